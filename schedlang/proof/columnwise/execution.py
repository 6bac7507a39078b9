"""Runs a schedule without data; see `schedlang.proof.machine`."""

import numpy as np

from schedlang.proof.columnwise.columns import columns_of
from schedlang.proof.columnwise.messages import all_meet
from schedlang.proof.columnwise.order import is_in_order, places
from schedlang.proof.columnwise.structure import has_all_work
from schedlang.proof.columnwise.times import Floats, Ops, begins, messages, ops_of
from schedlang.schedule.costs import Costs
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Bars, Timeline
from schedlang.schedule.transports import GLOO, Transport


def timeline(
    schedule: Schedule, costs: Costs, transport: Transport, ideal: bool
) -> Timeline | None:
    """The times of a schedule with communication that is right; None if it is not known to be, or
    its times are not.

    Times are known where no transfer waits for another: ideally, and on gloo.
    """
    columns = columns_of(schedule)
    if columns is None or not (ideal or transport == GLOO) or not has_all_work(columns):
        return None
    ops = ops_of(columns, costs)
    at = places(columns)
    if ops is None or not is_in_order(columns, at, received=True) or not all_meet(columns, at):
        return None
    starts = begins(ops, messages(ops, at, costs, from_sends=not ideal))
    return None if starts is None else _timeline(ops, starts)


def _timeline(ops: Ops, starts: Floats) -> Timeline:
    columns = ops.columns
    end = starts[ops.batch] + ops.after
    start = starts[ops.batch]
    (second,) = np.nonzero(np.diff(ops.batch, prepend=-1) == 0)
    start[second] = end[second - 1]
    ranks = len(columns.schedule.ranks)
    ends = np.searchsorted(columns.rank[ops.op], np.arange(ranks), "right").tolist()
    found = []
    for first, stop in zip([0, *ends], ends, strict=False):
        bars = Bars()
        mine = ops.op[first:stop]
        for target, column in (
            (bars.kind, columns.kind[mine]),
            (bars.stage, columns.stage[mine]),
            (bars.microbatch, columns.microbatch[mine]),
            (bars.start, start[first:stop]),
            (bars.end, end[first:stop]),
        ):
            target.frombytes(column.astype(target.typecode).tobytes())
        found.append(bars)
    return Timeline(tuple(found), tuple(Bars() for _ in range(ranks)))
