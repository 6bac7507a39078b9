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

from schedlang.cli.inputs import UsageError, load, load_with_costs, read_cost_options
from schedlang.diagnostics.diagnostic import CompileError, Diagnostic, counted, render

#: The most sizes that one `schedc check --for` looks at.
MOST_SIZES = 1_000_000


def compile_program(options: argparse.Namespace) -> int:
    """Prove a program and write its plan."""
    from schedlang import read_source
    from schedlang.advice.compiling import compile_with_advice
    from schedlang.language.forms import old_forms
    from schedlang.language.imports import load as load_program

    source = read_source(options.file)
    if source.is_plan:
        raise UsageError(f"`{options.file}` is a plan, which `schedc check` proves again")
    plan = compile_with_advice(
        source,
        dict(options.params),
        forward_only=options.forward_only,
        transport=options.transport,
    )
    warnings = old_forms(*load_program(source))
    _report(plan, options.output, options.format, warnings)
    if options.verbose:
        from schedlang.report.figures import lowering_text

        print(lowering_text(plan))
    return 0


def import_table(options: argparse.Namespace) -> int:
    """Prove one of torch's action tables and write its plan."""
    from schedlang import read_source
    from schedlang.plan.torch_tables import plan_of, read_table

    table = read_table(read_source(options.file))
    # The same checks as for a program: a table may come from anywhere.
    plan = plan_of(table, options.transport)
    if table.has_communication and not table.reduces_gradients:
        warning = (
            f"warning: `{options.file}` has no REDUCE_GRAD: torch runs it without scaling "
            "gradients; plans always scale them"
        )
        print(warning, file=sys.stderr)
    _report(plan, options.output)
    return 0


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


def _report(
    plan: Any, output: str | None, format: str = "text", warnings: Sequence[Diagnostic] = ()
) -> None:
    """Write a plan, if to a file; print in one line what it is, and warnings."""
    from schedlang import write_plan
    from schedlang.lowering import OWN
    from schedlang.proof.lints import lint

    if output:
        write_plan(plan, output)
    costs = "the plan's costs" if plan.costs.gives_times else "unit costs"
    sizes = [
        counted(len(plan.ranks), "rank"),
        counted(len(plan.placement), "stage"),
        counted(plan.microbatches, "microbatch"),
        counted(sum(map(len, plan.ranks)), "action"),
    ]
    verdict = "forward only, no deadlock" if plan.is_forward_only else "no deadlock"
    print(f"{plan.name}: {', '.join(sizes)}; {verdict}; {plan.idle:.1%} idle at {costs}")
    if output:
        print(f"wrote {output}")
    # Transfers that the compiler has placed are proved from the first use of each communicator
    # on, so only those of a program, or of a table, are worth a warning.
    own_warnings = lint(plan) if plan.lowering in (OWN, "") else []
    _warn([*warnings, *plan.warnings, *own_warnings], format)


def check(options: argparse.Namespace) -> int:
    """Prove a program or a plan: for a transport, for all, or at many sizes."""
    from schedlang import read_plan, read_source
    from schedlang.advice.advice import advise
    from schedlang.cli.verdicts import errors, verdicts_json, verdicts_text, warnings
    from schedlang.compiler import check_program, check_schedule
    from schedlang.schedule.transports import NAMES

    source = read_source(options.file)
    if source.is_plan and (options.params or options.ranges):
        raise UsageError(
            f"-p and --for are for the parameters of a program, `{options.file}` is a plan"
        )
    if options.ranges:
        return _check_sizes(options, source)
    names = NAMES if options.transport == "all" else (options.transport,)
    if source.is_plan:
        plan = read_plan(options.file)
        verdicts = check_schedule(plan, names, plan.kernels)
    else:
        verdicts = check_program(source, dict(options.params), names)
    is_wrong = any(map(errors, verdicts.values()))
    if options.json:
        document = {"file": options.file, "verdicts": verdicts_json(verdicts)}
        print(json.dumps(document, indent=1))
        return int(is_wrong)
    if len(verdicts) == 1 and is_wrong:
        # Of one transport everything is said that `compile` would say.
        error = CompileError(verdicts[options.transport])
        if source.is_plan:
            raise error
        raise advise(error, source, dict(options.params), transport=options.transport)
    if len(verdicts) > 1:
        print(verdicts_text(verdicts))
    else:
        print(f"proved for {options.transport}")
    _warn(warnings(verdicts))
    return int(is_wrong)


def _check_sizes(options: argparse.Namespace, source: Any) -> int:
    """Prove a program at every size that `--for` names."""
    from schedlang.cli.verdicts import count_sizes
    from schedlang.compiler import check_range

    ranges = dict(options.ranges)
    if options.transport == "all" or options.json:
        raise UsageError("--for checks many sizes for one transport, and prints one line")
    if len(ranges) < len(options.ranges):
        raise UsageError("a parameter has one --for")
    in_both = ranges.keys() & dict(options.params).keys()
    if in_both:
        raise UsageError(f"`{min(in_both)}` has a -p and a --for")
    sizes = prod(map(len, ranges.values()))
    if sizes > MOST_SIZES:
        raise UsageError(f"--for asks for {sizes:,} sizes, at most {MOST_SIZES:,} are looked at")
    # Proved as they are counted, the smallest size first.
    instances = check_range(source, dict(options.params), ranges, options.transport)
    print(count_sizes(instances, sizes))
    return 0


