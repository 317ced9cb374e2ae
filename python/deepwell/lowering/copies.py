"""Lowers the program of a traced layer again for the layers that are copies of it (repeat.py)."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch.utils import _pytree as pytree

from .builder import Value
from .repeat import BEGIN, COPY, END, NotRepeatable, Site

# The placeholders of the traced program: (kind, target), as in Traced's inputs.
Inputs = Mapping[torch.fx.Node, Tuple[str, Any]]


class Copies:
    """The marks and copies of one traced program.

    Args:
        sites: the traced calls, by the number in their marks.
        inputs: what each placeholder of the program stands for.
        bind: maps (kind, target, example) to the leaf of a parameter or buffer.
    """

    def __init__(
        self, sites: Mapping[int, Site], inputs: Inputs, bind: Callable[[str, str, Any], Any]
    ) -> None:
        self._sites = sites
        self._inputs = inputs
        self._bind = bind
        self._programs: Dict[int, "_Program"] = {}
        self.moved: Optional[Tuple[str, str]] = None  # (path of the traced layer, of the copy)

    @staticmethod
    def concerns(target: Any) -> bool:
        return target in (BEGIN, END, COPY)

    def lower(self, node: torch.fx.Node, env: Dict[torch.fx.Node, Any], lowering: Any) -> Any:
        if node.target is BEGIN:
            return None
        if node.target is END:
            number = node.args[1]
            if number in self._sites:
                site = self._sites[number]
                self._programs[number] = _Program(node, env, site.layer.path, self._inputs)
            return None
        return self._copy(node, env, lowering)

    def _copy(self, node: torch.fx.Node, env: Dict[torch.fx.Node, Any], lowering: Any) -> Any:
        operands, number, path = node.args
        program = self._programs.get(number)
        if program is None:
            raise NotRepeatable("a copy is in another part of the program than its layer")
        if program.refusal is not None:
            raise NotRepeatable(program.refusal)
        twin = self._programs.get(self._sites[number].twin)
        if twin is None or program.described() != twin.described():
            raise NotRepeatable(f"layers '{program.path}' and another of its kind differ")
        inner = _Environment(lambda n: self._outer(n, program, path))
        inner.update(zip(program.operands, (env[operand] for operand in operands)))
        self.moved = (program.path, path)
        try:
            for each in program.nodes:
                inner[each] = lowering.node(each, inner)
        finally:
            self.moved = None
        return [inner[result] for result in program.results]

    def _outer(self, node: torch.fx.Node, program: "_Program", path: str) -> Any:
        """Returns the copy's counterpart of a node outside of the layer's program."""
        found = program.env[node]
        kind, target = self._inputs.get(node, ("", ""))
        if kind in ("parameter", "buffer") and target.startswith(program.path + "."):
            name = path + target[len(program.path) :]
            return self._bind(kind, name, node.meta.get("val"))
        if kind == "constant" and isinstance(found, Value) and found.node is None:
            raise NotRepeatable("a layer holds a tensor that is neither parameter nor buffer")
        return found


class _Environment(dict):
    """Values of nodes. Looks up nodes outside of the program on demand."""

    def __init__(self, outside: Callable[[torch.fx.Node], Any]) -> None:
        super().__init__()
        self._outside = outside

    def __missing__(self, node: torch.fx.Node) -> Any:
        value = self[node] = self._outside(node)
        return value


class _Program:
    """The nodes between the marks of a traced layer."""

    def __init__(
        self,
        end: torch.fx.Node,
        env: Dict[torch.fx.Node, Any],
        path: str,
        inputs: Inputs,
    ) -> None:
        self.path = path
        self.env = env
        self.nodes: List[torch.fx.Node] = []
        self._inputs = inputs
        self._described: Optional[Tuple] = None
        begin = end.prev
        while begin.target is not BEGIN or begin.args[1] != end.args[1]:
            if begin.op in ("root", "placeholder"):
                self.refusal: Optional[str] = "a layer's program is not contiguous"
                return
            self.nodes.append(begin)
            begin = begin.prev
        self.nodes.reverse()
        self.operands: Sequence[torch.fx.Node] = begin.args[0]
        self.results: Sequence[torch.fx.Node] = end.args[0]
        self.refusal = self._leak(end)

    def _leak(self, end: torch.fx.Node) -> Optional[str]:
        """Returns how the program uses tensors around it, or is used, other than by operands and results."""
        inside = set(self.nodes)
        known = inside | set(self.operands)
        handed_on = set(self.results)
        if not handed_on <= inside:
            return "a layer returns a tensor that it did not make"
        for node in self.nodes:
            for operand in node.all_input_nodes:
                constant = operand.op in ("placeholder", "get_attr")
                if operand in known or _is_number(operand):
                    continue
                if not constant or self._inputs.get(operand, ("",))[0] == "input":
                    return f"layer '{self.path}' reads a tensor that is not one of its arguments"
            if node in handed_on or _is_number(node):
                continue
            if any(user not in inside and user is not end for user in node.users):
                return f"a tensor inside layer '{self.path}' is used outside of it"
        return None

    def described(self) -> Tuple:
        """Returns a value that is equal for programs that compute the same from their operands and own parameters."""
        if self._described is None:
            places: Dict[torch.fx.Node, Any] = {}
            for i, operand in enumerate(self.operands):
                places.setdefault(operand, ("operand", i))
            # A size is computed by the first layer that needs it. Sizes are therefore described by
            # their value.
            tensors = [node for node in self.nodes if not _is_number(node)]
            for i, node in enumerate(tensors):
                places[node] = ("node", i)
            self._described = (
                tuple(self._node(node, places) for node in tensors),
                tuple(places[node] for node in self.results),
            )
        return self._described

    def _node(self, node: torch.fx.Node, places: Dict[torch.fx.Node, Any]) -> Tuple:
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        return (
            node.op,
            node.target if node.op != "get_attr" else None,
            spec,
            tuple(self._operand(leaf, places) for leaf in leaves),
            _kinds(node.meta.get("val")),
        )

    def _operand(self, leaf: Any, places: Dict[torch.fx.Node, Any]) -> Any:
        if not isinstance(leaf, torch.fx.Node):
            return (type(leaf), repr(leaf))
        if _is_number(leaf):
            return ("number", str(leaf.meta["val"]))
        if leaf in places:
            return places[leaf]
        kind, target = self._inputs.get(leaf, ("", ""))
        if kind in ("parameter", "buffer"):
            if target.startswith(self.path + "."):
                return (kind, "own", target[len(self.path) :])
            return (kind, target)
        found = self.env.get(leaf)
        if isinstance(found, Value) and found.node is not None and found.node.op == "constant":
            return ("constant", found.dtype, found.shape, repr(found.node.attrs["value"]))
        return ("object", id(leaf))


def _is_number(node: torch.fx.Node) -> bool:
    return isinstance(
        node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)
    )


def _kinds(value: Any) -> Tuple:
    return tuple(
        (leaf.dtype, str(tuple(leaf.shape))) if isinstance(leaf, torch.Tensor) else str(leaf)
        for leaf in pytree.tree_leaves(value)
    )
