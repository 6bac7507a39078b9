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
from contextlib import suppress
from fractions import Fraction
from itertools import combinations

import islpy as isl
from attrs import evolve, frozen

from schedlang.diagnostics.source import Span
from schedlang.language import syntax
from schedlang.parametric.ranks.checks import Edge, Relations, sizes_only
from schedlang.parametric.ranks.counting import RANK, Many, entry, how_many_before
from schedlang.parametric.ranks.numbers import (
    BASE,
    Number,
    Unreadable,
    digits,
    folded,
    most,
    multiple_of_base,
    of_number,
    of_symbol,
    simplified_number,
    under,
    union,
)
from schedlang.parametric.ranks.prove import Outcome, parts_of
from schedlang.parametric.ranks.stamps import Frame, Pairs, Row, Wish, gap, keeps, pairs_of, solve
from schedlang.parametric.ranks.statements import (
    GROUPS,
    LATER,
    REST,
    STAGE,
    UPDATES,
    Line,
    Reading,
    Statement,
)
from schedlang.parametric.ranks.symbols import (
    between,
    condition_of,
    constant,
    function_map,
    number,
    points,
    symbol,
    without,
)
from schedlang.schedule.costs import UNIT
from schedlang.schedule.kinds import MAKERS, OPS, Kind
from schedlang.schedule.layout import Layout, Pipeline

#: The sizes in the base of which all updates of a stream are counted, and all slices.
_MICROBATCHES = "microbatches"
_SLICES = "slices"
#: The figure that is of each rank.
PEAK = "peak(r)"
#: How often ops without a chain are taken away.
_ROUNDS = 12
#: Before all ops, and behind them.
_START = -1
_END = -2
#: Into so many cases the sizes are cut at most, one after the other.
_MOST_CASES = 2


@frozen(eq=False)
class Form:
    """A figure as a function of the sizes, and of RANK where it is of each rank."""

    figure: str
    value: Number


def forms_of(outcome: Outcome, tree: syntax.Schedule) -> Iterator[Form]:
    """The closed forms of a program, where it is proved; those that were found."""
    reading = outcome.reading
    if sum([reading.is_stream, reading.in_base, _SLICES in reading.sizes]) > 1:
        # Products of three of groups, microbatches, slices and updates.
        return
    priced = [item for item in tree.items if isinstance(item, syntax.Cost)]
    if not any(isinstance(item, syntax.Memory) for item in priced):
        # What a rank holds has no bearing on when its ops run.
        with suppress(Unreadable):
            peak = _peak(outcome)
            if peak is not None:
                yield Form(PEAK, peak)
    if any(s.batch for s in outcome.reading.statements if s.kind in OPS):
        return
    if any(not isinstance(item, syntax.Memory) for item in priced):
        return
    makespan = _makespan(outcome)
    if makespan is not None:
        yield Form("makespan", makespan)
        work = _work(outcome)
        if work is not None:
            yield Form("work", work)
            bubble = makespan.minus(work)
            yield Form("bubble", simplified_number(folded(bubble, bubble.domain())))


def _durations() -> dict[Kind, int]:
    """How long ops take at unit costs."""
    layout = Layout((0,), (Pipeline("", 0, 1, 1),))
    durations = UNIT.durations(layout)
    return {Kind(kind): int(durations[Kind(kind)][0]) for kind in OPS}


def _base(reading: Reading) -> str | None:
    """The base of a program's figures, where they have two digits."""
    wanted = _MICROBATCHES if reading.is_stream else _SLICES
    is_any = wanted in reading.sizes and constant(symbol(wanted), reading.domain) is None
    return wanted if is_any else reading.base


# Time


def _makespan(outcome: Outcome) -> Number | None:
    """The makespan of the ideal execution, for the sizes for which it was found."""
    rest = outcome.proved
    pieces: list[Number] = []
    # The second reading has more statements, and so more freedom for stamps: it is tried for the
    # sizes that are left; and in the end for these part by part.
    readings = (outcome.reading, _refined(outcome.reading))
    for reading, is_cut in ((readings[0], False), (readings[1], False), (readings[1], True)):
        timing = _Timing(reading)
        for part in parts_of(rest, reading) if is_cut else [rest]:
            pieces += _by_cases(timing, part)
        for piece in pieces:
            rest = (rest - piece.domain()).coalesce()
        if rest.is_empty():
            break
    if not pieces:
        return None
    return simplified_number(union(pieces))


