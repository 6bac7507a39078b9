"""Whole numbers as functions of symbols, with two digits where they grow with a product of sizes.

A program whose microbatches come in groups of `ranks` computes `i / ranks` and `i % ranks`, for an
`i` up to `microbatches`. These are not affine in `i`. But if `i` is written as `high * ranks +
low`, they are `high` and `low`. So such a number is stored as two digits in base `ranks`, each a
quasi-affine function. Two numbers are compared by the sign of their difference `high * ranks +
low`: only for few values of `high` does it depend on `low`, and for each of these it is affine. The
updates of a schedule without a flush are counted in base `microbatches` in the same way.
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
    floor_by,
    merged,
    number,
    simplified,
    symbol,
)

#: The base of numbers with two digits in programs.
BASE = "ranks"
#: The low digit of a microbatch must lie between minus and plus this many times the base.
_MOST_CARRY = 64
#: When numbers are compared, their low digit must lie between minus and plus this many times the
#: base.
_MOST_BASES_OF_LOW = 4096
#: The most that a factor may be, as a multiple of the base.
_MOST_BASES = 6
#: A factor may also be a multiple of the base divided by up to this number.
_MOST_PARTS = 4
#: The most values of the quotient in a division by a number that depends on sizes.
_MOST_CASES = 16


class Unreadable(Exception):
    """Something in the program is not a quasi-affine function, so it is not proved for all sizes.
    `span` is its place; `is_large` says that numbers with two digits may help.
    """

    def __init__(
        self, reason: str, span: Span | None = None, is_large: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.span = span
        #: Whether it may be read where numbers have two digits.
        self.is_large = is_large


#: The limit of isl's operations in one block: some tens of seconds.
_MOST_STEPS = 200_000_000


@contextmanager
def in_time() -> Iterator[None]:
    """Limit isl's operations in this block; Unreadable if it needs more."""
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
    """`high * base + low`, or `low` alone. All numbers of an expression have the same base, a
    size.
    """

    low: isl.PwAff
    high: isl.PwAff | None = None
    base: str = BASE

    def domain(self) -> isl.Set:
        """The condition under which it has a value."""
        return self.low.domain()

    def within(self, where: isl.Set) -> Number:
        """The number on a part of its domain."""
        high = None if self.high is None else self.high.intersect_domain(where)
        return Number(self.low.intersect_domain(where), high, self.base)

    def pieces(self) -> Iterator[tuple[isl.Set, Number]]:
        """The parts of the domain on which both digits are one affine function, each with the
        number there, extended to everywhere.
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
        """The product with a constant."""
        value = isl.Val(factor)
        high = None if self.high is None else self.high.scale_val(value)
        return Number(self.low.scale_val(value), high, self.base)

    def minus(self, other: Number) -> Number:
        """The difference."""
        return self.plus(other.times(-1))

    def carries(self) -> Iterator[tuple[isl.Set, int]]:
        """For each case, how many times the low digit contains the base; Unreadable if there are
        too many.
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
        """Where it is less than a constant."""
        low = self.low.sub(_like(self.low, value))
        if self.high is None:
            return low.lt_set(_like(low, 0))
        base = _base(low, self.base)
        zero = _like(low, 0)
        carry = self.least_carry(low)
        rest = self.domain()
        result = isl.Set.empty(rest.get_space())
        # Case by case of the low digit, from the least: where it contains the base `carry` times,
        # the number is below 0 if and only if `high < -carry`.
        while True:
            # On all of `rest`, the low digit is at least `carry` times the base.
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
        """A lower bound of the low digit, in multiples of the base; Unreadable if it has none."""
        base = _base(low, self.base)
        carry = 0
        while not low.lt_set(base.scale_val(isl.Val(carry))).is_empty():
            carry = 2 * carry - 1
            if carry < -_MOST_BASES_OF_LOW:
                raise self.too_large()
        return carry

    def too_large(self) -> Unreadable:
        """The error for a low digit that is not bounded by a multiple of the base."""
        return Unreadable(f"a number of several powers of `{self.base}`")

    def equals(self, value: int) -> isl.Set:
        """Where it equals a constant."""
        if self.high is None:
            return self.low.eq_set(_like(self.low, value))
        return self.is_below(value + 1) - self.is_below(value)


def under(one: Number, other: Number, where: isl.Set) -> isl.Set:
    """Where the condition `where` holds and `one < other`."""
    if one.high is None and other.high is None:
        return where & one.low.lt_set(other.low)
    return one.minus(other).within(where).is_below(0)


def same(one: Number, other: Number, where: isl.Set) -> isl.Set:
    """Where the condition `where` holds and the numbers are equal."""
    if one.high is None and other.high is None:
        return where & one.low.eq_set(other.low)
    return one.minus(other).within(where).equals(0)


def between(low: Number, value: Number, stop: Number, where: isl.Set) -> isl.Set:
    """Where the condition `where` holds and `low <= value < stop`."""
    return under(value, stop, where) - under(value, low, where)


def of_number(value: int) -> Number:
    """A constant."""
    return Number(number(value))


def of_symbol(name: str) -> Number:
    """The value of a symbol."""
    return Number(symbol(name))


