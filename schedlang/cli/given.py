"""What several commands are given: a program or a plan, and costs."""

import argparse
from typing import Any

from attrs import evolve


class UsageError(Exception):
    """The options do not go together."""


def load(options: argparse.Namespace, file: str | None = None, **choices: Any) -> Any:
    """The plan in the file, or the plan of the program in it, with some choices of `compile`."""
    from schedlang import read_plan, read_source
    from schedlang.advice.compiling import compile_with_advice

    file = file or options.file
    source = read_source(file)
    if not source.is_plan:
        return compile_with_advice(source, dict(options.params), **choices)
    if options.params:
        raise UsageError(f"-p sets parameters of a program, `{file}` is a plan")
    return read_plan(file)


def load_priced(options: argparse.Namespace, file: str | None = None) -> tuple[Any, Any]:
    """The plan in the file, or of the program in it, for the transport and the updates asked for;
    and its costs.
    """
    from schedlang.schedule.costs import Costs

    choices = {"transport": options.transport} if options.transport else {}
    try:
        costs = costs_given(options)
        given = {"costs": costs} if costs != Costs() else {}
        plan = evolve(load(options, file, **given, **choices), **choices)
        costs.check(len(plan.placement))
        return plan if options.updates is None else plan.for_updates(options.updates), costs
    except ValueError as error:
        raise UsageError(str(error)) from None


def costs_given(options: argparse.Namespace) -> Any:
    """The costs in the options, or in the file that they name; ValueError for what cannot be
    one.
    """
    from schedlang.schedule.costs import NAMES, make_costs, read_costs

    given = {
        name: getattr(options, name) for name in NAMES if getattr(options, name, None) is not None
    }
    if options.costs and given:
        raise UsageError("give costs as options or as a file, not both")
    if options.costs:
        return read_costs(options.costs)
    return make_costs(
        {name: times if isinstance(times, list) else [times] for name, times in given.items()}
    )
