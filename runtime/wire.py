"""Tensors to and from other ranks: begun without waiting, and waited for with a limit."""

import os
import pickle
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.actions import is_transfer
from schedlang.plan import Plan
from schedlang.runtime.watchdog import GRACE, LostRank, Watchdog

#: What is on its way: gloo loses a message whose handle or tensor is dropped.
InFlight = list[tuple[dist.Work, Tensor]]


class Wire:
    """The connections of one rank; LostRank where one breaks."""

    def __init__(self, timeout: float, watchdog: Watchdog) -> None:
        # The watchdog is to find out first: it knows whose fault a wait is, gloo does not.
        self._limit = timedelta(seconds=timeout + 2 * GRACE)
        self._watchdog = watchdog
        group = dist.group.WORLD
        assert group is not None
        # What `dist.isend` and `dist.irecv` call in the end, in a third of their time.
        self._send, self._receive = group.send, group.recv
        _let_main_thread_go_on()

    def send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a tensor, which must stay as it is until the wait for it."""
        try:
            return self._send([tensor], peer, tag)
        except RuntimeError as error:
            raise LostRank({peer}, str(error)) from error

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to receive into a tensor."""
        try:
            return self._receive([tensor], peer, tag)
        except RuntimeError as error:
            raise LostRank({peer}, str(error)) from error

    def as_one(self, operations: list[dist.P2POp]) -> InFlight:
        """Begin sends and receives as one batch of NCCL, which has one handle for all of them."""
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise LostRank({each.peer for each in operations}, str(error)) from error
        return list(zip(works * (len(operations) // len(works)), (each.tensor for each in operations), strict=True))

    def wait(self, in_flight: InFlight, peer: int) -> None:
        """Wait for what goes to a rank or comes from it; on a GPU, only its stream waits."""
        self._watchdog.waits_for = peer
        try:
            for work, tensor in in_flight:
                if tensor.is_cpu:
                    work.wait(self._limit)
                else:
                    # With a limit, NCCL would let the host wait, and not only its stream.
                    work.wait()
        except RuntimeError as error:
            raise LostRank({peer}, str(error)) from error
        self._watchdog.waits_for = None

    def send_object(self, sent: object, peer: int, tag: int) -> InFlight:
        """Begin to send what can be pickled: its length, then its bytes."""
        data = torch.frombuffer(bytearray(pickle.dumps(sent)), dtype=torch.uint8)
        return [(self.send(each, peer, tag), each) for each in (torch.tensor([len(data)]), data)]

    def receive_object(self, peer: int, tag: int) -> object:
        """Wait for what `send_object` sends."""
        length = torch.empty(1, dtype=torch.int64)
        self.wait([(self.receive(length, peer, tag), length)], peer)
        data = torch.empty(int(length), dtype=torch.uint8)
        self.wait([(self.receive(data, peer, tag), data)], peer)
        with warnings.catch_warnings():
            # Torch warns of what its own containers do here.
            warnings.simplefilter("ignore", FutureWarning)
            return pickle.loads(data.numpy().tobytes())


def _let_main_thread_go_on() -> None:
    """Keep gloo's threads from interrupting the main thread, on Linux.

    A thread of gloo wakes for what comes from a rank, but can do nothing while the main thread is sending to that rank:
    it tries again and again. Where it has taken the main thread's place on a core, it does so until its time is over,
    which is many times what the messages take.
    """
    with suppress(OSError):
        for name in Path("/proc/self/task").glob("*/comm"):
            if name.read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(name.parent.name), os.SCHED_BATCH, os.sched_param(0))


def warm_up(plan: Plan, device: torch.device) -> None:
    """Let NCCL make its communicators: of all ranks, for batches, and of each two with transfers outside of batches.

    Ranks wait for each other here, so they come to the pairs in the same order.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sent, received = torch.zeros(1, device=device), torch.zeros(1, device=device)
    if ranks > 1:
        ring = [(dist.isend, sent, (rank + 1) % ranks), (dist.irecv, received, (rank - 1) % ranks)]
        for work in dist.batch_isend_irecv([dist.P2POp(*each) for each in ring]):
            work.wait()
    for low, high in sorted(_alone(plan)):
        if rank == low:
            dist.send(sent, high)
        elif rank == high:
            dist.recv(received, low)


def _alone(plan: Plan) -> set[tuple[int, int]]:
    """The pairs of ranks that have transfers outside of batches."""
    found = set()
    for rank, actions in enumerate(plan.ranks):
        for batch in actions.batches():
            kind, stage = actions.kind[batch.start], actions.stage[batch.start]
            peer = plan.peer(kind, stage) if is_transfer(kind) and len(batch) == 1 else None
            if peer is not None:
                found.add((min(rank, peer), max(rank, peer)))
    return found
