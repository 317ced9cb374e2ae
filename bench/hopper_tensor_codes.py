"""Measures the kernels that make FP8 codes with one scale (cuda/common/tensor_codes.cu) or with scales of blocks
(fp8_block_codes.cu) against a copy, on a GPU.

    python3 bench/hopper_tensor_codes.py [ROWSxCOLUMNS ...] [--precision fp8|fp8-block] [--rounds N] [--json FILE]

A matrix of BF16 is read for its largest magnitude and again for its codes, which are written in both orientations; with
scales of blocks it is read once. fp8-block measures activations, with blocks of 1 x 128, and weights, 128 x 128. Each
kernel's time is the profiler's, the median of the rounds, in two states of the L2 cache: "cold", after a buffer larger
than it has been filled, and "warm", as the kernels before left it. The copy moves as many bytes as the kernel reads and
writes together. The kernels are those of a plan of ``deepwell.compile``, on operands of their own.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

SIZES = ["8192x2048", "8192x8192"]
AMAX, CODES, BLOCKS = "quantize_tensor_amax", "quantize_tensor_codes", "fp8_block_codes"


def quantize_of(rows: int, columns: int, target: str, precision: str = "fp8", weight: bool = False):
    """Returns the operation that quantizes the input, or the weight, of a linear layer in both orientations."""
    import deepwell
    import torch

    device = "cuda" if target == "auto" else "cpu"
    features, batch = (rows, 136) if weight else (128, rows)
    model = torch.nn.Linear(columns, features, bias=False, device=device, dtype=torch.bfloat16)
    engine = deepwell.compile(
        model,
        precision=deepwell.PrecisionPolicy(precision, []),
        example_inputs=torch.randn(
            batch, columns, device=device, dtype=torch.bfloat16, requires_grad=True
        ),
        target=target,
    )
    for op in engine.compiled_ops:
        made = op.op in ("quantize_tensor", "quantize_tiles")
        if made and op.inputs[0][1] == (rows, columns):
            return op
    sys.exit(f"hopper_tensor_codes: the plan does not quantize {rows} x {columns}")


def times_of(events, name: str) -> list[float]:
    """Returns the microseconds of the kernels or copies whose name contains `name`, in order."""
    import torch

    return [
        event.device_time
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and name in event.name
    ]


def profiled(function):
    import torch
    from torch.profiler import ProfilerActivity

    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    return profiler.events()


def measure(rows: int, columns: int, rounds: int, precision: str) -> dict:
    """Returns the times of each kernel, and of a copy of as many bytes as it reads and writes together."""
    import torch

    read = 2 * rows * columns
    if precision == "fp8":
        op = quantize_of(rows, columns, "auto")
        kernels = [(AMAX, "", op, read), (CODES, "", op, 2 * read)]
    else:
        kernels = [
            (BLOCKS, f" of {what}", quantize_of(rows, columns, "auto", precision, weight), 2 * read)
            for what, weight in (("activations", False), ("weights", True))
        ]
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    figures = {"rows": rows, "columns": columns, "precision": precision}
    for state in ("cold", "warm"):
        for name, suffix, op, moved in kernels:

            def run() -> None:
                for _ in range(rounds):
                    if state == "cold":
                        flush.fill_(1)
                    op.backend_op()

            run()
            found = times_of(profiled(run), name)
            us = statistics.median(found)
            figures[f"{name}{suffix} {state}"] = {
                "us": us,
                "tb_s": moved / us / 1e6,
                "calls": len(found),
            }
    for moved in sorted({moved for *_, moved in kernels}):
        source = torch.ones(moved // 2, dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)

        def copy() -> None:
            for _ in range(rounds):
                flush.fill_(1)
                target.copy_(source)

        copy()
        us = statistics.median(times_of(profiled(copy), "Memcpy DtoD"))
        figures[f"copy of {moved >> 20} MiB read and written"] = {
            "us": us,
            "tb_s": moved / us / 1e6,
        }
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", default=SIZES, metavar="ROWSxCOLUMNS")
    parser.add_argument("--precision", choices=("fp8", "fp8-block"), default="fp8")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    import torch

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results = []
    for size in options.sizes:
        rows, columns = map(int, size.split("x"))
        results.append(measure(rows, columns, options.rounds, options.precision))
        print(f"{rows} x {columns}, BF16")
        for name, figure in results[-1].items():
            if isinstance(figure, dict):
                print(f"  {name:55} {figure['us']:8.1f} us  {figure['tb_s']:.2f} TB/s")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