def _refined(reading: Reading) -> Reading:
    """The same program with more statements: an op is cut where another one in the same loops
    begins or ends to run beside it, and where what its stage makes goes elsewhere by another rule
    than of other stages, since its own pace may change there.
    """
    statements: list[Statement] = []
    rounds = [_rounds(one) for one in reading.statements]
    goes = [
        without(isl.Set.from_basic_set(part), [LATER]) for part in reading.onward.get_basic_sets()
    ]
    for one, own in zip(reading.statements, rounds, strict=True):
        cuts = [without(part & symbol(STAGE).eq_set(one.stage), [STAGE]) for part in goes]
        for other, others in zip(reading.statements, rounds, strict=True):
            if len(other.order) == len(one.order):
                beside = own.intersect_range(others.range()).domain()
                cuts.append(condition_of(beside, one.indices))
        for part in _cut_by(one.domain, cuts):
            statements.append(evolve(one, number=len(statements), domain=part))
    return evolve(reading, statements=tuple(statements))


def _cut_by(where: isl.Set, cuts: Sequence[isl.Set]) -> list[isl.Set]:
    """A condition cut at others, each into where it holds and where it does not."""
    parts = [where]
    for cut in cuts:
        parts = [
            part.coalesce()
            for whole in parts
            for part in (whole & cut, whole - cut)
            if not part.is_empty()
        ]
    return parts


def _rounds(statement: Statement) -> isl.Map:
    """From a statement's instances to the rounds of its loops."""
    entries = [entry(each, {}) for each in statement.order[:-1]]
    names = statement.indices
    return function_map(statement.domain, names, statement.name, [symbol(RANK), *entries])


def _by_cases(timing: _Timing, where: isl.Set) -> list[Number]:
    """The makespan for some sizes, cut into cases of which each has one affine function."""
    pieces: list[Number] = []
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
        self.frame = Frame(reading.sizes, _base(reading))
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
            # All ops wait for the start, and the end for all ops: so its stamp is the makespan.
            #
            #     start ──► F ──► … ──► B ──► end
            #       0                          makespan, as small as can be
            edges.append(_beside(_pseudo(_START, op), op, domain))
            edges.append(_beside(op, _pseudo(_END, op), domain))
        self.edges = edges

    def delays(self) -> dict[int, int]:
        """What ops take, by their kinds; the start takes nothing."""
        return {int(kind): takes for kind, takes in self.takes.items()}

    def bound(self, where: isl.Set) -> Number | None:
        """The makespan for some sizes, if it is one affine function of them."""
        pairs = [
            evolve(each, delay=0 if each.edge.source.number == _START else each.delay)
            for each in pairs_of(self.edges, self.frame, where, self.delays())
        ]
        samples = _samples(where, self.sizes)
        none = tuple([Fraction(0)] * self.frame.digits * self.frame.width())
        least_end = self.terms(samples)
        first = solve(pairs, self.frame, True, Wish({_END: least_end}, {_START: none}))
        if first is None:
            return None
        if any(not keeps(each, self.frame, first, each.delay) for each in pairs):
            return None
        makespan = _of_sizes(first[_END], self.frame).within(where)
        # Stamps that grow are an upper bound, and a chain of ops as long is a lower one. Ops that
        # have slack may hide the chain: then all are stamped as early and as late as can be, and
        # those of which both are one are looked at.
        if self.is_reached(pairs, first, first, where):
            return makespan
        # Ops that could as well be earlier, or later, are in no chain: those that are left out.
        ends = {_START: none, _END: first[_END]}
        weights = self.weights(where, samples)
        rows = solve(pairs, self.frame, True, Wish(weights, ends))
        latest = {of: tuple(-value for value in row) for of, row in weights.items()}
        late = solve(pairs, self.frame, True, Wish(latest, ends))
        if rows is None or late is None:
            return None
        is_right = all(
            keeps(each, self.frame, stamps, each.delay) for each in pairs for stamps in (rows, late)
        )
        return makespan if is_right and self.is_reached(pairs, rows, late, where) else None

    def terms(self, samples: Sequence[Sequence[int]]) -> Row:
        """The terms of a function at some sizes and points, each summed up."""
        total: list[int] = []
        for sample in samples:
            terms = [1, *sample]
            if self.frame.base is not None:
                base = sample[self.sizes.index(self.frame.base)]
                terms += [base * term for term in terms]
            total = [one + more for one, more in zip(total or [0] * len(terms), terms, strict=True)]
        return tuple(map(Fraction, total))

    def weights(self, where: isl.Set, samples: Sequence[Sequence[int]]) -> dict[int, Row]:
        """Weights by which all ops count alike at some sizes, by their first and last instances."""
        weights = {}
        for op in self.ops:
            domain = _plain(self.relations.items[op.number].domain(), where)
            instances: list[list[int]] = []
            for sample in samples:
                fixed = domain
                for size, value in zip(self.sizes, sample, strict=True):
                    at = fixed.find_dim_by_name(isl.dim_type.param, size)
                    if at >= 0:
                        fixed = fixed.fix_val(isl.dim_type.param, at, isl.Val(value))
                if fixed.is_empty():
                    continue
                for extreme in (fixed.lexmin(), fixed.lexmax()):
                    values = _coordinates(extreme.sample_point(), len(op.indices))
                    instances.append([*sample, *values])
            weights[op.number] = self.terms(instances)
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
        tight = []
        for each in pairs:
            grows, factor = gap(each, self.frame, rows)
            # An edge without a gap: its target begins right when its source is over.
            closed = each.points & grows.within(each.points).equals(each.delay * factor)
            if not closed.is_empty():
                tight.append((each.edge, closed))
        chained: dict[int, isl.Set] = {}
        for op in self.ops:
            if op.number not in rows:
                continue
            domain = _plain(self.relations.items[op.number].domain(), where)
            row = [one - other for one, other in zip(rows[op.number], late[op.number], strict=True)]
            domain = self.frame.aligned(domain)
            differs, _ = self.frame.number(domain, row)
            chained[op.number] = domain & differs.within(domain).equals(0)
        # Kept are ops that have one before them that is kept; all others are taken away, until
        # nothing changes.
        for _ in range(_ROUNDS):
            following: dict[int, isl.Set] = {
                number: isl.Set.empty(part.get_space()) for number, part in chained.items()
            }
            for edge, closed in tight:
                source = edge.source
                target = edge.target
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

    def cut(self, where: isl.Set) -> tuple[Number, isl.Set] | None:
        """The makespan of some part of the sizes, as one affine function, and the other sizes; None
        if no such part was found.
        """
        microbatches = Number(symbol(REST), symbol(GROUPS))
        if self.frame.base != BASE:
            if not {BASE, _MICROBATCHES} <= {*self.sizes}:
                return None
            microbatches = of_symbol(_MICROBATCHES)
        for factor in (1, 2):
            limit = of_symbol(BASE).times(factor)
            part = (where - under(microbatches, limit, where)).coalesce()
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


