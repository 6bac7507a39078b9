"""What each action needs: the rules of pipeline training that depend on the layout.

What a kind of op needs whatever the layout, and what it makes, is in `schedlang.schedule.kinds`.
The functions here are of schedules that have the right structure: their stages and microbatches
exist.
"""

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from attrs import frozen

from schedlang.schedule.arrays import Flags, Ints, is_any, members
from schedlang.schedule.kinds import (
    BACK,
    MAKERS,
    OPS,
    RECEIVES,
    REPEATS,
    ROWS,
    SENDS,
    STEPS,
    Kind,
)
from schedlang.schedule.layout import Pipeline
from schedlang.schedule.schedule import Schedule, once

#: A kind, a stage or the number of a transfer, and a microbatch.
Op = tuple[int, int, int]


@frozen
class Rule:
    """One rule: each op of the kinds `users` needs a product, of the kind `made`.

    The stages `of` make the product: the op's "own" stage, the stages "before" it, those "after"
    it; or, for an optimizer step, all "replicas", for each microbatch of its update. With `slices`,
    the product is needed of the slice that is so many further on in the microbatch, if there is
    one. With `if_there`, it is needed only if an action makes it. Rules for the `activation` of an
    op's own forward exclude each other: the rule applies whose product was made last.
    """

    users: tuple[Kind, ...]
    made: Kind
    of: str = "own"
    slices: int = 0
    activation: bool = False
    if_there: bool = False


#: The ops that put the activations of a backward into memory; the last of them counts.
_SOURCES = (Kind.F, *REPEATS, *BACK)

#: What ops need of each other. Beside these rules, a send needs what it carries.
RULES = (
    # A forward needs the activations of the stages before; and of its own stage what attention
    # keeps of the slice before (TeraPipe, section 3).
    Rule(MAKERS[Kind.F], Kind.F, "before"),
    Rule((Kind.F,), Kind.F, slices=-1),
    # A backward needs its own activation, run again if it was dropped, or brought back; and the
    # gradients of the stages after, and of the slice after.
    *(Rule(MAKERS[Kind.B], kind, activation=True) for kind in _SOURCES),
    Rule(MAKERS[Kind.B], Kind.B, "after"),
    Rule(MAKERS[Kind.B], Kind.B, slices=1),
    *(
        Rule((Kind(kind),), op.follows, op.of)
        for kind, op in OPS.items()
        if op.follows is not None
    ),
    *(
        Rule(op.before, Kind(kind), if_there=True)
        for kind, op in OPS.items()
        if op.before
    ),
    # An optimizer step needs all gradients of its stage and update, and those of replicas.
    Rule(STEPS, Kind.W, "replicas"),
)


@frozen(eq=False)
class Needs:
    """What the actions of a schedule need: columns with an item for each action and each of its
    needs.

    The action `user` needs what the action `maker` makes: a product of the kind `made` (see
    `Op.makes`), of a stage and a microbatch. If another rank makes it, the action `receive` brings
    it, under the number `number`. Gradients of weights are summed and not sent
    (`schedlang.schedule.needed_gradients`). Users, makers and receives are rows of the schedule's
    columns, or -1 where there is no such action.
    """

    # Rank 0 has stage 0, rank 1 stage 1, and the actions have these rows:
    #
    #     rank 0    0 0F0   1 0SEND_F0   2 0RECV_B0   3 0B0
    #     rank 1    4 1RECV_F0   5 1F0   6 1B0   7 1SEND_B0
    #
    # Then 1F0 needs the activation of 0F0, which its receive brings, and 1B0 needs that of 1F0:
    #
    #     user  made  stage  microbatch  number  maker  receive  is_far
    #      5     F     0        0          1       0       4      yes
    #      6     F     1        0          1       5      -1      no
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
        """Which needs are gradients of weights that another rank makes."""
        return self.is_far & is_any(self.made, Kind.W)

    @cached_property
    def is_message(self) -> Flags:
        """Which needs are messages from other ranks."""
        return self.is_far & is_any(self.made, *RECEIVES)

    def action(self, item: int) -> tuple[Kind, int, int]:
        """What is needed, as the kind, number and microbatch of an action: of the receive that
        brings it, or else of the op that makes it.
        """
        made = Kind(int(self.made[item]))
        microbatch = int(self.microbatch[item])
        if self.is_far[item] and made in RECEIVES:
            return RECEIVES[made], int(self.number[item]), microbatch
        return made, int(self.stage[item]), microbatch


