"""deepwell.optimize: runs a module's forward in the engine and leaves the module unchanged otherwise.

optimize() gives the module an instance attribute ``forward``, an ``OptimizedForward``. At the first call it
captures the original forward with the arguments of that call, and it runs the captured graph from then on.
Names, parameters, hooks, ``state_dict`` and the class do not change. Whenever the graph would differ from
what the original forward does now, the original runs, and the summary counts it.

If a module's forward cannot be captured, PyTorch runs it, and its submodules are tried instead.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import sys
import threading
import time
import weakref
from typing import Any, Callable, Iterator

import torch
from torch.utils import _pytree as pytree

from deepwell import _deepwell, linear, routing
from deepwell.arena import ArenaPool
from deepwell.attention import install
from deepwell.caches import flatten_outputs, is_cache
from deepwell.capture import Captured, capture_graph
from deepwell.comparison import (
    SHARE,
    Timing,
    compare,
    differentiated,
    magnitude,
    smaller_sizes,
)
from deepwell.contents import Reads
from deepwell.errors import CaptureError, UnsupportedError
from deepwell.guards import ModuleState, named_tensors, state_kept, unusual_mode
from deepwell.kept import KeptValues
from deepwell.lazy_logits import defer, without_logits
from deepwell.precision import Precision, PrecisionPolicy, policy_of
from deepwell.precision_guard import Sample
from deepwell.report import Report
from deepwell.runtime import Program
from deepwell.sharding import gathers, is_sharded, sharded_inside
from deepwell.targets import BLACKWELL, EMULATED, ENGINES, EmulatedGpu, Gpu, Target

# Captures of one module. Each kind of call (which arguments, which dtypes, which axes are 1, which submodules train) is
# one. Beyond this number the arguments keep varying, and PyTorch runs the call.
_MAX_CAPTURES = 16
# Kinds of call that differ in nothing but a number, such as a step or a count that is new at every call.
_MAX_NUMBERS = 4
# Captures over all states that the module has been in, because flags may keep varying as well.
_MAX_CAPTURES_EVER = 64
# States whose captures are kept, so that switching between two configurations needs no new capture.
_MAX_STATES = 8
# Shapes of calls that are measured to be slower in the engine. Beyond this number they are forgotten.
_MAX_SLOWER = 256
_SLOWER = "measured slower than PyTorch"
_RESTORED = "deepwell.restore was called"
# Failed attempts after which a module without any capture is left to PyTorch for good.
_MAX_FAILURES = 4
# Leaf types. Calls with only these arguments need no pytree, which would take longer than a small model.
_TENSORS = frozenset((torch.Tensor, torch.nn.Parameter))
_PLAIN = _TENSORS | {bool, int, float, str, type(None), torch.dtype, torch.device}


def optimize(
    model: torch.nn.Module,
    precision: str | Precision | PrecisionPolicy = "auto",
    target: str = "auto",
    verbose: bool = True,
    profile: bool = False,
    inplace: bool = True,
    logits: bool | str = "lazy",
) -> torch.nn.Module:
    """Makes ``model`` train faster with the same results. Returns the model.

    Args:
        model: any module. Parameters, names, ``state_dict``, hooks and outputs do not change.
        precision: "auto" or "fp32" (the model's own), or how the operands of linear layers' matmuls are
            rounded, forward and backward: "bf16", "fp8", "fp8-block", "mxfp8", "mxfp6", "mxfp4", "nvfp4", a ``Precision``,
            or a ``PrecisionPolicy`` with a precision for each layer (docs/precision.md). The results then differ from the
            model's own. PyTorch runs the model's own precision if the engine cannot run a module, with a warning, or
            with an error if the policy's fallback is "strict". On a Hopper GPU the formats other than FP8 are simulated; FP8 is
            real with one scale for each tensor ("fp8") and with scales of blocks ("fp8-block").
        target: "auto": the engine runs the model where it is, on the CPU or on one Hopper GPU (H100, H200), also in a
            group of processes with a GPU each. On other GPUs, and for a model on several, "auto" replaces attention
            alone, as "attention" does everywhere (docs/attention.md). "cpu" and "sm_90a" (one Hopper GPU) ask for the engine by
            name, and so does "sm_120a" (one RTX 50 or RTX PRO Blackwell GPU). "emulator:sm_90a" and "emulator:sm_120a"
            run a model on the CPU on such an emulated GPU. "sm_100a", "sm_103a", "emulator:sm_100a" and
            "emulator:sm_103a" give linear layers kernels for Blackwell GPUs; with a precision the engine runs the whole
            model there. On all Blackwell GPUs MXFP8, MXFP4 and NVFP4 are codes on tensor cores. Their kernels are
            proven on the emulator and have not run on hardware (docs/blackwell.md).
        verbose: prints at the first call what was replaced, what was left alone, and why.
        profile: ``deepwell.summary(model)`` then shows the mean time of a forward.
        inplace: False optimizes ``copy.deepcopy(model)`` instead.
        logits: for models that return a loss and logits. "lazy": the logits are made when they are first looked at.
            True: each forward makes them. False: they are never made, and None is in their place. See
            docs/optimize.md.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: a precision that does not exist, or another value of ``logits``.
        UnsupportedError: an option that this version does not have, or a model that a strict policy does not fit.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"deepwell.optimize needs a torch.nn.Module, not {type(model).__name__}")
    policy = policy_of(precision)
    if target not in ("auto", "attention", "cpu", *ENGINES, *EMULATED, *linear.TARGETS):
        raise UnsupportedError(
            f"target={target!r} is not supported in this version: use target='auto', 'attention', 'cpu', "
            + ", ".join(f"'{name}'" for name in (*ENGINES, *EMULATED, *linear.TARGETS))
        )
    if not any(logits is mode for mode in (True, False)) and logits != "lazy":
        raise ValueError(
            f"logits={logits!r} does not exist: use 'lazy' (made when they are looked at), True (always made) or False "
            "(never made)"
        )
    if not inplace:
        model = copy.deepcopy(model)
    restore(model)
    root = _unwrap(model)
    on_gpu = any(tensor.device.type == "cuda" for tensor in named_tensors(root).values())
    if (target == "attention" or target.startswith("sm_")) and not on_gpu:
        raise UnsupportedError(
            f"target={target!r} is for a model on a GPU, and this one is not: move it there first "
            "(model.cuda()), or use target='auto'"
        )
    follows = target == "auto"
    if follows and on_gpu and _is_on_one_hopper(root):
        target = "sm_90a"
    linear_alone = target in linear.TARGETS and policy is None
    engine = target == "cpu" or not on_gpu or target in ENGINES or target in BLACKWELL
    if logits is False and (not engine or linear_alone):
        raise UnsupportedError(
            "logits=False is not supported where PyTorch runs the model's forward: use logits='lazy', or a target whose "
            "engine runs the whole model ('cpu', 'sm_90a', 'sm_120a')"
        )
    if linear_alone and target.startswith("emulator:"):
        return _optimize_emulated(model, root, target, verbose)
    if linear_alone or not engine:
        return _optimize_on_gpu(model, root, policy, target, verbose)
    place = _place(root, target)
    report = Report(root, verbose=verbose, profile=profile, policy=policy, target=place)
    session = Session(report, policy, place, logits, follows)
    if isinstance(root, torch.jit.ScriptModule):
        reason = "it is a TorchScript module"
    else:
        sharded = any(is_sharded(module) for module in root.modules())
        reason = None if sharded else _unsupported_tensor(named_tensors(root), place)
        session.install(root, "")  # also now, since it may be converted later
    if reason is not None:
        try:
            report.leave("", root, reason)
        except UnsupportedError:  # a strict policy
            restore(model)
            raise
        report.announce()
    else:
        report.announce_start()
    return model


