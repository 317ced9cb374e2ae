"""Predicts the memory of a model's training step before any tensor exists.

    report = deepwell.dryrun(model, example_inputs)     # the model may be on the meta device
    report["memory_gb"], report["moments"], report["fits"]

The model is captured and goes through the engine's own passes and placement. deepwell/step_memory.h adds what the
caller holds, in the order in which deepwell.optimize's forward and backward make and free it; for a GPU gpu_memory.py
does. docs/engine.md and docs/dryrun.md have the rules.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Iterator

import torch
from torch.utils import _pytree as pytree

from deepwell import _deepwell, gpu_memory
from deepwell.arena import ArenaPool
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.guards import named_tensors
from deepwell.ir import IR, call_arguments, capture
from deepwell.lazy_logits import defer
from deepwell.machine import GB, GIB, Hardware, hardware
from deepwell.optim import AdamW
from deepwell.optimize import unsupported_parameter
from deepwell.precision import Precision, PrecisionPolicy, policy_of
from deepwell.runtime import DTYPES, Program
from deepwell.targets import EMULATED, EmulatedGpu, Gpu, PlannedGpu, Target

_OPTIMIZERS = {
    None: "none",
    "none": "none",
    "adamw_dw": "adamw_dw",
    "adamw": "adamw",
    "adamw_fused": "adamw_fused",
    AdamW: "adamw_dw",
    torch.optim.AdamW: "adamw",
}
_TARGETS = ("auto", "cpu", "sm_90a", *EMULATED)
# The CUDA context, with its kernels and libraries, takes this much of a GPU's memory.
_CONTEXT_BYTES = 1 << 30


def optimizer_name(optimizer: Any) -> str:
    """Returns the name of an optimizer that is given by name, as a class, or as an object."""
    name = None
    if isinstance(optimizer, (str, type, type(None))):
        name = _OPTIMIZERS.get(optimizer)
    elif type(optimizer) in _OPTIMIZERS and not getattr(optimizer, "has_other_memory", False):
        name = _name_with(type(optimizer), optimizer.param_groups)
    if name is None:
        raise UnsupportedError(
            f"the memory of the optimizer {optimizer!r} is not known: use 'adamw_dw' (deepwell.AdamW), 'adamw' "
            "(torch.optim.AdamW with its defaults), 'adamw_fused' (torch.optim.AdamW(fused=True)), or None and add the "
            "bytes of its states, which state_bytes() of Deepwell's optimizers returns"
        )
    return name


def _name_with(kind: type, groups: list[dict[str, Any]]) -> str | None:
    """Returns the name of an optimizer with the options of ``groups``, or None if its memory is not known."""
    if len(groups) != 1 or groups[0]["amsgrad"] or groups[0]["maximize"]:
        return None
    if isinstance(groups[0]["lr"], torch.Tensor):
        return None
    if kind is AdamW:
        return "adamw_dw"
    if groups[0]["fused"]:
        return "adamw_fused"
    plain = not groups[0]["capturable"] and groups[0]["foreach"] is None
    return "adamw" if plain else None


def _counted_as(name: str) -> str:
    """Returns the optimizer whose memory on a CPU is the same: fused updates have states and no temporaries."""
    return "adamw_dw" if name == "adamw_fused" else name


def _storage_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """Returns the bytes of all tensors. Each storage counts once, so tied parameters and views add nothing."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class StepGraph:
    """A graph whose training step is placed in memory, with shapes instead of tensors.

    Args:
        wrt: leaves that get gradients; None: all parameters.
        resident: bytes that the caller holds outside of the graph's leaves.
        leaves: their memory, for a GPU.
    """

    def __init__(
        self,
        program: Program,
        wrt: tuple[int, ...] | None = None,
        resident: int = 0,
        leaves: gpu_memory.Leaves | None = None,
    ) -> None:
        self.program = program
        if wrt is None:
            wrt = tuple(i for i, role in enumerate(program.leaf_roles) if role == "parameter")
        self._wrt = wrt
        self.resident = resident
        self.leaves = leaves

    @classmethod
    def of_model(
        cls,
        model: torch.nn.Module,
        ir: IR,
        flat: list[Any],
        policy: PrecisionPolicy | None,
        target: Target | None = None,
    ) -> StepGraph:
        """Builds the graph as deepwell.optimize would run the call with the flattened arguments ``flat``."""
        captured, deferred = defer(ir.captured, "lazy", policy)

        def tensor(leaf: Any) -> torch.Tensor:
            if leaf.kind == "parameter":
                return model.get_parameter(leaf.target)
            if leaf.kind == "buffer":
                return model.get_buffer(leaf.target)
            return flat[leaf.position] if leaf.kind == "input" else leaf.value

        leaves = {i: tensor(leaf) for i, leaf in enumerate(captured.leaves) if leaf.kind != "seed"}
        program = Program(captured.json, ArenaPool(), policy, target, deferred)
        program.set_dependencies(captured.depends)
        wrt = tuple(i for i, leaf in leaves.items() if leaf.requires_grad)
        given = [value for value in flat if isinstance(value, torch.Tensor)]
        # Parameters, buffers and arguments that forward does not read, and copies of leaves that are not contiguous.
        own = [*model.parameters(), *model.buffers(), *given]
        known = {leaf.untyped_storage()._cdata for leaf in leaves.values()}
        rest = [t for t in own if t.untyped_storage()._cdata not in known]
        copies = [t.nbytes for t in leaves.values() if not t.is_contiguous()]
        # Tensors of numbers that forward makes, whose values are in the graph: the capture keeps those on the device.
        places = ("cuda", "meta") if program.target.kind == "cuda" else ("cpu",)
        numbers = [t for t, _ in captured.folded if t.device.type in places]
        memory = gpu_memory.leaves_of(
            leaves,
            program.leaf_roles,
            [*rest, *numbers],
            program.target.alignment,
            isinstance(target, (Gpu, PlannedGpu))
            and all(not t.is_cuda for t in model.parameters()),
        )
        memory.cloned = tuple(
            output.index for output in captured.outputs if output.kind == "graph" and output.copied
        )
        return cls(program, wrt, _storage_bytes(iter(rest)) + sum(copies), memory)

    def sizes(self, batch: int, seq_len: int) -> tuple[int, ...]:
        """Returns the sizes of the graph's symbols, which must be batch and seq_len."""
        known = {"B": batch, "S": seq_len}
        strange = [name for name in self.program.symbols if name not in known]
        if strange:
            raise UnsupportedError(
                f"the graph has sizes {', '.join(self.program.symbols)}; expected only B and S, the batch and the length "
                "of its sequences"
            )
        return tuple(known[name] for name in self.program.symbols)

    def variant(
        self, sizes: tuple[int, ...], keep_outputs: bool | None, quantize_once: bool = False
    ) -> tuple[Any, bytes]:
        """Returns the engine of a training step, and which outputs the caller keeps: only the loss, or all outputs if
        there is no loss. ``quantize_once``: the step's micro-batches share the codes of weights."""
        outputs = self.program.variant((), ()).plan(sizes).outputs
        constant = set(self.program.constant_outputs(self._wrt))
        floating = [
            i
            for i, (dtype, _) in enumerate(outputs)
            if DTYPES[dtype].is_floating_point and i not in constant
        ]
        losses = [i for i in floating if len(outputs[i][1]) == 0][:1]
        wanted = tuple(losses or floating) if self._wrt else ()
        if keep_outputs is None:
            keep_outputs = not losses
        kept = bytes(keep_outputs or i in wanted for i in range(len(outputs)))
        keeps = quantize_once and self.program.policy is not None and bool(wanted)
        return self.program.variant(self._wrt if wanted else (), wanted, keeps), kept

    def peak(self, batch: int, seq_len: int, optimizer: str, accumulate: bool) -> dict[str, Any]:
        sizes = self.sizes(batch, seq_len)
        variant, kept = self.variant(sizes, None, accumulate)
        plan = variant.plan(sizes)
        moments, at = plan.step_memory(_counted_as(optimizer), accumulate, kept, self.resident)
        return moments[at]

    def fit(
        self, batch: int, seq_len: int, least: int, optimizer: str, capacity: int
    ) -> tuple[int, bool, dict[str, Any]]:
        """Returns the largest micro-batch of ``batch`` that fits, whether it does, and its peak."""
        sizes = self.sizes(batch, seq_len)
        if "B" not in self.program.symbols:
            peak = self.peak(batch, seq_len, optimizer, False)
            return batch, peak["total"] <= capacity, peak
        symbol = self.program.symbols.index("B")

        def fit(least: int, quantize_once: bool) -> tuple[int, bool, dict[str, Any]]:
            variant, kept = self.variant(sizes, None, quantize_once)
            return variant.engine.fit_step(
                sizes, symbol, least, _counted_as(optimizer), kept, self.resident, capacity
            )

        if self.program.policy is None:
            return fit(least, False)
        whole = fit(batch, False)
        return whole if whole[1] or least >= batch else fit(least, True)


