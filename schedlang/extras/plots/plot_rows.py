"""What plots show: rows of numbers, as pandas takes them, and what is written beside them.

`PLOTS` has a row for each kind of plot, which is a function from executions to a `Chart`. Nothing
here draws.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

import numpy as np
from attrs import frozen

from schedlang.proof.execution import Execution
from schedlang.report.bubbles.account import Account
from schedlang.report.bubbles.attribution import CAUSES
from schedlang.report.model_share import Share
from schedlang.report.views.units import BYTES, PRINTED, SECONDS, unit_of

Row = dict[str, Any]


class Form(Enum):
    """How rows are drawn."""

    LINES = "a line for each series, with a mark for each row"
    STEPS = "a line for each series, which stays until its next row"
    BARS = "a bar for each x, with the series on top of each other"
    POINTS = "a mark for each row, and a line along the frontier"


@frozen
class Axis:
    """What an axis shows: a column of the rows, `scale` times its numbers, and what is written."""

    column: str
    title: str
    scale: float = 1.0

    def of(self, row: Row) -> float:
        """Where a row is on the axis."""
        value: float = row[self.column]
        return value * self.scale


@frozen
class Limit:
    """A line across the plot at a value of the x axis."""

    value: float
    name: str


@frozen(eq=False)
class Chart:
    """What a plot shows: its rows of numbers, and how they are drawn.

    `rows` is a list of dictionaries, as `pandas.DataFrame` takes it; each has the `command` that
    gives its numbers. `series` is the column that tells lines, or parts of bars, apart.
    """

    title: str
    form: Form
    x: Axis
    y: Axis
    rows: list[Row]
    series: str
    limit: Limit | None = None
    #: The name of the line on which y is x, if there is one.
    diagonal: str | None = None
    #: What is written below, such as the sizes that a program refuses.
    notes: tuple[str, ...] = ()


@frozen(eq=False)
class Shown:
    """An execution that is plotted, the `name` of its schedule, and the command that simulates it.

    A unit of its costs has so many `seconds`, if that is known. Beside schedules that cut the model
    into another number of stages, it is plotted as it is at its `share` of the model.
    """

    name: str
    execution: Execution
    command: str
    seconds: float | None = None
    share: Share | None = None
    shared: Execution | None = None

    @property
    def at_share(self) -> Execution:
        """The execution whose times compare with those of the others."""
        return self.shared or self.execution

    @property
    def stage(self) -> float:
        """How much an activation of a stage counts beside those of the others."""
        return 1.0 if self.share is None else float(self.share.factor)

    @property
    def figures(self) -> Row:
        """The row of the execution."""
        schedule = self.execution.schedule
        timeline = self.execution.timeline
        return {
            "schedule": self.name,
            **schedule.params,
            "ranks": len(schedule.ranks),
            "microbatches": schedule.layout.microbatches,
            "stages": schedule.layout.pieces,
            "makespan": timeline.makespan,
            "bubble_over_makespan": timeline.bubble_over_makespan,
            "bubble_over_ideal": timeline.bubble_over_ideal,
            "busy_ranks": sum(timeline.busy) / (timeline.makespan or 1.0),
            "command": self.command,
        }


class Varied(NamedTuple):
    """The parameter along the x axis of a plot, and its values where nobody says others: numbers,
    or with `of_ranks` multiples of the number of ranks. Other parameters are then `fixed`.
    """

    param: str
    values: tuple[int, ...]
    of_ranks: bool = False
    fixed: Mapping[str, int] = {}


class Kind(NamedTuple):
    """A kind of plot: the function that makes it of executions, and the parameter on its axis."""

    plot: Callable[[Sequence[Shown]], Chart]
    axis: Varied | None = None


def bubble(shown: Sequence[Shown]) -> Chart:
    """Idle time against the number of microbatches."""
    return Chart(
        title="Idle time against microbatches",
        form=Form.LINES,
        x=Axis("microbatches", "microbatches"),
        y=Axis("bubble_over_makespan", "% of all time is idle", 100.0),
        rows=sorted(
            (each.figures for each in shown), key=lambda row: row["microbatches"]
        ),
        series="schedule",
    )


def scaling(shown: Sequence[Shown]) -> Chart:
    """How many ranks work at a time, against the number of ranks."""
    return Chart(
        title="Scaling with ranks",
        form=Form.LINES,
        x=Axis("ranks", "ranks"),
        y=Axis("busy_ranks", "ranks at work, on average"),
        rows=sorted((each.figures for each in shown), key=lambda row: row["ranks"]),
        series="schedule",
        diagonal="all of them",
    )


def memory(shown: Sequence[Shown]) -> Chart:
    """What the fullest rank of each schedule holds over time."""
    in_bytes = _have_bytes(shown)
    rows: list[Row] = []
    for each in shown:
        execution = each.at_share
        held = execution.memory_bytes if in_bytes else execution.memory
        assert held is not None
        peaks = [max((amount for _, amount in steps), default=0.0) for steps in held]
        rank = peaks.index(max(peaks))
        start = execution.timeline.start
        end = start + execution.timeline.makespan
        row: Row = {"schedule": f"{each.name}, rank {rank}", "command": each.command}
        for time, level in _levels([(start, 0.0), *held[rank]], end):
            amount = level if in_bytes else level * each.stage
            rows.append({**row, "rank": rank, "time": time - start, "held": amount})
    return Chart(
        title="What the fullest rank holds over time",
        form=Form.STEPS,
        x=_time_axis("time", "time", shown, [row["time"] for row in rows]),
        y=_amount_axis("held", shown, [row["held"] for row in rows]),
        rows=rows,
        series="schedule",
    )


def _levels(
    steps: Sequence[tuple[float, float]], end: float
) -> Iterator[tuple[float, float]]:
    """The steps up to an end, without a fall where what fell rises again at the same time."""
    before = 0.0
    for time, group in groupby(steps, key=lambda step: step[0]):
        levels = [level for _, level in group]
        highest = max(levels)
        if highest > max(before, levels[-1]):
            yield time, highest
        before = levels[-1]
        yield time, before
    yield end, before


def frontier(shown: Sequence[Shown]) -> Chart:
    """Makespan against memory, and the frontier of schedules that no other one is better than."""
    in_bytes = _have_bytes(shown)
    rows: list[Row] = []
    for each in shown:
        execution = each.execution
        peaks = execution.peak_bytes if in_bytes else execution.peak_memory
        assert peaks is not None
        held = max(peaks) if in_bytes else max(peaks) * each.stage
        time = each.at_share.timeline.makespan
        rows.append({**each.figures, "held": held, "at_share": time})
    mark_frontier(rows, "held", "at_share")
    return Chart(
        title="Makespan against memory",
        form=Form.POINTS,
        x=_amount_axis("held", shown, [row["held"] for row in rows]),
        y=_time_axis("at_share", "makespan", shown, [row["at_share"] for row in rows]),
        rows=rows,
        series="schedule",
    )


def mark_frontier(rows: Sequence[Row], cost: str, other: str) -> None:
    """Set `frontier` in each row: whether none is better in one column and as good in the other."""
    least = inf
    for row in sorted(rows, key=lambda row: (row[cost], row[other])):
        row["frontier"] = row[other] < least
        least = min(least, row[other])


def bars(shown: Sequence[Shown]) -> Chart:
    """The idle time of several schedules, by its causes."""
    rows: list[Row] = []
    for each in shown:
        timeline = each.execution.timeline
        all_time = timeline.makespan * len(timeline.ranks) or 1.0
        times = Account(each.execution).idle.of_ranks()
        for cause in CAUSES:
            row: Row = {"schedule": each.name, "cause": cause}
            row["idle"] = sum(times[cause]) / all_time
            rows.append({**row, "command": f"{each.command} --why"})
    there = {row["cause"] for row in rows if row["idle"]}
    return Chart(
        title="Idle time by its causes",
        form=Form.BARS,
        x=Axis("schedule", ""),
        y=Axis("idle", "% of all time is idle", 100.0),
        rows=[row for row in rows if row["cause"] in there],
        series="cause",
    )


def error(shown: Sequence[Shown]) -> Chart:
    """How much later a run ends each op than was predicted.

    ValueError unless there is one run, and one prediction for it.
    """
    runs = [each for each in shown if each.execution.transport == "measured"]
    predictions = [each for each in shown if each not in runs]
    if len(runs) != 1 or len(predictions) != 1:
        raise ValueError(
            "errors are those of one prediction for one run: a program or plan, and a trace"
        )
    (run,), (prediction,) = runs, predictions
    rows: list[Row] = []
    measured = run.execution.timeline
    predicted = prediction.execution.timeline
    for rank, bars_of_rank in enumerate(measured.ranks):
        ends = {bar[:3]: bar.end - predicted.start for bar in predicted.ranks[rank]}
        for bar in bars_of_rank:
            if bar[:3] not in ends:
                raise ValueError(
                    f"the run has {bar} on rank {rank}, the prediction not"
                )
            end = bar.end - measured.start
            row: Row = {"rank": f"rank {rank}", "op": str(bar), "time": end}
            row |= {"predicted": ends[bar[:3]], "late": end - ends[bar[:3]]}
            rows.append({**row, "command": prediction.command})
    share = predicted.makespan / measured.makespan - 1 if measured.makespan else 0.0
    late = _time_axis(
        "late", "later than predicted", [run], [abs(row["late"]) for row in rows]
    )
    return Chart(
        title=f"{run.name}: the predicted makespan is {share:+.1%} off the measured one",
        form=Form.LINES,
        x=_time_axis("time", "measured end of an op", [run], [measured.makespan]),
        y=late,
        rows=rows,
        series="rank",
    )


#: The kinds of plots, by their words.
PLOTS = {
    "bubble": Kind(bubble, Varied("microbatches", (1, 2, 3, 4, 6, 8, 12, 16), True)),
    "scaling": Kind(
        scaling, Varied("ranks", (2, 4, 8, 16), fixed={"microbatches": 32})
    ),
    "memory": Kind(memory),
    "frontier": Kind(frontier),
    "bars": Kind(bars),
    "error": Kind(error),
}


def _time_axis(
    column: str, title: str, shown: Sequence[Shown], values: Sequence[float]
) -> Axis:
    """An axis of time, in the unit of the costs, or in the one in which its numbers are short."""
    seconds = shown[0].seconds if shown else None
    if seconds is None:
        return Axis(column, f"{title}{_of_share(shown)}")
    unit = unit_of(max(values, default=0.0) * seconds)
    return Axis(column, f"{title}, {PRINTED[unit]}", seconds / SECONDS[unit])


def _of_share(shown: Sequence[Shown]) -> str:
    """Of what part of the model a stage is on the axis, where schedules have different ones."""
    shares = [each.share for each in shown if each.share is not None]
    return f", {shares[0].axis}" if shares else ""


def _have_bytes(shown: Sequence[Shown]) -> bool:
    """Whether the costs of all executions say how many bytes ranks hold."""
    return all(each.execution.peak_bytes is not None for each in shown)


def _amount_axis(column: str, shown: Sequence[Shown], values: Sequence[float]) -> Axis:
    """An axis of what ranks hold: bytes where all costs give these."""
    if _have_bytes(shown):
        return bytes_axis(column, values)
    executions = [each.execution for each in shown]
    is_plain = all(each.peak_memory == each.peak_activations for each in executions)
    what = "stage activations" if is_plain else "in the program's amounts"
    return Axis(column, f"held by the fullest rank, {what}{_of_share(shown)}")


def bytes_axis(column: str, values: Sequence[float]) -> Axis:
    """An axis of bytes, in the unit in which the largest is at least 1."""
    power = min(int(np.log10(max(*values, 1.0)) // 3), len(BYTES) - 1)
    return Axis(column, f"held by the fullest rank, {BYTES[power]}", 1000.0**-power)
