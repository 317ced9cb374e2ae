"""Measures a linear layer's forward product in FP8 with the quantization of its operands, on a GPU of Hopper.

    python3 bench/hopper_fp8_product.py [MxNxK ...] [--rounds N] [--json FILE]

The product y = x w^T with x m x k and w n x k, in BF16, and codes of both in the one orientation that it needs. Times are
the profiler's of all kernels of a call, medians of the rounds, in turns, each call after a buffer larger than the L2 cache
has been filled. Copies of operands to the GPU, which an operation of a plan begins with, do not count. Rates are those of the
product with the times of all quantization that the line names, in TFLOP/s. Three ways:

    tensor   one scale for each tensor, found in the call, and fast accumulation
    block    fp8-block: x in blocks of 1 x 128, w in blocks of 128 x 128
    torch    torch._scaled_mm with fast accumulation; quantization compiled by torch.compile

"in the GEMM before": the codes of x are made by the GEMM that computes x (dw_gemm_run with scheme_d fp8-block), a product
of m x k x k in BF16. Their time is the difference to the same GEMM that stores x.
"""

import argparse
import ctypes
import json
import statistics
import sys
from pathlib import Path

from hopper_gemm import Gemm, Matrix, library

SIZES = ["8192x8192x8192", "8192x8192x2048"]
FP8_BLOCK = 5  # DW_SCHEME_FP8_BLOCK


def operations(m: int, n: int, k: int, policy) -> dict:
    """Returns the plan's operations that quantize x and w and multiply them; neither gets a gradient."""
    import deepwell
    import torch

    layer = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    engine = deepwell.compile(
        layer.requires_grad_(False), precision=policy, example_inputs=x, target="auto"
    )
    found = {}
    for op in engine.compiled_ops:
        if op.op == "multiply_codes":
            found.setdefault("gemm", op)
        elif op.op in ("quantize_tensor", "quantize_tiles"):
            found.setdefault("x" if "x" not in found and op.inputs[0][1] == (m, k) else "w", op)
    if sorted(found) != ["gemm", "w", "x"]:
        sys.exit(f"hopper_fp8_product: the plan has {sorted(found)}; expected gemm, w and x")
    return found


