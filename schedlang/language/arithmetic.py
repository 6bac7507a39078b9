"""What of a program's arithmetic can fail while it runs; the last argument of each is the place in
the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING

from schedlang.language.faults import Fault
from schedlang.language.scopes import LARGEST

if TYPE_CHECKING:
    from fractions import Fraction

#: The most digits behind its point that a cost is looked at with: 1 / this; up to how many
#: multiples of a unit a float tells apart after a long sum; and how near to one such a sum is.
_FINEST = 10**9
_MOST_MULTIPLES = 2**44
_NEAR = 0.25

_NOT_ZERO = "where it may be 0, say what is then: `if n > 0 then m / n else 0`"


@lru_cache
def decimal(text: str) -> Fraction:
    """A decimal number, exactly: a float would be a little more or less than what is written."""
    from fractions import Fraction

    return Fraction(text)


def quotient(left: int, right: int, location: int) -> int:
    """`left / right`, rounded down."""
    if right == 0:
        raise Fault("division-by-zero", "division by zero", location, _NOT_ZERO)
    return left // right


def divide(left: int | Fraction, right: int | Fraction, location: int) -> int | Fraction:
    """`left / right` where there are decimals: rounded down if both sides are whole numbers, and
    else exact.
    """
    if right == 0:
        raise Fault("division-by-zero", "division by zero", location, _NOT_ZERO)
    if isinstance(left, int) and isinstance(right, int):
        return left // right
    return _short(as_fraction(left) / right, location)


def rest(left: int, right: int, location: int) -> int:
    """`left % right`, with the sign of `right`."""
    if right == 0:
        raise Fault("division-by-zero", "division by zero", location, _NOT_ZERO)
    return left % right


def multiply(left: int | Fraction, right: int | Fraction, location: int) -> int | Fraction:
    """`left * right`; repeated squaring is the one way to grow numbers without bound."""
    if not (-LARGEST <= left <= LARGEST and -LARGEST <= right <= LARGEST):
        raise Fault("too-large", "a number grows beyond 10^18", location)
    return _short(left * right, location)


def _short(value: int | Fraction, location: int) -> int | Fraction:
    """A number, if it has not grown too many digits behind its point."""
    # A whole number has the denominator 1.
    if int(value.denominator) > LARGEST:
        raise Fault("too-large", "a number grows to more than 18 decimals", location)
    return value


def as_fraction(value: float | Fraction) -> Fraction:
    """A number as a decimal, also a whole one."""
    from fractions import Fraction

    return Fraction(value)


def exact(value: float, parts: Callable[[], Iterable[float]]) -> int | Fraction:
    """What the float of a sum would be without rounding, by all the numbers that it is a sum of,
    each any number of times.

    Of 0.1 + 0.2, which is 0.30000000000000004, it is 3/10. Where that cannot be said, since the
    numbers have too many digits, it is the float itself.
    """
    if value.is_integer():
        return int(value)
    from fractions import Fraction

    # All sums of numbers are whole multiples of what all the numbers are multiples of.
    unit = 1
    for part in set(parts()):
        fraction = Fraction(part).limit_denominator(_FINEST)
        unit = lcm(unit, fraction.denominator)
        if float(fraction) != part or abs(value) * unit > _MOST_MULTIPLES:
            return Fraction(value)
    multiple = round(value * unit)
    # Rounding makes a small part of one multiple; a share of an overlap is none.
    is_near = abs(value * unit - multiple) < _NEAR
    return as_number(Fraction(multiple, unit)) if is_near else Fraction(value)


def as_number(value: Fraction) -> int | Fraction:
    """A number as a whole one, if it is one."""
    return value.numerator if value.denominator == 1 else value


def require(holds: int, reason: str | None, location: int) -> None:
    """`require holds, reason`."""
    if not holds:
        raise Fault(
            "require",
            f"the schedule requires: {reason}" if reason else "a requirement does not hold",
            location,
        )
