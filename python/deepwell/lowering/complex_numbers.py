"""Complex tensors as pairs of real ones. The graph has no complex numbers; models use them to rotate queries and keys.

A complex tensor is a `Complex`: its real and its imaginary part. Operations that only move elements are lowered once for
each part, arithmetic by its definition. The product of a real tensor's pairs (`view_as_complex`) with a table becomes one
`rope`. A complex tensor has no place in the graph: it may not be an input, an output, or written in place.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.utils import _pytree as pytree

from . import dims
from .builder import LoweringError, Value
from .dims import Dim
from .table import Context, find

_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}


class Complex:
    """A complex tensor. `pairs` [.., 2] has both parts in its last axis. Either it or the parts are made on demand."""

    def __init__(
        self,
        shape: Tuple[Dim, ...],
        dtype: str,
        parts: Optional[Callable[[], Tuple[Value, Value]]] = None,
        pairs: Optional[Callable[[], Value]] = None,
        source: Optional[Value] = None,
    ) -> None:
        """`dtype` is that of the parts. `source`: the real tensor that view_as_complex views, which is `pairs` too."""
        self.shape, self.dtype, self.source = shape, dtype, source
        self._make_parts, self._make_pairs = parts, pairs
        self._parts: Optional[Tuple[Value, Value]] = None
        self._pairs: Optional[Value] = source

    @property
    def rank(self) -> int:
        return len(self.shape)

    def pairs(self, c: Context) -> Value:
        if self._pairs is None and self._make_pairs is not None:
            self._pairs = self._make_pairs()
        if self._pairs is None:
            b = c.builder
            parts = [b.reshape(part, (*part.shape, 1)) for part in self.parts(c)]
            self._pairs = b.concat(parts, self.rank)
        return self._pairs

    def parts(self, c: Context) -> Tuple[Value, Value]:
        if self._parts is None and self._make_parts is not None:
            self._parts = self._make_parts()
        if self._parts is None:
            b, pairs = c.builder, self.pairs(c)
            re, im = (
                b.reshape(b.slice_axis(pairs, self.rank, at, at + 1), self.shape) for at in (0, 1)
            )
            self._parts = re, im
        return self._parts


def _of(re: Value, im: Value) -> Complex:
    return Complex(re.shape, re.dtype, lambda: (re, im))


def map_parts(c: Context, function: Callable[[Value], Value], x: Complex) -> Complex:
    return _of(*map(function, x.parts(c)))


def concerns(args: Any, kwargs: Any, value: Any) -> bool:
    """Returns whether an operation reads complex tensors, or returns (`value`) one."""
    if any(isinstance(v, torch.Tensor) and v.dtype in _PARTS for v in _flat((value,))):
        return True
    return any(isinstance(v, Complex) for v in _flat(args) + _flat(kwargs.values()))


def _flat(operands: Any) -> List[Any]:
    """Returns the operands, with those in lists one by one."""
    found: List[Any] = []
    for each in operands:
        if isinstance(each, (list, tuple)):
            found += each
        else:
            found.append(each)
    return found


def lower(c: Context, op: Any, args: Any, kwargs: Any) -> Any:
    """Lowers an operation that `concerns` complex tensors."""
    name = op._opname
    if name in _OWN:
        return _OWN[name](c, *args, **kwargs)
    if name in _MOVES:
        return _move(c, op, args, kwargs)
    raise LoweringError("complex tensors are supported in products, sums and rotations only")


# ---- operations that move elements ----------------------------------------------------------------

_MOVES = frozenset(
    "view reshape _unsafe_view flatten unflatten unsqueeze squeeze expand expand_as permute transpose t slice select "
    "narrow clone contiguous alias detach to _to_copy cat stack repeat split split_with_sizes chunk unbind index "
    "index_select view_as lift_fresh_copy".split()
)


def _move(c: Context, op: Any, args: Any, kwargs: Any) -> Any:
    """Lowers the operation once for each part."""
    lowering = find(op)
    if lowering is None:
        raise LoweringError("this operation is not supported for complex tensors")
    kept = c.result_dtypes
    results = []
    try:
        for at in (0, 1):

            def part(leaf: Any) -> Any:
                if isinstance(leaf, Complex):
                    return leaf.parts(c)[at]
                return _PARTS.get(leaf, leaf) if isinstance(leaf, torch.dtype) else leaf

            leaves, spec = pytree.tree_flatten((args, kwargs))
            own = [part(leaf) for leaf in leaves]
            own_args, own_kwargs = pytree.tree_unflatten(own, spec)
            dtype = next(v.dtype for v in own if isinstance(v, Value))
            c.result_dtypes = tuple(dtype for _ in kept)
            results.append(lowering(c, *own_args, **own_kwargs))
    finally:
        c.result_dtypes = kept
    re, im = results
    if isinstance(re, Value):
        return _of(re, im)
    return [_of(*each) for each in zip(re, im)]


# ---- conversions ----------------------------------------------------------------------------------


def _view_as_complex(c: Context, self: Value) -> Complex:
    return Complex(self.shape[:-1], self.dtype, source=self)


def _view_as_real(c: Context, self: Complex) -> Value:
    return self.pairs(c)


def _complex(c: Context, real: Value, imag: Value) -> Complex:
    return _of(*c.builder.broadcast_together(real, imag))


def _polar(c: Context, abs: Value, angle: Value) -> Complex:
    b = c.builder
    length, angle = b.broadcast_together(abs, angle)
    return _of(
        b.binary("mul", length, b.unary("cos", angle)),
        b.binary("mul", length, b.unary("sin", angle)),
    )


def _real(c: Context, self: Any) -> Value:
    return self.parts(c)[0] if isinstance(self, Complex) else self


def _imag(c: Context, self: Complex) -> Value:
    return self.parts(c)[1]


def _conj(c: Context, self: Complex) -> Complex:
    re, im = self.parts(c)
    return _of(re, c.builder.unary("neg", im))


def _same(c: Context, self: Complex) -> Complex:
    return self


# ---- arithmetic -----------------------------------------------------------------------------------


def _split(c: Context, x: Any, dtype: str) -> Tuple[Value, Optional[Value]]:
    """Returns the parts of an operand in `dtype`; a real operand has no imaginary part."""
    if isinstance(x, Complex):
        re, im = x.parts(c)
        return c.tensor(re, dtype), c.tensor(im, dtype)
    if isinstance(x, complex):
        return c.tensor(x.real, dtype), c.tensor(x.imag, dtype)
    return c.tensor(x, dtype), None


def _dtype_of(*operands: Any) -> str:
    wide = any(isinstance(x, (Complex, Value)) and x.dtype == "f64" and x.rank for x in operands)
    return "f64" if wide else "f32"


def _mul(c: Context, self: Any, other: Any) -> Complex:
    for x, table in ((self, other), (other, self)):
        rotated = _rotated(c, x, table)
        if rotated is not None:
            return rotated
    b, dtype = c.builder, _dtype_of(self, other)
    (a_re, a_im), (b_re, b_im) = _split(c, self, dtype), _split(c, other, dtype)
    if b_im is None:
        a_re, a_im, b_re, b_im = b_re, b_im, a_re, a_im
    if a_im is None:  # a real factor
        return _of(*(b.binary("mul", *b.broadcast_together(a_re, part)) for part in (b_re, b_im)))
    a_re, a_im, b_re, b_im = b.broadcast_together(a_re, a_im, b_re, b_im)
    re = b.binary("sub", b.binary("mul", a_re, b_re), b.binary("mul", a_im, b_im))
    im = b.binary("add", b.binary("mul", a_re, b_im), b.binary("mul", a_im, b_re))
    return _of(re, im)


def _rotated(c: Context, x: Any, table: Any) -> Optional[Complex]:
    """Returns x * table if x views a real tensor's pairs and the table broadcasts to it: rope computes this product."""
    if not isinstance(x, Complex) or x.source is None or not isinstance(table, Complex):
        return None
    b, (cosine, sine) = c.builder, table.parts(c)
    added = x.rank - table.rank
    if added < 0 or x.dtype != table.dtype or cosine.differentiable or sine.differentiable:
        return None
    shape = (1,) * added + table.shape
    if any(d not in (1, size) for d, size in zip(shape, x.shape)) or shape[-1] != x.shape[-1]:
        return None

    def spread(part: Value) -> Value:
        """Repeats each number of the table for both elements of a pair."""
        twice = b.broadcast(b.reshape(part, (*shape, 1)), (*shape, 2))
        return b.reshape(twice, (*shape[:-1], dims.product((shape[-1], 2))))

    def pairs() -> Value:
        source = x.source
        rows = (*x.shape[:-1], dims.product((x.shape[-1], 2)))
        flat = b.reshape(source, rows)
        (turned,) = b.emit(
            "rope",
            [flat, spread(cosine), spread(sine)],
            [(flat.dtype, rows)],
            interleaved=1,
        )
        return b.reshape(turned, source.shape)

    return Complex(x.shape, x.dtype, pairs=pairs)


