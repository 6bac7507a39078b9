"""Collectives that a program writes itself: which of them meet, is what they are for there when it
is needed, and do all ranks come to them in one order?

A gather of a stage's weights, or a sum of its gradients, is one event of all ranks that hold a
replica of the stage. The first gather of a stage meets the first of each replica, the second one
the second, and so do sums. An exchange of a microbatch meets those of the same microbatch. A hop
takes the weights of a stage, or the gradients, to its next replica: it is one event of two ranks,
whose k-th send meets the k-th receive. Replicas outside of the plan all do the same, in the same
order.

A rank begins its own collectives one after the other, and goes on beside them. An op waits for the
gather or the exchange that it needs, and an update for the sums. A rank waits at a send until what
it passes on is there, and at the end of weights that hop until all that was sent of the stage is
over.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise

import numpy as np
from attrs import evolve, frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.proof.edges import own_ideal_events
from schedlang.proof.graph import NOTHING
from schedlang.proof.presence import presence
from schedlang.proof.threads import Threads
from schedlang.ranks.weight_homes import homes
from schedlang.schedule.arrays import Ints, counts_of, how_many_before, is_any
from schedlang.schedule.columns import STREAMS, Columns, op_names
from schedlang.schedule.findings import Finding, amiss, here, ranks_text
from schedlang.schedule.kinds import MEETS, OF_HOPS, OPS, kinds_of
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Schedule, once

#: The collectives that meet all replicas of their stage.
_OF_ALL = kinds_of(lambda op: op.meets == "replicas")
#: What messages call the replicas that a collective meets, and the two ends of a hop.
_WHOSE = {"replicas": "its", "next": "the next", "previous": "the previous"}
_ENDS = {"next": "send", "previous": "receive"}


def met_by(layout: Layout, kind: int, stage: int) -> list[tuple[int, int]]:
    """The kinds and stages that a collective meets on other ranks."""
    op = OPS[kind]
    replicas = layout.replicas(stage)
    if op.other_end is None:
        return [(kind, each) for each in replicas if each != stage]
    step = 1 if op.meets == "next" else -1
    there = (replicas.index(stage) + step) % len(replicas)
    return [(op.other_end, replicas[there])]


@frozen(eq=False)
class Sides:
    """The collectives that meet others, an item for each on each rank, in the order of the
    schedule's columns: item i is the action `row[i]`, a side of the event `event[i]`.
    """

    row: Ints
    event: Ints

    @cached_property
    def counts(self) -> Ints:
        """For each item how many sides its event has."""
        return counts_of(self.event)[self.event]


@once
def sides_of(schedule: Schedule) -> Sides:
    """The sides of the events of a schedule: the k-th of a kind and stage meets the k-th of each
    kind and stage that it is to meet; an op of a microbatch meets that of the same microbatch.
    """
    columns = schedule.columns
    stages = len(schedule.placement)
    rows = columns.where(*MEETS)
    names = op_names(stages, columns)[rows]
    is_of_stage = columns.is_collective[rows]
    number = np.where(is_of_stage, how_many_before(names), columns.microbatch[rows])
    # Those that meet have the lowest of their names.
    found, which = np.unique(names, return_inverse=True)
    lowest = []
    for name in found.tolist():
        met = met_by(schedule.layout, *divmod(name, stages))
        lowest.append(min([name, *(kind * stages + stage for kind, stage in met)]))
    key = np.array(lowest, np.int64)[which]
    key = key * (number.max(initial=0) + 1) + number
    return Sides(rows, np.unique(key, return_inverse=True)[1])


def wrong_structure(schedule: Schedule) -> list[Finding]:
    """What is wrong with collectives: on each rank by itself; or if nothing is, where replicas do
    not come together.
    """
    for check in (
        _homes_amiss,
        _presence_amiss,
        _side_by_side,
        _unmet,
        _out_of_order,
    ):
        findings = list(check(schedule))
        if findings:
            return findings
    return []


def place(threads: Threads) -> None:
    """Put the ops that meet others on streams of their ranks."""
    # A rank begins one after the other, whatever its kind, each once all ranks have come to
    # those before it: so they stand on a stream without duration first. An all-gather to which
    # rank 1 comes later:
    #
    #     rank 0            ── 0B3 ── … ────────────── 0F4
    #                           ╰╌╌╮                  │
    #     begun by rank 0   ─────── ● ─ ●             │
    #                                   ╎╰╌╌╮         │
    #     its stream        ────────────╎── gather ───╯
    #     begun by rank 1   ────────── ● ─ ●
    columns = threads.columns
    sides = sides_of(threads.schedule)
    rows = sides.row
    rank = columns.rank[rows]
    kind = columns.kind[rows]
    items = threads.issue(rank, rows, threads.on_ranks.before(rows), rows, meets=True)
    threads.meet(items, sides.event, rows)
    # Replicas have one event, which takes the longest time that is given for any of them.
    each = threads.durations.of(kind, columns.stage[rows], columns.microbatch[rows])
    takes = np.zeros(int(sides.event.max(initial=-1)) + 1)
    np.maximum.at(takes, sides.event, each)
    takes = takes[sides.event]
    # Where none takes any time, each is over as soon as all its ranks have begun it.
    if takes.any():
        stream = STREAMS[kind] * len(threads.schedule.ranks) + rank
        items = threads.issue(stream, rows, items, rows, takes, meets=True)
        threads.meet(items, sides.event, rows)
    threads.item[rows] = items
    waiters, awaited = threads.awaited
    threads.wait(threads.on_ranks.at(waiters), threads.item[awaited], awaited)
    # What is shown of those that take time: the op that waits, and the last gradient of a sum.
    user = np.full(len(columns), NOTHING)
    is_op = ~columns.is_collective[waiters]
    user[awaited[is_op]] = waiters[is_op]
    timed = rows[(takes > 0) & columns.is_collective[rows]]
    if len(timed):
        last = presence(threads.schedule).last
        threads.beside.append(np.stack([threads.item[timed], last[timed], user[timed]]))


def _presence_amiss(schedule: Schedule) -> Iterable[Finding]:
    """Weights and gradients that are not there when they are needed, or left behind."""
    return presence(schedule).findings()


def _homes_amiss(schedule: Schedule) -> Iterator[Finding]:
    """Stages that hop, and have no home, or several; or whose weights are gathered, or gradients
    summed, besides.
    """
    columns = schedule.columns
    layout = schedule.layout
    beside = columns.where(*_OF_ALL)
    of_pieces = {
        layout.replicas(stage)[0]: each for stage, each in homes(schedule).items()
    }
    for first, found in of_pieces.items():
        replicas = layout.replicas(first)
        which = schedule.names.stages(replicas)
        rows = columns.where(*OF_HOPS)
        help = "the home of a stage is the one replica that never receives its weights"
        if len(replicas) == 1:
            message = f"{which} has no replica to pass anything on to"
            help = "hops go round the replicas of a stage, which are those of several pipelines"
        elif is_any(columns.stage[beside], *replicas).any():
            rows = beside
            message = (
                f"{which}: weights and gradients hop, "
                "so they are not gathered and summed as well"
            )
            help = "leave out `unshard` and `reduce` of the stage"
        elif not found:
            message = (
                f"{which}: all replicas receive the weights, so none is their home"
            )
        elif len(found) > 1:
            ranks = ranks_text(sorted(layout.placement[stage] for stage in found))
            message = f"{which}: {ranks} never receive the weights, so they have several homes"
        else:
            continue
        row = int(rows[is_any(columns.stage[rows], *replicas)][0])
        yield amiss(schedule, "hop", row, message, help)


def _side_by_side(schedule: Schedule) -> Iterator[Finding]:
    """Stages with collectives that share their rank with a replica: the first of each."""
    columns = schedule.columns
    rows = np.flatnonzero(columns.is_collective | is_any(columns.kind, *MEETS))
    stages, first = np.unique(columns.stage[rows], return_index=True)
    for stage, row in zip(stages.tolist(), rows[first].tolist(), strict=True):
        held = {*schedule.stages_of(int(columns.rank[row]))}
        held &= {*schedule.layout.replicas(stage)}
        if len(held) > 1:
            names = schedule.names.stages(sorted(held))
            message = f"{here(schedule, row)}: it holds {names}, which are replicas"
            op = OPS[int(columns.kind[row])]
            help = "leave their gathers and sums to the runtime"
            if op.is_background:
                help = "exchanges are between ranks: place replicas on different ones"
            if op.is_hop:
                help = "hops are between ranks: place replicas on different ones"
            yield amiss(schedule, "collective", row, message, help)


def _unmet(schedule: Schedule) -> Iterator[Finding]:
    """Collectives that lack one which they should meet: the first of each kind and stage."""
    columns = schedule.columns
    yield from _unmet_of_microbatches(schedule)
    rows = columns.where(*kinds_of(lambda op: op.meets and op.is_of_stage))
    pairs = zip(columns.kind[rows].tolist(), columns.stage[rows].tolist(), strict=True)
    counts = Counter(pairs)
    lacking = []
    for (kind, stage), count in counts.items():
        met = met_by(schedule.layout, kind, stage)
        fewest = min(met, key=lambda pair: counts[pair], default=(kind, stage))
        if counts[fewest] < count:
            own = rows[(columns.kind[rows] == kind) & (columns.stage[rows] == stage)]
            lacking.append((int(own[counts[fewest]]), kind, fewest))
    for row, kind, (there, replica) in sorted(lacking):
        op = OPS[kind]
        count = counts[there, replica]
        what = _ENDS.get(op.meets, op.name)
        other = _ENDS.get(OPS[there].meets, op.name)
        message = (
            f"{here(schedule, row)} is {what} {count + 1} of its "
            f"{'kind' if op.is_hop else 'stage'}; {_WHOSE[op.meets]} replica, stage "
            f"{schedule.names.stage(replica)} on rank {schedule.placement[replica]}, has "
            f"{counted(count, other)}"
        )
        help = "replicas make all of them together: write as many for each"
        if op.is_hop:
            help = "a send goes to the next replica of its stage, the one of the next pipeline"
        yield amiss(schedule, "collective", row, message, help)


def _unmet_of_microbatches(schedule: Schedule) -> Iterator[Finding]:
    """Exchanges that a replica of their stage does not make of their microbatch."""
    columns = schedule.columns
    layout = schedule.layout
    sides = sides_of(schedule)
    stages = range(len(layout.placement))
    replicas = np.array([len(layout.replicas(stage)) for stage in stages])
    is_unmet = ~columns.is_collective[sides.row]
    is_unmet &= sides.counts < replicas[columns.stage[sides.row]]
    for row in sides.row[is_unmet].tolist():
        message = (
            f"{here(schedule, row)}: not all replicas of its stage exchange this one"
        )
        help = "replicas make all exchanges together: write the same ones for each"
        yield amiss(schedule, "collective", row, message, help)


def _out_of_order(schedule: Schedule) -> Iterator[Finding]:
    """Ranks that come to collectives in different orders: a cycle of events, of which each comes
    before the next one on some rank.
    """
    # Two ranks with replicas of the stages a and b:
    #
    #     rank 0    sum of a ──▶ sum of b
    #     rank 1    sum of b ──▶ sum of a
    columns = schedule.columns
    sides = sides_of(schedule)
    # Where all events happen there is no cycle, and the graph of events is needed anyway.
    if own_ideal_events(schedule).graph.is_whole:
        return
    stands = _stands_at(columns, sides)
    if not stands:
        return
    # From any rank, follow what it waits for: a side to which its own rank has not come, since it
    # stands at another one before.
    order = [min(stands)]
    steps = dict[int, tuple[int, int]]()
    while order[-1] not in steps:
        event = sides.event[np.searchsorted(sides.row, stands[order[-1]])]
        late = sides.row[sides.event == event].tolist()
        row = next(row for row in late if row > stands.get(int(columns.rank[row]), row))
        rank = int(columns.rank[row])
        steps[order[-1]] = stands[rank], row
        order.append(rank)
    cycle = [steps[rank] for rank in order[order.index(order[-1]) : -1]][::-1]
    # Begin with the lowest rank.
    first = cycle.index(min(cycle))
    cycle = cycle[first:] + cycle[:first]

    def name(row: int) -> str:
        return schedule.name_of(*columns.place(row))

    texts = [
        f"rank {columns.rank[one]} makes `{name(one)}` before `{name(other)}`"
        for one, other in cycle
    ]
    ranks = ranks_text(sorted({int(columns.rank[one]) for one, _ in cycle}))
    what = "gathers and sums"
    help = "write them in one order on all ranks that hold replicas"
    ops = [OPS[int(columns.kind[one])] for one, _ in cycle]
    if any(op.is_background for op in ops):
        what = "exchanges"
    if any(op.is_hop for op in ops):
        what = "hops"
        help = "let some ranks of the ring receive first, as every second one"
    message = f"{ranks} come to {what} in different orders: {', '.join(texts)}"
    related = tuple(
        (int(columns.source[one]), text)
        for (one, _), text in zip(cycle[1:], texts[1:], strict=True)
    )
    found = amiss(schedule, "collective", cycle[0][0], message, help)
    yield evolve(found, label=texts[0], related=related)


def _stands_at(columns: Columns, sides: Sides) -> dict[int, int]:
    """The collectives at which ranks wait for ever, by rank: each goes on where all have come."""
    is_met = sides.counts > 1
    rows = sides.row[is_met]
    events = sides.event[is_met]
    bounds = np.searchsorted(rows, columns.first).tolist()
    orders = [
        iter([*zip(rows[begin:end].tolist(), events[begin:end].tolist(), strict=True)])
        for begin, end in pairwise(bounds)
    ]
    missing = counts_of(sides.event).tolist()
    waiting: dict[int, list[int]] = {}
    stands = dict[int, int]()
    ready = [*range(len(orders))]
    while ready:
        rank = ready.pop()
        stands.pop(rank, None)
        for row, event in orders[rank]:
            missing[event] -= 1
            if missing[event]:
                stands[rank] = row
                waiting.setdefault(event, []).append(rank)
                break
            ready += waiting.pop(event, ())
    return stands