def _is_on_one_hopper(root: torch.nn.Module) -> bool:
    """Returns whether the model is on one GPU for which the engine has kernels, with whole parameters in its forward. It
    may be one of a group of processes, each with a GPU of its own."""
    devices = {tensor.device for tensor in named_tensors(root).values()}
    if len(devices) != 1 or not gathers(root):
        return False
    return torch.cuda.get_device_capability(devices.pop()) == (9, 0)


def _place_of(root: torch.nn.Module) -> Target | None:
    """Returns where "auto" runs a model in the engine where it is now, or None."""
    devices = {tensor.device for tensor in named_tensors(root).values()}
    if devices == {torch.device("cpu")}:
        return Target()
    if all(device.type == "cuda" for device in devices) and _is_on_one_hopper(root):
        return Gpu(devices.pop().index)
    return None


def _place(root: torch.nn.Module, target: str) -> Target:
    """Returns where the engine runs the model."""
    if target.startswith("emulator:"):
        return EmulatedGpu(target)
    if not target.startswith("sm_"):
        return Target()
    devices = {tensor.device for tensor in named_tensors(root).values()}
    if len(devices) > 1:
        raise UnsupportedError(
            f"target={target!r} is for a model on one GPU, and this one is on {len(devices)} devices: use "
            "target='attention', which replaces its attention"
        )
    device = devices.pop()
    _check_capability(target, device.index)
    return Gpu(device.index)


def _check_capability(target: str, index: int) -> None:
    found = torch.cuda.get_device_capability(index)
    if target != "sm_{}{}a".format(*found):
        raise UnsupportedError(
            f"target={target!r} does not match {torch.cuda.get_device_name(index)}, of compute capability "
            "{}.{}: use target='auto'".format(*found)
        )


def _keeps_precision(policy: PrecisionPolicy | None, why: str) -> None:
    if policy is not None:
        raise UnsupportedError(
            f"precision={policy.name!r} is supported on the CPU, on one Hopper GPU, and with target='sm_100a', 'sm_103a' or "
            f"'sm_120a' on one Blackwell GPU, {why}: use precision='auto', which keeps the model's own"
        )


def _optimize_on_gpu(
    model: torch.nn.Module,
    root: torch.nn.Module,
    policy: PrecisionPolicy | None,
    target: str,
    verbose: bool,
) -> torch.nn.Module:
    on = ", ".join(sorted({str(tensor.device) for tensor in named_tensors(root).values()}))
    _keeps_precision(policy, f"not with target={target!r} for this model, which is on {on}")
    devices = sorted({t.device.index for t in named_tensors(root).values() if t.is_cuda})
    if target in linear.TARGETS:
        for index in devices:
            _check_capability(target, index)
    title = ", ".join(f"{torch.cuda.get_device_name(index)}" for index in devices)
    made = install.install(root, title)
    if target in linear.TARGETS:
        made.add_linear(*linear.install(root, "cuda"))
    if verbose:
        print(made.text(root), flush=True)
    return model


def _optimize_emulated(
    model: torch.nn.Module, root: torch.nn.Module, target: str, verbose: bool
) -> torch.nn.Module:
    """Optimizes for an emulated GPU, which is slow and as correct as the emulator."""
    made = install.Installation(f"{target}, emulated on the CPU")
    made.add_linear(*linear.install(root, target))
    made.mark(root)
    if verbose:
        print(made.text(root), flush=True)
    return model


def installed(model: torch.nn.Module) -> list[OptimizedForward]:
    """Returns Deepwell's forwards in the model, outer modules first."""
    return [forward for module in model.modules() if (forward := _installed.get(module))]


def restore(model: torch.nn.Module) -> torch.nn.Module:
    """Undoes ``optimize`` exactly. Returns the model. Does nothing to a model that is not optimized."""
    install.restore(model)
    for module in model.modules():
        forward = _installed.get(module)
        if forward is not None:
            forward.remove()
    return model


def has_own_target(model: torch.nn.Module) -> bool:
    """Returns whether ``optimize`` was called on the whole model with a target that another call with "auto" would lose."""
    root = _unwrap(model)
    forward = _installed.get(root)
    if forward is None:
        return install.installation(root) is not None
    return not forward.session.follows


def sessions(model: torch.nn.Module) -> list[Session]:
    """Returns the sessions of the model's optimized forwards; one, unless parts were optimized by themselves."""
    found = {id(forward.session): forward.session for forward in installed(model)}
    return list(found.values())


def is_optimized_in_parts(model: torch.nn.Module) -> bool:
    """Returns whether modules of the model were optimized by themselves, and the model as a whole was not. The names in such
    a module's policy are relative to it."""
    root = _unwrap(model)
    return any(not forward.path and forward.module is not root for forward in installed(model))


