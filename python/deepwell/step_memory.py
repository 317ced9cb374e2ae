"""Predicts the memory of a model's training step before any tensor exists.

    report = deepwell.dryrun(model, example_inputs)     # the model may be on the meta device
    report["memory_gb"], report["moments"], report["fits"]

The model is captured and goes through the engine's own passes and placement. deepwell/step_memory.h adds what the
caller holds, in the order in which deepwell.optimize's forward and backward make and free it. docs/engine.md has the
rules.
"""

from __future__ import annotations

import json
import os
from typing import Any, Iterator

import torch
from torch.utils import _pytree as pytree

from deepwell import _deepwell
from deepwell.arena import ArenaPool
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.ir import IR, call_arguments, capture
from deepwell.lazy_logits import defer
from deepwell.machine import GB, GIB, Hardware, hardware
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


def optimizer_name(optimizer: Any) -> str:
    name = _OPTIMIZERS.get(optimizer) if isinstance(optimizer, (str, type, type(None))) else None
    if name is None:
        raise UnsupportedError(
            f"the memory of the optimizer {optimizer!r} is not known: use 'adamw_dw' (deepwell.AdamW), 'adamw' "
            "(torch.optim.AdamW, neither fused nor foreach), or None and add the bytes of its states"
        )
    return name


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision={precision!r} does not exist: use one of {', '.join(PRECISIONS)}"
        )


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
    """

    def __init__(
        self, program: Program, wrt: tuple[int, ...] | None = None, resident: int = 0
    ) -> None:
        self.program = program
        if wrt is None:
            wrt = tuple(i for i, role in enumerate(program.leaf_roles) if role == "parameter")
        self._wrt = wrt
        self.resident = resident

    @classmethod
    def of_model(cls, model: torch.nn.Module, ir: IR, flat: list[Any], precision: str) -> StepGraph:
        """Builds the graph as deepwell.optimize would run the call with the flattened arguments ``flat``."""
        captured, deferred = defer(ir.captured, "lazy", precision)

        def tensor(leaf: Any) -> torch.Tensor:
            if leaf.kind == "parameter":
                return model.get_parameter(leaf.target)
            if leaf.kind == "buffer":
                return model.get_buffer(leaf.target)
            return flat[leaf.position] if leaf.kind == "input" else leaf.value

        leaves = {i: tensor(leaf) for i, leaf in enumerate(captured.leaves) if leaf.kind != "seed"}
        program = Program(captured.json, ArenaPool(), precision, deferred=deferred)
        program.set_dependencies(captured.depends)
        wrt = tuple(i for i, leaf in leaves.items() if leaf.requires_grad)
        given = [value for value in flat if isinstance(value, torch.Tensor)]
        # Parameters, buffers and arguments that forward does not read, and copies of leaves that are not contiguous.
        own = [*model.parameters(), *model.buffers(), *given]
        known = {leaf.untyped_storage()._cdata for leaf in leaves.values()}
        rest = [t for t in own if t.untyped_storage()._cdata not in known]
        copies = [t.nbytes for t in leaves.values() if not t.is_contiguous()]
        return cls(program, wrt, _storage_bytes(iter(rest)) + sum(copies))

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

    def variant(self, sizes: tuple[int, ...], keep_outputs: bool | None) -> tuple[Any, bytes]:
        """Returns the engine of a training step, and which outputs the caller keeps: only the loss, or all outputs if
        there is no loss."""
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
        return self.program.variant(self._wrt if wanted else (), wanted), kept

    def peak(self, batch: int, seq_len: int, optimizer: str, accumulate: bool) -> dict[str, Any]:
        sizes = self.sizes(batch, seq_len)
        variant, kept = self.variant(sizes, None)
        plan = variant.plan(sizes)
        moments, at = plan.step_memory(optimizer, accumulate, kept, self.resident)
        return moments[at]

    def fit(
        self, batch: int, seq_len: int, least: int, optimizer: str, capacity: int
    ) -> tuple[int, bool, dict[str, Any]]:
        """Returns the largest micro-batch of ``batch`` that fits, whether it does, and its peak."""
        sizes = self.sizes(batch, seq_len)
        if "B" not in self.program.symbols:
            peak = self.peak(batch, seq_len, optimizer, False)
            return batch, peak["total"] <= capacity, peak
        variant, kept = self.variant(sizes, None)
        symbol = self.program.symbols.index("B")
        return variant.engine.fit_step(
            sizes, symbol, least, optimizer, kept, self.resident, capacity
        )


def _host_memory(hw: Any) -> float:
    if hw is None:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    described = hw if isinstance(hw, Hardware) else hardware(hw)
    figure = described.figures.get("host_memory")
    if figure is None:
        raise DeepwellError(
            f"the description of {described.name} has no host_memory, which Deepwell's engine on the CPU needs: add it, "
            "or leave hw out for this machine"
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
    """Predicts the memory of one training step of ``model`` behind ``deepwell.optimize``, to the byte. Nothing is
    computed and no tensor is made. See ``deepwell.dryrun``."""
    name = optimizer_name(optimizer)
    check_precision(precision)
    capacity = _host_memory(hw)
    threads_before = _deepwell.get_threads()
    args, kwargs = call_arguments(model, example_inputs)
    ir = capture(model, (args, kwargs))
    flat, _ = pytree.tree_flatten((args, kwargs))
    sizes = tuple(flat[i].shape[axis] for i, axis in ir.captured.symbol_sources)
    _deepwell.set_threads(torch.get_num_threads() if threads is None else threads)
    try:
        step = StepGraph.of_model(model, ir, flat, "fp32" if precision == "auto" else precision)
        variant, kept = step.variant(sizes, keep_outputs)
        plan = variant.plan(sizes)
        planned_threads = _deepwell.get_threads()
        moments, peak = plan.step_memory(name, accumulate, kept, step.resident)
    except _deepwell.Error as error:
        raise DeepwellError(str(error)) from None
    finally:
        _deepwell.set_threads(threads_before)
    alive, first_backward = plan.arena_alive()
    most = moments[peak]["total"]
    return {
        "model": ir.name,
        "sizes": dict(zip(ir.symbols, sizes)),
        "optimizer": name,
        "precision": step.program.precision,
        "threads": planned_threads,
        "peak_bytes": most,
        "memory_gb": most / GB,
        "memory_gib": most / GIB,
        "peak": moments[peak],
        "moments": moments,
        "arena": {
            "bytes": plan.arena_bytes,
            "saved_bytes": plan.saved_bytes,
            "alive": alive,
            "first_backward": first_backward,
        },
        # False: the size of oneDNN's own buffers is not known on this CPU, and they are not counted above.
        "library_known": json.loads(_deepwell.machine())["onednn_memory_known"],
        "capacity_gb": capacity / GB,
        "capacity_gib": capacity / GIB,
        "fits": most <= capacity,
        # Not predicted for a CPU.
        "step_time_ms": None,
        "mfu": None,
        "bubble_fraction": None,
        "overlap": None,
        "expected_speedup": None,
        "baseline": None,
    }
