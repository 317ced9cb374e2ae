"""Reductions, scans, orderings and softmax."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

from . import dims
from .builder import FLOATS, LoweringError, Value
from .table import Context, axes_of, axis_of, convert_dtype, is_float, lowers, rounds_once


@lowers("sum")
def reduce_sum(
    c: Context, self: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Value:
    x = c.builder.cast(self, c.dtype)
    return c.builder.reduce("reduce_sum", x, axes_of(dim, x.rank), keepdim)


@lowers("mean")
def mean(
    c: Context, self: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Value:
    if not isinstance(dim, (int, list, tuple, type(None))):  # mean(self, dtype)
        dim = None
    x = c.builder.cast(self, c.dtype)
    return c.builder.reduce("mean", x, axes_of(dim, x.rank), keepdim)


@lowers("prod.dim_int")
def reduce_prod(
    c: Context, self: Value, dim: int, keepdim: bool = False, dtype: Any = None
) -> Value:
    x = c.builder.cast(self, c.dtype)
    return c.builder.reduce("reduce_prod", x, axes_of(dim, x.rank), keepdim)


def _variance(c: Context, x: Value, dim: Any, correction: Any, keepdim: bool) -> Value:
    b = c.builder
    axes = axes_of(dim, x.rank)
    center = b.reduce("mean", x, axes, True)
    deviation = b.binary("sub", x, center)
    total = b.reduce("reduce_sum", b.binary("mul", deviation, deviation), axes, keepdim)
    count = dims.product(x.shape[a] for a in axes)
    if isinstance(correction, float) and correction == int(correction):
        correction = int(correction)
    if isinstance(count, int):
        divisor = b.constant(x.dtype, total.shape, max(count - correction, 0))
    elif isinstance(correction, int):
        divisor = b.broadcast(b.size(count - correction, x.dtype), total.shape)
    else:
        raise LoweringError("a variance over a varying size with a fractional correction")
    return b.binary("div", total, divisor)


def _correction(unbiased: Any, correction: Any) -> Any:
    if isinstance(unbiased, bool):
        return int(unbiased)
    return 1 if correction is None else correction


@lowers("var")
@rounds_once
def var(
    c: Context,
    self: Value,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    correction: Any = None,
) -> Value:
    if isinstance(dim, bool):  # var(self, unbiased)
        dim, unbiased = None, dim
    return _variance(c, self, dim, _correction(unbiased, correction), keepdim)


@lowers("std")
@rounds_once
def std(
    c: Context,
    self: Value,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    correction: Any = None,
) -> Value:
    return c.builder.unary("sqrt", var(c, self, dim, unbiased, keepdim, correction))


@lowers("var_mean")
@rounds_once
def var_mean(
    c: Context,
    self: Value,
    dim: Any = None,
    unbiased: Any = None,
    keepdim: bool = False,
    correction: Any = None,
) -> Tuple[Value, Value]:
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    variance = _variance(c, self, dim, _correction(unbiased, correction), keepdim)
    return variance, c.builder.reduce("mean", self, axes_of(dim, self.rank), keepdim)


@lowers("amax")
def amax(c: Context, self: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return c.builder.reduce("reduce_max", self, axes_of(dim, self.rank), keepdim)


@lowers("amin")
def amin(c: Context, self: Value, dim: Any = (), keepdim: bool = False) -> Value:
    return c.builder.reduce("reduce_min", self, axes_of(dim, self.rank), keepdim)


@lowers("any")
def any_true(c: Context, self: Value, dim: Any = None, keepdim: bool = False) -> Value:
    x = c.builder.cast(self, "bool")
    return c.builder.reduce("reduce_max", x, axes_of(dim, x.rank), keepdim)


@lowers("all")
def all_true(c: Context, self: Value, dim: Any = None, keepdim: bool = False) -> Value:
    x = c.builder.cast(self, "bool")
    return c.builder.reduce("reduce_min", x, axes_of(dim, x.rank), keepdim)


def _extreme(c: Context, x: Value, which: str, dim: Optional[int], keepdim: bool) -> Any:
    if dim is None:
        return c.builder.reduce(f"reduce_{which}", x, axes_of(None, x.rank), False)
    axis = axis_of(dim, x.rank)
    indices = c.builder.arg_reduce(f"arg_{which}", x, axis, True)
    values = c.builder.take_along(x, indices, axis)
    if not keepdim:
        shape = x.shape[:axis] + x.shape[axis + 1 :]
        indices, values = c.builder.reshape(indices, shape), c.builder.reshape(values, shape)
    return values, indices


@lowers("max", "max.dim")
def reduce_max(c: Context, self: Value, dim: Optional[int] = None, keepdim: bool = False) -> Any:
    return _extreme(c, self, "max", dim, keepdim)


@lowers("min", "min.dim")
def reduce_min(c: Context, self: Value, dim: Optional[int] = None, keepdim: bool = False) -> Any:
    return _extreme(c, self, "min", dim, keepdim)


def _arg_extreme(c: Context, x: Value, op: str, dim: Optional[int], keepdim: bool) -> Value:
    if dim is None:
        flat = c.builder.reshape(x, (dims.product(x.shape),))
        index = c.builder.arg_reduce(op, flat, 0, False)
        return c.builder.reshape(index, (1,) * x.rank) if keepdim else index
    return c.builder.arg_reduce(op, x, axis_of(dim, x.rank), keepdim)


@lowers("argmax")
def argmax(c: Context, self: Value, dim: Optional[int] = None, keepdim: bool = False) -> Value:
    return _arg_extreme(c, self, "arg_max", dim, keepdim)


@lowers("argmin")
def argmin(c: Context, self: Value, dim: Optional[int] = None, keepdim: bool = False) -> Value:
    return _arg_extreme(c, self, "arg_min", dim, keepdim)


@lowers("cumsum")
def cumsum(c: Context, self: Value, dim: int, dtype: Any = None) -> Value:
    x = c.builder.cast(self, c.dtype)
    return c.builder.cumsum(x, axis_of(dim, x.rank)) if x.rank else x


@lowers("diff")
def diff(
    c: Context,
    self: Value,
    n: int = 1,
    dim: int = -1,
    prepend: Optional[Value] = None,
    append: Optional[Value] = None,
) -> Value:
    b = c.builder
    axis = axis_of(dim, self.rank)
    x = b.concat([v for v in (prepend, self, append) if v is not None], axis)
    for _ in range(n):
        size = x.shape[axis]
        later, earlier = b.slice_axis(x, axis, 1, size), b.slice_axis(x, axis, 0, size - 1)
        x = b.binary("ne" if x.dtype == "bool" else "sub", later, earlier)
    return x


@lowers("sort", "sort.stable")
def sort(
    c: Context, self: Value, stable: Any = None, dim: int = -1, descending: bool = False
) -> Any:
    if isinstance(stable, int) and not isinstance(stable, bool):  # sort(self, dim, descending)
        dim, descending = stable, bool(dim) if isinstance(dim, bool) else descending
    axis = axis_of(dim, self.rank)
    return tuple(
        c.builder.emit(
            "sort",
            [self],
            [(self.dtype, self.shape), ("i64", self.shape)],
            axis=axis,
            descending=int(descending),
        )
    )


@lowers("topk")
def topk(
    c: Context, self: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Any:
    if not largest:
        raise LoweringError("topk of the smallest elements is not supported")
    axis = axis_of(dim, self.rank)
    shape = self.shape[:axis] + (k,) + self.shape[axis + 1 :]
    return tuple(
        c.builder.emit("top_k", [self], [(self.dtype, shape), ("i64", shape)], axis=axis, size=(k,))
    )


def _softmax(c: Context, op: str, x: Value, dim: int, dtype: Any) -> Value:
    x = convert_dtype(c, x, dtype)
    if not is_float(x):
        x = c.builder.cast(x, c.dtype)
    if x.rank == 0:
        x = c.builder.reshape(x, (1,))
        return c.builder.reshape(_softmax(c, op, x, 0, None), ())
    return c.builder.emit(op, [x], [(x.dtype, x.shape)], axis=axis_of(dim, x.rank))[0]


@lowers("softmax", "special_softmax")
def softmax(c: Context, self: Value, dim: int, dtype: Any = None) -> Value:
    return _softmax(c, "softmax", self, dim, dtype)


@lowers("log_softmax", "special_log_softmax")
def log_softmax(c: Context, self: Value, dim: int, dtype: Any = None) -> Value:
    return _softmax(c, "log_softmax", self, dim, dtype)


@lowers("_softmax", "_safe_softmax")
def inner_softmax(c: Context, self: Value, dim: int, half_to_float: Any = False) -> Value:
    return c.builder.cast(_softmax(c, "softmax", self, dim, None), c.dtype)


@lowers("_log_softmax")
def inner_log_softmax(c: Context, self: Value, dim: int, half_to_float: bool = False) -> Value:
    return c.builder.cast(_softmax(c, "log_softmax", self, dim, None), c.dtype)


@lowers("logsumexp")
def logsumexp(c: Context, self: Value, dim: Sequence[int], keepdim: bool = False) -> Value:
    """Returns max + log(sum(exp(x - max))). An infinite maximum is not subtracted."""
    b = c.builder
    axes = axes_of(dim, self.rank)
    top = b.stop_gradient(b.reduce("reduce_max", self, axes, True))
    top = b.select(b.unary("is_finite", top), top, b.scalar_like(top, 0))
    shifted = b.unary("exp", b.binary("sub", self, top))
    total = b.unary("log", b.reduce("reduce_sum", shifted, axes, keepdim))
    return b.binary("add", total, b.reshape(top, total.shape))


@lowers("norm.ScalarOpt_dim", "linalg_vector_norm")
@rounds_once
def vector_norm(
    c: Context, self: Value, p: Any = 2, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Value:
    if p not in (2, 2.0, None) or self.dtype not in FLOATS:
        raise LoweringError(f"the norm of order {p} is not supported, only of order 2")
    x = convert_dtype(c, self, dtype)
    squares = c.builder.binary("mul", x, x)
    total = c.builder.reduce("reduce_sum", squares, axes_of(dim, x.rank), keepdim)
    return c.builder.unary("sqrt", total)
