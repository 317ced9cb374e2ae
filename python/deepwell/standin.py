"""A module's stand-in for tracing: other objects of the same classes that hold the same tensors.

Tracers replace a module's parameters by fake tensors, and a capture removes its hooks. Another thread that trains or
saves the module must not see that. Therefore the stand-in is traced. It has its own modules, module tables, and
containers and bound methods that refer to modules; it shares everything else.
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from typing import Any

import torch


class Strayed(Exception):
    """A forward reached the original modules by a way that the stand-in does not cover."""


def stand_in(root: torch.nn.Module) -> torch.nn.Module | None:
    """Returns the stand-in, or None for modules that Python cannot copy (TorchScript)."""
    copies: dict[int, torch.nn.Module] = {}
    modules = list(root.modules())
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule) or not hasattr(module, "_parameters"):
            return None
        try:
            copies[id(module)] = object.__new__(type(module))
        except TypeError:
            return None
    for module in modules:
        attributes = copies[id(module)].__dict__
        for name, value in module.__dict__.items():
            if name == "forward" and hasattr(value, "previous"):
                value = value.previous  # an optimized forward
                if value is None:
                    continue
            if name == "_modules":
                value = type(value)((k, _replaced(m, copies, {})) for k, m in value.items())
            elif isinstance(value, dict) and name.startswith("_") and hasattr(_PLAIN, name):
                value = value.copy()
            elif name == "_non_persistent_buffers_set":
                value = set(value)
            else:
                value = _replaced(value, copies, {})
            attributes[name] = value
    return copies[id(root)]


def bound_to(function: Any, root: torch.nn.Module, traced: torch.nn.Module) -> Any:
    """Returns a function that is bound to ``root`` bound to its stand-in instead; others as they are."""
    return _replaced(function, {id(root): traced}, {})


_PLAIN = torch.nn.Module()


def _replaced(value: Any, copies: dict[int, torch.nn.Module], seen: dict[int, Any]) -> Any:
    """Returns the value with modules replaced by stand-ins, or the value itself if it refers to no module."""
    if id(value) in copies:
        return copies[id(value)]
    kind = type(value)
    if id(value) in seen:
        return seen[id(value)]
    if kind in (list, tuple, set, collections.deque):
        seen[id(value)] = value
        items = [_replaced(item, copies, seen) for item in value]
        changed = any(a is not b for a, b in zip(items, value))
        made = kind(items) if changed else value
    elif kind in (dict, collections.OrderedDict, collections.defaultdict):
        seen[id(value)] = value
        found = {key: _replaced(item, copies, seen) for key, item in value.items()}
        made = value
        if any(found[key] is not item for key, item in value.items()):
            made = value.copy()
            made.update(found)
    elif kind is types.MethodType:
        bound = _replaced(value.__self__, copies, seen)
        made = value if bound is value.__self__ else types.MethodType(value.__func__, bound)
    elif kind is functools.partial:
        parts = (value.func, value.args, value.keywords)
        new = [_replaced(part, copies, seen) for part in parts]
        same = all(a is b for a, b in zip(new, parts))
        made = value if same else functools.partial(new[0], *new[1], **new[2])
    elif kind is weakref.ref:
        target = value()
        made = weakref.ref(copies[id(target)]) if id(target) in copies else value
    else:
        return value
    seen[id(value)] = made
    return made
