"""Closed forms of index and mask tensors, known while a graph is being lowered.

Models build causal masks from arange, comparisons and gathers. Their closed form, as a function of an element's index
i = (i0, i1, ...), shows that a mask is "key <= query" and needs no memory, or that a gather only moves axes.

    Affine     integer tensor: constant + sum of coefficient[axis] * i[axis]
    Predicate  bool tensor: every atom (Affine) is >= 0, and every value of `rest` is true
               (`rest`: bool values of the graph that broadcast to the tensor's shape)

An axis of size 1 never has a coefficient (its index is 0), so broadcasting keeps a form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional, Sequence, Tuple

from .dims import Dim


@dataclass(frozen=True)
class Affine:
    constant: Dim
    coefficients: Tuple[Tuple[int, Dim], ...] = ()  # (axis, coefficient != 0), by axis

    @staticmethod
    def make(constant: Dim, coefficients: dict) -> "Affine":
        kept = tuple(sorted((axis, c) for axis, c in coefficients.items() if c != 0))
        return Affine(constant, kept)

    @property
    def is_constant(self) -> bool:
        return not self.coefficients

    @property
    def is_non_negative(self) -> bool:
        """True if no element can be negative, for any sizes."""
        if not isinstance(self.constant, int) or self.constant < 0:
            return False
        return all(isinstance(c, int) and c > 0 for _, c in self.coefficients)

    def plus(self, other: "Affine", sign: int = 1) -> "Affine":
        coefficients = dict(self.coefficients)
        for axis, c in other.coefficients:
            coefficients[axis] = coefficients.get(axis, 0) + sign * c
        return Affine.make(self.constant + sign * other.constant, coefficients)

    def times(self, factor: Dim) -> "Affine":
        return Affine.make(self.constant * factor, {a: c * factor for a, c in self.coefficients})

    def move(self, axis_of: Callable[[int], int]) -> "Affine":
        return Affine.make(self.constant, {axis_of(a): c for a, c in self.coefficients})

    def slice(self, start: Sequence[Dim], step: Sequence[int], shape: Sequence[Dim]) -> "Affine":
        constant = self.constant
        coefficients = {}
        for axis, c in self.coefficients:
            constant = constant + c * start[axis]
            coefficients[axis] = 0 if shape[axis] == 1 else c * step[axis]
        return Affine.make(constant, coefficients)


@dataclass(frozen=True)
class Predicate:
    atoms: frozenset = frozenset()  # Affine forms, each >= 0
    rest: Tuple[Any, ...] = ()  # bool values

    @property
    def constant(self) -> Optional[bool]:
        """True or False if every element has this value, else None."""
        for atom in self.atoms:
            if atom.is_constant and isinstance(atom.constant, int) and atom.constant < 0:
                return False
        return True if not self.atoms and not self.rest else None

    def both(self, other: "Predicate") -> "Predicate":
        rest = self.rest + tuple(v for v in other.rest if v not in self.rest)
        return Predicate(self.atoms | other.atoms, rest)

    def negated(self) -> Optional["Predicate"]:
        if self.constant is not None:
            return FALSE if self.constant else TRUE
        if len(self.atoms) == 1 and not self.rest:
            (atom,) = self.atoms
            return at_least_zero(Affine(-1).plus(atom, -1))
        return None


TRUE = Predicate()
FALSE = Predicate(frozenset([Affine(-1)]))


def at_least_zero(form: Affine) -> Predicate:
    if form.is_constant and isinstance(form.constant, int):
        return TRUE if form.constant >= 0 else FALSE
    if form.is_non_negative:  # an index is never below zero
        return TRUE
    return Predicate(frozenset([form]))


def compare(op: str, a: Affine, b: Affine) -> Optional[Predicate]:
    """Returns the form of `a op b`, or None if it has none."""
    if op in ("le", "lt"):
        return at_least_zero(b.plus(a, -1).plus(Affine(-1 if op == "lt" else 0)))
    if op in ("ge", "gt"):
        return compare("le" if op == "ge" else "lt", b, a)
    difference = a.plus(b, -1)
    if difference.is_constant and isinstance(difference.constant, int):
        return TRUE if (difference.constant == 0) == (op == "eq") else FALSE
    return None


def concatenated(pieces: Sequence[Affine], sizes: Sequence[Dim], axis: int) -> Optional[Affine]:
    """Returns one form for all pieces concatenated along `axis`, or None.

    A piece of one element has no slope of its own and takes that of its neighbour.
    """
    slopes = [dict(piece.coefficients).get(axis, 0) for piece, n in zip(pieces, sizes) if n != 1]
    slope = slopes[0] if slopes else 0
    offset: Dim = 0
    result = None
    for piece, size in zip(pieces, sizes):
        coefficients = dict(piece.coefficients)
        if size != 1 and coefficients.get(axis, 0) != slope:
            return None
        coefficients[axis] = slope
        shifted = Affine.make(piece.constant - slope * offset, coefficients)
        if result is not None and shifted != result:
            return None
        result = shifted
        offset = offset + size
    return result