def change_policy(model: torch.nn.Module, before: PrecisionPolicy, policy: PrecisionPolicy) -> None:
    """Gives what has the policy ``before`` another one from the next call on."""
    changed = [session for session in sessions(model) if session.policy is before]
    for session in changed:
        session.policy = policy
        session.kept.clear()
        session.report.policy_changed(policy)
    for forward in installed(model):
        if forward.session in changed:
            forward.change_precision()


def summary(model: torch.nn.Module) -> str:
    """Returns what was replaced, what was left alone and why, and the calls and fallbacks so far."""
    for module in model.modules():
        forward = _installed.get(module)
        if forward is not None:
            return forward.session.report.text()
    told = install.installed(model)
    if told is not None:
        return told
    return "deepwell: this model is not optimized; call deepwell.optimize(model)"


def _unwrap(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the module to optimize: the one that DistributedDataParallel or torch.compile wraps."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return _unwrap(model.module)
    if type(model).__name__ == "OptimizedModule" and "_orig_mod" in model._modules:
        return _unwrap(model._modules["_orig_mod"])
    return model


_AUTOCAST_KINDS = ("cpu", "cuda")
# The element types of parameters that the engine trains.
_TRAINED = (torch.float32, torch.bfloat16, torch.float16)


def unsupported_parameter(model: torch.nn.Module) -> str | None:
    """Returns why the engine has no step of this model, wherever it is, or None."""
    return _unsupported_tensor(named_tensors(_unwrap(model)), None)


def _unsupported_tensor(tensors: dict[str, torch.Tensor], target: Target | None) -> str | None:
    """Returns why this version has no engine for these parameters and buffers, or None. ``target`` None: any."""
    for name, tensor in tensors.items():
        trained = isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad
        if type(tensor) is not torch.nn.Parameter and type(tensor) is not torch.Tensor:
            return f"parameter '{name}' is a {type(tensor).__name__}, not a plain tensor"
        if target is not None and not target.accepts(tensor):
            return f"'{name}' is on {tensor.device}, and the engine is for {target.device}"
        if trained and tensor.dtype not in _TRAINED:
            return f"parameter '{name}' is {tensor.dtype}: the engine trains " + ", ".join(
                map(str, _TRAINED)
            )
        if tensor.layout != torch.strided:
            return f"'{name}' has the layout {tensor.layout}: only dense tensors are supported"
        if tensor.is_inference():
            return f"'{name}' was created under torch.inference_mode"
    return None


class Session:
    """One call of optimize(): the report, the target and the arenas that its modules share. ``follows``: the target is
    where the model is, also after it has been moved."""

    def __init__(
        self,
        report: Report,
        policy: PrecisionPolicy | None,
        target: Target,
        logits: bool | str = "lazy",
        follows: bool = False,
    ) -> None:
        self.report = report
        self.follows = follows
        self.policy = policy  # None: the model's own precision
        self.target = target
        self.logits = logits
        self.pool = ArenaPool()
        self.sample: Sample | None = None  # of the step that runs, if its operands are observed
        self.kept = KeptValues()

    def install(self, module: torch.nn.Module, path: str) -> None:
        forward = OptimizedForward(module, path, self)
        module.__dict__["forward"] = _installed[module] = forward
        self.report.installed(path, module)

    def follow(self, module: torch.nn.Module) -> bool:
        """Moves the target to the module if that has been moved. Returns whether it has."""
        first = next(module.parameters(), None) if self.follows else None
        if first is None or first.device == self.target.device:
            return False
        target = _place_of(module)
        if target is None or target.device == self.target.device:
            return False
        self.target = target
        self.report.placed(target)
        return True

    def descend(self, module: torch.nn.Module, path: str) -> None:
        """Leaves ``module`` to PyTorch and tries its submodules one by one."""
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if type(child).forward is torch.nn.Module.forward:  # a container without a forward
                self.descend(child, child_path)
            elif "forward" in child.__dict__:
                if _installed.get(child) is None:
                    self.report.leave(child_path, child, "its forward has been replaced already")
            elif isinstance(child, torch.jit.ScriptModule):
                self.report.leave(child_path, child, "it is a TorchScript module")
            elif not any(True for _ in child.children()):
                self.report.leave(child_path, child, "a single operation gains nothing")
            else:
                self.install(child, child_path)

    def left_to_pytorch(self) -> list[tuple[str, str, str]]:
        """Returns path, class and reason of what PyTorch runs because the engine cannot."""
        return self.report.left_to_pytorch(_SLOWER)

    # A copied model has its own report of the same modules and no arenas.
    def __getstate__(self) -> dict[str, Any]:
        return {
            "report": self.report,
            "policy": self.policy,
            "target": self.target,
            "logits": self.logits,
            "follows": self.follows,
        }

    def __setstate__(self, saved: dict[str, Any]) -> None:
        self.report = saved["report"]
        # An earlier version saved a name.
        self.policy = saved["policy"] if "policy" in saved else policy_of(saved["precision"])
        self.target = (
            saved.get("target") or Target()
        )  # missing in models saved by an earlier version
        self.logits = saved.get("logits", True)
        self.follows = saved.get("follows", False)
        self.pool = ArenaPool()
        self.sample = None
        self.kept = KeptValues()


# torch.compile leaves calls out of its graphs with this reason. torch.compiler.disable would do the same, but costs
# 10 us per call.
_UNCOMPILED = "an engine of Deepwell runs this forward"
# The callback with which torch.compile compiles frames as they are called, or None.
_frames_compiled: Callable[[], Any] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: True
)
# Sets what _frames_compiled returns, and returns what it was.
_compile_frames: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame

# A graph's operands: one tensor per leaf, and the sizes of the symbols.
_Bound = tuple[list[torch.Tensor], tuple[int, ...]]


