"""What each stage is to its neighbours, as numpy columns over the stages."""

from functools import lru_cache

import numpy as np
from attrs import frozen

from schedlang.proof.columnwise.columns import Flags
from schedlang.schedule.layout import Layout


@frozen(eq=False)
class Neighbours:
    """Whether there is a stage before each one, or after it, in its pipeline; and whether on
    another rank.

    What comes from there is then received.
    """

    before: Flags
    after: Flags
    far_before: Flags
    far_after: Flags


@lru_cache(1)
def neighbours(layout: Layout) -> Neighbours:
    """The neighbours of all stages."""
    stages = range(len(layout.placement))
    rank = np.array(layout.placement)
    before = np.array([not layout.is_first(stage) for stage in stages])
    after = np.array([not layout.is_last(stage) for stage in stages])
    return Neighbours(
        before, after, before & (np.roll(rank, 1) != rank), after & (np.roll(rank, -1) != rank)
    )
