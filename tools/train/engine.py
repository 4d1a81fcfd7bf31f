"""The engine's own forward pass over a checkpoint, all weights in memory: what training is held to.

Owns the wiring of `compute.Model` to sources that never wait, and what is kept of a pass: losses,
routes and MoE inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from compute.model import Model
from compute.resident import ResidentExperts
from compute.weights import ModelWeights
from engram_io.hashing import NgramHash
from protocol.config import ModelConfig
from protocol.shards import Shards
from tools.train.checkpoint import stored_tensor
from tools.train.ngrams import ngram_hash


class ResidentEngram:
    """An EngramSource over tables held in memory; a ticket is an index into what was asked."""

    def __init__(self, shards: Shards, ngrams: NgramHash | None, device: torch.device) -> None:
        config = shards.config
        self._ngrams = ngrams
        self._asked: dict[int, list[torch.Tensor]] = {}
        self._next = 0
        self._tables = [
            [
                stored_tensor(shards, f"layers.{layer}.engram.embed.{part}")
                .view(torch.uint8)
                .to(device)
                for part in ("weight", "scale")
            ]
            for layer in config.engram_layer_ids
        ]

    def request(self, start: int, tokens: Sequence[int], history: Sequence[int]) -> int:
        """See `EngramSource`."""
        self._next += 1
        if self._ngrams is not None:
            rows = torch.from_numpy(self._ngrams.rows(tokens, history))
            self._asked[self._next] = list(rows)
        return self._next

    def here(self, ticket: int) -> bool:
        """See `EngramSource`."""
        return True

    def rows(self, ticket: int, engram_layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See `EngramSource`."""
        codes, scales = self._tables[engram_layer_index]
        rows = self._asked[ticket][engram_layer_index].to(codes.device)
        return codes[rows], scales[rows]

    def done(self, ticket: int) -> None:
        """See `EngramSource`."""
        self._asked.pop(ticket, None)


@dataclass
class Trace:
    """Of every layer in order: picks int64 [T, k] and MoE inputs bf16 [T, H]."""

    picks: list[torch.Tensor] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)

    def observe(self, name: str, layer: int, tensor: torch.Tensor) -> None:
        """The `observe` of `compute.Model`."""
        if name == "gate_indices":
            self.picks.append(tensor.cpu())
        elif name == "ffn_in":
            self.inputs.append(tensor.cpu())


class Engine:
    """`compute.Model` over a checkpoint's directory."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        self.config = ModelConfig.load(directory)
        shards = Shards.open(directory, self.config)
        self._engram = ResidentEngram(shards, ngram_hash(directory, self.config), device)
        self._trace = Trace()
        self._model = Model(
            self.config,
            ModelWeights.load(shards, device),
            ResidentExperts.read(shards, device),
            self._engram,
            observe=lambda *shown: self._trace.observe(*shown),
            predictions=0,
        )

    def run(self, piece: torch.Tensor) -> tuple[torch.Tensor, Trace]:
        """Losses in nats of int64 `piece` [T + 1]'s last T tokens, as one prefill, and its
        trace."""
        self._trace = Trace()
        inputs = piece[:-1].tolist()
        ticket = self._engram.request(0, inputs, [])
        logits = self._model.forward(inputs, self._model.new_state(), ticket, want_all_logits=True)
        losses = F.cross_entropy(logits.cpu(), piece[1:], reduction="none")
        return losses, self._trace