def _plain(domain: isl.Set, where: isl.Set) -> isl.Set:
    return domain.intersect_params(where).reset_tuple_id()


def _as_source(part: isl.Set, pairs: isl.Set) -> isl.Set:
    """The pairs of which the first half is in a set."""
    more = pairs.dim(isl.dim_type.set) - part.dim(isl.dim_type.set)
    return part.add_dims(isl.dim_type.set, more)


def _samples(where: isl.Set, sizes: Sequence[str]) -> list[list[int]]:
    """Some sizes of a set: a few small and large ones, or any one."""
    samples = []
    values = (1, 2, 3, 5, 8, 20, 60)
    for one in values:
        for other in values:
            sample = [one, other, *(0 if size == REST else 2 for size in sizes[2:])][: len(sizes)]
            fixed = where
            for size, value in zip(sizes, sample, strict=True):
                at = fixed.find_dim_by_name(isl.dim_type.param, size)
                if at >= 0:
                    fixed = fixed.fix_val(isl.dim_type.param, at, isl.Val(value))
            if not fixed.is_empty():
                samples.append(sample)
    return samples or [_coordinates(points(where, sizes).sample_point(), len(sizes))]


def _coordinates(point: isl.Point, width: int) -> list[int]:
    return [int(point.get_coordinate_val(isl.dim_type.set, at).to_python()) for at in range(width)]


def _of_sizes(row: Row, frame: Frame) -> Number:
    """A function of the sizes by its coefficients."""
    digits_of = []
    for digit in range(frame.digits):
        result = number(0)
        terms = [number(1), *map(symbol, frame.sizes)]
        for value, term in zip(row[digit * len(terms) :], terms, strict=False):
            factor = isl.Val(value.numerator).div(isl.Val(value.denominator))
            result = result.add(term.scale_val(factor))
        digits_of.append(result)
    if frame.base is None:
        return Number(digits_of[0])
    low, high = digits_of
    return Number(low, high, frame.base)