def _described(hw: Any) -> Hardware | None:
    return hw if hw is None or isinstance(hw, Hardware) else hardware(hw)


def _host_memory(hw: Hardware | None) -> float:
    if hw is None:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    figure = hw.figures.get("host_memory")
    if figure is None:
        raise DeepwellError(
            f"the description of {hw.name} has no host_memory, which Deepwell's engine on the CPU needs: add it, "
            "or leave hw out for this machine"
        )
    return figure.value


def _gpu_here(model: torch.nn.Module) -> Gpu | None:
    """Returns the GPU that plans are made on: the model's, or else a Hopper GPU of this machine."""
    if not torch.cuda.is_available():
        return None
    at = {t.device.index for t in named_tensors(model).values() if t.is_cuda}
    for index in [*at, torch.cuda.current_device(), *range(torch.cuda.device_count())]:
        if torch.cuda.get_device_capability(index) == (9, 0):
            return Gpu(index)
    return None


def _target_of(model: torch.nn.Module, target: str, hw: Hardware | None) -> Target:
    """Returns the target whose engine makes the plan."""
    if target not in _TARGETS:
        raise UnsupportedError(
            f"the memory of a step on target={target!r} is not predicted: use "
            + ", ".join(map(repr, _TARGETS))
        )
    devices = {t.device for t in named_tensors(model).values()}
    on_gpu = [device for device in devices if device.type == "cuda"]
    if target == "auto":
        if on_gpu:
            target = "sm_90a"
        elif hw is not None and hw.gpu_count > 0:
            if hw.architecture != "sm_90a":
                raise UnsupportedError(
                    f"not supported: Deepwell's engine runs on Hopper GPUs (sm_90a), and {hw.name} is "
                    f"{hw.architecture}; target='cpu' predicts the engine on the CPU of such a machine"
                )
            target = "sm_90a"
        else:
            target = "cpu"
    if target == "cpu":
        return Target()
    reason = unsupported_parameter(model)
    if reason is not None:
        raise UnsupportedError(f"not supported: {reason}")
    if target in EMULATED:
        return EmulatedGpu(target)
    if len(on_gpu) > 0 and len(devices) > 1:
        raise UnsupportedError(
            f"not supported: the engine holds a model on one GPU, and this one is on {len(devices)} devices"
        )
    if on_gpu and torch.cuda.get_device_capability(on_gpu[0]) != (9, 0):
        raise UnsupportedError(
            f"not supported: Deepwell's engine runs on Hopper GPUs (sm_90a), and the model is on "
            f"{torch.cuda.get_device_name(on_gpu[0])}"
        )
    return _gpu_here(model) or PlannedGpu()


