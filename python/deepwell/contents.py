"""Descriptions of Python values that are equal while the values mean the same to a forward.

A forward reads more than its arguments: attributes, globals, closures, the objects that these hold. Contents walks
from such roots through containers, objects, functions and classes, describes what it finds by value, and notes what
must be compared so that a change is noticed: dictionaries and lists as a whole, single attributes of objects, and a
few values (sets, arrays) that have to be read.

Only those attributes of an object count that a forward can name. Reads holds these names: they come from the
code objects that ran while the forward was traced (observe.py).
"""

from __future__ import annotations

import argparse
import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import os
import pathlib
import random
import re
import sys
import sysconfig
import threading
import types
import weakref
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator

import torch

_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
BY_VALUE = frozenset(
    {
        *_SIMPLE, torch.Size, torch.layout, torch.memory_format, range, slice, type(...), type(NotImplemented),
        datetime.date, datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal, fractions.Fraction,
        pathlib.PosixPath, pathlib.PurePosixPath, re.Pattern,
    }
)  # fmt: skip
# Most items of all containers together, and deepest nesting of containers.
_MOST_ITEMS = 20000
_DEEPEST = 40
# Largest array, in bytes, that is compared at every call.
_MOST_BYTES = 1 << 14
# Classes of objects that stand for a value while a forward is traced, each with a function that reads the value.
SEEN_THROUGH: dict[type, Callable[[Any], Any]] = {}
# Marks an absent attribute.
MISSING = NotImplemented


# ---- owners of code -------------------------------------------------------------------------------------

USER, LIBRARY, STANDARD, TORCH = "user", "library", "standard", "torch"
_OWN = tuple(
    os.path.dirname(found) + os.sep
    for found in (torch.__file__, __file__, getattr(sys.modules.get("numpy"), "__file__", None))
    if found
)
# An interpreter that was moved after its build names folders that do not exist. The folders of its modules count too.
_STANDARD = tuple(
    {
        folder + os.sep
        for name in (
            sysconfig.get_path("stdlib"),
            sysconfig.get_path("platstdlib"),
            os.path.dirname(os.__file__),
        )
        for folder in (name, os.path.realpath(name))
    }
)


@functools.lru_cache(maxsize=8192)
def owner(filename: str) -> str:
    """Returns the owner of the code in a file. Code written in a console or made by exec() is the user's."""
    if filename.startswith(_OWN) or "/site-packages/sympy/" in filename:
        return TORCH
    if "/site-packages/" in filename or "/dist-packages/" in filename:
        return LIBRARY
    if filename.startswith(_STANDARD) or filename.startswith("<frozen "):
        return STANDARD
    return USER


@functools.lru_cache(maxsize=8192)
def _owner_of_module(name: str) -> str:
    top = name.partition(".")[0]
    if top in ("torch", "deepwell", "numpy", "functorch", "sympy"):
        return TORCH
    if top in sys.stdlib_module_names and top != "__main__":
        return STANDARD
    found = getattr(sys.modules.get(name), "__file__", None)
    return USER if found is None else owner(found)


def owner_of_code(code: types.CodeType, namespace: dict[str, Any]) -> str:
    """Returns the owner of a code object that runs with these globals. Code made by exec() (``dataclass``,
    ``namedtuple``) belongs to the module that it runs in."""
    if code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen "):
        if code.co_name == "__create_fn__" or "__create_fn__" in getattr(code, "co_qualname", ""):
            return STANDARD  # a method of a dataclass
        name = namespace.get("__name__")
        return _owner_of_module(name) if isinstance(name, str) else USER
    return owner(code.co_filename)


def owner_of(kind: type) -> str:
    return _owner_of_module(getattr(kind, "__module__", None) or "builtins")


# ---- what can be read --------------------------------------------------------------------------------


@dataclass
class Reads:
    """Names everything that a forward can read: globals by their place, attributes of objects by their name."""

    names: set[str] = field(default_factory=set)
    everything: bool = False  # attributes are found by computed names
    optional: set[str] = field(default_factory=set)  # attributes that may be missing (hasattr)
    places: dict[tuple[int, str], tuple[dict[str, Any], str]] = field(default_factory=dict)

    def update(self, other: "Reads") -> None:
        self.names |= other.names
        self.everything |= other.everything
        self.optional |= other.optional
        self.places.update(other.places)

    def covers(self, other: "Reads") -> bool:
        return (
            self.names >= other.names
            and self.everything >= other.everything
            and self.optional >= other.optional
            and self.places.keys() >= other.places.keys()
        )


# ---- descriptions ------------------------------------------------------------------------------------


