"""Where the weights and gradients of stages are on each rank, as its program says it: are they
there when they are needed, and is nothing left behind?

Weights are there from the op that brings them to the one that drops them, and in the home of a
stage that hops always. Gradients are there from the backward that makes them, or the hop that takes
them, to the op that sums them or passes them on.

Every gradient of a stage that hops comes home once: it is made once, a send takes all that there is
away, and a receive brings all of that to one other replica. So it is enough that none is left
elsewhere at the end, which each rank shows by itself.
"""

from collections.abc import Collection
from functools import cached_property

import numpy as np
from attrs import define, frozen

from schedlang.proof.graph import NOTHING
from schedlang.ranks.weight_homes import homes
from schedlang.schedule.arrays import Flags, Ints, is_any
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import (
    GATHERS,
    HOPS,
    MAKERS,
    OF_HOPS,
    OPS,
    STEPS,
    SUMS,
    USES_WEIGHTS,
    Kind,
    kinds_of,
)
from schedlang.schedule.schedule import Schedule, once

#: What brings weights to a rank, what needs them there, and what lets go of them.
_BRINGS = kinds_of(lambda op: op.weights == "bring")
_NEEDS = (*sorted(USES_WEIGHTS), *kinds_of(lambda op: op.weights == "pass on"))
_DROPS = kinds_of(lambda op: op.weights == "drop")
#: What takes gradients from another replica, passes them on to the next, and sums them.
_TAKES = kinds_of(lambda op: op.gradients == "take")
_PASSES = kinds_of(lambda op: op.gradients == "pass on")
_REDUCES = kinds_of(lambda op: op.gradients == "sum")
#: Who waits for collectives of some kinds: the next of these actions of the stage. A rank lets go
#: of weights that hop once all that was sent of the stage is received.
_AWAITED_BY = (
    (_BRINGS, (*_NEEDS, *_DROPS)),
    (_TAKES, _PASSES),
    (tuple(HOPS), _DROPS),
    (_REDUCES, STEPS),
)
#: What stands behind the last action of a stage: no kind of action.
_END = 0


def writes(schedule: Schedule, kinds: Collection[int]) -> Flags:
    """For each stage whether the program writes actions of some kinds for it."""
    written = np.zeros(len(schedule.placement), bool)
    written[schedule.columns.stage[schedule.columns.where(*kinds)]] = True
    return written


