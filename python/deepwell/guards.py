"""Snapshots of everything that a captured graph assumes about its module, and a quick check that it still holds.

A graph is the module's forward at one moment: its submodules, parameters, flags, hooks and configuration, and
the globals, closures and objects that its code reads (contents.py, observe.py). After a change of any of them the graph
may differ from the forward, and the original forward must run.

Every call compares dictionaries, lists and single attributes with their earlier values, object by object, in C. Only if
one differs, slower code decides whether the difference matters.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import sys
import types
import weakref
from typing import Any, Iterator

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize

from deepwell import _deepwell
from deepwell.contents import (
    BY_VALUE,
    LIBRARY,
    MISSING,
    USER,
    Contents,
    Reads,
    owner,
    owner_of,
    parts,
)
from deepwell.observe import read_by

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_SIMPLE = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
# Attributes that nn.Module manages itself, and attributes that PyTorch and transformers change while modules are used.
_UNWATCHED = frozenset(torch.nn.Module().__dict__) | {
    "forward",
    "_is_hf_initialized",
    "_compiled_call_impl",
    "_output_capturing_hooks_installed",
}
# Fast checks of tensors that a state keeps: each is for one choice of modes (autocast, gradients).
_MAX_LIKENESSES = 4
# Marks a value that first_change does not compare.
_ANY = ...


# ---- names outside the module ------------------------------------------------------------------------


def _forward_of(attributes: dict[str, Any]) -> Any:
    """Returns the forward attribute of a module. Looks through Deepwell's own forward, which changes nothing."""
    forward = attributes.get("forward")
    return forward.previous if hasattr(forward, "previous") else forward


def _method(kind: type, name: str) -> types.FunctionType | None:
    for holder in kind.__mro__:
        if holder is torch.nn.Module:
            return None
        if name in vars(holder):
            found = inspect.unwrap(getattr(vars(holder)[name], "__func__", vars(holder)[name]))
            return found if isinstance(found, types.FunctionType) else None
    return None


@functools.lru_cache(maxsize=4096)
def _settings_outside(kind: type) -> tuple[tuple[Any, str], ...]:
    """Returns (namespace, name) of the globals and class attributes that the forward of a class of an installed package
    names, and of the methods that it names. Recorder does this for the user's own classes."""
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    if owner_of(kind) != LIBRARY:
        return ()
    waiting, seen = ["forward"], {"forward"}
    while waiting:
        function = _method(kind, waiting.pop())
        if function is None:
            continue
        for name in (name for code in parts(function.__code__) for name in code.co_names):
            if name in seen or name.startswith("__"):
                continue
            seen.add(name)
            waiting.append(name)
            if isinstance(function.__globals__.get(name, MISSING), _SIMPLE):
                found[id(function.__globals__), name] = (function.__globals__, name)
            for holder in kind.__mro__:
                if isinstance(vars(holder).get(name, MISSING), _SIMPLE):
                    found[id(holder), name] = (vars(holder), name)
    return tuple(found.values())


def _likely_reads(root: torch.nn.Module) -> Reads:
    """Returns what the code of the user's forwards can read. This is a first guess; running the forwards completes
    it."""
    found = Reads()
    waiting: list[tuple[Any, type | None]] = []
    for kind in {type(module) for module in root.modules()}:
        if owner_of(kind) == USER:
            waiting.append((_method(kind, "forward"), kind))
    own = _forward_of(root.__dict__)
    waiting.append((getattr(own, "__func__", own), None))
    seen = set()
    while waiting:
        function, kind = waiting.pop()
        if not isinstance(function, types.FunctionType) or (function, kind) in seen:
            continue
        if owner(function.__code__.co_filename) != USER:
            continue
        seen.add((function, kind))
        reads = read_by(function.__code__, function.__globals__)
        found.update(reads)
        if kind is not None:
            waiting += [(_method(kind, name), kind) for name in reads.names]
        waiting += [(namespace.get(name), None) for namespace, name in reads.places.values()]
    return found


# ---- the state of a module ---------------------------------------------------------------------------


