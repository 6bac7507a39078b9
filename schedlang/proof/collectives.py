"""Gathers and sums that a program writes itself: is what they are for there when it is needed, and
do all replicas come to them in one order?

A gather of a stage's weights, or a sum of its gradients, is one event of all ranks that hold a
replica of the stage. The first gather of a stage meets the first of each replica, the second one
the second, and so do sums. A rank comes to its own one after the other, and goes on beside them; an
op waits for the gather that it needs, and an update for the sums. Replicas outside of the plan all
do the same, in the same order.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np
from attrs import define, field, frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.proof.graph import NOTHING
from schedlang.schedule.columns import Columns, Flags, Ints, is_any
from schedlang.schedule.findings import Finding, ranks_text
from schedlang.schedule.kinds import GATHERS, MAKERS, OPS, USES_WEIGHTS, Kind
from schedlang.schedule.schedule import Schedule

#: What is an event of all replicas; a RESHARD is of its own rank.
_EVENTS = (Kind.UNSHARD, Kind.REDUCE_GRAD)


@frozen(eq=False)
class Collectives:
    """The gathers and sums that are written, an item for each on each rank, in the order of the
    schedule's columns.

    Item i is the action `row[i]`. Items of one `event` are its sides, on different ranks. What
    needs it first is the action `user[i]`, or NOTHING; a sum is of all gradients up to `last[i]`.
    """

    row: Ints
    event: Ints
    user: Ints
    last: Ints

    @property
    def has_replicas(self) -> bool:
        """Whether some of them are events of several ranks."""
        return len(np.unique(self.event)) < len(self.event)


def collectives(schedule: Schedule) -> Collectives:
    """The gathers and sums of a schedule that `check_collectives` accepts."""
    columns = schedule.columns
    rows = columns.where(*_EVENTS)
    users: dict[int, int] = {}
    lasts: dict[int, int] = {}
    for walk in _walks(schedule):
        users |= walk.users
        lasts |= walk.lasts
    names = _names(schedule, rows)
    events: dict[tuple[int, int, int], int] = {}
    event = [events.setdefault(name, len(events)) for name in names]
    return Collectives(
        rows,
        np.array(event, np.int64),
        np.array([users.get(row, NOTHING) for row in rows.tolist()], np.int64),
        np.array([lasts.get(row, NOTHING) for row in rows.tolist()], np.int64),
    )


def writes(schedule: Schedule, kind: Kind) -> Flags:
    """For each stage whether its replicas' gathers, or sums, are written."""
    written = np.zeros(len(schedule.placement), bool)
    written[schedule.columns.stage[schedule.columns.where(kind)]] = True
    return written


def check_collectives(schedule: Schedule) -> list[Finding]:
    """What is wrong with gathers and sums: on each rank by itself; or if nothing is, where replicas
    do not come together.
    """
    if not schedule.columns.is_collective.any():
        return []
    found = [finding for walk in _walks(schedule) for finding in walk.findings]
    return found or list(_side_by_side(schedule)) or list(_alone(schedule)) or _orders(schedule)


def _walks(schedule: Schedule) -> list["_Walk"]:
    """A walk over each rank that has any, gone to its end."""
    columns = schedule.columns
    if not columns.is_collective.any():
        return []
    # What is walked, of a stage:
    #
    #     actions           unshard  F0  F1  B0  B1  reshard  reduce
    #     for its gathers   unshard  F0              reshard
    #     for its sums                           B1           reduce
    uses = _ends_of_runs(columns, USES_WEIGHTS, (*GATHERS, Kind.U), last=False)
    gradients = _ends_of_runs(columns, MAKERS[Kind.W], (Kind.REDUCE_GRAD, Kind.U), last=True)
    rows = np.unique(np.concatenate([uses, gradients]))
    walks = []
    for rank in np.unique(columns.rank[columns.is_collective]).tolist():
        walk = _Walk(schedule, rank)
        walk.go(rows[columns.rank[rows] == rank])
        walks.append(walk)
    return walks


def _ends_of_runs(
    columns: Columns, run: Collection[int], others: Collection[int], last: bool
) -> Ints:
    """The actions of some kinds, of each stage; of those of a `run` that follow each other only the
    first one, or the last: between them nothing changes.
    """
    rows = columns.where(*run, *others)
    rows = rows[np.argsort(columns.stage[rows], kind="stable")]
    is_run = is_any(columns.kind[rows], *run)
    is_same = is_run[1:] & is_run[:-1] & (columns.stage[rows][1:] == columns.stage[rows][:-1])
    left_out = np.zeros(len(rows), bool)
    if last:
        left_out[:-1] = is_same
    else:
        left_out[1:] = is_same
    kept: Ints = rows[~left_out]
    return kept


@define
class _Stage:
    """What is under way of a stage, as the rows of actions: the gather that it has its weights by,
    the last gradient that no sum has, and the sums since the last update.
    """

    gather: int | None = None
    added: int | None = None
    sums: list[int] = field(factory=list)
    last_reshard: int | None = None