@frozen(eq=False)
class _Misplaced:
    """A kind of mistake: the items that make it, and its message. The message is about the item
    itself, or about the item `at` which the mistake began; it may name a `related` item.
    """

    is_wrong: Flags
    code: str
    text: str
    help: str | None = None
    at: Ints | None = None
    related: Ints | None = None
    label: str = "here"


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
    def hops(self) -> Flags:
        """The items of stages whose weights travel from replica to replica."""
        return self._writes(OF_HOPS)

    @cached_property
    def at_home(self) -> Flags:
        """The items of stages that travel, at the replica that is their home: its weights never
        leave.
        """
        found = homes(self.schedule).values()
        return is_any(self.stage, *{home for of_stage in found for home in of_stage})

    @cached_property
    def brought(self) -> Ints:
        """For each item the item that brought the weights which are there; NOTHING where there are
        none.
        """
        return self._there(self._is(*_BRINGS), self._is(*_DROPS))

    @cached_property
    def added(self) -> Ints:
        """For each item the last gradient that was added, if it was neither summed nor passed on;
        or NOTHING.
        """
        makes = self._is(*MAKERS[Kind.W]) & (self._writes(SUMS) | self.hops)
        return self._there(makes, self._is(*_REDUCES, *_PASSES))

    @cached_property
    def awaited(self) -> Ints:
        """Two rows: actions that wait for collectives, and the collectives. The first action behind
        a collective that needs it waits. In the order of the actions that wait.
        """
        pairs = [
            self._followed(self._is(*kinds), self._is(*waiters))
            for kinds, waiters in _AWAITED_BY
        ]
        items, waiters = np.concatenate(pairs, axis=1)
        # Weights that nothing has used are let go of while they are gathered.
        is_unused = self._is(*_DROPS)[waiters] & ~self.hops[items]
        rows = np.stack([self.row[waiters], self.row[items]])[:, ~is_unused]
        return rows[:, np.lexsort(rows[::-1])]

    @cached_property
    def last(self) -> Ints:
        """For each action that sums or sends gradients, the last gradient that it takes; or
        NOTHING.
        """
        last = np.full(len(self.schedule.columns), NOTHING)
        moves = self._is(*_REDUCES, *_PASSES)
        items = np.flatnonzero(moves & (self.added != NOTHING))
        last[self.row[items]] = self.row[self.added[items]]
        return last

    def findings(self) -> list[Finding]:
        """The first mistake of each stage; later ones may follow from it. In the order of each
        rank, with what is left over at its end last.
        """
        mistakes = (*self._of_weights(), *self._of_gradients())
        wrong = np.flatnonzero(np.any([each.is_wrong for each in mistakes], axis=0))
        wrong = wrong[np.diff(self.stage[wrong], prepend=NOTHING) != 0]
        rank = np.array(self.schedule.placement)[self.stage[wrong]]
        wrong = wrong[np.lexsort((self.stage[wrong], self.row[wrong], rank))]
        # An item has one finding, the first of these.
        return [
            self._told(next(each for each in mistakes if each.is_wrong[item]), item)
            for item in wrong.tolist()
        ]

    def _of_weights(self) -> tuple[_Misplaced, ...]:
        """The mistakes about where weights are."""
        is_brought = self.brought != NOTHING
        is_missing = self._writes(GATHERS) & ~self.at_home & ~is_brought
        is_drop = self._is(*_DROPS)
        is_step = self._is(*STEPS)
        dropped = self._before(is_drop)
        return (
            _Misplaced(
                self._is(*USES_WEIGHTS) & is_missing,
                "unshard",
                "{here} runs without the weights of its stage",
                help="put `{bring}` of stage {stage} before it",
                related=dropped,
                label="they are dropped here",
            ),
            _Misplaced(
                self._is(*_NEEDS) & is_missing,
                "unshard",
                "{here} passes on the weights of its stage, which are not there",
                help="put `{bring}` of stage {stage} before it",
                related=dropped,
                label="they are dropped here",
            ),
            _Misplaced(
                self._is(*_BRINGS) & is_brought,
                "unshard",
                "{here}: the weights of the stage are {there} already",
                related=self.brought,
            ),
            _Misplaced(
                is_drop & self.at_home & ~is_brought,
                "unshard",
                "{here}: the weights of the stage are at home here",
            ),
            _Misplaced(
                is_drop & ~is_brought,
                "unshard",
                "{here}: the weights of the stage are dropped already",
            ),
            _Misplaced(
                is_step & is_brought,
                "unshard",
                "{here} changes weights that are gathered",
                help="put `reshard` of stage {stage} before it",
                related=self.brought,
            ),
            _Misplaced(
                is_step & self.hops,
                "hop",
                "{here}: the weights of the stage hop from replica to replica",
                help="leave it out: an optimizer steps after the schedule, where the stage is at "
                "home",
            ),
            _Misplaced(
                self._is(_END) & is_brought,
                "unshard",
                "the weights of stage {stage} are never dropped",
                help="`reshard` belongs behind the last op that uses them",
                at=self.brought,
            ),
        )

    def _of_gradients(self) -> tuple[_Misplaced, ...]:
        """The mistakes about where gradients are."""
        is_end = self._is(_END)
        passes = self._is(*_PASSES)
        takes = self._is(*_TAKES)
        is_added = self.added != NOTHING
        is_any_there = is_added | (self._there(takes, passes) != NOTHING)
        # The last gradient that the rank has made, or else the first that it has received since it
        # passed on what it had made.
        passed = np.maximum(self._before(passes), self._first - 1)
        received = np.append(np.flatnonzero(takes), NOTHING)
        first_received = received[np.searchsorted(received[:-1], passed, "right")]
        left = np.where(is_added, self.added, first_received)
        return (
            _Misplaced(
                self._is(*_REDUCES) & ~is_added,
                "reduce-grad",
                "{here} has nothing to sum: no gradient comes before it{since}",
            ),
            _Misplaced(
                passes & ~is_any_there,
                "hop",
                "{here} has nothing to pass on: no gradient comes before it{since}",
            ),
            _Misplaced(
                (self._is(*STEPS) | is_end) & ~self.hops & is_added,
                "reduce-grad",
                "the gradient of {here} is never summed, those of others are",
                help="`reduce` of stage {stage} belongs behind it",
                at=self.added,
            ),
            _Misplaced(
                is_end & self.hops & ~self.at_home & is_any_there,
                "hop",
                "the gradient of {here} never comes home",
                help="`send gradients` of stage {stage} belongs behind it",
                at=left,
            ),
        )

    def _told(self, mistake: _Misplaced, item: int) -> Finding:
        """The finding for a mistake at an item."""
        columns = self.schedule.columns
        at = item if mistake.at is None else int(mistake.at[item])
        row = int(self.row[at])
        rank = self.schedule.placement[int(self.stage[item])]
        hops = bool(self.hops[item])
        bring = next(kind for kind in _BRINGS if OPS[kind].is_hop == hops)
        moved = self._there(self._is(*_REDUCES, *_PASSES), self._is(*STEPS))
        words = {
            "here": f"`{self.schedule.name_of(*columns.place(row))}` on rank {rank}",
            "stage": self.schedule.names.stage(int(self.stage[item])),
            "bring": OPS[bring].word,
            "there": "there" if hops else "gathered",
            "since": "" if moved[item] == NOTHING else " since the last one",
        }
        related: tuple[tuple[int, str], ...] = ()
        if mistake.related is not None and mistake.related[item] != NOTHING:
            place = int(columns.source[self.row[mistake.related[item]]])
            related = ((place, mistake.label),)
        return Finding(
            mistake.code,
            mistake.text.format_map(words),
            rank,
            int(columns.source[row]),
            related=related,
            help=mistake.help and mistake.help.format_map(words),
        )

    def _is(self, *kinds: int) -> Flags:
        return is_any(self.kind, *kinds)

    def _writes(self, kinds: Collection[int]) -> Flags:
        """The items of stages for which the program writes actions of some kinds."""
        return writes(self.schedule, kinds)[self.stage]

    @cached_property
    def _first(self) -> Ints:
        """For each item the first item of its stage."""
        is_first = np.diff(self.stage, prepend=NOTHING) != 0
        return np.maximum.accumulate(np.where(is_first, np.arange(len(self.row)), 0))

    def _before(self, is_one: Flags) -> Ints:
        """For each item the last one before it, within its stage, that has a flag; or NOTHING."""
        latest = np.maximum.accumulate(
            np.where(is_one, np.arange(len(is_one)), NOTHING)
        )
        before = np.append(NOTHING, latest[:-1])
        return np.where(before >= self._first, before, NOTHING)

    def _there(self, brings: Flags, goes: Flags) -> Ints:
        """For each item the last one before it that brings something, unless an item in between
        took it away; or NOTHING.
        """
        last = self._before(brings | goes)
        # As an index, NOTHING is that of the last item: an end, which brings nothing.
        return np.where(brings[last], last, NOTHING)

    def _followed(self, is_one: Flags, is_other: Flags) -> tuple[Ints, Ints]:
        """Pairs of items of one stage: an item with a flag, and the first item behind it with the
        other flag.
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
    """The stages whose program says where weights and gradients are."""
    columns = schedule.columns
    is_written = writes(schedule, (*GATHERS, *SUMS))
    rows = columns.where(*USES_WEIGHTS, *GATHERS, *SUMS, *STEPS)
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