def _sum(op: str) -> Callable[..., Complex]:
    def lower_sum(c: Context, self: Any, other: Any, alpha: Any = 1) -> Complex:
        if alpha != 1:
            raise LoweringError("a scaled sum of complex tensors is not supported")
        b, dtype = c.builder, _dtype_of(self, other)
        left, right = _split(c, self, dtype), _split(c, other, dtype)
        parts = []
        for x, y in zip(left, right):
            x = c.tensor(0.0, dtype) if x is None else x
            y = c.tensor(0.0, dtype) if y is None else y
            parts.append(b.binary(op, *b.broadcast_together(x, y)))
        return _of(*b.broadcast_together(*parts))

    return lower_sum


def _neg(c: Context, self: Complex) -> Complex:
    return _of(*(c.builder.unary("neg", part) for part in self.parts(c)))


def _div(c: Context, self: Any, other: Any) -> Complex:
    if isinstance(other, (Complex, complex)):
        raise LoweringError("a complex divisor is not supported")
    b, dtype = c.builder, _dtype_of(self, other)
    divisor = c.tensor(other, dtype)
    parts = _split(c, self, dtype)
    return _of(*(b.binary("div", *b.broadcast_together(part, divisor)) for part in parts))


_OWN: Dict[str, Callable[..., Any]] = {
    "view_as_complex": _view_as_complex,
    "view_as_real": _view_as_real,
    "complex": _complex,
    "polar": _polar,
    "real": _real,
    "imag": _imag,
    "conj": _conj,
    "_conj": _conj,
    "conj_physical": _conj,
    "_conj_physical": _conj,
    "resolve_conj": _same,
    "mul": _mul,
    "add": _sum("add"),
    "sub": _sum("sub"),
    "neg": _neg,
    "div": _div,
}
