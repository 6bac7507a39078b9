"""Insert sends and receives in the order of one global execution: a send and its receive are issued
at the same moment.

In that order, both ranks of the oldest unfinished transfer have come to it, so it can always
finish: no transport can deadlock. It is also a fast order, because the execution has the program's
costs: a receive stands where its message would arrive. torch's own pipelining does the same without
costs. See `schedlang.proof.moments`.
"""

import numpy as np
from attrs import evolve, frozen

from schedlang.proof.events import Events
from schedlang.proof.moments import Moments, global_events, sent_as
from schedlang.schedule.arrays import Ints
from schedlang.schedule.columns import Columns, actions_of
from schedlang.schedule.kinds import RECEIVES, SENDS, Kind
from schedlang.schedule.needs import needs_of
from schedlang.schedule.schedule import Schedule


def co_issue(schedule: Schedule, events: Events | None = None) -> Schedule:
    """The schedule with a send after each op for every other rank that needs its result, and with a
    receive on that rank.

    `events` are the schedule's global events, if they are known. If the ops deadlock, the remaining
    actions are placed in each rank's order, and the proof reports the deadlock.
    """
    # Without messages, there is no need to execute the schedule.
    if not needs_of(schedule).is_message.any():
        return schedule
    columns = schedule.columns
    moments = Moments(events or global_events(schedule))
    messages = _messages(schedule)
    # A message is sent and received at the moment at which its maker hands it over. If its maker
    # never runs, the receive stands right before the op that needs it.
    is_handed = (messages.maker >= 0) & ~moments.is_stuck[messages.maker]
    lacking = moments.issue[messages.user] - 1
    received = np.where(is_handed, moments.hand_over[messages.maker], lacking)
    came_from = np.where(is_handed, messages.maker, messages.user)
    sends = np.flatnonzero(messages.maker >= 0)
    receives = np.flatnonzero(is_handed | moments.is_stuck[messages.user])
    maker = messages.maker[sends]
    user = messages.user[receives]

    # All ops, sends and receives in one list, sorted by rank and moment. Within a moment a rank
    # runs its op, then sends, then runs collectives, and then receives: collectives only need
    # results of earlier moments. A rank's own actions keep their order in any case.
    rank = np.concatenate([columns.rank, columns.rank[maker], columns.rank[user]])
    when = np.concatenate([moments.issue, moments.hand_over[maker], received[receives]])
    lengths = [len(columns), len(sends), len(receives)]
    turn = np.repeat([0, 1, 3], lengths)
    turn[: len(columns)] = _behind(
        np.where(columns.is_collective, 2, 0), columns, moments.issue
    )
    order = np.lexsort((turn, rank * np.int64(when.max(initial=0) + 1) + when))
    alone = np.zeros(len(sends) + len(receives), np.int64)

    def merged(*columns: Ints) -> Ints:
        return np.concatenate(columns)[order]

    placed = Columns(
        kind=merged(columns.kind, messages.send[sends], messages.receive[receives]),
        stage=merged(
            columns.stage, messages.sent_as[sends], messages.received_as[receives]
        ),
        microbatch=merged(
            columns.microbatch, columns.microbatch[maker], columns.microbatch[user]
        ),
        group=merged(columns.group, alone),
        source=merged(
            columns.source, columns.source[maker], columns.source[came_from[receives]]
        ),
        rank=rank[order],
        first=columns.first,
    )
    return evolve(schedule, ranks=actions_of(len(schedule.ranks), placed))


def _behind(turn: Ints, columns: Columns, when: Ints) -> Ints:
    """Each action's turn within its moment, at least that of the action before it on its rank."""
    is_new = np.ones(len(columns), bool)
    is_new[1:] = (np.diff(columns.rank) != 0) | (np.diff(when) != 0)
    moment = np.cumsum(is_new) * (turn.max(initial=0) + 1)
    latest: Ints = np.maximum.accumulate(moment + turn) - moment
    return latest


@frozen(eq=False)
class _Messages:
    """All messages in the order in which they are sent: the rows of the op that makes one and of
    the op that needs it; the kinds of its send and its receive, and their numbers.
    """

    maker: Ints
    user: Ints
    send: Ints
    sent_as: Ints
    receive: Ints
    received_as: Ints


def _messages(schedule: Schedule) -> _Messages:
    needs = needs_of(schedule)
    items = np.flatnonzero(needs.is_message)
    numbers = sent_as(schedule, needs, items)
    # Messages to the next stage first, then skips, which have higher numbers.
    order = np.lexsort((numbers, needs.maker[items]))
    items = items[order]
    is_forward = needs.made[items] == Kind.F
    return _Messages(
        maker=needs.maker[items],
        user=needs.user[items],
        send=np.where(is_forward, SENDS[Kind.F], SENDS[Kind.B]),
        sent_as=numbers[order],
        receive=np.where(is_forward, RECEIVES[Kind.F], RECEIVES[Kind.B]),
        received_as=needs.number[items],
    )
