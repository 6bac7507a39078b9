"""Receives posted early: where ranks do not wait for transfers, a message can then come while its
rank works.
"""

from attrs import evolve

from schedlang.schedule.actions import Actions, is_copy, is_send, is_transfer
from schedlang.schedule.schedule import Schedule


def post_early(lowered: Schedule, in_order: bool = False) -> Schedule:
    """Each receive goes ahead of one more op of its rank: messages need one buffer more.

    It stays behind transfers with the same rank, or if all are to stay `in_order`, behind any.
    """
    # The receive of the next message goes ahead of the op that works on this one:
    #
    #     1RECV_F0 1F0 1RECV_F1 1F1    becomes    1RECV_F0 1RECV_F1 1F0 1F1
    ranks = tuple(_post_early(lowered, actions, in_order) for actions in lowered.ranks)
    return evolve(lowered, ranks=ranks)


def _post_early(lowered: Schedule, actions: Actions, in_order: bool) -> Actions:
    order: list[range] = []
    for batch in actions.batches():
        kind = actions.kind[batch.start]
        stage = actions.stage[batch.start]
        place = len(order)
        if len(batch) == 1 and is_transfer(kind) and not is_send(kind):
            place = _place(lowered, actions, order, None if in_order else lowered.peer(kind, stage))
        order.insert(place, batch)
    return actions.issued_as(order)


def _place(lowered: Schedule, actions: Actions, order: list[range], peer: int | None) -> int:
    """Where in the order the next receive goes: before the last op, if it need not go before a
    transfer with its peer.

    Without a peer, if it need not go before any transfer.
    """
    for place in range(len(order) - 1, -1, -1):
        kind = actions.kind[order[place].start]
        stage = actions.stage[order[place].start]
        if is_transfer(kind):
            if peer is None or lowered.peer(kind, stage) == peer:
                break
        elif not is_copy(kind):
            return place
    return len(order)
