"""The commands of `schedc`: their options, and the function that does each.

Nothing is imported here that takes time: this is all that `schedc --help` loads.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from schedlang.cli.parser import Named, Parser
from schedlang.cli.usage import near
from schedlang.cli.values import (
    DEVICES,
    OPTIMIZERS,
    amount,
    capacities,
    count,
    counts,
    device,
    dialect,
    natural,
    number,
    numbers,
    one_of,
    param,
    program,
    ranks,
    rate,
    seconds,
    setting,
    share,
    sizes,
    slow,
    transport,
    transport_or_all,
    window,
)

#: What is written to a file or to standard output, and in which form diagnostics are.
FORMATS = ("text", "json", "github")
COLOURS = ("auto", "always", "never")
#: What a unit of time may be.
TIME_UNITS = ("us", "ms", "s")
SHELLS = ("bash", "zsh", "fish")

#: What `--ideal` means, for two commands.
_IDEAL = "no transfer waits for another: only latency counts"

_EXIT_CODES = """\
exit codes: 0 all is well; 1 the program or plan is wrong, or what was asked does not hold; 2 wrong
usage, or a file that cannot be read or written"""


class Command(NamedTuple):
    """A command: what it does, in words; its function, as `module.function` in this package; what
    adds its options; and an example of its arguments.
    """

    help: str
    run: str
    add: Callable[[Parser], None]
    example: str


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, with the function to `run`; UsageError for what is wrong.

    `--help` and `--version` print what they are for, and end the process.
    """
    word = argv[0] if argv else ""
    if word in COMMANDS:
        # The options of one command are quicker to build than those of all.
        options: argparse.Namespace = parser_of(word).parse_args(argv[1:])
        return options
    parser = parser_of_all(with_options=False)
    if not argv:
        parser.error("COMMAND is missing")
    if word in ("-h", "--help"):
        parser.print_help()
        parser.exit()
    if word in ("-V", "--version"):
        # Reading it takes as long as all else that `--help` does.
        from schedlang import __version__

        print(f"schedc {__version__}")
        parser.exit()
    if word.startswith("-"):
        parser.error(f"`{word}` stands in front of a command: options stand behind it")
    if os.path.exists(word):
        parser.error(
            f"`{word}` is no command: a file stands behind one, as schedc compile {word}"
        )
    parser.error(f"there is no command `{word}`{near(word, COMMANDS)}")


def parser_of(name: str) -> Parser:
    """The parser of one command."""
    parser = Parser(prog=f"schedc {name}", **_texts(name))
    _complete(parser, name)
    return parser


def parser_of_all(with_options: bool = True) -> Parser:
    """The parser of all commands: for `schedc --help`, and with their options for completion."""
    parser = Parser(
        prog="schedc",
        description="Compile pipeline-parallel training schedules.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument(
        "-V", "--version", action="store_true", help="print the version and exit"
    )
    parsers = parser.add_subparsers(metavar="COMMAND")
    for name in COMMANDS:
        parser.commands[name] = parsers.add_parser(
            name, help=COMMANDS[name].help, **_texts(name)
        )
        if with_options:
            _complete(parser.commands[name], name)
    return parser


def _texts(name: str) -> dict[str, Any]:
    """What the help of a command begins and ends with."""
    help = COMMANDS[name].help
    return {
        "description": f"{help[0].upper()}{help[1:]}.",
        "epilog": f"example: schedc {name} {COMMANDS[name].example}".rstrip(),
    }


def _complete(parser: Parser, name: str) -> None:
    """Add the options of a command to its parser, behind them those that all commands have."""
    command = COMMANDS[name]
    command.add(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--format",
        type=one_of(*FORMATS),
        choices=FORMATS,
        default="text",
        metavar="FORMAT",
        help="text for people; json for programs, results on stdout and diagnostics on stderr; "
        "github: diagnostics as annotations of a GitHub workflow",
    )
    form.add_argument(
        "--json",
        dest="format",
        action="store_const",
        const="json",
        help="short for --format json",
    )
    parser.add_argument(
        "--color",
        type=one_of(*COLOURS),
        choices=COLOURS,
        default="auto",
        metavar="WHEN",
        help="auto: on a terminal, unless NO_COLOR is set; always; never",
    )
    parser.set_defaults(command=name, run=command.run)


