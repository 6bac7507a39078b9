"""The progress of a GPU in the work that the host has given it.

The host runs ahead of the GPU: when the host is at the end of a step, the GPU may have most of it
still to do, and if a message never comes, it is the GPU that waits. So the host records marks
between the GPU's work, each with what the rank does up to there:

    host     F0  B0  F1  B1 ── at the end of the step
    GPU      F0 ▏wait for rank 1 ▏B0 ▏F1 ▏B1 ▏
                 └ the first mark that the GPU has not reached: this rank waits for rank 1
"""

from collections import deque
from threading import Lock

import torch

from schedlang.runtime.heartbeats import Doing


class GpuProgress:
    """The marks that a GPU has not reached. The main thread records them; any thread may ask."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: deque[tuple[torch.cuda.Event, Doing]] = deque()
        #: Events of past marks, which are reused.
        self._free: list[torch.cuda.Event] = []
        self._lock = Lock()

    def stream(self) -> torch.cuda.Stream:
        """The stream that ops run on now. To ask takes as long as to record an event on it."""
        return torch.cuda.current_stream(self._device)

    def mark(self, doing: Doing, stream: torch.cuda.Stream) -> None:
        """Mark the end of a stream's last work, with what the rank does until then."""
        event = self._free.pop() if self._free else _new_event()
        event.record(stream)
        self._marks.append((event, doing))

    def doing(self) -> Doing | None:
        """What the rank does where the GPU is now; None if the GPU has nothing left to do."""
        with self._lock:
            try:
                while self._marks and self._marks[0][0].query():  # type: ignore[no-untyped-call]
                    event, _ = self._marks.popleft()
                    self._free.append(event)
            except RuntimeError:
                # The GPU has failed. The main thread gets the same error and reports it.
                self._marks.clear()
            return self._marks[0][1] if self._marks else None


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
