"""What the commands of `schedc` do, given their options; each returns an exit code.

What a command needs is imported when it runs, so that `schedc --help` is there at once.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from attrs import evolve

from schedlang.cli.diagnosed import print_diagnostics
from schedlang.cli.extra import extra
from schedlang.cli.inputs import (
    load_compiled,
    load_to_execute,
    read_cost_options,
    wrong_as_usage,
)
from schedlang.cli.outputs import check_outputs
from schedlang.cli.printing import json_text, written
from schedlang.cli.progress import progress
from schedlang.cli.usage import FINE, WRONG, UsageError
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic, counted


def compile_program(options: argparse.Namespace) -> int:
    """Prove a program and write its plan."""
    from schedlang.advice.compiling import compile_with_advice
    from schedlang.files.file_kinds import FileKind, kind_of
    from schedlang.files.reading import read_source

    source = read_source(options.file)
    if source.is_plan and kind_of(source.text) is FileKind.PLAN:
        raise UsageError(
            f"`{options.file}` is a plan, which `schedc check` proves again"
        )
    costs = read_cost_options(options)
    with progress(f"compiling {source.path}"), wrong_as_usage(options):
        plan = compile_with_advice(
            source,
            options.params,
            costs,
            forward_only=options.forward_only,
            transport=options.transport,
        )
    check_outputs(options, [imported for imported, _ in plan.source.imports])
    if options.prove:
        prove = extra("prove.prove_command")
        if not prove.proved_for_all(options, source):
            return WRONG
    _report(plan, options, _missing_backward(plan, options))
    return FINE


def _missing_backward(plan: Any, options: argparse.Namespace) -> list[Diagnostic]:
    """A warning where a program has no backward, and the options do not say that this is meant."""
    known = [warning.code for warning in plan.warnings]
    if not plan.is_forward_only or options.forward_only or "forward-only" in known:
        return []
    message = (
        "the program has no backward: its plan is an inference, and trains nothing"
    )
    help = "give every forward its backward, as in `F(m)  B(m)`; or say with --forward-only that "
    help += "an inference is meant"
    file = plan.source.path
    return [
        Diagnostic("forward-only", message, file=file, help=help, severity="warning")
    ]


def import_table(options: argparse.Namespace) -> int:
    """Prove one of torch's action tables and write its plan."""
    from schedlang.files.reading import read_source
    from schedlang.plan.torch_tables import plan_of, read_table

    table = read_table(read_source(options.file))
    # The same checks as for a program: a table may come from anywhere.
    with progress(f"proving {options.file}"):
        plan = plan_of(table, options.transport)
    warnings = []
    if table.has_communication and not table.reduces_gradients:
        message = (
            f"`{options.file}` has no REDUCE_GRAD: torch runs it without scaling gradients; plans "
            "always scale them"
        )
        warnings.append(
            Diagnostic("unscaled", message, file=options.file, severity="warning")
        )
    _report(plan, options, warnings)
    return FINE


def _report(
    plan: Any, options: argparse.Namespace, warnings: Sequence[Diagnostic] = ()
) -> None:
    """Write a plan, if to a file; print what it is, and warnings."""
    from schedlang.lowering import OWN
    from schedlang.plan.write import write_plan
    from schedlang.proof.lints import lint

    if options.output:
        write_plan(plan, options.output)
    # Only `compile` has it.
    is_verbose = getattr(options, "verbose", False)
    verdict = "forward only, no deadlock" if plan.is_forward_only else "no deadlock"
    if options.format == "json":
        print(json_text(_plan_json(plan, options.output, verdict, is_verbose)))
    else:
        print(_plan_text(plan, verdict))
        if options.output:
            print(f"wrote {options.output}")
        if is_verbose:
            from schedlang.report.figures import lowering_text

            print(lowering_text(plan))
    # Transfers that the compiler has placed are proved from the first use of each communicator
    # on, so only those of a program, or of a table, are worth a warning.
    own_warnings = lint(plan) if plan.lowering in (OWN, "") else []
    _warn([*warnings, *plan.warnings, *own_warnings], options)


def _plan_text(plan: Any, verdict: str) -> str:
    """What a plan is, in one line."""
    costs = "the plan's costs" if plan.costs.gives_times else "unit costs"
    sizes = [
        counted(len(plan.ranks), "rank"),
        counted(len(plan.placement), "stage"),
        counted(plan.microbatches, "microbatch"),
        counted(sum(map(len, plan.ranks)), "action"),
    ]
    return (
        f"{plan.name}: {', '.join(sizes)}; {verdict}; {plan.idle:.1%} idle at {costs}"
    )


def _plan_json(
    plan: Any, output: str | None, verdict: str, is_verbose: bool
) -> dict[str, Any]:
    """The same for programs, with the names that `simulate --json` has."""
    document = {
        "schedule": plan.name,
        "params": plan.params,
        "ranks": len(plan.ranks),
        "stages": len(plan.placement),
        "microbatches": plan.microbatches,
        "actions": sum(map(len, plan.ranks)),
        "transport": plan.transport,
        "verdict": verdict,
        "idle": plan.idle,
        "output": output,
    }
    if is_verbose:
        document["lowering"] = plan.lowering
        document["trials"] = {trial.name: trial.makespan for trial in plan.trials}
    return document


