"""Where weights and gradients are on each rank, as its program says it: are they there when they
are needed, and is nothing left behind?
"""

from collections.abc import Callable, Collection
from functools import cached_property

import numpy as np
from attrs import define

from schedlang.proof.graph import NOTHING, once
from schedlang.proof.hops import homes
from schedlang.schedule.columns import Flags, Ints, is_any
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import (
    GATHERS,
    MAKERS,
    OF_HOPS,
    OPS,
    SUMS,
    USES_WEIGHTS,
    Kind,
)
from schedlang.schedule.schedule import Schedule

#: What brings weights to a rank, and what needs them there.
_BRINGS = (Kind.UNSHARD, Kind.RECV_WEIGHTS)
_NEEDS = (*sorted(USES_WEIGHTS), Kind.SEND_WEIGHTS)
#: Who waits for a collective: the next of these actions of its stage. Ops wait for the weights that
#: they use, and sends for what they pass on. Weights that hop are let go of once all that was sent
#: of the stage is received.
_AWAITED_BY = {
    Kind.UNSHARD: (*sorted(USES_WEIGHTS), Kind.RESHARD),
    Kind.RECV_WEIGHTS: (*_NEEDS, Kind.RESHARD),
    Kind.RECV_GRADIENTS: (Kind.SEND_GRADIENTS,),
    Kind.SEND_WEIGHTS: (Kind.RESHARD,),
    Kind.SEND_GRADIENTS: (Kind.RESHARD,),
    Kind.REDUCE_GRAD: (Kind.U,),
}
#: What stands behind the last action of a stage: no kind of action.
_END = 0


def writes(schedule: Schedule, kinds: Collection[int]) -> Flags:
    """For each stage whether actions of some kinds are written for it."""
    written = np.zeros(len(schedule.placement), bool)
    written[schedule.columns.stage[schedule.columns.where(*kinds)]] = True
    return written


