"""The `schedc` command: data on stdout, diagnostics on stderr.

Exit code 0, 1 for diagnostics, 2 for wrong usage, 130 for Ctrl-C.
"""

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

# What the example at the end of a command's help is about.
_EXAMPLE = "programs/1f1b.sched"
_TABLE = "table.csv"
#: What `--ideal` means, for two commands.
_IDEAL = "no transfer waits for another: only latency counts"
#: How many objects a command makes before Python looks for garbage among them for the first time.
_FEW_OBJECTS = 100_000
#: What `run` can train with.
OPTIMIZERS = ("sgd", "adam", "adamw")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, by default that of this process; the exit code."""
    if argv is None:
        _run_and_end()
        argv = sys.argv[1:]
    # The options of one command are quicker to build than those of all.
    names = argv[:1] if argv and argv[0] in _COMMANDS else _COMMANDS
    parser = _parser(names)
    options = parser.parse_args(argv)
    # Behind this line, so that `--help` does not pay for it.
    from schedlang.cli.inputs import UsageError
    from schedlang.diagnostics.diagnostic import CompileError, render

    # Each command names its function, as `commands.simulate`.
    module, _, function = options.run.rpartition(".")
    try:
        command = getattr(import_module(f"schedlang.cli.{module}"), function)
        exit_code: int = command(options)
        return exit_code
    except CompileError as error:
        print(render(error.diagnostics, getattr(options, "format", "text")), file=sys.stderr)
        return 1
    except UsageError as error:
        # This prints the usage and exits with 2.
        parser.error(str(error))
    except KeyboardInterrupt:
        # What shells report for a command that Ctrl-C has ended.
        return 130
    except BrokenPipeError:
        # The reader of our output has seen enough; Python would complain again when it closes
        # stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run_and_end() -> None:
    """Make this process one that runs a command and ends.

    Most of its objects are the modules that it loads, which are no garbage. Looking through them
    again and again, and twice more at the end, would be a quarter of the time of a small command.
    Nor does any command do linear algebra, for which numpy would start a thread on each core.
    """
    gc.set_threshold(_FEW_OBJECTS)
    atexit.register(gc.freeze)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


class _Version(argparse.Action):
    """`--version`: print it and exit. It is looked up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from schedlang import __version__

        print(f"schedc {__version__}")
        parser.exit()


def _parser(names: Iterable[str]) -> argparse.ArgumentParser:
    """The parser of the command line, with the commands of some names."""
    parser = argparse.ArgumentParser(
        prog="schedc", description="Compile pipeline-parallel training schedules."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in names:
        _COMMANDS[name](parsers)
    return parser


def _compile(parsers: Any) -> None:
    help = "prove a program and write its plan"
    compile = _command(
        parsers, "compile", "commands.compile_program", help, "-p ranks=8 -o plan.json"
    )
    compile.add_argument("-o", "--output", metavar="PLAN", help="the plan file to write")
    compile.add_argument(
        "--forward-only", action="store_true", help="keep only the forwards: the inference plan"
    )
    compile.add_argument(
        "--format",
        choices=("text", "json", "github"),
        default="text",
        help="the form of diagnostics: for people, programs, GitHub's annotations",
    )
    compile.add_argument(
        "--transport",
        type=_transport,
        default="portable",
        metavar="NAME",
        help="what the plan is proved for, and its communication chosen",
    )
    compile.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="say how its communication was chosen, and what it costs",
    )


def _check(parsers: Any) -> None:
    check = _command(
        parsers,
        "check",
        "commands.check",
        "prove a program for transports or sizes",
        "--for ranks=2..8",
    )
    check.add_argument(
        "--transport",
        type=_transports,
        default="portable",
        metavar="NAME",
        help="a transport, or `all` for a table",
    )
    check.add_argument(
        "--for",
        dest="ranges",
        action="append",
        default=[],
        type=_range,
        metavar="NAME=A..B",
        help="every value of a parameter from A to B",
    )
    check.add_argument("--json", action="store_true", help="the verdicts, for machines")


