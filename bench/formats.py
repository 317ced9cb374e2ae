"""Measures number formats against memcpy: F32 to blocks and back.

    python bench/formats.py [--rounds N] [--mib N] [--json FILE]

Quantizing counts the bytes of F32 that it reads, dequantizing the bytes of F32 that it writes, memcpy the bytes that it
copies, all with the same number of threads. All memory has been touched before. Ways are interleaved round by round, so
that drift of the machine affects all alike. The best round of each counts; the median is recorded too.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import datetime
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from deepwell import _deepwell, numbers

COLS = 4096
WAYS = (
    [(scheme, 1, "nearest") for scheme in numbers.SCHEMES]
    + [(scheme, 0, "nearest") for scheme in ("mxfp8", "nvfp4")]
    + [(scheme, 1, "stochastic") for scheme in ("mxfp8", "nvfp4")]
)


def copy_in(threads: int, to: torch.Tensor, source: torch.Tensor):
    """Copies with memcpy on this many threads (ctypes releases the GIL)."""
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    bytes_ = source.numel() * 4
    share = bytes_ // threads

    def copy(index: int) -> None:
        count = bytes_ - index * share if index == threads - 1 else share
        ctypes.memmove(to.data_ptr() + index * share, source.data_ptr() + index * share, count)

    return lambda: list(pool.map(copy, range(threads)))


def ways_of(source: torch.Tensor, result: torch.Tensor, threads: int) -> dict:
    """Returns functions without arguments by name; each processes source.numel() F32 numbers."""
    rows, cols = source.shape
    ways = {"memcpy": copy_in(threads, result, source)}
    for scheme, axis, rounding in WAYS:
        options = numbers._options(scheme, "default", False, axis, rounding, 1, 2, 3, 0.01)
        layout = _deepwell.block_layout(options, rows, cols)
        outer, _, row_bytes, scale_rows, scale_cols, _, scale = layout
        codes = torch.zeros(outer * row_bytes, dtype=torch.uint8)
        scales = torch.zeros(
            scale_rows * scale_cols * (4 if scale == "f32" else 1), dtype=torch.uint8
        )

        def quantize(options=options, codes=codes, scales=scales):
            _deepwell.block_quantize(
                options, rows, cols, source.data_ptr(), cols, codes.data_ptr(), 0, scales.data_ptr()
            )

        def dequantize(options=options, codes=codes, scales=scales):
            _deepwell.block_dequantize(
                options, rows, cols, codes.data_ptr(), 0, scales.data_ptr(), result.data_ptr(), cols
            )

        name = f"{scheme}, axis {axis}, {rounding}"
        ways[f"quantize {name}"] = quantize
        if rounding == "nearest":
            ways[f"dequantize {name}"] = dequantize
    return ways


def measure(source: torch.Tensor, result: torch.Tensor, threads: int, rounds: int) -> dict:
    _deepwell.set_threads(threads)
    ways = ways_of(source, result, threads)
    seconds: dict = {name: [] for name in ways}
    for run in ways.values():  # allocates the codes and touches all pages
        run()
    for _ in range(rounds):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    gigabytes = source.numel() * 4 / 1e9
    copied = gigabytes / min(seconds["memcpy"])
    return {
        name: {
            "gb_per_s": gigabytes / min(taken),
            "gb_per_s_median": gigabytes / statistics.median(taken),
            "of_memcpy": gigabytes / min(taken) / copied,
        }
        for name, taken in seconds.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--mib", type=int, default=128, help="of F32")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    source = torch.randn(arguments.mib * (1 << 20) // 4 // COLS, COLS)
    result = torch.zeros_like(source)
    machine = json.loads(_deepwell.machine())
    most = _deepwell.get_threads()
    report = {
        "machine": {
            "cpu": cpu_name(),
            "isa": machine["isa"],
            "threads": most,
            "load": os.getloadavg(),
        },
        "date": datetime.date.today().isoformat(),
        "shape": list(source.shape),
        "rounds": arguments.rounds,
        "counts": "F32 bytes read (quantize), written (dequantize), copied (memcpy)",
        "results": {},
    }
    for threads in sorted({1, most}):
        rows = measure(source, result, threads, arguments.rounds)
        report["results"][f"{threads} threads"] = rows
        print(f"{threads} thread(s), {arguments.mib} MiB of F32, load {os.getloadavg()[0]:.1f}")
        for name, row in rows.items():
            print(f"  {name:44} {row['gb_per_s']:6.2f} GB/s  {row['of_memcpy']:5.2f} of memcpy")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
