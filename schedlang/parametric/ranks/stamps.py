"""Time stamps: for each statement some affine functions of sizes and loops, compared by the first
that differ, which grow along every edge of the event graph. Where there are some, ranks cannot wait
for each other in a circle, at any size (Feautrier 1992, parts I and II).

They are guessed, and then checked exactly. The guess is a linear program: by Farkas' lemma, an
affine function is at least d on all points of a polyhedron just if it is a sum of the polyhedron's
inequalities, with weights of 0 or more, and a number that is d or more; the weights and the stamps'
coefficients are its unknowns. The check is by isl, over all edges of all sizes. So nothing depends
on floating point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import islpy as isl
from attrs import evolve, field, frozen
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

from schedlang.parametric.ranks.checks import Edge

#: No coefficient is larger.
_LARGEST = 1000
#: The largest denominator of a coefficient.
_DENOMINATOR = 60
#: How much a coefficient's size counts where something else is wished for.
_SMALL = 0.01
#: Of so many functions is a stamp at most.
_MOST_DIMENSIONS = 4

#: The coefficients of an affine function: of 1, of each size, and of each index of a statement.
Row = tuple[Fraction, ...]
#: For each statement, by its number, the functions of its stamp.
Stamps = Mapping[int, tuple[Row, ...]]


@frozen(eq=False)
class Pairs:
    """An edge as a set of points: the source's indices, then the target's, with all sizes as
    parameters in one order. The target's stamp is to be at least `delay` more.
    """

    edge: Edge
    points: isl.Set
    delay: int


def pairs_of(
    edges: Iterable[Edge], sizes: Sequence[str], within: isl.Set, delays: Mapping[int, int]
) -> list[Pairs]:
    """The pairs of edges at some sizes, one for each convex part. The target of an edge comes as
    much later as the delay of its source's kind, by default 1; ops that are issued together come
    together.
    """
    space = isl.Space.params_alloc(isl.DEFAULT_CONTEXT, len(sizes))
    for place, size in enumerate(sizes):
        space = space.set_dim_name(isl.dim_type.param, place, size)
    result = []
    for edge in edges:
        related = edge.pairs.intersect_params(within).align_params(space)
        assert related.dim(isl.dim_type.param) == len(sizes)
        delay = 0 if edge.why == "together" else delays.get(edge.source.kind, 1)
        points = related.wrap().flatten().reset_tuple_id().coalesce()
        for part in points.get_basic_sets():
            if not part.is_empty():
                result.append(Pairs(edge, isl.Set.from_basic_set(part), delay))
    return result


def find_stamps(pairs: Sequence[Pairs], sizes: int) -> Stamps | None:
    """Stamps that grow along all edges; None if none were found."""
    together = [each for each in pairs if not each.delay]
    rest = [each for each in pairs if each.delay]
    functions: list[dict[int, Row]] = []
    for _ in range(_MOST_DIMENSIONS):
        rows = solve([*rest, *together], sizes, is_strict=True)
        if rows is None:
            rows = solve([*rest, *together], sizes, is_strict=False)
        if rows is None or any(_falls(each, sizes, rows) for each in [*rest, *together]):
            return None
        functions.append(rows)
        rest = [part for each in rest for part in _left(each, sizes, rows)]
        if not rest:
            return _stacked(functions)
    return None


def _falls(pairs: Pairs, sizes: int, rows: Mapping[int, Row]) -> bool:
    """Whether a function is less at the target of an edge than at its source."""
    return not (pairs.points & gap(pairs, sizes, rows).lt_set(_number(pairs, 0))).is_empty()


def _left(pairs: Pairs, sizes: int, rows: Mapping[int, Row]) -> list[Pairs]:
    """The pairs of an edge along which a function does not grow as much as it must."""
    left = pairs.points & gap(pairs, sizes, rows).lt_set(_number(pairs, pairs.delay))
    return [
        evolve(pairs, points=isl.Set.from_basic_set(part))
        for part in left.coalesce().get_basic_sets()
        if not part.is_empty()
    ]


def _stacked(functions: Sequence[Mapping[int, Row]]) -> Stamps:
    """The functions of each statement; 0 where one has no edges left to grow along."""
    widths = {number: len(row) for rows in functions for number, row in rows.items()}
    return {
        number: tuple(rows.get(number, (Fraction(0),) * width) for rows in functions)
        for number, width in widths.items()
    }


def gap(pairs: Pairs, sizes: int, rows: Mapping[int, Row]) -> isl.PwAff:
    """By how much a function is more at the targets of an edge than at its sources."""
    source, target = pairs.edge.source, pairs.edge.target
    before, after = rows[source.number], rows[target.number]
    row = [after[at] - before[at] for at in range(1 + sizes)]
    row += [-value for value in before[1 + sizes :]]
    row += list(after[1 + sizes :])
    return affine(pairs.points, sizes, row)


def affine(points: isl.Set, sizes: int, row: Sequence[Fraction]) -> isl.PwAff:
    """An affine function of a set's sizes and points by its coefficients."""
    local = isl.LocalSpace.from_space(points.get_space())
    result = isl.Aff.zero_on_domain(local).set_constant_val(_val(row[0]))
    for at, value in enumerate(row[1 : 1 + sizes]):
        result = result.set_coefficient_val(isl.dim_type.param, at, _val(value))
    for at, value in enumerate(row[1 + sizes :]):
        result = result.set_coefficient_val(isl.dim_type.in_, at, _val(value))
    return isl.PwAff.from_aff(result)


