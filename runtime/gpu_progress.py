"""How far a GPU is with what the host has given it.

The host runs ahead of a GPU: when a step is over for the host, the GPU may have most of it before
it, and where a message never comes, it is the GPU that waits. So the host leaves marks between the
GPU's work, each with what the rank does up to there:

    host     F0  B0  F1  B1 ── at the end of the step
    GPU      F0 ▏wait for rank 1 ▏B0 ▏F1 ▏B1 ▏
                 └ the first mark that the GPU has not come to: this rank waits for rank 1
"""

from collections import deque
from threading import Lock

import torch

from schedlang.runtime.heartbeats import Doing


class GpuProgress:
    """The marks that a GPU has yet to come to. The main thread leaves them; any may ask."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: deque[tuple[torch.cuda.Event, Doing]] = deque()
        #: Events of marks that are past, to be used again.
        self._free: list[torch.cuda.Event] = []
        self._lock = Lock()

    def mark(self, doing: Doing) -> None:
        """Mark the end of what the GPU was given last, and what the rank does until then."""
        event = self._free.pop() if self._free else _new_event()
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append((event, doing))

    def doing(self) -> Doing | None:
        """What the GPU does now, or None if it has nothing more to do."""
        with self._lock:
            try:
                while self._marks and self._marks[0][0].query():  # type: ignore[no-untyped-call]
                    event, _ = self._marks.popleft()
                    self._free.append(event)
            except RuntimeError:
                # The GPU has failed. The main thread meets that error too, and tells it.
                self._marks.clear()
            return self._marks[0][1] if self._marks else None


def _new_event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]
