"""Names for symbolic sizes, and what a trace assumed about them."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import sympy
import torch

from . import dims
from .dims import Dim, NotPolynomial, Translator


class Symbols:
    """Names for the symbolic sizes of the inputs' axes.

    PyTorch gives each axis its own symbol unless the forward compared them. Symbols on the same axis of
    different inputs with the same size in this call get one name (the batch of input_ids and of
    attention_mask), unless one input has both as different axes. This assumes more than the trace did.
    Leaf shapes express the assumption, and a call that breaks it is captured separately.
    """

    def __init__(self, inputs: Sequence[Tuple[int, torch.Tensor]], examples: Sequence[Any]):
        self.names: Dict[sympy.Symbol, str] = {}
        self.sources: List[Tuple[str, Tuple[int, int]]] = []
        self._shape_env: Any = None
        found: List[Tuple[sympy.Symbol, int, int, int]] = []  # symbol, position, axis, size
        together: Dict[sympy.Symbol, set] = {}
        for position, tensor in inputs:
            here = []
            for axis, size in enumerate(tensor.shape):
                if not isinstance(size, torch.SymInt):
                    continue
                self._shape_env = size.node.shape_env
                expr = size.node.expr
                if expr.is_Symbol:
                    here.append(expr)
                    found.append((expr, position, axis, examples[position].shape[axis]))
            for expr in here:
                together.setdefault(expr, set()).update(here)
        for expr, position, axis, size in found:
            if expr in self.names:
                continue
            name = self._same_axis(expr, axis, size, found, together)
            if name is None:
                name = self._new_name(axis)
                self.sources.append((name, (position, axis)))
            self.names[expr] = name

    def _same_axis(
        self,
        expr: sympy.Symbol,
        axis: int,
        size: int,
        found: Sequence[Tuple],
        together: Dict[sympy.Symbol, set],
    ) -> Optional[str]:
        for other, _, other_axis, other_size in found:
            name = self.names.get(other)
            if name is None or other_axis != axis or other_size != size:
                continue
            if not any(self.names.get(e) == name for e in together[expr]):
                return name
        return None

    def _new_name(self, axis: int) -> str:
        taken = {name for name, _ in self.sources}
        if axis == 0 and "B" not in taken:
            return "B"
        if "S" not in taken:
            return "S"
        count = 2
        while f"D{count}" in taken:
            count += 1
        return f"D{count}"

    def relations(
        self,
        translator: Translator,
        limits: Sequence[Tuple[Any, int, int]],
        at_least_zero: Sequence[Dim],
    ) -> Tuple[sympy.Expr, ...]:
        """Returns the assumptions of the trace about sizes that the graph's shapes do not already express.

        Further assumptions: `limits`, (size, lowest, highest), and dimensions `at_least_zero`.
        """
        if self._shape_env is None or not self.names:
            return ()
        plain = {
            symbol: sympy.Symbol(name, integer=True, positive=True)
            for symbol, name in self.names.items()
        }
        kept: List[sympy.Expr] = []
        assumed = [guard.expr for guard in self._shape_env.guards]
        for size, low, high in limits:
            if isinstance(size, torch.SymInt):
                assumed += [sympy.Ge(size.node.expr, low), sympy.Le(size.node.expr, high)]
        for relation in assumed:
            if isinstance(relation, sympy.Rel) and _holds_always(relation, translator):
                continue
            relation = self._shape_env.replace(relation).xreplace(plain)
            if relation == sympy.true:
                continue
            if relation not in kept:
                kept.append(relation)
        for symbol, low, high in self._ranges():
            if high is not None:
                kept.append(sympy.Le(plain[symbol], high))
            if low > 2:
                kept.append(sympy.Ge(plain[symbol], low))
        named = {name: symbol for symbol, name in zip(plain.values(), self.names.values())}
        for dim in at_least_zero:
            if not _at_least_one(dim + 1):
                terms = dim.terms.items() if isinstance(dim, dims.Poly) else [((), dim)]
                value = sum(c * sympy.prod([named[n] for n in m]) for m, c in terms)
                kept.append(sympy.Ge(value, 0))
        return tuple(kept)

    def _ranges(self) -> Iterator[Tuple[sympy.Symbol, int, Optional[int]]]:
        ranges = getattr(self._shape_env, "var_to_range", {})
        for symbol in self.names:
            bounds = ranges.get(symbol)
            if bounds is None:
                continue
            high = int(bounds.upper) if bounds.upper.is_Integer else None
            if high is not None and high >= 1 << 61:
                high = None
            low = int(bounds.lower) if bounds.lower.is_Integer else 2
            yield symbol, low, high


def _holds_always(relation: sympy.Rel, translator: Translator) -> bool:
    """Returns True for relations that hold for all sizes of at least 2."""
    try:
        left, right = translator.expression(relation.lhs), translator.expression(relation.rhs)
    except NotPolynomial:
        return False
    difference = left - right
    if difference == 0:
        return relation.rel_op in ("==", "<=", ">=")
    if isinstance(difference, int):
        return bool(relation.func(difference, 0))
    if not isinstance(difference, int) and relation.rel_op in ("!=", ">", ">="):
        return _at_least_one(difference)
    return relation.rel_op in ("<", "<=") and _at_least_one(-difference)


def _at_least_one(difference: Dim) -> bool:
    """Returns whether the polynomial is positive if every symbol is at least 2."""
    if isinstance(difference, int):
        return difference >= 1
    rising = [c for monomial, c in difference.terms.items() if monomial]
    if any(c < 0 for c in rising):
        return False
    names = {name for monomial in difference.terms for name in monomial}
    return dims.evaluate(difference, {name: 2 for name in names}) >= 1
