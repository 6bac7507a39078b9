"""NCCL under a pipeline: the transport of its messages, and its communicators, which are created
before the first step.
"""

from collections.abc import Collection

import torch
import torch.distributed as dist

from schedlang.plan.plan import Plan
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.processes import Processes, backend_of
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.transports import (
    NCCL,
    NCCL_EAGER,
    NCCL_EDGE,
    PORTABLE,
    Transport,
)

#: Torch's backends for GPUs, and whether a group that is bound to a device has one communicator
#: for everything. `nccl-lazy` (torch's main line, c10d's LazyBackend) makes one for each two ranks
#: at the first transfer that is issued alone, bound or not, and sends batches over that of the
#: group: the transport `nccl`.
BACKENDS_FOR_GPUS = {"nccl": True, "nccl2": True, "nccl-lazy": False}


def check_transport(
    plan: Plan, group: dist.ProcessGroup, device: torch.device
) -> Transport:
    """Check that the group can send tensors of a GPU, and that the plan is proved for that; return
    the transport of its messages.
    """
    backend = backend_of(group, device)
    if backend not in BACKENDS_FOR_GPUS:
        how = "has no backend" if backend is None else f"has `{backend}`"
        raise PipelineError(
            f"the stages are on a GPU, and the process group {how} for tensors there: only NCCL "
            "sends them. Use init_process_group('cpu:gloo,cuda:nccl')"
        )
    # If the group was bound to a device, torch makes NCCL's communicator at once; otherwise at its
    # first use, where ranks wait for each other. The proof knows both as transports.
    is_bound = group.bound_device_id is not None
    used = NCCL_EAGER if is_bound and BACKENDS_FOR_GPUS.get(str(backend)) else NCCL
    if plan.transport not in (PORTABLE, NCCL_EDGE.name, used.name):
        raise PipelineError(
            f"the plan is proved for `{plan.transport}` alone, and its tensors go by `{used.name}`"
        )
    return NCCL_EDGE if plan.transport == NCCL_EDGE.name else used


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
