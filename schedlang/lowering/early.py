"""Post receives early, for transports on which ranks do not block: then a message can arrive while
its rank computes.
"""

from attrs import evolve

from schedlang.schedule.actions import Actions, is_beside, is_send, is_transfer
from schedlang.schedule.schedule import Schedule


def post_early(lowered: Schedule, lane: str = "pair") -> Schedule:
    """Move each receive before the op that precedes it; messages then need one more buffer.

    A receive does not pass transfers of its `lane`: for `pair`, transfers with the same peer; for
    `edge`, receives from the same peer; for `rank`, all transfers.
    """
    # The receive of the next message goes ahead of the op that works on this one:
    #
    #     1RECV_F0 1F0 1RECV_F1 1F1    becomes    1RECV_F0 1RECV_F1 1F0 1F1
    ranks = tuple(_post_early(lowered, actions, lane) for actions in lowered.ranks)
    return evolve(lowered, ranks=ranks)


def _post_early(lowered: Schedule, actions: Actions, lane: str) -> Actions:
    order: list[range] = []
    for batch in actions.batches():
        kind = actions.kind[batch.start]
        place = len(order)
        if len(batch) == 1 and is_transfer(kind) and not is_send(kind):
            place = _place(lowered, actions, order, batch.start, lane)
        order.insert(place, batch)
    return actions.issued_as(order)


def _place(
    lowered: Schedule, actions: Actions, order: list[range], receive: int, lane: str
) -> int:
    """The place of the next receive in the order: before the last op, unless a transfer of the
    receive's lane stands after that op.
    """
    peer = lowered.peer(actions.kind[receive], actions.stage[receive])
    for place in range(len(order) - 1, -1, -1):
        kind = actions.kind[order[place].start]
        stage = actions.stage[order[place].start]
        if is_transfer(kind):
            is_with_peer = lowered.peer(kind, stage) == peer
            if lane == "rank" or (
                is_with_peer and not (lane == "edge" and is_send(kind))
            ):
                break
        elif not is_beside(kind):
            return place
    return len(order)
