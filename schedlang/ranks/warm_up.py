"""The warm-up of a step, which the ranks can run again: only forwards, and messages between them.

If weights turn out to be wrong when a step has already begun, its forwards are wrong, and all ranks
start over. Until that is known, no rank may run past the end of its warm-up, and no message may go
from a warm-up to a later action:

    rank 0   F0 SEND_F0 F1 SEND_F1 F2 │ SEND_F2 F3 …
    rank 1         RECV_F0 F0 SEND_F0 RECV_F1 F1 │ SEND_F1 RECV_F2 F2 …
    rank 2                         RECV_F0 F0 │ B0 SEND_B0 RECV_F1 F1 …
"""

from collections.abc import Iterator
from itertools import takewhile

from schedlang.schedule.actions import Action, Actions, is_transfer
from schedlang.schedule.kinds import FORWARD, RECEIVES, Kind
from schedlang.schedule.schedule import Schedule


def warm_ups(schedule: Schedule) -> list[int]:
    """For each rank, the index of the first action after its warm-up, in a schedule with
    communication.

    The warm-ups are the longest ones in which each message has both of its ends and the forward
    that needs it inside, or all of them outside. So no message is on its way when they end, and
    they run by themselves on every transport on which the schedule runs.
    """
    ranks = range(len(schedule.ranks))
    # By rank, the leading batches of forwards and their messages, and the index of each action.
    leading = [list(_leading(actions)) for actions in schedule.ranks]
    places = [
        {
            schedule.ranks[rank].at(index): index
            for batch in leading[rank]
            for index in batch
        }
        for rank in ranks
    ]
    heads = [[batch.start for batch in own for _ in batch] for own in leading]
    ends = [len(own) for own in heads]
    # If one end of a message is left out, the other end is, too, with all actions after it on that
    # rank.
    left_out = [
        (rank, index)
        for rank in ranks
        for action, index in places[rank].items()
        if any(
            other not in places[peer]
            for peer, other in _goes_with(schedule, rank, action)
        )
    ]
    while left_out:
        rank, index = left_out.pop()
        if index >= ends[rank]:
            continue
        begin = heads[rank][index]
        following = [schedule.ranks[rank].at(each) for each in range(begin, ends[rank])]
        ends[rank] = begin
        left_out += [
            (peer, places[peer][other])
            for action in following
            for peer, other in _goes_with(schedule, rank, action)
            if other in places[peer]
        ]
    return ends


def _leading(actions: Actions) -> Iterator[range]:
    """The batches at the beginning of a rank that have only forwards and their messages."""
    return takewhile(
        lambda batch: all(actions.kind[index] in FORWARD for index in batch),
        actions.batches(),
    )


def _goes_with(
    schedule: Schedule, rank: int, action: Action
) -> Iterator[tuple[int, Action]]:
    """The actions, with their ranks, that are in a warm-up if `action` is: the other end of a
    message, the forward that needs a received message, or the receives that a forward needs.
    """
    kind, number, microbatch = action
    layout = schedule.layout
    receive = RECEIVES[Kind.F]
    if is_transfer(kind):
        peer = layout.peer(kind, number)
        assert peer is not None
        yield peer, (*layout.counterpart(kind, number), microbatch)
    if kind == receive:
        yield rank, (Kind.F, layout.stage_of(kind, number), microbatch)
    elif kind == Kind.F:
        for each in layout.numbers(receive, number):
            if layout.peer(receive, each) is not None:
                yield rank, (receive, each, microbatch)
