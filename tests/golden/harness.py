"""The mini checkpoint as a model in one process, and a way to break ties as the golden run did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import torch
from safetensors.torch import load_file

from compute.layers import indexer
from compute.layers.attention import Observer
from compute.model import Model
from compute.resident import ResidentExperts
from compute.sequence import SequenceState
from compute.sources import ExpertSource
from compute.weights import ModelWeights
from engram_io.hashing import NgramHash
from protocol.config import ModelConfig
from protocol.shards import Shards
from tests.golden.cases import DATA, DEVICE, MINI


@cache
def config() -> ModelConfig:
    return ModelConfig.load(MINI)


@cache
def shards() -> Shards:
    return Shards.open(MINI, config())


@cache
def weights() -> ModelWeights:
    return ModelWeights.load(shards(), DEVICE)


@cache
def experts() -> ResidentExperts:
    return ResidentExperts.read(shards(), DEVICE)


@cache
def engram_table(layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All engram rows of a layer: codes uint8 [rows, width], scales uint8 [rows, width / 32]."""
    parts = []
    for part in ("weight", "scale"):
        entry = shards().tensors[f"layers.{layer}.engram.embed.{part}"]
        raw = bytearray(entry.path.read_bytes()[entry.offset : entry.offset + entry.nbytes])
        parts.append(torch.frombuffer(raw, dtype=torch.uint8).view(entry.shape))
    return parts[0], parts[1]


@cache
def ngram_hash() -> NgramHash:
    token_map = load_file(DATA / "mini_engram.safetensors")["token_map"].numpy()
    return NgramHash.from_config(config(), token_map, MINI / "config.json")


class TableEngram:
    """An EngramSource over whole tables in memory; tickets must be given back once each."""

    def __init__(self) -> None:
        self.open: dict[int, torch.Tensor] = {}
        self._tickets = 0

    def request(self, start: int, tokens: Sequence[int], history: Sequence[int]) -> int:
        assert len(history) == min(start, config().engram_max_ngram_size - 1)
        self._tickets += 1
        self.open[self._tickets] = torch.from_numpy(ngram_hash().rows(tokens, history))
        return self._tickets

    def here(self, ticket: int) -> bool:
        return True

    def rows(self, ticket: int, engram_layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.open[ticket][engram_layer_index]
        codes, scales = engram_table(config().engram_layer_ids[engram_layer_index])
        return codes[ids].to(DEVICE), scales[ids].to(DEVICE)

    def done(self, ticket: int) -> None:
        del self.open[ticket]


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


class Mini:
    """The mini model with everything resident, run a chunk at a time."""

    def __init__(
        self,
        *,
        observe: Observer | None = None,
        source: ExpertSource | None = None,
        reference_index_keys: bool = True,
        ahead: int = 1,
        early: bool = False,
    ) -> None:
        self.engram = TableEngram()
        self.model = Model(
            config(),
            weights(),
            source or experts(),
            self.engram,
            observe=observe,
            reference_index_keys=reference_index_keys,
            ahead=ahead,
            early=early,
        )

    def run(
        self, tokens: Sequence[int], state: SequenceState, begin: int, end: int, *, every: bool
    ) -> torch.Tensor:
        """Logits fp32 [T, V] (or [V]) of tokens[begin:end]."""
        reach = config().engram_max_ngram_size - 1
        history = tokens[max(begin - reach, 0) : begin]
        ticket = self.engram.request(begin, tokens[begin:end], history)
        return self.model.forward(tokens[begin:end], state, ticket, want_all_logits=every)


class TieGuide:
    """What the golden run chose, for use where scores at a cut are equal.

    A tie at the cut has no defined winner. Following the golden one there, and only there, keeps
    the comparison of everything behind the choice exact.
    """

    def __init__(self) -> None:
        self._golden: dict[str, torch.Tensor] = {}
        self._phase, self._rows = "prefill", slice(None)
        self._layer = 0

    def at(self, golden: dict[str, torch.Tensor], phase: str, rows: slice) -> None:
        """The next pass is over `rows` of the tensors of `phase`."""
        self._golden, self._phase, self._rows = golden, phase, rows

    def __call__(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        """An observer: scores are shown right before the choice."""
        if name == "index_score":
            self._layer = layer

    def chosen_rows(self, rows: int) -> torch.Tensor:
        """bool [T, rows] that the golden run chose at the layer whose scores were last shown."""
        chosen = self._golden[f"{self._phase}.layers.{self._layer}.topk_idxs"][self._rows].long()
        mask = torch.zeros(len(chosen), rows + 1, dtype=torch.bool, device=chosen.device)
        mask.scatter_(1, torch.where(chosen < 0, rows, chosen), True)
        return mask[:, :rows]

    def candidate_blocks(self, blocks: int) -> torch.Tensor:
        """bool [T, blocks] that the golden run kept."""
        layer, size = config().candidate_source_layer_id, config().candidate_block_size
        mask = self._golden[f"{self._phase}.layers.{layer}.candidates"][self._rows]
        return mask[:, ::size][:, :blocks]


@contextmanager
def golden_ties() -> Iterator[TieGuide]:
    """Break ties at a cut as the golden run did; pass the guide on as (part of) the observer."""
    guide = TieGuide()
    choose, blocks, top = indexer.choose_rows, indexer.candidate_blocks, indexer.top_positions
    kernels = indexer.chunk_kernels
    preferred: list[torch.Tensor] = []

    @contextmanager
    def in_torch() -> Iterator[None]:
        # A kernel has its own rule for ties and would not ask for another's.
        indexer.chunk_kernels = lambda device: None
        try:
            yield
        finally:
            indexer.chunk_kernels = kernels

    def choose_rows(scores: torch.Tensor, k: int) -> torch.Tensor:
        preferred[:] = [guide.chosen_rows(scores.shape[1])]
        with in_torch():
            return choose(scores, k)

    def candidate_blocks(
        scores: torch.Tensor, visible: torch.Tensor, block_size: int, keep: int
    ) -> torch.Tensor:
        preferred[:] = [guide.candidate_blocks(-(-scores.shape[1] // block_size))]
        with in_torch():
            return blocks(scores, visible, block_size, keep)

    def top_positions(scores: torch.Tensor, k: int) -> torch.Tensor:
        order = scores.double().unique()  # equal scores share a rank; no rounding in between
        rank = torch.searchsorted(order, scores.double())
        return (rank * 2 + preferred[0]).topk(k, -1).indices

    indexer.choose_rows, indexer.candidate_blocks = choose_rows, candidate_blocks
    indexer.top_positions = top_positions
    try:
        yield guide
    finally:
        indexer.choose_rows, indexer.candidate_blocks = choose, blocks
        indexer.top_positions = top


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """|difference| / |golden| over everything."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def bf16_steps_apart(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Distance in representable bf16 values."""
    assert got.dtype == want.dtype == torch.bfloat16 and got.shape == want.shape
    ranks = []
    for tensor in (got, want):
        bits = tensor.contiguous().view(torch.int16).int()
        ranks.append(torch.where(bits < 0, -(bits & 0x7FFF), bits))
    return (ranks[0] - ranks[1]).abs()
