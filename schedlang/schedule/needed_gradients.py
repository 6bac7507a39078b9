"""The gradients of weights that optimizer steps and sums over replicas need."""

from collections.abc import Iterator

import numpy as np
from attrs import frozen

from schedlang.schedule.arrays import Flags, Ints
from schedlang.schedule.columns import Columns
from schedlang.schedule.needs import Rules
from schedlang.schedule.schedule import Schedule, once


@frozen(eq=False)
class Sums:
    """The gradients that optimizer steps need: an item for each step and each replica of its stage,
    the stage itself included.

    `last` is the row of the last gradient that the replica adds to the update, or -1 where it adds
    none. `is_whole` says whether it adds all of them, and `is_far` whether it is on another rank
    than the step. `step` is a row as well.
    """

    step: Ints
    last: Ints
    is_whole: Flags
    is_far: Flags

    def late(self, columns: Columns) -> Ints:
        """The steps that stand before a gradient that their own rank makes for them."""
        is_before = self.is_whole & (self.last < columns.batch[self.step])
        return self.step[~is_before & ~self.is_far]


@frozen(eq=False)
class Gradients:
    """The gradients that a rank adds to an update of a piece of the model: an item for each rank,
    piece and update, in the order of these.

    A piece has the number of its stage in the first pipeline; stages of other pipelines are
    replicas. `last` is the row of the action that makes the last of the gradients.
    """

    rank: Ints
    piece: Ints
    update: Ints
    last: Ints

    def taken(self, items: Flags) -> "Gradients":
        """The items at which the flags are set."""
        return Gradients(
            self.rank[items], self.piece[items], self.update[items], self.last[items]
        )

    def of(self, rank: Ints, piece: Ints, update: Ints) -> Ints:
        """The items of some ranks, pieces and updates; -1 where there is none."""
        items = {
            key: item
            for item, key in enumerate(_keys(self.rank, self.piece, self.update))
        }
        return np.array(
            [items.get(key, -1) for key in _keys(rank, piece, update)], np.int64
        )


def _keys(*columns: Ints) -> Iterator[tuple[int, ...]]:
    """The rows of some columns."""
    return zip(*(column.tolist() for column in columns), strict=True)


@once
def gradients_of(schedule: Schedule) -> Gradients:
    """The gradients that each rank adds to the updates. Missing ones are left out."""
    layout = schedule.layout
    rules = Rules(schedule)
    placement = np.array(layout.placement, np.int64)
    parts = []
    for pipeline in layout.trained:
        last = rules.gradients(pipeline).max(axis=2)
        piece, update = np.indices(last.shape)
        rank = placement[pipeline.start + piece]
        # Models are no replicas of one another: their pieces are numbered on.
        piece += layout.piece(pipeline.start)
        parts.append([column.ravel() for column in (rank, piece, update, last)])
    rank, piece, update, last = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    order = np.lexsort((last, update, piece, rank))
    order = order[last[order] >= 0]
    # Of replicas on one rank, the one whose last gradient comes last.
    keys = np.column_stack([rank, piece, update])[order]
    goes_on = (np.diff(keys, axis=0) == 0).all(axis=1)
    order = np.delete(order, np.flatnonzero(goes_on))
    return Gradients(rank[order], piece[order], update[order], last[order])


@once
def sums_of(schedule: Schedule) -> Sums:
    """The gradients that all optimizer steps need."""
    rules = Rules(schedule)
    parts = []
    for pipeline in schedule.layout.trained:
        step, stage, update = rules.steps(pipeline)
        by_update = rules.gradients(pipeline)
        at = stage - pipeline.start, update
        parts.append(
            (step, stage, by_update.max(axis=2)[at], by_update.min(axis=2)[at])
        )
    step, stage, last, first = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    placement = np.array(schedule.placement, np.int32)
    is_far = placement[stage] != schedule.columns.rank[step]
    return Sums(step, last, first >= 0, is_far)
