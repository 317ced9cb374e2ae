"""Plans for a machine without GPUs, for Deepwell's engine on the CPU.

    plan = deepwell.autoplan(model, seq_len=1024, global_batch=32)     # without GPUs here, or with hw= such a machine
    plan.layout.micro_batch, plan.memory_gb, plan.fits

The plan chooses the micro-batch: the largest one that fits, by the engine's own placement for each size that divides
the batch (deepwell/step_memory.h). Time on a CPU is not predicted.
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
from deepwell.lazy_logits import defer
from deepwell.machine import GB, GIB, Hardware
from deepwell.precision import PrecisionPolicy, policy_of
from deepwell.runtime import Program
from deepwell.step_memory import StepGraph, optimizer_name

# Fraction of the memory left free: predictions cover tensors, not the rest of a process.
_RESERVE = 0.05


class HostPlan:
    """How a step runs on Deepwell's engine. ``layout`` has micro_batch, micro_batches (their gradients are accumulated)
    and the request; ``peak`` is the largest amount of memory held at once, in parts."""

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
            f"  peak {self.memory_gib:.3f} GiB in {peak['phase']}; {self.capacity_gib:.3f} available"
            + ("" if self.fits else f": does not fit, the largest part is {self.tightest}"),
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
    """Returns the N of a constraint `micro_batch=N`, 0 if there is none."""
    found = 0
    for constraint in constraints:
        name, _, value = str(constraint).partition("=")
        if name.strip() != "micro_batch" or not value.strip().isdigit():
            raise UnsupportedError(
                f"the constraint {constraint!r} is for GPUs: Deepwell's engine on a CPU supports micro_batch=N only"
            )
        found = int(value)
        if found < 1 or batch % found:
            raise DeepwellError(
                f"micro_batch is {found}, which does not divide the batch of {batch}"
            )
    return found


def _example(model: torch.nn.Module, batch: int, seq_len: int) -> dict[str, torch.Tensor]:
    """Returns token ids, and labels if the model computes a loss from them."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ids = torch.zeros(batch, seq_len, dtype=torch.long, device=device)
    takes = inspect.signature(model.forward).parameters
    return {name: ids for name in ("input_ids", "labels") if name in takes}


class _Graphs:
    """The graphs for micro-batches. A capture does not cover size 1, which has a graph of its own."""

    def __init__(self, model: Any, seq_len: int, policy: PrecisionPolicy | None) -> None:
        self.model, self.seq_len, self.policy = model, seq_len, policy

    def of(self, batch: int) -> tuple[str, StepGraph, int]:
        """Returns (name, graph, smallest micro-batch of the graph) for a batch of this size."""
        model = self.model
        if isinstance(model, (str, os.PathLike)):
            path = os.fspath(model)
            program = Program(_deepwell.model_graph(path, loss=True), ArenaPool(), self.policy)
            return os.path.basename(os.path.normpath(path)), StepGraph(program), 1
        if isinstance(model, IR):
            if batch == 1:
                raise UnsupportedError(
                    "a capture does not cover a batch of one sequence, which PyTorch traces separately: pass autoplan the "
                    "model instead, or a larger global_batch"
                )
            captured, deferred = defer(model.captured, "lazy", self.policy)
            program = Program(captured.json, ArenaPool(), self.policy, deferred=deferred)
            program.set_dependencies(captured.depends)
            return model.name, StepGraph(program), 2
        if isinstance(model, torch.nn.Module):
            # Sizes above 1 become symbols, so two sequences stand for any number.
            kwargs = _example(model, min(batch, 2), self.seq_len)
            if "input_ids" not in kwargs:
                raise UnsupportedError(
                    f"{type(model).__name__} does not accept input_ids, the only input that autoplan can make: use "
                    "deepwell.dryrun(model, example_inputs) for the memory of one step"
                )
            ir = capture(model, kwargs)
            if batch > 1 and not ir.captured.accepts_sizes(
                [{"B": batch, "S": self.seq_len}.get(name, 2) for name in ir.symbols]
            ):
                raise UnsupportedError(
                    f"the capture of {ir.name} does not hold for {batch} sequences of {self.seq_len}"
                )
            graph = StepGraph.of_model(model, ir, list(kwargs.values()), self.policy)
            return ir.name, graph, 1 if batch == 1 else 2
        raise DeepwellError(
            "without GPUs a plan is for Deepwell's own engine, which needs the model itself: a module (it may be on the "
            "meta device), the result of deepwell.capture, or a name or folder as for deepwell train; got "
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
    """Implements `autoplan` for hardware without a GPU."""
    policy = policy_of(precision)
    name = optimizer_name(optimizer)
    memory = hw.figures.get("host_memory")
    if memory is None:
        raise DeepwellError(
            f"the description of {hw.name} has neither GPUs nor host_memory; add one of them"
        )
    if seq_len < 1 or global_batch < 1:
        raise DeepwellError(
            f"seq_len is {seq_len} and global_batch {global_batch}; each must be 1 or more"
        )
    reserve = _RESERVE * memory.value if reserve_gb is None else reserve_gb * GB
    capacity = int(memory.value - reserve)
    fixed = _fixed_micro_batch(constraints, global_batch)
    graphs = _Graphs(model, seq_len, policy)
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
                "precision": "fp32" if policy is None else policy.name,
                "optimizer": name,
                "threads": _deepwell.get_threads(),
            },
            "peak": peak,
            "capacity": capacity,
            "fits": fits,
        }
    )


def _fit(graphs, batch: int, seq_len: int, optimizer: str, capacity: int, fixed: bool, whole: int):
    """Returns (name, (micro-batch, fits, peak))."""
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
