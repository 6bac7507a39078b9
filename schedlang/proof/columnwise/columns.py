"""All actions of a schedule as numpy columns."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule

Ints = NDArray[np.integer]
Flags = NDArray[np.bool_]


@frozen(eq=False)
class Columns:
    """The actions of all ranks, rank after rank: item i of all columns is of action i.

    `batch[i]` is the first of the actions that are issued together with action i. A stage and a
    microbatch have a `slot`: `stride` apart for neighbouring stages. Optimizer steps have none.
    """

    schedule: Schedule
    stride: int
    kind: Ints
    stage: Ints
    microbatch: Ints
    group: Ints
    source: Ints
    rank: Ints
    batch: Ints
    slot: Ints
    _found: dict[tuple[Kind, ...], Ints] = field(factory=dict, init=False)

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return len(self.schedule.placement) * self.stride

    def where(self, *kinds: Kind) -> Ints:
        """The actions of some kinds, in order."""
        if kinds not in self._found:
            self._found[kinds] = np.flatnonzero(is_any(self.kind, *kinds))
        return self._found[kinds]

    def at(self, *kinds: Kind) -> Ints:
        """For each slot, the last action of some kinds there; -1 where there is none."""
        chosen = self.where(*kinds)
        found = np.full(self.slots, -1, np.int32)
        found[self.slot[chosen]] = chosen
        return found


def columns_of(schedule: Schedule) -> Columns | None:
    """The columns of a schedule; None if they have an action of a stage or microbatch that does not
    exist.

    Nor are there any where actions are not on the ranks of their stages, or far fewer than the work
    that there is: what is indexed by slots stays no larger than the schedule; nor where there are
    skips, or updates of replicas wait for each other.
    """
    stages = len(schedule.placement)
    layout = schedule.layout
    if layout.skips:
        return None
    units = np.array([layout.units(stage) for stage in range(stages)])
    stride = int(units.max())
    if stages * stride > sum(map(len, schedule.ranks)):
        return None
    kind, stage, microbatch, group, source = (
        np.concatenate([np.asarray(getattr(actions, name)) for actions in schedule.ranks])
        for name in ("kind", "stage", "microbatch", "group", "source")
    )
    lengths = list(map(len, schedule.ranks))
    rank = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    if stage.min() < 0 or stage.max() >= stages:
        return None
    updates = kind == Kind.U
    fits = np.where(
        updates, microbatch < layout.updates, (microbatch >= 0) & (microbatch < units[stage])
    )
    if (
        (len(layout.pipelines) > 1 and updates.any())
        or not fits.all()
        or (np.array(schedule.placement)[stage] != rank).any()
    ):
        return None
    slot = np.where(updates, 0, stage * np.int32(stride) + microbatch)
    return Columns(
        schedule, stride, kind, stage, microbatch, group, source, rank, _batches(rank, group), slot
    )


def _batches(rank: Ints, group: Ints) -> Ints:
    """The first action of each one's batch."""
    index = np.arange(len(rank), dtype=np.int32)
    if group.any():
        goes_on = (group[1:] > 0) & (group[1:] == group[:-1]) & (rank[1:] == rank[:-1])
        index[1:][goes_on] = 0
        index = np.maximum.accumulate(index)
    return index


def is_any(kind: Ints, *kinds: Kind) -> Flags:
    """Whether each of some kinds is one of these."""
    return _table(kinds)[kind]


@cache
def _table(kinds: tuple[Kind, ...]) -> Flags:
    return np.array([each in kinds for each in (None, *Kind)])


def actions_of(
    ranks: int, rank: Ints, kind: Ints, stage: Ints, microbatch: Ints, source: Ints, group: Ints
) -> tuple[Actions, ...]:
    """The actions of each rank, from columns that are in the order of the ranks."""
    ends = np.searchsorted(rank, np.arange(ranks), "right").tolist()
    found = []
    for begin, end in zip([0, *ends], ends, strict=False):
        actions = Actions()
        columns: Sequence[Ints] = kind, stage, microbatch, source, group
        targets = actions.kind, actions.stage, actions.microbatch, actions.source, actions.group
        for column, target in zip(columns, targets, strict=True):
            target.frombytes(column[begin:end].astype(target.typecode).tobytes())
        found.append(actions)
    return tuple(found)
