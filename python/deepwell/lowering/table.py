"""The table of ATen operations that can be lowered, and the arguments of a lowering function.

A lowering function is registered under names of ATen packets ("add", "add.Scalar"). Its arguments are the Context and
then the operation's arguments by their ATen names: every tensor is a Value, every size a Dim, every list a list. It
returns a Value or a tuple of Values (None for a result that is not produced).
"""

from __future__ import annotations

from functools import lru_cache, wraps
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch

from .builder import DTYPES, FLOATS, INTEGERS, TORCH_DTYPES, Builder, LoweringError, Value
from .dims import Dim, Poly

Lowering = Callable[..., Any]
TABLE: Dict[str, Lowering] = {}
LOW_PRECISION = ("bf16", "f16")


def lowers(*names: str) -> Callable[[Lowering], Lowering]:
    """Registers a lowering for ATen operations: "name" for all overloads or "name.overload"; "deepwell::name" for an
    operation of Deepwell's."""

    def register(function: Lowering) -> Lowering:
        for name in names:
            TABLE[name] = function
        return function

    return register


def find(op: Any) -> Optional[Lowering]:
    namespace, _, name = op.name().partition("::")
    if namespace == "deepwell":
        return TABLE.get(op.name())
    if namespace != "aten":
        return None
    return TABLE.get(name) or TABLE.get(name.partition(".")[0])


def find_functional(op: Any) -> Optional[Lowering]:
    """Returns the lowering of x.f(...) for the operation x.f_(...)."""
    namespace, _, name = op.name().partition("::")
    packet, _, overload = name.partition(".")
    if namespace != "aten" or not packet.endswith("_") or packet.endswith("__"):
        return None
    packet = packet[:-1]
    return TABLE.get(f"{packet}.{overload}") or TABLE.get(packet)


class Context:
    """The context of a lowering function: the builder, and the results that PyTorch predicts."""

    def __init__(self, builder: Builder):
        self.builder = builder
        self.result_dtypes: Tuple[Optional[str], ...] = ()
        self.result_shapes: Tuple[Optional[Tuple[Dim, ...]], ...] = ()

    @property
    def dtype(self) -> str:
        """The dtype of the (first) result."""
        if not self.result_dtypes or self.result_dtypes[0] is None:
            raise LoweringError("the result has a dtype that the graph does not support")
        return self.result_dtypes[0]

    @property
    def shape(self) -> Tuple[Dim, ...]:
        """The shape of the (first) result."""
        shape = self.result_shapes[0] if self.result_shapes else None
        if shape is None:
            raise LoweringError("the result is not a tensor")
        return shape

    def tensor(self, x: Any, dtype: str) -> Value:
        """Returns `x`, a Value, a number or a Dim, as a Value of `dtype`."""
        if isinstance(x, Value):
            return self.builder.cast(x, dtype)
        if isinstance(x, Poly):
            return self.builder.size(x, dtype)
        return self.builder.constant(dtype, (), x)


def rounds_once(lower: Lowering) -> Lowering:
    """Wraps a lowering to several operations, if PyTorch has one that computes BF16 and FP16 in FP32 and rounds at its
    end. Operands are widened before it and results rounded after it."""

    @wraps(lower)
    def wide(c: Context, *args: Any, **kwargs: Any) -> Any:
        dtypes = c.result_dtypes
        if not any(dtype in LOW_PRECISION for dtype in dtypes):
            return lower(c, *args, **kwargs)

        def widen(x: Any) -> Any:
            short = isinstance(x, Value) and x.dtype in LOW_PRECISION
            return c.builder.cast(x, "f32") if short else x

        c.result_dtypes = tuple("f32" if dtype in LOW_PRECISION else dtype for dtype in dtypes)
        try:
            found = lower(c, *map(widen, args), **{key: widen(x) for key, x in kwargs.items()})
        finally:
            c.result_dtypes = dtypes
        results = found if isinstance(found, tuple) else (found,)
        rounded = tuple(
            c.builder.cast(x, dtype) if x is not None and dtype is not None else x
            for x, dtype in zip(results, dtypes)
        )
        return rounded if isinstance(found, tuple) else rounded[0]

    return wide


def graph_dtype(dtype: torch.dtype) -> str:
    name = DTYPES.get(dtype)
    if name is None:
        raise LoweringError(f"dtype {dtype} is not supported")
    return name


def convert_dtype(c: Context, x: Value, dtype: Optional[torch.dtype]) -> Value:
    return x if dtype is None else c.builder.cast(x, graph_dtype(dtype))


def axis_of(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def promote(*operands: Any) -> str:
    """Returns the dtype in which PyTorch computes with these Values, numbers and Dims."""
    kinds = []
    for x in operands:
        if isinstance(x, Value):
            kinds.append((x.dtype, x.rank == 0))
        elif isinstance(x, bool):
            kinds.append(("python bool", True))
        elif isinstance(x, (int, Poly)):
            kinds.append(("python int", True))
        else:
            kinds.append(("python float", True))
    result = kinds[0]
    for kind in kinds[1:]:
        result = (_result_type(result, kind), result[1] and kind[1])
    return result[0] if result[0] in TORCH_DTYPES else _result_type(result, result)


_PYTHON = {"python bool": True, "python int": 1, "python float": 1.0}


@lru_cache(maxsize=None)
def _result_type(a: Tuple[str, bool], b: Tuple[str, bool]) -> str:
    def sample(kind: Tuple[str, bool]) -> Any:
        dtype, scalar = kind
        if dtype in _PYTHON:
            return _PYTHON[dtype]
        return torch.empty(() if scalar else (1,), dtype=TORCH_DTYPES[dtype], device="meta")

    return graph_dtype(torch.result_type(sample(a), sample(b)))


def is_float(x: Any) -> bool:
    return x.dtype in FLOATS if isinstance(x, Value) else isinstance(x, float)


def is_integer(x: Value) -> bool:
    return x.dtype in INTEGERS


def axes_of(axes: Optional[Sequence[int]], rank: int) -> Tuple[int, ...]:
    """Returns sorted, non-negative axes; None or empty means all."""
    if axes is None or (not isinstance(axes, int) and len(axes) == 0):
        return tuple(range(rank))
    if isinstance(axes, int):
        axes = [axes]
    return tuple(sorted(axis_of(a, rank) for a in axes)) if rank else ()
