"""What a captured graph took for granted about its module, and a quick check that it still holds.

A graph is the module's forward at one moment: its submodules, parameters, flags, hooks, configuration, and
the class attributes and globals that its methods name. When any of them changes, the graph is not the
module's forward any more, and the original forward must run.

Every call compares the module's dictionaries with what they held, object by object, in C. Only where one
differs is it asked, slowly, whether the difference matters.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
import inspect
import types
import weakref
from typing import Any, Iterator

import torch
from torch.autograd import forward_ad
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize

from deepwell import _deepwell

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
_BY_VALUE = (*_SIMPLE, torch.Size, range, slice)
# What nn.Module keeps for itself, and attributes that PyTorch and transformers change as modules are used.
_UNWATCHED = frozenset(torch.nn.Module().__dict__) | {
    "forward",
    "_is_hf_initialized",
    "_compiled_call_impl",
    "_output_capturing_hooks_installed",
}
# Containers and configuration objects are looked into this deep, and up to this many items in all.
_DEPTH = 4
_ITEMS = 20000
_MISSING = object()
# In place of a value that first_change is not to compare.
_ANY = ...


# ---- what attributes hold ----------------------------------------------------------------------------


class _Contents:
    """Descriptions of attributes that are equal while the attributes mean the same to a forward.

    Which objects attributes share says nothing: torch.export puts equal copies of lists in their place.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._items = 0
        # By identity and depth, on which alone a description depends; the value lives, so that its id is its own.
        self._described: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._listed: set[int] = set()  # ids in the lists below
        self.containers: list[Any] = []  # dicts and lists that were looked into
        self.modules: list[torch.nn.Module] = []  # found in containers: registered nowhere
        self.alive: list[Any] = []  # what is described by its identity

    def describe(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind in _BY_VALUE or isinstance(value, enum.Enum):
            return (kind, value) if value == value else (kind, repr(value))
        if value is self._root:
            return "the module itself"
        if isinstance(value, torch.Tensor):
            return self._itself(value)
        if isinstance(value, torch.nn.Module):
            if depth > 0:
                self._list(self.modules, value)
            return self._itself(value)
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, type)):
            return self._itself(value)
        if isinstance(value, types.MethodType):
            return (kind, self._itself(value.__func__), self.describe(value.__self__, depth + 1))
        if isinstance(value, functools.partial):
            return (kind, self.describe([value.func, value.args, value.keywords], depth + 1))
        if depth >= _DEPTH or self._items > _ITEMS:
            return (kind, "not looked into")
        key = id(value), depth
        if key not in self._described:
            self._described[key] = (value, self._inside(value, kind, depth))
        return self._described[key][1]

    def _list(self, found: list[Any], value: Any) -> None:
        if id(value) not in self._listed:
            self._listed.add(id(value))
            found.append(value)

    def _inside(self, value: Any, kind: type, depth: int) -> Any:
        if isinstance(value, (list, tuple)):
            items: Any = enumerate(value)
        elif isinstance(value, dict):
            items = value.items()
        elif isinstance(value, (set, frozenset)):
            return (kind, frozenset(v for v in value if isinstance(v, _SIMPLE)), len(value))
        elif _is_configuration(value, kind):
            return (self._itself(value), self.describe(vars(value), depth + 1))
        else:
            return self._itself(value)
        if isinstance(value, (dict, list)):
            self._list(self.containers, value)
        parts = []
        for key, item in items:
            self._items += 1
            if self._items > _ITEMS:
                return (kind, "not looked into")
            key = key if isinstance(key, _SIMPLE) else self._itself(key)
            parts.append((key, self.describe(item, depth + 1)))
        return (kind, tuple(parts))

    def _itself(self, value: Any) -> tuple[str, int]:
        self.alive.append(value)
        return (type(value).__name__, id(value))


def _is_configuration(value: Any, kind: type) -> bool:
    """Whether it is an object of settings, which are its attributes, rather than one with a life."""
    if not isinstance(getattr(value, "__dict__", None), dict):
        return False
    return (
        dataclasses.is_dataclass(kind)
        or hasattr(kind, "to_dict")
        or issubclass(kind, (types.SimpleNamespace, argparse.Namespace))
        or any(word in kind.__name__.lower() for word in ("config", "cfg", "option", "setting"))
    )


def _forward_of(attributes: dict[str, Any]) -> Any:
    """The forward that a module has for its own, ours seen through: that one changes nothing."""
    forward = attributes.get("forward")
    return forward.previous if hasattr(forward, "previous") else forward


# ---- names outside the module ------------------------------------------------------------------------


def _code_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_names(constant)


def _method(kind: type, name: str) -> types.FunctionType | None:
    for owner in kind.__mro__:
        if owner is torch.nn.Module:
            return None
        if name in vars(owner):
            found = inspect.unwrap(getattr(vars(owner)[name], "__func__", vars(owner)[name]))
            return found if isinstance(found, types.FunctionType) else None
    return None


