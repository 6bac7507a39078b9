"""Numbers that depend on n.

A program is proved for microbatches = base + period * n, for all n from 0 on. Every number that it
computes is then `constant + by_n * n`; within a loop whose rounds grow with n, `+ by_round * k` for
round k. A question about such a number may have different answers for different n or k: a
comparison that changes, a division whose remainder changes. Then an exception says which base,
period or loop would give one answer, and the program runs again with that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from fractions import Fraction
from math import ceil, floor, gcd
from typing import Any, NamedTuple

from attrs import frozen

from schedlang.language.arithmetic import listed

Number = int | Fraction


class Undecided(Exception):
    """A question has different answers for different n or rounds."""


class NeedsBase(Undecided):
    """The answer is the same for all n from `least` on: a larger base helps."""

    def __init__(self, least: int) -> None:
        super().__init__(least)
        self.least = least


#: Within a `settled` block: for each answer so far, the n from which on it holds.
_HELD_FROM: ContextVar[list[int] | None] = ContextVar("_HELD_FROM", default=None)


@contextmanager
def settled() -> Iterator[None]:
    """Within this block, questions get the answer that holds for all large n. At the end, NeedsBase
    with the n from which on all these answers hold, unless that is 0. This is so also if the block
    failed: an error that follows from an answer for large n says nothing of smaller n.
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
    """Note that an answer holds for all n from `least` on. Outside a `settled` block, raise
    NeedsBase.
    """
    held_from = _HELD_FROM.get()
    if held_from is None:
        raise NeedsBase(least)
    held_from.append(least)


class NeedsPeriod(Undecided):
    """The answer is the same for all n if the period is `factor` times as long."""

    def __init__(self, factor: int) -> None:
        super().__init__(factor)
        self.factor = factor


class NeedsUnrolling(Undecided):
    """The answer is the same in all rounds if `factor` rounds of the loop are taken as one."""

    def __init__(self, loop: Loop, factor: int) -> None:
        super().__init__(loop, factor)
        self.loop = loop
        self.factor = factor


class NeedsSplit(Undecided):
    """The answer is the same in all rounds before round `at`, and in all from there on."""

    def __init__(self, loop: Loop, at: Linear | int) -> None:
        super().__init__(loop, at)
        self.loop = loop
        self.at = at


class NotLinear(Exception):
    """A number or a program is of a kind that this prover does not handle. `location` is an index
    into the program's spans, if the place is known.
    """

    def __init__(self, message: str, location: int | None = None) -> None:
        super().__init__(message)
        self.location = location


class Searched(NotLinear):
    """The order is the result of a search, so it does not follow from the text."""


