"""Find the runs of ops that a schedule repeats every few microbatches."""

from collections.abc import Iterator
from itertools import groupby

import numpy as np

from schedlang.schedule.arrays import Floats, Ints, counts_of
from schedlang.schedule.columns import Columns, op_names
from schedlang.schedule.kinds import ROWS, Kind
from schedlang.schedule.periods import Periods, Run, steps_of
from schedlang.schedule.schedule import Schedule


def find_periods(
    schedule: Schedule, microbatches: tuple[int, ...], starts: Floats | None = None
) -> Periods[Schedule] | None:
    """The periods of a schedule of ops, each of `microbatches` of each pipeline; None if some op is
    in no run.

    An op may be in several runs. The one with the longest period is taken, since it leaves the
    fewest ops to others; among equals, the one that is repeated most often. If ops have `starts`,
    the run is taken among equals that is nearest to the time at which most of them are going on.
    """
    columns = schedule.columns
    names = op_names(len(schedule.placement), columns)
    units = steps_of(schedule.layout, microbatches)[Kind.F, columns.stage]
    # Ops without a microbatch, which are optimizer steps, are never repeated.
    counts = counts_of(names, columns.microbatch >= 0, ROWS * len(schedule.placement))
    is_open = counts > 0
    runs = list[Run]()

    def can_take(run: Run) -> bool:
        """Whether no op of this run belongs to another one yet."""
        # If another run has taken them, the first op mostly shows it.
        body = names[run.first : run.first + run.length]
        return bool(is_open[body[0]] and is_open[body].all())

    for _, group in groupby(_runs(columns, names, units), key=lambda run: run.length):
        alike = filter(can_take, group)
        if starts is not None:
            alike = filter(can_take, _in_turn(list(alike), starts))
        # The filter is lazy: a run is checked after the runs before it were taken.
        for run in alike:
            is_open[names[run.first : run.first + run.length]] = False
            runs.append(run)
    if is_open.any() or not runs:
        return None
    # For each kind and stage: the row after the first repetition of its run.
    stops = np.full(len(is_open), len(columns))
    for first, length, _ in runs:
        stops[names[first : first + length]] = first + length
    behind = np.arange(len(columns)) >= stops[names]
    return Periods(schedule, microbatches, 0, tuple(runs), behind)


def _in_turn(runs: list[Run], starts: Floats) -> list[Run]:
    """Sort runs of one length, whose ops have `starts`: those that should be taken first come
    first.
    """
    if len(runs) < 2:
        return runs
    first, length, times = np.array(runs).T
    begin = starts[first]
    end = starts[first + length * times - 1]
    is_there = (begin[:, np.newaxis] <= begin) & (begin <= end[:, np.newaxis])
    most = np.argmax(is_there.sum(axis=0))
    # The middle of that time, since some rank may begin to repeat itself a little later.
    common = (begin[most] + end[is_there[:, most]].min()) / 2
    away = np.maximum(np.maximum(begin - common, common - end), 0)
    return [runs[index] for index in np.lexsort((-times, away))]


def _runs(columns: Columns, names: Ints, units: Ints) -> Iterator[Run]:
    """All runs of a schedule, the longest first, and among equals the one that is repeated most
    often. Within a run each kind and stage has the ops of a whole period: for each row, `units` is
    the number of these.
    """
    rows = np.arange(len(columns))
    has_unit = columns.microbatch >= 0
    stride = int(columns.microbatch.max(initial=0) + 1 + units.max(initial=0))
    keys = names * stride + columns.microbatch
    row_of = np.full(int(names.max(initial=0) + 1) * stride, -1)
    row_of[keys[has_unit]] = rows[has_unit]
    # The distance in rows to the same op one period later, if its batch is alike; otherwise 0.
    again = np.where(has_unit, row_of[np.where(has_unit, keys + units, 0)], -1)
    in_batch = columns.batch != rows
    is_again = (again >= 0) & (in_batch == in_batch[again])
    # Until then the rank must have run as many ops of this kind and stage as a period has.
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
