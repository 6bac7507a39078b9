"""The makespan as a function of the sizes, proved from both sides.

Stamps that grow along each edge by what its source takes, from 0 on, are an upper bound for it: a
linear program finds the ones with the least. It is also a lower bound where some op that ends last
has a chain of ops before it, each one behind the one before without a gap, down to one that begins
at 0. Those that have such a chain are what remains when ops without are taken away again and again;
that is done exactly, by isl. Where bound and chain do not meet for all sizes, these are cut into
cases; some may remain without.

Ops that overlap begin together, and all of them are over when the last one is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from itertools import count
from math import prod

import islpy as isl
from attrs import evolve

from schedlang.diagnostics.source import Span
from schedlang.extras.prove.sets.counting import RANK, entry, renamed
from schedlang.extras.prove.sets.cycles import Instance, instances
from schedlang.extras.prove.sets.isl_functions import (
    at_sizes,
    condition_of,
    coordinates,
    function_map,
    number,
    points,
    symbol,
    without,
)
from schedlang.extras.prove.sets.numbers import (
    BASE,
    Number,
    of_symbol,
    simplified_number,
    under,
    union,
)
from schedlang.extras.prove.sets.outcome import Outcome, parts_of
from schedlang.extras.prove.sets.relations import Edge, Relations
from schedlang.extras.prove.sets.stamps import (
    Frame,
    Pairs,
    Row,
    Wish,
    gap,
    keeps,
    pairs_of,
    solve,
)
from schedlang.extras.prove.sets.statements import (
    GROUPS,
    LATER,
    REST,
    STAGE,
    Reading,
    Statement,
)
from schedlang.schedule.kinds import OPS, Kind

#: How long ops take, by their kinds.
Takes = Mapping[Kind, int]

#: The size in the base of which all updates of a stream are counted.
MICROBATCHES = "microbatches"
#: Stamps are looked for along so many kinds of edges.
_MOST_PAIRS = 2500
#: At so many of the smallest sizes a bound is compared with the makespan.
_TRIED = 4
#: So often ops without a chain are taken away one by one, and then the whole statement.
_ROUNDS = 1
#: or where they are more parts than these.
_MOST_PARTS = 4
#: Before all ops, and behind them.
_START = -1
_END = -2
#: Into so many cases the sizes are cut at most, one after the other.
_MOST_CASES = 2


def makespan_of(outcome: Outcome, takes: Takes, base: str | None) -> Number | None:
    """The makespan of the ideal execution, for the sizes for which it was found."""
    rest = outcome.proved
    pieces: list[Number] = []
    for found in _ways(outcome.reading, takes, base):
        pieces += found(rest)
        for piece in pieces:
            rest = (rest - piece.domain()).coalesce()
        if rest.is_empty():
            break
    if not pieces:
        return None
    return simplified_number(union(pieces))


def _ways(
    reading: Reading, takes: Takes, base: str | None
) -> Iterator[Callable[[isl.Set], list[Number]]]:
    """Ways to find the makespan for some sizes, each for those that the ones before leave."""
    timing = _Timing(reading, takes, base)
    yield partial(_by_cases, timing)
    # With ops cut where their stamps are too late; sets of groups have too many cases for that.
    if not reading.in_base:
        yield lambda rest: [
            each for each in [timing.bound(rest, is_cut=True)] if each is not None
        ]
    # More statements give more freedom for stamps; in the end these are for the sizes part by part.
    refined = _refined(reading)
    finer = _Timing(refined, takes, base)
    yield partial(_by_cases, finer)
    yield lambda rest: [
        each for part in parts_of(rest, refined) for each in _by_cases(finer, part)
    ]


def _refined(reading: Reading) -> Reading:
    """The same program with more statements: an op is cut where another one in the same loops
    begins or ends to run beside it, and where what its stage makes goes elsewhere by another rule
    than of other stages, since its own pace may change there.
    """
    statements: list[Statement] = []
    rounds = [_rounds(one) for one in reading.statements]
    goes = [
        without(isl.Set.from_basic_set(part), [LATER])
        for part in reading.onward.get_basic_sets()
    ]
    for one, own in zip(reading.statements, rounds, strict=True):
        cuts = [
            without(part & symbol(STAGE).eq_set(one.stage), [STAGE]) for part in goes
        ]
        for other, others in zip(reading.statements, rounds, strict=True):
            if len(other.order) == len(one.order):
                beside = own.intersect_range(others.range()).domain()
                cuts.append(condition_of(beside, one.indices))
        for part in _cut_by(one.domain, cuts):
            statements.append(evolve(one, number=len(statements), domain=part))
    return evolve(reading, statements=tuple(statements))


def _lasting(reading: Reading, takes: Takes) -> tuple[Reading, dict[int, int]]:
    """The same program, with an op cut where others begin or end to overlap with it; and how long
    each statement lasts, by its number: ops that overlap are over when all are.
    """
    relations = Relations(reading)
    statements: list[Statement] = []
    lasts = {_START: 0}
    for one in reading.statements:
        overlapping = [
            (other, condition_of(relations.together(one, other).domain(), one.indices))
            for other in reading.statements
            if one.batch
            and other.batch == one.batch
            and other is not one
            and one.kind in OPS
        ]
        for part in _cut_by(one.domain, [where for _, where in overlapping]):
            mates = [
                other.kind for other, where in overlapping if part.is_subset(where)
            ]
            if one.kind in OPS:
                lasts[len(statements)] = sum(takes[kind] for kind in [one.kind, *mates])
            statements.append(evolve(one, number=len(statements), domain=part))
    return evolve(reading, statements=tuple(statements)), lasts


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
    return function_map(
        statement.domain, names, statement.name, [symbol(RANK), *entries]
    )


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

    def __init__(self, reading: Reading, takes: Takes, base: str | None) -> None:
        self.takes = takes
        self.frame = Frame(reading.sizes, base)
        self.sizes = reading.sizes
        self.reading, self.lasts = _lasting(reading, takes)
        reading = self.reading
        self.ops = [s for s in reading.statements if s.kind in OPS]
        # Without the transfers that a program writes.
        ideal = evolve(reading, statements=tuple(self.ops))
        self.relations = relations = Relations(ideal)
        edges = relations.edges()
        for op in self.ops:
            domain = relations.items[op.number].domain()
            # All ops wait for the start, and the end for all ops: so its stamp is the makespan.
            #
            #     start ──► F ──► … ──► B ──► end
            #       0                          makespan, as small as can be
            edges.append(_beside(_pseudo(_START, op), op, domain))
            edges.append(_beside(op, _pseudo(_END, op), domain))
        self.edges = edges

    def bound(self, where: isl.Set, is_cut: bool = False) -> Number | None:
        """The makespan for some sizes, if it is one affine function of them: as ops are, or where
        that fails with some of them cut.
        """
        pairs = pairs_of(self.edges, self.frame, where, self.lasts)
        if len(pairs) > _MOST_PAIRS:
            return None
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
        is_least = self.is_met(first[_END], samples)
        if is_least and _Chain(self, pairs, first, first, where).reaches_end():
            return makespan
        if not (is_least or is_cut):
            return None
        # Ops that could as well be earlier, or later, are in no chain: those that are left out.
        ends = {_START: none, _END: first[_END]}
        weights = self.weights(where, samples)
        rows = solve(pairs, self.frame, True, Wish(weights, ends))
        latest = {of: tuple(-value for value in row) for of, row in weights.items()}
        late = solve(pairs, self.frame, True, Wish(latest, ends))
        if rows is None or late is None:
            return None
        is_right = all(
            keeps(each, self.frame, stamps, each.delay)
            for each in pairs
            for stamps in (rows, late)
        )
        if not is_right:
            return None
        chain = _Chain(self, pairs, rows, late, where)
        if is_least and chain.reaches_end():
            return makespan
        if not is_cut:
            return None
        # An op that waits for nothing has a stamp that is too late: there it gets one of its own.
        reading = _cut_where(self.reading, chain.idle())
        return _Timing(reading, self.takes, self.frame.base).bound(where)

    def is_met(self, end: Row, samples: Sequence[Sequence[int]]) -> bool:
        """Whether a bound is the makespan at some small sizes: else it is too high, and has no
        chain.
        """
        small = sorted(samples, key=lambda sample: prod(size + 1 for size in sample))[
            :_TRIED
        ]
        for sample in small:
            at = dict(zip(self.sizes, sample, strict=True))
            bound = sum(
                one * other
                for one, other in zip(end, self.terms([sample]), strict=True)
            )
            if bound != makespan_at(self.edges, self.lasts, at):
                return False
        return True

    def terms(self, samples: Sequence[Sequence[int]]) -> Row:
        """The terms of a function at some sizes and points, each summed up."""
        total: list[int] = []
        for sample in samples:
            terms = [1, *sample]
            if self.frame.base is not None:
                base = sample[self.sizes.index(self.frame.base)]
                terms += [base * term for term in terms]
            total = [
                one + more
                for one, more in zip(total or [0] * len(terms), terms, strict=True)
            ]
        return tuple(map(Fraction, total))

    def weights(
        self, where: isl.Set, samples: Sequence[Sequence[int]]
    ) -> dict[int, Row]:
        """Weights by which all ops count alike at some sizes, by their first and last instances."""
        weights = {}
        for op in self.ops:
            domain = _plain(self.relations.items[op.number].domain(), where)
            instances: list[list[int]] = []
            for sample in samples:
                fixed = at_sizes(domain, dict(zip(self.sizes, sample, strict=True)))
                if fixed.is_empty():
                    continue
                for extreme in (fixed.lexmin(), fixed.lexmax()):
                    instances.append([*sample, *coordinates(extreme.sample_point())])
            weights[op.number] = self.terms(instances)
        return weights

    def cut(self, where: isl.Set) -> tuple[Number, isl.Set] | None:
        """The makespan of some part of the sizes, as one affine function, and the other sizes; None
        if no such part was found.
        """
        if {BASE, MICROBATCHES} <= {*self.sizes}:
            microbatches = of_symbol(MICROBATCHES)
        elif {BASE, GROUPS, REST} <= {*self.sizes}:
            microbatches = Number(symbol(REST), symbol(GROUPS))
        else:
            return None
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


class _Chain:
    """The ops of some sizes that have a chain of ops before them, each right behind the one before:
    by stamps as early as can be, and as late as can be. Only ops of which both are one are in a
    chain as long as the makespan.
    """

    def __init__(
        self,
        timing: _Timing,
        pairs: Sequence[Pairs],
        rows: Mapping[int, Row],
        late: Mapping[int, Row],
        where: isl.Set,
    ) -> None:
        frame = timing.frame
        self.where = where
        self.tight: list[tuple[Edge, isl.Set]] = []
        self.together: list[tuple[Edge, isl.Set]] = []
        for each in pairs:
            grows, factor = gap(each, frame, rows)
            # An edge without a gap: its target begins right when its source is over.
            closed = each.points & grows.within(each.points).equals(each.delay * factor)
            if closed.is_empty():
                continue
            if each.edge.why == "together":
                self.together.append((each.edge, closed))
            # A chain of ops that take no time may lead nowhere.
            elif each.delay or each.edge.source.number == _START:
                self.tight.append((each.edge, closed))
        self.ops: dict[int, isl.Set] = {}
        for op in timing.ops:
            if op.number not in rows:
                continue
            domain = _plain(timing.relations.items[op.number].domain(), where)
            row = [
                one - other
                for one, other in zip(rows[op.number], late[op.number], strict=True)
            ]
            domain = frame.aligned(domain)
            differs, _ = frame.number(domain, row)
            self.ops[op.number] = domain & differs.within(domain).equals(0)

    def following(self, ops: Mapping[int, isl.Set]) -> dict[int, isl.Set]:
        """Those of some ops that are right behind others of them, or behind the start."""
        none = {of: isl.Set.empty(part.get_space()) for of, part in ops.items()}
        following = _led_to(self.tight, ops, none, ops)
        # What overlaps with one that is begins with it.
        return _led_to(self.together, following, following, ops)

    def idle(self) -> dict[int, isl.Set]:
        """The ops that are behind none."""
        following = self.following(self.ops)
        return {of: (part - following[of]).coalesce() for of, part in self.ops.items()}

    def reaches_end(self) -> bool:
        """Whether at all sizes a chain leads from the start to the end."""
        chained = self.ops
        # Kept are ops that have one before them that is kept; all others are taken away, until
        # nothing changes. A chain is one of some ops: what loses some again and again can go.
        for turn in count():
            left = self.following(chained)
            losing = {
                of for of, part in chained.items() if not part.is_subset(left[of])
            }
            if not losing:
                break
            for of in losing:
                if turn >= _ROUNDS or left[of].n_basic_set() > _MOST_PARTS:
                    left[of] = left[of] - left[of]
            chained = left
        ends = isl.Set("{ : 1 = 0 }")
        for edge, closed in self.tight:
            if edge.target.number == _END and edge.source.number in chained:
                ends = (
                    ends
                    | (
                        closed & _as_source(chained[edge.source.number], closed)
                    ).params()
                )
        return bool(self.where.is_subset(ends))


def _cut_where(reading: Reading, points_of: Mapping[int, isl.Set]) -> Reading:
    """The same program, with each statement cut where some of its instances begin and end."""
    statements: list[Statement] = []
    for one in reading.statements:
        some = points_of.get(one.number)
        cuts = []
        if some is not None and not some.is_empty():
            cuts = [*_borders(some, one), *_ends(one)]
        for part in _cut_by(one.domain, cuts):
            statements.append(evolve(one, number=len(statements), domain=part))
    return evolve(reading, statements=tuple(statements))


def _ends(statement: Statement) -> list[isl.Set]:
    """Of each loop of a statement, the first round and the last one."""
    ends = []
    for index in statement.indices[1:]:
        for step in (1, -1):
            moved = renamed(statement.domain, {index: "_other"})
            moved = moved & symbol("_other").eq_set(symbol(index).add(number(step)))
            ends.append(statement.domain - without(moved, ["_other"]))
    return ends


def _borders(some: isl.Set, statement: Statement) -> list[isl.Set]:
    """The conditions by which some instances of a statement are other than the rest."""
    every = points(statement.domain, statement.indices)
    width = len(statement.indices)
    borders = []
    for part in some.gist(every).get_basic_sets():
        if part.dim(isl.dim_type.div):
            borders.append(isl.Set.from_basic_set(part))
            continue
        for constraint in part.get_constraints():
            if constraint.involves_dims(isl.dim_type.set, 0, width):
                border = isl.BasicSet.universe(part.get_space()).add_constraint(
                    constraint
                )
                borders.append(isl.Set.from_basic_set(border))
    return [condition_of(border, statement.indices) for border in borders]


def _led_to(
    edges: Sequence[tuple[Edge, isl.Set]],
    sources: Mapping[int, isl.Set],
    others: Mapping[int, isl.Set],
    within: Mapping[int, isl.Set],
) -> dict[int, isl.Set]:
    """The ops within some to which edges lead from some sources, or from the start; and others."""
    result = dict(others)
    for edge, pairs in edges:
        target = edge.target.number
        if target == _END:
            continue
        if edge.source.number != _START:
            pairs = pairs & _as_source(sources[edge.source.number], pairs)
        reached = pairs.project_out(isl.dim_type.set, 0, len(edge.source.indices))
        result[target] = result[target] | (reached.reset_tuple_id() & within[target])
    return {of: part.coalesce() for of, part in result.items()}


def makespan_at(
    edges: Sequence[Edge], lasts: Mapping[int, int], sizes: Mapping[str, int]
) -> int:
    """The makespan at one size: as long as the longest chain of ops."""
    behind: dict[Instance, list[tuple[Instance, int]]] = defaultdict(list)
    for edge in edges:
        delay = 0 if edge.why == "together" else lasts[edge.source.number]
        for source, target in instances(edge, sizes):
            behind[source].append((target, delay))
    start = dict.fromkeys(behind, 0)
    queue = deque(behind)
    while queue:
        source = queue.popleft()
        for target, delay in behind[source]:
            if start.get(target, -1) < start[source] + delay:
                start[target] = start[source] + delay
                if target in behind:
                    queue.append(target)
    return start[_END, ()]


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
            sample = [one, other, *(0 if size == REST else 2 for size in sizes[2:])][
                : len(sizes)
            ]
            fixed = at_sizes(where, dict(zip(sizes, sample, strict=True)))
            if not fixed.is_empty():
                samples.append(sample)
    return samples or [list(coordinates(points(where, sizes).sample_point()))]


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
