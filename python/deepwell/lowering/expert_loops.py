"""Mixtures of experts written as a loop: each expert computes the rows that chose it.

    for i, expert in enumerate(self.experts):
        rows, choice = torch.where(selected == i)
        if rows.numel() > 0:
            out[rows] += weights[rows, choice, None] * expert(x[rows])

Which rows an expert computes depends on data, so such a loop has no trace. Before a trace the source of each forward is
searched for it. A loop is replaced only if every statement in it is understood: the experts of a ModuleList, a comparison
of the chosen experts with the loop's number, rows picked by it, products of weights and outputs, and one sum into the
result. The replacement computes the same for all rows at once, by grouped_linear of the experts' stacked matrices. Choices
outside of the list, such as those that a capacity drops, are not computed. Anything else stays as it is, and PyTorch runs
the module.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import textwrap
import types
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from deepwell.contents import USER, owner_of_code

from .repeat import Layer, _description, _Unsure


class NotRecognised(RuntimeError):
    """The loop is not one that can be replaced; the message says why."""


# ---- replacing the forwards of a model ---------------------------------------------------------------


def replace_loops(root: nn.Module) -> List[str]:
    """Gives modules with such a loop a forward without it; whoever traces removes the forwards. Returns why loops that
    look like one stay."""
    reasons = []
    for path, module in root.named_modules():
        if "forward" in module.__dict__ or not any(
            type(child) is nn.ModuleList and len(child) > 1 for child in module.children()
        ):
            continue
        function = type(module).forward
        if not isinstance(function, types.FunctionType):
            continue
        if owner_of_code(function.__code__, function.__globals__) != USER:
            continue
        lists = tuple(n for n, c in module.named_children() if type(c) is nn.ModuleList)
        made, reason = _without_loops(function, lists)
        if reason is not None:
            place = f"'{path}'" if path else "the module"
            reasons.append(f"the loop over experts in {place} is not recognised: {reason}")
        if made is not None:
            module.__dict__["forward"] = types.MethodType(made, module)
    return reasons


@functools.lru_cache(maxsize=256)
def _without_loops(
    function: types.FunctionType, lists: Tuple[str, ...]
) -> Tuple[Optional[types.FunctionType], Optional[str]]:
    """Returns the function with its loops over experts replaced, or (None, why one of them stays)."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None, None
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        return None, None
    rewriter = _Rewriter(definition, lists)
    if not _means_torch(function, definition):
        return None, None
    try:
        rewriter.visit(definition)
        if not rewriter.replaced:
            return None, None
        if definition.decorator_list:
            raise NotRecognised("the forward has a decorator")
        if any(_is_private(each) for each in ast.walk(definition)):
            raise NotRecognised("the forward uses names that begin with two underscores")
        if function.__code__.co_freevars:
            raise NotRecognised("the forward uses variables of a function around it, or super()")
    except NotRecognised as error:
        return None, str(error)
    ast.fix_missing_locations(tree)
    file = inspect.getsourcefile(function) or "<string>"
    code = compile(tree, file, "exec", dont_inherit=True)
    (body,) = [
        each
        for each in code.co_consts
        if isinstance(each, types.CodeType) and each.co_name == definition.name
    ]
    made = types.FunctionType(body, function.__globals__, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made, None


_TORCH = {"torch": torch, "nn": nn, "F": F, "functional": F}


def _means_torch(function: types.FunctionType, definition: ast.FunctionDef) -> bool:
    """Returns whether the usual names of torch's modules stand for them in a function."""
    stored = {
        each.id if isinstance(each, ast.Name) else each.arg
        for each in ast.walk(definition)
        if isinstance(each, ast.arg)
        or isinstance(each, ast.Name)
        and isinstance(each.ctx, ast.Store)
    }
    known = function.__globals__
    return not stored & set(_TORCH) and all(
        known.get(name, found) is found for name, found in _TORCH.items()
    )


# ---- reading a loop ----------------------------------------------------------------------------------

_CALL = "_deepwell_loop"
_PURE = frozenset(
    "where nonzero any all sum view reshape flatten squeeze unsqueeze to type_as float half bfloat16 size numel len "
    "eq contiguous".split()
)


def _is_private(node: ast.AST) -> bool:
    name = getattr(node, "attr", None) or getattr(node, "id", None)
    return isinstance(name, str) and name.startswith("__") and not name.endswith("__")


def _is_call(node: ast.AST, *names: str) -> bool:
    """Returns whether this is a call of a method, or of a function of torch, with one of these names."""
    return isinstance(node, ast.Call) and _called(node) in names


def _called(node: ast.Call) -> str:
    function = node.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return "len" if _is_name(function, "len") else ""


def _receiver(node: ast.Call) -> Tuple[ast.expr, List[ast.expr]]:
    """Returns the tensor that a method or a function of torch is called on, and its other arguments."""
    function = node.func
    if isinstance(function, ast.Attribute) and not _is_name(function.value, "torch"):
        return function.value, list(node.args)
    if not node.args:
        raise NotRecognised(f"the call `{ast.unparse(node)}`")
    return node.args[0], list(node.args[1:])


def _is_name(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _keyword(node: ast.Call, name: str, position: int, default: Any = None) -> Any:
    """Returns a constant argument by name or position among those after the tensor."""
    _, rest = _receiver(node)
    found = next((k.value for k in node.keywords if k.arg == name), None)
    if found is None and position < len(rest):
        found = rest[position]
    if found is None:
        return default
    try:
        return ast.literal_eval(found)
    except ValueError:
        raise NotRecognised(f"the call `{ast.unparse(node)}`") from None


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and _is_name(node.value, "self")


def _same(one: ast.AST, other: ast.AST) -> bool:
    return ast.unparse(one) == ast.unparse(other)


@dataclass
class _Mask:
    """Which choices an expert has of `selected`.

    choices: [N, top_k], or [N]. turned: the same, as [top_k, N]. rows: [.., N] that have the expert among the choices of
    the last axis. single: [..] one choice for each row. flat: [N] one choice for each row.
    """

    selected: ast.expr
    kind: str


@dataclass
class _Index:
    """Rows picked by a mask, or (`choice`) their places in the last axis of `selected`."""

    mask: _Mask
    choice: bool = False


class _Rewriter(ast.NodeTransformer):
    def __init__(self, definition: ast.FunctionDef, lists: Sequence[str]) -> None:
        self.definition, self.lists = definition, lists
        self.replaced = 0
        self._loops = 0  # around the statement that is visited

    def _around(self, node: ast.AST) -> Any:
        self._loops += 1
        try:
            return self.generic_visit(node)
        finally:
            self._loops -= 1

    def visit_While(self, node: ast.While) -> Any:
        return self._around(node)

    def visit_For(self, node: ast.For) -> Any:
        loop = self._experts_of(node)
        if loop is None:
            return self._around(node)
        if self._loops:
            raise NotRecognised("it is inside of another loop")
        made = _Loop(self.definition, node, *loop).replacement(self.replaced)
        self.replaced += 1
        return made

    def _experts_of(
        self, node: ast.For
    ) -> Optional[Tuple[str, str, Optional[str], Optional[ast.expr]]]:
        """Returns (list of experts, the loop's number, the name of its expert, the number of iterations) of a loop that
        compares something with its number, or None."""
        source, target = node.iter, node.target
        found = None
        if not isinstance(source, ast.Call) or node.orelse or not isinstance(source.func, ast.Name):
            return None
        if source.func.id == "enumerate" and len(source.args) == 1 and not source.keywords:
            listed = source.args[0]
            if _is_self(listed) and listed.attr in self.lists and isinstance(target, ast.Tuple):
                if len(target.elts) == 2 and all(isinstance(e, ast.Name) for e in target.elts):
                    found = listed.attr, target.elts[0].id, target.elts[1].id, None
        elif source.func.id == "range" and len(source.args) == 1 and isinstance(target, ast.Name):
            used = {
                each.value.attr
                for each in ast.walk(node)
                if isinstance(each, ast.Subscript)
                and _is_self(each.value)
                and each.value.attr in self.lists
                and _is_name(each.slice, target.id)
            }
            if len(used) == 1:
                found = used.pop(), target.id, None, source.args[0]
        if found is None:
            return None
        number = found[1]
        for each in ast.walk(node):
            if isinstance(each, ast.Compare) and any(
                _is_name(side, number) for side in (each.left, *each.comparators)
            ):
                return found
            if _is_call(each, "where", "nonzero", "eq"):
                return found
        return None


@dataclass
class _Loop:
    definition: ast.FunctionDef
    node: ast.For
    experts: str
    number: str
    expert: Optional[str]
    count: Optional[ast.expr]
    values: Dict[str, ast.expr] = field(default_factory=dict)  # of the loop's own names
    picked: Dict[str, _Index] = field(default_factory=dict)
    effect: Optional[Tuple[str, ast.expr, Any, ast.expr]] = None  # add or set, tensor, index, rows
    x: Optional[ast.expr] = None
    mask: Optional[_Mask] = None
    guards: List[_Mask] = field(default_factory=list)

    def replacement(self, at: int) -> List[ast.stmt]:
        self._read(self.node.body)
        if self.effect is None:
            raise NotRecognised("it adds nothing to a result")
        self._check_names()
        kind, out, index, rows = self.effect
        place = self._index(index)
        if place is None or place.choice:
            raise NotRecognised(f"the rows of the result, `{ast.unparse(index)}`")
        self.mask = place.mask
        if not all(_same(guard.selected, place.mask.selected) for guard in self.guards):
            raise NotRecognised("it skips an expert for another reason than that it has no rows")
        call = f"{_CALL}_{at}"
        value = self._rows(rows, call)
        if self.x is None:
            raise NotRecognised("it does not call an expert")
        count = "None" if self.count is None else ast.unparse(self.count)
        made = ast.parse(
            f"from deepwell.lowering.expert_loops import Picked as {call}_picked\n"
            f"{call} = {call}_picked(self.{self.experts}, {ast.unparse(place.mask.selected)}, "
            f"{ast.unparse(self.x)}, {ast.unparse(out)}, {place.mask.kind!r}, {count})\n"
            f"{call}.{kind}({ast.unparse(value)})\n"
        ).body
        return [ast.copy_location(each, self.node) for each in made]

    # ---- statements --------------------------------------------------------------------------------

    def _read(self, body: Sequence[ast.stmt]) -> None:
        for statement in body:
            if self.effect is not None and not isinstance(statement, (ast.Pass, ast.Continue)):
                raise self._odd(statement)
            self._statement(statement)

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Pass):
            return
        if isinstance(statement, ast.If):
            self._guard(statement)
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            self._assign(statement, statement.targets[0])
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Add):
            target = statement.target
            if not isinstance(target, ast.Subscript):
                raise self._odd(statement)
            self._set_effect("add", target.value, target.slice, statement.value)
        elif isinstance(statement, ast.Expr) and _is_call(statement.value, "index_add_"):
            call = statement.value
            out, rest = _receiver(call)
            if len(rest) != 3 or call.keywords or _keyword(call, "dim", 0) != 0:
                raise self._odd(statement)
            self._set_effect("add_each", out, rest[1], rest[2])
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        else:
            raise self._odd(statement)

    def _odd(self, statement: ast.stmt) -> NotRecognised:
        first = ast.unparse(statement).splitlines()[0]
        return NotRecognised(f"the statement `{first}`")

    def _guard(self, statement: ast.If) -> None:
        """Reads `if there are rows:`, or `if there are none: continue`."""
        skips = len(statement.body) == 1 and isinstance(statement.body[0], ast.Continue)
        if statement.orelse or not self._tests_rows(self._inlined(statement.test), not skips):
            raise self._odd(statement)
        if not skips:
            self._read(statement.body)

    def _tests_rows(self, test: ast.expr, some: bool) -> bool:
        """Returns whether a test is whether there are some rows, or none."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._tests_rows(test.operand, not some)
        if _is_call(test, "any") and not test.keywords and not _receiver(test)[1]:
            return some and self._guarded(self._mask(_receiver(test)[0]))
        if not isinstance(test, ast.Compare) or len(test.ops) != 1:
            return some and self._counts(test)
        operator, limit = test.ops[0], test.comparators[0]
        if not isinstance(limit, ast.Constant) or not self._counts(test.left):
            return False
        positive = {(ast.Gt, 0), (ast.NotEq, 0), (ast.GtE, 1)}
        return (type(operator), limit.value) in (positive if some else {(ast.Eq, 0), (ast.Lt, 1)})

    def _guarded(self, mask: Optional[_Mask]) -> bool:
        """Notes that an expert is skipped if this mask is empty."""
        if mask is not None:
            self.guards.append(mask)
        return mask is not None

    def _counts(self, node: ast.expr) -> bool:
        """Returns whether an expression is the number of rows, and notes of which."""
        if _is_call(node, "item"):
            return self._counts(_receiver(node)[0])
        if _is_call(node, "sum") and not node.keywords and not _receiver(node)[1]:
            return self._guarded(self._mask(_receiver(node)[0]))
        index = None
        if _is_call(node, "len") and len(node.args) == 1:
            index = node.args[0]
        elif _is_call(node, "numel") and not _receiver(node)[1]:
            index = _receiver(node)[0]
        elif _is_call(node, "size") and _keyword(node, "dim", 0) == 0:
            index = _receiver(node)[0]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            shape = node.value
            if isinstance(shape, ast.Attribute) and shape.attr == "shape" and node.slice.value == 0:
                index = shape.value
        if index is None or self._mask(index) is not None:  # a mask has the length of all rows
            return False
        found = self._index(index)
        return found is not None and self._guarded(found.mask)

    def _assign(self, statement: ast.Assign, target: ast.expr) -> None:
        value = self._inlined(statement.value)
        if isinstance(target, ast.Tuple) and all(isinstance(e, ast.Name) for e in target.elts):
            condition = self._found_by(value)
            mask = None if condition is value else self._mask(condition)
            if mask is None or len(target.elts) > 2:
                raise self._odd(statement)
            names = [e.id for e in target.elts]
            if mask.kind == "turned":
                names.reverse()
            if len(names) == 1 or mask.kind != "rows":
                for name, choice in zip(names, (False, True)):
                    self._own(name, statement)
                    self.picked[name] = _Index(mask, choice)
                if len(names) == 1 and mask.kind == "choices":
                    self.picked[names[0]] = _Index(_Mask(mask.selected, "single"))
                return
            raise self._odd(statement)
        if isinstance(target, ast.Name):
            self._check_pure(value, statement)
            self._own(target.id, statement)
            self.values[target.id] = value
            return
        if isinstance(target, ast.Subscript):
            base, index = self._inlined(target.value), self._inlined(target.slice)
            if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
                for one, other in ((value.left, value.right), (value.right, value.left)):
                    if (
                        isinstance(one, ast.Subscript)
                        and _same(one.value, base)
                        and _same(one.slice, index)
                    ):
                        self._set_effect("add", target.value, target.slice, other)
                        return
            self._set_effect("set", target.value, target.slice, value)
            return
        raise self._odd(statement)

    def _own(self, name: str, statement: ast.stmt) -> None:
        """Checks that a name is new in each iteration."""
        if name in (self.number, self.expert) or name in self.values or name in self.picked:
            raise NotRecognised(f"'{name}' is assigned twice")
        end = statement.end_lineno, statement.end_col_offset
        for each in ast.walk(self.node):
            if _is_name(each, name) and isinstance(each.ctx, ast.Load):
                if (each.lineno, each.col_offset) < end:
                    raise NotRecognised(f"'{name}' keeps a value from one expert to the next")

    def _found_by(self, value: ast.expr) -> ast.expr:
        """Returns the condition in `torch.where(c)` and `c.nonzero(as_tuple=True)`."""
        where = _is_call(value, "where") and _is_name(value.func.value, "torch")
        if where and len(value.args) == 1 and not value.keywords:
            return value.args[0]
        if _is_call(value, "nonzero") and _keyword(value, "as_tuple", 9) is True:
            return _receiver(value)[0]
        return value

    def _check_pure(self, value: ast.expr, statement: ast.stmt) -> None:
        """Checks that a value may be computed in another place, or not at all."""
        for each in ast.walk(value):
            if isinstance(each, ast.Call):
                if not self._is_expert(each.func) and _called(each) not in _PURE:
                    raise self._odd(statement)
            elif isinstance(each, (ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom, ast.Lambda)):
                raise self._odd(statement)

    def _set_effect(self, kind: str, out: ast.expr, index: ast.expr, rows: ast.expr) -> None:
        out = self._inlined(out)
        if not isinstance(out, ast.Name):
            raise NotRecognised(f"the result is `{ast.unparse(out)}`, not a variable")
        self.effect = kind, out, self._inlined(index), self._inlined(rows)

    def _check_names(self) -> None:
        """Checks that the loop's own names are not read outside of it, and are no others' names."""
        own = {self.number, *self.values, *self.picked, *([self.expert] if self.expert else [])}
        inside = set(map(id, ast.walk(self.node)))
        for each in ast.walk(self.definition):
            if id(each) not in inside and isinstance(each, ast.Name) and each.id in own:
                if each.lineno > self.node.lineno and isinstance(each.ctx, ast.Load):
                    raise NotRecognised(f"'{each.id}' is used after the loop")

    # ---- expressions -------------------------------------------------------------------------------

    def _inlined(self, node: Any) -> Any:
        """Returns an expression with the values of the loop's own names in their place."""
        values = self.values

        class Inline(ast.NodeTransformer):
            def visit_Name(self, name: ast.Name) -> ast.expr:
                return copy.deepcopy(values[name.id]) if name.id in values else name

        return Inline().visit(copy.deepcopy(node))

    def _varies(self, node: ast.AST) -> bool:
        own = {self.number, self.expert, *self.values, *self.picked}
        return any(isinstance(each, ast.Name) and each.id in own for each in ast.walk(node))

    def _is_expert(self, node: ast.expr) -> bool:
        if self.expert is not None and _is_name(node, self.expert):
            return True
        return (
            isinstance(node, ast.Subscript)
            and _is_self(node.value)
            and node.value.attr == self.experts
            and _is_name(node.slice, self.number)
        )

    def _mask(self, node: ast.AST) -> Optional[_Mask]:
        """Reads a mask of the rows, or choices, of this expert."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            sides = [node.left, node.comparators[0]]
            for one, other in (sides, sides[::-1]):
                if _is_name(other, self.number) and not self._varies(one):
                    return _Mask(one, "choices")
        if _is_call(node, "eq"):
            base, rest = _receiver(node)
            if len(rest) == 1 and _is_name(rest[0], self.number) and not self._varies(base):
                return _Mask(base, "choices")
        if isinstance(node, ast.Subscript) and _is_name(node.slice, self.number):
            selected = self._one_hot(node.value)
            return None if selected is None else _Mask(selected, "turned")
        if _is_call(node, "any"):
            mask = self._mask(_receiver(node)[0])
            if mask is not None and mask.kind == "choices" and _keyword(node, "dim", 0) == -1:
                return _Mask(mask.selected, "rows")
            return None
        if _is_call(node, "view", "reshape", "flatten"):
            base, rest = _receiver(node)
            mask = self._mask(base)
            flat = _called(node) == "flatten" and not rest
            flat = flat or len(rest) == 1 and _keyword(node, "shape", 0) == -1
            return mask if mask is not None and mask.kind == "rows" and flat else None
        return None

    def _one_hot(self, node: ast.expr) -> Optional[ast.expr]:
        """Returns what was chosen if a name stands for one_hot(chosen).permute(2, 1, 0), assigned once."""
        if not isinstance(node, ast.Name):
            return None
        found = [
            each.value
            for each in ast.walk(self.definition)
            if isinstance(each, ast.Assign) and any(_is_name(t, node.id) for t in each.targets)
        ]
        stores = sum(
            isinstance(each, ast.Name) and each.id == node.id and isinstance(each.ctx, ast.Store)
            for each in ast.walk(self.definition)
        )
        if len(found) != 1 or stores != 1 or not _is_call(found[0], "permute"):
            return None
        hot, rest = _receiver(found[0])
        order = [each.value for each in rest if isinstance(each, ast.Constant)]
        if order != [2, 1, 0] or len(rest) != 3 or not _is_call(hot, "one_hot"):
            return None
        chosen = hot.args[0] if hot.args else None
        if not isinstance(chosen, ast.Name):
            return None
        later = [
            each.lineno
            for each in ast.walk(self.definition)
            if _is_name(each, chosen.id) and isinstance(each.ctx, ast.Store)
        ]
        inside = set(map(id, ast.walk(self.node)))
        elsewhere = any(
            _is_name(each, node.id) and isinstance(each.ctx, ast.Load) and id(each) not in inside
            for each in ast.walk(self.definition)
        )
        # The chosen experts must still be those of the one_hot, and the masks must not have changed.
        if elsewhere or self._is_written(chosen.id) or any(line >= hot.lineno for line in later):
            return None
        return chosen

    def _is_written(self, name: str) -> bool:
        """Returns whether a tensor is written in place under this name."""
        for each in ast.walk(self.definition):
            if isinstance(each, ast.Subscript) and _is_name(each.value, name):
                if not isinstance(each.ctx, ast.Load):
                    return True
            if isinstance(each, ast.AugAssign) and _is_name(each.target, name):
                return True
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
                if _is_name(each.func.value, name) and each.func.attr.endswith("_"):
                    return True
        return False

    def _index(self, node: Any) -> Optional[_Index]:
        """Reads an index that picks this expert's rows."""
        if isinstance(node, ast.Name):
            return self.picked.get(node.id)
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            mask = self._mask(self._found_by(node.value))
            if mask is not None and self._found_by(node.value) is not node.value:
                at = node.slice.value
                if mask.kind == "rows":
                    return _Index(mask) if at == 0 else None
                rows = 1 if mask.kind == "turned" else 0
                return _Index(mask, at != rows) if at in (0, 1) else None
        if _is_call(node, "flatten", "view", "reshape", "squeeze"):
            # The indices of a mask of rows: nonzero() has an axis of 1 behind them.
            base, rest = _receiver(node)
            wanted = {"flatten": ([],), "squeeze": (["-1"], ["1"])}.get(_called(node), (["-1"],))
            if _is_call(base, "nonzero") and _keyword(base, "as_tuple", 9, False) is False:
                mask = self._mask(_receiver(base)[0])
                if (
                    mask is not None
                    and not node.keywords
                    and list(map(ast.unparse, rest)) in wanted
                ):
                    return (
                        _Index(mask)
                        if mask.kind == "rows"
                        else _Index(_Mask(mask.selected, "flat"))
                    )
                return None
        mask = self._mask(node)
        if mask is None:
            return None
        if mask.kind == "choices":  # a mask of rows that have one choice each
            return _Index(_Mask(mask.selected, "single"))
        return _Index(mask) if mask.kind == "rows" else None

    def _is_row(self, node: Any) -> bool:
        found = self._index(node)
        return found is not None and not found.choice and self._fits(found)

    def _fits(self, found: _Index) -> bool:
        """Returns whether an index is by the same mask as the result's."""
        return found.mask.kind == self.mask.kind and _same(found.mask.selected, self.mask.selected)

    def _rows(self, node: ast.expr, call: str) -> ast.expr:
        """Returns the expression for all choices at once that a value of this expert's rows is part of."""
        if isinstance(node, ast.Call) and self._is_expert(node.func):
            if len(node.args) != 1 or node.keywords:
                raise NotRecognised(f"the call `{ast.unparse(node)}`")
            x = self._input(node.args[0])
            if self.x is not None and not _same(x, self.x):
                raise NotRecognised("it calls an expert with two inputs")
            self.x = x
            return ast.parse(f"{call}.outputs()", mode="eval").body
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return ast.BinOp(self._rows(node.left, call), ast.Mult(), self._rows(node.right, call))
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return node
        if isinstance(node, ast.Subscript):
            return self._weights(node, call)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self._method(node, call)
        raise NotRecognised(f"the expression `{ast.unparse(node)}`")

    def _method(self, node: ast.Call, call: str) -> ast.expr:
        """Reads methods that treat each row by itself, whatever their number."""
        name, base, rest = _called(node), node.func.value, node.args
        places = [each.value for each in rest if isinstance(each, ast.Constant)]
        negative = [ast.unparse(each) for each in rest]
        fits = name in ("to", "type_as", "float", "contiguous") and not any(
            self._varies(each) for each in (*rest, *(k.value for k in node.keywords))
        )
        fits = (
            fits
            or name == "unsqueeze"
            and not node.keywords
            and (places == [1] or negative == ["-1"])
        )
        fits = fits or name in ("view", "reshape") and negative == ["-1", "1"]
        fits = fits or name == "squeeze" and places == [1]
        if name == "unsqueeze" and node.keywords:
            fits = not rest and _keyword(node, "dim", 0) in (1, -1)
        if not fits or _is_name(base, "torch"):
            raise NotRecognised(f"the expression `{ast.unparse(node)}`")
        made = copy.copy(node)
        inner = self._rows(base, call)
        if name == "squeeze":
            return ast.parse(f"{call}.squeezed({ast.unparse(inner)})", mode="eval").body
        made.func = ast.Attribute(inner, name, ast.Load())
        return made

    def _weights(self, node: ast.Subscript, call: str) -> ast.expr:
        """Reads `w[rows, choice]`, `w[rows, i]` and `w[rows]`, with None behind them."""
        parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        if self._varies(node.value):
            if len(parts) == 2 and isinstance(parts[0], ast.Slice) and _is_none(parts[1]):
                if ast.unparse(parts[0]) == ":":  # a value of rows [:, None]
                    return ast.parse(
                        f"{ast.unparse(self._rows(node.value, call))}[:, None]", mode="eval"
                    ).body
            raise NotRecognised(f"the expression `{ast.unparse(node)}`")
        tail = ""
        if len(parts) > 1 and _is_none(parts[-1]):
            parts, tail = parts[:-1], "[:, None]"
        if not self._is_row(parts[0]) or len(parts) > 2:
            raise NotRecognised(f"the expression `{ast.unparse(node)}`")
        base = ast.unparse(node.value)
        if len(parts) == 1:
            text = f"{call}.of_rows({base})"
        elif _is_name(parts[1], self.number):
            text = f"{call}.of_experts({base})"
        elif ast.unparse(parts[1]) in (f"{self.number}:{self.number} + 1", f"[{self.number}]"):
            text, tail = f"{call}.of_experts({base})", f"{tail}[:, None]"
            if ast.unparse(parts[1]).startswith("["):
                raise NotRecognised(f"the expression `{ast.unparse(node)}`")
        else:
            found = self._index(parts[1])
            if found is None or not found.choice or not self._fits(found):
                raise NotRecognised(f"the expression `{ast.unparse(node)}`")
            text = f"{call}.of_choices({base})"
        return ast.parse(text + tail, mode="eval").body

    def _input(self, node: ast.expr) -> ast.expr:
        """Reads `x[rows]`, `x[rows, :]` and `x[None, rows].reshape(-1, d)`; returns x."""
        if _is_call(node, "reshape", "view", "squeeze") and isinstance(node.func, ast.Attribute):
            inner, rest = node.func.value, [ast.unparse(each) for each in node.args]
            leading = isinstance(inner, ast.Subscript) and isinstance(inner.slice, ast.Tuple)
            leading = leading and _is_none(inner.slice.elts[0]) and len(inner.slice.elts) == 2
            if leading and not node.keywords and not any(map(self._varies, node.args)):
                if (
                    rest == ["0"]
                    if _called(node) == "squeeze"
                    else len(rest) == 2 and rest[0] == "-1"
                ):
                    if self._is_row(inner.slice.elts[1]) and not self._varies(inner.value):
                        return inner.value
        if isinstance(node, ast.Subscript) and not self._varies(node.value):
            parts = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
            whole = all(ast.unparse(part) in (":", "...") for part in parts[1:])
            if self._is_row(parts[0]) and whole and len(parts) <= 2:
                return node.value
        raise NotRecognised(f"the input of the expert, `{ast.unparse(node)}`")


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


