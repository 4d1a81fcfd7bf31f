"""Options about which experts are there from the start, and which stay."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from launch.ranges import PATH
from launch.user_directories import user_directory
from protocol.config import ModelConfig
from protocol.errors import UsageError

COLD = "off"


def default_warm_dir() -> str:
    """The user's own state."""
    return str(user_directory("XDG_STATE_HOME", ".local/state") / "warm")


def with_warm_options(*, warm: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--warm-dir`, which becomes part of GroupOptions; `warm` says whether it is on."""
    return click.option(
        "--warm-dir",
        default=default_warm_dir if warm else COLD,
        show_default="~/.local/state/headrace/warm" if warm else COLD,
        type=PATH,
        metavar="DIR",
        callback=lambda context, parameter, value: None if value == Path(COLD) else value,
        help=f"Where the hot experts' names are kept for the next start; {COLD}: start cold.",
    )


class _Experts(click.ParamType):  # type: ignore[type-arg]  # older releases are not generic
    """(layer, expert) pairs, as `parse_experts` reads them."""

    name = "experts"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, int], ...]:
        try:
            return parse_experts(str(value))
        except UsageError as error:
            self.fail(str(error), param, ctx)


EXPERTS = _Experts()


def parse_experts(text: str) -> tuple[tuple[int, int], ...]:
    """(layer, expert) pairs in `3:17,5:0-7`; raises UsageError."""
    pairs = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        matched = re.fullmatch(r"([0-9]{1,5}):([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if matched is None:
            raise UsageError(
                f"{part!r} is not LAYER:EXPERT or LAYER:FIRST-LAST; write several with commas "
                "between"
            )
        layer, first, last = (int(group or matched[2]) for group in matched.groups())
        pairs += [(layer, expert) for expert in range(first, last + 1)]
    return tuple(dict.fromkeys(pairs))


def check_pinned(pinned: tuple[tuple[int, int], ...], config: ModelConfig, slots: int) -> None:
    """Raises UsageError for experts that the model has not, or too many for the cache."""
    for layer, expert in pinned:
        if layer >= config.num_hidden_layers or expert >= config.n_routed_experts:
            raise UsageError(
                f"--pin-experts: layer {layer} expert {expert} is none of the model's "
                f"{config.num_hidden_layers} layers of {config.n_routed_experts} experts"
            )
    if len(pinned) > slots // 4:
        raise UsageError(
            f"--pin-experts: {len(pinned)} experts are more than a quarter of the cache's {slots} "
            "slots; the others must be able to change"
        )
