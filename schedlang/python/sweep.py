"""Schedules at many sizes and costs, for a table or a plot."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from attrs import evolve

from schedlang.compiler import compile
from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.diagnostics.source import Source
from schedlang.diagnostics.wrong_arguments import check_params
from schedlang.files.sources import NO_FILE, source_of
from schedlang.plan.plan import Plan
from schedlang.proof.prove import simulate
from schedlang.python.plans import plan_of
from schedlang.report.bubbles.account import Account
from schedlang.report.compare import params_of_each
from schedlang.report.figures import figures
from schedlang.schedule.costs import UNIT, Costs, check_costs
from schedlang.schedule.transports import PORTABLE

Row = dict[str, Any]
_Program = Source | str | Path


def load(
    program: _Program,
    costs: Costs = UNIT,
    *,
    transport: str | None = None,
    **params: int,
) -> Plan:
    """The plan of a program, by its name in the gallery, its path or its text, or of a plan's file;
    a notebook shows its picture.

    It is that of `compile`, with the program's parameters as arguments: `load("1f1b", ranks=8)`. A
    plan from a file has its order and its parameters; only the `transport` may be another one.
    CompileError and errors of wrong arguments are as of `compile`.
    """
    source = source_of(program, "program")
    if not source.is_plan:
        return compile(source, params, costs, transport=transport or PORTABLE)
    plan = plan_of(source, params, name="program")
    return evolve(plan, transport=transport) if transport else plan


def sweep(
    programs: _Program | Sequence[_Program],
    costs: Costs | Mapping[str, Costs] = UNIT,
    *,
    transport: str | None = None,
    **params: int | Iterable[int],
) -> list[Row]:
    """The figures of one or several programs at all combinations of some parameters and costs: a
    list of dictionaries, as `pandas.DataFrame` takes it.

    A parameter has one value or several, `ranks=8, microbatches=range(8, 65, 8)`; a program takes
    those that it has. Costs have names where there are several: `{"fast": ..., "slow": ...}`. All
    programs communicate by the `transport`, gloo's way by default.

    A row has the name of the `schedule`, which is that of its file, the name of the `costs` if they
    have any, the parameters, and the figures that `schedc simulate --json` gives: times in the unit
    of the costs; bubbles as parts of 1, `bubble_over_ideal`, `bubble_over_makespan` and
    `bubble_of_span`; and of what each rank has, such as `peak_activations` or, where the costs give
    them, `peak_bytes`, the most. A program that refuses a size by its `require` has a row with the
    reason as its `refusal`, which is None in all others.

    ValueError for a parameter that no program has; CompileError for what is wrong with a program.
    """
    chosen = [programs] if isinstance(programs, str | Path | Source) else list(programs)
    sources = [source_of(program, "programs") for program in chosen]
    named = costs if isinstance(costs, Mapping) else {"": costs}
    for each in named.values():
        check_costs(each)
    values = {name: _values(name, value) for name, value in params.items()}
    for name, of_param in values.items():
        for value in of_param:
            check_params("params", {name: value})
    # Which parameters a program takes does not depend on their values: any will do to find it out.
    firsts = {name: of_param[0] for name, of_param in values.items()}
    runs = [
        (source, dict(zip(own, combination, strict=True)), name)
        for source, own in zip(sources, params_of_each(sources, firsts), strict=True)
        for name in named
        for combination in product(*(values[param] for param in own))
    ]
    rows = []
    for number, (source, own, name) in enumerate(runs):
        doing("comparing", number, len(runs))
        rows.append(dict(_row(source, own, name, named[name], transport)))
    return rows


def _values(name: str, value: int | Iterable[int]) -> list[int]:
    """The values of a parameter."""
    values = list(value) if isinstance(value, Iterable) else [value]
    if not values:
        raise ValueError(f"`{name}` has no value")
    return values


def _row(
    source: Source,
    params: Mapping[str, int],
    name: str,
    costs: Costs,
    transport: str | None,
) -> Iterator[tuple[str, Any]]:
    """The entries of a row."""
    refusal = None
    found: dict[str, Any] = {"schedule": source.path, "params": params}
    try:
        plan = load(source, costs, transport=transport, **params)
        found = figures(plan, Account(simulate(plan, costs)))
    except CompileError as error:
        # Not every program is for every size.
        if any(diagnostic.code != "require" for diagnostic in error.diagnostics):
            raise
        refusal = error.diagnostics[0].message
    schedule = found.pop("schedule")
    yield "schedule", schedule if source.path == NO_FILE else Path(source.path).stem
    if name:
        yield "costs", name
    yield from found.pop("params").items()
    for figure, value in found.items():
        if figure == "bubble":
            yield from ((f"bubble_{kind}", share) for kind, share in _bubbles(value))
        elif isinstance(value, list):
            yield figure, max(value)
        elif not isinstance(value, Mapping):
            yield figure, value
    yield "refusal", refusal


def _bubbles(bubble: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """The bubbles, by the names that they have in Python (`Timeline`)."""
    for kind, share in bubble.items():
        yield ("of_span" if kind == "span" else kind), share
