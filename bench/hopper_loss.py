"""Measures a language model's head on one GPU: a linear layer and the cross-entropy of its logits, forward and backward.

    python3 bench/hopper_loss.py [ROWSxFEATURESxCLASSES ...] [--ways WAY,...] [--rounds N] [--out FILE.json]

Ways: "deepwell", the layer and the loss by `deepwell.optimize`, which computes the logits again in backward because there
is no memory that they could share; "kept", the same with DEEPWELL_LOGITS=kept, as in a whole model; "compile", `torch.compile` of both; "liger", Liger's
fused operation, if it is installed; "gemms", cuBLAS's three products alone, logits, dx and dw, which is what a head
costs if all else is free. "gemms" has whole logits.

BF16 with random data; medians of rounds in turns, each a few steps after each other, so that the clock is that of a
steady load. TFLOP/s count the three products whatever a way computes. The memory is the peak of a step beside x, the
weight and the targets; gradients of x and of the weight are part of it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
from pathlib import Path

import torch
from torch.nn import functional

SIZES = ["8192x2048x128256", "16384x768x50257"]
WAYS = ["gemms", "deepwell", "kept", "compile", "liger"]


class Head(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(functional.linear(x, self.weight), target)


class Problem:
    def __init__(self, size: str) -> None:
        self.size = size
        self.rows, self.features, self.classes = (int(x) for x in size.split("x"))
        torch.manual_seed(0)
        self.x = torch.randn(self.rows, self.features, device="cuda", dtype=torch.bfloat16)
        self.x.requires_grad_()
        weight = torch.randn(self.classes, self.features, device="cuda")
        self.weight = (weight * (2 / self.features**0.5)).bfloat16()
        self.target = torch.randint(self.classes, (self.rows,), device="cuda")
        self.target[::17] = -100

    @property
    def flops(self) -> float:
        return 6.0 * self.rows * self.features * self.classes

    def step_of(self, module, weight):
        """Returns a function that runs one step and leaves the gradients where the first one put them."""

        def step():
            self.x.grad = weight.grad = None
            loss = module(self.x, self.target)
            loss.backward()
            return loss

        return step

    def deepwell(self, logits: str = "blocks"):
        import deepwell

        os.environ["DEEPWELL_LOGITS"] = logits
        head = Head(self.weight)
        step = self.step_of(deepwell.optimize(head, verbose=False), head.weight)
        step()  # makes the plan
        del os.environ["DEEPWELL_LOGITS"]
        return step

    def kept(self):
        return self.deepwell("kept")

    def compile(self):
        head = Head(self.weight)
        return self.step_of(torch.compile(head), head.weight)

    def liger(self):
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        head, loss = Head(self.weight), LigerFusedLinearCrossEntropyLoss()
        return self.step_of(lambda x, target: loss(head.weight, x, target), head.weight)

    def gemms(self):
        """Rows of logits lie at multiples of 64 elements, without which cuBLAS is several times slower."""
        pitch = (self.classes + 63) // 64 * 64
        weight = torch.randn(pitch, self.features, device="cuda", dtype=torch.bfloat16)
        logits = torch.empty(self.rows, pitch, device="cuda", dtype=torch.bfloat16)
        x, dx, dw = self.x.detach(), torch.empty_like(self.x), torch.empty_like(weight)

        def step():
            torch.mm(x, weight.t(), out=logits)
            torch.mm(logits, weight, out=dx)
            torch.mm(logits.t(), x, out=dw)

        return step


def expected(problem: Problem) -> tuple[float, torch.Tensor]:
    """The loss and the gradient of x's first rows, by F32 sums of FP64 exponentials."""
    rows = 64
    counted = (problem.target != -100).sum()
    losses, gradient = [], None
    for first in range(0, problem.rows, 512):
        logits = (problem.x[first : first + 512].detach() @ problem.weight.t()).double()
        target = problem.target[first : first + 512]
        losses.append(functional.cross_entropy(logits, target, reduction="sum"))
        if first == 0:
            logits, target = logits[:rows], target[:rows]
            dlogits = torch.softmax(logits, 1)
            dlogits[torch.arange(rows), target.clamp(min=0)] -= 1
            dlogits[target < 0] = 0
            gradient = (dlogits / counted).float() @ problem.weight.float()
    return float(sum(losses) / counted), gradient


def check(problem: Problem, way: str, step, loss: float, gradient: torch.Tensor) -> None:
    """So that no wrong way is timed: rounding of logits and of dlogits changes neither by a hundredth."""
    if way == "gemms":
        return
    found = float(step().detach())
    error = (problem.x.grad[: len(gradient)].float() - gradient).abs().max() / gradient.abs().max()
    if not (abs(found - loss) <= 0.01 * loss and float(error) <= 0.01):
        raise SystemExit(f"hopper_loss: {way}: loss {found}, not {loss}; dx differs by {error:.2g}")


def median_seconds(steps: dict, rounds: int) -> dict[str, float]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: dict[str, list[float]] = {way: [] for way in steps}
    calls = {}
    for way, step in steps.items():
        step()
        begin.record()
        step()
        end.record()
        end.synchronize()
        calls[way] = max(1, int(60 / begin.elapsed_time(end)))
    for _ in range(rounds):
        for way, step in steps.items():
            begin.record()
            for _ in range(calls[way]):
                step()
            end.record()
            end.synchronize()
            times[way].append(begin.elapsed_time(end) / calls[way] / 1000)
    return {way: statistics.median(found) for way, found in times.items()}


def peak_bytes(step, before: int) -> int:
    """The most memory of a step above `before`, with what the way keeps from step to step."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure(size: str, ways: list[str], rounds: int) -> list[dict]:
    problem, steps, peaks, results = Problem(size), {}, {}, []
    loss, gradient = expected(problem)
    for way in ways:
        problem.x.grad = None
        before = torch.cuda.memory_allocated()
        try:
            step = getattr(problem, way)()
            check(problem, way, step, loss, gradient)
            peaks[way] = peak_bytes(step, before)
            steps[way] = step
        except ImportError as error:
            print(f"{size} {way}: {error}", flush=True)
    seconds = median_seconds(steps, rounds)
    for way, time in seconds.items():
        row = {
            "size": size,
            "way": way,
            "seconds": time,
            "tflops": problem.flops / time / 1e12,
            "of_gemms": seconds.get("gemms", float("nan")) / time,
            "peak_bytes": peaks[way],
        }
        results.append(row)
        print(
            f"{size} {way:9s} {time * 1e3:8.2f} ms {row['tflops']:6.0f} TFLOP/s, {row['of_gemms']:.3f} of the GEMMs' rate, "
            f"peak {row['peak_bytes'] / 2**20:.0f} MiB",
            flush=True,
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sizes", nargs="*", default=SIZES, metavar="ROWSxFEATURESxCLASSES")
    parser.add_argument("--ways", default=",".join(WAYS), help="some of " + ",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="writes the results to this file as JSON")
    options = parser.parse_args()
    results = []
    for size in options.sizes or SIZES:
        results += measure(size, options.ways.split(","), options.rounds)
    if options.out:
        report = {
            "date": datetime.date.today().isoformat(),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "results": results,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
