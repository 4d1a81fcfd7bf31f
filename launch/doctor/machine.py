"""What this machine has, read from the kernel and from torch; nothing is measured here."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

from launch.memory import available_memory
from launch.options import on_gpu

NETWORK_FILE_SYSTEMS = frozenset(("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph"))


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA device as torch sees it; sizes in bytes."""

    name: str
    memory: int
    free: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Sizes in bytes. `available` counts control groups in; `cpus` may be less than `cores` where a
    control group limits them. `memlock` None is no limit."""

    system: str
    torch: str
    cores: int
    cpus: float
    memory: int
    available: int
    memlock: int | None
    gpu: Gpu | None
    gpu_without_torch: bool
    file_system: str
    rotating: bool


def look(checkpoint: Path) -> Machine:
    """This machine, with the disk that `checkpoint` is on."""
    # Seconds to load, which no other command should wait for.
    import torch

    memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    gpu = _gpu()
    return Machine(
        system=f"{platform.system()} {platform.release()}, {platform.machine()}",
        torch=torch.__version__,
        cores=len(os.sched_getaffinity(0)),
        cpus=_cpu_quota(len(os.sched_getaffinity(0))),
        memory=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available=available_memory(),
        memlock=None if memlock == resource.RLIM_INFINITY or os.geteuid() == 0 else memlock,
        gpu=gpu,
        gpu_without_torch=gpu is None and on_gpu("auto"),
        file_system=_file_system(checkpoint.resolve()),
        rotating=_rotates(checkpoint),
    )


def _gpu() -> Gpu | None:
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return Gpu(torch.cuda.get_device_name(), total, free)


def _cpu_quota(cores: int) -> float:
    """CPUs that control group v2 gives this process's group, at most `cores`."""
    try:
        inside = Path("/proc/self/cgroup").read_text().split("::", 1)[1].strip()
        allowed, period = Path(f"/sys/fs/cgroup{inside}/cpu.max").read_text().split()
        return min(cores, int(allowed) / int(period))
    except (OSError, IndexError, ValueError):
        return cores  # no such limit, or the word "max"


def _file_system(path: Path) -> str:
    """The type of the file system that holds `path`: the longest mount point above it."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, found, *_ = line.split()
        mount = mount.replace("\\040", " ")
        above = path == Path(mount) or path.is_relative_to(mount)
        if above and len(mount) >= len(best):
            best, kind = mount, found
    return kind


def _rotates(path: Path) -> bool:
    """Whether the block device under `path` says that it is a spinning disk."""
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    for directory in (block, block.parent, block.resolve().parent):
        try:
            return (directory / "queue" / "rotational").read_text().strip() == "1"
        except OSError:
            continue
    return False
