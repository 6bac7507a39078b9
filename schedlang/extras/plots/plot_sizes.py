"""At which sizes the schedules of a plot are executed, and which of them a program refuses."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product

from attrs import evolve

from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.diagnostic import CompileError, counted
from schedlang.extras.plots.plot_rows import PLOTS, Chart, Shown
from schedlang.report.model_share import MODEL, STAGE, at_shares
from schedlang.schedule.costs import Costs

#: Parameters of a program, of which some are lists.
Params = Mapping[str, int | tuple[int, ...]]
#: The ranks of a program of the gallery where nobody says how many.
_RANKS = 4


def sizes_of(
    kind: str, params: Params, ranges: Mapping[str, Iterable[int]]
) -> dict[str, Sequence[int]]:
    """The values of the parameters that vary: those of `ranges`, and those along the x axis of a
    kind of plot. ValueError if that parameter has one value.
    """
    chosen: dict[str, Sequence[int]] = {
        name: list(values) for name, values in ranges.items()
    }
    axis = PLOTS[kind].axis
    if axis is None or axis.param in chosen:
        return chosen
    if axis.param in params:
        raise ValueError(
            f"`{kind}` is a plot against {axis.param}, of which there must be several"
        )
    factor = params.get("ranks", _RANKS) if axis.of_ranks else 1
    if not isinstance(factor, int):
        raise ValueError("`ranks` is one number")
    return {axis.param: [factor * value for value in axis.values], **chosen}


def fixed_of(kind: str, params: Params, ranges: Mapping[str, object]) -> Params:
    """The parameters that do not vary, with those that a kind of plot has by default."""
    axis = PLOTS[kind].axis
    fixed = {} if axis is None else dict(axis.fixed)
    return {name: fixed[name] for name in fixed if name not in ranges} | dict(params)


def plotted(
    kind: str,
    programs: Mapping[str, set[str]],
    params: Params,
    sizes: Mapping[str, Sequence[int]],
    execute: Callable[[str, str, Params], Shown],
    costs: Costs,
    unit: str = MODEL,
) -> Chart:
    """A plot of some programs, each with the names of its parameters, at all sizes.

    `execute` takes a program, what it is called in the plot, and its parameters. Schedules with
    different numbers of stages are compared by the `unit`, at the `costs` of all. A size that the
    program refuses by its `require` is noted. ValueError if nothing is left.
    """
    shown: list[Shown] = []
    refusals: dict[str, list[str]] = {}
    runs = list(_runs(kind, programs, params, sizes))
    for place, (program, name, own) in enumerate(runs):
        doing("simulating", place, len(runs))
        try:
            shown.append(execute(program, name, own))
        except CompileError as error:
            # Not every program is for every size.
            if any(diagnostic.code != "require" for diagnostic in error.diagnostics):
                raise
            refusals.setdefault(name, []).append(error.diagnostics[0].message)
    notes = tuple(
        f"{name} refuses {counted(len(reasons), 'size')}: {reasons[0]}"
        for name, reasons in refusals.items()
    )
    if not shown:
        raise ValueError(f"there is nothing to plot: {'; '.join(notes)}")
    executions = [each.execution for each in shown]
    if any(execution.transport == "measured" for execution in executions):
        unit = STAGE
    both = zip(shown, at_shares(executions, costs, unit), strict=True)
    compared = [
        evolve(each, shared=shared, share=share) for each, (shared, share) in both
    ]
    return evolve(PLOTS[kind].plot(compared), notes=notes)


def _runs(
    kind: str,
    programs: Mapping[str, set[str]],
    params: Params,
    sizes: Mapping[str, Sequence[int]],
) -> Iterator[tuple[str, str, Params]]:
    """Each program at each of its sizes: the program, its name there, and its parameters."""
    axis = PLOTS[kind].axis
    for program, names in programs.items():
        own = {name: value for name, value in params.items() if name in names}
        varied = [name for name in sizes if name in names]
        for values in product(*(sizes[name] for name in varied)):
            size = dict(zip(varied, values, strict=True))
            told = [
                f"{name} = {value}"
                for name, value in size.items()
                if axis is None or name != axis.param
            ]
            yield program, ", ".join([program, *told]), {**own, **size}
