"""Opposite transfers as one batch: where transfers wait for each other, two ranks then exchange
messages in one go.
"""

from collections.abc import Iterator

from attrs import evolve

from schedlang.schedule.actions import Actions, is_send, is_transfer
from schedlang.schedule.schedule import Schedule

#: A transfer, apart from its place: kind, number, microbatch.
_Transfer = tuple[int, int, int]


def fuse(lowered: Schedule) -> Schedule:
    """A send and a receive that are neighbours on both of their two ranks are issued as one batch,
    on both.

    So every batch has its mirror image, as NCCL asks for; Megatron-LM's 1F1B does the same.
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
    #: Of each rank, the transfers that are first in a batch.
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
    """Whether a transfer and the one behind it are in no batch yet."""
    return firsts.isdisjoint((index - 1, index, index + 1))


def _exchanges_with(lowered: Schedule, rank: int, index: int) -> int | None:
    """The other rank of two neighbours, if they are a send and a receive with the same one."""
    one, other = lowered.ranks[rank].kind[index : index + 2]
    if not (is_transfer(one) and is_transfer(other)) or is_send(one) == is_send(other):
        return None
    peer = lowered.peer_of(rank, index)
    return peer if peer == lowered.peer_of(rank, index + 1) else None


def _batches(actions: Actions, firsts: set[int]) -> Iterator[range]:
    """The batches of a rank, with those that begin at some transfers."""
    for batch in actions.batches():
        if batch.start in firsts:
            yield range(batch.start, batch.start + 2)
        elif batch.start - 1 not in firsts:
            yield batch
