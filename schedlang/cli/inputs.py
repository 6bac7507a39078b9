"""What several commands take: a program or a plan, and costs."""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from attrs import evolve

from schedlang.cli.outputs import check_outputs
from schedlang.cli.progress import progress
from schedlang.cli.usage import UsageError
from schedlang.schedule.transports import PORTABLE


def load(
    options: argparse.Namespace,
    file: str | None = None,
    params: Mapping[str, int] | None = None,
    takes_tables: bool = False,
    keeps_wrong: bool = False,
    **choices: Any,
) -> Any:
    """The plan in a file, or the plan of the program in it, with the parameters in the options or
    other `params`; or that of an action table of torch, if the command takes these, too.

    With `keeps_wrong`, claims that do not hold are noted in the options, for `main` to print them
    in the end, and the plan is given all the same. `choices` are those of `compile`: only the
    transport counts for a table, and none for a plan.
    """
    from schedlang.advice.compiling import compile_with_advice
    from schedlang.compiler import ClaimError
    from schedlang.files.reading import read_source
    from schedlang.plan.proved_again import read_plan

    path = file or options.file
    source = read_source(path)
    chosen = options.params if params is None else params
    if source.is_plan and chosen:
        raise UsageError(f"-p sets parameters of a program, `{path}` is a plan")
    is_table = takes_tables and _is_table(source.text)
    if is_table and chosen:
        raise UsageError(f"-p sets parameters of a program, `{path}` is a table")
    if source.is_plan:
        with progress(f"reading {source.path}"):
            return read_plan(path)
    if is_table:
        from schedlang.plan.torch_tables import plan_of, read_table

        with progress(f"proving {source.path}"):
            return plan_of(read_table(source), choices.get("transport", PORTABLE))
    try:
        with progress(f"compiling {source.path}"):
            plan = compile_with_advice(source, chosen, **choices)
    except ClaimError as error:
        if not keeps_wrong:
            raise
        plan = error.plan
        options.wrong += plan.wrong
    # Only the program says what it imports.
    check_outputs(options, [imported for imported, _ in plan.source.imports])
    return plan


def _is_table(text: str) -> bool:
    """Whether a text is an action table of torch."""
    from schedlang.files.file_kinds import FileKind, kind_of

    return kind_of(text) is FileKind.TABLE


def load_with_costs(
    options: argparse.Namespace, file: str | None = None, **choices: Any
) -> tuple[Any, Any]:
    """The plan in a file, or of the program in it, compiled for the costs in the options, if there
    are any, and else for its own; and the costs in the options. `choices` are those of `load`.
    """
    costs = read_cost_options(options)
    with wrong_as_usage(options):
        plan = load(options, file, costs=costs, **choices)
        costs.check(plan.layout)
    return plan, costs


def load_compiled(options: argparse.Namespace) -> Any:
    """The plan in the file of the options, or of the program in it, compiled for the costs in the
    options; for a command to which the costs are nothing else. UsageError for the costs of a plan.
    """
    check_plan_without_costs(options)
    plan, _ = load_with_costs(options)
    return plan


def check_plan_without_costs(options: argparse.Namespace) -> None:
    """UsageError for costs beside a plan, in a command for which costs only order a program."""
    from schedlang.files.reading import read_source
    from schedlang.schedule.costs import UNIT

    if read_cost_options(options) != UNIT and read_source(options.file).is_plan:
        raise UsageError(
            f"costs decide about the order of a program, `{options.file}` is a plan: it has its "
            "order, and the costs that it was compiled for"
        )


def load_to_execute(
    options: argparse.Namespace, file: str | None = None, **inputs: Any
) -> tuple[Any, Any]:
    """`load_with_costs` for the transport and the number of updates in the options, also where
    claims do not hold.
    """
    choices = {"transport": options.transport} if options.transport else {}
    plan, costs = load_with_costs(options, file, keeps_wrong=True, **inputs, **choices)
    # A plan from a file may be for another transport.
    plan = evolve(plan, **choices)
    if options.updates is not None:
        with wrong_as_usage():
            plan = plan.for_updates(options.updates)
    return plan, costs


def load_beside(options: argparse.Namespace, file: str, run: Any) -> Any:
    """The plan in a file, or of the program in it, for the costs that the plan of a run was
    compiled for: for others, its passes may give another order.
    """
    from schedlang.diagnostics.diagnostic import CompileError

    try:
        return load(options, file, costs=run.plan.costs, keeps_wrong=True)
    except CompileError:
        raise
    except ValueError:
        # The costs are of another number of stages: whoever compares says what the run is of.
        return load(options, file, keeps_wrong=True)


def read_cost_options(options: argparse.Namespace) -> Any:
    """The costs in the options, or in the file that the options name; UsageError for what cannot be
    a cost, CompileError for a file that has none.
    """
    from schedlang.schedule.costs import COSTS, UNIT, make_costs, read_costs

    values: dict[str, list[float]] = {}
    for name in COSTS:
        value = getattr(options, name, None)
        if value is not None:
            # One value is for all stages; a list has one for each.
            values[name] = value if isinstance(value, list) else [value]
    # How much room there is depends on the machine, and not on what ops cost.
    room = {name: values.pop(name) for name in ("capacity_bytes",) if name in values}
    if options.costs and values:
        raise UsageError("give costs as options or as a file, not both")
    given = read_costs(*options.costs) if options.costs else UNIT
    with wrong_as_usage():
        return make_costs(values | room).over(given)


@contextmanager
def wrong_as_usage(options: argparse.Namespace | None = None) -> Iterator[None]:
    """A ValueError becomes a UsageError: it is of a value in the options, such as costs of another
    number of stages, maybe in a file that the `options` name.
    """
    from schedlang.diagnostics.diagnostic import CompileError

    try:
        yield
    except CompileError:
        # Some are also ValueErrors, for Python.
        raise
    except ValueError as error:
        raise UsageError(with_costs_file(options, error)) from None


def with_costs_file(options: argparse.Namespace | None, error: ValueError) -> str:
    """What is wrong, and in which file of costs, if these are of another number of stages."""
    from schedlang.schedule.costs import WrongNumber

    files = getattr(options, "costs", None) or []
    # Beside a file of costs, the room of ranks may be an option.
    has_room = getattr(options, "capacity_bytes", None) is not None
    is_of_file = files and not (has_room and "`capacity_bytes`" in str(error))
    if not is_of_file or not isinstance(error, WrongNumber):
        return str(error)
    names = ", ".join(f"`{file}`" for file in files)
    return f"costs in {names}: {error}"
