"""The moments of one global execution, in which the two sides of a message come at once.

The execution is the ideal one where nothing is on its way for any time. Its moments are the ends of
ops: then an op hands over what it made. Of ops that end together, those hand over first whose ranks
have done less; then all ops start that can:

    time      0        1          2
    moment    0        1          2
    rank 0    F0 ──────┤SEND F1 ──┤SEND …
    rank 1             ┤RECV F0 ──┤RECV …

Where each rank's actions are in the order of their moments, the schedule runs on every transport:
of all that is not done yet, what comes first in that order waits for nothing but what is done. So
it is the order in which the compiler places transfers, and the quickest proof of a schedule.

Batches that exchange messages have one moment, that of the last of these.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import evolve

from schedlang.on_demand import on_demand
from schedlang.proof.edges import ideal_events, own_ideal_events
from schedlang.proof.events import Events
from schedlang.proof.graph import NOTHING, Graph
from schedlang.schedule.arrays import Flags, Floats, Ints, repeats
from schedlang.schedule.columns import Columns
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import HANDS_ON, OPS, RECEIVES, Kind
from schedlang.schedule.needs import Needs, needs_of
from schedlang.schedule.schedule import Schedule

if TYPE_CHECKING:
    from schedlang.proof.collectives import sides_of
    from schedlang.proof.transfer_batches import share_moments
else:
    # For schedules with batches of transfers, and for those with collectives.
    share_moments = on_demand("schedlang.proof.transfer_batches.share_moments")
    sides_of = on_demand("schedlang.proof.collectives.sides_of")

#: The costs that make ways between ranks, and what goes on beside ops, take any time.
_WAYS = (
    "p2p_time",
    "link_times",
    "boundary_bytes",
    "latency_in_node",
    "bandwidth_in_node",
    "latency_between_nodes",
    "bandwidth_between_nodes",
    "sum_times",
    "gather_times",
)


class Moments:
    """When each op is issued on its rank, and when it hands over its product. Events are those of
    `global_events`.

    Moments are whole numbers; only their order matters. `issue[row]` and `hand_over[row]` are the
    moments of an action. A copy is issued when the op before it hands over. `is_stuck[row]` is set
    for an op that never runs; its moments come after all others.
    """

    # Ops that hand over are counted: the k-th does it at moment 2k. An op that starts when k ops
    # have handed over is issued at 2k + 1. So what F0 makes is sent and received at 2, and the ops
    # that start at that time come at 3:
    #
    #     moment    1         2        3         4
    #     rank 0    issue F0  SEND_F0  issue F1  SEND_F1
    #     rank 1              RECV_F0  issue F0  …

    def __init__(self, events: Events) -> None:
        schedule = events.schedule
        columns = schedule.columns
        #: The heads of ops, one for all that overlap; and where ranks wait for hops, which are ops
        #: without duration: what stands behind them on one rank may let another one go on.
        heads = events.on_ranks.heads
        is_op = np.zeros(len(columns), bool)
        is_op[heads] = True
        items = events.on_ranks.items
        starts = events.graph.starts[items]
        ends = events.graph.ends[items]
        hands_on = columns.is_collective.copy()
        hands_on[columns.batch[columns.where(*map(Kind, HANDS_ON))]] = True
        start_round, end_round = _rounds(events, items, hands_on[heads])
        is_stuck = np.isinf(ends)

        # Of ops that end together, each rank's number of ops before decides, not its transfers.
        ops_before = np.cumsum(np.append(0, ~columns.is_transfer))
        index = ops_before[heads] - ops_before[columns.first[columns.rank[heads]]]
        within = end_round * np.int64(index.max(initial=0) + 1) + index
        within = within * len(schedule.ranks) + columns.rank[heads]
        order = np.lexsort((within, ends))
        turn = np.empty(len(items), np.int64)
        turn[order] = np.arange(len(items))
        handed = _before(starts, start_round, ends, end_round, order)

        # After a standstill each rank just goes on: it receives what an op lacks, runs it, and
        # sends. That takes three moments of each op.
        stuck = 2 * len(heads) + 3 + 3 * np.arange(len(heads))
        issue = np.where(is_stuck, stuck + 1, 2 * handed + 1)
        hand_over = np.where(is_stuck, stuck + 2, 2 * turn + 2)

        # Of each action those of its op, or of the op before it, or 0 where there is none.
        at = (np.cumsum(is_op) - 1)[columns.batch]
        is_there = (at >= 0) & (columns.rank[heads[at]] == columns.rank)
        self.is_stuck: Flags = is_stuck[at] & is_there
        self.hand_over: Ints = np.where(is_there, hand_over[at], 0).astype(np.int32)
        issue_of_op = np.where(is_there, issue[at], 0)
        # An op that takes no time and hands nothing on is issued as those that start with it.
        beside = np.maximum(self.hand_over, issue_of_op)
        is_beside = columns.is_beside & ~is_op
        self.issue: Ints = np.where(is_beside, beside, issue_of_op).astype(np.int32)


def sent_as(schedule: Schedule, needs: Needs, items: Ints) -> Ints:
    """The numbers under which the products of some needs are sent."""
    layout = schedule.layout
    table = np.zeros((max(RECEIVES) + 1, len(layout.all_numbers)), np.int64)
    for made, receive in RECEIVES.items():
        table[made] = layout.other_numbers(receive)
    numbers: Ints = table[needs.made[items], needs.number[items]]
    return numbers


def global_events(schedule: Schedule) -> Events:
    """The events of the execution whose moments are used: the ideal one, where messages and copies
    take no time.
    """
    costs = _without_ways(schedule)
    if costs == schedule.costs:
        return own_ideal_events(schedule)
    return ideal_events(schedule, costs)


def follows_moments(
    schedule: Schedule, ideal: Events, walked: Iterable[Graph] = ()
) -> bool:
    """Whether the actions of each rank are in the order of their moments, and both sides of every
    message have one moment; or both sides of all messages of batches that exchange some.

    `ideal` are the ideal events at the schedule's own costs, `walked` graphs that were walked
    before. A schedule for which this is not so may still be right.
    """
    columns = schedule.columns
    needs = needs_of(schedule)
    is_at_once = _without_ways(schedule) == schedule.costs
    events = ideal if is_at_once else global_events(schedule).among(walked)
    if not events.graph.is_whole:
        return False
    moments = Moments(events)
    # Both sides of the messages: the receives that ops need, and the sends.
    received = np.flatnonzero(needs.is_message)
    sent = np.flatnonzero(columns.is_transfer[needs.user])
    both = (
        (needs.receive[received], received, sent_as(schedule, needs, received)),
        (needs.user[sent], sent, needs.number[sent]),
    )
    # A moment has room for all messages, one behind the other in the order of hand-overs.
    room = np.int64(len(sent) + 1)
    when = moments.issue * room
    messages = []
    for rows, items, number in both:
        # In the order in which they are handed over: by their makers, then to the neighbour first.
        order = np.lexsort((number, needs.maker[items]))
        rows = rows[order]
        makers = needs.maker[items][order]
        if (rows < 0).any() or (makers < 0).any():
            return False
        when[rows] = moments.hand_over[makers] * room + 1 + np.arange(len(rows))
        messages.append((makers, number[order], rows))
    # What is sent is what is received, and every transfer is a side of one message.
    (makers, number, receives), (makers_sent, number_sent, sends) = messages
    if not np.array_equal(makers, makers_sent) or not np.array_equal(
        number, number_sent
    ):
        return False
    transfers = np.concatenate([receives, sends])
    if len(transfers) != np.count_nonzero(columns.is_transfer) or len(
        repeats(transfers)[0]
    ):
        return False
    if columns.has_batches and not share_moments(columns, sends, receives, when):
        return False
    grows = _grows(schedule, events, when, room)
    is_there = when[needs.receive[received]] < when[needs.user[received]]
    return grows and bool(is_there.all())


def _grows(schedule: Schedule, events: Events, when: Ints, room: np.int64) -> bool:
    """Whether the actions of each rank are in the order of the moments `when`."""
    columns = schedule.columns
    is_begun = np.zeros(len(columns), bool)
    if columns.is_collective.any():
        sides = sides_of(schedule)
        is_begun[sides.row[sides.counts > 1]] = True
    is_begun[events.on_ranks.heads] = False
    # What is of a stage and replicas outside of the plan may stand anywhere.
    is_anywhere = columns.is_collective & ~is_begun
    is_anywhere[events.on_ranks.heads] = False
    rows = np.flatnonzero(~is_anywhere)
    if is_begun.any():
        _begin_late(columns, rows, is_begun, when, room)
    is_same_rank = columns.rank[rows][1:] == columns.rank[rows][:-1]
    # Ops may share a moment, a transfer or a batch comes later than what is before it.
    is_head = columns.batch == np.arange(len(columns))
    grows = np.diff(when[rows]) >= (columns.is_transfer & is_head)[rows][1:]
    return bool((grows | ~is_same_rank).all())


def _begin_late(
    columns: Columns, rows: Ints, is_begun: Flags, when: Ints, room: np.int64
) -> None:
    """Move collectives behind what their rank does before them in the same moment. What waits for a
    collective has a later moment.
    """
    at = when[rows]
    of_rank = columns.rank[rows] * (at.max(initial=0) + np.int64(1))
    latest = np.maximum.accumulate(of_rank + at) - of_rank
    is_late = is_begun[rows] & (latest // room == at // room)
    when[rows[is_late]] = latest[is_late]


def _without_ways(schedule: Schedule) -> Costs:
    """The schedule's costs, with messages and copies to the host that take no time."""
    costs = schedule.costs
    no_times: dict[str, Any] = dict.fromkeys(_WAYS)
    if schedule.columns.is_background.any():
        copies = (op for op in OPS.values() if op.is_background)
        no_times |= {f"{op.cost}_times": (0.0,) for op in copies}
    changed = {
        name: time for name, time in no_times.items() if getattr(costs, name) != time
    }
    return evolve(costs, **changed) if changed else costs


