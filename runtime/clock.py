"""The times of what a step does, on a CPU and on a GPU."""

from collections.abc import Sequence
from time import perf_counter

import torch

from schedlang.runtime.calls import Call
from schedlang.runtime.part import Op
from schedlang.runtime.watchdog import Watchdog
from schedlang.schedule.naming import Names
from schedlang.schedule.timeline import Bar

#: A moment: on a CPU in seconds of `time.perf_counter()`, on a GPU an event in its stream.
Moment = float | torch.cuda.Event


class Clock:
    """Times of ops on a device. A GPU comes to them later than its host, which does not wait: an
    event takes the time, and is read when the step is over.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero: torch.cuda.Event | None = None
        self._seconds_at_zero = 0.0
        if device.type == "cuda":
            self._zero = self._event()
            self._zero.synchronize()
            self._seconds_at_zero = perf_counter()

    def now(self) -> Moment:
        """The moment at which the device has done what it was given."""
        return perf_counter() if self._zero is None else self._event()

    def seconds(self, moment: Moment) -> float:
        """A moment in seconds of `time.perf_counter()`. For one of a GPU this waits until then."""
        if isinstance(moment, float):
            return moment
        assert self._zero is not None
        moment.synchronize()
        milliseconds: float = self._zero.elapsed_time(moment)
        return self._seconds_at_zero + milliseconds / 1e3

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event


def walk_recording(
    calls: Sequence[Call], device: torch.device, watchdog: Watchdog, names: Names
) -> list[Bar]:
    """Make calls one after the other; gives the time of each that stands for an op or a message."""
    clock = Clock(device)
    moments: list[tuple[Op, Moment, Moment]] = []
    for watchdog.action, call, op in calls:
        if op is None:
            call()
        else:
            start = clock.now()
            with torch.profiler.record_function(names.action(*op)):
                call()
            moments.append((op, start, clock.now()))
        watchdog.mark()
    return [
        Bar(*op, clock.seconds(start), clock.seconds(end)) for op, start, end in moments
    ]
