"""Route traces: what every layer picked, what was resident, what each predictor had said.

Owns both file formats (docs/route-trace.md): the trace itself, which replays without a model, and
the activations beside it, from which predictors are fitted. Promises: a file that was cut short is
read up to its last whole block; anything else that is not such a file is refused in one line; a
block is written by one call, so that a killed writer leaves whole blocks. Needs numpy, not torch.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from protocol.config import require_file
from protocol.errors import ResourceError, UsageError

MAGIC = b"headrace"
VERSION = 1
ROUTES, INPUTS = "routes", "inputs"
MAX_HEADER_BYTES = 1 << 20
MAX_BLOCK_BYTES = 1 << 30
MAX_TOKENS = 1 << 16
NO_SCORE = -128

GATE, FITTED = "gate", "fitted"
MOE, STREAM = "moe", "stream"
METHODS, SOURCES = (GATE, FITTED), (MOE, STREAM)

_PREFIX = struct.Struct("<8sII")  # magic, version, header length
_BLOCK = struct.Struct("<II")  # payload length, its CRC-32
_STEP = struct.Struct("<III")  # step, start, tokens
_LAYER = struct.Struct("<III")  # step, layer, tokens

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]
Halves = npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class Predictor:
    """Who predicts: `method` by `source`, `distance` layers ahead of the target layer.

    `gate` is the target's own gate and its scores are margins above the cut at top-k (0 and more:
    it would be picked); `fitted` scores are log-odds of being picked. `moe` sees the MoE input of
    layer target - distance; `stream` sees what the next layer's experts would see if its attention
    added nothing, which is known before that. Scores are kept as multiples of `score_step`.
    """

    method: str
    source: str
    distance: int
    score_step: float

    @property
    def name(self) -> str:
        """For tables and options, as `gate.moe.1`."""
        return f"{self.method}.{self.source}.{self.distance}"


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What holds for a whole file. `identity` is the checkpoint's (`protocol.identity`);
    `expert_bytes` are one expert's in the shards, `slots` the cache of the run; a predictor names
    `width` experts for each token of a pass, at most all of them."""

    identity: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    expert_bytes: int
    slots: int
    width: int
    predictors: tuple[Predictor, ...]

    def named(self, tokens: int) -> int:
        """How many experts a predictor names in a pass over `tokens` tokens."""
        return min(self.width * tokens, self.experts)


@dataclass(frozen=True, slots=True)
class Step:
    """One pass over T `tokens` from position `start` of a sequence; T is 1 in decode.

    `picks` [L, T, k] by falling score, their `weights`, and whether each was `resident` when its
    layer was routed. `predicted` [P, L, n] are experts of that target layer, best first, with
    `scores` float32 [P, L, n], NaN where nothing was said (the first layers have none before them).
    `seconds` float32 [L, 3]: up to routing, from there on without waiting, and waiting for experts;
    what recording took is in none of them.
    """

    step: int
    start: int
    picks: Ints
    weights: Floats
    resident: Bools
    predicted: Ints
    scores: Floats
    seconds: Floats

    @property
    def tokens(self) -> int:
        return int(self.picks.shape[1])


class _Writer:
    """A file of this module's outer form: prefix, JSON header, blocks with checksums."""

    def __init__(self, path: Path, kind: str, header: TraceHeader) -> None:
        """Makes or empties `path`, readable by its owner alone. Raises ResourceError."""
        self.header = header
        self._path = path
        text = json.dumps({"kind": kind, **asdict(header)}).encode()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._file: BinaryIO = open(descriptor, "wb", buffering=0)  # noqa: SIM115 - in close
            self._file.write(_PREFIX.pack(MAGIC, VERSION, len(text)) + text)
        except OSError as error:
            raise ResourceError(f"{path}: cannot be written ({error.strerror})") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Safe to call twice."""
        self._file.close()

    def _write_block(self, payload: bytes) -> None:
        """Raises ResourceError; what was whole before stays readable."""
        block = memoryview(_BLOCK.pack(len(payload), zlib.crc32(payload)) + payload)
        try:
            while block:
                block = block[self._file.write(block) :]
        except OSError as error:
            raise ResourceError(f"{self._path}: cannot be written ({error.strerror})") from None


class RouteTraceWriter(_Writer):
    """Writes a trace, a block a step."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        super().__init__(path, ROUTES, header)

    def write(self, step: Step) -> None:
        """Append `step`. Raises ResourceError."""
        parts = [
            step.picks.astype(_id_type(self.header)),
            step.weights.astype("<f2"),
            np.packbits(step.resident),
            step.predicted.astype(_id_type(self.header)),
            self._quantized(step.scores),
            np.rint(step.seconds * 1e6).clip(0, 2**32 - 1).astype("<u4"),
        ]
        fixed = _STEP.pack(step.step, step.start, step.tokens)
        self._write_block(zlib.compress(fixed + b"".join(part.tobytes() for part in parts), 6))

    def _quantized(self, scores: Floats) -> npt.NDArray[np.int8]:
        units = np.rint(scores / _score_steps(self.header)).clip(NO_SCORE + 1, 127)
        return np.where(np.isnan(units), NO_SCORE, units).astype(np.int8)


