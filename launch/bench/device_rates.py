"""What a device gives at best: the rates that a floor is made from, and where its time went."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_ROUNDS = 9
# Far beyond the caches, and a fraction of a second on a CPU.
_CPU_BYTES = 256 << 20
_GPU_SIDE, _CPU_SIDE = 8192, 1024


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_rate(device: torch.device) -> float:
    """Bytes/s of reading memory: by a kernel that only reads on a GPU, by torch's sum on a CPU."""
    if device.type == "cuda":
        # Triton need not be installed where no GPU is.
        from compute.kernels.bandwidth import read_bandwidth

        return read_bandwidth(device) * 1e9
    source = torch.ones(_CPU_BYTES // 8, dtype=torch.int64)
    return source.nbytes / _seconds(device, source.sum)


def product_rate(device: torch.device) -> float:
    """Operations/s of a large square product through torch: bf16 on a GPU, fp32 on a CPU."""
    on_gpu = device.type == "cuda"
    side, dtype = (_GPU_SIDE, torch.bfloat16) if on_gpu else (_CPU_SIDE, torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * side**3 / _seconds(device, lambda: torch.mm(left, right, out=out))


def kernel_table(seen: torch.profiler.profile) -> list[dict[str, Any]]:
    """The device's time by kernel, longest first: `kernel`, `calls`, `us` and `share` of all."""
    rows = [
        {"kernel": of.key, "calls": of.count, "us": of.self_device_time_total}
        for of in seen.key_averages()
        if of.device_type.name == "CUDA" and of.self_device_time_total
    ]
    rows.sort(key=lambda row: -row["us"])
    every = sum(row["us"] for row in rows)
    return [row | {"share": row["us"] / every} for row in rows]


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median of a few runs after a warm one."""
    times = []
    for _ in range(_ROUNDS + 1):
        synchronize(device)
        begin = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])
