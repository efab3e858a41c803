"""Integers that depend on the free axes: expressions, `int`s that carry one, and a solver for the others."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import sys
from collections.abc import Callable, Sequence

Sizes = dict[str, int]


class Expr:
    """An integer that depends on the free axes. Compare with `==` (structural); evaluate with `evaluate`."""

    def evaluate(self, sizes: Sizes) -> int:
        """The value at `sizes`, a dict from axis name to size."""
        raise NotImplementedError


Dim = int | Expr


@dataclasses.dataclass(frozen=True)
class Axis(Expr):
    """A free axis, by its public name, with the range of sizes it may take (`maximum` None: no limit)."""

    name: str
    minimum: int = 1
    maximum: int | None = None

    def evaluate(self, sizes):
        return sizes[self.name]

    def __str__(self):
        return self.name


@dataclasses.dataclass(frozen=True)
class Polynomial(Expr):
    """`constant + Σ coefficient · Π atoms`; an atom is an `Axis` or a `Quotient`.

    `terms` maps a sorted tuple of atoms to its coefficient, as a tuple of pairs: `2·B·T - 1` is
    `Polynomial((((B, T), 2),), -1)`.
    """

    terms: tuple[tuple[tuple[Expr, ...], int], ...]
    constant: int = 0

    def evaluate(self, sizes):
        total = self.constant
        for atoms, coefficient in self.terms:
            product = coefficient
            for atom in atoms:
                product *= atom.evaluate(sizes)
            total += product
        return total

    def __str__(self):
        parts = []
        for atoms, coefficient in self.terms:
            text = "*".join(str(atom) for atom in atoms)
            sign = "-" if coefficient < 0 else "+"
            parts.append(f"{sign} {text}" if abs(coefficient) == 1 else f"{sign} {abs(coefficient)}*{text}")
        if self.constant:
            parts.append(f"{'-' if self.constant < 0 else '+'} {abs(self.constant)}")
        return " ".join(parts).removeprefix("+ ")


@dataclasses.dataclass(frozen=True)
class Quotient(Expr):
    """`numerator // divisor` (rounded down) or, with `remainder=True`, `numerator % divisor`; divisor > 0."""

    numerator: Expr
    divisor: int
    remainder: bool = False

    def evaluate(self, sizes):
        value = self.numerator.evaluate(sizes)
        return value % self.divisor if self.remainder else value // self.divisor

    def __str__(self):
        return f"({self.numerator}) {'%' if self.remainder else '//'} {self.divisor}"


def evaluate(dim: Dim, sizes: Sizes) -> int:
    """The integer that `dim` is at `sizes`."""
    return dim.evaluate(sizes) if isinstance(dim, Expr) else int(dim)


def axes_of(dim: Dim) -> set[Axis]:
    """The free axes that `dim` depends on."""
    if isinstance(dim, Axis):
        return {dim}
    if isinstance(dim, Quotient):
        return axes_of(dim.numerator)
    if isinstance(dim, Polynomial):
        return set().union(*(axes_of(atom) for atoms, _ in dim.terms for atom in atoms))
    return set()


def add(a: Dim, b: Dim) -> Dim:
    """Sum in lowest terms."""
    terms = dict(_terms(a))
    for atoms, coefficient in _terms(b):
        terms[atoms] = terms.get(atoms, 0) + coefficient
    return _polynomial(terms, _constant(a) + _constant(b))


def multiply(a: Dim, b: Dim) -> Dim:
    """Product in lowest terms."""
    terms: dict[tuple[Expr, ...], int] = {}
    left = [*_terms(a), ((), _constant(a))]
    right = [*_terms(b), ((), _constant(b))]
    for (atoms_a, x), (atoms_b, y) in itertools.product(left, right):
        atoms = tuple(sorted(atoms_a + atoms_b, key=str))
        terms[atoms] = terms.get(atoms, 0) + x * y
    return _polynomial(terms, terms.pop((), 0))


def floor_divide(a: Dim, divisor: int) -> Dim:
    """Quotient rounded down, for a positive divisor."""
    if isinstance(a, Expr):
        coefficients = [coefficient for _, coefficient in _terms(a)]
        if all(coefficient % divisor == 0 for coefficient in coefficients):
            terms = {atoms: coefficient // divisor for atoms, coefficient in _terms(a)}
            return _polynomial(terms, _constant(a) // divisor)
        return Quotient(a, divisor)
    return int(a) // divisor


def modulo(a: Dim, divisor: int) -> Dim:
    """Remainder, for a positive divisor."""
    if isinstance(a, Expr):
        if all(coefficient % divisor == 0 for _, coefficient in _terms(a)):
            return _constant(a) % divisor
        return Quotient(a, divisor, remainder=True)
    return int(a) % divisor


def _terms(dim: Dim) -> tuple[tuple[tuple[Expr, ...], int], ...]:
    if isinstance(dim, Polynomial):
        return dim.terms
    return (((dim,), 1),) if isinstance(dim, Expr) else ()


def _constant(dim: Dim) -> int:
    if isinstance(dim, Polynomial):
        return dim.constant
    return 0 if isinstance(dim, Expr) else int(dim)


def _polynomial(terms: dict[tuple[Expr, ...], int], constant: int) -> Dim:
    kept = sorted(((a, c) for a, c in terms.items() if c), key=lambda term: [str(atom) for atom in term[0]])
    if not kept:
        return constant
    if len(kept) == 1 and constant == 0 and kept[0][1] == 1 and len(kept[0][0]) == 1:
        return kept[0][0][0]
    return Polynomial(tuple(kept), constant)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A comparison of sizes in layer code: another outcome at another size would mean another model.

    `sure` is False if an operand is an axis only by the look of its size, which may be a coincidence.
    """

    operator: Callable[[int, int], bool]
    left: Dim
    right: Dim
    outcome: bool
    source: str
    sure: bool = True

    def __str__(self):
        sign = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}[self.operator.__name__]
        return f"{self.left} {sign} {self.right}"


