"""Tensors to and from other ranks: begun without waiting, and waited for with a limit."""

import os
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.plan.plan import Plan
from schedlang.runtime.transport.ranks import Ranks, Replicas
from schedlang.runtime.watch.watchdog import GRACE, LostRank, Watchdog
from schedlang.schedule.actions import is_transfer

#: What is on its way: gloo loses a message whose handle or tensor is dropped.
InFlight = list[tuple[dist.Work, Tensor]]


class Wire:
    """The connections of one rank to the others of its plan, its peers; LostRank where one
    breaks.
    """

    def __init__(self, ranks: Ranks, timeout: float, watchdog: Watchdog) -> None:
        # The watchdog is to find out first: it knows whose fault a wait is, gloo does not.
        self._limit = timedelta(seconds=timeout + 2 * GRACE)
        self._watchdog = watchdog
        self._ranks = ranks
        self._others = tuple(each for each in ranks.pipeline if each != dist.get_rank())
        #: For each peer the process, which the watchdog knows, and its rank in the group.
        self._processes = [(each,) for each in ranks.pipeline]
        self._in_group = [dist.get_group_rank(ranks.group, each) for each in ranks.pipeline]
        # What `dist.isend` and `dist.irecv` call in the end, in a third of their time.
        self._send = ranks.group.send
        self._receive = ranks.group.recv
        _let_main_thread_go_on()

    def send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a tensor, which must stay as it is until the wait for it."""
        try:
            return self._send([tensor], self._in_group[peer], tag)
        except RuntimeError as error:
            raise LostRank({self._ranks.pipeline[peer]}, str(error)) from error

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to receive into a tensor."""
        try:
            return self._receive([tensor], self._in_group[peer], tag)
        except RuntimeError as error:
            raise LostRank({self._ranks.pipeline[peer]}, str(error)) from error

    def operation(
        self, call: Callable[..., dist.Work | None], tensor: Tensor, peer: int
    ) -> dist.P2POp:
        """A send or a receive of a batch, `dist.isend` or `dist.irecv`."""
        return dist.P2POp(call, tensor, self._ranks.pipeline[peer], self._ranks.group)

    def as_one(self, operations: list[dist.P2POp]) -> InFlight:
        """Begin sends and receives as one batch of NCCL, which has one handle for all of them."""
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise LostRank({each.peer for each in operations}, str(error)) from error
        return list(
            zip(
                works * (len(operations) // len(works)),
                (each.tensor for each in operations),
                strict=True,
            )
        )

    def exchange(self, operations: list[dist.P2POp]) -> None:
        """Make such a batch, and wait for it."""
        if operations:
            self._wait(self.as_one(operations), tuple({each.peer for each in operations}))

    def wait(self, in_flight: InFlight, peer: int) -> None:
        """Wait for what goes to a peer or comes from it; on a GPU, only its stream waits."""
        self._wait(in_flight, self._processes[peer])

    def _wait(self, in_flight: InFlight, processes: tuple[int, ...]) -> None:
        self._watchdog.waits_for = processes
        try:
            for work, tensor in in_flight:
                if tensor.is_cpu:
                    work.wait(self._limit)
                else:
                    # With a limit, NCCL would let the host wait, and not only its stream.
                    work.wait()
        except RuntimeError as error:
            raise LostRank({*processes}, str(error)) from error
        self._watchdog.waits_for = ()

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        """Reduce a tensor over all ranks of the plan, in place."""
        self.end_reduce(self.begin_reduce(tensor, operation, self._ranks.group))

    def begin_reduce(
        self, tensor: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None
    ) -> InFlight:
        """Begin to reduce a tensor over all ranks of the plan, which are the group, in place."""
        try:
            return [(dist.all_reduce(tensor, operation, group, async_op=True), tensor)]
        except RuntimeError as error:
            raise LostRank({*self._others}, str(error)) from error

    def end_reduce(self, in_flight: InFlight) -> None:
        """Wait for it."""
        self._wait(in_flight, self._others)

    def begin_sum(self, tensor: Tensor, replicas: Replicas) -> InFlight:
        """Begin to add up a tensor over replicas, in place."""
        if not replicas.are_several:
            return []
        try:
            return [(dist.all_reduce(tensor, group=replicas.group, async_op=True), tensor)]
        except RuntimeError as error:
            raise LostRank({*replicas.others}, str(error)) from error

    def end_sum(self, in_flight: InFlight, replicas: Replicas) -> None:
        """Wait for it."""
        self._wait(in_flight, replicas.others)

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

    A thread of gloo wakes for what comes from a rank, but can do nothing while the main thread is
    sending to that rank: it tries again and again. Where it has taken the main thread's place on a
    core, it does so until its time is over, which is many times what the messages take.
    """
    with suppress(OSError):
        for name in Path("/proc/self/task").glob("*/comm"):
            if name.read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(int(name.parent.name), os.SCHED_BATCH, os.sched_param(0))


def warm_up(plan: Plan, ranks: Ranks, device: torch.device) -> None:
    """On GPUs, let NCCL make its communicators: of all ranks, for batches; of each two with
    transfers outside of them.

    And of replicas. Ranks wait for each other here, so they come to the pairs in the same order.
    """
    if device.type != "cuda":
        return
    own = ranks.own
    count = len(ranks.pipeline)
    group = ranks.group
    sent = torch.zeros(1, device=device)
    received = torch.zeros(1, device=device)
    if count > 1:
        ring = [
            (dist.isend, sent, ranks.pipeline[(own + 1) % count]),
            (dist.irecv, received, ranks.pipeline[(own - 1) % count]),
        ]
        for work in dist.batch_isend_irecv([dist.P2POp(*each, group) for each in ring]):
            work.wait()
    for low, high in sorted(_alone(plan)):
        if own == low:
            dist.send(sent, ranks.pipeline[high], group)
        elif own == high:
            dist.recv(received, ranks.pipeline[low], group)
    if ranks.replicas.are_several:
        dist.all_reduce(sent, group=ranks.replicas.group)


def _alone(plan: Plan) -> set[tuple[int, int]]:
    """The pairs of ranks that have transfers outside of batches."""
    found = set()
    for rank, actions in enumerate(plan.ranks):
        for batch in actions.batches():
            kind = actions.kind[batch.start]
            stage = actions.stage[batch.start]
            peer = plan.peer(kind, stage) if is_transfer(kind) and len(batch) == 1 else None
            if peer is not None:
                found.add((min(rank, peer), max(rank, peer)))
    return found
