"""Copies of activations between a GPU and the memory of its host, beside the ops.

Each direction has a stream, as a GPU has a copy engine for each. The streams record and wait for
the events that `schedlang.ranks.gpu_streams` derives from the plan:

    compute       F0 ● ─ F1 ○ ● ──────────── ○ B1       ● records an event
                     ╎      ╎ ╎              ╎          ○ waits for it
    copies out       ○ 0 ── ● ○ 1 ── ●       ╎
                                     ╎       ╎
    copies in                        ○ ─ 1 ─ ●

So a copy to the host is over when the next one begins, and its memory on the GPU is free then. No
tensor needs `record_stream`: all memory of the GPU is that of the compute stream, which has waited
for whoever else used it before it is taken or given back.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from schedlang.runtime.parts.offload import Memory


class Streams:
    """The streams of a GPU: that of its ops, and one for the copies of each direction."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies_out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.copies_in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def compute(self) -> Any:
        """The stream on which the step runs its ops."""
        return torch.cuda.current_stream(self.device)

    def run_on(self, stream: Any) -> AbstractContextManager[Any]:
        """Let a stream run what is called inside."""
        return torch.cuda.stream(stream)

    def room_on_host(self, bytes: Tensor) -> Tensor:
        """Pinned memory for a copy of some bytes, to and from which copies run by themselves."""
        return torch.empty_like(bytes, device="cpu", pin_memory=True)


@frozen(eq=False)
class _Leaving:
    """A copy to the host: the memory that it reads, and the event with which it is over."""

    memory: list[Tensor]
    is_over: Any


class CopiesOfGpu:
    """The copies of a rank whose stages are on a GPU."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        #: The copy to the host that began last, while the compute stream has not waited for it.
        self._last: _Leaving | None = None
        #: By stage and microbatch, the copies of what is on the host.
        self._away: dict[tuple[int, int], _Leaving] = {}

    def offload(self, memories: Sequence[Memory], stage: int, microbatch: int) -> None:
        """Begin to copy the memories of a stage's microbatch to the host. The copy before is over
        by then, and the memory that it has read is free.
        """
        if self._last is not None:
            self._streams.compute.wait_event(self._last.is_over)
            self._last.memory.clear()
        on_gpu = [memory.bytes for memory in memories]
        for memory in memories:
            memory.saved = []
            memory.bytes = self._streams.room_on_host(memory.bytes)
        over = self._copy(self._streams.copies_out, on_gpu, memories)
        self._last = self._away[stage, microbatch] = _Leaving(on_gpu, over)

    def reload(
        self, memories: Sequence[Memory], stage: int, microbatch: int
    ) -> Callable[[], None]:
        """Begin to copy them back; gives a function that lets the compute stream wait for that."""
        leaving = self._away.pop((stage, microbatch))
        on_host = [memory.bytes for memory in memories]
        for memory in memories:
            memory.bytes = torch.empty_like(memory.bytes, device=self._streams.device)
        over = self._copy(self._streams.copies_in, on_host, memories, leaving.is_over)

        def arrive() -> None:
            self._streams.compute.wait_event(over)
            on_host.clear()
            # The copy back has waited for the one to the host.
            leaving.memory.clear()
            if self._last is leaving:
                self._last = None

        return arrive

    def _copy(
        self,
        stream: Any,
        sources: Iterable[Tensor],
        memories: Iterable[Memory],
        *events: Any,
    ) -> Any:
        """Let a stream copy bytes into memories, behind what was computed so far and behind events;
        gives the event with which that is over.
        """
        for event in (self._streams.compute.record_event(), *events):
            stream.wait_event(event)
        with self._streams.run_on(stream):
            for source, memory in zip(sources, memories, strict=True):
                memory.bytes.copy_(source, non_blocking=True)
        return stream.record_event()


def of_device(device: torch.device) -> CopiesOfGpu:
    """The copies of a rank on this device."""
    return CopiesOfGpu(Streams(device))
