"""The commands of `schedc`, a row for each: what it does, its function, an example and its options.

Nothing is imported here that takes time: this is all that `schedc --help` loads. The commands of
`schedlang.extras` have their rows there, and are left out where their extra is.
"""

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from schedlang.cli.extra import extra
from schedlang.cli.options import (
    COMMON,
    COMPUTE,
    COSTS,
    EXECUTION,
    FORCE,
    IDEAL,
    PARAMS,
    TRAINING,
    TRANSPORT_OR_ALL,
    Command,
    Either,
    add_options,
    file,
    given,
    output,
    transport_for,
)
from schedlang.cli.parser import Parser
from schedlang.cli.usage import UsageError, near
from schedlang.cli.values import dialect, natural, number, program

_EXIT_CODES = """\
exit codes: 0 all is well; 1 the program or plan is wrong, or what was asked does not hold; 2 wrong
usage, or a file that cannot be read or written"""

#: In the order of `schedc --help`: first what most people need first. Of an extra's command, the
#: module in `schedlang.extras` that has its row.
COMMANDS: dict[str, Command | str] = {
    "compile": Command(
        "prove a program and write its plan",
        "cli.commands.compile_program",
        "programs/1f1b.sched -p ranks=8 -o plan.json",
        {
            **file("a program"),
            **PARAMS,
            **output("PLAN", "the plan file to write"),
            "--forward-only": "keep only the forwards: the inference plan",
            **transport_for(
                "what the plan is proved for, and its communication chosen", "portable"
            ),
            **COSTS,
            "--prove": "prove the program for any number of microbatches as well, and its claims "
            "`for all`",
            "-v --verbose": "say how its communication was chosen, and what it costs",
        },
    ),
    "check": Command(
        "prove a program for transports or sizes",
        "cli.commands.check",
        "programs/1f1b.sched --for ranks=2..8",
        {
            **file(),
            **PARAMS,
            **TRANSPORT_OR_ALL,
            "--for NAME=A..B": given(
                "every value of a parameter from A to B: which sizes hold, which fail, and why",
                dest="ranges",
            ),
            **COSTS,
        },
    ),
    "prove": "prove.prove_command",
    "show": Command(
        "print what each rank does",
        "cli.show.show",
        "programs/1f1b.sched --compute",
        {
            **file(),
            **PARAMS,
            "--ranks": "only the actions, one line per rank",
            # Each is another way to print the actions, so only one can be asked for.
            "actions": Either(
                {
                    **COMPUTE,
                    "--frees": "with the activations and messages that each action lets go",
                    "--shards N": "when sharded weights are gathered, of at most N stages of a "
                    "rank at once, and gradients reduced",
                }
            ),
            **COSTS,
        },
    ),
    "simulate": Command(
        "predict time, bubble and memory",
        "cli.commands.simulate",
        "programs/1f1b.sched --p2p-time 0.1",
        {
            **file(),
            **PARAMS,
            **EXECUTION,
            **IDEAL,
            "--jitter SHARE": given(
                "simulate many runs, in which each op and transfer takes longer or shorter: 0.1 is "
                "a standard deviation of 10%% of its duration, see docs/costs.md",
                number,
            ),
            "--slow WHAT:FACTOR": "a rank whose ops, or a link whose transfers take so many times "
            "as long in all runs: rank=3:1.3, link=0-1:2; also several times",
            "--runs N": "how many runs, with --jitter (default: 200)",
            "--seed N": given(
                "what --jitter draws from: the same number, the same runs (default: 0)",
                natural,
            ),
        },
    ),
    "view": Command(
        "draw when each op runs",
        "cli.view.view",
        "programs/1f1b.sched -o 1f1b.html",
        {
            **file("a program, a plan, or the trace of a run"),
            "others FILE*": given(
                "others, beside it on a page; beside a run, a program has the costs that the run "
                "shows",
                program,
            ),
            **PARAMS,
            **EXECUTION,
            **IDEAL,
            "--time-unit UNIT": given(
                "what the costs count: us, ms or s; times are then written so (a run's are known)",
                ("us", "ms", "s"),
            ),
            "--window A..B": "in an SVG or PNG, only the time from A to B, in the unit of the "
            "costs",
            "--ranks RANKS": "in an SVG or PNG, only these ranks: 0..3,7",
            "--width N": "an SVG or PNG so many pixels wide",
            "--memory": "in an SVG or PNG, what ranks hold, below their rows",
            "--causes": "in an SVG or PNG, idle time coloured by its cause",
            "--serve": "show the page at an address of this machine only, drawn again each time "
            "the program is saved, with its parameters as sliders",
            **output(
                "VIEW",
                "the file to write, instead of the terminal: NAME.svg or .png for papers, .html to "
                "zoom and hover, .json a trace for Perfetto and Chrome",
            ),
        },
    ),
    "compare": Command(
        "compare schedules in one table",
        "cli.figures.compare",
        "programs/1f1b.sched programs/zb_h1.sched --sort makespan",
        {
            "files FILE+": given(
                "programs and plans; or one, and the trace of a run", program
            ),
            **PARAMS,
            **COSTS,
            **transport_for(
                "what they communicate by; without, as each plan says, or gloo"
            ),
            "--sort ORDER": given(
                "the order of the rows: as given, or by makespan",
                ("given", "makespan"),
                default="given",
            ),
            "--write-costs FILE": "of a program or plan and the trace of a run: write what its ops "
            "took, for --costs",
            **FORCE,
        },
    ),
    "diff": "difference.diff_command",
    "tune": "search.tune_command",
    "explain-bubble": Command(
        "say what every idle time is due to, and what would make it less",
        "cli.figures.explain_bubble",
        "programs/1f1b.sched --p2p-time 0.1",
        {**file(), **PARAMS, **EXECUTION},
    ),
    "optimize": "search.optimize_command",
    "export": Command(
        "write a plan as an action table of torch",
        "cli.commands.export",
        "programs/1f1b.sched --to torch-csv",
        {
            **file(),
            **PARAMS,
            "--to TABLE": given(
                "torch-csv, with communication; or torch-csv-compute, compute ops only, the form "
                "that torchtitan loads",
                ("torch-csv", "torch-csv-compute"),
                required=True,
            ),
            "--torch VERSION": given(
                "the version of torch that is to read a table with communication; without, the one "
                "that is installed. From 2.15 on there is a wait for each send. The other form has "
                "none",
                dialect,
            ),
            **COSTS,
            **output("TABLE", "the file to write, instead of stdout"),
        },
    ),
    "import": Command(
        "prove an action table of torch and write its plan",
        "cli.commands.import_table",
        "table.csv -o plan.json",
        {
            "file FILE": "a table; - is standard input",
            **output("PLAN", "the plan file to write"),
            **transport_for("what the plan is proved for", "portable"),
        },
    ),
    "pipeline": "pipeline_tool.pipeline_command",
    "run": Command(
        "train a small GPT with a schedule on this machine",
        "cli.run.run",
        "programs/1f1b.sched --steps 5 --check",
        {**file(), **TRAINING, **FORCE},
    ),
    "fmt": Command(
        "write programs in the one style",
        "cli.fmt.fmt",
        "programs --check",
        {
            "files FILE+": "programs, files to import, or folders of them, which are written anew; "
            "- is standard input, and goes to standard output",
            "--check": "write nothing: name the files that are not in style",
            "--diff": "write nothing: print what would change in each file",
        },
    ),
    "lsp": "editor.lsp_command",
    "gallery": Command(
        "list the published schedules that come along, or print their programs",
        "cli.reference.gallery",
        "1f1b",
        {"programs NAME*": "print these programs; without, all are listed"},
    ),
    "explain": Command(
        "say what error codes mean, and how such programs are put right",
        "cli.reference.explain",
        "deadlock",
        {"codes CODE*": "what stands in `error[…]`; without, all are listed"},
    ),
    "completion": Command(
        "print a script with which a shell completes commands and options",
        "cli.reference.completion",
        "bash",
        {"shell SHELL": given("bash, zsh or fish", ("bash", "zsh", "fish"))},
    ),
}
_ALL = (*COMMANDS, "help")
COMMANDS["help"] = Command(
    "say what a command does, and list its options",
    "cli.reference.help",
    "compile",
    {"about COMMAND?": given("a command; without, all are listed", _ALL)},
)


def command_of(name: str) -> Command:
    """The row of a command; UsageError where its extra was left out."""
    row = COMMANDS[name]
    if isinstance(row, Command):
        return row
    found: Command = extra(row).COMMAND
    return found


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
        from importlib.metadata import version

        print(f"schedc {version('schedlang')}")
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
    command = command_of(name)
    parser = Parser(prog=f"schedc {name}", **_texts(name, command))
    _complete(parser, name, command)
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
        with suppress(UsageError):
            command = command_of(name)
            parser.commands[name] = parsers.add_parser(
                name, help=command.help, **_texts(name, command)
            )
            if with_options:
                _complete(parser.commands[name], name, command)
    return parser


def _texts(name: str, command: Command) -> dict[str, Any]:
    """What the help of a command begins and ends with."""
    help = command.help
    return {
        "description": f"{help[0].upper()}{help[1:]}.",
        "epilog": f"example: schedc {name} {command.example}".rstrip(),
    }


def _complete(parser: Parser, name: str, command: Command) -> None:
    """Add the options of a command to its parser, behind them those that all commands have."""
    add_options(parser, {**command.options, **COMMON})
    parser.set_defaults(command=name, run=command.run)