def _before(
    starts: Floats, start_round: Ints, ends: Floats, end_round: Ints, order: Ints
) -> Ints:
    """For each op, how many other ops have ended by the moment of its start. `order` is the order
    of the ends.
    """
    if not end_round.any():
        return np.searchsorted(ends[order], starts, "right")
    moments = np.concatenate([starts, ends])
    rounds = np.concatenate([start_round, end_round])
    # Of one moment, ends come before starts.
    is_start = np.arange(len(moments)) < len(starts)
    in_time = np.lexsort((is_start, rounds, moments))
    ended = np.empty(len(moments), np.int64)
    ended[in_time] = np.cumsum(~is_start[in_time])
    return ended[: len(starts)]


def _rounds(events: Events, items: Ints, hands_on: Flags) -> tuple[Ints, Ints]:
    """Rounds of the ops at one time. If ops take no time, several come one after the other at the
    same time: for each op the round in which it starts, and the one in which it ends.

    A round is the longest path over the same events, counted in ops without duration, along edges
    on which nobody waits. If no op without duration hands anything on to another rank, as optimizer
    steps do not, one round is enough for all messages of one time.
    """
    graph = events.graph
    takes = graph.takes[graph.over[items]]
    is_short = (takes == 0) & np.isfinite(graph.ends[items])
    nothing = np.zeros(len(items), np.int64)
    if not (is_short & hands_on).any():
        return nothing, nothing
    counted = np.zeros(len(graph.times))
    counted[graph.over[items[is_short]]] = 1.0

    def counts(events: Ints) -> Flags:
        """Whether events happen as others begin, and have taken no time themselves."""
        took = np.append(graph.takes, [0.0, 0.0])[events]
        follows: Flags = (
            (events >= 0) & (took == 0) & (graph.times_of(events) == graph.begins)
        )
        return follows

    # Most events are at a time at which no such op runs: their round is the first.
    is_near = np.isin(graph.begins, graph.times[counted > 0])
    after = is_near & counts(graph.before)
    at_once = is_near & counts(graph.waits)
    chosen = np.flatnonzero((counted > 0) | after | at_once)
    number = np.full(len(counted) + 2, NOTHING)
    number[chosen] = np.arange(len(chosen))
    # Rounds are counted anew at every time: from a number that none of an earlier time reaches.
    moment = np.unique(graph.begins[chosen], return_inverse=True)[1]
    base = moment * (counted.sum() + 1)
    waits = np.where(at_once, number[graph.waits], NOTHING)[chosen]
    chains = evolve(
        graph,
        first=np.searchsorted(chosen, graph.first),
        waits=waits,
        delay=np.where(waits == NOTHING, base, 0.0),
        takes=counted[chosen],
    )
    rounds = np.zeros(len(counted), np.int64)
    rounds[chosen] = chains.times - base
    rounds = rounds[graph.over[items]]
    return rounds - is_short, np.where(is_short, rounds, 0)
