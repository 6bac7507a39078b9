"""Find out from its CPU time whether a process computes or stands still."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, process_time, thread_time

import torch

#: A process that computes uses at least this share of a core, even on a busy machine.
_SHARE = 0.05


class Work:
    """Whether a process computes. One thread makes this object, and another one asks about it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._place: tuple[int, int] | None = None
        self._own = _Use(_seconds_of_own)
        self._started = _Use(_seconds_of_started)

    def goes_on(self) -> bool:
        """Whether the process has computed since the last call."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return self._own.is_some()
        # Waiting for a GPU uses a core, as computing does, but the thread stays in one call.
        frame = sys._current_frames().get(self._thread)
        before = self._place
        self._place = frame and (id(frame), frame.f_lasti)
        return self._place != before

    def of_started_goes_on(self) -> bool:
        """Whether the processes that it has started, such as compilers, have computed; on Linux. It
        reads all processes of the machine.
        """
        return self._started.is_some()


class _Use:
    """Whether a CPU time grows, which `seconds` returns."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds
        self._since = monotonic()
        self._used = 0.0

    def is_some(self) -> bool:
        """Whether it has grown since the last call."""
        before, self._used = self._used, self._seconds()
        since, self._since = self._since, monotonic()
        return self._used - before > _SHARE * (self._since - since)


def _seconds_of_own() -> float:
    """The CPU time of this process without this thread, which watches it, and of child processes
    for which it has waited.
    """
    ended = os.times()
    waited_for = ended.children_user + ended.children_system
    return process_time() - thread_time() + waited_for


def _seconds_of_started() -> float:
    """The CPU time of all descendants of this process."""
    children: dict[int, list[tuple[int, int]]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        # A process may have ended since.
        with suppress(OSError):
            # The fields after the name, which is in brackets and may have any characters.
            fields = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name), sum(map(int, fields[11:15]))
            children.setdefault(int(fields[1]), []).append(process)
    ticks = 0
    ahead = [os.getpid()]
    while ahead:
        for child, used in children.get(ahead.pop(), []):
            ticks += used
            ahead.append(child)
    return ticks / os.sysconf("SC_CLK_TCK")
