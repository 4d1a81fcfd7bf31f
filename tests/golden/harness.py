"""The mini checkpoint as a model in one process, fed with the golden hash ids."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache

import torch

from compute.layers.attention import Observer
from compute.model import Model
from compute.resident import ResidentExperts
from compute.sources import ExpertSource
from compute.weights import ModelWeights
from protocol.config import ModelConfig
from protocol.shards import Shards
from tests.golden.cases import MINI, case

CPU = torch.device("cpu")


@cache
def config() -> ModelConfig:
    return ModelConfig.load(MINI)


@cache
def shards() -> Shards:
    return Shards.open(MINI, config())


@cache
def weights() -> ModelWeights:
    return ModelWeights.load(shards(), CPU)


@cache
def experts() -> ResidentExperts:
    return ResidentExperts(shards(), CPU)


@cache
def engram_table(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All engram rows of a layer: codes uint8 [rows, width], scales uint8 [rows, width / 32]."""
    parts = []
    for part in ("weight", "scale"):
        entry = shards().tensors[f"layers.{layer}.engram.embed.{part}"]
        raw = bytearray(entry.path.read_bytes()[entry.offset : entry.offset + entry.nbytes])
        parts.append(torch.frombuffer(raw, dtype=torch.uint8).view(entry.shape))
    return parts[0], parts[1]


class GoldenEngram:
    """An EngramSource that looks up the hash ids recorded for one case."""

    def __init__(self, name: str) -> None:
        golden = case(name)
        self._ids = torch.cat((golden["prefill.hash_ids"], golden["decode.hash_ids"]))
        self._asked: dict[int, torch.Tensor] = {}

    def request(self, start: int, tokens: Sequence[int], history: Sequence[int]) -> int:
        ticket = len(self._asked)
        self._asked[ticket] = self._ids[start : start + len(tokens)]
        assert len(self._asked[ticket]) == len(tokens)
        return ticket

    def rows(self, ticket: int, engram_layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self._asked[ticket][:, engram_layer_index]
        codes, scales = engram_table(config().engram_layer_ids[engram_layer_index])
        return codes[ids], scales[ids]

    def done(self, ticket: int) -> None:
        self._asked[ticket] = torch.empty(0)


class Capture:
    """An observer that keeps what it is shown, by golden name."""

    def __init__(self) -> None:
        self._parts: dict[str, list[torch.Tensor]] = defaultdict(list)

    def __call__(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        self._parts[f"layers.{layer}.{name}"].append(tensor.clone())

    def __getitem__(self, name: str) -> torch.Tensor:
        return torch.cat(self._parts[name])

    def __contains__(self, name: str) -> bool:
        return name in self._parts

    def clear(self) -> None:
        self._parts.clear()


def mini_model(
    name: str, *, observe: Observer | None = None, source: ExpertSource | None = None
) -> tuple[Model, GoldenEngram]:
    """The mini model with the index keys of the reference, and the engram source of case `name`."""
    engram = GoldenEngram(name)
    model = Model(
        config(),
        weights(),
        source or experts(),
        engram,
        observe=observe,
        reference_index_keys=True,
    )
    return model, engram


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """|difference| / |golden| over everything."""
    return float((got.double() - want.double()).norm() / want.double().norm())
