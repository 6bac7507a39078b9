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
from attrs import frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.proof.graph import NOTHING
from schedlang.proof.hops import check_hops
from schedlang.proof.presence import walks
from schedlang.schedule.columns import Flags, Ints
from schedlang.schedule.findings import Finding, ranks_text
from schedlang.schedule.kinds import HOPS, OF_HOPS, OPS, Kind
from schedlang.schedule.schedule import Schedule

#: What is an event of all replicas.
_OF_ALL = (Kind.UNSHARD, Kind.REDUCE_GRAD)
#: What is an event of several ranks; a RESHARD is of its own.
_EVENTS = (*_OF_ALL, *sorted(OF_HOPS))


@frozen(eq=False)
class Collectives:
    """The gathers, sums and hops that are written, an item for each on each rank, in the order of
    the schedule's columns.

    Item i is the action `row[i]`. Items of one `event` are its sides, on different ranks. What
    needs it first is the action `user[i]`, or NOTHING: an op, or the send that passes it on. A sum,
    or a send of gradients, is of all gradients up to `last[i]`. The end of weights `ends[0, j]`
    waits for the hop `ends[1, j]`.
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
    for walk in walks(schedule):
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
    found = found or [finding for walk in walks(schedule) for finding in walk.findings]
    found = found or list(_side_by_side(schedule)) or list(_alone(schedule))
    return found or list(_unmet(schedule)) or _orders(schedule)


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
