"""A whole token as one captured graph, whose misses are answered while it runs.

Owns the launches of such a token and the host's part beside it. What the host does between two
segments otherwise, the device does by itself (`compute.kernels.ask`): it waits for the engram rows,
looks the picks up and, where one is absent, waits for an answer. The answer comes from the thread
that launched the token, which has nothing else to do until it is sampled; so no lock changes hands,
and the arena's slots, demands and hints are this process's as they are without graphs.

A wait on the device that runs out ends in the token being repeated by eager launches. They write
what the graph has written: the rows of one position, and nothing that an earlier position left and
this one still reads.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from compute.bounded_wait import BoundedWait
from compute.decode.decoder import Decoder, Once, SingleTokens
from compute.decode.graphs import TokenRunner
from compute.decode.mailbox import SILENCE_S
from compute.device_experts import DeviceExperts
from compute.kernels import kernels_for
from compute.sequence import SequenceState
from compute.sources import NullTracer, Tracer
from protocol.errors import StallError

# How often the device looks for an answer, each look most of a microsecond: what a layer's experts
# take from a disk, but no stall.
LOOKS = 3_000_000


class TokenDecoder(SingleTokens):
    """Runs single tokens as `eager` does, over the same `DecodeStep` and the experts of `tier`.

    `waits` and `waited_s` count the host's waits for the device, `repeated` the tokens that were
    run again eagerly.
    """

    def __init__(
        self,
        eager: Decoder,
        tier: DeviceExperts,
        runner: TokenRunner,
        *,
        looks: int = LOOKS,
        tracer: Tracer | None = None,
    ) -> None:
        super().__init__(tier)
        self.step = eager.step
        self._eager = eager
        self._tier = tier
        self._runner = runner
        self._looks = looks
        self._tracer: Tracer = tracer or NullTracer()
        config = self.step.config
        self._layers = config.num_hidden_layers
        self._engram_layers = config.engram_layer_ids
        # The first of them waits for the rows of all.
        self._rows_due = min(self._engram_layers, default=-1)
        self._mailbox = eager.mailbox
        self._kernels = kernels_for(self.step.buffers.streams.device)
        # One object for good: a captured graph serves the launch that it was captured from.
        self._whole = self._launch
        self._compiled = False
        self.waits = self.repeated = 0
        self.waited_s = 0.0

    @torch.inference_mode()
    def compile(self, capacity: int = 0) -> None:
        """Compile and load the kernels of a token: some twenty seconds where none are cached.

        Runs one that waits for nothing and means nothing, of an empty sequence with room for
        `capacity` tokens: kernels are compiled for what divides the room.
        """
        device = self.step.buffers.streams.device
        self._eager.begin(0, SequenceState(self.step.config, device, capacity), void=True)
        self._launch()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._compiled = True

    def run(self, token: int, state: SequenceState, ticket: int) -> torch.Tensor:
        if not self._compiled:
            self.compile()
        self._eager.begin(token, state)
        self._tier.make_room()
        if not self._runner.start(self._whole):
            return self._eager.run(token, state, ticket)
        try:
            with self._tracer.span("token's graph"), self._tier.serving():
                self._serve(ticket)
            # For the next token, while this one's last layer and head are computed.
            self._tier.make_room()
        finally:
            self._end()
        if self._mailbox.gave_up:
            self._say_repeated()
            self._tier.join_copies()
            return self._eager.run(token, state, ticket)
        return self.step.buffers.logits.flatten().clone()

    def _launch(self) -> None:
        """The token, from what lies in host memory to its logits."""
        step = self.step
        step.buffers.inputs.copy_(self._eager.inputs, non_blocking=True)
        self._tier.send_slots()
        step.begin()
        for layer in range(self._layers):
            if layer in self._engram_layers:
                if layer == self._rows_due:
                    self._await_rows()
                step.engram(layer)
            step.attention(layer)
            step.route(layer, self._tier.slots)
            self._look_up(layer)
            step.experts(layer, joined=False)
        step.head()

    def _await_rows(self) -> None:
        b, mailbox = self.step.buffers, self._mailbox
        self._kernels.await_rows(
            b.tag, b.given_up, mailbox.status, mailbox.rows_here,
            layer=self._rows_due, looks=self._looks,
        )  # fmt: skip

    def _look_up(self, layer: int) -> None:
        b, k, mailbox, slots = self.step.buffers, self._kernels, self._mailbox, self._tier.slots
        self.step.tell(layer, slots.of, mailbox.records[layer])
        k.ask(
            b.tag, b.given_up, slots.first, mailbox.status, mailbox.answer, b.table,
            layer=layer, looks=self._looks,
        )  # fmt: skip

    def _serve(self, ticket: int) -> None:
        """Answer the running token, and pass on what it picks and predicts."""
        # Rows that are there already need not wait for a layer to be heard of.
        due = 0 if self._rows_due >= 0 and self._eager.rows_here(ticket) else self._rows_due
        for layer in range(self._layers):
            if layer == due:
                self._send_rows(ticket)
            begin = time.perf_counter()
            record = self._mailbox.wait(layer, self._runner.running)
            self.waited_s += time.perf_counter() - begin
            if record is None or self._mailbox.gave_up:
                return
            self._tier.passed()
            hint = Once(partial(self._eager.hint, layer, record))
            if record.waits:
                self._answer(layer, record.picks, hint)
            else:
                self._tier.used(layer, record.picks)
            hint()

    def _send_rows(self, ticket: int) -> None:
        """Wait for the token's engram rows and send them: it has begun with the layers before."""
        there = False
        try:
            for layer in self._engram_layers:
                self._eager.fetch_rows(layer, ticket)
            self.step.buffers.engram.copy_(self._eager.rows, non_blocking=True)
            there = True
        finally:
            self._mailbox.say_rows(self._rows_due, there)

    def _answer(self, layer: int, picks: list[int], hint: Callable[[], None]) -> None:
        """Say where `picks` lie, once they are on their way. Who is asked for what is missing shall
        have the hint before we wait for him."""
        addresses = None
        try:
            with self._tracer.span("place experts", layer=layer):
                addresses = self._tier.bring(layer, picks, hint)
        finally:
            self._mailbox.reply(layer, addresses)

    def _end(self) -> None:
        """Wait until the token has ended, well or not."""
        silence = BoundedWait(SILENCE_S)
        while self._runner.running():
            if silence.exhausted:
                raise StallError(f"the device did not end its token within {SILENCE_S:.0f} s")
        self.waits += 1
        self.waited_s += silence.seconds
        self._tier.passed()

    def _say_repeated(self) -> None:
        if not self.repeated:
            print(
                "a token's graph waited in vain for an expert; it is repeated without graphs, as "
                "others will be where the disk is that slow",
                file=sys.stderr,
            )
        self.repeated += 1
