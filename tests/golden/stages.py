"""Each stage of the model fed with the golden input of that stage.

`stages(name, steps)` runs a case's prefill and its first decode steps; the comparison it gives says
what is outside the bounds of data/README.md. Nothing is, for a right model.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cache

import torch

from compute.layers.attention import Chunk
from compute.layers.hyper_connections import first_mix
from compute.sequence import SequenceState
from tests.golden.cases import DEVICE, case
from tests.golden.harness import (
    Capture,
    Mini,
    config,
    golden_ties,
)


@dataclass(frozen=True, slots=True)
class Bound:
    """How far a kind of stage may be off.

    `share` of elements that differ, `relative` error over everything, `row` the same for the worst
    row, `absolute` of any element; 0 for the last three means no such bound.
    """

    share: float = 0.0
    relative: float = 0.0
    row: float = 0.0
    absolute: float = 0.0


EXACT = Bound()
# On a GPU another exp moves more probabilities over a rounding boundary, and tensor cores cut off
# what an addition shifts out, so a head's weight in an index score may move by a bf16 step.
_MORE = 3.0 if DEVICE.type == "cuda" else 1.0
SCORES = Bound(share=1e-2, relative=3e-3) if DEVICE.type == "cuda" else EXACT
# A probability or a sum that lies at a rounding boundary moves one row by a bf16 step here and
# there. In the shortest case such a row weighs most; over all cases the README's figures hold.
ATTENTION = Bound(share=2e-3 * _MORE, relative=5e-4, row=1e-2)
SUMS = Bound(share=1e-3 * _MORE, relative=2e-4, row=5e-3)
STREAMS = Bound(share=2e-3 * _MORE, relative=5e-4, row=1e-2)
MIX = Bound(share=1, absolute=1e-3)
GATE_WEIGHTS = Bound(share=1, absolute=1e-6)
LOGITS = Bound(share=1, absolute=2e-5)
OVERALL = {
    "attention": Bound(share=1e-3 * _MORE, relative=5e-4),
    "experts": Bound(share=1e-3 * _MORE),
}


class Comparison:
    """Collects what each kind of stage gave beside what it should have given."""

    def __init__(self) -> None:
        self._bounds: dict[str, Bound] = {}
        self._pairs: dict[str, list[tuple[str, torch.Tensor, torch.Tensor]]] = defaultdict(list)

    def add(
        self, kind: str, where: str, got: torch.Tensor, want: torch.Tensor, bound: Bound
    ) -> None:
        self._bounds[kind] = bound
        self._pairs[kind].append((where, got.clone(), want))

    def merge(self, other: Comparison) -> None:
        """Take in what `other` collected."""
        for kind, pairs in other._pairs.items():
            self._bounds[kind] = other._bounds[kind]
            self._pairs[kind] += pairs

    def faults(self, bounds: dict[str, Bound] | None = None) -> list[str]:
        """One line for each kind of stage that is outside its bound, with the worst place."""
        found = []
        for kind, bound in (self._bounds if bounds is None else bounds).items():
            fault = _fault(self._pairs[kind], bound)
            if fault:
                found.append(f"{kind}: {fault}")
        return found


def _fault(pairs: list[tuple[str, torch.Tensor, torch.Tensor]], bound: Bound) -> str:
    different = total = 0
    off = size = worst_row = worst = 0.0
    place = ""
    for where, got, want in pairs:
        if got.shape != want.shape:
            return f"{where} has shape {list(got.shape)}, not {list(want.shape)}"
        if torch.equal(got, want):
            error = torch.zeros((), device=DEVICE)
        else:
            error = torch.where(got == want, 0, got.double() - want.double()).nan_to_num(torch.inf)
            rows = error.flatten(1).norm(dim=1) / want.double().flatten(1).norm(dim=1)
            worst_row = max(worst_row, float(rows.nan_to_num(torch.inf).max()))
            if float(error.abs().max()) > worst:
                worst, place = float(error.abs().max()), where
        different += int((got != want).sum())
        total += got.numel()
        off += float(error.square().sum())
        size += float(want.double().nan_to_num(0, 0, 0).square().sum())
    share, relative = different / max(total, 1), (off / size) ** 0.5 if size else 0.0
    said = f"{share:.3%} of elements differ by {relative:.1e}, most at {place} (by {worst:.1e})"
    within = (
        share <= bound.share
        and (not bound.relative or relative <= bound.relative)
        and (not bound.row or worst_row <= bound.row)
        and (not bound.absolute or worst <= bound.absolute)
    )
    return "" if within else said


class StageRun:
    """Runs the stages of one pass of a case on golden inputs."""

    def __init__(self, name: str) -> None:
        self.golden = case(name)
        self.comparison = Comparison()
        self._capture = Capture()
        self._tokens = torch.cat((self.golden["prompt_ids"], self.golden["decode.input_ids"]))

    def run(self, steps: int) -> Comparison:
        """The prefill and `steps` decode steps."""
        with golden_ties() as guide, torch.inference_mode():

            def observe(name: str, layer: int, tensor: torch.Tensor) -> None:
                guide(name, layer, tensor)
                self._capture(name, layer, tensor)

            self._mini = Mini(observe=observe)
            # Two states: a block runs its own attention, on streams instead of on `attn_in`.
            states = (self._mini.model.new_state(), self._mini.model.new_state())
            length = len(self.golden["prompt_ids"])
            for step in range(-1, steps):
                begin, count = (0, length) if step < 0 else (length + step, 1)
                phase = "prefill" if step < 0 else "decode"
                rows = slice(None) if step < 0 else slice(step, step + 1)
                guide.at(self.golden, phase, rows)
                self._pass(phase, rows, begin, count, states)
                if step in (-1, 39):
                    self._caches("prefill" if step < 0 else "end", states[0])
        return self.comparison

    def _pass(
        self,
        phase: str,
        rows: slice,
        begin: int,
        count: int,
        states: tuple[SequenceState, SequenceState],
    ) -> None:
        self._prefix, self._rows = phase, rows
        model, chunks = self._mini.model, [self._mini.model.chunk(begin, count) for _ in states]
        tokens = self._tokens[begin : begin + count].tolist()
        reach = config().engram_max_ngram_size - 1
        history = self._tokens[max(begin - reach, 0) : begin].tolist()
        ticket = self._mini.engram.request(begin, tokens, history)
        ids = self._mini.engram.open[ticket].transpose(0, 1).to(DEVICE)
        self._add("hash ids", 0, ids, self._want("hash_ids"), EXACT)
        streams, pre = self._want("layers.0.stream_in"), first_mix(count, config().hc_mult, DEVICE)
        for layer in range(config().num_hidden_layers):
            self._capture.clear()
            if layer in config().engram_layer_ids:
                streams = self._engram(layer, streams, ticket)
            self._attention(layer, chunks[0], states[0])
            self._experts(layer)
            self._capture.clear()
            got, mix = model.block(layer, streams, pre, chunks[1], states[1])
            streams = self._want(f"layers.{layer}.stream_out")
            pre = self._want(f"layers.{layer}.pre_mix")
            self._add("streams", layer, got, streams, STREAMS)
            self._add("mix", layer, mix, pre, MIX)
        self._mini.engram.done(ticket)
        logits = self._want("logits").view(-1, config().vocab_size)[-1:]
        self._add("logits", 0, model.head(streams[-1:], pre[-1:]), logits, LOGITS)
        for state in states:
            state.length = begin + count

    def _engram(self, layer: int, streams: torch.Tensor, ticket: int) -> torch.Tensor:
        index = config().engram_layer_ids.index(layer)
        rows = self._mini.engram.rows(ticket, index)
        got = self._mini.model.add_engram(layer, streams, *rows)
        added = self._want(f"layers.{layer}.stream_in")
        for name in ("engram_rows", "engram_kv"):
            full = f"layers.{layer}.{name}"
            if full in self._capture:
                want = self._want(full).flatten(1)
                self._add(name, layer, self._capture[full].flatten(1), want, SUMS)
        self._add("engram add", layer, got, added, SUMS)
        return added

    def _attention(self, layer: int, chunk: Chunk, state: SequenceState) -> None:
        base = f"layers.{layer}"
        got = self._mini.model.attention(layer, self._want(f"{base}.attn_in"), chunk, state)
        self._add("attention", layer, got, self._want(f"{base}.attn_out"), ATTENTION)
        if f"{base}.latent" in self._capture and len(self._capture[f"{base}.latent"]):
            want = self._want(f"{base}.latent")
            self._add("latent", layer, self._capture[f"{base}.latent"], want, SUMS)
        for name in ("index_score", "topk_idxs", "candidates"):
            full = f"{base}.{name}"
            # The mask is recorded where it is made; later layers only hand it on.
            if full in self._capture and f"{self._prefix}.{full}" in self.golden:
                shown = self._capture[full]
                want = self._want(full)[:, : shown.shape[1]]
                bound = SCORES if name == "index_score" else EXACT
                self._add(name, layer, shown.to(want.dtype), want, bound)

    def _experts(self, layer: int) -> None:
        base = f"layers.{layer}"
        got = self._mini.model.experts(layer, self._want(f"{base}.ffn_in"))
        self._add("experts", layer, got, self._want(f"{base}.ffn_out"), SUMS)
        picks, chosen = self._capture[f"{base}.gate_indices"], self._want(f"{base}.gate_indices")
        self._add("picks", layer, picks, chosen, EXACT)
        shares = self._capture[f"{base}.gate_weights"]
        self._add("gate weights", layer, shares, self._want(f"{base}.gate_weights"), GATE_WEIGHTS)

    def _caches(self, when: str, state: SequenceState) -> None:
        base = "cache_after_prefill" if when == "prefill" else "cache_at_end"
        for layer in range(config().num_hidden_layers):
            want = self.golden[f"{base}.layers.{layer}.window_kv"]
            self._add("window", layer, state.windows[layer], want, SUMS)
        for layer in config().kv_source_layer_ids:
            rows = state.compressed[layer].rows
            want = self.golden[f"{base}.layers.{layer}.compress_kv"]
            self._add("compressed rows", layer, rows, want, SUMS)
            keys = state.index_keys[layer].rows
            want = self.golden[f"{base}.layers.{layer}.index_k"]
            self._add("index keys", layer, keys, want, SUMS)

    def _want(self, name: str) -> torch.Tensor:
        full = f"{self._prefix}.{name}"
        whole = self.golden[full]
        return whole if name == "logits" and self._prefix == "prefill" else whole[self._rows]

    def _add(
        self, kind: str, layer: int, got: torch.Tensor, want: torch.Tensor, bound: Bound
    ) -> None:
        where = f"layer {layer}, {self._prefix} step {self._rows.start or 0}"
        self.comparison.add(kind, where, got, want, bound)


@cache
def stages(name: str, steps: int) -> Comparison:
    """All stages of case `name`: its prefill and `steps` decode steps."""
    return StageRun(name).run(steps)