def _compile(parser: Parser) -> None:
    _file(parser, "a program")
    _params(parser)
    _output(parser, "PLAN", "the plan file to write")
    parser.add_argument(
        "--forward-only",
        action="store_true",
        help="keep only the forwards: the inference plan",
    )
    _transport(
        parser, "what the plan is proved for, and its communication chosen", "portable"
    )
    _costs(parser)
    parser.add_argument(
        "--prove",
        action="store_true",
        help="prove the program for any number of microbatches as well, and its claims `for all`",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="say how its communication was chosen, and what it costs",
    )


def _check(parser: Parser) -> None:
    _file(parser)
    _params(parser)
    parser.add_argument(
        "--transport",
        type=transport_or_all,
        default="portable",
        metavar="NAME",
        help="a transport, or `all` for a table",
    )
    parser.add_argument(
        "--for",
        dest="ranges",
        action=Named,
        default={},
        type=sizes,
        metavar="NAME=A..B",
        help="every value of a parameter from A to B: which sizes hold, which fail, and why",
    )
    _costs(parser)


def _prove(parser: Parser) -> None:
    _file(parser)
    _params(parser)
    parser.add_argument(
        "--transport",
        type=transport_or_all,
        default="portable",
        metavar="NAME",
        help="a transport, or `all` for a table",
    )
    parser.add_argument(
        "--any-ranks",
        action="store_true",
        help="for any number of ranks, too, and of slices, where they are not given with -p; it "
        "needs the extra `prove`",
    )
    _output(parser, "FILE", "write the certificate, which a checker of its own reads")
    parser.add_argument(
        "--check",
        action="store_true",
        help="FILE is a certificate: check it, and that it is one of its program for all sizes; "
        "say what it proves",
    )


def _show(parser: Parser) -> None:
    _file(parser)
    _params(parser)
    parser.add_argument(
        "--ranks", action="store_true", help="only the actions, one line per rank"
    )
    # Each is another way to print the actions, so only one can be asked for.
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--compute", action="store_true", help="without sends and receives"
    )
    what.add_argument(
        "--frees",
        action="store_true",
        help="with the activations and messages that each action lets go",
    )
    what.add_argument(
        "--shards",
        type=count,
        metavar="N",
        help="when sharded weights are gathered, of at most N stages of a rank at once, and "
        "gradients reduced",
    )
    _costs(parser)


def _simulate(parser: Parser) -> None:
    _file(parser)
    _params(parser)
    _execution(parser)
    parser.add_argument("--ideal", action="store_true", help=_IDEAL)
    parser.add_argument(
        "--jitter",
        type=number,
        metavar="SHARE",
        help="simulate many runs, in which each op and transfer takes longer or shorter: 0.1 is a "
        "standard deviation of 10%% of its duration, see docs/costs.md",
    )
    parser.add_argument(
        "--slow",
        action=Named,
        default={},
        type=slow,
        metavar="WHAT:FACTOR",
        help="a rank whose ops, or a link whose transfers take so many times as long in all runs: "
        "rank=3:1.3, link=0-1:2; also several times",
    )
    parser.add_argument(
        "--runs",
        type=count,
        metavar="N",
        help="how many runs, with --jitter (default: 200)",
    )
    parser.add_argument(
        "--seed",
        type=natural,
        metavar="N",
        help="what --jitter draws from: the same number, the same runs (default: 0)",
    )


def _view(parser: Parser) -> None:
    _file(parser, "a program, a plan, or the trace of a run")
    parser.add_argument(
        "others",
        type=program,
        metavar="FILE",
        nargs="*",
        help="others, beside it on a page; beside a run, a program has the costs that the run "
        "shows",
    )
    _params(parser)
    _execution(parser)
    parser.add_argument("--ideal", action="store_true", help=_IDEAL)
    parser.add_argument(
        "--time-unit",
        type=one_of(*TIME_UNITS),
        choices=TIME_UNITS,
        metavar="UNIT",
        help="what the costs count: us, ms or s; times are then written so (a run's are known)",
    )
    parser.add_argument(
        "--window",
        type=window,
        metavar="A..B",
        help="in an SVG or PNG, only the time from A to B, in the unit of the costs",
    )
    parser.add_argument(
        "--ranks",
        type=ranks,
        metavar="RANKS",
        help="in an SVG or PNG, only these ranks: 0..3,7",
    )
    parser.add_argument(
        "--width", type=count, metavar="N", help="an SVG or PNG so many pixels wide"
    )
    parser.add_argument(
        "--memory",
        action="store_true",
        help="in an SVG or PNG, what ranks hold, below their rows",
    )
    parser.add_argument(
        "--causes",
        action="store_true",
        help="in an SVG or PNG, idle time coloured by its cause",
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="show the page at an address of this machine only, drawn again each time the program "
        "is saved, with its parameters as sliders",
    )
    _output(
        parser,
        "VIEW",
        "the file to write, instead of the terminal: NAME.svg or .png for papers, .html to zoom "
        "and hover, .json a trace for Perfetto and Chrome",
    )


