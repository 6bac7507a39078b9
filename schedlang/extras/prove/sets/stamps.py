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
from math import gcd, lcm
from typing import Any

import islpy as isl
from attrs import evolve, field, frozen
from ortools.linear_solver import pywraplp  # type: ignore[import-untyped]

from schedlang.extras.prove.sets.isl_functions import points
from schedlang.extras.prove.sets.numbers import Number, Unreadable
from schedlang.extras.prove.sets.relations import Edge
from schedlang.extras.prove.sets.statements import Statement

#: No coefficient is larger.
_LARGEST = 1000
#: The largest denominator of a coefficient.
_DENOMINATOR = 60
#: How much a coefficient's size counts where something else is wished for.
_SMALL = 0.01
#: Of so many functions is a stamp at most.
_MOST_DIMENSIONS = 4

#: The coefficients of an affine function: of 1, of each size, and of each index of a statement.
#: With a base there are as many again, of the same times the base.
Row = tuple[Fraction, ...]
#: For each statement, by its number, the functions of its stamp.
Stamps = Mapping[int, tuple[Row, ...]]


@frozen
class Frame:
    """What stamps are functions of, besides the indices of their statement: some `sizes`. With a
    `base`, which is one of them, they are numbers of two digits.
    """

    sizes: tuple[str, ...]
    base: str | None

    @property
    def digits(self) -> int:
        """How many digits a number has."""
        return 1 if self.base is None else 2

    def width(self, *statements: Statement) -> int:
        """How many terms a digit has, of some statements."""
        return 1 + len(self.sizes) + sum(len(each.indices) for each in statements)

    def aligned(self, points: isl.Set) -> isl.Set:
        """A set with all sizes as its parameters, in their order."""
        space = isl.Space.params_alloc(isl.DEFAULT_CONTEXT, len(self.sizes))
        for place, size in enumerate(self.sizes):
            space = space.set_dim_name(isl.dim_type.param, place, size)
        return points.align_params(space)

    def number(self, points: isl.Set, row: Sequence[Fraction]) -> tuple[Number, int]:
        """A function of a set's sizes and points by its coefficients, times a factor by which all
        of these are whole; and the factor.
        """
        factor = lcm(*(value.denominator for value in row))
        whole = [value * factor for value in row]
        width = len(row) // self.digits
        low = affine(points, len(self.sizes), whole[:width])
        if self.base is None:
            return Number(low), factor
        high = affine(points, len(self.sizes), whole[width:])
        return Number(low, high, self.base), factor


@frozen(eq=False)
class Pairs:
    """An edge as a set of points: the source's indices, then the target's, with all sizes as
    parameters in one order. The target's stamp is to be at least `delay` more.
    """

    edge: Edge
    points: isl.Set
    delay: int


def pairs_of(
    edges: Iterable[Edge], frame: Frame, within: isl.Set, delays: Mapping[int, int]
) -> list[Pairs]:
    """The pairs of edges at some sizes, one for each convex part. The target of an edge comes as
    much later as the delay of its source, by its number, by default 1; ops that are issued together
    come together.
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
    # One function that grows along all edges, if there is one. Else one that falls along none; what
    # it does not grow along is left to the next function, as with the digits of a number.
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
    """Whether a function is as much more at each target of an edge as at its source, or further."""
    return not _falls_short(pairs, frame, rows, delay)


def _falls_short(
    pairs: Pairs, frame: Frame, rows: Mapping[int, Row], delay: int
) -> Sequence[isl.BasicSet]:
    grows, factor = gap(pairs, frame, rows)
    try:
        short = pairs.points & grows.within(pairs.points).is_below(delay * factor)
    except Unreadable:
        # Nobody can say; so nothing is said of it.
        short = pairs.points
    return [part for part in short.coalesce().get_basic_sets() if not part.is_empty()]


def _left(pairs: Pairs, frame: Frame, rows: Mapping[int, Row]) -> list[Pairs]:
    """The pairs of an edge along which a function does not grow as much as it must."""
    return [
        evolve(pairs, points=isl.Set.from_basic_set(part))
        for part in _falls_short(pairs, frame, rows, pairs.delay)
    ]


def _stacked(functions: Sequence[Mapping[int, Row]]) -> Stamps:
    """The functions of each statement; 0 where one has no edges left to grow along."""
    widths = {number: len(row) for rows in functions for number, row in rows.items()}
    return {
        number: tuple(rows.get(number, (Fraction(0),) * width) for rows in functions)
        for number, width in widths.items()
    }


def gap(pairs: Pairs, frame: Frame, rows: Mapping[int, Row]) -> tuple[Number, int]:
    """By how much a function is more at the targets of an edge than at its sources, times a number;
    and the number.
    """
    before = rows[pairs.edge.source.number]
    after = rows[pairs.edge.target.number]
    row: list[Fraction] = []
    ones = frame.width(pairs.edge.source)
    others = frame.width(pairs.edge.target)
    # The coefficients of the target's function less those of the source's; sizes are in both:
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
    """An affine function of a set's sizes and points by its coefficients."""
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
    """Which of several stamps are wanted: those with the least sum of coefficients times `weights`.
    For the statements `fixed` they are given.
    """

    weights: Mapping[int, Row]
    fixed: Mapping[int, Row] = field(factory=dict)


