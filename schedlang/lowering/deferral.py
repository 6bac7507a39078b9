"""Defer receives to the last moment, for transports on which ranks block or transfers wait for each
other: then no rank waits for a message before it needs one.
"""

from collections.abc import Sequence

from attrs import evolve

from schedlang.schedule.actions import Actions, is_send, is_transfer
from schedlang.schedule.needs import needs_of
from schedlang.schedule.schedule import Schedule


def defer(lowered: Schedule) -> Schedule:
    """Each rank defers its receives from another rank until an op needs one of these messages, or
    until it sends to that rank.

    Then it issues all deferred receives from there, so transfers between two ranks keep their
    order.
    """
    # Rank 1 does not wait for the gradient from rank 2 before it has run 1F1:
    #
    #     1RECV_F1 1RECV_B0 1F1 1B0    becomes    1RECV_F1 1F1 1RECV_B0 1B0
    ranks = range(len(lowered.ranks))
    return evolve(lowered, ranks=tuple(_defer(lowered, rank) for rank in ranks))


def _defer(lowered: Schedule, rank: int) -> Actions:
    actions = lowered.ranks[rank]
    users = _users(lowered, rank)
    order = list[Sequence[int]]()
    held: list[int] = []
    for batch in actions.batches():
        kind = actions.kind[batch.start]
        if is_transfer(kind) and not is_send(kind):
            held.append(batch.start)
            continue
        if is_send(kind):
            peers = {lowered.peer_of(rank, batch.start)}
        else:
            needed = [index for index in held if users.get(index) in batch]
            peers = {lowered.peer_of(rank, index) for index in needed}
        due = [index for index in held if lowered.peer_of(rank, index) in peers]
        held = [index for index in held if index not in due]
        order += [[index] for index in due]
        order.append(batch)
    return actions.issued_as(order)


def _users(lowered: Schedule, rank: int) -> dict[int, int]:
    """For each receive of a rank the op that needs its message, both by index."""
    needs = needs_of(lowered)
    first, end = lowered.columns.first[rank : rank + 2].tolist()
    is_here = (needs.receive >= first) & (needs.receive < end)
    receives = needs.receive[is_here] - first
    users = needs.user[is_here] - first
    return dict(zip(receives.tolist(), users.tolist(), strict=True))
