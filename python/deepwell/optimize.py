"""deepwell.optimize: an engine behind a module that stays what it was.

optimize() gives the module a forward of its own (an instance attribute, an ``OptimizedForward``), which
captures the original forward at the first call, with the arguments of that call, and runs the captured
graph from then on. Names, parameters, hooks, ``state_dict`` and the class are untouched. Whenever the
graph would not be what the original forward does now, the original runs, and the summary counts it.

A module whose forward cannot be captured is left to PyTorch and its submodules are tried instead.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import threading
import time
from collections import OrderedDict
from typing import Any, Iterator

import torch
from torch.utils import _pytree as pytree

from deepwell import _deepwell
from deepwell.arena import ArenaPool
from deepwell.capture import Captured, capture_graph
from deepwell.errors import CaptureError, UnsupportedError
from deepwell.guards import HOOKS, ModuleState, hooked_submodule, training_flags, unusual_mode
from deepwell.report import Report
from deepwell.runtime import Program, fresh_seed

# Captures of one module: each distinct kind of call (which arguments, which dtypes, which axes are 1,
# which submodules train) is one. Beyond this the arguments vary without end, and PyTorch runs them.
_MAX_CAPTURES = 16
# The comparison with PyTorch at the first call ends after this long, unless the engine is behind.
_MEASURE_SECONDS = 0.5
_MEASURE_ROUNDS = 5
_PRECISIONS = ("auto", "fp32", "bf16", "mxfp8", "nvfp4")
# The engine must not be slower; timings this close count as equal.
_MEASURE_SLACK = 1.03


def optimize(
    model: torch.nn.Module,
    precision: str = "auto",
    target: str = "auto",
    verbose: bool = True,
    profile: bool = False,
    inplace: bool = True,
    logits: bool = True,
) -> torch.nn.Module:
    """Makes ``model`` train faster, with the same results; returns it.

    Args:
        model: any module. Parameters, names, ``state_dict``, hooks and outputs stay what they are.
        precision: "auto" or "fp32" (the model's own), or how the operands of linear layers' products are
            rounded, forward and backward: "bf16", "mxfp8", "nvfp4" (docs/precision.md). The results are
            then not the model's own, and PyTorch runs it only where the engine cannot, with a warning.
        target: "auto" or "cpu". Others are not supported in this version.
        verbose: print what was replaced and what was left alone, and why, at the first call.
        profile: ``deepwell.summary(model)`` shows the mean time of a forward.
        inplace: False works on ``copy.deepcopy(model)``.
        logits: False (outputs without logits) is not supported in this version.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: a precision that does not exist.
        UnsupportedError: an option that this version does not have.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"deepwell.optimize takes a torch.nn.Module, not {type(model).__name__}")
    if precision == "fp8":
        raise UnsupportedError(
            "precision='fp8' is not supported in this version: use 'mxfp8', which has FP8 elements, "
            "'nvfp4', 'bf16' or 'fp32'"
        )
    if precision not in _PRECISIONS:
        raise ValueError(
            f"precision={precision!r} does not exist: use one of {', '.join(_PRECISIONS)}"
        )
    if target not in ("auto", "cpu"):
        raise UnsupportedError(
            f"target={target!r} is not supported in this version: use target='auto' or 'cpu'"
        )
    if not logits:
        raise UnsupportedError(
            "logits=False is not supported in this version: use logits=True, which returns what the "
            "model returns"
        )
    if not inplace:
        model = copy.deepcopy(model)
    restore(model)
    root = _unwrap(model)
    precision = "fp32" if precision == "auto" else precision
    report = Report(root, verbose=verbose, profile=profile, precision=precision)
    session = Session(report, precision)
    reason = _unsupported_module(root)
    if reason is not None:
        report.leave("", root, reason)
        report.announce()
    else:
        session.install(root, "")
        report.announce_start()
    return model


