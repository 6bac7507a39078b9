"""Checks that losses are finite, without waiting for a GPU.

On a CPU, the losses are known when a step ends. A GPU may still be computing them, and reading them
would synchronise. So they are copied to the host asynchronously, and checked once the copy is
complete: at the end of a later step, usually the next one. A pipeline that must stop before the
weights are updated (`stop_on_nan`) waits for them.
"""

import warnings
from collections.abc import Callable
from typing import NoReturn

import torch
from attrs import frozen
from torch import Tensor

from schedlang.runtime.errors import PipelineError

#: The limit of losses that a message names.
_MOST_NAMED = 3


@frozen(eq=False)
class _Copied:
    """Losses on their way to the host, with the event of their copy (`ready`) and their name."""

    step: int
    what: str
    losses: Tensor
    ready: torch.cuda.Event | None

    @property
    def are_there(self) -> bool:
        return self.ready is None or bool(self.ready.query())  # type: ignore[no-untyped-call]

    def message(self) -> str | None:
        """The message about losses that are not finite; None if all are finite."""
        if self.losses.isfinite().all():
            return None
        wrong = [
            f"{number} ({float(loss)})"
            for number, loss in enumerate(self.losses.reshape(-1))
            if not loss.isfinite()
        ]
        where = ""
        if self.losses.dim():
            more = len(wrong) - _MOST_NAMED
            where = f" for microbatch {', '.join(wrong[:_MOST_NAMED])}"
            where += f" and {more} more" if more > 0 else ""
        return f"step {self.step} of the pipeline: {self.what} is not finite{where}"


class FiniteCheck:
    """Warns once of a loss that is not finite, or with `stops`, calls `fail` with an error."""

    def __init__(self, stops: bool, fail: Callable[[Exception], NoReturn]) -> None:
        self._stops = stops
        self._fail = fail
        self._has_warned = False
        self._copied: list[_Copied] = []

    def note(self, step: int, what: str, losses: Tensor) -> None:
        """Begin to copy losses of a step: those of all microbatches, or a single one."""
        copy = losses.detach().to("cpu", non_blocking=True)
        ready = None
        if losses.is_cuda:
            ready = torch.cuda.current_stream(losses.device).record_event()
        self._copied.append(_Copied(step, what, copy, ready))

    def look(self) -> None:
        """Check the losses whose copies are complete."""
        while self._copied and (self._stops or self._copied[0].are_there):
            first = self._copied.pop(0)
            if first.ready is not None:
                first.ready.synchronize()
            message = first.message()
            if message is not None:
                self._tell(message)

    def _tell(self, message: str) -> None:
        if self._stops:
            self._fail(PipelineError(message))
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(message, stacklevel=6)
