"""What the commands of `schedc` do, given their options; each returns an exit code.

What a command needs is imported when it runs, so that `schedc --help` is there at once.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from schedlang.cli.given import UsageError, compiled, costs_given, load, load_priced
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic, counted, render

#: The most sizes that one `schedc check --for` looks at.
MOST_SIZES = 1_000_000


def compile_program(options: argparse.Namespace) -> int:
    """Prove a program and write its plan."""
    from schedlang import read_source
    from schedlang.language.forms import old_forms
    from schedlang.language.imports import load as load_program

    source = read_source(options.file)
    if source.is_plan:
        raise UsageError(f"`{options.file}` is a plan, which `schedc check` proves again")
    choices = {"forward_only": options.forward_only, "transport": options.transport}
    plan = compiled(source, dict(options.params), **choices)
    status = _write(plan, options.output, options.format, old_forms(*load_program(source)))
    if options.verbose:
        from schedlang.report.figures import lowering_text

        print(lowering_text(plan))
    return status


def import_table(options: argparse.Namespace) -> int:
    """Prove one of torch's action tables and write its plan."""
    from schedlang import read_source
    from schedlang.plan.torch_tables import plan_of, read_table

    table = read_table(read_source(options.file))
    plan = plan_of(table, options.transport)
    if table.has_communication and not table.reduces_gradients:
        print(
            f"warning: `{options.file}` has no REDUCE_GRAD: torch runs it without scaling "
            "gradients; "
            "plans always scale them",
            file=sys.stderr,
        )
    return _write(plan, options.output)


def export(options: argparse.Namespace) -> int:
    """Write a plan as one of torch's action tables."""
    from schedlang.files.writing import write_text
    from schedlang.plan.torch_tables import export_table

    table = export_table(load(options), options.to)
    if options.output:
        write_text(table, options.output)
        print(f"wrote {options.output}")
    else:
        print(table, end="")
    return 0


def _write(
    plan: Any, output: str | None, format: str = "text", warnings: Sequence[Diagnostic] = ()
) -> int:
    """Write a plan, if to a file, and say in a line what it is, and what to beware of."""
    from schedlang import write_plan
    from schedlang.lowering import OWN
    from schedlang.proof.lints import lint

    if output:
        write_plan(plan, output)
    costs = "the plan's costs" if plan.costs.gives_times else "unit costs"
    sizes = {
        "rank": len(plan.ranks),
        "stage": len(plan.placement),
        "microbatch": plan.microbatches,
        "action": sum(map(len, plan.ranks)),
    }
    facts = [counted(number, noun) for noun, number in sizes.items()]
    print(f"{plan.name}: {', '.join(facts)}; no deadlock; {plan.idle:.1%} idle at {costs}")
    if output:
        print(f"wrote {output}")
    # What the compiler placed, it proved from the first use of each communicator on.
    own = plan.lowering in (OWN, "")
    _warn([*warnings, *(lint(plan) if own else [])], format)
    return 0


def check(options: argparse.Namespace) -> int:
    """Prove a program or a plan: for a transport, for all, or at many sizes."""
    from schedlang import read_plan, read_source
    from schedlang.advice.advice import advise
    from schedlang.cli.verdicts import (
        count_instances,
        errors,
        verdicts_json,
        verdicts_text,
        warnings,
    )
    from schedlang.compiler import check_program, check_range, check_schedule
    from schedlang.schedule.transports import NAMES

    source = read_source(options.file)
    ranges = dict(options.ranges)
    if source.is_plan and (options.params or ranges):
        raise UsageError(
            f"-p and --for are for the parameters of a program, `{options.file}` is a plan"
        )
    if ranges:
        if options.transport == "all" or options.json:
            raise UsageError("--for checks many sizes for one transport, and prints one line")
        if len(ranges) < len(options.ranges):
            raise UsageError("a parameter has one --for")
        if both := ranges.keys() & dict(options.params).keys():
            raise UsageError(f"`{min(both)}` has a -p and a --for")
        sizes = prod(map(len, ranges.values()))
        if sizes > MOST_SIZES:
            raise UsageError(
                f"--for asks for {sizes:,} sizes, at most {MOST_SIZES:,} are looked at"
            )
        print(
            count_instances(
                check_range(source, dict(options.params), ranges, options.transport), sizes
            )
        )
        return 0
    names = NAMES if options.transport == "all" else (options.transport,)
    if source.is_plan:
        found = check_schedule(read_plan(options.file), names)
    else:
        found = check_program(source, dict(options.params), names)
    wrong = any(map(errors, found.values()))
    if options.json:
        print(json.dumps({"file": options.file, "verdicts": verdicts_json(found)}, indent=1))
        return int(wrong)
    if len(found) == 1 and wrong:
        error = CompileError(found[options.transport])
        raise (
            error
            if source.is_plan
            else advise(error, source, dict(options.params), transport=options.transport)
        )
    print(verdicts_text(found) if len(found) > 1 else f"proved for {options.transport}")
    _warn(warnings(each for diagnostics in found.values() for each in diagnostics))
    return int(wrong)