@define(eq=False)
class Presence:
    """The stages that write where their weights or gradients are: an item for each action of theirs
    that uses or moves these, stage by stage, and one for the end of each stage.

    What is there at an item follows from what came last before it:

        item       0        1   2   3        4       5
        action     unshard  F0  B0  reshard  reduce  the end
        brought    -        0   0   0        -       -
        added      -        -   -   2        2       -
    """

    schedule: Schedule
    row: Ints
    kind: Ints
    stage: Ints

    @cached_property
    def _first(self) -> Ints:
        """For each item the first one of its stage."""
        is_first = np.diff(self.stage, prepend=NOTHING) != 0
        return np.maximum.accumulate(np.where(is_first, np.arange(len(self.row)), 0))

    @cached_property
    def hops(self) -> Flags:
        """Which items are of stages that hop from replica to replica."""
        return writes(self.schedule, OF_HOPS)[self.stage]

    @cached_property
    def at_home(self) -> Flags:
        """Which items are of stages that hop, and are at home there: their weights always are."""
        is_home = np.zeros(len(self.schedule.placement), bool)
        is_home[[home for found in homes(self.schedule).values() for home in found]] = (
            True
        )
        return is_home[self.stage]

    @cached_property
    def brought(self) -> Ints:
        """For each item the one that brought the weights which are there, or NOTHING."""
        brings = self._is(*_BRINGS)
        # As an index, NOTHING is that of the last item: an end, which is none of these.
        last = self._before(brings | self._is(Kind.RESHARD))
        return np.where(brings[last], last, NOTHING)

    @cached_property
    def added(self) -> Ints:
        """For each item the last gradient that was added up, and neither summed nor passed on; or
        NOTHING.
        """
        moves = writes(self.schedule, SUMS)[self.stage] | self.hops
        makes = self._is(*MAKERS[Kind.W]) & moves
        last = self._before(makes | self._is(Kind.REDUCE_GRAD, Kind.SEND_GRADIENTS))
        return np.where(makes[last], last, NOTHING)

    @cached_property
    def received(self) -> Ints:
        """For each item the last gradients that were received, and not passed on; or NOTHING."""
        receives = self._is(Kind.RECV_GRADIENTS)
        last = self._before(receives | self._is(Kind.SEND_GRADIENTS))
        return np.where(receives[last], last, NOTHING)

    @cached_property
    def awaited(self) -> Ints:
        """Who waits for which collectives, as two rows of actions, in the order of those that wait:
        of each collective the first action behind it that does.
        """
        pairs = [
            self._followed(self._is(kind), self._is(*waiters))
            for kind, waiters in _AWAITED_BY.items()
        ]
        items, waiters = np.concatenate(pairs, axis=1)
        # Weights that nothing has used are let go of while they are gathered.
        is_unused = self._is(Kind.UNSHARD)[items] & self._is(Kind.RESHARD)[waiters]
        rows = np.stack([self.row[waiters], self.row[items]])[:, ~is_unused]
        return rows[:, np.lexsort(rows[::-1])]

    @cached_property
    def last(self) -> Ints:
        """For each action that sums gradients, or sends them, the last one of these; or NOTHING."""
        last = np.full(len(self.schedule.columns), NOTHING)
        moves = self._is(Kind.REDUCE_GRAD, Kind.SEND_GRADIENTS)
        items = np.flatnonzero(moves & (self.added != NOTHING))
        last[self.row[items]] = self.row[self.added[items]]
        return last

    def findings(self) -> list[Finding]:
        """The first mistake of each stage: of what follows from it, nothing is said. Those of a
        rank stand in its order, and what is left at its end comes last.
        """
        is_end = self._is(_END)
        is_update = self._is(Kind.U)
        has_weights = self.at_home | (self.brought != NOTHING)
        writes_weights = writes(self.schedule, GATHERS)[self.stage]
        has_gradient = self.added != NOTHING
        has_any = has_gradient | (self.received != NOTHING)
        # An item has one finding, the first of these.
        checks: tuple[tuple[Flags, Callable[[int], Finding]], ...] = (
            (self._is(*_NEEDS) & writes_weights & ~has_weights, self._without_weights),
            (self._is(*_BRINGS) & (self.brought != NOTHING), self._there_already),
            (self._is(Kind.RESHARD) & (self.brought == NOTHING), self._not_there),
            (is_update & (self.brought != NOTHING), self._update_of_gathered),
            (is_update & self.hops, self._update_of_hopping),
            (self._is(Kind.REDUCE_GRAD) & ~has_gradient, self._nothing_to_sum),
            (self._is(Kind.SEND_GRADIENTS) & ~has_any, self._nothing_to_pass_on),
            ((is_update | is_end) & ~self.hops & has_gradient, self._never_summed),
            (is_end & self.hops & ~self.at_home & has_any, self._never_home),
            (is_end & (self.brought != NOTHING), self._never_dropped),
        )
        wrong = np.flatnonzero(np.any([is_wrong for is_wrong, _ in checks], axis=0))
        wrong = wrong[np.diff(self.stage[wrong], prepend=NOTHING) != 0]
        rank = np.array(self.schedule.placement)[self.stage[wrong]]
        wrong = wrong[np.lexsort((self.stage[wrong], self.row[wrong], rank))]
        return [
            next(tell for is_wrong, tell in checks if is_wrong[item])(item)
            for item in wrong.tolist()
        ]

    def _without_weights(self, item: int) -> Finding:
        uses = self.kind[item] in USES_WEIGHTS
        message = f"{self._here(item)} runs without the weights of its stage"
        if not uses:
            message = f"{self._here(item)} passes on the weights of its stage, which are not there"
        bring = OPS[Kind.RECV_WEIGHTS if self.hops[item] else Kind.UNSHARD].word
        help = f"put `{bring}` of stage {self._name(item)} before it"
        dropped = int(self._before(self._is(Kind.RESHARD))[item])
        related = (
            ()
            if dropped == NOTHING
            else ((self._source(dropped), "they are dropped here"),)
        )
        return self._amiss("unshard", message, item, related, help)

    def _there_already(self, item: int) -> Finding:
        how = "there" if self.hops[item] else "gathered"
        message = f"{self._here(item)}: the weights of the stage are {how} already"
        related = ((self._source(self.brought[item]), "here"),)
        return self._amiss("unshard", message, item, related)

    def _not_there(self, item: int) -> Finding:
        how = "are at home here" if self.at_home[item] else "are dropped already"
        message = f"{self._here(item)}: the weights of the stage {how}"
        return self._amiss("unshard", message, item)

    def _update_of_gathered(self, item: int) -> Finding:
        message = f"{self._here(item)} changes weights that are gathered"
        related = ((self._source(self.brought[item]), "here"),)
        help = f"put `reshard` of stage {self._name(item)} before it"
        return self._amiss("unshard", message, item, related, help)

    def _update_of_hopping(self, item: int) -> Finding:
        message = (
            f"{self._here(item)}: the weights of the stage hop from replica to replica"
        )
        help = "leave it out: an optimizer steps after the schedule, where the stage is at home"
        return self._amiss("hop", message, item, help=help)

    def _nothing_to_sum(self, item: int) -> Finding:
        message = f"{self._here(item)} has nothing to sum: no gradient comes before it"
        before = self._before(self._is(Kind.REDUCE_GRAD, Kind.U))[item]
        if before != NOTHING and self.kind[before] == Kind.REDUCE_GRAD:
            message += " since the last one"
        return self._amiss("reduce-grad", message, item)

    def _nothing_to_pass_on(self, item: int) -> Finding:
        message = (
            f"{self._here(item)} has nothing to pass on: no gradient comes before it"
        )
        if self._before(self._is(Kind.SEND_GRADIENTS))[item] != NOTHING:
            message += " since the last one"
        return self._amiss("hop", message, item)

    def _never_summed(self, item: int) -> Finding:
        """A gradient behind the last sum of its update."""
        added = self.added[item]
        message = (
            f"the gradient of {self._here(added)} is never summed, those of others are"
        )
        help = f"`reduce` of stage {self._name(item)} belongs behind it"
        return self._amiss("reduce-grad", message, added, help=help)

    def _never_home(self, item: int) -> Finding:
        """The last gradient that the rank has made, or else the first that it has received since it
        passed on what it had made.
        """
        left = self.added[item]
        if left == NOTHING:
            passed = self._before(self._is(Kind.SEND_GRADIENTS))[item]
            received = np.flatnonzero(self._is(Kind.RECV_GRADIENTS))
            left = received[received > passed][0]
        message = f"the gradient of {self._here(left)} never comes home"
        help = f"`send gradients` of stage {self._name(item)} belongs behind it"
        return self._amiss("hop", message, left, help=help)

    def _never_dropped(self, item: int) -> Finding:
        message = f"the weights of stage {self._name(item)} are never dropped"
        help = "`reshard` belongs behind the last op that uses them"
        return self._amiss("unshard", message, self.brought[item], help=help)

    def _amiss(
        self,
        code: str,
        message: str,
        item: int,
        related: tuple[tuple[int, str], ...] = (),
        help: str | None = None,
    ) -> Finding:
        """What is wrong at an item."""
        rank = self.schedule.placement[int(self.stage[item])]
        place = self._source(item)
        return Finding(code, message, rank, place, related=related, help=help)

    def _here(self, item: int) -> str:
        """An action and its rank."""
        rank, index = self.schedule.columns.place(int(self.row[item]))
        return f"`{self.schedule.name_of(rank, index)}` on rank {rank}"

    def _name(self, item: int) -> str:
        """The name of an item's stage."""
        return self.schedule.names.stage(int(self.stage[item]))

    def _source(self, item: int) -> int:
        """The place of an action in the program."""
        return int(self.schedule.columns.source[self.row[item]])

    def _is(self, *kinds: int) -> Flags:
        return is_any(self.kind, *kinds)

    def _before(self, is_one: Flags) -> Ints:
        """For each item the last one before it, of its stage, of those that are; or NOTHING."""
        latest = np.maximum.accumulate(
            np.where(is_one, np.arange(len(is_one)), NOTHING)
        )
        before = np.append(NOTHING, latest[:-1])
        return np.where(before >= self._first, before, NOTHING)

    def _followed(self, is_one: Flags, is_other: Flags) -> tuple[Ints, Ints]:
        """The items of some that are followed, in their stage, by one of others; and the first that
        follows each.
        """
        items = np.flatnonzero(is_one)
        others = np.flatnonzero(is_other)
        behind = np.searchsorted(others, items)
        is_there = behind < len(others)
        is_there[is_there] = (
            self.stage[others[behind[is_there]]] == self.stage[items[is_there]]
        )
        return items[is_there], others[behind[is_there]]


@once
def presence(schedule: Schedule) -> Presence:
    """What a schedule writes of where weights and gradients are."""
    columns = schedule.columns
    is_written = writes(schedule, (*GATHERS, *SUMS))
    rows = columns.where(*USES_WEIGHTS, *GATHERS, *SUMS, Kind.U)
    rows = rows[is_written[columns.stage[rows]]]
    # A stage ends with its rank.
    stages = np.flatnonzero(is_written)
    ends = columns.first[np.array(schedule.placement)[stages] + 1]
    row = np.concatenate([rows, ends])
    kind = np.concatenate([columns.kind[rows], np.full(len(ends), _END, np.int8)])
    stage = np.concatenate([columns.stage[rows], stages])
    # Small numbers are sorted faster.
    order = np.argsort(stage.astype(np.min_scalar_type(len(is_written))), kind="stable")
    return Presence(schedule, row[order], kind[order], stage[order])
