"""Sends and receives in the order of one global execution: a send and its receive are issued in the
same moment.

Following that order, a rank that waits always waits for the oldest transfer not yet done, whose two
ends are both there; so it is safe on every transport. It is also a good order, because the
execution is the one with the program's costs: a receive stands where its message would arrive. It
is what torch's own pipelining does, without costs. See `schedlang.proof.moments`.
"""

import numpy as np
from attrs import evolve, frozen

from schedlang.proof.moments import Moments, global_events, sent_as
from schedlang.schedule.columns import Columns, Ints, actions_of
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule


def co_issue(schedule: Schedule) -> Schedule:
    """The schedule with a send behind every op for each other rank that needs its result, and a
    receive there.

    Where the ops come to a standstill, each rank just goes on from there: the proof says why.
    """
    columns = schedule.columns
    moments = Moments(global_events(schedule))
    messages = _messages(schedule)
    is_handed = (messages.maker >= 0) & ~moments.is_stuck[messages.maker]
    # A receive is issued as its message is sent, or if it never is, before the op that lacks it.
    lacking = moments.issue[messages.user] - 1
    received = np.where(is_handed, moments.hand_over[messages.maker], lacking)
    came_from = np.where(is_handed, messages.maker, messages.user)
    sends = np.flatnonzero(messages.maker >= 0)
    receives = np.flatnonzero(is_handed | moments.is_stuck[messages.user])
    maker = messages.maker[sends]
    user = messages.user[receives]
    nothing = np.zeros(len(sends) + len(receives), np.int64)
    rank = np.concatenate([columns.rank, columns.rank[maker], columns.rank[user]])
    when = np.concatenate([moments.issue, moments.hand_over[maker], received[receives]])
    order = np.argsort(rank * np.int64(when.max(initial=0) + 1) + when, kind="stable")

    def merged(ops: Ints, sent: Ints, got: Ints) -> Ints:
        return np.concatenate([ops, sent, got])[order]

    placed = Columns(
        merged(columns.kind, messages.send[sends], messages.receive[receives]),
        merged(columns.stage, messages.sent_as[sends], messages.received_as[receives]),
        merged(columns.microbatch, columns.microbatch[maker], columns.microbatch[user]),
        np.concatenate([columns.group, nothing])[order],
        merged(columns.source, columns.source[maker], columns.source[came_from[receives]]),
        rank[order],
        columns.first,
    )
    return evolve(schedule, ranks=actions_of(len(schedule.ranks), placed))


@frozen(eq=False)
class _Messages:
    """What ops on other ranks need, in the order in which it is sent: who makes it and who needs
    it, as rows; its send and its receive.
    """

    maker: Ints
    user: Ints
    send: Ints
    sent_as: Ints
    receive: Ints
    received_as: Ints


def _messages(schedule: Schedule) -> _Messages:
    needs = schedule.needs
    items = np.flatnonzero(needs.is_message)
    made = needs.made[items]
    number = needs.number[items]
    is_forward = made == Kind.F
    number_there = sent_as(schedule, needs, items)
    # To the neighbour first, then by skips, whose numbers are behind those of the stages.
    order = np.lexsort((number_there, needs.maker[items]))
    return _Messages(
        needs.maker[items][order],
        needs.user[items][order],
        np.where(is_forward, int(Kind.SEND_F), int(Kind.SEND_B))[order],
        number_there[order],
        np.where(is_forward, int(Kind.RECV_F), int(Kind.RECV_B))[order],
        number[order],
    )
