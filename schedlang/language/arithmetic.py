"""What of a program's arithmetic can fail while it runs; the last argument of each is the place in
the program.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import counted
from schedlang.language.faults import Fault
from schedlang.language.scopes import LARGEST

if TYPE_CHECKING:
    from fractions import Fraction

_NOT_ZERO = "where it may be 0, say what is then: `if n > 0 then m / n else 0`"


@lru_cache
def decimal(text: str) -> Fraction:
    """A decimal number exactly, as a fraction; a float would be rounded."""
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
    """`left / right` in programs with decimals: rounded down if both sides are whole, and else
    exact.
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
    """`left * right`, if the product is not too large. Repeated squaring is the one way to grow
    numbers without bound.
    """
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
    """The first number of `start .. stop by step`, and how many numbers there are; less than 1 for
    none.

    A step above 0 counts up from the first number of the range, a step below 0 down from its last.
    """
    if step == 0:
        help = "write `by 1` for all numbers of the range, `by -1` for all from its last one down"
        raise Fault("step", "a range by steps of 0 comes to no end", location, help)
    rounds = (stop - start + abs(step) - 1) // abs(step)
    return (start if step > 0 else stop - 1), rounds


def listed(name: str, values: tuple[Any, ...]) -> Callable[[int, int], Any]:
    """A list of a program as a function, of an index and a place in the program."""

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
