"""Receives at the last moment: where ranks block, or transfers wait for each other, none waits
before it must.
"""

from attrs import evolve

from schedlang.schedule.actions import Actions, is_send, is_transfer
from schedlang.schedule.needs import SENDS, needs, receive_of
from schedlang.schedule.schedule import Schedule


def defer(lowered: Schedule) -> Schedule:
    """Each rank holds back what it receives from another one until an op needs some of it, or it
    sends to that one.

    Then it receives all that it holds back from there: so transfers between two ranks stay in their
    order.
    """
    return evolve(lowered, ranks=tuple(_defer(lowered, rank) for rank in range(len(lowered.ranks))))


def _defer(lowered: Schedule, rank: int) -> Actions:
    actions = lowered.ranks[rank]
    order = list[range]()
    held: list[int] = []
    for batch in actions.batches():
        kind = actions.kind[batch.start]
        if is_transfer(kind) and not is_send(kind):
            held.append(batch.start)
            continue
        if is_send(kind):
            peers = {_peer(lowered, rank, batch.start)}
        else:
            wanted = _receives(lowered, rank, batch)
            peers = {
                _peer(lowered, rank, index) for index in held if actions.row(index)[:3] in wanted
            }
        due = [index for index in held if _peer(lowered, rank, index) in peers]
        order += [*(range(index, index + 1) for index in due), batch]
        held = [index for index in held if index not in due]
    return actions.issued_as(order)


def _peer(lowered: Schedule, rank: int, index: int) -> int | None:
    actions = lowered.ranks[rank]
    return lowered.peer(actions.kind[index], actions.stage[index])


def _receives(lowered: Schedule, rank: int, batch: range) -> set[tuple[int, int, int]]:
    """The receives that bring what ops need, each by its kind, number and microbatch."""
    actions = lowered.ranks[rank]
    return {
        receive_of(lowered, need, actions.stage[index])
        for index in batch
        for need in needs(lowered, *actions.row(index)[:3])
        if lowered.placement[need[1]] != rank and need[0] in SENDS
    }
