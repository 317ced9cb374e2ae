"""Measures the grouped GEMMs of a mixture of experts in BF16 and with FP8 codes, and the kernels that make the codes,
on a GPU.

    python3 bench/hopper_experts.py [SHAPE ...] [--rounds N] [--json FILE]

SHAPE is olmoe, mixtral or TOKENSxWIDTHxHIDDENxEXPERTSxTOP_K. A layer of ``deepwell.DeepwellMoE`` runs forward and
backward in each precision; each kernel's time is the profiler's, the median of the rounds, in the order in which
kernels run: GEMMs of rows in groups, those of the weights' gradients, and kernels of codes. "fp8" adds sums of 128
products in F32, "fp8-fast" keeps the forward's sums in the tensor cores. TFLOP/s counts the rows of all experts
together.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

SHAPES = {"olmoe": (8192, 2048, 1024, 64, 8), "mixtral": (4096, 4096, 14336, 8, 2)}
PRECISIONS = ("bf16", "fp8", "fp8-fast")
MEASURED = ("sm90_gemm", "quantize_tensor", "segment_linear")


def engine_of(shape: tuple[int, ...], precision: str, target: str = "auto"):
    """Returns the engine of a layer of experts, and an input."""
    import deepwell
    import torch

    tokens, width, hidden, experts, top_k = shape
    device = "cuda" if target == "auto" else "cpu"
    torch.manual_seed(0)
    model = deepwell.DeepwellMoE(width, hidden, num_experts=experts, top_k=top_k)
    model = model.to(device=device, dtype=torch.bfloat16)
    x = torch.randn(1, tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    policy = None
    if precision != "bf16":
        policy = deepwell.PrecisionPolicy("fp8", fast_accumulation=precision == "fp8-fast")
    kwargs = {} if policy is None else {"precision": policy}
    return deepwell.compile(model, example_inputs=x, target=target, **kwargs), x


def sequences(engine, x, rounds: int) -> list[list[tuple[str, float]]]:
    """Returns the measured kernels of each round, in order, with their microseconds."""
    import torch
    from torch.profiler import ProfilerActivity

    dy = torch.randn_like(x)
    found = []
    for round_ in range(rounds + 3):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
            engine(x).backward(dy)
            torch.cuda.synchronize()
        kernels = [
            event
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and any(name in event.name for name in MEASURED)
        ]
        kernels.sort(key=lambda event: event.time_range.start)
        if round_ >= 3:
            found.append([(event.name, event.device_time) for event in kernels])
    return found


def measure(shape: tuple[int, ...], precision: str, rounds: int) -> list[dict]:
    tokens, width, hidden, _, top_k = shape
    engine, x = engine_of(shape, precision)
    found = sequences(engine, x, rounds)
    names = [name for name, _ in found[0]]
    if any([name for name, _ in each] != names for each in found):
        sys.exit("hopper_experts: rounds ran different kernels")
    # SwiGLU: one matrix of gate and up, then one of down; backward has dx and dw of each in any order.
    flops = {
        "large": 4.0 * tokens * top_k * width * hidden,
        "small": 2.0 * tokens * top_k * width * hidden,
    }
    rows = []
    for i, name in enumerate(names):
        us = statistics.median(each[i][1] for each in found)
        rates = {size: count / us / 1e6 for size, count in flops.items()}
        rows.append({"kernel": name, "us": us, "tflops": rates if "gemm" in name else None})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    import torch

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results = {}
    for name in options.shapes:
        shape = SHAPES.get(name) or tuple(map(int, name.split("x")))
        for precision in PRECISIONS:
            rows = results[f"{name} {precision}"] = measure(shape, precision, options.rounds)
            print(f"{name} {shape}, {precision}: {sum(row['us'] for row in rows):.0f} us")
            for row in rows:
                rates = row["tflops"]
                told = (
                    f"{rates['large']:6.0f} TFLOP/s if gate and up, {rates['small']:.0f} if down"
                    if rates
                    else ""
                )
                print(f"  {row['kernel'][:40]:40} {row['us']:8.1f} us {told}")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
