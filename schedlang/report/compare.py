"""The figures of several schedules at one size and at the same costs, in one table."""

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any

from attrs import evolve, frozen

from schedlang.compiler import ClaimError, compile
from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Source
from schedlang.files.file_kinds import FileKind, kind_of
from schedlang.files.programs import called
from schedlang.files.reading import read_source
from schedlang.language.loading import load
from schedlang.language.syntax import List, Param
from schedlang.plan.plan import Plan
from schedlang.plan.proved_again import read_plan
from schedlang.proof.prove import simulate
from schedlang.report.bubbles.account import Account
from schedlang.report.figures import figures
from schedlang.report.model_share import MODEL, Share, shares_of
from schedlang.report.text_table import aligned, rounded
from schedlang.schedule.costs import Costs, WrongNumber
from schedlang.schedule.transports import PORTABLE


@frozen
class Entry:
    """A row of the table: a file, and the figures of its schedule, or why the program refuses the
    size; and its claims that do not hold. Where the schedules cut the model into different numbers
    of stages, `share` is the part of the model that a stage is, and `at_share` the makespan if its
    ops take this part of the time.
    """

    file: str
    figures: dict[str, Any] | None
    refusal: str | None = None
    wrong: tuple[Diagnostic, ...] = ()
    share: Share | None = None
    at_share: float | None = None

    @property
    def makespan(self) -> float:
        """The makespan to sort by; a program that refuses the size comes last."""
        if self.figures is None:
            return inf
        makespan: float = self.figures["makespan"]
        return makespan if self.at_share is None else self.at_share


def compare(
    files: Iterable[str],
    params: Mapping[str, int],
    costs: Costs,
    transport: str | None = None,
    updates: int | None = None,
    unit: str = MODEL,
) -> list[Entry]:
    """The figures of programs and plans, in their order; each program takes those of the
    parameters that it has. All communicate by the `transport`, or each as its plan says, for so
    many `updates` or as many as the plan has. With `STAGE` as the `unit`, an op of any stage takes
    as long, however much of the model that is.

    ValueError for a parameter that no program has, and for costs of another number of stages;
    CompileError for what is wrong with a program, but not where it refuses the size itself.
    """
    # All files are read before any is compiled: a misspelt name should not take a minute to find.
    sources = {file: read_source(file) for file in files}
    plans: dict[str, Plan] = {}
    entries: dict[str, Entry] = {}
    all_params = params_of_each(sources.values(), params)
    for (file, source), own_params in zip(sources.items(), all_params, strict=True):
        doing("comparing", len(entries), len(sources))
        name = called(file)
        try:
            plan = _plan(file, source, own_params, costs, transport)
            plans[file] = plan if updates is None else plan.for_updates(updates)
            entries[file] = _entry(name, plans[file], costs)
        except CompileError as error:
            # Not every program is for every size: the table goes on without it.
            if any(diagnostic.code != "require" for diagnostic in error.diagnostics):
                raise
            entries[file] = Entry(name, None, error.diagnostics[0].message)
        except WrongNumber as error:
            raise WrongNumber(f"`{name}`: {error}") from None
        except ValueError as error:
            raise ValueError(f"`{name}`: {error}") from None
    shares = shares_of(list(plans.values()), costs, unit)
    for (file, plan), share in zip(plans.items(), shares, strict=True):
        if share is not None:
            makespan = simulate(plan, share.costs(plan, costs)).timeline.makespan
            entries[file] = evolve(entries[file], share=share, at_share=makespan)
    return list(entries.values())


def params_of_each(
    sources: Iterable[Source], params: Mapping[str, int]
) -> list[dict[str, int]]:
    """For each program those of some parameters that it has; ValueError for one that none has."""
    names = [parameters_of(source) for source in sources]
    unknown = params.keys() - set().union(*names)
    if unknown:
        raise ValueError(f"no program has a parameter `{min(unknown)}`")
    return [
        {name: value for name, value in params.items() if name in of_program}
        for of_program in names
    ]


def parameters_of(source: Source) -> set[str]:
    """The names of a program's parameters; a plan has none that could be set, nor has a table."""
    if source.is_plan or kind_of(source.text) is FileKind.TABLE:
        return set()
    _, tree = load(source)
    return {
        item.name.text
        for item in tree.items
        if isinstance(item, Param) or (isinstance(item, List) and item.is_param)
    }