class _Entry:
    """One captured kind of call: the program, the sources of its leaves, and how outputs are rebuilt."""

    def __init__(
        self,
        captured: Captured,
        tensors: dict[str, torch.Tensor],
        session: Session,
        logits: bool | str,
        path: str,
        sharded: bool,
    ) -> None:
        # The codes of all layers would be whole on each rank, where FSDP2 gathers the weights of one at a time.
        self._keeps = not sharded
        if session.policy is not None:
            captured = captured.inside(path)  # a policy's names are those of the whole model
        self._session, self._given, self._logits = session, captured, logits
        self._make_program()
        captured = self._captured
        self._valid: dict[tuple[int, ...], bool] = {}
        self._sizes = captured.symbol_sources
        self._inputs = [
            (index, leaf.position)
            for index, leaf in enumerate(captured.leaves)
            if leaf.kind == "input"
        ]
        self.bind(tensors)
        self.program.check_inputs([index for index, _ in self._inputs])
        # By grad mode, whether torch.compile compiles the original, and magnitude: whether it was measured slower than
        # the original.
        self.slower: dict[tuple[bool, bool, int], bool] = {}

    def _make_program(self) -> None:
        """Makes the program in the session's precision."""
        session = self._session
        captured, self._deferred = defer(self._given, self._logits, session.policy)
        self._captured = captured
        self.program = self._program()
        self.rebuild = captured.rebuild_outputs
        self._observing: Program | None = None

    def _program(self, observed: bool = False) -> Program:
        session, captured = self._session, self._captured
        program = Program(
            captured.json, session.pool, session.policy, session.target, self._deferred, observed
        )
        program.set_dependencies(captured.depends)
        return program

    def change_precision(self) -> None:
        """Makes the program again after the session's policy has changed. What was captured stays."""
        bound = self._leaves[: len(self._captured.leaves)]
        self._make_program()
        self._leaves = [*bound, *[None] * (len(self.program.leaf_roles) - len(bound))]
        self.program.check_inputs([index for index, _ in self._inputs])

    def _observed(self, sample: Sample, leaves: list[Any]) -> tuple[Program, list[Any]]:
        """Returns the program whose backward also gives the statistics of operands, and its leaves."""
        if self._observing is None:
            self._observing = self._program(observed=True)
        return self._observing, [*leaves, *sample.leaves(self._observing)]

    def bind(self, tensors: dict[str, torch.Tensor]) -> None:
        """Binds the parameters and buffers in ``tensors``."""
        leaves: list[torch.Tensor | None] = []
        for leaf in self._captured.leaves:
            if leaf.kind in ("parameter", "buffer"):
                leaves.append(tensors[leaf.target])
            else:
                leaves.append(leaf.value if leaf.kind == "constant" else None)
        # A seed that only the precision needs is not in the capture.
        missing = len(self.program.leaf_roles) - len(leaves)
        self._leaves = [*leaves, *[None] * missing]

    def bind_call(self, flat: list[Any]) -> _Bound | None:
        """Returns the tensors of all leaves, still without the seed, and the sizes of the symbols. Returns None if the
        graph does not cover such a call."""
        leaves = list(self._leaves)
        for index, position in self._inputs:
            leaves[index] = flat[position]
        sizes = tuple([flat[position].shape[axis] for position, axis in self._sizes])
        if not self.program.accepts(leaves, sizes):
            return None
        for tensor, version in self._captured.folded:
            if tensor._version != version:
                return None  # a tensor whose value is part of the graph
        if self._captured.guards.plain_layout and not self._lies_plainly(leaves):
            return None
        needs_grad_mode = self._captured.guards.grad_enabled
        if needs_grad_mode is not None and needs_grad_mode != torch.is_grad_enabled():
            return None
        valid = self._valid.get(sizes)
        if valid is None:
            valid = self._valid[sizes] = self._captured.accepts_sizes(sizes)
        return (leaves, sizes) if valid else None

    def _lies_plainly(self, leaves: list[torch.Tensor]) -> bool:
        """Returns whether the arguments are laid out in memory as during tracing, if the forward depends on that."""
        return all(
            leaves[index].is_contiguous() and leaves[index].storage_offset() == 0
            for index, _ in self._inputs
        )

    def run(
        self,
        flat: list[Any],
        bound: _Bound,
        original: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """Runs the graph. ``original`` is PyTorch's forward on the flattened arguments; a backward that the engine
        cannot run (a second derivative) falls back to it."""
        leaves, sizes = bound
        if self.program.seed_leaf is not None:
            leaves[self.program.seed_leaf] = self.program.target.fresh_seed()
        replay = None if original is None else functools.partial(self._replay, original, flat)
        program, sample = self.program, self._session.sample
        if sample is not None and torch.is_grad_enabled():
            program, leaves = self._observed(sample, leaves)
        kept = self._session.kept if self._keeps and self._session.kept.wanted else None
        return self.rebuild(program.run(leaves, sizes, replay, kept), flat)

    def smaller_call(self, flat: list[Any], bound: _Bound) -> list[Any]:
        """Returns arguments for a comparison with PyTorch: copies that share memory with ``flat``, or parts of large
        ones."""
        leaves, sizes = bound
        first = [False] * len(sizes)
        for index, (_, axis) in enumerate(self._sizes):
            first[index] = axis == 0
        fewer = smaller_sizes(
            sizes,
            first,
            lambda at: self.program.call_bytes(leaves, at),
            self.program.target.large_call,
        )
        copies = [_detached(value) for value in flat]
        if fewer != sizes:
            for index, position in self._inputs:
                value = flat[position].detach()
                for axis, size in enumerate(self.program.leaf_shape(index, fewer)):
                    value = value.narrow(axis, 0, size)
                copies[position] = value.contiguous().requires_grad_(flat[position].requires_grad)
        return copies

    def _replay(self, original: Callable[[list[Any]], Any], flat: list[Any]) -> list[torch.Tensor]:
        """Returns the graph's outputs, recomputed by PyTorch."""
        # The losses and loads that mixtures record are outputs of the graph, too.
        with routing.collecting() as collected:
            result = original(flat)
        module = self._captured._module()
        values, _ = flatten_outputs(routing.with_records(module, result, collected))
        outputs: dict[int, torch.Tensor] = {}
        for value, output in zip(values, self._captured.outputs, strict=True):
            if output.kind == "graph":
                outputs[output.index] = value
        return [outputs[index] for index in range(len(outputs))]


# Deepwell's forwards by module. They are found here even if someone has wrapped one (Accelerate does).
_installed: "weakref.WeakKeyDictionary[torch.nn.Module, OptimizedForward]"
_installed = weakref.WeakKeyDictionary()


class _Tracing(threading.local):
    """Whether this thread is capturing. Deepwell's forwards then call the originals."""

    active = False


_tracing = _Tracing()


@contextlib.contextmanager
def _standing_aside() -> Iterator[None]:
    _tracing.active = True
    try:
        yield
    finally:
        _tracing.active = False


class _State:
    """The module's state at one time, and what was captured then."""

    def __init__(self, module: torch.nn.Module, reads: Reads, target: Target) -> None:
        self.module = ModuleState(module, reads)
        # A module inside to which fully_shard was applied, or None.
        self.sharded_inside = sharded_inside(module)
        # Whether tensors are split over processes even while the forward runs.
        self.split = self.sharded_inside is None and any(
            type(tensor).__name__ == "DTensor" for tensor in self.module.tensors().values()
        )
        if self.sharded_inside is not None:
            self.reason = f"fully_shard was applied to '{self.sharded_inside}': such modules run in the engine each by itself"
        else:
            self.reason = self.module.reason or _unsupported_tensor(self.module.tensors(), target)
        self.entries: dict[Any, list[_Entry]] = {}
        self.failed: dict[Any, str] = {}
        self.count = 0
        self.numbers: dict[Any, int] = {}  # number of captures by kind of call, ignoring numbers

    def adopt(self, now: "_State") -> None:
        """Replaces this state by ``now``, which differs at most in its tensors."""
        self.module.adopt(now.module)
        for made in self.entries.values():
            for entry in made:
                entry.bind(self.module.tensors())


class OptimizedForward:
    """A module's forward while it is optimized. It is called as the original would be.

    It behaves like the bound method that it replaces, but does not keep its module alive: a model is
    freed when its last reference goes.
    """

    def __init__(self, module: torch.nn.Module, path: str, session: Session) -> None:
        self._module = weakref.ref(module)
        self.path = path
        self.session = session
        self.previous = module.__dict__.get("forward")
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._busy = threading.local()
        self._states: list[_State] = []  # the current one first
        self._reads = Reads()  # everything that the forward was observed to read, over all captures
        self._left_alone: str | None = None  # why PyTorch runs it for good
        self._awaited: str | None = (
            None  # an effect of the first call, after which a capture may succeed
        )
        self._captured_once = False
        self._attempts = 0
        self._slower: set[Any] = set()  # shapes of calls for which PyTorch is faster

    # ---- the interface of a forward ----------------------------------------------------------------

    @property
    def module(self) -> torch.nn.Module:
        module = self._module()
        if module is None:
            raise RuntimeError(
                "the model of this optimized forward no longer exists: keep the model, not its forward alone, or "
                "take the forward after deepwell.restore(model)"
            )
        return module

    @property
    def original(self):
        """The forward that the module had before optimize()."""
        if self.previous is not None:
            return self.previous
        module = self.module
        return type(module).forward.__get__(module)

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

    @property
    def __self__(self) -> torch.nn.Module:
        return self.module

    @property
    def __func__(self):
        """The function of a bound method, for code that wraps one (Accelerate wraps it and binds it again)."""
        return _unbound(type(self.module))

    def __getattr__(self, name: str) -> Any:
        # Like a bound method, it has its function's attributes (__code__, and the user's own).
        if name.startswith("_") and not name.startswith("__"):
            raise AttributeError(name)
        asking = sys._getframe(1).f_globals.get("__name__")
        if name == "__globals__" and asking == "torch._jit_internal":
            raise UnsupportedError(
                "torch.jit.script compiles source code, and an optimized forward has none: call "
                "deepwell.restore(model) first, or use torch.jit.trace or torch.export"
            )
        return getattr(self.original, name)

    def remove(self) -> None:
        """Restores the original. If a wrapper holds this forward, it behaves like the original from now on."""
        self._left_alone = _RESTORED
        module = self.module
        found = module.__dict__.get("forward")
        ours = getattr(found, "__func__", None) is _unbound(type(module))
        if found is self or ours:
            if self.previous is not None:
                module.__dict__["forward"] = self.previous
            else:
                module.__dict__.pop("forward", None)
        _installed.pop(module, None)

    def __reduce__(self):
        return (_unpickle, (self.module, self.path, self.session, self.previous))

    def __deepcopy__(self, memo: dict[int, Any]) -> "OptimizedForward":
        return _unpickle(
            copy.deepcopy(self.module, memo),
            self.path,
            copy.deepcopy(self.session, memo),
            copy.deepcopy(self.previous, memo),
        )

    # ---- a call ------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = _frames_compiled()
        if compiler is None:
            result, forward, failed = self._decide(args, kwargs)
        else:
            result, forward, failed = self._decide_uncompiled(args, kwargs, compiler)
        if forward is not None:
            # Called from here, where torch.compile sees it, so that it compiles what the engine does not run.
            try:
                result = forward(*args, **kwargs)
            except BaseException:
                failed()
                raise
        if not self.session.report.announced and not self.path and not _tracing.active:
            self._announce()
        return result

    @torch.compiler.disable
    def _announce(self) -> None:
        self.session.report.announce()

    @functools.partial(torch.compiler.disable, reason=_UNCOMPILED)
    def _decide_uncompiled(self, args: Any, kwargs: Any, compiler: Any) -> Any:
        self._busy.compiler = compiler
        try:
            return self._decide(args, kwargs)
        finally:
            self._busy.compiler = None

    @property
    def _is_compiled(self) -> bool:
        """Whether torch.compile compiles what this call leaves to PyTorch."""
        return getattr(self._busy, "compiler", None) is not None

    def _in_pytorch(self) -> Callable[..., Any]:
        """Returns the original forward, with logits as optimize was asked."""
        if self.session.logits is not False or self.path:
            return self.original
        original = self.original

        def forward(*args: Any, **kwargs: Any) -> Any:
            return without_logits(original(*args, **kwargs))

        return forward

    def _decide(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Callable[..., Any] | None, Callable[[], None]]:
        """Returns (the engine's result, None, ...), or what must run instead as the second item, and what to do if that
        raises an error as the third."""
        if getattr(self._busy, "out", False) or _tracing.active or self._left_alone is _RESTORED:
            return None, self.original, _nothing
        if self._left_alone is not None:
            return None, self._in_pytorch(), _nothing
        report = self.session.report
        asks = self._slower and not getattr(self._busy, "comparing", False)
        shapes = self._shapes(args, kwargs) if asks else None
        if shapes in self._slower:
            report.count_fallback(self.path, _SLOWER)
            return None, self._in_pytorch(), _nothing
        attempts_before = self._attempts
        started = time.perf_counter() if report.profile else 0.0
        kind, result, reason = self._run(args, kwargs)
        if reason is not None and self.session.follow(self.module):
            kind, result, reason = self._run(args, kwargs)
        if reason is None:
            report.count_call(self.path, time.perf_counter() - started if report.profile else 0.0)
            return result, None, _nothing
        if self._captured_once or self._attempts == 0:
            report.count_fallback(self.path, reason)
        if reason is _SLOWER:
            self._note_slower(self._shapes(args, kwargs))
        if self._attempts == attempts_before:
            return None, self._in_pytorch(), _nothing

        def failed() -> None:
            # for example wrong arguments, which say nothing about other calls
            self._attempts = attempts_before
            self._left_alone = None
            state, key = kind
            state.failed.pop(key, None)

        return None, self._in_pytorch(), failed

    def _shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _shapes(args, kwargs, (self.module.training, self._is_compiled))

    def _note_slower(self, shapes: Any) -> None:
        """Sends later calls of these shapes to PyTorch without checking the module, which only the engine needs."""
        if shapes is not None:
            if len(self._slower) >= _MAX_SLOWER:
                self._slower.clear()
            self._slower.add(shapes)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, str | None]:
        """Returns (kind of call, the engine's result, None), or with the reason why PyTorch must run as the third
        item."""
        kind = None
        reason = unusual_mode(self.session.target.kind)
        if reason is None:
            flat, spec = _flattened(args, kwargs)
            if spec is None:
                return kind, None, "called with a key-value cache"
            autocast = _autocast_types()
            key, reason = _signature(flat, spec, self.session.target, autocast)
        if reason is None:
            state = self._state()
            reason = state.reason
            if reason is not None:
                self._place_elsewhere(state)
        if reason is None:
            key = key, state.module.training
            kind = state, key
            entry, found = self._find(state, key, flat, args, kwargs)
            if entry is None:
                return kind, None, found
            replay = functools.partial(self._original_on, spec, state, autocast)
            return kind, entry.run(flat, found, replay), None
        return kind, None, reason

    def _place_elsewhere(self, state: _State) -> None:
        """Puts the engine into the modules that FSDP2 gathers, and on a GPU Deepwell's attention into a module of which
        each process has a part, both for good."""
        if state.sharded_inside is not None:
            self._left_alone = state.reason
            self.session.report.leave(self.path, self.module, state.reason)
            self.session.descend(self.module, self.path)
        elif state.split and isinstance(self.session.target, Gpu):
            self.session.report.leave(self.path, self.module, state.reason)
            self._replace_attention(state.reason)

    def _original_on(self, spec: Any, state: _State, autocast: Any, flat: list[Any]) -> Any:
        """Runs the original forward on flattened arguments, some time after the call, with autocast as it was then."""
        if not state.module.unchanged():
            raise RuntimeError(
                f"{type(self.module).__name__} has changed since its forward, and this backward must run the "
                "forward again: call backward before changing the model, or deepwell.restore(model) first"
            )
        args, kwargs = _unflattened(flat, spec)
        with contextlib.ExitStack() as stack:
            for kind, dtype in zip(_AUTOCAST_KINDS, autocast):
                if dtype is not None or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None))
            stack.enter_context(self._out())
            return self.original(*args, **kwargs)

    @contextlib.contextmanager
    def _out(self) -> Iterator[None]:
        """Inside the context, calls by this thread run the original."""
        was = getattr(self._busy, "out", False)
        self._busy.out = True
        try:
            yield
        finally:
            self._busy.out = was

    def _state(self) -> _State:
        """Returns the module's current state: that of the last call, an earlier one, or a new one."""
        states = self._states
        if states and states[0].module.unchanged():
            return states[0]
        with self._lock:
            now = _State(self.module, self._reads, self.session.target)
            change = None
            for position, state in enumerate(self._states):
                difference = state.module.compare(now.module)
                if difference is None and state.reason == now.reason:
                    state.adopt(now)
                    self._states = [state, *self._states[:position], *self._states[position + 1 :]]
                    return state
                change = change or difference
            if change is not None:
                self.session.report.note(self.path, change)
            self._states = [now, *self._states[: _MAX_STATES - 1]]
            return now

    def _find(self, state: _State, key: Any, flat: list[Any], args: Any, kwargs: Any):
        """Returns (entry, its operands), or (None, why the original must run)."""
        entry, bound = self._accepting(state, key, flat)
        if entry is None:
            if key in state.failed:
                if self._awaited is not None:  # the call had no effect on the module's state
                    self._replace_attention(self._awaited)
                return None, state.failed[key]
            with self._lock:
                # Another thread may have made it meanwhile.
                entry, _ = self._accepting(state, key, flat)
                reason = None if entry is not None else self._capture(state, key, args, kwargs)
            if reason is not None:
                return None, reason
            entry, bound = self._accepting(state, key, flat)
            if entry is None:
                state.failed[key] = "the captured graph does not cover these shapes or strides"
                return None, state.failed[key]
        size = torch.is_grad_enabled(), self._is_compiled, magnitude(bound[1])
        slower = entry.slower.get(size)
        if slower is not False and getattr(self._busy, "comparing", False):
            return entry, bound
        if slower is None:
            with self._lock:
                slower = entry.slower.get(size)
                if slower is None:
                    slower = self._measure(entry, flat, bound, args, kwargs)
        return (None, _SLOWER) if slower else (entry, bound)

    def _accepting(self, state: _State, key: Any, flat: list[Any]) -> Any:
        """Returns (entry, its operands) of a capture for such a call, or (None, None)."""
        for entry in state.entries.get(key, ()):
            bound = entry.bind_call(flat)
            if bound is not None:
                return entry, bound
        return None, None

    def _capture(self, state: _State, key: Any, args: Any, kwargs: Any) -> str | None:
        """Captures this kind of call. Returns None, or why it stays with PyTorch."""
        if state.count >= _MAX_CAPTURES:
            return f"{_MAX_CAPTURES} kinds of call are already captured"
        if self._attempts >= _MAX_CAPTURES_EVER:
            return f"{_MAX_CAPTURES_EVER} captures were already made: the module keeps changing"
        kind = _without_numbers(key)
        if state.numbers.get(kind, 0) >= _MAX_NUMBERS:
            return (
                f"{_MAX_NUMBERS} kinds of call that differ only in a number are already captured: pass "
                "numbers that vary as tensors"
            )
        started = time.perf_counter()
        self._attempts += 1
        name = type(self.module).__name__
        try:
            with self.session.report.progress(f"Capturing {name}"), _standing_aside():
                # Hooks, and functions that someone has wrapped around this forward, run around the engine: tracing
                # must neither run them nor capture them.
                captured = capture_graph(
                    self.module,
                    args,
                    kwargs,
                    repeat=True,
                    without_hooks=True,
                    forward=self.previous,
                )
            self._watch(state, captured)
            # A module inside returns what the modules around it use.
            logits = "lazy" if self.path and self.session.logits is False else self.session.logits
            sharded = is_sharded(self.module)
            if logits == "lazy" and sharded:
                logits = True  # FSDP2 may free the head's weight after forward
            entry = _Entry(
                captured, state.module.tensors(), self.session, logits, self.path, sharded
            )
        except (CaptureError, _deepwell.Error) as error:
            state.failed[key] = reason = str(error)
            if getattr(error, "of_call", False):
                self._attempts -= 1  # nothing was traced
            elif not self._captured_once:
                self._descend(reason, getattr(error, "of_effect", False))
            return reason
        self._captured_once = True
        state.entries.setdefault(key, []).append(entry)
        state.count += 1
        state.numbers[kind] = state.numbers.get(kind, 0) + 1
        self.session.report.captured(
            self.path, self.module, entry.program, time.perf_counter() - started
        )
        return None

    def _watch(self, state: _State, captured: Captured) -> None:
        """From now on, each call compares what the forward was observed to read."""
        self._reads.update(captured.reads)
        watched = ModuleState(self.module, self._reads)
        reason = watched.unwatched
        for code, name in captured.codes.items():
            if code.co_freevars and code not in watched.described_codes and reason is None:
                reason = f"variables around '{name}', which cannot be watched"
        if reason is not None:
            raise CaptureError(
                f"{type(self.module).__name__} reads {reason}: pass it as an argument, keep it in a "
                "number, a list or a dictionary, or leave it as it is: the module then runs in PyTorch"
            )
        state.module.adopt(watched)

    def _descend(self, reason: str, of_effect: bool) -> None:
        """Tries the modules inside, after a capture failed and if there is none. This module is tried again a few
        times, for other kinds of call and when it changes. On a GPU its attention is replaced instead, for good; an
        effect that only the first call may have (Hugging Face models set ``config.problem_type``) is waited for."""
        if self._attempts >= _MAX_FAILURES:
            self._left_alone = reason
        self.session.report.leave(self.path, self.module, reason)
        if not isinstance(self.session.target, Gpu):
            self.session.descend(self.module, self.path)
        elif of_effect and self._attempts == 1:
            self._awaited = reason
        else:
            self._replace_attention(reason)

    def _replace_attention(self, reason: str) -> None:
        self._awaited = None
        self._left_alone = reason
        self.session.report.attention(install.install(self.module, "GPU"))

    def change_precision(self) -> None:
        """Makes the programs again after the session's policy has changed."""
        with self._lock:
            for state in self._states:
                for entries in state.entries.values():
                    for entry in entries:
                        entry.change_precision()
            for program in self.programs()[:1]:
                self.session.report.precisions_of(self.path, program)

    # ---- looking inside ----------------------------------------------------------------------------

    def programs(self) -> list[Program]:
        """Returns the captured graphs, those of the module's current state first."""
        return [
            entry.program
            for state in self._states
            for entries in state.entries.values()
            for entry in entries
        ]

    @contextlib.contextmanager
    def in_engine(self) -> Iterator[None]:
        """Inside the context, calls by this thread run in the engine also where PyTorch was measured to be faster."""
        was = getattr(self._busy, "comparing", False)
        self._busy.comparing = True
        try:
            yield
        finally:
            self._busy.comparing = was

    # ---- comparison with PyTorch ---------------------------------------------------------------------

    def _measure(
        self, entry: _Entry, flat: list[Any], bound: _Bound, args: Any, kwargs: Any
    ) -> bool:
        """Times the original and the engine on copies of this call's inputs. Returns whether the original is faster.

        Both are called as the module calls its forward, so guards, binding and autograd count. Gradients, buffers,
        attributes and random states do not change. DEEPWELL_MEASURE=0 in the environment skips the comparison: the
        engine then runs every call that it can.
        """
        grad = torch.is_grad_enabled()
        # Until the result is known the engine runs: in the calls below, and in other threads meanwhile.
        size = grad, self._is_compiled, magnitude(bound[1])
        entry.slower[size] = False
        if (
            os.environ.get("DEEPWELL_MEASURE") == "0"
            or self.session.policy is not None  # PyTorch would compute something else
            or isinstance(self.session.target, EmulatedGpu)  # slower in any case
            # gradient hooks of the user would run
            or any(parameter._backward_hooks for parameter in self.module.parameters())
        ):
            return False
        if self.session.target.is_recorded():  # a CUDA graph of the caller's
            del entry.slower[size]
            return False
        structure = pytree.tree_structure((args, kwargs))
        for copies in (entry.smaller_call(flat, bound), [_detached(value) for value in flat]):
            call = entry.bind_call(copies)
            if call is None:  # the engine has no graph for sizes this small
                continue
            try:
                with self.session.report.progress("Comparing with PyTorch"):
                    timing = self._compared(entry, copies, structure)
            except Exception:  # smaller arguments may be inconsistent; a wrong call fails later
                continue
            finally:
                if entry.program.call_bytes(*call) > self.session.target.large_call // SHARE:
                    self.session.pool.clear()
                    _deepwell.trim_memory()
            entry.slower[size] = timing.slower
            self.session.report.measured(
                self.path,
                self.module,
                grad,
                timing,
                call[1] if call[1] != bound[1] else None,
                self._is_compiled,
            )
            return timing.slower
        return False

    def _compared(self, entry: _Entry, copies: list[Any], structure: Any) -> Timing:
        args, kwargs = pytree.tree_unflatten(copies, structure)
        targets = [
            tensor
            for tensor in [*self.module.parameters(), *copies]
            if torch.is_grad_enabled() and isinstance(tensor, torch.Tensor) and tensor.requires_grad
        ]

        target = self.session.target
        bound = entry.bind_call(copies)
        assert bound is not None
        # On a GPU an idle arena is not kept beside PyTorch's activations, where both are large.
        large = entry.program.call_bytes(*bound) > target.large_call // 16
        alone = isinstance(target, Gpu) and large

        compiler = getattr(self._busy, "compiler", None)
        forward = self.original
        compiler = (
            None if compiler is True else compiler
        )  # a PyTorch that does not give its callback

        def original() -> Any:
            if alone:
                self.session.pool.clear()
            with self._out():
                before = _compile_frames(compiler)
                try:
                    return forward(*args, **kwargs)
                finally:
                    _compile_frames(before)

        def engine() -> Any:
            self._busy.comparing = True
            try:
                _, result, reason = self._run(args, kwargs)
            finally:
                self._busy.comparing = False
            if reason is not None:
                raise _NotCompared(reason)
            return result

        # The comparison must restore all state that the forward changes, also changes that no capture noticed.
        with state_kept(self.module):
            theirs = differentiated(original, targets)
            if compiler is not None:
                theirs()  # compiles
            return compare(
                theirs,
                differentiated(engine, targets),
                target.wait if isinstance(target, Gpu) else None,
            )