@dataclass(frozen=True)
class _Machine:
    """What the report says of the machine: where the plan was made, and the memory that the step must fit into."""

    device: str
    plan_exact: bool  # the plan is that of the machine itself, or of an emulated GPU
    capacity: float | None


def _gpu_machine(target: Target, hw: Hardware | None) -> _Machine:
    capacity = None
    if hw is not None and "memory" in hw.figures:
        capacity = hw.figures["memory"].value
    if isinstance(target, Gpu):
        properties = torch.cuda.get_device_properties(target.device)
        if capacity is None:
            capacity = float(properties.total_memory)
        return _Machine(properties.name, True, capacity)
    if isinstance(target, PlannedGpu):
        return _Machine("a Hopper GPU that is not here" if hw is None else hw.name, False, capacity)
    return _Machine(target.name, True, capacity)


def predict_step(
    model: torch.nn.Module,
    example_inputs: Any = None,
    *,
    optimizer: Any = "adamw_dw",
    precision: str | Precision | PrecisionPolicy = "auto",
    target: str = "auto",
    accumulate: bool = False,
    quantize_once: bool | None = None,
    keep_outputs: bool | None = None,
    threads: int | None = None,
    hw: Any = None,
    ir: IR | None = None,
) -> dict[str, Any]:
    """Predicts the memory of one training step of ``model`` behind ``deepwell.optimize``, to the byte. Nothing is
    computed and no tensor is made. See ``deepwell.dryrun``. ``ir``: the capture of this call, if there is one."""
    name = optimizer_name(optimizer)
    policy = policy_of(precision)
    described = _described(hw)
    place = _target_of(model, target, described)
    on_cpu = type(place) is Target
    released = optimizer.released_bytes if isinstance(optimizer, AdamW) else None
    releases = isinstance(optimizer, AdamW) and optimizer.releases_gradients
    if releases and (on_cpu or accumulate or released is None):
        raise UnsupportedError(
            "the memory of release_gradients is predicted on a GPU for steps of one pass: use target='sm_90a' and "
            "accumulation=1, or an optimizer without it"
        )
    capacity = _host_memory(described) if on_cpu else None
    threads_before = _deepwell.get_threads()
    args, kwargs = call_arguments(model, example_inputs)
    if ir is None:
        ir = capture(model, (args, kwargs))
    flat, _ = pytree.tree_flatten((args, kwargs))
    sizes = tuple(flat[i].shape[axis] for i, axis in ir.captured.symbol_sources)
    _deepwell.set_threads(torch.get_num_threads() if threads is None else threads)
    try:
        step = StepGraph.of_model(model, ir, flat, policy, place)
        once = accumulate if quantize_once is None else quantize_once
        variant, kept = step.variant(sizes, keep_outputs, once)
        plan = variant.plan(sizes)
        planned_threads = _deepwell.get_threads()
        if on_cpu:
            counted = _counted_as(name)
            moments, peak = plan.step_memory(counted, accumulate, kept, step.resident)
        else:
            clipped = getattr(optimizer, "max_grad_norm", None)
            moments = gpu_memory.moments_of(
                step.program, variant, sizes, step.leaves, name, accumulate, kept, clipped, released
            )
            peak = max(range(len(moments)), key=lambda i: moments[i]["total"])
    except _deepwell.Error as error:
        raise DeepwellError(str(error)) from None
    finally:
        _deepwell.set_threads(threads_before)
    alive, first_backward = plan.arena_alive()
    most = moments[peak]["total"]
    report = {
        "model": ir.name,
        "sizes": dict(zip(ir.symbols, sizes)),
        "optimizer": name,
        "precision": "fp32" if policy is None else policy.name,
        "target": place.name if on_cpu or isinstance(place, EmulatedGpu) else "sm_90a",
        "threads": planned_threads if on_cpu else None,
        "peak_bytes": most,
        "memory_gb": most / GB,
        "memory_gib": most / GIB,
        "peak": moments[peak],
        "moments": moments,
        "arena": {
            "bytes": plan.arena_bytes,
            "saved_bytes": plan.saved_bytes,
            "kept_bytes": plan.kept_bytes,
            "alive": alive,
            "first_backward": first_backward,
        },
        # Not predicted.
        "step_time_ms": None,
        "mfu": None,
        "bubble_fraction": None,
        "overlap": None,
        "expected_speedup": None,
        "baseline": None,
    }
    return report | (_on_cpu(most, capacity) if on_cpu else _on_gpu(moments, place, described))


def _on_cpu(most: int, capacity: float) -> dict[str, Any]:
    return {
        # False: the size of oneDNN's own buffers is not known on this CPU, and they are not counted.
        "library_known": json.loads(_deepwell.machine())["onednn_memory_known"],
        "capacity_gb": capacity / GB,
        "capacity_gib": capacity / GIB,
        "fits": most <= capacity,
    }


def _on_gpu(moments: list[dict[str, Any]], place: Target, hw: Hardware | None) -> dict[str, Any]:
    machine = _gpu_machine(place, hw)
    capacity = machine.capacity
    allocated = max(moment["allocated"] for moment in moments)
    return {
        "device": machine.device,
        "plan_exact": machine.plan_exact,
        "allocated_bytes": allocated,
        "allocated_bytes_most": max(moment["allocated_most"] for moment in moments),
        "library_known": True,
        "capacity_gb": None if capacity is None else capacity / GB,
        "capacity_gib": None if capacity is None else capacity / GIB,
        "fits": None if capacity is None else allocated + _CONTEXT_BYTES <= capacity,
    }