def base_of(numbers: Sequence[Number]) -> str:
    """The base of those that have two digits; BASE if none has."""
    return next((each.base for each in numbers if each.high is not None), BASE)


def union(pieces: Sequence[Number]) -> Number:
    """One number from several with disjoint domains."""
    lows = [piece.low for piece in pieces]
    if all(piece.high is None for piece in pieces):
        return Number(joined(lows))
    highs = [
        _like(p.low, 0).intersect_domain(p.domain()) if p.high is None else p.high
        for p in pieces
    ]
    return Number(joined(lows), joined(highs), base_of(pieces))


def joined(pieces: Sequence[isl.PwAff]) -> isl.PwAff:
    """One function from several with disjoint domains."""
    result = pieces[0]
    for piece in pieces[1:]:
        result = result.union_add(piece)
    return result.coalesce()


def least(values: Sequence[Number], where: isl.Set) -> Number:
    """The minimum of some numbers."""
    result = values[0]
    for value in values[1:]:
        if result.high is None and value.high is None:
            result = Number(result.low.min(value.low))
        else:
            less = under(value, result, where)
            result = _either(less, value, result, where)
    return result


def most(values: Sequence[Number], where: isl.Set) -> Number:
    """The maximum of some numbers."""
    return least([value.times(-1) for value in values], where).times(-1)


def _either(holds: isl.Set, then: Number, otherwise: Number, where: isl.Set) -> Number:
    parts = [(holds, then), (where - holds, otherwise)]
    pieces = [value.within(case) for case, value in parts if not case.is_empty()]
    return folded(union(pieces), where) if pieces else then


def folded(value: Number, where: isl.Set) -> Number:
    """The number with one digit, where the high digit is constant."""
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
    """The number in fewer pieces: a piece on which another one has the same values joins that
    one.
    """
    if value.high is None:
        return Number(simplified(value.low))
    pieces = merged(value.pieces(), _are_one)
    return union([part.within(where) for where, part in pieces])


def _are_one(one: Number, other: Number, where: isl.Set) -> bool:
    """Whether two numbers are known to be equal wherever a condition holds."""
    try:
        return bool(where.is_subset(same(one, other, where)))
    except Unreadable:
        return False


def plain(value: Number, where: isl.Set) -> isl.PwAff:
    """The number as a function; Unreadable if it needs two digits."""
    one = folded(value, where)
    if one.high is not None:
        raise Unreadable("a number that is as large as a product of sizes")
    return one.low


def known(value: Number, where: isl.Set) -> int | None:
    """The value of a number that is constant on a set; None if it is not, 0 if the set is empty."""
    if value.high is not None:
        value = folded(value, where)
    return None if value.high is not None else constant(value.low, where)


def product(one: Number, other: Number, where: isl.Set) -> Number | None:
    """The product of two numbers; None if it cannot be written as a number."""
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
    # One factor has few values: case by case.
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


#: `parts` times a number is `bases` times the base plus `more`: these three.
Multiple = tuple[int, int, int]


def _multiples(
    value: Number, where: isl.Set
) -> Iterator[tuple[isl.Set, Multiple | None]]:
    """For each case of a number, what multiple of the base it is; None where it is none."""
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
    """A function as a multiple of the base plus a constant, maybe divided by up to `most`; None if
    it is not of this form.
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
    """A number of one digit times a number that is a multiple of the base."""
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
    """The quotient by a positive number, rounded down; None if it cannot be written as a number."""
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
            # The remainder of `high` goes to the low digit, times the base, before that is divided.
            lows.append(floor_by(low, divisor).intersect_domain(case))
    return Number(joined(lows), high, value.base)


def _over_bases(value: Number, bases: int, where: isl.Set) -> Number | None:
    """The quotient by a multiple of the base."""
    carry = _by_cases(Number(value.low), of_symbol(value.base), where)
    if carry is None:
        return None
    whole = carry.low if value.high is None else value.high.add(carry.low)
    return Number(floor_by(whole, bases))


def _by_cases(value: Number, divisor: Number, where: isl.Set) -> Number | None:
    """The quotient, case by case for each of its values; None if there are too many."""
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
    """Both digits of a number, with the low one from 0 to below the base. Unreadable if the low one
    is too many times the base.
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
    """The symbol of the high digit that belongs to the symbol of a low digit."""
    return f"{index}_row"


def _like(function: isl.PwAff, value: int) -> isl.PwAff:
    """A constant on the space of another function."""
    local = isl.LocalSpace.from_space(function.get_domain_space())
    return isl.PwAff.from_aff(
        isl.Aff.zero_on_domain(local).set_constant_val(isl.Val(value))
    )


def _base(function: isl.PwAff, base: str) -> isl.PwAff:
    """The base on the space of another function."""
    return _base_at(function.dim(isl.dim_type.in_), base)


@cache
def _base_at(width: int, base: str) -> isl.PwAff:
    if not width:
        return symbol(base)
    points = ", ".join(f"x{at}" for at in range(width))
    return isl.PwAff(f"[{base}] -> {{ [{points}] -> [({base})] }}")
