"""Elementwise operations, with PyTorch's type promotion made explicit."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional

import torch

from .builder import FLOATS, INTEGERS, TORCH_DTYPES, LoweringError, Value
from .dims import Poly
from .table import (
    LOW_PRECISION,
    Context,
    convert_dtype,
    is_float,
    lowers,
    promote,
    rounds_once,
)


def _unary(op: str) -> Callable[..., Value]:
    def lower(c: Context, self: Value) -> Value:
        return c.builder.unary(op, c.builder.cast(self, c.dtype))

    return lower


for _name in ("exp", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh", "erf",
              "sigmoid"):  # fmt: skip
    lowers(_name)(_unary(_name))


def _integer_aware(op: str, identity_on_integers: bool) -> Callable[..., Value]:
    def lower(c: Context, self: Value) -> Value:
        if identity_on_integers and not is_float(self):
            return self
        return c.builder.unary(op, self)

    return lower


for _name, _op, _identity in (
    ("neg", "neg", False),
    ("abs", "abs", False),
    ("sign", "sign", False),
    ("sgn", "sign", False),
    ("floor", "floor", True),
    ("ceil", "ceil", True),
):
    lowers(_name)(_integer_aware(_op, _identity))


@lowers("square")
def square(c: Context, self: Value) -> Value:
    return power(c, self, 2)


@lowers("isfinite")
def isfinite(c: Context, self: Value) -> Value:
    if not is_float(self):
        return c.builder.constant("bool", self.shape, True)
    return c.builder.unary("is_finite", self)


@lowers("isnan")
def isnan(c: Context, self: Value) -> Value:
    return c.builder.binary("ne", self, self)


@lowers("isinf")
def isinf(c: Context, self: Value) -> Value:
    magnitude = c.builder.unary("abs", self)
    return c.builder.binary("eq", magnitude, c.builder.scalar_like(magnitude, math.inf))


# ---- arithmetic ---------------------------------------------------------------------------------


def arithmetic(c: Context, op: str, x: Any, y: Any, dtype: Optional[str] = None) -> Value:
    """Computes `x op y` in PyTorch's promoted dtype.

    If the other operand is a BF16 or FP16 tensor, PyTorch rounds a number, or a tensor without axes, to the tensor's
    dtype. Products and quotients keep a right-hand side of this kind in FP32 and round once, at the end.
    """
    dtype = dtype or promote(x, y)
    b = c.builder
    if op == "mul" and not isinstance(x, Value):
        x, y = y, x
    if dtype in LOW_PRECISION and op in ("mul", "div") and _kept_wide(x, y, dtype):
        return b.cast(b.binary(op, c.tensor(c.tensor(x, dtype), "f32"), c.tensor(y, "f32")), dtype)
    return b.binary(op, c.tensor(x, dtype), c.tensor(y, dtype))


def _kept_wide(x: Any, y: Any, dtype: str) -> bool:
    """Returns whether `y` is a number that is not exact in `dtype`, and `x` a tensor of that dtype."""
    if isinstance(y, Value):
        return y.rank == 0 and isinstance(x, Value) and x.rank > 0 and y.dtype != dtype
    return isinstance(y, Poly) or _rounded(y, dtype) != y


def _rounded(number: Any, dtype: str) -> float:
    return torch.tensor(number, dtype=torch.float32).to(TORCH_DTYPES[dtype]).item()


def _scaled(c: Context, x: Any, alpha: Any, dtype: str) -> Any:
    """Returns alpha * x as an operand of add and sub."""
    if isinstance(alpha, (int, float)) and alpha == 1:
        return x
    if isinstance(x, (int, float)) and isinstance(alpha, (int, float)):
        return x * alpha
    return arithmetic(c, "mul", c.tensor(x, dtype), alpha, dtype)


def _sum(c: Context, op: str, x: Any, y: Any, alpha: Any, dtype: str) -> Value:
    """Returns x + alpha * y or x - alpha * y. PyTorch rounds alpha to BF16 or FP16, and then only the sum."""
    if dtype not in LOW_PRECISION or not isinstance(alpha, (int, float)) or alpha == 1:
        return arithmetic(c, op, x, _scaled(c, y, alpha, dtype), dtype)
    x, y = (c.tensor(c.tensor(v, dtype), "f32") for v in (x, y))
    scaled = c.builder.binary("mul", y, c.tensor(_rounded(alpha, dtype), "f32"))
    return c.builder.cast(c.builder.binary(op, x, scaled), dtype)


@lowers("add")
def add(c: Context, self: Any, other: Any, alpha: Any = 1) -> Value:
    dtype = promote(self, other)
    if dtype == "bool":
        return c.builder.binary("or", c.tensor(self, "bool"), c.tensor(other, "bool"))
    if isinstance(self, Value) and self.dtype == dtype and _is_number(other, 0) and _ints(dtype):
        return self
    return _sum(c, "add", self, other, alpha, dtype)


@lowers("sub", "subtract")
def sub(c: Context, self: Any, other: Any, alpha: Any = 1) -> Value:
    dtype = promote(self, other)
    return _sum(c, "sub", self, other, alpha, dtype)


@lowers("rsub")
def rsub(c: Context, self: Value, other: Any, alpha: Any = 1) -> Value:
    dtype = promote(self, other)
    return _sum(c, "sub", other, self, alpha, dtype)


@lowers("mul", "multiply")
def mul(c: Context, self: Any, other: Any) -> Value:
    dtype = promote(self, other)
    if dtype == "bool":
        return c.builder.binary("and", c.tensor(self, "bool"), c.tensor(other, "bool"))
    if isinstance(self, Value) and self.dtype == dtype and _is_number(other, 1):
        return self
    return arithmetic(c, "mul", self, other, dtype)


def _is_number(x: Any, number: int) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and x == number


def _ints(dtype: str) -> bool:
    """Returns whether the dtype is an integer. x + 0 is x for integers only, since -0.0 + 0 is 0.0."""
    return dtype in INTEGERS


@lowers("div", "true_divide", "divide")
def div(c: Context, self: Any, other: Any, rounding_mode: Optional[str] = None) -> Value:
    if rounding_mode is None:
        return arithmetic(c, "div", self, other, c.dtype)
    if rounding_mode == "floor":
        return floor_divide(c, self, other)
    dtype = promote(self, other)
    if dtype in FLOATS:
        return _truncated_quotient(c, self, other)
    return _integer_truncated_quotient(c, c.tensor(self, dtype), c.tensor(other, dtype))


@rounds_once
def _truncated_quotient(c: Context, x: Any, y: Any) -> Value:
    return _truncate(c, arithmetic(c, "div", x, y))


@lowers("floor_divide")
@rounds_once
def floor_divide(c: Context, self: Any, other: Any) -> Value:
    dtype = promote(self, other)
    quotient = arithmetic(c, "div", self, other, dtype)
    return c.builder.unary("floor", quotient) if dtype in FLOATS else quotient


def _truncate(c: Context, x: Value) -> Value:
    b = c.builder
    negative = b.binary("lt", x, b.scalar_like(x, 0))
    return b.select(negative, b.unary("ceil", x), b.unary("floor", x))


@lowers("trunc", "fix")
def trunc(c: Context, self: Value) -> Value:
    return _truncate(c, self) if is_float(self) else self


def _integer_truncated_quotient(c: Context, x: Value, y: Value) -> Value:
    b = c.builder
    magnitude = b.binary("div", b.unary("abs", x), b.unary("abs", y))
    return b.binary("mul", magnitude, b.binary("mul", b.unary("sign", x), b.unary("sign", y)))


@lowers("remainder")
def remainder(c: Context, self: Any, other: Any) -> Value:
    dtype = promote(self, other)
    if dtype in FLOATS:
        raise LoweringError("the remainder of floating-point numbers is not supported")
    return c.builder.binary("rem", c.tensor(self, dtype), c.tensor(other, dtype))


@lowers("pow", "float_power")
def power(c: Context, self: Any, exponent: Any) -> Value:
    dtype = c.dtype
    if isinstance(self, Value) and isinstance(exponent, (int, float)):
        b, x = c.builder, c.builder.cast(self, dtype)
        if exponent == 1:
            return x
        stepwise = dtype in LOW_PRECISION  # a gradient of products would round differently
        if exponent == 2 and not stepwise:  # as PyTorch computes it
            return b.binary("mul", x, x)
        if exponent == 3 and not stepwise:
            return b.binary("mul", b.binary("mul", x, x), x)
        if exponent == 0.5 and dtype in FLOATS:
            return b.unary("sqrt", x)
        if exponent == -0.5 and dtype in FLOATS:
            return b.unary("rsqrt", x)
        if exponent == -1 and dtype in FLOATS:
            return b.unary("reciprocal", x)
    return c.builder.binary("pow", c.tensor(self, dtype), c.tensor(exponent, dtype))


@lowers("maximum", "max.other")
def maximum(c: Context, self: Any, other: Any) -> Value:
    return arithmetic(c, "max", self, other)


@lowers("minimum", "min.other")
def minimum(c: Context, self: Any, other: Any) -> Value:
    return arithmetic(c, "min", self, other)


@lowers("clamp", "clip")
def clamp(c: Context, self: Value, min: Any = None, max: Any = None) -> Value:
    """Clamps. Elements equal to a bound pass the whole gradient; max and min would pass half of it."""
    return _bounded(c, c.builder.cast(self, c.dtype), min, max, "lt", "gt")


def _bounded(c: Context, x: Value, low: Any, high: Any, below: str, above: str) -> Value:
    b = c.builder
    for bound, op, outside in ((low, "max", below), (high, "min", above)):
        if bound is None:
            continue
        x, limit = b.broadcast_together(x, c.tensor(bound, x.dtype))
        if x.dtype in FLOATS and x.differentiable:
            x = b.select(b.binary(outside, x, limit), limit, x)
        else:
            x = b.binary(op, x, limit)
    return x


@lowers("clamp_min")
def clamp_min(c: Context, self: Value, min: Any) -> Value:
    return clamp(c, self, min=min)


@lowers("clamp_max")
def clamp_max(c: Context, self: Value, max: Any) -> Value:
    return clamp(c, self, max=max)


@lowers("addcmul")
@rounds_once
def addcmul(c: Context, self: Value, tensor1: Value, tensor2: Value, value: Any = 1) -> Value:
    return add(c, self, mul(c, tensor1, tensor2), alpha=value)


@lowers("addcdiv")
@rounds_once
def addcdiv(c: Context, self: Value, tensor1: Value, tensor2: Value, value: Any = 1) -> Value:
    return add(c, self, arithmetic(c, "div", tensor1, tensor2), alpha=value)


@lowers("lerp")
@rounds_once
def lerp(c: Context, self: Value, end: Value, weight: Any) -> Value:
    return add(c, self, mul(c, sub(c, end, self), weight))


# ---- activations --------------------------------------------------------------------------------


@lowers("relu")
def relu(c: Context, self: Value) -> Value:
    if not is_float(self):
        return c.builder.binary("max", self, c.builder.scalar_like(self, 0))
    return c.builder.emit("relu", [self], [(self.dtype, self.shape)])[0]


@lowers("silu")
def silu(c: Context, self: Value) -> Value:
    return c.builder.emit("silu", [self], [(self.dtype, self.shape)])[0]


@lowers("gelu")
def gelu(c: Context, self: Value, approximate: str = "none") -> Value:
    return c.builder.emit("gelu", [self], [(self.dtype, self.shape)], approximate=approximate)[0]


@lowers("softplus")
@rounds_once
def softplus(c: Context, self: Value, beta: Any = 1, threshold: Any = 20) -> Value:
    b = c.builder
    scaled = mul(c, self, beta)
    large = b.binary("gt", scaled, b.scalar_like(scaled, threshold))
    # If exp overflowed, its gradient would be NaN even where it is not selected.
    small = b.select(large, b.scalar_like(scaled, 0), scaled)
    soft = arithmetic(c, "div", b.unary("log1p", b.unary("exp", small)), beta)
    return b.select(large, self, soft)


@lowers("expm1")
@rounds_once
def expm1(c: Context, self: Value) -> Value:
    """Returns exp(x) - 1 without cancellation near zero: 2t / (1 - t) with t = tanh(x/2) if x < 1."""
    b = c.builder
    x = b.cast(self, c.dtype)
    one = b.scalar_like(x, 1)
    t = b.unary("tanh", b.binary("mul", b.binary("min", x, one), b.scalar_like(x, 0.5)))
    near = b.binary("div", b.binary("add", t, t), b.binary("sub", one, t))
    far = b.binary("sub", b.unary("exp", x), one)
    return b.select(b.binary("lt", x, one), near, far)


@lowers("elu")
@rounds_once
def elu(c: Context, self: Value, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Value:
    b = c.builder
    zero = b.scalar_like(self, 0)
    below = expm1(c, mul(c, b.binary("min", self, zero), input_scale))
    y = b.select(b.binary("gt", self, zero), self, mul(c, below, alpha))
    return mul(c, y, scale)


@lowers("leaky_relu")
@rounds_once
def leaky_relu(c: Context, self: Value, negative_slope: Any = 0.01) -> Value:
    positive = c.builder.binary("gt", self, c.builder.scalar_like(self, 0))
    return c.builder.select(positive, self, mul(c, self, negative_slope))


@lowers("hardtanh")
def hardtanh(c: Context, self: Value, min_val: Any = -1, max_val: Any = 1) -> Value:
    """Clamps like clamp, but elements equal to a bound pass no gradient."""
    return _bounded(c, self, min_val, max_val, "le", "ge")


@lowers("relu6")
def relu6(c: Context, self: Value) -> Value:
    return hardtanh(c, self, 0, 6)


# ---- comparisons and logic ----------------------------------------------------------------------


def _comparison(op: str) -> Callable[..., Value]:
    def lower(c: Context, self: Any, other: Any) -> Value:
        dtype = promote(self, other)
        if dtype == "bool" and op not in ("eq", "ne"):
            dtype = "i32"
        return c.builder.binary(op, c.tensor(self, dtype), c.tensor(other, dtype))

    return lower


for _name, _op in (
    ("eq", "eq"), ("ne", "ne"), ("lt", "lt"), ("le", "le"), ("gt", "gt"), ("ge", "ge"),
    ("not_equal", "ne"), ("less", "lt"), ("less_equal", "le"), ("greater", "gt"),
    ("greater_equal", "ge"),
):  # fmt: skip
    lowers(_name)(_comparison(_op))


@lowers("logical_and")
def logical_and(c: Context, self: Value, other: Value) -> Value:
    return c.builder.binary("and", c.tensor(self, "bool"), c.tensor(other, "bool"))


@lowers("logical_or")
def logical_or(c: Context, self: Value, other: Value) -> Value:
    return c.builder.binary("or", c.tensor(self, "bool"), c.tensor(other, "bool"))


@lowers("logical_xor")
def logical_xor(c: Context, self: Value, other: Value) -> Value:
    return c.builder.binary("ne", c.tensor(self, "bool"), c.tensor(other, "bool"))


@lowers("logical_not")
def logical_not(c: Context, self: Value) -> Value:
    return c.builder.unary("logical_not", c.builder.cast(self, "bool"))


def _bool_only(name: str, *operands: Any) -> None:
    for x in operands:
        if isinstance(x, Value) and x.dtype != "bool":
            raise LoweringError(f"{name} of integers is not supported, only of bool")


@lowers("bitwise_and", "__and__")
def bitwise_and(c: Context, self: Any, other: Any) -> Value:
    _bool_only("bitwise and", self, other)
    return logical_and(c, self, other)


@lowers("bitwise_or", "__or__")
def bitwise_or(c: Context, self: Any, other: Any) -> Value:
    _bool_only("bitwise or", self, other)
    return logical_or(c, self, other)


@lowers("bitwise_xor", "__xor__")
def bitwise_xor(c: Context, self: Any, other: Any) -> Value:
    _bool_only("bitwise xor", self, other)
    return logical_xor(c, self, other)


@lowers("bitwise_not")
def bitwise_not(c: Context, self: Value) -> Value:
    _bool_only("bitwise not", self)
    return c.builder.unary("logical_not", self)


@lowers("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def where(c: Context, condition: Value, self: Any, other: Any) -> Value:
    dtype = promote(self, other)
    return c.builder.select(
        c.builder.cast(condition, "bool"), c.tensor(self, dtype), c.tensor(other, dtype)
    )


@lowers("masked_fill")
def masked_fill(c: Context, self: Value, mask: Value, value: Any) -> Value:
    return c.builder.select(c.builder.cast(mask, "bool"), c.tensor(value, self.dtype), self)


# ---- conversions --------------------------------------------------------------------------------


@lowers("to.dtype")
def to_dtype(c: Context, self: Value, dtype: Any, *_: Any, **__: Any) -> Value:
    return convert_dtype(c, self, dtype)


@lowers("to.device")
def to_device(c: Context, self: Value, device: Any, dtype: Any, *_: Any, **__: Any) -> Value:
    return convert_dtype(c, self, dtype)


@lowers("to.dtype_layout", "_to_copy")
def to_dtype_layout(c: Context, self: Value, dtype: Any = None, **_: Any) -> Value:
    return convert_dtype(c, self, dtype)


@lowers("to.other")
def to_other(c: Context, self: Value, other: Value, *_: Any, **__: Any) -> Value:
    return c.builder.cast(self, other.dtype)


@lowers("type_as")
def type_as(c: Context, self: Value, other: Value) -> Value:
    return c.builder.cast(self, other.dtype)


@lowers("contiguous", "clone", "alias", "lift", "lift_fresh", "lift_fresh_copy", "positive")
def identity(c: Context, self: Value, *_: Any, **__: Any) -> Value:
    return self


@lowers("detach", "detach_")
def detach(c: Context, self: Value) -> Value:
    return c.builder.stop_gradient(self)
