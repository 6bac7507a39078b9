"""Saves that are called within a step, as by a handler of a signal that tells of the end of a job.

Ranks get a signal at different points, perhaps in different steps. So each notes the call, and all
make it after the same step: the one after that in which the last of them was told.
"""

import atexit
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.watchdog import Watchdog


class LaterCalls:
    """Calls of all ranks that one of them makes within a step, in the order in which it does."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._watchdog = watchdog
        self._calls: list[tuple[str, Callable[[], None]]] = []
        self._done = 0
        self._step = 0
        self._is_inside = False

    @contextmanager
    def within_step(self) -> Iterator[None]:
        """A step or an evaluation, after which calls are made that were put off on all ranks."""
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
        """Note a call for later, if it comes within a step; whether it does."""
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
        """Of a script that makes no further step."""
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
