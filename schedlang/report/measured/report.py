"""What a comparison of a run with its prediction says, for people and for machines."""

from typing import Any

from attrs import asdict

from schedlang.report.measured.comparison import Comparison, Durations, Straggler
from schedlang.report.views.terminal import draw_both

_MILLISECOND = 1000.0


def comparison_text(found: Comparison) -> str:
    """The two timelines, one figure of each in a line, what ops took by stage, and who is to blame;
    in milliseconds.
    """
    steps = [step.makespan / _MILLISECOND for step in found.run.steps]
    p2p = found.costs.p2p
    count = len(steps)
    return "\n".join(
        [
            draw_both(found.predicted, found.measured),
            "",
            f"step time   predicted {found.predicted.makespan / _MILLISECOND:.4g} ms, measured "
            f"{found.step / _MILLISECOND:.4g} ms: the prediction is off by {found.error:+.1%}",
            f"            median of {count} step{'' if count == 1 else 's'}, {min(steps):.4g} to "
            f"{max(steps):.4g} ms; "
            "predicted with the costs below",
            "",
            *_ranks(found),
            "",
            *_ops(found),
            *([] if p2p is None else [f"a transfer takes {p2p / _MILLISECOND:.4g} ms"]),
            "",
            *(
                map(_blame, found.stragglers)
                if found.stragglers
                else ["no rank is slow, and none unsteady"]
            ),
        ]
    )


def _ranks(found: Comparison) -> list[str]:
    """How long each rank is busy and idle, in both; idle is of the makespan."""
    both = found.predicted, found.measured
    rows = [["", "busy, ms", "", "idle", ""], ["", *["predicted", "measured"] * 2]]
    for rank in range(len(found.predicted.ranks)):
        busy = [f"{timeline.busy[rank] / _MILLISECOND:.4g}" for timeline in both]
        rows.append([f"rank {rank}", *busy, *(f"{timeline.idle[rank]:.1%}" for timeline in both)])
    return _table(rows)


def _ops(found: Comparison) -> list[str]:
    """How long ops took: by kind and stage."""
    rows = [["op", "stage", "mean, ms", "to the other stages", "spread of the middle half"]]
    for each in found.durations:
        took = f"{each.mean / _MILLISECOND:.4g}", f"{each.ratio:.2f}x", f"{each.spread:.0%}"
        rows.append([each.kind.name, str(each.stage), *took])
    return _table(rows)


def _table(rows: list[list[str]]) -> list[str]:
    first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [
        "  ".join([f"{row[0]:<{first}}", *map(str.rjust, row[1:], widths)]).rstrip() for row in rows
    ]


def _blame(straggler: Straggler) -> str:
    several = len(straggler.stages) > 1
    stages = (
        f"stage{'s' if several else ''} {', '.join(map(str, straggler.stages))} on rank "
        f"{straggler.rank}"
    )
    if straggler.ratio is not None:
        worst = "up to " if several else ""
        return (
            f"slow: {stages}: the ops of a microbatch take {worst}{straggler.ratio:.2f}x as "
            "long as on other stages"
        )
    return (
        f"unsteady: {stages}: the middle half of the ops of a kind spreads over "
        f"{straggler.spread:.0%} of the median"
    )


def comparison_json(found: Comparison) -> dict[str, Any]:
    """The same for machines, in microseconds."""
    return {
        "schedule": found.run.plan.name,
        "params": found.run.plan.params,
        "unit": "microseconds",
        "steps": [step.makespan for step in found.run.steps],
        "predicted": _figures(found, predicted=True),
        "measured": _figures(found, predicted=False),
        "error": found.error,
        "costs": found.costs.to_json(),
        "ops": [_op(each) for each in found.durations],
        "stragglers": [
            asdict(each, filter=lambda _, value: value is not None) for each in found.stragglers
        ],
    }


def _figures(found: Comparison, predicted: bool) -> dict[str, Any]:
    """Of a timeline; the measured makespan is the median over the steps."""
    timeline = found.predicted if predicted else found.measured
    makespan = timeline.makespan if predicted else found.step
    return {"makespan": makespan, "busy": timeline.busy, "idle": timeline.idle}


def _op(each: Durations) -> dict[str, Any]:
    return asdict(each) | {"kind": each.kind.name}
