"""Orders for any n without what a schedule leaves out: what frozen stages do not do
(`schedlang.schedule.frozen`), and transfers.
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
    """The orders of a program as its stages run them, some of which are frozen."""
    if not layout.frozen:
        return orders
    table = runs_as(layout)

    def as_run(op: Op) -> Op | None:
        kind = int(table[op.kind, op.stage])
        return None if kind == NOTHING else evolve(op, kind=kind)

    return orders.changed(as_run)


def computing(orders: Orders, layout: Layout) -> Orders:
    """The orders without transfers, and without backwards that do nothing."""
    is_nothing = is_idle(layout)

    def works(op: Op) -> Op | None:
        return None if is_transfer(op.kind) or is_nothing[op.kind, op.stage] else op

    return orders.changed(works)


def only_computing(schedule: Schedule) -> Schedule:
    """The same of a schedule."""
    columns = schedule.columns
    if schedule.layout.frozen:
        columns = without_idle(columns, schedule.layout)
    kept = columns.taken(np.flatnonzero(~columns.is_transfer))
    if len(kept) == len(schedule.columns):
        return schedule
    return evolve(schedule, ranks=actions_of(len(schedule.ranks), kept))


def all_trained(schedule: Schedule) -> Schedule:
    """The schedule as though no stage were frozen: a backward that does nothing takes its time."""
    if not schedule.layout.frozen:
        return schedule
    return evolve(schedule, layout=evolve(schedule.layout, frozen=()))
