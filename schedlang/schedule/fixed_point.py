"""Decimals as whole numbers of a small part of their unit.

Programs, options and files give times and memory in decimals, and of these floats hold hardly any:
0.1 + 0.2 is a little more than 0.3 there, and what is a sum of many is off by more. So whatever is
added up is counted in parts of which all that is given is a multiple: of 0.1, 0.25 and 3 these are
twentieths. Floats add whole numbers exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from fractions import Fraction

#: The largest count that a float tells from its neighbours, also as a quotient by a denominator.
_MOST = 2**50


@frozen
class FixedPoint:
    """Numbers that are multiples of 1 / `denominator`. It is None if they have no common
    denominator for which floats have room.
    """

    denominator: int | None

    @property
    def scale(self) -> int:
        """The factor from numbers to counts."""
        return self.denominator or 1

    def counts(self, numbers: ArrayLike) -> NDArray[Any]:
        """Numbers as multiples of 1 / `denominator`; without one, unchanged."""
        values = np.asarray(numbers, np.float64)
        if self.scale == 1:
            return values
        return np.asarray(np.rint(values * self.scale))

    def numbers(self, counts: NDArray[Any]) -> NDArray[Any]:
        """The numbers that counts stand for, each as the nearest float."""
        return counts if self.scale == 1 else counts / self.scale

    def difference(self, earlier: float, later: float) -> float:
        """How much larger a number is than another one."""
        return float(self.numbers(self.counts(later) - self.counts(earlier)))

    def total(self, starts: ArrayLike, ends: ArrayLike) -> float:
        """How long it is from each start to its end, together."""
        counts = self.counts(ends) - self.counts(starts)
        # One after the other, as ranks work: `sum` rounds in another way from Python 3.12 on.
        return float(self.numbers(np.cumsum(np.append(0.0, counts))[-1]))

    def is_exact(self, number: float) -> bool:
        """Whether it is known which number a float stands for."""
        return self.denominator is not None and abs(number) * self.scale <= _MOST

    def exact(self, number: float) -> int | Fraction:
        """The number that a float stands for; if that is not known, the float."""
        if number.is_integer() and self.scale == 1:
            return int(number)
        # Only decimals need it, and it takes a while to load.
        from fractions import Fraction

        if not self.is_exact(number):
            return as_number(Fraction(number))
        return as_number(Fraction(round(number * self.scale), self.scale))


#: Whole numbers, and numbers of which nothing is known.
WHOLE = FixedPoint(1)
ANY = FixedPoint(None)


def fixed_point(given: Iterable[float | Fraction]) -> FixedPoint:
    """The common denominator of some numbers, and so of all their sums."""
    numbers: set[Any] = set(given)
    denominator = 1
    if any(number != number // 1 for number in numbers):
        for number in numbers:
            denominator = lcm(denominator, meant(number).denominator)
            if denominator > _MOST:
                return ANY
    largest = max(map(abs, numbers), default=0)
    return FixedPoint(denominator) if largest * denominator <= _MOST else ANY


@lru_cache(1024)
def meant(number: float | Fraction) -> Fraction:
    """The number that a float stands for: the shortest decimal that reads as this float."""
    from fractions import Fraction

    is_float = isinstance(number, float)
    return Fraction(repr(float(number)) if is_float else number)


def half(number: float | Fraction) -> float | Fraction:
    """Half of the number that a float stands for."""
    return number / 2 if number == number // 1 else meant(number) / 2


def as_float(number: float | Fraction) -> float | Fraction:
    """An exact number as a float, if the float stands for it."""
    nearest = float(number)
    # Only decimals need to be looked at.
    is_same = nearest == number or meant(nearest) == number
    return nearest if is_same else number


def as_number(value: Fraction) -> int | Fraction:
    """A number as a whole one, if it is one."""
    return value.numerator if value.denominator == 1 else value
