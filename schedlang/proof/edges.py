"""A transport is a set of edges: what waits for what in a schedule, as an event graph.

Every rank has a thread with its ops, where each waits for the one before. What else there is to
wait for depends on the transport (`schedlang.schedule.transports`, and docs/transports.md in
words); the drawings below show it.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from attrs import define, field, frozen

from schedlang.proof.channels import Channels, channels_of
from schedlang.proof.collectives import Collectives, collectives
from schedlang.proof.graph import NEVER, NOTHING, Graph, Items, once
from schedlang.proof.presence import writes
from schedlang.ranks.shards import gathers
from schedlang.schedule.columns import Columns, Floats, Ints, counts_of, pairs_within
from schedlang.schedule.costs import Costs, Durations, Transfers
from schedlang.schedule.fixed_point import FixedPoint
from schedlang.schedule.kinds import HOPS, RECEIVES, ROWS, SUMS, WAITS, Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.needs import gradients_of, needs_of, sums_of
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Bars, Beside, Timeline
from schedlang.schedule.transports import Transport

# `0F0 0SEND_F0 0F1` on rank 0, and `1RECV_F0 1F0` on rank 1. `──` is a thread, `╎` an edge.
#
# Where ranks block, batches of transfers stand on the ranks' threads, among the ops, and the two
# sides of a transfer wait for each other:
#
#     rank 0    ── 0F0 ── SEND_F0 ── 0F1 ──
#                            ╎
#     rank 1    ────────── RECV_F0 ── 1F0 ──
#
# Where they do not, batches stand on the threads of their lanes. A batch is issued once its rank
# has come to it, and an op waits for the batches that bring what it needs:
#
#     rank 0        ── 0F0 ── 0F1 ──
#                       ╰╌╌╌╌╮ issued
#     a lane of 0   ────── SEND_F0 ──
#                            ╎
#     a lane of 1   ────── RECV_F0 ──
#                            ╰╌╌╌╌╮ brings
#     rank 1        ───────────── 1F0 ──
#
# Where every transfer is on its own (gloo), a message is under way once its rank has come to the
# send, and an op waits for its messages. `ideal`, an op waits for the ops that make what it needs,
# and no transfer for another. Both look alike here:
#
#     rank 0    ── 0F0 ── 0F1 ──
#                   ╰╌╌╌╌╮ latency
#     rank 1    ──────── 1F0 ──

#: The streams of a rank on which gathers, sums and hops go beside its ops, by kind.
_STREAMS = (
    (Kind.UNSHARD,),
    (Kind.REDUCE_GRAD,),
    tuple(HOPS),
    tuple(HOPS.values()),
)
_STREAM = np.zeros(ROWS, np.int64)
for _number, _kinds in enumerate(_STREAMS):
    _STREAM[[*_kinds]] = _number

#: Among the orders of items on a thread: a batch is issued right before it stands there.
_ISSUED = 0
_STANDS = 1


@frozen(eq=False)
class Events:
    """The event graph of a schedule, and which of its items are which actions.

    `item[row]` is the item with which an action is over, or NOTHING for one that has none of its
    own: transfers on gloo, and ideally. `on_rank` are the heads of the batches on the threads of
    ranks, by their rows, in order, and `stands` their items there. `about[edge]` is the action that
    an edge is about: the receive that brings what is needed, the op that needs a sum, or what waits
    for a send. `receive[edge]` is the receive of the message whose way is the delay of an edge, or
    NOTHING. `awaited` has two rows: actions at which ranks wait, and the gathers, sums and hops of
    these ranks for which they do.
    `beside` has three: the items of sums and gathers that take time, and of each the actions after
    and before it (see `Beside`). Times of the graph are counts of the numbers of `fixed`.
    """

    schedule: Schedule
    fixed: FixedPoint
    graph: Graph
    item: Ints
    on_rank: Ints
    stands: Ints
    about: Ints
    receive: Ints
    awaited: Ints
    beside: Ints
    channels: Channels | None
    after: Floats

    def come(self, rows: Ints) -> Ints:
        """The events by which ranks have come to some transfers, copies, gathers, sums and hops, or
        NOTHING. A rank has come to a hop once it has waited there for what it passes on.
        """
        columns = self.schedule.columns
        heads = columns.batch[rows]
        before = np.searchsorted(self.on_rank, heads)
        is_wait = np.append(self.on_rank, NOTHING)[before] == rows
        before += is_wait & columns.is_collective[rows]
        items = _last_items(columns, self.stands, self.on_rank, heads, before)
        return np.append(self.graph.over, NOTHING)[items]

    def timeline(self) -> Timeline:
        """When each op and each copy runs."""
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
    # The order of gathers and hops is asked of the same events, see
    # `schedlang.proof.collective_order`. Others are not kept: to find new room takes longer than to
    # make a graph anew.
    is_asked = schedule.columns.is_collective.any() and costs == schedule.costs
    if is_asked and graph_of is _at_costs:
        return _own_ideal_events(schedule)
    return _ideal_in_turns(schedule, costs, graph_of)


@once
def _own_ideal_events(schedule: Schedule) -> Events:
    """The ideal events of a schedule at its own costs."""
    return _ideal_in_turns(schedule, schedule.costs, _at_costs)


def _ideal_in_turns(schedule: Schedule, costs: Costs, graph_of: GraphOf) -> Events:
    return _in_turns(
        schedule,
        costs,
        lambda turns: _ideal_events(_Build(schedule, costs, turns)),
        graph_of,
    )


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
    return _in_turns(
        schedule,
        costs,
        lambda turns: _transport_events(
            _Build(schedule, costs, turns), channels, transport
        ),
        graph_of,
    )


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
    events_of: Callable[[Ints | None], Events],
    graph_of: GraphOf,
) -> Events:
    """The events where copies of several ranks take turns on their links, in the order in which
    their ranks come to them.

    That order follows from the times, and these from it. So it is looked for: from an order, the
    times, and from these the order, until it stays.
    """
    # At first, and where no order is found, each rank has a link of its own.
    found = events = events_of(None)
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
        events = events_of(turns)
        if events.graph.is_whole:
            found = events
    return found


def _ideal_events(build: "_Build") -> Events:
    schedule = build.schedule
    build.place_ops()
    build.place_copies()
    needs = needs_of(schedule)
    items = build.item[needs.user]
    is_op = items >= 0
    is_before = (needs.maker >= 0) & (needs.maker < schedule.columns.batch[needs.user])
    # What is made on the same rank, but not before: its thread never gets there.
    build.wait_never(needs.user[is_op & ~needs.is_far & ~is_before])
    build.wait_never(sums_of(schedule).late(schedule.columns))
    # What another rank makes, and when it has come.
    wanted = np.flatnonzero(is_op & needs.is_message)
    makers = needs.maker[wanted]
    target = np.where(makers >= 0, build.item[makers], NEVER)
    delay = build.latency(needs.made[wanted], needs.number[wanted])
    build.wait(items[wanted], target, needs.user[wanted], delay, needs.receive[wanted])
    build.wait_for_copies()
    build.place_collectives()
    return build.events()


def _transport_events(
    build: "_Build", channels: Channels, transport: Transport
) -> Events:
    if transport.blocks:
        build.place_ops(with_batches=True)
    else:
        build.place_ops()
    build.place_copies()
    if transport.lane == "none":
        build.wait_for_messages(channels)
    else:
        if not transport.blocks:
            build.place_lanes(channels, transport)
            build.wait_for_receives()
        if transport.capacity:
            build.wait_for_room(channels, transport.capacity)
        else:
            build.meet(channels, transport.atomic)
    build.wait_for_copies()
    build.place_collectives()
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
    #: What waits for gathers, sums and hops, and these, in the order in which they are told.
    awaited: Ints = field(factory=lambda: np.zeros((2, 0), np.int64))
    #: The items of sums and gathers, and what comes before and after them.
    beside: list[Ints] = field(factory=list)
    item: Ints = field(init=False)
    after: Floats = field(init=False)
    #: The heads of the batches on the ranks' threads, by their rows, in order; and their items.
    on_rank: Ints = field(init=False)
    stands: Ints = field(init=False)

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
    def _latencies(self) -> Floats:
        transfers = self.costs.transfers(len(self.schedule.placement))
        times = latencies(self.schedule.layout, transfers)
        return self.costs.fixed_times.counts(times)

    def latency(self, made: Ints, number: Ints) -> Floats:
        """How long messages take, by what is made, and the numbers of their receives."""
        return self._latencies[made, number]

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

    def wait_never(self, users: Ints) -> None:
        """Ops that need what does not come before them."""
        self.wait(self.item[users], np.full(len(users), NEVER), users)

    @cached_property
    def written(self) -> Collectives | None:
        """The gathers, sums and hops that the program writes, if any."""
        is_any_written = self.columns.is_collective.any()
        return collectives(self.schedule) if is_any_written else None

    def place_ops(self, with_batches: bool = False) -> None:
        """Put the ops of each rank on its thread, and what else it waits at: for hops, and
        `with_batches` its transfers.
        """
        # What stands behind a wait for a hop, whatever it is, comes once the rank has waited:
        #
        #     rank 0    ── 1F0 ── 1RESHARD ── … ── 0F1 ──
        #                            ╎
        #     its hops  ───── 1SEND_WEIGHTS
        columns = self.columns
        is_head = columns.batch == np.arange(len(columns))
        is_op = columns.is_computed
        on_rank = is_op | columns.is_transfer if with_batches else is_op.copy()
        if self.written:
            on_rank[self.written.waits[0]] = True
        self.on_rank = np.flatnonzero(is_head & on_rank)
        # Ops that overlap are one item, which takes until the last of them ends.
        self.after[is_op] = op_ends(columns, np.flatnonzero(is_op), self.durations)
        takes = np.zeros(len(columns))
        np.maximum.at(takes, columns.batch[is_op], self.after[is_op])
        heads = self.on_rank
        self.stands = self.items.add(
            columns.rank[heads], heads * 2 + _STANDS, takes[heads]
        )
        self.item[heads] = self.stands
        self.item = self.item[columns.batch]

    @cached_property
    def heads_before(self) -> Ints:
        """How many heads of batches on the ranks' threads come before each action, of all ranks."""
        is_there = np.zeros(len(self.columns), bool)
        is_there[self.on_rank] = True
        before: Ints = np.cumsum(is_there) - is_there
        return before

    def rank_before(self, rows: Ints) -> Ints:
        """The item on its rank's thread that comes before each action, or NOTHING."""
        before = self.heads_before[rows]
        return _last_items(self.columns, self.stands, self.on_rank, rows, before)

    def place_copies(self) -> None:
        """Put copies on the threads of their links: each is begun when its rank comes to it."""
        rows = np.flatnonzero(self.columns.is_copy)
        if not len(rows):
            return
        # Each rank has a link of its own, where its copies go in its order; or they take turns.
        links: Sequence[int] = range(len(self.schedule.ranks))
        order: Ints = rows
        if self.turns is not None:
            links = self.schedule.layout.links
            order = self.turns
        link: Ints = np.unique(links, return_inverse=True)[1]
        columns = self.columns
        takes = self.durations.of(
            columns.kind[rows], columns.stage[rows], columns.microbatch[rows]
        )
        thread = self.threads + link[self.columns.rank[rows]]
        self.threads += len(link)
        self.item[rows] = self.items.add(thread, order, takes)
        self.wait(self.item[rows], self.rank_before(rows), rows)

    def wait_for_copies(self) -> None:
        """Ops wait for what is brought back from the host."""
        needs = needs_of(self.schedule)
        wanted = np.flatnonzero(needs.made == Kind.RELOAD)
        users = needs.user[wanted]
        makers = needs.maker[wanted]
        is_before = (makers >= 0) & (makers < self.columns.batch[users])
        wanted = wanted[is_before & ~self.columns.is_transfer[users]]
        users = needs.user[wanted]
        self.wait(self.item[users], self.item[needs.maker[wanted]], users)

    def place_collectives(self) -> None:
        """Put sums and gathers beside the ops: those that the program writes, and the others."""
        self.wait_for_sums()
        self.place_sums()
        self.place_gathers()
        if self.written:
            self.place_written(self.written)

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

    def place_sums(self) -> None:
        """Put sums of gradients over replicas, where they take time, on streams of their own. A sum
        is begun when the rank has made the last gradient, and goes on once all ranks with replicas
        have begun it; optimizer steps wait for it.
        """
        # Two ranks with replicas of one stage. The later one begins the sum for both:
        #
        #     rank 0       ── 0B3 ── … ──────────── U
        #                      ╰╌╌╮                 │
        #     its stream     ───── sum ─────────────╯
        #                           ╎
        #     of rank 1      ─────── sum ───────────╮
        #                      ╭╌╌╌╌╯               │
        #     rank 1       ── 2B1 ── … ──────────── U
        if not self.costs.sum_times:
            return
        columns = self.columns
        layout = self.schedule.layout
        # Replicas have one sum, which takes the longest time that is given for any of them.
        times = self.costs.fixed_times.counts(self.costs.sums(len(layout.placement)))
        times = np.reshape(times, (-1, layout.pieces))
        takes = times.max(axis=0)[gradients_of(self.schedule).piece]
        gradients = gradients_of(self.schedule)
        # Those that are written have a place of their own.
        pieces = np.array(layout.piece_of)
        written = np.unique(pieces[writes(self.schedule, SUMS)])
        is_placed = (takes > 0) & ~np.isin(gradients.piece, written)
        gradients = gradients.taken(is_placed)
        takes = takes[is_placed]
        last = gradients.last
        group = gradients.piece * layout.updates + gradients.update
        sizes = counts_of(group)
        # Sums over replicas outside of the plan go one after the other on each rank. Those within
        # have a stream for each piece, so that all ranks can have them in one order.
        is_alone = sizes[group] == 1
        ranks = len(self.schedule.ranks)
        thread = (
            self.threads
            + gradients.rank
            + np.where(is_alone, 0, gradients.piece + 1) * ranks
        )
        turn = np.where(is_alone, last, gradients.update) * 2
        self.threads = int(thread.max(initial=self.threads)) + 1
        begun = self.items.add(thread, turn + _ISSUED)
        self.wait(begun, self.item[last], last)
        sums = self.items.add(thread, turn + _STANDS, takes)
        # All sums of a group wait for each other's begin.
        one, other = pairs_within(group)
        self.wait(sums[one], sums[other], last[one], at_begin=True)
        # Steps wait for them; one that stands before its gradients is found to be wrong elsewhere.
        steps = columns.where(Kind.U)
        stage = columns.stage[steps]
        piece = np.array(layout.piece_of)[stage]
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

    def place_gathers(self) -> None:
        """Put gathers of sharded weights, where they take time, on a stream of each rank. A gather
        is begun when its rank comes to the op before the one that waits for it, or to that one
        (`schedlang.ranks.shards`); there is a place for all stages of a rank.
        """
        if not self.costs.gather_times:
            return
        columns = self.columns
        times = self.costs.fixed_times.counts(
            self.costs.gathers(len(self.schedule.placement))
        )
        begun = []
        users = []
        stages = []
        for rank, actions in enumerate(self.schedule.ranks):
            held = [stage for stage in self.schedule.stages_of(rank) if times[stage]]
            first = int(columns.first[rank])
            for index, stage, user in gathers(actions, held, max(len(held), 1)):
                begun.append(first + index)
                users.append(first + user)
                stages.append(stage)
        rows, waiting = np.array([begun, users], np.int64)
        thread = self.threads + columns.rank[rows]
        self.threads += len(self.schedule.ranks)
        items = self.items.add(
            thread, np.arange(len(rows)), times[np.array(stages, np.int64)]
        )
        self.wait(items, self.rank_before(columns.batch[rows]), rows)
        self.wait(self.item[waiting], items, waiting)
        self.beside.append(np.stack([items, np.full(len(items), NOTHING), waiting]))

    def place_written(self, written: Collectives) -> None:
        """Put the gathers, sums and hops that the program writes on streams of each rank; each is
        begun when its rank comes to it, and goes on once all its ranks have begun it. A rank begins
        one after the other, whichever it is.
        """
        # A gather on two ranks with replicas, of which rank 1 comes to it later:
        #
        #     rank 0            ── 0B3 ── … ────────────── 0F4
        #                           ╰╌╌╮                  │
        #     begun by rank 0   ─────── ● ─ ●             │
        #                                   ╎╰╌╌╮         │
        #     its stream        ────────────╎── gather ───╯
        #     begun by rank 1   ────────── ● ─ ●
        columns = self.columns
        ranks = len(self.schedule.ranks)
        rows = written.row
        rank = columns.rank[rows]
        kind = columns.kind[rows]
        thread = self.threads + rank
        # What its rank waits at, it begins behind that.
        waiting, hops = written.waits
        stand = self.item[waiting]
        before = self.rank_before(rows)
        before = np.where(np.isin(rows, waiting), self.item[rows], before)
        # Of those behind one op, the first waits for it, and the others stand behind that.
        first = np.flatnonzero(np.diff(before, prepend=NOTHING))
        begun = self.items.add(thread[first], rows[first] * 2 + _ISSUED)
        self.wait(begun, before[first], rows[first])
        together = self.items.add(thread, rows * 2 + _STANDS)
        # Replicas have one event, which takes the longest time that is given for any of them.
        each = self.durations.of(kind, columns.stage[rows], columns.microbatch[rows])
        takes = np.zeros(int(written.event.max(initial=-1)) + 1)
        np.maximum.at(takes, written.event, each)
        items = together
        stream = thread
        one, other = pairs_within(written.event)
        self.wait(together[one], together[other], rows[one], at_begin=True)
        # Where none takes any time, each is over as soon as all its ranks have begun it: then no
        # stream is needed.
        if takes.any():
            stream = self.threads + (1 + _STREAM[kind]) * ranks + rank
            items = self.items.add(stream, rows, takes[written.event])
            self.wait(items, together, rows)
            self.wait(items[one], items[other], rows[one], at_begin=True)
        self.item[rows] = items
        self.threads += (1 + len(_STREAMS)) * ranks
        self.place_releases(waiting)
        # Ops wait for what they need, and so do sends that pass something on, and ends of weights.
        needed = np.flatnonzero(written.user != NOTHING)
        users = columns.batch[written.user[needed]]
        awaited = np.array([[*users, *waiting], [*rows[needed], *hops]], np.int64)
        self.wait_in_streams(awaited, np.append(self.item[users], stand), rows, stream)
        timed = np.flatnonzero(takes[written.event] > 0)
        self.beside.append(
            np.stack([items[timed], written.last[timed], written.user[timed]])
        )

    def place_releases(self, waiting: Ints) -> None:
        """Weights go where the rank is `waiting` for hops, or at once when it comes there."""
        rows = self.columns.where(Kind.RESHARD)
        rows = rows[~np.isin(rows, waiting)]
        items = self.items.add(self.threads + self.columns.rank[rows], rows)
        self.threads += len(self.schedule.ranks)
        self.item[rows] = items
        self.wait(items, self.rank_before(rows), rows)

    def wait_in_streams(
        self, awaited: Ints, waiters: Ints, written: Ints, stream: Ints
    ) -> None:
        """Let ranks wait for gathers, sums and hops of theirs, at some items, and keep which these
        are. Of all that are written, the threads are given.
        """
        self.awaited = awaited
        # Of one thread, the last is over last: only that is waited for.
        heads, rows = awaited
        pair = heads * np.int64(stream.max(initial=0) + 1)
        pair += stream[np.searchsorted(written, rows)]
        order = np.lexsort((rows, pair))
        last = order[np.diff(pair[order], append=NOTHING) != 0]
        self.wait(waiters[last], self.item[rows[last]], rows[last])

    def wait_for_messages(self, channels: Channels) -> None:
        """Each transfer is on its own: ops wait for the sends of what they need, and the way."""
        wanted, receives = self._received()
        sends = channels.partner[receives]
        target = np.where(sends >= 0, self.rank_before(sends), NEVER)
        delay = channels.latency(self._latencies)[receives]
        users = needs_of(self.schedule).user[wanted]
        self.wait(self.item[users], target, receives, delay, receives)

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
            delay = channels.latency(self._latencies)[sends]
            receives = channels.partner[sends]
            come = np.where(receives >= 0, self.rank_before(receives), NEVER)
            self.wait(self.item[waits], come, waits, delay, receives)
            self.wait(self.item[waits], self.rank_before(sends), waits, delay, receives)

    def _sorted(self, rows: Ints) -> Ints:
        """Actions in the order of their stages and microbatches."""
        return rows[
            np.lexsort((self.columns.microbatch[rows], self.columns.stage[rows]))
        ]

    def wait_for_receives(self) -> None:
        """Ops wait for the batches that bring what they need."""
        wanted, receives = self._received()
        users = needs_of(self.schedule).user[wanted]
        self.wait(self.item[users], self.item[receives], receives)

    def _received(self) -> tuple[Ints, Ints]:
        """The needs of ops for messages, and the receives that bring these before them."""
        needs = needs_of(self.schedule)
        is_op = ~self.columns.is_transfer[needs.user]
        is_before = (needs.receive >= 0) & (
            needs.receive < self.columns.batch[needs.user]
        )
        wanted = np.flatnonzero(needs.is_message & is_op & is_before)
        return wanted, needs.receive[wanted]

    def place_lanes(self, channels: Channels, transport: Transport) -> None:
        """Put batches of transfers on the threads of their lanes, each issued when its rank comes
        to it.
        """
        columns = self.columns
        batch = issued_with(columns, transport)
        rows = np.flatnonzero(columns.is_transfer)
        heads = rows[batch[rows] == rows]
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
        thread = self.threads + lane
        self.threads = int(thread.max(initial=self.threads)) + 1
        # Two items of a batch, one behind the other on its lane: it is issued when its rank comes
        # to it, and only from then on it stands there and meets its other side.
        issued = self.items.add(thread, heads * 2 + _ISSUED)
        self.wait(issued, self.rank_before(heads), heads)
        self.item[heads] = self.items.add(thread, heads * 2 + _STANDS)
        self.item[rows] = self.item[batch[rows]]

    def meet(self, channels: Channels, atomic: bool) -> None:
        """Transfers are over one latency after both sides have started; and batches with the last
        of theirs, or if `atomic`, all that exchange messages, directly or through others, together.
        """
        # A send whose receive starts later; both are over at once:
        #
        #     send      ●──────────┬─ latency ─●
        #     receive              ●─ latency ─●
        is_there = channels.has_peer
        together = channels.components() if atomic else np.full(len(is_there), -1)
        latency = channels.latency(self._latencies)
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
        self.meet_together(channels, rows, together, others, latency)

    def meet_together(
        self,
        channels: Channels,
        rows: Ints,
        together: Ints,
        others: Ints,
        latency: Floats,
    ) -> None:
        """Batches that are complete together: each such set of batches has an item of its own,
        which waits for all of them to start, and with which they are over.
        """
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
        delay = channels.latency(self._latencies)[receives]
        target = np.where(sends >= 0, done[sends], NEVER)
        self.wait(done[receives], target, receives, delay, receives)
        sends, earlier = channels.taking_room(capacity)
        self.wait(done[sends], np.where(earlier >= 0, done[earlier], NEVER), sends)

    def events(self, channels: Channels | None = None) -> Events:
        """All of it as a graph."""
        graph = self.items.graph()
        about, receive = map(np.concatenate, (self.about, self.receive))
        beside = np.concatenate([np.zeros((3, 0), np.int64), *self.beside], axis=1)
        return Events(
            self.schedule,
            self.costs.fixed_times,
            graph,
            self.item,
            self.on_rank,
            self.stands,
            about,
            receive,
            self.awaited,
            beside,
            channels,
            self.after,
        )