@functools.lru_cache(maxsize=4096)
def _named_outside(kind: type) -> tuple[tuple[Any, str], ...]:
    """(namespace, name) of the settings among globals and class attributes that the forward of `kind`
    names, and the methods that it names."""
    found: dict[tuple[int, str], tuple[Any, str]] = {}
    if kind.__module__.startswith("torch."):
        return ()  # PyTorch's own modules have their settings in attributes
    waiting, seen = ["forward"], {"forward"}
    while waiting:
        function = _method(kind, waiting.pop())
        if function is None:
            continue
        for name in _code_names(function.__code__):
            if name in seen or name.startswith("__"):
                continue
            seen.add(name)
            waiting.append(name)
            if isinstance(function.__globals__.get(name, _MISSING), _SIMPLE):
                found[id(function.__globals__), name] = (function.__globals__, name)
            for holder in kind.__mro__:
                if isinstance(vars(holder).get(name, _MISSING), _SIMPLE):
                    found[id(holder), name] = (holder, name)
    return tuple(found.values())


def _read(namespace: Any, name: str) -> Any:
    return namespace.get(name) if isinstance(namespace, dict) else vars(namespace).get(name)


# ---- the state of a module ---------------------------------------------------------------------------


class ModuleState:
    """A snapshot of everything a captured graph depends on, apart from the arguments.

    Holds no reference to the root module, whose forward holds this: a model is freed when its last
    reference goes.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._root = weakref.ref(module)
        self._read(module)
        self.reason = self._unsupported(
            module
        )  # why no engine can run the module as it is, or None

    # ---- reading ---------------------------------------------------------------------------------------

    def _read(self, root: torch.nn.Module) -> None:
        contents = _Contents(root)
        self._records: dict[str, dict[str, Any]] = {}
        self._kinds: dict[str, Any] = {}
        self._unregistered: str | None = None
        watched: list[Any] = []
        submodules: list[torch.nn.Module] = []
        outside: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        named = list(root.named_modules())
        registered = {path for path, _ in named}
        for path, module in named:  # grows: modules that lists hold are looked at as well
            attributes = module.__dict__
            description = {
                name: contents.describe(value)
                for name, value in attributes.items()
                if name not in _UNWATCHED
            }
            if path not in registered:
                if self._unregistered is None and any(True for _ in module.parameters()):
                    self._unregistered = f"a {type(module).__name__} in a container of '{path}'"
                for table in ("_parameters", "_buffers"):
                    description[table] = contents.describe(dict(attributes[table]))
            named += [(f"{path}.<{len(named)}>", m) for m in contents.modules]
            contents.modules.clear()
            own = _forward_of(attributes)
            if module is not root and own is not None:
                description["forward"] = contents.describe(own)
            self._records[path] = description
            self._kinds[path] = (type(module), tuple(self._children(attributes)))
            contents.alive += attributes["_modules"].values()
            for namespace, name in _named_outside(type(module)):
                outside[id(namespace), name] = (namespace, name, _read(namespace, name))
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
        self._outside = list(outside.values())
        self._submodules = submodules
        self._tensors = named_tensors(root)
        self._set_tensors()
        self.training = (root.training, *[module.training for module in submodules])
        self._watched = (_kept(root.__dict__), watched)

    @staticmethod
    def _children(attributes: dict[str, Any]) -> Iterator[Any]:
        for name, child in attributes["_modules"].items():
            yield (name, id(child))

    def _set_tensors(self) -> None:
        unique = list({id(t): t for t in self._tensors.values()}.values())
        self._unique = unique
        self._dtypes = [tensor.dtype for tensor in unique]
        self._shapes = [tensor.shape for tensor in unique]
        self._devices = [tensor.device for tensor in unique]

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
        """Every parameter and buffer under each of its names."""
        return self._tensors

    def unchanged(self) -> bool:
        """Whether nothing at all has changed. False may be wrong, True is right."""
        root = self._root()
        kept, watched = self._watched
        if _deepwell.first_change(watched) >= 0 or (
            _deepwell.first_change([root.__dict__, kept]) >= 0
        ):
            return False
        for namespace, name, value in self._outside:
            if _read(namespace, name) is not value:
                return False
        return not self._converted()

    def _converted(self) -> bool:
        """Whether a tensor got other data (`p.data = ...`), of another shape, dtype or device."""
        unique = self._unique
        return (
            [tensor.dtype for tensor in unique] != self._dtypes
            or [tensor.shape for tensor in unique] != self._shapes
            or [tensor.device for tensor in unique] != self._devices
        )

    def compare(self, now: "ModuleState") -> str | None:
        """What is different in ``now``, or None. Tensors may be others as long as they are alike."""
        if self._kinds.keys() != now._kinds.keys():
            return f"submodules of '{_first_other(self._kinds, now._kinds)}' were replaced"
        for path, kind in self._kinds.items():
            if now._kinds[path] != kind:
                return f"submodules of '{path}' were replaced"
        for path, was in self._records.items():
            found = now._records.get(path)
            if found != was:
                return _difference(path, was, found or {})
        for (_, name, was), (_, _, value) in zip(self._outside, now._outside):
            if was is not value and (type(was), was) != (type(value), value):
                return f"'{name}' changed from {was!r} to {value!r}"
        if _likeness(self._tensors) != _likeness(now._tensors):
            return _tensor_difference(self._tensors, now._tensors)
        return now.reason if self.reason != now.reason else None

    def adopt(self, now: "ModuleState") -> None:
        """Takes over ``now``, which compares equal: the same module, with other tensors perhaps."""
        self.__dict__.update(now.__dict__)


def _kept(container: Any) -> tuple[Any, ...]:
    if isinstance(container, list):
        return tuple(container)
    flat: list[Any] = []
    for key, value in container.items():
        flat += (key, _ANY if key == "forward" else value)
    return tuple(flat)


def named_tensors(root: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers under each of their names: tied ones have several."""
    tensors = dict(root.named_parameters(remove_duplicate=False))
    tensors.update(root.named_buffers(remove_duplicate=False))
    return tensors


