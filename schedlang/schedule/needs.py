"""What each action needs: the one place where the rules of pipeline training stand.

What others need of a backward is the gradient of its input, so that is Kind.B here, whether a whole
backward makes it or an input half; Kind.W is the gradient of the weights.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from attrs import frozen

from schedlang.schedule.actions import word
from schedlang.schedule.columns import Columns, Flags, Ints, is_any, members
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout

#: What is there once an op of a kind has ended: an activation (F, R, RELOAD, or on the host
#: OFFLOAD), a gradient of the input (B), of the weights (W).
MAKES: dict[int, tuple[Kind, ...]] = {
    Kind.F: (Kind.F,),
    Kind.B: (Kind.B, Kind.W),
    Kind.I: (Kind.B,),
    Kind.W: (Kind.W,),
    Kind.R: (Kind.R,),
    Kind.U: (),
    Kind.OFFLOAD: (Kind.OFFLOAD,),
    Kind.RELOAD: (Kind.RELOAD,),
}

#: The send that brings what was made to another rank, and its receive there; of weights, gradients
#: are summed.
SENDS = {Kind.F: Kind.SEND_F, Kind.B: Kind.SEND_B}
RECEIVES = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B}

#: A kind, a stage or the number of a transfer, and a microbatch.
Op = tuple[int, int, int]

#: Rows that need something; what, by its kind, stage and microbatch; and the numbers under which a
#: transfer would bring it.
_Part = tuple[Ints, Kind, Ints, Ints, Ints]


@frozen(eq=False)
class Needs:
    """What the actions of a schedule need, one item of all columns for each action and each need.

    The action `user` needs what the action `maker` makes, of the kind `made` (see `MAKES`), of a
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
        return self.table(*(kind for kind in Kind if made in MAKES.get(kind, ())))

    def all(self) -> Iterator[_Part]:
        """What every action needs."""
        yield from self.forward()
        yield from self.backward()
        yield self.own(Kind.W, Kind.B)
        yield self.own(Kind.R, Kind.F)
        yield self.own(Kind.OFFLOAD, Kind.F)
        yield self.own(Kind.RELOAD, Kind.OFFLOAD)
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

    def neighbours(self, kinds: tuple[Kind, ...], made: Kind) -> _Part:
        """Ops need what the stages before theirs make; or, of backwards, those after."""
        others = self.layout.before if made == Kind.F else self.layout.after
        rows = self.columns.where(*kinds)
        stages = self.columns.stage[rows]
        counts = np.array([len(each) for each in others], np.int32)
        flat = [
            (other, self.layout.number(s, other)) for s, each in enumerate(others) for other in each
        ]
        other, number = np.array(flat, np.int32).reshape(-1, 2).T
        op, neighbour = members(counts, stages)
        user = rows[op]
        return user, made, other[neighbour], self.columns.microbatch[user], number[neighbour]

    def forward(self) -> Iterator[_Part]:
        """A forward needs the activations of the stages before; and of its own stage what attention
        keeps of the slice before (TeraPipe, section 3).
        """
        yield self.neighbours((Kind.F,), Kind.F)
        if self.layout.slices > 1:
            rows = self.columns.where(Kind.F)
            rows = rows[self.columns.microbatch[rows] % self.layout.slices > 0]
            stage = self.columns.stage[rows]
            yield rows, Kind.F, stage, self.columns.microbatch[rows] - 1, stage

    def backward(self) -> Iterator[_Part]:
        """A backward needs its own activation, run again if it was dropped, or brought back; and
        the gradients of the stages after, and of the slice after.
        """
        rows = self.columns.where(Kind.B, Kind.I)
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
        yield self.neighbours((Kind.B, Kind.I), Kind.B)
        if self.layout.slices > 1:
            chosen = (microbatch + 1) % self.layout.slices > 0
            yield rows[chosen], Kind.B, stage[chosen], microbatch[chosen] + 1, stage[chosen]

    def updates(self) -> Iterator[_Part]:
        """An optimizer step needs all gradients of its stage and update, and those of replicas."""
        steps = self.columns.where(Kind.U)
        update = np.maximum(self.columns.microbatch[steps], 0)
        starts = [pipeline.start for pipeline in self.layout.pipeline_of]
        piece = self.columns.stage[steps] - np.array(starts, np.int32)[self.columns.stage[steps]]
        for pipeline in self.layout.pipelines:
            units = self.layout.units_of_update(pipeline.start)
            first = update * units
            microbatch = (first[:, np.newaxis] + np.arange(units, dtype=np.int32)).ravel()
            stage = np.repeat(pipeline.start + piece, units)
            yield np.repeat(steps, units), Kind.W, stage, microbatch, stage

    def stage_of(self, send: Kind) -> Ints:
        """The stage of a transfer, by its number."""
        numbers = range(len(self.layout.placement) + len(self.layout.skip_stages))
        return np.array([self.layout.stage_of(send, number) for number in numbers], np.int32)
