"""Expressions of the free axes, and the solver that finds them from sizes seen in several traces."""

from __future__ import annotations

import dataclasses


class Expr:
    """An integer that depends on the free axes. Compare with `==` (structural); evaluate with `evaluate`."""

    def evaluate(self, sizes: dict[str, int]) -> int:
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
    `Polynomial(((  (B, T), 2),), -1)`.
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
