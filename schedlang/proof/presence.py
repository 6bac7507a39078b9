"""Where weights and gradients are on each rank, as its program says it: are they there when they
are needed, and is nothing left behind?
"""

from collections.abc import Collection

import numpy as np
from attrs import define, field

from schedlang.proof.hops import homes
from schedlang.schedule.columns import Columns, Ints, is_any
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import GATHERS, MAKERS, OF_HOPS, OPS, SUMS, USES_WEIGHTS, Kind
from schedlang.schedule.schedule import Schedule

#: What brings weights to a rank.
_BRINGS = (Kind.UNSHARD, Kind.RECV_WEIGHTS)


def walks(schedule: Schedule) -> list["Walk"]:
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
    gradients = _ends_of_runs(columns, MAKERS[Kind.W], (*SUMS, Kind.U), last=True)
    rows = np.unique(np.concatenate([uses, gradients]))
    at_home = {home for found in homes(schedule).values() for home in found}
    hopping = {*columns.stage[columns.where(*OF_HOPS)].tolist()}
    found = []
    for rank in np.unique(columns.rank[columns.is_collective]).tolist():
        walk = Walk(schedule, rank, at_home, hopping)
        walk.go(rows[columns.rank[rows] == rank])
        found.append(walk)
    return found


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
    """What is under way of a stage, as the rows of actions: the gather or the receive that it has
    its weights by, the last gradient that no sum has, or that was not passed on, and the sums since
    the last update; gradients received, but not passed on, and whether any were passed on; and what
    was sent since the last `reshard`.

    If its weights hop from replica to replica, it `hops`; at home (`is_home`), they always are.
    """

    hops: bool
    is_home: bool
    gather: int | None = None
    added: int | None = None
    sums: list[int] = field(factory=list)
    received: list[int] = field(factory=list)
    has_passed_on: bool = False
    sent: list[int] = field(factory=list)
    last_reshard: int | None = None

    @property
    def has_weights(self) -> bool:
        """Whether its weights are there."""
        return self.is_home or self.gather is not None


