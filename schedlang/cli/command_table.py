"""The commands of `schedc`, a row for each: what it does, its function, an example and its options.

Nothing is imported here that takes time: this is all that `schedc --help` loads. The commands of
`schedlang.extras` have their rows there, and are left out where their extra is.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from schedlang.cli.command_line import Parser
from schedlang.cli.extra import extra
from schedlang.cli.option_values import (
    dialect,
    kind_of_plot,
    natural,
    number,
    program,
    width,
)
from schedlang.cli.options import (
    COMMON,
    COSTS,
    EXECUTION,
    FORCE,
    IDEAL,
    PARAMS,
    TRAINING,
    TRANSPORT_OR_ALL,
    UNIT,
    Command,
    Either,
    add_options,
    file,
    given,
    more,
    output,
    transport_for,
)
from schedlang.cli.usage import FINE, UsageError, near

#: In the order of `schedc --help`: first what most people need first. Of an extra's command, the
#: module in `schedlang.extras` that has its row.
COMMANDS: dict[str, Command | str] = {
    "compile": Command(
        "Is a program right? Proves it, and writes its plan.",
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
            **more(
                {
                    "-v --verbose": "say how its communication was chosen, and what it costs"
                }
            ),
        },
    ),
    "check": Command(
        "For which transports is it right, and for which sizes, or for any?",
        "cli.commands.check",
        "programs/1f1b.sched --for ranks=2..8",
        {
            **file("a program, a plan, or a certificate, which is checked"),
            **PARAMS,
            **TRANSPORT_OR_ALL,
            "--for NAME=A..B": given(
                "every value of a parameter from A to B: which sizes hold, which fail, and why; "
                "microbatches=any proves all numbers of them at once, with formulas of time and "
                "memory, and ranks=any those of ranks too",
                dest="ranges",
            ),
            **COSTS,
            **output(
                "CERTIFICATE",
                "with --for NAME=any: write the certificate of the proof, which a checker of its "
                "own reads",
            ),
        },
    ),
    "simulate": Command(
        "How long does a step take, how much is idle, and why?",
        "cli.commands.simulate",
        "programs/1f1b.sched --p2p-time 0.1",
        {
            **file(),
            **PARAMS,
            "--why": "the cause of each idle time, the critical path, and what would help",
            **EXECUTION,
            "--jitter SHARE": given(
                "simulate many runs, in which each op and transfer takes longer or shorter: 0.1 is "
                "a standard deviation of 10%% of its duration, see docs/costs.md",
                number,
            ),
            "--slow WHAT:FACTOR": "a rank whose ops, or a link whose transfers take so many times "
            "as long in all runs: rank=3:1.3, link=0-1:2; also several times",
            **more(
                {
                    **IDEAL,
                    "--runs N": "how many runs, with --jitter (default: 200)",
                    "--seed N": given(
                        "what --jitter draws from: the same number, the same runs (default: 0)",
                        natural,
                    ),
                }
            ),
        },
    ),
    "view": Command(
        "What happens when? A picture; or as text, what each rank does.",
        "cli.view.view",
        "programs/1f1b.sched -o 1f1b.html",
        {
            **file("a program, a plan, or the trace of a run"),
            "others FILE*": given(
                "others, below it in a picture or beside it on a page; beside a run, a program has "
                "the costs that the run shows",
                program,
            ),
            **PARAMS,
            **output(
                "VIEW",
                "the file to write, instead of the terminal: NAME.svg, .pdf or .png for papers, "
                ".html to zoom and hover, .json a trace for Perfetto and Chrome",
            ),
            "--serve": "show the page at an address of this machine only, drawn again each time "
            "the program is saved, with its parameters as sliders",
            "--actions": "print what each rank does, as text",
            "--plot KIND": given(
                "a plot of the schedules: bubble or scaling, at many sizes; memory over time; "
                "frontier, of time against memory; bars of idle time; error of a prediction",
                kind_of_plot,
            ),
            **EXECUTION,
            **more(
                {
                    "--for NAME=A..B": given(
                        "with --plot, the values of a parameter", dest="ranges"
                    ),
                    "--memory": "in a picture, what ranks hold, below their rows",
                    "--causes": "in a picture, idle time coloured by its cause",
                    "--ranks RANKS": "only these ranks, 0..3,7, of --actions, or in a picture",
                    "--window A..B": "in a picture, only the time from A to B, in the unit of the "
                    "costs",
                    "--width WIDTH": given(
                        "a picture so many pixels wide; or as wide as a `column` or a `page` of a "
                        "paper",
                        width,
                    ),
                    "--no-legend": "a picture without its legend",
                    "--font NAME": "the letters of a picture, such as Times",
                    **UNIT,
                    "--time-unit UNIT": given(
                        "what the costs count: us, ms or s; times are then written so (a run's are "
                        "known)",
                        ("us", "ms", "s"),
                    ),
                    **IDEAL,
                    "--bare": "of the actions, one line per rank and nothing else",
                    # Each is another way to print the actions, so only one can be asked for.
                    "form of actions": Either(
                        {
                            "--compute": "the actions without sends and receives",
                            "--frees": "the actions, with the activations and messages that each "
                            "lets go",
                            "--shards N": "the actions, with when sharded weights are gathered, of "
                            "at most N stages of a rank at once, and gradients reduced",
                        }
                    ),
                }
            ),
        },
    ),
    "compare": Command(
        "Which schedule is better, and what do two of them do otherwise?",
        "cli.comparisons.compare",
        "programs/1f1b.sched programs/zb_h1.sched --sort makespan",
        {
            "files FILE+": given(
                "programs and plans; or one, and the trace of a run", program
            ),
            **PARAMS,
            "--diff": "of two schedules, what the second does otherwise, rank by rank; exit code 1 "
            "if it is anything",
            **EXECUTION,
            "--sort ORDER": given(
                "the order of the rows: as given, or by makespan",
                ("given", "makespan"),
                default="given",
            ),
            **more(
                {
                    "-a NAME=VALUE": given(
                        "set a parameter of the first one alone, with --diff",
                        dest="params_a",
                    ),
                    "-b NAME=VALUE": given(
                        "set a parameter of the second one alone, with --diff",
                        dest="params_b",
                    ),
                    "--compute": "without sends and receives, with --diff",
                    **UNIT,
                    "--write-costs COSTS": "of a program or plan and the trace of a run: write "
                    "what its ops took, for --costs",
                }
            ),
            **FORCE,
        },
    ),
    "optimize": "search.optimize_command",
    "tune": "search.tune_command",
    "run": Command(
        "Does it train? A small GPT, on processes of this machine.",
        "cli.run.run",
        "programs/1f1b.sched --steps 5 --check",
        {**file(), **TRAINING, **FORCE},
    ),
    "export": Command(
        "What is it as a table of actions, for torch's own pipelining?",
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
        "Is such a table right? Proves it, and writes its plan.",
        "cli.commands.import_table",
        "table.csv -o plan.json",
        {
            "file FILE": "a table; - is standard input",
            **output("PLAN", "the plan file to write"),
            **transport_for("what the plan is proved for", "portable"),
        },
    ),
    "fmt": Command(
        "How is a program written? Puts it into the one style.",
        "cli.fmt.fmt",
        "programs --check",
        {
            "files FILE+": "programs, files to import, or folders of them, which are written anew; "
            "- is standard input, and goes to standard output",
            "--check": "write nothing: name the files that are not in style",
            "--diff": "write nothing: print what would change in each file",
        },
    ),
    "gallery": Command(
        "Which published schedules come along, and how are they written?",
        "cli.lookups.gallery",
        "1f1b",
        {"programs NAME*": "print these programs; without, all are listed"},
    ),
    "explain": Command(
        "What does an error mean, and how is such a program put right?",
        "cli.lookups.explain",
        "deadlock",
        {"codes CODE*": "what stands in `error[…]`; without, all are listed"},
    ),
    "lsp": "editor.lsp_command",
    "completion": Command(
        "The script with which a shell completes commands and options.",
        "cli.lookups.completion",
        "bash",
        {"shell SHELL": given("bash, zsh or fish", ("bash", "zsh", "fish"))},
    ),
    "pipeline": "pipeline_tool.pipeline_command",
}
#: Commands for other programs, which `schedc --help` only names, and those that it does not name.
TOOLS = ("lsp", "completion")
UNLISTED = ("pipeline",)


class Alias(NamedTuple):
    """The new name of a command, with options, and the new names of old options."""

    new: str
    options: Mapping[str, str] = {}


ALIASES = {
    "show": Alias("view --actions", {"--ranks": "--bare"}),
    "prove": Alias(
        "check --for microbatches=any",
        {"--any-ranks": "--for ranks=any", "--check": ""},
    ),
    "diff": Alias("compare --diff"),
    "explain-bubble": Alias("simulate --why"),
    # Elsewhere, --memory is an amount of bytes.
    "optimize": Alias("optimize", {"--memory": "--peak"}),
}


def command_of(name: str) -> Command:
    """The row of a command; UsageError where its extra was left out."""
    row = COMMANDS[name]
    if isinstance(row, Command):
        return row
    found: Command = extra(row).COMMAND
    return found


def renamed(argv: Sequence[str]) -> Sequence[str]:
    """A command line with the new names of old ones: `show FILE` is `view FILE --actions`."""
    word, *others = argv or [""]
    if word == "help":
        # As `git help commit`.
        about, *rest = others or [""]
        return [*renamed([about]), "--help", *rest] if about else ["--help"]
    if word not in ALIASES:
        return argv
    alias = ALIASES[word]
    command, *options = alias.new.split()
    for other in others:
        name, equals, value = other.partition("=")
        if name in alias.options:
            options += f"{alias.options[name]}{equals}{value}".split()
        else:
            options.append(other)
    return [command, *options]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options of a command line, with the function to `run`; UsageError for what is wrong.

    `--help` and `--version` print what they are for, and end the process.
    """
    word, *others = renamed(argv) or [""]
    if argv and argv[0] == "help" and list(argv[2:]) not in ([], ["all"]):
        raise UsageError(f"`{argv[2]}` is one argument too many")
    if word in COMMANDS:
        # The options of one command are quicker to build than those of all.
        options: argparse.Namespace = parser_of(word).parse_args(others)
        # Claims that do not hold of what is drawn or measured all the same.
        options.wrong = []
        return options
    if not word:
        raise UsageError("COMMAND is missing")
    if word in ("-h", "--help"):
        print(help_text())
        raise SystemExit(FINE)
    if word in ("-V", "--version"):
        # Reading it takes as long as all else that `--help` does.
        from importlib.metadata import version

        print(f"schedc {version('schedlang')}")
        raise SystemExit(FINE)
    if word.startswith("-"):
        raise UsageError(
            f"`{word}` stands in front of a command: options stand behind it"
        )
    if os.path.exists(word):
        raise UsageError(
            f"`{word}` is no command: a file stands behind one, as schedc compile {word}"
        )
    raise UsageError(f"there is no command `{word}`{near(word, [*COMMANDS, *ALIASES])}")


