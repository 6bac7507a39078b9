"""What a schedule does again and again, period by period: the schedule with more or fewer periods.

A period of a schedule without a flush is an update. Of one with a flush it is some microbatches.
"""

from itertools import product
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from attrs import evolve, frozen

from schedlang.schedule.arrays import Flags, Ints, repeated
from schedlang.schedule.columns import actions_of
from schedlang.schedule.kinds import ROWS, STEPS, TRANSFERS, Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Kernel, Schedule

S = TypeVar("S", bound=Schedule)


class Run(NamedTuple):
    """The `length` rows of a rank from `first` on: they are there `times` times, one after the
    other, each time for microbatches of one period later.
    """

    first: int
    length: int
    times: int = 1


@frozen(eq=False)
class Periods(Generic[S]):
    """The periods of a schedule: its `runs`, one after the other, and the rows that are
    `behind` the first time of the run that has their op. `microbatches` says how many microbatches
    of each pipeline a period has, `updates` whether it is an update.
    """

    # A rank of five microbatches. Every microbatch repeats F I, and at the end W; by their first
    # rows and lengths, the runs are (2, 2) and (10, 1):
    #
    #     F0 F1   F2 I0   F3 I1   F4 I2   I3 I4   W0   W1   W2   W3   W4
    #             ━━━━━   ━━━━━   ━━━━━           ━━   ━━   ━━   ━━   ━━
    #
    # With one period fewer, all that is behind is of one microbatch less:
    #
    #     F0 F1   F2 I0   F3 I1   I2 I3   W0   W1   W2   W3
    schedule: S
    microbatches: tuple[int, ...]
    updates: int
    runs: tuple[Run, ...]
    behind: Flags

    @property
    def times(self) -> int:
        """How many times each run is there at least."""
        return min(run.times for run in self.runs)

    def more(self, times: int) -> S:
        """The schedule with so many periods more, or fewer where the number is negative; slots are
        forgotten.
        """
        schedule = self.schedule
        columns = schedule.columns
        rows = list[Ints]()
        #: By how many periods each row comes later.
        later = list[Ints]()
        start = 0
        for first, length, _ in sorted(self.runs):
            stop = first + length
            again = max(times, 0)
            rows += [np.arange(start, stop), np.tile(np.arange(first, stop), again)]
            later += [
                times * self.behind[start:stop],
                repeated(np.arange(1, again + 1), length),
            ]
            start = stop + max(-times, 0) * length
        rows.append(np.arange(start, len(columns)))
        later.append(times * self.behind[start:])
        changed = columns.taken(np.concatenate(rows))
        step = steps_of(schedule.layout, self.microbatches)
        moved = np.concatenate(later) * step[changed.kind, changed.stage]
        changed = evolve(changed, microbatch=changed.microbatch + moved)
        return evolve(
            schedule,
            layout=_longer(schedule.layout, times, self.microbatches, self.updates),
            ranks=actions_of(len(schedule.ranks), changed),
            slots=None,
        )


def repeat(schedule: S, kernels: tuple[Kernel, ...], times: int) -> S:
    """The schedule with the repeating part of every rank some more times; or some times less, where
    it has been repeated as often.
    """
    columns = schedule.columns
    place = np.arange(len(columns)) - columns.first[columns.rank]
    behind = place >= np.array([kernel.stop for kernel in kernels])[columns.rank]
    runs = tuple(
        Run(first + kernel.start, kernel.stop - kernel.start)
        for first, kernel in zip(columns.first.tolist(), kernels, strict=False)
    )
    update = microbatches_of_update(schedule.layout)
    return Periods(schedule, update, 1, runs, behind).more(times)


def microbatches_of_update(layout: Layout) -> tuple[int, ...]:
    """How many microbatches of each pipeline an update has."""
    return tuple(
        pipeline.microbatches // layout.updates for pipeline in layout.pipelines
    )


def steps_of(layout: Layout, microbatches: tuple[int, ...] | None = None) -> Ints:
    """By kind and number of an action, by how much its microbatch grows in a period, which has so
    many `microbatches` of each pipeline: by default those of an update.
    """
    # An optimizer step has the number of its update, which grows by one.
    each = microbatches or microbatches_of_update(layout)
    steps = np.ones((ROWS, len(layout.all_numbers)), np.int64)
    stages = range(len(layout.placement))
    lengths = [pipeline.stop - pipeline.start for pipeline in layout.pipelines]
    steps[:, : len(stages)] = repeated(np.array(each) * layout.slices, lengths)
    steps[[*STEPS]] = 1
    # Only transfers have the numbers of skips.
    for kind, number in product(TRANSFERS, layout.far_edges):
        steps[kind, number] = steps[Kind.F, layout.stage_of(kind, number)]
    return steps


def _longer(
    layout: Layout, times: int, microbatches: tuple[int, ...], updates: int
) -> Layout:
    """The layout with so many periods more."""
    pipelines = tuple(
        evolve(pipeline, microbatches=pipeline.microbatches + times * each)
        for pipeline, each in zip(layout.pipelines, microbatches, strict=True)
    )
    return evolve(layout, pipelines=pipelines, updates=layout.updates + times * updates)
