"""What a plan must keep on each rank by itself, whatever the transport; written apart from the
verifier.

Every op is there once, on its rank; nothing runs or is sent before what it needs is made, or its
receive is issued; and weights are read and updated by their rules.
"""

from collections import defaultdict

from schedlang import Kind, Schedule
from tests.support.graph import far_edges, handovers, is_near, pieces, runs_ahead
from tests.support.own_collectives import COLLECTIVES, EXCHANGES
from tests.support.own_needs import HOPS

Row = tuple[int, int, int]
#: What is there: its kind, stage and unit; received, also the stage that it is for.
There = set[tuple[str | int, ...]]
#: What is there after an action: a forward's output F, a gradient B of the input and G of the
#: weights, and so on.
MAKES = {
    Kind.F: "F",
    Kind.B: "BG",
    Kind.I: "B",
    Kind.W: "G",
    Kind.R: "R",
    Kind.OFFLOAD: "O",
    Kind.RELOAD: "L",
}
#: The kinds of an inference.
FORWARD = (Kind.F, Kind.SEND_F, Kind.RECV_F)
COPIES = (Kind.OFFLOAD, Kind.RELOAD)


def is_in_order(schedule: Schedule) -> bool:
    all_rows = [
        [actions.row(index)[:3] for index in range(len(actions))]
        for actions in schedule.ranks
    ]
    # Gathers, sums and hops have rules of their own.
    beside = (*COLLECTIVES, *HOPS)
    rows = [[row for row in rank if row[0] not in beside] for rank in all_rows]
    everything = [row for rank in rows for row in rank]
    #: The versions that the forwards of each update read, on all replicas of a stage.
    versions: dict[tuple[int, int], set[int]] = defaultdict(set)
    return (
        len(everything) == len(set(everything))
        and all(
            _exists(schedule, rank, *row)
            for rank, own in enumerate(rows)
            for row in own
        )
        and are_exchanged(schedule)
        and _is_complete(schedule, set(everything))
        and all(_has_all_needs(schedule, rank) for rank in range(len(rows)))
        and all(
            _keeps_weights(schedule, rows[rank], stage, versions)
            for stage, rank in enumerate(schedule.placement)
        )
    )


def are_exchanged(schedule: Schedule) -> bool:
    """Whether exchanges stand where they must: between the ops of two neighbouring stages of a
    rank, whose activations and gradients are both exchanged, or neither.
    """
    rows = [
        [actions.row(index)[:3] for index in range(len(actions))]
        for actions in schedule.ranks
    ]
    everything = [row for rank in rows for row in rank]
    beside = (*COLLECTIVES, *HOPS)
    trains = any(kind not in (*FORWARD, *beside) for kind, *_ in everything)
    for rank, own in enumerate(rows):
        for at, (kind, stage, unit) in enumerate(own):
            if kind not in EXCHANGES:
                continue
            forwards = kind == Kind.EXCHANGE_F
            if not 0 <= stage < len(schedule.placement):
                return False
            other = stage - 1 if forwards else stage + 1
            if not _is_between(schedule, rank, stage, other):
                return False
            if not 0 <= unit < _units(schedule, stage) or everything.count(own[at]) > 1:
                return False
            ops = (Kind.F,) if forwards else (Kind.B, Kind.I)
            before = own[:at]
            if not any((op, other, unit) in before for op in ops):
                return False
            if any((op, stage, unit) in before for op in ops):
                return False
            if not forwards and not has_backward(schedule, stage):
                return False
            counterpart = Kind.EXCHANGE_B if forwards else Kind.EXCHANGE_F
            is_one_way = forwards and not (trains and has_backward(schedule, other))
            if not is_one_way and (counterpart, other, unit) not in everything:
                return False
    return True


def _is_between(schedule: Schedule, rank: int, stage: int, other: int) -> bool:
    """Whether a rank has a stage and its neighbour, and nothing else comes to the stage from that
    side.
    """
    layout = schedule.layout
    placement = schedule.placement
    near = is_near(layout, min(stage, other))
    this_side = 1 if other < stage else 0
    far = [edge for edge in far_edges(layout) if edge[this_side] == stage]
    return near and not far and placement[stage] == placement[other] == rank


def _ends(schedule: Schedule, stage: int) -> tuple[int, int]:
    """The first and the last stage of a stage's pipeline."""
    return next(
        (each.start, each.stop - 1)
        for each in schedule.layout.pipelines
        if each.start <= stage < each.stop
    )


def _units(schedule: Schedule, stage: int) -> int:
    pipeline = next(
        each for each in schedule.layout.pipelines if each.start <= stage < each.stop
    )
    return pipeline.microbatches * schedule.layout.slices