@define(eq=False)
class _Walk:
    """Goes over the actions of a rank; of each gather and sum it finds what first needs it."""

    schedule: Schedule
    rank: int
    users: dict[int, int] = field(factory=dict)
    lasts: dict[int, int] = field(factory=dict)
    findings: list[Finding] = field(factory=list)
    #: Those with a mistake: of what follows from it, nothing is said.
    wrong: set[int] = field(factory=set)

    def go(self, rows: Ints) -> None:
        """Over the rank's actions of some rows, in their order."""
        columns = self.schedule.columns
        gathers = set(columns.stage[columns.where(*GATHERS)].tolist())
        sums = set(columns.stage[columns.where(Kind.REDUCE_GRAD)].tolist())
        held = self.schedule.stages_of(self.rank)
        stages = {stage: _Stage() for stage in held if stage in gathers | sums}
        actions = zip(*(each[rows].tolist() for each in (columns.kind, columns.stage)), strict=True)
        for row, (kind, stage) in zip(rows.tolist(), actions, strict=True):
            if stage in gathers:
                self.weights(stages[stage], kind, stage, row)
            if stage in sums:
                self.gradients(stages[stage], kind, stage, row)
        for number, stage_at_end in stages.items():
            self.end(number, stage_at_end)

    def weights(self, stage: _Stage, kind: int, number: int, row: int) -> None:
        """An action of a stage whose gathers are written."""
        if kind in USES_WEIGHTS:
            if stage.gather is None:
                message = f"{self.here(row)} runs without the weights of its stage"
                help = f"put `unshard` of stage {self.name(number)} before it"
                related: tuple[tuple[int, str], ...] = ()
                if stage.last_reshard is not None:
                    related = ((self.source(stage.last_reshard), "they are dropped here"),)
                self.report("unshard", message, number, row, related=related, help=help)
                return
            self.users.setdefault(stage.gather, row)
        elif kind == Kind.UNSHARD:
            if stage.gather is not None:
                related = ((self.source(stage.gather), "here"),)
                message = f"{self.here(row)}: the weights of the stage are gathered already"
                self.report("unshard", message, number, row, related=related)
            stage.gather = row
        elif kind == Kind.RESHARD:
            if stage.gather is None:
                message = f"{self.here(row)}: the weights of the stage are dropped already"
                self.report("unshard", message, number, row)
            stage.gather = None
            stage.last_reshard = row
        elif kind == Kind.U and stage.gather is not None:
            message = f"{self.here(row)} changes weights that are gathered"
            related = ((self.source(stage.gather), "here"),)
            help = f"put `reshard` of stage {self.name(number)} before it"
            self.report("unshard", message, number, row, related=related, help=help)

    def gradients(self, stage: _Stage, kind: int, number: int, row: int) -> None:
        """An action of a stage whose sums are written."""
        if kind in MAKERS[Kind.W]:
            stage.added = row
        elif kind == Kind.REDUCE_GRAD:
            if stage.added is None:
                message = f"{self.here(row)} has nothing to sum: no gradient comes before it"
                if stage.sums:
                    message += " since the last one"
                self.report("reduce-grad", message, number, row)
                return
            self.lasts[row] = stage.added
            stage.added = None
            stage.sums.append(row)
        elif kind == Kind.U:
            if stage.added is not None:
                self.unsummed(number, stage.added)
            for summed in stage.sums:
                self.users[summed] = row
            stage.sums = []

    def end(self, number: int, stage: _Stage) -> None:
        """The end of a step."""
        if stage.added is not None:
            self.unsummed(number, stage.added)
        if stage.gather is not None:
            message = f"the weights of stage {self.name(number)} are never dropped"
            help = "`reshard` belongs behind the last op that uses them"
            self.report("unshard", message, number, stage.gather, help=help)

    def unsummed(self, number: int, added: int) -> None:
        """A gradient behind the last sum of its update."""
        message = f"the gradient of {self.here(added)} is never summed, those of others are"
        help = f"`reduce` of stage {self.name(number)} belongs behind it"
        self.report("reduce-grad", message, number, added, help=help)

    def report(
        self,
        code: str,
        message: str,
        number: int,
        row: int,
        related: tuple[tuple[int, str], ...] = (),
        help: str | None = None,
    ) -> None:
        """The first mistake of a stage."""
        if number not in self.wrong:
            self.wrong.add(number)
            place = self.source(row)
            self.findings.append(
                Finding(
                    code,
                    message,
                    self.rank,
                    place,
                    related=related,
                    help=help,
                    numbers=(number,),
                )
            )

    def here(self, row: int) -> str:
        """An action and its rank."""
        return f"`{_name(self.schedule, row)}` on rank {self.rank}"

    def name(self, number: int) -> str:
        """The name of a stage."""
        return self.schedule.names.stage(number)

    def source(self, row: int) -> int:
        """The place of an action in the program."""
        return int(self.schedule.columns.source[row])