@define(eq=False)
class Walk:
    """Goes over the actions of a rank; of each gather, sum and hop it finds what first needs it.

    Some stages are `at_home` here, of those with hops.
    """

    schedule: Schedule
    rank: int
    at_home: set[int]
    hopping: set[int]
    users: dict[int, int] = field(factory=dict)
    lasts: dict[int, int] = field(factory=dict)
    ends: list[tuple[int, int]] = field(factory=list)
    findings: list[Finding] = field(factory=list)
    #: Those with a mistake: of what follows from it, nothing is said.
    wrong: set[int] = field(factory=set)

    def go(self, rows: Ints) -> None:
        """Over the rank's actions of some rows, in their order."""
        columns = self.schedule.columns
        gathers = set(columns.stage[columns.where(*GATHERS)].tolist())
        sums = set(columns.stage[columns.where(*SUMS)].tolist()) | self.hopping
        held = self.schedule.stages_of(self.rank)
        stages = {
            stage: _Stage(stage in self.hopping, stage in self.at_home)
            for stage in held
            if stage in gathers | sums
        }
        actions = zip(*(each[rows].tolist() for each in (columns.kind, columns.stage)), strict=True)
        for row, (kind, stage) in zip(rows.tolist(), actions, strict=True):
            if stage in gathers:
                self.weights(stages[stage], kind, stage, row)
            if stage in sums:
                self.gradients(stages[stage], kind, stage, row)
        for number, stage_at_end in stages.items():
            self.end(number, stage_at_end)

    def weights(self, stage: _Stage, kind: int, number: int, row: int) -> None:
        """An action of a stage of which it is written when its weights are there."""
        if kind in USES_WEIGHTS or kind == Kind.SEND_WEIGHTS:
            if not stage.has_weights:
                self.without_weights(stage, kind, number, row)
                return
            if stage.gather is not None:
                self.users.setdefault(stage.gather, row)
            if kind == Kind.SEND_WEIGHTS:
                stage.sent.append(row)
        elif kind in _BRINGS:
            if stage.gather is not None:
                related = ((self.source(stage.gather), "here"),)
                how = "there" if stage.hops else "gathered"
                message = f"{self.here(row)}: the weights of the stage are {how} already"
                self.report("unshard", message, number, row, related=related)
            stage.gather = row
        elif kind == Kind.RESHARD:
            if stage.gather is None:
                how = "are at home here" if stage.is_home else "are dropped already"
                message = f"{self.here(row)}: the weights of the stage {how}"
                self.report("unshard", message, number, row)
            elif stage.hops:
                # What has come for nobody is over first, as well.
                unused = [stage.gather] if stage.gather not in self.users else []
                self.ends += [(row, hop) for hop in (*stage.sent, *unused)]
                stage.sent = []
            stage.gather = None
            stage.last_reshard = row
        elif kind == Kind.U and stage.gather is not None:
            message = f"{self.here(row)} changes weights that are gathered"
            related = ((self.source(stage.gather), "here"),)
            help = f"put `reshard` of stage {self.name(number)} before it"
            self.report("unshard", message, number, row, related=related, help=help)

    def without_weights(self, stage: _Stage, kind: int, number: int, row: int) -> None:
        """An action that needs weights which are not there."""
        does = "runs without" if kind in USES_WEIGHTS else "passes on"
        message = f"{self.here(row)} {does} the weights of its stage"
        if kind not in USES_WEIGHTS:
            message += ", which are not there"
        bring = OPS[Kind.RECV_WEIGHTS if stage.hops else Kind.UNSHARD].word
        help = f"put `{bring}` of stage {self.name(number)} before it"
        related: tuple[tuple[int, str], ...] = ()
        if stage.last_reshard is not None:
            related = ((self.source(stage.last_reshard), "they are dropped here"),)
        self.report("unshard", message, number, row, related=related, help=help)

    def gradients(self, stage: _Stage, kind: int, number: int, row: int) -> None:
        """An action of a stage whose sums, or hops, are written."""
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
        elif kind == Kind.RECV_GRADIENTS:
            stage.received.append(row)
        elif kind == Kind.SEND_GRADIENTS:
            self.pass_on(stage, number, row)
        elif kind == Kind.U:
            self.update(stage, number, row)

    def pass_on(self, stage: _Stage, number: int, row: int) -> None:
        """Send all that has been added up on."""
        if stage.added is None and not stage.received:
            message = f"{self.here(row)} has nothing to pass on: no gradient comes before it"
            if stage.has_passed_on:
                message += " since the last one"
            self.report("hop", message, number, row)
            return
        if stage.added is not None:
            self.lasts[row] = stage.added
        self.users |= dict.fromkeys(stage.received, row)
        stage.added = None
        stage.received = []
        stage.has_passed_on = True
        stage.sent.append(row)

    def update(self, stage: _Stage, number: int, row: int) -> None:
        """An optimizer step, of a stage whose gradients are brought together."""
        if stage.hops:
            message = f"{self.here(row)}: the weights of the stage hop from replica to replica"
            help = "leave it out: an optimizer steps after the schedule, where the stage is at home"
            self.report("hop", message, number, row, help=help)
            return
        if stage.added is not None:
            self.unsummed(number, stage.added)
        for summed in stage.sums:
            self.users[summed] = row
        stage.sums = []

    def end(self, number: int, stage: _Stage) -> None:
        """The end of a step."""
        if stage.hops:
            left = stage.added if stage.added is not None else next(iter(stage.received), None)
            if left is not None and not stage.is_home:
                message = f"the gradient of {self.here(left)} never comes home"
                help = f"`send gradients` of stage {self.name(number)} belongs behind it"
                self.report("hop", message, number, left, help=help)
        elif stage.added is not None:
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
        return f"`{self.schedule.name_of(*self.schedule.columns.place(row))}` on rank {self.rank}"

    def name(self, number: int) -> str:
        """The name of a stage."""
        return self.schedule.names.stage(number)

    def source(self, row: int) -> int:
        """The place of an action in the program."""
        return int(self.schedule.columns.source[row])