def _stages(schedule: Schedule, kind: int, number: int) -> tuple[int, int]:
    """The stages at the two ends of a transfer, its own first."""
    # A send of activations and a receive of gradients are of the earlier stage, with the later one
    # at their other end.
    step = 1 if kind in (Kind.SEND_F, Kind.RECV_B) else -1
    skip = number - len(schedule.placement)
    return (
        (number, number + step)
        if skip < 0
        else far_edges(schedule.layout)[skip][::step]
    )


def _exists(schedule: Schedule, rank: int, kind: int, stage: int, unit: int) -> bool:
    """Whether there is such an action, on this rank."""
    placement = schedule.placement
    if stage >= len(placement) + (
        len(far_edges(schedule.layout)) if kind >= Kind.SEND_F else 0
    ):
        return False
    if kind >= Kind.SEND_F:
        is_far = stage >= len(placement)
        stage, other = _stages(schedule, kind, stage)
        if not is_far and not is_near(schedule.layout, min(stage, other)):
            return False
        if placement[other] == rank:
            return False
        # Gradients go to the earlier stage, and activations to no stage that takes others.
        if kind in (Kind.SEND_B, Kind.RECV_B):
            if not has_backward(schedule, other if kind == Kind.SEND_B else stage):
                return False
        elif not is_far and max(stage, other) in handovers(schedule.layout):
            return False
    if placement[stage] != rank:
        return False
    if kind == Kind.U:
        return unit < schedule.layout.updates
    return 0 <= unit < _units(schedule, stage)


def _is_complete(schedule: Schedule, found: set[Row]) -> bool:
    """Whether every stage runs each microbatch's forward and backward, or none has a backward."""
    trains = any(kind not in FORWARD for kind, *_ in found)
    updates = any(kind == Kind.U for kind, *_ in found)
    # There are versions of weights where updates make them.
    stages = range(len(schedule.placement))
    if not updates and any(
        schedule.weights_of(stage).name != "latest" for stage in stages
    ):
        return False
    for stage in range(len(schedule.placement)):
        for unit in range(_units(schedule, stage)):
            # What a trained stage must have done is one of two sets; recomputation and copies may
            # come beside.
            done = {kind for kind in MAKES if (kind, stage, unit) in found}
            work = done - {Kind.R, *COPIES}
            copies = done & {*COPIES}
            if not trains:
                right = [{Kind.F}]
            elif _is_trained(schedule, stage):
                right = [{Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}]
            else:
                right = [
                    {Kind.F, Kind.I} if has_backward(schedule, stage) else {Kind.F}
                ]
            if work not in right or (done > work and right == [{Kind.F}] and trains):
                return False
            # A copy away without one back, or the other way round; or a copy of what is made again
            # anyway.
            if len(copies) == 1 or (copies and Kind.R in done):
                return False
            # A copy to another rank needs another one.
            keepers = schedule.layout.keepers
            rank = schedule.placement[stage]
            if copies and keepers and keepers[rank] == rank:
                return False
        made = {
            max(unit, 0) for kind, at, unit in found if (kind, at) == (Kind.U, stage)
        }
        wanted = (
            set(range(schedule.layout.updates))
            if _is_trained(schedule, stage)
            else set()
        )
        if updates and made != wanted:
            return False
    return True


def _is_trained(schedule: Schedule, stage: int) -> bool:
    """Whether a stage makes gradients of its weights."""
    if runs_ahead(schedule.layout, stage):
        return False
    return pieces(schedule.layout, stage)[0] not in schedule.layout.frozen


def has_backward(schedule: Schedule, stage: int) -> bool:
    """Whether a stage is trained, or one before it."""
    if _is_trained(schedule, stage):
        return True
    if runs_ahead(schedule.layout, stage):
        return False
    before = [
        earlier for earlier, later in far_edges(schedule.layout) if later == stage
    ]
    if is_near(schedule.layout, stage - 1):
        before.append(stage - 1)
    return any(has_backward(schedule, earlier) for earlier in before)


