"""The makespan as a function of the sizes, with a proof from both sides.

Stamps that start at 0 and grow along each edge by what the source takes are an upper bound of the
makespan; a linear program finds the stamps with the least bound. The bound is reached if some op
that ends last has a chain of ops before it without a gap, down to an op that starts at 0. Such
chains are found exactly, by isl: ops that do not follow another one without a gap are removed,
again and again, until nothing changes. Where bound and chain do not meet for all sizes, the sizes
are cut into cases; some may remain without a makespan.

Ops that overlap begin together, and end together when the last one is done.
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

#: The base in which all updates of a program without a flush are counted.
MICROBATCHES = "microbatches"
#: The most convex parts of all edges for which stamps are looked for.
_MOST_PAIRS = 2500
#: The number of small sizes at which a bound is compared with the makespan.
_TRIED = 4
#: Ops without a chain are removed one by one in this many passes; afterwards the whole statement is
#: removed.
_ROUNDS = 1
#: A statement is also removed as a whole if its remaining ops are more convex parts than this.
_MOST_PARTS = 4
#: The numbers of two pseudo-statements: all ops wait for the start, and the end waits for all ops.
_START = -1
_END = -2
#: The most cases into which the sizes are cut, one after the other.
_MOST_CASES = 2


def makespan_of(outcome: Outcome, takes: Takes, base: str | None) -> Number | None:
    """The makespan of the ideal execution, at the sizes for which it was found. `takes` has the
    duration of each kind of op.
    """
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
    """Ways to find the makespan, each for the sizes that the ones before left."""
    timing = _Timing(reading, takes, base)
    yield partial(_by_cases, timing)
    # Cut ops whose stamps are too late; sets with groups have too many cases for that.
    if not reading.in_base:
        yield lambda rest: [
            each for each in [timing.bound(rest, is_cut=True)] if each is not None
        ]
    # More statements leave more freedom for stamps. At last, try the sizes part by part.
    refined = _refined(reading)
    finer = _Timing(refined, takes, base)
    yield partial(_by_cases, finer)
    yield lambda rest: [
        each for part in parts_of(rest, refined) for each in _by_cases(finer, part)
    ]


def _refined(reading: Reading) -> Reading:
    """The same program with more statements. An op is cut where another one in the same loops
    begins or ends to run beside it, and where its stage passes on its result by another edge rule
    than other stages: its pace may change there.
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
    """The same program, with each op cut where others begin or end to overlap with it; and the
    duration of each statement, by number: ops that overlap end together.
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
    """A condition, cut into the parts where each of `cuts` holds and where it does not."""
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
    """The makespan for some sizes, cut into cases with one affine function each."""
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
    """The event graph of a program between a start and an end, with the durations of its ops."""

    def __init__(self, reading: Reading, takes: Takes, base: str | None) -> None:
        self.takes = takes
        self.frame = Frame(reading.sizes, base)
        self.sizes = reading.sizes
        self.reading, self.lasts = _lasting(reading, takes)
        reading = self.reading
        self.ops = [s for s in reading.statements if s.kind in OPS]
        # The ideal execution has no transfers.
        ideal = evolve(reading, statements=tuple(self.ops))
        self.relations = relations = Relations(ideal)
        edges = relations.edges()
        for op in self.ops:
            domain = relations.items[op.number].domain()
            # All ops wait for the start, and the end waits for all ops: its stamp is the makespan.
            #
            #     start ──► F ──► … ──► B ──► end
            #       0                          makespan, as small as can be
            edges.append(_beside(_pseudo(_START, op), op, domain))
            edges.append(_beside(op, _pseudo(_END, op), domain))
        self.edges = edges

    def bound(self, where: isl.Set, is_cut: bool = False) -> Number | None:
        """The makespan for some sizes, if it is one affine function. With `is_cut`, a failed
        attempt is repeated with ops cut where they wait for nothing.
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
        makespan = self.frame.function(self.frame.aligned(where), first[_END])
        makespan = makespan.within(where)
        # The stamp of the end is an upper bound; a chain of ops of that length is a lower bound.
        # Ops with slack may hide the chain. Then the earliest and the latest stamps of all ops are
        # found, and only ops for which these are equal are looked at.
        is_least = self.is_met(first[_END], samples)
        if is_least and _Chain(self, pairs, first, first, where).reaches_end():
            return makespan
        if not (is_least or is_cut):
            return None
        # Ops with slack are in no chain without gaps.
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
        # The stamps of ops that wait for nothing are too late: these ops get statements of their
        # own.
        reading = _cut_where(self.reading, chain.idle())
        return _Timing(reading, self.takes, self.frame.base).bound(where)

    def is_met(self, end: Row, samples: Sequence[Sequence[int]]) -> bool:
        """Whether a bound equals the makespan at some small sizes. If not, it is too high."""
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
        """The terms of a function, summed over some sizes and points."""
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
        """Weights that make all ops count alike in the objective: the sum over the first and last
        instance of each statement at some sizes.
        """
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
        """The makespan for a part of the sizes as one affine function, and the remaining sizes;
        None if there is no such part.
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
    """The ops that may belong to a chain without gaps, at some sizes. An op of such a chain starts
    at the same time in the earliest stamps (`rows`) and in the latest ones (`late`).
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
            # Edges without a gap: the target starts when the source ends.
            closed = each.points & grows.within(each.points).equals(each.delay * factor)
            if closed.is_empty():
                continue
            if each.edge.why == "together":
                self.together.append((each.edge, closed))
            # A chain of ops that take no time may be a loop.
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
        """The ops that follow another one, or the start, without a gap."""
        none = {of: isl.Set.empty(part.get_space()) for of, part in ops.items()}
        following = _led_to(self.tight, ops, none, ops)
        # An op that overlaps with such an op begins with it.
        return _led_to(self.together, following, following, ops)

    def idle(self) -> dict[int, isl.Set]:
        """The ops that follow none without a gap."""
        following = self.following(self.ops)
        return {of: (part - following[of]).coalesce() for of, part in self.ops.items()}

    def reaches_end(self) -> bool:
        """Whether at all sizes a chain leads from the start to the end."""
        chained = self.ops
        # Keep the ops that follow one that is kept, until nothing changes. This keeps all ops of
        # chains from the start. A statement that loses ops again and again is dropped as a whole,
        # which is safe: a chain may be missed, but none is invented.
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
    """The same program, with each statement cut at the borders of some of its instances."""
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
    """The first and the last round of each loop of a statement."""
    ends = []
    for index in statement.indices[1:]:
        for step in (1, -1):
            moved = renamed(statement.domain, {index: "_other"})
            moved = moved & symbol("_other").eq_set(symbol(index).add(number(step)))
            ends.append(statement.domain - without(moved, ["_other"]))
    return ends


def _borders(some: isl.Set, statement: Statement) -> list[isl.Set]:
    """The constraints that separate some instances of a statement from the rest."""
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
    """The ops within `within` to which an edge leads from `sources` or from the start; and
    `others`.
    """
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
    """The makespan at one size: the length of the longest chain."""
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
    """The edges from the start to all instances of an op, or from these to the end."""
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
    """The pairs whose first half is in a set."""
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
