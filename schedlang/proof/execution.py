"""What an execution shows of a schedule that runs to its end."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attrs import field, frozen

from schedlang.on_demand import on_demand
from schedlang.schedule.costs import UNIT, Costs
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Timeline

if TYPE_CHECKING:
    from schedlang.proof.memory import Level, levels, peaks
    from schedlang.ranks.weight_versions import bytes_of_weights
    from schedlang.schedule.notebook_views import drawn
else:
    # For notebooks.
    drawn = on_demand("schedlang.schedule.notebook_views.drawn")
    # For whoever asks what ranks hold.
    levels = on_demand("schedlang.proof.memory.levels")
    peaks = on_demand("schedlang.proof.memory.peaks")
    bytes_of_weights = on_demand("schedlang.ranks.weight_versions.bytes_of_weights")


@frozen
class Execution:
    """When all ops of a schedule ran, and what the ranks held by then.

    `transport` is the one that its times are of, or `ideal`; or `measured`, if a run has recorded
    them. `costs` are all that are given. Times are in their unit.
    """

    transport: str
    schedule: Schedule = field(repr=False)
    costs: Costs
    timeline: Timeline = field(repr=False)

    def __repr__(self) -> str:
        name = f"{self.schedule.title} on {self.transport}"
        return f"<Execution {name}: makespan {self.timeline.makespan:.10g}>"

    def _repr_html_(self) -> str | None:
        return drawn(self)

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the most stage activations that it holds, one per stage and microbatch.

        They are held from the forward to the last use: the whole backward, or the weight half.
        """
        return tuple(
            map(int, peaks(self.schedule, self.timeline, UNIT.memory(self._layout)))
        )

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """The most memory that each rank holds in the program's amounts, with that of messages if
        these have any.
        """
        return peaks(self.schedule, self.timeline, self.costs.memory(self._layout))

    @cached_property
    def memory(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """What each rank holds over time in the program's amounts, in steps: (time, amount from
        then on).
        """
        found = levels(self.schedule, self.timeline, self.costs.memory(self._layout))
        return tuple(tuple(level.steps) for level in found)

    @cached_property
    def memory_bytes(self) -> tuple[tuple[tuple[float, float], ...], ...] | None:
        """What each rank holds over time in bytes, in steps from the first start on: activations,
        messages, and weights in all versions; None if the costs give no bytes.
        """
        found = self._levels_of_bytes
        if found is None:
            return None
        start = self.timeline.start
        return tuple(((start, level.first), *level.steps) for level in found)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """For each rank, the most bytes that it holds: activations, messages, and weights in all
        versions; None if the costs give no bytes.
        """
        found = self._levels_of_bytes
        return None if found is None else tuple(level.peak for level in found)

    @cached_property
    def _levels_of_bytes(self) -> list[Level] | None:
        amounts = self.costs.bytes(self._layout)
        if amounts is None:
            return None
        weights = bytes_of_weights(self.schedule, self.costs)
        return levels(self.schedule, self.timeline, amounts, weights)

    @property
    def _layout(self) -> Layout:
        return self.schedule.layout
