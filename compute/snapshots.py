"""Kept sequence states on disk, so that conversations outlive the process.

Owns one directory within a byte budget, the least recently used file going first. Promises: a file
that is damaged, of another model, or of another arithmetic is refused, removed and counted, never
used; writing happens in a thread and never holds up a token; no failure here fails a request.

A file is safetensors: the state's tensors, `tokens`, maybe `logits`; its metadata names the
identity of what made it and a digest over everything else. It holds what people said to the model,
so the directory is private.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from compute.kept_states import KeptState
from protocol.config import ModelConfig, require_file
from protocol.errors import ResourceError
from protocol.identity import PREDICTOR_NAME

FORMAT = "headrace sequence state 1"
SUFFIX = ".state"
# States waiting to be written; a disk slower than people type loses the oldest.
WAITING = 4
CLOSE_S = 0.8

_UNUSABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError)
Ids = npt.NDArray[np.int32]


class Refused(ValueError):
    """A file that must not be used; the text says why."""


def identity_of(checkpoint: Path, *arithmetic: object) -> str:
    """A digest of what a state depends on: the checkpoint's files and how it is computed.

    The shards count by name, size and time of change: reading 475 GiB to know them is no option.
    """
    digest = hashlib.sha256(repr((FORMAT, *arithmetic)).encode())
    for path in sorted(path for path in checkpoint.iterdir() if path.is_file()):
        if path.suffix == ".json":
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        elif path.suffix == ".safetensors" and path.name != PREDICTOR_NAME:
            about = path.stat()
            digest.update(f"{path.name}\0{about.st_size}\0{about.st_mtime_ns}".encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class _Entry:
    path: Path
    tokens: Ids
    has_logits: bool


class Snapshots:
    """The states of one model in `directory`, beside those of others under the same budget."""

    def __init__(self, directory: Path, budget: int, identity: str, config: ModelConfig) -> None:
        """Raises ResourceError where the directory cannot be made or written."""
        self._directory = directory
        self._budget = budget
        self._identity = identity
        self._config = config
        self._entries: dict[str, _Entry] = {}
        self._lock = threading.Lock()
        self._jobs: queue.Queue[KeptState | None] = queue.Queue(WAITING)
        self.refused = self.dropped = 0
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            directory.chmod(0o700)
            for leftover in directory.glob("*.partial"):
                leftover.unlink(missing_ok=True)
        except OSError as error:
            raise ResourceError(
                f"{directory}: cannot keep sequence states there ({error.strerror}); give another "
                "--snapshot-dir, or --snapshot-bytes 0"
            ) from None
        for path in directory.glob(f"{identity}-*{SUFFIX}"):
            self._index(path)
        self._writer = threading.Thread(target=self._write_all, name="snapshots", daemon=True)
        self._writer.start()

    def __len__(self) -> int:
        return len(self._entries)

    def save(self, state: KeptState) -> None:
        """Write `state` soon. Dropped where the disk is too slow; states are only a saving."""
        try:
            self._jobs.put_nowait(state)
        except queue.Full:
            self.dropped += 1

    def longest(self, prompt: Sequence[int], longer_than: int) -> KeptState | None:
        """The longest usable state that `prompt` begins with, if it saves more than
        `longer_than` tokens."""
        wanted = np.asarray(prompt, np.int32)
        with self._lock:
            matching = [
                (name, entry)
                for name, entry in self._entries.items()
                if longer_than < len(entry.tokens)
                and len(entry.tokens) + (not entry.has_logits) <= len(wanted)
                and np.array_equal(wanted[: len(entry.tokens)], entry.tokens)
            ]
        for name, entry in sorted(matching, key=lambda item: -len(item[1].tokens)):
            try:
                state = self._load(entry.path)
            except FileNotFoundError:
                self._forget(name)
                continue
            except _UNUSABLE as error:
                self._refuse(name, entry.path, error)
                continue
            with contextlib.suppress(OSError):
                os.utime(entry.path)
            return state
        return None

    def close(self) -> None:
        """Write what waits, within a bound."""
        deadline = time.monotonic() + CLOSE_S
        with contextlib.suppress(queue.Full):
            self._jobs.put(None, timeout=CLOSE_S)
        self._writer.join(max(0.0, deadline - time.monotonic()))

    # --- reading ----------------------------------------------------------------------------------

    def _index(self, path: Path) -> None:
        try:
            require_file(path, Refused)
            with safe_open(path, framework="np") as file:
                tokens = file.get_tensor("tokens").astype(np.int32)
                if tokens.ndim != 1:
                    raise Refused("its tokens are not one after another")
                self._entries[path.name] = _Entry(path, tokens, "logits" in file.keys())  # noqa: SIM118
        except _UNUSABLE as error:
            self._refuse(path.name, path, error)

    def _load(self, path: Path) -> KeptState:
        """Raises Refused, or what a damaged file makes the library raise."""
        require_file(path, Refused)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if metadata.get("identity") != self._identity:
            raise Refused("it was made by another model or arithmetic")
        if metadata.get("digest") != _digest(tensors, metadata):
            raise Refused("its content does not match its digest")
        tokens = tuple(tensors.pop("tokens").tolist())
        logits = tensors.pop("logits", None)
        numbers = {name: int(value) for name, value in json.loads(metadata["numbers"]).items()}
        self._check_shapes(tensors, len(tokens))
        if numbers["length"] != len(tokens):
            raise Refused(f"it says {numbers['length']} tokens and has {len(tokens)}")
        nbytes = sum(tensor.nbytes for tensor in tensors.values()) + 8 * len(tokens)
        nbytes += logits.nbytes if logits is not None else 0
        return KeptState(tokens, {**tensors, **numbers}, logits, nbytes)

    def _check_shapes(self, tensors: dict[str, torch.Tensor], length: int) -> None:
        config = self._config
        rows = (config.num_hidden_layers, config.sliding_window, config.head_dim)
        expected: dict[str, tuple[int, ...]] = {"windows": rows}
        for layer in config.kv_source_layer_ids:
            ratio = config.compress_ratios[layer]
            expected[f"compressed.{layer}"] = (length // ratio, config.head_dim)
            expected[f"index_keys.{layer}"] = (length // ratio, config.index_head_dim)
            expected[f"pending_kv.{layer}"] = (length % ratio, config.head_dim)
            expected[f"pending_gate.{layer}"] = (length % ratio, config.head_dim)
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != expected:
            raise Refused("its tensors do not have the shapes of such a state")

    def _refuse(self, name: str, path: Path, error: Exception) -> None:
        self.refused += 1
        _say(f"{path}: refused and removed, its tokens are computed again ({error})")
        self._forget(name)
        with contextlib.suppress(OSError):
            path.unlink()

    def _forget(self, name: str) -> None:
        with self._lock:
            self._entries.pop(name, None)

    # --- writing ----------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (state := self._jobs.get()) is not None:
            try:
                self._write(state)
            except _UNUSABLE as error:
                self.dropped += 1
                _say(f"{self._directory}: a sequence state was not kept ({error})")

    def _write(self, state: KeptState) -> None:
        tokens = np.asarray(state.tokens, np.int32)
        name = f"{self._identity}-{hashlib.sha256(tokens.tobytes()).hexdigest()[:32]}{SUFFIX}"
        known = self._entries.get(name)
        if known is not None and (known.has_logits or state.logits is None):
            with contextlib.suppress(OSError):
                os.utime(known.path)
            return
        if state.nbytes > self._budget:
            return
        self._make_room(state.nbytes, name)
        tensors = {k: v for k, v in state.snapshot.items() if isinstance(v, torch.Tensor)}
        tensors["tokens"] = torch.from_numpy(tokens)
        if state.logits is not None:
            tensors["logits"] = state.logits
        numbers = {k: v for k, v in state.snapshot.items() if isinstance(v, int)}
        metadata = {"identity": self._identity, "numbers": json.dumps(numbers, sort_keys=True)}
        metadata["digest"] = _digest(tensors, metadata)
        path = self._directory / name
        partial = path.with_suffix(".partial")
        try:
            partial.touch(mode=0o600)
            save_file(tensors, partial, metadata)
            partial.chmod(0o600)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        with self._lock:
            self._entries[name] = _Entry(path, tokens, state.logits is not None)

    def _make_room(self, nbytes: int, name: str) -> None:
        """Remove files, of other models too, until `nbytes` more fit."""
        files = []
        for path in self._directory.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                about = path.stat()
                files.append((about.st_mtime_ns, about.st_size, path))
        used = sum(size for _, size, path in files if path.name != name)
        for _, size, path in sorted(files):
            if used + nbytes <= self._budget:
                return
            if path.name != name:
                self._forget(path.name)
                path.unlink(missing_ok=True)
                used -= size


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _digest(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(f"{metadata['identity']}\0{metadata['numbers']}".encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
