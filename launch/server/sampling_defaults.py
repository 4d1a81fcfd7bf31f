"""How tokens are chosen where a request does not say: what the checkpoint itself recommends."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from protocol.config import read_json_object
from protocol.errors import CheckpointError

_RANGES = {"temperature": (0.0, 2.0), "top_p": (0.0, 1.0), "top_k": (0, 1 << 30), "min_p": (0, 1)}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values of `generation_config.json`; without the file, the model's own distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0

    @classmethod
    def load(cls, checkpoint: Path) -> SamplingDefaults:
        """Raises CheckpointError where the file is there but not usable."""
        path = checkpoint / "generation_config.json"
        if not path.exists():
            return cls()
        parsed = read_json_object(path)
        found: dict[str, Any] = {}
        for name, (low, high) in _RANGES.items():
            value = parsed.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise CheckpointError(f"{path}: {name} is {value!r}, expected a number")
            if not low <= value <= high or (name == "top_p" and value == 0):
                raise CheckpointError(f"{path}: {name} is {value}, expected {low} to {high}")
            found[name] = value
        if parsed.get("do_sample") is False:
            found["temperature"] = 0.0
        return cls(**found)

    def as_dict(self) -> dict[str, float]:
        """For `/v1/models`."""
        return asdict(self)
