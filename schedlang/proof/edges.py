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
(`schedlang.schedule.transports`, and docs/transports.md in words): `schedlang.proof.message_edges`
draws it.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from schedlang.on_demand import on_demand
from schedlang.proof.events import Events
from schedlang.proof.features import functions
from schedlang.proof.graph import NEVER, Graph
from schedlang.proof.threads import Threads
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import AWAY, BACK
from schedlang.schedule.needs import needs_of
from schedlang.schedule.schedule import Schedule, once

if TYPE_CHECKING:
    from schedlang.schedule.needed_gradients import sums_of
else:
    # For optimizer steps.
    sums_of = on_demand("schedlang.schedule.needed_gradients.sums_of")

#: The graph by whose times copies of several ranks take turns: the events of a schedule, with the
#: durations that count.
GraphOf = Callable[[Events], Graph]


def at_costs(events: Events) -> Graph:
    """The graph of events with the durations that the costs give."""
    return events.graph


def ideal_events(
    schedule: Schedule, costs: Costs, graph_of: GraphOf = at_costs
) -> Events:
    """The ideal events: the product of an op is on its way at once, and no transfer waits for
    another.

    An op never runs if its own rank does not make what it needs before it.
    """
    return in_turns(schedule, costs, _ideal, graph_of)


@once
def own_ideal_events(schedule: Schedule) -> Events:
    """The ideal events at the costs of the schedule itself."""
    return ideal_events(schedule, schedule.costs)


def takes_turns(schedule: Schedule, costs: Costs) -> bool:
    """Whether ranks share links to the host, so that the times of their copies decide which copy
    waits for which.
    """
    links = schedule.layout.links
    is_shared = len(set(links)) < len(links)
    # What the costs say is asked last, since it takes longest.
    if not is_shared or not schedule.columns.is_copy.any():
        return False
    durations = costs.durations(schedule.layout)
    # A copy that takes no time keeps nobody waiting.
    return any(any(durations[kind]) for kind in (*AWAY, *BACK))


def in_turns(
    schedule: Schedule,
    costs: Costs,
    events_of: Callable[[Threads], Events],
    graph_of: GraphOf,
) -> Events:
    """The events where ranks share links: copies take turns in the order in which their ranks reach
    them.

    That order depends on the times, and the times on the order. So both are iterated until the
    order does not change.
    """
    # At first, and where no order is found, each rank has a link of its own.
    found = events = events_of(Threads(schedule, costs))
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
        events = events_of(Threads(schedule, costs, turns))
        if events.graph.is_whole:
            found = events
    return found


def _ideal(threads: Threads) -> Events:
    """The ideal event graph."""
    threads.place_ops()
    _wait_for_makers(threads)
    place_features(threads)
    _never_run(threads)
    return threads.events()


def place_features(threads: Threads) -> None:
    """Put the events of the schedule's features into the graph."""
    for place in functions("place", threads.schedule, threads.costs):
        place(threads)
    if threads.columns.is_background.any():
        _wait_for_background(threads)


def _wait_for_background(threads: Threads) -> None:
    """Let ops wait for what they need of ops that run beside them, such as copies."""
    columns = threads.columns
    needs = needs_of(threads.schedule)
    is_before = (needs.maker >= 0) & (needs.maker < columns.batch[needs.user])
    is_op = columns.is_computed[needs.user]
    is_beside = columns.is_background[needs.maker]
    wanted = np.flatnonzero(is_before & is_op & is_beside)
    users = needs.user[wanted]
    makers = needs.maker[wanted]
    threads.wait(threads.item[users], threads.item[makers], makers)


def _wait_for_makers(threads: Threads) -> None:
    """Let ops wait for the ops on other ranks that make what they need, and for the latency."""
    needs = needs_of(threads.schedule)
    wanted = np.flatnonzero(needs.is_message & ~threads.columns.is_transfer[needs.user])
    users = needs.user[wanted]
    makers = needs.maker[wanted]
    target = np.where(makers >= 0, threads.item[makers], NEVER)
    delay = threads.latencies[needs.made[wanted], needs.number[wanted]]
    threads.wait(threads.item[users], target, users, delay, needs.receive[wanted])


def _never_run(threads: Threads) -> None:
    """Ops and copies never run if they need a product that their own rank makes only later."""
    needs = needs_of(threads.schedule)
    is_before = (needs.maker >= 0) & (needs.maker < threads.columns.batch[needs.user])
    is_late = ~needs.is_far & ~is_before & ~threads.columns.is_transfer[needs.user]
    late = [needs.user[is_late]]
    if threads.schedule.has_updates:
        late.append(sums_of(threads.schedule).late(threads.columns))
    for users in late:
        threads.wait(threads.item[users], np.full(len(users), NEVER), users)
