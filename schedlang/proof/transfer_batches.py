"""Batches: transfers that are issued as one."""

import numpy as np

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.schedule.arrays import Ints
from schedlang.schedule.columns import Columns
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.schedule import Schedule


def check_sizes(schedule: Schedule, most: float) -> None:
    """CompileError for batches of more transfers than a transport takes as one."""
    columns = schedule.columns
    is_head = columns.batch == np.arange(len(columns))
    is_too_large = is_head & columns.is_transfer & (columns.sizes > most)
    findings = []
    for row in np.flatnonzero(is_too_large).tolist():
        rank, index = columns.place(row)
        size = int(columns.sizes[row])
        message = (
            f"rank {rank} issues {size:,} transfers as one batch, "
            f"from `{schedule.name_of(rank, index)}` on; NCCL may hang with more than {most:g}"
        )
        help = "write several `overlap`, with the same transfers in each on both ranks"
        place = int(columns.source[row])
        findings.append(Finding("batch-size", message, rank, place, help=help))
    if findings:
        raise CompileError(diagnose(schedule, findings))


def share_moments(columns: Columns, sends: Ints, receives: Ints, when: Ints) -> bool:
    """Put the transfers of batches that exchange messages into one moment: `when` the last of these
    is handed over. Sends and receives are the two sides of each message.

    Whether the messages of a batch meet on every transport: both sides are of batches, in which
    those from one rank to another one have the same order.
    """
    is_batched = columns.sizes[sends] > 1
    if (is_batched != (columns.sizes[receives] > 1)).any():
        return False
    sends = sends[is_batched]
    receives = receives[is_batched]
    label = exchanging(columns, sends, receives)
    sides = np.concatenate([sends, receives])
    moment = label[columns.batch[sides]]
    last = np.zeros(len(columns), np.int64)
    np.maximum.at(last, moment, when[sides])
    when[sides] = last[moment]
    channel = (
        columns.rank[sends] * (columns.rank.max(initial=0) + np.int64(1))
        + columns.rank[receives]
    )
    sent, received = (np.lexsort((side, channel)) for side in (sends, receives))
    return np.array_equal(sent, received)


def exchanging(columns: Columns, rows: Ints, partners: Ints) -> Ints:
    """For each batch, by its first row, a number that it shares with those with which it exchanges
    messages, directly or through others: what the rows are one side of, and the partners the other.
    """
    # Each batch begins with its own first row as its number, and takes the lowest one among those
    # that it exchanges messages with, until no number changes any more.
    label = columns.batch.astype(np.int64)
    heads = columns.batch[rows]
    others = columns.batch[partners]
    while True:
        before = label.copy()
        np.minimum.at(label, heads, label[others])
        # A number's own batch may have got a lower one by now: this halves the way there.
        label = label[label]
        if (label == before).all():
            return label