def _name(schedule: Schedule, row: int) -> str:
    return schedule.name_of(*schedule.columns.place(row))


def _names(schedule: Schedule, rows: Ints) -> list[tuple[int, int, int]]:
    """What each gather and sum is a side of: its kind, the first replica of its stage, and how many
    the stage has had before.
    """
    columns = schedule.columns
    layout = schedule.layout
    stages = columns.stage[rows].tolist()
    first = {stage: min(layout.replicas(stage)) for stage in set(stages)}
    before = Counter[tuple[int, int]]()
    names = []
    for kind, stage in zip(columns.kind[rows].tolist(), stages, strict=True):
        names.append((kind, first[stage], before[kind, stage]))
        before[kind, stage] += 1
    return names


def _side_by_side(schedule: Schedule) -> Iterator[Finding]:
    """Stages with written gathers or sums that share their rank with a replica."""
    columns = schedule.columns
    rows = np.flatnonzero(columns.is_collective)
    for stage, first in zip(*np.unique(columns.stage[rows], return_index=True), strict=True):
        row = int(rows[first])
        rank, index = columns.place(row)
        held = {*schedule.stages_of(rank)} & {*schedule.layout.replicas(int(stage))}
        if len(held) > 1:
            names = schedule.names.stages(sorted(held))
            message = (
                f"`{schedule.name_of(rank, index)}` on rank {rank}: it holds {names}, which are "
                "replicas"
            )
            help = "leave their gathers and sums to the runtime"
            place = int(columns.source[row])
            yield Finding(
                "collective", message, rank, place, help=help, numbers=tuple(sorted(held))
            )


def _alone(schedule: Schedule) -> Iterator[Finding]:
    """Gathers and sums that a stage has more often than a replica, the first of each stage."""
    columns = schedule.columns
    rows = columns.where(*_EVENTS)
    counts = Counter(zip(columns.kind[rows].tolist(), columns.stage[rows].tolist(), strict=True))
    for (kind, stage), number in counts.items():
        for replica in schedule.layout.replicas(stage):
            if counts[kind, replica] >= number:
                continue
            met = counts[kind, replica]
            of_stage = rows[(columns.kind[rows] == kind) & (columns.stage[rows] == stage)]
            row = int(of_stage[met])
            rank, index = columns.place(row)
            what = OPS[kind].name
            there = counted(met, what)
            message = (
                f"`{schedule.name_of(rank, index)}` on rank {rank} is {what} {met + 1} of "
                f"its stage; its replica, stage {schedule.names.stage(replica)} on rank "
                f"{schedule.placement[replica]}, has {there}"
            )
            help = "replicas make all of them together: write as many for each"
            place = int(columns.source[row])
            yield Finding("collective", message, rank, place, help=help, numbers=(stage, replica))
            break


def _orders(schedule: Schedule) -> list[Finding]:
    """Ranks that come to the events of several replicas in different orders: a round of events, of
    which each comes before the next one on some rank.
    """
    # Two ranks with replicas of the stages a and b:
    #
    #     rank 0    sum of a ──▶ sum of b
    #     rank 1    sum of b ──▶ sum of a
    columns = schedule.columns
    rows = columns.where(*_EVENTS)
    names = _names(schedule, rows)
    sides = Counter(names)
    sorter = TopologicalSorter[tuple[int, int, int]]()
    behind: dict[tuple[tuple[int, int, int], tuple[int, int, int]], tuple[int, int]] = {}
    of_several = [
        (row, name) for row, name in zip(rows.tolist(), names, strict=True) if sides[name] > 1
    ]
    for (row, name), (following, other) in pairwise(of_several):
        if columns.rank[row] == columns.rank[following]:
            sorter.add(other, name)
            behind.setdefault((name, other), (row, following))
    try:
        sorter.prepare()
    except CycleError as error:
        steps = [behind[pair] for pair in pairwise(error.args[1])]
    else:
        return []
    # Begin with the lowest rank.
    first = min(range(len(steps)), key=lambda step: int(columns.rank[steps[step][0]]))
    steps = steps[first:] + steps[:first]
    texts = [
        f"rank {columns.rank[one]} makes `{_name(schedule, one)}` before `{_name(schedule, other)}`"
        for one, other in steps
    ]
    ranks = ranks_text(sorted({int(columns.rank[one]) for one, _ in steps}))
    message = f"{ranks} come to gathers and sums in different orders: {', '.join(texts)}"
    related = tuple(
        (int(columns.source[one]), text)
        for (one, _), text in zip(steps[1:], texts[1:], strict=True)
    )
    row = steps[0][0]
    return [
        Finding(
            "collective",
            message,
            int(columns.rank[row]),
            int(columns.source[row]),
            texts[0],
            related,
            help="write them in one order on all ranks that hold replicas",
            numbers=tuple(int(columns.stage[side]) for step in steps for side in step),
        )
    ]
