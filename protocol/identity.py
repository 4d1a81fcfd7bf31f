"""What tells one checkpoint from another, without reading all of it.

Owns the digest that files made for one checkpoint carry (fitted predictors, packed experts, warm
sets, route traces), so that a foreign one is refused. It covers the config, the index, every
shard's name, size and header, and blocks sampled evenly over each shard: training or quantizing
again changes nearly every byte, so the samples see it. It does not change when files are copied or
touched. A few flipped bits it does not see; checksums are for those.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from protocol.config import require_file
from protocol.errors import CheckpointError
from protocol.shards import INDEX_NAME

SAMPLES = 8
SAMPLE_BYTES = 4096
_HEADER_BYTES = 65536
# Lies beside the shards and is made from them, so it is no part of them.
PREDICTOR_NAME = "headrace-predictor.safetensors"


def checkpoint_identity(directory: Path) -> str:
    """32 hexadecimal digits. Raises CheckpointError where a file cannot be read."""
    digest = hashlib.sha256(b"headrace checkpoint 1")
    path = directory
    try:
        for name in ("config.json", INDEX_NAME):
            path = directory / name
            require_file(path)
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        for path in sorted(directory.glob("*.safetensors")):
            if path.name != PREDICTOR_NAME:
                require_file(path)
                digest.update(path.name.encode() + b"\0" + _sampled(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()[:32]


def _sampled(path: Path) -> bytes:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(size.to_bytes(8, "little"))
        digest.update(file.read(_HEADER_BYTES))
        for sample in range(SAMPLES):
            at = (size - SAMPLE_BYTES) * (sample + 1) // SAMPLES
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, max(0, at)))
    return digest.digest()
