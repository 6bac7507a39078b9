"""Options of commands as rows: how each is written, and its help. Those of several commands.

Nothing is imported here that takes time: `schedc --help` loads it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from schedlang.cli.command_line import Named, Parser
from schedlang.cli.option_values import (
    DEVICES,
    OPTIMIZERS,
    amount,
    capacities,
    count,
    data,
    number,
    numbers,
    one_of,
    param,
    program,
    ranks,
    rate,
    seconds,
    share,
    sizes,
    slow,
    table,
    transport,
    transport_or_all,
    window,
)

#: What the word behind an option stands for, unless its row says another type.
_VALUES: dict[str, Callable[[str], Any]] = {
    "A..B": window,
    "B": capacities,
    "BYTES": amount,
    "CERTIFICATE": data,
    "COSTS": data,
    "N": count,
    "NAME=A..B": sizes,
    "NAME=VALUE": param,
    "PART": share,
    "PLAN": data,
    "RANKS": ranks,
    "RATE": rate,
    "SHARE": share,
    "T": numbers,
    "TABLE": table,
    "TIME": seconds,
    "TRACE": data,
    "WHAT:FACTOR": slow,
}
#: The types with several numbers, and those with a name and a value, which may come again.
_LISTS = (numbers, capacities)
_NAMED = (param, sizes, slow)


class Given(NamedTuple):
    """The help of an option, more that argparse is told of it, and whether it is rare (`more`)."""

    help: str
    settings: dict[str, Any]
    is_rare: bool = False


class Either(NamedTuple):
    """Options of which a command line has one at most; exactly one, if it is required."""

    options: "Options"
    is_required: bool = False


#: The options of a command, in the order of its help. Each is written as in a command line, with a
#: word for its value: `--width N`, `-o --output PLAN`. Arguments that stand by their place have
#: names as well: `others FILE*` is any number of files, `files FILE+` one or more, `about COMMAND?`
#: at most one. Of `--costs FILE...` there may be several.
Options = Mapping[str, str | Given | Either]


class Command(NamedTuple):
    """A command: the question that it answers; its function, as `module.function` in `schedlang`;
    an example of its arguments; and its options.
    """

    help: str
    run: str
    example: str
    options: Options


def given(help: str, type: Any = None, **settings: Any) -> Given:
    """The help of an option whose value is of some type, or one of some words."""
    if isinstance(type, tuple):
        settings["choices"] = type
        type = one_of(*type)
    if type:
        settings["type"] = type
    return Given(help, settings)


def more(options: Options) -> Options:
    """Options that `--help` only names: `--help all` explains them. The others of a command are ten
    at most.
    """
    return {written: _as_rare(about) for written, about in options.items()}


def _as_rare(about: str | Given | Either) -> Given | Either:
    if isinstance(about, Either):
        return Either(more(about.options), about.is_required)
    return _as_given(about)._replace(is_rare=True)


def _as_given(about: str | Given) -> Given:
    return Given(about, {}) if isinstance(about, str) else about


def add_options(parser: Parser, options: Options, group: Any = None) -> None:
    """Add options to a parser."""
    for written, about in options.items():
        if isinstance(about, Either):
            either = parser.add_mutually_exclusive_group(required=about.is_required)
            add_options(parser, about.options, either)
            continue
        help, others, is_rare = _as_given(about)
        *names, word = written.split()
        settings: dict[str, Any] = {"help": help, **others}
        takes = ""
        if word.startswith("-"):
            names.append(word)
            settings.setdefault("action", "store_true")
        else:
            takes = _take_value(word, settings)
        parser.add(names, settings, group, takes, is_rare)


def _take_value(word: str, settings: dict[str, Any]) -> str:
    """Complete the settings of an option for its value; what it takes several of, if it does."""
    takes = ""
    if word.endswith("..."):
        takes = "files"
        word = word.removesuffix("...")
        settings["action"] = "append"
    elif word[-1] in "*+?":
        settings["nargs"] = word[-1]
        word = word[:-1]
    settings["metavar"] = word
    type = settings.setdefault("type", _VALUES.get(word, str))
    if type in _NAMED:
        settings |= {"action": Named, "default": {}}
    return "numbers" if type in _LISTS else takes


def file(what: str = "a program or a plan") -> Options:
    """The file that a command reads."""
    also = "- is standard input, and a name such as 1f1b a program of the gallery"
    return {"file FILE": given(f"{what}; {also}", program)}


def transport_for(help: str, default: str | None = None) -> Options:
    """The transport for which something is proved or simulated."""
    return {"--transport NAME": given(help, transport, default=default)}


def output(word: str, help: str) -> Options:
    """The file that a command writes."""
    return {f"-o --output {word}": help, **FORCE}


PARAMS: Options = {
    "-p NAME=VALUE": given(
        "set a parameter of the program; a list as depth=3,2,1", dest="params"
    )
}
TRANSPORT_OR_ALL: Options = {
    "--transport NAME": given(
        "a transport, or `all` for a table", transport_or_all, default="portable"
    )
}
FORCE: Options = more(
    {"--force": "also replace a program, or a file that this command reads"}
)
IDEAL: Options = {"--ideal": "no transfer waits for another: only latency counts"}
UNIT: Options = {
    "--unit UNIT": given(
        "of schedules with different numbers of stages: an op takes the time of the share of the "
        "model that its stage is (model), or as long on any stage (stage)",
        ("model", "stage"),
        default="model",
    )
}
COMPUTE: Options = {"--compute": "without sends and receives"}

_EACH = "one for all stages or one per stage: 1,1.5,1"
#: The options for costs. A file can have more.
COSTS: Options = {
    "--costs FILE...": "a JSON or YAML file of costs, see docs/costs.md, or a run's trace; of one "
    "trace a rank all of them, or their folder",
    "--forward-times T": f"durations of F, {_EACH}",
    "--backward-times T": f"durations of a whole B, {_EACH}",
    "--p2p-time T": given("duration of a transfer between ranks", number),
    **more(
        {
            "--input-times T": f"durations of B where W is apart, {_EACH}",
            "--weight-times T": f"durations of W, {_EACH}",
            "--recompute-times T": f"durations of R, {_EACH}",
            "--update-times T": f"durations of U, {_EACH}",
            "--overlap-times T": f"durations of ops that overlap, together, {_EACH}",
            "--capacity-bytes B": "bytes that ranks have room for, one for all or one per rank: "
            "72GB, or H100 for 95 %% of its memory; also beside --costs",
        }
    ),
}
#: The options of a command that executes a plan.
EXECUTION: Options = {
    **COSTS,
    **transport_for("what it communicates by; without, as the plan says, or gloo"),
    **more({"--updates N": "of a schedule without a flush, how many to look at"}),
}
#: The options of a training: of `schedc run`, and of the processes that it starts.
TRAINING: Options = {
    **PARAMS,
    "--steps N": "how many updates (default: 20)",
    "--optimizer NAME": given("sgd, which is the default, adam or adamw", OPTIMIZERS),
    "--lr RATE": "the learning rate (default: one that suits the optimizer and the schedule)",
    "--device NAME": given(
        "cpu, or cuda with a GPU for each process of a machine (default: cuda, if it has as many)",
        DEVICES,
    ),
    "--check": "compare with the same training in one process",
    "--audit": "compare every stage with itself alone, in one step",
    "--replicas N": given(
        "train so many replicas of the plan, each with batches of its own (default: 1)",
        default=1,
    ),
    "--trace TRACE": "write what the last steps did and when: for `schedc view`, `schedc compare` "
    "and ui.perfetto.dev",
    "--checkpoint DIR": "resume from the newest checkpoint in a folder, and write more there; the "
    "newest two are kept, older ones are deleted",
    **more(
        {
            "--every N": "how many updates from one checkpoint to the next (default: 10)",
            "--stop-on-nan": "end where a loss is not a finite number, before the update",
            "--error-feedback": "correct each update for gradients that are late by one update",
            "--unequal": "train on microbatches whose rows have other lengths than those of the "
            "others",
            **COSTS,
        }
    ),
}
#: The options that all commands have, behind their own.
COMMON: Options = more(
    {
        "form": Either(
            {
                "--format FORMAT": given(
                    "text for people; json for programs, results on stdout and diagnostics on "
                    "stderr; github: diagnostics as annotations of a GitHub workflow",
                    ("text", "json", "github"),
                    default="text",
                ),
                "--json": given(
                    "short for --format json",
                    dest="format",
                    action="store_const",
                    const="json",
                ),
            }
        ),
        "--color WHEN": given(
            "auto: on a terminal, unless NO_COLOR is set; always; never",
            ("auto", "always", "never"),
            default="auto",
        ),
    }
)