class InputsWriter(_Writer):
    """Writes activations, a block a step and layer."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        super().__init__(path, INPUTS, header)

    def write(self, step: int, layer: int, stream: Halves, moe: Halves) -> None:
        """Append [T, hidden]: `layer`'s MoE input foreseen before its attention, and as it was."""
        payload = _LAYER.pack(step, layer, len(moe)) + stream.tobytes() + moe.tobytes()
        self._write_block(payload)


class _Reader:
    """Checks the outer form. `cut_short` holds once the end was met inside a block."""

    KIND = ""

    def __init__(self, path: Path) -> None:
        """Raises UsageError for what is no such file."""
        self.path = path
        self.cut_short = False
        require_file(path, UsageError)
        try:
            with path.open("rb") as file:
                self.header, self._begin = self._read_header(file)
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror})") from None

    def refused(self, why: str) -> UsageError:
        """The one line about a malformed file."""
        return UsageError(f"{self.path}: {why}; record it again")

    def _read_header(self, file: BinaryIO) -> tuple[TraceHeader, int]:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size or prefix[:8] != MAGIC:
            raise UsageError(f"{self.path}: is no route trace; record one with --route-trace")
        _, version, length = _PREFIX.unpack(prefix)
        if version != VERSION:
            raise self.refused(f"is of version {version}, this program reads version {VERSION}")
        text = file.read(length) if length <= MAX_HEADER_BYTES else b""
        if len(text) != length:
            raise self.refused("has a header that is cut short")
        try:
            fields = json.loads(text)
            kind = fields.pop("kind")
            predictors = tuple(Predictor(**item) for item in fields.pop("predictors"))
            header = TraceHeader(**fields, predictors=predictors)
            sound = _sound(header)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            raise self.refused("has a header without the fields of a route trace") from None
        if not sound:
            raise self.refused("has a header with senseless figures")
        if kind != self.KIND:
            raise UsageError(f"{self.path}: holds {kind}, expected {self.KIND}")
        return header, _PREFIX.size + length

    def _blocks(self) -> Iterator[tuple[int, bytes]]:
        """(offset, payload) of every whole block."""
        with self.path.open("rb") as file:
            file.seek(self._begin)
            while prefix := file.read(_BLOCK.size):
                at = file.tell() - len(prefix)
                length, checksum = _BLOCK.unpack(prefix.ljust(_BLOCK.size, b"\0"))
                if len(prefix) == _BLOCK.size and length > MAX_BLOCK_BYTES:
                    raise self.refused(f"has a senseless block length at offset {at}")
                payload = file.read(length)
                if len(prefix) < _BLOCK.size or len(payload) < length:
                    self.cut_short = True
                    return
                if zlib.crc32(payload) != checksum:
                    raise self.refused(f"has a damaged block at offset {at}")
                yield at, payload


