"""The warm-up of a step: forwards alone, and the messages between them, which the ranks can run
once more.

Where weights turn out to be wrong when a step has begun already, what its forwards have computed is
wrong, and all ranks start over. By then none may have gone further than to the end of its warm-up,
and no message may lead from a warm-up to what follows one:

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
    """For each rank of a schedule with communication the index of the first action behind its
    warm-up.

    The warm-ups are as long as they can be where both ends of each message are inside or outside,
    and so is the forward that needs it. So at their ends nothing is on its way, and they run
    through by themselves on every transport on which the schedule does.
    """
    ranks = range(len(schedule.ranks))
    # By rank, where its actions before all others than forwards are, and where their batches begin.
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
    # What is left out may be one end of a message, whose other end is left out as well, with all
    # that follows it there.
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
    """The batches of forwards and their messages before all others."""
    return takewhile(
        lambda batch: all(actions.kind[index] in FORWARD for index in batch),
        actions.batches(),
    )


def _goes_with(
    schedule: Schedule, rank: int, action: Action
) -> Iterator[tuple[int, Action]]:
    """What is inside if an action is, with its rank: the other end of a message; the forward that
    needs it, or the receives of what a forward needs.
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