def _compare(parser: Parser) -> None:
    parser.add_argument(
        "files",
        type=program,
        metavar="FILE",
        nargs="+",
        help="programs and plans; or one, and the trace of a run",
    )
    _params(parser)
    _costs(parser)
    _transport(parser, "what they communicate by; without, as each plan says, or gloo")
    orders = ("given", "makespan")
    parser.add_argument(
        "--sort",
        type=one_of(*orders),
        choices=orders,
        default="given",
        metavar="ORDER",
        help="the order of the rows: as given, or by makespan",
    )
    parser.add_argument(
        "--write-costs",
        metavar="FILE",
        help="of a program or plan and the trace of a run: write what its ops took, for --costs",
    )
    _force(parser)


def _diff(parser: Parser) -> None:
    what = "a program, a plan, or an action table of torch"
    parser.add_argument("file", type=program, metavar="A", help=what)
    parser.add_argument("other", type=program, metavar="B", help="another one")
    _params(parser)
    for side in ("a", "b"):
        parser.add_argument(
            f"-{side}",
            dest=f"params_{side}",
            action=Named,
            default={},
            type=param,
            metavar="NAME=VALUE",
            help=f"set a parameter of {side.upper()} alone",
        )
    parser.add_argument(
        "--compute", action="store_true", help="without sends and receives"
    )
    _execution(parser)


def _explain_bubble(parser: Parser) -> None:
    _file(parser)
    _params(parser)
    _execution(parser)


def _optimize(parser: Parser) -> None:
    _file(parser)
    _params(parser)
    parser.add_list(
        "--memory",
        type=numbers,
        metavar="N",
        help="what a rank may hold at most, as `peak(r)` counts it, one number for all or one per "
        "rank (default: the highest peak of the program)",
    )
    parser.add_argument(
        "--place",
        action="store_true",
        help="look for better ranks of the stages first: one, several or not as many on each",
    )
    parser.add_argument(
        "--block",
        action="store_true",
        help="look for a block that repeats instead: its program is for any number of microbatches",
    )
    parser.add_argument(
        "--for",
        dest="seconds",
        type=seconds,
        default=60.0,
        metavar="TIME",
        help="how long to look for a better order, or a better bound: 30s, 5m (default: 60s)",
    )
    parser.add_argument(
        "--workers",
        type=count,
        default=2,
        metavar="N",
        help="how many threads the solver has (default: 2)",
    )
    parser.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="what the search draws from",
    )
    _costs(parser)
    _transport(parser, "what the order is judged on, once it is found", "portable")
    _output(parser, "PROGRAM", "the program to write, NAME.sched")


def _execution(parser: Parser) -> None:
    """The options of a command that executes a plan."""
    _costs(parser)
    _transport(parser, "what it communicates by; without, as the plan says, or gloo")
    parser.add_argument(
        "--updates",
        type=count,
        metavar="N",
        help="of a schedule without a flush, how many to look at",
    )


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


def _costs(parser: Parser) -> None:
    """The options for costs."""
    # The most frequent ones; a file can have more.
    for name, ops in _OPS.items():
        parser.add_list(
            f"--{name}-times",
            type=numbers,
            metavar="T",
            help=f"durations of {ops}, one for all stages or one per stage: 1,1.5,1",
        )
    parser.add_argument(
        "--p2p-time",
        type=number,
        metavar="T",
        help="duration of a transfer between ranks",
    )
    parser.add_files(
        "--costs",
        metavar="FILE",
        help="a JSON or YAML file with these and more, see docs/costs.md, or a run's trace; of "
        "one trace a rank all of them, or their folder",
    )
    parser.add_list(
        "--capacity-bytes",
        type=capacities,
        metavar="B",
        help="bytes that ranks have room for, one for all or one per rank: 72GB, or H100 for "
        "90 %% of its memory; also beside --costs",
    )


