"""Send tensors to other ranks and receive from them: asynchronously, with limited waits."""

import os
import pickle
import warnings
from collections.abc import Callable, Sequence
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

#: The watchdog limits waits, since it knows whether the peer still computes, and gloo does not.
_NO_LIMIT = timedelta(days=365)

#: Messages on their way. Both handle and tensor must be kept, or gloo loses the message.
InFlight = list[tuple[dist.Work, Tensor]]


class Wire:
    """The connections of one rank to the other ranks of its plan, its peers.

    Every call that waits tells the watchdog for which processes. LostRank if a connection breaks.
    """

    #: Whether messages of the plan go by a communicator for each edge, instead of a common one.
    is_by_edge = False

    def __init__(
        self, processes: Processes, timeout: float, watchdog: Watchdog
    ) -> None:
        self._timeout = timeout
        self._watchdog = watchdog
        self.processes = processes
        self._others = processes.others
        #: For each peer, its process as the watchdog needs it, and its rank in the process group.
        self._peers = [(process,) for process in processes.pipeline]
        self._group_ranks = [
            dist.get_group_rank(processes.group, process)
            for process in processes.pipeline
        ]
        # `dist.isend` and `dist.irecv` check their arguments and then call these methods; calling
        # them directly takes a third of the time.
        self._send = processes.group.send
        self._receive = processes.group.recv
        let_main_thread_go_on()

    def send(self, tensor: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send a tensor, which must not change until the wait for it."""
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

    #: The calls for messages of the plan whose shapes are known; here the same as for all others.
    post_send = send
    post_receive = receive

    def in_group(self, group: dist.ProcessGroup) -> "Wire":
        """A wire to the same ranks in another process group."""
        processes = evolve(self.processes, group=group)
        return Wire(processes, self._timeout, self._watchdog)

    def operation(
        self, call: Callable[..., dist.Work | None], tensor: Tensor, peer: int
    ) -> dist.P2POp:
        """A send or a receive for a batch; `call` is `dist.isend` or `dist.irecv`."""
        return dist.P2POp(
            call, tensor, self.processes.pipeline[peer], self.processes.group
        )

    def as_one(self, operations: list[dist.P2POp]) -> InFlight:
        """Begin sends and receives as one batch."""
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

    def exchange(self, batches: Sequence[list[dist.P2POp]]) -> None:
        """Make batches of sends and receives, and wait for all of them."""
        in_flight = [each for batch in batches if batch for each in self.as_one(batch)]
        if in_flight:
            peers = {operation.peer for batch in batches for operation in batch}
            self._wait(in_flight, tuple(peers))

    def wait(self, in_flight: InFlight, peer: int) -> None:
        """Wait for messages to a peer or from it; on a GPU, only its stream waits."""
        self._wait(in_flight, self._peers[peer])

    def end_copy(self, in_flight: InFlight, peer: int) -> None:
        """Wait in a thread that makes copies; the watchdog knows only the main thread's waits."""
        self._end(in_flight, self._peers[peer])

    def make_copy(self, copy: Callable[[], None]) -> None:
        """Make a copy in such a thread; if it fails, all ranks end, even if this one is waiting."""
        try:
            copy()
        except Exception as error:
            self._watchdog.met_beside = error
            raise

    def wait_for(self, copy: "Future[None]", peer: int) -> None:
        """Wait in the main thread for a copy to a peer or from it, which another thread makes."""
        self._watchdog.waits_for = self._peers[peer]
        copy.result()
        self._watchdog.waits_for = ()

    def _wait(self, in_flight: InFlight, processes: tuple[int, ...]) -> None:
        self._watchdog.waits_for = processes
        if self._end(in_flight, processes):
            # The host continues, and the GPU's stream waits.
            self._watchdog.mark()
        self._watchdog.waits_for = ()

    def _end(self, in_flight: InFlight, processes: tuple[int, ...]) -> bool:
        """Wait; return whether a GPU's stream does for any of the messages, and not the host."""
        is_on_gpu = False
        try:
            for work, tensor in in_flight:
                if tensor.is_cpu:
                    work.wait(_NO_LIMIT)
                else:
                    # With a limit, NCCL would block the host, and not only its stream.
                    work.wait()
                    is_on_gpu = True
        except RuntimeError as error:
            raise_if_lost({*processes}, error)
            raise
        return is_on_gpu

    def reduce(self, tensor: Tensor, operation: dist.ReduceOp.RedOpType) -> None:
        """All-reduce a tensor in place over all ranks of the plan."""
        self.end_reduce(self.begin_reduce(tensor, operation, self.processes.group))

    def begin_reduce(
        self,
        tensor: Tensor,
        operation: dist.ReduceOp.RedOpType,
        group: dist.ProcessGroup | None,
    ) -> InFlight:
        """Begin to all-reduce a tensor in place over all ranks of the plan, in this group."""
        try:
            return [(dist.all_reduce(tensor, operation, group, async_op=True), tensor)]
        except RuntimeError as error:
            raise_if_lost({*self._others}, error)
            raise

    def end_reduce(self, in_flight: InFlight) -> None:
        """Wait for an all-reduce over the ranks of the plan."""
        self._wait(in_flight, self._others)

    def begin_sum(self, tensor: Tensor, replicas: Replicas) -> InFlight:
        """Begin to sum a tensor over replicas, in place."""
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
        """Begin to send a pickled object: its length, then its bytes."""
        # Not `dist.send_object_list`, which blocks.
        data = torch.frombuffer(bytearray(pickle.dumps(sent)), dtype=torch.uint8)
        tensors = torch.tensor([len(data)]), data
        return [(self.send(tensor, peer, tag), tensor) for tensor in tensors]

    def receive_object(self, peer: int, tag: int) -> object:
        """Wait for an object from `send_object`."""
        length = torch.empty(1, dtype=torch.int64)
        self.wait([(self.receive(length, peer, tag), length)], peer)
        data = torch.empty(int(length), dtype=torch.uint8)
        self.wait([(self.receive(data, peer, tag), data)], peer)
        with warnings.catch_warnings():
            # Torch's own containers warn here.
            warnings.simplefilter("ignore", FutureWarning)
            return pickle.loads(data.numpy().tobytes())


def let_main_thread_go_on() -> None:
    """Keep gloo's threads from preempting the main thread, on Linux.

    A thread of gloo wakes up when a message comes from a rank, but while the main thread is sending
    to that rank, it can only retry. If it has preempted the main thread on its core, it retries
    until its time slice is over, which takes many times as long as the messages. With the batch
    scheduling policy, these threads do not preempt a running thread.
    """
    for name in Path("/proc/self/task").glob("*/comm"):
        # A thread may have ended since.
        with suppress(OSError):
            if name.read_text() == "gloo_tcp_loop\n":
                os.sched_setscheduler(
                    int(name.parent.name), os.SCHED_BATCH, os.sched_param(0)
                )
