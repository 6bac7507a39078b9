"""The certificate of a proof, for a checker that does not trust the prover: docs/proof.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any

from schedlang.files.reading import source_of
from schedlang.language.expand import expand
from schedlang.language.imports import load
from schedlang.parametric.coverage import wanted_of
from schedlang.parametric.figures import Figures
from schedlang.parametric.left_out import only_computing
from schedlang.parametric.orders import (
    ONCE,
    ZERO,
    Cell,
    Op,
    Pair,
    Piece,
    Triple,
    at_round,
    minus,
)
from schedlang.parametric.stamps import Makers, Need, Sources, Stamped
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule

FORMAT = "schedlang certificate 2"
_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)


def certificate(
    program: str, params: Mapping[str, int], classes: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    """A certificate of classes of sizes of a program."""
    content = json.dumps([program, dict(params)], sort_keys=True)
    return {
        "format": FORMAT,
        "program": program,
        "params": dict(params),
        "sha256": hashlib.sha256(content.encode()).hexdigest(),
        "classes": list(classes),
    }


def certified(
    base: int,
    period: int,
    stamped: Stamped,
    figures: Figures,
    schedule: Schedule,
) -> dict[str, Any]:
    """One class of sizes: its pieces with their times, and in which rounds what is needed is made;
    `schedule` is one of those that they are of.
    """
    sources = stamped.sources()
    ranks: list[list[Any]] = [[] for _ in schedule.ranks]
    for timed in stamped.timed:
        batches = [
            {
                "ops": [
                    [Kind(op.kind).name, op.stage, *_triple(op.microbatch, timed.piece)]
                    for op in batch
                ],
                "start": _triple(timed.starts[place], timed.piece),
                "waits": _waits(stamped, sources, timed.piece, place),
            }
            for place, batch in enumerate(timed.piece.batches)
        ]
        ranks[timed.rank].append({"rounds": _numbers(timed.piece.rounds), "batches": batches})
    ways = {
        (Kind(made).name, stage, of, way)
        for (_, stage, _), needs in stamped.rules.items()
        for made, of, _, _, way in needs
        if way
    }
    return {
        "base": base,
        "period": period,
        **_setting(schedule),
        "units": [_numbers(units) for units in stamped.orders.units],
        "ways": [[made, stage, of, _short(way)] for made, stage, of, way in sorted(ways)],
        "ranks": ranks,
        "figures": {
            "makespan": _numbers(figures.makespan),
            "work": _numbers(figures.work),
            "span": _numbers(figures.span),
            "peak": [_numbers(peak) for peak in figures.peak],
        },
    }


def is_of_program(document: Mapping[str, Any]) -> bool:
    """Whether the orders in a certificate, its stages with their microbatches, and what their ops
    make, take and hold are those of its program, at two sizes of each class; CompileError if the
    program does not run there.
    """
    whole, tree = load(source_of(document["program"]))
    for one in document["classes"]:
        for n in range(2):
            size = {"microbatches": one["base"] + one["period"] * n}
            schedule = only_computing(expand(whole, tree, {**document["params"], **size}))
            orders = [_order_of(schedule, rank) for rank in range(len(schedule.ranks))]
            if orders != [_order_at(pieces, n) for pieces in one["ranks"]]:
                return False
            if any(one[name] != value for name, value in _setting(schedule).items()):
                return False
            units = [schedule.layout.units(stage) for stage in range(len(one["units"]))]
            if units != [constant + by_n * n for constant, by_n in one["units"]]:
                return False
    return True


def _setting(schedule: Schedule) -> dict[str, Any]:
    """What does not depend on the number of microbatches: stages, and what their ops make, take and
    hold.
    """
    layout = schedule.layout
    stages = range(len(layout.placement))
    durations = schedule.costs.durations(layout)
    return {
        "slices": layout.slices,
        "placement": list(layout.placement),
        "edges": [[earlier, later] for later in stages for earlier in layout.before[later]],
        "makes": [[Kind(made).name, stage] for made, stage in sorted(wanted_of(schedule))],
        "takes": {kind.name: _numbers(durations[kind]) for kind in _KINDS},
        "holds": {kind.name: _holds(schedule, kind) for kind in _KINDS},
    }


def _holds(schedule: Schedule, kind: Kind) -> list[Any]:
    """What an op of a kind adds to what its rank holds, for each stage: while it runs, and
    after.
    """
    stages = range(len(schedule.placement))
    amounts = schedule.costs.memory(schedule.layout).get(kind, [0.0] * len(stages))
    return [
        _numbers([max(amount, 0), amount if schedule.keeps(kind, stage, 0) else 0])
        for stage, amount in zip(stages, amounts, strict=True)
    ]


def _order_at(pieces: list[Any], n: int) -> list[Any]:
    """The batches of pieces for some n."""
    return [
        [(kind, stage, c + b * n + a * k) for kind, stage, c, b, a in batch["ops"]]
        for piece in pieces
        for k in range(piece["rounds"][0] + piece["rounds"][1] * n)
        for batch in piece["batches"]
    ]


def _order_of(schedule: Schedule, rank: int) -> list[Any]:
    """The batches of ops of a rank."""
    actions = schedule.ranks[rank]
    return [
        [(Kind(actions.kind[i]).name, actions.stage[i], actions.microbatch[i]) for i in batch]
        for batch in actions.batches()
    ]


def _waits(stamped: Stamped, sources: Sources, piece: Piece, place: int) -> list[Any]:
    """What a batch of a piece waits for: by rounds, up to which, and then for each op where all
    that it needs is made in these.
    """
    needed = [
        [(need[:3], *_made(sources, piece, op, need)) for need in stamped.needs(op)]
        for op in piece.batches[place]
    ]
    borders = {ZERO, piece.rounds}
    if not place:
        # The first round waits for the piece before.
        borders.add(ONCE)
    for cells in (cells for of_op in needed for _, _, cells in of_op):
        borders |= {border for cell in cells for border in (cell.begin, cell.end)}
    waits = []
    for begin, end in pairwise(sorted(borders, key=_by_growth)):
        rows = [
            [
                [Kind(made).name, stage, further, _row(makers, cells, begin, end)]
                for (made, stage, further), makers, cells in of_op
            ]
            for of_op in needed
        ]
        waits.append([_numbers(end), rows])
    return waits


def _made(sources: Sources, piece: Piece, op: Op, need: Need) -> tuple[Makers, list[Cell]]:
    """Where something that an op needs is made, by its rounds."""
    constant, by_n, by_round = op.microbatch
    made, stage, further, *_ = need
    makers = sources[made, stage]
    return makers, makers.cells(piece.rounds, (constant + further, by_n, by_round))


def _row(makers: Makers, cells: list[Cell], begin: Pair, end: Pair) -> list[Any]:
    """The piece, the batch and the round in which something is made that some rounds need."""
    cell = next(cell for cell in cells if _by_growth(begin) < _by_growth(cell.end))
    piece, batch, _ = makers.ops[cell.source]
    is_one = minus(end, begin) == ONCE
    number = (*at_round(cell.round, begin), 0) if is_one else cell.round
    return [piece, batch, _numbers(number)]


def _by_growth(number: Pair) -> Pair:
    """What puts numbers in order, of which all are for every n."""
    return number[1], number[0]


def _triple(number: Triple, piece: Piece) -> list[Any]:
    """A number by n and the round; of one round alone, the round is nothing."""
    return _numbers(number if piece.grows else (*number[:2], 0))


def _numbers(values: Iterable[Any]) -> list[Any]:
    return list(map(_short, values))


def _short(value: Any) -> int | str:
    """A number as JSON has it exactly."""
    exact = Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
    return exact.numerator if exact.denominator == 1 else str(exact)
