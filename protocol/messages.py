"""Every message two Headrace processes exchange, and nothing else.

Each is data without behaviour. Direction and the answer it gets stand in its docstring; a message
called a *hint* may be dropped and is counted where that happens, any other is an *order* and is
answered. Layers, experts and slots are indices from 0; times are seconds; sizes are bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.errors import FailureKind
from protocol.wire import Message, message

# Expert lanes, most urgent first. A read order carries one for traces and counters.
URGENT, PREDICTED, BACKGROUND = 0, 1, 2
LANE_NAMES = ("urgent", "predicted", "background")

# Most alternatives that one token can be reported with.
MAX_LOGPROBS = 20

# A prompt of 1,048,576 tokens, five bytes each, and the request's other fields.
LARGE = 8 << 20


# --- every child <-> supervisor (control endpoint) ------------------------------------------------


@message(1)
@dataclass(frozen=True, slots=True)
class Hello(Message):
    """Child -> supervisor: the process runs and reached the control socket. `incarnation` counts
    the starts of this name from 0."""

    process: str
    pid: int
    incarnation: int


@message(2)
@dataclass(frozen=True, slots=True)
class Loading(Message):
    """Child -> supervisor, hint: how far the start has come, `fraction` from 0 to 1."""

    process: str
    what: str
    fraction: float


@message(3)
@dataclass(frozen=True, slots=True)
class Ready(Message):
    """Child -> supervisor: the process serves. `facts` are one-line findings for the summary
    (for example whether O_DIRECT is used)."""

    process: str
    facts: dict[str, str]


@message(4)
@dataclass(frozen=True, slots=True)
class Stop(Message):
    """Supervisor -> child: end now, in order, within a second."""


@message(5)
@dataclass(frozen=True, slots=True)
class StatsRequest(Message):
    """Supervisor -> child; answered by StatsReply with the same `request`."""

    request: int


@message(6)
@dataclass(frozen=True, slots=True)
class StatsReply(Message):
    """Child -> supervisor: counters since the process started (`protocol.counters`)."""

    request: int
    process: str
    counters: dict[str, float]


@message(7)
@dataclass(frozen=True, slots=True)
class TraceStart(Message):
    """Supervisor -> child: write trace events to `path` (in the runtime directory) from now on."""

    path: str


@message(8)
@dataclass(frozen=True, slots=True)
class TraceStop(Message):
    """Supervisor -> child: flush and close the trace; answered by TraceStopped."""


@message(9)
@dataclass(frozen=True, slots=True)
class TraceStopped(Message):
    """Child -> supervisor: the file of the last TraceStart is complete."""

    process: str


@message(10)
@dataclass(frozen=True, slots=True)
class ReaderStuck(Message):
    """Expert service -> supervisor: this incarnation of a reader holds an order past its bound;
    kill and replace it."""

    reader: int
    incarnation: int
    seconds: float


# --- supervisor <-> compute (control endpoint) ----------------------------------------------------


@message(20, LARGE)
@dataclass(frozen=True, slots=True)
class Generate(Message):
    """Supervisor -> compute: continue `prompt` (token ids). Answered by TokenEvents, then Finished.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. `logprobs` is how many
    alternatives to report a token, None for none at all. `stop` are strings that end the text and
    are not part of it.
    """

    request: int
    prompt: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: list[str]
    ignore_eos: bool
    frequency_penalty: float
    presence_penalty: float
    logprobs: int | None


@message(21)
@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Supervisor -> compute: end this request after the token or chunk at hand; answered by
    Finished with reason `cancelled`. Unknown requests are ignored."""

    request: int


@message(22)
@dataclass(frozen=True, slots=True)
class PrefillProgress(Message):
    """Compute -> supervisor, hint: `done` of `total` prompt tokens are computed; `reused` of them
    came from a kept sequence state."""

    request: int
    done: int
    total: int
    reused: int


@message(23)
@dataclass(frozen=True, slots=True)
class TokenEvent(Message):
    """Compute -> supervisor: one sampled token.

    `text` is what became certain with it: it may be empty (half a character, or the start of a stop
    string) and may hold text of earlier tokens. `logprob` is None unless asked for; `top_ids` and
    `top_logprobs` are the alternatives, best first.
    """

    request: int
    token: int
    text: str
    logprob: float | None
    top_ids: list[int]
    top_logprobs: list[float]


@message(24)
@dataclass(frozen=True, slots=True)
class Finished(Message):
    """Compute -> supervisor: the request is over.

    `reason`: `stop` (end of sequence or stop string), `length`, `cancelled`, `error` (`error` says
    what, in one line, and `failure` of which kind it is). `text` is text still held back. `figures`
    are this request's, in the words of `protocol.counters`, times in seconds.
    """

    request: int
    reason: str
    text: str
    error: str
    failure: FailureKind
    prompt_tokens: int
    reused_tokens: int
    tokens: int
    figures: dict[str, float]


