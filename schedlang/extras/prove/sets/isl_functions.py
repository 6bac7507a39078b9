"""Functions and conditions of symbols, computed exactly by isl: quasi-affine functions and integer
sets (Verdoolaege 2010, "isl: An Integer Set Library for the Polyhedral Model").

The symbols are parameters in isl's sense: the sizes of a program, the number of a rank, the
variables of loops. So an expression has only the symbols that occur in it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from math import lcm
from typing import TypeVar

import islpy as isl

AnySet = TypeVar("AnySet", isl.Set, isl.Map)
T = TypeVar("T")


def number(value: int) -> isl.PwAff:
    """A constant function."""
    return isl.PwAff(f"{{ [({value})] }}")


def rational(value: Fraction) -> isl.PwAff:
    """A constant that need not be a whole number."""
    return number(value.numerator).scale_down_val(isl.Val(value.denominator))


def symbol(name: str) -> isl.PwAff:
    """The function whose value is a symbol."""
    return isl.PwAff(f"[{name}] -> {{ [({name})] }}")


def everywhere() -> isl.Set:
    """The condition that always holds."""
    return isl.Set("{ : }")


def nowhere() -> isl.Set:
    """The condition that never holds."""
    return isl.Set("{ : 1 = 0 }")


def between(low: isl.PwAff, value: isl.PwAff, stop: isl.PwAff) -> isl.Set:
    """Where low <= value < stop."""
    return low.le_set(value) & value.lt_set(stop)


def indicator(holds: isl.Set) -> isl.PwAff:
    """1 where the condition holds, 0 elsewhere."""
    one = number(1).intersect_domain(holds)
    return one.union_add(number(0).intersect_domain(holds.complement()))


def scaled(value: isl.PwAff) -> tuple[isl.PwAff, int]:
    """A multiple of a function whose values are whole numbers, as isl compares no others; and the
    factor.
    """
    factor = lcm(
        *(each.get_denominator_val().to_python() for _, each in value.get_pieces())
    )
    return value.scale_val(isl.Val(factor)), factor


def constant(value: isl.PwAff, where: isl.Set) -> int | None:
    """The value of a function that is constant on a set; None if it is not, 0 if the set is
    empty.
    """
    within = value.intersect_domain(where)
    if within.domain().is_empty():
        return 0
    whole, factor = scaled(within)
    low = whole.min_val()
    high = whole.max_val()
    if not (low.is_int() and low.eq(high)):
        return None
    quotient, rest = divmod(int(low.to_python()), factor)
    return None if rest else quotient


def floor_by(value: isl.PwAff, divisor: int) -> isl.PwAff:
    """The quotient by a number, rounded down."""
    if divisor < 0:
        value = value.neg()
        divisor = -divisor
    return value.scale_down_val(isl.Val(divisor)).floor()


def at_sizes(condition: AnySet, sizes: Mapping[str, int]) -> AnySet:
    """A set or relation with values for some symbols."""
    for name, value in sizes.items():
        at = condition.find_dim_by_name(isl.dim_type.param, name)
        if at >= 0:
            condition = condition.fix_val(isl.dim_type.param, at, isl.Val(value))
    return condition


def coordinates(point: isl.Point) -> tuple[int, ...]:
    """The coordinates of a point."""
    width = point.get_space().dim(isl.dim_type.set)
    values = (point.get_coordinate_val(isl.dim_type.set, at) for at in range(width))
    return tuple(int(value.to_python()) for value in values)


def all_points(some: isl.Set) -> list[tuple[int, ...]]:
    """The points of a set that does not depend on symbols."""
    found: list[tuple[int, ...]] = []
    some = some.project_out(isl.dim_type.param, 0, some.dim(isl.dim_type.param))
    some.foreach_point(lambda point: found.append(coordinates(point)))
    return found


def without(condition: isl.Set, names: Iterable[str]) -> isl.Set:
    """The condition that some values of these symbols satisfy it (projection)."""
    for name in names:
        at = condition.find_dim_by_name(isl.dim_type.param, name)
        if at >= 0:
            condition = condition.project_out(isl.dim_type.param, at, 1)
    return condition


def points(condition: isl.Set, names: Sequence[str], tuple_name: str = "") -> isl.Set:
    """The values of some symbols that satisfy a condition, as a set of points."""
    result = isl.Set.from_params(condition)
    for place, name in enumerate(names):
        at = result.find_dim_by_name(isl.dim_type.param, name)
        if at < 0:
            result = result.add_dims(isl.dim_type.set, 1)
        else:
            result = result.move_dims(
                isl.dim_type.set, place, isl.dim_type.param, at, 1
            )
    return result.set_tuple_name(tuple_name) if tuple_name else result.reset_tuple_id()


def condition_of(points: isl.Set, names: Sequence[str]) -> isl.Set:
    """The condition that some symbols have the values of a point of a set: the inverse of
    `points`.
    """
    result = points.reset_tuple_id()
    for name in names:
        at = result.dim(isl.dim_type.param)
        result = result.move_dims(isl.dim_type.param, at, isl.dim_type.set, 0, 1)
        result = result.set_dim_name(isl.dim_type.param, at, name)
    return result.params()


def function_map(
    where: isl.Set, names: Sequence[str], tuple_name: str, values: Sequence[isl.PwAff]
) -> isl.Map:
    """The relation from each point of a condition to the values of some functions there."""
    outs = [f"_out{place}" for place in range(len(values))]
    condition = where
    for out, value in zip(outs, values, strict=True):
        condition = condition & symbol(out).eq_set(value)
    both = points(condition, [*names, *outs])
    result = isl.Map.from_domain(both)
    result = result.move_dims(
        isl.dim_type.out, 0, isl.dim_type.in_, len(names), len(outs)
    )
    return result.set_tuple_name(isl.dim_type.in_, tuple_name)


def count(condition: isl.Set, name: str) -> isl.PwAff | None:
    """How many values of a symbol satisfy a condition, if they are evenly spaced; else None."""
    values = points(condition, [name])
    if values.is_empty():
        return number(0)
    low = values.dim_min(0)
    high = values.dim_max(0)
    there = low.domain()
    whole = there & between(low, symbol(name), high.add(number(1)))
    # For `m % 2 == 0` the values have a stride of 2. Strides are counted, provided that no value is
    # left out.
    step = int(values.get_stride(0).to_python())
    if step > 1:
        behind = symbol(name).sub(low)
        whole = whole & behind.eq_set(floor_by(behind, step).scale_val(isl.Val(step)))
    if not whole.is_subset(condition):
        return None
    some = floor_by(high.sub(low), step).add(number(1)).intersect_domain(there)
    return some.union_add(number(0).intersect_domain(there.complement())).coalesce()


def simplified(function: isl.PwAff) -> isl.PwAff:
    """The function in fewer pieces: a piece on which another one's function has the same values
    joins that one.
    """
    pieces = [
        (isl.Set.from_basic_set(part), isl.PwAff.from_aff(value))
        for where, value in function.coalesce().get_pieces()
        for part in where.make_disjoint().get_basic_sets()
    ]
    if len(pieces) < 2:
        return function.coalesce()
    parts = [
        value.intersect_domain(where) for where, value in merged(pieces, _are_equal)
    ]
    return reduce(isl.PwAff.union_add, parts)


def _are_equal(one: isl.PwAff, other: isl.PwAff, where: isl.Set) -> bool:
    return bool(one.intersect_domain(where).eq_set(other).is_equal(where))


def merged(
    pieces: Iterable[tuple[isl.Set, T]], are_equal: Callable[[T, T, isl.Set], bool]
) -> list[tuple[isl.Set, T]]:
    """Pieces of a function: one on which another one's values are the same joins that one."""
    result: list[tuple[isl.Set, T]] = []
    # Large pieces first: small ones are mostly the borders of others.
    for where, value in sorted(pieces, key=lambda piece: _equalities(piece[0])):
        for place, (there, other) in enumerate(result):
            if are_equal(other, value, where):
                result[place] = (there | where, other)
                break
        else:
            result.append((where, value))
    return [(where.coalesce(), value) for where, value in result]


def _equalities(where: isl.Set) -> int:
    """The number of equalities that hold on all of a condition."""
    return int(where.affine_hull().n_constraint())