def _tune(parser: Parser) -> None:
    parser.add_argument(
        "files",
        type=program,
        metavar="FILE",
        nargs="*",
        help="programs to try; without, all of the gallery",
    )
    parser.add_argument(
        "--ranks",
        type=count,
        required=True,
        metavar="N",
        help="how many ranks there are",
    )
    parser.add_argument(
        "--batch",
        type=count,
        required=True,
        metavar="N",
        help="how many samples a step has",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model",
        metavar="CONFIG",
        help="a transformer, by its config.json of Hugging Face: its costs are estimated",
    )
    parser.add_files(
        "--costs",
        group=what,
        metavar="FILE",
        help="measured costs of stages or layers, see docs/costs.md; of one trace a rank, "
        "one --costs for each, or their folder",
    )
    parser.add_argument(
        "--device",
        type=device,
        metavar="NAME",
        help="with --model: what it runs on, such as H100",
    )
    parser.add_argument(
        "--sequence",
        type=count,
        metavar="N",
        help="with --model: how many tokens a sample has",
    )
    parser.add_argument(
        "--efficiency",
        type=share,
        metavar="SHARE",
        help="with --model: the share of the device's operations that is reached (default: 0.5)",
    )
    parser.add_argument(
        "--layers",
        type=counts,
        metavar="N",
        help="with --costs: how many layers its stages have, one number or 8,8,7: other stages are "
        "tried too",
    )
    parser.add_argument(
        "--microbatch",
        type=count,
        metavar="N",
        help="samples of a microbatch: those of --costs (default: 1); with --model, no other sizes",
    )
    parser.add_argument(
        "--memory",
        type=amount,
        metavar="BYTES",
        help="what a rank may hold, such as 72GB (default: with --model 90 %% of the device's)",
    )
    parser.add_argument(
        "--robust",
        type=share,
        metavar="PART",
        help="go by the makespan that 95 of 100 runs stay below, where durations vary by this "
        "part of them, such as 0.1",
    )
    _params(parser)
    _transport(parser, "what the plans are proved for", "portable")
    parser.add_argument(
        "--for",
        dest="seconds",
        type=seconds,
        metavar="TIME",
        help="end after this time, such as 60s, with what is known by then",
    )
    parser.add_argument(
        "--write-costs",
        metavar="FILE",
        help="write what the stages of the best one cost, for --costs of the other commands",
    )
    _output(
        parser, "VIEW", "a picture of time against memory to write: NAME.svg or .html"
    )


def _export(parser: Parser) -> None:
    _file(parser)
    _params(parser)
    tables = ("torch-csv", "torch-csv-compute")
    parser.add_argument(
        "--to",
        required=True,
        type=one_of(*tables),
        choices=tables,
        metavar="TABLE",
        help="torch-csv, with communication; or torch-csv-compute, compute ops only, the form that "
        "torchtitan loads",
    )
    parser.add_argument(
        "--torch",
        type=dialect,
        metavar="VERSION",
        help="the version of torch that is to read a table with communication; without, the one "
        "that is installed. From 2.15 on there is a wait for each send. The other form has none",
    )
    _costs(parser)
    _output(parser, "TABLE", "the file to write, instead of stdout")


def _import(parser: Parser) -> None:
    parser.add_argument("file", metavar="FILE", help="a table; - is standard input")
    _output(parser, "PLAN", "the plan file to write")
    _transport(parser, "what the plan is proved for", "portable")