def _warn(warnings: list[Diagnostic], format: str = "text") -> None:
    if warnings:
        print(render(warnings, format), file=sys.stderr)


def simulate(options: argparse.Namespace) -> int:
    """Print the figures of an execution."""
    from schedlang import simulate as execute
    from schedlang.report.figures import figures, figures_text

    plan, costs = load_priced(options)
    execution = execute(plan, costs, options.ideal)
    ideal = execution if options.ideal else execute(plan, costs, ideal=True)
    makespan = ideal.timeline.makespan
    if options.json:
        print(json.dumps(figures(plan, execution, costs) | {"ideal_makespan": makespan}))
    else:
        print(figures_text(plan, execution, makespan, costs))
    return 0


def view(options: argparse.Namespace) -> int:
    """Draw executions: one in the terminal, or one or two in a file."""
    from schedlang.report.views import check_path, write_pictures
    from schedlang.report.views.terminal import view as draw

    files = [options.file, *([options.other] if options.other else [])]
    if len(files) > 1 and not options.output:
        raise UsageError("two schedules stand side by side on a page: -o NAME.html")
    try:
        if options.output:
            check_path(options.output, len(files))
    except ValueError as error:
        raise UsageError(str(error)) from None
    pictures = [_picture(options, file) for file in files]
    if not options.output:
        print(draw(pictures[0], colour=sys.stdout.isatty() and not os.environ.get("NO_COLOR")))
        return 0
    try:
        write_pictures(pictures, options.output)
    except ImportError as error:
        print(f"schedc view: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.output}")
    return 0


def _picture(options: argparse.Namespace, file: str) -> Any:
    """The picture of an execution: simulated, or recorded by a run."""
    from schedlang import read_source
    from schedlang import simulate as execute
    from schedlang.report.measured import is_trace, read_run
    from schedlang.report.views import lay_out
    from schedlang.schedule.costs import Costs

    if is_trace(read_source(file).text):
        if not options.other and (options.params or costs_given(options) != Costs()):
            raise UsageError(
                f"`{file}` is a recorded run: it is drawn as it was, without parameters and costs"
            )
        run = read_run(file)
        return lay_out(run.plan, run.execution())
    plan, costs = load_priced(options, file)
    return lay_out(plan, execute(plan, costs, options.ideal))


def run(options: argparse.Namespace) -> int:
    """Train a small GPT on this machine."""
    from importlib.util import find_spec
    from tempfile import TemporaryDirectory

    from schedlang import write_plan

    plan = load(options)
    if find_spec("torch") is None:
        print("schedc run needs torch: pip install 'schedlang[runtime]'", file=sys.stderr)
        return 1
    # What would end the run only once it is over, or on every rank, is told before it begins.
    if options.trace and not Path(options.trace).absolute().parent.is_dir():
        raise UsageError(f"there is no folder for the trace `{options.trace}`")
    if options.every and not options.checkpoint:
        raise UsageError("--every says how often --checkpoint writes")
    try:
        if plan.kernels:
            plan.for_updates(max(options.steps or 0, plan.layout.updates))
    except ValueError as error:
        raise UsageError(str(error)) from None
    with TemporaryDirectory() as directory:
        path = Path(directory) / "plan.json"
        write_plan(plan, path)
        processes = str(len(plan.ranks) * options.replicas)
        launch = [
            sys.executable,
            "-m",
            "schedlang.runtime.example.launch",
            "--standalone",
            "--nproc-per-node",
            processes,
            "-m",
            "schedlang.runtime",
            str(path),
        ]
        for name in ("steps", "replicas", "trace", "checkpoint", "every"):
            given = getattr(options, name)
            launch += [f"--{name}", str(given)] if given is not None else []
        launch += ["--check"] if options.check else []
        return _follow(launch, {"OMP_NUM_THREADS": "1"} | dict(os.environ))


def _follow(command: list[str], environment: dict[str, str]) -> int:
    """Run a command; its exit code. Signals that would end this process are for it alone, and once:
    it ends its own.
    """
    import signal
    import subprocess

    process = subprocess.Popen(command, env=environment, start_new_session=True)

    def pass_on(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        process.send_signal(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in signals}
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def explain(options: argparse.Namespace) -> int:
    """Print what error codes mean."""
    from difflib import get_close_matches

    from schedlang.report.explain import codes, page, summary

    known = codes()
    for code in options.codes:
        if code not in known:
            close = ", ".join(f"`{each}`" for each in get_close_matches(code, known))
            raise UsageError(
                f"there is no code `{code}`; "
                f"{f'near it: {close}' if close else 'all: `schedc explain`'}"
            )
    if options.codes:
        print("\n".join(map(page, options.codes)), end="")
    else:
        width = max(map(len, known))
        print("\n".join(f"{code:{width}}  {summary(code)}" for code in known))
    return 0