class ModuleState:
    """A snapshot of everything a captured graph depends on, apart from the arguments.

    ``reads`` is what forwards were observed to read. Without it only the attributes of modules are compared.

    Holds no reference to the root module, because the module's forward holds this object: a model is freed when its
    last reference goes.
    """

    def __init__(self, module: torch.nn.Module, reads: Reads | None = None) -> None:
        self._root = weakref.ref(module)
        self._read(module, reads or Reads())
        self.reason = self._unsupported(
            module
        )  # why no engine can run the module as it is, or None

    # ---- reading ---------------------------------------------------------------------------------------

    def _read(self, root: torch.nn.Module, reads: Reads) -> None:
        contents = Contents(root, reads)
        self._records: dict[str, dict[str, Any]] = {}
        self._kinds: dict[str, Any] = {}
        self._unregistered: str | None = None
        watched: list[Any] = []
        submodules: list[torch.nn.Module] = []
        outside: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        contents.strict = True
        self._globals = contents.globals()
        named = list(root.named_modules())
        registered = {path for path, _ in named}
        found_elsewhere = {id(module) for _, module in named}
        for (
            path,
            module,
        ) in named:  # grows: modules that lists and globals hold are looked at as well
            attributes = module.__dict__
            description = {}
            for name, value in attributes.items():
                if name not in _UNWATCHED:
                    contents.strict = name in reads.names
                    description[name] = contents.describe(value, _place(path, name))
            contents.strict = True
            if owner_of(type(module)) == USER:
                contents.describe(type(module), type(module).__name__, 1)
            else:
                contents.forward_of(type(module))
            if path not in registered:
                if self._unregistered is None and any(True for _ in module.parameters()):
                    self._unregistered = f"a {type(module).__name__} in a container of '{path}'"
                for table in ("_parameters", "_buffers"):
                    description[table] = contents.describe(
                        dict(attributes[table]), _place(path, table)
                    )
            for found in contents.modules:
                if id(found) not in found_elsewhere:
                    found_elsewhere.add(id(found))
                    named.append((f"{path}.<{len(named)}>", found))
            contents.modules.clear()
            own = _forward_of(attributes)
            if module is not root and own is not None:
                description["forward"] = contents.describe(own, _place(path, "forward"))
            self._records[path] = description
            self._kinds[path] = (type(module), tuple(self._children(attributes)))
            contents.alive += attributes["_modules"].values()
            for namespace, name in _settings_outside(type(module)):
                outside[id(namespace), name] = (namespace, name, namespace.get(name, MISSING))
            if module is not root:
                submodules.append(module)
                watched += [attributes, _kept(attributes)]
                for hooks in HOOKS:
                    watched += [attributes[hooks], _kept(attributes[hooks])]
            for table in ("_parameters", "_buffers", "_modules"):
                watched += [attributes[table], _kept(attributes[table])]
        for container in contents.containers:
            watched += [container, _kept(container)]
        for name in _GLOBAL_HOOKS:
            hooks = getattr(nn_module, name, None)
            if isinstance(hooks, dict):
                watched += [hooks, _kept(hooks)]
        self._alive = contents.alive
        self._objects = contents.objects
        self._outside = list(outside.values())
        self._submodules = submodules
        self._tensors = named_tensors(root)
        # As they are now: a conversion or a move gives the same parameters other data.
        self._likeness = _likeness(self._tensors)
        self._set_tensors(contents.tensors)
        self.training = (root.training, *[module.training for module in submodules])
        watched[:0] = [None, _kept(root.__dict__)]
        self._watched = watched, _deepwell.watch(watched)  # the second points into the first
        self._places = _flat(root, [*contents.places, *self._outside])
        self._probes = [tuple(probe[1:]) for probe in contents.probes]
        # The first value that the forwards read and that cannot be watched.
        self.unwatched = contents.unwatched
        self.described_codes = contents.codes

    @staticmethod
    def _children(attributes: dict[str, Any]) -> Iterator[Any]:
        for name, child in attributes["_modules"].items():
            yield (name, id(child))

    def _set_tensors(self, others: list[torch.Tensor]) -> None:
        unique = list({id(t): t for t in [*self._tensors.values(), *others]}.values())
        self._unique = unique
        self._dtypes = [tensor.dtype for tensor in unique]
        self._shapes = [tensor.shape for tensor in unique]
        self._devices = [tensor.device for tensor in unique]
        self._likenesses: tuple[Any, ...] = ()

    def _unsupported(self, root: torch.nn.Module) -> str | None:
        for name in _GLOBAL_HOOKS:
            if getattr(nn_module, name, None):
                return f"global hooks ({name}) are registered"
        for path, module in root.named_modules():
            if module is root:
                if self._unregistered is not None:
                    return (
                        f"the parameters of {self._unregistered} are not registered: hold modules in a "
                        "ModuleList or a ModuleDict"
                    )
                if module._backward_hooks and module._is_full_backward_hook is False:
                    return "a backward hook of the old kind (register_backward_hook) is registered"
            elif any(getattr(module, hooks) for hooks in HOOKS):
                return f"hooks are registered on '{path}'"
        return None

    # ---- comparing -------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns every parameter and buffer under each of its names."""
        return self._tensors

    def unchanged(self) -> bool:
        """Returns whether nothing has changed. True is certain; False may be wrong."""
        root = self._root()
        watched, watch = self._watched
        if (
            _deepwell.first_change(watch, root.__dict__) >= 0
            or _deepwell.first_replaced(self._places) >= 0
        ):
            return False
        for read, value, by_identity in self._probes:
            if not _same(read(), value, by_identity):
                return False
        return not self._converted()

    def _converted(self) -> bool:
        """Returns whether a tensor has new data (`p.data = ...`) of another shape, dtype or device."""
        unique = self._unique
        for likeness in self._likenesses:
            if likeness.check(*unique):
                return False
        converted = (
            [tensor.dtype for tensor in unique] != self._dtypes
            or [tensor.shape for tensor in unique] != self._shapes
            or [tensor.device for tensor in unique] != self._devices
        )
        if not converted:
            self._likenesses = (*_likeness_checks(unique), *self._likenesses[: _MAX_LIKENESSES - 1])
        return converted

    def compare(self, now: "ModuleState") -> str | None:
        """Returns what differs in ``now``, or None. Tensors may be replaced by tensors of the same kind."""
        if self._kinds.keys() != now._kinds.keys():
            return f"submodules of '{_first_other(self._kinds, now._kinds)}' were replaced"
        for path, kind in self._kinds.items():
            if now._kinds[path] != kind:
                return f"submodules of '{path}' were replaced"
        for path, was in self._records.items():
            found = now._records.get(path)
            if found != was:
                return _difference(path, was, found or {})
        outside = {(id(namespace), name): value for namespace, name, value in now._outside}
        for namespace, name, was in self._outside:
            value = outside.get((id(namespace), name), was)
            if was is not value and (type(was), was) != (type(value), value):
                return f"'{name}' changed from {was!r} to {value!r}"
        difference = _outer_difference(self._globals, now._globals) or _object_difference(
            self._objects, now._objects
        )
        if difference is not None:
            return difference
        if self._likeness != now._likeness:
            return _tensor_difference(self._likeness, now._likeness)
        return now.reason if self.reason != now.reason else None

    def adopt(self, now: "ModuleState") -> None:
        """Replaces this snapshot by ``now``, which compares equal: the same module, possibly with other tensors."""
        self.__dict__.update(now.__dict__)


