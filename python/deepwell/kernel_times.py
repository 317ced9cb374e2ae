"""Times of the kernels that a GPU ran for each instruction, from PyTorch's profiler.

PyTorch's profiler reads NVIDIA's CUPTI, which gives the time at which each kernel began and ended on the GPU. A kernel
belongs to the range that was open when it was launched. So each instruction of a timed run is put into a range of its
own (``Plan.watch``), whose name says which it is, and the kernels of that range are the instruction's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_PREFIX = "deepwell instruction"
_STEP = "deepwell step"


@dataclass
class Kernel:
    """A kernel, copy or fill. ``at``: (number of the plan, instruction); times in seconds of the host's clock."""

    at: tuple[int, int]
    step: int
    name: str
    start: float
    seconds: float
    stream: int


def supported() -> bool:
    """Returns whether PyTorch's profiler can time kernels here and is not in use."""
    activity = torch.profiler.ProfilerActivity.CUDA
    return (
        activity in torch.profiler.supported_activities()
        and hasattr(torch._C._profiler, "_RecordFunctionFast")
        and not torch.autograd._profiler_enabled()
    )


class _Ranges:
    """The watcher of a plan: opens a range for each instruction."""

    def __init__(self, plan: int) -> None:
        self.plan = plan
        self.open: Any = None

    def __call__(self, instruction: int, begins: bool) -> None:
        if begins:
            self.open = _range(f"{_PREFIX} {self.plan} {instruction}")
            self.open.__enter__()
        elif self.open is not None:  # else the instruction began before this watcher was set
            self.open.__exit__(None, None, None)
            self.open = None


def _range(name: str) -> Any:
    return torch._C._profiler._RecordFunctionFast(name)


@contextlib.contextmanager
def _watched(plans: Sequence[Any]) -> Iterator[None]:
    try:
        for number, plan in enumerate(plans):
            plan.watch(_Ranges(number))
        yield
    finally:
        for plan in plans:
            plan.watch(None)


def measure(plans: Sequence[Any], run: Callable[[], Any], steps: int) -> tuple[list[Kernel], list]:
    """Calls ``run`` ``steps`` times, which runs ``plans`` in timed runs and waits for the GPU. Returns the kernels of
    their instructions in the order in which they began, and what the calls returned."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    results, began = [], []
    with torch.profiler.profile(activities=activities) as profiler, _watched(plans):
        for step in range(steps):
            with _range(f"{_STEP} {step}"):
                began.append(time.perf_counter())
                results.append(run())
    return kernels_of(profiler.profiler.kineto_results.events(), began), results


def kernels_of(events: Sequence[Any], began: Sequence[float]) -> list[Kernel]:
    """``events``: of PyTorch's profiler, whose clock is not the host's. ``began``: the host's clock at the start of each
    step."""
    instructions: dict[int, tuple[int, int]] = {}
    starts: dict[int, int] = {}
    on_gpu = []
    for event in events:
        name = event.name()
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            on_gpu.append(event)
        elif name.startswith(_PREFIX):
            plan, instruction = name[len(_PREFIX) :].split()
            instructions[event.correlation_id()] = (int(plan), int(instruction))
        elif name.startswith(_STEP):
            starts[int(name[len(_STEP) :])] = event.start_ns()
    order = sorted(starts)
    if not order:
        return []
    found = []
    for event in sorted(on_gpu, key=lambda each: each.start_ns()):
        at = instructions.get(event.linked_correlation_id())
        if at is None:
            continue
        step = max((each for each in order if starts[each] <= event.start_ns()), default=order[0])
        start = began[step] + 1e-9 * (event.start_ns() - starts[step])
        seconds = 1e-9 * event.duration_ns()
        stream = event.device_resource_id()
        found.append(Kernel(at, step, event.name(), start, seconds, stream))
    return found
