"""Plans for a machine without GPUs, where this library's own engine runs.

    plan = deepwell.autoplan(model, seq_len=1024, global_batch=32)     # no GPU here, or hw= a machine that has none
    plan.layout.micro_batch, plan.memory_gb, plan.fits

What is chosen is how many sequences a step takes at once: the most that fit, by the engine's own placement of each size
that divides the batch (deepwell/step_memory.h). Time on a CPU is not predicted.
"""

from __future__ import annotations

import inspect
import json
import os
import types
from typing import Any, Iterable

import torch

from deepwell import _deepwell
from deepwell.arena import ArenaPool
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.ir import IR, capture
from deepwell.machine import GB, GIB, Hardware
from deepwell.runtime import Program
from deepwell.step_memory import StepGraph, check_precision, optimizer_name

# Predictions are of tensors; the rest of a process is not.
_RESERVE = 0.05


class HostPlan:
    """How a step runs on this library's engine. ``layout`` has micro_batch, micro_batches (gradients of all but the first
    are added up) and what was asked for; ``peak`` what is held at the most."""

    step_time_ms = mfu = tokens_per_second = None  # not predicted for a CPU

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = fields
        self.model_name: str = fields["model"]
        self.layout = types.SimpleNamespace(**fields["layout"])
        self.peak: dict[str, Any] = fields["peak"]
        self.peak_bytes: int = self.peak["total"]
        self.memory_gb, self.memory_gib = self.peak_bytes / GB, self.peak_bytes / GIB
        self.capacity_gb, self.capacity_gib = fields["capacity"] / GB, fields["capacity"] / GIB
        self.fits: bool = fields["fits"]
        parts = {k: v for k, v in self.peak.items() if k not in ("phase", "part", "total")}
        self.tightest = "" if self.fits else max(parts, key=parts.get)

    def to_json(self) -> str:
        return json.dumps(self._fields)

    def explain(self) -> str:
        layout, peak = self.layout, self.peak
        lines = [
            f"{self.model_name} on {layout.hardware}, batches of {layout.global_batch} x {layout.seq_len}",
            f"  {layout.micro_batches} x {layout.micro_batch} sequences, {layout.precision}, {layout.optimizer}, "
            f"{layout.threads} threads",
            f"  {self.memory_gib:.3f} GiB at most, in {peak['phase']}; {self.capacity_gib:.3f} available"
            + ("" if self.fits else f": does not fit, most of it {self.tightest}"),
        ]
        for name, size in peak.items():
            if name not in ("phase", "part", "total") and size:
                lines.append(f"    {name.replace('_', ' '):18}{size / GIB:10.4f} GiB")
        return "\n".join(lines)

    __str__ = explain

    def __repr__(self) -> str:
        layout = self.layout
        return (
            f"<HostPlan {self.model_name}: {layout.micro_batches} x {layout.micro_batch} sequences, "
            f"{self.memory_gib:.2f} GiB, {'fits' if self.fits else 'does not fit'}>"
        )


def _fixed_micro_batch(constraints: Iterable[str], batch: int) -> int:
    """What `micro_batch=N` asks for; 0: nothing."""
    found = 0
    for constraint in constraints:
        name, _, value = str(constraint).partition("=")
        if name.strip() != "micro_batch" or not value.strip().isdigit():
            raise UnsupportedError(
                f"the constraint {constraint!r} is for GPUs: this library's engine on a CPU takes micro_batch=N"
            )
        found = int(value)
        if found < 1 or batch % found:
            raise DeepwellError(
                f"micro_batch is {found}, which does not divide the batch of {batch}"
            )
    return found


