"""The `schedc` command: data on stdout, diagnostics on stderr.

Exit code 0, 1 for diagnostics, 2 for wrong usage.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from schedlang.diagnostics import CompileError, counted, to_json, to_text

_EXAMPLE, _TABLE = "programs/1f1b.sched", "table.csv"
#: The most errors that are shown as text: in a table, one mistake can make every cell behind it wrong.
_MOST_ERRORS = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        return options.run(options)  # type: ignore[no-any-return]
    except CompileError as error:
        _report(error, getattr(options, "format", "text"))
        return 1
    except _UsageError as error:
        parser.error(str(error))
    except BrokenPipeError:
        # The reader of our output has seen enough; Python would complain again when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _UsageError(Exception):
    """The options do not go together."""


def _report(error: CompileError, format: str) -> None:
    if format == "json":
        print(json.dumps({"diagnostics": [to_json(each) for each in error.diagnostics]}, indent=1), file=sys.stderr)
        return
    print("\n\n".join(map(to_text, error.diagnostics[:_MOST_ERRORS])), file=sys.stderr)
    if len(error.diagnostics) > 1:
        shown = f", the first {_MOST_ERRORS} are shown" if len(error.diagnostics) > _MOST_ERRORS else ""
        print(f"\n{len(error.diagnostics)} errors{shown}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="schedc", description="Compile pipeline-parallel training schedules.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    compile = _command(commands, "compile", _compile, "prove a program and write its plan", "-p ranks=8 -o plan.json")
    compile.add_argument("-o", "--output", metavar="PLAN", help="the plan file to write")
    compile.add_argument("--forward-only", action="store_true", help="keep only the forwards: the inference plan")
    compile.add_argument("--format", choices=("text", "json"), default="text", help="the form of diagnostics")

    show = _command(commands, "show", _show, "print what each rank does", "--compute")
    show.add_argument("--ranks", action="store_true", help="only the actions, one line per rank")
    show.add_argument("--compute", action="store_true", help="without sends and receives")

    simulate = _command(commands, "simulate", _simulate, "predict time, bubble and memory", "--p2p-time 0.1")
    for name in ("forward", "backward", "input", "weight"):
        simulate.add_argument(f"--{name}-times", nargs="+", type=float, metavar="T",
                              help=f"durations of {_OPS[name]}, one for all stages or one per stage")  # fmt: skip
    simulate.add_argument("--p2p-time", type=float, metavar="T", help="duration of a transfer between ranks")
    simulate.add_argument("--costs", metavar="FILE", help="a JSON file with the above, by their names")
    simulate.add_argument("--updates", type=int, metavar="N", help="of a schedule without a flush, how many to show")
    simulate.add_argument("--json", action="store_true", help="the figures, for machines")

    export = _command(commands, "export", _export, "write it as an action table of torch", "--to torch-csv")
    export.add_argument("--to", required=True, choices=("torch-csv", "torch-csv-compute"), help="with communication, "
                        "or compute ops only, the form that torchtitan loads")  # fmt: skip
    export.add_argument("-o", "--output", metavar="TABLE", help="the file to write, instead of stdout")

    table = _command(commands, "import", _import, "prove an action table of torch and write its plan", "-o plan.json")
    table.add_argument("-o", "--output", metavar="PLAN", help="the plan file to write")

    run = _command(commands, "run", _run, "train a small GPT with it on this machine", "--steps 5 --check")
    run.add_argument("--steps", type=int, help="how many updates")
    run.add_argument("--check", action="store_true", help="compare with the same training in one process")
    return parser


_OPS = {
    "forward": "F", "backward": "a whole B", "input": "B where W is apart", "weight": "W",
}  # fmt: skip


def _command(commands: Any, name: str, run: Any, help: str, example: str) -> argparse.ArgumentParser:
    """A command that takes a program or a plan, and parameters for a program; or a table."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog=f"example: schedc {name} {_TABLE if name == 'import' else _EXAMPLE} {example}",
    )
    what = {"compile": "a program", "import": "a table"}
    command.add_argument("file", metavar="FILE", help=what.get(name, "a program or a plan"))
    if name != "import":
        command.add_argument("-p", dest="params", action="append", default=[], type=_param, metavar="NAME=VALUE",
                             help="set a parameter of the program")  # fmt: skip
    command.set_defaults(run=run)
    return command


def _param(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{text}` is not NAME=VALUE with a whole number") from None


def _load(options: argparse.Namespace, costs: Any = None) -> Any:
    """The plan in the file, or the plan of the program in it for some costs.

    A plan begins with `{`, a program never does.
    """
    from schedlang import compile, read_plan, read_source

    source = read_source(options.file)
    if not source.text.lstrip().startswith("{"):
        return compile(source, dict(options.params), *([costs] if costs else []))
    if options.params:
        raise _UsageError(f"-p sets parameters of a program, `{options.file}` is a plan")
    return read_plan(options.file)


def _compile(options: argparse.Namespace) -> int:
    from schedlang import compile, read_source

    plan = compile(read_source(options.file), dict(options.params), forward_only=options.forward_only)
    return _write(plan, options.output)


def _import(options: argparse.Namespace) -> int:
    from schedlang import read_source
    from schedlang.torch_tables import plan_of, read_table

    table = read_table(read_source(options.file))
    plan = plan_of(table)
    if table.has_communication and not table.reduces_gradients:
        print(f"warning: `{options.file}` has no REDUCE_GRAD: torch runs it without scaling gradients; "
              "plans always scale them", file=sys.stderr)  # fmt: skip
    return _write(plan, options.output)


def _export(options: argparse.Namespace) -> int:
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
    from schedlang import simulate, write_plan

    if output:
        write_plan(plan, output)
    idle = simulate(plan).timeline.bubble_over_makespan
    costs = "the plan's costs" if plan.costs.gives_times else "unit costs"
    sizes = {"rank": len(plan.ranks), "stage": len(plan.placement), "microbatch": plan.microbatches,
             "action": sum(map(len, plan.ranks))}  # fmt: skip
    facts = [counted(number, noun) for noun, number in sizes.items()]
    print(f"{plan.name}: {', '.join(facts)}; no deadlock; {idle:.1%} idle at {costs}")
    if output:
        print(f"wrote {output}")
    return 0


def _show(options: argparse.Namespace) -> int:
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


def _simulate(options: argparse.Namespace) -> int:
    from schedlang import simulate
    from schedlang.costs import NAMES, make_costs, read_costs
    from schedlang.report import figures, figures_text

    given = {name: getattr(options, name) for name in NAMES if getattr(options, name, None) is not None}
    if options.costs and given:
        raise _UsageError("give costs as options or as a file, not both")
    try:
        costs = read_costs(options.costs) if options.costs else make_costs(
            {name: times if isinstance(times, list) else [times] for name, times in given.items()}
        )  # fmt: skip
        plan = _load(options, costs)
        if options.updates is not None:
            plan = plan.for_updates(options.updates)
        execution = simulate(plan, costs)
    except ValueError as error:
        raise _UsageError(str(error)) from None
    print(json.dumps(figures(plan, execution)) if options.json else figures_text(plan, execution))
    return 0


def _run(options: argparse.Namespace) -> int:
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
        return subprocess.run(launch, env={"OMP_NUM_THREADS": "1"} | dict(os.environ)).returncode