def listed() -> dict[str, Command]:
    """The commands of `schedc --help`, without those whose extra was left out."""
    found = {}
    for name in COMMANDS:
        if name not in UNLISTED:
            with suppress(UsageError):
                found[name] = command_of(name)
    return found


def help_text() -> str:
    """What `schedc --help` prints, on one screen of 80 columns and 24 lines."""
    commands = listed()
    rows = [
        f"  {name:10}{command.help}"
        for name, command in commands.items()
        if name not in TOOLS
    ]
    return "\n".join([_HEAD, *rows, _FOOT])


_HEAD = """\
usage: schedc COMMAND ...     what it takes: schedc COMMAND --help

Schedules of pipeline-parallel training, proved before they run.
"""
_FOOT = """
For tools: lsp, which editors start; completion, for shells. -V: the version.
Exit codes: 0 all is well; 1 the program or plan is wrong, or what was asked
does not hold; 2 wrong usage, or a file that cannot be read or written."""


def parser_of(name: str) -> Parser:
    """The parser of one command."""
    command = command_of(name)
    parser = Parser(prog=f"schedc {name}", **_texts(name, command))
    _complete(parser, name, command)
    return parser


def parser_of_all() -> Parser:
    """The parser of all listed commands, for completion."""
    parser = Parser(prog="schedc")
    parser.add_argument(
        "-V", "--version", action="store_true", help="print the version"
    )
    parsers = parser.add_subparsers(metavar="COMMAND")
    for name, command in listed().items():
        texts = _texts(name, command)
        parser.commands[name] = parsers.add_parser(name, help=command.help, **texts)
        _complete(parser.commands[name], name, command)
    return parser


def _texts(name: str, command: Command) -> dict[str, Any]:
    """What the help of a command begins and ends with."""
    example = f"example: schedc {name} {command.example}".rstrip()
    return {"description": command.help, "epilog": example}


def _complete(parser: Parser, name: str, command: Command) -> None:
    """Add the options of a command to its parser, behind them those that all commands have."""
    add_options(parser, {**command.options, **COMMON})
    parser.set_defaults(command=name, run=command.run)
