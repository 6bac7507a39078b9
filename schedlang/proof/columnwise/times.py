"""When do the ops run, if each starts as soon as its rank is free and what it needs is there? See
`schedlang.proof.machine`.

What an op needs of its own rank is there before it, so only what other ranks make is waited for:
one message for each op, so two for ops that overlap in pairs.
"""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from schedlang.proof.columnwise.columns import Columns, Ints, is_any
from schedlang.proof.columnwise.order import At
from schedlang.proof.columnwise.stages import neighbours
from schedlang.schedule.costs import Costs, Durations
from schedlang.schedule.kinds import Kind

Floats = NDArray[np.float64]


@frozen(eq=False)
class Ops:
    """The compute ops among the actions of a schedule, and the batches that they are issued in.

    Item i of `op` is the action of op i; its batch is `batch[i]`, in which it ends `after` the
    batch's start. Of a batch, `rank` is where it runs and `total` how long it takes.
    """

    columns: Columns
    op: Ints
    batch: Ints
    after: Floats
    rank: Ints
    total: Floats

    @property
    def first(self) -> Ints:
        """The first op of each batch."""
        return np.flatnonzero(np.diff(self.batch, prepend=-1))


def ops_of(columns: Columns, costs: Costs) -> Ops | None:
    """The compute ops of a schedule; None if more than two overlap, or there are copies to the
    host.
    """
    op = np.flatnonzero(columns.kind < Kind.SEND_F)
    first = columns.batch[op] == op
    batch = np.cumsum(first) - 1
    second = ~first
    if (second[1:] & second[:-1]).any() or len(columns.where(Kind.OFFLOAD, Kind.RELOAD)):
        return None
    durations = costs.durations(len(columns.schedule.placement))
    table = np.array([durations[kind] for kind in Kind if kind < Kind.SEND_F], np.float64)
    after = table[columns.kind[op] - 1, columns.stage[op]]
    (later,) = np.nonzero(second)
    ends, pair = _ends_of_pairs(columns, op[later - 1], op[later], durations)
    after[later - 1], after[later] = ends[pair].T
    last = np.flatnonzero(np.diff(batch, append=len(batch)))
    return Ops(columns, op, batch, after, columns.rank[op[last]], after[last])


def _ends_of_pairs(
    columns: Columns, one: Ints, other: Ints, durations: Durations
) -> tuple[Floats, Ints]:
    """When ops that overlap end, from their start, for each pair of kinds and stages that there is;
    and which it is.
    """
    stages = len(columns.schedule.placement)
    first, second = (
        columns.kind[each] * np.int64(stages) + columns.stage[each] for each in (one, other)
    )
    kinds = stages * (max(Kind) + 1)
    found, pair = np.unique(first * kinds + second, return_inverse=True)
    words = [[divmod(word, stages) for word in divmod(code, kinds)] for code in found.tolist()]
    return np.array(list(map(durations.ends, words)), np.float64).reshape(-1, 2), pair


@frozen(eq=False)
class Messages:
    """For each op, the batch whose message it waits for, or -1; when that is given, from the
    batch's start; its way.
    """

    maker: Ints
    given: Floats
    latency: Floats


def messages(ops: Ops, at: At, costs: Costs | None, from_sends: bool) -> Messages:
    """The messages that ops wait for, given as the batch that makes them ends; or if `from_sends`,
    as they are sent.

    Where nothing is sent, that is at the end of the maker's batch. Without costs, their way takes
    no time.
    """
    columns = ops.columns
    near = neighbours(ops.columns.schedule.layout)
    kind = columns.kind[ops.op]
    stage = columns.stage[ops.op]
    slot = columns.slot[ops.op]
    maker = np.full(len(ops.op), -1, np.int32)
    latency = np.zeros(len(ops.op))
    sender = maker.copy()
    for kinds, far, step, made, send in (
        ((Kind.F,), near.far_before, -1, Kind.F, Kind.SEND_F),
        ((Kind.B, Kind.I), near.far_after, 1, Kind.B, Kind.SEND_B),
    ):
        waits = is_any(kind, *kinds) & far[stage]
        source = slot[waits] + step * columns.stride
        maker[waits] = at[made][source]
        sender[waits] = at[send][source]
        if costs is not None:
            latency[waits] = _latencies(columns, costs, made, step)[stage[waits]]
    waits = maker >= 0
    index = np.searchsorted(ops.op, maker[waits])
    given = np.zeros(len(ops.op))
    if from_sends:
        sent = np.where(sender[waits] >= 0, sender[waits], maker[waits])
        index = np.maximum(index, np.searchsorted(ops.op, sent, "right") - 1)
    maker[waits] = ops.batch[index]
    given[waits] = ops.total[maker[waits]]
    return Messages(maker, given, latency)


