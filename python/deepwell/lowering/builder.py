"""The graph under construction: values, nodes, and one method per operation.

Each method checks its operands' shapes, infers its result's shape, and keeps the closed form of index
and mask tensors (forms.py). `include/deepwell/ops.h` defines operation names, operands and attributes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch

from . import dims
from .dims import Dim
from .forms import FALSE, TRUE, Affine, Predicate, at_least_zero, compare, concatenated

DTYPES = {
    torch.bool: "bool",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
FLOATS = ("bf16", "f16", "f32", "f64")
INTEGERS = ("i32", "i64")
MAX_RANK = 8


class LoweringError(Exception):
    """The graph cannot express the operation; the message says what and why."""


@dataclass(eq=False)
class Value:
    name: str
    dtype: str
    shape: Tuple[Dim, ...]
    differentiable: bool  # depends on a parameter or on a floating-point input
    node: Optional["Node"] = None  # None: a leaf
    form: Union[Affine, Predicate, None] = None

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(eq=False)
class Node:
    op: str
    inputs: List[Optional[Value]]
    attrs: Dict[str, Any]
    outputs: List[Value]
    region: str = "none"
    layer: int = -1
    module: str = ""


@dataclass
class Origin:
    """The origin of nodes that are appended: region, layer, module."""

    region: str = "none"
    layer: int = -1
    module: str = ""


@dataclass
class Leaf:
    value: Value
    role: str  # parameter, input, constant, seed


_DIM_ATTRS = ("shape", "start", "limit", "low", "high", "size")


def _attr_json(key: str, value: Any) -> Any:
    if key in _DIM_ATTRS:
        return [dims.json_form(dim) for dim in value]
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no NaN and no infinity: "inf", "-inf", "nan"
    return list(value) if isinstance(value, tuple) else value


class Builder:
    def __init__(self) -> None:
        self.leaves: List[Leaf] = []
        self.nodes: List[Node] = []
        self.origin = Origin()
        self._names: Dict[str, int] = {}
        self._constants: Dict[Tuple, Value] = {}
        # Dimensions that the graph assumes to be at least 0, though sizes could make them negative.
        self.at_least_zero: List[Dim] = []
        self._seed: Optional[Value] = None
        self._streams = 0

    # ---- leaves and nodes -----------------------------------------------------------------------

    def name(self, wanted: str) -> str:
        """Returns `wanted`, with a number after it if the name is taken."""
        count = self._names.get(wanted)
        if count is None:
            self._names[wanted] = 0
            return wanted
        while True:
            count += 1
            candidate = f"{wanted}_{count}"
            if candidate not in self._names:
                break
        self._names[wanted] = count
        self._names[candidate] = 0
        return candidate

    def leaf(self, role: str, name: str, dtype: str, shape: Sequence[Dim]) -> Value:
        if len(shape) > MAX_RANK:
            raise LoweringError(f"{name} has rank {len(shape)}; at most {MAX_RANK} is supported")
        differentiable = role in ("parameter", "input") and dtype in FLOATS
        value = Value(self.name(name), dtype, tuple(shape), differentiable)
        self.leaves.append(Leaf(value, role))
        return value

    def seed(self) -> Value:
        """Returns the leaf from which all random numbers of a call are drawn."""
        if self._seed is None:
            self._seed = self.leaf("seed", "seed", "i64", (2,))
        return self._seed

    def stream(self) -> int:
        """Returns an unused stream of random numbers."""
        self._streams += 1
        return self._streams - 1

    def emit(
        self,
        op: str,
        inputs: Sequence[Optional[Value]],
        results: Sequence[Tuple[str, Sequence[Dim]]],
        form: Union[Affine, Predicate, None] = None,
        **attrs: Any,
    ) -> List[Value]:
        """Appends a node; `results` are its outputs' dtypes and shapes.

        A result that is known to be the same number everywhere becomes a constant.
        """
        number = None if op == "constant" else _constant_of(form)
        if number is not None:
            return [self.constant(dtype, shape, number) for dtype, shape in results]
        from_differentiable = op != "stop_gradient" and any(
            x is not None and x.differentiable for x in inputs
        )
        node = Node(op, list(inputs), attrs, [])
        node.region, node.layer = self.origin.region, self.origin.layer
        node.module = self.origin.module
        for dtype, shape in results:
            if len(shape) > MAX_RANK:
                raise LoweringError(
                    f"a result has rank {len(shape)}; at most {MAX_RANK} is allowed"
                )
            differentiable = from_differentiable and dtype in FLOATS
            value = Value(self.name(op), dtype, tuple(shape), differentiable, node, form)
            node.outputs.append(value)
        self.nodes.append(node)
        return node.outputs

    # ---- without tensor operands ----------------------------------------------------------------

    def constant(self, dtype: str, shape: Sequence[Dim], value: Union[bool, int, float]) -> Value:
        number = float(value)
        if dtype in INTEGERS and int(number) != int(value):
            raise LoweringError(f"the integer constant {value} is not exact in FP64")
        key = (dtype, tuple(shape), repr(number))
        found = self._constants.get(key)
        if found is not None:
            return found
        form: Union[Affine, Predicate, None] = None
        if dtype in INTEGERS:
            form = Affine(int(value))
        elif dtype == "bool":
            form = TRUE if value else FALSE
        (y,) = self.emit(
            "constant", [], [(dtype, shape)], form, dtype=dtype, shape=tuple(shape), value=number
        )
        self._constants[key] = y
        return y

    def size(self, dim: Dim, dtype: str = "i64") -> Value:
        """Returns a scalar that holds a dimension."""
        if isinstance(dim, int):
            return self.constant(dtype, (), dim)
        form = Affine(dim) if dtype in INTEGERS else None
        return self.emit("size", [], [(dtype, ())], form, dtype=dtype, size=(dim,))[0]

    def iota(self, shape: Sequence[Dim], axis: int, dtype: str = "i64") -> Value:
        form = None
        if dtype in INTEGERS:
            form = Affine.make(0, {axis: 0 if shape[axis] == 1 else 1})
        return self.emit(
            "iota", [], [(dtype, shape)], form, dtype=dtype, shape=tuple(shape), axis=axis
        )[0]

    def random_uniform(self, shape: Sequence[Dim]) -> Value:
        return self.emit(
            "random_uniform",
            [self.seed()],
            [("f32", shape)],
            shape=tuple(shape),
            stream=self.stream(),
        )[0]

    # ---- elementwise ----------------------------------------------------------------------------

    def unary(self, op: str, x: Value) -> Value:
        dtype, form = x.dtype, None
        if op == "neg" and isinstance(x.form, Affine):
            form = x.form.times(-1)
        elif op == "logical_not" and isinstance(x.form, Predicate):
            form = x.form.negated()
        elif op == "is_finite":
            dtype = "bool"
        return self.emit(op, [x], [(dtype, x.shape)], form)[0]

    def binary(self, op: str, x: Value, y: Value) -> Value:
        """Appends a binary node. The operands have one dtype; they are broadcast here to the common shape."""
        if x.dtype != y.dtype:
            raise LoweringError(f"{op} of {x.dtype} and {y.dtype}")
        x, y = self.broadcast_together(x, y)
        if op in ("and", "or"):
            for one, other in ((x, y), (y, x)):
                if _constant_of(one.form) == (op == "and"):  # the operation's neutral element
                    return other
        compares = op in ("eq", "ne", "lt", "le", "gt", "ge")
        dtype = "bool" if compares else x.dtype
        return self.emit(op, [x, y], [(dtype, x.shape)], self._binary_form(op, x, y))[0]

    def _binary_form(self, op: str, x: Value, y: Value) -> Union[Affine, Predicate, None]:
        a, b = x.form, y.form
        if isinstance(a, Affine) and isinstance(b, Affine):
            if op in ("add", "sub"):
                return a.plus(b, 1 if op == "add" else -1)
            if op == "mul" and (a.is_constant or b.is_constant):
                return b.times(a.constant) if a.is_constant else a.times(b.constant)
            if op in ("eq", "ne", "lt", "le", "gt", "ge"):
                return compare(op, a, b)
        if op == "and" and (isinstance(a, Predicate) or isinstance(b, Predicate)):
            a = a if isinstance(a, Predicate) else Predicate(rest=(self._unbroadcast(x),))
            b = b if isinstance(b, Predicate) else Predicate(rest=(self._unbroadcast(y),))
            return a.both(b)
        if op == "or":
            for one, other in ((x, y), (y, x)):
                if isinstance(one.form, Predicate) and one.form.constant is not None:
                    return TRUE if one.form.constant else other.form
        return None

    @staticmethod
    def _unbroadcast(x: Value) -> Value:
        """Returns the tensor that `x` was broadcast from, if it has x's rank, else `x`."""
        while x.node is not None and x.node.op == "broadcast" and x.node.inputs[0].rank == x.rank:
            x = x.node.inputs[0]
        return x

    def select(self, condition: Value, x: Value, y: Value) -> Value:
        condition, x, y = self.broadcast_together(condition, x, y)
        if isinstance(condition.form, Predicate) and condition.form.constant is not None:
            return x if condition.form.constant else y
        return self.emit("select", [condition, x, y], [(x.dtype, x.shape)])[0]

    def cast(self, x: Value, dtype: str) -> Value:
        if x.dtype == dtype:
            return x
        form = None
        if isinstance(x.form, Affine):
            if dtype in INTEGERS:
                form = x.form
            elif dtype == "bool" and x.form.is_constant and isinstance(x.form.constant, int):
                form = TRUE if x.form.constant else FALSE
        elif isinstance(x.form, Predicate) and dtype in INTEGERS and x.form.constant is not None:
            form = Affine(int(x.form.constant))
        return self.emit("cast", [x], [(dtype, x.shape)], form, dtype=dtype)[0]

    def stop_gradient(self, x: Value) -> Value:
        return self.emit("stop_gradient", [x], [(x.dtype, x.shape)])[0] if x.differentiable else x

    def scalar_like(self, x: Value, value: Union[bool, int, float]) -> Value:
        return self.constant(x.dtype, x.shape, value)

    # ---- data movement --------------------------------------------------------------------------

    def reshape(self, x: Value, shape: Sequence[Dim]) -> Value:
        shape = tuple(shape)
        if shape == x.shape:
            return x
        if dims.product(shape) != dims.product(x.shape):
            raise LoweringError(f"reshape of {_text(x.shape)} to {_text(shape)}")
        form = _reshaped_form(x, shape)
        return self.emit("reshape", [x], [(x.dtype, shape)], form, shape=shape)[0]

    def permute(self, x: Value, perm: Sequence[int]) -> Value:
        perm = tuple(perm)
        if perm == tuple(range(x.rank)):
            return x
        shape = tuple(x.shape[p] for p in perm)
        form = _moved_form(x, {old: new for new, old in enumerate(perm)})
        return self.emit("permute", [x], [(x.dtype, shape)], form, perm=perm)[0]

    def broadcast(self, x: Value, shape: Sequence[Dim]) -> Value:
        shape = tuple(shape)
        if shape == x.shape:
            return x
        added = len(shape) - x.rank
        if added < 0 or any(d not in (1, shape[added + i]) for i, d in enumerate(x.shape)):
            raise LoweringError(f"{_text(x.shape)} does not broadcast to {_text(shape)}")
        if x.node is not None and x.node.op == "constant":
            return self.constant(x.dtype, shape, x.node.attrs["value"])
        form = x.form
        if isinstance(form, Affine):
            form = form.move(lambda axis: axis + added)
        elif isinstance(form, Predicate) and added:
            form = _moved_form(x, {axis: axis + added for axis in range(x.rank)})
        return self.emit("broadcast", [x], [(x.dtype, shape)], form, shape=shape)[0]

    def broadcast_shape(self, *shapes: Sequence[Dim]) -> Tuple[Dim, ...]:
        rank = max(len(shape) for shape in shapes)
        result: List[Dim] = [1] * rank
        for shape in shapes:
            for i, dim in enumerate(shape):
                at = rank - len(shape) + i
                if dim != 1 and result[at] not in (1, dim):
                    raise LoweringError(f"shapes {', '.join(map(_text, shapes))} do not broadcast")
                if dim != 1:
                    result[at] = dim
        return tuple(result)

    def broadcast_together(self, *values: Value) -> List[Value]:
        if all(v.shape == values[0].shape for v in values):
            return list(values)
        shape = self.broadcast_shape(*(v.shape for v in values))
        return [self.broadcast(v, shape) for v in values]

    def slice(
        self,
        x: Value,
        start: Sequence[Dim],
        limit: Sequence[Dim],
        step: Optional[Sequence[int]] = None,
    ) -> Value:
        start, limit = tuple(start), tuple(limit)
        step = tuple(step) if step is not None else (1,) * x.rank
        if all(s == 0 for s in start) and limit == x.shape and all(s == 1 for s in step):
            return x
        shape = tuple(
            hi - lo if by == 1 else _steps(hi - lo, by) for lo, hi, by in zip(start, limit, step)
        )
        form = None
        if isinstance(x.form, Affine):
            form = x.form.slice(start, step, shape)
        elif isinstance(x.form, Predicate) and not x.form.rest:
            form = TRUE
            for atom in x.form.atoms:
                form = form.both(at_least_zero(atom.slice(start, step, shape)))
        return self.emit(
            "slice", [x], [(x.dtype, shape)], form, start=start, limit=limit, step=step
        )[0]

    def slice_axis(self, x: Value, axis: int, start: Dim, limit: Dim, step: int = 1) -> Value:
        starts, limits, steps = [0] * x.rank, list(x.shape), [1] * x.rank
        starts[axis], limits[axis], steps[axis] = start, limit, step
        return self.slice(x, starts, limits, steps)

    def pad(self, x: Value, low: Sequence[Dim], high: Sequence[Dim], value: float = 0.0) -> Value:
        if all(p == 0 for p in low) and all(p == 0 for p in high):
            return x
        shape = tuple(d + lo + hi for d, lo, hi in zip(x.shape, low, high))
        return self.emit(
            "pad", [x], [(x.dtype, shape)], low=tuple(low), high=tuple(high), value=float(value)
        )[0]

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        values = [v for v in values if v.shape[axis] != 0] or list(values[:1])
        if len(values) == 1:
            return values[0]
        first = values[0]
        for v in values[1:]:
            same = v.rank == first.rank and all(
                a == b for i, (a, b) in enumerate(zip(v.shape, first.shape)) if i != axis
            )
            if not same or v.dtype != first.dtype:
                raise LoweringError(f"concat of {_text(first.shape)} and {_text(v.shape)}")
        shape = list(first.shape)
        shape[axis] = sum((v.shape[axis] for v in values), 0)
        form = None
        if all(isinstance(v.form, Affine) for v in values):
            form = concatenated([v.form for v in values], [v.shape[axis] for v in values], axis)
        while len(values) > 64:  # the most operands that a node may have
            head = self.concat(values[:64], axis)
            values = [head] + values[64:]
        return self.emit("concat", list(values), [(first.dtype, shape)], form, axis=axis)[0]

    def take(self, x: Value, index: Value, axis: int) -> Value:
        shape = x.shape[:axis] + index.shape + x.shape[axis + 1 :]
        return self.emit("take", [x, index], [(x.dtype, shape)], axis=axis)[0]

    def take_along(self, x: Value, index: Value, axis: int) -> Value:
        return self.emit("take_along", [x, index], [(x.dtype, index.shape)], axis=axis)[0]

    # ---- reductions -----------------------------------------------------------------------------

    def reduce(self, op: str, x: Value, axes: Sequence[int], keep: bool) -> Value:
        """reduce_sum, reduce_max, reduce_min, reduce_prod, mean."""
        axes = tuple(sorted(axes))
        if not axes:
            return x
        shape = _reduced(x.shape, axes, keep)
        return self.emit(op, [x], [(x.dtype, shape)], axes=axes, keep=int(keep))[0]

    def arg_reduce(self, op: str, x: Value, axis: int, keep: bool) -> Value:
        shape = _reduced(x.shape, (axis,), keep)
        return self.emit(op, [x], [("i64", shape)], axis=axis, keep=int(keep))[0]

    def cumsum(self, x: Value, axis: int) -> Value:
        form = None
        if isinstance(x.form, Affine) and x.form.is_constant:
            step = x.form.constant
            form = Affine.make(step, {axis: 0 if x.shape[axis] == 1 else step})
        return self.emit("cumsum", [x], [(x.dtype, x.shape)], form, axis=axis)[0]

    # ---- matmul ---------------------------------------------------------------------------------

    def matmul(self, a: Value, b: Value) -> Value:
        """a [batch.., M, K], b [batch.., K, N]. Folds transposes of the operands into the node."""
        if a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2] or a.dtype != b.dtype:
            raise LoweringError(f"matmul of {a.dtype}{_text(a.shape)}, {b.dtype}{_text(b.shape)}")
        shape = a.shape[:-1] + b.shape[-1:]
        a, transpose_a = _untransposed(a)
        b, transpose_b = _untransposed(b)
        return self.emit(
            "matmul", [a, b], [(a.dtype, shape)], transpose_a=transpose_a, transpose_b=transpose_b
        )[0]

    def linear(self, x: Value, w: Value, bias: Optional[Value], transpose_w: int = 1) -> Value:
        k, n = (w.shape[1], w.shape[0]) if transpose_w else (w.shape[0], w.shape[1])
        if x.shape[-1] != k or x.dtype != w.dtype or (bias is not None and bias.dtype != x.dtype):
            raise LoweringError(f"linear of {x.dtype}{_text(x.shape)} by {w.dtype}{_text(w.shape)}")
        return self.emit(
            "linear", [x, w, bias], [(x.dtype, x.shape[:-1] + (n,))], transpose_w=transpose_w
        )[0]

    # ---- the result -----------------------------------------------------------------------------

    def live_nodes(self, outputs: Sequence[Value]) -> List[Node]:
        """Returns the nodes that `outputs` need, in order."""
        needed = {v.name for v in outputs}
        live = []
        for node in reversed(self.nodes):
            if any(v.name in needed for v in node.outputs):
                live.append(node)
                needed.update(v.name for v in node.inputs if v is not None)
        live.reverse()
        return live

    def to_json(
        self,
        symbols: Sequence[str],
        leaves: Sequence[Leaf],
        nodes: Sequence[Node],
        outputs: Sequence[Value],
    ) -> str:
        return json.dumps(
            {
                "format": "deepwell.graph",
                "version": 1,
                "symbols": list(symbols),
                "leaves": [
                    {
                        "name": leaf.value.name,
                        "role": leaf.role,
                        "dtype": leaf.value.dtype,
                        "shape": [dims.json_form(d) for d in leaf.value.shape],
                    }
                    for leaf in leaves
                ],
                "nodes": [
                    {
                        "op": node.op,
                        "inputs": [None if v is None else v.name for v in node.inputs],
                        "outputs": [v.name for v in node.outputs],
                        "attrs": {key: _attr_json(key, v) for key, v in node.attrs.items()},
                        "region": node.region,
                        "layer": node.layer,
                        "module": node.module,
                    }
                    for node in nodes
                ],
                "outputs": [v.name for v in outputs],
            },
            allow_nan=False,
        )