# --- compute <-> expert service (experts endpoint) ------------------------------------------------


@message(40)
@dataclass(frozen=True, slots=True)
class Demand(Message):
    """Compute -> expert service, order: `experts` of `layer` are needed now.

    Answered by Landed for every expert (those already resident at once) or DemandFailed. They are
    not evicted until compute's progress page says `demand_done >= demand`. Sending the same
    demand again is harmless: only what has not been answered is answered.
    """

    demand: int
    layer: int
    experts: list[int]


@message(41)
@dataclass(frozen=True, slots=True)
class Landed(Message):
    """Expert service -> compute: these experts of the demand are in the directory."""

    demand: int
    experts: list[int]


@message(42)
@dataclass(frozen=True, slots=True)
class DemandFailed(Message):
    """Expert service -> compute: one expert cannot be read; the request fails, the engine lives."""

    demand: int
    expert: int
    reason: str


@message(43)
@dataclass(frozen=True, slots=True)
class Hint(Message):
    """Compute -> expert service, hint: what `layer` picked in `step`, and what comes next.

    `picks` are all experts the layer uses (hits too: recency comes from here). `predicted` are
    experts of `predicted_layer`, best first, with `scores` (larger is likelier); both empty where
    nothing is predicted.
    """

    step: int
    layer: int
    picks: list[int]
    predicted_layer: int
    predicted: list[int]
    scores: list[float]


# --- expert service <-> readers (readers endpoint) ------------------------------------------------


@message(60)
@dataclass(frozen=True, slots=True)
class ReaderHello(Message):
    """Reader -> expert service: ready for orders. A higher incarnation means that the earlier
    process of this reader is dead, so its orders may be given out again."""

    reader: int
    incarnation: int
    pid: int


@message(61)
@dataclass(frozen=True, slots=True)
class ReadOrder(Message):
    """Expert service -> reader, order: preadv `length` bytes at `offset` of file number `file` to
    `arena_offset` of the arena, `step` bytes at a time. Answered by ReadDone, ReadFailed or, after
    a ReviseOrder, ReadStopped.

    Offsets, length and step are aligned for O_DIRECT. The file may end inside the last block: at
    least `needed` bytes have to come. `scales` are (begin, end) pairs of arena offsets of this read
    that hold e8m0 scales, where byte 255 (NaN) fails the read. Once the bytes are there, the word
    of `piece` of `slot` becomes `generation`. `lane`, `layer`, `expert` are for traces.
    """

    order: int
    file: int
    offset: int
    length: int
    needed: int
    step: int
    arena_offset: int
    scales: list[int]
    slot: int
    piece: int
    generation: int
    lane: int
    layer: int
    expert: int


@message(62)
@dataclass(frozen=True, slots=True)
class ReadDone(Message):
    """Reader -> expert service: the bytes of `order` are in the arena; asks for the next order."""

    reader: int
    incarnation: int
    order: int
    seconds: float


@message(63)
@dataclass(frozen=True, slots=True)
class ReadFailed(Message):
    """Reader -> expert service: `order` failed after the reader's retries; asks for the next."""

    reader: int
    incarnation: int
    order: int
    reason: str


@message(64)
@dataclass(frozen=True, slots=True)
class ReviseOrder(Message):
    """Expert service -> reader, hint: read no further step of `order` if `stop`, or else all that
    is left at once. After its last step it changes nothing."""

    order: int
    stop: bool


@message(65)
@dataclass(frozen=True, slots=True)
class ReadStopped(Message):
    """Reader -> expert service: `order` ended after `nbytes`, as ReviseOrder asked; asks for
    the next."""

    reader: int
    incarnation: int
    order: int
    nbytes: int
    seconds: float


# --- compute <-> engram service (engram endpoint) -------------------------------------------------


@message(80, LARGE)
@dataclass(frozen=True, slots=True)
class EngramRequest(Message):
    """Compute -> engram service, order: rows for `tokens` at positions `start`, `start + 1`, …

    `history` are the tokens just before them, oldest first, as many as n-grams reach back (fewer at
    the start of a sequence). The rows go to ring block `ticket % blocks`; compute sends a ticket
    only when it no longer reads that block. Answered by EngramReady once for each engram layer, in
    layer order, or by EngramFailed. The same ticket again is answered again and read once.
    """

    ticket: int
    start: int
    tokens: list[int]
    history: list[int]


@message(81)
@dataclass(frozen=True, slots=True)
class EngramReady(Message):
    """Engram service -> compute: the rows of engram layer number `index` (0-based among the engram
    layers) are in the ring."""

    ticket: int
    index: int


@message(82)
@dataclass(frozen=True, slots=True)
class EngramFailed(Message):
    """Engram service -> compute: the rows cannot be read; the request fails, the engine lives."""

    ticket: int
    reason: str