def restore(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes ``optimize`` exactly; returns the model. Does nothing to a model never optimized."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, OptimizedForward):
            forward.remove()
    return model


def summary(model: torch.nn.Module) -> str:
    """What was replaced, what was left alone and why, calls and fallbacks so far."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, OptimizedForward):
            return forward.session.report.text()
    return "deepwell: this model is not optimized (deepwell.optimize(model) does it)"


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """The module to optimize: inside DistributedDataParallel, the module it wraps."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return model.module
    return model


def _unsupported_module(module: torch.nn.Module) -> str | None:
    """Why no engine of this version can run ``module``, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module"
    for name, tensor in module.named_parameters():
        if tensor.device.type not in ("cpu", "meta"):
            return f"parameter '{name}' is on {tensor.device}: only the CPU is supported so far"
        if tensor.dtype != torch.float32:
            return f"parameter '{name}' is {tensor.dtype}: only torch.float32 is supported so far"
        if type(tensor) is not torch.nn.Parameter and type(tensor) is not torch.Tensor:
            return f"parameter '{name}' is a {type(tensor).__name__}, not a plain tensor"
    return None


class Session:
    """One call of optimize(): the report and the arenas its modules share."""

    def __init__(self, report: Report, precision: str) -> None:
        self.report = report
        self.precision = precision
        self.pool = ArenaPool()

    def install(self, module: torch.nn.Module, path: str) -> None:
        module.__dict__["forward"] = OptimizedForward(module, path, self)

    def descend(self, module: torch.nn.Module, path: str) -> None:
        """``module`` is left to PyTorch; its submodules are tried one by one."""
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if type(child).forward is torch.nn.Module.forward:  # a container without a forward
                self.descend(child, child_path)
            elif "forward" in child.__dict__:
                continue
            elif not any(True for _ in child.children()):
                self.report.leave(child_path, child, "a single operation gains nothing by itself")
            else:
                self.install(child, child_path)

    # A copied model has its own report of the same module tree and no arenas.
    def __getstate__(self) -> dict[str, Any]:
        return {"report": self.report, "precision": self.precision}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.report = saved["report"]
        self.precision = saved["precision"]
        self.pool = ArenaPool()


class _Entry:
    """One captured kind of call: the program, where its leaves come from, how outputs are rebuilt."""

    def __init__(
        self, captured: Captured, module: torch.nn.Module, pool: ArenaPool, precision: str
    ) -> None:
        self.program = Program(captured.json, pool, precision)
        self.rebuild = captured.rebuild_outputs
        self._captured = captured
        self._valid: dict[tuple[int, ...], bool] = {}
        self._sizes = captured.symbol_sources
        parameters = dict(module.named_parameters(remove_duplicate=False))
        parameters.update(module.named_buffers(remove_duplicate=False))
        self._leaves: list[torch.Tensor | None] = []
        self._inputs: list[tuple[int, int]] = []
        for index, leaf in enumerate(captured.leaves):
            self._leaves.append(None)
            if leaf.kind in ("parameter", "buffer"):
                self._leaves[index] = parameters[leaf.target]
            elif leaf.kind == "constant":
                self._leaves[index] = leaf.value
            elif leaf.kind == "input":
                self._inputs.append((index, leaf.position))
        # A seed that only the precision asked for has no place in the capture.
        self._leaves += [None] * (len(self.program.leaf_roles) - len(captured.leaves))
        self.slower: dict[bool, bool] = {}  # by grad mode: measured slower than the original

    def _bind(self, flat: list[Any]) -> tuple[list[torch.Tensor], tuple[int, ...]]:
        """Tensors of all leaves, the seed still missing, and the sizes of the symbols."""
        leaves = list(self._leaves)
        for index, position in self._inputs:
            leaves[index] = flat[position]
        return leaves, tuple([flat[position].shape[axis] for position, axis in self._sizes])

    def accepts(self, flat: list[Any]) -> bool:
        leaves, sizes = self._bind(flat)
        if not self.program.accepts(leaves, sizes):
            return False
        needs_grad_mode = self._captured.guards.grad_enabled
        if needs_grad_mode is not None and needs_grad_mode != torch.is_grad_enabled():
            return False
        valid = self._valid.get(sizes)
        if valid is None:
            valid = self._valid[sizes] = self._captured.accepts_sizes(sizes)
        return valid

    def prepare(self, flat: list[Any]) -> None:
        """Makes engine and plan for such a call, so that a timed one does not."""
        self.program.prepare(*self._bind(flat))

    def run(self, flat: list[Any]) -> Any:
        leaves, sizes = self._bind(flat)
        if self.program.seed_leaf is not None:
            leaves[self.program.seed_leaf] = fresh_seed()
        return self.rebuild(self.program.run(leaves, sizes), flat)


class OptimizedForward:
    """A module's forward while it is optimized. Called as the original would be."""

    def __init__(self, module: torch.nn.Module, path: str, session: Session) -> None:
        self.module = module
        self.path = path
        self.session = session
        self._previous = module.__dict__.get("forward")
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._busy = threading.local()
        self._state: ModuleState | None = None
        self._submodules: list[torch.nn.Module] = []
        self._entries: dict[Any, list[_Entry]] = {}
        self._failed: dict[Any, str] = {}
        self._left_alone: str | None = None
        self._capture_count = 0

    # ---- being a forward ---------------------------------------------------------------------------

    @property
    def original(self):
        """The forward that the module had before optimize()."""
        if self._previous is not None:
            return self._previous
        return type(self.module).forward.__get__(self.module)

    @property
    def __wrapped__(self):
        return self.original

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)

    @property
    def __name__(self) -> str:
        return "forward"

    @property
    def __doc__(self) -> str | None:  # type: ignore[override]
        return self.original.__doc__

    def remove(self) -> None:
        if self._previous is not None:
            self.module.__dict__["forward"] = self._previous
        else:
            self.module.__dict__.pop("forward", None)

    def __reduce__(self):
        return (_unpickle, (self.module, self.path, self.session, self._previous))

    def __deepcopy__(self, memo: dict[int, Any]) -> "OptimizedForward":
        return _unpickle(
            copy.deepcopy(self.module, memo),
            self.path,
            copy.deepcopy(self.session, memo),
            copy.deepcopy(self._previous, memo),
        )

    # ---- a call ------------------------------------------------------------------------------------

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._call(args, kwargs)
        if not self.session.report.announced and not self.path:
            self.session.report.announce()
        return result

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._left_alone is not None or getattr(self._busy, "capturing", False):
            return self.original(*args, **kwargs)
        reason = unusual_mode()
        if reason is None:
            flat, spec = pytree.tree_flatten((args, kwargs))
            key, reason = _signature(flat, spec)
        if reason is None:
            reason = self._refresh()
        if reason is None:
            key = (key, training_flags(self._submodules))
            entry, reason = self._find(key, flat, args, kwargs)
            if entry is not None:
                started = time.perf_counter()
                result = entry.run(flat)
                self.session.report.count_call(self.path, time.perf_counter() - started)
                return result
        if self._left_alone is None:
            self.session.report.count_fallback(self.path, reason)
        return self.original(*args, **kwargs)

    def _refresh(self) -> str | None:
        """Drops every capture when the module is no longer what was captured; why no engine can run."""
        if self._state is not None:
            changed = self._state.changed()
            if changed is None:
                return None
            with self._lock:
                self._entries.clear()
                self._failed.clear()
                self._state = None
            self.session.report.note(self.path, changed)
        self._submodules = list(self.module.modules())
        hooked = hooked_submodule(self.module)
        if hooked is not None:
            return f"hooks are registered on '{hooked}'"
        return _unsupported_module(self.module)

    def _find(self, key: Any, flat: list[Any], args: Any, kwargs: Any):
        """(entry, None), or (None, why the original must run)."""
        grad = torch.is_grad_enabled()
        entry = self._accepting(key, flat)
        if entry is None:
            if key in self._failed:
                return None, self._failed[key]
            with self._lock:
                entry = self._accepting(key, flat)  # another thread may have been first
                reason = None if entry is not None else self._capture(key, args, kwargs)
            if reason is not None:
                return None, reason
            entry = self._accepting(key, flat)
            if entry is None:
                self._failed[key] = "the captured graph does not describe these shapes"
                return None, self._failed[key]
        if grad not in entry.slower:
            self._measure(entry, flat, args, kwargs)
        if entry.slower[grad]:
            return None, "measured slower than PyTorch"
        return entry, None

    def _accepting(self, key: Any, flat: list[Any]) -> _Entry | None:
        for entry in self._entries.get(key, ()):
            if entry.accepts(flat):
                return entry
        return None

    def _capture(self, key: Any, args: Any, kwargs: Any) -> str | None:
        """Captures this kind of call; None, or why it stays with PyTorch."""
        if self._capture_count >= _MAX_CAPTURES:
            return f"{_MAX_CAPTURES} kinds of call are captured already"
        started = time.perf_counter()
        try:
            with self._as_it_was():
                captured = capture_graph(self.module, args, kwargs)
            entry = _Entry(captured, self.module, self.session.pool, self.session.precision)
        except (CaptureError, _deepwell.Error) as error:
            self._failed[key] = reason = str(error)
            self._give_up_on_structure(reason)
            return reason
        if self._state is None:
            self._state = ModuleState(self.module)
        self._entries.setdefault(key, []).append(entry)
        self._capture_count += 1
        self.session.report.captured(
            self.path, self.module, entry.program, time.perf_counter() - started
        )
        return None

    @contextlib.contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """The module with its own forward and without its hooks, which run around the engine: tracing
        must neither run them nor make them part of the graph."""
        attributes = self.module.__dict__
        kept = {name: attributes[name] for name in ("forward", *HOOKS)}
        self._busy.capturing = True
        try:
            attributes.update({name: OrderedDict() for name in HOOKS})
            if self._previous is not None:
                attributes["forward"] = self._previous
            else:
                del attributes["forward"]
            yield
        finally:
            attributes.update(kept)
            self._busy.capturing = False

    def _give_up_on_structure(self, reason: str) -> None:
        """The first capture failed: leave this module to PyTorch and try what is inside."""
        if self._capture_count > 0 or self._left_alone is not None:
            return
        self._left_alone = reason
        self.session.report.leave(self.path, self.module, reason)
        self.session.descend(self.module, self.path)

    # ---- never slower --------------------------------------------------------------------------------

    def _measure(self, entry: _Entry, flat: list[Any], args: Any, kwargs: Any) -> None:
        """Times the original and the engine on copies of this call's inputs, once per kind of call.

        Touches no gradient, no buffer and no random state. What is slower here is left alone.
        DEEPWELL_MEASURE=0 in the environment skips this: the engine runs whatever it can.
        """
        grad = torch.is_grad_enabled()
        if (
            os.environ.get("DEEPWELL_MEASURE") == "0"
            or self.session.precision != "fp32"  # PyTorch would compute something else
            # gradient hooks of the user would run
            or any(parameter._backward_hooks for parameter in self.module.parameters())
        ):
            entry.slower[grad] = False
            return
        copies = [_measuring_copy(value) for value in flat]
        copied_args, copied_kwargs = pytree.tree_unflatten(
            copies, pytree.tree_structure((args, kwargs))
        )
        targets = [
            tensor
            for tensor in [*self.module.parameters(), *copies]
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad
        ]

        def original() -> Any:
            return self.original(*copied_args, **copied_kwargs)

        def engine() -> Any:
            return entry.run(copies)

        best_original = best_engine = float("inf")
        self._busy.capturing = True
        try:
            entry.prepare(copies)
            with torch.random.fork_rng(devices=[]):
                spent = 0.0
                for _ in range(_MEASURE_ROUNDS):
                    engine_time = _timed(engine, targets if grad else [])
                    original_time = _timed(original, targets if grad else [])
                    best_engine = min(best_engine, engine_time)
                    best_original = min(best_original, original_time)
                    spent += engine_time + original_time
                    if spent > _MEASURE_SECONDS and best_engine <= best_original:
                        break
        finally:
            self._busy.capturing = False
        entry.slower[grad] = best_engine > best_original * _MEASURE_SLACK
        self.session.report.measured(
            self.path, self.module, grad, best_original, best_engine, entry.slower[grad]
        )