def _warn(warnings: list[Diagnostic], format: str = "text") -> None:
    if warnings:
        print(render(warnings, format), file=sys.stderr)


def simulate(options: argparse.Namespace) -> int:
    """Print the figures of an execution."""
    from schedlang import simulate as execute
    from schedlang.report.figures import figures, figures_text

    plan, costs = load_with_costs(options)
    execution = execute(plan, costs, options.ideal)
    # What the transport adds is shown as what is beyond the ideal.
    ideal = execution if options.ideal else execute(plan, costs, ideal=True)
    makespan = ideal.timeline.makespan
    if options.json:
        document = figures(plan, execution, costs)
        document["ideal_makespan"] = makespan
        print(json.dumps(document))
    else:
        print(figures_text(plan, execution, makespan, costs))
    return 0


def view(options: argparse.Namespace) -> int:
    """Draw executions: one in the terminal, or one or two in a file."""
    from schedlang.report.views import check_path, write_pictures
    from schedlang.report.views.terminal import view as draw

    files = [options.file]
    if options.other:
        files.append(options.other)
    if len(files) > 1 and not options.output:
        raise UsageError("two schedules stand side by side on a page: -o NAME.html")
    try:
        # Before the schedules are compiled, which may take a while.
        if options.output:
            check_path(options.output, len(files))
    except ValueError as error:
        raise UsageError(str(error)) from None
    pictures = [_picture(options, file) for file in files]
    if not options.output:
        # https://no-color.org
        has_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(draw(pictures[0], colour=has_colour))
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

    if not is_trace(read_source(file).text):
        plan, costs = load_with_costs(options, file)
        return lay_out(plan, execute(plan, costs, options.ideal))
    # Of a program beside a run, the options are for the program.
    if not options.other and (options.params or read_cost_options(options) != Costs()):
        raise UsageError(
            f"`{file}` is a recorded run: it is drawn as it was, without parameters and costs"
        )
    run = read_run(file)
    return lay_out(run.plan, run.execution())


def run(options: argparse.Namespace) -> int:
    """Train a small GPT on this machine."""
    from importlib.util import find_spec
    from tempfile import TemporaryDirectory

    from schedlang import write_plan

    plan = load(options)
    if find_spec("torch") is None:
        print("schedc run needs torch: pip install 'schedlang[runtime]'", file=sys.stderr)
        return 1
    _check_run(options, plan)
    with TemporaryDirectory() as directory:
        path = Path(directory) / "plan.json"
        write_plan(plan, path)
        processes = len(plan.ranks) * options.replicas
        command = [sys.executable, "-m", "schedlang.runtime.example.launch"]
        command += ["--standalone", "--nproc-per-node", str(processes)]
        command += ["-m", "schedlang.runtime", str(path)]
        for name in ("steps", "optimizer", "lr", "replicas", "trace", "checkpoint", "every"):
            value = getattr(options, name)
            if value is not None:
                command += [f"--{name}", str(value)]
        flags = {"check": "check", "audit": "audit", "stop_on_nan": "stop-on-nan"}
        command += [f"--{flag}" for name, flag in flags.items() if getattr(options, name)]
        # The ranks are the parallel part: threads of each would only be in each other's way.
        return _run_until_end(command, {"OMP_NUM_THREADS": "1"} | dict(os.environ))


def _check_run(options: argparse.Namespace, plan: Any) -> None:
    """Say before processes start what would end the run only when it is over, or on every rank."""
    if options.trace and not Path(options.trace).absolute().parent.is_dir():
        raise UsageError(f"there is no folder for the trace `{options.trace}`")
    if options.every and not options.checkpoint:
        raise UsageError("--every says how often --checkpoint writes")
    for name in ("audit", "checkpoint", "lr", "optimizer"):
        if plan.is_forward_only and getattr(options, name):
            raise UsageError(f"--{name} is for a training, and `{plan.name}` has no backward")
    if plan.kernels:
        try:
            plan.for_updates(max(options.steps or 0, plan.layout.updates))
        except ValueError as error:
            raise UsageError(str(error)) from None


def _run_until_end(command: list[str], environment: dict[str, str]) -> int:
    """Run a command; its exit code.

    A signal that would end this process goes to the command alone, once: it ends its own processes,
    and then this one ends too.
    """
    import signal
    import subprocess

    # In a session of its own, or Ctrl-C would reach all of its processes at once.
    process = subprocess.Popen(command, env=environment, start_new_session=True)

    def pass_on(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        process.send_signal(number)

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in signals}
    # Whoever calls this from Python gets their own handlers back.
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
            close = [f"`{match}`" for match in get_close_matches(code, known)]
            way_out = f"near it: {', '.join(close)}" if close else "all: `schedc explain`"
            raise UsageError(f"there is no code `{code}`; {way_out}")
    if options.codes:
        print("\n".join(map(page, options.codes)), end="")
    else:
        width = max(map(len, known))
        for code in known:
            print(f"{code:{width}}  {summary(code)}")
    return 0
