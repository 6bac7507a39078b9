"""Gathers, sums and hops that a program writes itself: is what they are for there when it is
needed, and do all replicas come to them in one order?

A gather of a stage's weights, or a sum of its gradients, is one event of all ranks that hold a
replica of the stage. The first gather of a stage meets the first of each replica, the second one
the second, and so do sums. A rank comes to its own one after the other, and goes on beside them; an
op waits for the gather that it needs, and an update for the sums. Replicas outside of the plan all
do the same, in the same order.

A hop takes the weights of a stage, or the gradients, to its next replica: it is one event of two
ranks, whose k-th send meets the k-th receive (`schedlang.proof.hops`). A rank waits at a send until
what it passes on is there, and at the end of weights until all that was sent of the stage is over.
"""

from collections import Counter
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import numpy as np
from attrs import define, field, frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.proof.graph import NOTHING
from schedlang.proof.hops import check_hops, homes
from schedlang.schedule.columns import Columns, Flags, Ints, is_any
from schedlang.schedule.findings import Finding, ranks_text
from schedlang.schedule.kinds import GATHERS, HOPS, MAKERS, OF_HOPS, OPS, SUMS, USES_WEIGHTS, Kind
from schedlang.schedule.schedule import Schedule

#: What is an event of all replicas.
_OF_ALL = (Kind.UNSHARD, Kind.REDUCE_GRAD)
#: What is an event of several ranks; a RESHARD is of its own.
_EVENTS = (*_OF_ALL, *sorted(OF_HOPS))
#: What brings weights to a rank.
_BRINGS = (Kind.UNSHARD, Kind.RECV_WEIGHTS)


@frozen(eq=False)
class Collectives:
    """The gathers, sums and hops that are written, an item for each on each rank, in the order of
    the schedule's columns.

    Item i is the action `row[i]`. Items of one `event` are its sides, on different ranks. What
    needs it first is the action `user[i]`, or NOTHING: an op, or the send that passes it on. A sum,
    or a send of gradients, is of all gradients up to `last[i]`. The end of weights `ends[0, j]`
    waits for the send `ends[1, j]`.
    """

    row: Ints
    event: Ints
    user: Ints
    last: Ints
    ends: Ints

    @property
    def has_replicas(self) -> bool:
        """Whether some of them are events of several ranks."""
        return len(np.unique(self.event)) < len(self.event)


def collectives(schedule: Schedule) -> Collectives:
    """The gathers, sums and hops of a schedule that `check_collectives` accepts."""
    columns = schedule.columns
    rows = columns.where(*_EVENTS)
    users: dict[int, int] = {}
    lasts: dict[int, int] = {}
    ends: list[tuple[int, int]] = []
    for walk in _walks(schedule):
        users |= walk.users
        lasts |= walk.lasts
        ends += walk.ends
    names = _names(schedule, rows)
    events: dict[tuple[int, int, int], int] = {}
    event = [events.setdefault(name, len(events)) for name in names]
    return Collectives(
        rows,
        np.array(event, np.int64),
        np.array([users.get(row, NOTHING) for row in rows.tolist()], np.int64),
        np.array([lasts.get(row, NOTHING) for row in rows.tolist()], np.int64),
        np.array(ends, np.int64).reshape(-1, 2).T,
    )


def writes(schedule: Schedule, kinds: Collection[int]) -> Flags:
    """For each stage whether actions of some kinds are written for it."""
    written = np.zeros(len(schedule.placement), bool)
    written[schedule.columns.stage[schedule.columns.where(*kinds)]] = True
    return written


def check_collectives(schedule: Schedule) -> list[Finding]:
    """What is wrong with gathers, sums and hops: on each rank by itself; or if nothing is, where
    replicas do not come together.
    """
    if not schedule.columns.is_collective.any():
        return []
    found = check_hops(schedule)
    found = found or [finding for walk in _walks(schedule) for finding in walk.findings]
    found = found or list(_side_by_side(schedule)) or list(_alone(schedule))
    return found or list(_unmet(schedule)) or _orders(schedule)


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
    gradients = _ends_of_runs(columns, MAKERS[Kind.W], (*SUMS, Kind.U), last=True)
    rows = np.unique(np.concatenate([uses, gradients]))
    at_home = {home for found in homes(schedule).values() for home in found}
    hopping = {*columns.stage[columns.where(*OF_HOPS)].tolist()}
    walks = []
    for rank in np.unique(columns.rank[columns.is_collective]).tolist():
        walk = _Walk(schedule, rank, at_home, hopping)
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
    """What is under way of a stage, as the rows of actions: the gather or the receive that it has
    its weights by, the last gradient that no sum has, or that was not passed on, and the sums since
    the last update; gradients received, but not passed on; and what was sent since the last
    `reshard`.

    If its weights hop from replica to replica, it `hops`; at home (`is_home`), they always are.
    """

    hops: bool
    is_home: bool
    gather: int | None = None
    added: int | None = None
    sums: list[int] = field(factory=list)
    received: list[int] = field(factory=list)
    sent: list[int] = field(factory=list)
    last_reshard: int | None = None

    @property
    def has_weights(self) -> bool:
        """Whether its weights are there."""
        return self.is_home or self.gather is not None