def _show(parsers: Any) -> None:
    show = _command(parsers, "show", "show.show", "print what each rank does", "--compute")
    show.add_argument("--ranks", action="store_true", help="only the actions, one line per rank")
    # Each is another way to print the actions, so only one can be asked for.
    what = show.add_mutually_exclusive_group()
    what.add_argument("--compute", action="store_true", help="without sends and receives")
    what.add_argument(
        "--frees",
        action="store_true",
        help="with the activations and messages that each action lets go",
    )
    what.add_argument(
        "--shards",
        type=count,
        metavar="N",
        help="when sharded weights are gathered, of at most N "
        "stages of a rank at once, and gradients reduced",
    )
    show.add_argument("--costs", metavar="FILE", help="a file with `weights_bytes`, for --shards")


def _simulate(parsers: Any) -> None:
    simulate = _command(
        parsers,
        "simulate",
        "commands.simulate",
        "predict time, bubble and memory",
        "--p2p-time 0.1",
    )
    _execution(simulate)
    simulate.add_argument("--ideal", action="store_true", help=_IDEAL)
    simulate.add_argument("--json", action="store_true", help="the figures, for machines")


def _view(parsers: Any) -> None:
    view = _command(parsers, "view", "commands.view", "draw when each op runs", "-o 1f1b.html")
    view.add_argument(
        "other", metavar="FILE", nargs="?", help="another one, side by side with it on a page"
    )
    _execution(view)
    view.add_argument("--ideal", action="store_true", help=_IDEAL)
    view.add_argument(
        "-o",
        "--output",
        metavar="VIEW",
        help="the file to write, instead of the terminal: NAME.svg or "
        ".png for papers, .html to zoom and hover, .json a trace for Perfetto and Chrome",
    )


def _compare(parsers: Any) -> None:
    compare = _command(
        parsers,
        "compare",
        "figures.compare",
        "compare schedules in one table",
        "programs/zb_h1.sched --sort makespan",
    )
    _costs(compare)
    compare.add_argument(
        "--sort", choices=("given", "makespan"), default="given", help="the order of the rows"
    )
    compare.add_argument("--json", action="store_true", help="the figures of each, for machines")
    compare.add_argument(
        "--write-costs",
        metavar="FILE",
        help="of a program or plan and the trace of a run: write what its ops took, for --costs",
    )


def _explain_bubble(parsers: Any) -> None:
    help = "say what every idle time is due to, and what would make it less"
    bubble = _command(parsers, "explain-bubble", "figures.explain_bubble", help, "--p2p-time 0.1")
    _execution(bubble)
    bubble.add_argument("--json", action="store_true", help="every idle interval, for machines")


def _execution(command: argparse.ArgumentParser) -> None:
    """The options of a command that executes a plan."""
    _costs(command)
    command.add_argument(
        "--transport",
        type=_transport,
        metavar="NAME",
        help="what it communicates by; without, as the plan says, or gloo",
    )
    command.add_argument(
        "--updates",
        type=int,
        metavar="N",
        help="of a schedule without a flush, how many to look at",
    )


def _costs(parser: argparse.ArgumentParser) -> None:
    """The options for costs."""
    # The most frequent ones; a file can have more.
    for name, ops in _OPS.items():
        parser.add_argument(
            f"--{name}-times",
            nargs="+",
            type=float,
            metavar="T",
            help=f"durations of {ops}, one for all stages or one per stage",
        )
    parser.add_argument(
        "--p2p-time", type=float, metavar="T", help="duration of a transfer between ranks"
    )
    parser.add_argument(
        "--costs", metavar="FILE", help="a JSON or YAML file with these and more, see docs/costs.md"
    )


