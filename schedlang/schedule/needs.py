"""What each action needs: the rules of pipeline training that depend on the layout.

What a kind of op needs whatever the layout, and what it makes, is in `schedlang.schedule.kinds`.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from attrs import frozen

from schedlang.schedule.actions import word
from schedlang.schedule.columns import Columns, Flags, Ints, is_any
from schedlang.schedule.kinds import MAKERS, OPS, RECEIVES, SENDS, Kind
from schedlang.schedule.layout import Layout

#: A kind, a stage or the number of a transfer, and a microbatch.
Op = tuple[int, int, int]

#: Rows that need something; what, by its kind, stage and microbatch; and the numbers under which a
#: transfer would bring it.
_Part = tuple[Ints, Kind, Ints, Ints, Ints]


@frozen(eq=False)
class Needs:
    """What the actions of a schedule need, one item of all columns for each action and each need.

    The action `user` needs what the action `maker` makes, of the kind `made` (see `Op.makes`), of a
    stage and microbatch. If that is made on another rank, the action `receive` brings it, and
    `number` is the number of its transfer; gradients of weights are summed instead. All are rows of
    the schedule's columns, or -1 where there is no such action.
    """

    user: Ints
    made: Ints
    stage: Ints
    microbatch: Ints
    number: Ints
    maker: Ints
    receive: Ints
    is_far: Flags

    @cached_property
    def is_sum(self) -> Flags:
        """Whether gradients of weights are needed that another rank makes."""
        return self.is_far & is_any(self.made, Kind.W)

    @cached_property
    def is_message(self) -> Flags:
        """Whether a message from another rank is needed."""
        return self.is_far & is_any(self.made, *RECEIVES)

    def word(self, item: int) -> str:
        """What is needed, as an action: the op that makes it, or the receive that brings it."""
        made = Kind(int(self.made[item]))
        microbatch = int(self.microbatch[item])
        if self.is_far[item] and made in RECEIVES:
            return word(RECEIVES[made], int(self.number[item]), microbatch)
        return word(made, int(self.stage[item]), microbatch)


def needs_of(layout: Layout, columns: Columns) -> Needs:
    """What all actions need; their stages and microbatches must exist."""
    rules = _Rules(layout, columns)
    parts = list(rules.all())
    user = np.concatenate([part[0] for part in parts])
    made = np.repeat([part[1] for part in parts], [len(part[0]) for part in parts]).astype(np.int8)
    stage, microbatch, number = (
        np.concatenate([part[column] for part in parts]).astype(np.int32) for column in (2, 3, 4)
    )
    placement = np.array(layout.placement, np.int32)
    is_far = placement[stage] != columns.rank[user]
    maker = np.full(len(user), -1, np.int32)
    receive = np.full(len(user), -1, np.int32)
    for kind in {part[1] for part in parts}:
        chosen = np.flatnonzero(made == kind)
        maker[chosen] = rules.made_at(kind)[rules.slot(stage[chosen], microbatch[chosen])]
        if kind in RECEIVES:
            chosen = chosen[is_far[chosen]]
            arrivals = rules.table(RECEIVES[kind])
            receive[chosen] = arrivals[rules.slot(number[chosen], microbatch[chosen])]
    return Needs(user, made, stage, microbatch, number, maker, receive, is_far)


class _Rules:
    """The rules, each for all actions of a kind at once."""

    def __init__(self, layout: Layout, columns: Columns) -> None:
        self.layout = layout
        self.columns = columns
        stages = len(layout.placement)
        #: How many microbatches, or slices of them, pass through each stage.
        self.units = np.array([layout.units(stage) for stage in range(stages)], np.int32)
        self.stride = int(self.units.max())
        self.slots = (stages + len(layout.skip_stages)) * self.stride
        self.tables: dict[tuple[Kind, ...], Ints] = {}

    def slot(self, number: Ints, microbatch: Ints) -> Ints:
        """Where the tables have a stage's, or a transfer's, microbatch."""
        return number * np.int64(self.stride) + microbatch

    def table(self, *kinds: Kind) -> Ints:
        """For each slot, the last action there of some kinds; -1 where there is none."""
        if kinds not in self.tables:
            rows = self.columns.where(*kinds)
            rows = rows[self.columns.microbatch[rows] < self.stride]
            found = np.full(self.slots, -1, np.int32)
            found[self.slot(self.columns.stage[rows], self.columns.microbatch[rows])] = rows
            self.tables[kinds] = found
        return self.tables[kinds]

    def made_at(self, made: Kind) -> Ints:
        """For each slot, the action that makes something of a kind."""
        return self.table(*MAKERS[made])

    def all(self) -> Iterator[_Part]:
        """What every action needs."""
        yield from self.forward()
        yield from self.backward()
        for kind, op in OPS.items():
            if op.follows is not None:
                yield self.own(Kind(kind), op.follows)
        yield from self.updates()
        for made, send in SENDS.items():
            rows = self.columns.where(send)
            numbers = self.columns.stage[rows]
            stages = self.stage_of(send)[numbers]
            yield rows, made, stages, self.columns.microbatch[rows], numbers

    def own(self, kind: Kind, made: Kind) -> _Part:
        """Ops of a kind need something of their own stage and microbatch."""
        rows = self.columns.where(kind)
        stage = self.columns.stage[rows]
        return rows, made, stage, self.columns.microbatch[rows], stage

    def neighbours(self, made: Kind) -> _Part:
        """To make an activation, ops need those of the stages before theirs; or to make a gradient
        those of the stages after.
        """
        others = self.layout.before if made == Kind.F else self.layout.after
        rows = self.columns.where(*MAKERS[made])
        stages = self.columns.stage[rows]
        counts = np.array([len(each) for each in others], np.int32)
        flat = [
            (other, self.layout.number(s, other)) for s, each in enumerate(others) for other in each
        ]
        other, number = np.array(flat, np.int32).reshape(-1, 2).T
        begins = np.cumsum(counts) - counts
        count = counts[stages]
        user = np.repeat(rows, count)
        # The first, second, … neighbour of each op's stage.
        nth = np.arange(len(user)) - np.repeat(np.cumsum(count) - count, count)
        item = np.repeat(begins[stages], count) + nth
        return user, made, other[item], self.columns.microbatch[user], number[item]

    def forward(self) -> Iterator[_Part]:
        """A forward needs the activations of the stages before; and of its own stage what attention
        keeps of the slice before (TeraPipe, section 3).
        """
        yield self.neighbours(Kind.F)
        if self.layout.slices > 1:
            rows = self.columns.where(Kind.F)
            rows = rows[self.columns.microbatch[rows] % self.layout.slices > 0]
            stage = self.columns.stage[rows]
            yield rows, Kind.F, stage, self.columns.microbatch[rows] - 1, stage

    def backward(self) -> Iterator[_Part]:
        """A backward needs its own activation, run again if it was dropped, or brought back; and
        the gradients of the stages after, and of the slice after.
        """
        rows = self.columns.where(*MAKERS[Kind.B])
        stage = self.columns.stage[rows]
        microbatch = self.columns.microbatch[rows]
        slots = self.slot(stage, microbatch)
        is_away = self.table(Kind.OFFLOAD)[slots] >= 0
        is_dropped = (self.table(Kind.R)[slots] >= 0) & ~is_away
        for made, chosen in (
            (Kind.F, ~is_away & ~is_dropped),
            (Kind.R, is_dropped),
            (Kind.RELOAD, is_away),
        ):
            yield rows[chosen], made, stage[chosen], microbatch[chosen], stage[chosen]
        yield self.neighbours(Kind.B)
        if self.layout.slices > 1:
            chosen = (microbatch + 1) % self.layout.slices > 0
            yield rows[chosen], Kind.B, stage[chosen], microbatch[chosen] + 1, stage[chosen]

    def updates(self) -> Iterator[_Part]:
        """An optimizer step needs all gradients of its stage and update, and those of replicas."""
        for row in self.columns.where(Kind.U).tolist():
            stage = int(self.columns.stage[row])
            update = max(int(self.columns.microbatch[row]), 0)
            for replica in self.layout.replicas(stage):
                units = self.layout.units(replica) // self.layout.updates
                microbatches = np.arange(update * units, (update + 1) * units, dtype=np.int32)
                rows = np.full(units, row, np.int32)
                stages = np.full(units, replica, np.int32)
                yield rows, Kind.W, stages, microbatches, stages

    def stage_of(self, send: Kind) -> Ints:
        """The stage of a transfer, by its number."""
        numbers = range(len(self.layout.placement) + len(self.layout.skip_stages))
        return np.array([self.layout.stage_of(send, number) for number in numbers], np.int32)
