"""Counts the memory of a process's tensors on the CPU to the byte, with arenas of emulated GPUs among them."""

from __future__ import annotations

from typing import Callable

import torch
from deepwell.targets import EmulatedGpu

_STEP = "a counted step"


class _Shadowed:
    """A segment of an arena in an emulated GPU's memory, and a tensor of the same size, which is counted."""

    def __init__(self, arena, size: int) -> None:
        self._arena = arena
        self._shadow = torch.empty(size, dtype=torch.uint8)
        self.address, self.bytes = arena.address, size

    def copy_from(self, other: "_Shadowed", size: int) -> None:
        self._arena.copy_from(other._arena, size)


def shadow_arenas(monkeypatch) -> None:
    """From now on, arenas of emulated GPUs count as tensors."""
    make = EmulatedGpu.arena
    monkeypatch.setattr(EmulatedGpu, "arena", lambda self, size: _Shadowed(make(self, size), size))


def counted_peaks(prepare: Callable[[], Callable[[], None]], steps: int) -> list[int]:
    """Returns the peak of the bytes of all tensors that ``prepare`` has made since it began, in each of so many runs of
    the step that it returns."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step = prepare()
        for _ in range(steps):
            with torch.profiler.record_function(_STEP):
                step()
    events = list(profile.profiler.kineto_results.events())
    begins = sorted(e.start_ns() for e in events if e.name() == _STEP)
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    peaks, now = [0] * steps, 0
    for at, change in sorted(changes, key=lambda each: each[0]):
        now += change
        index = sum(begin <= at for begin in begins) - 1
        if index >= 0:
            peaks[index] = max(peaks[index], now)
    return peaks
