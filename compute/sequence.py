"""What one sequence keeps between forward passes: window rings, compressed KV, index keys.

Owns the state's layout and its growth. A state belongs to one sequence and is written by the layers
of one forward pass at a time; a pass that fails midway leaves it unusable until `restore`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from protocol.config import ModelConfig

Snapshot = Mapping[str, torch.Tensor | int]


class GrowingRows:
    """bf16 rows that are only appended; storage doubles, so appending is amortized constant."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._storage = torch.empty(0, width, dtype=torch.bfloat16, device=device)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> torch.Tensor:
        """A view [count, width]; valid until the next append."""
        return self._storage[: self._count]

    def append(self, rows: torch.Tensor) -> None:
        """Add bf16 `rows` [n, width] at the end."""
        count = self._count + len(rows)
        if count > len(self._storage):
            grown = self._storage.new_empty(max(count, 2 * len(self._storage), 64), rows.shape[1])
            grown[: self._count] = self.rows
            self._storage = grown
        self._storage[self._count : count] = rows
        self._count = count

    def reset(self, rows: torch.Tensor) -> None:
        """Hold a copy of `rows` and nothing else."""
        self._count = 0
        self.append(rows)


class SequenceState:
    """The attention memory of one sequence of `length` tokens.

    `windows` bf16 [layers, sliding_window, head_dim]: position p in slot p mod sliding_window. For
    each kv source layer: `compressed` rows [groups, head_dim], `index_keys` [groups,
    index_head_dim], and of the tokens whose group is not full yet `pending_kv`, `pending_gate`
    fp32 [length mod ratio, head_dim]. `last_key_source` is the kv source that published last,
    which only `reference_index_keys` asks for.
    """

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.length = 0
        self.usable = True
        self.windows = torch.zeros(
            config.num_hidden_layers,
            config.sliding_window,
            config.head_dim,
            dtype=torch.bfloat16,
            device=device,
        )
        sources = config.kv_source_layer_ids
        self.compressed = {layer: GrowingRows(config.head_dim, device) for layer in sources}
        self.index_keys = {layer: GrowingRows(config.index_head_dim, device) for layer in sources}
        empty = torch.empty(0, config.head_dim, device=device)
        self.pending_kv = {layer: empty for layer in sources}
        self.pending_gate = {layer: empty for layer in sources}
        self.last_key_source: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows held, without the room kept for growth."""
        return sum(part.nbytes for part in self._tensors().values())

    @torch.inference_mode()
    def snapshot(self) -> dict[str, torch.Tensor | int]:
        """A copy of everything, as plain tensors and ints, unaffected by later passes."""
        copy: dict[str, torch.Tensor | int] = {
            name: tensor.clone() for name, tensor in self._tensors().items()
        }
        copy["length"] = self.length
        copy["last_key_source"] = -1 if self.last_key_source is None else self.last_key_source
        return copy

    @torch.inference_mode()
    def restore(self, snapshot: Snapshot) -> None:
        """Become what `snapshot()` of a state of the same model saw; the snapshot stays valid."""
        tensors = {k: v for k, v in snapshot.items() if isinstance(v, torch.Tensor)}
        self.windows.copy_(tensors["windows"])
        for layer in self.compressed:
            self.compressed[layer].reset(tensors[f"compressed.{layer}"])
            self.index_keys[layer].reset(tensors[f"index_keys.{layer}"])
            self.pending_kv[layer] = tensors[f"pending_kv.{layer}"].to(self.windows.device)
            self.pending_gate[layer] = tensors[f"pending_gate.{layer}"].to(self.windows.device)
        source = int(snapshot["last_key_source"])
        self.last_key_source = None if source < 0 else source
        self.length = int(snapshot["length"])
        self.usable = True

    def _tensors(self) -> dict[str, torch.Tensor]:
        held = {"windows": self.windows}
        for layer in self.compressed:
            held[f"compressed.{layer}"] = self.compressed[layer].rows
            held[f"index_keys.{layer}"] = self.index_keys[layer].rows
            held[f"pending_kv.{layer}"] = self.pending_kv[layer]
            held[f"pending_gate.{layer}"] = self.pending_gate[layer]
        return held
