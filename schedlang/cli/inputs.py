"""What several commands take: a program or a plan, and costs."""

import argparse
from typing import Any

from attrs import evolve

from schedlang.cli.outputs import check_outputs
from schedlang.cli.progress import progress
from schedlang.cli.usage import UsageError


def load(options: argparse.Namespace, file: str | None = None, **choices: Any) -> Any:
    """The plan in a file, or the plan of the program in it.

    `choices` are those of `compile`, and for programs only.
    """
    from schedlang import read_plan, read_source
    from schedlang.advice.compiling import compile_with_advice

    path = file or options.file
    source = read_source(path)
    if source.is_plan and options.params:
        raise UsageError(f"-p sets parameters of a program, `{path}` is a plan")
    if source.is_plan:
        with progress(f"reading {source.path}"):
            return read_plan(path)
    with progress(f"compiling {source.path}"):
        plan = compile_with_advice(source, options.params, **choices)
    # Only the program says what it imports.
    check_outputs(options, [imported for imported, _ in plan.source.imports])
    return plan


def load_with_costs(options: argparse.Namespace, file: str | None = None) -> tuple[Any, Any]:
    """The plan in a file, or of the program in it, for the transport and the number of updates in
    the options; and the costs in the options.
    """
    from schedlang import CompileError
    from schedlang.schedule.costs import Costs

    choices: dict[str, Any] = {}
    if options.transport:
        choices["transport"] = options.transport
    try:
        costs = read_cost_options(options)
        # A program is compiled for the costs, if there are any, and else for its own.
        compiled_for = {"costs": costs} if costs != Costs() else {}
        plan = load(options, file, **compiled_for, **choices)
        # A plan from a file may be for another transport.
        plan = evolve(plan, **choices)
        costs.check(len(plan.placement))
        if options.updates is not None:
            plan = plan.for_updates(options.updates)
    except CompileError:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from None
    return plan, costs


def read_cost_options(options: argparse.Namespace) -> Any:
    """The costs in the options, or in the file that the options name; ValueError for what cannot be
    a cost.
    """
    from schedlang.schedule.costs import NAMES, make_costs, read_costs

    values: dict[str, list[float]] = {}
    for name in NAMES:
        value = getattr(options, name, None)
        if value is not None:
            # One value is for all stages; a list has one for each.
            values[name] = value if isinstance(value, list) else [value]
    if options.costs and values:
        raise UsageError("give costs as options or as a file, not both")
    if options.costs:
        return read_costs(options.costs)
    return make_costs(values)
