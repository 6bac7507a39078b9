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
    places = [
        {
            actions.row(index)[:3]: index
            for index, kind in enumerate(actions.kind)
            if is_transfer(kind)
        }
        for actions in lowered.ranks
    ]
    #: Of each rank, the transfers that are first in a batch.
    fused: list[set[int]] = [set() for _ in lowered.ranks]
    for rank, actions in enumerate(lowered.ranks):
        for index in range(len(actions) - 1):
            peer = _exchanges_with(lowered, rank, index)
            if peer is None:
                continue
            ends = [
                places[peer][_other_end(lowered, actions.row(each)[:3])]
                for each in (index, index + 1)
            ]
            there = min(ends)
            taken = {index - 1, index, index + 1} & fused[rank] or {
                there - 1,
                there,
                there + 1,
            } & fused[peer]
            if max(ends) == there + 1 and not taken:
                fused[rank].add(index)
                fused[peer].add(there)
    ranks = (
        actions.issued_as(_batches(actions, firsts))
        for actions, firsts in zip(lowered.ranks, fused, strict=True)
    )
    return evolve(lowered, ranks=tuple(ranks))


def _exchanges_with(lowered: Schedule, rank: int, index: int) -> int | None:
    """The other rank of two neighbours, if they are a send and a receive with the same one."""
    actions = lowered.ranks[rank]
    one = actions.kind[index]
    other = actions.kind[index + 1]
    if not (is_transfer(one) and is_transfer(other)) or is_send(one) == is_send(other):
        return None
    peer = lowered.peer(one, actions.stage[index])
    return peer if peer == lowered.peer(other, actions.stage[index + 1]) else None


def _other_end(lowered: Schedule, transfer: _Transfer) -> _Transfer:
    kind, number, microbatch = transfer
    return *lowered.layout.counterpart(kind, number), microbatch


def _batches(actions: Actions, firsts: set[int]) -> Iterator[range]:
    """The batches of a rank, with those that begin at some transfers."""
    for batch in actions.batches():
        if batch.start in firsts:
            yield range(batch.start, batch.start + 2)
        elif batch.start - 1 not in firsts:
            yield batch