class SizedInt(int):
    """An `int` that knows which expression of the free axes it is, through arithmetic, and notes comparisons.

    Where the expression is lost (`int(n)`, NumPy) a plain integer is left, which `solve` finds again.
    """

    # Keras asks numbers for their type by `getattr(x, "dtype", type(x))`, and knows no subclass of int.
    dtype = int

    def __new__(
        cls, value: int, expr: Dim, note: Callable[[Comparison], None] = lambda comparison: None, sure: bool = True
    ):
        self = super().__new__(cls, value)
        self.expr = expr
        self.note = note
        self.sure = sure
        return self

    def _with(self, value: int, expr: Dim, other: int = 0) -> int:
        return SizedInt(value, expr, self.note, self._sure_with(other)) if isinstance(expr, Expr) else value

    def _sure_with(self, other) -> bool:
        return self.sure and getattr(other, "sure", True)

    def __add__(self, other):
        if type(other) not in (int, SizedInt):
            return super().__add__(other)
        return self._with(int(self) + int(other), add(self.expr, expr_of(other)), other)

    __radd__ = __add__

    def __neg__(self):
        return self._with(-int(self), multiply(self.expr, -1))

    def __sub__(self, other):
        return self + -other if type(other) in (int, SizedInt) else super().__sub__(other)

    def __rsub__(self, other):
        return -self + other if type(other) is int else super().__rsub__(other)

    def __mul__(self, other):
        if type(other) not in (int, SizedInt):
            return super().__mul__(other)
        return self._with(int(self) * int(other), multiply(self.expr, expr_of(other)), other)

    __rmul__ = __mul__

    def __floordiv__(self, other):
        if type(other) is not int or other <= 0:
            return super().__floordiv__(other)
        return self._with(int(self) // other, floor_divide(self.expr, other))

    def __mod__(self, other):
        if type(other) is not int or other <= 0:
            return super().__mod__(other)
        return self._with(int(self) % other, modulo(self.expr, other))

    def __divmod__(self, other):
        return self // other, self % other

    def __abs__(self):
        return -self if self._compare(operator.lt, 0) else self

    def __bool__(self):
        return self._compare(operator.ne, 0)

    def __lt__(self, other):
        return self._compare(operator.lt, other)

    def __le__(self, other):
        return self._compare(operator.le, other)

    def __gt__(self, other):
        return self._compare(operator.gt, other)

    def __ge__(self, other):
        return self._compare(operator.ge, other)

    def __eq__(self, other):
        return self._compare(operator.eq, other)

    def __ne__(self, other):
        return self._compare(operator.ne, other)

    __hash__ = int.__hash__

    def _compare(self, compare, other):
        outcome = compare(int(self), int(other) if isinstance(other, int) else other)
        if type(other) in (int, SizedInt):
            frame = sys._getframe(2)
            source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self.note(Comparison(compare, self.expr, expr_of(other), outcome, source, self._sure_with(other)))
        return outcome


def expr_of(value: int) -> Dim:
    """The expression that an integer carries, or the integer itself."""
    return value.expr if isinstance(value, SizedInt) else int(value)


def counterexample(comparison: Comparison, limit: int = 4096) -> Sizes | None:
    """Sizes within the axes' ranges at which `comparison` has the other outcome; None if there are none.

    A single axis is tried at every size up to `limit`; of several axes, combinations of some sizes. Beyond, sizes
    around the numbers that are compared with, and very large ones.
    """
    axes = sorted(axes_of(comparison.left) | axes_of(comparison.right), key=lambda axis: axis.name)
    numbers = {number for number in _numbers(comparison.left) | _numbers(comparison.right) if number > 1}
    numbers |= {a * b for a, b in itertools.combinations(numbers, 2)}
    choices = []
    for axis in axes:
        sizes = range(axis.minimum, axis.minimum + limit + 1)
        if len(axes) > 1:
            apart = {size + number for size in sizes[:2] for number in numbers}
            sizes = {*sizes[:5], *sizes[:40:7], *sizes[:: limit // 8], *apart}
        around = {number + shift for number in numbers for shift in (-1, 0, 1)}
        tried = {*sizes, *around, 10**5, 10**6, 2**31, axis.maximum or axis.minimum}
        choices.append(sorted(n for n in tried if axis.minimum <= n <= (axis.maximum or n)))
    for combination in itertools.product(*choices):
        sizes = {axis.name: size for axis, size in zip(axes, combination, strict=True)}
        left, right = evaluate(comparison.left, sizes), evaluate(comparison.right, sizes)
        if comparison.operator(left, right) != comparison.outcome:
            return sizes
    return None


def _numbers(dim: Dim) -> set[int]:
    """The numbers, without their signs, in an expression."""
    if isinstance(dim, Quotient):
        return {dim.divisor} | _numbers(dim.numerator)
    numbers = {abs(_constant(dim))}
    for atoms, coefficient in _terms(dim):
        numbers |= {abs(coefficient), abs(_constant(dim)) // abs(coefficient)}
        numbers |= set().union(*(_numbers(atom) for atom in atoms if isinstance(atom, Quotient)))
    return numbers


def solve(values: Sequence[int], traces: Sequence[Sizes], axes: Sequence[Axis]) -> Dim | None:
    """The expression that takes `values[i]` at the sizes `traces[i]`; None if there is no single one.

    An expression that the integers carry is taken if it fits everywhere; otherwise one is sought among
    constants, `a·m + c` and `a·m + b·n + c` for products of axes m and n, and `a·((axis + c) // k)`.
    """
    plain = [int(value) for value in values]

    def fits(expr: Dim) -> bool:
        return all(evaluate(expr, sizes) == value for sizes, value in zip(traces, plain, strict=True))

    carried = {expr_of(value) for value in values}
    if len(carried) == 1 and fits(*carried):
        return carried.pop()
    if len(set(plain)) == 1:
        return plain[0]
    for expr in sorted((expr for expr in carried if isinstance(expr, Expr)), key=str):
        if fits(expr):
            return expr
    monomials: list[Dim] = list(axes)
    for degree in (2, 3):
        for atoms in itertools.combinations_with_replacement(axes, degree):
            product: Dim = 1
            for atom in atoms:
                product = multiply(product, atom)
            monomials.append(product)
    for count in (1, 2):
        for support in itertools.combinations(monomials, count):
            expr = _fit_linear(plain, traces, support)
            if expr is not None and fits(expr):
                return expr
    if len(set(plain)) < 3:
        return None
    factor = math.gcd(*plain)
    plain = [value // factor for value in plain]
    quotients = [q for axis in axes for divisor in range(2, 65) for q in _fit_quotients(plain, traces, axis, divisor)]
    return multiply(quotients[0], factor) if len(quotients) == 1 else None


def _fit_linear(values, traces, support) -> Dim | None:
    """Integer coefficients and a constant for `support`, from as many traces as there are unknowns."""
    rows = [[evaluate(monomial, sizes) for monomial in support] for sizes in traces]
    first, first_value = rows[0], values[0]
    differences = [
        ([a - b for a, b in zip(row, first, strict=True)], value - first_value)
        for row, value in zip(rows[1:], values[1:], strict=True)
    ]
    if len(support) == 1:
        pairs = [(row[0], delta) for row, delta in differences if row[0]]
        if not pairs or pairs[0][1] % pairs[0][0]:
            return None
        coefficients = [pairs[0][1] // pairs[0][0]]
    else:
        for (r, x), (s, y) in itertools.combinations(differences, 2):
            determinant = r[0] * s[1] - r[1] * s[0]
            if determinant:
                a, b = x * s[1] - r[1] * y, r[0] * y - x * s[0]
                if a % determinant or b % determinant:
                    return None
                coefficients = [a // determinant, b // determinant]
                break
        else:
            return None
    expr: Dim = first_value - sum(c * m for c, m in zip(coefficients, first, strict=True))
    for coefficient, monomial in zip(coefficients, support, strict=True):
        expr = add(expr, multiply(monomial, coefficient))
    return expr


def _fit_quotients(values, traces, axis, divisor) -> list[Quotient]:
    """Every `(axis + c) // divisor` that fits."""
    offsets = [value * divisor - sizes[axis.name] for value, sizes in zip(values, traces, strict=True)]
    return [Quotient(add(axis, c), divisor) for c in range(max(offsets), min(offsets) + divisor)]
