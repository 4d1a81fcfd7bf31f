"""The dense weights: everything of the text model except routed experts and engram tables.

Owns reading them from the shards (plain reads, in pieces, no mapping) and the form they are held
in. On CUDA matrices stay as stored, fp8 with its scales or bf16, because kernels read them so. On
CPU fp8 weights are dequantized once, at load, to fp32 (`product_dtype` says why), and the head, the
gates and the compressors that gate are fp32, as their products are in the model.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from compute.formats import GROUP, NAN_SCALE, dequantize_fp8_weight
from compute.layers.linear import Fp8Weight, product_dtype
from protocol.config import ModelConfig
from protocol.errors import CheckpointError
from protocol.shards import Shards, TensorEntry
from protocol.tensor_table import expected_tensors, kind_of

PIECE_BYTES = 16 << 20  # read at a time, so that loading needs little beyond what it fills
_STORED = {"BF16": torch.bfloat16, "F32": torch.float32}
_NAN_CODE = 0x7F  # of e4m3, either sign
# What is stored in bf16 and multiplied with; norms and gates of the engram are vectors.
_MATRICES = (
    "head.weight",
    ".gate.weight",
    ".compressor.wkv.weight",
    ".compressor.wgate.weight",
    ".indexer.weights_proj.weight",
    ".indexer.wk.weight",
)


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """`wkv`, `wgate` [head_dim, D]; `wgate` is None at ratio 1, else their products are fp32."""

    wkv: torch.Tensor
    wgate: torch.Tensor | None
    norm: torch.Tensor


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """`wk` [index_head_dim, head_dim] and `k_norm` are None where the layer owns no keys."""

    wq_b: Fp8Weight
    weights_proj: torch.Tensor
    wk: torch.Tensor | None
    k_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """`wq_a_wkv` stacks wq_a on wkv, which share their input; `wo_a` [o_groups * rank, width]."""

    wq_a_wkv: Fp8Weight
    q_norm: torch.Tensor
    wq_b: Fp8Weight
    kv_norm: torch.Tensor
    wo_a: Fp8Weight
    wo_b: Fp8Weight
    sink: torch.Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True, slots=True)
class MixWeights:
    """One hyper-connection: `fn` [(2 + hc) * hc, hc * D], `base` [(2 + hc) * hc], `scale` [3]."""

    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


@dataclass(frozen=True, slots=True)
class GateWeights:
    """`weight` [E, D], fp32 `bias` [E]; the bias chooses and never weighs."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class SharedExpertWeights:
    """`w1_w3` stacks the gate branch on the up branch, which share their input."""

    w1_w3: Fp8Weight
    w2: Fp8Weight


@dataclass(frozen=True, slots=True)
class EngramWeights:
    """`wkv` [(hc + 1) * D, rows * head_dim]; fp32 `q_weight`, `k_weight` [hc, D]."""

    wkv: Fp8Weight
    q_weight: torch.Tensor
    k_weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_mix: MixWeights
    attention_norm: torch.Tensor
    attention: AttentionWeights
    ffn_mix: MixWeights
    ffn_norm: torch.Tensor
    gate: GateWeights
    shared: SharedExpertWeights
    engram: EngramWeights | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`embed` bf16 [V, D], `head` [V, D], `norm` fp32 [D]."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors held."""
        return tensor_bytes(self)

    @classmethod
    def load(
        cls,
        shards: Shards,
        device: torch.device,
        progress: Callable[[int, int], None] = lambda done, layers: None,
        *,
        stored: bool | None = None,
    ) -> ModelWeights:
        """Read all dense weights to `device`; `progress(done, layers)` is called after each layer.

        `stored` keeps matrices as they are in the file, which kernels ask for: on CUDA by default.
        Raises CheckpointError naming file and tensor: a NaN scale or code, a file that ends early
        or cannot be read.
        """
        config = shards.config
        stored = device.type == "cuda" if stored is None else stored
        with _Reader(shards, device, stored) as reader:
            embed = reader.plain("embed.weight", torch.bfloat16)
            layers = []
            for layer in range(config.num_hidden_layers):
                layers.append(_layer(reader, config, layer))
                progress(layer + 1, config.num_hidden_layers)
            norm = reader.plain("norm.weight")
            return cls(embed, tuple(layers), norm, reader.plain("head.weight"))


