"""A plot drawn by matplotlib, for who puts it into a figure of their own."""

from typing import Any

from schedlang.extras.plots.plot_rows import Chart, Form
from schedlang.extras.plots.plot_svg import (
    COLOURS,
    NAMED,
    bars_of,
    frontier_of,
    lines_of,
    parts_of,
)

#: The marks of series, as in the other drawings.
_MARKS = "os^Dv"


def draw(chart: Chart, axes: Any = None) -> Any:
    """Draw a plot, as `Plot.draw` says."""
    if axes is None:
        try:
            from matplotlib import pyplot
        except ImportError:
            raise ImportError(
                "this needs matplotlib: pip install 'schedlang[plot]'"
            ) from None
        _, axes = pyplot.subplots(layout="constrained")
    _DRAWS[chart.form](chart, axes)
    axes.set_title(chart.title, loc="left", fontsize="medium", fontweight="bold")
    axes.set_xlabel(chart.x.title)
    axes.set_ylabel(chart.y.title)
    if chart.limit is not None:
        axes.axvline(
            chart.limit.value * chart.x.scale, linestyle="--", label=chart.limit.name
        )
    if chart.diagonal is not None:
        ends = [chart.x.of(row) for row in chart.rows]
        ends = [min(ends, default=0.0), max(ends, default=1.0)]
        axes.plot(ends, ends, color="grey", linestyle=":", label=chart.diagonal)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
    return axes


def _lines(chart: Chart, axes: Any) -> None:
    steps = chart.form is Form.STEPS
    for place, (name, of_line) in enumerate(lines_of(chart).items()):
        rows = [row for _, row in of_line]
        axes.plot(
            [chart.x.of(row) for row in rows],
            [chart.y.of(row) for row in rows],
            label=name,
            color=COLOURS[place % len(COLOURS)],
            marker=None if steps else _MARKS[place % len(_MARKS)],
            drawstyle="steps-post" if steps else "default",
        )
    if all(chart.y.of(row) >= 0 for row in chart.rows):
        axes.set_ylim(bottom=0)


def _bars(chart: Chart, axes: Any) -> None:
    bars = bars_of(chart)
    for name in parts_of(chart):
        parts = {
            bar: (chart.y.of(row), below)
            for bar, of_bar in bars.items()
            for _, row, below in of_bar
            if row[chart.series] == name
        }
        heights = [height for height, _ in parts.values()]
        bottoms = [below for _, below in parts.values()]
        axes.bar(list(parts), heights, bottom=bottoms, width=0.62, label=name)


def _points(chart: Chart, axes: Any) -> None:
    corners = frontier_of(chart)
    axes.plot(*zip(*corners, strict=True), color=COLOURS[2], label="frontier")
    for row in chart.rows:
        x = chart.x.of(row)
        y = chart.y.of(row)
        is_on = row["frontier"]
        axes.plot([x], [y], ".", color=COLOURS[2] if is_on else COLOURS[0])
        if is_on or len(chart.rows) <= NAMED:
            axes.annotate(
                str(row[chart.series]), (x, y), (3, 3), textcoords="offset points"
            )
    axes.set_xlim(left=0)


_DRAWS = {
    Form.LINES: _lines,
    Form.STEPS: _lines,
    Form.BARS: _bars,
    Form.POINTS: _points,
}
