"""What a schedule repeats, every so many microbatches: taken out, so that there is less of it to
look at, and put in again.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
from attrs import evolve, frozen

from schedlang.schedule.columns import (
    Columns,
    Floats,
    Ints,
    actions_of,
    counts_of,
    op_names,
    repeated,
)
from schedlang.schedule.kinds import ROWS
from schedlang.schedule.schedule import Schedule


class Run(NamedTuple):
    """The `length` rows of a rank from `first` on: they are there so many `times`, one after the
    other, each time for microbatches of one period later.
    """

    first: int
    length: int
    times: int


@frozen(eq=False)
class Repeats:
    """What a schedule of ops repeats every so many microbatches of each pipeline, which `periods`
    say.

    In a run, each of its ops is there for all microbatches of a period; every op of the schedule is
    in one run.
    """

    # A rank of five microbatches. Every microbatch repeats F I, and at the end W; by their first
    # rows and lengths, the runs are (2, 2) and (10, 1):
    #
    #     F0 F1   F2 I0   F3 I1   F4 I2   I3 I4   W0   W1   W2   W3   W4
    #             ━━━━━   ━━━━━   ━━━━━           ━━   ━━   ━━   ━━   ━━
    #
    # Without one period, all that follows in a run is of one microbatch less:
    #
    #     F0 F1   F2 I0   F3 I1   I2 I3   W0   W1   W2   W3
    schedule: Schedule
    periods: tuple[int, ...]
    runs: tuple[Run, ...]

    @property
    def units(self) -> Ints:
        """How many microbatches, or slices of these, a period has for each stage."""
        return _units(self.schedule, self.periods)

    @property
    def times(self) -> int:
        """How many times each run is there at least."""
        return min(run.times for run in self.runs)

    def taken_out(self, times: int) -> Schedule:
        """The schedule without so many of its periods, fewer than `times`, and without slots."""
        stays = np.ones(len(self.schedule.columns), bool)
        for first, length, _ in self.runs:
            stays[first + length : first + (1 + times) * length] = False
        columns = self._moved(-times).taken(np.flatnonzero(stays))
        return self._of(columns, -times)

    def put_in(self, times: int) -> Schedule:
        """The schedule with so many more of its periods, and without slots."""
        moved = self._moved(times)
        columns = self.schedule.columns
        units = self.units
        rows = list[Ints]()
        microbatches = list[Ints]()
        start = 0
        for first, length, _ in sorted(self.runs):
            middle = first + length
            body = np.tile(np.arange(first, middle), times)
            later = (
                repeated(np.arange(1, times + 1), length) * units[columns.stage[body]]
            )
            rows += [np.arange(start, middle), body]
            microbatches += [
                moved.microbatch[start:middle],
                columns.microbatch[body] + later,
            ]
            start = middle
        rows.append(np.arange(start, len(columns)))
        microbatches.append(moved.microbatch[start:])
        more = columns.taken(np.concatenate(rows))
        return self._of(evolve(more, microbatch=np.concatenate(microbatches)), times)

    def _moved(self, times: int) -> Columns:
        """The columns, where what is done in a run after its first time is for microbatches that
        many periods later.
        """
        columns = self.schedule.columns
        names = op_names(len(self.schedule.placement), columns)
        # By the name of an op: the row in its run from which on that is so.
        begin = np.full(names.max(initial=0) + 1, len(columns))
        for first, length, _ in self.runs:
            begin[names[first : first + length]] = first + length
        later = times * self.units[columns.stage]
        is_later = np.arange(len(columns)) >= begin[names]
        return evolve(
            columns, microbatch=columns.microbatch + np.where(is_later, later, 0)
        )

    def _of(self, columns: Columns, times: int) -> Schedule:
        layout = self.schedule.layout
        pipelines = tuple(
            evolve(pipeline, microbatches=pipeline.microbatches + times * period)
            for pipeline, period in zip(layout.pipelines, self.periods, strict=True)
        )
        ranks = actions_of(len(self.schedule.ranks), columns)
        return evolve(
            self.schedule,
            layout=evolve(layout, pipelines=pipelines),
            ranks=ranks,
            slots=None,
        )


def find_repeats(
    schedule: Schedule, periods: tuple[int, ...], starts: Floats | None = None
) -> Repeats | None:
    """What a schedule of ops repeats every so many microbatches of each pipeline; None where some
    op is in no run.

    Of the runs of an op the longest in rows a period is taken, since it leaves the fewest ops to
    others; of these the one that is repeated most often. Or where the ops have `starts`, the one
    that is next to the time at which most runs of that length go on.
    """
    columns = schedule.columns
    names = op_names(len(schedule.placement), columns)
    units = _units(schedule, periods)[columns.stage]
    # Ops without a microbatch, which are optimizer steps, are never repeated.
    counts = counts_of(names, columns.microbatch >= 0, ROWS * len(schedule.placement))
    is_open = counts > 0
    runs = list[Run]()

    def can_take(run: Run) -> bool:
        """Whether all ops of a run are in no other one yet."""
        # Mostly the first op tells, where another run has them.
        body = names[run.first : run.first + run.length]
        return bool(is_open[body[0]] and is_open[body].all())

    for _, group in groupby(_runs(columns, names, units), key=lambda run: run.length):
        alike = filter(can_take, group)
        if starts is not None:
            alike = filter(can_take, _in_turn(list(alike), starts))
        # Each is asked for once those before it are taken.
        for run in alike:
            is_open[names[run.first : run.first + run.length]] = False
            runs.append(run)
    return (
        None if is_open.any() or not runs else Repeats(schedule, periods, tuple(runs))
    )


def _units(schedule: Schedule, periods: tuple[int, ...]) -> Ints:
    """`Repeats.units` of some periods."""
    layout = schedule.layout
    stages = [pipeline.stop - pipeline.start for pipeline in layout.pipelines]
    return repeated(np.array(periods) * layout.slices, stages)


def _in_turn(runs: list[Run], starts: Floats) -> list[Run]:
    """Runs of one length, where the ops have `starts`, in the order in which they are to be
    taken.
    """
    if len(runs) < 2:
        return runs
    first, length, times = np.array(runs).T
    begin = starts[first]
    end = starts[first + length * times - 1]
    is_there = (begin[:, np.newaxis] <= begin) & (begin <= end[:, np.newaxis])
    most = np.argmax(is_there.sum(axis=0))
    # The middle of that time, since some rank may come to repeat itself only a little later.
    common = (begin[most] + end[is_there[:, most]].min()) / 2
    away = np.maximum(np.maximum(begin - common, common - end), 0)
    return [runs[index] for index in np.lexsort((-times, away))]


def _runs(columns: Columns, names: Ints, units: Ints) -> Iterator[Run]:
    """All runs of a schedule in which each op is there for a whole period, the longest first, and
    of these the one that is repeated most often; of each row the `units` that are a period of its
    pipeline.
    """
    rows = np.arange(len(columns))
    has_unit = columns.microbatch >= 0
    stride = int(columns.microbatch.max(initial=0) + 1 + units.max(initial=0))
    keys = names * stride + columns.microbatch
    row_of = np.full(int(names.max(initial=0) + 1) * stride, -1)
    row_of[keys[has_unit]] = rows[has_unit]
    # How many rows later the op is there again, in a batch like this; 0 where it is not.
    again = np.where(has_unit, row_of[np.where(has_unit, keys + units, 0)], -1)
    in_batch = columns.batch != rows
    is_again = (again >= 0) & (in_batch == in_batch[again])
    # How many ops of its kind and stage there are before it comes again: those of a whole period.
    nth = np.empty(len(rows), np.int64)
    by_name = np.argsort(names, kind="stable")
    nth[by_name] = rows
    is_again &= nth[again] - nth == units
    distance = np.where(is_again, again - rows, 0)
    is_new = np.diff(distance, prepend=-1) != 0
    is_new |= np.diff(columns.rank, prepend=-1) != 0
    first = np.flatnonzero(is_new)
    length = distance[first]
    size = np.diff(first, append=len(rows))
    is_run = (length > 0) & (size >= length)
    first = first[is_run]
    length = length[is_run]
    times = size[is_run] // length + 1
    order = np.lexsort((-times, -length))
    return map(Run._make, np.column_stack([first, length, times])[order].tolist())