def _pipeline(parser: Parser) -> None:
    parser.add_argument(
        "settings",
        metavar="KEY=VALUE",
        nargs="*",
        type=setting,
        help="a setting, by its key in files",
    )
    parser.add_argument(
        "-c", "--config", metavar="FILE", help="a JSON or YAML file with settings"
    )
    parser.add_argument(
        "-s",
        "--num-stages",
        type=count,
        metavar="N",
        help="stages of the pipeline, by default 4",
    )
    parser.add_argument(
        "-b",
        "--num-batches",
        type=count,
        metavar="N",
        help="microbatches, by default 10",
    )
    for short, name in (("-f", "forward"), ("-bw", "backward")):
        parser.add_list(
            short,
            f"--{name}-times",
            type=numbers,
            metavar="T",
            help=f"{name} times by stage: 1,1.5,1",
        )
    parser.add_argument(
        "--p2p-time", type=number, metavar="T", help="time of a transfer, by default 0"
    )
    _output(parser, "FILE", "the picture to write")
    parser.add_argument(
        "--no-visualization",
        action="store_true",
        help="no picture, only the bubble rate",
    )
    parser.add_argument(
        "--table", action="store_true", help="the timeline as a table, time by stage"
    )
    compat = parser.add_mutually_exclusive_group()
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


def _run(parser: Parser) -> None:
    _file(parser)
    add_training(parser)
    _force(parser)


def add_training(parser: Parser) -> None:
    """Add the options of a training: for `schedc run`, and for the processes that it starts."""
    _params(parser)
    _costs(parser)
    parser.add_argument(
        "--steps", type=count, metavar="N", help="how many updates (default: 20)"
    )
    parser.add_argument(
        "--optimizer",
        type=one_of(*OPTIMIZERS),
        choices=OPTIMIZERS,
        metavar="NAME",
        help="sgd, which is the default, adam or adamw",
    )
    parser.add_argument(
        "--lr",
        type=rate,
        metavar="RATE",
        help="the learning rate (default: one that suits the optimizer and the schedule)",
    )
    parser.add_argument(
        "--device",
        type=one_of(*DEVICES),
        choices=DEVICES,
        metavar="NAME",
        help="cpu, or cuda with a GPU for each process of a machine (default: cuda, if it has as "
        "many)",
    )
    parser.add_argument(
        "--stop-on-nan",
        action="store_true",
        help="end where a loss is not a finite number, before the update",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare with the same training in one process",
    )
    parser.add_argument(
        "--audit",
        action="store_true",
        help="compare every stage with itself alone, in one step",
    )
    parser.add_argument(
        "--replicas",
        type=count,
        default=1,
        metavar="N",
        help="train so many replicas of the plan, each with batches of its own (default: 1)",
    )
    parser.add_argument(
        "--unequal",
        action="store_true",
        help="train on microbatches whose rows have other lengths than those of the others",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write what the last steps did and when: for `schedc view`, `schedc compare` and "
        "ui.perfetto.dev",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="resume from the newest checkpoint in a folder, and write more there; the newest two "
        "are kept, older ones are deleted",
    )
    parser.add_argument(
        "--every",
        type=count,
        metavar="N",
        help="how many updates from one checkpoint to the next (default: 10)",
    )


def _explain(parser: Parser) -> None:
    parser.add_argument(
        "codes",
        metavar="CODE",
        nargs="*",
        help="what stands in `error[…]`; without, all are listed",
    )


def _fmt(parser: Parser) -> None:
    parser.add_argument(
        "files",
        metavar="FILE",
        nargs="+",
        help="programs, files to import, or folders of them, which are written anew; - is standard "
        "input, and goes to standard output",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing: name the files that are not in style",
    )
    parser.add_argument(
        "--diff",
        action="store_true",
        help="write nothing: print what would change in each file",
    )


def _lsp(parser: Parser) -> None:
    """It has no options of its own: an editor sends its settings."""


def _gallery(parser: Parser) -> None:
    parser.add_argument(
        "programs",
        metavar="NAME",
        nargs="*",
        help="print these programs; without, all are listed",
    )


def _completion(parser: Parser) -> None:
    parser.add_argument(
        "shell",
        type=one_of(*SHELLS),
        choices=SHELLS,
        metavar="SHELL",
        help="bash, zsh or fish",
    )


def _help(parser: Parser) -> None:
    names = list(COMMANDS)
    parser.add_argument(
        "about",
        metavar="COMMAND",
        nargs="?",
        type=one_of(*names),
        choices=names,
        help="a command; without, all are listed",
    )


def _file(parser: Parser, what: str = "a program or a plan") -> None:
    parser.add_argument(
        "file",
        type=program,
        metavar="FILE",
        help=f"{what}; - is standard input, and a name such as 1f1b a program of the gallery",
    )