def _entry(name: str, plan: Plan, costs: Costs) -> Entry:
    costs.check(plan.layout)
    found = figures(plan, Account(simulate(plan, costs)))
    return Entry(name, found, wrong=plan.wrong)


def _plan(
    file: str,
    source: Source,
    params: Mapping[str, int],
    costs: Costs,
    transport: str | None,
) -> Plan:
    if not source.is_plan:
        try:
            return compile(source, params, costs, transport=transport or PORTABLE)
        except ClaimError as error:
            return error.plan
    plan = read_plan(file)
    return evolve(plan, transport=transport) if transport else plan


#: The columns of the table with figures, and what each means.
_MEANINGS = {
    "stages": (
        "that the model is cut into; makespans compare between schedules with as many, "
        "bubbles always"
    ),
    "makespan": "from the first start to the last end, over all ranks",
    "at share": (
        "the makespan if an op takes the time of the share of the model that its stage is: these "
        "compare; - where costs are given for each stage"
    ),
    "over ideal": "idle time / working time, which includes recomputation",
    "over makespan": "idle time / all time",
    "of span": (
        "idle share of the rank with the longest span, from its own first start to its own last end"
    ),
    "exposed": (
        "idle time in which ranks wait for what is on its way from other ranks, all ranks together"
    ),
    "activations": "the most stage activations that a rank holds until their last use",
    "bytes": "the most bytes that a rank holds",
    "versions": "the most versions of a stage's weights that a rank holds",
}


def comparison_text(entries: list[Entry]) -> str:
    """The table, what its columns mean, and which programs refuse the size, or claim what does not
    hold.
    """
    parts = []
    shown = [(entry, entry.figures) for entry in entries if entry.figures]
    if shown:
        # Bytes are known only where the costs have those of activations.
        is_left_out = {
            "bytes": not any("peak_bytes" in figures for _, figures in shown),
            "at share": all(entry.share is None for entry, _ in shown),
        }
        columns = [name for name in _MEANINGS if not is_left_out.get(name)]
        rows = [["", "ranks x microbatches", *columns]]
        for entry, figures in shown:
            rows.append([entry.file, *_cells(entry, figures, columns)])
        parts.append("\n".join(aligned(rows)))
        parts.append("\n".join(f"{name:<15}{_MEANINGS[name]}" for name in columns))
    notes = []
    for entry in entries:
        if not entry.figures:
            notes.append(f"refused: {entry.file}: {entry.refusal}")
        for wrong in entry.wrong:
            notes.append(f"! {entry.file}: {wrong.message}")
    if notes:
        parts.append("\n".join(notes))
    return "\n\n".join(parts)


def _cells(entry: Entry, figures: dict[str, Any], columns: list[str]) -> list[str]:
    """The cells of a row behind the name of its file."""
    bubble = figures["bubble"]
    cells = {
        "stages": str(figures["stages"]),
        "makespan": f"{figures['makespan']:.10g}",
        "at share": "-" if entry.at_share is None else f"{entry.at_share:.10g}",
        "over ideal": f"{bubble['over_ideal']:.2%}",
        "over makespan": f"{bubble['over_makespan']:.2%}",
        "of span": f"{bubble['span']:.2%}",
        "exposed": rounded(figures["exposed"]),
        "activations": str(max(figures["peak_activations"])),
        "bytes": f"{max(figures.get('peak_bytes', [0])):,.0f}",
        "versions": str(max(figures["versions"])),
    }
    size = f"{figures['ranks']} x {figures['microbatches']}"
    return [size, *(cells[name] for name in columns)]


def comparison_json(entries: list[Entry]) -> list[dict[str, Any]]:
    """The table for programs: `figures` as `schedc simulate --json` has them, or `refusal`; and
    where the schedules have different numbers of stages, the `makespan_at_share`.
    """
    rows: list[dict[str, Any]] = []
    for entry in entries:
        # Every row has one of the two.
        if entry.figures:
            row: dict[str, Any] = {"file": entry.file, "figures": entry.figures}
            if entry.share is not None:
                row["makespan_at_share"] = entry.at_share
            rows.append(row)
        else:
            rows.append({"file": entry.file, "refusal": entry.refusal})
    return rows
