"""Lowers ATen operations to the operations of the graph (`include/deepwell/ops.h`)."""

from . import elementwise, index, nn, reduce, shape  # noqa: F401  (each fills the table)
from .builder import Builder, LoweringError, Value
from .dims import NotPolynomial, Translator
from .table import TABLE

__all__ = ["TABLE", "Builder", "LoweringError", "NotPolynomial", "Translator", "Value"]
