"""The events of a schedule: when each of its actions happens, by an event graph."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from attrs import evolve, frozen

from schedlang.proof.graph import NOTHING, Graph
from schedlang.schedule.arrays import Floats, Ints
from schedlang.schedule.columns import Columns
from schedlang.schedule.fixed_point import FixedPoint
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Bars, Beside, Timeline

if TYPE_CHECKING:
    from schedlang.proof.channels import Channels


@frozen(eq=False)
class RankThreads:
    """What stands on the threads of the ranks, thread after thread: `heads` are rows of actions,
    the first one of each batch, and `items` are their items in the event graph.
    """

    columns: Columns
    heads: Ints
    items: Ints

    def at(self, rows: Ints) -> Ints:
        """The items of some actions that stand on the threads."""
        return self.items[np.searchsorted(self.heads, self.columns.batch[rows])]

    def before(self, rows: Ints) -> Ints:
        """The items at whose end ranks reach some actions; NOTHING for the first action of a rank.
        A rank that waits at a collective has reached it once it has waited.
        """
        if not len(self.heads):
            return np.full(len(rows), NOTHING)
        heads = self.columns.batch[rows]
        place = np.searchsorted(self.heads, heads)
        waits_here = np.append(self.heads, NOTHING)[place] == heads
        place += waits_here & self.columns.is_collective[heads]
        last = self.heads[place - 1]
        is_there = (place > 0) & (self.columns.rank[last] == self.columns.rank[heads])
        return np.where(is_there, self.items[place - 1], NOTHING)


@frozen(eq=False)
class Events:
    """The event graph of a schedule, and which of its items belong to which actions.

    `item[row]` is the item with which an action is over. It is NOTHING for transfers that have no
    item, as on gloo and ideally. `about[edge]` is the action that an edge is about: the receive
    that brings what is needed, the op that needs a sum, or the action that waits for a send.
    `receive[edge]` is the receive of the message whose latency is the delay of the edge, or
    NOTHING. `beside` has three rows: the items of sums and gathers that take time, and for each the
    actions after and before it (see `Beside`). `after[row]` is the end of an op, counted from the
    start of the ops that it overlaps with. Times of the graph are counts of the numbers of `fixed`.
    """

    schedule: Schedule
    fixed: FixedPoint
    graph: Graph
    on_ranks: RankThreads
    item: Ints
    about: Ints
    receive: Ints
    beside: Ints
    after: Floats
    channels: Channels | None

    def among(self, walked: Iterable[Graph]) -> Events:
        """These events, with the graph in `walked` that is equal, if there is one: its times are
        known.
        """
        return evolve(self, graph=self.graph.among(walked))

    def come(self, rows: Ints) -> Ints:
        """The events at which ranks reach transfers, copies and collectives, or NOTHING."""
        return np.append(self.graph.over, NOTHING)[self.on_ranks.before(rows)]

    def timeline(self) -> Timeline:
        """When each op, each copy and each collective runs."""
        columns = self.schedule.columns
        starts = self.graph.starts
        ends = self.graph.ends
        ops = np.flatnonzero(columns.is_computed)
        begins = starts[self.item[ops]]
        stops = begins + self.after[ops]
        # Of ops that overlap, each is shown behind the one before.
        later = np.flatnonzero(columns.batch[ops] != ops)
        begins[later] = stops[later - 1]
        numbers = self.fixed.numbers
        bars = _bars(columns, ops, numbers(begins), numbers(stops))
        starts = numbers(starts)
        ends = numbers(ends)
        copies = np.flatnonzero(columns.is_beside)
        items = self.item[copies]
        bars_of_copies = _bars(columns, copies, starts[items], ends[items])
        items = self.beside[0]
        times = *self.beside[1:], starts[items], ends[items]
        beside = zip(*(column.tolist() for column in times), strict=True)
        return Timeline(
            bars, bars_of_copies, tuple(map(Beside._make, beside)), self.fixed
        )


def _bars(
    columns: Columns, rows: Ints, starts: Floats, ends: Floats
) -> tuple[Bars, ...]:
    """The bars of each rank, in order."""
    bounds = np.searchsorted(rows, columns.first)
    values = (
        columns.kind[rows],
        columns.stage[rows],
        columns.microbatch[rows],
        starts,
        ends,
    )
    return tuple(
        Bars.from_columns(*(column[begin:end] for column in values))
        for begin, end in pairwise(bounds)
    )