class _NotCompared(Exception):
    """The engine cannot run the call that is to be compared."""


torch._dynamo.decorators.skip(OptimizedForward.__call__)
OptimizedForward.__call__._torchdynamo_disable_msg = _UNCOMPILED


def _unpickle(module, path, session, previous) -> OptimizedForward:
    forward = OptimizedForward.__new__(OptimizedForward)
    forward._module = weakref.ref(module)
    forward.path, forward.session, forward.previous = path, session, previous
    forward._reset()
    _installed[module] = forward
    return forward


@functools.lru_cache(maxsize=1024)
def _unbound(kind: type):
    """Returns the optimized forward of modules of class ``kind``, as a function of the module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ours = _installed.get(self)
        if ours is None:  # restored, or a copy that was made without it
            return kind.forward(self, *args, **kwargs)
        return ours(*args, **kwargs)

    forward.__signature__ = inspect.signature(kind.forward)
    forward.__doc__ = kind.forward.__doc__
    return forward


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Returns the arguments as a list in pytree's order, and their structure. The structure is missing if there is a
    key-value cache, because decoding updates it in place and a graph does not."""
    flat = [*args, *kwargs.values()]
    if all([type(value) in _PLAIN for value in flat]):
        return flat, (len(args), *kwargs)
    if any(is_cache(value) for value in flat):
        return flat, None
    return pytree.tree_flatten((args, kwargs))


