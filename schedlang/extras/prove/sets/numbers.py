"""Whole numbers as functions of symbols, in the base of a size where they grow with a product of
sizes.

A program whose microbatches come in groups of `ranks` computes with numbers such as `i / ranks` and
`i % ranks`, for an `i` up to `microbatches`. No function of these is affine; but of `i` written as
`high * ranks + low`, quotient and rest are `high` and `low`. So such a number is kept as its two
digits, each of them a quasi-affine function: what compares two of them is a question of their
difference, `high * ranks + low`, which is affine for each of the few values that `high` has where
`low` may turn the scale. What a schedule without a flush does in all its updates, it counts in base
`microbatches` in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

import islpy as isl
from attrs import frozen
from islpy import DEFAULT_CONTEXT

from schedlang.diagnostics.source import Span
from schedlang.extras.prove.sets.isl_functions import (
    constant,
    equalities,
    floor_by,
    number,
    simplified,
    symbol,
)

#: The base of numbers with two digits, as programs have them.
BASE = "ranks"
#: The low digit of a microbatch is less than so many times the base, up or down from 0,
_MOST_CARRY = 64
#: and that of any number.
_MOST_BASES_OF_LOW = 4096
#: A factor is so many times the base at most.
_MOST_BASES = 6
#: Of a factor that is no multiple of `ranks`, so many times it is.
_MOST_PARTS = 4
#: What the quotient of a division by a number that depends on sizes may be at most.
_MOST_CASES = 16


class Unreadable(Exception):
    """What no quasi-affine function says, and so is not proved for every size."""

    def __init__(
        self, reason: str, span: Span | None = None, is_large: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.span = span
        #: Whether it may be read where numbers have two digits.
        self.is_large = is_large


#: So many steps isl makes for one question at most: some tens of seconds.
_MOST_STEPS = 200_000_000


@contextmanager
def in_time() -> Iterator[None]:
    """Within this, isl takes so many steps and no more: Unreadable if they do not do."""
    DEFAULT_CONTEXT.reset_operations()
    DEFAULT_CONTEXT.set_max_operations(_MOST_STEPS)
    try:
        yield
    except isl.Error as error:
        if "maximal number of operations" not in str(error):
            raise
        raise Unreadable(
            "its sets have too many cases to be looked at in time"
        ) from None
    finally:
        DEFAULT_CONTEXT.set_max_operations(0)


@frozen(eq=False)
class Number:
    """`high * base + low`; without a `high` it is `low`, which all is that is affine. The base is a
    size, the same for all numbers that come together.
    """

    low: isl.PwAff
    high: isl.PwAff | None = None
    base: str = BASE

    def domain(self) -> isl.Set:
        """Where it has a value."""
        return self.low.domain()

    def within(self, where: isl.Set) -> Number:
        """The same number, of some part of its domain only."""
        high = None if self.high is None else self.high.intersect_domain(where)
        return Number(self.low.intersect_domain(where), high, self.base)

    def pieces(self) -> Iterator[tuple[isl.Set, Number]]:
        """The parts of its domain in which both digits are one affine function, with these, which
        are defined everywhere.
        """
        highs = [] if self.high is None else self.high.get_pieces()
        for where, low in self.low.get_pieces():
            of_low = isl.PwAff.from_aff(low)
            if self.high is None:
                yield where, Number(of_low)
            for there, high in highs:
                both = where & there
                if not both.is_empty():
                    yield (
                        both.coalesce(),
                        Number(of_low, isl.PwAff.from_aff(high), self.base),
                    )

    def plus(self, other: Number) -> Number:
        """The sum."""
        if self.high is None or other.high is None:
            high = self.high if other.high is None else other.high
            if high is not None:
                high = high.intersect_domain(self.domain() & other.domain())
        else:
            high = self.high.add(other.high)
        return Number(self.low.add(other.low), high, base_of([self, other]))

    def times(self, factor: int) -> Number:
        """The product with a number that is known."""
        value = isl.Val(factor)
        high = None if self.high is None else self.high.scale_val(value)
        return Number(self.low.scale_val(value), high, self.base)

    def minus(self, other: Number) -> Number:
        """The difference."""
        return self.plus(other.times(-1))

    def carries(self) -> Iterator[tuple[isl.Set, int]]:
        """How many times the base its low digit is, rounded down, by cases; Unreadable where these
        are many.
        """
        rest = self.domain()
        base = _base(self.low, self.base)
        for carry in sorted(range(-_MOST_CARRY, _MOST_CARRY + 1), key=abs):
            first = base.scale_val(isl.Val(carry))
            case = rest & first.le_set(self.low) & self.low.lt_set(first.add(base))
            if not case.is_empty():
                yield case, carry
                rest = rest - case
            if rest.is_empty():
                return
        raise self.too_large()

    def is_below(self, value: int) -> isl.Set:
        """Where it is less than a number."""
        low = self.low.sub(_like(self.low, value))
        if self.high is None:
            return low.lt_set(_like(low, 0))
        base = _base(low, self.base)
        zero = _like(low, 0)
        carry = self.least_carry(low)
        rest = self.domain()
        result = isl.Set.empty(rest.get_space())
        # Case by case of the low digit, from its least: where it has `carry` bases and none more,
        # the number is below 0 just if `high` is below -carry.
        while True:
            # The low digit is `carry` bases or more, in all of the rest.
            rest = rest & self.high.lt_set(_like(low, -carry))
            if rest.is_empty():
                return result.coalesce()
            carry += 1
            is_less = low.sub(base.scale_val(isl.Val(carry))).lt_set(zero)
            result = result | (rest & is_less)
            rest = rest - is_less
            if carry > _MOST_BASES_OF_LOW:
                raise self.too_large()

    def least_carry(self, low: isl.PwAff) -> int:
        """How many bases the low digit is at least; Unreadable where it is no fixed number."""
        base = _base(low, self.base)
        carry = 0
        while not low.lt_set(base.scale_val(isl.Val(carry))).is_empty():
            carry = 2 * carry - 1
            if carry < -_MOST_BASES_OF_LOW:
                raise self.too_large()
        return carry

    def too_large(self) -> Unreadable:
        """What is said where its low digit is not some times the base."""
        return Unreadable(f"a number of several powers of `{self.base}`")

    def equals(self, value: int) -> isl.Set:
        """Where it is a number."""
        if self.high is None:
            return self.low.eq_set(_like(self.low, value))
        return self.is_below(value + 1) - self.is_below(value)


def under(one: Number, other: Number, where: isl.Set) -> isl.Set:
    """Where one number is less than another one, of where a condition holds."""
    if one.high is None and other.high is None:
        return where & one.low.lt_set(other.low)
    return one.minus(other).within(where).is_below(0)


def same(one: Number, other: Number, where: isl.Set) -> isl.Set:
    """Where two numbers are the same one, of where a condition holds."""
    if one.high is None and other.high is None:
        return where & one.low.eq_set(other.low)
    return one.minus(other).within(where).equals(0)


def between(low: Number, value: Number, stop: Number, where: isl.Set) -> isl.Set:
    """Where low <= value < stop, of where a condition holds."""
    return under(value, stop, where) - under(value, low, where)


def of_number(value: int) -> Number:
    """A number that is known."""
    return Number(number(value))


def of_symbol(name: str) -> Number:
    """What a symbol stands for."""
    return Number(symbol(name))


def base_of(numbers: Sequence[Number]) -> str:
    """The base of some numbers that come together: of those that have two digits."""
    return next((each.base for each in numbers if each.high is not None), BASE)


def union(pieces: Sequence[Number]) -> Number:
    """The numbers of several cases, of which no two hold together, as one."""
    lows = [piece.low for piece in pieces]
    if all(piece.high is None for piece in pieces):
        return Number(joined(lows))
    highs = [
        _like(p.low, 0).intersect_domain(p.domain()) if p.high is None else p.high
        for p in pieces
    ]
    return Number(joined(lows), joined(highs), base_of(pieces))


def joined(pieces: Sequence[isl.PwAff]) -> isl.PwAff:
    """The functions of several cases, of which no two hold together, as one."""
    result = pieces[0]
    for piece in pieces[1:]:
        result = result.union_add(piece)
    return result.coalesce()


def least(values: Sequence[Number], where: isl.Set) -> Number:
    """The least of some numbers."""
    result = values[0]
    for value in values[1:]:
        if result.high is None and value.high is None:
            result = Number(result.low.min(value.low))
        else:
            less = under(value, result, where)
            result = _either(less, value, result, where)
    return result


def most(values: Sequence[Number], where: isl.Set) -> Number:
    """The most of some numbers."""
    return least([value.times(-1) for value in values], where).times(-1)


def _either(holds: isl.Set, then: Number, otherwise: Number, where: isl.Set) -> Number:
    parts = [(holds, then), (where - holds, otherwise)]
    pieces = [value.within(case) for case, value in parts if not case.is_empty()]
    return folded(union(pieces), where) if pieces else then


def folded(value: Number, where: isl.Set) -> Number:
    """The same number with one digit, as far as its high one is known."""
    if value.high is None:
        return value
    value = value.within(where)
    assert value.high is not None
    pieces = []
    for case, high in value.high.coalesce().get_pieces():
        if high.is_cst():
            low = value.low.intersect_domain(case)
            times = high.get_constant_val()
            pieces.append(Number(low.add(_base(low, value.base).scale_val(times))))
        else:
            pieces.append(value.within(case))
    return union(pieces) if pieces else Number(value.low)


def simplified_number(value: Number) -> Number:
    """The same number in fewer pieces: one that is the same as another one's on its own part goes
    into that.
    """
    if value.high is None:
        return Number(simplified(value.low))
    merged: list[tuple[isl.Set, Number]] = []
    for where, one in sorted(value.pieces(), key=lambda piece: equalities(piece[0])):
        for place, (there, other) in enumerate(merged):
            if _are_one(one, other, where):
                merged[place] = (there | where, other)
                break
        else:
            merged.append((where, one))
    return union([other.within(there.coalesce()) for there, other in merged])


def _are_one(one: Number, other: Number, where: isl.Set) -> bool:
    """Whether two numbers are known to be the same one wherever a condition holds."""
    try:
        return bool(where.is_subset(same(one, other, where)))
    except Unreadable:
        return False


def plain(value: Number, where: isl.Set) -> isl.PwAff:
    """A number with one digit; Unreadable where it needs two."""
    one = folded(value, where)
    if one.high is not None:
        raise Unreadable("a number that is as large as a product of sizes")
    return one.low


def known(value: Number, where: isl.Set) -> int | None:
    """The one number that it is in all of a set, if it is one; 0 if the set is empty."""
    if value.high is not None:
        value = folded(value, where)
    return None if value.high is not None else constant(value.low, where)


def product(one: Number, other: Number, where: isl.Set) -> Number | None:
    """The product of two numbers; None if it cannot be said."""
    for factor, times in ((one, other), (other, one)):
        value = known(factor, where)
        if value is not None:
            return times.times(value)
    if one.high is not None and other.high is not None:
        return None
    for factor, times in ((one, other), (other, one)):
        if times.high is None:
            pieces = list(_multiples(factor, where))
            if all(piece is not None for _, piece in pieces):
                return union(
                    [
                        _times(times, factor, case, piece)
                        for case, piece in pieces
                        if piece
                    ]
                )
    # A factor of few values.
    for factor, times in ((one, other), (other, one)):
        if factor.high is None:
            values = factor.low.intersect_domain(where).coalesce().get_pieces()
            if all(value.is_cst() for _, value in values):
                whole = [
                    times.times(int(value.get_constant_val().to_python())).within(
                        case & where
                    )
                    for case, value in values
                ]
                return union(whole)
    return None


#: Of a number, how many times it are how many bases, and how much more.
Multiple = tuple[int, int, int]


def _multiples(
    value: Number, where: isl.Set
) -> Iterator[tuple[isl.Set, Multiple | None]]:
    """A number by cases, in each of which it is a known multiple of the base and a known number, or
    a known part of them; None where it is neither.
    """
    value = value.within(where)
    if value.high is not None:
        value = folded(value, where)
        if value.high is not None:
            yield where, None
            return
    for case, _ in value.low.coalesce().get_pieces():
        yield case & where, multiple_of_base(value.low, case & where, BASE, _MOST_PARTS)


def multiple_of_base(
    value: isl.PwAff, where: isl.Set, base_name: str, most: int = 1
) -> Multiple | None:
    """A function as a known multiple of a base and a known number, if it is one; or some times it,
    at `most` so many.
    """
    base = symbol(base_name)
    for parts in range(1, most + 1):
        whole = value.scale_val(isl.Val(parts))
        for bases in sorted(range(-_MOST_BASES, _MOST_BASES + 1), key=abs):
            more = constant(whole.sub(base.scale_val(isl.Val(bases))), where)
            if more is not None:
                return parts, bases, more
    return None


def _times(factor: Number, value: Number, where: isl.Set, multiple: Multiple) -> Number:
    """A number of one digit times one that is a known multiple of the base."""
    parts, bases, more = multiple
    wholes = floor_by(factor.low, parts)
    rest = factor.low.sub(wholes.scale_val(isl.Val(parts)))
    low = wholes.scale_val(isl.Val(more)).intersect_domain(where)
    if parts > 1:
        left = [
            plain(value, where).scale_val(isl.Val(count)).intersect_domain(case)
            for count in range(parts)
            for case in [where & rest.eq_set(number(count))]
            if not case.is_empty()
        ]
        low = low.add(joined(left))
    high = wholes.scale_val(isl.Val(bases)).intersect_domain(where)
    return Number(low, high if bases else None)


def quotient(value: Number, divisor: Number, where: isl.Set) -> Number | None:
    """A number divided by one that is positive, rounded down; None if it cannot be said."""
    factor = known(divisor, where)
    if factor is not None:
        return _over_known(value, factor, where)
    if not under(divisor, of_number(1), where).is_empty():
        return None
    value = value.within(where)
    pieces = []
    for case, multiple in _multiples(divisor, where):
        if case.is_empty():
            continue
        by_bases = None
        if multiple is not None and multiple[0] == 1 and multiple[2] == 0:
            by_bases = _over_bases(value.within(case), multiple[1], case)
        if by_bases is None:
            by_bases = _by_cases(value.within(case), divisor.within(case), case)
        if by_bases is None:
            return None
        pieces.append(by_bases)
    return union(pieces)


def _over_known(value: Number, divisor: int, where: isl.Set) -> Number:
    if value.high is None:
        return Number(floor_by(value.low, divisor))
    if divisor < 0:
        value = value.times(-1)
        divisor = -divisor
    value = value.within(where)
    assert value.high is not None
    high = floor_by(value.high, divisor)
    rest = value.high.sub(high.scale_val(isl.Val(divisor)))
    lows = []
    for count in range(divisor):
        case = where & rest.eq_set(number(count))
        if not case.is_empty():
            low = value.low.add(symbol(value.base).scale_val(isl.Val(count)))
            # What `high` leaves over is that many bases more in the low digit, before this is
            # divided.
            lows.append(floor_by(low, divisor).intersect_domain(case))
    return Number(joined(lows), high, value.base)


def _over_bases(value: Number, bases: int, where: isl.Set) -> Number | None:
    """A number divided by some multiple of the base."""
    carry = _by_cases(Number(value.low), of_symbol(value.base), where)
    if carry is None:
        return None
    whole = carry.low if value.high is None else value.high.add(carry.low)
    return Number(floor_by(whole, bases))


def _by_cases(value: Number, divisor: Number, where: isl.Set) -> Number | None:
    """A quotient by cases of what comes out, if these are few."""
    rest = where & value.domain() & divisor.domain()
    pieces = []
    for result in sorted(range(-_MOST_CASES, _MOST_CASES), key=abs):
        low = divisor.times(result)
        case = between(low, value, low.plus(divisor), rest)
        if case.is_empty():
            continue
        pieces.append(number(result).intersect_domain(case))
        rest = (rest - case).coalesce()
        if rest.is_empty():
            return Number(joined(pieces))
    return None


def digits(value: Number, where: isl.Set) -> tuple[isl.PwAff, isl.PwAff]:
    """The high and the low digit of a number, of which the low one is from 0 to below the base.
    Unreadable where the low one is too many times the base.
    """
    value = value.within(where)
    if value.domain().is_empty():
        return value.low, value.low
    highs = []
    lows = []
    for case, carry in value.carries():
        whole = _base(value.low, value.base).scale_val(isl.Val(carry))
        lows.append(value.low.sub(whole).intersect_domain(case))
        more = _like(value.low, carry)
        highs.append(
            (more if value.high is None else value.high.add(more)).intersect_domain(
                case
            )
        )
    return joined(highs), joined(lows)


def row_of(index: str) -> str:
    """The symbol of the high digit of what has a symbol for its low one."""
    return f"{index}_row"


def _like(function: isl.PwAff, value: int) -> isl.PwAff:
    """A number as a function of what another function is of."""
    local = isl.LocalSpace.from_space(function.get_domain_space())
    return isl.PwAff.from_aff(
        isl.Aff.zero_on_domain(local).set_constant_val(isl.Val(value))
    )


def _base(function: isl.PwAff, base: str) -> isl.PwAff:
    """A base as a function of what another function is of."""
    return _base_at(function.dim(isl.dim_type.in_), base)


@cache
def _base_at(width: int, base: str) -> isl.PwAff:
    if not width:
        return symbol(base)
    points = ", ".join(f"x{at}" for at in range(width))
    return isl.PwAff(f"[{base}] -> {{ [{points}] -> [({base})] }}")
