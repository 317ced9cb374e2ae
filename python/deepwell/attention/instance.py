"""A forward that replaces one module's, as an attribute of the instance."""

from __future__ import annotations

import copy
import inspect
import weakref
from typing import Any

import torch


class InstanceForward:
    """A forward that does not keep its module alive. A copied or loaded module has its own."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)
        self.previous = module.__dict__.get("forward")

    @property
    def __signature__(self) -> inspect.Signature:
        module = self._module()
        return inspect.signature(type(module).forward.__get__(module))

    def __reduce__(self):
        return (_make, (type(self), self._module(), self.previous))

    def __deepcopy__(self, memo: dict[int, Any]) -> InstanceForward:
        module, previous = copy.deepcopy((self._module(), self.previous), memo)
        return _make(type(self), module, previous)


def _make(kind: type[InstanceForward], module: torch.nn.Module, previous: Any) -> InstanceForward:
    forward = kind(module)
    forward.previous = previous
    return forward
