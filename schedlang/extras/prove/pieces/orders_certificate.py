"""Writes the certificate of a proof for any number of microbatches (docs/proof.md)."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from schedlang.extras.prove.pieces.computing import only_computing
from schedlang.extras.prove.pieces.formulas import Figures, held_by
from schedlang.extras.prove.pieces.linear import ONCE, ZERO, Affine
from schedlang.extras.prove.pieces.pieces import Cell, Op, Piece
from schedlang.extras.prove.pieces.start_times import Need, Sources, Stamped, rules_of
from schedlang.schedule.kept import keeps
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule


def certified(
    base: int,
    period: int,
    unrolled: int,
    stamped: Stamped,
    figures: Figures,
    schedules: Sequence[Schedule],
    is_idle: bool = False,
) -> dict[str, Any]:
    """One class of a certificate: its pieces with start times, and which round of which op makes
    what an op needs.

    `schedules` are those at n = 0, 1, … With `is_idle`, backwards of frozen stages take their time.
    """
    sources = stamped.sources()
    ranks: list[list[Any]] = [[] for _ in schedules[0].ranks]
    for timed in stamped.timed:
        batches = [
            {
                "ops": [
                    [
                        Kind(op.kind).name,
                        op.stage,
                        *_in_piece(op.microbatch, timed.piece),
                    ]
                    for op in batch
                ],
                "start": _in_piece(timed.starts[place], timed.piece),
                "waits": _waits(stamped, sources, timed.piece, place),
            }
            for place, batch in enumerate(timed.piece.batches)
        ]
        ranks[timed.rank].append(
            {"rounds": _number(*timed.piece.rounds), "batches": batches}
        )
    return {
        "base": base,
        "period": period,
        "unrolled": unrolled,
        "idle": is_idle,
        **setting(list(map(only_computing, schedules))),
        "units": [_number(*units) for units in stamped.orders.units],
        "ranks": ranks,
        "figures": {
            "makespan": _number(*figures.makespan),
            "work": _number(*figures.work),
            "span": _number(*figures.span),
            "peak": [_number(*peak) for peak in figures.peak],
        },
    }


def setting(schedules: Sequence[Schedule]) -> dict[str, Any]:
    """What a certificate takes from the program: stages, edges of activations and of gradients,
    how long messages take, and for each kind and stage how long an op takes and how much it holds,
    while it runs and after.
    """
    schedule = schedules[0]
    layout = schedule.layout
    stages = range(len(layout.placement))
    durations = schedule.costs.durations(layout)
    amount_of = held_by(schedules)
    ops = []
    of_each = np.stack([schedule.columns.kind, schedule.columns.stage], axis=1)
    for kind, stage in np.unique(of_each, axis=0).tolist():
        amount = amount_of(kind, stage)
        meanwhile = ZERO if amount.is_negative else amount
        after = amount if keeps(schedule, kind, stage, 0) else ZERO
        takes = _number(durations.fixed.exact(durations[Kind(kind)][stage]))
        held = _number(*meanwhile), _number(*after)
        ops.append([Kind(kind).name, stage, takes, *held])
    ways = {
        (Kind(made).name, stage, of, way)
        for (_, stage, _), needs in rules_of(schedules).items()
        for made, of, _, _, way in needs
        if way
    }
    return {
        "slices": layout.slices,
        "placement": list(layout.placement),
        "edges": [
            [earlier, later] for later in stages for earlier in layout.before[later]
        ],
        "gradients": [
            [earlier, later]
            for later in stages
            for earlier in layout.gradients_to[later]
        ],
        "ops": ops,
        "ways": [
            [made, stage, of, _number(way)] for made, stage, of, way in sorted(ways)
        ],
    }


def _waits(stamped: Stamped, sources: Sources, piece: Piece, place: int) -> list[Any]:
    """For each range of rounds of a batch: its end, and for each need of each op the maker and its
    round, in the order of the needs' names and stages.
    """
    needed = [
        [
            _made(sources, piece, op, need)
            for need in sorted(stamped.needs(op), key=_by_name)
        ]
        for op in piece.batches[place]
    ]
    borders = {ZERO, piece.rounds}
    if not place:
        # Round 0 waits for the piece before, the others for the round before.
        borders.add(ONCE)
    for cells in (cells for of_op in needed for cells in of_op):
        borders |= {border for cell in cells for border in (cell.begin, cell.end)}
    waits = []
    for begin, end in pairwise(sorted(borders, key=lambda border: border.growth)):
        rows = [[_row(cells, begin, end) for cells in of_op] for of_op in needed]
        waits.append([_number(*end), rows])
    return waits


def _made(sources: Sources, piece: Piece, op: Op, need: Need) -> list[Cell]:
    """Where the thing is made that an op needs, by the op's rounds."""
    made, stage, further, *_ = need
    return sources[made, stage].cells(piece.rounds, op.microbatch + further)


def _row(cells: list[Cell], begin: Affine, end: Affine) -> list[Any]:
    """The maker of a thing in the rounds from `begin` to `end`, and its round."""
    cell = next(cell for cell in cells if begin.growth < cell.end.growth)
    is_one = end - begin == ONCE
    number = cell.round.in_round(begin) if is_one else cell.round
    return [cell.source, _number(*number)]


def _by_name(need: Need) -> tuple[str, int, int]:
    made, stage, further, *_ = need
    return Kind(made).name, stage, further


def _in_piece(number: Affine, piece: Piece) -> list[Any]:
    """A number by n and the round; without the round if the piece has only one."""
    return _number(*(number if piece.grows else number.in_round(ZERO)))


def _number(constant: Any, by_n: Any = 0, by_round: Any = 0) -> list[Any]:
    """A number in the notation of certificates."""
    return list(map(_short, (constant, by_n, by_round)))


def _short(value: Any) -> int | str:
    """A coefficient as JSON stores it exactly."""
    exact = Fraction(value)
    return exact.numerator if exact.denominator == 1 else str(exact)