def _export(parsers: Any) -> None:
    help = "write a plan as an action table of torch"
    export = _command(parsers, "export", "commands.export", help, "--to torch-csv")
    export.add_argument(
        "--to",
        required=True,
        choices=("torch-csv", "torch-csv-compute"),
        help="with communication, or compute ops only, the form that torchtitan loads",
    )
    export.add_argument(
        "-o", "--output", metavar="TABLE", help="the file to write, instead of stdout"
    )


def _import(parsers: Any) -> None:
    help = "prove an action table of torch and write its plan"
    table = _command(parsers, "import", "commands.import_table", help, "-o plan.json")
    table.add_argument("-o", "--output", metavar="PLAN", help="the plan file to write")
    table.add_argument(
        "--transport",
        type=_transport,
        default="portable",
        metavar="NAME",
        help="what the plan is proved for",
    )


def _pipeline(parsers: Any) -> None:
    help = "simulate a strategy with the options of PP-Schedule-Visualization"
    tool = parsers.add_parser(
        "pipeline",
        help=help,
        description=f"{help[0].upper()}{help[1:]}; see docs/pipeline.md.",
        epilog="example: schedc pipeline --num-stages 4 --num-batches 8 --p2p-time 0.1",
    )
    tool.add_argument(
        "settings",
        metavar="KEY=VALUE",
        nargs="*",
        type=_setting,
        help="a setting, by its key in files",
    )
    tool.add_argument("-c", "--config", metavar="FILE", help="a JSON or YAML file with settings")
    tool.add_argument(
        "-s", "--num-stages", type=int, metavar="N", help="stages of the pipeline, by default 4"
    )
    tool.add_argument(
        "-b", "--num-batches", type=int, metavar="N", help="microbatches, by default 10"
    )
    for short, name in (("-f", "forward"), ("-bw", "backward")):
        tool.add_argument(
            short,
            f"--{name}-times",
            nargs="+",
            type=float,
            metavar="T",
            help=f"{name} times by stage",
        )
    tool.add_argument(
        "--p2p-time", type=float, metavar="T", help="time of a transfer, by default 0"
    )
    tool.add_argument("-o", "--output", metavar="FILE", help="the picture to write")
    tool.add_argument(
        "--no-visualization", action="store_true", help="no picture, only the bubble rate"
    )
    tool.add_argument("--table", action="store_true", help="the timeline as a table, time by stage")
    compat = tool.add_mutually_exclusive_group()
    compat.add_argument(
        "--compat",
        action="store_const",
        const="sync",
        help="count time as the tool's later version",
    )
    compat.add_argument(
        "--compat-async",
        dest="compat",
        action="store_const",
        const="async",
        help="the same before its commit 56a94ad: no gaps after transfers",
    )
    tool.set_defaults(run="pipeline.pipeline")


def _run(parsers: Any) -> None:
    run = _command(
        parsers,
        "run",
        "commands.run",
        "train a small GPT with a schedule on this machine",
        "--steps 5 --check",
    )
    run.add_argument("--steps", type=count, metavar="N", help="how many updates")
    run.add_argument("--optimizer", choices=OPTIMIZERS, help="default: sgd")
    run.add_argument(
        "--lr",
        type=rate,
        metavar="RATE",
        help="the learning rate (default: one that suits the optimizer and the schedule)",
    )
    run.add_argument(
        "--stop-on-nan",
        action="store_true",
        help="end where a loss is not a finite number, before the update",
    )
    run.add_argument(
        "--check", action="store_true", help="compare with the same training in one process"
    )
    run.add_argument(
        "--audit", action="store_true", help="compare every stage with itself alone, in one step"
    )
    run.add_argument(
        "--replicas",
        type=count,
        default=1,
        metavar="N",
        help="train so many replicas of the plan, each with batches of its own (default: 1)",
    )
    run.add_argument(
        "--trace",
        metavar="FILE",
        help="write what the last steps did and when: for `schedc view`, "
        "`schedc compare` and ui.perfetto.dev",
    )
    run.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="resume from the newest checkpoint in a folder, and write more there",
    )
    run.add_argument(
        "--every",
        type=count,
        metavar="N",
        help="how many updates from one checkpoint to the next (default: 10)",
    )


