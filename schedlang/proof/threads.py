"""The event graph of a schedule while it is put together: the threads of its ranks, the streams
beside them, and the rule by which something runs on a stream.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from attrs import define, field

from schedlang.on_demand import on_demand
from schedlang.proof.durations import latencies, op_ends
from schedlang.proof.events import Events, RankThreads
from schedlang.proof.graph import NOTHING, Items
from schedlang.schedule.arrays import Floats, Ints, pairs_within
from schedlang.schedule.columns import Columns
from schedlang.schedule.costs import Costs, Durations
from schedlang.schedule.schedule import Schedule

if TYPE_CHECKING:
    from schedlang.proof.channels import Channels
    from schedlang.proof.presence import presence
else:
    # For schedules with collectives.
    presence = on_demand("schedlang.proof.presence.presence")


@define(eq=False)
class Threads:
    """The threads of the ranks and the streams beside them, while the event graph is built."""

    schedule: Schedule
    costs: Costs
    #: The turns of copies on the links that ranks share; without, each rank has a link of its own.
    turns: Ints | None = None
    items: Items = field(factory=Items)
    #: How many threads and streams there are by now.
    count: int = 0
    #: Of each edge the action that it is about, and the receive of the message whose way its delay
    #: is.
    about: list[Ints] = field(factory=list)
    receive: list[Ints] = field(factory=list)
    #: The items of sums and gathers, and what comes before and after them.
    beside: list[Ints] = field(factory=list)
    item: Ints = field(init=False)
    after: Floats = field(init=False)
    on_ranks: RankThreads = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.item = np.full(len(self.columns), NOTHING, np.int32)
        self.after = np.zeros(len(self.columns))
        self.count = len(self.schedule.ranks)

    @property
    def columns(self) -> Columns:
        """The actions of the schedule."""
        return self.schedule.columns

    @cached_property
    def durations(self) -> Durations:
        """The durations of ops. All times here are counts of the costs' `fixed_times`."""
        return self.costs.durations(self.schedule.layout).counted()

    @cached_property
    def latencies(self) -> Floats:
        """The latency of each message, by the product that is sent and the receive's number."""
        transfers = self.costs.transfers(len(self.schedule.placement))
        times = latencies(self.schedule.layout, transfers)
        return self.costs.fixed_times.counts(times)

    @cached_property
    def awaited(self) -> Ints:
        """Two rows: the actions that wait for collectives of the program, and these collectives."""
        if not self.columns.is_collective.any():
            return np.zeros((2, 0), np.int64)
        return presence(self.schedule).awaited

    def events(self, channels: Channels | None = None) -> Events:
        """The finished event graph."""
        return Events(
            self.schedule,
            self.costs.fixed_times,
            self.items.graph(),
            self.on_ranks,
            self.item,
            np.concatenate(self.about),
            np.concatenate(self.receive),
            np.concatenate([np.zeros((3, 0), np.int64), *self.beside], axis=1),
            self.after,
            channels,
        )

    def wait(
        self,
        waiter: Ints,
        target: Ints,
        about: Ints,
        delay: Floats | float = 0.0,
        receive: Ints | None = None,
        at_begin: bool = False,
    ) -> None:
        """Let items wait for others. Each edge is about an action. A delay is the latency of a
        message, whose receive is given.
        """
        self.items.wait(waiter, target, delay, at_begin)
        self.about.append(about)
        self.receive.append(
            np.full(len(about), NOTHING) if receive is None else receive
        )

    def issue(
        self,
        stream: Ints,
        turn: Ints,
        behind: Ints,
        about: Ints,
        takes: Floats | float = 0.0,
        meets: bool = False,
    ) -> Ints:
        """Put items on streams, in the order of their turns. An item is issued once the item that
        it stands `behind` is over.
        """
        thread = self.count + stream
        self.count = int(thread.max(initial=self.count)) + 1
        items = self.items.add(thread, turn * 2 + 1, takes)
        issued = items
        # What meets an item waits for another one before it, with which it is issued and comes next
        # on its stream.
        if meets:
            issued = self.items.add(thread, turn * 2)
        self.wait(issued, behind, about)
        return items

    def meet(self, items: Ints, event: Ints, about: Ints) -> None:
        """Let the items of each event start together."""
        one, other = pairs_within(event)
        self.wait(items[one], items[other], about[one], at_begin=True)

    def place_ops(self, with_transfers: bool = False) -> None:
        """Put the ops of each rank on its thread, with the collectives at which the rank waits;
        `with_transfers` also all transfers.
        """
        # What stands behind a wait for a hop, whatever it is, comes once the rank has waited:
        #
        #     rank 0    ── 1F0 ── 1RESHARD ── … ── 0F1 ──
        #                            ╎
        #     its hops  ───── 1SEND_WEIGHTS
        columns = self.columns
        is_op = columns.is_computed
        on_rank = is_op | columns.is_transfer if with_transfers else is_op.copy()
        on_rank[self.awaited[0]] = True
        heads = np.flatnonzero(on_rank & (columns.batch == np.arange(len(columns))))
        # Ops that overlap are one item, which takes until the last of them ends.
        self.after[is_op] = op_ends(columns, np.flatnonzero(is_op), self.durations)
        takes = np.zeros(len(columns))
        np.maximum.at(takes, columns.batch[is_op], self.after[is_op])
        items = self.items.add(columns.rank[heads], heads, takes[heads])
        self.on_ranks = RankThreads(columns, heads, items)
        self.item[heads] = items
        self.item = self.item[columns.batch]
