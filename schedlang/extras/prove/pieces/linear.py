"""Numbers that depend on n, of which all is known that holds for every n from 0 on.

A program is proved for microbatches = base + period * n. What it works out is then, for some base
and period, `constant + by_n * n`; within a loop that has more rounds the larger n is, the number of
the round comes in as well. Where such a number would have no one value for all n (a comparison that
changes, a division with a rest that changes), there is none for this base, period and loop: an
exception says which would do, and the program runs again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from math import ceil, floor, gcd
from typing import Any

from attrs import frozen

from schedlang.language.arithmetic import listed

Number = int | Fraction


class Undecided(Exception):
    """What is asked has not one answer for all n."""


class NeedsBase(Undecided):
    """It has one from so many n on."""

    def __init__(self, least: int) -> None:
        super().__init__(least)
        self.least = least


#: From which n on each answer holds that was given in a `settled` block, where there is one.
_HELD_FROM: ContextVar[list[int] | None] = ContextVar("_HELD_FROM", default=None)


@contextmanager
def settled() -> Iterator[None]:
    """What is asked within is answered as it is for all large n. NeedsBase at the end, from which
    n on all the answers hold, whatever came of them, unless they hold for every n.
    """
    held_from = [0]
    token = _HELD_FROM.set(held_from)
    try:
        yield
    except Exception as error:
        if max(held_from):
            raise NeedsBase(max(held_from)) from error
        raise
    finally:
        _HELD_FROM.reset(token)
    if max(held_from):
        raise NeedsBase(max(held_from))


def holds_from(least: int) -> None:
    """An answer holds from so many n on: that is kept in mind, or NeedsBase."""
    held_from = _HELD_FROM.get()
    if held_from is None:
        raise NeedsBase(least)
    held_from.append(least)


class NeedsPeriod(Undecided):
    """It has one where the period is so many times as long."""

    def __init__(self, factor: int) -> None:
        super().__init__(factor)
        self.factor = factor


class NeedsUnrolling(Undecided):
    """It has one where so many rounds of a loop are taken as one."""

    def __init__(self, loop: Loop, factor: int) -> None:
        super().__init__(loop, factor)
        self.loop = loop
        self.factor = factor


class NeedsSplit(Undecided):
    """It has one before a round of a loop, and one from there on."""

    def __init__(self, loop: Loop, at: Linear | int) -> None:
        super().__init__(loop, at)
        self.loop = loop
        self.at = at


class NotLinear(Exception):
    """A number of the program is of no such kind, or a program of no kind that can be proved; its
    place, as an index into the program's spans, where there is one.
    """

    def __init__(self, message: str, location: int | None = None) -> None:
        super().__init__(message)
        self.location = location


class Searched(NotLinear):
    """The order does not follow from the text: a search makes it."""


@frozen(eq=False)
class Loop:
    """A loop, or a part of one, with `rounds` of them: 1 or more, and more the larger n is."""

    rounds: Linear
    key: Any = None


@frozen(eq=False)
class Linear:
    """`constant + by_n * n + by_round * k`, where k counts the rounds of a loop."""

    constant: Number
    by_n: Number = 0
    by_round: Number = 0
    loop: Loop | None = None

    def __repr__(self) -> str:
        rounds = f" + {self.by_round}k" if self.by_round else ""
        return f"({self.constant} + {self.by_n}n{rounds})"

    def at(self, n: int, round: int = 0) -> Number:
        """The number for some n and round."""
        return self.constant + self.by_n * n + self.by_round * round

    @property
    def parts(self) -> tuple[Number, Number, Number]:
        """Its three numbers: two of them are the same for all n and k if these are."""
        return self.constant, self.by_n, self.by_round

    # Arithmetic

    def __add__(self, other: Any) -> Any:
        other = linear(other)
        loop = _common(self, other)
        return number(
            self.constant + other.constant,
            self.by_n + other.by_n,
            self.by_round + other.by_round,
            loop,
        )

    __radd__ = __add__

    def __neg__(self) -> Any:
        return number(-self.constant, -self.by_n, -self.by_round, self.loop)

    def __pos__(self) -> Any:
        return self

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return other + -self

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Linear):
            raise NotLinear("a product of two numbers that depend on `microbatches`")
        return number(
            self.constant * other, self.by_n * other, self.by_round * other, self.loop
        )

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        self._divides(other)
        # Only the constant has a rest: the others divide.
        by_round = self.by_round // other
        return number(self.constant // other, self.by_n // other, by_round, self.loop)

    def __mod__(self, other: Any) -> Any:
        self._divides(other)
        return self.constant % other

    def __rfloordiv__(self, other: Any) -> Any:
        if other == 0:
            return 0
        # From some n on the divisor is the larger number.
        if self > abs(other) or self < -abs(other):
            return 0 if (other > 0) == (self > 0) else -1
        raise NotLinear("a number divided by one that depends on `microbatches`")

    def __rmod__(self, other: Any) -> Any:
        return other - self.__rfloordiv__(other) * self

    def _divides(self, divisor: Any) -> None:
        """Whether the rest of a division is one for all n and rounds."""
        if isinstance(divisor, Linear):
            raise NotLinear("a number divided by one that depends on `microbatches`")
        if any(not isinstance(part, int) for part in (*self.parts, divisor)):
            raise NotLinear("a division with decimals that depends on `microbatches`")
        if self.by_round % divisor:
            assert self.loop
            raise NeedsUnrolling(
                self.loop, abs(divisor) // gcd(int(self.by_round), divisor)
            )
        if self.by_n % divisor:
            raise NeedsPeriod(abs(divisor) // gcd(int(self.by_n), divisor))

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __int__(self) -> int:
        raise NotLinear("a number that depends on `microbatches` stands where none can")

    __index__ = __int__
    __float__ = __int__

    # Comparisons

    def __lt__(self, other: Any) -> bool:
        return is_negative(self - other)

    def __le__(self, other: Any) -> bool:
        return not is_negative(other - self)

    def __gt__(self, other: Any) -> bool:
        return is_negative(other - self)

    def __ge__(self, other: Any) -> bool:
        return not is_negative(self - other)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Linear | int | Fraction):
            return False
        return not is_negative(self - other) and not is_negative(other - self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __bool__(self) -> bool:
        return self != 0

    __hash__ = None  # type: ignore[assignment]


def linear(value: Any) -> Linear:
    """A number as one that might depend on n."""
    if isinstance(value, Linear):
        return value
    if isinstance(value, bool):
        return Linear(int(value))
    if isinstance(value, int | Fraction):
        return Linear(value)
    raise NotLinear(f"a number was expected, not {value!r}")


def number(
    constant: Number, by_n: Number = 0, by_round: Number = 0, loop: Loop | None = None
) -> Any:
    """A number; a plain one if it depends on nothing."""
    if not by_n and not by_round:
        return constant
    return Linear(constant, by_n, by_round, loop if by_round else None)


def listed_for_all(name: str, values: tuple[Any, ...]) -> Any:
    """A list, whose values are asked for by numbers that are the same for all n."""
    of_number = listed(name, values)

    def value_of(number: Any, location: int) -> Any:
        if isinstance(number, Linear):
            raise NotLinear(
                f"`{name}[…]` of a number that depends on `microbatches`", location
            )
        return of_number(number, location)

    return value_of


def _common(one: Linear, other: Linear) -> Loop | None:
    """The loop of two numbers."""
    loops = {id(each.loop): each.loop for each in (one, other) if each.loop}
    if len(loops) > 1:
        raise NotLinear(
            "a loop with a growing number of rounds stands within another one"
        )
    return next(iter(loops.values()), None)


def is_negative(value: Any) -> bool:
    """Whether a number is less than 0, for all n, and all rounds of its loop; Undecided where it is
    for some and not for others.
    """
    value = linear(value)
    if not value.by_round:
        return _is_negative(value.constant, value.by_n)
    assert value.loop
    # A number that grows by steps is below 0 everywhere or nowhere, if it is so at both ends.
    last = value.loop.rounds - 1
    first = _is_negative(value.constant, value.by_n)
    if first == is_negative(number(value.constant, value.by_n) + value.by_round * last):
        return first
    # It changes on the way: at the first round at which it is as at the last.
    step = abs(value.by_round)
    if value.by_n % step:
        raise NeedsPeriod(int(step // gcd(int(value.by_n), int(step))))
    quotient = number(value.constant // step, value.by_n // step)
    raise NeedsSplit(value.loop, -quotient if value.by_round > 0 else quotient + 1)


def _is_negative(constant: Number, by_n: Number) -> bool:
    if constant < 0 and by_n <= 0:
        return True
    if constant >= 0 and by_n >= 0:
        return False
    crossing = -Fraction(constant) / Fraction(by_n)
    # The first n from which on it is as it stays.
    holds_from(ceil(crossing) if by_n > 0 else floor(crossing) + 1)
    return by_n < 0
