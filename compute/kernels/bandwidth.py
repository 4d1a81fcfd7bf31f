"""How fast the device reads its memory: what a step's bytes are divided by for its floor."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _read(source, out, count, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.int32)
    for at in tl.range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK, num_stages=4):
        offset = at + tl.arange(0, BLOCK)
        total += tl.load(source + offset, mask=offset < count, other=0)
    tl.store(out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


def read_bandwidth(device: torch.device, size: int = 8 << 30) -> float:
    """GB/s of a kernel that only reads `size` bytes of random numbers: the best of a few shapes."""
    count = size // 4
    source = torch.randint(0, 1 << 30, (count,), dtype=torch.int32, device=device)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    best = 0.0
    for programs, block in ((4, 4096), (8, 4096), (8, 2048)):
        programs *= processors
        out = torch.empty(programs * block, dtype=torch.int32, device=device)
        times: list[float] = []
        for _ in range(6):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            _read[(programs,)](source, out, count, BLOCK=block)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        # The first one compiles.
        best = max(best, source.nbytes / sorted(times[1:])[2] / 1e6)
    return best
