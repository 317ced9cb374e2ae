"""Times calls, on a GPU or on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def times_ms(op: Callable[[], Any], iterations: int, device: torch.device) -> list[float]:
    """Returns the time of each call in milliseconds: by CUDA events, or by a clock on the CPU."""
    if device.type != "cuda":
        times = []
        for _ in range(iterations):
            start = time.perf_counter()
            op()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    with torch.cuda.device(device):
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(iterations)
        ]
        for before, after in events:
            before.record()
            op()
            after.record()
        torch.cuda.synchronize(device)
    return [before.elapsed_time(after) for before, after in events]


class KernelProfiler:
    """Times a call and derives its rates."""

    @staticmethod
    def profile_kernel(
        op: Callable[[], Any],
        warmup_iterations: int = 10,
        profile_iterations: int = 100,
        *,
        flops: float | None = None,
        bytes: float | None = None,
        device: torch.device | str | None = None,
    ) -> dict[str, Any]:
        """Calls op() and returns a dict of ms (median), tflops, gb_per_s, sm_efficiency, tmem_utilization, device,
        iterations.

        The work of a call is `flops` and `bytes`, else op.flops and op.bytes; a rate without its work is None.
        `device`: op.device if it is a torch.device, else the GPU if there is one. sm_efficiency and tmem_utilization are None: they are
        hardware counters, which this function does not read (Nsight Compute does).
        """
        if warmup_iterations < 0 or profile_iterations < 1:
            raise ValueError(
                f"warmup_iterations is {warmup_iterations} and profile_iterations {profile_iterations}: expected at "
                "least 0 and 1"
            )
        flops = getattr(op, "flops", None) if flops is None else flops
        bytes = getattr(op, "bytes", None) if bytes is None else bytes
        if device is None and isinstance(getattr(op, "device", None), torch.device):
            device = op.device
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        for _ in range(warmup_iterations):
            op()
        ms = statistics.median(times_ms(op, profile_iterations, device))
        return {
            "ms": ms,
            "tflops": None if flops is None or ms == 0 else flops / ms / 1e9,
            "gb_per_s": None if bytes is None or ms == 0 else bytes / ms / 1e6,
            "sm_efficiency": None,
            "tmem_utilization": None,
            "device": device_name(device),
            "iterations": profile_iterations,
        }
