"""deepwell.compile: a captured model, a plan and a target as one object that trains and can be looked into.

    ir = deepwell.capture(model, example_inputs)
    engine = deepwell.compile(ir, precision="mxfp8")
    loss = engine(input_ids=ids, labels=ids).loss
    loss.backward()
    print(engine)
    engine.profile(trace="trace.json")

An Engine adds nothing of its own: deepwell.optimize runs the model, the plan is deepwell.autoplan's, and the operations
are the instructions of the C library's plan. docs/compile.md describes it.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from typing import Any, Iterable, Iterator, NamedTuple

import torch
from torch.utils import _pytree as pytree

from deepwell import _deepwell, step_profile
from deepwell.attention.install import installation
from deepwell.compiled_ops import CompiledOp, listed_ops
from deepwell.errors import CaptureError, DeepwellError, UnsupportedError
from deepwell.guards import named_tensors
from deepwell.host_plan import HostPlan
from deepwell.ir import IR, capture, made_arguments
from deepwell.machine import Hardware, hardware, probe
from deepwell.optimize import _unwrap, installed, optimize, restore
from deepwell.plans import Plan, autoplan
from deepwell.precision import Precision, policy_of
from deepwell.step_memory import StepGraph
from deepwell.targets import Gpu, Target

_FALLBACKS = ("safe", "error", "none")


class LeftToPyTorch(NamedTuple):
    """A module that PyTorch runs, because the engine cannot. ``path`` is "" for the model itself."""

    path: str
    module: str
    reason: str


class Engine:
    """A model that runs on this machine by ``deepwell.compile``. Call it as the model; gradients flow as through the model.

    Attributes:
        model: the module, which ``deepwell.optimize`` has optimized in place.
        ir: its graph, or None if it could not be captured.
        plan: the plan that it was compiled with, or None.
        precision: that of the GEMMs, as given to ``compile``; "auto" (the model's own) where it is not supported here.
        target: where it runs: "cpu", "sm_90a", "sm_120a", "emulator:sm_90a", "emulator:sm_120a"; "meta" for a model
            without memory.
        fallback: as given.
        notes: what to know about this engine, one line each.
        measured: the last result of ``profile``, or None.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        ir: IR | None,
        plan: Plan | HostPlan | None,
        precision: Any,
        target: str,
        fallback: str,
        notes: Iterable[str],
        not_captured: str | None = None,
    ) -> None:
        self.model = model
        self.ir = ir
        self.plan = plan
        self.precision = precision
        self.fallback = fallback
        self.notes: list[str] = list(notes)
        self.measured: dict[str, Any] | None = None
        self._asked_target = target
        self._not_captured = not_captured
        self._ops: list[CompiledOp] | None = None
        self._announced: Any = None

    # ---- the model -----------------------------------------------------------------------------------

    @property
    def _root(self) -> torch.nn.Module:
        return _unwrap(self.model)

    @property
    def planned_only(self) -> bool:
        """Whether the model has no memory, so that nothing can run."""
        return any(tensor.is_meta for tensor in named_tensors(self._root).values())

    @property
    def target(self) -> str:
        if self.planned_only:
            return "meta"
        place = self._place()
        if not isinstance(place, Gpu):
            return place.name
        return "sm_{}{}a".format(*torch.cuda.get_device_capability(place.device))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.planned_only:
            raise UnsupportedError(
                f"this engine is a plan only, because {type(self._root).__name__} is on the meta device and has no values: "
                "make the model on a device (or load its weights), capture it there and compile it again"
            )
        result = self.model(*args, **kwargs)
        if self.fallback != "safe":
            self._refuse_fallbacks()
        return result

    def _refuse_fallbacks(self) -> None:
        for left in self.fallbacks:
            raise UnsupportedError(
                f"PyTorch ran {left.path or 'the model'} ({left.module}) and fallback={self.fallback!r} forbids it: "
                f"{left.reason}. Change that, or compile with fallback='safe'"
            )

    def parameters(self, recurse: bool = True) -> Iterator[torch.nn.Parameter]:
        return self.model.parameters(recurse)

    def named_parameters(
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return self.model.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.load_state_dict(*args, **kwargs)

    def train(self, mode: bool = True) -> Engine:
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    @property
    def training(self) -> bool:
        return self.model.training

    # ---- what runs -----------------------------------------------------------------------------------

    @property
    def fallbacks(self) -> list[LeftToPyTorch]:
        """What PyTorch runs because the engine cannot. Known after the first call; calls that were measured to be faster
        in PyTorch are not listed."""
        forwards = installed(self._root)
        if forwards:
            found = forwards[0].session.left_to_pytorch()
        else:
            made = installation(self._root)
            left = {} if made is None else made.left
            found = [
                (path, type(self._root.get_submodule(path)).__name__, reason)
                for path, reason in left.items()
            ]
        if self._not_captured is not None and all(path for path, _, _ in found):
            found = [("", type(self._root).__name__, self._not_captured), *found]
        return [LeftToPyTorch(*one) for one in found]

    def _place(self) -> Target:
        """Returns where the model runs, or where Deepwell's engine would run it."""
        forwards = installed(self._root)
        if forwards:
            return forwards[0].session.target
        devices = {tensor.device for tensor in named_tensors(self._root).values()}
        gpu = next((device for device in devices if device.type == "cuda"), None)
        return Target() if gpu is None else Gpu(gpu.index)

    @property
    def compiled_ops(self) -> list[CompiledOp]:
        """The instructions of the plan, in the order in which they run: those of a training step at the sizes of the
        example inputs, and after ``profile`` those that it measured."""
        if self._ops is None:
            self._ops = self._planned_ops()
        return self._ops

    def _planned_ops(self) -> list[CompiledOp]:
        if self.ir is None:
            return []
        place = self._place()
        flat, _ = pytree.tree_flatten(self.ir.arguments)
        sizes = tuple(flat[at].shape[axis] for at, axis in self.ir.captured.symbol_sources)
        place.begin()
        try:
            step = StepGraph.of_model(
                self._root,
                self.ir,
                flat,
                policy_of(self.precision),
                place,
            )
            variant, _ = step.variant(sizes, None)
            return listed_ops(variant.prepared(sizes).plan, place)
        except _deepwell.Error as error:
            raise DeepwellError(str(error)) from None

    def profile(
        self,
        *inputs: Any,
        steps: int = 10,
        warmup: int = 2,
        trace: str | os.PathLike | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Measures training steps (forward, and backward to the parameters) on ``inputs``, by default the example inputs.

        The dict has step_time_ms, forward_ms and backward_ms (medians of ``steps`` steps as a training makes them),
        step_times_ms, operations (the time of each kind of operation in a step), operations_ms (their sum), outside_ms
        (Python, autograd and what PyTorch runs beside them), method, device, engine_runs (False: calls like this one run
        in PyTorch, which was measured to be faster or which the engine cannot replace) and trace. What could not be
        measured is None. ``trace``: a file to write for ui.perfetto.dev. Afterwards ``compiled_ops`` have measured_ms.
        """
        if self.planned_only:
            raise UnsupportedError(
                "a model on the meta device has no values to run with: profile it where it has memory"
            )
        if not inputs and not kwargs:
            if self.ir is None:
                raise DeepwellError(
                    "this engine has no example inputs, because the model was not captured: pass the model's arguments"
                )
            inputs, kwargs = self._example()
        made = step_profile.measure(self.model, self._root, inputs, kwargs, steps, warmup, trace)
        if made.ops:
            self._ops = made.ops
        self.measured = made.report
        return made.report

    def _example(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the example inputs where the model is now; zeros for those without values."""
        device = next((p.device for p in self._root.parameters()), torch.device("cpu"))

        def placed(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.device == device:
                return value
            return torch.zeros_like(value, device=device) if value.is_meta else value.to(device)

        return pytree.tree_map(placed, self.ir.arguments)

    # ---- text ----------------------------------------------------------------------------------------

    def summary(self) -> str:
        """Returns what runs where, the plan, the time of the operations, and what PyTorch runs and why."""
        root = self._root
        ir = self.ir
        lines = [
            f"Engine of {type(root).__name__} on {self.target}, precision {_named(self.precision)}"
        ]
        if ir is not None:
            lines.append(
                f"  graph: {ir.node_count} nodes, {ir.parameter_count:,} parameters, sizes {', '.join(ir.symbols) or 'fixed'}"
            )
        if self.plan is not None:
            lines.append(f"  plan: {self.plan!r}")
        lines += [f"  note: {note}" for note in self.notes]
        if self._ops is not None:
            lines += _ops_text(self._ops)
        if self.measured is not None:
            lines.append(_measured_text(self.measured))
        left = self.fallbacks
        lines += [
            f"  PyTorch runs {one.path or 'the model'} ({one.module}): {one.reason}"
            for one in left[:16]
        ]
        if len(left) > 16:
            lines.append(f"  and {len(left) - 16} more (engine.fallbacks)")
        return "\n".join(lines)

    __str__ = summary

    def __repr__(self) -> str:
        return f"<Engine of {type(self._root).__name__} on {self.target}, precision {_named(self.precision)}>"


def _named(precision: Any) -> str:
    return str(getattr(precision, "value", getattr(precision, "name", precision)))


def _ops_text(ops: list[CompiledOp]) -> list[str]:
    counted = Counter((op.op, op.kernel) for op in ops)
    lines = [f"  {len(ops)} operations:"]
    for (name, kernel), count in counted.most_common(8):
        same = [op for op in ops if (op.op, op.kernel) == (name, kernel)]
        measured = [op.measured_ms for op in same if op.measured_ms is not None]
        predicted = [op.predicted_ms for op in same if op.predicted_ms is not None]
        times = f", {sum(measured):.3f} ms measured" if measured else ""
        times += f", {sum(predicted):.3f} ms predicted" if len(predicted) == len(same) else ""
        lines.append(f"    {count:4} x {name} by {kernel}{times}")
    if len(counted) > 8:
        lines.append(f"    and {len(counted) - 8} more kinds (engine.compiled_ops)")
    return lines


def _measured_text(measured: dict[str, Any]) -> str:
    where = "" if measured["engine_runs"] else "; PyTorch runs calls like this one"
    return (
        f"  measured on {measured['device']}: {measured['step_time_ms']:.3f} ms for a step{where}"
    )


# ---- compile -------------------------------------------------------------------------------------------


def compile(
    ir: IR | torch.nn.Module,
    plan: Plan | HostPlan | None = None,
    precision: Any = "auto",
    fallback: str = "safe",
    target: str = "auto",
    example_inputs: Any = None,
) -> Engine:
    """Binds a captured model to this machine. Returns an engine that is called as the model.

    Args:
        ir: what ``deepwell.capture`` returns, or a module, which is then captured with ``example_inputs``.
        plan: what ``deepwell.autoplan`` returns. A plan for several GPUs is compiled for one process of it, and a note
            says so.
        precision: as for ``deepwell.optimize``: a name, a ``deepwell.Precision`` or a policy.
        fallback: "safe": PyTorch runs what the engine cannot, ``engine.fallbacks`` lists it, and a precision that this
            device does not support becomes the model's own, with a warning. "error" or "none": that is an
            UnsupportedError, here or in the call that needs it.
        target: as for ``deepwell.optimize``.

    The model is optimized in place (``deepwell.restore(engine.model)`` undoes it). A model on the meta device is planned
    only: calling the engine is an error, everything that needs no values works.

    Raises:
        TypeError: ``ir`` is neither a capture nor a module.
        ValueError: a precision or a fallback that does not exist.
        UnsupportedError: a target that this machine does not have; with fallback "error" or "none" also a model that
            cannot be captured whole.
    """
    engine, notes = _compiled(ir, plan, precision, fallback, target, example_inputs)
    for note in notes:
        warnings.warn(f"deepwell: {note}", stacklevel=2)
    return engine


def _compiled(
    ir: Any, plan: Any, precision: Any, fallback: str, target: str, example_inputs: Any
) -> tuple[Engine, list[str]]:
    """Returns the engine, and those of its notes that are worth a warning."""
    if fallback not in _FALLBACKS:
        raise ValueError(f"fallback={fallback!r} does not exist: use 'safe', 'error' or 'none'")
    if plan is not None and not isinstance(plan, (Plan, HostPlan)):
        raise TypeError(
            f"plan is a {type(plan).__name__}; expected what deepwell.autoplan or deepwell.Plan.load returns"
        )
    not_captured = None
    if isinstance(ir, IR):
        if ir.module is None:
            raise DeepwellError(
                f"the capture of {ir.name} does not know its module: pass what deepwell.capture(model) returned, or the model"
            )
        model = ir.module
        if example_inputs is not None:
            ir = capture(model, example_inputs)
    elif isinstance(ir, torch.nn.Module):
        model = ir
        ir, not_captured = _captured(_unwrap(model), example_inputs, fallback)
    else:
        raise TypeError(
            f"deepwell.compile needs the result of deepwell.capture or a module, not {type(ir).__name__}"
        )
    planned_only = any(tensor.is_meta for tensor in named_tensors(_unwrap(model)).values())
    refused: list[str] = []
    if not planned_only:
        precision, refused = _optimized(model, precision, target, fallback)
    warned = [*_plan_notes(plan, precision), *refused]
    notes = list(warned)
    if planned_only:
        notes.append(
            "the model is on the meta device: this engine is a plan only and cannot be called"
        )
    engine = Engine(model, ir, plan, precision, target, fallback, notes, not_captured)
    if fallback != "safe" and not engine.planned_only and not installed(engine._root):
        restore(model)
        raise UnsupportedError(
            f"the engine does not run {type(engine._root).__name__} on this device, where PyTorch runs it with Deepwell's "
            f"attention, and fallback={fallback!r} forbids that: use fallback='safe'"
        )
    return engine, warned


def _captured(
    model: torch.nn.Module, example_inputs: Any, fallback: str
) -> tuple[IR | None, str | None]:
    """Returns the capture, or why there is none."""
    try:
        return capture(model, example_inputs), None
    except CaptureError as error:
        if fallback == "safe":
            return None, str(error)
        raise UnsupportedError(
            f"{type(model).__name__} is not captured whole, and fallback={fallback!r} forbids that PyTorch runs it: {error}"
        ) from None


def _optimized(
    model: torch.nn.Module, precision: Any, target: str, fallback: str
) -> tuple[Any, list[str]]:
    """Optimizes the model. Returns its precision, and notes."""
    try:
        optimize(model, precision=precision, target=target, verbose=False)
        return precision, []
    except UnsupportedError as error:
        if fallback != "safe" or (isinstance(precision, str) and precision == "auto"):
            raise
        try:
            optimize(model, precision="auto", target=target, verbose=False)
        except UnsupportedError:
            raise error from None
        return "auto", [f"the model runs in its own precision, because {error}"]


def _plan_notes(plan: Plan | HostPlan | None, precision: Any) -> list[str]:
    if not isinstance(plan, Plan):
        return []
    return [*_precision_notes(plan, precision), *_process_notes(plan)]


def _precision_notes(plan: Plan, precision: Any) -> list[str]:
    asked = _named(precision).lower()
    planned = plan.layout.precision.removesuffix("-tensor")
    if asked in ("auto", planned) or asked not in [p.value for p in Precision]:
        return []
    return [
        f"the plan's times and memory are for {planned} GEMMs and the engine has {asked}: pass precision={asked!r} to "
        "deepwell.autoplan too"
    ]


def _process_notes(plan: Plan) -> list[str]:
    layout = plan.layout
    if layout.gpus <= 1:
        return []
    here = torch.cuda.device_count()
    axes = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "pp", "ep", "dp")]
    used = ", ".join(axis for axis in axes if not axis.endswith(" 1"))
    return [
        f"the plan is for {layout.gpus} x {plan.hardware.name} ({used}) and this machine has {here or 'no'} GPU"
        f"{'' if here == 1 else 's'}: the engine is one process of it, and holds the whole model"
    ]


# ---- Blackwell -----------------------------------------------------------------------------------------


def _one_gpu(hw: Hardware) -> Hardware:
    """Returns the machine's description with one of its GPUs."""
    described = json.loads(hw.to_json())
    described.pop("machine", None)
    described.update(gpus=1, gpus_per_node=1, gpus_per_domain=1)
    return Hardware(json.dumps(described))


def _where_it_runs(engine: Engine, precision: Any) -> str:
    if engine.planned_only:
        return "nothing runs, because the model is on the meta device"
    if isinstance(engine.precision, str) and engine.precision == "auto":
        return f"the model runs on {engine.target} in its own precision"
    return f"the model runs on {engine.target}, where GEMM operands are rounded as {_named(precision)} rounds them"


def optimize_for_blackwell(
    model: torch.nn.Module,
    precision: Any = "mxfp8",
    seq_len: int = 2048,
    batch_size: int = 32,
    example_inputs: Any = None,
) -> Engine:
    """Plans a step of ``model`` on one Blackwell GPU and compiles it.

    On a Blackwell GPU the engine runs there. Elsewhere the plan is for the published profile of a B200, the model runs
    where it is, on a CPU with the same rounding of GEMM operands, and one warning says so.

    Args:
        precision: of GEMMs: "mxfp8", "nvfp4", "bf16", a ``deepwell.Precision`` or a policy.
        seq_len, batch_size: of a step, for the plan and for inputs that are made.
        example_inputs: as for ``deepwell.capture``; None: made for models that say what they read.
    """
    if seq_len < 1 or batch_size < 1:
        raise ValueError(f"seq_len is {seq_len} and batch_size {batch_size}; expected 1 or more")
    root = _unwrap(model)
    given = example_inputs is not None
    if not given:
        example_inputs = made_arguments(root, batch_size, seq_len, labels=True)
    devices = {t.device.index for t in named_tensors(root).values() if t.is_cuda}
    capability = torch.cuda.get_device_capability(min(devices)) if len(devices) == 1 else (0, 0)
    here = capability[0] in (10, 12)
    targets = {(10, 0): "sm_100a", (10, 3): "sm_103a", (12, 0): "sm_120a"}
    target = targets.get(capability, "auto")
    hw = _one_gpu(probe()) if here else hardware("b200:1")
    notes = []
    ir, not_captured = _captured(root, example_inputs, "safe")
    if ir is None and not given and example_inputs is not None:
        # The model may support shorter sequences only. The graph is the same for all sizes that it supports.
        ir, _ = _captured(root, made_arguments(root, labels=True), "safe")
        if ir is not None:
            notes.append(f"the graph is not that of {batch_size} x {seq_len}: {not_captured}")
    plan = None
    try:
        plan = autoplan(
            root if ir is None else ir,
            hw=hw,
            seq_len=seq_len,
            global_batch=batch_size,
            precision=precision
            if isinstance(precision, str)
            else getattr(precision, "name", precision),
        )
    except DeepwellError as error:
        notes.append(f"there is no plan for {hw.name}: {error}")
    engine, more = _compiled(
        model if ir is None else ir,
        plan,
        precision,
        "safe",
        target,
        example_inputs if ir is None else None,
    )
    engine.notes[:0] = notes
    told = [*notes, *more]
    if not here:
        text = "this machine has no Blackwell GPU: "
        text += "" if plan is None else 'the plan is for the profile "b200", and '
        text += _where_it_runs(engine, precision)
        engine.notes.insert(0, text)
        told.insert(0, text)
    if told:
        warnings.warn("deepwell: " + "; ".join(told), stacklevel=2)
    return engine