def _number(pairs: Pairs, value: int) -> isl.PwAff:
    local = isl.LocalSpace.from_space(pairs.points.get_space())
    return isl.PwAff.from_aff(isl.Aff.zero_on_domain(local).set_constant_val(isl.Val(value)))


def _val(value: Fraction) -> isl.Val:
    return isl.Val(value.numerator).div(isl.Val(value.denominator))


@frozen(eq=False)
class Wish:
    """Which of several stamps are wanted: those with the least sum of coefficients times `weights`.
    For the statements `fixed` they are given.
    """

    weights: Mapping[int, Row]
    fixed: Mapping[int, Row] = field(factory=dict)


def solve(
    pairs: Sequence[Pairs], sizes: int, is_strict: bool, wish: Wish | None = None
) -> dict[int, Row] | None:
    """One function for each statement that grows along all edges as much as it must; or if not
    `is_strict`, along as many as can be, and falls along none. None if there is none.

    Of several, it is one with small coefficients, or one that is wished for.
    """
    solver = pywraplp.Solver.CreateSolver("GLOP")
    infinity = solver.infinity()
    objective = solver.Objective()
    columns: dict[int, list[tuple[Any, Any]]] = {}
    for each in pairs:
        for statement in (each.edge.source, each.edge.target):
            if statement.number in columns:
                continue
            variables = []
            for _ in range(1 + sizes + len(statement.indices)):
                # A number is the difference of two that are not negative, so that its size counts.
                up, down = solver.NumVar(0, _LARGEST, ""), solver.NumVar(0, _LARGEST, "")
                for part in (up, down):
                    objective.SetCoefficient(part, 1 if is_strict else 0.001)
                variables.append((up, down))
            columns[statement.number] = variables
    if wish is not None:
        for number, weights in wish.weights.items():
            for (up, down), value in zip(columns.get(number, ()), weights, strict=False):
                objective.SetCoefficient(up, _SMALL + float(value))
                objective.SetCoefficient(down, _SMALL - float(value))
        for number, values in wish.fixed.items():
            for (up, down), value in zip(columns.get(number, ()), values, strict=False):
                up.SetBounds(max(float(value), 0), max(float(value), 0))
                down.SetBounds(max(-float(value), 0), max(-float(value), 0))
    for each in pairs:
        source, target = each.edge.source, each.edge.target
        ones = len(source.indices)
        width = 1 + sizes + ones + len(target.indices)
        rows = [solver.Constraint(0, 0) for _ in range(width)]

        def enter(row: Any, variable: tuple[Any, Any], factor: int) -> None:
            for part, sign in zip(variable, (1, -1), strict=True):
                before = row.GetCoefficient(part)
                row.SetCoefficient(part, before + sign * factor)

        for at in range(1 + sizes):
            enter(rows[at], columns[target.number][at], 1)
            enter(rows[at], columns[source.number][at], -1)
        for at in range(ones):
            enter(rows[1 + sizes + at], columns[source.number][1 + sizes + at], -1)
        for at in range(len(target.indices)):
            enter(rows[1 + sizes + ones + at], columns[target.number][1 + sizes + at], 1)
        # The function less a weighted sum of the inequalities is a number: the delay, or more.
        more = solver.NumVar(0, infinity, "")
        rows[0].SetCoefficient(more, -1)
        if is_strict or not each.delay:
            rows[0].SetBounds(each.delay, each.delay)
        else:
            grows = solver.NumVar(0, each.delay, "")
            rows[0].SetCoefficient(grows, -1)
            objective.SetCoefficient(grows, -1)
        for is_equality, factors in _inequalities(each.points, sizes):
            weight = solver.NumVar(-infinity if is_equality else 0, infinity, "")
            for row, factor in zip(rows, factors, strict=True):
                if factor:
                    row.SetCoefficient(weight, -factor)
    objective.SetMinimization()
    if solver.Solve() != solver.OPTIMAL:
        return None
    return {
        number: tuple(
            Fraction(up.solution_value() - down.solution_value()).limit_denominator(_DENOMINATOR)
            for up, down in variables
        )
        for number, variables in columns.items()
    }


def _inequalities(points: isl.Set, sizes: int) -> list[tuple[bool, list[int]]]:
    """The equalities and inequalities of a convex set, over the rationals, as rows."""
    (part,) = points.remove_divs().get_basic_sets()
    rows = []
    for constraint in part.remove_redundancies().get_constraints():
        values = [constraint.get_constant_val()]
        for at in range(sizes):
            values.append(constraint.get_coefficient_val(isl.dim_type.param, at))
        for at in range(part.dim(isl.dim_type.set)):
            values.append(constraint.get_coefficient_val(isl.dim_type.set, at))
        rows.append((constraint.is_equality(), [int(value.to_python()) for value in values]))
    return rows
