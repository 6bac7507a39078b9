"""Gathers, sums and hops that a program writes itself: is what they are for there when it is
needed, and do all replicas come to them? Whether they do in one order is another question
(`schedlang.proof.collective_order`).

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
from collections.abc import Iterator
from functools import cached_property

import numpy as np
from attrs import frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.proof.graph import NOTHING, once
from schedlang.proof.hops import check_hops
from schedlang.proof.presence import presence
from schedlang.schedule.columns import (
    Ints,
    counts_of,
    how_many_before,
    is_any,
)
from schedlang.schedule.findings import Finding
from schedlang.schedule.kinds import HOPS, OF_HOPS, OPS, ROWS, Kind
from schedlang.schedule.schedule import Schedule

#: What is an event of all replicas.
_OF_ALL = (Kind.UNSHARD, Kind.REDUCE_GRAD)
#: What is an event of several ranks; a RESHARD is of its own.
_EVENTS = (*_OF_ALL, *sorted(OF_HOPS))


def have_replicas(schedule: Schedule) -> bool:
    """Whether some gathers, sums or hops are events of several ranks."""
    return bool((sides_of(schedule).counts > 1).any())


def check_collectives(schedule: Schedule) -> list[Finding]:
    """What is wrong with gathers, sums and hops: on each rank by itself; or if nothing is, where
    replicas do not come together.
    """
    if not schedule.columns.is_collective.any():
        return []
    found = check_hops(schedule)
    found = found or presence(schedule).findings()
    found = found or list(_side_by_side(schedule)) or list(_alone(schedule))
    if found:
        return found
    return list(_unmet(schedule, sides_of(schedule)))


def _name(schedule: Schedule, row: int) -> str:
    return schedule.name_of(*schedule.columns.place(row))


@frozen(eq=False)
class Sides:
    """The gathers, sums and hops that are written, an item for each on each rank, in the order of
    the schedule's columns: item i is the action `row[i]`, and a side of an event.

    What it is a side of is told by its `kind`, that of the send for a hop; by its `stage`, that of
    the first replica, or the one that sends; and by the `number` of those that the stage has had
    before. Events are numbered as they first come.
    """

    row: Ints
    kind: Ints
    stage: Ints
    number: Ints
    event: Ints

    @cached_property
    def counts(self) -> Ints:
        """For each item how many sides its event has."""
        return counts_of(self.event)[self.event]


@once
def sides_of(schedule: Schedule) -> Sides:
    """The sides of the events of a schedule."""
    columns = schedule.columns
    layout = schedule.layout
    stages = len(layout.placement)
    rows = columns.where(*_EVENTS)
    # Whose they are, by kind and stage.
    event_kind = np.arange(ROWS)
    event_stage = np.tile(np.arange(stages), (ROWS, 1))
    written = np.flatnonzero(counts_of(columns.stage[rows])).tolist()
    for replicas in {tuple(layout.replicas(stage)) for stage in written}:
        event_stage[np.ix_(_OF_ALL, replicas)] = min(replicas)
        event_stage[np.ix_([*HOPS.values()], [*map(layout.next_replica, replicas)])] = (
            replicas
        )
    event_kind[[*HOPS.values()]] = [*HOPS]
    kind = event_kind[columns.kind[rows]]
    stage = event_stage[columns.kind[rows], columns.stage[rows]]
    number = how_many_before(
        columns.kind[rows] * np.int64(stages) + columns.stage[rows]
    )
    # The events of one kind and stage lie side by side.
    group = kind * stages + stage
    most = np.zeros(ROWS * stages, np.int64)
    np.maximum.at(most, group, number + 1)
    place = (np.cumsum(most) - most)[group] + number
    first = np.zeros(int(most.sum()), np.int64)
    items = np.arange(len(rows))
    first[place[::-1]] = items[::-1]
    is_first = first[place] == items
    event = (np.cumsum(is_first) - 1)[first[place]]
    return Sides(rows, kind, stage, number, event)


def _side_by_side(schedule: Schedule) -> Iterator[Finding]:
    """Stages with written gathers, sums or hops that share their rank with a replica."""
    columns = schedule.columns
    rows = np.flatnonzero(columns.is_collective)
    first = np.full(len(schedule.placement), NOTHING)
    first[columns.stage[rows[::-1]]] = rows[::-1]
    for stage in np.flatnonzero(first != NOTHING).tolist():
        row = int(first[stage])
        rank, index = columns.place(row)
        held = {*schedule.stages_of(rank)} & {*schedule.layout.replicas(stage)}
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
            yield Finding("collective", message, rank, place, help=help)


def _alone(schedule: Schedule) -> Iterator[Finding]:
    """Gathers and sums that a stage has more often than a replica, the first of each stage."""
    columns = schedule.columns
    rows = columns.where(*_OF_ALL)
    counts = Counter(
        zip(columns.kind[rows].tolist(), columns.stage[rows].tolist(), strict=True)
    )
    for (kind, stage), number in counts.items():
        for replica in schedule.layout.replicas(stage):
            if counts[kind, replica] >= number:
                continue
            met = counts[kind, replica]
            of_stage = rows[
                (columns.kind[rows] == kind) & (columns.stage[rows] == stage)
            ]
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
            yield Finding("collective", message, rank, place, help=help)
            break


def _unmet(schedule: Schedule, sides: Sides) -> Iterator[Finding]:
    """The first side of each stage's hops that has no other one."""
    columns = schedule.columns
    names = schedule.names
    is_unmet = is_any(sides.kind, *HOPS) & (sides.counts != 2)
    told = set[tuple[int, int]]()
    for item in np.flatnonzero(is_unmet).tolist():
        row = int(sides.row[item])
        stage = int(sides.stage[item])
        number = int(sides.number[item])
        if (int(sides.kind[item]), stage) in told:
            continue
        told.add((int(sides.kind[item]), stage))
        is_send = columns.kind[row] in HOPS
        other = schedule.layout.next_replica(stage) if is_send else stage
        there = counted(number, "receive" if is_send else "send")
        message = (
            f"`{_name(schedule, row)}` on rank {columns.rank[row]} is "
            f"{'send' if is_send else 'receive'} {number + 1} of its kind; the "
            f"{'next' if is_send else 'previous'} replica, stage {names.stage(other)} on rank "
            f"{schedule.placement[other]}, has {there}"
        )
        help = (
            "a send goes to the next replica of its stage, the one of the next pipeline"
        )
        rank = int(columns.rank[row])
        place = int(columns.source[row])
        yield Finding("collective", message, rank, place, help=help)
