"""Dimensions of the graph: integers, or polynomials with integer coefficients over named symbols.

A constant polynomial is always a plain int, so ``==`` between dimensions means equality for every size
of the symbols. The text form is "B*S + 1", which the graph core reads.
"""

from __future__ import annotations

from typing import Dict, Iterable, Mapping, Tuple, Union

import sympy

Monomial = Tuple[str, ...]  # sorted symbol names; the empty tuple is the constant term
Dim = Union[int, "Poly"]


class NotPolynomial(Exception):
    """A size that is not a polynomial with integer coefficients, such as S // 2 or max(S, 4)."""


class Poly:
    """A polynomial that is not constant. Arithmetic on `symbol(...)` makes it; it is immutable."""

    __slots__ = ("terms", "_hash")

    def __init__(self, terms: Mapping[Monomial, int]):
        self.terms: Dict[Monomial, int] = dict(terms)
        self._hash = hash(frozenset(self.terms.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Poly) and self.terms == other.terms

    def __add__(self, other: Dim) -> Dim:
        terms = dict(self.terms)
        for monomial, coefficient in _terms(other).items():
            terms[monomial] = terms.get(monomial, 0) + coefficient
        return _make(terms)

    __radd__ = __add__

    def __neg__(self) -> Dim:
        return _make({monomial: -coefficient for monomial, coefficient in self.terms.items()})

    def __sub__(self, other: Dim) -> Dim:
        return self + -other

    def __rsub__(self, other: Dim) -> Dim:
        return -self + other

    def __mul__(self, other: Dim) -> Dim:
        terms: Dict[Monomial, int] = {}
        for left, a in self.terms.items():
            for right, b in _terms(other).items():
                monomial = tuple(sorted(left + right))
                terms[monomial] = terms.get(monomial, 0) + a * b
        return _make(terms)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return text(self)


def symbol(name: str) -> Poly:
    return Poly({(name,): 1})


def _terms(dim: Dim) -> Mapping[Monomial, int]:
    return dim.terms if isinstance(dim, Poly) else {(): dim}


def _make(terms: Mapping[Monomial, int]) -> Dim:
    terms = {monomial: coefficient for monomial, coefficient in terms.items() if coefficient}
    if not terms:
        return 0
    if len(terms) == 1 and () in terms:
        return terms[()]
    return Poly(terms)


def _order(monomial: Monomial) -> Tuple[int, Monomial]:
    return (len(monomial), monomial)


def product(dims: Iterable[Dim]) -> Dim:
    result: Dim = 1
    for dim in dims:
        result = result * dim
    return result


def divide(a: Dim, b: Dim) -> Dim:
    """Returns the exact quotient. Raises NotPolynomial if there is a remainder."""
    if isinstance(a, int) and isinstance(b, int):
        if b == 0 or a % b:
            raise NotPolynomial(f"{a} / {b}")
        return a // b
    if b == 0:
        raise NotPolynomial(f"{text(a)} / 0")
    divisor = _terms(b)
    lead = max(divisor, key=_order)
    quotient: Dim = 0
    rest = a
    while rest != 0:
        terms = _terms(rest)
        top = max(terms, key=_order)
        factor = _quotient_of_monomials(top, lead)
        if factor is None or terms[top] % divisor[lead]:
            raise NotPolynomial(f"({text(a)}) / ({text(b)})")
        step = _make({factor: terms[top] // divisor[lead]})
        quotient = quotient + step
        rest = rest - step * b
    return quotient


def _quotient_of_monomials(a: Monomial, b: Monomial) -> Union[Monomial, None]:
    rest = list(a)
    for name in b:
        if name not in rest:
            return None
        rest.remove(name)
    return tuple(rest)


def text(dim: Dim) -> str:
    """Returns "B*S + 1", highest degree first, so that equal dimensions have equal texts."""
    if isinstance(dim, int):
        return str(dim)
    pieces = []
    for monomial in sorted(dim.terms, key=lambda m: (-len(m), m)):
        coefficient = dim.terms[monomial]
        sign = "-" if coefficient < 0 else "+"
        factors = list(monomial)
        if abs(coefficient) != 1 or not factors:
            factors.insert(0, str(abs(coefficient)))
        pieces.append((sign, "*".join(factors)))
    first_sign, first = pieces[0]
    result = ("-" if first_sign == "-" else "") + first
    for sign, piece in pieces[1:]:
        result += f" {sign} {piece}"
    return result


def json_form(dim: Dim) -> Union[int, str]:
    return dim if isinstance(dim, int) else text(dim)


def evaluate(dim: Dim, sizes: Mapping[str, int]) -> int:
    total = 0
    for monomial, coefficient in _terms(dim).items():
        value = coefficient
        for name in monomial:
            value *= sizes[name]
        total += value
    return total


class Translator:
    """Translates sizes of PyTorch's symbolic shapes (sympy expressions) to dimensions.

    `names` maps a sympy symbol to the graph's name for it; several may share one name.
    """

    def __init__(self, names: Mapping[sympy.Symbol, str]):
        self._names = names
        self._cache: Dict[sympy.Expr, Dim] = {}

    def dim(self, size: object) -> Dim:
        """Returns the dimension of `size`, an int or a torch.SymInt."""
        if isinstance(size, int) and not isinstance(size, bool):
            return size
        node = getattr(size, "node", None)
        if node is None:
            raise NotPolynomial(repr(size))
        return self.expression(node.expr)

    def shape(self, sizes: Iterable[object]) -> Tuple[Dim, ...]:
        return tuple(self.dim(size) for size in sizes)

    def expression(self, expr: sympy.Expr) -> Dim:
        found = self._cache.get(expr)
        if found is None:
            found = self._cache[expr] = self._convert(expr)
        return found

    def _convert(self, expr: sympy.Expr) -> Dim:
        if expr.is_Integer or expr.is_Float and expr == int(expr):
            return int(expr)
        if expr.is_Symbol:
            name = self._names.get(expr)
            if name is None:
                raise NotPolynomial(f"{expr} is not the size of an input axis")
            return symbol(name)
        if expr.is_Add:
            return sum((self.expression(arg) for arg in expr.args), 0)
        if expr.is_Mul:
            return product(self.expression(arg) for arg in expr.args)
        if expr.is_Pow and expr.exp.is_Integer and expr.exp >= 0:
            return product([self.expression(expr.base)] * int(expr.exp))
        if type(expr).__name__ == "ToFloat":
            return self.expression(expr.args[0])
        if type(expr).__name__ in ("FloorDiv", "CleanDiv", "IntTrueDiv") and len(expr.args) == 2:
            return divide(self.expression(expr.args[0]), self.expression(expr.args[1]))
        raise NotPolynomial(str(expr))
