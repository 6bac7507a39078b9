"""Closed forms: the makespan, the bubble and the peak of each rank as functions of the sizes.

The makespan is that of the ideal execution with unit costs. Stamps that grow along each edge by
what its source takes, from 0 on, are an upper bound for it: a linear program finds the ones with
the least. It is also a lower bound where some op that ends last has a chain of ops before it, each
one behind the one before without a gap, down to one that begins at 0. Those that have such a chain
are what remains when ops without are taken away again and again; that is done exactly, by isl.
Where bound and chain do not meet for all sizes, these are cut into cases; some may remain without.

The peak of a rank is a matter of its order alone: how many activations it has taken, and how many
it has given back, before each op.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

import islpy as isl
from attrs import evolve, frozen

from schedlang.diagnostics.source import Span
from schedlang.language import syntax
from schedlang.parametric.ranks.checks import Edge, Relations, sizes_only
from schedlang.parametric.ranks.counting import RANK, Many, how_many_before
from schedlang.parametric.ranks.prove import Outcome
from schedlang.parametric.ranks.reading import Reading, Statement
from schedlang.parametric.ranks.stamps import Pairs, Row, Wish, affine, gap, pairs_of, solve
from schedlang.parametric.ranks.symbols import (
    between,
    number,
    points,
    simplified,
    symbol,
)
from schedlang.schedule.costs import UNIT
from schedlang.schedule.kinds import MAKERS, OPS, Kind
from schedlang.schedule.layout import Layout, Pipeline

#: How often ops without a chain are taken away.
_ROUNDS = 12
#: Before all ops, and behind them.
_START, _END = -1, -2
#: Into so many cases the sizes are cut at most, one after the other.
_MOST_CASES = 2


@frozen(eq=False)
class Form:
    """A figure as a function of the sizes, and of RANK where it is of each rank."""

    figure: str
    value: isl.PwAff


def forms_of(outcome: Outcome, tree: syntax.Schedule) -> Iterator[Form]:
    """The closed forms of a program, where it is proved; those that were found."""
    priced = [item for item in tree.items if isinstance(item, syntax.Cost)]
    if not any(isinstance(item, syntax.Memory) for item in priced):
        peak = _peak(outcome)
        if peak is not None:
            yield Form("peak(r)", peak)
    overlaps = any(s.batch for s in outcome.reading.statements if s.kind in OPS)
    if outcome.reading.is_stream or overlaps:
        return
    if any(not isinstance(item, syntax.Memory) for item in priced):
        return
    makespan = _makespan(outcome)
    if makespan is not None:
        yield Form("makespan", makespan)
        work = _work(outcome)
        if work is not None:
            yield Form("work", work)
            yield Form("bubble", simplified(makespan.sub(work)))


def _durations() -> dict[Kind, int]:
    """How long ops take at unit costs."""
    layout = Layout((0,), (Pipeline("", 0, 1, 1),))
    durations = UNIT.durations(layout)
    return {Kind(kind): int(durations[Kind(kind)][0]) for kind in OPS}


# Time


def _makespan(outcome: Outcome) -> isl.PwAff | None:
    """The makespan of the ideal execution, for the sizes for which it was found."""
    rest = outcome.proved
    pieces: list[isl.PwAff] = []
    for reading in (outcome.reading, _refined(outcome.reading)):
        pieces += _by_cases(_Timing(reading), rest)
        for piece in pieces:
            rest = rest - piece.domain()
        if rest.is_empty():
            break
    if not pieces:
        return None
    result = pieces[0]
    for piece in pieces[1:]:
        result = result.union_add(piece)
    return simplified(result)


def _refined(reading: Reading) -> Reading:
    """The same program with more statements: an op is cut where another one in the same loops
    begins or ends to run beside it, since its own pace may change there.
    """
    statements: list[Statement] = []
    for one in reading.statements:
        parts = [one.domain]
        for other in reading.statements:
            if other.indices == one.indices:
                parts = [
                    part.coalesce()
                    for whole in parts
                    for part in (whole & other.domain, whole - other.domain)
                    if not part.is_empty()
                ]
        for part in parts:
            statements.append(evolve(one, number=len(statements), domain=part))
    return evolve(reading, statements=tuple(statements))


def _by_cases(timing: _Timing, where: isl.Set) -> list[isl.PwAff]:
    """The makespan for some sizes, cut into cases of which each has one affine function."""
    pieces: list[isl.PwAff] = []
    whole = timing.bound(where)
    if whole is not None:
        return [whole]
    for _ in range(_MOST_CASES):
        cut = timing.cut(where)
        if cut is None:
            return pieces
        piece, where = cut
        pieces.append(piece)
        rest = timing.bound(where)
        if rest is not None:
            return [*pieces, rest]
    return pieces


class _Timing:
    """The ops of a program with what they take, between a start and an end."""

    def __init__(self, reading: Reading) -> None:
        self.sizes = reading.sizes
        self.takes = _durations()
        self.ops = [s for s in reading.statements if s.kind in OPS]
        self.relations = relations = Relations(reading)
        edges = []
        for one in self.ops:
            for other in self.ops:
                pairs = relations.before(one, other)
                if not pairs.is_empty():
                    edges.append(Edge(one, other, pairs, "order"))
        for _, maker, user, pairs in relations.needs():
            far = pairs - relations.same_rank(maker, user)
            if not far.is_empty():
                edges.append(Edge(maker, user, far, "need"))
        for op in self.ops:
            domain = relations.items[op.number].domain()
            edges.append(_beside(_pseudo(_START, op), op, domain))
            edges.append(_beside(op, _pseudo(_END, op), domain))
        self.edges = edges

    def delays(self) -> dict[int, int]:
        """What ops take, by their kinds; the start takes nothing."""
        return {int(kind): takes for kind, takes in self.takes.items()}

    def bound(self, where: isl.Set) -> isl.PwAff | None:
        """The makespan for some sizes, if it is one affine function of them."""
        pairs = [
            evolve(each, delay=0 if each.edge.source.number == _START else each.delay)
            for each in pairs_of(self.edges, self.sizes, where, self.delays())
        ]
        samples = _samples(where, self.sizes)
        none = tuple([Fraction(0)] * (1 + len(self.sizes)))
        least_end = tuple(
            Fraction(sum((1, *sample)[at] for sample in samples)) for at in range(len(none))
        )
        first = solve(pairs, len(self.sizes), True, Wish({_END: least_end}, {_START: none}))
        if first is None:
            return None
        if any(not _keeps(each, len(self.sizes), first) for each in pairs):
            return None
        makespan = _of_sizes(first[_END], self.sizes).intersect_domain(where)
        if self.is_reached(pairs, first, first, where):
            return makespan
        # Ops that could as well be earlier, or later, are in no chain: those that are left out.
        ends = {_START: none, _END: first[_END]}
        weights = self.weights(where, samples)
        rows = solve(pairs, len(self.sizes), True, Wish(weights, ends))
        latest = {of: tuple(-value for value in row) for of, row in weights.items()}
        late = solve(pairs, len(self.sizes), True, Wish(latest, ends))
        if rows is None or late is None:
            return None
        is_right = all(
            _keeps(each, len(self.sizes), stamps) for each in pairs for stamps in (rows, late)
        )
        return makespan if is_right and self.is_reached(pairs, rows, late, where) else None

    def weights(self, where: isl.Set, samples: Sequence[Sequence[int]]) -> dict[int, Row]:
        """Weights by which all ops count alike at some sizes, by their first and last instances."""
        weights = {}
        for op in self.ops:
            domain = _plain(self.relations.items[op.number].domain(), where)
            row = [0] * (1 + len(self.sizes) + len(op.indices))
            for sample in samples:
                fixed = domain
                for size, value in zip(self.sizes, sample, strict=True):
                    at = fixed.find_dim_by_name(isl.dim_type.param, size)
                    if at >= 0:
                        fixed = fixed.fix_val(isl.dim_type.param, at, isl.Val(value))
                if fixed.is_empty():
                    continue
                for extreme in (fixed.lexmin(), fixed.lexmax()):
                    point = extreme.sample_point()
                    values = [
                        int(point.get_coordinate_val(isl.dim_type.set, at).to_python())
                        for at in range(len(op.indices))
                    ]
                    row = [one + more for one, more in zip(row, (1, *sample, *values), strict=True)]
            weights[op.number] = tuple(map(Fraction, row))
        return weights

    def is_reached(
        self,
        pairs: Sequence[Pairs],
        rows: Mapping[int, Row],
        late: Mapping[int, Row],
        where: isl.Set,
    ) -> bool:
        """Whether at all of some sizes a chain without gaps leads from the start to the end. Only
        ops that are as late as can be are in one.
        """
        size = len(self.sizes)
        tight = []
        for each in pairs:
            delay = _const(each, each.delay)
            closed = each.points & gap(each, size, rows).eq_set(delay)
            if not closed.is_empty():
                tight.append((each.edge, closed))
        chained: dict[int, isl.Set] = {}
        for op in self.ops:
            if op.number not in rows:
                continue
            domain = _plain(self.relations.items[op.number].domain(), where)
            row = [one - other for one, other in zip(rows[op.number], late[op.number], strict=True)]
            domain = domain.align_params(pairs[0].points.get_space().params())
            chained[op.number] = domain & affine(domain, size, row).zero_set()
        for _ in range(_ROUNDS):
            following: dict[int, isl.Set] = {
                number: isl.Set.empty(part.get_space()) for number, part in chained.items()
            }
            for edge, closed in tight:
                source, target = edge.source, edge.target
                if target.number == _END:
                    continue
                ones = len(source.indices)
                if source.number != _START:
                    inside = _as_source(chained[source.number], closed)
                    closed = closed & inside
                reached = closed.project_out(isl.dim_type.set, 0, ones).reset_tuple_id()
                following[target.number] = following[target.number] | reached
            is_stable = True
            for number_of, part in chained.items():
                left = (part & following[number_of]).coalesce()
                is_stable &= part.is_subset(left)
                chained[number_of] = left
            if is_stable:
                break
        else:
            return False
        ends = isl.Set("{ : 1 = 0 }")
        for edge, closed in tight:
            if edge.target.number == _END and edge.source.number in chained:
                ends = ends | (closed & _as_source(chained[edge.source.number], closed)).params()
        return bool(where.is_subset(ends))

    def cut(self, where: isl.Set) -> tuple[isl.PwAff, isl.Set] | None:
        """The makespan of some part of the sizes, as one affine function, and the other sizes; None
        if no such part was found.
        """
        ranks, microbatches = symbol("ranks"), symbol("microbatches")
        for factor in (1, 2):
            limit = ranks.scale_val(isl.Val(factor))
            part = (where & microbatches.ge_set(limit)).coalesce()
            rest = (where - part).coalesce()
            if part.is_empty() or rest.is_empty():
                continue
            piece = self.bound(part)
            if piece is not None:
                return piece, rest
        return None


def _beside(source: Statement, target: Statement, domain: isl.Set) -> Edge:
    """From the start to each instance of an op, or from these to the end."""
    none = isl.Set("{ [] }")
    if source.number == _START:
        return Edge(source, target, isl.Map.from_domain_and_range(none, domain), "need")
    return Edge(source, target, isl.Map.from_domain_and_range(domain, none), "need")


def _pseudo(number_of: int, like: Statement) -> Statement:
    """The start or the end as a statement."""
    return evolve(like, number=number_of, indices=(), span=Span(0, 0))


def _keeps(pairs: Pairs, sizes: int, rows: Mapping[int, Row]) -> bool:
    short = gap(pairs, sizes, rows).lt_set(_const(pairs, pairs.delay))
    return bool((pairs.points & short).is_empty())


def _const(pairs: Pairs, value: int) -> isl.PwAff:
    return affine(pairs.points, 0, [Fraction(value)])


def _plain(domain: isl.Set, where: isl.Set) -> isl.Set:
    return domain.intersect_params(where).reset_tuple_id()


def _as_source(part: isl.Set, pairs: isl.Set) -> isl.Set:
    """The pairs of which the first half is in a set."""
    more = pairs.dim(isl.dim_type.set) - part.dim(isl.dim_type.set)
    return part.add_dims(isl.dim_type.set, more)


def _samples(where: isl.Set, sizes: Sequence[str]) -> list[list[int]]:
    """Some sizes of a set: a few small and large ones."""
    samples = []
    values = (1, 2, 3, 5, 8, 20, 60)
    for one in values:
        for other in values:
            sample = [one, other, *[2] * (len(sizes) - 2)][: len(sizes)]
            fixed = where
            for size, value in zip(sizes, sample, strict=True):
                at = fixed.find_dim_by_name(isl.dim_type.param, size)
                if at >= 0:
                    fixed = fixed.fix_val(isl.dim_type.param, at, isl.Val(value))
            if not fixed.is_empty():
                samples.append(sample)
    return samples


def _of_sizes(row: Sequence[Fraction], sizes: Sequence[str]) -> isl.PwAff:
    result = number(0)
    for value, term in zip(row, [number(1), *map(symbol, sizes)], strict=True):
        factor = isl.Val(value.numerator).div(isl.Val(value.denominator))
        result = result.add(term.scale_val(factor))
    return result


def _work(outcome: Outcome) -> isl.PwAff | None:
    """What the busiest rank works: all microbatches of all of its stages."""
    reading = outcome.reading
    if len(reading.sizes) > 2:
        # Microbatches times slices are no affine function.
        return None
    takes = _durations()
    kinds = {s.kind for s in reading.statements}
    of_unit = takes[Kind.F]
    if kinds & set(MAKERS[Kind.B]):
        of_unit += takes[Kind.B]
    if Kind.R in kinds:
        relations = outcome.relations
        if not relations.made(Kind.F).is_equal(relations.made(Kind.R)):
            return None
        of_unit += takes[Kind.R]
    total = number(0)
    for stage in reading.own_stages:
        for line in reading.lines:
            own = stage.domain() & between(line.first, stage, line.first.add(line.stages))
            part = line.microbatches.scale_val(isl.Val(of_unit)).intersect_domain(own)
            total = total.add(part.union_add(number(0).intersect_domain(own.complement())))
    every = between(number(0), symbol(RANK), symbol("ranks"))
    return _highest(total, outcome.proved & every, reading.sizes)


# Memory


def _peak(outcome: Outcome) -> isl.PwAff | None:
    """The most activations that a rank holds."""
    reading, relations = outcome.reading, outcome.relations
    ops = [s for s in reading.statements if s.kind in OPS]
    if any(s.batch for s in ops):
        return None
    kinds = {s.kind for s in ops}
    holding = [s for s in ops if OPS[s.kind].holds > 0]
    if kinds == {Kind.F}:
        staying: list[Statement] = []
    elif Kind.R in kinds:
        if not relations.made(Kind.F).is_equal(relations.made(Kind.R)):
            return None
        staying = [s for s in holding if s.kind == Kind.R]
    else:
        staying = holding
    giving = [s for s in ops if OPS[s.kind].holds < 0]
    most: isl.PwAff | None = None
    keep = ("updates", *reading.sizes, RANK)
    for op in holding:
        held = number(1)
        for sign, others in ((1, staying), (-1, giving)):
            for other in others:
                counted = how_many_before(_many(op), _many(other))
                if counted is None:
                    return None
                held = held.add(counted.scale_val(isl.Val(sign)))
        domain = op.domain & outcome.proved
        highest = _highest(held, domain, keep)
        most = highest if most is None else most.union_max(highest)
    return None if most is None else simplified(most)


def _many(statement: Statement) -> Many:
    return Many(statement.domain, statement.indices, statement.order)


def _highest(function: isl.PwAff, where: isl.Set, keep: Sequence[str]) -> isl.PwAff:
    """The highest value of a function over all symbols but some."""
    values = where & symbol("_value").eq_set(function)
    values = sizes_only(values, [*keep, "_value"])
    return points(values, ["_value"]).dim_max(0).coalesce()
