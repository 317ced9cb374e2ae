"""Operations that move, repeat, split and create tensors without computing on their elements."""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

from . import dims
from .builder import LoweringError, Value
from .dims import Dim
from .table import Context, axis_of, lowers

HUGE = 1 << 62  # PyTorch writes "to the end" as 2^63 - 1


# ---- views --------------------------------------------------------------------------------------


def resolve_shape(x: Value, shape: Sequence[Dim]) -> Tuple[Dim, ...]:
    """Returns `shape` with its -1, if any, replaced by the remaining size."""
    shape = tuple(shape)
    if -1 in shape:
        known = dims.product(d for d in shape if d != -1)
        rest = dims.divide(dims.product(x.shape), known)
        shape = tuple(rest if d == -1 else d for d in shape)
    return shape


@lowers("view", "reshape", "_unsafe_view", "view_copy", "_reshape_alias")
def view(c: Context, self: Value, size: Any = None, *_: Any, **kwargs: Any) -> Value:
    size = kwargs.get("shape", size)
    if not isinstance(size, (list, tuple)):
        raise LoweringError("a view with another dtype is not supported")
    return c.builder.reshape(self, resolve_shape(self, size))


@lowers("view_as", "reshape_as")
def view_as(c: Context, self: Value, other: Value) -> Value:
    return c.builder.reshape(self, other.shape)


@lowers("flatten")
def flatten(c: Context, self: Value, start_dim: int = 0, end_dim: int = -1) -> Value:
    if self.rank == 0:
        return c.builder.reshape(self, (1,))
    first, last = axis_of(start_dim, self.rank), axis_of(end_dim, self.rank)
    merged = dims.product(self.shape[first : last + 1])
    return c.builder.reshape(self, self.shape[:first] + (merged,) + self.shape[last + 1 :])


@lowers("unflatten")
def unflatten(c: Context, self: Value, dim: int, sizes: Sequence[Dim]) -> Value:
    axis = axis_of(dim, self.rank)
    sizes = tuple(sizes)
    if -1 in sizes:
        rest = dims.divide(self.shape[axis], dims.product(d for d in sizes if d != -1))
        sizes = tuple(rest if d == -1 else d for d in sizes)
    return c.builder.reshape(self, self.shape[:axis] + sizes + self.shape[axis + 1 :])


@lowers("unsqueeze")
def unsqueeze(c: Context, self: Value, dim: int) -> Value:
    axis = axis_of(dim, self.rank + 1)
    return c.builder.reshape(self, self.shape[:axis] + (1,) + self.shape[axis:])


@lowers("squeeze")
def squeeze(c: Context, self: Value, dim: Any = None) -> Value:
    if dim is None:
        axes = range(self.rank)
    else:
        axes = [axis_of(a, self.rank) for a in ([dim] if isinstance(dim, int) else dim)]
    shape = tuple(d for i, d in enumerate(self.shape) if not (i in axes and d == 1))
    return c.builder.reshape(self, shape)


@lowers("expand")
def expand(c: Context, self: Value, size: Sequence[Dim], implicit: bool = False) -> Value:
    added = len(size) - self.rank
    shape = tuple(self.shape[i - added] if d == -1 else d for i, d in enumerate(size))
    return c.builder.broadcast(self, shape)


@lowers("expand_as")
def expand_as(c: Context, self: Value, other: Value) -> Value:
    return c.builder.broadcast(self, other.shape)


@lowers("broadcast_to")
def broadcast_to(c: Context, self: Value, size: Sequence[Dim]) -> Value:
    return expand(c, self, size)


@lowers("broadcast_tensors")
def broadcast_tensors(c: Context, tensors: Sequence[Value]) -> List[Value]:
    shape = c.builder.broadcast_shape(*(t.shape for t in tensors))
    return [c.builder.broadcast(t, shape) for t in tensors]