class Contents:
    """Describes values, and collects what a later comparison needs.

    Containers are described by their items and objects by their identity, with their attributes in ``objects``:
    torch.export leaves equal copies of containers in the place of those that attributes hold.
    """

    def __init__(self, root: torch.nn.Module | None, reads: Reads | None = None) -> None:
        self._root = root
        self._reads = reads or Reads()
        self._items = 0
        self._described: dict[int, Any] = {}
        self._open: dict[int, int] = {}  # containers that are being described, with their depth
        self._listed: set[int] = set()
        self.objects: dict[int, tuple[str, dict[str, Any]]] = {}  # (label for messages, attributes)
        self.containers: list[Any] = []  # dicts and lists, compared as a whole
        self.places: list[tuple[Any, Any, Any]] = []  # (holder, key, value): dict items, attributes
        self.probes: list[
            tuple[Any, Callable[[], Any], Any]
        ] = []  # (holder, function that reads it, value)
        self.modules: list[torch.nn.Module] = []  # modules in containers, which are not registered
        self.tensors: list[torch.Tensor] = []
        self.caches: list[Any] = []  # functions under functools.lru_cache
        self.alive: list[Any] = []  # objects described by their identity, kept alive
        self.codes: set[types.CodeType] = (
            set()
        )  # of functions whose closures and defaults are described
        self.unwatched: str | None = None  # the first thing that cannot be watched
        self.iterator: str | None = None  # the first iterator, from which a forward may draw
        self.strict = False  # whether the two above are recorded

    # ---- roots -------------------------------------------------------------------------------------

    def globals(self) -> dict[tuple[int, str], Any]:
        """Descriptions of the globals that are read, by their place."""
        found = {}
        for key, (namespace, name) in self._reads.places.items():
            value = namespace.get(name, MISSING)
            self.places.append((namespace, name, value))
            self.alive.append(namespace)
            found[key] = "nothing" if value is MISSING else self.describe(value, name, 1)
        return found

    def _reads_name(self, name: Any) -> bool:
        return self._reads.everything or name in self._reads.names

    def forward_of(self, kind: type) -> None:
        """Describes the forward of a class of an installed package, which users sometimes replace."""
        for holder in kind.__mro__:
            if "forward" in vars(holder) and owner_of(holder) == LIBRARY:
                found = vars(holder)["forward"]
                self.places.append((vars(holder), "forward", found))
                self.alive.append(found)
                self.objects.setdefault(id(holder), (holder.__name__, {}))[1]["forward"] = id(found)

    # ---- values ------------------------------------------------------------------------------------

    def describe(self, value: Any, label: str, depth: int = 0) -> Any:
        """Describes ``value``; ``label`` names it in messages. Modules at a ``depth`` above 0 are listed."""
        kind = type(value)
        if kind in SEEN_THROUGH:
            value = SEEN_THROUGH[kind](value)
            kind = type(value)
        if kind in BY_VALUE:
            plain = value == value and not (kind in (float, complex) and value == 0)
            return (kind, value) if plain else (kind, repr(value))
        if isinstance(value, enum.Enum):
            return (kind, value.name)
        if value is self._root:
            return "the module itself"
        if id(value) in self._described:
            return self._described[id(value)]
        if id(value) in self._open:
            return ("again", depth - self._open[id(value)])
        if depth > _DEEPEST:
            return self._unknown(value, label, "is nested too deep")
        self._open[id(value)] = depth
        try:
            found = self._inside(value, kind, label, depth)
        finally:
            del self._open[id(value)]
        self.alive.append(value)
        self._described[id(value)] = found
        return found

    def _inside(self, value: Any, kind: type, label: str, depth: int) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            if value.__dict__ and type(value) is torch.Tensor:
                self._attributes(value, value.__dict__, label, depth, False)
            return self._itself(value)
        if isinstance(value, torch.nn.Module):
            if depth > 0:
                self._list(self.modules, value)
            return self._itself(value)
        if isinstance(value, types.FunctionType):
            return self._function(value, label, depth)
        if isinstance(value, type):
            return self._class(value, label, depth)
        if isinstance(value, types.MethodType):
            bound = self.describe(value.__self__, label, depth + 1)
            return (kind, self.describe(value.__func__, label, depth + 1), bound)
        if isinstance(value, functools.partial):
            return (
                kind, self.describe(value.func, label, depth + 1),
                self.describe(value.args, label, depth + 1), self.describe(value.keywords, label, depth + 1),
            )  # fmt: skip
        if isinstance(value, types.ModuleType):
            return self._module(value, label, depth)
        if isinstance(value, (staticmethod, classmethod)):
            return (kind, self.describe(value.__func__, label, depth + 1))
        if isinstance(value, property):
            parts = [f for f in (value.fget, value.fset) if f is not None]
            return (kind, *[self.describe(part, label, depth + 1) for part in parts])
        if isinstance(value, functools.cached_property):
            return (kind, self.describe(value.func, label, depth + 1))
        if isinstance(value, functools._lru_cache_wrapper):
            self.caches.append(value)
            return (kind, id(value), self.describe(value.__wrapped__, label, depth + 1))
        if isinstance(value, weakref.ref):
            target = value()
            return (kind, self.describe(target, label, depth + 1))
        if isinstance(value, (list, tuple, dict, set, frozenset, collections.deque)):
            return self._container(value, kind, label, depth)
        if isinstance(value, (types.MappingProxyType, collections.ChainMap)):
            return self._probed(
                value,
                lambda: tuple([part for item in value.items() for part in item]),
                label,
                depth,
            )
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray):
            return self._array(value, label, depth)
        if numpy is not None and isinstance(value, numpy.generic):
            return (kind, value.tobytes())
        if isinstance(value, (bytearray, array.array)):
            if len(value) > _MOST_BYTES:
                return self._unknown(value, label, f"has {len(value)} elements")
            self._probe(value, lambda: bytes(value))
            return (kind, bytes(value))
        if callable(getattr(kind, "__next__", None)):
            if self.strict and self.iterator is None:
                self.iterator = label
            return self._unknown(value, label, "is an iterator")
        if isinstance(value, threading.local) or kind.__name__ in ("ContextVar", "_Environ"):
            return self._unknown(value, label, f"is a {kind.__name__}")
        if isinstance(value, (random.Random, torch.Generator)) or (
            numpy is not None
            and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))
        ):
            return self._unknown(value, label, "is a generator of random numbers")
        return self._object(value, kind, label, depth)

    def _itself(self, value: Any) -> tuple[str, int]:
        return (type(value).__name__, id(value))

    def _unknown(self, value: Any, label: str, reason: str) -> Any:
        if self.strict and self.unwatched is None:
            self.unwatched = f"'{label}', which {reason} and cannot be watched"
        self.alive.append(value)
        return (type(value), "not looked into")

    def _list(self, found: list[Any], value: Any) -> None:
        if id(value) not in self._listed:
            self._listed.add(id(value))
            found.append(value)

    def _probe(self, value: Any, read: Callable[[], Any], by_identity: bool = False) -> None:
        self.probes.append((value, read, read(), by_identity))

    def _probed(self, value: Any, read: Callable[[], Any], label: str, depth: int) -> Any:
        self._probe(value, read, True)
        return (type(value), self.describe(read(), label, depth + 1))

    # ---- containers --------------------------------------------------------------------------------

    def _container(self, value: Any, kind: type, label: str, depth: int) -> Any:
        self._items += len(value)
        if self._items > _MOST_ITEMS:
            self._items -= len(value)
            return self._unknown(value, label, f"has {len(value)} items")
        if isinstance(value, (set, frozenset)):
            if isinstance(value, set):
                self._probe(value, lambda: frozenset(value))
            # Equal sets may iterate in different orders, and a loop depends on the order.
            parts: Any = tuple(self.describe(item, f"{label} item", depth + 1) for item in value)
        elif isinstance(value, dict):
            self._list(self.containers, value)
            parts = tuple(
                (
                    self.describe(key, label, depth + 1),
                    self.describe(item, f"{label}[{key!r:.40}]", depth + 1),
                )
                for key, item in list(value.items())
            )
        else:
            if isinstance(value, list):
                self._list(self.containers, value)
            elif isinstance(value, collections.deque):
                self._probe(value, lambda: tuple(value), True)
            parts = tuple(
                self.describe(item, f"{label}[{index}]", depth + 1)
                for index, item in enumerate(list(value))
            )
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and own:  # attributes of a class derived from a container
            self._attributes(value, own, label, depth, True)
            return (kind, parts, id(value))
        if isinstance(value, collections.defaultdict):
            return (kind, parts, self.describe(value.default_factory, label, depth + 1))
        return (kind, parts)

    def _array(self, value: Any, label: str, depth: int) -> Any:
        if value.dtype.hasobject:
            return self._probed(value, lambda: tuple(value.ravel().tolist()), label, depth)
        if value.nbytes > _MOST_BYTES:
            return self._unknown(value, label, f"is a NumPy array of {value.nbytes} bytes")

        def read() -> Any:
            return (value.dtype, value.shape, value.strides, value.tobytes())

        self._probe(value, read)
        return (type(value), read())

    # ---- objects -----------------------------------------------------------------------------------

    def _object(self, value: Any, kind: type, label: str, depth: int) -> Any:
        if owner_of(kind) in (STANDARD, TORCH) and not is_configuration(value, kind):
            return self._itself(value)  # loggers, locks, files, generators of PyTorch
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self._attributes(value, own, label, depth, is_configuration(value, kind))
        for name in _slots(kind):
            if self._reads_name(name) or is_configuration(value, kind):
                found = getattr(value, name, MISSING)
                self.places.append((value, name, found))
                self._note(value, name, found, label, depth)
        if owner_of(kind) in (USER, LIBRARY):
            if not isinstance(own, dict) and not _slots(kind) and not _is_python(kind):
                return self._unknown(value, label, f"is a {kind.__name__}")
            self.describe(kind, kind.__name__, depth + 1)
        return self._itself(value)

    def _attributes(
        self, value: Any, own: dict[str, Any], label: str, depth: int, whole: bool
    ) -> None:
        if whole:
            self._list(self.containers, own)
        for name, found in list(own.items()):
            if whole or self._reads_name(name):
                if not whole:
                    self.places.append((own, name, found))
                self._note(value, name, found, label, depth)
        if whole:
            return
        for name in self._reads.names:
            # Setting it would hide the class attribute, or make hasattr() true.
            if name not in own and _settable(type(value), name, name in self._reads.optional):
                self.places.append((own, name, MISSING))
                self._note(value, name, MISSING, label, depth)

    def _note(self, value: Any, name: str, found: Any, label: str, depth: int) -> None:
        _, attributes = self.objects.setdefault(id(value), (label, {}))
        was = self.strict
        self.strict = was and self._reads_name(name)
        described = (
            "nothing" if found is MISSING else self.describe(found, f"{label}.{name}", depth + 1)
        )
        self.strict = was
        attributes[name] = described

    def _function(self, value: types.FunctionType, label: str, depth: int) -> Any:
        if owner(value.__code__.co_filename) != USER:
            return self._itself(value)
        self.codes.update(parts(value.__code__))
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            found = getattr(value, name)
            self.places.append((value, name, found))
            if name == "__code__":
                self.objects.setdefault(id(value), (label, {}))[1][name] = id(found)
                self.alive.append(found)
            else:
                self._note(value, name, found, label, depth)
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or ()):
            found = getattr(cell, "cell_contents", MISSING)
            self.places.append((cell, "cell_contents", found))
            self._cell(value, name, found, depth)
        self._attributes(value, value.__dict__, label, depth, False)
        return self._itself(value)

    def _cell(self, function: Any, name: str, found: Any, depth: int) -> None:
        described = "nothing" if found is MISSING else self.describe(found, name, depth + 1)
        self.objects.setdefault(id(function), (name, {}))[1][f"variable {name}"] = described

    def _class(self, value: type, label: str, depth: int) -> Any:
        for holder in value.__mro__:
            if owner_of(holder) != USER:
                continue
            attributes = vars(holder)
            for name in self._reads.names:
                if name in attributes and not (name.startswith("__") and name.endswith("__")):
                    found = attributes[name]
                    if type(found) in (types.MemberDescriptorType, types.GetSetDescriptorType):
                        continue
                    self.places.append((attributes, name, found))
                    self._note(holder, name, found, holder.__name__, depth)
        return self._itself(value)

    def _module(self, value: types.ModuleType, label: str, depth: int) -> Any:
        if _owner_of_module(value.__name__) in (STANDARD, TORCH):
            return self._itself(value)
        whose = _owner_of_module(value.__name__)
        own = vars(value)
        for name in self._reads.names:
            found = own.get(name, MISSING)
            if name.startswith("__") or (whose == LIBRARY and type(found) not in BY_VALUE):
                continue
            if found is not MISSING:
                self.places.append((own, name, found))
                self._note(value, name, found, label, depth)
        return self._itself(value)


def is_configuration(value: Any, kind: type) -> bool:
    """Returns whether the object only holds settings, in its attributes."""
    if not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return (
        dataclasses.is_dataclass(kind)
        or hasattr(kind, "to_dict")
        or issubclass(kind, (types.SimpleNamespace, argparse.Namespace))
        or any(word in kind.__name__.lower() for word in ("config", "cfg", "option", "setting"))
    )


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    found = []
    for holder in kind.__mro__:
        for name, value in vars(holder).items():
            if type(value) is types.MemberDescriptorType and owner_of(holder) != STANDARD:
                found.append(name)
    return tuple(found)


def _is_python(kind: type) -> bool:
    return bool(kind.__flags__ & (1 << 9))  # Py_TPFLAGS_HEAPTYPE: made by a class statement


def _settable(kind: type, name: str, optional: bool) -> bool:
    """Returns whether an instance attribute would hide an attribute of the class. That is the case if the class
    attribute is not a data descriptor. If the class has no such attribute, returns ``optional``."""
    for holder in kind.__mro__:
        if name in vars(holder):
            return not hasattr(vars(holder)[name], "__set__")
    return optional


def parts(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object and those of the functions that it defines."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from parts(constant)