class Affine(NamedTuple):
    """`constant + by_n * n + by_round * k`: a number of an order, for all n and for all rounds k of
    its piece. Two are equal if their coefficients are.
    """

    constant: Any
    by_n: Any = 0
    by_round: Any = 0

    def __add__(self, other: Affine | Number) -> Affine:  # type: ignore[override]
        if not isinstance(other, Affine):
            return Affine(self.constant + other, self.by_n, self.by_round)
        constant, by_n, by_round = other
        return Affine(
            self.constant + constant, self.by_n + by_n, self.by_round + by_round
        )

    def __sub__(self, other: Affine | Number) -> Affine:
        return self + -other

    def __neg__(self) -> Affine:
        return self * -1

    def __mul__(self, factor: Number) -> Affine:  # type: ignore[override]
        return Affine(
            self.constant * factor, self.by_n * factor, self.by_round * factor
        )

    def over(self, divisor: int) -> Affine:
        """The quotient by a number, rounded down; NeedsPeriod where its remainder depends on n."""
        if self.by_n % divisor:
            raise NeedsPeriod(abs(divisor) // gcd(int(self.by_n), divisor))
        return Affine(self.constant // divisor, self.by_n // divisor)

    def at(self, n: int, round: int = 0) -> Any:
        """The value at some n and round."""
        return self.constant + self.by_n * n + self.by_round * round

    def in_round(self, k: Affine) -> Affine:
        """The value in round `k`, which may depend on n, and on the round of another piece."""
        slope = self.by_round
        return Affine(
            self.constant + slope * k.constant,
            self.by_n + slope * k.by_n,
            slope * k.by_round,
        )

    @property
    def growth(self) -> tuple[Any, Any]:
        """A key by which numbers are sorted whose order is the same for all n."""
        return self.by_n, self.constant

    @property
    def is_negative(self) -> bool:
        """Whether a number that depends on n alone is below 0 for all n; NeedsBase if it changes
        its sign.
        """
        constant, by_n, _ = self
        if constant < 0 and by_n <= 0:
            return True
        if constant >= 0 and by_n >= 0:
            return False
        crossing = -Fraction(constant) / Fraction(by_n)
        # The first n from which on the sign does not change.
        holds_from(ceil(crossing) if by_n > 0 else floor(crossing) + 1)
        return bool(by_n < 0)


ZERO = Affine(0)
#: The number of rounds of a piece that does not repeat.
ONCE = Affine(1)


@frozen(eq=False)
class Loop:
    """A loop, or a part of one, whose number of `rounds` grows with n, from 1 or more."""

    rounds: Linear
    key: Any = None


@frozen(eq=False)
class Linear:
    """`constant + by_n * n + by_round * k`, where k is the round of `loop`."""

    constant: Number
    by_n: Number = 0
    by_round: Number = 0
    loop: Loop | None = None

    def __repr__(self) -> str:
        rounds = f" + {self.by_round}k" if self.by_round else ""
        return f"({self.constant} + {self.by_n}n{rounds})"

    @property
    def parts(self) -> Affine:
        """Its coefficients."""
        return Affine(self.constant, self.by_n, self.by_round)

    # Arithmetic

    def __add__(self, other: Any) -> Any:
        other = linear(other)
        return _in_loop(self.parts + other.parts, _common(self, other))

    __radd__ = __add__

    def __neg__(self) -> Any:
        return _in_loop(-self.parts, self.loop)

    def __pos__(self) -> Any:
        return self

    def __sub__(self, other: Any) -> Any:
        return self + -other

    def __rsub__(self, other: Any) -> Any:
        return other + -self

    def __mul__(self, other: Any) -> Any:
        if isinstance(other, Linear):
            raise NotLinear("a product of two numbers that depend on `microbatches`")
        return _in_loop(self.parts * other, self.loop)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Any:
        self._divides(other)
        # The other coefficients are divisible.
        by_round = self.by_round // other
        return number(self.constant // other, self.by_n // other, by_round, self.loop)

    def __mod__(self, other: Any) -> Any:
        self._divides(other)
        return self.constant % other

    def __rfloordiv__(self, other: Any) -> Any:
        if other == 0:
            return 0
        # From some n on, the divisor is larger than the number.
        if self > abs(other) or self < -abs(other):
            return 0 if (other > 0) == (self > 0) else -1
        raise NotLinear("a number divided by one that depends on `microbatches`")

    def __rmod__(self, other: Any) -> Any:
        return other - self.__rfloordiv__(other) * self

    def _divides(self, divisor: Any) -> None:
        """Raise an exception unless the remainder is the same for all n and rounds."""
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
    """A number as a `Linear`."""
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
    """The number with these coefficients: a plain one if it depends on neither n nor the round."""
    if not by_n and not by_round:
        return constant
    return Linear(constant, by_n, by_round, loop if by_round else None)


def _in_loop(parts: Affine, loop: Loop | None = None) -> Any:
    """The number with these coefficients."""
    return number(parts.constant, parts.by_n, parts.by_round, loop)


def listed_for_all(name: str, values: tuple[Any, ...]) -> Any:
    """A list of the program; its index must not depend on n."""
    of_number = listed(name, values)

    def value_of(number: Any, location: int) -> Any:
        if isinstance(number, Linear):
            raise NotLinear(
                f"`{name}[…]` of a number that depends on `microbatches`", location
            )
        return of_number(number, location)

    return value_of


def _common(one: Linear, other: Linear) -> Loop | None:
    """The loop of two numbers; NotLinear if they are of two loops."""
    loops = {id(each.loop): each.loop for each in (one, other) if each.loop}
    if len(loops) > 1:
        raise NotLinear(
            "a loop with a growing number of rounds stands within another one"
        )
    return next(iter(loops.values()), None)


def is_negative(value: Any) -> bool:
    """Whether a number is below 0 for all n and rounds of its loop; Undecided if that differs."""
    of = linear(value)
    first = of.parts.in_round(ZERO)
    if not of.by_round:
        return first.is_negative
    assert of.loop
    # The number is linear in the round: if its first and last values have one sign, all have.
    last = of.loop.rounds - 1
    if first.is_negative == is_negative(_in_loop(first) + of.by_round * last):
        return first.is_negative
    # The sign changes in between; find the round at which it does.
    step = int(of.by_round) if of.by_round > 0 else -int(of.by_round)
    rounds = first.over(step)
    raise NeedsSplit(of.loop, _in_loop(-rounds if of.by_round > 0 else rounds + 1))
