"""The operations of a compiled engine: one for each instruction of the plans that run it.

    for op in engine.compiled_ops:
        print(op.op, op.kernel, op.precision, op.predicted_ms, op.measured_ms)
    engine.compiled_ops[0].backend_op()      # runs that kernel on operands of its own

The C library lists the instructions (dw_plan_operations in deepwell/engine.h) and runs one by itself (dw_instruction).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from deepwell import _deepwell
from deepwell.errors import DeepwellError, UnsupportedError
from deepwell.targets import Target

# Element types of operands that say in which precision an operation computes.
_PRECISIONS = {"f64": "fp64", "f32": "fp32", "f16": "fp16", "bf16": "bf16"}


class _Operands:
    """Holds the operands of the operation that was called last, so that calling one after the other needs no more
    memory than the largest."""

    def __init__(self) -> None:
        self.of: BackendOp | None = None

    def pass_to(self, backend_op: BackendOp) -> None:
        if self.of is not None and self.of is not backend_op:
            self.of.release()
        self.of = backend_op


class BackendOp:
    """A kernel of a plan with operands of its own. Each call runs it once and returns nothing; on a GPU the call
    enqueues it on PyTorch's current stream and does not wait.

    Operands have the shapes, types and layout of the plan: numbers between -1 and 1, indices that lie in every axis.
    The first call allocates them on the engine's device; ``release()``, or a call of another operation of the engine,
    frees them.

    Attributes:
        name: "linear h.0.mlp.fc_in".
        kernel: the kernel's name.
        flops, bytes: of one call.
        device: "cpu", "cuda" or "emulator:sm_90a".
        why_not: why it cannot run, or None. A call then raises UnsupportedError.
    """

    def __init__(
        self,
        plan: _deepwell.Plan,
        index: int,
        target: Target,
        listed: dict[str, Any],
        operands: _Operands,
    ) -> None:
        self._plan, self._index, self._target, self._operands = plan, index, target, operands
        self._instruction: Any = None
        self.name = f"{listed['op']} {listed['module'] or listed['name'] or ''}".strip()
        self.kernel: str = listed["kernel"]
        self.flops: float = listed["flops"]
        self.bytes: float = listed["bytes"]
        self.device = target.name
        self.why_not: str | None = None
        if target.name.startswith("plan:"):
            self.why_not = (
                f"the plan is for a GPU that is not here ({target.name.partition(':')[2]})"
            )

    def __call__(self) -> None:
        if self.why_not is not None:
            raise UnsupportedError(
                f"{self.name} ({self.kernel}) cannot run here: {self.why_not}; compile the model on the device that it is for"
            )
        self._operands.pass_to(self)
        try:
            if self._instruction is None:
                with self._target.current():
                    self._instruction = self._plan.instruction(self._index)
            self._target.run_alone(self._instruction)
        except _deepwell.Error as error:
            self.release()
            raise DeepwellError(f"{self.name} cannot run by itself: {error}") from None

    def wait(self) -> None:
        """Waits until the calls so far are done."""
        self._target.wait()

    def release(self) -> None:
        """Frees the operands."""
        if self._instruction is not None:
            self._target.wait()  # the kernel may still read them
            with self._target.current():
                self._instruction = None

    def __repr__(self) -> str:
        return f"<{self.name} by {self.kernel} on {self.device}>"


@dataclasses.dataclass
class CompiledOp:
    """One instruction of an engine's plan.

    op: the graph's operation; name: its result in the graph. phase: "forward" or "backward". kernel: the kernel's name,
    and epilogue: that of elementwise operations or rope in the same instruction, or None. precision: of the computation
    ("fp32", "bf16"), or the format of the operands ("mxfp8"). module: dotted path, layer: its number, region: "embed",
    "attn", "mlp", "norm", "router", "experts", "head", "loss"; None where the graph has none. inputs, outputs: (type,
    shape). flops: of the operation. bytes: that it reads and writes. stream_id: of the device; an engine has one stream, 0.
    predicted_ms: by the cost model, whose origin is predicted_from; None where it has none, as on a CPU. measured_ms:
    mean time of engine.profile; None before.
    """

    op: str
    name: str | None
    phase: str
    kernel: str
    epilogue: str | None
    precision: str
    module: str | None
    layer: int | None
    region: str | None
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, tuple[int, ...]], ...]
    flops: float
    bytes: float
    predicted_ms: float | None
    predicted_from: str | None
    backend_op: BackendOp
    stream_id: int = 0
    measured_ms: float | None = None
    runs: int = 0  # timed runs that measured_ms is the mean of

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the inputs and then the outputs."""
        return tuple(shape for _, shape in (*self.inputs, *self.outputs))


def _tensors(listed: list[dict[str, Any]]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((entry["dtype"], tuple(entry["shape"])) for entry in listed)


def _precision(listed: dict[str, Any]) -> str:
    """Returns the quantized format of the operands, or else the type of the first tensor of numbers."""
    if listed["scheme"] is not None:
        return listed["scheme"]
    types = [entry["dtype"] for entry in (*listed["inputs"], *listed["outputs"])]
    found = next((t for t in types if t in _PRECISIONS), types[0] if types else "none")
    return _PRECISIONS.get(found, found)


def _path(prefix: str, module: str | None) -> str | None:
    return ".".join(part for part in (prefix, module) if part) or None


def listed_ops(plan: _deepwell.Plan, target: Target, prefix: str = "") -> list[CompiledOp]:
    """Returns the plan's instructions, with the times that they were measured to take. ``prefix``: path of the module
    whose graph the plan runs."""
    operands = _Operands()
    ops = []
    entries = zip(json.loads(plan.operations()), plan.times())
    for index, (listed, (runs, seconds, _)) in enumerate(entries):
        listed["module"] = _path(prefix, listed["module"])
        predicted = listed["seconds"]
        epilogue = listed["epilogue"]
        ops.append(
            CompiledOp(
                op=listed["op"],
                name=listed["name"],
                phase=listed["phase"],
                kernel=listed["kernel"],
                epilogue=None if epilogue is None else epilogue["kernel"],
                precision=_precision(listed),
                module=listed["module"],
                layer=listed["layer"],
                region=listed["region"],
                inputs=_tensors(listed["inputs"]),
                outputs=_tensors(listed["outputs"]),
                flops=listed["flops"],
                bytes=listed["bytes"],
                predicted_ms=None if predicted is None else 1e3 * predicted,
                predicted_from=listed["seconds_from"],
                backend_op=BackendOp(plan, index, target, listed, operands),
                measured_ms=1e3 * seconds / runs if runs else None,
                runs=runs,
            )
        )
    return ops