def _nothing() -> None:
    """Does nothing."""


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any], mode: Any) -> Any:
    """Returns a key, from the arguments and the module's mode, under which the faster side is stored; None if they are
    not plain."""
    parts: list[Any] = [mode, torch.is_grad_enabled(), len(args), *kwargs]
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind not in _PLAIN:
            return None
        parts.append((value.shape, value.dtype) if kind in _TENSORS else (kind, value))
    return tuple(parts)


def _unflattened(flat: list[Any], spec: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(spec, tuple):
        count, *names = spec
        return tuple(flat[:count]), dict(zip(names, flat[count:], strict=True))
    return pytree.tree_unflatten(flat, spec)


def _without_numbers(key: Any) -> Any:
    """Returns a kind of call without the values of its numbers."""
    (spec, parts), training = key
    return spec, training, tuple([p[0] if p[0] in (int, float) else p for p in parts])


def _autocast_types() -> tuple[torch.dtype | None, ...]:
    """Returns autocast's element type on each kind of device, or None where it is off."""
    return tuple(
        [
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            for kind in _AUTOCAST_KINDS
        ]
    )


def _signature(
    flat: list[Any], spec: Any, target: Target, autocast: tuple[torch.dtype | None, ...]
) -> tuple[Any, str | None]:
    """Returns what distinguishes this kind of call from others, or why the engine does not support it. ``autocast``:
    the result of _autocast_types()."""
    parts: list[Any] = []
    # Position of each tensor, since a forward can see that two arguments are the same.
    first: dict[int, int] = {}
    for position, value in enumerate(flat):
        if isinstance(value, torch.Tensor):
            if type(value) not in (torch.Tensor, torch.nn.Parameter):
                return None, f"an argument is a {type(value).__name__}, not a plain tensor"
            if not target.accepts(value) or value.layout != torch.strided:
                return None, f"an argument is on {value.device} with layout {value.layout}"
            if torch._C._functorch.is_functorch_wrapped_tensor(value):
                return None, "an argument comes from inside of a torch.func transform"
            if value.is_neg() or value.is_conj():
                return None, "an argument is negated or conjugated lazily"
            if value.is_inference() and torch.is_grad_enabled():
                return None, "an argument was created under torch.inference_mode"
            shape = value.shape
            if 0 in shape:
                return None, "an argument has no elements"
            same = first.setdefault(id(value), position)
            parts.append((value.dtype, tuple([size == 1 for size in shape]), same))
        elif isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device)):
            parts.append((type(value), value))
        else:
            return None, f"an argument is a {type(value).__name__}"
    parts.append((torch.dtype, torch.get_default_dtype()))
    parts.append((torch.autocast, autocast))
    return (spec, tuple(parts)), None


def _detached(value: Any) -> Any:
    """Returns a tensor with the same memory that is a leaf of autograd."""
    if isinstance(value, torch.Tensor):
        return value.detach().requires_grad_(value.requires_grad)
    return value
