"""The statements of a program as isl relations: the item of each op, its place in the order of its
rank, what it needs, and the edges of the event graph. A relation contains the instances of all
statements, each under the name of its statement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, reduce

import islpy as isl
from attrs import frozen

from schedlang.extras.prove.sets.counting import RANK, entry, renamed
from schedlang.extras.prove.sets.isl_functions import (
    between,
    function_map,
    nowhere,
    number,
    points,
    symbol,
)
from schedlang.extras.prove.sets.statements import (
    LATER,
    STAGE,
    UPDATES,
    Line,
    Reading,
    Statement,
)
from schedlang.schedule.kinds import MAKERS, REPEATS, SENDS, TRANSFERS, Kind
from schedlang.schedule.needs import RULES, Rule

#: The symbols of an item, which is what an op is about: stage, update, the two digits of a
#: microbatch, slice.
ITEM = (STAGE, "_u", "_g", "_m", "_k")
#: The symbols of another item, which an op needs.
NEEDED = tuple(f"{name}2" for name in ITEM)


@frozen(eq=False)
class Edge:
    """Pairs of instances of two statements, of which the second waits for the first. `why` is
    "order" (of one rank), "need", or "together": parts of a batch and the two sides of a message
    happen at once.
    """

    source: Statement
    target: Statement
    pairs: isl.Map
    why: str


@frozen(eq=False)
class Relations:
    """The relations between the statements of a program."""

    reading: Reading

    @cached_property
    def depth(self) -> int:
        """The length of the longest order vector."""
        return max((len(s.order) for s in self.reading.statements), default=0)

    @cached_property
    def items(self) -> dict[int, isl.Map]:
        """For each statement, by number, the relation from its instances to their items."""
        return {
            s.number: function_map(
                s.domain & self.reading.domain, s.indices, s.name, [s.stage, *s.unit]
            )
            for s in self.reading.statements
        }

    @cached_property
    def places(self) -> dict[int, isl.Map]:
        """For each statement, by number, the relation from its instances to the rank and the order
        vector.
        """
        result = {}
        for s in self.reading.statements:
            entries = [entry(each, {}) for each in s.order]
            # Pad all vectors to one length, so that isl can compare them.
            entries += [number(0)] * (self.depth - len(entries))
            values = [symbol(RANK), *entries]
            result[s.number] = function_map(
                s.domain & self.reading.domain, s.indices, s.name, values
            )
        return result

    @cached_property
    def ranks(self) -> isl.UnionMap:
        """From all instances to their ranks."""
        return _union(
            place.project_out(isl.dim_type.out, 1, self.depth)
            for place in self.places.values()
        )

    def of(self, *kinds: Kind) -> isl.UnionMap:
        """From all instances of ops of some kinds to their items."""
        return _union(
            self.items[s.number] for s in self.reading.statements if s.kind in kinds
        )

    def pairs(
        self, ones: isl.UnionMap, related: isl.Map, others: isl.UnionMap
    ) -> isl.UnionMap:
        """The pairs of ops whose items are related by `related`; the ops are given with their
        items.
        """
        return ones.apply_range(isl.UnionMap.from_map(related)).apply_range(
            others.reverse()
        )

    def wanted(self) -> isl.Set:
        """All items of the program."""
        result = points(nowhere(), ITEM)
        for line in self.reading.lines:
            result = result | points(items_of(self.reading, line), ITEM)
        return result.coalesce()

    @cached_property
    def before(self) -> isl.UnionMap:
        """The pairs of instances on one rank of which the first precedes the second."""
        # From an instance to its place, to all later places, and back to instances.
        places = _union(self.places.values())
        space = isl.Space.set_alloc(isl.DEFAULT_CONTEXT, 0, self.depth + 1)
        later = isl.Map.lex_lt(space).equate(isl.dim_type.in_, 0, isl.dim_type.out, 0)
        return self.pairs(places, later, places)

    def together(self, one: Statement, other: Statement) -> isl.Map:
        """The pairs of instances of two statements that are issued together."""
        return self.places[one.number].apply_range(self.places[other.number].reverse())

    @cached_property
    def batches(self) -> list[Edge]:
        """The edges between statements that are issued together."""
        return [
            Edge(one, other, self.together(one, other), "together")
            for one in self.reading.statements
            for other in self.reading.statements
            if one.batch and one.batch == other.batch and one is not other
        ]

    @cached_property
    def writes_transfers(self) -> bool:
        """Whether the program writes its sends and receives."""
        return any(s.kind in TRANSFERS for s in self.reading.statements)

    @cached_property
    def messages(self) -> isl.UnionMap:
        """From each send to the receive of its message."""
        result = isl.UnionMap("{ }")
        for send in SENDS.values():
            on = TRANSFERS[send].distance
            text = f"{{ [s, u, g, m, k] -> [s + {on}, u, g, m, k] }}"
            receives = self.of(TRANSFERS[send].other_end)
            result = result.union(self.pairs(self.of(send), isl.Map(text), receives))
        return result

    @cached_property
    def needs(self) -> list[tuple[Rule, isl.UnionMap]]:
        """For each rule of `RULES`, the relation from the ops that make the thing to those that
        need it.
        """
        result = []
        dropped = self.of(*REPEATS).range()
        for rule in RULES:
            wants = self.of(*rule.users)
            if rule.activation:
                # A backward needs what `R` makes if there is one, and else its forward's
                # activations.
                if rule.made in REPEATS:
                    wants = wants.intersect_range(dropped)
                else:
                    wants = wants.subtract_range(dropped)
            needed = _needed(self.reading, rule)
            makers = self.of(*MAKERS[rule.made])
            result.append((rule, self.pairs(wants, needed, makers).reverse()))
        return result

    def edges(self) -> list[Edge]:
        """All edges of the event graph."""
        ordered = [*self._edges(self.before, "order"), *self.batches]
        ordered.sort(key=lambda edge: (edge.source.number, edge.target.number))
        # The two sides of a message happen at once; with the order of each rank, these are all
        # edges.
        if self.writes_transfers:
            both = self.messages.union(self.messages.reverse())
            return [*ordered, *self._edges(both, "together")]
        for _, pairs in self.needs:
            ordered += self._edges(far(pairs), "need")
        return ordered

    def _edges(self, pairs: isl.UnionMap, why: str) -> list[Edge]:
        """The relation as edges between statements."""
        named = {s.name: s for s in self.reading.statements}
        edges = [
            Edge(
                named[each.get_tuple_name(isl.dim_type.in_)],
                named[each.get_tuple_name(isl.dim_type.out)],
                each,
                why,
            )
            for each in maps_of(pairs)
            if not each.is_empty()
        ]
        return sorted(edges, key=lambda edge: (edge.target.number, edge.source.number))


def maps_of(pairs: isl.UnionMap) -> Iterator[isl.Map]:
    """The parts of a relation, each between two statements."""
    maps = pairs.get_map_list()
    for at in range(maps.n_map()):
        yield maps.get_map(at)


def _union(maps: Iterable[isl.Map]) -> isl.UnionMap:
    return reduce(
        isl.UnionMap.union, map(isl.UnionMap.from_map, maps), isl.UnionMap("{ }")
    )


def near(pairs: isl.UnionMap) -> isl.UnionMap:
    """The pairs on one rank, which is the first index of both."""
    return _union(
        each.equate(isl.dim_type.in_, 0, isl.dim_type.out, 0) for each in maps_of(pairs)
    )


def far(pairs: isl.UnionMap) -> isl.UnionMap:
    """The pairs on two ranks."""
    return _union(
        each
        - isl.Map.universe(each.get_space()).equate(
            isl.dim_type.in_, 0, isl.dim_type.out, 0
        )
        for each in maps_of(pairs)
    )


def items_of(reading: Reading, line: Line) -> isl.Set:
    """The condition that ITEM is an item of a pipeline."""
    stage, update, _, _, piece = map(symbol, ITEM)
    updates = symbol(UPDATES) if reading.is_stream else number(1)
    return (
        reading.domain
        & between(line.first, stage, line.first.add(line.stages))
        & between(number(0), update, updates)
        & reading.are_microbatches(line, *ITEM[2:4])
        & between(number(0), piece, reading.slices)
    )


def relation_of(
    condition: isl.Set, ones: Sequence[str], others: Sequence[str]
) -> isl.Map:
    """The relation between the values of two lists of symbols that satisfy a condition."""
    both = isl.Map.from_domain(points(condition, [*ones, *others]))
    return both.move_dims(isl.dim_type.out, 0, isl.dim_type.in_, len(ones), len(others))


def stage_relation(reading: Reading, of: str) -> isl.Map:
    """From each stage to the stages "before" or "after" it, to its "own", or to its "replicas"."""
    return relation_of(_stages(reading, of) & reading.domain, [ITEM[0]], [NEEDED[0]])


def _stages(reading: Reading, of: str) -> isl.Set:
    """The condition that the stage of NEEDED is "before", "after", … the stage of ITEM."""
    stage = symbol(ITEM[0])
    other = symbol(NEEDED[0])
    result = nowhere()
    for line in reading.lines:
        own = between(line.first, stage, line.first.add(line.stages))
        there = between(line.first, other, line.first.add(line.stages))
        match of:
            case "own":
                result = result | (own & stage.eq_set(other))
            case "before":
                onward = _onward(reading, later=STAGE, earlier=NEEDED[0])
                result = result | (own & there & onward)
            case "after":
                onward = _onward(reading, later=NEEDED[0], earlier=STAGE)
                result = result | (own & there & onward)
            case "replicas":
                for replica in reading.lines:
                    same = stage.sub(line.first).add(replica.first).eq_set(other)
                    result = result | (own & same)
    return result


def _onward(reading: Reading, *, earlier: str, later: str) -> isl.Set:
    """The condition that what stage `earlier` makes goes to stage `later`, for two symbols."""
    # Rename in two steps, since the two symbols may be swapped.
    moved = renamed(reading.onward, {STAGE: "_earlier"})
    return renamed(renamed(moved, {LATER: later}), {"_earlier": earlier})


def _needed(reading: Reading, rule: Rule) -> isl.Map:
    """From the items of ops to the items that they need by a rule."""
    _, update, group, microbatch, piece = map(symbol, ITEM)
    _, update2, group2, microbatch2, piece2 = map(symbol, NEEDED)
    pairs = _stages(reading, rule.of) & update.eq_set(update2)
    if rule.of != "replicas":
        same_piece = piece2.eq_set(piece.add(number(rule.slices)))
        pairs = (
            pairs & group.eq_set(group2) & microbatch.eq_set(microbatch2) & same_piece
        )
    return relation_of(pairs & reading.domain, ITEM, NEEDED)
