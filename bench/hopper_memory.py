"""Measures the memory-bound kernels of the engine on one GPU, each beside a copy that moves as many bytes.

    python3 bench/hopper_memory.py [CASE ...] [--rounds 20] [--kernels] [--out FILE.json]
    python3 bench/hopper_memory.py --small      on the emulator: small tensors, no times; shows that the script runs

A case is a small model that `deepwell.compile` plans; its operations run on operands of their own. Cases are named by
their beginning: "norm" runs all norms. A round runs the operation, the copy and PyTorch's peer in turns. In front of each, a
buffer of 256 MiB is read, so that operands come from memory and nothing waits to be written. A time is the sum of the
durations of an operation's kernels by the profiler, the median of the rounds; pauses between kernels are not part of it.

Bytes count each operand that is read once and each result that is written once. The copy reads half as many and writes
as many. "of copy" is the copy's time divided by the operation's: 1 is the rate of the copy.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DEEPWELL_MEASURE", "0")

import deepwell  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

FLUSH_BYTES = 256 << 20


# ---- models ---------------------------------------------------------------------------------------


class AddNorm(nn.Module):
    """RMS norm of a sum that is a result, too: backward adds the gradients of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = a + b
        return x, self.norm(x)


class OnDevice(nn.Module):
    """A model without parameters, but one that it does not use: `deepwell.compile` looks where parameters lie."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))


class Softmax(OnDevice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x, -1)


class GELU(OnDevice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)


class Rope(OnDevice):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        half = x.shape[-1] // 2
        turned = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * cos + turned * sin


class SwiGLU(OnDevice):
    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * up


class Add(OnDevice):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class Bias(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class Loss(OnDevice):
    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, target)


FEATURES = 60  # rows that are no multiples of 16 bytes, so that the loss is no part of a GEMM


class Head(nn.Module):
    """A last layer with few features, so that the kernels of the loss take most of the time."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, classes, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.linear(x), target)


# ---- cases ----------------------------------------------------------------------------------------


@dataclass
class Case:
    """A model with the arguments of a call. `ops`: those of the plan that are measured, as {(op, phase): peer}, where
    the peer is one of peers_of or None. `precision`: of deepwell.compile. `kernels`: measures the kernels whose names
    contain a text alone, {(op, phase): (text, bytes)}."""

    name: str
    model: nn.Module
    arguments: tuple[torch.Tensor, ...]
    ops: dict[tuple[str, str], str | None]
    precision: Any = None
    kernels: dict[tuple[str, str], tuple[str, int]] = field(default_factory=dict)


