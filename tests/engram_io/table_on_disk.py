"""A table on disk whose every byte is known, at the offsets that released shards have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engram_io.rows import EngramTable
from protocol.shards import TensorEntry

HEAD_DIM = 256
ROWS = 40_000
# Odd, so that every row lies across some boundary sooner or later; the scales end the file.
CODES_AT = 1003


@dataclass(frozen=True)
class TableOnDisk:
    table: EngramTable
    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.uint8]

    @property
    def path(self) -> Path:
        return self.table.codes.path


def write_table(directory: Path) -> TableOnDisk:
    """A table of ROWS rows in a file of `directory`."""
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 256, (ROWS, HEAD_DIM), np.uint8)
    scales = rng.integers(100, 140, (ROWS, HEAD_DIM // 32), np.uint8)
    path = directory / "model-00047-of-00048.safetensors"
    path.write_bytes(b"h" * CODES_AT + codes.tobytes() + scales.tobytes())
    name = "layers.1.engram.embed"
    entries = (
        TensorEntry(f"{name}.weight", path, "F8_E4M3", codes.shape, CODES_AT, codes.nbytes),
        TensorEntry(
            f"{name}.scale", path, "F8_E8M0", scales.shape, CODES_AT + codes.nbytes, scales.nbytes
        ),
    )
    return TableOnDisk(EngramTable(1, *entries), codes, scales)