def _last_items(
    columns: Columns, stands: Ints, on_rank: Ints, rows: Ints, before: Ints
) -> Ints:
    """The item on its rank's thread that comes before each of some actions, or NOTHING; `on_rank`
    are the heads of the batches on all ranks' threads, which so many of come `before`, and `stands`
    their items.
    """
    if not len(on_rank):
        return np.full(len(rows), NOTHING)
    heads = on_rank[before - 1]
    is_there = (before > 0) & (columns.rank[heads] == columns.rank[rows])
    return np.where(is_there, stands[before - 1], NOTHING)


def issued_with(columns: Columns, transport: Transport) -> Ints:
    """Of each action, the first row of those that go as one with it on a transport."""
    if not transport.splits_batches:
        return columns.batch
    return np.where(columns.is_transfer, np.arange(len(columns)), columns.batch)


def latencies(layout: Layout, transfers: Transfers) -> Floats:
    """How long each transfer takes, by what it brings, and the number of its receive."""
    table = np.zeros((max(RECEIVES) + 1, len(layout.all_numbers)))
    for made, receive in RECEIVES.items():
        for number in layout.all_numbers:
            stage, other = layout.ends(receive, number)
            sender = layout.peer(receive, number)
            if sender is not None:
                earlier = min(stage, other)
                receiver = layout.placement[stage]
                table[made, number] = transfers.time(made, earlier, sender, receiver)
    return table


def op_ends(columns: Columns, ops: Ints, durations: Durations) -> Floats:
    """For each op, its end after the start of the ops that it overlaps with."""
    kind = columns.kind[ops]
    stage = columns.stage[ops]
    microbatch = columns.microbatch[ops]
    after = durations.of(kind, stage, microbatch)
    heads = columns.batch[ops]
    is_alone = columns.sizes[ops] == 1
    if is_alone.all():
        return after
    # Overlaps come in few combinations of kinds and stages: each is asked for once. Only where
    # durations differ by microbatch, each is one of its own.
    known: dict[tuple[tuple[int, int, int], ...], list[float]] = {}
    unit = microbatch if durations.by_unit else np.zeros_like(microbatch)
    overlapping = np.flatnonzero(~is_alone)
    starts = overlapping[heads[overlapping] == ops[overlapping]]
    sizes = columns.sizes[ops[starts]]
    words = list(zip(kind.tolist(), stage.tolist(), unit.tolist(), strict=True))
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        group = tuple(words[start : start + size])
        if group not in known:
            known[group] = durations.ends(group)
        after[start : start + size] = known[group]
    return after
