"""Reading elements by index tensors."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from . import dims
from .builder import LoweringError, Value
from .dims import Dim
from .forms import Affine
from .table import Context, axis_of, is_integer, lowers


def wrapped(c: Context, index: Value, size: Dim) -> Value:
    """`index` with negative entries counted from the end, as PyTorch's indexing does."""
    if isinstance(index.form, Affine) and index.form.is_non_negative:
        return index
    b = c.builder
    zero = b.scalar_like(index, 0)
    extent = b.broadcast(b.size(size, index.dtype), index.shape)
    return b.select(b.binary("lt", index, zero), b.binary("add", index, extent), index)


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
    if not contiguous:  # the indexed axes move to the front, and so does the result's index part
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
    """Indexing by whole ranges and by fixed positions, such as x[arange(B)[:, None], arange(S)],
    moves axes and reads no index tensor. None where the indices are anything else."""
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
