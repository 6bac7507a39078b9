"""The statements of a program as isl relations: the item of each op, its place in the order of its
rank, what it needs, and the edges of the event graph. A relation contains the instances of all
statements, each under the name of its statement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, reduce
from itertools import product
from typing import Any

import islpy as isl
from attrs import frozen

from schedlang.extras.prove.check_sets import MESSAGES, Orders
from schedlang.extras.prove.sets.counting import RANK, entry
from schedlang.extras.prove.sets.isl_functions import (
    between,
    everywhere,
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
    Weights,
)
from schedlang.schedule.kinds import TRANSFERS, Kind

#: The symbols of an item, which is what an op is about: stage, update, the two digits of a
#: microbatch, slice.
ITEM = (STAGE, "_u", "_g", "_m", "_k")


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
    def orders(self) -> Orders:
        """What the checker of certificates makes of these relations."""
        return Orders(document_of(self), self.reading.domain)

    def of(self, *kinds: Kind) -> isl.UnionMap:
        """From all instances of ops of some kinds to their items."""
        return self.orders.of(*(kind.name for kind in kinds))

    def wanted(self) -> isl.Set:
        """All items of the program."""
        result = points(nowhere(), ITEM)
        for line in self.reading.lines:
            result = result | points(items_of(self.reading, line), ITEM)
        return result.coalesce()

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
        return reduce(isl.UnionMap.union, map(self.orders.met, MESSAGES))

    def edges(self) -> list[Edge]:
        """All edges of the event graph."""
        ordered = [*self._edges(self.orders.before, "order"), *self.batches]
        ordered.sort(key=lambda edge: (edge.source.number, edge.target.number))
        # The two sides of a message happen at once; with the order of each rank, these are all
        # edges.
        if self.writes_transfers:
            both = self.messages.union(self.messages.reverse())
            return [*ordered, *self._edges(both, "together")]
        for *_, pairs in self.orders.needs():
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


def far(pairs: isl.UnionMap) -> isl.UnionMap:
    """The pairs on two ranks, which are the first index of both."""
    result = isl.UnionMap("{ }")
    for each in maps_of(pairs):
        every = isl.Map.universe(each.get_space())
        near = every.equate(isl.dim_type.in_, 0, isl.dim_type.out, 0)
        result = result.union(isl.UnionMap.from_map(each - near))
    return result


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


def _after(reading: Reading) -> isl.Map:
    """From each stage to the stages after it."""
    after = nowhere()
    for line in reading.lines:
        end = line.first.add(line.stages)
        here = between(line.first, symbol(STAGE), end)
        there = between(line.first, symbol(LATER), end)
        after = after | (here & there & reading.onward)
    return relation_of(after & reading.domain, [STAGE], [LATER])


def _replicas(reading: Reading) -> isl.Map:
    """From each stage to all its replicas, itself included."""
    replicas = nowhere()
    for line, other in product(reading.lines, repeat=2):
        own = between(line.first, symbol(STAGE), line.first.add(line.stages))
        moved = symbol(STAGE).sub(line.first).add(other.first)
        replicas = replicas | (own & moved.eq_set(symbol(LATER)))
    return relation_of(replicas & reading.domain, [STAGE], [LATER])


def document_of(relations: Relations) -> dict[str, Any]:
    """The relations as texts in isl's notation, as a certificate has them."""
    reading = relations.reading
    return {
        "weights": [list(_rule(relations, each)) for each in reading.weights],
        "stream": reading.is_stream,
        "held": str(relation_of(reading.held, [STAGE], [RANK])),
        "after": str(_after(reading)),
        "replicas": str(_replicas(reading)),
        "wanted": str(relations.wanted()),
        "depth": relations.depth,
        "statements": [
            {
                "name": statement.name,
                "kind": statement.kind.name,
                "item": str(relations.items[statement.number]),
                **_place(relations, statement),
            }
            for statement in reading.statements
        ],
    }


def _rule(relations: Relations, weights: Weights) -> tuple[str, str]:
    """The rule by which some stages read their weights; and the relation from the items of these
    stages to the update whose version a forward reads by `delay`.
    """
    items = relations.wanted().intersect(points(weights.stages, ITEM))
    update = symbol(ITEM[1]).sub(number(1)).sub(weights.delay)
    read = [symbol(STAGE), update, number(0), number(0), number(0)]
    relation = function_map(everywhere(), ITEM, "", read).reset_tuple_id(
        isl.dim_type.in_
    )
    return weights.rule, str(relation.intersect_domain(items))


def _place(relations: Relations, statement: Statement) -> dict[str, str]:
    """From a statement's instances to their ranks, and to their places in the order."""
    both = relations.places[statement.number]
    rank = both.project_out(isl.dim_type.out, 1, relations.depth)
    return {"rank": str(rank), "place": str(both.project_out(isl.dim_type.out, 0, 1))}