def _likeness(tensors: dict[str, torch.Tensor]) -> list[Any]:
    """Equal for sets of tensors that the same graph can run on: also tied in the same way."""
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


def _tensor_difference(was: dict[str, Any], now: dict[str, Any]) -> str:
    for old, new in zip(_likeness(was), _likeness(now)):
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
        if isinstance(old[0], tuple) and old[0] == new[0]:  # an object and its attributes
            return _inner_difference(place, old[1], new[1])
        both = isinstance(old[1], tuple) and isinstance(new[1], tuple)
        if both and old[0] is new[0] and len(old[1]) == len(new[1]):
            for was, now in zip(old[1], new[1]):
                if was != now and was[0] == now[0]:
                    return _inner_difference(f"{place}.{was[0]}", was[1], now[1])
    return f"'{place}' was replaced or changed"


def _is_value(description: Any) -> bool:
    return (
        isinstance(description, tuple)
        and len(description) == 2
        and isinstance(description[0], type)
        and description[0] in _BY_VALUE
    )


# ---- what a forward leaves behind --------------------------------------------------------------------


class Effects:
    """Notices what a forward that is being traced changes in its modules, and takes it back."""

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self.seen: list[str] = []
        self._before = self._describe()
        self._saved = [(d, dict(d) if isinstance(d, dict) else list(d)) for d in self._containers]

    def _describe(self) -> dict[str, dict[str, Any]]:
        contents = _Contents(self._root)
        records: dict[str, dict[str, Any]] = {}
        self._containers: list[Any] = []
        named = list(self._root.named_modules())
        for path, module in named:
            attributes = module.__dict__
            records[path] = {
                name: contents.describe(value)
                for name, value in attributes.items()
                if name not in _UNWATCHED
            }
            records[path]["training"] = (bool, module.training)
            self._containers.append(attributes)
            self._containers += [v for v in attributes.values() if isinstance(v, dict)]
            named += [(f"{path}.<{len(named)}>", m) for m in contents.modules]
            contents.modules.clear()
        self._alive = contents.alive
        self._containers += contents.containers
        return records

    def look(self) -> None:
        """To be called when the forward has run: adds to ``seen`` what it has changed."""
        kept = self._containers, self._alive
        after = self._describe()
        self._containers, self._alive = kept
        for path, was in self._before.items():
            if "rope_type" in was:
                continue  # what rotary embeddings note down is settled_rope's business
            for name, value in after.get(path, {}).items():
                if value != was.get(name):
                    place = f"{path}.{name}" if path else name
                    self.seen.append(f"changes its attribute '{place}' in its forward")

    def close(self) -> None:
        """Keeps the module alive no longer."""
        self._root = None
        self._containers, self._alive, self._saved = [], [], []

    def undo(self) -> None:
        """Puts everything back."""
        for container, content in self._saved:
            if isinstance(container, dict):
                same = [(k, id(v)) for k, v in container.items()] == [
                    (k, id(v)) for k, v in content.items()
                ]
                if not same:
                    container.clear()
                    container.update(content)
            elif [id(v) for v in container] != [id(v) for v in content]:
                container[:] = content


# ---- modes -------------------------------------------------------------------------------------------


def unusual_mode() -> str | None:
    """A PyTorch mode under which a compiled engine must step aside, or None."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "called inside a torch.func transform"
    if torch._C._len_torch_dispatch_stack() > 0:
        return "called under a TorchDispatchMode"
    if torch._C._is_torch_function_mode_enabled() and torch._C._len_torch_function_stack() > 0:
        for index in range(torch._C._len_torch_function_stack()):
            mode = torch._C._get_function_stack_at(index)
            # A default device is such a mode, and harmless where it is the CPU.
            if type(mode).__name__ != "DeviceContext":
                return f"called under {type(mode).__name__}"
            if mode.device.type != "cpu":
                return f"the default device is {mode.device}"
    if torch.is_autocast_enabled("cpu"):
        return "autocast is on"
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