class RouteTrace(_Reader):
    """A trace file: `header`, and its steps by iteration, as often as wanted."""

    KIND = ROUTES

    def __iter__(self) -> Iterator[Step]:
        """Every whole step in the order recorded. Raises UsageError for a malformed block."""
        for at, payload in self._blocks():
            try:
                inflater = zlib.decompressobj()
                raw = inflater.decompress(payload, MAX_BLOCK_BYTES)
                yield self._step(raw)
            except (zlib.error, struct.error, ValueError):
                raise self.refused(f"has a block at offset {at} that is no step") from None

    def _step(self, raw: bytes) -> Step:
        """Raises ValueError or struct.error."""
        header = self.header
        number, start, tokens = _STEP.unpack_from(raw)
        if not 1 <= tokens <= MAX_TOKENS:
            raise ValueError
        layers, predictors = header.layers, len(header.predictors)
        picked = (layers, tokens, header.top_k)
        named = (predictors, layers, header.named(tokens))
        ids = _id_type(header)
        position = _STEP.size

        def take(kind: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
            nonlocal position
            count = math.prod(shape)
            array = np.frombuffer(raw, kind, count, position).reshape(shape)
            position += array.nbytes
            return array

        picks, weights = take(ids, picked), take("<f2", picked)
        bits = np.unpackbits(take("u1", (-(-math.prod(picked) // 8),)), count=math.prod(picked))
        predicted, units = take(ids, named), take("i1", named)
        seconds = take("<u4", (layers, 3))
        if position != len(raw) or max(picks.max(), predicted.max(initial=0)) >= header.experts:
            raise ValueError
        scores = np.where(units == NO_SCORE, np.nan, units * _score_steps(header))
        return Step(
            number,
            start,
            picks.astype(np.int64),
            weights.astype(np.float32),
            bits.reshape(picked).astype(np.bool_),
            predicted.astype(np.int64),
            scores.astype(np.float32),
            seconds.astype(np.float32) / np.float32(1e6),
        )


class InputsTrace(_Reader):
    """An activations file, read a layer at a time."""

    KIND = INPUTS

    def __init__(self, path: Path) -> None:
        """Checks every block once. Raises UsageError."""
        super().__init__(path)
        row = 2 * self.header.hidden
        steps: dict[int, dict[int, tuple[int, int]]] = {}
        for at, payload in self._blocks():
            if len(payload) < _LAYER.size:
                raise self.refused(f"has a block at offset {at} that is no layer's")
            step, layer, tokens = _LAYER.unpack_from(payload)
            if layer >= self.header.layers or len(payload) != _LAYER.size + 2 * tokens * row:
                raise self.refused(f"has a block at offset {at} that is no layer's")
            steps.setdefault(step, {})[layer] = (at + _BLOCK.size + _LAYER.size, tokens)
        # A pass that failed or was cut short has its first layers only.
        self._steps = [places for places in steps.values() if len(places) == self.header.layers]

    @property
    def tokens(self) -> int:
        """How many tokens have all their layers."""
        return sum(places[0][1] for places in self._steps)

    def layer(self, layer: int) -> tuple[Halves, Halves]:
        """float16 [tokens, hidden]: `layer`'s MoE input foreseen before its attention, and as it
        was."""
        hidden = self.header.hidden
        streams, moes = [], []
        with self.path.open("rb") as file:
            for at, tokens in (places[layer] for places in self._steps):
                file.seek(at)
                both = np.frombuffer(file.read(4 * tokens * hidden), "<f2")
                both = both.reshape(2, tokens, hidden)
                streams.append(both[0])
                moes.append(both[1])
        empty = np.empty((0, hidden), np.float16)
        return np.concatenate([empty, *streams]), np.concatenate([empty, *moes])


def inputs_path(trace: Path) -> Path:
    """Where the activations of the trace at `trace` lie."""
    return trace.with_name(trace.name + ".inputs")


def _id_type(header: TraceHeader) -> str:
    return "u1" if header.experts <= 256 else "<u2"


def _score_steps(header: TraceHeader) -> Floats:
    steps = [predictor.score_step for predictor in header.predictors]
    return np.array(steps, np.float32).reshape(-1, 1, 1)


def _sound(header: TraceHeader) -> bool:
    figures = (header.layers, header.experts, header.top_k, header.hidden, header.expert_bytes)
    return (
        isinstance(header.identity, str)
        and all(type(figure) is int and figure > 0 for figure in figures)
        and all(type(figure) is int and figure >= 0 for figure in (header.slots, header.width))
        and header.top_k <= header.experts <= 1 << 16
        and header.layers <= 1 << 10
        and len(header.predictors) <= 64
        and all(
            item.method in METHODS
            and item.source in SOURCES
            and type(item.distance) is int
            and 1 <= item.distance <= header.layers
            and 0 < float(item.score_step) < math.inf
            for item in header.predictors
        )
    )
