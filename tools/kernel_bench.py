"""Time every decode kernel at released widths, and a whole token of 40 layers as one CUDA graph.

Weights are random and rotate through more memory than the L2 holds. Prints a table a person can
read and writes the same figures to `--out` as JSON. `--sweep` times other tile shapes too; `--warm
I/N` only compiles the I-th of N shares of them, so that several processes can fill Triton's cache
first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton

from compute.kernels import dense, experts, launching, norms
from compute.kernels.bandwidth import read_bandwidth
from compute.kernels.dense import Tile
from compute.kernels.limbs import Limbs
from tools.kernel_token import DEVICE, Token, fp4, fp8

Launch = Callable[[], None]
ROTATED_BYTES = 400 << 20  # several times the 60 MB L2


def time_graph(body: Launch, repeats: int = 7) -> float:
    """Milliseconds of one replay of `body` captured as a graph: the median of `repeats`."""
    body()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def _copies(size: int) -> int:
    return max(2, -(-ROTATED_BYTES // size))


def _matvec_cases() -> dict[str, tuple[int, Callable[[dict[str, Any]], list[Launch]]]]:
    """By name: bytes one launch reads, and its launches over rotating weights under given
    options.
    """

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE).to(torch.bfloat16)

    def fp8_case(rows: int, columns: int, mode: str, groups: int = 1) -> tuple[int, Any]:
        size = rows * columns + rows * columns // 1024

        def launches(options: dict[str, Any]) -> list[Launch]:
            x = bf16(1, groups * columns)
            out = bf16(1, rows)
            if mode.startswith("split"):
                out = torch.empty(int(mode[5:]), 1, rows, device=DEVICE)
            streams, mix = bf16(1, 4, rows), torch.rand(1, 4, device=DEVICE)
            comb = torch.rand(1, 4, 4, device=DEVICE)
            made = []
            for _ in range(_copies(size)):
                w, s = fp8(rows, columns)
                if mode == "streams":
                    made.append(
                        lambda w=w, s=s: dense.fp8_matvec_to_streams(
                            x, w, s, streams, mix, comb, mix, out, **options
                        )
                    )
                else:
                    made.append(
                        lambda w=w, s=s: dense.fp8_matvec(
                            x, w, s, out, groups=groups, round_trip=mode == "rounded", **options
                        )
                    )
            return made

        return size, launches

    def bf16_case(rows: int, columns: int, splits: int) -> tuple[int, Any]:
        def launches(options: dict[str, Any]) -> list[Launch]:
            x, out = bf16(1, columns), torch.empty(splits, 1, rows, device=DEVICE)
            weights = [bf16(rows, columns) for _ in range(_copies(2 * rows * columns))]
            return [lambda w=w: dense.bf16_matvec(x, w, out, **options) for w in weights]

        return 2 * rows * columns, launches

    def shared_gate_up(options: dict[str, Any]) -> list[Launch]:
        x, out = bf16(1, 5120), bf16(1, 2304)
        weights = [(*fp8(2304, 5120), *fp8(2304, 5120)) for _ in range(20)]
        return [lambda w=w: dense.fp8_gate_up(x, *w, out, limit=10.0, **options) for w in weights]

    def routed(options: dict[str, Any], down: bool) -> list[Launch]:
        x, a = Limbs.empty(1, 5120, DEVICE), Limbs.empty(6, 2304, DEVICE)
        gated = bf16(6, 2304)
        norms.quantize(bf16(1, 5120), None, x)
        norms.quantize(gated, None, a)
        each = bf16(1, 6, 5120)
        keep = [[*fp4(2304, 5120), *fp4(2304, 5120), *fp4(5120, 2304)] for _ in range(48)]
        table = torch.tensor([[t.data_ptr() for t in e] for e in keep], device=DEVICE)
        tables = [table[i : i + 6].contiguous() for i in range(0, 48, 6)]
        made: list[Launch] = []
        for t in tables:
            if not down:
                made.append(
                    lambda t=t, k=keep: experts.experts_gate_up(
                        x, t, weights, gated, limit=10.0, **options
                    )
                )  # fmt: skip
            else:
                made.append(lambda t=t, k=keep: experts.experts_down(a, t, each, **options))
        return made

    weights = torch.rand(1, 6, device=DEVICE)
    matrix = 2304 * 5120 // 2 + 2304 * 160
    return {
        "wq_a+wkv": fp8_case(1792, 5120, "split5"),
        "wq_b": fp8_case(32768, 1280, "plain"),
        "wo_a": fp8_case(8192, 4096, "rounded", 8),
        "wo_b": fp8_case(5120, 8192, "streams"),
        "shared gate+up": (2 * 2304 * 5120, shared_gate_up),
        "shared down": fp8_case(5120, 2304, "plain"),
        "engram wkv": fp8_case(25600, 6144, "plain"),
        "router": bf16_case(384, 5120, 10),
        "head": bf16_case(129280, 5120, 1),
        "experts gate+up": (12 * matrix, lambda o: routed(o, False)),
        "experts down": (6 * matrix, lambda o: routed(o, True)),
    }


FP8_TILES = [
    Tile(32, 512, 8), Tile(32, 512, 16), Tile(32, 1024, 16), Tile(32, 1024, 8), Tile(8, 512, 1),
    Tile(4, 512, 1), Tile(8, 1024, 4), Tile(4, 1024, 1), Tile(16, 512, 4), Tile(16, 1024, 4),
    Tile(8, 2048, 4),
]  # fmt: skip
BF16_TILES = [
    Tile(32, 128, 2, 4), Tile(16, 128, 1, 4), Tile(16, 256, 2, 4), Tile(64, 128, 4, 4),
    Tile(32, 256, 2, 4), Tile(128, 64, 4, 5),
]  # fmt: skip
GATE_UP_TILES = [
    Tile(4, 128, 1, 1), Tile(8, 128, 1, 1), Tile(2, 128, 1, 1), Tile(8, 128, 2, 1),
    Tile(16, 128, 4, 1), Tile(16, 128, 2, 1),
]  # fmt: skip
DOWN_TILES = [
    Tile(8, 32, 1, 1), Tile(16, 32, 1, 1), Tile(4, 128, 1, 1), Tile(8, 64, 1, 1),
    Tile(16, 64, 2, 1), Tile(32, 32, 4, 1), Tile(2, 128, 1, 1),
]  # fmt: skip


def tiles_for(name: str) -> list[dict[str, Any]]:
    if name.startswith("experts"):
        tiles = GATE_UP_TILES if name.endswith("up") else DOWN_TILES
    else:
        tiles = BF16_TILES if name in ("router", "head") else FP8_TILES
    if name in ("wo_a", "shared gate+up"):  # their rounding takes whole groups of 32 rows
        tiles = [tile for tile in tiles if tile.rows == 32]
    return [{"tile": tile} for tile in tiles]


def _run(launches: list[Launch]) -> None:
    for launch in launches:
        launch()


def sweep(warm: tuple[int, int] | None, only_default: bool) -> dict[str, list[dict[str, Any]]]:
    results: dict[str, list[dict[str, Any]]] = {}
    for name, (size, make) in _matvec_cases().items():
        rows = []
        options_list: list[dict[str, Any]] = [{}] if only_default else tiles_for(name)
        if warm is not None:
            options_list = options_list[warm[0] :: warm[1]]
        options: dict[str, Any] = {}
        for options in options_list:
            try:
                launches = make(options)
                if warm is not None:
                    launches[0]()
                    continue
                us = {}
                for mode in ("plain", "dependent"):
                    launching.set_dependent_launches(mode == "dependent")
                    us[mode] = time_graph(lambda ls=launches: _run(ls)) / len(launches) * 1e3
                rows.append({"options": str(options), "chosen": options, "bytes": size, **us})
            except Exception as error:  # a tile that does not fit ends this row, not the table
                rows.append({"options": str(options), "error": str(error)[:100]})
                torch.cuda.synchronize()
        results[name] = sorted(rows, key=lambda row: row.get("plain", 1e9))
        for row in results[name][:5]:
            if "error" in row:
                print(f"  {name:18s} {row['options']} {row['error']}")
                continue
            speed = size / row["plain"] / 1e3
            print(
                f"{name:18s} {size / 1e6:7.1f} MB {row['plain']:7.2f} us plain "
                f"{row['dependent']:7.2f} us dependent {speed:6.0f} GB/s  {row['options']}",
                flush=True,
            )
        torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("kernel_bench.json"))
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--warm", metavar="I/N")
    options = parser.parse_args()
    if options.warm:
        index, count = map(int, options.warm.split("/"))
        sweep((index, count), False)
        return
    begin = time.monotonic()
    figures: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "read_gb_s": read_bandwidth(DEVICE),
    }
    print({k: v for k, v in figures.items()}, flush=True)
    torch.cuda.empty_cache()
    figures["kernels"] = sweep(None, not options.sweep)
    print(f"-- kernels done after {time.monotonic() - begin:.0f} s", flush=True)
    best = {name: rows[0]["chosen"] for name, rows in figures["kernels"].items()}
    token = Token(40, {name: options for name, options in best.items()})
    figures["token_bytes"] = token.bytes
    figures["token"] = {}
    floor = token.bytes / figures["read_gb_s"] / 1e6
    print(f"token: {token.bytes / 1e9:.2f} GB, floor {floor:.3f} ms")
    for dependent, side in itertools.product((False, True), repeat=2):
        launching.set_dependent_launches(dependent)
        name = f"dependent={dependent} side={side}"
        try:
            ms = time_graph(lambda s=side: token.step(s))
        except Exception as error:
            print(name, str(error)[:300])
            torch.cuda.synchronize()
            continue
        figures["token"][name] = ms
        print(
            f"{name}: {ms:.3f} ms, {ms / floor:.2f} x floor, {token.launches} launches", flush=True
        )
    figures["parts"] = {}
    launching.set_dependent_launches(False)
    for part, body in token.parts().items():
        figures["parts"][part] = ms = time_graph(body)
        print(f"  {part:24s} {ms:.3f} ms a token by itself", flush=True)
    options.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
