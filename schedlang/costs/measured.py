"""Costs from a measured run."""

from collections.abc import Iterable
from statistics import median
from typing import Any

from schedlang.costs.model import DURATIONS, Costs


def measured_costs(ops: Iterable[tuple[int, int, float]]) -> Costs:
    """The costs that a run shows: of each kind of op on each stage, the median duration, in the unit of the run.

    `ops` are (kind, stage, duration). A kind that did not run at all is left open; where one ran on some stages only,
    its duration on the others is 0.
    """
    durations: dict[tuple[int, int], list[float]] = {}
    for kind, stage, duration in ops:
        durations.setdefault((kind, stage), []).append(duration)
    stages = range(1 + max((stage for _, stage in durations), default=-1))
    ran = {kind for kind, _ in durations}
    found: dict[str, Any] = {
        name: tuple(median(durations.get((kind, stage), [0.0])) for stage in stages)
        for kind, name in DURATIONS.items()
        if kind in ran
    }
    return Costs(**found)
