"""The most that ranks hold; see `schedlang.proof.memory`."""

from collections.abc import Sequence

import numpy as np

from schedlang.proof.columnwise.times import Floats
from schedlang.proof.memory import Amounts
from schedlang.schedule.kinds import Kind
from schedlang.schedule.timeline import Bars, Timeline


def peaks(timeline: Timeline, amounts: Amounts, first: Sequence[float]) -> tuple[float, ...] | None:
    """The most that each rank holds, where all ops stay; None if some take no time: their order
    says too little.
    """
    table = np.array([amounts[kind] for kind in Kind if kind < Kind.OFFLOAD], np.float64)
    if any((np.asarray(bars.start) == np.asarray(bars.end)).any() for bars in timeline.ranks):
        return None
    return tuple(_peak(bars, table, held) for bars, held in zip(timeline.ranks, first, strict=True))


def _peak(bars: Bars, table: Floats, first: float) -> float:
    changes = table[np.asarray(bars.kind) - 1, np.asarray(bars.stage)]
    return float(np.cumsum(np.concatenate([[first], changes])).max())