def load_gates(shards: Shards, device: torch.device) -> list[GateWeights]:
    """Every layer's gate in fp32 and nothing else. Raises CheckpointError."""
    layers = range(shards.config.num_hidden_layers)
    with _Reader(shards, device, stored=False) as reader:
        return [_gate(reader, f"layers.{layer}") for layer in layers]


def dense_bytes(config: ModelConfig, device: torch.device) -> int:
    """Bytes that `ModelWeights.load` will hold, known from the config alone."""
    total, stored = 0, device.type == "cuda"
    for name, spec in expected_tensors(config).items():
        if kind_of(name) != "dense" or name.endswith(".bias_vl"):
            continue
        if spec.dtype == "F8_E8M0" and not stored:
            continue
        total += math.prod(spec.shape) * _held_dtype(name, spec.dtype, stored).itemsize
    return total


def _held_dtype(name: str, dtype: str, stored: bool) -> torch.dtype:
    if dtype == "F8_E8M0" or (dtype == "F8_E4M3" and stored):
        return torch.uint8
    matrix = dtype == "BF16" and name.endswith(_MATRICES)
    return torch.bfloat16 if name == "embed.weight" or (matrix and stored) else torch.float32


def tensor_bytes(holder: object) -> int:
    """Bytes of all tensors in `holder`: one, or dataclasses and tuples of them."""
    if isinstance(holder, torch.Tensor):
        return holder.nbytes
    if isinstance(holder, tuple):
        return sum(map(tensor_bytes, holder))
    if dataclasses.is_dataclass(holder):
        return sum(
            tensor_bytes(getattr(holder, field.name)) for field in dataclasses.fields(holder)
        )
    return 0


def _layer(reader: _Reader, config: ModelConfig, layer: int) -> LayerWeights:
    base = f"layers.{layer}"
    has_engram = layer in config.engram_layer_ids
    return LayerWeights(
        attention_mix=_mix(reader, f"{base}.hc_attn"),
        attention_norm=reader.plain(f"{base}.attn_norm.weight"),
        attention=_attention(reader, config, layer),
        ffn_mix=_mix(reader, f"{base}.hc_ffn"),
        ffn_norm=reader.plain(f"{base}.ffn_norm.weight"),
        gate=_gate(reader, base),
        shared=SharedExpertWeights(
            reader.fp8(f"{base}.ffn.shared_experts.w1", f"{base}.ffn.shared_experts.w3"),
            reader.fp8(f"{base}.ffn.shared_experts.w2"),
        ),
        engram=_engram(reader, f"{base}.engram") if has_engram else None,
    )


def _gate(reader: _Reader, base: str) -> GateWeights:
    return GateWeights(
        reader.plain(f"{base}.ffn.gate.weight"), reader.plain(f"{base}.ffn.gate.bias")
    )


def _mix(reader: _Reader, base: str) -> MixWeights:
    return MixWeights(*(reader.plain(f"{base}_{part}") for part in ("fn", "base", "scale")))


def _engram(reader: _Reader, base: str) -> EngramWeights:
    q_weight, k_weight = (reader.plain(f"{base}.{part}_weight") for part in "qk")
    return EngramWeights(reader.fp8(f"{base}.wkv"), q_weight, k_weight)


def _attention(reader: _Reader, config: ModelConfig, layer: int) -> AttentionWeights:
    base = f"layers.{layer}.attn"
    return AttentionWeights(
        wq_a_wkv=reader.fp8(f"{base}.wq_a", f"{base}.wkv"),
        q_norm=reader.plain(f"{base}.q_norm.weight"),
        wq_b=reader.fp8(f"{base}.wq_b"),
        kv_norm=reader.plain(f"{base}.kv_norm.weight"),
        wo_a=reader.fp8(f"{base}.wo_a"),
        wo_b=reader.fp8(f"{base}.wo_b"),
        sink=reader.plain(f"{base}.attn_sink"),
        compressor=_compressor(reader, config, layer),
        indexer=_indexer(reader, config, layer),
    )


def _compressor(reader: _Reader, config: ModelConfig, layer: int) -> CompressorWeights | None:
    if layer not in config.kv_source_layer_ids:
        return None
    base = f"layers.{layer}.attn.compressor"
    gated = config.compress_ratios[layer] > 1
    return CompressorWeights(
        reader.plain(f"{base}.wkv.weight"),
        reader.plain(f"{base}.wgate.weight") if gated else None,
        reader.plain(f"{base}.norm.weight"),
    )