def _params(parser: Parser) -> None:
    parser.add_argument(
        "-p",
        dest="params",
        action=Named,
        default={},
        type=param,
        metavar="NAME=VALUE",
        help="set a parameter of the program",
    )


def _transport(parser: Parser, help: str, default: str | None = None) -> None:
    parser.add_argument(
        "--transport", type=transport, default=default, metavar="NAME", help=help
    )


def _output(parser: Parser, metavar: str, help: str) -> None:
    parser.add_argument("-o", "--output", metavar=metavar, help=help)
    _force(parser)


def _force(parser: Parser) -> None:
    parser.add_argument(
        "--force",
        action="store_true",
        help="also replace a program, or a file that this command reads",
    )


#: In the order of `schedc --help`: first what most people need first.
COMMANDS: dict[str, Command] = {
    "compile": Command(
        "prove a program and write its plan",
        "commands.compile_program",
        _compile,
        "programs/1f1b.sched -p ranks=8 -o plan.json",
    ),
    "check": Command(
        "prove a program for transports or sizes",
        "commands.check",
        _check,
        "programs/1f1b.sched --for ranks=2..8",
    ),
    "prove": Command(
        "prove a program for any number of microbatches",
        "prove.prove",
        _prove,
        "programs/1f1b.sched -p ranks=8",
    ),
    "show": Command(
        "print what each rank does", "show.show", _show, "programs/1f1b.sched --compute"
    ),
    "simulate": Command(
        "predict time, bubble and memory",
        "commands.simulate",
        _simulate,
        "programs/1f1b.sched --p2p-time 0.1",
    ),
    "view": Command(
        "draw when each op runs", "view.view", _view, "programs/1f1b.sched -o 1f1b.html"
    ),
    "compare": Command(
        "compare schedules in one table",
        "figures.compare",
        _compare,
        "programs/1f1b.sched programs/zb_h1.sched --sort makespan",
    ),
    "diff": Command(
        "say what differs between two schedules, rank by rank",
        "figures.diff",
        _diff,
        "programs/1f1b.sched programs/zb_h1.sched --compute",
    ),
    "tune": Command(
        "find the program and the parameters that train a model fastest within memory",
        "tune.tune",
        _tune,
        "1f1b zb_h1 --ranks 4 --batch 32 --costs costs.json --layers 4",
    ),
    "explain-bubble": Command(
        "say what every idle time is due to, and what would make it less",
        "figures.explain_bubble",
        _explain_bubble,
        "programs/1f1b.sched --p2p-time 0.1",
    ),
    "optimize": Command(
        "find the best order of a program's ops, and prove how good it is",
        "optimize.optimize",
        _optimize,
        "programs/1f1b.sched --for 10s -o best.sched",
    ),
    "export": Command(
        "write a plan as an action table of torch",
        "commands.export",
        _export,
        "programs/1f1b.sched --to torch-csv",
    ),
    "import": Command(
        "prove an action table of torch and write its plan",
        "commands.import_table",
        _import,
        "table.csv -o plan.json",
    ),
    "pipeline": Command(
        "simulate a strategy with the options of PP-Schedule-Visualization, see docs/commands.md",
        "pipeline.pipeline",
        _pipeline,
        "--num-stages 4 --num-batches 8 --p2p-time 0.1",
    ),
    "run": Command(
        "train a small GPT with a schedule on this machine",
        "run.run",
        _run,
        "programs/1f1b.sched --steps 5 --check",
    ),
    "fmt": Command(
        "write programs in the one style", "fmt.fmt", _fmt, "programs --check"
    ),
    "lsp": Command(
        "serve an editor: diagnostics, figures and names as one types, see docs/editor.md",
        "lsp.lsp",
        _lsp,
        "",
    ),
    "gallery": Command(
        "list the published schedules that come along, or print their programs",
        "reference.gallery",
        _gallery,
        "1f1b",
    ),
    "explain": Command(
        "say what error codes mean, and how such programs are put right",
        "reference.explain",
        _explain,
        "deadlock",
    ),
    "completion": Command(
        "print a script with which a shell completes commands and options",
        "reference.completion",
        _completion,
        "bash",
    ),
    "help": Command(
        "say what a command does, and list its options",
        "reference.help",
        _help,
        "compile",
    ),
}
