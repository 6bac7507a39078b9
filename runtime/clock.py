"""Measure the times of a step's ops and messages, on a CPU or a GPU."""

from collections.abc import Sequence
from functools import cached_property, partial
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
    """The time on a device. A GPU does its work later than the host issues it, so an event records
    the time there, and is read on demand.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Moment:
        """The moment at which the device has done its work so far."""
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, begin: Moment, end: Moment) -> float:
        """Seconds from one moment to another; the host waits until the GPU has reached both."""
        if isinstance(begin, float):
            assert isinstance(end, float)
            return end - begin
        assert isinstance(end, torch.cuda.Event)
        begin.synchronize()
        end.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3

    def seconds_of(self, moment: Moment) -> float:
        """A moment in seconds of `time.perf_counter()`."""
        if isinstance(moment, float):
            return moment
        since = self.between(moment, self.now())
        return perf_counter() - since


class Recording:
    """The times of a rank's ops, sends and waits for receives in a step. A step that runs in two
    parts has both in one recording.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begin = clock.now()
        self._moments: list[tuple[Op, Moment, Moment]] = []

    def walk(self, calls: Sequence[Call], watchdog: Watchdog, names: Names) -> None:
        """Make calls one after the other, and record the times of those that stand for an op or a
        message.
        """
        now = self._clock.now
        for watchdog.action, call, op in calls:
            if op is None:
                call()
            else:
                start = now()
                with torch.profiler.record_function(names.action(*op)):
                    call()
                self._moments.append((op, start, now()))
            watchdog.mark()

    @cached_property
    def bars(self) -> list[Bar]:
        """The ops and messages with their times, in seconds of `time.perf_counter()`."""
        # A GPU's moments are relative to the first one, which is compared with the host's clock.
        zero = self._clock.seconds_of(self._begin)
        since = partial(self._clock.between, self._begin)
        return [
            Bar(*op, zero + since(start), zero + since(end))
            for op, start, end in self._moments
        ]

    @property
    def seconds(self) -> float:
        """The time from the beginning of the step to the end of its last op or message."""
        _, _, end = self._moments[-1]
        return self._clock.between(self._begin, end)
