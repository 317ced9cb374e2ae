"""Measures block quantization on an H100 or H200 against a copy that moves as many bytes.

    python bench/hopper_quantize.py FOLDER [--json FILE]

FOLDER has machine code of cuda/common/quantize.cu, made by `compare_machines ptx FOLDER -k quantize` and
`ptxas -arch=sm_90a NAME.ptx -o NAME.cubin`; nothing is compiled here. The figures are medians of 50 rounds in which the
candidates take turns, timed by events, over four inputs so that none stays in the cache.
"""

import argparse
import ctypes
import json
import statistics
import sys
from pathlib import Path

import torch

SCHEMES = {6: ("MXFP8 E4M3", 1.0, 32), 10: ("MXFP4", 0.5, 32), 11: ("NVFP4", 0.5, 16)}
SHAPES = [(8192, 8192), (4096, 11008), (16384, 2048)]
INPUTS, ROUNDS = 4, 50


class Quantized(ctypes.Structure):
    _fields_ = [
        ("codes", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        ("scales", ctypes.c_void_p),
    ]


class Params(ctypes.Structure):
    """dw_quantize_params (cuda/common/quantize_params.h)."""

    _fields_ = [
        ("source", ctypes.c_void_p),
        ("row_stride", ctypes.c_longlong),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("along_rows", Quantized),
        ("along_columns", Quantized),
        ("amax", ctypes.c_void_p),
        ("tensor_scale", ctypes.c_void_p),
    ]


cuda = ctypes.CDLL("libcuda.so.1")


def must(result: int) -> None:
    if result:
        sys.exit(f"hopper_quantize: CUDA error {result}")


def load(folder: Path, scheme: int, square: int):
    """Returns the kernel for BF16 and both directions, or None if the folder does not have it."""
    found = [
        path
        for path in sorted(folder.glob("quantize.sm_90a.*.cubin"))
        if {"INPUT=0", f"SCHEME={scheme}", f"SQUARE={square}", "ROWS=1", "COLUMNS=1"}
        <= set(path.stem.split("."))
    ]
    if not found:
        return None
    module, kernel = ctypes.c_void_p(), ctypes.c_void_p()
    must(cuda.cuModuleLoadData(ctypes.byref(module), found[0].read_bytes()))
    must(cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"quantize_blocks"))
    return kernel


def tiles(count: int) -> int:
    return (count + 127) // 128


class Direction:
    """The memory for one direction of the result."""

    def __init__(self, outer: int, inner: int, code_bytes: float, block: int):
        stride = (int(inner * code_bytes) + 15) // 16 * 16
        scale_columns = (inner + block - 1) // block
        self.codes = torch.empty(outer * stride, dtype=torch.uint8, device="cuda")
        self.scales = torch.empty(
            tiles(outer) * 128 * ((scale_columns + 3) // 4 * 4), dtype=torch.uint8, device="cuda"
        )
        self.argument = Quantized(self.codes.data_ptr(), stride, self.scales.data_ptr())


def launcher(kernel, source, directions, amax, tensor_scale):
    rows, columns = source.shape
    params = Params(
        source.data_ptr(),
        source.stride(0),
        rows,
        columns,
        directions[0].argument,
        directions[1].argument,
        amax.data_ptr(),
        tensor_scale.data_ptr(),
    )
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    grid = tiles(rows) * tiles(columns)

    def run():
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        must(cuda.cuLaunchKernel(kernel, grid, 1, 1, 256, 1, 1, 0, stream, pointers, None))

    run.keep = (params, pointers, directions)
    return run


def medians(candidates: dict) -> dict:
    """Returns microseconds of each candidate, a list of calls that cycle through its inputs."""
    times = {name: [] for name in candidates}
    for turn in range(ROUNDS + 5):
        for name, calls in candidates.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            call = calls[turn % len(calls)]
            torch.cuda._sleep(20000)  # the launch is in the queue before the clock starts
            begin.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 5:
                times[name].append(1000 * begin.elapsed_time(end))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(folder: Path, rows: int, columns: int) -> list:
    sources = [
        torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(INPUTS)
    ]
    amax = torch.stack([s.abs().max().float() for s in sources])
    tensor_scale = torch.empty(1, device="cuda")
    candidates, moved = {}, {}
    for scheme, (name, code_bytes, block) in SCHEMES.items():
        for square in (0, 1):
            kernel = load(folder, scheme, square)
            if kernel is None:
                continue
            label = name + (" square" if square else "")
            directions = [
                Direction(rows, columns, code_bytes, block),
                Direction(columns, rows, code_bytes, block),
            ]
            candidates[label] = [
                launcher(kernel, source, directions, amax[i : i + 1], tensor_scale)
                for i, source in enumerate(sources)
            ]
            moved[label] = 2 * rows * columns + sum(
                d.codes.numel() + d.scales.numel() for d in directions
            )
            # A copy of half as many bytes reads and writes as much.
            flat = [
                torch.empty(moved[label] // 2, dtype=torch.uint8, device="cuda")
                for _ in range(2 * INPUTS)
            ]
            candidates["copy for " + label] = [
                (lambda a=flat[2 * i], b=flat[2 * i + 1]: b.copy_(a)) for i in range(INPUTS)
            ]
    times = medians(candidates)
    return [
        {
            "rows": rows,
            "columns": columns,
            "scheme": label,
            "microseconds": round(times[label], 2),
            "copy_microseconds": round(times["copy for " + label], 2),
            "bytes": moved[label],
            "terabytes_per_second": round(moved[label] / times[label] / 1e6, 3),
        }
        for label in moved
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("folder", type=Path)
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    torch.cuda.init()
    torch.empty(1, device="cuda")
    results = [row for shape in SHAPES for row in measure(given.folder, *shape)]
    print(f"{'rows x columns':>16}  {'BF16 to':<18} {'us':>8} {'copy us':>8} {'TB/s':>6}")
    for r in results:
        print(
            f"{r['rows']:>7} x {r['columns']:<6}  {r['scheme']:<18} {r['microseconds']:8.1f}"
            f" {r['copy_microseconds']:8.1f} {r['terabytes_per_second']:6.2f}"
        )
    if given.json:
        made = {
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "rows": results,
        }
        given.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