def solve(
    pairs: Sequence[Pairs], frame: Frame, is_strict: bool, wish: Wish | None = None
) -> dict[int, Row] | None:
    """One function for each statement that grows along all edges as much as it must; or if not
    `is_strict`, along as many as can be, and falls along none. None if there is none.

    Of several, it is one with small coefficients, or one that is wished for.
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
    """The linear program: its unknowns are the coefficients of stamps, and Farkas' weights.

    With a base, a function is also 0 or more if it is a sum of the inequalities, and of these times
    the base, with weights of 0 or more.
    """

    def __init__(self, frame: Frame, is_strict: bool) -> None:
        self.frame = frame
        self.is_strict = is_strict
        self.solver = pywraplp.Solver.CreateSolver("GLOP")
        self.objective = self.solver.Objective()
        self.columns: dict[int, list[tuple[Any, Any]]] = {}

    def add(self, statement: Statement) -> None:
        """The coefficients of a statement, each the difference of two that are not negative, so
        that its size counts.
        """
        if statement.number in self.columns:
            return
        variables = []
        # What an equality says of an index is said with the other terms.
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
        """Prefer some functions to others."""
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
        """The stamps grow along an edge."""
        frame = self.frame
        source = pairs.edge.source
        target = pairs.edge.target
        width = frame.width(source, target)
        # A row for each term: its coefficients in the function, and in the weighted inequalities,
        # are to be the same.
        rows = [self.solver.Constraint(0, 0) for _ in range(frame.digits * width)]
        if frame.base is not None:
            # 1 times the base is a size: both have one row.
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
        # The function less a weighted sum of the inequalities is a number: the delay, or more.
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
        """The functions."""
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
    """The indices of a statement that are affine functions of the others, and of sizes."""
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
    """The equalities and inequalities of a convex set, over the rationals, as rows: first the
    constant, then the factors of sizes, then of the points.
    """
    whole = points.move_dims(isl.dim_type.set, 0, isl.dim_type.param, 0, sizes)
    # Where a number is every fourth one, of these are said what holds of whole numbers: of `i < j`
    # there are four between.
    strides = [_stride(whole, at) for at in range(whole.dim(isl.dim_type.set))]
    whole = whole.preimage_multi_aff(_strided(whole, strides))
    (part,) = whole.remove_divs().get_basic_sets()
    # By their distance, factors are fractions; so all are multiplied by a common denominator.
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
    """The distance of the values of a dimension, and the rest when they are divided by it."""
    info = whole.get_stride_info(at)
    if not info.get_offset().is_cst():
        return 1, 0
    return int(info.get_stride().to_python()), int(
        info.get_offset().get_constant_val().to_python()
    )


def _strided(whole: isl.Set, strides: Sequence[tuple[int, int]]) -> isl.MultiAff:
    """From numbers that follow each other to those of some dimensions, which are at distances."""
    result = isl.MultiAff.identity(whole.get_space().map_from_set())
    for at, (stride, offset) in enumerate(strides):
        value = (
            result.get_at(at)
            .scale_val(isl.Val(stride))
            .add_constant_val(isl.Val(offset))
        )
        result = result.set_at(at, value)
    return result
