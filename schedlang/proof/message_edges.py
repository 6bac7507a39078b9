"""The events of a schedule on a transport, and the edges of its messages there."""

import numpy as np

from schedlang.proof.channels import Channels, channels_of
from schedlang.proof.edges import GraphOf, at_costs, in_turns, place_features
from schedlang.proof.events import Events
from schedlang.proof.graph import NEVER, NOTHING
from schedlang.proof.threads import Threads
from schedlang.schedule.arrays import Ints
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import WAITS
from schedlang.schedule.needs import needs_of
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


def transport_events(
    schedule: Schedule,
    costs: Costs,
    transport: Transport,
    graph_of: GraphOf = at_costs,
) -> Events:
    """The events on a transport.

    The order of each rank is taken as right: an op that stands before what it needs does not wait
    for it. `schedlang.proof.order` finds such ops.
    """
    channels = channels_of(schedule, transport)

    def on_transport(threads: Threads) -> Events:
        return _on_transport(threads, channels, transport)

    return in_turns(schedule, costs, on_transport, graph_of)


def _on_transport(threads: Threads, channels: Channels, transport: Transport) -> Events:
    """The event graph on a transport."""
    threads.place_ops(with_transfers=transport.blocks)
    if transport.lane == "none":
        _wait_for_messages(threads, channels)
    else:
        if not transport.blocks:
            _place_lanes(threads, channels, transport)
            _wait_for_receives(threads)
        if transport.capacity:
            _wait_for_room(threads, channels, transport.capacity)
        else:
            _meet_transfers(threads, channels, transport.atomic)
    place_features(threads)
    _wait_for_sends(threads, channels)
    return threads.events(channels)


def _wait_for_messages(threads: Threads, channels: Channels) -> None:
    """Without lanes: let ops wait until the ranks that send what they need have reached their
    sends, and for the latency.
    """
    users, receives = _received(threads)
    sends = channels.partner[receives]
    target = np.where(sends >= 0, threads.on_ranks.before(sends), NEVER)
    delay = channels.latency(threads.latencies)[receives]
    threads.wait(threads.item[users], target, receives, delay, receives)


def _wait_for_receives(threads: Threads) -> None:
    """With lanes: let ops wait for the batches that bring what they need."""
    users, receives = _received(threads)
    threads.wait(threads.item[users], threads.item[receives], receives)


def _received(threads: Threads) -> tuple[Ints, Ints]:
    """Pairs of ops and receives: the op needs what the receive brings before it."""
    needs = needs_of(threads.schedule)
    is_before = (needs.receive >= 0) & (
        needs.receive < threads.columns.batch[needs.user]
    )
    is_op = ~threads.columns.is_transfer[needs.user]
    wanted = np.flatnonzero(needs.is_message & is_op & is_before)
    return needs.user[wanted], needs.receive[wanted]


def _wait_for_sends(threads: Threads, channels: Channels) -> None:
    """Let a wait for a send hold its rank until the send is complete. Each send has one wait."""
    for send, wait in WAITS.items():
        if not len(threads.columns.where(wait)):
            continue
        # In one order, sends and waits are pairs.
        sends = _sorted(threads, threads.columns.where(send))
        waits = _sorted(threads, threads.columns.where(wait))
        alone = threads.item[sends] == NOTHING
        threads.wait(
            threads.item[waits[~alone]], threads.item[sends[~alone]], waits[~alone]
        )
        # A transfer on its own is over one latency after both ranks have come to it.
        sends = sends[alone]
        waits = waits[alone]
        delay = channels.latency(threads.latencies)[sends]
        receives = channels.partner[sends]
        come = np.where(receives >= 0, threads.on_ranks.before(receives), NEVER)
        threads.wait(threads.item[waits], come, waits, delay, receives)
        come = threads.on_ranks.before(sends)
        threads.wait(threads.item[waits], come, waits, delay, receives)


def _sorted(threads: Threads, rows: Ints) -> Ints:
    """Actions in the order of their stages and microbatches."""
    return rows[
        np.lexsort((threads.columns.microbatch[rows], threads.columns.stage[rows]))
    ]


