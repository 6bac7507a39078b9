"""A timeline as a table: a row for each time, a column for each stage."""

from schedlang.plan.plan import Plan
from schedlang.schedule.actions import NO_MICROBATCH
from schedlang.schedule.kinds import Kind
from schedlang.schedule.timeline import Bar, Timeline

#: Times that are equal up to so many digits after the point are one row.
_DIGITS = 9


def table(plan: Plan, timeline: Timeline) -> str:
    """A row for each time at which an op starts or ends, and a column for each stage, separated by
    tabs.

    A cell has the op that starts then, as `F(1)`, with microbatches counted from 1; `|` where an op
    still runs; or `-`.
    """
    bars = [bar for rank in timeline.ranks for bar in rank]
    times = sorted(
        {round(time, _DIGITS) for bar in bars for time in (bar.start, bar.end)}
    )
    row_of = {time: row for row, time in enumerate(times)}
    stages = range(len(plan.placement))
    rows = [[["-"] for _ in stages] for _ in times]
    for bar in sorted(bars, key=lambda bar: bar.start):
        start = row_of[round(bar.start, _DIGITS)]
        end = row_of[round(bar.end, _DIGITS)]
        # Ops that take no time share a cell with the next one.
        words = [word for word in rows[start][bar.stage] if word not in "-|"]
        rows[start][bar.stage] = [*words, _word(bar)]
        for row in rows[start + 1 : end]:
            row[bar.stage] = ["|"]
    # At the last time ops end, and none starts, unless it takes no time.
    if all(cell == ["-"] for cell in rows[-1]):
        rows.pop()
    head = "Time\t" + "\t".join(f"Stage {stage}" for stage in stages)
    lines = [
        f"Pipeline Timeline ({len(stages)} stages, {plan.microbatches} microbatches):",
        head,
    ]
    lines.append("-" * (len(head) + 10))
    for time, cells in zip(times, rows, strict=False):
        lines.append(f"{time:g}\t" + "\t".join("+".join(cell) for cell in cells))
    return "\n".join(lines)


def _word(bar: Bar) -> str:
    """An op as the visualizer writes it."""
    name = Kind(bar.kind).name
    if bar.microbatch == NO_MICROBATCH:
        return name
    return f"{name}({bar.microbatch + 1})"