# ---- computing it ------------------------------------------------------------------------------------


class Picked:
    """What a replaced loop computes. Rows are tokens [N]; each has top_k choices, and values have one row for each
    choice [N * top_k]."""

    def __init__(
        self,
        experts: nn.ModuleList,
        selected: torch.Tensor,
        x: torch.Tensor,
        out: torch.Tensor,
        kind: str,
        count: Optional[int],
    ) -> None:
        if count is not None and count != len(experts):
            raise NotRecognised(f"the loop runs over {count} of {len(experts)} experts")
        if selected.is_floating_point() or selected.dtype == torch.bool:
            raise NotRecognised(f"the chosen experts are {selected.dtype}, not integers")
        if kind == "flat" and selected.dim() != 1:
            raise NotRecognised(f"the chosen experts have {selected.dim()} axes, not 1")
        if kind == "flat" or kind == "choices" and selected.dim() == 1:
            kind = "single"
        if kind in ("choices", "turned") and selected.dim() != 2:
            raise NotRecognised(f"the chosen experts have {selected.dim()} axes, not 2")
        chosen = (
            selected.reshape(-1, 1)
            if kind == "single"
            else selected.reshape(-1, selected.shape[-1])
        )
        self.rows, self.top_k = chosen.shape
        width = x.shape[-1]
        for name, tensor in (("input", x), ("result", out)):
            if tensor.dim() < 2 or tensor.numel() != self.rows * tensor.shape[-1]:
                raise NotRecognised(
                    f"the {name} does not have one row for each row of chosen experts"
                )
        memory = out.untyped_storage()._cdata
        if any(t.untyped_storage()._cdata == memory for t in (x, selected)):
            raise NotRecognised("the result shares memory with what the experts read")
        self.experts, self.out, self._outputs = experts, out, None
        self._memory = memory
        count = len(experts)
        # Experts outside of the list compute nothing.
        self.valid = (chosen >= 0) & (chosen < count)
        self._given, self.chosen = chosen, chosen.clamp(0, count - 1)
        self.x = x.reshape(self.rows, width)

    def outputs(self) -> torch.Tensor:
        """Returns for each choice the output of its expert."""
        if self._outputs is None:
            rows = self.x.repeat_interleave(self.top_k, dim=0)
            chosen = torch.where(self.valid, self._given, len(self.experts))
            self._outputs = of_their_experts(self.experts, rows, chosen.reshape(-1))
        return self._outputs

    def _checked(self, weights: torch.Tensor) -> torch.Tensor:
        if weights.untyped_storage()._cdata == self._memory:
            raise NotRecognised("the result shares memory with the weights")
        return weights

    def of_choices(self, weights: torch.Tensor) -> torch.Tensor:
        """weights [N, top_k]"""
        if tuple(self._checked(weights).shape) != (self.rows, self.top_k):
            raise NotRecognised("the weights do not have the shape of the chosen experts")
        return weights.reshape(-1)

    def of_experts(self, weights: torch.Tensor) -> torch.Tensor:
        """weights [N, experts]"""
        if weights.dim() < 2 or self._checked(weights).numel() != self.rows * weights.shape[-1]:
            raise NotRecognised("the weights do not have one row for each row of chosen experts")
        flat = weights.reshape(self.rows, weights.shape[-1])
        if flat.shape[1] != len(self.experts):
            raise NotRecognised(
                f"there are {flat.shape[1]} weights for {len(self.experts)} experts"
            )
        return flat.gather(1, self.chosen).reshape(-1)

    def of_rows(self, weights: torch.Tensor) -> torch.Tensor:
        """weights [N] or [N, n], the first axis maybe in several"""
        if self._checked(weights).numel() == self.rows:
            flat = weights.reshape((self.rows, 1) if weights.shape[-1:] == (1,) else (self.rows,))
        elif weights.numel() == self.rows * weights.shape[-1]:
            flat = weights.reshape(self.rows, weights.shape[-1])
        else:
            raise NotRecognised("the weights do not have one row for each row of chosen experts")
        return flat.repeat_interleave(self.top_k, dim=0)

    def squeezed(self, rows: torch.Tensor) -> torch.Tensor:
        return rows.squeeze(1)

    def _of_valid(self, rows: torch.Tensor, once: bool) -> torch.Tensor:
        """Returns the rows, with 0 for choices that compute nothing. ``once``: an expert that a token chose twice counts
        once, as in `out[rows] += ...`."""
        if rows.dim() != 2 or rows.shape[0] != self.rows * self.top_k:
            raise NotRecognised("what is added to the result is not a row for each choice")
        kept = self.valid
        if once and self.top_k > 1:
            equal = self._given.unsqueeze(2) == self._given.unsqueeze(1)
            later = torch.ones(self.top_k, self.top_k, dtype=torch.bool, device=rows.device).triu(1)
            kept = kept & ~(equal & later).any(-1)
        return torch.where(kept.reshape(-1, 1), rows, torch.zeros_like(rows))

    def add(self, rows: torch.Tensor, once: bool = True) -> None:
        total = self._of_valid(rows, once).view(self.rows, self.top_k, rows.shape[1]).sum(1)
        self.out += total.view(self.out.shape).to(self.out.dtype)

    def add_each(self, rows: torch.Tensor) -> None:
        self.add(rows, once=False)

    def set(self, rows: torch.Tensor) -> None:
        if self.top_k != 1:
            raise NotRecognised("it overwrites rows that several experts compute")
        kept = self.valid.reshape(-1, 1)
        old = self.out.reshape(self.rows, -1)
        made = torch.where(kept, rows.to(old.dtype), old)
        self.out.copy_(made.view(self.out.shape))