@lowers("transpose", "swapaxes", "swapdims")
def transpose(c: Context, self: Value, dim0: int, dim1: int) -> Value:
    perm = list(range(self.rank))
    if perm:
        a, b = axis_of(dim0, self.rank), axis_of(dim1, self.rank)
        perm[a], perm[b] = b, a
    return c.builder.permute(self, perm)


@lowers("permute")
def permute(c: Context, self: Value, dims: Sequence[int]) -> Value:
    return c.builder.permute(self, [axis_of(a, self.rank) for a in dims])


@lowers("t", "numpy_T")
def matrix_transpose(c: Context, self: Value) -> Value:
    return c.builder.permute(self, list(range(self.rank))[::-1])


@lowers("mT")
def last_two_exchanged(c: Context, self: Value) -> Value:
    return transpose(c, self, -2, -1)


@lowers("movedim", "moveaxis")
def movedim(c: Context, self: Value, source: Any, destination: Any) -> Value:
    sources = [source] if isinstance(source, int) else source
    destinations = [destination] if isinstance(destination, int) else destination
    perm: List[Optional[int]] = [None] * self.rank
    for s, d in zip(sources, destinations):
        perm[axis_of(d, self.rank)] = axis_of(s, self.rank)
    rest = iter(a for a in range(self.rank) if a not in perm)
    return c.builder.permute(self, [next(rest) if p is None else p for p in perm])


# ---- parts --------------------------------------------------------------------------------------


def _bounded(c: Context, index: Dim, size: Dim) -> Dim:
    """Returns a slice's bound as PyTorch reads it: negative counts from the end, clamped to the axis."""
    if isinstance(index, int):
        if index >= HUGE:
            return size
        if index < 0:
            index = index + size
        if isinstance(index, int) and isinstance(size, int):
            return min(max(index, 0), size)
    return index


