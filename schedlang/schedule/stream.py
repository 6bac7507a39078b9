"""Schedules without a flush: what each rank does before, in, and after the updates, for any number
of them.

A program gives the ops before the first update (`warmup`) and those of one update (`steady`), with
microbatches counted from the update's first; a number beyond its microbatches belongs to a later
update. The drain follows: it is the same list without the microbatches of updates that do not come.
"""

from typing import TypeVar

from attrs import evolve

from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Kernel, Schedule

S = TypeVar("S", bound=Schedule)
Row = tuple[int, int, int, int, int]


def unroll(schedule: Schedule, updates: int) -> Schedule:
    """The schedule of a stream for some number of updates, as one list per rank."""
    assert schedule.stream is not None
    layout = _for_updates(schedule.layout, updates)
    ranks = []
    for warmup, steady in zip(schedule.stream.warmup, schedule.stream.steady, strict=True):
        actions = Actions()
        steps = (row for update in range(updates) for row in later(rows(steady), update, layout))
        for row in [*rows(warmup), *steps]:
            if row[0] == Kind.U or row[2] < layout.units(row[1]):
                actions.add(*row)
        ranks.append(actions)
    return evolve(schedule, layout=layout, ranks=tuple(ranks), stream=None)


def repeat(schedule: S, kernels: tuple[Kernel, ...], times: int) -> S:
    """The schedule with the repeating part of every rank some more times."""
    ranks = []
    for actions, kernel in zip(schedule.ranks, kernels, strict=True):
        shown = rows(actions)
        longer = Actions()
        body = shown[kernel.start : kernel.stop]
        parts = [
            shown[: kernel.stop],
            *(later(body, more, schedule.layout) for more in range(1, times + 1)),
        ]
        for row in [
            *(row for part in parts for row in part),
            *later(shown[kernel.stop :], times, schedule.layout),
        ]:
            longer.add(*row)
        ranks.append(longer)
    return evolve(
        schedule,
        layout=_for_updates(schedule.layout, schedule.layout.updates + times),
        ranks=tuple(ranks),
    )


def _for_updates(layout: Layout, updates: int) -> Layout:
    pipelines = tuple(
        evolve(pipeline, microbatches=pipeline.microbatches // layout.updates * updates)
        for pipeline in layout.pipelines
    )
    return evolve(layout, pipelines=pipelines, updates=updates)


def rows(actions: Actions) -> list[Row]:
    """The actions of a rank, one by one."""
    return [actions.row(index) for index in range(len(actions))]


def later(rows: list[Row], updates: int, layout: Layout) -> list[Row]:
    """Rows of some updates later."""
    found = []
    for kind, number, microbatch, place, group in rows:
        step = (
            1 if kind == Kind.U else layout.units(layout.stage_of(kind, number)) // layout.updates
        )
        found.append((kind, number, microbatch + updates * step, place, group))
    return found
