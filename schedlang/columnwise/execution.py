"""Runs a schedule without data; see `schedlang.machine`."""

import numpy as np

from schedlang.columnwise.columns import columns_of
from schedlang.columnwise.messages import all_meet
from schedlang.columnwise.order import is_in_order, places
from schedlang.columnwise.structure import has_all_work
from schedlang.columnwise.times import Floats, Ops, begins, messages, ops_of
from schedlang.costs import Costs
from schedlang.schedule import Schedule
from schedlang.timeline import Bars, Timeline
from schedlang.transports import GLOO, Transport


def timeline(schedule: Schedule, costs: Costs, transport: Transport, ideal: bool) -> Timeline | None:
    """The times of a schedule with communication that is right; None if it is not known to be, or its times are not.

    Times are known where no transfer waits for another: ideally, and on gloo.
    """
    columns = columns_of(schedule)
    if columns is None or not (ideal or transport == GLOO) or not has_all_work(columns):
        return None
    ops, at = ops_of(columns, costs), places(columns)
    if ops is None or not is_in_order(columns, at, received=True) or not all_meet(columns, at):
        return None
    starts = begins(ops, messages(ops, at, costs, from_sends=not ideal))
    return None if starts is None else _timeline(ops, starts)


def _timeline(ops: Ops, starts: Floats) -> Timeline:
    columns = ops.columns
    end = starts[ops.batch] + ops.after
    start, (second,) = starts[ops.batch], np.nonzero(np.diff(ops.batch, prepend=-1) == 0)
    start[second] = end[second - 1]
    ranks = len(columns.schedule.ranks)
    ends = np.searchsorted(columns.rank[ops.op], np.arange(ranks), "right").tolist()
    found = []
    for first, stop in zip([0, *ends], ends, strict=False):
        bars, mine = Bars(), ops.op[first:stop]
        for target, column in (
            (bars.kind, columns.kind[mine]), (bars.stage, columns.stage[mine]),
            (bars.microbatch, columns.microbatch[mine]), (bars.start, start[first:stop]), (bars.end, end[first:stop]),
        ):  # fmt: skip
            target.frombytes(column.astype(target.typecode).tobytes())
        found.append(bars)
    return Timeline(tuple(found), tuple(Bars() for _ in range(ranks)))
