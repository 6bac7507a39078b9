"""Time stamps: for each statement a few affine functions of sizes and loop variables, compared
lexicographically, which grow along every edge of the event graph. If they exist, the graph has no
cycle at any size, so nothing deadlocks (Feautrier 1992, parts I and II).

A linear program finds them. By Farkas' lemma, an affine function is at least d on all points of a
polyhedron if and only if it is a sum of the polyhedron's inequalities, with weights of 0 or more,
and a constant of d or more. The unknowns are these weights and the coefficients of the stamps. Then
isl checks the stamps on all edges at all sizes, exactly; so nothing depends on floating point.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Any

import islpy as isl
from attrs import evolve, field, frozen
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

from schedlang.extras.prove.sets.isl_functions import points
from schedlang.extras.prove.sets.numbers import Number, Unreadable
from schedlang.extras.prove.sets.relations import Edge
from schedlang.extras.prove.sets.statements import Statement

#: The largest coefficient.
_LARGEST = 1000
#: The largest denominator of a coefficient.
_DENOMINATOR = 60
#: The weight of the coefficients' size in the objective, where a `Wish` is the main part of it.
_SMALL = 0.01
#: The most functions of a stamp.
_MOST_DIMENSIONS = 4

#: The coefficients of an affine function: of 1, of each size, and of each index of the statement.
#: With a base, the same again for the high digit.
Row = tuple[Fraction, ...]
#: The functions of each statement's stamp, by the statement's number.
Stamps = Mapping[int, tuple[Row, ...]]


@frozen
class Frame:
    """The terms of stamps besides the indices of their statement: the sizes. With a `base`, which
    is one of them, stamps are numbers of two digits.
    """

    sizes: tuple[str, ...]
    base: str | None

    @property
    def digits(self) -> int:
        """The number of digits."""
        return 1 if self.base is None else 2

    def width(self, *statements: Statement) -> int:
        """The number of coefficients of a digit, for the indices of some statements."""
        return 1 + len(self.sizes) + sum(len(each.indices) for each in statements)

    def aligned(self, points: isl.Set) -> isl.Set:
        """The set with all sizes as its parameters, in their order."""
        space = isl.Space.params_alloc(isl.DEFAULT_CONTEXT, len(self.sizes))
        for place, size in enumerate(self.sizes):
            space = space.set_dim_name(isl.dim_type.param, place, size)
        return points.align_params(space)

    def number(self, points: isl.Set, row: Sequence[Fraction]) -> tuple[Number, int]:
        """The function with these coefficients on a set, times a factor that makes all of them
        whole; and the factor.
        """
        factor = lcm(*(value.denominator for value in row))
        return self.function(points, [value * factor for value in row]), factor

    def function(self, points: isl.Set, row: Sequence[Fraction]) -> Number:
        """The function with these coefficients on a set."""
        width = len(row) // self.digits
        low = affine(points, len(self.sizes), row[:width])
        if self.base is None:
            return Number(low)
        high = affine(points, len(self.sizes), row[width:])
        return Number(low, high, self.base)


@frozen(eq=False)
class Pairs:
    """A convex part of an edge, as a set of points: the source's indices, then the target's, with
    all sizes as parameters in order. The target's stamp must be at least `delay` more than the
    source's.
    """

    edge: Edge
    points: isl.Set
    delay: int


def pairs_of(
    edges: Iterable[Edge], frame: Frame, within: isl.Set, delays: Mapping[int, int]
) -> list[Pairs]:
    """The convex parts of edges at some sizes. The delay of an edge is that of its source, by
    number, or 1; it is 0 between ops that are issued together.
    """
    result = []
    for edge in edges:
        related = edge.pairs.intersect_params(within).wrap().flatten().reset_tuple_id()
        points = frame.aligned(related).coalesce()
        assert points.dim(isl.dim_type.param) == len(frame.sizes)
        delay = 0 if edge.why == "together" else delays.get(edge.source.number, 1)
        for part in points.get_basic_sets():
            if not part.is_empty():
                result.append(Pairs(edge, isl.Set.from_basic_set(part), delay))
    return result


def find_stamps(pairs: Sequence[Pairs], frame: Frame) -> Stamps | None:
    """Stamps that grow along all edges; None if none were found."""
    together = [each for each in pairs if not each.delay]
    rest = [each for each in pairs if each.delay]
    functions: list[dict[int, Row]] = []
    # Look for one function that grows along all edges. If there is none, take one that falls along
    # none, and leave the edges along which it does not grow to the next function, as with the
    # digits of a number.
    for _ in range(_MOST_DIMENSIONS):
        rows = solve([*rest, *together], frame, is_strict=True)
        if rows is None:
            rows = solve([*rest, *together], frame, is_strict=False)
        if rows is None or any(
            not keeps(each, frame, rows, 0) for each in [*rest, *together]
        ):
            return None
        functions.append(rows)
        rest = [part for each in rest for part in _left(each, frame, rows)]
        if not rest:
            return _stacked(functions)
    return None


def keeps(pairs: Pairs, frame: Frame, rows: Mapping[int, Row], delay: int) -> bool:
    """Whether a function grows by at least `delay` along all pairs."""
    return not _falls_short(pairs, frame, rows, delay)


def _falls_short(
    pairs: Pairs, frame: Frame, rows: Mapping[int, Row], delay: int
) -> Sequence[isl.BasicSet]:
    """The convex parts of the pairs along which a function grows by less than `delay`."""
    grows, factor = gap(pairs, frame, rows)
    try:
        short = pairs.points & grows.within(pairs.points).is_below(delay * factor)
    except Unreadable:
        # It is unknown, so count all pairs as too short.
        short = pairs.points
    return [part for part in short.coalesce().get_basic_sets() if not part.is_empty()]


def _left(pairs: Pairs, frame: Frame, rows: Mapping[int, Row]) -> list[Pairs]:
    """The pairs along which a function does not grow by their delay."""
    return [
        evolve(pairs, points=isl.Set.from_basic_set(part))
        for part in _falls_short(pairs, frame, rows, pairs.delay)
    ]


def _stacked(functions: Sequence[Mapping[int, Row]]) -> Stamps:
    """The functions of each statement; zeros where a statement has no edges left."""
    widths = {number: len(row) for rows in functions for number, row in rows.items()}
    return {
        number: tuple(rows.get(number, (Fraction(0),) * width) for rows in functions)
        for number, width in widths.items()
    }


def gap(pairs: Pairs, frame: Frame, rows: Mapping[int, Row]) -> tuple[Number, int]:
    """By how much a function grows along the pairs of an edge, times a factor; and the factor."""
    before = rows[pairs.edge.source.number]
    after = rows[pairs.edge.target.number]
    row: list[Fraction] = []
    ones = frame.width(pairs.edge.source)
    others = frame.width(pairs.edge.target)
    # The coefficients of the target's function minus the source's; sizes occur in both:
    #
    #     source    1  ranks │ i
    #     target    1  ranks │ j  k
    #     row       1  ranks │ i  j  k          of i the source's, below 0
    for digit in range(frame.digits):
        mine = before[digit * ones : (digit + 1) * ones]
        theirs = after[digit * others : (digit + 1) * others]
        row += [theirs[at] - mine[at] for at in range(frame.width())]
        row += [-value for value in mine[frame.width() :]]
        row += theirs[frame.width() :]
    return frame.number(pairs.points, row)


def affine(points: isl.Set, sizes: int, row: Sequence[Fraction]) -> isl.PwAff:
    """The affine function with these coefficients on a set with sizes as parameters."""
    local = isl.LocalSpace.from_space(points.get_space())
    result = isl.Aff.zero_on_domain(local).set_constant_val(_val(row[0]))
    for at, value in enumerate(row[1 : 1 + sizes]):
        result = result.set_coefficient_val(isl.dim_type.param, at, _val(value))
    for at, value in enumerate(row[1 + sizes :]):
        result = result.set_coefficient_val(isl.dim_type.in_, at, _val(value))
    return isl.PwAff.from_aff(result)


def _val(value: Fraction) -> isl.Val:
    return isl.Val(value.numerator).div(isl.Val(value.denominator))


@frozen(eq=False)
class Wish:
    """Among several stamps, those are wanted for which the sum of coefficients times `weights` is
    least. The stamps of the statements in `fixed` are given.
    """

    weights: Mapping[int, Row]
    fixed: Mapping[int, Row] = field(factory=dict)


def solve(
    pairs: Sequence[Pairs], frame: Frame, is_strict: bool, wish: Wish | None = None
) -> dict[int, Row] | None:
    """One function for each statement that grows along all edges by their delays. If not
    `is_strict`, it grows along as many as it can and falls along none. None if there is no such
    function.

    Of several, the result is the one with the smallest coefficients, or the one of the `wish`.
    """
    program = _Program(frame, is_strict)
    for each in pairs:
        for statement in (each.edge.source, each.edge.target):
            program.add(statement)
    if wish is not None:
        program.prefer(wish)
    for each in pairs:
        program.grow(each)
    return program.solved()


class _Program:
    """The linear program. Its unknowns are the coefficients of stamps and Farkas' weights.

    With a base, the inequalities times the base are used as well.
    """

    def __init__(self, frame: Frame, is_strict: bool) -> None:
        self.frame = frame
        self.is_strict = is_strict
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.objective = self.solver.Objective()
        self.columns: dict[int, list[tuple[Any, Any]]] = {}

    def add(self, statement: Statement) -> None:
        """Add the coefficients of a statement. Each is the difference of two numbers of 0 or more,
        so that its absolute value can be minimized.
        """
        if statement.number in self.columns:
            return
        variables = []
        # An index that depends on other terms needs no coefficient of its own.
        told = _told_by_others(statement) if self.frame.base is not None else set()
        terms = ["", *self.frame.sizes, *statement.indices] * self.frame.digits
        for term in terms:
            most = 0 if term in told else _LARGEST
            up = self.solver.NumVar(0, most, "")
            down = self.solver.NumVar(0, most, "")
            for part in (up, down):
                self.objective.SetCoefficient(part, 1 if self.is_strict else 0.001)
            variables.append((up, down))
        self.columns[statement.number] = variables

    def prefer(self, wish: Wish) -> None:
        """Minimize a wish."""
        for number, variables in self.columns.items():
            weights = wish.weights.get(number) or (Fraction(0),) * len(variables)
            for (up, down), value in zip(variables, weights, strict=True):
                self.objective.SetCoefficient(up, _SMALL + float(value))
                self.objective.SetCoefficient(down, _SMALL - float(value))
        for number, values in wish.fixed.items():
            for (up, down), value in zip(
                self.columns.get(number, ()), values, strict=False
            ):
                up.SetBounds(max(float(value), 0), max(float(value), 0))
                down.SetBounds(max(-float(value), 0), max(-float(value), 0))

    def grow(self, pairs: Pairs) -> None:
        """Require that the stamps grow along an edge."""
        frame = self.frame
        source = pairs.edge.source
        target = pairs.edge.target
        width = frame.width(source, target)
        # One row for each term: its coefficient in the function equals that in the weighted sum of
        # inequalities.
        rows = [self.solver.Constraint(0, 0) for _ in range(frame.digits * width)]
        if frame.base is not None:
            # The high digit's constant times the base is the coefficient of that size: one row.
            rows[width] = rows[1 + frame.sizes.index(frame.base)]
        ones = frame.width(source)
        others = frame.width(target)
        sizes = frame.width()
        for digit in range(frame.digits):
            of_source = self.columns[source.number][digit * ones : (digit + 1) * ones]
            of_target = self.columns[target.number][
                digit * others : (digit + 1) * others
            ]
            own = rows[digit * width : (digit + 1) * width]
            for row, variable in zip(own, of_source, strict=False):
                _enter(row, variable, -1)
            for row, variable in zip(
                [*own[:sizes], *own[ones:]], of_target, strict=True
            ):
                _enter(row, variable, 1)
        # The function minus a weighted sum of the inequalities is a constant: the delay, or more.
        infinity = self.solver.infinity()
        more = self.solver.NumVar(0, infinity, "")
        rows[0].SetCoefficient(more, -1)
        if self.is_strict or not pairs.delay:
            rows[0].SetBounds(pairs.delay, pairs.delay)
        else:
            grows = self.solver.NumVar(0, pairs.delay, "")
            rows[0].SetCoefficient(grows, -1)
            self.objective.SetCoefficient(grows, -1)
        for is_equality, factors in _inequalities(pairs.points, len(frame.sizes)):
            for digit in range(frame.digits):
                weight = self.solver.NumVar(
                    -infinity if is_equality else 0, infinity, ""
                )
                own = rows[digit * width : (digit + 1) * width]
                for row, factor in zip(own, factors, strict=True):
                    if factor:
                        row.SetCoefficient(weight, -factor)

    def solved(self) -> dict[int, Row] | None:
        """Solve it; the functions."""
        self.objective.SetMinimization()
        if self.solver.Solve() != self.solver.OPTIMAL:
            return None
        return {
            number: tuple(
                Fraction(up.solution_value() - down.solution_value()).limit_denominator(
                    _DENOMINATOR
                )
                for up, down in variables
            )
            for number, variables in self.columns.items()
        }


def _told_by_others(statement: Statement) -> set[str]:
    """The indices of a statement that are affine functions of other indices and of sizes."""
    hull = points(statement.domain, statement.indices).affine_hull()
    told: set[str] = set()
    for constraint in hull.get_constraints():
        divisions = range(hull.dim(isl.dim_type.div))
        if any(
            not constraint.get_coefficient_val(isl.dim_type.div, at).is_zero()
            for at in divisions
        ):
            continue
        for at, index in enumerate(statement.indices):
            factor = constraint.get_coefficient_val(isl.dim_type.set, at)
            if index not in told and (factor.is_one() or factor.is_negone()):
                told.add(index)
                break
    return told


def _enter(row: Any, variable: tuple[Any, Any], factor: int) -> None:
    for part, sign in zip(variable, (1, -1), strict=True):
        row.SetCoefficient(part, row.GetCoefficient(part) + sign * factor)


def _inequalities(points: isl.Set, sizes: int) -> list[tuple[bool, list[int]]]:
    """The equalities and inequalities of a convex set, over the rationals. A row has the constant,
    then the factors of the sizes, then those of the points.
    """
    whole = points.move_dims(isl.dim_type.set, 0, isl.dim_type.param, 0, sizes)
    # Where a coordinate has a stride, count in strides: with a stride of 4, `i < j` means that `j -
    # i` is at least 4.
    strides = [_stride(whole, at) for at in range(whole.dim(isl.dim_type.set))]
    whole = whole.preimage_multi_aff(_strided(whole, strides))
    (part,) = whole.remove_divs().get_basic_sets()
    # Factors are divided by the strides; a common denominator makes them whole.
    common = lcm(*(stride for stride, _ in strides))
    shares = [common // stride for stride, _ in strides]
    rows = []
    for constraint in part.remove_redundancies().get_constraints():
        constant = int(constraint.get_constant_val().to_python()) * common
        factors = []
        for at, (_, offset) in enumerate(strides):
            value = constraint.get_coefficient_val(isl.dim_type.set, at)
            factor = int(value.to_python()) * shares[at]
            factors.append(factor)
            constant -= factor * offset
        divisor = gcd(common, constant, *factors)
        row = [value // divisor for value in (constant, *factors)]
        rows.append((constraint.is_equality(), row))
    return rows


def _stride(whole: isl.Set, at: int) -> tuple[int, int]:
    """The distance between the values of a dimension, and their remainder by it."""
    info = whole.get_stride_info(at)
    if not info.get_offset().is_cst():
        return 1, 0
    return int(info.get_stride().to_python()), int(
        info.get_offset().get_constant_val().to_python()
    )


def _strided(whole: isl.Set, strides: Sequence[tuple[int, int]]) -> isl.MultiAff:
    """The map from consecutive numbers to the values of dimensions that have strides."""
    result = isl.MultiAff.identity(whole.get_space().map_from_set())
    for at, (stride, offset) in enumerate(strides):
        value = (
            result.get_at(at)
            .scale_val(isl.Val(stride))
            .add_constant_val(isl.Val(offset))
        )
        result = result.set_at(at, value)
    return result