def _work(outcome: Outcome) -> Number | None:
    """What the busiest rank works: all slices of all microbatches of all of its stages."""
    reading = outcome.reading
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
    every = outcome.proved & without(reading.held, [STAGE])
    total = of_number(0).within(every)
    for stage in reading.own_stages:
        for line in reading.lines:
            own = stage.domain() & between(line.first, stage, line.first.add(line.stages))
            own = own & every
            run = _run_by(line, reading)
            if run is None:
                return None
            parts = [run.times(of_unit).within(own), of_number(0).within(every - own)]
            total = total.plus(union(parts))
    return _highest(total, every, reading.sizes)


def _run_by(line: Line, reading: Reading) -> Number | None:
    """How many slices a pipeline runs, in all updates; None if it cannot be said."""
    slices = constant(reading.slices, reading.domain)
    if slices is None:
        assert line.microbatches.high is None
        return Number(number(0), line.microbatches.low, _SLICES)
    if not reading.is_stream:
        return line.microbatches.times(slices)
    multiple = multiple_of_base(line.microbatches.low, reading.domain, _MICROBATCHES)
    if multiple is None:
        return None
    _, bases, more = multiple
    low, high = (symbol(UPDATES).scale_val(isl.Val(times * slices)) for times in (more, bases))
    return Number(low, high, _MICROBATCHES)


# Memory


def _peak(outcome: Outcome) -> Number | None:
    """The most activations that a rank holds."""
    reading = outcome.reading
    relations = outcome.relations
    ops = [s for s in reading.statements if s.kind in OPS]
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
    for one, other in combinations(holding, 2):
        is_mate = one.batch and one.batch == other.batch
        if is_mate and not relations.together(one, other).is_empty():
            return None
    highest: list[Number] = []
    keep = ("updates", *reading.sizes, RANK)
    for op in holding:
        # The op's own, and what was taken and not given back before it.
        held = of_number(1)
        for sign, others in ((1, staying), (-1, giving)):
            counted = _counted(op, others, _base(reading) or BASE)
            if counted is None:
                return None
            held = held.plus(counted.times(sign))
        domain = op.domain & outcome.proved
        highest.append(_highest(held, domain, keep))
    peak = _most_of(highest)
    if peak is None:
        return None
    every = outcome.proved & without(reading.held, [STAGE])
    pieces = list(peak.pieces())
    # What is one function for all ranks is said of these in the words in which they are proved.
    if len(pieces) == 1 and pieces[0][0].is_equal(every):
        return pieces[0][1].within(every)
    return peak


def _many(statement: Statement) -> Many:
    return Many(statement.domain, statement.indices, statement.order)


def _counted(op: Statement, others: Sequence[Statement], base: str) -> Number | None:
    """How many of others stand before each instance of an op; None where it cannot be said."""
    cases = list(map(_many, others))
    # The rounds of a call may all be alike where those of its cases are not.
    for each in (cases, _calls(cases)):
        counted = [how_many_before(_many(op), other, base) for other in each]
        if None not in counted:
            total = of_number(0)
            for number_of in filter(None, counted):
                total = total.plus(number_of)
            return total
    return None


def _calls(cases: Sequence[Many]) -> list[Many]:
    """What is counted, with the cases of a call as one."""
    calls: list[Many] = []
    for case in cases:
        if calls and calls[-1].order is case.order:
            calls[-1] = evolve(calls[-1], where=(calls[-1].where | case.where).coalesce())
        else:
            calls.append(case)
    return calls


def _most_of(values: Sequence[Number]) -> Number | None:
    """The most of some numbers at each size at which one has a value."""
    result: Number | None = None
    for value in values:
        if result is None:
            result = value
            continue
        both = result.domain() & value.domain()
        parts = [
            result.within(result.domain() - both),
            value.within(value.domain() - both),
            most([result, value], both).within(both),
        ]
        # Piece by piece, so that they do not become many.
        there = [part for part in parts if not part.domain().is_empty()]
        result = simplified_number(union(there))
    return result


def _highest(value: Number, where: isl.Set, keep: Sequence[str]) -> Number:
    """The highest value of a number over all symbols but some."""
    value = folded(value, where)
    if value.high is None:
        values = where & symbol("_value").eq_set(value.low)
        values = sizes_only(values, [*keep, "_value"])
        return Number(points(values, ["_value"]).dim_max(0).coalesce())
    high, low = digits(value, where)
    values = where & symbol("_high").eq_set(high) & symbol("_low").eq_set(low)
    values = sizes_only(values, [*keep, "_high", "_low"])
    top = points(values, ["_high", "_low"]).lexmax_pw_multi_aff()
    highest = Number(top.get_pw_aff(1), top.get_pw_aff(0), value.base)
    return folded(highest, highest.domain())