@once
def needs_of(schedule: Schedule) -> Needs:
    """What every action needs, optimizer steps left out. A step needs every gradient of every
    replica; `schedlang.schedule.needed_gradients` has of these what matters for its time.
    """
    return _needs_of(schedule, with_sums=False)


@once
def all_needs_of(schedule: Schedule) -> Needs:
    """What every action needs, each gradient of an optimizer step included."""
    if not schedule.has_updates:
        return needs_of(schedule)
    return _needs_of(schedule, with_sums=True)


def _needs_of(schedule: Schedule, with_sums: bool) -> Needs:
    rules = Rules(schedule)
    parts = list(rules.all(with_sums))
    user = np.concatenate([part.user for part in parts])
    stage = np.concatenate([part.stage for part in parts]).astype(np.int32)
    microbatch = np.concatenate([part.microbatch for part in parts]).astype(np.int32)
    number = np.concatenate([part.number for part in parts]).astype(np.int32)
    lengths = [len(part.user) for part in parts]
    made = np.repeat([part.made for part in parts], lengths).astype(np.int8)

    placement = np.array(schedule.placement, np.int32)
    is_far = placement[stage] != schedule.columns.rank[user]
    maker = np.empty(len(user), np.int32)
    receive = np.full(len(user), -1, np.int32)
    for kind in {part.made for part in parts}:
        items = np.flatnonzero(made == kind)
        makers = rules.rows_of(*MAKERS[kind])
        maker[items] = makers[rules.slot(stage[items], microbatch[items])]
        if kind in RECEIVES:
            items = items[is_far[items]]
            arrivals = rules.rows_of(RECEIVES[kind])
            receive[items] = arrivals[rules.slot(number[items], microbatch[items])]
    return Needs(user, made, stage, microbatch, number, maker, receive, is_far)


@frozen(eq=False)
class _Part:
    """Needs for products of one kind: the rows of the actions that need them, and of each product
    the stage, the microbatch, and the number of the transfer that would bring it.
    """

    made: Kind
    user: Ints
    stage: Ints
    microbatch: Ints
    number: Ints


