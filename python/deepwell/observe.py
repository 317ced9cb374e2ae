"""Watches a forward while it is traced: which code runs, and which queries it makes that a trace does not show.

A trace holds the operations on tensors. A forward may also read the grad mode, a tensor's strides, the clock or a
global; the graph would keep the values that tracing saw. A profile function sees every function that is called outside
of PyTorch's operations. A TorchFunctionMode sees every query of a tensor.

Code that belongs to PyTorch, NumPy or the standard library is trusted to do what its documentation says. Code of other
installed packages (site-packages) may keep its own caches and records; its queries count like the user's.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import inspect
import io
import logging
import os
import random
import sys
import types
from typing import Any, Callable, Iterator

import torch
from torch.overrides import TorchFunctionMode

from deepwell.contents import LIBRARY, STANDARD, TORCH, USER, Reads, owner_of_code, parts
from deepwell.standin import Strayed

# Queries of a tensor whose answer is not part of a graph. The attributes are read through their descriptors.
_ATTRIBUTES = frozenset(
    {
        "requires_grad",
        "is_leaf",
        "grad_fn",
        "grad",
        "_version",
        "_base",
        "retains_grad",
        "output_nr",
    }
)
_METHODS = frozenset(
    {
        "data_ptr", "untyped_storage", "storage", "_typed_storage", "is_inference", "is_shared", "is_pinned",
        "is_set_to", "_is_view", "is_conj", "is_neg", "__reduce_ex__", "__deepcopy__", "share_memory_",
    }
)  # fmt: skip
_LAYOUT = frozenset(
    {"stride", "storage_offset", "is_contiguous", "dim_order", "is_non_overlapping_and_dense"}
)
# Changes to a tensor that a trace does not show.
_CHANGES = frozenset(
    {"set_", "resize_", "resize_as_", "requires_grad_", "retain_grad", "swap_tensors", "swap_"}
)
_IN_PLACE = frozenset(
    {
        f"__i{name}__"
        for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()
    }
    | {"__setitem__"}
)
_NUMBERS = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
        "__complex__",
    }
)
# Builtin functions whose result varies from call to call, or that have side effects.
_BUILTINS = {
    "time": ("time",), "posix": ("the operating system",), "_socket": ("the network",), "_io": ("a file",),
    "_random": ("a random generator",), "_thread": ("the thread",), "_contextvars": ("a context variable",),
}  # fmt: skip
_HARMLESS = frozenset(
    {"fspath", "allocate_lock", "acquire", "release", "__enter__", "__exit__", "locked", "RLock"}
)
_TORCH_STATE = frozenset(
    {
        "is_inference_mode_enabled", "is_autocast_cache_enabled", "get_num_threads", "get_num_interop_threads",
        "is_anomaly_enabled", "is_anomaly_check_nan_enabled", "_get_deterministic_algorithms",
        "_get_deterministic_algorithms_warn_only", "_get_float32_matmul_precision",
    }
)  # fmt: skip


def _code(function: Any) -> Any:
    return getattr(inspect.unwrap(function), "__code__", None)


# Python functions of the standard library and of PyTorch that do the same.
_FUNCTIONS = {
    code: what
    for code, what in {
        _code(os._Environ.__getitem__): "reads the environment",
        _code(os._Environ.__iter__): "reads the environment",
        _code(logging.Logger._log): "writes to a log",
        _code(logging.Logger.isEnabledFor): "",
        _code(random.Random.randint): "draws from a random generator",
        _code(random.Random.choice): "draws from a random generator",
        _code(torch.initial_seed): "reads the state of PyTorch's random generator",
        _code(torch.get_rng_state): "reads the state of PyTorch's random generator",
        _code(torch.set_rng_state): "sets the state of PyTorch's random generator",
        _code(torch.manual_seed): "sets the state of PyTorch's random generator",
        _code(torch.are_deterministic_algorithms_enabled): "reads PyTorch's flags",
        _code(torch.get_float32_matmul_precision): "reads PyTorch's flags",
        _code(torch.utils.data.get_worker_info): "reads which process it runs in",
    }.items()
    if code is not None and what
}
_MODULE_CALL = torch.nn.Module._call_impl.__code__
_WRAPPERS = os.sep.join(
    ("", "torch", "_compile.py")
)  # wrappers of functions that no compiler traces into
_PASSED = (os.sep.join(("torch", "overrides.py")), os.sep.join(("torch", "_tensor.py")))


@functools.lru_cache(maxsize=4096)
def _mentions(code: types.CodeType) -> tuple[frozenset[str], Reads, tuple[str, ...]]:
    """Returns (globals, attributes, modules imported) that a code object names."""
    outside, names, optional, imported, computed = set(), set(), set(), [], False
    for part in parts(code):
        names.add(part.co_name)
        for step in dis.get_instructions(part):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
                outside.add(step.argval)
            elif step.opname in (
                "LOAD_ATTR",
                "LOAD_METHOD",
                "STORE_ATTR",
                "DELETE_ATTR",
                "IMPORT_FROM",
            ):
                names.add(step.argval)
            elif step.opname == "LOAD_SUPER_ATTR":
                names.add(step.argval)
            elif step.opname == "IMPORT_NAME":
                imported.append(step.argval)
        if {
            "getattr",
            "hasattr",
            "setattr",
            "vars",
            "attrgetter",
            "dir",
        } & outside or "__dict__" in names:
            computed = True
            optional |= {c for c in part.co_consts if isinstance(c, str) and c.isidentifier()}
    return frozenset(outside), Reads(names | optional, computed, optional), tuple(imported)


def read_by(code: types.CodeType, namespace: dict[str, Any]) -> Reads:
    """Returns what a code object can read when it runs with these globals."""
    outside, attributes, imported = _mentions(code)
    found = Reads()
    found.update(attributes)
    library = owner_of_code(code, namespace) == LIBRARY
    for name in outside:
        if name in namespace or not hasattr(builtins, name):
            value = namespace.get(name)
            if not library or isinstance(value, (bool, int, float, str, type(None))):
                found.places[id(namespace), name] = (namespace, name)
    for name in imported:
        if name in sys.modules and not library:
            found.places[id(sys.modules), name] = (sys.modules, name)
    return found


# Kinds of globals that do not depend on who reads them.
_SAME_FOR_ALL = (
    bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, torch.dtype, torch.device,
)  # fmt: skip


class Unrecordable(Exception):
    """The forward does something that a graph cannot represent."""


class Recorder:
    """Records one run of a forward. ``seen`` lists what a graph would omit, as verb phrases that follow the module's
    name."""

    def __init__(
        self, on_code: Callable[[Reads], None], tensors: dict[int, Any], strangers: set[int]
    ) -> None:
        """``on_code`` is called before code runs that reads more than the code before it. ``tensors`` are those that
        attributes and globals hold, by identity. ``strangers`` are modules that must not be called."""
        self.reads = Reads()
        self.seen: list[str] = []
        self.asks_grad_mode = False
        self.asks_layout = False
        self.codes: dict[types.CodeType, str] = {}  # the user's, with the functions' names
        self._known: set[types.CodeType] = set()
        self._on_code = on_code
        self._tensors = tensors
        self._strangers = strangers
        self.strayed = False

    def tells_objects_apart(self) -> bool:
        """Returns whether the user's code may treat equal objects differently by their identity: it names ``id`` or
        ``hash``, or reads variables around it, containers or other objects outside of the module."""
        for code in self.codes:
            if set(code.co_freevars) - {"__class__"}:
                return True
            if any(name in ("id", "hash") for part in parts(code) for name in part.co_names):
                return True
        values = [namespace.get(name) for namespace, name in self.reads.places.values()]
        return not all(isinstance(value, _SAME_FOR_ALL) for value in values)

    def close(self) -> None:
        """Drops the references to what was watched."""
        self._on_code, self._tensors = lambda reads: None, {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches the code that runs inside the context, in the thread that traces."""
        previous = sys.getprofile()
        if previous is not None and hasattr(previous, "disable"):
            previous.disable()  # cProfile
        elif previous is not None and not callable(previous):
            self.note("runs under a profiler that cannot be set aside")
        try:
            with _Questions(self):
                sys.setprofile(self.event)
                try:
                    yield
                finally:
                    sys.setprofile(None)
        finally:
            if previous is not None and hasattr(previous, "enable"):
                previous.enable()
            elif previous is not None:
                sys.setprofile(previous)

    def note(self, what: str) -> None:
        """Ends the trace before the observed effect happens."""
        if what not in self.seen:
            self.seen.append(what)
        raise Unrecordable(what)

    # ---- functions ---------------------------------------------------------------------------------

    def event(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code in _FUNCTIONS:
                if self._asked_by_user(frame.f_back):
                    self.note(f"{_FUNCTIONS[code]} in its forward")
            elif code is _MODULE_CALL:
                if id(frame.f_locals.get("self")) in self._strangers:
                    self.strayed = True
                    raise Strayed
            elif code not in self._known:
                self._known.add(code)
                if owner_of_code(code, frame.f_globals) in (USER, LIBRARY):
                    self._enter(code, frame)
        elif event == "c_call":
            self._builtin(frame, argument)

    def _enter(self, code: types.CodeType, frame: types.FrameType) -> None:
        if owner_of_code(code, frame.f_globals) == USER:
            self.codes[code] = getattr(code, "co_qualname", code.co_name)
        reads = read_by(code, frame.f_globals)
        if not self.reads.covers(reads):
            self.reads.update(reads)
            self._on_code(self.reads)

    def _builtin(self, frame: types.FrameType, function: Any) -> None:
        name, module = getattr(function, "__name__", ""), getattr(function, "__module__", None)
        bound = getattr(function, "__self__", None)
        if name == "is_grad_enabled":
            self.asks_grad_mode |= owner_of_code(frame.f_code, frame.f_globals) in (USER, LIBRARY)
            return
        what = None
        if function is print:
            what = "prints"
        elif function is input or name == "open" and module in ("io", "_io"):
            what = "reads or writes a file"
        elif name in _TORCH_STATE:
            what = "asks for PyTorch's modes"
        elif isinstance(bound, (random.Random, torch.Generator)) or _draws(bound):
            what = "draws from a random generator"
        elif isinstance(bound, io.IOBase):
            what = "reads or writes a file"
        elif name in ("now", "utcnow", "today") and getattr(bound, "__module__", "") == "datetime":
            what = "calls time"
        elif name in _HARMLESS:
            return
        else:
            place = module or getattr(type(bound), "__module__", None)
            if isinstance(bound, types.ModuleType):
                place = bound.__name__
            if place in _BUILTINS:
                what = f"asks for {_BUILTINS[place][0]} ({name})"
        if what is not None and self._asked_by_user(frame):
            self.note(f"{what} in its forward")

    @staticmethod
    def _asked_by_user(frame: types.FrameType | None) -> bool:
        """Returns whether the user's code made the query, directly or through the standard library."""
        while frame is not None and (
            owner_of_code(frame.f_code, frame.f_globals) == STANDARD
            or _WRAPPERS in frame.f_code.co_filename
        ):
            frame = frame.f_back
        return frame is not None and owner_of_code(frame.f_code, frame.f_globals) == USER

    # ---- tensors -----------------------------------------------------------------------------------

    def question(
        self, function: Any, args: tuple[Any, ...], out: Any, frame: types.FrameType | None
    ) -> None:
        """Handles a function of PyTorch that is called from ``frame``."""
        name = getattr(function, "__name__", "")
        written = out
        if args and (name.endswith("_") and not name.startswith("__") or name in _IN_PLACE):
            written = args[0]
        if written is not None and id(written) in self._tensors:
            self.note("changes a tensor that is not one of its buffers in its forward")
        if name in ("__get__", "__set__", "__delete__"):
            attribute = getattr(getattr(function, "__self__", None), "__name__", "")
            if name == "__get__" and attribute not in _ATTRIBUTES:
                return
            if _caller(frame) != TORCH:
                what = "asks for" if name == "__get__" else "sets"
                self.note(f"{what} '{attribute}' of a tensor in its forward")
        elif name in _LAYOUT:
            self.asks_layout |= _caller(frame) != TORCH
        elif name in _METHODS or name in _CHANGES:
            if _caller(frame) != TORCH:
                self.note(f"calls '{name}' of a tensor in its forward")

    def answer(self, function: Any, result: Any, frame: types.FrameType | None) -> None:
        if getattr(function, "__name__", "") in _NUMBERS and not isinstance(
            result, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
        ):
            if _caller(frame) != TORCH:
                self.note("reads the numbers in a tensor in its forward")


def _draws(bound: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(
        bound, (numpy.random.Generator, numpy.random.RandomState)
    )


def _caller(frame: types.FrameType | None) -> str:
    """Returns the owner of the code that called an operation. Skips functions that every such call passes through."""
    while frame is not None and frame.f_code.co_filename.endswith(_PASSED):
        frame = frame.f_back
    return TORCH if frame is None else owner_of_code(frame.f_code, frame.f_globals)


class _Questions(TorchFunctionMode):
    """Handles PyTorch's functions as they are called. What they call themselves is not profiled."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        sys.setprofile(None)
        try:
            frame = sys._getframe(1)
            kwargs = kwargs or {}
            self._recorder.question(function, args, kwargs.get("out"), frame)
            result = function(*args, **kwargs)
            self._recorder.answer(function, result, frame)
            return result
        finally:
            sys.setprofile(self._recorder.event)
