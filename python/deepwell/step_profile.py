"""Measures a step of an optimized model: forward, and backward to its parameters.

The step is timed first, as it runs in a training. Then each instruction of the engine's plans is timed in further steps
(dw_plan_profile in deepwell/engine.h), in runs that replay no recorded CUDA graph: on a CPU by the clock around it, on a
GPU by the times of its kernels (kernel_times.py), or by events between instructions where PyTorch's profiler cannot time
kernels. Where PyTorch runs the model, PyTorch's profiler times its operators and kernels instead.
Gradients, buffers and random states stay as they are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import time
from typing import Any, Callable, Iterator, Sequence

import torch
from torch.utils import _pytree as pytree

from deepwell import _deepwell, kernel_times
from deepwell.compiled_ops import CompiledOp, listed_ops
from deepwell.optimize import installed
from deepwell.targets import Target

# The host's clock before a step, after its forward, and after its backward (None: there was none).
_Span = tuple[float, float, "float | None"]


@dataclasses.dataclass
class _Running:
    """A plan that may run in a step: the module whose graph it is, and where it runs."""

    path: str
    plan: _deepwell.Plan
    target: Target


@dataclasses.dataclass
class _Event:
    """A run of an instruction, in seconds of the host's clock. ``at``: position in the list of operations."""

    at: int
    step: int
    start: float
    seconds: float
    kernels: list[kernel_times.Kernel] | None = None  # None: not known by kernels


@dataclasses.dataclass
class Measured:
    """What steps took. ``report``: as engine.profile returns it; ``ops``: the operations that ran, [] in PyTorch."""

    report: dict[str, Any]
    ops: list[CompiledOp]


@contextlib.contextmanager
def _left_as_it_is(model: torch.nn.Module) -> Iterator[None]:
    """Restores the values of buffers and the states of PyTorch's generators."""
    buffers = [(b, b.detach().clone()) for b in model.buffers() if not b.is_inference()]
    gpus = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def _waiter(model: torch.nn.Module) -> Callable[[], None]:
    """Returns a function that waits for the work of the model's device."""
    gpus = sorted({p.device.index for p in model.parameters() if p.is_cuda})

    def wait() -> None:
        for index in gpus:
            torch.cuda.current_stream(index).synchronize()

    return wait


