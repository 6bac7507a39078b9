"""Saves that are called within a step, for example by the handler of a signal that a job will end.

Ranks get a signal at different points, perhaps in different steps. So each rank notes the call, and
all make it after the same step: the one after the step in which the last rank got the signal.
"""

import atexit
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.watchdog import Watchdog


class LaterCalls:
    """Calls that ranks make within a step; all ranks make them together after a later step."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._calls: list[tuple[str, Callable[[], None]]] = []
        self._done = 0
        self._step = 0
        self._is_inside = False

    @contextmanager
    def within_step(self) -> Iterator[None]:
        """A context around a step or an evaluation, which makes the calls that all ranks have
        noted.
        """
        if self._is_inside:
            raise PipelineError(
                "a step was called within a step, as by a handler of a signal: let the handler set "
                "a flag, and look at that after the step"
            )
        self._is_inside = True
        self._step += 1
        try:
            yield
        finally:
            self._is_inside = False
        if self._calls:
            after = self._watchdog.agreed(self._done, self._step + 1)
            if after is not None and after <= self._step:
                self._make()

    def add(self, what: str, call: Callable[[], None]) -> bool:
        """Note a call for later if a step is running; return whether one is."""
        if not self._is_inside:
            return False
        if not self._calls:
            atexit.register(self._at_exit)
        self._watchdog.agree(self._done + len(self._calls))
        self._calls.append((what, call))
        warnings.warn(
            f"`{what}` was called within a step, as by a handler of a signal: all ranks make it "
            "after the same step, once it was called on each",
            stacklevel=3,
        )
        return True

    def _make(self) -> None:
        _, call = self._calls.pop(0)
        self._done += 1
        call()

    def _at_exit(self) -> None:
        """Make the calls that are left, if the script makes no further step."""
        is_error = getattr(sys, "last_value", None) is not None
        while self._calls and not is_error:
            if self._watchdog.agreed(self._done, 0) is None:
                what, _ = self._calls[0]
                warnings.warn(
                    f"`{what}` was called within a step, and not on all ranks: it was not made",
                    stacklevel=1,
                )
                return
            self._make()