def _warn(warnings: list[Diagnostic], options: argparse.Namespace) -> None:
    if warnings:
        print_diagnostics(warnings, options)


def export(options: argparse.Namespace) -> int:
    """Write a plan as one of torch's action tables."""
    from schedlang.files.writing import write_text
    from schedlang.plan.torch_tables import export_table

    plan = load_compiled(options)
    try:
        table = export_table(plan, options.to, options.torch)
    except CompileError:
        # It is also a ValueError, for Python.
        raise
    except ValueError as error:
        raise UsageError(f"{error}: say with --torch which one is to read it") from None
    if options.output:
        write_text(table, options.output)
        print(written(options))
    elif options.format == "json":
        # A row for each rank, with a cell for each action.
        rows = [line.split(",") for line in table.splitlines()]
        print(json_text({"table": rows}))
    else:
        print(table, end="")
    return FINE


def check(options: argparse.Namespace) -> int:
    """Prove a program or a plan: for a transport, for all, at many sizes, or for any size; or check
    the certificate of such a proof.
    """
    from schedlang.advice.advice import advise
    from schedlang.cli.verdicts import errors, verdicts_json, verdicts_text, warnings
    from schedlang.compiler import check_program, check_schedule
    from schedlang.files.file_kinds import is_certificate
    from schedlang.files.reading import read_source
    from schedlang.plan.proved_again import read_plan
    from schedlang.schedule.costs import UNIT
    from schedlang.schedule.transports import NAMES

    source = read_source(options.file)
    if is_certificate(source.text):
        return int(extra("prove.prove_command").check(options, source))
    if source.is_plan and (options.params or options.ranges):
        raise UsageError(
            f"-p and --for are for the parameters of a program, `{options.file}` is a plan"
        )
    if None in options.ranges.values():
        return int(extra("prove.prove_command").prove(options, source))
    if options.output:
        raise UsageError(
            "-o writes the certificate of a proof for any size, of --for microbatches=any"
        )
    if options.ranges:
        from schedlang.cli.sizes import check_sizes

        return check_sizes(options, source)
    names = NAMES if options.transport == "all" else (options.transport,)
    costs = read_cost_options(options)
    with progress(f"proving {source.path}"), wrong_as_usage(options):
        if source.is_plan:
            plan = read_plan(options.file)
            costs.check(plan.layout)
            plan = evolve(plan, costs=costs.over(plan.costs))
            verdicts = check_schedule(plan, names, plan.kernels, costs)
        else:
            verdicts = check_program(source, options.params, names, costs)
    exit_code = WRONG if any(map(errors, verdicts.values())) else FINE
    if options.format == "json":
        document = {"file": options.file, "verdicts": verdicts_json(verdicts)}
        print(json_text(document, indent=1))
        return exit_code
    if len(verdicts) == 1 and exit_code == WRONG:
        # Of one transport everything is said that `compile` would say.
        error = CompileError(verdicts[options.transport])
        # Advice is for a program's own costs.
        if source.is_plan or costs != UNIT:
            raise error
        with progress(f"looking for a repair of {source.path}"):
            raise advise(error, source, options.params, transport=options.transport)
    if len(verdicts) > 1:
        print(verdicts_text(verdicts))
        if options.format == "github" and exit_code == WRONG:
            # People have them in the table.
            print_diagnostics(
                [wrong for verdict in verdicts.values() for wrong in errors(verdict)],
                options,
            )
    else:
        print(f"proved for {options.transport}")
    _warn(warnings(verdicts), options)
    return exit_code


def simulate(options: argparse.Namespace) -> int:
    """Print the figures of an execution, and of runs with noise, if there is any; or why ranks are
    idle.
    """
    from schedlang.proof.prove import simulate as execute
    from schedlang.report.bubbles.account import Account
    from schedlang.report.figures import figures, figures_text

    wanted = (options.jitter, options.slow or None, options.runs, options.seed)
    is_noisy = any(value is not None for value in wanted)
    if options.why:
        if is_noisy or options.ideal:
            raise UsageError(
                "--why explains one run with its transfers: leave out --jitter, --slow and --ideal"
            )
        from schedlang.cli.comparisons import explain_bubble

        return explain_bubble(options)
    noisy: Any = extra("noise.noise_options") if is_noisy else None
    noise = noisy and noisy.noise_of(options)
    plan, costs = load_to_execute(options)
    with progress(f"simulating {plan.name}"):
        runs = noise and noisy.runs_of(plan, costs, noise, options)
        execution = execute(plan, costs, options.ideal)
        # What the transport adds is shown as what is beyond the ideal.
        ideal = execution if options.ideal else execute(plan, costs, ideal=True)
        makespan = ideal.timeline.makespan
        if options.format == "json":
            document = figures(plan, Account(execution))
            document["ideal_makespan"] = makespan
            if runs:
                document["noise"] = noisy.runs_json(runs)
            text = json_text(document)
        else:
            text = figures_text(plan, Account(execution), makespan)
            if runs:
                text += f"\n\n{noisy.runs_text(runs)}"
    print(text)
    return FINE
