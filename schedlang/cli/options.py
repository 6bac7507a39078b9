"""Options of commands as rows of data, and those that several commands have.

Nothing is imported here that takes time: `schedc --help` loads it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from schedlang.cli.parser import Either, Named, Option, Options, Takes
from schedlang.cli.values import (
    COLOURS,
    DEVICES,
    FORMATS,
    OPTIMIZERS,
    capacities,
    count,
    number,
    numbers,
    one_of,
    param,
    program,
    rate,
    transport,
    transport_or_all,
)

#: What `--ideal` means, for two commands.
_IDEAL = "no transfer waits for another: only latency counts"


class Command(NamedTuple):
    """A command: what it does, in words; its function, as `module.function` in `schedlang`; an
    example of its arguments; and its options.
    """

    help: str
    run: str
    example: str
    options: Options


def value(
    name: str, type: Callable[[str], Any], metavar: str, help: str, **settings: Any
) -> Option:
    """An option with a value."""
    given = {"type": type, "metavar": metavar, "help": help, **settings}
    return Option(tuple(name.split()), given)


def path(name: str, metavar: str, help: str) -> Option:
    """An option that names a file or a folder."""
    return value(name, str, metavar, help)


def flag(name: str, help: str, **settings: Any) -> Option:
    """An option without a value."""
    given = {"action": "store_true", "help": help, **settings}
    return Option(tuple(name.split()), given)


def choice(
    name: str, words: tuple[str, ...], metavar: str, help: str, **settings: Any
) -> Option:
    """An option or an argument whose value is one of some words."""
    return value(name, one_of(*words), metavar, help, choices=words, **settings)


def each_once(
    name: str, type: Callable[[str], Any], metavar: str, help: str, **settings: Any
) -> Option:
    """An option that may stand several times, each time with a name and a value."""
    return value(name, type, metavar, help, action=Named, default={}, **settings)


def values(name: str, type: Callable[[str], Any], metavar: str, help: str) -> Option:
    """An option with several numbers."""
    return value(name, type, metavar, help)._replace(takes=Takes.NUMBERS)


def paths(name: str, metavar: str, help: str) -> Option:
    """An option that names several files."""
    settings = {"action": "append", "metavar": metavar, "help": help}
    return Option((name,), settings, Takes.FILES)


def argument(
    name: str, number: str | None, metavar: str, help: str, **settings: Any
) -> Option:
    """An argument that stands by its place, a `number` of times as argparse has it."""
    return value(
        name, metavar=metavar, help=help, nargs=number, **{"type": str, **settings}
    )


def file(what: str = "a program or a plan") -> Option:
    """The file that a command reads."""
    also = "- is standard input, and a name such as 1f1b a program of the gallery"
    return value("file", program, "FILE", f"{what}; {also}")


def files(number: str, help: str) -> Option:
    """The programs that a command reads."""
    return argument("files", number, "FILE", help, type=program)


def transport_option(help: str, default: str | None = None) -> Option:
    """The transport for which something is proved or simulated."""
    return value("--transport", transport, "NAME", help, default=default)


def output(metavar: str, help: str) -> Options:
    """The file that a command writes."""
    return [path("-o --output", metavar, help), FORCE]


PARAMS = each_once(
    "-p", param, "NAME=VALUE", "set a parameter of the program", dest="params"
)
TRANSPORT_OR_ALL = value(
    "--transport",
    transport_or_all,
    "NAME",
    "a transport, or `all` for a table",
    default="portable",
)
FORCE = flag("--force", "also replace a program, or a file that this command reads")
IDEAL = flag("--ideal", _IDEAL)
COMPUTE = flag("--compute", "without sends and receives")

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
#: The options for costs: the most frequent ones. A file can have more.
COSTS: Options = [
    *(
        values(
            f"--{name}-times",
            numbers,
            "T",
            f"durations of {ops}, one for all stages or one per stage: 1,1.5,1",
        )
        for name, ops in _OPS.items()
    ),
    value("--p2p-time", number, "T", "duration of a transfer between ranks"),
    paths(
        "--costs",
        "FILE",
        "a JSON or YAML file with these and more, see docs/costs.md, or a run's trace; of "
        "one trace a rank all of them, or their folder",
    ),
    values(
        "--capacity-bytes",
        capacities,
        "B",
        "bytes that ranks have room for, one for all or one per rank: 72GB, or H100 for "
        "90 %% of its memory; also beside --costs",
    ),
]
#: The options of a command that executes a plan.
EXECUTION: Options = [
    *COSTS,
    transport_option("what it communicates by; without, as the plan says, or gloo"),
    value(
        "--updates", count, "N", "of a schedule without a flush, how many to look at"
    ),
]
#: The options of a training: of `schedc run`, and of the processes that it starts.
TRAINING: Options = [
    PARAMS,
    *COSTS,
    value("--steps", count, "N", "how many updates (default: 20)"),
    choice(
        "--optimizer", OPTIMIZERS, "NAME", "sgd, which is the default, adam or adamw"
    ),
    value(
        "--lr",
        rate,
        "RATE",
        "the learning rate (default: one that suits the optimizer and the schedule)",
    ),
    choice(
        "--device",
        DEVICES,
        "NAME",
        "cpu, or cuda with a GPU for each process of a machine (default: cuda, if it has as "
        "many)",
    ),
    flag("--stop-on-nan", "end where a loss is not a finite number, before the update"),
    flag("--check", "compare with the same training in one process"),
    flag("--audit", "compare every stage with itself alone, in one step"),
    value(
        "--replicas",
        count,
        "N",
        "train so many replicas of the plan, each with batches of its own (default: 1)",
        default=1,
    ),
    flag(
        "--unequal",
        "train on microbatches whose rows have other lengths than those of the others",
    ),
    path(
        "--trace",
        "FILE",
        "write what the last steps did and when: for `schedc view`, `schedc compare` and "
        "ui.perfetto.dev",
    ),
    path(
        "--checkpoint",
        "DIR",
        "resume from the newest checkpoint in a folder, and write more there; the newest two "
        "are kept, older ones are deleted",
    ),
    value(
        "--every",
        count,
        "N",
        "how many updates from one checkpoint to the next (default: 10)",
    ),
]
#: The options that all commands have, behind their own.
COMMON: Options = [
    Either(
        (
            choice(
                "--format",
                FORMATS,
                "FORMAT",
                "text for people; json for programs, results on stdout and diagnostics on stderr; "
                "github: diagnostics as annotations of a GitHub workflow",
                default="text",
            ),
            flag(
                "--json",
                "short for --format json",
                dest="format",
                action="store_const",
                const="json",
            ),
        )
    ),
    choice(
        "--color",
        COLOURS,
        "WHEN",
        "auto: on a terminal, unless NO_COLOR is set; always; never",
        default="auto",
    ),
]
