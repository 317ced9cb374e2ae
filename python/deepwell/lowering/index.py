"""Reading elements by index tensors."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from . import dims
from .builder import LoweringError, Value
from .dims import Dim
from .forms import Affine
from .table import Context, axis_of, is_integer, lowers


def wrapped(c: Context, index: Value, size: Dim) -> Value:
    """Returns `index` with negative entries counted from the end, as in PyTorch's indexing."""
    if isinstance(index.form, Affine) and index.form.is_non_negative or _is_position(index):
        return index
    b = c.builder
    zero = b.scalar_like(index, 0)
    extent = b.broadcast(b.size(size, index.dtype), index.shape)
    return b.select(b.binary("lt", index, zero), b.binary("add", index, extent), index)


def _is_position(index: Value) -> bool:
    """Returns whether the values are positions found in another tensor, which are never negative."""
    while index.node is not None and index.node.op in ("reshape", "permute", "broadcast", "slice"):
        index = index.node.inputs[0]
    if index.node is None or index.node.op not in ("top_k", "sort", "arg_max", "arg_min"):
        return False
    return index.name == index.node.outputs[-1].name  # not the values of top_k and sort


@lowers("embedding")
def embedding(
    c: Context,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Value:
    if scale_grad_by_freq or sparse:
        raise LoweringError("sparse or frequency-scaled embedding gradients are not supported")
    shape = indices.shape + weight.shape[1:]
    return c.builder.emit(
        "embedding", [weight, indices], [(weight.dtype, shape)], padding_index=padding_idx
    )[0]


@lowers("index_select")
def index_select(c: Context, self: Value, dim: int, index: Value) -> Value:
    return c.builder.take(self, index, axis_of(dim, self.rank))


@lowers("gather")
def gather(c: Context, self: Value, dim: int, index: Value, sparse_grad: bool = False) -> Value:
    return c.builder.take_along(self, index, axis_of(dim, self.rank))


@lowers("take_along_dim")
def take_along_dim(c: Context, self: Value, indices: Value, dim: Optional[int] = None) -> Value:
    if dim is None:
        raise LoweringError("take_along_dim without a dim is not supported")
    axis = axis_of(dim, self.rank)
    batch = c.builder.broadcast_shape(
        self.shape[:axis] + (1,) + self.shape[axis + 1 :],
        indices.shape[:axis] + (1,) + indices.shape[axis + 1 :],
    )
    x_shape, i_shape = list(batch), list(batch)
    x_shape[axis], i_shape[axis] = self.shape[axis], indices.shape[axis]
    return c.builder.take_along(
        c.builder.broadcast(self, x_shape), c.builder.broadcast(indices, i_shape), axis
    )


def _check_whole(self: Value, axis: int, index: Value) -> None:
    if any(a != b for i, (a, b) in enumerate(zip(self.shape, index.shape)) if i != axis):
        raise LoweringError("indices that cover only part of another axis are not supported")


@lowers("scatter.value")
def scatter_value(c: Context, self: Value, dim: int, index: Value, value: Any) -> Value:
    """Writes one number to all indexed places."""
    b = c.builder
    axis = axis_of(dim, self.rank)
    _check_whole(self, axis, index)
    ones = b.constant("i32", index.shape, 1)
    (hits,) = b.emit(
        "put_along_add", [index, ones], [("i32", self.shape)], axis=axis, size=self.shape
    )
    hit = b.binary("gt", hits, b.scalar_like(hits, 0))
    return b.select(hit, b.scalar_like(self, value), self)


@lowers("scatter.src")
def scatter_src(c: Context, self: Value, dim: int, index: Value, src: Value) -> Value:
    """Writes each number to its indexed place. If two had the same place, PyTorch would choose one of them."""
    b = c.builder
    axis = axis_of(dim, self.rank)
    _check_whole(self, axis, index)
    found = index.node
    distinct = (
        found is not None and found.op in ("top_k", "sort") and index.name == found.outputs[-1].name
    )
    if not distinct or found.attrs["axis"] != axis:
        raise LoweringError(
            "a scatter to places other than those that topk or sort found is not supported"
        )
    src = b.slice(src, (0,) * src.rank, index.shape)
    ones = b.constant("i32", index.shape, 1)
    (hits,) = b.emit(
        "put_along_add", [index, ones], [("i32", self.shape)], axis=axis, size=self.shape
    )
    (written,) = b.emit(
        "put_along_add", [index, src], [(self.dtype, self.shape)], axis=axis, size=self.shape
    )
    return b.select(b.binary("gt", hits, b.scalar_like(hits, 0)), written, self)


@lowers("scatter_add")
def scatter_add(c: Context, self: Value, dim: int, index: Value, src: Value) -> Value:
    b = c.builder
    axis = axis_of(dim, self.rank)
    _check_whole(self, axis, index)
    src = b.slice(src, (0,) * src.rank, index.shape)
    (added,) = b.emit(
        "put_along_add", [index, src], [(self.dtype, self.shape)], axis=axis, size=self.shape
    )
    return b.binary("add", self, added)


@lowers("histc")
def histc(c: Context, self: Value, bins: int = 100, min: Any = 0, max: Any = 0) -> Value:
    """Counts each integer in a tensor of integers, which models cast to a float first."""
    whole = self
    # FP32 and FP64 hold every integer that could fall into a bin.
    while (
        whole.node is not None
        and whole.node.op in ("cast", "reshape")
        and whole.dtype in ("f32", "f64")
    ):
        whole = whole.node.inputs[0]
    if not is_integer(whole) or max - min != bins or min != int(min) or bins > 1 << 24:
        raise LoweringError("a histogram is supported only for integers, with one bin for each")
    b = c.builder
    whole = b.reshape(whole, (dims.product(whole.shape),))
    low, high = b.scalar_like(whole, int(min)), b.scalar_like(whole, int(max))
    inside = b.binary("and", b.binary("ge", whole, low), b.binary("le", whole, high))
    # The last bin includes both of its ends. Values outside of all bins are not counted.
    zero, last = b.scalar_like(whole, 0), b.scalar_like(whole, bins - 1)
    place = b.binary("min", b.binary("max", b.binary("sub", whole, low), zero), last)
    place = b.select(inside, place, zero)
    return b.emit(
        "put_along_add",
        [place, b.cast(inside, c.dtype)],
        [(c.dtype, (bins,))],
        axis=0,
        size=(bins,),
    )[0]


@lowers("index.Tensor", "_unsafe_index.Tensor")
def index(c: Context, self: Value, indices: Sequence[Optional[Value]]) -> Value:
    axes = [axis for axis, i in enumerate(indices) if i is not None]
    tensors = [i for i in indices if i is not None]
    for i in tensors:
        if not is_integer(i):
            raise LoweringError("indexing with a bool mask gives a size that depends on the data")
    moved = _index_by_moving(c, self, axes, tensors)
    if moved is not None:
        return moved
    b = c.builder
    tensors = b.broadcast_together(*tensors)
    contiguous = axes == list(range(axes[0], axes[0] + len(axes)))
    x, first = self, axes[0]
    if not contiguous:  # the indexed axes and the result's index part move to the front
        x = b.permute(x, axes + [a for a in range(x.rank) if a not in axes])
        first = 0
    sizes = x.shape[first : first + len(axes)]
    flat = wrapped(c, tensors[0], sizes[0])
    for i, size in zip(tensors[1:], sizes[1:]):
        extent = b.broadcast(b.size(size, flat.dtype), flat.shape)
        i = b.cast(wrapped(c, i, size), flat.dtype)
        flat = b.binary("add", b.binary("mul", flat, extent), i)
    merged = x.shape[:first] + (dims.product(sizes),) + x.shape[first + len(axes) :]
    return b.take(b.reshape(x, merged), flat, first)


def _index_by_moving(
    c: Context, x: Value, axes: List[int], tensors: List[Value]
) -> Optional[Value]:
    """Indexes by whole ranges and fixed positions, such as x[arange(B)[:, None], arange(S)], by moving axes
    instead of reading an index tensor. Returns None for any other indices."""
    if axes != list(range(len(axes))):
        return None
    shape = c.builder.broadcast_shape(*(t.shape for t in tensors))
    placed: List[Tuple[int, int]] = []  # (axis of x, axis of the index part that runs over it)
    fixed: List[Tuple[int, Dim]] = []
    for axis, t in zip(axes, tensors):
        if not isinstance(t.form, Affine):
            return None
        if t.form.is_constant and t.form.is_non_negative:
            fixed.append((axis, t.form.constant))
            continue
        if t.form.constant != 0 or len(t.form.coefficients) != 1:
            return None
        run, coefficient = t.form.coefficients[0]
        run += len(shape) - t.rank
        if coefficient != 1 or shape[run] != x.shape[axis]:
            return None
        placed.append((axis, run))
    runs = [run for _, run in placed]
    if runs != sorted(set(runs)):
        return None
    b = c.builder
    for axis, at in fixed:
        size = x.shape[axis]
        if isinstance(at, int) and isinstance(size, int) and at >= size:
            return None  # an error at run time, which `take` reports
        x = b.slice_axis(x, axis, at, at + 1)
    rest = x.shape[len(axes) :]
    spread: List[Dim] = [1] * len(shape)
    for _, run in placed:
        spread[run] = shape[run]
    return b.broadcast(b.reshape(x, tuple(spread) + rest), shape + rest)
