"""A line on the terminal that says what a command is doing, and how far it is.

It is drawn by a thread of its own, since the work itself has no time for it, and only for those who
wait: after a second, on stderr, if that is a terminal.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from time import monotonic
from typing import TYPE_CHECKING

from schedlang.diagnostics.activity import CURRENT, doing

if TYPE_CHECKING:
    from threading import Event

#: How long nobody wonders, and how often the line is drawn, in seconds.
_PATIENCE = 1.0
_INTERVAL = 0.1
_WIDTH = 24
_CLEAR = "\x1b[K"


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Show what is done within, on a terminal: `what`, until the work itself says more."""
    doing(what)
    if not _is_watched():
        yield
        return
    # Most commands are over, or not watched, before this is needed.
    from threading import Event, Thread

    end = Event()
    thread = Thread(target=_draw_until, args=(end,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _is_watched() -> bool:
    return bool(sys.stderr) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _draw_until(end: "Event") -> None:
    """Draw the line again and again, and in the end clear it."""
    from shutil import get_terminal_size

    start = monotonic()
    if end.wait(_PATIENCE):
        return
    is_unicode = (sys.stderr.encoding or "").lower().startswith("utf")
    spinner = cycle("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏" if is_unicode else "|/-\\")
    while not end.wait(_INTERVAL):
        line = progress_line(next(spinner), monotonic() - start, is_unicode)
        # What is printed next takes its place.
        _write(f"{_CLEAR}{line[: get_terminal_size().columns - 1]}\r")
    _write(_CLEAR)


def progress_line(mark: str, seconds: float, is_unicode: bool) -> str:
    """What is being done, how much of it, since when, and how long it may still take."""
    activity = CURRENT
    line = f"{mark} {activity.what}"
    if not activity.total:
        return f"{line}, {seconds:.0f} s"
    full, empty = "█░" if is_unicode else "#."
    bar = (full * (_WIDTH * activity.done // activity.total)).ljust(_WIDTH, empty)
    line += f" {bar} {activity.done:,} of {activity.total:,}, {seconds:.0f} s"
    if activity.done:
        left = seconds / activity.done * (activity.total - activity.done)
        line += f", about {left:.0f} s left"
    return line


def _write(text: str) -> None:
    # Past Python's buffers: a process that is forked meanwhile must not find them locked.
    with suppress(OSError):
        os.write(
            sys.stderr.fileno(), text.encode(sys.stderr.encoding or "utf-8", "replace")
        )
