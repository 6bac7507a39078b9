"""Receives at the last moment: where ranks block, or transfers wait for each other, none waits
before it must.
"""

from attrs import evolve

from schedlang.schedule.actions import Actions, is_send, is_transfer
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
    users = _users(lowered, rank)
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
            peers = {_peer(lowered, rank, index) for index in held if users.get(index) in batch}
        due = [index for index in held if _peer(lowered, rank, index) in peers]
        order += [*(range(index, index + 1) for index in due), batch]
        held = [index for index in held if index not in due]
    return actions.issued_as(order)


def _users(lowered: Schedule, rank: int) -> dict[int, int]:
    """For each receive of a rank the op that needs what it brings, both by index."""
    needs = lowered.needs
    first, end = lowered.columns.first[rank : rank + 2].tolist()
    is_here = (needs.receive >= first) & (needs.receive < end)
    receives = (needs.receive[is_here] - first).tolist()
    return dict(zip(receives, (needs.user[is_here] - first).tolist(), strict=True))


def _peer(lowered: Schedule, rank: int, index: int) -> int | None:
    actions = lowered.ranks[rank]
    return lowered.peer(actions.kind[index], actions.stage[index])
