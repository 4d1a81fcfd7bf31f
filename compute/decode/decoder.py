"""One token through the kernels, with the host's part of every layer between their launches.

Owns the order of host and device: a layer says what it picked, what the device does not find by
itself is asked for and its addresses handed down, and the experts are launched. What is launched at
once is a segment, and a layer has two: all up to its picks, and its experts. The second is short,
so the device soon begins with it, and the next layer's first is launched while it works.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch

from compute.decode.graphs import SegmentRunner
from compute.decode.mailbox import Mailbox, Record
from compute.decode.step import DecodeStep
from compute.device_experts import DeviceExperts
from compute.sequence import SequenceState
from compute.sources import EngramSource, NullTracer, PlacedExperts, Tracer
from protocol.errors import HeadraceError


class Once:
    """A layer's hint, given at the first of two calls: ahead of a demand where there is one, else
    behind the launch."""

    def __init__(self, say: Callable[[], None]) -> None:
        self._say: Callable[[], None] | None = say

    def __call__(self) -> None:
        say, self._say = self._say, None
        if say is not None:
            say()


class SingleTokens(ABC):
    """Runs single tokens of any sequence of the model over `experts`; one token at a time."""

    def __init__(self, experts: PlacedExperts) -> None:
        self._experts = experts

    @torch.inference_mode()
    def forward(self, token: int, state: SequenceState, ticket: int) -> torch.Tensor:
        """fp32 logits [V] after `token` at position state.length, which is counted.

        Raises ReadError and StallError from the sources; the state is then unusable.
        """
        try:
            logits = self.run(token, state, ticket)
        except BaseException:
            self._experts.release()
            raise
        state.advance()
        return logits

    @abstractmethod
    def run(self, token: int, state: SequenceState, ticket: int) -> torch.Tensor:
        """As `forward`, without counting the token: the same token may be run again."""


class Decoder(SingleTokens):
    """Launches segment by segment and waits for the picks in between.

    `waits` counts how often the host waited for the device, `waited_s` how long in all.
    """

    def __init__(
        self,
        step: DecodeStep,
        runner: SegmentRunner,
        experts: PlacedExperts,
        engram: EngramSource,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(experts)
        self.step = step
        self._runner = runner
        self._engram = engram
        self._tracer: Tracer = tracer or NullTracer()
        config, buffers = step.config, step.buffers
        self._layers = config.num_hidden_layers
        self._pinned = buffers.routed.is_cuda
        # Where the device finds experts by itself, as long as all of a layer's are there.
        self._tier = experts if isinstance(experts, DeviceExperts) else None
        device = buffers.streams.device
        every = (self._layers, step.config.n_routed_experts)
        nowhere = torch.zeros(every, dtype=torch.int32, device=device)
        self._slots = nowhere if self._tier is None else self._tier.slots.of
        picks, guesses = config.num_experts_per_tok, len(buffers.predicted)
        self.mailbox = Mailbox(self._layers, picks, guesses, device)
        # Written by the host before a segment that reads it is launched.
        self.inputs = self._on_host(buffers.inputs)
        self.rows = self._on_host(buffers.engram)
        self._table = self._on_host(buffers.table)
        self._input_words = self.inputs.numpy()
        self._stream: torch.cuda.Stream | None = None
        self.waits = 0
        self.waited_s = 0.0
        layers = range(self._layers)
        self._to_picks = [self._launch_to_picks(layer) for layer in layers]
        self._to_end = [self._launch_experts(layer) for layer in layers]

    def begin(self, token: int, state: SequenceState, *, void: bool = False) -> None:
        """What the device is told of the token, in `inputs`; of one that is `void`, not to wait."""
        self.step.bind(state)
        self._input_words[:] = token, state.length, self.mailbox.begin(), void

    def run(self, token: int, state: SequenceState, ticket: int) -> torch.Tensor:
        # Asked for once: it is dear.
        self._stream = torch.cuda.current_stream() if self._pinned else None
        self.begin(token, state)
        self._start(0, ticket)
        for layer in range(self._layers):
            with self._tracer.span("wait for picks", layer=layer):
                record = self._hear(layer)
            picks = record.picks
            held = self._tier is not None and self._tier.holds(layer, picks)
            hint = Once(partial(self.hint, layer, record))
            if not held:
                self._place(layer, picks, hint)
            self._runner.run(2 * layer + 1, self._to_end[layer])
            if layer + 1 < self._layers:
                self._start(layer + 1, ticket)
            self._experts.release()
            if self._tier is not None and held:
                self._tier.used(layer, picks)
            hint()
        return self.step.buffers.logits.flatten().clone()

    def _place(self, layer: int, picks: list[int], hint: Callable[[], None]) -> None:
        """Hand down where `picks` lie, once they are on their way. Who is asked for what is missing
        shall have the hint before we wait for him."""
        with self._tracer.span("place experts", layer=layer):
            self._table.numpy()[:] = self._experts.place(layer, picks, hint)
        self.step.buffers.table.copy_(self._table, non_blocking=True)

    def _start(self, layer: int, ticket: int) -> None:
        """Launch `layer` up to its picks."""
        self.fetch_rows(layer, ticket)
        self._runner.run(2 * layer, self._to_picks[layer])

    def _launch_to_picks(self, layer: int) -> Callable[[], None]:
        """A layer's first segment; the token's beginning with the first layer's."""
        step = self.step
        has_engram = layer in step.config.engram_layer_ids

        def launch() -> None:
            if layer == 0:
                step.buffers.inputs.copy_(self.inputs, non_blocking=True)
                if self._tier is not None:
                    self._tier.send_slots()
                step.begin()
            if has_engram:
                at = step.config.engram_layer_ids.index(layer)
                step.buffers.engram[at].copy_(self.rows[at], non_blocking=True)
                step.engram(layer)
            step.attention(layer)
            step.route(layer, None if self._tier is None else self._tier.slots)
            # Before the shared expert is waited for: the host has its part to do meanwhile.
            step.tell(layer, self._slots, self.mailbox.records[layer])
            step.join()

        return launch

    def _launch_experts(self, layer: int) -> Callable[[], None]:
        """A layer's second segment; the token's end with the last layer's."""

        def launch() -> None:
            self.step.experts(layer, joined=True)
            if layer + 1 == self._layers:
                self.step.head()

        return launch

    def rows_here(self, ticket: int) -> bool:
        """Whether `fetch_rows` would not wait."""
        return self._engram.here(ticket)

    def fetch_rows(self, layer: int, ticket: int) -> None:
        """Put `layer`'s engram rows, if it has any, into `rows`; waits for them."""
        if layer not in self.step.config.engram_layer_ids:
            return
        at = self.step.config.engram_layer_ids.index(layer)
        with self._tracer.span("engram", layer=layer):
            codes, scales = self._engram.rows(ticket, at)
        into = self.rows[at]
        into[: codes.numel()].copy_(codes.flatten())
        into[codes.numel() :].copy_(scales.flatten())

    def _hear(self, layer: int) -> Record:
        """What `layer`, just launched, has routed; waits for the device."""
        begin = time.perf_counter()
        record = self.mailbox.wait(layer, self._running)
        self.waited_s += time.perf_counter() - begin
        self.waits += 1
        if record is None:
            raise HeadraceError(f"layer {layer} ended without saying what it routed")
        return record

    def _running(self) -> bool:
        return self._stream is not None and not self._stream.query()

    def hint(self, layer: int, record: Record) -> None:
        """Publish the layer's picks and the prediction."""
        if layer + 1 < self._layers and record.words:
            predicted, margins = record.guesses()
            scores = self.step.scores(layer, margins)
            self._experts.hint(layer, record.picks, layer + 1, predicted, scores)
        else:
            self._experts.hint(layer, record.picks, None, [], [])

    def _on_host(self, buffer: torch.Tensor) -> torch.Tensor:
        return torch.zeros(buffer.shape, dtype=buffer.dtype, pin_memory=self._pinned)