def _step(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wait: Callable[[], None],
    split: bool = True,
) -> _Span:
    """Runs a step. Nothing is added to ``.grad``. ``split``: waits for forward before backward begins."""
    given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    targets = [tensor for tensor in [*model.parameters(), *given] if tensor.requires_grad]
    wait()
    began = time.perf_counter()
    outputs = [
        value
        for value in pytree.tree_leaves(model(*args, **kwargs))
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    if split:
        wait()
    middle = time.perf_counter()
    if not targets or not outputs:
        return began, middle, None
    chosen = [value for value in outputs if value.dim() == 0][:1] or outputs
    ones = [torch.ones_like(value) for value in chosen]
    torch.autograd.grad(chosen, targets, ones, allow_unused=True)
    wait()
    return began, middle, time.perf_counter()


def _plans(root: torch.nn.Module) -> list[_Running]:
    return [
        _Running(forward.path, plan, program.target)
        for forward in installed(root)
        for program in forward.programs()
        for plan in program.plans()
    ]


def _length(span: _Span) -> float:
    began, middle, end = span
    return (middle if end is None else end) - began


def _median_ms(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return 1e3 * statistics.median(known) if known else None


def measure(
    model: torch.nn.Module,
    root: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    steps: int,
    warmup: int,
    trace: str | os.PathLike | None,
) -> Measured:
    """Measures ``steps`` steps of ``model(*args, **kwargs)`` after ``warmup`` others. ``root``: the optimized module in
    ``model``. ``trace``: a file to write."""
    if steps < 1 or warmup < 0:
        raise ValueError(f"steps is {steps} and warmup {warmup}; expected at least 1 and 0")
    wait = _waiter(root)
    path = None if trace is None else os.fspath(trace)
    with _left_as_it_is(root):
        for _ in range(max(warmup, 1)):  # the first one may capture
            _step(model, args, kwargs, wait)
        whole = halves = [_step(model, args, kwargs, wait) for _ in range(steps)]
        if any(parameter.is_cuda for parameter in root.parameters()):
            whole = [_step(model, args, kwargs, wait, split=False) for _ in range(steps)]
        report: dict[str, Any] = {
            "steps": steps,
            "device": _device(root),
            "step_time_ms": _median_ms([_length(span) for span in whole]),
            "forward_ms": _median_ms([middle - began for began, middle, _ in halves]),
            "backward_ms": _median_ms([None if e is None else e - m for _, m, e in halves]),
            "step_times_ms": [1e3 * _length(span) for span in whole],
            "trace": path,
        }
        ops, events, spans = _timed(model, root, args, kwargs, steps, wait)
        if ops:
            report |= _of_engine(ops, events, spans)
            report["engine_runs"] = _runs_in_engine(model, root, args, kwargs, wait)
            if path is not None:
                _write_trace(path, report["device"], ops, events, spans)
        else:
            report |= _of_pytorch(model, args, kwargs, steps, wait, path)
            report["engine_runs"] = False
    return Measured(report, ops)


def _device(root: torch.nn.Module) -> str:
    gpu = next((p.device for p in root.parameters() if p.is_cuda), None)
    if gpu is not None:
        return torch.cuda.get_device_name(gpu)
    target = next((f.session.target for f in installed(root)), None)
    return "cpu" if target is None else target.name


@contextlib.contextmanager
def _timing(running: Sequence[_Running]) -> Iterator[None]:
    """Inside the context, the instructions of these plans are timed."""
    for one in running:
        one.plan.profile(True)
    try:
        yield
    finally:
        for one in running:
            one.plan.profile(False)


def _timed(
    model: torch.nn.Module,
    root: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    steps: int,
    wait: Callable[[], None],
) -> tuple[list[CompiledOp], list[_Event], list[_Span]]:
    """Times the instructions of the plans that the engine runs in a step, also where PyTorch was measured to be faster.
    Returns the operations of these plans, their runs, and the clock of each step."""
    with contextlib.ExitStack() as stack:
        for forward in installed(root):
            stack.enter_context(forward.in_engine())
        _step(model, args, kwargs, wait)  # makes the plans
        running = _plans(root)
        found: list[list[tuple[Any, ...]]] = [[] for _ in running]
        spans = []

        def timed() -> _Span:
            with _timing(running):
                return _step(model, args, kwargs, wait)

        if _has_kernels(root):
            kernels, spans = kernel_times.measure([one.plan for one in running], timed, steps)
            for (at, index, step), mine in _by_instruction(kernels).items():
                start, end = mine[0].start, max(each.start + each.seconds for each in mine)
                found[at].append((index, step, start, end - start, mine))
        if not any(found):
            spans = []
            for step in range(steps):
                spans.append(timed())
                for mine, one in zip(found, running):
                    for index, (runs, seconds, start) in enumerate(one.plan.times()):
                        if runs:
                            mine.append((index, step, start, seconds / runs))
    ops: list[CompiledOp] = []
    events: list[_Event] = []
    for mine, one in zip(found, running):
        if not mine:
            continue
        first = len(ops)
        ops += listed_ops(one.plan, one.target, one.path)
        events += [_Event(first + index, *event) for index, *event in mine]
    for op in ops:
        op.measured_ms, op.runs = None, 0
    for event in events:
        op = ops[event.at]
        op.measured_ms = (op.measured_ms or 0.0) + 1e3 * _busy(event)
        op.runs += 1
    for op in ops:
        if op.measured_ms is not None:
            op.measured_ms /= op.runs
    return ops, events, spans


def _has_kernels(root: torch.nn.Module) -> bool:
    """Returns whether the kernels of the model can be timed one by one."""
    return any(p.is_cuda for p in root.parameters()) and kernel_times.supported()


def _by_instruction(
    kernels: Sequence[kernel_times.Kernel],
) -> dict[tuple[int, int, int], list[kernel_times.Kernel]]:
    """(number of the plan, instruction, step) -> its kernels, in order."""
    found: dict[tuple[int, int, int], list[kernel_times.Kernel]] = {}
    for kernel in kernels:
        found.setdefault((*kernel.at, kernel.step), []).append(kernel)
    return found


def _busy(event: _Event) -> float:
    """Seconds of an instruction: those of its kernels, without what is between them, where they are known."""
    if event.kernels is None:
        return event.seconds
    return sum(kernel.seconds for kernel in event.kernels)


def _runs_in_engine(
    model: torch.nn.Module,
    root: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wait: Callable[[], None],
) -> bool:
    """Returns whether a step as a training makes it runs in the engine, at least in part."""
    running = _plans(root)
    with _timing(running):
        _step(model, args, kwargs, wait)
    return any(runs for one in running for runs, _, _ in one.plan.times())


def _of_engine(ops: list[CompiledOp], events: list[_Event], spans: list[_Span]) -> dict[str, Any]:
    """Returns the fields of a report whose step ran in the engine."""
    method = "the clock around each instruction"
    if ops[0].backend_op.device != "cpu":
        method = "events between instructions"
    if any(event.kernels is not None for event in events):
        method = "kernels by CUPTI"
    counted: dict[tuple[str, str, str], list[float]] = {}
    for event in events:
        op = ops[event.at]
        counted.setdefault((op.phase, op.op, op.kernel), []).append(_busy(event))
    total = sum(map(_busy, events))
    lengths = [_length(span) for span in spans]
    return {
        "method": method,
        "operations_ms": 1e3 * total / len(spans),
        # Python, autograd, allocations, and what PyTorch runs beside the engine, in the steps that were timed.
        "outside_ms": 1e3 * max(sum(lengths) - total, 0.0) / len(spans),
        "operations": _table(counted, len(spans)),
    }


def _table(counted: dict[tuple[str, str, str], list[float]], steps: int) -> list[dict[str, Any]]:
    """Returns the time of each kind of operation in a step, the longest first."""
    rows = [
        {
            "phase": phase,
            "op": op,
            "kernel": kernel,
            "count": len(seconds) / steps,
            "ms": 1e3 * sum(seconds) / steps,
        }
        for (phase, op, kernel), seconds in counted.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def _of_pytorch(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    steps: int,
    wait: Callable[[], None],
    path: str | None,
) -> dict[str, Any]:
    """Returns the fields of a report whose step PyTorch ran, from PyTorch's own profiler. Writes its trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            _step(model, args, kwargs, wait)
    if path is not None:
        profiler.export_chrome_trace(path)
    kernels = _rows(profiler.key_averages(), steps)
    return {
        "method": "torch.profiler",
        "operations_ms": sum(row["ms"] for row in kernels) if kernels else None,
        "outside_ms": None,
        "operations": kernels,
    }


def _rows(averages: Sequence[Any], steps: int) -> list[dict[str, Any]]:
    """Returns the time of each kernel in a step, or where there are none of each of PyTorch's operators, the longest first.
    An operator has the time of its kernels, too, and so have the ranges around them, which are not counted again."""
    kernels = [
        row
        for row in averages
        if row.device_type != torch.autograd.DeviceType.CPU
        and not getattr(row, "is_user_annotation", False)
        and row.self_device_time_total
    ]
    rows = []
    for row in kernels or averages:
        micro = row.self_device_time_total if kernels else row.self_cpu_time_total
        if micro:
            rows.append(
                {
                    "phase": None,
                    "op": row.key,
                    "kernel": row.key if kernels else None,
                    "count": row.count / steps,
                    "ms": micro / 1e3 / steps,
                }
            )
    return sorted(rows, key=lambda row: -row["ms"])


# ---- the trace ---------------------------------------------------------------------------------------


def _write_trace(
    path: str, device: str, ops: list[CompiledOp], events: list[_Event], spans: list[_Span]
) -> None:
    """Writes the timed steps in the JSON trace format for ui.perfetto.dev or chrome://tracing: a process, with a thread
    for the phases of each step, one for the engine's instructions, and one for the kernels of each of the GPU's streams
    where they are known. Times are in microseconds."""
    zero = min([span[0] for span in spans] + [event.start for event in events])

    def event_of(name: str, category: str, thread: int, start: float, seconds: float, **args: Any):
        return {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": 0,
            "tid": thread,
            "ts": round(1e6 * (start - zero), 3),
            "dur": round(1e6 * seconds, 3),
            "args": args,
        }

    written: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": device}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "step"}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 1, "args": {"name": "stream 0"}},
    ]
    for step, (began, middle, end) in enumerate(spans):
        written.append(event_of("forward", "step", 0, began, middle - began, step=step))
        if end is not None:
            written.append(event_of("backward", "step", 0, middle, end - middle, step=step))
    for event in sorted(events, key=lambda event: event.start):
        op = ops[event.at]
        written.append(
            event_of(
                op.backend_op.name,
                op.phase,
                1,
                event.start,
                event.seconds,
                step=event.step,
                kernel=op.kernel,
                precision=op.precision,
                shapes=op.shapes,
                flops=op.flops,
                bytes=op.bytes,
            )
        )
    streams: dict[int, int] = {}  # of the GPU -> thread of the trace
    for event in events:
        for kernel in event.kernels or ():
            if kernel.stream not in streams:
                thread = streams[kernel.stream] = 2 + len(streams)
                name = {"name": f"kernels of the GPU's stream {kernel.stream}"}
                written.append(
                    {"ph": "M", "name": "thread_name", "pid": 0, "tid": thread, "args": name}
                )
            written.append(
                event_of(
                    kernel.name,
                    "kernel",
                    streams[kernel.stream],
                    kernel.start,
                    kernel.seconds,
                    step=kernel.step,
                    instruction=ops[event.at].backend_op.name,
                )
            )
    with open(path, "w", encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(json.dumps(one) for one in written) + "\n]\n")
