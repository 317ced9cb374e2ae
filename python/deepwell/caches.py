"""Key-value caches of Hugging Face models among a module's outputs.

A forward may return a cache object that it filled. A graph has tensors and sizes only, so the cache is taken apart,
attribute by attribute, and rebuilt from the results as the module would have returned it: every layer with its own
class, its window and its number of tokens.
"""

from __future__ import annotations

import sys
from typing import Any, List, Tuple

import torch
from torch.utils import _pytree as pytree


def is_cache(value: Any) -> bool:
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__)


def flatten_outputs(outputs: Any) -> Tuple[List[Any], Any]:
    """Flattens like pytree.tree_flatten, with the tensors and sizes inside caches as leaves. pytree.tree_unflatten
    rebuilds the caches."""
    if "transformers" not in sys.modules:
        return pytree.tree_flatten(outputs)
    opened = pytree.tree_map(lambda v: _open(v) if is_cache(v) else v, outputs, is_leaf=is_cache)
    return pytree.tree_flatten(opened)


class _Object:
    """An object taken apart: its class and its attributes."""

    def __init__(self, kind: type, attributes: Tuple[str, ...], values: List[Any]) -> None:
        self.kind = kind
        self.attributes = attributes
        self.values = values


class _Constant:
    """A value that is neither a tensor, a size nor a container of them; it is kept as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Constant) and (
            self.value is other.value or self.value == other.value
        )

    def __hash__(self) -> int:
        return hash(type(self.value))


def _open(value: Any) -> Any:
    if isinstance(value, torch.Tensor) or (
        isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    ):
        return value
    if type(value) in (list, tuple):
        return type(value)(_open(item) for item in value)
    if type(value) is dict:
        return {key: _open(item) for key, item in value.items()}
    if is_cache(value) or any(kind.__name__ == "CacheLayerMixin" for kind in type(value).__mro__):
        attributes = tuple(vars(value))
        return _Object(type(value), attributes, [_open(vars(value)[name]) for name in attributes])
    return _Constant(value)


def _rebuild(values: Any, context: Tuple[type, Tuple[str, ...]]) -> Any:
    kind, attributes = context
    made = kind.__new__(kind)
    made.__dict__.update(zip(attributes, values))
    return made


pytree.register_pytree_node(
    _Object,
    lambda opened: (opened.values, (opened.kind, opened.attributes)),
    _rebuild,
    serialized_type_name="deepwell.caches.Object",
)
pytree.register_pytree_node(
    _Constant,
    lambda constant: ([], constant),
    lambda values, constant: constant.value,
    serialized_type_name="deepwell.caches.Constant",
)
