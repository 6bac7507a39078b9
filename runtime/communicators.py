"""Create NCCL's communicators before the first step."""

from collections.abc import Collection

import torch
import torch.distributed as dist

from schedlang.plan.plan import Plan
from schedlang.runtime.processes import Processes
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.transports import NCCL_EDGE


def warm_up(plan: Plan, processes: Processes, device: torch.device) -> None:
    """Let NCCL create its communicators: one of all ranks for batches, one for every two ranks with
    transfers outside of batches, and one of replicas. Those of edges exist already.

    Ranks wait for each other here, so all of them take the pairs in the same order.
    """
    own = processes.own
    pipeline = processes.pipeline
    count = len(pipeline)
    group = processes.group
    sent = torch.zeros(1, device=device)
    received = torch.zeros(1, device=device)
    if count > 1:
        # Every rank sends to the next one and receives from the previous one in one batch, so the
        # communicator has all ranks.
        ring = [
            (dist.isend, sent, pipeline[(own + 1) % count]),
            (dist.irecv, received, pipeline[(own - 1) % count]),
        ]
        for work in dist.batch_isend_irecv(
            [dist.P2POp(*operation, group) for operation in ring]
        ):
            work.wait()
    use_pairs(
        set() if plan.transport == NCCL_EDGE.name else _pairs(plan), processes, device
    )
    if processes.replicas.are_several:
        dist.all_reduce(sent, group=processes.replicas.group)


def use_pairs(
    pairs: Collection[tuple[int, int]], processes: Processes, device: torch.device
) -> None:
    """Let NCCL create the communicators of these pairs of ranks; this rank joins its own pairs."""
    number = torch.zeros(1, device=device)
    for low, high in sorted(pairs):
        if processes.own == low:
            dist.send(number, processes.pipeline[high], processes.group)
        elif processes.own == high:
            dist.recv(number, processes.pipeline[low], processes.group)


def _pairs(plan: Plan) -> set[tuple[int, int]]:
    """The pairs of ranks that have transfers outside of batches."""
    found = set()
    for rank, actions in enumerate(plan.ranks):
        for batch in actions.batches():
            kind = actions.kind[batch.start]
            stage = actions.stage[batch.start]
            peer = (
                plan.peer(kind, stage)
                if is_transfer(kind) and len(batch) == 1
                else None
            )
            if peer is not None:
                found.add((min(rank, peer), max(rank, peer)))
    return found
