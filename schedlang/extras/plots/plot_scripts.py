"""Plots for scripts and notebooks: `schedlang.plot`."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import fields, frozen

from schedlang.diagnostics.source import Source
from schedlang.diagnostics.wrong_arguments import check_choice, check_params
from schedlang.extras.plots.plot_files import write_plot
from schedlang.extras.plots.plot_matplotlib import draw
from schedlang.extras.plots.plot_rows import PLOTS, Chart, Shown
from schedlang.extras.plots.plot_sizes import Params, fixed_of, plotted, sizes_of
from schedlang.extras.plots.plot_svg import svg
from schedlang.files.sources import NO_FILE, source_of
from schedlang.proof.execution import Execution
from schedlang.proof.prove import simulate
from schedlang.python.sweep import load
from schedlang.report.compare import parameters_of, params_of_each
from schedlang.schedule.costs import UNIT, Costs, check_costs
from schedlang.schedule.schedule import Schedule

_Given = Source | str | Path | Schedule | Execution


@frozen(eq=False, repr=False)
class Plot(Chart):
    """A plot: its `rows` of numbers, each with the `command` that gives them, and its drawing.

    `rows` is a list of dictionaries, as `pandas.DataFrame` takes it. A notebook shows the plot.
    """

    def write(
        self,
        path: str | Path,
        width: int | str | None = None,
        legend: bool = True,
        font: str | None = None,
    ) -> None:
        """Write it in the format of the path's ending: `.svg`, `.pdf`, `.png`, or `.html`, where
        each point leads to its row and its command. It is `width` pixels wide, or as a `column` or
        a `page` of a paper, in the letters of a `font`.

        ValueError for another ending; ImportError if the package that draws a PDF or a PNG is
        missing; CompileError when the file cannot be written.
        """
        write_plot(self, path, width, legend, font)

    def draw(self, axes: Any = None) -> Any:
        """Draw it by matplotlib, on some `axes` or in a figure of its own; returns the axes.

        ImportError if matplotlib is missing.
        """
        return draw(self, axes)

    def __repr__(self) -> str:
        return f"<Plot {self.title}: {len(self.rows)} rows>"

    def _repr_html_(self) -> str:
        return svg(self)


def plot(
    kind: str,
    schedules: _Given | Iterable[_Given],
    costs: Costs = UNIT,
    *,
    transport: str | None = None,
    **params: int | Iterable[int],
) -> Plot:
    """A plot of one or several schedules: programs, by their name in the gallery, path or text;
    plans; or executions.

    `kind` is `bubble`, idle time against microbatches; `scaling`, how many ranks work, against
    their number; `memory`, what the fullest rank holds over time; `frontier`, makespan against
    memory; `bars`, idle time by its causes; or `error`, of a prediction for a run. A parameter has
    one value or several, `ranks=8, microbatches=range(8, 65, 8)`; a program takes those that it
    has.

    The `rows` of the plot are its numbers, as `pandas.DataFrame` takes them; a notebook shows it;
    its `write` writes a file, and its `draw` draws by matplotlib.

    ValueError for a kind that there is not, for a parameter that no program has, and where nothing
    is left to plot; CompileError for what is wrong with a program.
    """
    check_choice("kind", kind, PLOTS)
    check_costs(costs)
    fixed, ranges = _params(params)
    given = _named(schedules)
    sources = {name: each for name, each in given.items() if isinstance(each, Source)}
    # ValueError for a parameter that none of them has.
    params_of_each(sources.values(), {**fixed, **dict.fromkeys(ranges, 1)})
    takes = {name: set[str]() for name in given}
    takes |= {name: parameters_of(source) for name, source in sources.items()}

    def execute(program: str, name: str, own: Params) -> Shown:
        shown = given[program]
        if isinstance(shown, Execution):
            return Shown(name, shown, repr(shown))
        with_costs = "" if costs is UNIT else ", costs"
        code = f"simulate({program!r}{with_costs}, params={dict(own)})"
        if isinstance(shown, Source):
            shown = load(shown, costs, transport=transport, **own)  # type: ignore[arg-type]
        return Shown(name, simulate(shown, costs), code)

    sizes = sizes_of(kind, fixed, ranges)
    chosen = fixed_of(kind, fixed, ranges)
    chart = plotted(kind, takes, chosen, sizes, execute, costs)
    return Plot(**{each.name: getattr(chart, each.name) for each in fields(Chart)})


def _params(
    params: Mapping[str, int | Iterable[int]],
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """The parameters that have one value, and those that have several."""
    fixed: dict[str, int] = {}
    ranges: dict[str, list[int]] = {}
    for name, value in params.items():
        if isinstance(value, Iterable):
            ranges[name] = list(value)
            values = ranges[name]
        else:
            fixed[name] = value
            values = [value]
        for each in values:
            check_params("params", {name: each})
    return fixed, ranges


def _named(
    schedules: _Given | Iterable[_Given],
) -> dict[str, Source | Schedule | Execution]:
    """What is to be plotted, by names that are all different."""
    if isinstance(schedules, _Given) or not isinstance(schedules, Iterable):
        schedules = [schedules]
    given: dict[str, Source | Schedule | Execution] = {}
    for each in schedules:
        if not isinstance(each, Schedule | Execution):
            each = source_of(each, "schedules")
        if isinstance(each, Source):
            name = each.path if each.path == NO_FILE else Path(each.path).stem
        else:
            name = each.name if isinstance(each, Schedule) else each.schedule.name
        number = 2
        while name in given:
            name = f"{name.partition(' #')[0]} #{number}"
            number += 1
        given[name] = each
    return given