_ACTIVATIONS = (
    nn.SiLU, nn.GELU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.Tanh, nn.Sigmoid, nn.Mish, nn.Softplus, nn.Hardswish,
    nn.Identity, nn.Dropout,
)  # fmt: skip
_FUNCTIONS = frozenset(
    "silu gelu relu relu6 leaky_relu elu tanh sigmoid mish softplus hardswish dropout square".split()
)


def of_their_experts(
    experts: nn.ModuleList, rows: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Returns experts[chosen[t]](rows[t]) for each row t. The experts must be equal but for their numbers. Linear layers
    do not multiply rows whose number is that of the experts."""
    first = experts[0]
    descriptions = []
    for index, expert in enumerate(experts):
        layer = Layer(str(index), expert, {})
        owners: Dict[int, List[str]] = {}
        for named in (expert.named_parameters, expert.named_buffers, expert.named_modules):
            for name, thing in named(remove_duplicate=False):
                owners.setdefault(id(thing), []).append(f"{index}.{name}")
        owners[id(expert)] = [str(index)]
        try:
            descriptions.append((_description(layer, owners), layer.integers))
        except _Unsure as error:
            raise NotRecognised(f"expert {index}: {error}") from None
    for index, description in enumerate(descriptions):
        if description != descriptions[0]:
            raise NotRecognised(f"expert {index} differs from expert 0 in more than its numbers")
    linears = _linears(first, "")
    with contextlib.ExitStack() as stack:
        for path in linears:
            stack.enter_context(_gathered(experts, path, chosen))
        return first(rows)


@contextlib.contextmanager
def _gathered(experts: nn.ModuleList, path: str, chosen: torch.Tensor) -> Iterator[None]:
    """Gives a linear layer of the first expert a forward that multiplies each row by the matrix of its own expert."""
    layers = [expert.get_submodule(path) for expert in experts]
    weight = torch.stack([layer.weight for layer in layers])
    bias = None
    if layers[0].bias is not None:
        bias = torch.stack([layer.bias for layer in layers])

    def forward(x: torch.Tensor) -> torch.Tensor:
        w, b, device = weight, bias, x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
        return torch.ops.deepwell.grouped_linear(x, w, chosen, b)

    layers[0].__dict__["forward"] = forward
    try:
        yield
    finally:
        layers[0].__dict__.pop("forward", None)


def _linears(module: nn.Module, path: str) -> List[str]:
    """Returns the paths of the linear layers of an expert. Refuses an expert that may not treat each row by itself."""
    name = f"'{path}' of the experts" if path else "an expert"
    if "forward" in module.__dict__:
        raise NotRecognised(f"the forward of {name} was replaced")
    if type(module) is nn.Linear:
        return [path]
    if type(module) in _ACTIVATIONS or type(module).__module__ == "transformers.activations":
        return []
    if any(True for _ in module.parameters(recurse=False)) or any(
        True for _ in module.buffers(recurse=False)
    ):
        raise NotRecognised(f"{name} has parameters outside of linear layers")
    children = frozenset(name for name, _ in module.named_children())
    if type(module) is not nn.Sequential and not _treats_rows(type(module).forward, children):
        raise NotRecognised(f"the forward of {name} ({type(module).__name__}) may mix rows")
    return [
        found
        for child, each in module.named_children()
        for found in _linears(each, f"{path}.{child}" if path else child)
    ]


@functools.lru_cache(maxsize=256)
def _treats_rows(function: Callable[..., Any], children: FrozenSet[str]) -> bool:
    """Returns whether a forward surely treats each row by itself: submodules, activations and arithmetic alone."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return False
    if len(definition.args.args) != 2 or definition.args.vararg or definition.args.kwonlyargs:
        return False
    if not isinstance(function, types.FunctionType) or not _means_torch(function, definition):
        return False
    known = {definition.args.args[1].arg}

    def fits(node: ast.AST) -> bool:
        if isinstance(node, ast.Name):
            return node.id in known
        if isinstance(node, ast.Constant):
            return isinstance(node.value, (int, float))
        if isinstance(node, ast.BinOp):
            plain = isinstance(node.op, (ast.Add, ast.Sub, ast.Mult, ast.Div))
            return plain and fits(node.left) and fits(node.right)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.USub) and fits(node.operand)
        if not isinstance(node, ast.Call):
            return False
        target = node.func
        if _is_self(target):  # a submodule, which is looked at by itself
            plain = target.attr in children and len(node.args) == 1 and not node.keywords
            return plain and fits(node.args[0])
        if not isinstance(target, ast.Attribute):
            return False
        if target.attr in ("chunk", "split"):
            base, rest = _receiver(node)
            last = [*rest[1:], *(k.value for k in node.keywords if k.arg == "dim")]
            return fits(base) and [ast.unparse(each) for each in last] == ["-1"]
        owner = ast.unparse(target.value)
        if owner in ("F", "torch", "nn.functional", "torch.nn.functional", "functional"):
            rest = [k.value for k in node.keywords]
            settings = all(
                isinstance(r, ast.Constant) or _is_self(r) for r in (*node.args[1:], *rest)
            )
            return target.attr in _FUNCTIONS and fits(node.args[0]) and settings
        return False

    body = definition.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]
    for statement in body[:-1]:
        plain = isinstance(statement, ast.Assign) and len(statement.targets) == 1
        if not plain or not isinstance(statement.targets[0], (ast.Name, ast.Tuple)):
            return False
        if not fits(statement.value):
            return False
        target = statement.targets[0]
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if not all(isinstance(each, ast.Name) for each in names):
            return False
        known.update(each.id for each in names)
    last = body[-1]
    return isinstance(last, ast.Return) and last.value is not None and fits(last.value)