def _indexer(reader: _Reader, config: ModelConfig, layer: int) -> IndexerWeights | None:
    if layer not in config.index_source_layer_ids:
        return None
    base = f"layers.{layer}.attn.indexer"
    owns_keys = layer in config.kv_source_layer_ids
    return IndexerWeights(
        reader.fp8(f"{base}.wq_b"),
        reader.plain(f"{base}.weights_proj.weight"),
        reader.plain(f"{base}.wk.weight") if owns_keys else None,
        reader.plain(f"{base}.k_norm.weight") if owns_keys else None,
    )


class _Reader:
    """Reads tensors of shards, whose types and shapes are checked, piece by piece into the form
    they are held in."""

    def __init__(self, shards: Shards, device: torch.device, stored: bool) -> None:
        self._shards = shards
        self._device = device
        self._stored = stored
        self._files: dict[str, int] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *exc: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)

    def plain(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A BF16 or F32 tensor."""
        entry = self._shards.tensors[name]
        dtype = dtype or _held_dtype(name, entry.dtype, self._stored)
        held = torch.empty(entry.shape, dtype=dtype, device=self._device)
        for begin, end, raw in self._pieces(entry):
            piece = raw.view(_STORED[entry.dtype]).view(-1, *entry.shape[1:])
            held[begin:end].copy_(piece)
        return held

    def fp8(self, *bases: str) -> Fp8Weight:
        """The fp8 weights `bases` stacked by rows, each whole tiles."""
        entries = [self._shards.tensors[f"{base}.weight"] for base in bases]
        shape = (sum(entry.shape[0] for entry in entries), entries[0].shape[1])
        dtype = torch.uint8 if self._stored else product_dtype(self._device)
        held = torch.empty(shape, dtype=dtype, device=self._device)
        row, stacked = 0, []
        for base, entry in zip(bases, entries, strict=True):
            scales = self._scales(f"{base}.scale").to(self._device)
            stacked.append(scales)
            for begin, end, raw in self._pieces(entry):
                codes = raw.view(-1, entry.shape[1])
                if bool(((codes & _NAN_CODE) == _NAN_CODE).any()):
                    raise CheckpointError(
                        f"{entry.path}: {entry.name} holds a NaN code; fetch the file again"
                    )
                into = held[row + begin : row + end]
                if self._stored:
                    into.copy_(codes)
                else:
                    tiles = scales[begin // GROUP : math.ceil(end / GROUP)]
                    into.copy_(dequantize_fp8_weight(codes.to(self._device), tiles))
            row += entry.shape[0]
        if self._stored:
            return Fp8Weight(codes=held, scales=torch.cat(stacked))
        return Fp8Weight(held)

    def _scales(self, name: str) -> torch.Tensor:
        entry = self._shards.tensors[name]
        scales = torch.cat([raw for _, _, raw in self._pieces(entry)]).view(entry.shape)
        bad = (scales == NAN_SCALE).nonzero()
        if len(bad):
            raise CheckpointError(
                f"{entry.path}: {name} holds the scale byte 255 (NaN) at {bad[0].tolist()}; "
                "fetch the file again"
            )
        return scales

    def _pieces(self, entry: TensorEntry) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first row, row after the last, raw bytes) over `entry`, in whole tiles of rows."""
        rows = entry.shape[0]
        row_bytes = entry.nbytes // max(rows, 1)
        step = max(PIECE_BYTES // max(row_bytes, 1) // GROUP, 1) * GROUP
        for begin in range(0, rows, step):
            end = min(begin + step, rows)
            yield begin, end, self._read(entry, begin * row_bytes, (end - begin) * row_bytes)

    def _read(self, entry: TensorEntry, skip: int, size: int) -> torch.Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        view = buffer.numpy().data
        done = 0
        try:
            path = str(entry.path)
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            while done < size:
                got = os.preadv(self._files[path], [view[done:]], entry.offset + skip + done)
                if got == 0:
                    raise CheckpointError(
                        f"{path}: ends inside {entry.name} at byte {entry.offset + skip + done}; "
                        "it was cut short, fetch it again"
                    )
                done += got
        except OSError as error:
            raise CheckpointError(
                f"{entry.path}: {entry.name} cannot be read ({error.strerror})"
            ) from None
        return buffer
