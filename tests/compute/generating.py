"""A text generator in the test's process: over a script, or over the mini model, all resident."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from compute.generation import Event, Limits, TextGenerator
from compute.kept_states import KeptStates
from compute.model import Model
from compute.progress import ProgressPage
from compute.sequence import SequenceState
from compute.sources import EngramSource
from compute.text import TokenBytes
from engram_io.local import LocalEngramSource
from protocol import counters
from protocol.layouts import Progress
from protocol.messages import Finished, Generate, TokenEvent
from protocol.trace import Tracer
from tests.golden.cases import MINI
from tests.golden.harness import config, experts, weights

NEVER = bool  # bool() is False: nobody cancels


def request(prompt: Sequence[int], **changes: Any) -> Generate:
    """A greedy request."""
    plain = Generate(
        request=1,
        prompt=list(prompt),
        max_tokens=8,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        stop=[],
        ignore_eos=False,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        logprobs=None,
    )
    return dataclasses.replace(plain, **changes)


class RowsAsked:
    """An EngramSource that logs what happens to tickets and passes it on to `source`, if any."""

    def __init__(self, log: list[str], source: LocalEngramSource | None) -> None:
        self.log = log
        self.open: set[int] = set()
        self._source = source
        self._next = 0

    def request(self, start: int, tokens: Sequence[int], history: Sequence[int]) -> int:
        ticket = self._source.request(start, tokens, history) if self._source else self._next
        self._next += 1
        self.log.append(f"ask {start}-{start + len(tokens)} after {len(history)}")
        self.open.add(ticket)
        assert len(self.open) <= 2, "more tickets than the ring has blocks"
        return ticket

    def here(self, ticket: int) -> bool:
        return True

    def rows(self, ticket: int, engram_layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._source is not None
        codes, scales = self._source.rows(ticket, engram_layer_index)
        return torch.from_numpy(codes), torch.from_numpy(scales)

    def done(self, ticket: int) -> None:
        self.open.remove(ticket)
        if self._source is not None:
            self._source.done(ticket)


class ScriptedModel:
    """Wants the tokens of `script` one after another, whatever the prompt (of `prompt` tokens)."""

    def __init__(self, engram: EngramSource, prompt: int, script: Sequence[int]) -> None:
        self.config = config()
        self.engram = engram
        self.prompt = prompt
        self.script = script
        self.log: list[str] = []
        self.fail_at: tuple[int, Exception] | None = None

    def new_state(self) -> SequenceState:
        return SequenceState(self.config, torch.device("cpu"))

    def forward(self, tokens: Sequence[int], state: SequenceState, ticket: int) -> torch.Tensor:
        self.engram.done(ticket)
        self.log.append(f"run {state.length}-{state.length + len(tokens)}")
        if self.fail_at is not None and state.length <= self.fail_at[0] < state.length + len(
            tokens
        ):
            state.usable = False
            raise self.fail_at[1]
        state.length += len(tokens)
        logits = torch.zeros(self.config.vocab_size)
        logits[self.script[max(0, state.length - self.prompt)]] = 5.0
        return logits


class Rig:
    """One generator and what it did: `log` has the asks and runs in order."""

    def __init__(
        self,
        *,
        script: Sequence[int] | None = None,
        prompt: int = 1,
        token_bytes: TokenBytes | None = None,
        chunk_tokens: int = 64,
        context: int = 1024,
        kept_bytes: int = 64 << 20,
    ) -> None:
        """Over `script` if there is one, else over the mini model."""
        self.log: list[str] = []
        self.scripted: ScriptedModel | None = None
        if script is None:
            self.engram = RowsAsked(self.log, LocalEngramSource.open(MINI))
            model = Model(config(), weights(), experts(), self.engram)
        else:
            self.engram = RowsAsked(self.log, None)
            self.scripted = ScriptedModel(self.engram, prompt, script)
            self.scripted.log = self.log
            model = cast(Model, self.scripted)
        self.kept = KeptStates(kept_bytes)
        self.generator = TextGenerator(
            model,
            self.engram,
            token_bytes or TokenBytes.load(MINI, [config().eos_token_id]),
            ProgressPage(Progress.create(words_count=Progress.COUNT)),
            Tracer("test"),
            self.kept,
            Limits(chunk_tokens, context),
            lambda: {counters.STALL_EXPERT_S: 1.0},
        )

    def run(self, asked: Generate, cancelled: Callable[[], bool] = NEVER) -> list[Event]:
        """All events; afterwards no ticket is left open."""
        events = list(self.generator.run(asked, cancelled))
        assert isinstance(events[-1], Finished)
        assert sum(isinstance(event, Finished) for event in events) == 1
        assert not self.engram.open
        return events


def tokens_of(events: Sequence[Event]) -> list[int]:
    return [event.token for event in events if isinstance(event, TokenEvent)]


def text_of(events: Sequence[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TokenEvent | Finished))


def finished(events: Sequence[Event]) -> Finished:
    last = events[-1]
    assert isinstance(last, Finished)
    return last
