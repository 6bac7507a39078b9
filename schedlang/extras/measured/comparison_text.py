"""The comparison of a run with its prediction, for people and for programs."""

from collections.abc import Iterable
from typing import Any

from attrs import asdict

from schedlang.diagnostics.diagnostic import counted
from schedlang.extras.measured.comparison import (
    SLOW,
    Comparison,
    Straggler,
    stragglers_of,
)
from schedlang.extras.measured.recorded_run import Run
from schedlang.report.text_table import aligned
from schedlang.report.views.terminal import draw_both
from schedlang.report.views.units import PRINTED, SECONDS, time_text, unit_of
from schedlang.schedule.naming import Names

#: The unit of traces, in seconds.
_MICROSECOND = 1e-6


def comparison_text(comparison: Comparison) -> str:
    """The two timelines, the figures of both side by side, what ops took on each stage, and which
    ranks hold up the others.
    """
    costs = _ops(comparison)
    if comparison.costs.p2p_time is not None:
        costs.append(f"a transfer takes {_time(comparison.costs.p2p_time)}")
    names = comparison.run.plan.names
    blamed = [_straggler_text(names, straggler) for straggler in comparison.stragglers]
    if not blamed:
        blamed = ["no rank is slow, and none unsteady"]
    lines = [
        draw_both(comparison.predicted, comparison.measured, names),
        "",
        *_steps(comparison),
        "",
        *_ranks(comparison),
        "",
        *costs,
        "",
        *blamed,
    ]
    return "\n".join(lines)


def _time(microseconds: float) -> str:
    """A time with its unit."""
    return time_text(microseconds, _MICROSECOND, digits=4)


class _Column:
    """Times of a table, all in the unit of the largest one."""

    def __init__(self, times: Iterable[float]) -> None:
        unit = unit_of(max(times, default=0.0) * _MICROSECOND)
        self.unit = PRINTED[unit]
        self._microseconds = SECONDS[unit] / _MICROSECOND

    def text(self, microseconds: float) -> str:
        """A time, whose unit stands in the head of the table."""
        return f"{microseconds / self._microseconds:.4g}"


def _steps(comparison: Comparison) -> list[str]:
    """How long a step takes."""
    predicted = _time(comparison.predicted.makespan)
    measured = _time(comparison.step)
    # A median without its range would look more certain than it is.
    times = [step.makespan for step in comparison.run.steps]
    shortest = _time(min(times))
    longest = _time(max(times))
    return [
        f"step time   predicted {predicted}, measured {measured}: the prediction is off by "
        f"{comparison.error:+.1%}",
        f"            median of {counted(len(times), 'step')}, {shortest} to {longest}; "
        "predicted with the costs below",
    ]


def _ranks(comparison: Comparison) -> list[str]:
    """How long each rank is busy, and which part of the makespan it is idle; predicted and
    measured.
    """
    predicted = comparison.predicted
    measured = comparison.measured
    busy = _Column([*predicted.busy, *measured.busy])
    rows = [
        ["", f"busy, {busy.unit}", "", "idle", ""],
        ["", "predicted", "measured", "predicted", "measured"],
    ]
    for rank in range(len(predicted.ranks)):
        rows.append(
            [
                f"rank {rank}",
                busy.text(predicted.busy[rank]),
                busy.text(measured.busy[rank]),
                f"{predicted.idle[rank]:.1%}",
                f"{measured.idle[rank]:.1%}",
            ]
        )
    return aligned(rows)


def _ops(comparison: Comparison) -> list[str]:
    """How long ops took, by kind and stage."""
    means = _Column(duration.mean for duration in comparison.durations)
    rows = [
        [
            "op",
            "stage",
            f"mean, {means.unit}",
            "to the other stages",
            "spread of the middle half",
        ]
    ]
    names = comparison.run.plan.names
    # By kind, so that stages can be compared.
    for duration in comparison.durations:
        rows.append(
            [
                duration.kind.name,
                names.stage(duration.stage),
                means.text(duration.mean),
                f"{duration.ratio:.2f}x",
                f"{duration.spread:.0%}",
            ]
        )
    return aligned(rows)


def _straggler_text(names: Names, straggler: Straggler) -> str:
    are_several = len(straggler.stages) > 1
    where = f"{names.stages(straggler.stages)} on rank {straggler.rank}"
    if straggler.ratio is not None:
        ratio = f"{straggler.ratio:.2f}x"
        if are_several:
            ratio = f"up to {ratio}"
        return f"slow: {where}: the ops of a microbatch take {ratio} as long as on other stages"
    return (
        f"unsteady: {where}: the middle half of the ops of a kind spreads over "
        f"{straggler.spread:.0%} of the median"
    )


def notes_of(run: Run) -> list[str]:
    """What stands out in a run: slow and unsteady ranks, and a first step that took longer."""
    names = run.plan.names
    notes = [_straggler_text(names, straggler) for straggler in stragglers_of(run)]
    first = run.steps[0].makespan
    usual = run.median.makespan
    if usual and first > SLOW * usual:
        ratio = f"{first / usual:.2f}x the median of {counted(len(run.steps), 'step')}"
        notes.append(f"the first step took {_time(first)}, {ratio}")
    return notes


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """The same for programs, in microseconds."""
    predicted = comparison.predicted
    measured = comparison.measured
    durations = []
    for duration in comparison.durations:
        durations.append(asdict(duration) | {"kind": duration.kind.name})
    stragglers = []
    for straggler in comparison.stragglers:
        # A straggler is slow or unsteady, and has one of the two figures.
        figures = asdict(straggler, filter=lambda _, value: value is not None)
        stragglers.append(figures)
    return {
        "schedule": comparison.run.plan.name,
        "params": comparison.run.plan.params,
        "unit": "microseconds",
        "steps": [step.makespan for step in comparison.run.steps],
        "predicted": {
            "makespan": predicted.makespan,
            "busy": predicted.busy,
            "idle": predicted.idle,
        },
        "measured": {
            # The median over the steps; the other figures are those of one step.
            "makespan": comparison.step,
            "busy": measured.busy,
            "idle": measured.idle,
        },
        "error": comparison.error,
        "costs": comparison.costs.to_json(),
        "ops": durations,
        "stragglers": stragglers,
    }
