"""Programs without a flush, for any number of microbatches in an update and any number of updates.

What a rank does in update j is its `steady` part, with microbatches counted on by j updates. Each
op of update j is assumed to start `step` later than in update j - 1. So it is enough to check one
update, with the one before and the one after it. The warm-up must be what update -1 would have done
for update 0. The versions of weights follow from each rank's own order, and a further round of a
loop whose ops are all of one update does not change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from attrs import evolve

from schedlang.extras.prove.pieces.computing import only_computing
from schedlang.extras.prove.pieces.coverage import check_once, wanted_in
from schedlang.extras.prove.pieces.formulas import Held
from schedlang.extras.prove.pieces.linear import ZERO, Affine, NotLinear
from schedlang.extras.prove.pieces.pieces import Op, Orders, Piece, split
from schedlang.extras.prove.pieces.start_times import (
    NoStamps,
    Stamped,
    Timed,
    rules_of,
    stamp,
    walked,
)
from schedlang.language.sites import Sites
from schedlang.proof.prove import ideal_execution
from schedlang.ranks.weight_versions import follow_weights
from schedlang.schedule.actions import is_background, is_transfer, is_update
from schedlang.schedule.kept import keeps
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.stream import unroll

#: The numbers of updates that are executed, until the last two updates differ by one step.
_UPDATES = (6, 12, 24, 48)


def part_of(orders: Orders, sites: Sites, name: str) -> Orders:
    """The `warmup` or the `steady` part of a program's orders."""
    return orders.changed(
        lambda op: op if sites.ops[op.location].part == name else None
    )


def check_stream(warmup: Orders, steady: Orders, schedules: Sequence[Schedule]) -> Held:
    """What ranks hold in all updates; the orders must be those of the schedules at n = 0, 1, …

    NotLinear or NoStamps unless all updates end, for all n. The versions of weights are right for
    all n if they are right at one.
    """
    layout = schedules[0].layout
    if layout.frozen:
        raise NotLinear("it has no flush, and frozen stages")
    kinds = {op.kind for orders in (warmup, steady) for op in orders.ops}
    if any(is_transfer(kind) or is_background(kind) for kind in kinds):
        raise NotLinear("it has no flush, and does more than to compute")
    ranks = tuple(_by_update(pieces, steady.units) for pieces in steady.ranks)
    steady = evolve(steady, ranks=ranks)
    _check_coverage(warmup, steady, schedules[0])
    _check_ahead(warmup, steady)
    return _check_times(steady, schedules)


def _update_of(number: Affine, units: Affine) -> int:
    """How many updates ahead a microbatch is."""
    update = 0
    while not (number - units * (update + 1)).is_negative:
        update += 1
        if update > 1:
            raise NotLinear("ranks run ahead by more than an update")
    return update


def _by_update(pieces: Sequence[Piece], units: Sequence[Affine]) -> tuple[Piece, ...]:
    """The pieces, split so that all rounds of an op belong to the same update."""
    done: list[Piece] = []
    left = list(reversed(pieces))
    while left:
        piece = left.pop()
        if (piece.rounds - 1).is_negative:
            continue
        at = _border(piece, units) if piece.grows else None
        if at is None:
            done.append(piece)
        else:
            left += reversed(split(piece, at))
    return tuple(done)


def _border(piece: Piece, units: Sequence[Affine]) -> Affine | None:
    """The first round in which an op belongs to another update than in round 0."""
    last = piece.rounds - 1
    for op in (op for op in piece.ops if not is_update(op.kind)):
        first = op.microbatch.in_round(ZERO)
        border = units[op.stage] * (_update_of(first, units[op.stage]) + 1)
        away: Affine = border - first
        step = op.microbatch.by_round
        if step < 0 or (op.microbatch.in_round(last) - border).is_negative:
            continue
        if away.by_n % step:
            raise NotLinear(
                "a loop goes on into the next update, and not at one of its rounds"
            )
        return -(-away).over(step)
    return None


def _check_coverage(warmup: Orders, steady: Orders, schedule: Schedule) -> None:
    """Check that every update has each op once: the warm-up has the first microbatches, `steady`
    goes on from there.
    """
    early, own = (orders.makers() for orders in (warmup, steady))
    wanted = (
        wanted_in(schedule.layout, {thing for thing, _ in own}) | set(own) | set(early)
    )
    for thing, stage in sorted(wanted):
        if is_update(thing):
            if len(own.get((thing, stage), ())) != 1 or (thing, stage) in early:
                raise NotLinear(f"stage {stage} does not make one update")
            continue
        before = early.get((thing, stage), [])
        ahead = ZERO
        for piece, _ in before:
            ahead += piece.rounds
        stride = steady.strides[stage]
        check_once(before, ahead, stride, thing, stage)
        both = before + own.get((thing, stage), [])
        check_once(both, ahead + steady.units[stage], stride, thing, stage)