def _latencies(columns: Columns, costs: Costs, made: Kind, step: int) -> Floats:
    """How long a message to each stage takes from the one before, or after."""
    placement = columns.schedule.placement
    transfers = costs.transfers(len(placement))
    found = np.zeros(len(placement))
    for stage, rank in enumerate(placement):
        source = stage + step
        if 0 <= source < len(placement):
            found[stage] = transfers.time(made, min(source, stage), placement[source], rank)
    return found


def begins(ops: Ops, waits: Messages) -> Floats | None:
    """When each batch starts; None if some wait for ever."""
    first = ops.first
    bounds = np.searchsorted(ops.rank, np.arange(len(ops.columns.schedule.ranks) + 1))
    (second,) = np.nonzero((np.diff(ops.batch, prepend=-1) == 0) & (waits.maker >= 0))
    floats = (
        waits.given[first],
        waits.latency[first],
        ops.total,
        waits.given[second],
        waits.latency[second],
    )
    whole = waits.maker[first], waits.maker[second], ops.batch[second], bounds
    return _begins(
        *(column.tobytes() for column in floats),
        *(column.astype(np.int64).tobytes() for column in whole),
    )


# The lowering of a schedule, its proof and its simulation ask for the same times.
@lru_cache(1)
def _begins(
    given: bytes,
    latency: bytes,
    total: bytes,
    second_given: bytes,
    second_latency: bytes,
    maker: bytes,
    second_maker: bytes,
    second_batch: bytes,
    bounds: bytes,
) -> Floats | None:
    """`begins`, of columns over the batches; of what second ops wait for; and of where ranks begin,
    and the end.
    """
    columns = _integers(maker), _floats(given), _floats(latency), _floats(total)
    wanted = zip(
        _integers(second_maker), _floats(second_given), _floats(second_latency), strict=True
    )
    seconds = dict(zip(_integers(second_batch), wanted, strict=True))
    rows = [
        zip(range(begin, end), *(column[begin:end] for column in columns), strict=True)
        for begin, end in pairwise(_integers(bounds))
    ]
    found = array("d", [-1.0]) * len(columns[0])
    return np.frombuffer(found) if _walk(rows, seconds, found) else None


_Row = tuple[int, int, float, float, float]


def _walk(
    rows: Sequence[Iterator[_Row]],
    seconds: Mapping[int, tuple[int, float, float]],
    found: "array[float]",
) -> bool:
    """Find when each batch starts; whether none waits for ever. Each rank goes on until it has to
    wait.

    `rows` has for each rank its batches: their numbers, what they wait for, and how long they take.
    """
    #: The batch that each rank goes on with, and when it is free for it.
    next_row = [next(each, None) for each in rows]
    clock = [0.0] * len(rows)
    waiting: dict[int, list[int]] = {}
    ready = list(range(len(rows)))
    while ready:
        rank = ready.pop()
        row = next_row[rank]
        now = clock[rank]
        while row is not None:
            batch, made, given, latency, total = row
            if made >= 0:
                if found[made] < 0:
                    waiting.setdefault(made, []).append(rank)
                    break
                there = found[made] + given + latency
                if there > now:
                    now = there
            if batch in seconds:
                made, given, latency = seconds[batch]
                if found[made] < 0:
                    waiting.setdefault(made, []).append(rank)
                    break
                now = max(now, found[made] + given + latency)
            found[batch] = now
            now += total
            if batch in waiting:
                ready += waiting.pop(batch)
            row = next(rows[rank], None)
        next_row[rank] = row
        clock[rank] = now
    return not waiting


def _integers(column: bytes) -> "memoryview[int]":
    return memoryview(column).cast("q")


def _floats(column: bytes) -> "memoryview[float]":
    return memoryview(column).cast("d")