def _explain(parsers: Any) -> None:
    help = "say what error codes mean, and how such programs are put right"
    # It is the one command that takes neither a program nor a plan.
    explain = parsers.add_parser(
        "explain",
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog="example: schedc explain deadlock",
    )
    explain.add_argument(
        "codes",
        metavar="CODE",
        nargs="*",
        help="what stands in `error[…]`; without, all are listed",
    )
    explain.set_defaults(run="commands.explain")


#: What adds each command with its options; in the order of `schedc --help`, first what most people
#: need first.
_COMMANDS: dict[str, Callable[[Any], None]] = {
    "compile": _compile,
    "check": _check,
    "show": _show,
    "simulate": _simulate,
    "view": _view,
    "compare": _compare,
    "explain-bubble": _explain_bubble,
    "export": _export,
    "import": _import,
    "pipeline": _pipeline,
    "run": _run,
    "explain": _explain,
}


#: The ops that have a duration among the options, and what they are called in a help text.
_OPS = {
    "forward": "F",
    "backward": "a whole B",
    "input": "B where W is apart",
    "weight": "W",
    "recompute": "R",
    "update": "U",
    "overlap": "ops that overlap, together",
}


def _command(parsers: Any, name: str, run: str, help: str, example: str) -> argparse.ArgumentParser:
    """A command that takes a program or a plan, and parameters for a program; or a table."""
    command: argparse.ArgumentParser = parsers.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog=f"example: schedc {name} {_TABLE if name == 'import' else _EXAMPLE} {example}",
    )
    what = {
        "compile": "a program",
        "import": "a table",
        "view": "a program, a plan, or the trace of a run",
    }
    if name == "compare":
        command.add_argument(
            "files",
            metavar="FILE",
            nargs="+",
            help="programs and plans; or one, and the trace of a run",
        )
    else:
        command.add_argument("file", metavar="FILE", help=what.get(name, "a program or a plan"))
    # A table has no parameters.
    if name != "import":
        command.add_argument(
            "-p",
            dest="params",
            action="append",
            default=[],
            type=param,
            metavar="NAME=VALUE",
            help="set a parameter of the program",
        )
    command.set_defaults(run=run)
    return command


def param(text: str) -> tuple[str, int]:
    """The parameter and its value in `-p NAME=VALUE`, for argparse."""
    name, _, value = text.partition("=")
    try:
        return name.strip(), int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"`{text}` is not NAME=VALUE with a whole number"
        ) from None


def rate(text: str) -> float:
    """A number above 0, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"`{text}` is not a number above 0")
    return value


def count(text: str) -> int:
    """A whole number from 1, for argparse."""
    # Neither a sign nor a point is decimal.
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from 1")
    return int(text)


def _setting(text: str) -> str:
    # The value is YAML, and read with the file that it overrides.
    if "=" not in text:
        raise argparse.ArgumentTypeError(f"`{text}` is not KEY=VALUE")
    return text


def _transport(text: str) -> str:
    from schedlang.schedule.transports import transports

    try:
        transports(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _transports(text: str) -> str:
    # Only `check` takes all: a plan is proved for one.
    return text if text == "all" else _transport(text)


def _range(text: str) -> tuple[str, range]:
    name, _, values = text.partition("=")
    start, _, stop = values.partition("..")
    try:
        sizes = range(int(start), int(stop) + 1)
    except ValueError:
        sizes = range(0)
    if not name or not sizes:
        raise argparse.ArgumentTypeError(f"`{text}` is not NAME=A..B with whole numbers")
    from schedlang.cli.commands import MOST_SIZES

    # `len` would fail for the longest ranges.
    if sizes[-1] - sizes[0] >= MOST_SIZES:
        raise argparse.ArgumentTypeError(f"`{text}` is more than {MOST_SIZES:,} sizes")
    return name, sizes
