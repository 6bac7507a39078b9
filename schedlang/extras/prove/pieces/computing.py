"""Orders and schedules without ops that do nothing: transfers, and what frozen stages skip
(`schedlang.schedule.frozen`).
"""

from __future__ import annotations

import numpy as np
from attrs import evolve

from schedlang.extras.prove.pieces.pieces import Op, Orders
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.columns import actions_of
from schedlang.schedule.frozen import NOTHING, is_idle, runs_as, without_idle
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Schedule


def in_use(orders: Orders, layout: Layout) -> Orders:
    """The orders as the stages run them: ops of frozen stages change their kind or vanish."""
    if not layout.frozen:
        return orders
    table = runs_as(layout)

    def as_run(op: Op) -> Op | None:
        kind = int(table[op.kind, op.stage])
        return None if kind == NOTHING else evolve(op, kind=kind)

    return orders.changed(as_run)


def computing(orders: Orders, layout: Layout) -> Orders:
    """The orders without transfers, and without backwards of frozen stages."""
    is_nothing = is_idle(layout)

    def works(op: Op) -> Op | None:
        return None if is_transfer(op.kind) or is_nothing[op.kind, op.stage] else op

    return orders.changed(works)


def only_computing(schedule: Schedule) -> Schedule:
    """The schedule without transfers, and without backwards of frozen stages."""
    columns = schedule.columns
    if schedule.layout.frozen:
        columns = without_idle(columns, schedule.layout)
    kept = columns.taken(np.flatnonzero(~columns.is_transfer))
    if len(kept) == len(schedule.columns):
        return schedule
    return evolve(schedule, ranks=actions_of(len(schedule.ranks), kept))


def all_trained(schedule: Schedule) -> Schedule:
    """The schedule with no stage frozen, so that every backward takes its time."""
    if not schedule.layout.frozen:
        return schedule
    return evolve(schedule, layout=evolve(schedule.layout, frozen=()))
