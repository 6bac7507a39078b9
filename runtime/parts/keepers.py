"""Activations that another rank keeps in its memory (BPipe, Kim et al. 2023), by copies that run
while both ranks compute.

Each of the two ranks has a thread for the copies. It makes them one after the other, in the order
of the offloads and reloads of the rank whose activations they are:

    rank 0    its ops      F3 ─ OFFLOAD3 ─ B0 ─ RELOAD2 ─ … ─ B2
              a thread           ╰─ sends 3 ──╮  ╰─ receives 2 ─╯
    rank 3    a thread           receives 3 ──╯    sends 2
              its ops      …

The keeper's thread waits only for the thread of the other rank, and that one waits until its own
rank comes to the copy. No op of the keeper waits for either thread, so no cycle can arise: the
proof for copies to the host holds for these copies, too.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from schedlang.runtime.door import Rank
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.exchange import Exchange
from schedlang.runtime.part import Part, parts_by_stage
from schedlang.runtime.parts.offload import Memory, Offload, check_unchanged
from schedlang.runtime.wire import Wire
from schedlang.schedule.kinds import AWAY, BACK


class _Copies(Part):
    """The copies between this rank and another one, in their own thread. All have the same tag,
    since messages with the same tag arrive in the order in which they are sent.
    """

    def __init__(self, wire: Wire, peer: int, tag: int) -> None:
        self._wire = wire
        self._peer = peer
        self._tag = tag
        # The thread ends with the pipeline.
        self._thread = ThreadPoolExecutor(1, "schedlang copies")
        #: The copies of this step.
        self._begun: list[Future[None]] = []

    def begin(self, copy: Callable[[], None]) -> "Future[None]":
        """Make a copy in the thread, after all earlier ones."""
        future = self._thread.submit(self._wire.make_copy, copy)
        self._begun.append(future)
        return future

    def wait(self, copy: "Future[None]") -> None:
        """Wait in the main thread for a copy."""
        self._wire.wait_for(copy, self._peer)

    def end_step(self) -> None:
        """Wait for all copies."""
        for copy in self._begun:
            self.wait(copy)
        self._begun = []

    def send(self, tensors: Sequence[Tensor]) -> None:
        """Send tensors, and wait until they have been received."""
        sent = [
            (self._wire.send(tensor, self._peer, self._tag), tensor)
            for tensor in tensors
        ]
        self._wire.end_copy(sent, self._peer)

    def receive(self, sizes: Sequence[int]) -> list[Tensor]:
        """Receive byte tensors of these sizes."""
        tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        self._receive_into(tensors)
        return tensors

    def send_sizes(self, sizes: Sequence[int]) -> None:
        """Send the sizes of the tensors that follow, in bytes."""
        self.send([torch.tensor([len(sizes)]), torch.tensor([*sizes, 0])])

    def receive_sizes(self) -> list[int]:
        """Receive the sizes from `send_sizes`."""
        count = torch.empty(1, dtype=torch.int64)
        self._receive_into([count])
        # One element more, so that the tensor is not empty.
        sizes = torch.empty(int(count) + 1, dtype=torch.int64)
        self._receive_into([sizes])
        return sizes.tolist()[:-1]

    def _receive_into(self, tensors: Sequence[Tensor]) -> None:
        begun = [
            (self._wire.receive(tensor, self._peer, self._tag), tensor)
            for tensor in tensors
        ]
        self._wire.end_copy(begun, self._peer)


class KeptElsewhere(_Copies):
    """The copies of this rank's activations to a keeper and back; see
    `schedlang.runtime.parts.offload.Copies`.
    """

    def offload(self, memories: Sequence[Memory], stage: int, microbatch: int) -> None:
        """Begin to send the memories of a stage's microbatch; they are freed once they are sent."""

        def copy() -> None:
            self.send_sizes([memory.size for memory in memories])
            self.send([memory.bytes for memory in memories])
            # The rank has run other ops during the send, which must not have changed them.
            check_unchanged(memories, stage, microbatch)
            for memory in memories:
                memory.bytes = _NOTHING
                memory.saved = []

        self.begin(copy)

    def reload(
        self, memories: Sequence[Memory], stage: int, microbatch: int
    ) -> Callable[[], None]:
        """Begin to receive them back; return a function that waits until they are here."""

        def copy() -> None:
            for memory, bytes in zip(
                memories,
                self.receive([memory.size for memory in memories]),
                strict=True,
            ):
                memory.bytes = bytes

        return partial(self.wait, self.begin(copy))


class KeptHere(_Copies):
    """The activations that this rank keeps for another one."""

    def __init__(self, wire: Wire, peer: int, tag: int, exchange: Exchange) -> None:
        super().__init__(wire, peer, tag)
        self._exchange = exchange
        self._kept: dict[tuple[int, int], list[Tensor]] = {}

    def begin_step(self) -> None:
        """Let the thread make all copies of the step, offloads and reloads of the other rank in its
        order, as that rank comes to them.
        """
        for kind, *what in self._exchange.plan.ranks[self._peer].each():
            if kind in (*AWAY, *BACK):
                copy = self._take if kind in AWAY else self._give
                self.begin(partial(copy, *what))

    def _take(self, stage: int, microbatch: int) -> None:
        self._kept[stage, microbatch] = self.receive(self.receive_sizes())

    def _give(self, stage: int, microbatch: int) -> None:
        self.send(self._kept.pop((stage, microbatch)))


#: Stands in for memory that another rank keeps.
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


def of_rank(rank: Rank) -> Iterator[Part]:
    """Make the parts for the activations that this rank offloads to a keeper, and for those that it
    keeps for others; each rank's copies have a tag. PipelineError on GPUs.
    """
    plan = rank.site.plan
    own = rank.site.rank
    tag_of = rank.exchange.tags.copies
    offloads = parts_by_stage(Offload, rank.site.parts).values()
    if offloads:
        keeper = plan.layout.keepers[own]
        if rank.site.device.type != "cpu":
            raise PipelineError(
                f"rank {own} offloads activations to rank {keeper}, which the runtime does on CPUs "
                "alone yet: leave out `keeper`, so that they go to the host"
            )
        elsewhere = KeptElsewhere(rank.wire, keeper, tag_of(own))
        for part in offloads:
            part.copies = elsewhere
        yield elsewhere
    for other in plan.layout.kept_by(own):
        yield KeptHere(rank.wire, other, tag_of(other), rank.exchange)
