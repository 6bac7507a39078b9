"""The calls of a building block → the actions of its ranks, each at its slot: all repeats at once.

A block is written once, and repeated every so many slots, for the next microbatches each time. Each
rank does its ops in the order of their slots.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np
from attrs import frozen

from schedlang.language.declarations import Declarations
from schedlang.language.faults import Fault
from schedlang.language.scopes import LARGEST
from schedlang.language.sites import Sites
from schedlang.language.wrong_calls import wrong_microbatch, wrong_slice, wrong_stage
from schedlang.schedule.actions import Actions
from schedlang.schedule.arrays import Ints, members, repeated
from schedlang.schedule.columns import SLOTS, Columns, actions_of
from schedlang.schedule.frozen import NOTHING, runs_as
from schedlang.schedule.layout import Layout
from schedlang.schedule.naming import Names
from schedlang.schedule.schedule import Slots


@frozen(eq=False)
class Drawing:
    """The ops of a building block as columns, in the order of their calls.

    `slot` counts from the begin of the op's `repeat`. `call` is the number of its call within the
    repeat.
    """

    # The block `F(0, m) at 0  I(0, m) at 3`, every 2 slots:
    #
    #     slot       0   1   2   3   4   5   6   7
    #     repeat 0   F0          I0
    #     repeat 1           F1          I1
    #     repeat 2                   F2          I2
    layout: Layout
    columns: Columns
    slot: Ints
    repeat: Ints
    call: Ints

    def actions(
        self, ranks: int, offsets: list[int]
    ) -> tuple[Sequence[Actions], Slots]:
        """The actions of each rank, and their slots, if each repeat begins at an offset. A Fault if
        two ops of a rank have one slot.
        """
        columns = self.columns
        last = int(self.slot.max(initial=0)) + max(offsets, default=0)
        if last > LARGEST:
            row = int(self.slot.argmax())
            message = "a slot beyond 10^18"
            raise Fault("too-large", message, int(columns.source[row]))
        slot = self.slot + np.array(offsets, np.int64)[self.repeat]
        takes = SLOTS[columns.kind]
        # What takes no time comes first in its slot.
        order = np.lexsort((takes > 0, slot, columns.rank))
        drawn = columns.taken(order)
        slot = slot[order]
        end = slot + takes[order]
        collides = (slot[1:] < end[:-1]) & (drawn.rank[1:] == drawn.rank[:-1])
        if collides.any():
            row = int(collides.argmax()) + 1
            raise self.collision(drawn, row, int(slot[row]), int(end[row - 1]))
        bounds = np.searchsorted(drawn.rank, np.arange(ranks + 1))
        slots = tuple(
            tuple(slot[begin:stop].tolist()) for begin, stop in pairwise(bounds)
        )
        return actions_of(ranks, drawn), slots

    def collision(self, drawn: Columns, row: int, slot: int, end: int) -> Fault:
        """The fault for an op whose slot is taken by the op before it, which ends before `end`."""
        here = slice(row - 1, row + 1)
        ops = (drawn.kind[here], drawn.stage[here], drawn.microbatch[here])
        earlier, later = map(
            Names(self.layout).action, *(column.tolist() for column in ops)
        )
        before = f"`{earlier}`, until slot {end - 1}"
        after = f"`{later}`, from slot {slot}"
        other, location = drawn.source[here].tolist()
        if other == location:
            # Two repeats of the block want the slot for the same op.
            labels = {location: f"{before}; {after}"}
        else:
            labels = {location: after, other: before}
        message = f"`{earlier}` and `{later}` collide on rank {drawn.rank[row]} in slot {slot}"
        return Fault("collision", message, location, labels=labels)

    def least_interval(self) -> int | None:
        """The least interval at which no two ops of a rank have one slot; None if two of one repeat
        do.
        """
        # Each slot that an op takes, with its repeat and its rank.
        takes = SLOTS[self.columns.kind]
        # An op that takes several slots has a row for each of them:
        #
        #     takes   1   3             op     0   1   1   1
        #     slot    0   4             slot   0   4   5   6
        op = repeated(np.arange(len(takes)), takes)
        slot = self.slot[op] + np.arange(len(op)) - (np.cumsum(takes) - takes)[op]
        are_apart = partial(_are_apart, self.columns.rank[op], slot, self.repeat[op])
        # At this interval a repeat begins when the one before it is over: only ops of one repeat
        # can collide then.
        longest = 1 + int(slot.max(initial=0))
        if not are_apart(longest):
            return None
        return next(filter(are_apart, range(1, longest)), longest)


def _are_apart(rank: Ints, slot: Ints, repeat: Ints, interval: int) -> bool:
    """Whether no two ops of a rank have one slot, if the block repeats at an interval."""
    moved = repeat * np.int64(interval) + slot
    # Slot and rank as one number, so that equal pairs are equal numbers.
    taken = moved * (rank.max(initial=0) + 1) + rank
    return len(np.unique(taken)) == len(taken)


def run_block(
    declared: Declarations, layout: Layout
) -> tuple[Sequence[Actions], Slots]:
    """Repeat a building block until all microbatches have passed."""
    ranks = len(declared.every_rank())
    repeats = declared.repeats(layout)
    calls: list[int] = []
    counts: list[int] = []
    end: Fault | None = None
    for repeat in repeats:
        before = len(calls)
        try:
            declared.names["program"](*repeat.microbatches, calls.extend)
        except Fault as fault:
            end = fault
        counts.append((len(calls) - before) // (declared.sites.width + 1))
        if end:
            break
    # What is wrong with a call comes before what ended the run.
    drawing = draw(layout, declared.sites, calls, counts)
    if end:
        raise end
    try:
        return drawing.actions(ranks, [repeat.offset for repeat in repeats])
    except Fault as fault:
        # A search for what would help, so only where it is needed.
        if fault.code == "collision":
            fault.help = _apart(drawing.least_interval())
        raise


def _apart(interval: int | None) -> str:
    """A help for a collision: the least interval without one."""
    if interval is None:
        return "both are in one repeat of the block, at any interval: move one to another slot"
    return f"`every {interval}` is the least interval without a collision, with these slots"


def draw(layout: Layout, sites: Sites, calls: list[int], repeats: list[int]) -> Drawing:
    """The ops that a building block calls; a Fault for the first wrong call.

    A call is a location, a stage, a microbatch, a slice where there are any, and a slot. `repeats`
    has the number of calls in each repeat. In the last repeats, calls of microbatches that a
    pipeline does not have are left out.
    """
    width = sites.width + 1
    try:
        table = np.array(calls, np.int64)
    except OverflowError:
        # What does not fit into a column is wrong anyway.
        table = np.array(
            [min(max(number, -LARGEST), LARGEST) for number in calls], np.int64
        )
    source, stage, microbatch, *slices, slot = table.reshape(-1, width).T
    stages = len(layout.placement)
    is_stage = (stage >= 0) & (stage < stages)
    units = np.array(
        [pipeline.microbatches for pipeline in layout.pipeline_of], np.int64
    )
    is_there = microbatch < units[np.where(is_stage, stage, 0)]
    is_unit = microbatch >= 0
    for number in slices:
        is_unit &= (number >= 0) & (number < layout.slices)
        microbatch = microbatch * layout.slices + number
    wrong = np.flatnonzero((slot < 0) | ~is_stage | (is_there & ~is_unit))
    if len(wrong):
        first = int(wrong[0]) * width
        raise _wrong_call(layout, sites, calls[first : first + width])

    # A table from locations to kinds, to look all of them up at once.
    kinds = np.zeros(max(sites.kinds, default=0) + 1, np.int8)
    kinds[list(sites.kinds)] = list(sites.kinds.values())
    kind = kinds[source]
    if layout.frozen:
        kind = runs_as(layout)[kind, stage].astype(np.int8)
        is_there &= kind != NOTHING
    columns = Columns(
        kind=kind,
        stage=stage,
        microbatch=microbatch,
        group=np.zeros(len(source), np.int32),
        source=source,
        rank=np.array(layout.placement, np.int32)[stage],
        first=np.zeros(1, np.int64),
    )
    repeat, call = members(np.array(repeats, np.int64), np.arange(len(repeats)))
    # `members` numbers them through all repeats; here each repeat counts from 0.
    call -= repeated(np.cumsum(repeats) - repeats, repeats)
    there = np.flatnonzero(is_there)
    return Drawing(
        layout, columns.taken(there), slot[there], repeat[there], call[there]
    )


def _wrong_call(layout: Layout, sites: Sites, call: list[int]) -> Fault:
    """What is wrong with a call."""
    location, stage, microbatch, *slices, slot = call
    op = sites.ops[location].word
    if slot < 0:
        return Fault(
            "block", f"`{op}` at slot {slot}, a block's slots count from 0", location
        )
    if not 0 <= stage < len(layout.placement):
        return wrong_stage(layout, 0, op, stage, location)
    for number in slices:
        if not 0 <= number < layout.slices:
            return wrong_slice(layout, op, number, location)
        microbatch = microbatch * layout.slices + number
    return wrong_microbatch(layout, op, stage, microbatch, location)
