"""Wrong readings of the model, each as a change to one function.

The README's list of single mistakes, and two that other engines shipped. `MISTAKES[name](patch)`
makes one, through pytest's monkeypatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import compute.model as model
from compute.layers import attention, compressor, hyper_connections, indexer, linear, moe
from compute.layers.hyper_connections import Mixes
from compute.rope import Rope, Rotation, frequencies, rotate_tail, rotation
from compute.weights import GateWeights
from tests.golden import harness

Patch = pytest.MonkeyPatch
ROTATING = (attention, compressor, indexer)


def wrap(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Replace `owner.name` by `change(original, *args, **kwargs)`."""
    original = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **kwargs: change(original, *args, **kwargs))


def no_sink(patch: Patch) -> None:
    wrap(
        patch,
        attention,
        "attend",
        lambda attend, q, k, filled, sink: attend(q, k, filled, sink - torch.inf),
    )


def residual_mix_transposed(patch: Patch) -> None:
    wrap(
        patch,
        model,
        "write_back",
        lambda write, y, streams, by: write(y, streams, by._replace(comb=by.comb.mT)),
    )


def one_sinkhorn_pass(patch: Patch) -> None:
    wrap(
        patch,
        hyper_connections,
        "split_mixes",
        lambda split, raw, scale, base, eps, iterations: split(raw, scale, base, eps, 1),
    )


def pre_mix_of_the_same_sublayer(patch: Patch) -> None:
    newest: list[Mixes] = []

    def remember(mixes: Callable[..., Mixes], *args: Any) -> Mixes:
        newest[:] = [mixes(*args)]
        return newest[0]

    wrap(patch, hyper_connections, "mixes", remember)
    wrap(patch, model, "collapse_norm", lambda read, s, pre, *by: read(s, newest[0].pre, *by))


def no_candidate_filter(patch: Patch) -> None:
    wrap(patch, indexer, "rows_of_blocks", lambda rows, *args: torch.ones_like(rows(*args)))


def index_keys_always_from_the_own_source(patch: Patch) -> None:
    def own(init: Any, self: Any, *args: Any, reference_index_keys: bool, **kwargs: Any) -> None:
        init(self, *args, reference_index_keys=False, **kwargs)

    wrap_method(patch, attention.Attention, "__init__", own)


def wrap_method(patch: Patch, owner: type, name: str, change: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(original, self, *args, **kwargs)

    patch.setattr(owner, name, method)


def compressed_kv_not_rounded(patch: Patch) -> None:
    patch.setattr(compressor, "round_trip_fp4_kv", lambda x: x)


def index_vectors_not_rounded(patch: Patch) -> None:
    for owner in (compressor, indexer):
        patch.setattr(owner, "round_trip_fp4_index", lambda x: x)


def window_kv_not_rounded(patch: Patch) -> None:
    patch.setattr(attention, "round_trip_fp8", lambda x: x)


def product_inputs_not_rounded(patch: Patch) -> None:
    patch.setattr(linear, "round_trip_fp8", lambda x, dtype: x.to(dtype))


def split_half_rotation(patch: Patch) -> None:
    def split_half(x: torch.Tensor, by: Rotation, *, inverse: bool = False) -> torch.Tensor:
        half = by.cos.shape[-1]
        order = torch.arange(2 * half).view(2, half).T.flatten()
        order = torch.cat((torch.arange(x.shape[-1] - 2 * half), x.shape[-1] - 2 * half + order))
        return rotate_tail(x[..., order], by, inverse=inverse)[..., order.argsort()]

    for owner in ROTATING:
        patch.setattr(owner, "rotate_tail", split_half)


def no_inverse_rotation(patch: Patch) -> None:
    def forward_only(x: torch.Tensor, by: Rotation, *, inverse: bool = False) -> torch.Tensor:
        return x if inverse else rotate_tail(x, by)

    patch.setattr(attention, "rotate_tail", forward_only)


def no_yarn(patch: Patch) -> None:
    config = harness.config()
    plain = frequencies(config.qk_rope_head_dim, config.compress_rope_theta, None)
    patch.setattr(Rope, "yarn", lambda self, positions: rotation(positions, plain))


def window_theta_on_compressed_layers(patch: Patch) -> None:
    config = harness.config()
    wrong = frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
    patch.setattr(Rope, "yarn", lambda self, positions: rotation(positions, wrong))


def gate_bias_left_in_the_weights(patch: Patch) -> None:
    def biased(x: torch.Tensor, gate: GateWeights, top_k: int, scale: float) -> moe.Routing:
        scores = (moe.gate_scores(x, gate) + gate.bias).topk(top_k, -1)
        weights = scores.values / (scores.values.sum(-1, keepdim=True) + 1e-20) * scale
        return moe.Routing(scores.indices, weights)

    patch.setattr(model, "route", biased)


def gate_bias_ignored(patch: Patch) -> None:
    wrap(
        patch,
        model,
        "route",
        lambda route, x, gate, *rest: route(
            x, replace(gate, bias=torch.zeros_like(gate.bias)), *rest
        ),
    )


def fp4_nibbles_swapped(patch: Patch) -> None:
    wrap(
        patch,
        moe,
        "dequantize_fp4_weight",
        lambda decode, packed, scales: decode((packed >> 4) | (packed << 4), scales),
    )


def hash_padded_with_another_class(patch: Patch) -> None:
    wrong = replace(harness.ngram_hash(), pad_class=harness.ngram_hash().pad_class + 1)
    patch.setattr(harness, "ngram_hash", lambda: wrong)


def engram_left_out(patch: Patch) -> None:
    patch.setattr(model.Model, "add_engram", lambda self, layer, streams, codes, scales: streams)


def queries_normed_per_head(patch: Patch) -> None:
    def normed(x: torch.Tensor, by: Rotation, *, inverse: bool = False) -> torch.Tensor:
        if x.dim() == 3 and not inverse:
            x = (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True))).to(x.dtype)
        return rotate_tail(x, by, inverse=inverse)

    patch.setattr(attention, "rotate_tail", normed)


def probabilities_not_rounded(patch: Patch) -> None:
    def plain(
        queries: torch.Tensor, keys: torch.Tensor, filled: torch.Tensor, sink: torch.Tensor
    ) -> torch.Tensor:
        scores = torch.bmm(queries, keys.mT) * queries.shape[-1] ** -0.5
        scores = scores.masked_fill(~filled.unsqueeze(1), -torch.inf)
        with_sink = torch.cat((scores, sink.view(1, -1, 1).expand(len(scores), -1, 1)), -1)
        return torch.bmm(with_sink.softmax(-1)[..., :-1], keys)

    patch.setattr(attention, "attend", plain)


MISTAKES: dict[str, Callable[[Patch], None]] = {
    change.__name__: change
    for change in (
        no_sink,
        residual_mix_transposed,
        one_sinkhorn_pass,
        pre_mix_of_the_same_sublayer,
        no_candidate_filter,
        index_keys_always_from_the_own_source,
        compressed_kv_not_rounded,
        index_vectors_not_rounded,
        window_kv_not_rounded,
        product_inputs_not_rounded,
        split_half_rotation,
        no_inverse_rotation,
        no_yarn,
        window_theta_on_compressed_layers,
        gate_bias_left_in_the_weights,
        gate_bias_ignored,
        fp4_nibbles_swapped,
        hash_padded_with_another_class,
        engram_left_out,
        queries_normed_per_head,
        probabilities_not_rounded,
    )
}
