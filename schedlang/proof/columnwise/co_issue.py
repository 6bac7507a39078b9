"""Sends and receives in the order of one global execution; see `schedlang.lowering.co_issue`, which
says why.

The moments of that execution are known once its times are: a message is sent, and received, as the
batch that makes it ends, of several at one time in a fixed order; and an op starts after all that
ends up to its start. So each rank's actions are its ops and transfers, sorted by their moments.
"""

import numpy as np

from schedlang.proof.columnwise.columns import Columns, Ints, actions_of, columns_of, is_any
from schedlang.proof.columnwise.order import is_in_order, places
from schedlang.proof.columnwise.stages import neighbours
from schedlang.proof.columnwise.structure import has_all_work
from schedlang.proof.columnwise.times import begins, messages, ops_of
from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule


def co_issued(schedule: Schedule) -> tuple[Actions, ...] | None:
    """The actions of all ranks with their communication; None if the ops cannot run, or are
    unusual.
    """
    columns = columns_of(schedule)
    if columns is None or not has_all_work(columns):
        return None
    ops = ops_of(columns, schedule.costs)
    at = places(columns)
    if ops is None or not is_in_order(columns, at, received=False):
        return None
    starts = begins(ops, messages(ops, at, None, from_sends=True))
    if starts is None:
        return None
    makers = _makers(columns)
    if (ops.total[ops.batch[makers]] == 0).any():
        return None
    ends = starts + ops.total
    # Of ops that end together, those hand over first whose ranks have done less.
    done = (columns.batch - np.searchsorted(columns.rank, columns.rank))[ops.op]
    turn = np.empty(len(ops.op), np.int32)
    turn[np.lexsort((columns.rank, done, ends[ops.batch]))] = np.arange(len(ops.op))
    starting = (2 * np.searchsorted(np.sort(ends[ops.batch]), starts, "right") - 1).astype(
        np.int32
    )[ops.batch]
    return _sorted(columns, makers, starting, 2 * turn)


def _makers(columns: Columns) -> Ints:
    """The ops that make a message for another rank."""
    near = neighbours(columns.schedule.layout)
    forward = is_any(columns.kind, Kind.F) & near.far_after[columns.stage]
    backward = is_any(columns.kind, Kind.B, Kind.I) & near.far_before[columns.stage]
    return np.flatnonzero(forward | backward)


def _sorted(columns: Columns, makers: Ints, starting: Ints, turn: Ints) -> tuple[Actions, ...]:
    """The ops, each at the moment that it starts, and their messages, each at the moment of its
    maker's turn.
    """
    forward = columns.kind[makers] == Kind.F
    stage = columns.stage[makers]
    receiver = stage + np.where(forward, np.int32(1), np.int32(-1))
    peer = np.array(columns.schedule.placement, np.int32)[receiver]
    rank = np.concatenate([columns.rank, columns.rank[makers], peer])
    moment = np.concatenate([starting, turn[makers], turn[makers]])
    order = np.argsort(rank * np.int64(2 * len(columns.kind) + 2) + moment, kind="stable")
    nothing = np.zeros(len(makers), np.int8)
    sends = np.where(forward, np.int8(Kind.SEND_F), np.int8(Kind.SEND_B))
    receives = np.where(forward, np.int8(Kind.RECV_F), np.int8(Kind.RECV_B))
    rows = {
        "kind": (columns.kind, sends, receives),
        "stage": (columns.stage, stage, receiver),
        "microbatch": (columns.microbatch, columns.microbatch[makers], columns.microbatch[makers]),
        "source": (columns.source, columns.source[makers], columns.source[makers]),
        "group": (columns.group, nothing, nothing),
    }
    found = {name: np.concatenate(parts)[order] for name, parts in rows.items()}
    return actions_of(len(columns.schedule.ranks), rank[order], **found)