def _check_ahead(warmup: Orders, steady: Orders) -> None:
    """Check that the warm-up has what an update does for the next one, in the same order."""
    for early, own in zip(warmup.ranks, steady.ranks, strict=True):
        ahead = [op for piece in own for op in _ahead(piece, steady.units)]
        done = [
            (op.kind, op.stage, op.microbatch.in_round(ZERO))
            for piece in early
            for op in _once(piece)
        ]
        if ahead != done:
            raise NotLinear("its warm-up is not what an update does for the next one")


def _ahead(piece: Piece, units: Sequence[Affine]) -> Iterator[tuple[int, int, Affine]]:
    """The ops of a piece for the next update, with their microbatches in that."""
    for op in (op for op in piece.ops if not is_update(op.kind)):
        number = op.microbatch.in_round(ZERO)
        if _update_of(number, units[op.stage]):
            if piece.grows:
                raise NotLinear("how far ranks run ahead depends on `microbatches`")
            yield op.kind, op.stage, number - units[op.stage]


def _once(piece: Piece) -> Iterator[Op]:
    if piece.grows:
        raise NotLinear("how far ranks run ahead depends on `microbatches`")
    yield from piece.ops


def _check_times(steady: Orders, schedules: Sequence[Schedule]) -> Held:
    """Check that start times grow along all edges of an update; return what ranks hold."""
    for updates in _UPDATES:
        longer = [only_computing(unroll(schedule, updates)) for schedule in schedules]
        walks = [_steady_walk(*each) for each in zip(schedules, longer, strict=True)]
        if all(walks):
            break
    else:
        raise NoStamps("the updates do not come to go on by one step")
    steps = [step for step, _ in filter(None, walks)]
    step = Affine(steps[0], steps[1] - steps[0])
    if any(step.at(n) != of for n, of in enumerate(steps)):
        raise NoStamps("the step of the updates has no pattern yet")
    own = stamp(steady, [walk for _, walk in filter(None, walks)], longer[0])
    # Only the middle one of three updates is checked; the others have what it needs.
    timed: list[Timed] = []
    looked_at: list[int] = []
    for rank in range(len(steady.ranks)):
        of_rank = [piece for piece in own if piece.rank == rank]
        looked_at += range(len(timed) + len(of_rank), len(timed) + 2 * len(of_rank))
        for by in (-1, 0, 1):
            timed += (_later(piece, steady.units, step, by) for piece in of_rank)
    layout = schedules[0].layout
    summed = [
        set(layout.replicas(stage)) - {stage} for stage in range(len(layout.placement))
    ]
    Stamped(timed, rules_of(longer), steady, layout.slices, summed).check(looked_at)
    return _held(steady, longer)


def _steady_walk(
    schedule: Schedule, longer: Schedule
) -> tuple[Any, list[list[Any]]] | None:
    """The step between two of the last updates of an execution, and when the batches of each rank
    start in the later one; None if there is no single step.
    """
    assert schedule.stream
    parts = zip(
        schedule.stream.warmup, schedule.stream.steady, walked(longer), strict=True
    )
    steps = set()
    own = []
    for early, steady, starts in parts:
        length = sum(1 for _ in steady.batches())
        begin = sum(1 for _ in early.batches()) + (longer.layout.updates - 3) * length
        before = starts[begin - length : begin]
        after = starts[begin : begin + length]
        steps |= {late - soon for soon, late in zip(before, after, strict=True)}
        own.append(after)
    return (steps.pop(), own) if len(steps) == 1 else None


def _later(timed: Timed, units: Sequence[Affine], step: Affine, by: int) -> Timed:
    """A piece with start times, `by` updates later."""

    def moved(op: Op) -> Op:
        return evolve(op, microbatch=op.microbatch + units[op.stage] * by)

    starts = tuple(start + step * by for start in timed.starts)
    return evolve(timed, piece=timed.piece.changed(moved), starts=starts)


def _held(steady: Orders, longer: Sequence[Schedule]) -> Held:
    """What ranks hold at most; NotLinear if a loop adds to it, so that it grows with n."""
    fixed = longer[0].costs.fixed_memory
    amounts = longer[0].costs.memory(longer[0].layout).counted()
    for piece in (piece for piece in steady.pieces if piece.grows):
        kept = (op for op in piece.ops if keeps(longer[0], op.kind, op.stage, 0))
        if sum(amounts[op.kind][op.stage] for op in kept):
            raise NotLinear("what its ranks hold depends on `microbatches`")
    seen = []
    for schedule in longer:
        execution = ideal_execution(schedule)
        assert execution
        versions = follow_weights(schedule)
        seen.append((tuple(execution.peak_memory), versions.held, versions.staleness))
    if any(before != after for before, after in pairwise(seen)):
        raise NoStamps(
            "what its ranks hold is not the same for all numbers of microbatches"
        )
    peaks, held, staleness = seen[0]
    peak = tuple(Affine(fixed.exact(of)) for of in peaks)
    return Held(peak=peak, versions=held, staleness=staleness)