def _likeness_checks(tensors: list[torch.Tensor]) -> list[Any]:
    """Returns the fast check that torch.compile makes of its inputs, for tensors with the dtypes, shapes, strides and
    devices of these, under the current modes; nothing if this PyTorch has no such check."""
    try:
        return [
            torch._C._dynamo.guards.TensorGuards(
                *tensors,
                dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
            )
        ]
    except Exception:
        return []


def _kept(container: Any) -> tuple[Any, ...]:
    if isinstance(container, list):
        return tuple(container)
    flat: list[Any] = []
    for key, value in container.items():
        flat += (key, _ANY if key == "forward" else value)
    return tuple(flat)


def named_tensors(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns parameters and buffers under each of their names; tied ones have several."""
    tensors = dict(root.named_parameters(remove_duplicate=False))
    tensors.update(root.named_buffers(remove_duplicate=False))
    return tensors


def _likeness(tensors: dict[str, torch.Tensor]) -> list[Any]:
    """Returns a value that is equal for sets of tensors that the same graph can run on, including how they are tied."""
    first: dict[int, str] = {}
    return [
        (
            name,
            first.setdefault(id(tensor), name),
            tensor.dtype,
            tensor.shape,
            tensor.device,
            torch.Tensor if type(tensor) is torch.nn.Parameter else type(tensor),
        )
        for name, tensor in tensors.items()
    ]


def _tensor_difference(was: list[Any], now: list[Any]) -> str:
    for old, new in zip(was, now):
        if old == new:
            continue
        owner, _, _ = old[0].rpartition(".")
        if old[0] == new[0] and old[2:5] != new[2:5]:
            return (
                f"'{old[0]}' changed from {old[2]} {list(old[3])} on {old[4]} "
                f"to {new[2]} {list(new[3])} on {new[4]}"
            )
        return f"parameters of '{owner}' were replaced"
    return "parameters were added or removed"


def _first_other(was: dict[str, Any], now: dict[str, Any]) -> str:
    other = next(iter(set(was) ^ set(now)))
    return other.rpartition(".")[0]


def _difference(path: str, was: dict[str, Any], now: dict[str, Any]) -> str:
    for name in {**was, **now}:
        if was.get(name) == now.get(name):
            continue
        place = f"{path}.{name}" if path else name
        old, new = was.get(name), now.get(name)
        if name not in now:
            return f"'{place}' was removed"
        if name not in was:
            return f"'{place}' was added"
        return _inner_difference(place, old, new)
    return f"attributes of '{path}' changed"


def _inner_difference(place: str, old: Any, new: Any) -> str:
    """Follows descriptions down to the one item that differs."""
    if _is_value(old) and _is_value(new):
        return f"'{place}' changed from {old[1]!r} to {new[1]!r}"
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new) == 2:
        both = isinstance(old[1], tuple) and isinstance(new[1], tuple)
        if both and old[0] is new[0] and len(old[1]) == len(new[1]):
            keyed = isinstance(old[0], type) and issubclass(old[0], dict)
            for index, (was, now) in enumerate(zip(old[1], new[1])):
                if was == now:
                    continue
                if not keyed:
                    return _inner_difference(f"{place}.{index}", was, now)
                if was[0] == now[0]:
                    return _inner_difference(f"{place}.{was[0][1]}", was[1], now[1])
    return f"'{place}' was replaced or changed"


def _outer_difference(
    was: dict[tuple[int, str], Any], now: dict[tuple[int, str], Any]
) -> str | None:
    for place, old in was.items():
        if now.get(place, old) != old:
            return _inner_difference(place[1], old, now[place])
    return None


def _object_difference(was: dict[int, Any], now: dict[int, Any]) -> str | None:
    for identity, (label, attributes) in was.items():
        _, found = now.get(identity, (label, attributes))
        for name, old in attributes.items():
            if found.get(name, "nothing") != old:
                return _inner_difference(f"{label}.{name}", old, found.get(name, "nothing"))
    return None


def _is_value(description: Any) -> bool:
    return (
        isinstance(description, tuple)
        and len(description) == 2
        and isinstance(description[0], type)
        and description[0] in BY_VALUE
    )


def _place(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _flat(root: torch.nn.Module, places: list[tuple[Any, Any, Any]]) -> tuple[Any, ...]:
    """Returns the places as arguments of first_replaced, each place once."""
    found: dict[tuple[int, Any], tuple[Any, Any, Any]] = {}
    for holder, key, value in places:
        if value is not root:  # a reference to it would keep the model alive
            found[id(holder), key] = (holder, key, value)
    return tuple([part for place in found.values() for part in place])


def _same(now: Any, was: Any, by_identity: bool) -> bool:
    if not by_identity:
        return now == was
    return len(now) == len(was) and all(a is b for a, b in zip(now, was))


# ---- side effects of a forward -----------------------------------------------------------------------


class Effects:
    """Detects what a forward changes in its modules, and in everything else that it reads, while it is traced, and
    undoes the changes."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self.seen: list[str] = []
        self._reads = _likely_reads(root)
        self._saved: dict[int, tuple[Any, Any]] = {}  # containers and their content
        self._held: dict[tuple[int, Any], tuple[Any, Any, Any]] = {}  # single attributes
        self._alive: list[Any] = []
        self._caches: dict[int, Any] = {}  # functions under functools.lru_cache
        self._entries: list[tuple[Any, int]] = []  # the same, with the number of results they held
        self.tensors: dict[int, torch.Tensor] = {}  # the user's tensors, except registered ones
        self._before = self._describe(saving=True)
        self._tables: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
        self._versions: list[tuple[torch.Tensor, Any]] = []

    def learn(self, reads: Reads) -> None:
        """Must be called before code runs that reads more than was known. Records the state that it can change."""
        if self._reads.covers(reads):
            return
        self._reads.update(reads)
        records, outside, objects = self._describe(saving=True)
        _fill(self._before[1], outside)
        for identity, (label, attributes) in objects.items():
            _fill(self._before[2].setdefault(identity, (label, {}))[1], attributes)

    def _describe(self, saving: bool) -> tuple[dict[str, Any], dict[Any, Any], dict[int, Any]]:
        contents = Contents(self._root, self._reads)
        contents.strict = True
        outside = contents.globals()
        records: dict[str, dict[str, Any]] = {}
        named = list(self._root.named_modules())
        seen = {id(module) for _, module in named}
        for path, module in named:
            attributes = module.__dict__
            records[path] = {}
            for name, value in attributes.items():
                if name not in _UNWATCHED:
                    contents.strict = name in self._reads.names
                    records[path][name] = contents.describe(value, _place(path, name))
            contents.strict = True
            records[path]["training"] = (bool, module.training)
            if owner_of(type(module)) == USER:
                contents.describe(type(module), type(module).__name__, 1)
            contents.containers.append(attributes)
            contents.containers += [v for v in attributes.values() if issubclass(type(v), dict)]
            for found in contents.modules:
                if id(found) not in seen:
                    seen.add(id(found))
                    named.append((f"{path}.<{len(named)}>", found))
            contents.modules.clear()
        if saving:
            if contents.iterator is not None:
                self._saw(
                    f"may draw from '{contents.iterator}', which is an iterator, in its forward"
                )
            self._alive.append(contents.alive)
            self._caches.update((id(cache), cache) for cache in contents.caches)
            self.tensors.update((id(tensor), tensor) for tensor in contents.tensors)
            for container in [*contents.containers, *[probe[0] for probe in contents.probes]]:
                self._saved.setdefault(id(container), (container, _copied(container)))
            for holder, key, value in contents.places:
                self._held.setdefault((id(holder), key), (holder, key, value))
        return records, outside, contents.objects

    def begin(self) -> None:
        """Must be called just before the forward runs, after tracers have put their own tensors in place."""
        self._entries = [(cache, cache.cache_info().currsize) for cache in self._caches.values()]
        self._versions = [(tensor, _version(tensor)) for tensor in self.tensors.values()]
        self._tables = [
            (path, module.__dict__[table], dict(module.__dict__[table]))
            for path, module in self._root.named_modules()
            if "rope_type" not in module.__dict__
            for table in ("_parameters", "_buffers", "_modules")
        ]

    def look(self) -> None:
        """Must be called after the forward has run. Adds to ``seen`` what it has changed."""
        for path, table, was in self._tables:
            for name in {**was, **table}:
                if table.get(name, MISSING) is not was.get(name, MISSING):
                    self._saw(f"assigns '{_place(path, name)}' in its forward")
        self._tables = []
        if any(_version(tensor) != version for tensor, version in self._versions):
            self._saw("changes a tensor that is not one of its buffers in its forward")
        self._versions = []
        for cache, size in self._entries:
            if cache.cache_info().currsize != size:
                self._saw(f"fills the cache of '{cache.__name__}' in its forward")
        records, outside, objects = self._describe(saving=False)
        for path, was in self._before[0].items():
            if "rope_type" in was:
                continue  # settled_rope handles the notes of rotary embeddings
            for name, value in records.get(path, {}).items():
                if value != was.get(name):
                    self._saw(f"changes its attribute '{_place(path, name)}' in its forward")
        for place, old in self._before[1].items():
            if outside.get(place, old) != old:
                self._saw(f"changes the global '{place[1]}' in its forward")
        for identity, (label, attributes) in self._before[2].items():
            _, now = objects.get(identity, (label, attributes))
            for name, old in attributes.items():
                if now.get(name, "nothing") != old:
                    self._saw(f"changes its attribute '{label}.{name}' in its forward")

    def _saw(self, what: str) -> None:
        if what not in self.seen:
            self.seen.append(what)

    def close(self) -> None:
        """Drops the references to the module."""
        self._root = None
        self._alive, self._tables, self._versions = [], [], []
        self._saved, self._held, self.tensors = {}, {}, {}
        self._caches, self._entries = {}, []
        self._before = ({}, {}, {})

    def undo(self) -> None:
        """Puts everything back."""
        for container, content in self._saved.values():
            _put_back(container, content)
        for holder, key, value in self._held.values():
            _hold_again(holder, key, value)
        for cache, size in self._entries:
            if cache.cache_info().currsize != size:
                cache.cache_clear()  # it may hold results of the tracers


def _version(tensor: torch.Tensor) -> Any:
    return None if tensor.is_inference() else tensor._version


def _fill(before: dict[Any, Any], more: dict[Any, Any]) -> None:
    for key, value in more.items():
        before.setdefault(key, value)


def _copied(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container)
    if isinstance(container, (set, types.MappingProxyType)):
        return frozenset(container) if isinstance(container, set) else None
    if hasattr(container, "tobytes") and hasattr(container, "copy"):
        return container.copy()
    return list(container)


def _put_back(container: Any, content: Any) -> None:
    if isinstance(container, dict):
        if list(container) == list(content):  # other threads may be reading
            for key, value in content.items():
                if container[key] is not value:
                    container[key] = value
        else:
            container.clear()
            container.update(content)
    elif isinstance(container, set):
        if frozenset(container) != content:
            container.clear()
            container.update(content)
    elif content is None:
        return
    elif isinstance(content, list):
        if [id(v) for v in container] != [id(v) for v in content]:
            container.clear()
            container.extend(content)
    elif not (container == content).all():
        container[...] = content


def _hold_again(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict):
        if holder.get(key, MISSING) is value:
            return
        if value is MISSING:
            holder.pop(key, None)
        else:
            holder[key] = value
    elif not isinstance(holder, types.MappingProxyType) and value is not MISSING:
        if getattr(holder, key, MISSING) is not value:
            with contextlib.suppress(AttributeError, TypeError):
                setattr(holder, key, value)


@contextlib.contextmanager
def state_kept(root: torch.nn.Module) -> Iterator[None]:
    """Restores what forwards of the module may leave behind: which objects its attributes, parameters and
    buffers are, the values of buffers, and the states of Python's, NumPy's and PyTorch's generators."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy is not None else None
    tables = [
        (table, dict(table))
        for module in root.modules()
        for table in (
            module.__dict__,
            *[module.__dict__[n] for n in ("_parameters", "_buffers", "_modules")],
        )
    ]
    values = [(b, b._version, b.detach().clone()) for b in root.buffers() if not b.is_inference()]
    gpus = sorted({t.device.index for t in named_tensors(root).values() if t.is_cuda})
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        for table, content in tables:
            _put_back(table, content)
        with torch.no_grad():
            for buffer, version, value in values:
                if buffer._version != version:
                    buffer.copy_(value)
        random.setstate(python_state)
        if numpy_state is not None and numpy is not None:
            numpy.random.set_state(numpy_state)


# ---- modes -------------------------------------------------------------------------------------------


def unusual_mode(kind: str = "cpu") -> str | None:
    """Returns a PyTorch mode under which an engine on this kind of device must not run, or None."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "called inside a torch.func transform"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "called under a TorchDispatchMode"
    if torch._C._is_torch_function_mode_enabled() and torch._C._len_torch_function_stack() > 0:
        for index in range(torch._C._len_torch_function_stack()):
            mode = torch._C._get_function_stack_at(index)
            # A default device is such a mode too, and harmless if it is the engine's.
            if type(mode).__name__ != "DeviceContext":
                return f"called under {type(mode).__name__}"
            if mode.device.type != kind:
                return f"the default device is {mode.device}"
    if torch._C._get_tracing_state() is not None:
        return "being traced by torch.jit"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation is on"
    if parametrize._cache_enabled:
        return "called under torch.nn.utils.parametrize.cached()"
    if torch.is_grad_enabled() and _saved_tensor_hooks() is not None:
        return "hooks on saved tensors are active (checkpointing or offloading)"
    return None


def _saved_tensor_hooks() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)
