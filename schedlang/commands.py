"""What the commands of `schedc` do, given their options; each returns an exit code.

What a command needs is imported when it runs, so that `schedc --help` is there at once.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

from schedlang.diagnostics import CompileError, counted

#: The most sizes that one `schedc check --for` looks at.
MOST_SIZES = 1_000_000


class UsageError(Exception):
    """The options do not go together."""


def _load(options: argparse.Namespace, costs: Any = None) -> Any:
    """The plan in the file, or the plan of the program in it for some costs.

    A plan begins with `{`, a program never does.
    """
    from schedlang import compile, read_plan, read_source

    source = read_source(options.file)
    if not source.text.lstrip().startswith("{"):
        return compile(source, dict(options.params), *([costs] if costs else []))
    if options.params:
        raise UsageError(f"-p sets parameters of a program, `{options.file}` is a plan")
    return read_plan(options.file)


def compile_program(options: argparse.Namespace) -> int:
    """Prove a program and write its plan."""
    from schedlang import compile, read_source

    plan = compile(
        read_source(options.file), dict(options.params), forward_only=options.forward_only, transport=options.transport
    )
    return _write(plan, options.output)


def import_table(options: argparse.Namespace) -> int:
    """Prove one of torch's action tables and write its plan."""
    from schedlang import read_source
    from schedlang.torch_tables import plan_of, read_table

    table = read_table(read_source(options.file))
    plan = plan_of(table, options.transport)
    if table.has_communication and not table.reduces_gradients:
        print(f"warning: `{options.file}` has no REDUCE_GRAD: torch runs it without scaling gradients; "
              "plans always scale them", file=sys.stderr)  # fmt: skip
    return _write(plan, options.output)


def export(options: argparse.Namespace) -> int:
    """Write a plan as one of torch's action tables."""
    from schedlang.plan import write_text
    from schedlang.torch_tables import export_table

    table = export_table(_load(options), options.to)
    if options.output:
        write_text(table, options.output)
        print(f"wrote {options.output}")
    else:
        print(table, end="")
    return 0


def _write(plan: Any, output: str | None) -> int:
    """Write a plan, if to a file, and say in a line what it is."""
    from schedlang import simulate as execute
    from schedlang import write_plan

    if output:
        write_plan(plan, output)
    idle = execute(plan).timeline.bubble_over_makespan
    costs = "the plan's costs" if plan.costs.gives_times else "unit costs"
    sizes = {"rank": len(plan.ranks), "stage": len(plan.placement), "microbatch": plan.microbatches,
             "action": sum(map(len, plan.ranks))}  # fmt: skip
    facts = [counted(number, noun) for noun, number in sizes.items()]
    print(f"{plan.name}: {', '.join(facts)}; no deadlock; {idle:.1%} idle at {costs}")
    if output:
        print(f"wrote {output}")
    return 0


def check(options: argparse.Namespace) -> int:
    """Prove a program or a plan: for a transport, for all, or at many sizes."""
    from schedlang import read_plan, read_source
    from schedlang.compiler import check_program, check_range, check_schedule
    from schedlang.transports import NAMES
    from schedlang.verdicts import count_instances, verdicts_json, verdicts_text

    source, ranges = read_source(options.file), dict(options.ranges)
    is_plan = source.text.lstrip().startswith("{")
    if is_plan and (options.params or ranges):
        raise UsageError(f"-p and --for are for the parameters of a program, `{options.file}` is a plan")
    if ranges:
        if options.transport == "all" or options.json:
            raise UsageError("--for checks many sizes for one transport, and prints one line")
        if len(ranges) < len(options.ranges):
            raise UsageError("a parameter has one --for")
        sizes = prod(map(len, ranges.values()))
        if sizes > MOST_SIZES:
            raise UsageError(f"--for asks for {sizes:,} sizes, at most {MOST_SIZES:,} are looked at")
        print(count_instances(check_range(source, dict(options.params), ranges, options.transport), sizes))
        return 0
    names = NAMES if options.transport == "all" else (options.transport,)
    if is_plan:
        found = check_schedule(read_plan(options.file), names)
    else:
        found = check_program(source, dict(options.params), names)
    if options.json:
        print(json.dumps({"file": options.file, "verdicts": verdicts_json(found)}, indent=1))
    elif len(found) > 1:
        print(verdicts_text(found))
    elif any(found.values()):
        raise CompileError(found[options.transport])
    else:
        print(f"proved for {options.transport}")
    return int(any(found.values()))


def show(options: argparse.Namespace) -> int:
    """Print what each rank does."""
    plan = _load(options)
    texts = [(actions.compute() if options.compute else actions).text() for actions in plan.ranks]
    if options.ranks:
        print("\n".join(texts))
        return 0
    params = ", ".join(f"{name} = {value}" for name, value in plan.params.items())
    print(f"{plan.name} ({params}), from {plan.source.path}, proved for transport {plan.transport}")
    for rank, text in enumerate(texts):
        stages = ", ".join(map(str, plan.stages_of(rank)))
        print(f"\nrank {rank}, stage{'s' if ',' in stages else ''} {stages}\n  {text}")
    return 0


def simulate(options: argparse.Namespace) -> int:
    """Print the figures of an execution."""
    from schedlang import simulate as execute
    from schedlang.costs import NAMES, make_costs, read_costs
    from schedlang.report import figures, figures_text

    given = {name: getattr(options, name) for name in NAMES if getattr(options, name, None) is not None}
    if options.costs and given:
        raise UsageError("give costs as options or as a file, not both")
    try:
        costs = read_costs(options.costs) if options.costs else make_costs(
            {name: times if isinstance(times, list) else [times] for name, times in given.items()}
        )  # fmt: skip
        plan = _load(options, costs)
        if options.updates is not None:
            plan = plan.for_updates(options.updates)
        execution = execute(plan, costs)
    except ValueError as error:
        raise UsageError(str(error)) from None
    print(json.dumps(figures(plan, execution)) if options.json else figures_text(plan, execution))
    return 0


def run(options: argparse.Namespace) -> int:
    """Train a small GPT on this machine."""
    from schedlang import write_plan

    plan = _load(options)
    if importlib.util.find_spec("torch") is None:
        print("schedc run needs torch: pip install 'schedlang[runtime]'", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "plan.json"
        write_plan(plan, path)
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                  "--nproc-per-node", str(len(plan.ranks)), "-m", "schedlang.runtime", str(path)]  # fmt: skip
        launch += ["--steps", str(options.steps)] if options.steps is not None else []
        launch += ["--check"] if options.check else []
        launch += ["--trace", options.trace] if options.trace else []
        return subprocess.run(launch, env={"OMP_NUM_THREADS": "1"} | dict(os.environ)).returncode


def explain(options: argparse.Namespace) -> int:
    """Print what error codes mean."""
    from schedlang.explain import codes, page, summary

    known = codes()
    for code in options.codes:
        if code not in known:
            close = ", ".join(f"`{each}`" for each in get_close_matches(code, known))
            raise UsageError(f"there is no code `{code}`; {f'near it: {close}' if close else 'all: `schedc explain`'}")
    if options.codes:
        print("\n".join(map(page, options.codes)), end="")
    else:
        width = max(map(len, known))
        print("\n".join(f"{code:{width}}  {summary(code)}" for code in known))
    return 0