def _constant_of(form: Union[Affine, Predicate, None]) -> Union[bool, int, None]:
    if isinstance(form, Predicate):
        return form.constant
    if isinstance(form, Affine) and form.is_constant and isinstance(form.constant, int):
        return form.constant
    return None


def _text(shape: Sequence[Dim]) -> str:
    return "[" + ", ".join(dims.text(d) for d in shape) + "]"


def _steps(extent: Dim, step: int) -> Dim:
    """Returns the number of elements of a slice: the quotient rounded up."""
    if isinstance(extent, int):
        return -(-extent // step)
    return dims.divide(extent, step)


def _reduced(shape: Sequence[Dim], axes: Sequence[int], keep: bool) -> Tuple[Dim, ...]:
    if keep:
        return tuple(1 if i in axes else d for i, d in enumerate(shape))
    return tuple(d for i, d in enumerate(shape) if i not in axes)


def _untransposed(x: Value) -> Tuple[Value, int]:
    """Returns (y, 1) if x is y with its last two axes exchanged, else (x, 0)."""
    swapped = tuple(range(x.rank - 2)) + (x.rank - 1, x.rank - 2)
    if x.node is not None and x.node.op == "permute" and x.node.attrs["perm"] == swapped:
        return x.node.inputs[0], 1
    return x, 0


def _moved_form(x: Value, new_axis: Dict[int, int]) -> Union[Affine, Predicate, None]:
    if isinstance(x.form, Affine):
        return x.form.move(new_axis.__getitem__)
    if isinstance(x.form, Predicate) and not x.form.rest:
        return Predicate(frozenset(a.move(new_axis.__getitem__) for a in x.form.atoms))
    return None


def _reshaped_form(x: Value, shape: Sequence[Dim]) -> Union[Affine, Predicate, None]:
    """Returns the form of the reshaped tensor if only axes of size 1 change or the form is constant, else None."""
    if x.form is None:
        return None
    old = [i for i, d in enumerate(x.shape) if d != 1]
    new = [i for i, d in enumerate(shape) if d != 1]
    if [x.shape[i] for i in old] == [shape[i] for i in new]:
        return _moved_form(x, dict(zip(old, new)))
    if isinstance(x.form, Affine) and x.form.is_constant:
        return x.form
    if isinstance(x.form, Predicate) and x.form.constant is not None:
        return x.form
    return None
