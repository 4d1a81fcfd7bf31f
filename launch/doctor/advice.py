"""From facts to advice: options, the speed that bytes allow and what binds it, and what to mend.

Pure arithmetic over what was found and measured. The estimate counts bytes; it is no promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from launch.check import Findings
from launch.doctor.machine import NETWORK_FILE_SYSTEMS, Machine
from launch.doctor.measure import DiskSpeed, MemorySpeed
from launch.memory import RESERVE
from launch.options import format_size

# Of what is available, what a cache may take (as `launch.memory` does when the user names none).
SHARE = 0.8
# The share of experts found in memory against the share kept there. Uniform picks would find just
# that share. Another engine reports 70 % found with 13 % kept on the released model (36 GiB, FP4),
# which is this exponent.
LOCALITY = 0.175
# A step with every expert resident against the time its bytes take, as the engine this one follows
# reports it for a GPU.
ABOVE_FLOOR = 1.6
# A spinning disk makes no more single reads a second; virtual disks often say they spin.
SPINNING_READS_PER_S = 1000
FEW_CPUS = 4


@dataclass(frozen=True, slots=True)
class Warning:
    """Something that costs speed or stops the engine; `mend` is a command or an option."""

    what: str
    mend: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """Milliseconds a token: experts read from disk, engram rows read, experts copied to the GPU,
    and bytes taken through memory. `found` is the share of experts in memory."""

    found: float
    disk_ms: float
    engram_ms: float
    link_ms: float
    memory_ms: float

    @property
    def tokens_per_s(self) -> float:
        """With one after the other; what overlaps makes it more."""
        return 1000 / (self.disk_ms + self.engram_ms + self.link_ms + self.memory_ms)

    @property
    def binds(self) -> str:
        """What most of the time goes to."""
        parts = {
            "reading experts from disk": self.disk_ms,
            "reading engram rows": self.engram_ms,
            "copying experts to the GPU": self.link_ms,
            "memory bandwidth": self.memory_ms,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True, slots=True)
class Advice:
    """`cache_bytes` and `options` for `headrace serve`; `likely` with the locality that was seen
    elsewhere, `worst` with none."""

    device: str
    cache_bytes: int
    cache_share: float
    options: dict[str, str]
    likely: Estimate
    worst: Estimate
    warnings: tuple[Warning, ...]


def advise(
    checkpoint: Path,
    needs: Findings,
    machine: Machine,
    disk: DiskSpeed,
    memory: MemorySpeed,
    rows_per_token: int,
) -> Advice:
    """`rows_per_token` are the engram rows of all layers."""
    gpu = machine.gpu
    # bf16 on a GPU, fp32 on a CPU.
    dense = needs.dense_memory_cpu // (2 if gpu else 1)
    use_gpu = gpu is not None and dense < gpu.free
    host_dense = 0 if use_gpu else needs.dense_memory_cpu
    room = int((machine.available - host_dense - RESERVE) * SHARE)
    cache = max(needs.least_cache_bytes, min(room, needs.full_cache_bytes))
    share = min(1.0, cache / needs.full_cache_bytes)
    through_memory = dense if use_gpu else host_dense

    def estimate(found: float) -> Estimate:
        return _estimate(needs, disk, memory, rows_per_token, found, through_memory)

    options = {"cache": format_size(cache).replace(" ", ""), "readers": str(disk.best_readers)}
    if not disk.direct:
        options["buffered"] = ""
    if gpu is not None and not use_gpu:
        options["device"] = "cpu"
    warnings = _warnings(checkpoint, needs, machine, disk, cache, room)
    if gpu is not None and not use_gpu:
        warnings.append(
            Warning(
                f"the dense weights take {format_size(dense)}, of the GPU's memory "
                f"{format_size(gpu.free)} are free",
                "headrace serve DIR --device cpu, or stop what else uses the GPU (nvidia-smi)",
            )
        )
    return Advice(
        device="cuda" if use_gpu else "cpu",
        cache_bytes=cache,
        cache_share=share,
        options=options,
        likely=estimate(share**LOCALITY),
        worst=estimate(share),
        warnings=tuple(warnings),
    )


def _estimate(
    needs: Findings,
    disk: DiskSpeed,
    memory: MemorySpeed,
    rows_per_token: int,
    found: float,
    dense: int,
) -> Estimate:
    used = needs.layers * needs.experts_per_token * needs.expert_bytes
    # On a GPU experts cross the link to it; a CPU reads them where they lie.
    crossing = 1000 * used / memory.link if memory.link else 0.0
    return Estimate(
        found=found,
        disk_ms=1000 * used * (1 - found) / disk.bandwidth,
        engram_ms=1000 * rows_per_token / disk.rows_per_s,
        link_ms=crossing,
        memory_ms=ABOVE_FLOOR * 1000 * (dense + used) / memory.rate,
    )


def _warnings(
    checkpoint: Path,
    needs: Findings,
    machine: Machine,
    disk: DiskSpeed,
    cache: int,
    room: int,
) -> list[Warning]:
    found = [Warning(text, f"headrace check {checkpoint}") for text in needs.warnings]
    if room < needs.least_cache_bytes:
        found.append(
            Warning(
                f"{format_size(machine.available)} of memory are available; the smallest cache "
                f"takes {format_size(needs.least_cache_bytes)} beside the dense weights",
                _raise_memory(machine, needs.least_cache_bytes),
            )
        )
    if machine.available < machine.memory // 2:
        found.append(
            Warning(
                f"only {format_size(machine.available)} of {format_size(machine.memory)} may be "
                "used: by a control group, or because other programs hold the rest",
                "systemd-run --user -p MemoryMax=infinity headrace serve …, docker run --memory=…, "
                "or ps aux --sort=-rss | head",
            )
        )
    if machine.gpu is not None and machine.memlock is not None and machine.memlock < cache:
        found.append(
            Warning(
                f"RLIMIT_MEMLOCK is {format_size(machine.memlock)}, so the expert memory of "
                f"{format_size(cache)} cannot be pinned and copies to the GPU are slower",
                "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker: --ulimit memlock=-1",
            )
        )
    if machine.gpu_without_torch:
        found.append(
            Warning(
                f"there is an NVIDIA GPU, but torch {machine.torch} does not use it",
                "pip install torch --index-url https://download.pytorch.org/whl/cu128",
            )
        )
    if machine.cpus < min(FEW_CPUS, machine.cores):
        found.append(
            Warning(
                f"a control group allows {machine.cpus:g} of {machine.cores} CPUs for compute, "
                f"the services and {disk.best_readers} readers",
                "docker run --cpus=8, or systemd-run --user -p CPUQuota=800% headrace serve …",
            )
        )
    return found + _disk_warnings(checkpoint, machine, disk)


def _raise_memory(machine: Machine, need: int) -> str:
    if machine.available < machine.memory // 2:
        wanted = format_size(need + 2 * RESERVE).replace(" ", "")
        return f"give the process more: docker run --memory={wanted}, or end other programs"
    return "a machine with more memory; no option helps"


def _disk_warnings(checkpoint: Path, machine: Machine, disk: DiskSpeed) -> list[Warning]:
    found = []
    copy = f"rsync -a {checkpoint}/ /path/on/nvme/"
    if machine.file_system in NETWORK_FILE_SYSTEMS:
        found.append(
            Warning(f"the checkpoint is on a network file system ({machine.file_system})", copy)
        )
    if machine.rotating and disk.rows_per_s < SPINNING_READS_PER_S:
        found.append(Warning("the checkpoint is on a spinning disk", copy))
    if not disk.direct:
        found.append(
            Warning(
                f"{machine.file_system} does not take O_DIRECT reads, so experts pass through the "
                "page cache and push other files out of it",
                f"headrace serve DIR --buffered, or {copy} on ext4 or xfs",
            )
        )
    return found
