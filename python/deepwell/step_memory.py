"""What a training step of a model holds, before a tensor of it exists.

    report = deepwell.dryrun(model, example_inputs)     # the model may be on the meta device
    report["memory_gb"], report["moments"], report["fits"]

The model is captured and goes through the engine's own passes and placement; deepwell/step_memory.h adds what the caller
holds around it, in the order in which deepwell.optimize's forward and backward make and drop it. docs/engine.md has the
rules.
"""

from __future__ import annotations

import os
from typing import Any, Iterator

import torch
from torch.utils import _pytree as pytree

from deepwell import _deepwell
from deepwell.arena import ArenaPool
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.ir import IR, call_arguments, capture
from deepwell.machine import GIB, Hardware, hardware
from deepwell.optim import AdamW
from deepwell.optimize import PRECISIONS
from deepwell.runtime import DTYPES, Program

_OPTIMIZERS = {
    None: "none",
    "none": "none",
    "adamw_dw": "adamw_dw",
    "adamw": "adamw",
    AdamW: "adamw_dw",
    torch.optim.AdamW: "adamw",
}


def _optimizer_name(optimizer: Any) -> str:
    name = _OPTIMIZERS.get(optimizer) if isinstance(optimizer, (str, type, type(None))) else None
    if name is None:
        raise UnsupportedError(
            f"the memory of the optimizer {optimizer!r} is not known: use 'adamw_dw' (deepwell.AdamW), 'adamw' "
            "(torch.optim.AdamW, neither fused nor foreach), or None and add the bytes of its states"
        )
    return name


def _storage_bytes(tensors: Iterator[torch.Tensor]) -> int:
    """Of all tensors, each storage once: tied parameters and views are no more memory."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class _Step:
    """One call of the model, as deepwell.optimize would run it, with shapes in the place of tensors."""

    def __init__(self, model: torch.nn.Module, ir: IR, flat: list[Any], precision: str) -> None:
        captured = ir.captured
        self._model, self._captured, self._flat = model, captured, flat
        self.sizes = tuple(flat[i].shape[axis] for i, axis in captured.symbol_sources)
        self.program = Program(captured.json, ArenaPool(), precision)
        self.program.set_dependencies(captured.depends)

    def _tensor(self, leaf: Any) -> torch.Tensor:
        if leaf.kind == "parameter":
            return self._model.get_parameter(leaf.target)
        if leaf.kind == "buffer":
            return self._model.get_buffer(leaf.target)
        return self._flat[leaf.position] if leaf.kind == "input" else leaf.value

    def _leaves(self) -> list[tuple[int, torch.Tensor]]:
        leaves = enumerate(self._captured.leaves)
        return [(i, self._tensor(leaf)) for i, leaf in leaves if leaf.kind != "seed"]

    def plan(self) -> tuple[_deepwell.Plan, tuple[int, ...]]:
        """The plan of forward and backward in a training that has begun, and the outputs that are differentiated."""
        wrt = tuple(i for i, tensor in self._leaves() if tensor.requires_grad)
        outputs = self.program.variant((), ()).plan(self.sizes).outputs
        constant = set(self.program.constant_outputs(wrt))
        floating = [
            i
            for i, (dtype, _) in enumerate(outputs)
            if DTYPES[dtype].is_floating_point and i not in constant
        ]
        self.losses = [i for i in floating if len(outputs[i][1]) == 0][:1]
        wanted = tuple(self.losses or floating) if wrt else ()
        return self.program.variant(wrt if wanted else (), wanted).plan(self.sizes), wanted

    def resident(self) -> int:
        """Bytes that the caller holds and that no leaf of the graph counts: parameters and buffers that forward does not
        read, arguments likewise, and copies of leaves that are not contiguous."""
        leaves = [tensor for _, tensor in self._leaves()]
        given = [value for value in self._flat if isinstance(value, torch.Tensor)]
        own = [*self._model.parameters(), *self._model.buffers(), *given]
        known = {tensor.untyped_storage()._cdata for tensor in leaves}
        rest = [tensor for tensor in own if tensor.untyped_storage()._cdata not in known]
        copies = [t.numel() * t.element_size() for t in leaves if not t.is_contiguous()]
        return _storage_bytes(iter(rest)) + sum(copies)


def _host_memory(hw: Any) -> float:
    if hw is None:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    described = hw if isinstance(hw, Hardware) else hardware(hw)
    figure = described.figures.get("host_memory")
    if figure is None:
        raise DeepwellError(
            f"the description of {described.name} has no host_memory, and this engine runs on the CPU: add it, or leave "
            "hw out for this machine"
        )
    return figure.value


def predict_step(
    model: torch.nn.Module,
    example_inputs: Any = None,
    *,
    optimizer: Any = "adamw_dw",
    precision: str = "auto",
    accumulate: bool = False,
    keep_outputs: bool | None = None,
    threads: int | None = None,
    hw: Any = None,
) -> dict[str, Any]:
    """The memory of one training step of ``model`` behind ``deepwell.optimize``, to the byte; nothing is computed and no
    tensor is made. See ``deepwell.dryrun``."""
    name = _optimizer_name(optimizer)
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision={precision!r} does not exist: use one of {', '.join(PRECISIONS)}"
        )
    capacity = _host_memory(hw)
    threads_before = _deepwell.get_threads()
    args, kwargs = call_arguments(model, example_inputs)
    ir = capture(model, (args, kwargs))
    flat, _ = pytree.tree_flatten((args, kwargs))
    _deepwell.set_threads(torch.get_num_threads() if threads is None else threads)
    try:
        step = _Step(model, ir, flat, "fp32" if precision == "auto" else precision)
        plan, wanted = step.plan()
        planned_threads = _deepwell.get_threads()
    except _deepwell.Error as error:
        raise DeepwellError(str(error)) from None
    finally:
        _deepwell.set_threads(threads_before)
    if keep_outputs is None:  # a loss is all that a loop keeps; else outputs are what it works with
        keep_outputs = not step.losses
    kept = bytes(keep_outputs or i in wanted for i in range(len(plan.outputs)))
    moments, peak = plan.step_memory(name, accumulate, kept, step.resident())
    alive, first_backward = plan.arena_alive()
    most = moments[peak]["total"]
    return {
        "model": ir.name,
        "sizes": dict(zip(ir.symbols, step.sizes)),
        "optimizer": name,
        "precision": step.program.precision,
        "threads": planned_threads,
        "peak_bytes": most,
        "memory_gb": most / GIB,
        "peak": moments[peak],
        "moments": moments,
        "arena": {
            "bytes": plan.arena_bytes,
            "saved_bytes": plan.saved_bytes,
            "alive": alive,
            "first_backward": first_backward,
        },
        "capacity_gb": capacity / GIB,
        "fits": most <= capacity,
        # Not predicted for a CPU.
        "step_time_ms": None,
        "mfu": None,
        "bubble_fraction": None,
        "overlap": None,
        "expected_speedup": {"bf16": None, "unplanned": None},
    }
