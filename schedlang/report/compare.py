"""The figures of several schedules at one size and at the same costs, in one table."""

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from attrs import frozen

from schedlang.compiler import compile
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.files.reading import read_source
from schedlang.language.imports import load
from schedlang.language.syntax import Param
from schedlang.plan.plan import Plan
from schedlang.plan.reader import read_plan
from schedlang.proof.prove import simulate
from schedlang.report.figures import figures
from schedlang.schedule.costs import Costs


@frozen
class Entry:
    """A file, and the figures of its schedule; or why the program refuses the size."""

    file: str
    figures: dict[str, Any] | None
    refusal: str | None = None

    @property
    def makespan(self) -> float:
        """Its makespan; a program that refuses the size comes last."""
        return self.figures["makespan"] if self.figures else inf


def compare(files: Iterable[str], params: Mapping[str, int], costs: Costs) -> list[Entry]:
    """The entries of programs and plans, in their order; each program takes the parameters that it
    has.

    ValueError for a parameter that none has, and for costs that are for another number of stages;
    CompileError for what is wrong with a program, but not for its own `require`.
    """
    sources = {file: read_source(file) for file in files}
    programs = {file: _params(source) for file, source in sources.items() if not source.is_plan}
    unknown = params.keys() - set().union(*programs.values())
    if unknown:
        raise ValueError(f"no program has a parameter `{min(unknown)}`")
    return [_entry(file, sources[file], programs.get(file), params, costs) for file in sources]


def _params(source: Source) -> set[str]:
    """The names of a program's parameters."""
    _, tree = load(source)
    return {item.name.text for item in tree.items if isinstance(item, Param)}


def _entry(
    file: str, source: Source, names: set[str] | None, params: Mapping[str, int], costs: Costs
) -> Entry:
    try:
        plan = _plan(source, names, params, costs)
        costs.check(len(plan.placement))
        return Entry(file, figures(plan, simulate(plan, costs), costs))
    except ValueError as error:
        raise ValueError(f"`{file}`: {error}") from None
    except CompileError as error:
        if any(each.code != "require" for each in error.diagnostics):
            raise
        return Entry(file, None, error.diagnostics[0].message)


def _plan(source: Source, names: set[str] | None, params: Mapping[str, int], costs: Costs) -> Plan:
    if names is None:
        return read_plan(source.path)
    return compile(source, {name: value for name, value in params.items() if name in names}, costs)


#: The columns of the table, and what each means.
_MEANINGS = {
    "stages": (
        "that the model is cut into; makespans compare between schedules with as many, "
        "bubbles always"
    ),
    "makespan": "from the first start to the last end, over all ranks",
    "over ideal": "idle time / working time, which includes recomputation",
    "over makespan": "idle time / all time",
    "of span": (
        "idle share of the rank with the longest span, from its own first start to its own last end"
    ),
    "exposed": (
        "idle time in which ranks wait for what is on its way from other ranks, all ranks together"
    ),
    "activations": "the most stage activations that a rank holds until their last use",
    "bytes": "the most bytes that a rank holds, of activations and weights",
    "versions": "the most versions of a stage's weights that a rank holds",
}


def comparison_text(entries: list[Entry]) -> str:
    """The table, what its columns mean, and which programs refuse the size."""
    shown = [entry for entry in entries if entry.figures]
    has_bytes = any(entry.figures and "peak_bytes" in entry.figures for entry in shown)
    columns = [name for name in _MEANINGS if name != "bytes" or has_bytes]
    rows = [["", "ranks x microbatches", *columns]]
    rows += [[entry.file, *_cells(entry.figures, columns)] for entry in shown if entry.figures]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    if shown:
        for first, *others in rows:
            cells = (f"{cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True))
            lines.append("  ".join([f"{first:<{widths[0]}}", *cells]))
        lines += ["", *(f"{name:<15}{_MEANINGS[name]}" for name in columns)]
    refused = [f"refused: {entry.file}: {entry.refusal}" for entry in entries if not entry.figures]
    return "\n".join([*lines, *([""] if lines and refused else []), *refused])


def _cells(found: dict[str, Any], columns: list[str]) -> list[str]:
    bubble = found["bubble"]
    cells = {
        "stages": str(found["stages"]),
        "makespan": f"{found['makespan']:.10g}",
        "over ideal": f"{bubble['over_ideal']:.2%}",
        "over makespan": f"{bubble['over_makespan']:.2%}",
        "of span": f"{bubble['span']:.2%}",
        "exposed": f"{found['exposed']:.6g}",
        "activations": str(max(found["peak_activations"])),
        "bytes": f"{max(found.get('peak_bytes', [0])):,.0f}",
        "versions": str(max(found["versions"])),
    }
    return [f"{found['ranks']} x {found['microbatches']}", *(cells[name] for name in columns)]


def comparison_json(entries: list[Entry]) -> list[dict[str, Any]]:
    """The entries for machines: `figures` as `schedc simulate --json` has them, or `refusal`."""
    return [
        {"file": entry.file}
        | ({"figures": entry.figures} if entry.figures else {"refusal": entry.refusal})
        for entry in entries
    ]
