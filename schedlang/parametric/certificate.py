"""The certificate of a proof, for a checker that does not trust the prover: docs/proof.md."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from schedlang.files.reading import source_of
from schedlang.language.expand import expand
from schedlang.language.imports import load
from schedlang.parametric.figures import Figures
from schedlang.parametric.left_out import only_computing
from schedlang.parametric.orders import Cell, Op, Piece, Triple, at_round
from schedlang.parametric.stamps import Stamped
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule

FORMAT = "schedlang certificate 1"
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
    stride: int,
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
                "waits": [
                    [
                        [
                            Kind(made).name,
                            stage,
                            further,
                            _cells(stamped, timed.piece.rounds, op, further, sources[made, stage]),
                        ]
                        for made, stage, further, _, _ in stamped.needs(op)
                    ]
                    for op in batch
                ],
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
        "stride": stride,
        "units": [_numbers(units) for units in stamped.units],
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
    """Whether the orders in a certificate, its stages, and what their ops take are those of its
    program, at two sizes of each class; CompileError if the program does not run there.
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
    return True


def _setting(schedule: Schedule) -> dict[str, Any]:
    """What does not depend on the number of microbatches: stages, and what their ops take."""
    layout = schedule.layout
    stages = range(len(layout.placement))
    durations = schedule.costs.durations(layout)
    amounts = schedule.costs.memory(layout)
    nothing = [0.0] * len(stages)
    return {
        "slices": layout.slices,
        "placement": list(layout.placement),
        "pipelines": [[pipeline.start, pipeline.stop] for pipeline in layout.pipelines],
        "models": layout.models,
        "edges": [[earlier, later] for later in stages for earlier in layout.before[later]],
        "frozen": [stage for stage in stages if not layout.trains(stage)],
        "takes": {kind.name: _numbers(durations[kind]) for kind in _KINDS},
        "amounts": {kind.name: _numbers(amounts.get(kind, nothing)) for kind in _KINDS},
    }


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


def _cells(stamped: Stamped, rounds: Any, op: Op, further: int, makers: Any) -> list[Any]:
    constant, by_n, by_round = op.microbatch
    cells = stamped.cells(rounds, (constant + further, by_n, by_round), makers)
    return [
        [_numbers(cell.begin), _numbers(cell.end), *makers[cell.source][:2], _numbers(_round(cell))]
        for cell in cells
    ]


def _triple(number: Triple, piece: Piece) -> list[Any]:
    """A number by n and the round; of one round alone, the round is nothing."""
    return _numbers(number if piece.grows else (*number[:2], 0))


def _round(cell: Cell) -> Triple:
    return cell.round if cell.is_long else (*at_round(cell.round, cell.begin), 0)


def _numbers(values: Iterable[Any]) -> list[Any]:
    return list(map(_short, values))


def _short(value: Any) -> int | str:
    """A number as JSON has it exactly."""
    exact = Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
    return exact.numerator if exact.denominator == 1 else str(exact)