class Before:
    """The GEMM that computes x, m x k, from BF16 operands: it stores x, or x's codes, or both."""

    def __init__(self, m: int, k: int) -> None:
        import torch

        def draw(*shape):
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        padded, blocks = -(-k // 32) * 32, -(-k // 128)
        self.dw = library()
        self.a, self.b, self.x = draw(m, k), draw(k, k), draw(m, k)
        self.codes = torch.empty(m, padded, device="cuda", dtype=torch.uint8)
        self.scales = torch.empty(blocks, m, device="cuda")
        bf16 = next(i for i in range(64) if self.dw.dw_dtype_name(i) == b"bf16")
        common = {
            "struct_size": ctypes.sizeof(Gemm), "dtype": bf16, "output": bf16, "m": m, "n": k, "k": k,
            "alpha": k**-0.5, "a": Matrix(self.a.data_ptr(), k), "b": Matrix(self.b.data_ptr(), k),
            "stream": torch.cuda.current_stream().cuda_stream,
        }  # fmt: skip
        x = Matrix(self.x.data_ptr(), k)
        self.plain = Gemm(**common, d=x)
        coded = {
            **common, "d": Matrix(self.codes.data_ptr(), padded), "quantized_d": 1, "scheme_d": FP8_BLOCK,
            "scales_d": self.scales.data_ptr(),
        }  # fmt: skip
        self.coded, self.both = Gemm(**coded), Gemm(**coded, plain_d=x)

    def run(self, call: Gemm) -> None:
        if self.dw.dw_gemm_run(ctypes.byref(call)) != 0:
            sys.exit(f"hopper_fp8_product: {self.dw.dw_last_error().decode()}")

    def check(self) -> None:
        """Compares the codes with those of the stored x, by their definition."""
        import torch

        self.run(self.both)
        m, k = self.x.shape
        if k % 128:
            return
        blocks = self.x.float().view(m, k // 128, 128)
        largest = blocks.abs().amax(2)
        scales = largest / torch.full_like(largest, 448)  # a number would be a factor 1 / 448
        codes = (blocks / scales[:, :, None]).view(m, k).to(torch.float8_e4m3fn)
        if not torch.equal(self.scales.t(), scales):
            sys.exit("hopper_fp8_product: scales of the GEMM before are not those of its result")
        if not torch.equal(self.codes, codes.view(torch.uint8)):
            sys.exit("hopper_fp8_product: codes of the GEMM before are not those of its result")


def torch_calls(m: int, n: int, k: int) -> dict:
    """Returns PyTorch's product and its quantization of x and w."""
    import torch

    @torch.compile(dynamic=False)
    def quantize(x):
        scale = x.abs().amax().float() / 448
        return (x.float() / scale).to(torch.float8_e4m3fn), scale

    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    (a, scale_a), (b, scale_b) = quantize(x), quantize(w)

    def product():
        return torch._scaled_mm(
            a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
        )  # fmt: skip

    return {"gemm": product, "x": lambda: quantize(x), "w": lambda: quantize(w)}


def microseconds_of(events) -> list[float]:
    """Returns the time of the kernels behind each filling of the cache."""
    import torch

    on_gpu = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    found: list[float] = []
    for event in sorted(on_gpu, key=lambda event: event.time_range.start):
        if "FillFunctor" in event.name:
            found.append(0.0)
        elif found and not event.name.startswith("Memcpy"):
            found[-1] += event.device_time
    return found


def median_us(functions: dict, rounds: int) -> dict:
    """Returns the median time of each, in turns, out of a cold cache."""
    import torch
    from torch.profiler import ProfilerActivity

    flush = torch.empty(1 << 29, dtype=torch.uint8, device="cuda")
    for function in functions.values():
        function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            for function in functions.values():
                flush.fill_(1)
                function()
        torch.cuda.synchronize()
    found = microseconds_of(profiler.events())
    if len(found) != rounds * len(functions):
        sys.exit(
            f"hopper_fp8_product: {len(found)} calls were found; expected {rounds * len(functions)}"
        )
    return {name: statistics.median(found[i :: len(functions)]) for i, name in enumerate(functions)}


def measure(size: str, rounds: int) -> dict:
    import deepwell

    m, n, k = (int(x) for x in size.split("x"))
    before = Before(m, k)
    before.check()
    functions = {
        "before, x stored": lambda: before.run(before.plain),
        "before, codes": lambda: before.run(before.coded),
        "before, x and codes": lambda: before.run(before.both),
    }
    policies = {
        "tensor": deepwell.PrecisionPolicy("fp8", [], fast_accumulation=True),
        "block": deepwell.PrecisionPolicy("fp8-block", []),
    }
    kernels = {}
    for way, policy in policies.items():
        for part, op in operations(m, n, k, policy).items():
            functions[f"{way} {part}"] = op.backend_op
            kernels[f"{way} {part}"] = op.kernel
    for part, function in torch_calls(m, n, k).items():
        functions[f"torch {part}"] = function
    us = median_us(functions, rounds)
    extra = us["before, codes"] - us["before, x stored"]

    def rate(*parts: float) -> float:
        return round(2 * m * n * k / sum(parts) / 1e6, 1)

    rates = {}
    for way in ("tensor", "block", "torch"):
        gemm, x, w = (us[f"{way} {part}"] for part in ("gemm", "x", "w"))
        rates[f"{way}: GEMM"] = rate(gemm)
        rates[f"{way}: GEMM, codes of x"] = rate(gemm, x)
        rates[f"{way}: GEMM, codes of x and w"] = rate(gemm, x, w)
        if way == "block":
            rates["block: GEMM, codes of x in the GEMM before"] = rate(gemm, extra)
            rates["block: GEMM, codes of x in the GEMM before, of w"] = rate(gemm, extra, w)
    return {
        "size": size,
        "us": {name: round(x, 1) for name, x in us.items()},
        "codes of x in the GEMM before, us": round(extra, 1),
        "kernels": kernels,
        "tflops": rates,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", default=SIZES, metavar="MxNxK")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    import torch

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    results = []
    for size in options.sizes:
        results.append(measure(size, options.rounds))
        print(f"{size}, BF16 to FP8")
        for name, us in results[-1]["us"].items():
            print(f"  {name:52} {us:8.1f} us  {results[-1]['kernels'].get(name, '')}")
        print(
            f"  codes of x in the GEMM before add {results[-1]['codes of x in the GEMM before, us']} us"
        )
        for name, rate in results[-1]["tflops"].items():
            print(f"  {name:52} {rate:8.1f} TFLOP/s", flush=True)
    if options.json:
        record = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": results}
        Path(options.json).write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
