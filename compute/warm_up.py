"""A prompt's kernels, compiled and loaded before the first prompt comes.

Owns which made-up passes that takes, and what they compute with: every expert is the same zeros,
and so are all engram rows. No reader is asked and no state is left.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compute.model import Model
from compute.resident import ResidentExperts
from compute.slot_views import zero_expert
from compute.weights import ModelWeights
from protocol.config import ModelConfig

#: Passes over sequences of their own, besides one over a whole chunk. Triton compiles a kernel anew
#: for numbers that are multiples of 16, so lengths and places of both kinds occur; and what chooses
#: rows has a form for each of several lengths.
LENGTHS = ((77, 40, 48), (1024,), (4096,))
# A longer chunk launches nothing else, and a start should not take its time.
MOST_TOKENS = 8192
# Any other token than those with a meaning of their own.
_FIRST_TOKEN = 3


class SameRows:
    """An EngramSource of zeros; a ticket is how many tokens it is for."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self._shape = (config.engram_rows_per_token, config.engram_head_dim)
        self._device = device

    def request(self, start: int, tokens: Sequence[int], history: Sequence[int]) -> int:
        return len(tokens)

    def here(self, ticket: int) -> bool:
        return True

    def rows(self, ticket: int, engram_layer_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width = self._shape
        return self._zeros(ticket, rows, width), self._zeros(ticket, rows, width // 32)

    def done(self, ticket: int) -> None:
        """Nothing is kept."""

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, device=self._device)


def warm_up(config: ModelConfig, weights: ModelWeights, chunk_tokens: int) -> None:
    """Run passes of `chunk_tokens` tokens and of fewer: what they launch is compiled and loaded."""
    device = weights.embed.device
    rows = SameRows(config, device)
    model = Model(config, weights, _same_everywhere(config, device), rows)
    longest = min(chunk_tokens, MOST_TOKENS, config.max_position_embeddings)
    sequences = [[min(length, longest) for length in lengths] for lengths in LENGTHS]
    for lengths in dict.fromkeys([(longest,), *map(tuple, sequences)]):
        state = model.new_state()
        for length in lengths:
            count = min(length, config.max_position_embeddings - state.length)
            if count:
                ticket = rows.request(state.length, range(count), ())
                model.forward(_tokens(count, config), state, ticket)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _same_everywhere(config: ModelConfig, device: torch.device) -> ResidentExperts:
    """Experts that are all the same zeros."""
    layer = [zero_expert(config, device)] * config.n_routed_experts
    return ResidentExperts([layer] * config.num_hidden_layers)


def _tokens(count: int, config: ModelConfig) -> torch.Tensor:
    """int64 [count], all different if there are that many, so that they pick many experts."""
    span = config.vocab_size - _FIRST_TOKEN
    return _FIRST_TOKEN + torch.arange(count) * 7919 % span
