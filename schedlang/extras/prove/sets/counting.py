"""Counts how many instances of one op precede each instance of another op on its rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import islpy as isl
from attrs import frozen

from schedlang.extras.prove.sets.isl_functions import (
    count,
    everywhere,
    number,
    points,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import (
    BASE,
    Number,
    Unreadable,
    multiple_of_base,
    of_number,
)

#: The symbol of the rank.
RANK = "_r"
#: A place in a rank's order: positions of statements (numbers) and variables of loops (symbols or
#: functions of symbols), compared lexicographically.
Order = tuple[int | str | isl.PwAff, ...]


@frozen(eq=False)
class Many:
    """The instances of an op: its condition on the symbols `indices`, its place in the order, and
    its stage if only ops of the same stage are counted.
    """

    where: isl.Set
    indices: tuple[str, ...]
    order: Order
    stage: isl.PwAff | None = None


def how_many_before(one: Many, others: Many, base: str = BASE) -> Number:
    """How many instances of `others` precede each instance of `one` on its rank, of the same stage
    if both have one. Products of sizes are counted in the base. Unreadable if that is impossible.
    """
    names = {name: f"{name}_" for name in others.indices if name != RANK}
    # The points of one condition are counted: an instance of `one`, and the instances of `others`
    # before it. For F in `for m in 0 .. 4`, before B in the same loop:
    #
    #     B in round m    F in rounds m_ of 0 .. 4 with m_ < m, or m_ = m:     m + 1 of them
    together = one.where & renamed(others.where, names)
    if one.stage is not None and others.stage is not None:
        together = together & renamed_function(others.stage, names).eq_set(one.stage)
    total = of_number(0)
    for case in _before(others.order, one.order, names):
        counted = _how_many(together & case, [*names.values()], base)
        if counted is None:
            raise Unreadable("instances that cannot be counted")
        total = total.plus(counted)
    return total


def _how_many(condition: isl.Set, names: Sequence[str], base: str) -> Number | None:
    """How many values of some symbols satisfy a condition; None if they cannot be counted."""
    if condition.is_empty():
        return of_number(0)
    names = list(names)
    for name in [*names]:
        # A symbol with one value for each value of the others does not change the count.
        if len(names) > 1 and _is_single(condition, name):
            condition = without(condition, [name])
            names.remove(name)
    if not names:
        return Number(_or_zero(number(1).intersect_domain(condition)))
    if len(names) == 1:
        counted = count(condition, names[0])
        return None if counted is None else Number(counted)
    if len(names) == 2:
        # Rows of one length form a rectangle; either symbol may number the rows.
        for outer, inner in (names, names[::-1]):
            rows = _of_rows(condition, outer, inner, base)
            if rows is not None:
                return rows
    return None


def _of_rows(condition: isl.Set, outer: str, inner: str, base: str) -> Number | None:
    """How many pairs of values of two symbols satisfy a condition. The pairs form rows, one for
    each value of `outer`. They are counted if all rows have the same length, a multiple of the base
    plus a constant, or there is only one row; else None.
    """
    in_row = count(condition, inner)
    if in_row is None:
        return None
    total = of_number(0)
    rows_of = in_row.intersect_domain(without(condition, [inner])).coalesce()
    for case, of_row in _parts(rows_of):
        if _is_single(case, outer):
            values = without(case & symbol("_many").eq_set(of_row), [outer])
            only = points(values, ["_many"]).dim_min(0)
            total = total.plus(Number(_or_zero(only)))
            continue
        multiple = multiple_of_base(of_row, case, base)
        rows = count(case, outer)
        if multiple is None or rows is None:
            return None
        _, bases, more = multiple
        low = rows.scale_val(isl.Val(more))
        total = total.plus(Number(low, rows.scale_val(isl.Val(bases)), base))
    return total


def _parts(function: isl.PwAff) -> Iterator[tuple[isl.Set, isl.PwAff]]:
    """The convex parts of a function's domain, with the function on each."""
    for where, value in function.get_pieces():
        for part in where.make_disjoint().get_basic_sets():
            yield isl.Set.from_basic_set(part), isl.PwAff.from_aff(value)


def _or_zero(function: isl.PwAff) -> isl.PwAff:
    """The function, with 0 where it has no value."""
    return function.union_add(
        number(0).intersect_domain(function.domain().complement())
    )


def _is_single(condition: isl.Set, name: str) -> bool:
    """Whether a symbol has at most one value for each value of the others."""
    values = points(condition, [name])
    if values.is_empty():
        return True
    return bool(values.dim_min(0).lt_set(values.dim_max(0)).is_empty())


def _before(one: Order, other: Order, renamed: Mapping[str, str]) -> list[isl.Set]:
    """The cases in which one place precedes another. The symbols of the first place are renamed."""
    cases = []
    equal = everywhere()
    # Lexicographic: the first entry is less, or equal and the next one is less, and so on.
    for mine, theirs in zip(one, other, strict=False):
        left = entry(mine, renamed)
        right = entry(theirs, {})
        case = equal & left.lt_set(right)
        if not case.is_empty():
            cases.append(case)
        equal = equal & left.eq_set(right)
        if equal.is_empty():
            break
    return cases


def entry(of: int | str | isl.PwAff, names: Mapping[str, str]) -> isl.PwAff:
    """An entry of a place as a function, with some symbols renamed."""
    if isinstance(of, isl.PwAff):
        return renamed_function(of, names)
    return number(of) if isinstance(of, int) else symbol(names.get(of, of))


def renamed(condition: isl.Set, names: Mapping[str, str]) -> isl.Set:
    """The condition with some symbols renamed."""
    for name, other in names.items():
        at = condition.find_dim_by_name(isl.dim_type.param, name)
        if at >= 0:
            condition = condition.set_dim_name(isl.dim_type.param, at, other)
    return condition


def renamed_number(value: Number, names: Mapping[str, str]) -> Number:
    """The number with some symbols renamed."""
    high = None if value.high is None else renamed_function(value.high, names)
    return Number(renamed_function(value.low, names), high, value.base)


def renamed_function(function: isl.PwAff, names: Mapping[str, str]) -> isl.PwAff:
    """The function with some symbols renamed."""
    values = renamed(symbol("_value").eq_set(function), names)
    return isl.PwMultiAff.from_set(points(values, ["_value"])).get_pw_aff(0)
