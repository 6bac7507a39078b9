"""Command lines with a mistake: what each is told, and its exit code.

`MISTAKES` has a line for each; all are run in one folder (`folder`), none may change what is in it, and none
is answered with a traceback, or with more than it takes.
"""

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import schedc
from tests.support.paths import CASES, PROGRAMS

#: The program or plan is wrong; the command line is.
WRONG = 1
USAGE = 2

#: What is typed behind `schedc`, the exit code, and what the message says.
MISTAKES: list[tuple[str, int, str]] = [
    # No command, or none that there is.
    ("", USAGE, "COMMAND is missing"),
    (
        "complie my.sched",
        USAGE,
        "there is no command `complie`; did you mean `compile`?",
    ),
    (
        "simulat my.sched",
        USAGE,
        "there is no command `simulat`; did you mean `simulate`?",
    ),
    ("explain-bubbles my.sched", USAGE, "did you mean `explain-bubble`?"),
    ("frobnicate", USAGE, "there is no command `frobnicate`"),
    ("my.sched", USAGE, "`my.sched` is no command: a file stands behind one"),
    ("--json compile my.sched", USAGE, "`--json` stands in front of a command"),
    ("--verison", USAGE, "`--verison` stands in front of a command"),
    ("help complie", USAGE, "there is no command `complie`"),
    ("help compile check", USAGE, "`check` is one argument too many"),
    # Options that there are not.
    ("compile my.sched --forwrd-only", USAGE, "did you mean `--forward-only`?"),
    ("compile my.sched --forward", USAGE, "there is no option `--forward`"),
    ("compile my.sched --out plan2.json", USAGE, "there is no option `--out`"),
    ("simulate my.sched --forward-time 1", USAGE, "did you mean `--forward-times`?"),
    ("simulate my.sched --p2p_time 1", USAGE, "did you mean `--p2p-time`?"),
    ("check my.sched --transprt=nccl", USAGE, "did you mean `--transport`?"),
    ("show my.sched -x", USAGE, "there is no option `-x`"),
    ("view my.sched --jsn", USAGE, "did you mean `--json`?"),
    ("compile my.sched --ranks 8", USAGE, "`--ranks`: -p ranks=8 sets a parameter"),
    ("compile my.sched --ranks=8", USAGE, "`--ranks`: -p ranks=8 sets a parameter"),
    ("simulate my.sched --chunks 2", USAGE, "`--chunks`: -p chunks=2 sets a parameter"),
    ("compile my.sched --ranks", USAGE, "there is no option `--ranks`"),
    ("compile my.sched --ranks= 8", USAGE, "`--ranks`: -p ranks=8 sets a parameter"),
    ("view my.sched --ranks 8", USAGE, "how many there are is -p ranks=8"),
    (
        "view my.sched --html",
        USAGE,
        "`--html`: the name of a file says it, schedc view",
    ),
    ("simulate my.sched --svg x.svg", USAGE, "schedc view FILE -o NAME.svg"),
    ("compile my.sched --csv", USAGE, "--to torch-csv -o NAME.csv"),
    # Files of a kind that another command writes.
    ("compile my.sched -o d.html", USAGE, "a picture: schedc view FILE -o d.html"),
    (
        "compile my.sched -o d.csv",
        USAGE,
        "a table: schedc export FILE --to torch-csv -o",
    ),
    ("import table.csv -o d.svg", USAGE, "a picture: schedc view FILE -o d.svg"),
    ("export my.sched --to torch-csv -o d.png", USAGE, "schedc view FILE -o d.png"),
    ("run my.sched --trace run.html", USAGE, "schedc view FILE -o run.html"),
    ("compare my.sched --write-costs c.html", USAGE, "schedc view FILE -o c.html"),
    # Amounts of memory, and what a rank may hold.
    (
        "tune --ranks 2 --batch 2 --costs costs.json --memory 0",
        USAGE,
        "memory above 0, in bytes or with a unit",
    ),
    (
        "simulate my.sched --capacity-bytes 80XB",
        USAGE,
        "memory above 0, in bytes or with a unit",
    ),
    ("optimize my.sched --peak 72GB", USAGE, "`72GB` is not numbers, such as 1,1,2"),
    # Options that do not go together.
    ("simulate my.sched --why --jitter 0.1", USAGE, "--why explains one run"),
    ("view my.sched --actions -o x.svg", USAGE, "--output is for a picture"),
    ("view my.sched other.sched --actions", USAGE, "the actions of one schedule"),
    ("view my.sched --actions --ranks 9", USAGE, "there is no rank 9"),
    ("view plan.json --actions --transport nccl", USAGE, "`plan.json` is a plan"),
    ("compare my.sched --diff", USAGE, "--diff compares two schedules"),
    ("compare my.sched -a ranks=2", USAGE, "-a is for --diff"),
    ("check my.sched -o c.json", USAGE, "-o writes the certificate"),
    ("check my.sched --for chunks=any", USAGE, "for any microbatches, ranks, slices"),
    (
        "check my.sched --for ranks=2..3 --for microbatches=any",
        USAGE,
        "give one size, -p ranks=2",
    ),
    (
        "check my.sched -p microbatches=2 --for microbatches=any",
        USAGE,
        "`microbatches` has a -p and a --for",
    ),
    ("check plan.json --for microbatches=any", USAGE, "`plan.json` is a plan"),
    (
        "check my.sched --p2p-time 1 --for microbatches=any",
        USAGE,
        "at its own costs",
    ),
    # Arguments that are missing, or too many.
    ("compile", USAGE, "the following arguments are required: FILE"),
    ("compare", USAGE, "the following arguments are required: FILE"),
    ("export my.sched", USAGE, "the following arguments are required: --to"),
    ("completion", USAGE, "the following arguments are required: SHELL"),
    ("compile my.sched other.sched", USAGE, "`other.sched` is one argument too many"),
    ("compile my.sched -p", USAGE, "argument -p: expected one argument"),
    ("compile my.sched -o", USAGE, "argument -o/--output: expected one argument"),
    (
        "simulate my.sched --forward-times",
        USAGE,
        "--forward-times: expected one argument",
    ),
    # Values that are none.
    (
        "compile my.sched -p ranks",
        USAGE,
        "`ranks` is not NAME=VALUE with a whole number",
    ),
    ("compile my.sched -p ranks=4.5", USAGE, "`ranks=4.5` is not NAME=VALUE"),
    ("compile my.sched -p ranks=", USAGE, "`ranks=` is not NAME=VALUE"),
    ("compile my.sched -p =4", USAGE, "`=4` is not NAME=VALUE"),
    ("compile my.sched -p ranks:4", USAGE, "`ranks:4` is not NAME=VALUE"),
    ("compile my.sched --transport ncl", USAGE, "did you mean `nccl`?"),
    ("compile my.sched --transport all", USAGE, "there is no transport `all`"),
    ("compile my.sched --format jsn", USAGE, "there is no `jsn`"),
    ("compile my.sched --color sometimes", USAGE, "there is no `sometimes`"),
    (
        "compare my.sched --sort bubble",
        USAGE,
        "there is no `bubble`, there is `given`, `makespan`",
    ),
    (
        "export my.sched --to torch-csv --torch 2.9",
        USAGE,
        "torch 2.9 is older than 2.13, the oldest known dialect",
    ),
    ("export my.sched --to csv", USAGE, "there is no `csv`, there is `torch-csv`"),
    ("completion csh", USAGE, "there is no `csh`, there is `bash`, `zsh`, `fish`"),
    (
        "check my.sched --for ranks",
        USAGE,
        "`ranks` is not NAME=A..B with whole numbers",
    ),
    ("check my.sched --for ranks=4..2", USAGE, "`ranks=4..2` is not NAME=A..B"),
    ("check my.sched --for ranks=2-8", USAGE, "`ranks=2-8` is not NAME=A..B"),
    ("check my.sched --for ranks=1..99999999", USAGE, "is more than 1,000,000 sizes"),
    (
        "check my.sched --for ranks=1..2000 --for microbatches=1..2000",
        USAGE,
        "--for asks for 4,000,000 sizes",
    ),
    ("simulate my.sched --p2p-time fast", USAGE, "--p2p-time: `fast` is not a number"),
    (
        "simulate my.sched --p2p-time -1",
        USAGE,
        "`p2p_time` is -1: it must be a number from 0",
    ),
    (
        "simulate my.sched --p2p-time nan",
        USAGE,
        "`p2p_time` is nan: it must be a finite number",
    ),
    (
        "simulate my.sched --forward-times one",
        USAGE,
        "`one` is not numbers, such as 1,1,2",
    ),
    (
        "simulate my.sched --forward-times 1,,2",
        USAGE,
        "`1,,2` is not numbers, such as 1,1,2",
    ),
    (
        "simulate --forward-times 1 2 my.sched",
        USAGE,
        "2 durations of `F` are given, there are 4",
    ),
    ("simulate my.sched --jitter some", USAGE, "--jitter: `some` is not a number"),
    ("simulate my.sched --jitter 10", USAGE, "a part of each duration from 0 to 1"),
    ("simulate my.sched --jitter -0.1", USAGE, "a part of each duration from 0 to 1"),
    (
        "simulate my.sched --jitter 0.1 --seed -1",
        USAGE,
        "`-1` is not a whole number from 0",
    ),
    (
        "simulate my.sched --jitter 0.1 --runs 0",
        USAGE,
        "`0` is not a whole number from 1",
    ),
    ("simulate my.sched --runs 100", USAGE, "--runs is for --jitter"),
    ("simulate my.sched --slow rank=0:2 --seed 1", USAGE, "--seed is for --jitter"),
    (
        "simulate my.sched --slow rank=0",
        USAGE,
        "`rank=0` is not rank=R:FACTOR or link=R-Q:FACTOR",
    ),
    ("simulate my.sched --slow rank=0:0", USAGE, "with a factor above 0"),
    ("simulate my.sched --slow rank=0-1:2", USAGE, "`rank=0-1:2` is not rank=R:FACTOR"),
    ("simulate my.sched --slow stage=0:2", USAGE, "`stage=0:2` is not rank=R:FACTOR"),
    ("simulate my.sched --slow rank=90:2", USAGE, "there is no rank 90: there are "),
    (
        "simulate my.sched --slow link=0-1:2",
        USAGE,
        "transfers between ranks 0 and 1 take no time",
    ),
    ("simulate my.sched --slow link=1-1:2", USAGE, "a link is a pair of two ranks"),
    (
        "simulate my.sched --slow link=0-1:2 --slow link=1-0:3",
        USAGE,
        "`link=0-1` is given twice",
    ),
    ("simulate my.sched --updates 0", USAGE, "`0` is not a whole number from 1"),
    (
        "simulate my.sched --updates 3",
        USAGE,
        "the plan has 1 update: no part of it repeats",
    ),
    ("run my.sched --steps 0", USAGE, "`0` is not a whole number from 1"),
    ("run my.sched --steps many", USAGE, "`many` is not a whole number from 1"),
    ("run my.sched --replicas -2", USAGE, "`-2` is not a whole number from 1"),
    ("show my.sched --shards 1.5", USAGE, "`1.5` is not a whole number from 1"),
    ("pipeline -s four", USAGE, "`four` is not a whole number from 1"),
    ("pipeline num_stages", USAGE, "`num_stages` is not KEY=VALUE"),
    # What was given twice, or does not go together.
    (
        "compile my.sched -p ranks=8 -p ranks=4",
        USAGE,
        "argument -p: `ranks` is given twice",
    ),
    (
        "check my.sched --for ranks=2..3 --for ranks=4..5",
        USAGE,
        "`ranks` is given twice",
    ),
    (
        "check my.sched --for ranks=2..3 -p ranks=4",
        USAGE,
        "`ranks` has a -p and a --for: give one of",
    ),
    (
        "compile my.sched -o a.json -o b.json",
        USAGE,
        "argument -o/--output: it is given twice",
    ),
    (
        "simulate my.sched --p2p-time 1 --p2p-time 2",
        USAGE,
        "--p2p-time: it is given twice",
    ),
    ("pipeline num_stages=2 num_stages=4", USAGE, "`num_stages` is given twice"),
    ("pipeline --compat --compat-async", USAGE, "not allowed with argument --compat"),
    (
        "compile my.sched --json --format github",
        USAGE,
        "not allowed with argument --json",
    ),
    ("show my.sched --compute --frees", USAGE, "not allowed with argument --compute"),
    (
        "show plan.json --costs costs.json",
        USAGE,
        "costs decide about the order of a program",
    ),
    (
        "export plan.json --to torch-csv --p2p-time 1",
        USAGE,
        "`plan.json` is a plan: it has its order",
    ),
    ("run plan.json --p2p-time 1", USAGE, "`plan.json` is a plan: it has its order"),
    (
        "compile my.sched --forward-times 1,2",
        USAGE,
        "2 durations of `F` are given, there are 4",
    ),
    (
        "check my.sched --forward-times 1,2",
        USAGE,
        "2 durations of `F` are given, there are 4",
    ),
    (
        "check plan.json --forward-times 1,2,3",
        USAGE,
        "3 durations of `F` are given, there are 2",
    ),
    (
        "check my.sched --for ranks=2..3 --forward-times 1,2",
        USAGE,
        "give one number for all stages",
    ),
    (
        "simulate my.sched --p2p-time 1 --costs costs.json",
        USAGE,
        "as options or as a file",
    ),
    (
        "check my.sched --for ranks=2..3 --transport all",
        USAGE,
        "for one transport, not for all",
    ),
    ("check plan.json --for ranks=2..3", USAGE, "`plan.json` is a plan"),
    ("check plan.json -p ranks=2", USAGE, "`plan.json` is a plan"),
    (
        "show plan.json -p ranks=2",
        USAGE,
        "-p sets parameters of a program, `plan.json` is a plan",
    ),
    (
        "compile plan.json",
        USAGE,
        "`plan.json` is a plan, which `schedc check` proves again",
    ),
    (
        "view my.sched --plot pie",
        USAGE,
        "there is no `pie`, there is `bubble`, `scaling`",
    ),
    (
        "view my.sched other.sched -o both.json",
        USAGE,
        "a trace has one schedule, not 2: a picture has several, NAME.svg or .html",
    ),
    ("view my.sched -o picture.gif", USAGE, "`picture.gif` must end in"),
    (
        "compare my.sched --write-costs new.json",
        USAGE,
        "writes what a recorded run shows",
    ),
    ("run my.sched --every 5", USAGE, "--every says how often --checkpoint writes"),
    (
        "run my.sched --checkpoint costs.json",
        USAGE,
        "`costs.json` is a file, --checkpoint names a",
    ),
    ("compare - -", USAGE, "`-` stands twice, and standard input can be read once"),
    # What would be lost.
    (
        "compile my.sched -o my.sched",
        USAGE,
        "`my.sched` is read, and would be replaced",
    ),
    (
        "compile my.sched -o ./folder/../my.sched",
        USAGE,
        "is read, and would be replaced",
    ),
    (
        "compile my.sched -o link.sched",
        USAGE,
        "`link.sched` is read, and would be replaced",
    ),
    (
        "compile link.sched -o my.sched",
        USAGE,
        "`my.sched` is read, and would be replaced",
    ),
    (
        "compile my.sched -o hard.json",
        USAGE,
        "`hard.json` is read, and would be replaced",
    ),
    (
        "compile my.sched -o other.sched",
        USAGE,
        "`other.sched` is a program, and would be replaced",
    ),
    (
        "compile imports.sched -o parts.txt",
        USAGE,
        "`parts.txt` is read, and would be replaced",
    ),
    (
        "export my.sched --to torch-csv -o my.sched",
        USAGE,
        "is read, and would be replaced",
    ),
    (
        "export plan.json --to torch-csv -o plan.json",
        USAGE,
        "is read, and would be replaced",
    ),
    (
        "import cut.json -o cut.json",
        USAGE,
        "`cut.json` is read, and would be replaced",
    ),
    (
        "view plan.json -o plan.json",
        USAGE,
        "`plan.json` is read, and would be replaced",
    ),
    (
        "view my.sched --costs costs.json -o costs.json",
        USAGE,
        "`costs.json` is read, and would",
    ),
    (
        "compare my.sched run.json --write-costs run.json",
        USAGE,
        "`run.json` is read, and would",
    ),
    (
        "run plan.json --trace plan.json",
        USAGE,
        "`plan.json` is read, and would be replaced",
    ),
    (
        "pipeline -c settings.json -o settings.json",
        USAGE,
        "`settings.json` is read, and would be",
    ),
    (
        "pipeline -c own_output.json",
        USAGE,
        "`own_output.json` is read, and would be replaced",
    ),
    # Files that are not there, or that cannot be written.
    (
        "compile absent.sched",
        USAGE,
        "cannot read `absent.sched`: No such file or directory",
    ),
    ("compile folder", USAGE, "cannot read `folder`: Is a directory"),
    (
        "compile 1f1",
        USAGE,
        "there is no file `1f1`, and no program of the gallery has this name",
    ),
    (
        "view zb_h",
        USAGE,
        "no program of the gallery has this name; did you mean `zb_h2`?",
    ),
    ("compile binary.sched", USAGE, "byte 0 is not UTF-8 text"),
    ("show absent.json", USAGE, "cannot read `absent.json`"),
    ("import absent.csv", USAGE, "cannot read `absent.csv`"),
    ("compare my.sched absent.sched", USAGE, "cannot read `absent.sched`"),
    ("simulate my.sched --costs absent.json", USAGE, "cannot read `absent.json`"),
    ("simulate my.sched --costs wrong.json", USAGE, "there is no cost `forward_time`"),
    *(
        (f"{command} --costs short.json", USAGE, "error: costs in `short.json`: ")
        for command in (
            "simulate my.sched",
            "simulate plan.json",
            "compile my.sched",
            "check my.sched",
            "check my.sched --for ranks=2..3",
            "compare my.sched",
            "diff my.sched plan.json",
            "explain-bubble my.sched",
            "view my.sched",
        )
    ),
    (
        "simulate my.sched --costs costs.json --capacity-bytes 1,2,3",
        USAGE,
        "error: 3 `capacity_bytes` are given, there are 4 ranks",
    ),
    ("pipeline -c absent.json", USAGE, "cannot read `absent.json`"),
    ("pipeline -c wrong.json", USAGE, "forward_time"),
    ("compile my.sched -o absent/plan.json", USAGE, "there is no folder `absent`"),
    (
        "compile my.sched -o folder",
        USAGE,
        "`folder`: cannot be written: it is a folder",
    ),
    (
        "compile my.sched -o -",
        USAGE,
        "`-` is standard input; standard output is /dev/stdout",
    ),
    ("view my.sched -o absent/view.svg", USAGE, "there is no folder `absent`"),
    ("run my.sched --trace absent/run.json", USAGE, "there is no folder `absent`"),
    # Words of the reference.
    ("explain deadlok", USAGE, "there is no code `deadlok`; did you mean `deadlock`?"),
    ("explain deadlock zzz", USAGE, "there is no code `zzz`; all: `schedc explain`"),
    ("gallery 1f1", USAGE, "there is no program `1f1`; did you mean `1f1b`?"),
    ("gallery my.txt", USAGE, "there is no program `my.txt`; all: `schedc gallery`"),
    # Parameters, programs and plans that are wrong are told by diagnostics.
    ("compile my.sched -p rank=4", WRONG, "has no parameter `rank`"),
    ("compare my.sched -p rank=4", USAGE, "no program has a parameter `rank`"),
    ("compile my.sched -p ranks=0", WRONG, "error["),
    ("compile my.sched -p ranks=-3", WRONG, "error["),
    ("compile empty.sched", WRONG, "the program is empty"),
    ("compile table.csv", WRONG, "error["),
    ("show cut.json", WRONG, "not a whole plan file"),
    (
        "check explicit.sched -p microbatches=2 --transport nccl",
        WRONG,
        "error[first-use]",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the commands name, as the current one."""
    folder = tmp_path_factory.mktemp("mistakes")
    before = Path.cwd()
    os.chdir(folder)
    program = (PROGRAMS / "1f1b.sched").read_text()
    Path("my.sched").write_text(program)
    Path("other.sched").write_text(program)
    Path("explicit.sched").write_text((PROGRAMS / "1f1b_explicit.sched").read_text())
    Path("link.sched").symlink_to("my.sched")
    os.link("my.sched", "hard.json")
    Path("parts.txt").write_text("fn twice(n) = 2 * n\n")
    Path("imports.sched").write_text(
        'schedule imports { import "parts.txt" param ranks = 1 param microbatches = 1 '
        "rank r { F(0) B(0) } }"
    )
    Path("folder").mkdir()
    Path("empty.sched").write_text("")
    Path("binary.sched").write_bytes(bytes(range(128, 256)))
    Path("cut.json").write_text('{"format": "schedlang.plan/1"')
    Path("table.csv").write_text("0F0,0B0\n")
    Path("costs.json").write_text('{"forward_times": 1}')
    Path("short.json").write_text('{"forward_times": [1, 2, 3, 4, 5]}')
    Path("wrong.json").write_text('{"forward_time": 1}')
    Path("settings.json").write_text('{"num_stages": 2, "num_batches": 2}')
    Path("own_output.json").write_text(
        '{"num_stages": 2, "output_file": "own_output.json"}'
    )
    Path("run.json").write_bytes((CASES / "run.json").read_bytes())
    assert (
        schedc("compile", "my.sched", "-p", "ranks=2", "-o", "plan.json").returncode
        == 0
    )
    yield folder
    os.chdir(before)


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("command", "exit_code", "message"), MISTAKES)
def test_mistake(command: str, exit_code: int, message: str, folder: Path) -> None:
    before = content(folder)
    done = schedc(*shlex.split(command))
    assert message in done.stderr
    assert done.returncode == exit_code
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert content(folder) == before
    first, *others = done.stderr.splitlines()
    assert first.startswith("error")
    if not first.startswith("error["):
        # What is wrong, and where to read on.
        assert len(others) == 1
        assert others[0].startswith("see: schedc ")


def test_the_table_is_long_and_has_no_line_twice() -> None:
    assert len({command for command, _, _ in MISTAKES}) == len(MISTAKES) > 60


@pytest.mark.parametrize("option", [["--json"], ["--format", "json"]])
def test_diagnostics_are_one_document_for_programs(
    option: list[str], folder: Path
) -> None:
    for command in (
        ["show", "absent.json"],
        ["compile", "empty.sched"],
        ["import", "cut.json"],
    ):
        done = schedc(*command, *option)
        assert done.returncode in (WRONG, USAGE)
        assert json.loads(done.stderr)["diagnostics"][0]["severity"] == "error"


def test_force_is_for_those_who_mean_it(folder: Path) -> None:
    Path("gone.sched").write_text(Path("my.sched").read_text())
    assert schedc("compile", "my.sched", "-o", "gone.sched").returncode == USAGE
    assert schedc("compile", "my.sched", "-o", "gone.sched", "--force").returncode == 0
    assert schedc("show", "gone.sched").returncode == 0
    Path("gone.sched").unlink()