class Rules:
    """The rules, applied to all actions of a kind at once."""

    def __init__(self, schedule: Schedule) -> None:
        layout = schedule.layout
        self.layout = layout
        self.columns = schedule.columns
        stages = range(len(layout.placement))
        #: The tables below have a slot for each microbatch of each stage, and of each skip.
        self.stride = max(map(layout.units, stages))
        self.slots = len(layout.all_numbers) * self.stride
        self.tables: dict[tuple[Kind, ...], Ints] = {}

    def slot(self, number: Ints, microbatch: Ints) -> Ints:
        """The index in the tables of a microbatch of a stage, or of a far edge."""
        return number * np.int64(self.stride) + microbatch

    def _slots(self, rows: Ints) -> Ints:
        """The slots of the stages and microbatches of some actions."""
        return self.slot(self.columns.stage[rows], self.columns.microbatch[rows])

    def rows_of(self, *kinds: Kind) -> Ints:
        """For each slot, the first action of some kinds; -1 where there is none."""
        if kinds not in self.tables:
            # Where several have one slot, the first is written last, and stays.
            rows = self.columns.where(*kinds)[::-1]
            table = np.full(self.slots, -1, np.int32)
            table[self._slots(rows)] = rows
            self.tables[kinds] = table
        return self.tables[kinds]

    def all(self, with_sums: bool) -> Iterator[_Part]:
        """The needs of all actions."""
        # Most schedules have few of the kinds, and so follow few of the rules.
        has_kind = np.bincount(self.columns.kind, minlength=ROWS) > 0
        for rule in RULES:
            if not any(has_kind[kind] for kind in rule.users):
                continue
            if rule.if_there and not has_kind[rule.made]:
                continue
            if rule.of == "replicas":
                if with_sums:
                    yield from self.updates(rule)
            elif rule.of != "own":
                yield self.neighbours(rule)
            elif not rule.slices or self.layout.slices > 1:
                yield self.own(rule)
        yield from self.sends()

    def own(self, rule: Rule) -> _Part:
        """The needs by a rule about an op's own stage."""
        rows = self.columns.where(*rule.users)
        if rule.activation:
            rows = rows[self._comes_from(rows) == rule.made]
        if rule.if_there:
            rows = rows[self.rows_of(rule.made)[self._slots(rows)] >= 0]
        microbatch = self.columns.microbatch[rows]
        if rule.slices:
            slices = self.layout.slices
            slice_needed = microbatch % slices + rule.slices
            is_there = (slice_needed >= 0) & (slice_needed < slices)
            rows = rows[is_there]
            microbatch = microbatch[is_there]
        stage = self.columns.stage[rows]
        return _Part(rule.made, rows, stage, microbatch + rule.slices, stage)

    def _comes_from(self, rows: Ints) -> Ints:
        """For each op, the kind of the last op that put its activation into memory: a forward, a
        repeated one, or a reload.
        """
        slots = self._slots(rows)
        comes_from = np.full(len(rows), int(Kind.F))
        for kind in _SOURCES:
            comes_from[self.rows_of(kind)[slots] >= 0] = kind
        return comes_from

    def neighbours(self, rule: Rule) -> _Part:
        """The needs by a rule about other stages: activations of the stages before, or gradients of
        those after.
        """
        layout = self.layout
        others = layout.before if rule.of == "before" else layout.gradients_from
        # The neighbours of all stages, one stage after the other.
        pairs = [
            (other, layout.number(stage, other))
            for stage, neighbours in enumerate(others)
            for other in neighbours
        ]
        other, number = np.array(pairs, np.int32).reshape(-1, 2).T
        counts = np.array([len(neighbours) for neighbours in others], np.int32)
        rows = self.columns.where(*rule.users)
        op, pair = members(counts, self.columns.stage[rows])
        user = rows[op]
        return _Part(
            rule.made, user, other[pair], self.columns.microbatch[user], number[pair]
        )

    def updates(self, rule: Rule) -> Iterator[_Part]:
        """The needs of optimizer steps: every microbatch of their update, on every replica."""
        for pipeline in self.layout.trained:
            step, stage, update = self.steps(pipeline)
            units = self.layout.units_of_update(pipeline.start)
            microbatch: Ints = np.add.outer(update * units, np.arange(units)).ravel()
            number: Ints = np.repeat(stage, units)
            yield _Part(rule.made, np.repeat(step, units), number, microbatch, number)

    def steps(self, pipeline: Pipeline) -> tuple[Ints, Ints, Ints]:
        """The optimizer steps that need gradients of a pipeline. If the pipelines are models, a
        pipeline's own steps. With each step the replica of its stage in the pipeline, and its
        update.
        """
        step = self.columns.where(*STEPS)
        if self.layout.models:
            stages = self.columns.stage[step]
            step = step[(stages >= pipeline.start) & (stages < pipeline.stop)]
        starts = np.array([each.start for each in self.layout.pipeline_of], np.int32)
        own = self.columns.stage[step]
        stage: Ints = pipeline.start + own - starts[own]
        return step, stage, np.maximum(self.columns.microbatch[step], 0)

    def gradients(self, pipeline: Pipeline) -> Ints:
        """The rows of the actions that make the gradients of a pipeline's stages, as a table by
        stage, update and microbatch; -1 where there is none.
        """
        made = self.rows_of(*MAKERS[Kind.W]).reshape(-1, self.stride)
        units = self.layout.units_of_update(pipeline.start)
        table = made[pipeline.start : pipeline.stop, : units * self.layout.updates]
        return table.reshape(-1, self.layout.updates, units)

    def sends(self) -> Iterator[_Part]:
        """The needs of sends: each needs what it carries."""
        layout = self.layout
        for made, send in SENDS.items():
            rows = self.columns.where(send)
            number = self.columns.stage[rows]
            stages = [layout.stage_of(send, number) for number in layout.all_numbers]
            stage = np.array(stages, np.int32)[number]
            yield _Part(made, rows, stage, self.columns.microbatch[rows], number)