@define(eq=False)
class _Walk:
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
            stage.gather = None
            stage.last_reshard = row
            self.ends += [(row, send) for send in stage.sent]
            stage.sent = []
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
            if stage.sent:
                message += " since the last one"
            self.report("hop", message, number, row)
            return
        if stage.added is not None:
            self.lasts[row] = stage.added
        self.users |= dict.fromkeys(stage.received, row)
        stage.added = None
        stage.received = []
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
    """What each of some events is a side of: its kind, that of the send for a hop; the first
    replica of its stage, or the one that sends; and how many the stage has had before.
    """
    columns = schedule.columns
    layout = schedule.layout
    stages = columns.stage[rows].tolist()
    kinds = columns.kind[rows].tolist()
    first = {stage: min(layout.replicas(stage)) for stage in set(stages)}
    replicas = {stage for each in set(first.values()) for stage in layout.replicas(each)}
    sender = {layout.next_replica(stage): stage for stage in replicas}
    send = {receive: send for send, receive in HOPS.items()}
    before = Counter[tuple[int, int]]()
    names = []
    for kind, stage in zip(kinds, stages, strict=True):
        if kind in HOPS:
            of = (kind, stage)
        elif kind in send:
            of = (send[kind], sender[stage])
        else:
            of = (kind, first[stage])
        names.append((*of, before[kind, stage]))
        before[kind, stage] += 1
    return names


def _side_by_side(schedule: Schedule) -> Iterator[Finding]:
    """Stages with written gathers, sums or hops that share their rank with a replica."""
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
            if columns.kind[row] in OF_HOPS:
                help = "hops are between ranks: place replicas on different ones"
            place = int(columns.source[row])
            yield Finding(
                "collective", message, rank, place, help=help, numbers=tuple(sorted(held))
            )


def _alone(schedule: Schedule) -> Iterator[Finding]:
    """Gathers and sums that a stage has more often than a replica, the first of each stage."""
    columns = schedule.columns
    rows = columns.where(*_OF_ALL)
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


def _unmet(schedule: Schedule) -> Iterator[Finding]:
    """The first side of each stage's hops that has no other one."""
    columns = schedule.columns
    rows = columns.where(*OF_HOPS)
    rows = rows[np.argsort(rows)]
    names = _names(schedule, rows)
    sides = Counter(names)
    told = set[tuple[int, int]]()
    for row, name in zip(rows.tolist(), names, strict=True):
        kind, stage, number = name
        if sides[name] == 2 or (kind, stage) in told:
            continue
        told.add((kind, stage))
        is_send = columns.kind[row] in HOPS
        other = schedule.layout.next_replica(stage) if is_send else stage
        there = counted(number, "receive" if is_send else "send")
        message = (
            f"`{_name(schedule, row)}` on rank {columns.rank[row]} is "
            f"{'send' if is_send else 'receive'} {number + 1} of its kind; the "
            f"{'next' if is_send else 'last'} replica, stage {schedule.names.stage(other)} on rank "
            f"{schedule.placement[other]}, has {there}"
        )
        help = "a send goes to the next replica of its stage, the one of the next pipeline"
        rank = int(columns.rank[row])
        place = int(columns.source[row])
        numbers = (int(columns.stage[row]), other)
        yield Finding("collective", message, rank, place, help=help, numbers=numbers)


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
    is_hop = any(columns.kind[one] in OF_HOPS for one, _ in steps)
    what = "hops" if is_hop else "gathers and sums"
    message = f"{ranks} come to {what} in different orders: {', '.join(texts)}"
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
            help="let some ranks of the ring receive first, as every second one"
            if is_hop
            else "write them in one order on all ranks that hold replicas",
            numbers=tuple(int(columns.stage[side]) for step in steps for side in step),
        )
    ]
