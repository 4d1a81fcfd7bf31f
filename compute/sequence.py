"""What one sequence keeps between forward passes: window rings, compressed KV, index keys.

Owns the state's layout and its growth. A state belongs to one sequence and is written by the layers
of one forward pass at a time; a pass that fails midway leaves it unusable until `restore`. Prefill
and decode steps share it: a decode step's kernels write the rows themselves, and `advance` counts
them. With `capacity` tokens reserved nothing moves or is allocated up to that length, and all of it
is one allocation, so that a state made after another was dropped mostly lies where that one lay.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from protocol.config import ModelConfig

Snapshot = Mapping[str, torch.Tensor | int]
_ALIGNMENT = 256  # bytes, of every tensor in a state's one allocation


class GrowingRows:
    """bf16 rows that are only appended; storage doubles, so appending is amortized constant."""

    def __init__(
        self, width: int, device: torch.device, storage: torch.Tensor | None = None
    ) -> None:
        """`storage` bf16 [n, width] is where the first n rows go."""
        empty = torch.empty(0, width, dtype=torch.bfloat16, device=device)
        self._storage = empty if storage is None else storage
        # Asked for many times a token, and dear to ask of a tensor.
        self._capacity = self._storage.shape[0]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> torch.Tensor:
        """A view [count, width]; valid until the next append."""
        return self._storage[: self._count]

    def room(self, more: int) -> torch.Tensor:
        """The storage [n, width], with space for `more` rows behind those held."""
        count = self._count + more
        if count > self._capacity:
            width = self._storage.shape[1]
            self._capacity = max(count, 2 * self._capacity, 64)
            grown = self._storage.new_empty(self._capacity, width)
            grown[: self._count] = self.rows
            self._storage = grown
        return self._storage

    @property
    def capacity(self) -> int:
        """How many rows the storage takes."""
        return self._capacity

    def written(self, more: int) -> None:
        """`more` rows behind those held have been written in `room`."""
        self._count += more

    def append(self, rows: torch.Tensor) -> None:
        """Add bf16 `rows` [n, width] at the end."""
        count = self._count + len(rows)
        self.room(len(rows))[self._count : count] = rows
        self._count = count

    def reset(self, rows: torch.Tensor) -> None:
        """Hold a copy of `rows` and nothing else."""
        self._count = 0
        self.append(rows)


class SequenceState:
    """The attention memory of one sequence of `length` tokens.

    `windows` bf16 [layers, sliding_window, head_dim]: position p in slot p mod sliding_window. For
    each kv source layer: `compressed` rows [groups, head_dim], `index_keys` [groups,
    index_head_dim], and `filling` fp32 [2, ratio, head_dim], kv and gates of the group that is not
    full yet, of which the first length mod ratio mean something. `last_key_source` is the kv source
    that published last, which only `reference_index_keys` asks for.
    """

    def __init__(self, config: ModelConfig, device: torch.device, capacity: int = 0) -> None:
        self.length = 0
        self.usable = True
        self._ratios = {
            layer: config.compress_ratios[layer] for layer in config.kv_source_layer_ids
        }
        parts = _parts(config, capacity)
        places = [_padded(shape, dtype) for shape, dtype in parts.values()]
        memory = torch.empty(sum(places), dtype=torch.uint8, device=device).split(places)
        held = {
            name: piece[: torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)
            for (name, (shape, dtype)), piece in zip(parts.items(), memory, strict=True)
        }
        self.windows = held["windows"].zero_()
        self.filling = {layer: held[f"filling.{layer}"] for layer in self._ratios}
        self.compressed = {
            layer: GrowingRows(config.head_dim, device, held[f"compressed.{layer}"])
            for layer in self._ratios
        }
        self.index_keys = {
            layer: GrowingRows(config.index_head_dim, device, held[f"index_keys.{layer}"])
            for layer in self._ratios
        }
        self.last_key_source: int | None = None

    @classmethod
    def bytes_for(cls, config: ModelConfig, capacity: int) -> int:
        """Bytes of a state with room for `capacity` tokens."""
        parts = _parts(config, capacity).values()
        return sum(_padded(shape, dtype) for shape, dtype in parts)

    def pending(self, layer: int, length: int) -> torch.Tensor:
        """fp32 [2, length mod ratio, head_dim]: kv and gates of a group not full after `length`."""
        filling: torch.Tensor = self.filling[layer]
        return filling[:, : length % self._ratios[layer]]

    def make_room(self) -> None:
        """See that one more token fits without anything moving."""
        for layer in self._ratios:
            self.compressed[layer].room(1)
            self.index_keys[layer].room(1)

    def advance(self) -> None:
        """Count the token whose rows a decode step has written."""
        self.length += 1
        for layer, ratio in self._ratios.items():
            if self.length % ratio == 0:
                self.compressed[layer].written(1)
                self.index_keys[layer].written(1)
                self.last_key_source = layer

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held, without the room kept for growth."""
        return sum(part.nbytes for part in self._tensors().values())

    @torch.inference_mode()
    def snapshot(self) -> dict[str, torch.Tensor | int]:
        """A copy of everything in the host's memory, as plain tensors and ints."""
        copy: dict[str, torch.Tensor | int] = {
            name: tensor.to("cpu", copy=True) for name, tensor in self._tensors().items()
        }
        copy["length"] = self.length
        copy["last_key_source"] = -1 if self.last_key_source is None else self.last_key_source
        return copy

    @torch.inference_mode()
    def restore(self, snapshot: Snapshot) -> None:
        """Become what `snapshot()` of a state of the same model saw; the snapshot stays valid."""
        tensors = {k: v for k, v in snapshot.items() if isinstance(v, torch.Tensor)}
        self.length = int(snapshot["length"])
        self.windows.copy_(tensors["windows"])
        for layer in self.compressed:
            self.compressed[layer].reset(tensors[f"compressed.{layer}"])
            self.index_keys[layer].reset(tensors[f"index_keys.{layer}"])
            pending = self.pending(layer, self.length)
            pending[0].copy_(tensors[f"pending_kv.{layer}"])
            pending[1].copy_(tensors[f"pending_gate.{layer}"])
        source = int(snapshot["last_key_source"])
        self.last_key_source = None if source < 0 else source
        self.usable = True

    def _tensors(self) -> dict[str, torch.Tensor]:
        held = {"windows": self.windows}
        for layer in self.compressed:
            pending = self.pending(layer, self.length)
            held[f"compressed.{layer}"] = self.compressed[layer].rows
            held[f"index_keys.{layer}"] = self.index_keys[layer].rows
            held[f"pending_kv.{layer}"] = pending[0]
            held[f"pending_gate.{layer}"] = pending[1]
        return held


def _parts(config: ModelConfig, capacity: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of everything that a state allocates at once."""
    width, bf16 = config.head_dim, torch.bfloat16
    parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "windows": ((config.num_hidden_layers, config.sliding_window, width), bf16)
    }
    for layer in config.kv_source_layer_ids:
        ratio = config.compress_ratios[layer]
        groups = capacity // ratio
        parts[f"filling.{layer}"] = (2, ratio, width), torch.float32
        parts[f"compressed.{layer}"] = (groups, width), bf16
        parts[f"index_keys.{layer}"] = (groups, config.index_head_dim), bf16
    return parts


def _padded(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    size = torch.Size(shape).numel() * dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT
