"""Fuse a send and a receive into one batch, for transports on which transfers wait for each other:
then two ranks exchange messages at once.
"""

from collections.abc import Iterator

from attrs import evolve

from schedlang.schedule.actions import Actions, is_send, is_transfer
from schedlang.schedule.schedule import Schedule

#: Kind, number and microbatch of a transfer.
_Transfer = tuple[int, int, int]


def fuse(lowered: Schedule) -> Schedule:
    """Issue a send and a receive as one batch if they are neighbours on both of their ranks.

    Then every batch has its counterpart on the other rank, as NCCL requires. Megatron-LM's 1F1B
    does the same.
    """
    # Rank 0 and rank 1, before and after: both transfers of the pair are neighbours on both ranks.
    #
    #     0F1 0SEND_F1 0RECV_B0 0B0        0F1 (0SEND_F1;0RECV_B0) 0B0
    #     1B0 1RECV_F1 1SEND_B0 1F1        1B0 (1RECV_F1;1SEND_B0) 1F1
    places: list[dict[_Transfer, int]] = [{} for _ in lowered.ranks]
    for rank, actions in enumerate(lowered.ranks):
        for index, kind in enumerate(actions.kind):
            if is_transfer(kind):
                places[rank][actions.at(index)] = index
    #: For each rank, the first transfer of each batch.
    fused: list[set[int]] = [set() for _ in lowered.ranks]
    for rank, actions in enumerate(lowered.ranks):
        for index in range(len(actions) - 1):
            peer = _exchanges_with(lowered, rank, index)
            if peer is None:
                continue
            there, last = sorted(
                places[peer][lowered.other_end(rank, one)] for one in (index, index + 1)
            )
            is_free = _is_free(fused[rank], index) and _is_free(fused[peer], there)
            if last == there + 1 and is_free:
                fused[rank].add(index)
                fused[peer].add(there)
    ranks = (
        actions.issued_as(_batches(actions, firsts))
        for actions, firsts in zip(lowered.ranks, fused, strict=True)
    )
    return evolve(lowered, ranks=tuple(ranks))


def _is_free(firsts: set[int], index: int) -> bool:
    """Whether a transfer and the next one are in no batch yet."""
    return firsts.isdisjoint((index - 1, index, index + 1))


def _exchanges_with(lowered: Schedule, rank: int, index: int) -> int | None:
    """The peer of two neighbouring actions, if they are a send and a receive with the same rank."""
    one, other = lowered.ranks[rank].kind[index : index + 2]
    if not (is_transfer(one) and is_transfer(other)) or is_send(one) == is_send(other):
        return None
    peer = lowered.peer_of(rank, index)
    return peer if peer == lowered.peer_of(rank, index + 1) else None


def _batches(actions: Actions, firsts: set[int]) -> Iterator[range]:
    """The batches of a rank; each of `firsts` begins a batch of two transfers."""
    for batch in actions.batches():
        if batch.start in firsts:
            yield range(batch.start, batch.start + 2)
        elif batch.start - 1 not in firsts:
            yield batch
