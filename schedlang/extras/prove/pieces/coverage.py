"""Whether, for every n, each stage does each op of each microbatch once."""

from __future__ import annotations

from itertools import pairwise

from schedlang.extras.prove.pieces.linear import NeedsPeriod, NotLinear
from schedlang.extras.prove.pieces.pieces import (
    Op,
    Orders,
    Pair,
    Piece,
    is_negative,
    minus,
    plus,
)
from schedlang.language.faults import Fault
from schedlang.schedule.actions import is_background, is_update
from schedlang.schedule.kinds import OPS, STEPS, Kind
from schedlang.schedule.layout import Layout

_TRAINING: tuple[int, ...] = (Kind.F, Kind.B, Kind.W)


def check_coverage(orders: Orders, layout: Layout) -> None:
    """Fault where an op is missing, there twice, or of a microbatch that there is not, for all n;
    NotLinear where that cannot be said.
    """
    if any(is_background(op.kind) for op in orders.ops):
        raise NotLinear(
            "it offloads activations: when a copy ends, and so what its ranks hold, follows from "
            "turns on a link, which are taken by time"
        )
    made = orders.makers()
    wanted = wanted_in(layout, {thing for thing, _ in made})
    for wanted_thing, stage in sorted(wanted | set(made)):
        if not is_update(wanted_thing):
            ops = made.get((wanted_thing, stage), [])
            check_once(
                ops, orders.units[stage], orders.strides[stage], wanted_thing, stage
            )
    if any(is_update(thing) for thing, _ in made):
        _check_updates(orders, made, layout)


def wanted_in(layout: Layout, made: set[int]) -> set[tuple[int, int]]:
    """What the stages of a layout have to make of each microbatch, where these things are made."""
    stages = range(len(layout.placement))
    # Without backwards, nothing is trained.
    kinds = _TRAINING if made.intersection(_TRAINING[1:]) else _TRAINING[:1]
    both = ((kind, stage) for kind in kinds for stage in stages)
    return {(kind, stage) for kind, stage in both if layout.makes(kind, stage)}


def check_once(
    ops: list[tuple[Piece, Op]], units: Pair, stride: int, thing: int, stage: int
) -> None:
    """Fault unless some ops have all microbatches up to a number, each once."""
    name = OPS[thing].name
    #: For each rest by the stride, ranges of the quotient: where they begin and end.
    ranges: dict[int, list[tuple[Pair, Pair]]] = {rest: [] for rest in range(stride)}
    total: Pair = (0, 0)
    for piece, op in ops:
        constant, by_n, by_round = op.microbatch
        if by_n % stride:
            raise NeedsPeriod(stride)
        rest = constant % stride
        first = (constant // stride, by_n // stride)
        total = plus(total, piece.rounds)
        if not piece.grows:
            ranges[rest].append((first, plus(first, (1, 0))))
        elif by_round == stride:
            ranges[rest].append((first, plus(first, piece.rounds)))
        # Counting down, the last round has the first microbatch of the range.
        elif by_round == -stride:
            ranges[rest].append(
                (plus(minus(first, piece.rounds), (1, 0)), plus(first, (1, 0)))
            )
        else:
            raise NotLinear(
                "a loop goes on by another number of microbatches than others"
            )
    place = ops[0][1].location if ops else 0
    if total != units:
        # So many are not all, each once, whichever they are.
        if not is_negative(minus(total, units)) and not is_negative(
            minus(units, total)
        ):
            raise NotLinear(
                "some numbers of microbatches have as many ops as they should"
            )
        raise Fault("missing-op", f"not every {name} runs once on stage {stage}", place)
    if units[1] % stride:
        raise NeedsPeriod(stride)
    for rest, of in ranges.items():
        # How many microbatches have this rest: with a stride of 3, of 7 the rest 0 has three, 1 and
        # 2 have two.
        last = ((units[0] - rest + stride - 1) // stride, units[1] // stride)
        of.sort(key=lambda each: (each[0][1], each[0][0]))
        if [begin for begin, _ in of] + [last] != [(0, 0)] + [end for _, end in of]:
            _definitely_wrong(of, last, name, stage, place)


def _definitely_wrong(
    of: list[tuple[Pair, Pair]], last: Pair, name: str, stage: int, place: int
) -> None:
    """Fault if some microbatch is there twice, or is none, for all n."""
    for (begin, _), (after, _) in pairwise(of):
        # That they are in order for all n: else it is for larger ones.
        is_negative(minus(begin, after))
    borders = [(0, 0), *(end for _, end in of)]
    begins = [*(begin for begin, _ in of), last]
    for border, begin in zip(borders, begins, strict=True):
        if border == begin:
            continue
        # As many as there should be, and a gap or an overlap: one is missing or one is twice.
        if is_negative(minus(border, begin)) or is_negative(minus(begin, border)):
            raise Fault(
                "missing-op", f"not every {name} runs once on stage {stage}", place
            )
    raise NotLinear(f"whether every {name} runs once on stage {stage}")


def _check_updates(
    orders: Orders, made: dict[tuple[int, int], list[tuple[Piece, Op]]], layout: Layout
) -> None:
    """Whether each stage makes its update once, after all its ops."""
    if len(layout.pipelines) > 1:
        raise NotLinear("it has optimizer steps of replicas")
    for stage, rank in enumerate(orders.placement):
        if not layout.trains(stage):
            continue
        updates = [step for kind in STEPS for step in made.get((kind, stage), ())]
        if len(updates) != 1 or updates[0][0].grows:
            raise NotLinear(f"stage {stage} does not make one update")
        is_over = False
        for piece in orders.ranks[rank]:
            for batch in piece.batches:
                kinds = [op.kind for op in batch if op.stage == stage]
                if any(map(is_update, kinds)):
                    if len(batch) > 1:
                        raise NotLinear("an optimizer step overlaps with other ops")
                    is_over = True
                elif kinds and is_over:
                    raise NotLinear(f"stage {stage} goes on after its update")
