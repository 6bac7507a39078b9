"""A transport is a set of edges: what waits for what in a schedule, as an event graph.

Every rank has a thread with its ops, where each waits for the one before. Messages, copies and
collectives go on beside them, each on a *stream* of its rank: a lane of the transport, a link to
the host, the stream of a communicator. One rule says when:

- It is issued when its rank comes to it.
- It starts when those before it on its stream are over, and those that it meets on other ranks are
  issued and come next on their streams.
- What needs it waits until it is over.

Two ranks sum the gradients of a stage, and rank 1 comes to it later; `──` is a thread, `╎` an edge:

    rank 0             ── 0B3 ── … ──────────────── 0U
                           ╰╌╌╮ issued              │ needs it
    its stream         ────── ● ───── sum ──────────╯
                                  ╎ meet
    stream of rank 1   ────────── ● ─ sum ──────────╮
                           ╭╌╌╌╌╌╌╯                 │
    rank 1             ── 1F4 ── 1B3 ── … ───────── 1U

Which streams messages have, and what they meet there, depends on the transport
(`schedlang.schedule.transports`, and docs/transports.md in words); the drawings below show it.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np
from attrs import define, field

from schedlang.proof.channels import Channels, channels_of
from schedlang.proof.collectives import sides_of
from schedlang.proof.durations import latencies, op_ends
from schedlang.proof.events import Events, RankThreads
from schedlang.proof.graph import NEVER, NOTHING, Graph, Items, once
from schedlang.proof.presence import presence, writes
from schedlang.ranks.shards import gathers
from schedlang.schedule.columns import Columns, Floats, Ints, counts_of, pairs_within
from schedlang.schedule.costs import Costs, Durations
from schedlang.schedule.kinds import HOPS, ROWS, SUMS, WAITS, Kind
from schedlang.schedule.needs import gradients_of, needs_of, sums_of
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import Transport

# `0F0 0SEND_F0 0F1` on rank 0, and `1RECV_F0 1F0` on rank 1.
#
# Where ranks block, batches of transfers stand on the ranks' threads, among the ops, and the two
# sides of a message meet there:
#
#     rank 0    ── 0F0 ── SEND_F0 ── 0F1 ──
#                            ╎
#     rank 1    ────────── RECV_F0 ── 1F0 ──
#
# Where they do not, batches stand on the lanes of their ranks, and an op needs the batches that
# bring what it reads:
#
#     rank 0        ── 0F0 ── 0F1 ──
#                       ╰╌╌╌╌╮ issued
#     a lane of 0   ────── SEND_F0 ──
#                            ╎ meet
#     a lane of 1   ────── RECV_F0 ──
#                            ╰╌╌╌╌╮ needs it
#     rank 1        ───────────── 1F0 ──
#
# Where every transfer is on its own (gloo), a message is under way once its rank has come to the
# send, and an op waits for its messages. `ideal`, an op waits for the ops that make what it needs,
# and no transfer for another. Both look alike here:
#
#     rank 0    ── 0F0 ── 0F1 ──
#                   ╰╌╌╌╌╮ latency
#     rank 1    ──────── 1F0 ──

#: The streams of a rank that its collectives go on, by kind: numbers from 0.
_STREAM = np.zeros(ROWS, np.int64)
_STREAM[Kind.REDUCE_GRAD] = 1
_STREAM[[*HOPS]] = 2
_STREAM[[*HOPS.values()]] = 3

#: The graph by whose times copies of several ranks take turns: the events of a schedule, with the
#: durations that count.
GraphOf = Callable[[Events], Graph]


def _at_costs(events: Events) -> Graph:
    """The graph of events with the durations that the costs give."""
    return events.graph


def ideal_events(
    schedule: Schedule, costs: Costs, graph_of: GraphOf = _at_costs
) -> Events:
    """The events where what an op makes is at once on its way, and no transfer waits for another.

    An op that needs something of its own rank, which is not made before it, never runs.
    """
    # The order of collectives is asked of the same events, see `schedlang.proof.collective_order`.
    # Others are not kept: to find new room takes longer than to make a graph anew.
    is_asked = schedule.columns.is_collective.any() and costs == schedule.costs
    if is_asked and graph_of is _at_costs:
        return _own_ideal_events(schedule)
    return _in_turns(schedule, costs, _ideal, graph_of)


@once
def _own_ideal_events(schedule: Schedule) -> Events:
    """The ideal events of a schedule at its own costs."""
    return _in_turns(schedule, schedule.costs, _ideal, _at_costs)


def transport_events(
    schedule: Schedule,
    costs: Costs,
    transport: Transport,
    graph_of: GraphOf = _at_costs,
) -> Events:
    """The events on a transport.

    Its order is known to be right: where an op stands before what it needs, nothing waits.
    """
    channels = channels_of(schedule, transport)

    def on_transport(build: "_Build") -> Events:
        return _on_transport(build, channels, transport)

    return _in_turns(schedule, costs, on_transport, graph_of)


def takes_turns(schedule: Schedule, costs: Costs) -> bool:
    """Whether copies of several ranks wait for each other on links that these share, so that what
    waits for what follows from how long all takes.
    """
    links = schedule.layout.links
    is_shared = len(set(links)) < len(links)
    # What the costs say is asked last, since it takes longest.
    if not is_shared or not schedule.columns.is_copy.any():
        return False
    durations = costs.durations(schedule.layout)
    # A copy that takes no time keeps nobody waiting.
    return any(durations[Kind.OFFLOAD]) or any(durations[Kind.RELOAD])


def _in_turns(
    schedule: Schedule,
    costs: Costs,
    events_of: Callable[["_Build"], Events],
    graph_of: GraphOf,
) -> Events:
    """The events where copies of several ranks take turns on their links, in the order in which
    their ranks come to them.

    That order follows from the times, and these from it. So it is looked for: from an order, the
    times, and from these the order, until it stays.
    """
    # At first, and where no order is found, each rank has a link of its own.
    found = events = events_of(_Build(schedule, costs))
    if not takes_turns(schedule, costs):
        return found
    copies = np.flatnonzero(schedule.columns.is_copy)
    # Each round the first copy that had a wrong turn gets its right one, since what comes before it
    # does not change any more. So there is an end to it. Where ops take no time, ranks that come at
    # one time may need each other's copies first.
    turns = None
    while events.graph.is_whole:
        waits = graph_of(events).times_of(events.come(copies))
        following = np.argsort(
            np.lexsort((copies, schedule.columns.rank[copies], waits))
        )
        if turns is not None and (following == turns).all():
            break
        turns = following
        events = events_of(_Build(schedule, costs, turns))
        if events.graph.is_whole:
            found = events
    return found


def _ideal(build: "_Build") -> Events:
    """The edges where no transfer waits for another."""
    build.place_ops()
    build.wait_for_makers()
    build.place_beside()
    build.never_run()
    return build.events()


def _on_transport(build: "_Build", channels: Channels, transport: Transport) -> Events:
    """The edges on a transport."""
    build.place_ops(with_transfers=transport.blocks)
    if transport.lane == "none":
        build.wait_for_messages(channels)
    else:
        if not transport.blocks:
            build.place_lanes(channels, transport)
            build.wait_for_receives()
        if transport.capacity:
            build.wait_for_room(channels, transport.capacity)
        else:
            build.meet_transfers(channels, transport.atomic)
    build.place_beside()
    build.wait_for_sends(channels)
    return build.events(channels)


@define(eq=False)
class _Build:
    """The items and edges of a schedule that is being put together."""

    schedule: Schedule
    costs: Costs
    #: The turns of copies on the links that ranks share; without, each rank has a link of its own.
    turns: Ints | None = None
    items: Items = field(factory=Items)
    #: How many threads there are by now; of each edge the action that it is about, and the receive
    #: of the message that it is the way of.
    threads: int = 0
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
        self.threads = len(self.schedule.ranks)

    @property
    def columns(self) -> Columns:
        """The actions of the schedule."""
        return self.schedule.columns

    @cached_property
    def durations(self) -> Durations:
        """How long ops take; all times here are counts of the costs' `fixed_times`."""
        return self.costs.durations(self.schedule.layout).counted()

    @cached_property
    def latencies(self) -> Floats:
        """How long messages take, by what is made, and the numbers of their receives."""
        transfers = self.costs.transfers(len(self.schedule.placement))
        times = latencies(self.schedule.layout, transfers)
        return self.costs.fixed_times.counts(times)

    @cached_property
    def awaited(self) -> Ints:
        """Who waits for which collectives that the program writes, as two rows of actions."""
        if not self.columns.is_collective.any():
            return np.zeros((2, 0), np.int64)
        return presence(self.schedule).awaited

    def events(self, channels: Channels | None = None) -> Events:
        """All of it as a graph."""
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

    # The rules of edges, for whatever stands on a thread or a stream.

    def wait(
        self,
        waiter: Ints,
        target: Ints,
        about: Ints,
        delay: Floats | float = 0.0,
        receive: Ints | None = None,
        at_begin: bool = False,
    ) -> None:
        """Let items wait for others; each edge is about an action. A delay is the way of a message,
        to its receive.
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
    ) -> Ints:
        """Put items on streams, in turn, each issued once the one that it stands behind is over."""
        # Two items, one after the other. What meets it waits for the first one, with which it is
        # issued and comes next on its stream.
        thread = self.threads + stream
        self.threads = int(thread.max(initial=self.threads)) + 1
        issued = self.items.add(thread, turn * 2)
        self.wait(issued, behind, about)
        return self.items.add(thread, turn * 2 + 1, takes)

    def meet(self, items: Ints, event: Ints, about: Ints) -> None:
        """Let items of one event start together."""
        one, other = pairs_within(event)
        self.wait(items[one], items[other], about[one], at_begin=True)

    # Ops, and what they need of each other.

    def place_ops(self, with_transfers: bool = False) -> None:
        """Put the ops of each rank on its thread, and what else the rank waits at: collectives that
        wait for others, and `with_transfers` all batches.
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

    def never_run(self) -> None:
        """Ops and copies that need what their own rank does not make before never run."""
        needs = needs_of(self.schedule)
        is_before = (needs.maker >= 0) & (needs.maker < self.columns.batch[needs.user])
        is_late = ~needs.is_far & ~is_before & ~self.columns.is_transfer[needs.user]
        late = [needs.user[is_late], sums_of(self.schedule).late(self.columns)]
        for users in late:
            self.wait(self.item[users], np.full(len(users), NEVER), users)

    def wait_for_makers(self) -> None:
        """Ops wait for those that make what they need on other ranks, and its way."""
        needs = needs_of(self.schedule)
        wanted = np.flatnonzero(
            needs.is_message & ~self.columns.is_transfer[needs.user]
        )
        users = needs.user[wanted]
        makers = needs.maker[wanted]
        target = np.where(makers >= 0, self.item[makers], NEVER)
        delay = self.latencies[needs.made[wanted], needs.number[wanted]]
        self.wait(self.item[users], target, users, delay, needs.receive[wanted])

    def wait_for_sums(self) -> None:
        """Optimizer steps wait for the last gradient of each rank with replicas of the stage."""
        sums = sums_of(self.schedule)
        there = np.flatnonzero(sums.is_far & (sums.last >= 0))
        if not len(there):
            return
        # One edge for each step and other rank: where its last gradient is, the others are.
        makers = sums.last[there]
        ranks = len(self.schedule.ranks)
        pairs, which = np.unique(
            sums.step[there] * np.int64(ranks) + self.columns.rank[makers],
            return_inverse=True,
        )
        last = np.full(len(pairs), NOTHING, np.int64)
        np.maximum.at(last, which, makers)
        users = pairs // ranks
        self.wait(self.item[users], self.item[last], users)

    # Copies and collectives, which are the same on every transport.

    def place_beside(self) -> None:
        """Put copies and collectives on their streams: those that the program writes, and those
        that the runtime adds.
        """
        self.place_copies()
        self.wait_for_sums()
        self.place_unwritten_sums()
        self.place_unwritten_gathers()
        if self.columns.is_collective.any():
            self.place_collectives()

    def place_copies(self) -> None:
        """Put copies on the links of their ranks; ops wait for what is brought back."""
        columns = self.columns
        rows = np.flatnonzero(columns.is_copy)
        if not len(rows):
            return
        # Each rank has a link of its own, where its copies go in its order; or they take turns.
        link = np.arange(len(self.schedule.ranks))
        if self.turns is not None:
            link = np.unique(self.schedule.layout.links, return_inverse=True)[1]
        turn = rows if self.turns is None else self.turns
        takes = self.durations.of(
            columns.kind[rows], columns.stage[rows], columns.microbatch[rows]
        )
        self.item[rows] = self.issue(
            link[columns.rank[rows]], turn, self.on_ranks.before(rows), rows, takes
        )
        needs = needs_of(self.schedule)
        is_before = (needs.maker >= 0) & (needs.maker < columns.batch[needs.user])
        wanted = np.flatnonzero((needs.made == Kind.RELOAD) & is_before)
        users = needs.user[wanted]
        self.wait(self.item[users], self.item[needs.maker[wanted]], users)

    def place_collectives(self) -> None:
        """Put the collectives that the program writes on streams of their ranks, by kind."""
        # A rank begins one after the other, whatever its kind, each once all ranks have come to
        # those before it: so they stand on a stream without duration first. An all-gather to which
        # rank 1 comes later:
        #
        #     rank 0            ── 0B3 ── … ────────────── 0F4
        #                           ╰╌╌╮                  │
        #     begun by rank 0   ─────── ● ─ ●             │
        #                                   ╎╰╌╌╮         │
        #     its stream        ────────────╎── gather ───╯
        #     begun by rank 1   ────────── ● ─ ●
        columns = self.columns
        sides = sides_of(self.schedule)
        rows = sides.row
        rank = columns.rank[rows]
        kind = columns.kind[rows]
        items = self.issue(rank, rows, self.on_ranks.before(rows), rows)
        self.meet(items, sides.event, rows)
        # Replicas have one event, which takes the longest time that is given for any of them.
        each = self.durations.of(kind, columns.stage[rows], columns.microbatch[rows])
        takes = np.zeros(int(sides.event.max(initial=-1)) + 1)
        np.maximum.at(takes, sides.event, each)
        takes = takes[sides.event]
        # Where none takes any time, each is over as soon as all its ranks have begun it.
        if takes.any():
            stream = _STREAM[kind] * len(self.schedule.ranks) + rank
            items = self.issue(stream, rows, items, rows, takes)
            self.meet(items, sides.event, rows)
        self.item[rows] = items
        # Weights go where the rank waits for hops, or at once when it comes there.
        drops = columns.where(Kind.RESHARD)
        drops = drops[~np.isin(drops, self.awaited[0])]
        self.item[drops] = self.issue(
            columns.rank[drops], drops, self.on_ranks.before(drops), drops
        )
        waiters, awaited = self.awaited
        self.wait(self.on_ranks.at(waiters), self.item[awaited], awaited)
        # What is shown of those that take time: the op that waits, and the last gradient of a sum.
        user = np.full(len(columns), NOTHING)
        is_op = ~columns.is_collective[waiters]
        user[awaited[is_op]] = waiters[is_op]
        timed = rows[takes > 0]
        last = presence(self.schedule).last
        self.beside.append(np.stack([self.item[timed], last[timed], user[timed]]))

    def place_unwritten_sums(self) -> None:
        """Put sums of gradients over replicas, where they take time and no program writes them, on
        streams of their own. A sum is issued when its rank has made the last gradient.
        """
        if not self.costs.sum_times:
            return
        columns = self.columns
        layout = self.schedule.layout
        # Replicas have one sum, which takes the longest time that is given for any of them.
        times = self.costs.fixed_times.counts(self.costs.sums(len(layout.placement)))
        times = np.reshape(times, (-1, layout.pieces))
        gradients = gradients_of(self.schedule)
        takes = times.max(axis=0)[gradients.piece]
        pieces = np.array(layout.piece_of)
        written = np.unique(pieces[writes(self.schedule, SUMS)])
        is_placed = (takes > 0) & ~np.isin(gradients.piece, written)
        gradients = gradients.taken(is_placed)
        last = gradients.last
        event = gradients.piece * layout.updates + gradients.update
        # Sums over replicas outside of the plan go one after the other on each rank. Those within
        # have a stream for each piece, so that all ranks can have them in one order.
        is_alone = counts_of(event)[event] == 1
        ranks = len(self.schedule.ranks)
        stream = gradients.rank + np.where(is_alone, 0, gradients.piece + 1) * ranks
        turn = np.where(is_alone, last, gradients.update)
        sums = self.issue(stream, turn, self.item[last], last, takes[is_placed])
        self.meet(sums, event, last)
        # Steps wait for them; one that stands before its gradients is found to be wrong elsewhere.
        steps = columns.where(Kind.U)
        piece = pieces[columns.stage[steps]]
        update = np.maximum(columns.microbatch[steps], 0)
        of_step = gradients.of(columns.rank[steps], piece, update)
        is_there = of_step >= 0
        is_there[is_there] = last[of_step[is_there]] < columns.batch[steps[is_there]]
        steps = steps[is_there]
        of_step = of_step[is_there]
        self.wait(self.item[steps], sums[of_step], steps)
        # Of several steps on one rank, the first one waits.
        before = np.full(len(sums), NOTHING)
        before[of_step[::-1]] = steps[::-1]
        self.beside.append(np.stack([sums, last, before]))

    def place_unwritten_gathers(self) -> None:
        """Put gathers of sharded weights, where they take time and no program writes them, on a
        stream of each rank. A gather is issued when its rank comes to the op before the one that
        waits for it, or to that one (`schedlang.ranks.shards`); there is a place for all stages of
        a rank.
        """
        if not self.costs.gather_times:
            return
        columns = self.columns
        times = self.costs.fixed_times.counts(
            self.costs.gathers(len(self.schedule.placement))
        )
        found = []
        for rank, actions in enumerate(self.schedule.ranks):
            held = [stage for stage in self.schedule.stages_of(rank) if times[stage]]
            first = int(columns.first[rank])
            for index, stage, user in gathers(actions, held, max(len(held), 1)):
                found.append((first + index, first + user, stage))
        rows, users, stages = np.array(found, np.int64).reshape(-1, 3).T
        items = self.issue(
            columns.rank[rows],
            np.arange(len(rows)),
            self.on_ranks.before(rows),
            rows,
            times[stages],
        )
        self.wait(self.item[users], items, users)
        self.beside.append(np.stack([items, np.full(len(items), NOTHING), users]))

    # Messages, by the rules of a transport.

    def _received(self) -> tuple[Ints, Ints]:
        """The ops that need messages, and the receives that bring these before them."""
        needs = needs_of(self.schedule)
        is_before = (needs.receive >= 0) & (
            needs.receive < self.columns.batch[needs.user]
        )
        is_op = ~self.columns.is_transfer[needs.user]
        wanted = np.flatnonzero(needs.is_message & is_op & is_before)
        return needs.user[wanted], needs.receive[wanted]

    def wait_for_messages(self, channels: Channels) -> None:
        """Each transfer is on its own: ops wait for the sends of what they need, and the way."""
        users, receives = self._received()
        sends = channels.partner[receives]
        target = np.where(sends >= 0, self.on_ranks.before(sends), NEVER)
        delay = channels.latency(self.latencies)[receives]
        self.wait(self.item[users], target, receives, delay, receives)

    def wait_for_receives(self) -> None:
        """Ops wait for the batches that bring what they need."""
        users, receives = self._received()
        self.wait(self.item[users], self.item[receives], receives)

    def wait_for_sends(self, channels: Channels) -> None:
        """Actions that only wait do so until their sends are over; each send has one of them."""
        for send, wait in WAITS.items():
            if not len(self.columns.where(wait)):
                continue
            # In one order, sends and waits are pairs.
            sends = self._sorted(self.columns.where(send))
            waits = self._sorted(self.columns.where(wait))
            alone = self.item[sends] == NOTHING
            self.wait(self.item[waits[~alone]], self.item[sends[~alone]], waits[~alone])
            # A transfer on its own is over one latency after both ranks have come to it.
            sends = sends[alone]
            waits = waits[alone]
            delay = channels.latency(self.latencies)[sends]
            receives = channels.partner[sends]
            come = np.where(receives >= 0, self.on_ranks.before(receives), NEVER)
            self.wait(self.item[waits], come, waits, delay, receives)
            come = self.on_ranks.before(sends)
            self.wait(self.item[waits], come, waits, delay, receives)

    def _sorted(self, rows: Ints) -> Ints:
        """Actions in the order of their stages and microbatches."""
        return rows[
            np.lexsort((self.columns.microbatch[rows], self.columns.stage[rows]))
        ]

    def place_lanes(self, channels: Channels, transport: Transport) -> None:
        """Put batches of transfers on the lanes of their ranks."""
        columns = self.columns
        rows = np.flatnonzero(columns.is_transfer)
        batch = rows if transport.splits_batches else columns.batch[rows]
        heads = rows[batch == rows]
        lane = columns.rank[heads].astype(np.int64)
        ranks = len(self.schedule.ranks)
        if transport.lane == "pair":
            # Batches of several transfers have a lane of their own.
            peer = np.where(columns.sizes[heads] > 1, ranks, channels.peer[heads])
            lane = lane * (ranks + 1) + peer
        if transport.lane == "edge":
            # What has no rank to reach has lanes of its own, too.
            edge = (channels.peer[heads] + 1) * 2 + columns.is_send[heads]
            lane = lane * (ranks + 1) * 2 + edge
        self.item[heads] = self.issue(lane, heads, self.on_ranks.before(heads), heads)
        self.item[rows] = self.item[batch]

    def meet_transfers(self, channels: Channels, atomic: bool) -> None:
        """Transfers are over one latency after both sides have started; and batches with the last
        of theirs, or if `atomic`, all that exchange messages, directly or through others, together.
        """
        # A send whose receive starts later; both are over at once:
        #
        #     send      ●──────────┬─ latency ─●
        #     receive              ●─ latency ─●
        is_there = channels.has_peer
        together = channels.components() if atomic else np.full(len(is_there), -1)
        latency = channels.latency(self.latencies)
        rows = np.flatnonzero(is_there & (together < 0))
        others = np.where(channels.partner >= 0, self.item[channels.partner], NEVER)
        waiter = self.item[rows]
        receives = channels.receives[rows]
        self.wait(waiter, others[rows], rows, latency[rows], receives, at_begin=True)
        # The way begins at the later of the two sides, so each waits for its own start as well.
        late = np.flatnonzero(latency[rows] > 0)
        delay = latency[rows[late]]
        self.wait(
            waiter[late], waiter[late], rows[late], delay, receives[late], at_begin=True
        )
        rows = np.flatnonzero(is_there & (together >= 0))
        if not len(rows):
            return
        # Each set of batches that are complete together has an item of its own, which waits for all
        # of them to start, and with which they are over.
        numbers, which = np.unique(together[rows], return_inverse=True)
        thread = self.threads + np.arange(len(numbers))
        self.threads += len(numbers)
        whole = self.items.add(thread, np.zeros(len(numbers), np.int64))[which]
        started = np.where(others[rows] >= 0, self.item[rows], NEVER)
        receives = channels.receives[rows]
        self.wait(whole, started, rows, latency[rows], receives, at_begin=True)
        self.wait(self.item[rows], whole, rows)

    def wait_for_room(self, channels: Channels, capacity: float) -> None:
        """A send is over once its message may wait, behind fewer than `capacity` others; a receive
        one latency after that.

        Transfers of one batch do not wait for each other: each is on a thread of its own.
        """
        # On `buffered:2`, of the messages of a channel (the order of each rank apart):
        #
        #     receive 0   waits for send 0 and the way
        #     send 2      waits for receive 0, which makes room
        #     receive 2   waits for send 2 and the way
        #     send 4      waits for receive 2, …
        columns = self.columns
        rows = np.flatnonzero(columns.is_transfer)
        rows = rows[channels.has_peer[rows]]
        done = self.item.copy()
        several = rows[columns.sizes[rows] > 1]
        # Each is done on its own, once its batch has started; the batch is over when all are.
        done[several] = self.items.add(self.threads + np.arange(len(several)), several)
        self.threads += len(several)
        self.wait(done[several], self.item[several], several, at_begin=True)
        self.wait(self.item[several], done[several], several)
        receives = rows[~columns.is_send[rows]]
        sends = channels.partner[receives]
        delay = channels.latency(self.latencies)[receives]
        target = np.where(sends >= 0, done[sends], NEVER)
        self.wait(done[receives], target, receives, delay, receives)
        sends, earlier = channels.taking_room(capacity)
        self.wait(done[sends], np.where(earlier >= 0, done[earlier], NEVER), sends)