def numbers(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()


def indexes(device: str, count: int, below: int) -> torch.Tensor:
    return torch.randint(0, below, (count,), device=device)


def rope_arguments(device: str, batch: int, heads: int, tokens: int) -> tuple[torch.Tensor, ...]:
    tables = (numbers(device, 1, 1, tokens, 64).detach() for _ in range(2))
    return (numbers(device, batch, tokens, heads * 64), *tables)


def one_matrix(device: str, rows: int, width: int) -> tuple[torch.Tensor, ...]:
    return (numbers(device, rows, width),)


def two_matrices(device: str, rows: int, width: int) -> tuple[torch.Tensor, ...]:
    return (numbers(device, rows, width), numbers(device, rows, width))


def fused(peer: str | None) -> dict[tuple[str, str], str | None]:
    """A program forward and another backward."""
    return {("fused", "forward"): peer, ("fused", "backward"): peer and "backward"}


@dataclass
class Kind:
    """Cases that differ in shape. `model` and `arguments` make those of a shape, the latter on a device; `name` has a
    number of the shape for each pair of braces; `most`: the largest shape with --small."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    model: Callable[..., nn.Module]
    arguments: Callable[..., tuple[torch.Tensor, ...]]
    ops: dict[tuple[str, str], str | None]
    kernels: Callable[..., dict[tuple[str, str], tuple[str, int]]] = lambda *shape: {}
    precision: str = ""
    most: tuple[int, ...] = (64, 256, 64)


NORMS = ((8192, 4096), (16384, 768), (8192, 2048))
ELEMENTWISE = ((16384, 3072), (8192, 2048))
KINDS = [
    Kind(
        "norm layer {}x{}",
        NORMS,
        lambda _, width: nn.LayerNorm(width),
        one_matrix,
        {("layer_norm", "forward"): "forward", ("layer_norm_backward", "backward"): "backward"},
    ),
    Kind(
        "norm RMS {}x{}",
        NORMS,
        lambda _, width: nn.RMSNorm(width),
        one_matrix,
        {("rms_norm", "forward"): "forward", ("rms_norm_backward", "backward"): "backward"},
    ),
    Kind(
        "norm RMS + residual {}x{}",
        NORMS,
        lambda _, width: AddNorm(width),
        two_matrices,
        {("rms_norm_backward", "backward"): None},
    ),
    Kind(
        "softmax {}x{}",
        ((8192, 4096), (65536, 1024)),
        lambda *_: Softmax(),
        one_matrix,
        {("softmax", "forward"): "forward", ("softmax_backward", "backward"): "backward"},
    ),
    Kind(
        "cross-entropy BF16 {}x{}",
        ((8192, 128256), (16384, 50257)),
        lambda _, classes: Head(FEATURES, classes),
        lambda on, rows, classes: (numbers(on, rows, FEATURES), indexes(on, rows, classes)),
        {
            ("linear_cross_entropy", "forward"): None,
            ("linear_cross_entropy_backward", "backward"): None,
        },
        kernels=lambda rows, classes: {
            ("linear_cross_entropy", "forward"): ("cross_entropy_forward", 2 * rows * classes),
            ("linear_cross_entropy_backward", "backward"): (
                "cross_entropy_backward",
                4 * rows * classes,
            ),
        },
    ),
    Kind(
        "cross-entropy F32 {}x{}",
        ((8192, 32000),),
        lambda *_: Loss(),
        lambda on, rows, classes: (
            numbers(on, rows, classes).float().detach().requires_grad_(),
            indexes(on, rows, classes),
        ),
        {
            ("cross_entropy", "forward"): "forward",
            ("cross_entropy_backward", "backward"): "backward",
        },
    ),
    Kind(
        "embedding {} of {}x{}",
        ((16384, 50257, 768), (8192, 128256, 2048)),
        lambda _, classes, width: nn.Embedding(classes, width),
        lambda on, rows, classes, _: (indexes(on, rows, classes),),
        {("take", "forward"): "forward", ("embedding_backward", "backward"): "backward"},
    ),
    Kind(
        "rope {}x{}x{}x64",
        ((4, 32, 2048), (4, 8, 2048)),
        lambda _, heads, __: Rope(heads),
        rope_arguments,
        {("rope", "forward"): None, ("rope", "backward"): None},
        most=(1, 32, 16),
    ),
    Kind(
        "elementwise SwiGLU {}x{}", ((8192, 8192),), lambda *_: SwiGLU(), two_matrices, fused(None)
    ),
    Kind("elementwise GELU {}x{}", ELEMENTWISE, lambda *_: GELU(), one_matrix, fused("forward")),
    Kind(
        "elementwise sum {}x{}",
        ELEMENTWISE,
        lambda *_: Add(),
        two_matrices,
        {("add", "forward"): "forward", ("fused", "forward"): "forward"},
    ),
    Kind(
        "sums of columns {}x{}",
        ((16384, 3072), (8192, 8192)),
        lambda _, width: Bias(width),
        one_matrix,
        {("reduce_sum", "backward"): None},
    ),
    *(
        Kind(
            f"codes {precision} {{}}x{{}}",
            ((8192, 8192), (8192, 2048)),
            lambda _, width: nn.Linear(width, width, bias=False),
            one_matrix,
            {("quantize_tensor", "forward"): None, ("quantize_tiles", "forward"): None},
            precision=precision,
        )
        for precision in ("fp8", "fp8-block")
    ),
]


def cases_of(small: bool, device: str) -> Iterator[tuple[str, Callable[[], Case]]]:
    """Yields the name of each case, and a function that makes it."""
    for kind in KINDS:
        for shape in kind.shapes:
            if small:
                shape = tuple(min(n, most) for n, most in zip(shape, kind.most))
            yield kind.name.format(*shape), partial(case_of, kind, shape, device)


def case_of(kind: Kind, shape: tuple[int, ...], device: str) -> Case:
    arguments = kind.arguments(device, *shape)
    return Case(
        kind.name.format(*shape),
        kind.model(*shape).to(device, torch.bfloat16),
        arguments,
        kind.ops,
        deepwell.PrecisionPolicy(kind.precision, []) if kind.precision else None,
        kind.kernels(*shape),
    )


# ---- what is measured -------------------------------------------------------------------------------


@dataclass
class Measured:
    """`run` enqueues the operation once. `kernels`: a text in the names of the kernels whose time counts."""

    name: str
    kernel: str
    bytes: int
    run: Callable[[], None]
    peer: Callable[[], None] | None = None
    kernels: str = ""


def peer_of(
    model: nn.Module, arguments: tuple[torch.Tensor, ...], which: str | None
) -> Callable[[], None] | None:
    """Returns the call of PyTorch that does as much: the model, or the gradients of its output."""
    if which is None:
        return None
    if which == "forward":

        def forward() -> None:
            with torch.no_grad():
                model(*arguments)

        return forward
    result = model(*arguments)
    wanted = [t for t in (*arguments, *model.parameters()) if t.requires_grad]
    wanted = [t for t in wanted if t.shape != (1,)]  # OnDevice
    given = torch.randn_like(result)

    def backward() -> None:
        torch.autograd.grad(result, wanted, given, retain_graph=True)

    return backward


def least_bytes(op: Any) -> int:
    """Bytes of an operation's tensors; a gather reads as much of its table as it writes."""
    if op.op == "take":
        of_index, of_result = op.inputs[1], op.outputs[0]
        index = 8 * _count(of_index[1])
        return index + 4 * _count(of_result[1])
    return int(op.bytes)


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def operations_of(case: Case, target: str) -> Iterator[Measured]:
    """Yields the case's operations; those of one kind, phase and shape once."""
    options = {} if case.precision is None else {"precision": case.precision}
    theirs = copy.deepcopy(case.model)  # the engine takes the place of the model's own forward
    engine = deepwell.compile(case.model, example_inputs=case.arguments, target=target, **options)
    seen = set()
    for op in engine.compiled_ops:
        kind = (op.op, op.phase)
        key = (*kind, op.inputs, op.outputs)
        if kind not in case.ops or key in seen:
            continue
        seen.add(key)
        names, counted = case.kernels.get(kind, ("", least_bytes(op)))
        suffix = (
            f" {op.inputs[0][1][0]}x{op.inputs[0][1][1]}" if op.op.startswith("quantize") else ""
        )
        yield Measured(
            f"{case.name}: {op.op} {op.phase}{suffix}",
            op.kernel,
            counted,
            op.backend_op,
            peer_of(theirs, case.arguments, case.ops[kind]) if torch.cuda.is_available() else None,
            names,
        )
    if not seen:
        found = ", ".join(f"{op.op} {op.phase}" for op in engine.compiled_ops)
        print(
            f"{case.name}: the plan has none of the operations, but {found or 'none'}", flush=True
        )


def optimizers(small: bool, device: str) -> Iterator[Measured]:
    """AdamW of Llama 1B's layers, without clipping and with it; averages have the parameters' type."""
    count, width = (2, 64) if small else (8, 8192)

    def parameters() -> list[nn.Parameter]:
        made = [
            torch.randn(width, width, device=device, dtype=torch.bfloat16) for _ in range(count)
        ]
        for at, value in enumerate(made):
            made[at] = nn.Parameter(value)
            made[at].grad = torch.randn_like(value)
        return made

    elements = count * width * width
    for clips in (False, True):
        ours = deepwell.AdamW(parameters(), max_grad_norm=1.0 if clips else None)
        peer = torch.optim.AdamW(parameters(), fused=device == "cuda") if not clips else None
        yield Measured(
            f"AdamW of {elements / 1e6:.0f} M elements{', clipped' if clips else ''}",
            "adamw",
            (16 if clips else 14) * elements,
            ours.step,
            None if peer is None else peer.step,
        )


# ---- times ------------------------------------------------------------------------------------------


class Clock:
    """Times of functions in turns, each behind a read of the flush buffer."""

    def __init__(self) -> None:
        self.buffer = torch.ones(16384, FLUSH_BYTES // 8 // 16384, dtype=torch.int64, device="cuda")
        self.result = torch.empty(16384, dtype=torch.int64, device="cuda")
        self.flush()
        self.names = {event.name for event in self._profile(self.flush)}

    def flush(self) -> None:
        """One kernel, which no other function calls."""
        torch.amin(self.buffer, dim=1, out=self.result)

    def _profile(self, function: Callable[[], None]) -> list[Any]:
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            function()
            torch.cuda.synchronize()
        found = [
            event
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        return sorted(found, key=lambda event: event.time_range.start)

    def in_turns(self, functions: list[Callable[[], None]], rounds: int) -> list[list[list[Any]]]:
        """Returns the kernels of each run of each function."""

        def run() -> None:
            for _ in range(rounds):
                for function in functions:
                    self.flush()
                    function()

        for function in functions:
            function()
        runs: list[list[Any]] = []
        for event in self._profile(run):
            if event.name in self.names:
                if not runs or runs[-1]:
                    runs.append([])
            elif runs:
                runs[-1].append(event)
        runs = [run for run in runs if run]
        if len(runs) != rounds * len(functions):
            raise RuntimeError(f"{len(runs)} runs found, {rounds * len(functions)} expected")
        return [runs[at :: len(functions)] for at in range(len(functions))]


def copy_of(moved: int) -> Callable[[], None]:
    source = torch.ones(moved // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return copy


def median_us(runs: list[list[Any]], name: str = "") -> float:
    return statistics.median(
        sum(event.device_time for event in run if name in event.name) for run in runs
    )


def kernels_of(runs: list[list[Any]]) -> dict[str, float]:
    """Returns the median microseconds of each kernel of a run, by the beginning of its name."""
    names = dict.fromkeys(event.name for run in runs for event in run)
    return {
        name[:60]: round(
            statistics.median(
                sum(event.device_time for event in run if event.name == name) for run in runs
            ),
            2,
        )
        for name in names
    }


def measure(clock: Clock, of: Measured, rounds: int) -> dict[str, Any]:
    functions = [of.run, copy_of(of.bytes), *([of.peer] if of.peer else [])]
    ours, copies, *peers = clock.in_turns(functions, rounds)
    us, copy_us = median_us(ours, of.kernels), median_us(copies)
    if us == 0:
        names = ", ".join(kernels_of(ours))
        raise RuntimeError(f"no kernel has {of.kernels!r} in its name; those that ran: {names}")
    return {
        "name": of.name,
        "kernel": of.kernel,
        "bytes": of.bytes,
        "us": round(us, 2),
        "tb_s": round(of.bytes / us / 1e6, 3),
        "copy_us": round(copy_us, 2),
        "copy_tb_s": round(of.bytes / copy_us / 1e6, 3),
        "of_copy": round(copy_us / us, 3),
        "torch_us": round(median_us(peers[0]), 2) if peers else None,
        "kernels": kernels_of(ours),
    }


HEAD = f"{'operation':<66} {'us':>8} {'MB':>8} {'TB/s':>6} {'of copy':>8} {'torch us':>9}"


def line_of(row: dict[str, Any]) -> str:
    peer = "" if row["torch_us"] is None else f"{row['torch_us']:9.1f}"
    return (
        f"{row['name']:<66} {row['us']:8.1f} {row['bytes'] / 1e6:8.1f} {row['tb_s']:6.2f}"
        f" {row['of_copy']:8.2f} {peer}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="beginnings of cases' names")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kernels", action="store_true", help="list each operation's kernels")
    parser.add_argument("--small", action="store_true", help="run once on the emulator, no times")
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}; expected 1 or more")
    if not options.small and not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU; --small runs the script on the emulator")
    device = "cpu" if options.small else "cuda"
    target = "emulator:sm_90a" if options.small else "auto"

    def is_wanted(name: str) -> bool:
        return not options.cases or any(name.startswith(given) for given in options.cases)

    def measured() -> Iterator[Measured]:
        for name, make in cases_of(options.small, device):
            if is_wanted(name):
                yield from operations_of(make(), target)
        if is_wanted("AdamW"):
            yield from optimizers(options.small, device)

    torch.manual_seed(0)
    if options.small:
        for of in measured():
            of.run()
            print(f"{of.name}: {of.kernel}, {of.bytes} bytes")
        return 0
    clock = Clock()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n{HEAD}", flush=True)
    rows, failed = [], 0
    for of in measured():
        try:
            rows.append(measure(clock, of, options.rounds))
        except RuntimeError as error:
            print(f"{of.name}: {error}", flush=True)
            failed += 1
            continue
        print(line_of(rows[-1]), flush=True)
        if options.kernels:
            for name, us in rows[-1]["kernels"].items():
                print(f"    {us:8.1f} us  {name}")
        if options.out:  # after each row, so that an interrupted run leaves the rows before
            made = {
                "machine": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "rounds": options.rounds,
                "rows": rows,
            }
            options.out.write_text(json.dumps(made, indent=1) + "\n")
    if not rows:
        parser.error(f"no case begins with {' or '.join(options.cases)}")
    return failed != 0


if __name__ == "__main__":
    sys.exit(main())
