"""Outputs that share memory with one another, with an argument, a parameter or a buffer.

A graph writes each of its outputs to separate memory. If PyTorch returns views of one tensor, an in-place write to one
of them shows in the others. Therefore one output is computed, and the others are made as views of it. The traced
program's fake tensors show which outputs share memory: views have a common storage, copies have not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch.utils import _pytree as pytree

from deepwell.errors import CaptureError

from . import dims
from .builder import LoweringError, Value
from .dims import Dim, Translator
from .trace import Traced

# Most elements of a storage that are marked one by one to find whether two views of it overlap.
_MOST_MARKED = 1 << 26


@dataclass(frozen=True)
class View:
    """An output as a view of another output, in elements from its start."""

    base: int  # position of the other output
    shape: Tuple[Dim, ...]
    stride: Tuple[Dim, ...]
    offset: Dim
    detached: bool

    def of(self, base: torch.Tensor, sizes: Dict[str, int]) -> torch.Tensor:
        shape = [dims.evaluate(dim, sizes) for dim in self.shape]
        stride = [dims.evaluate(dim, sizes) for dim in self.stride]
        offset = dims.evaluate(self.offset, sizes)
        if self.detached:
            base = base.detach()
        return base.as_strided(shape, stride, base.storage_offset() + offset)


@dataclass(frozen=True)
class Sharing:
    """How one output shares memory: as a view of another output, or as a copy of a value that another output has
    too."""

    view: Optional[View] = None
    copied: bool = False


def sharing(
    traced: Traced,
    inputs: Sequence[Any],
    results: Sequence[Any],
    translator: Translator,
    name: str,
) -> List[Sharing]:
    """Returns one entry per output. ``inputs`` are the values of the placeholders, ``name`` is the module's class.

    Raises:
        CaptureError: an output is a view of memory that the graph does not own.
    """
    nodes = traced.graph_module.graph.nodes
    placeholders = [n.meta.get("val") for n in nodes if n.op == "placeholder"]
    (output,) = [n for n in nodes if n.op == "output"]
    made = pytree.tree_leaves(output.args[0])
    if len(made) != len(results):
        return [Sharing()] * len(results)
    tensors = [node.meta.get("val") if isinstance(node, torch.fx.Node) else None for node in made]
    owners = {_storage(t): i for i, t in enumerate(placeholders) if isinstance(t, torch.Tensor)}
    leaves = {v.name: i for i, v in enumerate(inputs) if isinstance(v, Value)}

    found = [Sharing()] * len(results)
    groups: Dict[int, List[int]] = {}
    first: Dict[str, int] = {}
    for i, (value, tensor) in enumerate(zip(results, tensors)):
        if not isinstance(value, Value) or not isinstance(tensor, torch.Tensor):
            continue
        owner = owners.get(_storage(tensor))
        if value.name in leaves:
            if owner is None:
                found[i] = Sharing(copied=True)
        elif owner is not None:
            raise CaptureError(_refusal(name, i, _owner(*traced.inputs[owner])))
        elif value.name in first and _storage(tensors[first[value.name]]) != _storage(tensor):
            found[i] = Sharing(copied=True)
        elif value.name not in first:
            first[value.name] = i
            groups.setdefault(_storage(tensor), []).append(i)
    for group in groups.values():
        if len(group) > 1:
            _share(group, tensors, results, translator, name, found)
    return found


def _share(
    group: Sequence[int],
    tensors: Sequence[Any],
    results: Sequence[Any],
    translator: Translator,
    name: str,
    found: List[Sharing],
) -> None:
    """Makes one output of the group the base of the others, if one covers all of the memory."""
    for base in group:
        whole = tensors[base]
        if not _is_whole(whole) or any(tensors[i].dtype != whole.dtype for i in group):
            continue
        try:
            for i in group:
                if i != base:
                    found[i] = Sharing(view=_view(base, tensors, results, translator, i))
        except LoweringError:
            break
        return
    for i in group:
        found[i] = Sharing()
    if not _disjoint([tensors[i] for i in group]):
        raise CaptureError(_refusal(name, group[1], f"memory that output {group[0]} views as well"))


def _view(
    base: int, tensors: Sequence[Any], results: Sequence[Any], translator: Translator, i: int
) -> View:
    def dim(size: Any) -> Dim:
        return translator.dim(size) if isinstance(size, torch.SymInt) else int(size)

    return View(
        base,
        tuple(map(dim, tensors[i].shape)),
        tuple(map(dim, tensors[i].stride())),
        dim(tensors[i].storage_offset()),
        results[base].differentiable and not results[i].differentiable,
    )


def _refusal(name: str, position: int, what: str) -> str:
    return (
        f"output {position} of {name} is a view of {what}, but a graph writes its outputs to separate memory; "
        "return a copy (.clone()), or leave it as it is: the module then runs in PyTorch, and the modules inside it "
        "may still be captured"
    )


def _owner(kind: str, target: Any) -> str:
    if kind == "input":
        return f"argument number {target}"
    return f"the {kind} '{target}'" if kind in ("parameter", "buffer") else "a tensor that it holds"


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _hint(size: Any) -> int:
    """Returns the value of a size in the call that was traced."""
    return size.node.hint if isinstance(size, torch.SymInt) else int(size)


def _is_whole(tensor: torch.Tensor) -> bool:
    """Returns whether the tensor covers its whole storage, in order."""
    count, expected = 1, []
    for size in reversed([_hint(size) for size in tensor.shape]):
        expected.append(count)
        count *= size
    strides = [_hint(stride) for stride in tensor.stride()]
    in_order = all(
        have == want or _hint(size) == 1
        for have, want, size in zip(strides, reversed(expected), tensor.shape)
    )
    bytes_ = _hint(tensor.untyped_storage().nbytes())
    return in_order and _hint(tensor.storage_offset()) == 0 and count * tensor.itemsize == bytes_


def _disjoint(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns whether no two views have an element in common (chunks of one tensor do not)."""
    size = _hint(tensors[0].untyped_storage().nbytes())
    if size > _MOST_MARKED or any(t.dtype != tensors[0].dtype for t in tensors):
        return False
    memory = torch.zeros(size // tensors[0].itemsize, dtype=torch.bool, device="cpu")
    for t in tensors:
        part = memory.as_strided(
            [_hint(s) for s in t.shape], [_hint(s) for s in t.stride()], _hint(t.storage_offset())
        )
        if bool(part.any()):
            return False
        part.fill_(True)
    return True