def _place_lanes(threads: Threads, channels: Channels, transport: Transport) -> None:
    """Put batches of transfers on the lanes of their ranks."""
    columns = threads.columns
    rows = np.flatnonzero(columns.is_transfer)
    batch = rows if transport.splits_batches else columns.batch[rows]
    heads = rows[batch == rows]
    number = transport.lanes(
        len(threads.schedule.ranks),
        channels.peer[heads],
        columns.is_send[heads],
        columns.sizes[heads],
    )
    lane = columns.rank[heads] * (number.max(initial=0) + np.int64(1)) + number
    threads.item[heads] = threads.issue(
        lane, heads, threads.on_ranks.before(heads), heads, meets=True
    )
    threads.item[rows] = threads.item[batch]


def _meet_transfers(threads: Threads, channels: Channels, atomic: bool) -> None:
    """A transfer is complete one latency after both of its sides have started, and a batch with the
    last of its transfers. If batches are `atomic`, those that exchange messages complete together.
    """
    # A send whose receive starts later; both are over at once:
    #
    #     send      ●──────────┬─ latency ─●
    #     receive              ●─ latency ─●
    is_there = channels.has_peer
    together = channels.components() if atomic else np.full(len(is_there), -1)
    latency = channels.latency(threads.latencies)
    rows = np.flatnonzero(is_there & (together < 0))
    others = np.where(channels.partner >= 0, threads.item[channels.partner], NEVER)
    waiter = threads.item[rows]
    receives = channels.receives[rows]
    threads.wait(waiter, others[rows], rows, latency[rows], receives, at_begin=True)
    # The way begins at the later of the two sides, so each waits for its own start as well.
    late = np.flatnonzero(latency[rows] > 0)
    delay = latency[rows[late]]
    threads.wait(
        waiter[late], waiter[late], rows[late], delay, receives[late], at_begin=True
    )
    rows = np.flatnonzero(is_there & (together >= 0))
    if not len(rows):
        return
    # Each set of batches that are complete together has an item of its own, which waits for all
    # of them to start, and with which they are over.
    numbers, which = np.unique(together[rows], return_inverse=True)
    thread = threads.count + np.arange(len(numbers))
    threads.count += len(numbers)
    whole = threads.items.add(thread, np.zeros(len(numbers), np.int64))[which]
    started = np.where(others[rows] >= 0, threads.item[rows], NEVER)
    receives = channels.receives[rows]
    threads.wait(whole, started, rows, latency[rows], receives, at_begin=True)
    threads.wait(threads.item[rows], whole, rows)


def _wait_for_room(threads: Threads, channels: Channels, capacity: float) -> None:
    """A send is complete once fewer than `capacity` messages wait on its channel, and its receive
    one latency later. Transfers of one batch do not wait for each other: each has a thread of its
    own.
    """
    # On `buffered:2`, of the messages of a channel (the order of each rank apart):
    #
    #     receive 0   waits for send 0 and the way
    #     send 2      waits for receive 0, which makes room
    #     receive 2   waits for send 2 and the way
    #     send 4      waits for receive 2, …
    columns = threads.columns
    rows = np.flatnonzero(columns.is_transfer)
    rows = rows[channels.has_peer[rows]]
    done = threads.item.copy()
    several = rows[columns.sizes[rows] > 1]
    # Each is done on its own, once its batch has started; the batch is over when all are.
    done[several] = threads.items.add(threads.count + np.arange(len(several)), several)
    threads.count += len(several)
    threads.wait(done[several], threads.item[several], several, at_begin=True)
    threads.wait(threads.item[several], done[several], several)
    receives = rows[~columns.is_send[rows]]
    sends = channels.partner[receives]
    delay = channels.latency(threads.latencies)[receives]
    target = np.where(sends >= 0, done[sends], NEVER)
    threads.wait(done[receives], target, receives, delay, receives)
    sends, earlier = channels.taking_room(capacity)
    threads.wait(done[sends], np.where(earlier >= 0, done[earlier], NEVER), sends)
