"""What of a program's arithmetic can fail while it runs; the last argument of each is the place in
the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import counted
from schedlang.language.faults import Fault
from schedlang.language.scopes import LARGEST

if TYPE_CHECKING:
    from fractions import Fraction

#: How many multiples of their unit a sum may be, so that a float still tells one from the next; and
#: how near it is to one then.
_MOST_MULTIPLES = 2**44
_NEAR = 0.25
#: The largest denominator of a number that is no decimal, such as 1.0 / 3.
_MOST_ODD = 10**4

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


def divide(
    left: int | Fraction, right: int | Fraction, location: int
) -> int | Fraction:
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


def multiply(
    left: int | Fraction, right: int | Fraction, location: int
) -> int | Fraction:
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


def steps_of(start: Any, stop: Any, step: int, location: int) -> tuple[Any, Any]:
    """The first number of `start .. stop by step`, and how many there are, or less than 1.

    With a step above 0 they count up from the first number of the range, with one below 0 down from
    its last.
    """
    if step == 0:
        help = "write `by 1` for all numbers of the range, `by -1` for all from its last one down"
        raise Fault("step", "a range by steps of 0 comes to no end", location, help)
    rounds = (stop - start + abs(step) - 1) // abs(step)
    return (start if step > 0 else stop - 1), rounds


def listed(name: str, values: tuple[Any, ...]) -> Callable[[int, int], Any]:
    """A list, as the function of a number and a place in the program that gives its value."""

    def value_of(number: int, location: int) -> Any:
        if not 0 <= number < len(values):
            last = len(values) - 1
            help = (
                f"its values are `{name}[0]` to `{name}[{last}]`"
                if last
                else "it has one value"
            )
            message = (
                f"`{name}[{number}]`: the list has {counted(len(values), 'value')}"
            )
            raise Fault("no-such-value", message, location, help)
        return values[number]

    return value_of


def as_fraction(value: float | Fraction) -> Fraction:
    """A number as a decimal, also a whole one."""
    from fractions import Fraction

    return Fraction(value)


def unit_of(numbers: Iterable[float]) -> int | None:
    """The least n for which some numbers, and so all sums of them, are whole multiples of 1 / n;
    None where a float cannot tell such multiples apart.
    """
    from fractions import Fraction

    unit = 1
    for number in set(numbers):
        # The shortest decimal that is this float is what was written, if that was a decimal.
        fraction = Fraction(repr(float(number)))
        if fraction.denominator > _MOST_MULTIPLES:
            fraction = fraction.limit_denominator(_MOST_ODD)
        unit = lcm(unit, fraction.denominator)
        if float(fraction) != number or unit > _MOST_MULTIPLES:
            return None
    return unit


def exact(value: float, unit: int | None) -> int | Fraction:
    """What the float of a sum would be without rounding, if it is of multiples of 1 / `unit`.

    Of 0.1 + 0.2, which is 0.30000000000000004, it is 3/10. Where that cannot be said, since the
    numbers have too many digits, it is the float itself.
    """
    from fractions import Fraction

    if unit is None or abs(value) * unit > _MOST_MULTIPLES:
        return as_number(Fraction(value))
    multiple = round(value * unit)
    # Rounding makes a small part of one multiple; a share of an overlap is none.
    is_near = abs(value * unit - multiple) < _NEAR
    return as_number(Fraction(multiple, unit) if is_near else Fraction(value))


def as_number(value: Fraction) -> int | Fraction:
    """A number as a whole one, if it is one."""
    return value.numerator if value.denominator == 1 else value


def require(holds: int, reason: str | None, location: int) -> None:
    """`require holds, reason`."""
    if not holds:
        raise Fault(
            "require",
            f"the schedule requires: {reason}"
            if reason
            else "a requirement does not hold",
            location,
        )
