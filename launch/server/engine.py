"""What the server needs of an engine: a process group, or a scripted one in tests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from launch.memory import MemoryPlan
from launch.options import GenerateOptions, GroupOptions
from protocol.config import ModelConfig
from protocol.errors import HeadraceError
from protocol.layouts import Directory
from protocol.messages import Finished, PrefillProgress, TokenEvent

Event = PrefillProgress | TokenEvent | Finished
Stats = dict[str, dict[str, float]]


class Engine(Protocol):
    """See `launch.group.ProcessGroup`, whose promises these are."""

    options: GroupOptions
    config: ModelConfig
    tokenizer: Tokenizer
    plan: MemoryPlan
    facts: dict[str, str]
    failure: HeadraceError | None

    @property
    def directory(self) -> Directory: ...

    @property
    def pids(self) -> dict[str, int]: ...

    def generate(self, options: GenerateOptions) -> AsyncGenerator[Event, None]: ...

    async def stats(self) -> Stats: ...

    async def trace_start(self) -> None: ...

    async def trace_stop(self, output: Path) -> int: ...
