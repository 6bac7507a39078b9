"""Tensors to and from other ranks: begun without waiting, and waited for with a limit."""

import os
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor

from schedlang.runtime.errors import raise_if_lost
from schedlang.runtime.processes import Processes, Replicas
from schedlang.runtime.watchdog import Watchdog

#: The watchdog ends a wait in vain: it knows whether the rank at its end still computes, gloo does
#: not.
_NO_LIMIT = timedelta(days=365)

#: What is on its way: gloo loses a message whose handle or tensor is dropped.
InFlight = list[tuple[dist.Work, Tensor]]


class Wire:
    """The connections of one rank to the others of its plan, its peers.

    Every call that waits tells the watchdog for which processes. LostRank where a connection
    breaks.
    """

    #: Whether messages of the plan go by a communicator for each edge, and not by that of all.
    is_by_edge = False

    def __init__(
        self, processes: Processes, timeout: float, watchdog: Watchdog
    ) -> None:
        self._timeout = timeout
        self._watchdog = watchdog
        self.processes = processes
        self._others = processes.others
        #: For each peer its process, as the watchdog is told, and its rank in the process group.
        self._peers = [(process,) for process in processes.pipeline]
        self._group_ranks = [
            dist.get_group_rank(processes.group, process)
            for process in processes.pipeline
        ]
        # `dist.isend` and `dist.irecv` check their arguments and then call these; to call these at
        # once takes a third of the time.
        self._send = processes.group.send
        self._receive = processes.group.recv
        let_main_thread_go_on()

    def send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a tensor, which must stay as it is until the wait for it."""
        try:
            return self._send([tensor], self._group_ranks[peer], tag)
        except RuntimeError as error:
            raise_if_lost({self.processes.pipeline[peer]}, error)
            raise

    def receive(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to receive into a tensor."""
        try:
            return self._receive([tensor], self._group_ranks[peer], tag)
        except RuntimeError as error:
            raise_if_lost({self.processes.pipeline[peer]}, error)
            raise

    #: So begin the messages of the plan, once it is known what comes: here like all others.
    post_send = send
    post_receive = receive

    def in_group(self, group: dist.ProcessGroup) -> "Wire":
        """The connections to the same ranks in another process group."""
        processes = evolve(self.processes, group=group)
        return Wire(processes, self._timeout, self._watchdog)

    def operation(
        self, call: Callable[..., dist.Work | None], tensor: Tensor, peer: int
    ) -> dist.P2POp:
        """A send or a receive of a batch, `dist.isend` or `dist.irecv`."""
        return dist.P2POp(
            call, tensor, self.processes.pipeline[peer], self.processes.group
        )

    def as_one(self, operations: list[dist.P2POp]) -> InFlight:
        """Begin sends and receives as one batch of NCCL, which has one handle for all of them."""
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            raise_if_lost({operation.peer for operation in operations}, error)
            raise
        return list(
            zip(
                # NCCL gives one handle for all of them, gloo one for each.
                works * (len(operations) // len(works)),
                (operation.tensor for operation in operations),
                strict=True,
            )
        )

    def exchange(self, operations: list[dist.P2POp]) -> None:
        """Make a batch of sends and receives, and wait for it."""
        if operations:
            self._wait(
                self.as_one(operations),
                tuple({operation.peer for operation in operations}),
            )

    def wait(self, in_flight: InFlight, peer: int) -> None:
        """Wait for what goes to a peer or comes from it; on a GPU, only its stream waits."""
        self._wait(in_flight, self._peers[peer])

    def end_copy(self, in_flight: InFlight, peer: int) -> None:
        """Wait in a thread that makes copies beside the main one, of which alone the watchdog is
        told.
        """
        self._end(in_flight, self._peers[peer])

    def make_copy(self, copy: Callable[[], None]) -> None:
        """Make a copy in such a thread; if it fails, all ranks end, whatever this one waits for."""
        try:
            copy()
        except Exception as error:
            self._watchdog.met_beside = error
            raise

    def wait_for(self, copy: "Future[None]", peer: int) -> None:
        """Wait in the main thread for what another one copies to a peer or from it."""
        self._watchdog.waits_for = self._peers[peer]
        copy.result()
        self._watchdog.waits_for = ()

    def _wait(self, in_flight: InFlight, processes: tuple[int, ...]) -> None:
        self._watchdog.waits_for = processes
        self._end(in_flight, processes)
        if any(not tensor.is_cpu for _, tensor in in_flight):
            # The host has gone on, and the GPU's stream waits.
            self._watchdog.mark()
        self._watchdog.waits_for = ()

    def _end(self, in_flight: InFlight, processes: tuple[int, ...]) -> None:
        try:
            for work, tensor in in_flight:
                if tensor.is_cpu:
                    work.wait(_NO_LIMIT)
                else:
                    # With a limit, NCCL would let the host wait, and not only its stream.
                    work.wait()
        except RuntimeError as error:
            raise_if_lost({*processes}, error)
            raise

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        """Reduce a tensor over all ranks of the plan, in place."""
        self.end_reduce(self.begin_reduce(tensor, operation, self.processes.group))

    def begin_reduce(
        self,
        tensor: Tensor,
        operation: dist.ReduceOp.RedOpType,
        group: dist.ProcessGroup | None,
    ) -> InFlight:
        """Begin to reduce a tensor in place over all ranks of the plan, in a group of theirs."""
        try:
            return [(dist.all_reduce(tensor, operation, group, async_op=True), tensor)]
        except RuntimeError as error:
            raise_if_lost({*self._others}, error)
            raise

    def end_reduce(self, in_flight: InFlight) -> None:
        """Wait for a reduction over the ranks of the plan."""
        self._wait(in_flight, self._others)

    def begin_sum(self, tensor: Tensor, replicas: Replicas) -> InFlight:
        """Begin to add up a tensor over replicas, in place."""
        if not replicas.are_several:
            return []
        try:
            return [
                (dist.all_reduce(tensor, group=replicas.group, async_op=True), tensor)
            ]
        except RuntimeError as error:
            raise_if_lost({*replicas.others}, error)
            raise

    def end_sum(self, in_flight: InFlight, replicas: Replicas) -> None:
        """Wait for a sum over replicas."""
        self._wait(in_flight, replicas.others)

    def send_object(self, sent: object, peer: int, tag: int) -> InFlight:
        """Begin to send what can be pickled: its length, then its bytes."""
        # Not `dist.send_object_list`, which waits.
        data = torch.frombuffer(bytearray(pickle.dumps(sent)), dtype=torch.uint8)
        tensors = torch.tensor([len(data)]), data
        return [(self.send(tensor, peer, tag), tensor) for tensor in tensors]

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


def let_main_thread_go_on() -> None:
    """Keep gloo's threads from interrupting the main thread, on Linux.

    A thread of gloo wakes up when a message comes from a rank, but can do nothing while the main
    thread is sending to that rank: it tries again and again. If it has taken the main thread's
    core, it goes on until its time slice is over, which is many times what the messages take. As
    threads for batch work, they do not take the core of a thread that runs.
    """
    for name in Path("/proc/self/task").glob("*/comm"):
        # Some other thread may have ended meanwhile.
        with suppress(OSError):
            if name.read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(
                    int(name.parent.name), os.SCHED_BATCH, os.sched_param(0)
                )