@lowers("slice.Tensor", "slice_copy.Tensor")
def slice_tensor(
    c: Context, self: Value, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Value:
    axis = axis_of(dim, self.rank)
    size = self.shape[axis]
    first = 0 if start is None else _bounded(c, start, size)
    last = size if end is None else _bounded(c, end, size)
    if step == 1:  # PyTorch's own result shows where bounds beyond the axis were clamped
        length = c.shape[axis]
        if length == size:
            return self
        if isinstance(end, int) and end >= HUGE or end is None:
            first = size - length
        last = first + length
    elif not (isinstance(last, int) and isinstance(first, int)):
        if last != size:
            raise LoweringError("a slice with a step and a varying end is not supported")
    return c.builder.slice_axis(self, axis, first, last, step)


@lowers("slice_scatter")
def slice_scatter(
    c: Context,
    self: Value,
    src: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Value:
    """Returns `self` with a part replaced, as a concatenation of what precedes, the part, and what follows."""
    if step != 1:
        raise LoweringError("writing a slice with a step is not supported")
    axis = axis_of(dim, self.rank)
    size, length = self.shape[axis], src.shape[axis]
    first = 0 if start is None else _bounded(c, start, size)
    if isinstance(end, int) and end >= HUGE or end is None:
        first = size - length
    return _with_part(c, self, src, axis, first)


@lowers("select_scatter")
def select_scatter(c: Context, self: Value, src: Value, dim: int, index: Dim) -> Value:
    axis = axis_of(dim, self.rank)
    if isinstance(index, int) and index < 0:
        index = index + self.shape[axis]
    return _with_part(c, self, unsqueeze(c, src, axis), axis, index)


def _with_part(c: Context, x: Value, part: Value, axis: int, first: Dim) -> Value:
    """Returns `x` with its elements from `first` on replaced by a part of the same shape but for this axis."""
    size, length = x.shape[axis], part.shape[axis]
    pieces = [c.builder.cast(part, x.dtype)]
    if length == size:
        return pieces[0]
    if first != 0:
        pieces.insert(0, _part(c, x, axis, 0, first))
    if first + length != size:
        pieces.append(_part(c, x, axis, first + length, size))
    return c.builder.concat(pieces, axis)


def _part(c: Context, x: Value, axis: int, first: Dim, last: Dim) -> Value:
    """Returns a slice; for a slice of a concatenation, the pieces that it consists of."""
    if x.node is not None and x.node.op == "concat" and x.node.attrs["axis"] == axis:
        pieces = x.node.inputs
        bounds: List[Dim] = [0]
        for piece in pieces:
            bounds.append(bounds[-1] + piece.shape[axis])
        if first in bounds and last in bounds:
            return c.builder.concat(pieces[bounds.index(first) : bounds.index(last)], axis)
    return c.builder.slice_axis(x, axis, first, last)


@lowers("narrow")
def narrow(c: Context, self: Value, dim: int, start: Any, length: Dim) -> Value:
    if isinstance(start, Value):
        raise LoweringError("narrow with a tensor as start is not supported")
    axis = axis_of(dim, self.rank)
    start = start + self.shape[axis] if isinstance(start, int) and start < 0 else start
    return c.builder.slice_axis(self, axis, start, start + length)


def select_axis(c: Context, x: Value, axis: int, index: Dim) -> Value:
    if isinstance(index, int) and index < 0:
        index = index + x.shape[axis]
    piece = c.builder.slice_axis(x, axis, index, index + 1)
    return c.builder.reshape(piece, x.shape[:axis] + x.shape[axis + 1 :])


@lowers("select.int", "select_copy.int")
def select(c: Context, self: Value, dim: int, index: Dim) -> Value:
    return select_axis(c, self, axis_of(dim, self.rank), index)


@lowers("unbind")
def unbind(c: Context, self: Value, dim: int = 0) -> List[Value]:
    axis = axis_of(dim, self.rank)
    count = self.shape[axis]
    if not isinstance(count, int):
        raise LoweringError("unbind along an axis whose size varies is not supported")
    return [select_axis(c, self, axis, i) for i in range(count)]


def split_sizes(c: Context, x: Value, axis: int, sizes: Sequence[Dim]) -> List[Value]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(c.builder.slice_axis(x, axis, start, start + size))
        start = start + size
    return pieces


@lowers("split", "split_with_sizes", "split_copy", "split_with_sizes_copy")
def split(c: Context, self: Value, split_size: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    split_size = kwargs.get("split_sizes", split_size)
    axis = axis_of(dim, self.rank)
    if isinstance(split_size, (list, tuple)):
        return split_sizes(c, self, axis, split_size)
    size = self.shape[axis]
    if not (isinstance(size, int) and isinstance(split_size, int)):
        count = dims.divide(size, split_size)
        if not isinstance(count, int):
            raise LoweringError("a split into a varying number of pieces is not supported")
        return split_sizes(c, self, axis, [split_size] * count)
    sizes = [min(split_size, size - at) for at in range(0, max(size, 1), max(split_size, 1))]
    return split_sizes(c, self, axis, sizes)


@lowers("chunk")
def chunk(c: Context, self: Value, chunks: int, dim: int = 0) -> List[Value]:
    axis = axis_of(dim, self.rank)
    size = self.shape[axis]
    if isinstance(size, int):
        return split(c, self, -(-size // chunks), dim)
    return split(c, self, dims.divide(size, chunks), dim)


@lowers("tensor_split.sections")
def tensor_split(c: Context, self: Value, sections: int, dim: int = 0) -> List[Value]:
    axis = axis_of(dim, self.rank)
    size = self.shape[axis]
    if not isinstance(size, int):
        return split(c, self, dims.divide(size, sections), dim)
    small, larger = divmod(size, sections)
    return split_sizes(c, self, axis, [small + (i < larger) for i in range(sections)])


# ---- joining and repeating ----------------------------------------------------------------------


@lowers("cat", "concat", "concatenate")
def cat(c: Context, tensors: Sequence[Value], dim: int = 0) -> Value:
    # PyTorch skips tensors of shape [0] whatever the other ranks.
    kept = [t for t in tensors if t.shape != (0,)] or list(tensors[:1])
    kept = [c.builder.cast(t, c.dtype) for t in kept]
    return c.builder.concat(kept, axis_of(dim, kept[0].rank))


@lowers("stack")
def stack(c: Context, tensors: Sequence[Value], dim: int = 0) -> Value:
    axis = axis_of(dim, tensors[0].rank + 1)
    rows = [unsqueeze(c, c.builder.cast(t, c.dtype), axis) for t in tensors]
    return c.builder.concat(rows, axis)


@lowers("repeat")
def repeat(c: Context, self: Value, repeats: Sequence[Dim]) -> Value:
    """Broadcasts each axis [n] to [r, n] and merges it to [r*n]."""
    x = c.builder.reshape(self, (1,) * (len(repeats) - self.rank) + self.shape)
    for axis, count in enumerate(repeats):
        if count == 1:
            continue
        before, n, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
        x = c.builder.reshape(x, before + (1, n) + after)
        x = c.builder.broadcast(x, before + (count, n) + after)
        x = c.builder.reshape(x, before + (count * n,) + after)
    return x


@lowers("tile")
def tile(c: Context, self: Value, dims: Sequence[Dim]) -> Value:
    return repeat(c, self, (1,) * max(0, self.rank - len(dims)) + tuple(dims))


@lowers("repeat_interleave.self_int")
def repeat_interleave(
    c: Context, self: Value, repeats: Dim, dim: Optional[int] = None, output_size: Any = None
) -> Value:
    x = flatten(c, self) if dim is None else self
    axis = 0 if dim is None else axis_of(dim, x.rank)
    before, n, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    x = c.builder.reshape(x, before + (n, 1) + after)
    x = c.builder.broadcast(x, before + (n, repeats) + after)
    return c.builder.reshape(x, before + (n * repeats,) + after)


@lowers("roll")
def roll(c: Context, self: Value, shifts: Any, dims: Any = ()) -> Value:
    shifts = [shifts] if not isinstance(shifts, (list, tuple)) else list(shifts)
    axes = [dims] if isinstance(dims, int) else list(dims)
    x = self
    if not axes:
        return c.builder.reshape(_roll_axis(c, flatten(c, x), shifts[0], 0), self.shape)
    for shift, dim in zip(shifts, axes):
        x = _roll_axis(c, x, shift, axis_of(dim, self.rank))
    return x


def _roll_axis(c: Context, x: Value, shift: Dim, axis: int) -> Value:
    size = x.shape[axis]
    if isinstance(size, int) and isinstance(shift, int):
        shift = shift % size if size else 0
        cut = size - shift
    elif isinstance(shift, int):
        cut = size - shift if shift > 0 else -shift
        c.builder.at_least_zero.append(size - abs(shift))
    else:
        raise LoweringError("a roll by a varying number is not supported")
    if cut == 0 or cut == size:
        return x
    head, tail = c.builder.slice_axis(x, axis, 0, cut), c.builder.slice_axis(x, axis, cut, size)
    return c.builder.concat([tail, head], axis)


@lowers("flip")
def flip(c: Context, self: Value, dims: Sequence[int]) -> Value:
    x = self
    for dim in dims:
        axis = axis_of(dim, self.rank)
        n = x.shape[axis]
        last = c.builder.broadcast(c.builder.size(n - 1), (n,))
        x = c.builder.take(x, c.builder.binary("sub", last, c.builder.iota((n,), 0)), axis)
    return x


@lowers("pad", "constant_pad_nd")
def pad(
    c: Context, self: Value, pad: Sequence[Dim], mode: Any = "constant", value: Any = None
) -> Value:
    if not isinstance(mode, str):  # the argument is the value of constant_pad_nd
        mode, value = "constant", mode
    if mode != "constant":
        raise LoweringError(f"padding with mode {mode!r} is not supported, only 'constant'")
    low, high = [0] * self.rank, [0] * self.rank
    start, limit = [0] * self.rank, list(self.shape)
    for i in range(len(pad) // 2):
        axis = self.rank - 1 - i
        for side, amount in enumerate((pad[2 * i], pad[2 * i + 1])):
            if isinstance(amount, int) and amount < 0:  # a negative amount removes elements
                if side == 0:
                    start[axis] = -amount
                else:
                    limit[axis] = limit[axis] + amount
            else:
                (low, high)[side][axis] = amount
    cut = c.builder.slice(self, start, limit)
    return c.builder.pad(cut, low, high, 0.0 if value is None else float(value))


# ---- creation -----------------------------------------------------------------------------------


@lowers("arange")
def arange(c: Context, *bounds: Any, **kwargs: Any) -> Value:
    bounds = tuple(bounds) + tuple(kwargs[k] for k in ("start", "end", "step") if k in kwargs)
    start = bounds[0] if len(bounds) >= 2 else 0
    step = bounds[2] if len(bounds) == 3 else 1
    (length,) = c.shape
    b = c.builder
    x = b.iota((length,), 0, c.dtype)
    if step != 1:
        x = b.binary("mul", x, c.tensor(step, c.dtype))
    if start != 0:
        x = b.binary("add", x, c.tensor(start, c.dtype))
    return x


def _filled(c: Context, value: Any) -> Value:
    return c.builder.broadcast(c.tensor(value, c.dtype), c.shape)


@lowers("full", "new_full", "full_like")
def full(c: Context, *args: Any, **kwargs: Any) -> Value:
    """full(size, fill), full_like(self, fill), new_full(self, size, fill): the fill comes last."""
    return _filled(c, kwargs["fill_value"] if "fill_value" in kwargs else args[-1])


@lowers("ones", "new_ones", "ones_like")
def ones(c: Context, *_: Any, **__: Any) -> Value:
    return _filled(c, 1)


@lowers("zeros", "new_zeros", "zeros_like", "empty", "empty_like", "new_empty", "empty_permuted",
        "empty_strided")  # fmt: skip
def zeros(c: Context, *_: Any, **__: Any) -> Value:
    """Also lowers `empty`, whose contents are unspecified."""
    return _filled(c, 0)


@lowers("zero")
def zero(c: Context, self: Value) -> Value:
    return _filled(c, 0)


@lowers("copy")
def copy(c: Context, self: Value, src: Value, non_blocking: bool = False) -> Value:
    return c.builder.broadcast(c.builder.cast(src, self.dtype), self.shape)


@lowers("fill")
def fill(c: Context, self: Value, value: Any) -> Value:
    return _filled(c, value)


@lowers("scalar_tensor")
def scalar_tensor(c: Context, s: Any, **_: Any) -> Value:
    return c.tensor(s, c.dtype)


def _triangle(c: Context, x: Value, diagonal: int, lower: bool) -> Value:
    b = c.builder
    shape = x.shape[-2:]
    row, column = b.iota(shape, 0), b.iota(shape, 1)
    edge = b.binary("add", row, b.scalar_like(row, diagonal)) if diagonal else row
    keep = b.binary("le" if lower else "ge", column, edge)
    keep = b.broadcast(keep, x.shape)
    if x.dtype == "bool":
        return b.binary("and", x, keep)
    return b.select(keep, x, b.scalar_like(x, 0))


@lowers("tril")
def tril(c: Context, self: Value, diagonal: int = 0) -> Value:
    return _triangle(c, self, diagonal, lower=True)


@lowers("triu")
def triu(c: Context, self: Value, diagonal: int = 0) -> Value:
    return _triangle(c, self, diagonal, lower=False)


@lowers("eye")
def eye(c: Context, *_: Any, **__: Any) -> Value:
    b = c.builder
    shape = c.shape
    return b.cast(b.binary("eq", b.iota(shape, 0), b.iota(shape, 1)), c.dtype)


@lowers("_shape_as_tensor")
def shape_as_tensor(c: Context, self: Value) -> Value:
    sizes = [unsqueeze(c, c.builder.size(d), 0) for d in self.shape]
    return c.builder.concat(sizes, 0)