def _example(model: torch.nn.Module, batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Token ids, and labels where the model has a loss of them."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids = torch.zeros(batch, seq_len, dtype=torch.long, device=device)
    takes = inspect.signature(model.forward).parameters
    return {name: ids for name in ("input_ids", "labels") if name in takes}


class _Graphs:
    """The graph for micro-batches of at least `least`: a capture knows nothing of size 1, and has another one for it."""

    def __init__(self, model: Any, seq_len: int, precision: str) -> None:
        self.model, self.seq_len, self.precision = model, seq_len, precision

    def of(self, batch: int) -> tuple[str, StepGraph, int]:
        """(name, graph, least micro-batch) for batches of this size."""
        model = self.model
        if isinstance(model, (str, os.PathLike)):
            path = os.fspath(model)
            source = path if os.path.exists(path) else f"name:{path}"
            program = Program(_deepwell.model_graph(source, loss=True), ArenaPool(), self.precision)
            return os.path.basename(os.path.normpath(path)), StepGraph(program), 1
        if isinstance(model, IR):
            if batch == 1:
                raise UnsupportedError(
                    "a capture does not hold for one sequence, PyTorch traces that apart: give autoplan the model, or a "
                    "larger global_batch"
                )
            program = Program(model.captured.json, ArenaPool(), self.precision)
            program.set_dependencies(model.captured.depends)
            return model.name, StepGraph(program), 2
        if isinstance(model, torch.nn.Module):
            # Sizes above 1 are symbols: two sequences stand for any number.
            kwargs = _example(model, min(batch, 2), self.seq_len)
            if "input_ids" not in kwargs:
                raise UnsupportedError(
                    f"{type(model).__name__} takes no input_ids, and autoplan has no other sequences to give: use "
                    "deepwell.dryrun(model, example_inputs) for the memory of one step"
                )
            ir = capture(model, kwargs)
            if batch > 1 and not ir.captured.accepts_sizes(
                [{"B": batch, "S": self.seq_len}.get(name, 2) for name in ir.symbols]
            ):
                raise UnsupportedError(
                    f"the capture of {ir.name} does not hold for {batch} sequences of {self.seq_len}"
                )
            graph = StepGraph.of_model(model, ir, list(kwargs.values()), self.precision)
            return ir.name, graph, 1 if batch == 1 else 2
        raise DeepwellError(
            "without GPUs a plan is made for this library's own engine, which needs the model itself: a module (on the "
            "meta device, say), what deepwell.capture returns, or a name or folder that deepwell train takes; this is "
            f"{type(model).__name__}"
        )


def host_plan(
    model: Any,
    hw: Hardware,
    seq_len: int,
    global_batch: int,
    precision: Any,
    constraints: Iterable[str],
    reserve_gb: float | None,
    optimizer: Any = "adamw_dw",
) -> HostPlan:
    """`autoplan` where the hardware has no GPU."""
    precision = str(getattr(precision, "value", precision)).lower()
    check_precision(precision)
    precision = "fp32" if precision == "auto" else precision
    name = optimizer_name(optimizer)
    memory = hw.figures.get("host_memory")
    if memory is None:
        raise DeepwellError(f"the description of {hw.name} has neither GPUs nor host_memory")
    if seq_len < 1 or global_batch < 1:
        raise DeepwellError(
            f"seq_len is {seq_len} and global_batch {global_batch}; each is 1 or more"
        )
    reserve = _RESERVE * memory.value if reserve_gb is None else reserve_gb * GB
    capacity = int(memory.value - reserve)
    fixed = _fixed_micro_batch(constraints, global_batch)
    graphs = _Graphs(model, seq_len, precision)
    _deepwell.set_threads(torch.get_num_threads())
    try:
        found = _fit(
            graphs, fixed or global_batch, seq_len, name, capacity, bool(fixed), global_batch
        )
    except _deepwell.Error as error:
        raise DeepwellError(str(error)) from None
    model_name, (micro_batch, fits, peak) = found
    return HostPlan(
        {
            "model": model_name,
            "layout": {
                "framework": "deepwell",
                "hardware": hw.name,
                "seq_len": seq_len,
                "global_batch": global_batch,
                "micro_batch": micro_batch,
                "micro_batches": global_batch // micro_batch,
                "precision": precision,
                "optimizer": name,
                "threads": _deepwell.get_threads(),
            },
            "peak": peak,
            "capacity": capacity,
            "fits": fits,
        }
    )


def _fit(graphs, batch: int, seq_len: int, optimizer: str, capacity: int, fixed: bool, whole: int):
    """(name, (micro-batch, fits, peak))"""
    name, graph, least = graphs.of(batch)
    if fixed:
        peak = graph.peak(batch, seq_len, optimizer, batch < whole)
        return name, (batch, peak["total"] <= capacity, peak)
    found = graph.fit(batch, seq_len, least, optimizer, capacity)
    if found[1] or least == 1 or isinstance(graphs.model, IR):
        return name, found
    name, graph, _ = graphs.of(1)
    peak = graph.peak(1, seq_len, optimizer, True)
    return name, (1, peak["total"] <= capacity, peak)