def _has_all_needs(schedule: Schedule, rank: int) -> bool:
    """Whether what each action needs is made by actions before it, or a receive for it is issued."""
    actions = schedule.ranks[rank]
    there = There()
    again = {
        row[1:3] for row in map(actions.row, range(len(actions))) if row[0] == Kind.R
    }
    away = {
        row[1:3]
        for row in map(actions.row, range(len(actions)))
        if row[0] == Kind.OFFLOAD
    }
    for batch in actions.batches():
        rows = [actions.row(index)[:3] for index in batch]
        if len(rows) > 1 and any(row[0] in COPIES for row in rows):
            return False
        if _changes_what_is_read(schedule, rows):
            return False
        made = There()
        for kind, number, unit in rows:
            stage, other = (
                _stages(schedule, kind, number)
                if kind >= Kind.SEND_F
                else (number, number)
            )
            # What the backward reads: made again, brought back, or still there from the forward.
            kept = (
                "R" if (stage, unit) in again else "L" if (stage, unit) in away else "F"
            )
            if not _needs(schedule, kind, stage, unit, kept) <= there:
                return False
            if kind in (Kind.RECV_F, Kind.RECV_B):
                made.add(("F" if kind == Kind.RECV_F else "B", other, unit, stage))
            made |= {(each, stage, unit) for each in MAKES.get(Kind(kind), "")}
        there |= made
    return True


def _changes_what_is_read(schedule: Schedule, rows: list[Row]) -> bool:
    """Whether an op overlaps with an update of its own stage, or of a replica of it."""
    updated = {
        piece
        for kind, stage, _ in rows
        if kind == Kind.U
        for piece in pieces(schedule.layout, stage)
    }
    return any(kind != Kind.U and stage in updated for kind, stage, _ in rows)


def _needs(schedule: Schedule, kind: int, stage: int, unit: int, kept: str) -> There:
    """What must be on a rank before an action; `kept` is what the backward reads the forward's
    activations from.
    """
    slices = schedule.layout.slices

    def of(what: str, other: int) -> tuple[str | int, ...]:
        # What another rank makes is here for the stage that has received it, and for no other.
        here = schedule.placement[other] == schedule.placement[stage]
        return (what, other, unit) if here else (what, other, unit, stage)

    if kind == Kind.F:
        has_own = is_near(schedule.layout, stage - 1) and stage not in handovers(
            schedule.layout
        )
        before = {of("F", stage - 1)} if has_own else There()
        before |= {
            of("F", earlier)
            for earlier, later in far_edges(schedule.layout)
            if later == stage
        }
        return before | ({("F", stage, unit - 1)} if unit % slices else set())
    if kind in (Kind.B, Kind.I):
        after = {of("B", stage + 1)} if is_near(schedule.layout, stage) else There()
        after |= {
            of("B", later)
            for earlier, later in far_edges(schedule.layout)
            if earlier == stage and not handovers(schedule.layout)
        }
        return (
            {(kept, stage, unit)}
            | after
            | ({("B", stage, unit + 1)} if (unit + 1) % slices else set())
        )
    if kind == Kind.U:
        number = max(unit, 0)
        found = set()
        for same in pieces(schedule.layout, stage):
            if schedule.placement[same] == schedule.placement[stage]:
                size = _units(schedule, same) // schedule.layout.updates
                found |= {
                    ("G", same, each)
                    for each in range(number * size, (number + 1) * size)
                }
        return found
    needed = {
        Kind.W: "B",
        Kind.R: "F",
        Kind.OFFLOAD: "F",
        Kind.RELOAD: "O",
        Kind.SEND_F: "F",
        Kind.SEND_B: "B",
    }
    return {(needed[Kind(kind)], stage, unit)} if kind in needed else set()


def _repeats(rule: str, kind: int) -> bool:
    """Whether an op must read what its forward has read, and nothing keeps that for it."""
    return rule == "latest" or (rule == "unstashed" and kind == Kind.R)


def _keeps_weights(
    schedule: Schedule,
    rows: list[Row],
    stage: int,
    versions: dict[tuple[int, int], set[int]],
) -> bool:
    """Whether a stage reads its weights by its rule, as its replicas before it do, and each gradient
    goes into the update that it belongs to.
    """
    rule = schedule.weights_of(stage)
    updates = schedule.layout.updates
    done = 0
    read: dict[int, int] = {}
    first = pieces(schedule.layout, stage)[0]
    for kind, at, unit in rows:
        if at != stage or kind >= Kind.OFFLOAD:
            continue
        # The update that a unit belongs to: units are shared out evenly, in order.
        update = unit * updates // _units(schedule, stage)
        if kind == Kind.U:
            done += 1
        elif kind == Kind.F:
            read[unit] = max(update - rule.delay, 0) if rule.name == "delay" else done
            if rule.name != "unstashed":
                versions[first, update].add(read[unit])
            if read[unit] > done or len(versions[first, update]) > 1:
                return False
        elif (_repeats(rule.name, kind) and read[unit] != done) or (
            kind in (Kind.B, Kind.W) and update != done
        ):
            return False
    return True
