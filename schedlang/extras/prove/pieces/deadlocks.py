"""Deadlocks for every n: found at two sizes, then proved for all.

At one size, each rank that does not end waits in front of a batch. The batch needs something whose
maker is a batch of a waiting rank, at or after the batch at which that rank waits. Following this
from rank to rank gives a cycle. If the cycles of two sizes run through the same places of the
orders, their rounds are extrapolated to all n, and each step of the cycle is checked for all n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from attrs import frozen

from schedlang.extras.prove.pieces.linear import Affine
from schedlang.extras.prove.pieces.pieces import Orders, Piece
from schedlang.extras.prove.pieces.start_times import NoStamps, Rules
from schedlang.language.faults import Fault
from schedlang.proof.edges import ideal_events
from schedlang.schedule.kinds import OF_STAGE, OPS
from schedlang.schedule.schedule import Schedule

#: A batch: the number of its piece on its rank, its index in the piece, and its round.
Place = tuple[int, int, int]


@frozen
class Wait:
    """A rank that waits at the batch `at`: its op number `op` needs something, by the rule number
    `rule`, that another batch makes.
    """

    rank: int
    at: Place
    op: int
    rule: int
    maker_rank: int
    maker: Place
    maker_op: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Everything but the rounds."""
        return (
            self.rank,
            *self.at[:2],
            self.op,
            self.rule,
            self.maker_rank,
            *self.maker[:2],
            self.maker_op,
        )


def check_deadlock(orders: Orders, rules: Rules, schedules: Sequence[Schedule]) -> None:
    """Fault if the ranks deadlock for all n; NoStamps if the deadlocks of the first two sizes do
    not extend to all n.
    """
    first, second = (
        _cycle(orders, rules, schedule, n) for n, schedule in enumerate(schedules[:2])
    )
    if [wait.shape for wait in first] != [wait.shape for wait in second]:
        raise NoStamps("ranks wait for each other, at each size in other places")
    places = [
        (_linear(one.at, other.at), _linear(one.maker, other.maker))
        for one, other in zip(first, second, strict=True)
    ]
    for number, wait in enumerate(first):
        _check_need(orders, rules, wait, *places[number])
        # The maker must be the batch at which its own rank waits, or a later one.
        after = places[(number + 1) % len(first)][0]
        following = first[(number + 1) % len(first)]
        made = places[number][1]
        if wait.maker[0] != following.at[0]:
            is_behind = wait.maker[0] > following.at[0]
        elif made == after:
            is_behind = wait.maker[1] >= following.at[1]
        else:
            is_behind = (after - made).is_negative
        if not is_behind:
            raise NoStamps("ranks wait for each other, at each size in other places")
    location = (
        orders.ranks[first[0].rank][first[0].at[0]].batches[first[0].at[1]][0].location
    )
    raise Fault("deadlock", "ranks wait for each other", location)


def _linear(one: Place, other: Place) -> Affine:
    """The round of a place for all n, from those at n = 0 and n = 1."""
    return Affine(one[2], other[2] - one[2])


def _check_need(
    orders: Orders, rules: Rules, wait: Wait, at: Affine, made: Affine
) -> None:
    """NoStamps unless the waiting batch needs what the other one makes, for all n."""
    piece = orders.ranks[wait.rank][wait.at[0]]
    source = orders.ranks[wait.maker_rank][wait.maker[0]]
    op = piece.batches[wait.at[1]][wait.op]
    maker = source.batches[wait.maker[1]][wait.maker_op]
    slices = _slices(rules)
    _, _, further, _, _ = rules[op.kind, op.stage, op.microbatch.constant % slices][
        wait.rule
    ]
    needed = op.microbatch.in_round(at) + further
    is_there = needed == maker.microbatch.in_round(made)
    if not is_there or not _is_round(at, piece) or not _is_round(made, source):
        raise NoStamps("ranks wait for each other, at each size in other places")


def _is_round(at: Affine, piece: Piece) -> bool:
    return not at.is_negative and (at - piece.rounds).is_negative


def _slices(rules: Rules) -> int:
    return 1 + max(number for _, _, number in rules)


def _cycle(orders: Orders, rules: Rules, schedule: Schedule, n: int) -> list[Wait]:
    """The cycle of waits at one size, beginning with its lowest rank."""
    events = ideal_events(schedule, schedule.costs)
    columns = schedule.columns
    heads = np.flatnonzero(
        (columns.batch == np.arange(len(columns))) & ~columns.is_transfer
    )
    is_done = np.isfinite(events.graph.ends[events.item[heads]])
    bounds = np.searchsorted(heads, columns.first)
    batches = [list(_places(orders, rank, n)) for rank in range(len(orders.ranks))]
    made: dict[tuple[int, int, int], tuple[int, int, int]] = {}
    for rank, own in enumerate(batches):
        for index, (_, ops) in enumerate(own):
            for number, (kind, stage, microbatch) in enumerate(ops):
                for thing in OPS[kind].makes:
                    made[thing, stage, microbatch] = rank, index, number
    stands = {}
    for rank, (begin, end) in enumerate(pairwise(bounds.tolist())):
        undone = np.flatnonzero(~is_done[begin:end])
        if len(undone):
            stands[rank] = int(undone[0])
    waits: dict[int, Wait] = {}
    rank = next(iter(stands))
    # Every waiting rank waits for a waiting rank, so this ends in a cycle.
    while rank not in waits:
        waits[rank] = _wait(rules, batches, made, stands, rank)
        rank = waits[rank].maker_rank
    ordered = list(waits)
    cycle = ordered[ordered.index(rank) :]
    # The cycle begins with its lowest rank.
    lowest = cycle.index(min(cycle))
    return [waits[each] for each in cycle[lowest:] + cycle[:lowest]]


def _places(orders: Orders, rank: int, n: int) -> Iterator[tuple[Place, Any]]:
    """The batches of a rank at some n, in order: the place, and the ops with their microbatches."""
    for number, piece in enumerate(orders.ranks[rank]):
        for k in range(piece.rounds.at(n)):
            for place, batch in enumerate(piece.batches):
                yield (
                    (number, place, k),
                    [(op.kind, op.stage, op.microbatch.at(n, k)) for op in batch],
                )


def _wait(
    rules: Rules, batches: Any, made: Any, stands: dict[int, int], rank: int
) -> Wait:
    """What the batch needs at which a rank waits."""
    at, ops = batches[rank][stands[rank]]
    slices = _slices(rules)
    for number, (kind, stage, microbatch) in enumerate(ops):
        if kind in OF_STAGE:
            continue
        for rule, (thing, of, further, _, _) in enumerate(
            rules[kind, stage, microbatch % slices]
        ):
            found = made.get((thing, of, microbatch + further))
            if found is None:
                continue
            maker_rank, index, maker_op = found
            if maker_rank in stands and index >= stands[maker_rank]:
                return Wait(
                    rank,
                    at,
                    number,
                    rule,
                    maker_rank,
                    batches[maker_rank][index][0],
                    maker_op,
                )
    raise NoStamps("a rank stands still, and what it waits for was not found")
