"""The plan of a program, or in a file: what a script may give where a plan is wanted."""

from collections.abc import Mapping
from pathlib import Path

from schedlang.compiler import compile
from schedlang.diagnostics.source import Source
from schedlang.files.sources import source_of
from schedlang.plan.plan import Plan
from schedlang.plan.proved_again import read_plan
from schedlang.schedule.costs import UNIT, Costs


def plan_of(
    program: Source | str | Path,
    params: Mapping[str, int],
    costs: Costs = UNIT,
    *,
    name: str,
) -> Plan:
    """The plan of a program for some parameters, or of a plan's file; `name` is that of the
    argument, in messages.
    """
    source = source_of(program, name)
    if not source.is_plan:
        return compile(source, params, costs)
    if params:
        raise ValueError(f"`params` are those of a program, `{source.path}` is a plan")
    return read_plan(source.path)