def _unpickle(module, path, session, previous) -> OptimizedForward:
    forward = OptimizedForward.__new__(OptimizedForward)
    forward.module, forward.path, forward.session, forward._previous = (
        module,
        path,
        session,
        previous,
    )
    forward._reset()
    return forward


def _signature(flat: list[Any], spec: Any) -> tuple[Any, str | None]:
    """What distinguishes this kind of call from others, or why the engine cannot take it."""
    parts: list[Any] = []
    for value in flat:
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                return None, f"an argument is a {type(value).__name__}, not a plain tensor"
            if value.device.type != "cpu" or value.layout != torch.strided:
                return None, f"an argument is on {value.device} with layout {value.layout}"
            shape = value.shape
            if 0 in shape:
                return None, "an argument has no elements"
            parts.append((value.dtype, tuple([size == 1 for size in shape])))
        elif isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device)):
            parts.append((type(value), value))
        else:
            return None, f"an argument is a {type(value).__name__}"
    return (spec, tuple(parts)), None


def _measuring_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def _timed(function: Any, targets: list[torch.Tensor]) -> float:
    """Seconds of one forward, and one backward to ``targets`` where there are any."""
    started = time.perf_counter()
    outputs = [
        value
        for value in pytree.tree_leaves(function())
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    if targets and outputs:
        chosen = [value for value in outputs if value.dim() == 0][:1] or outputs
        torch.autograd.grad(
            chosen, targets, [torch.ones_like(value) for value in chosen], allow_unused=True
        )
    return time.perf_counter() - started
