"""What is behind waits: who a rank waits for may itself wait, so the chain is followed to what
runs, or moves.

All waits are followed at once: in each round, those that are still open take one step along their
chains.
"""

from enum import IntEnum
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from schedlang.report.bubbles.op_waits import NOTHING, Waits
from schedlang.schedule.arrays import Flags, Floats, Ints, members


class Why(IntEnum):
    """What is behind a wait: an op or a copy that runs; or its result is on its way, as a transfer,
    or held back by the transport; or ranks sum, gather or exchange something.
    """

    OP, COPY, TRANSFER, TRANSPORT, COLLECTIVE = range(5)


#: The reasons that are communication.
_EXPOSED = (Why.TRANSFER, Why.TRANSPORT, Why.COLLECTIVE)


@frozen(eq=False)
class Gaps:
    """Times in which ranks wait, as columns: rank `rank[i]` with its step `index[i]`, or with the
    end of all.
    """

    rank: Ints
    index: Ints
    start: Floats
    end: Floats

    def __len__(self) -> int:
        return len(self.rank)


@frozen(eq=False)
class Reasons:
    """What is behind waits, as columns: a part of the gap `gap[i]`, and the number of a step.

    The step runs; or its result is on its way to another rank, `receiver[i]`.
    """

    why: Ints
    gap: Ints
    start: Floats
    end: Floats
    step: Ints
    receiver: Ints

    @property
    def exposed(self) -> float:
        """The idle time behind which there is communication: a transfer on its way or held back, or
        a sum or a gather.
        """
        is_exposed = np.isin(self.why, _EXPOSED)
        return float((self.end - self.start)[is_exposed].sum())


def all_gaps(waits: Waits) -> Gaps:
    """All times in which ranks wait."""
    of_ranks = [waits.gaps(rank) for rank in range(len(waits.schedule.ranks))]
    ranks = np.repeat(np.arange(len(of_ranks)), [len(index) for index, *_ in of_ranks])
    return Gaps(
        ranks, *(np.concatenate(columns) for columns in zip(*of_ranks, strict=True))
    )


def reasons(waits: Waits, gaps: Gaps) -> Reasons:
    """What is behind the waits of ranks, in pieces."""
    pieces = _Pieces()
    open = _follow(waits, gaps, np.arange(len(gaps)), pieces)
    while len(open.gap):
        open = _follow(waits, open.gaps, open.gap, pieces)
    return pieces.reasons()


@frozen(eq=False)
class _Open:
    """Waits that are not yet followed, and of each the gap that it is behind."""

    gaps: Gaps
    gap: Ints


def _follow(waits: Waits, open: Gaps, gap: Ints, pieces: "_Pieces") -> _Open:
    """Take one step along the chains of some waits."""
    step = waits.first[open.rank] + open.index
    is_step = step < waits.first[open.rank + 1]
    step = np.where(is_step, step, waits.last)
    # For the end of all, every rank waits for the last step.
    maker = np.where(is_step, waits.maker[step], waits.last)
    arrival = waits.arrival[step]
    is_made = maker != NOTHING
    made = np.where(is_made, waits.ends[maker], 0.0)
    behind = np.where(is_made, maker, step)
    late = np.maximum(open.start, arrival)
    # For what is summed or gathered, it waits while that goes on.
    held_from = np.where(is_step, waits.held_from[step], made)
    held_to = np.where(is_step, waits.held_to[step], waits.makespan)
    begun = np.clip(held_from, late, open.end)
    over = np.clip(held_to, begun, open.end)
    # What is between the op that made it and the end of the wait; any of these may be empty:
    #
    #     made ─ transfer ─► arrival ─ transport ─► begun ─ collective ─► over ─ transport ─► end
    pieces.add(Why.TRANSPORT, is_step, gap, late, begun, behind, open.rank)
    since = np.where(is_step, begun, np.maximum(open.start, made))
    pieces.add(
        Why.COLLECTIVE, np.full(len(gap), True), gap, since, over, step, open.rank
    )
    pieces.add(Why.TRANSPORT, is_step, gap, over, open.end, behind, open.rank)
    sent = np.maximum(open.start, made)
    there = np.minimum(open.end, arrival)
    pieces.add(Why.TRANSFER, is_step & is_made, gap, sent, there, maker, open.rank)
    end = np.minimum(open.end, made)
    sender = waits.rank[maker]
    is_beside = is_made & (maker >= waits.first[-1])
    is_copy = is_beside & waits.schedule.columns.is_copy[waits.head[maker]]
    is_exchange = is_beside & ~is_copy
    pieces.add(Why.COPY, is_copy, gap, open.start, end, maker, sender)
    pieces.add(Why.COLLECTIVE, is_exchange, gap, open.start, end, maker, sender)
    # While the maker's rank was not there yet, it ran something, or waited in its turn.
    goes_on = np.flatnonzero(is_made & ~is_beside & (open.start < end))
    return _during(
        waits, sender[goes_on], open.start[goes_on], end[goes_on], gap[goes_on], pieces
    )


def _during(
    waits: Waits, rank: Ints, start: Floats, end: Floats, gap: Ints, pieces: "_Pieces"
) -> _Open:
    """What ranks do from some times to others: the steps that they run are pieces, and the waits
    in between are still open.
    """
    # From the step that runs at the start, or is the last one before it, to the first one after.
    before = waits.begun(rank, start, "right") - 1
    after = waits.begun(rank, end, "left")
    lengths = after - before + 1
    # One row for each wait and step that lies in its time, or borders on it:
    #
    #     lengths    2        3
    #     item       0   0    1   1   1       which wait
    #     nth        0   1    0   1   2       which of its steps
    item, place = members(lengths, np.arange(len(rank)))
    nth = place - (np.cumsum(lengths) - lengths)[item]
    rank = rank[item]
    start = start[item]
    end = end[item]
    gap = gap[item]
    step = before[item] + nth
    first = waits.first[rank]
    is_there = (step >= first) & (step < after[item])
    known = np.where(is_there, step, 0)
    begins = np.maximum(start, waits.starts[known])
    ends = np.minimum(end, waits.ends[known])
    pieces.add(Why.OP, is_there, gap, begins, ends, step, rank)
    # Before each of these steps but the first, from the end of the one before on.
    idle_from = np.where(step > first, np.maximum(start, waits.ends[step - 1]), start)
    idle_to = np.where(is_there, np.minimum(end, waits.starts[known]), end)
    rows = np.flatnonzero((nth > 0) & (idle_from < idle_to))
    still = Gaps(rank[rows], (step - first)[rows], idle_from[rows], idle_to[rows])
    return _Open(still, gap[rows])


@define
class _Pieces:
    """Parts of columns that are put together."""

    parts: list[tuple[NDArray[Any], ...]] = field(factory=list)

    def add(
        self,
        why: Why,
        is_there: Flags,
        gap: Ints,
        start: Floats,
        end: Floats,
        step: Ints,
        receiver: Ints,
    ) -> None:
        """Pieces for some reason, those that last at all."""
        rows = np.flatnonzero(is_there & (start < end))
        columns = gap, start, end, step, receiver
        self.parts.append(
            (np.full(len(rows), why), *(column[rows] for column in columns))
        )

    def reasons(self) -> Reasons:
        """All of them."""
        return Reasons(
            *(np.concatenate(columns) for columns in zip(*self.parts, strict=True))
        )
