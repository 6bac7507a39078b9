"""How many instances of one op stand before each instance of another one on its rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import islpy as isl
from attrs import frozen

from schedlang.parametric.ranks.symbols import (
    count,
    everywhere,
    number,
    points,
    symbol,
    without,
)

#: The symbol of a rank.
RANK = "_r"
#: The places of statements, as numbers, and the variables of loops, by their symbols.
Order = tuple[int | str, ...]


@frozen(eq=False)
class Many:
    """The instances of an op: where it runs, as a condition of the symbols `indices`, in which
    order, and of which stage, if it counts.
    """

    where: isl.Set
    indices: tuple[str, ...]
    order: Order
    stage: isl.PwAff | None = None


def how_many_before(one: Many, others: Many) -> isl.PwAff | None:
    """How many of others stand before each instance of one on its rank, of its own stage if that
    counts; None where it cannot be said.
    """
    names = {name: f"{name}_" for name in others.indices if name != RANK}
    together = one.where & renamed(others.where, names)
    if one.stage is not None and others.stage is not None:
        together = together & renamed_function(others.stage, names).eq_set(one.stage)
    total = number(0)
    for case in _before(others.order, one.order, names):
        counted = _how_many(together & case, [*names.values()])
        if counted is None:
            return None
        total = total.add(counted)
    return total


def _how_many(condition: isl.Set, names: Sequence[str]) -> isl.PwAff | None:
    """For how many values of some symbols a condition holds; None where it cannot be said."""
    if condition.is_empty():
        return number(0)
    if not names:
        one = number(1).intersect_domain(condition)
        return one.union_add(number(0).intersect_domain(condition.complement()))
    for name in names:
        others = [other for other in names if other != name]
        # The other symbols each have one value, for a value of this one.
        if all(_is_single(condition, other) for other in others):
            counted = count(without(condition, others), name)
            if counted is not None:
                return counted
    return None


def _is_single(condition: isl.Set, name: str) -> bool:
    """Whether a symbol has one value at most, for each value of the others."""
    values = points(condition, [name])
    if values.is_empty():
        return True
    return bool(values.dim_min(0).lt_set(values.dim_max(0)).is_empty())


def _before(one: Order, other: Order, renamed: Mapping[str, str]) -> list[isl.Set]:
    """The cases in which what has one order comes before what has another one; the loops of the
    first have other names.
    """
    cases = []
    equal = everywhere()
    for mine, theirs in zip(one, other, strict=False):
        left = _entry(mine, renamed)
        right = _entry(theirs, {})
        case = equal & left.lt_set(right)
        if not case.is_empty():
            cases.append(case)
        equal = equal & left.eq_set(right)
        if equal.is_empty():
            break
    return cases


def _entry(entry: int | str, renamed: Mapping[str, str]) -> isl.PwAff:
    return number(entry) if isinstance(entry, int) else symbol(renamed.get(entry, entry))


def renamed(condition: isl.Set, names: Mapping[str, str]) -> isl.Set:
    """A condition with other names for some symbols."""
    for name, other in names.items():
        at = condition.find_dim_by_name(isl.dim_type.param, name)
        if at >= 0:
            condition = condition.set_dim_name(isl.dim_type.param, at, other)
    return condition


def renamed_function(function: isl.PwAff, names: Mapping[str, str]) -> isl.PwAff:
    """A function with other names for some symbols."""
    for name, other in names.items():
        at = function.find_dim_by_name(isl.dim_type.param, name)
        if at >= 0:
            function = function.set_dim_id(isl.dim_type.param, at, isl.Id(other))
    return function
