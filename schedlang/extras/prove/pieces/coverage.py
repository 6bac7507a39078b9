"""Checks, for every n, that each stage runs each op of each microbatch once."""

from __future__ import annotations

from itertools import pairwise

from schedlang.extras.prove.pieces.linear import (
    ZERO,
    Affine,
    NeedsPeriod,
    NotLinear,
)
from schedlang.extras.prove.pieces.pieces import Op, Orders, Piece
from schedlang.language.faults import Fault
from schedlang.schedule.actions import is_background, is_copy, is_update
from schedlang.schedule.kinds import OPS, Kind
from schedlang.schedule.layout import Layout

_TRAINING: tuple[int, ...] = (Kind.F, Kind.B, Kind.W)


def check_coverage(orders: Orders, layout: Layout) -> None:
    """Fault if an op is missing, runs twice, or has a microbatch that does not exist, for all n.
    NotLinear if the answer is unknown.
    """
    kinds = {op.kind for op in orders.ops}
    if any(map(is_copy, kinds)):
        raise NotLinear(
            "it offloads activations: when a copy ends, and so what its ranks hold, follows from "
            "turns on a link, which are taken by time"
        )
    beside = next(filter(is_background, kinds), None)
    if beside is not None:
        raise NotLinear(f"it has `{OPS[beside].word}`, which goes on beside other ops")
    made = orders.makers()
    wanted = wanted_in(layout, {thing for thing, _ in made})
    for wanted_thing, stage in sorted(wanted | set(made)):
        if is_update(wanted_thing):
            continue
        ops = made.get((wanted_thing, stage), [])
        units = orders.units[stage]
        total = sum((piece.rounds for piece, _ in ops), start=ZERO)
        if (wanted_thing, stage) not in wanted and (total - units).is_negative:
            # What a rank holds is the same for all microbatches of a stage here.
            name = OPS[wanted_thing].name
            raise NotLinear(
                f"a {name} of some microbatches of a stage, and not of others"
            )
        check_once(ops, units, orders.strides[stage], wanted_thing, stage)
    # That a stage makes one update, behind its other ops, is the compiler's word at n = 0 and 1. It
    # holds for all n: pieces stand in one order, and one that grows has more rounds at n = 1.
    if len(layout.pipelines) > 1 and any(is_update(thing) for thing, _ in made):
        raise NotLinear("it has optimizer steps of replicas")


def wanted_in(layout: Layout, made: set[int]) -> set[tuple[int, int]]:
    """The things that the stages must make of each microbatch, given the things that the program
    makes at all.
    """
    stages = range(len(layout.placement))
    # Without backwards it is an inference.
    kinds = _TRAINING if made.intersection(_TRAINING[1:]) else _TRAINING[:1]
    both = ((kind, stage) for kind in kinds for stage in stages)
    return {(kind, stage) for kind, stage in both if layout.makes(kind, stage)}


def check_once(
    ops: list[tuple[Piece, Op]], units: Affine, stride: int, thing: int, stage: int
) -> None:
    """Fault unless the ops have all microbatches from 0 up to `units`, each once."""
    name = OPS[thing].name
    #: For each rest by the stride, ranges of the quotient: where they begin and end.
    ranges: dict[int, list[tuple[Affine, Affine]]] = {
        rest: [] for rest in range(stride)
    }
    total = ZERO
    for piece, op in ops:
        by_round = op.microbatch.by_round
        if op.microbatch.by_n % stride:
            raise NeedsPeriod(stride)
        rest = op.microbatch.constant % stride
        first = op.microbatch.over(stride)
        total += piece.rounds
        if not piece.grows:
            ranges[rest].append((first, first + 1))
        elif by_round == stride:
            ranges[rest].append((first, first + piece.rounds))
        # If the loop counts down, its last round has the range's first microbatch.
        elif by_round == -stride:
            ranges[rest].append((first - piece.rounds + 1, first + 1))
        else:
            raise NotLinear(
                "a loop goes on by another number of microbatches than others"
            )
    place = ops[0][1].location if ops else 0
    if total != units:
        # With another number of ops, one is missing or runs twice.
        if not (total - units).is_negative and not (units - total).is_negative:
            raise NotLinear(
                "some numbers of microbatches have as many ops as they should"
            )
        raise Fault("missing-op", f"not every {name} runs once on stage {stage}", place)
    if units.by_n % stride:
        raise NeedsPeriod(stride)
    for rest, of in ranges.items():
        # The number of microbatches with this remainder: of 7 with a stride of 3, the remainder 0
        # has three, 1 and 2 have two.
        last = (units - rest + stride - 1).over(stride)
        of.sort(key=lambda each: each[0].growth)
        if [begin for begin, _ in of] + [last] != [ZERO] + [end for _, end in of]:
            _definitely_wrong(of, last, name, stage, place)


def _definitely_wrong(
    of: list[tuple[Affine, Affine]], last: Affine, name: str, stage: int, place: int
) -> None:
    """Fault if, for all n, a microbatch is missing, twice, or does not exist. `of` are the ranges
    of the microbatches with one remainder by the stride.
    """
    for (begin, _), (after, _) in pairwise(of):
        # NeedsBase unless the ranges are in this order for all n.
        _ = (begin - after).is_negative
    borders = [ZERO, *(end for _, end in of)]
    begins = [*(begin for begin, _ in of), last]
    for border, begin in zip(borders, begins, strict=True):
        if border == begin:
            continue
        # The number is right, so with a gap or an overlap one is missing and one runs twice.
        if (border - begin).is_negative or (begin - border).is_negative:
            raise Fault(
                "missing-op", f"not every {name} runs once on stage {stage}", place
            )
    raise NotLinear(f"whether every {name} runs once on stage {stage}")
