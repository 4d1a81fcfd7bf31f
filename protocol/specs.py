"""What the supervisor tells each child at its start, through an inherited pipe.

Everything a child needs is here, so that its command line names its module, a descriptor and its
parent, and nothing secret or long stands in a process list. Descriptors named `*_fd` are inherited.
"""

from __future__ import annotations

from dataclasses import dataclass

from protocol.wire import Message, message


def reader_name(reader: int) -> str:
    """The process name of reader number `reader`, and what its sockets are called."""
    return f"reader-{reader}"


@message(100)
@dataclass(frozen=True, slots=True)
class ReaderSpec(Message):
    """`files` are the shards a ReadOrder's `file` counts in. `direct` asks for O_DIRECT where the
    file system takes it. The remaining fields are for developers and tests, 0 or "" in use:
    `bandwidth` (bytes/s of the whole emulated disk, split among `readers`) and `latency` (seconds a
    read) slow reads down; `faults` is a `protocol.faults` description of what to break.
    `busy_poll` seconds after an order that matters to a token the next one is looked for without
    sleeping (0: never; `protocol.busy_poll` decides, for all processes alike), in
    `early_orders_fd`, too."""

    reader: int
    incarnation: int
    readers: int
    control: str
    orders: str
    files: list[str]
    arena_fd: int
    early_orders_fd: int
    direct: bool
    busy_poll: float
    bandwidth: float
    latency: float
    faults: str
    trace: str


@message(101, 1 << 20)
@dataclass(frozen=True, slots=True)
class ExpertServiceSpec(Message):
    """`experts` and `readers_endpoint` are bound by the service. `pack` is a packed copy of the
    experts that is read instead of the shards ("": none). `piece_bytes` bounds one read order.
    `predicted_in_flight` bounds predicted experts being read at once (0: no prefetch). `reserve`
    free slots are kept. `order_timeout` seconds without an answer make a reader stuck. `policy`
    names an eviction policy; `seed` is for its random choices. `warm_experts` are read in the
    background at the start, as `layer << 16 | expert`, hottest first; `pinned`, written the same
    way, before them, and those stay. `warm_dir` is where the hot experts are kept for the next
    start ("": nowhere). `busy_poll` seconds after compute has said something, messages are looked
    for without sleeping (0: never)."""

    control: str
    experts: str
    readers_endpoint: str
    checkpoint: str
    pack: str
    readers: int
    arena_fd: int
    directory_fd: int
    progress_fd: int
    early_orders_fd: int
    piece_bytes: int
    predicted_in_flight: int
    reserve: int
    order_timeout: float
    busy_poll: float
    policy: str
    seed: int
    warm_experts: list[int]
    pinned: list[int]
    warm_dir: str
    trace: str


@message(102)
@dataclass(frozen=True, slots=True)
class EngramServiceSpec(Message):
    """`threads` read at once; `cache_bytes` bounds the hot rows kept. `latency`, `faults` and
    `busy_poll` (after a request) as in ReaderSpec."""

    control: str
    engram: str
    checkpoint: str
    ring_fd: int
    threads: int
    cache_bytes: int
    direct: bool
    busy_poll: float
    latency: float
    faults: str
    trace: str


# How a GPU launches decode steps; `compute.decode.assembly` has what each means.
GRAPHS = ("off", "on", "token", "oracle")


@message(103)
@dataclass(frozen=True, slots=True)
class ComputeSpec(Message):
    """`device` is a torch device or `auto`. `chunk_tokens` bounds one prefill chunk, `max_context`
    the tokens of a sequence, `kept_bytes` the sequence states kept for requests that begin alike
    (0: none); `snapshot_dir` keeps them on disk too, within `snapshot_bytes` ("": not at all).
    `predict` is how many experts of each of the next `predict_ahead` layers are published (0:
    none), with `predict_early` also of each layer before its attention. `stall_timeout` seconds
    bound every wait for experts or rows, and for its first `busy_poll` seconds it does not sleep.
    `threads` is torch's own count (0: its default).
    `verify_slots` compares slot generations around every use. `pin` registers the arena with a GPU,
    so that it is copied from without a detour. On a GPU `graphs` says how decode steps are launched
    (off, on, token, oracle), and `device_cache_bytes` how much device memory holds experts (0:
    none, the arena alone serves; -1: what is free). `route_trace` is where routes are recorded
    ("": not), `route_trace_inputs` whether activations are, beside it."""

    control: str
    experts: str
    engram: str
    checkpoint: str
    device: str
    arena_fd: int
    directory_fd: int
    progress_fd: int
    ring_fd: int
    chunk_tokens: int
    max_context: int
    kept_bytes: int
    snapshot_dir: str
    snapshot_bytes: int
    predict: int
    predict_ahead: int
    predict_early: bool
    stall_timeout: float
    busy_poll: float
    threads: int
    verify_slots: bool
    pin: bool
    graphs: str
    device_cache_bytes: int
    route_trace: str
    route_trace_inputs: bool
    trace: str


SPECS = (ReaderSpec, ExpertServiceSpec, EngramServiceSpec, ComputeSpec)
