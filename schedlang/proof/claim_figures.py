"""The figures of an execution that a program may claim something of (`assert`), exactly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from schedlang.on_demand import on_demand
from schedlang.proof.execution import Execution

if TYPE_CHECKING:
    from fractions import Fraction

    from schedlang.ranks.weight_versions import Versions, follow_weights
else:
    follow_weights = on_demand("schedlang.ranks.weight_versions.follow_weights")


class Figures:
    """The figures of an execution by their names in a program, each found when it is asked for;
    `peak` and `versions` have one for each rank.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    @cached_property
    def makespan(self) -> int | Fraction:
        """From the first start to the last end."""
        return self._time(self._execution.timeline.makespan)

    @cached_property
    def work(self) -> int | Fraction:
        """What the busiest rank works."""
        return max(map(self._time, self._execution.timeline.busy))

    @property
    def bubble(self) -> int | Fraction:
        """The idle time of the busiest rank under a synchronous flush."""
        return self.makespan - self.work

    @cached_property
    def span(self) -> int | Fraction:
        """The longest time from a rank's own first start to its own last end."""
        return self._time(self._execution.timeline.span)

    @property
    def span_bubble(self) -> int | Fraction:
        """The idle time within the span."""
        return self.span - self.work

    @cached_property
    def peak(self) -> Sequence[int | Fraction]:
        """The most memory that each rank holds, in the program's amounts."""
        exact = self._execution.costs.fixed_memory.exact
        return list(map(exact, self._execution.peak_memory))

    @property
    def versions(self) -> Sequence[int]:
        """The most versions of a stage's weights that each rank holds."""
        return self._versions.held

    @property
    def staleness(self) -> int:
        """The most updates by which any weights are behind."""
        return self._versions.staleness

    @cached_property
    def rounded_makespan(self) -> float | None:
        """The makespan, if sums of times are rounded."""
        makespan = self._execution.timeline.makespan
        is_exact = self._execution.timeline.fixed.is_exact(makespan)
        return None if is_exact else makespan

    @cached_property
    def rounded_peak(self) -> float | None:
        """The highest peak, if sums of amounts are rounded."""
        peak = max(self._execution.peak_memory)
        return None if self._execution.costs.fixed_memory.is_exact(peak) else peak

    @cached_property
    def _versions(self) -> Versions:
        return follow_weights(self._execution.schedule)

    def _time(self, time: float) -> int | Fraction:
        return self._execution.timeline.fixed.exact(time)
