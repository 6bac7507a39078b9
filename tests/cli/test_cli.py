"""The command as a user meets it: its output, its exit codes, its manners."""

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import schedlang
from schedlang import Costs, Noise, compile, simulate_runs
from schedlang.cli.command_table import (
    COMMANDS,
    TOOLS,
    UNLISTED,
    command_of,
    parser_of,
    parser_of_all,
)
from schedlang.cli.outputs import INPUTS, OUTPUTS
from tests.support.commands import Done, document, exit_code, line_words, output, schedc
from tests.support.paths import DOCS, PROGRAMS, ROOT

ONE_F_ONE_B = str(PROGRAMS / "1f1b.sched")


def schedc_process(*line: object) -> Done:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "schedlang", *line_words(*line)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


def test_compile_show_simulate(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    arguments = ["compile", ONE_F_ONE_B, "-p ranks=2 -p microbatches=3 -o", plan]
    result = schedc_process(*arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        "one_f_one_b: 2 ranks, 2 stages, 3 microbatches, 24 actions; no deadlock; 25.0% idle at unit costs\n"
        f"wrote {plan}\n"
    )
    assert (
        schedc("show", plan, "--ranks --compute").stdout
        == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2\n"
    )
    assert schedc("show", plan, "--ranks").stdout.startswith(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 "
    )
    assert "rank 1, stage 1\n" in schedc("show", plan).stdout
    figures = json.loads(schedc("simulate", plan, "--json").stdout)
    assert figures == {
        "schedule": "one_f_one_b",
        "params": {"ranks": 2, "microbatches": 3},
        "ranks": 2,
        "stages": 2,
        "microbatches": 3,
        "actions": 24,
        "transport": "gloo",
        "makespan": 12.0,
        "ideal_makespan": 12.0,
        "bubble": {
            "over_ideal": pytest.approx(1 / 3),
            "over_makespan": 0.25,
            "span": 0.25,
        },
        "span": 12.0,
        "spans": [12.0, 9.0],
        "peak_activations": [2, 1],
        "peak_messages": [4, 3],
        "peak_memory": [2, 1],
        "busy": [9.0, 9.0],
        "copying": [0.0, 0.0],
        "exposed": 0.0,
        "critical_path": {"F": 4.0, "B": 8.0},
        "versions": [1, 1],
    }


def test_communication_takes_time_on_its_transport(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorded 1F1B with exchanges costs 0.75 on NCCL; a plan is replayed as it was compiled,
    or elsewhere.
    """
    explicit = str(PROGRAMS / "1f1b_explicit.sched")
    plan = str(tmp_path / "plan.json")
    slow = "--p2p-time 0.25"
    for options, transport, makespan in [
        ([], "gloo", 37),
        (["--transport nccl"], "nccl", 37.75),
        (["--transport nccl --ideal"], "ideal", 37),
    ]:
        figures = simulated(explicit, slow, *options)
        assert (
            figures["transport"],
            figures["makespan"],
            figures["ideal_makespan"],
        ) == (
            transport,
            makespan,
            37,
        )
    assert exit_code("compile", ONE_F_ONE_B, "--transport nccl -o", plan) == 0
    assert simulated(plan, slow)["transport"] == "nccl"
    assert (
        simulated(plan, slow)["makespan"] == 38.75
    )  # proved without times of transfers: nothing was to be gained
    assert simulated(plan, slow, "--transport gloo")["makespan"] == 37
    assert simulated(ONE_F_ONE_B, slow, "--transport nccl")["makespan"] == 37.5
    capsys.readouterr()
    assert (
        "\nbeyond the ideal      0.75     longer on nccl than the ideal 37,"
        in output("simulate", explicit, slow, "--transport nccl")
    )
    assert "beyond the ideal" not in output("simulate", explicit, slow)


def test_verbose_says_how_communication_was_chosen(
    tmp_path: Path,
) -> None:
    program = tmp_path / "slow.sched"
    text = re.sub("assert .*", "", Path(ONE_F_ONE_B).read_text())
    program.write_text(
        text.replace("rank r {", "cost F = 4  cost B = 8  cost send = 1\n    rank r {")
    )
    assert output("compile", str(program), "-v --transport nccl").splitlines()[1:] == [
        "lowering: posted early; makespan 150 on nccl, 148 ideal (+1.4%)",
        "tried: co-issued 155, posted early 150, posted early in order 150, fused 150, fused and posted early 150, "
        "deferred 157",
    ]
    assert output("compile", str(program), "-v").splitlines()[1:] == [
        "lowering: co-issued; makespan 148 on gloo, 148 ideal (+0.0%)"
    ]


def test_forward_only(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    assert "12 actions; forward only, no deadlock; 25.0% idle" in output(
        "compile", ONE_F_ONE_B, "-p ranks=2 -p microbatches=3 --forward-only -o", plan
    )
    assert output("show", plan, "--ranks") == (
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2\n1RECV_F0 1F0 1RECV_F1 1F1 1RECV_F2 1F2\n"
    )


def simulated(*line: object) -> dict[str, Any]:
    return document("simulate", *line)


def test_costs(tmp_path: Path) -> None:
    per_stage = "--forward-times 1 1 1 2 --backward-times 2 2 2 4"
    assert (
        simulated(ONE_F_ONE_B, per_stage)["makespan"] == 57
    )  # as a public visualizer has it
    assert simulated(ONE_F_ONE_B, "--p2p-time 0.5")["makespan"] == 41
    (tmp_path / "costs.json").write_text(
        json.dumps({"forward_times": [1, 1, 1, 2], "backward_times": [2, 2, 2, 4]})
    )
    assert (
        simulated(ONE_F_ONE_B, "--costs", str(tmp_path / "costs.json"))["makespan"]
        == 57
    )
    zero_bubble = str(PROGRAMS / "zb_h1.sched")
    halves = simulated(
        zero_bubble, "--input-times 2 --weight-times 2 --forward-times 2"
    )
    assert halves["makespan"] == 2 * 27
    assert simulated(zero_bubble, "--backward-times 4 --forward-times 2") == halves


def test_diagnostics_are_1_and_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.sched"
    bad.write_text(
        "schedule bad { param ranks = 2 param microbatches = 2 rank r { F(x) B(y) } }"
    )
    plan = tmp_path / "plan.json"
    assert exit_code("compile", str(bad), "-o", str(plan)) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("error[unknown-name]") == 2
    assert captured.err.endswith("\n\n2 errors; see: schedc explain unknown-name\n")
    assert not plan.exists()

    assert exit_code("compile", str(bad), "--format json") == 1
    diagnostics = json.loads(capsys.readouterr().err)["diagnostics"]
    assert [each["code"] for each in diagnostics] == ["unknown-name", "unknown-name"]
    assert diagnostics[0]["start"] == {"line": 1, "column": 66}

    assert exit_code("compile", str(bad), "--format github") == 1
    place = f"file={bad},line=1,col=66,endLine=1,endColumn=67,title=unknown-name"
    assert (
        capsys.readouterr().err.splitlines()[0]
        == f"::error {place}::no name `x` in scope"
    )


@pytest.mark.parametrize("command", ["compile", "show", "simulate", "view", "run"])
def test_files_that_are_no_program(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content, complaint in [
        ("empty.sched", b"", "the program is empty"),
        ("binary.sched", bytes(range(128, 256)), "not UTF-8"),
        ("plan.json", b'{"format": "schedlang.plan/1"', "not a whole plan file"),
    ][: 2 if command == "compile" else 3]:
        (tmp_path / name).write_bytes(content)
        # What is no text cannot be read, what is one can be wrong.
        assert exit_code(command, str(tmp_path / name)) == (
            2 if name == "binary.sched" else 1
        )
        assert complaint in capsys.readouterr().err
    assert exit_code(command, str(tmp_path / "absent")) == 2
    assert "No such file" in capsys.readouterr().err


def test_costs_files_that_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    for content, complaint in [
        ("", "is an empty file, not costs"),
        ("[", "Expecting value"),
        ("[1]", "it must be an object"),
        (
            '{"forward_time": 1}',
            "there is no cost `forward_time`, there is `forward_times`",
        ),
        ('{"forward_times": ["1"]}', "`forward_times` must be numbers"),
        ('{"forward_times": []}', "`forward_times` must be numbers"),
        (
            '{"forward_times": 1e308}',
            "`forward_times` must be numbers from 0 to 1e+100",
        ),
        (
            '{"forward_times": 1' + "0" * 400 + "}",
            "`forward_times` must be numbers from 0 to 1e+100",
        ),
        ("[" * 100_000, "it is nested too deep"),
        (
            '{"traceEvents": [{"ph": "X", "name": "0F0", "dur": -1}]}',
            "`0F0` lasts -1, it must be a number from 0",
        ),
        (
            '{"traceEvents": [{"ph": "X", "name": "0F0", "dur": NaN}]}',
            "`0F0` lasts nan, it must be a number from 0",
        ),
        ('{"p2p_time": Infinity}', "`p2p_time` is inf: it must be a finite number"),
    ]:
        path.write_text(content)
        assert exit_code("simulate", ONE_F_ONE_B, "--costs", str(path)) == 2
        assert complaint in capsys.readouterr().err


@pytest.mark.core
def test_the_help_is_one_screen() -> None:
    """`schedc --help` has a line for each command but those for other programs."""
    lines = schedc("--help").stdout.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert names == [name for name in COMMANDS if name not in (*TOOLS, *UNLISTED)]
    assert len(names) <= 13


@pytest.mark.core
@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_is_short(command: str) -> None:
    """It has a question, an example and ten options at most; `--help all` has every option."""
    short = schedc(command, "--help").stdout
    everything = schedc(command, "--help all").stdout
    assert command_of(command).help in short
    assert f"\nexample: schedc {command}" in short
    options = re.findall(r"^  (-.*)", short, re.MULTILINE)
    assert options[0].startswith("-h")
    assert len(options) <= 11
    # Where an option takes more room than its column, the word of its value follows both names.
    for action in parser_of(command).arguments():
        if action.option_strings:
            name = action.option_strings[-1]
            assert name in short
            assert re.search(rf"^  .*{name}\b", everything, re.MULTILINE)
    assert schedc("help", command).stdout == short


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("show 1f1b", "view 1f1b --actions"),
        ("show 1f1b --ranks --compute", "view 1f1b --bare --compute"),
        ("diff 1f1b zb_h1 --compute", "compare 1f1b zb_h1 --diff --compute"),
        ("explain-bubble 1f1b", "simulate 1f1b --why"),
        ("prove gpipe -p ranks=2", "check gpipe -p ranks=2 --for microbatches=any"),
        ("help", "--help"),
        ("help compile", "compile --help"),
        ("help show", "view --help"),
    ],
)
def test_old_names_of_commands(old: str, new: str) -> None:
    done = schedc(*new.split())
    assert done.stdout
    assert schedc(*old.split()) == done
    if "help" not in old:
        wrong = [schedc(*command.split(), "--zzz") for command in (old, new)]
        assert wrong[0] == wrong[1]


@pytest.mark.slow
def test_every_command_has_an_example_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "programs").symlink_to(PROGRAMS)
    (tmp_path / "table.csv").write_text("0F0,0B0")
    (tmp_path / "costs.json").write_text('{"forward_times": [1, 1, 1, 1]}')
    monkeypatch.chdir(tmp_path)  # the examples write files
    for command in COMMANDS:
        with pytest.raises(SystemExit):
            exit_code(command, "--help")
        example = capsys.readouterr().out.split("example: schedc ")[1].split()
        assert example[0] == command
        if command in ("run", "lsp"):
            continue  # test_runtime and test_server run them
        assert exit_code(*example) == 0
        capsys.readouterr()


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (
            "compile 1f1b -v",
            {"schedule", "idle", "output", "lowering", "trials"},
        ),
        ("check 1f1b", {"file", "verdicts"}),
        ("simulate 1f1b", {"makespan", "bubble"}),
        ("simulate 1f1b --why", {"makespan"}),
        ("view 1f1b", {"traceEvents"}),
        ("view 1f1b --frees", {"schedule", "params", "ranks"}),
        ("compare 1f1b zb_h1", {"file", "figures"}),
        (
            "compare 1f1b zb_h1 --diff",
            {"equal", "a", "b", "settings", "ranks"},
        ),
        (
            "tune 1f1b --ranks 2 --batch 4 --costs costs.json",
            {"results", "frontier", "command"},
        ),
        ("export 1f1b --to torch-csv", {"table"}),
        ("import table.csv -o plan.json", {"schedule", "output"}),
        (
            "pipeline -f 1 2 --no-visualization",
            {"bubble_rate", "warnings"},
        ),
        ("explain", {"code", "summary"}),
        ("explain order", {"code", "summary", "text"}),
        ("gallery", {"program", "summary"}),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_every_command_has_a_document_for_programs(
    command: str, keys: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("table.csv").write_text("0F0,0B0")
    Path("costs.json").write_text('{"forward_times": [1, 2]}')
    done = schedc(command, "--json")
    document = json.loads(done.stdout)
    assert keys <= (document[0] if isinstance(document, list) else document).keys()
    assert schedc(command, "--format json") == done
    assert not done.stderr or json.loads(done.stderr)
    # Annotations are of diagnostics only.
    assert schedc(command, "--format github").stdout == schedc(command).stdout


def test_annotations_of_every_transport() -> None:
    explicit = str(PROGRAMS / "1f1b_explicit.sched")
    arguments = "-p microbatches=2 --transport all --format github"
    done = schedc("check", explicit, arguments)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith(f"::error file={explicit},line=15,")
    assert "title=first-use" in done.stderr


def test_each_output_names_its_option() -> None:
    """A file to read or to write has one of the names by which it is known not to be lost."""
    files = {"FILE", "PLAN", "VIEW", "TABLE", "COSTS", "TRACE", "CERTIFICATE"}
    for name, parser in parser_of_all().commands.items():
        for action in parser.arguments():
            if action.metavar in files and action.dest != "to":
                assert action.dest in (*INPUTS, *OUTPUTS), f"{name}: {action.dest}"
            if action.dest in OUTPUTS:
                assert parser.get_default("force") is False


def test_options_may_stand_anywhere(tmp_path: Path) -> None:
    costs = "--forward-times 1 1 2 1"
    figures = simulated("1f1b", costs)
    assert (
        simulated(costs, "1f1b") == simulated("--forward-times 1,1,2,1 1f1b") == figures
    )
    assert figures["makespan"] != simulated("1f1b")["makespan"]
    settings = "strategy=zb1p --no-visualization num_devices=2 num_stages=2"
    assert schedc("pipeline", settings).returncode == 0
    assert schedc("compare 1f1b --sort makespan zb_h1").returncode == 0


def test_runs_with_noise(capsys: pytest.CaptureFixture[str]) -> None:
    noise = "--p2p-time 0.25 --transport nccl --jitter 0.2 --runs 100"
    noise += " --slow rank=3:1.5 --slow link=1-0:2"
    document = simulated("1f1b", noise)
    figures = document["noise"]
    assert isinstance(figures, dict)
    # What is simulated without noise is beside it, as ever.
    assert document["makespan"] == figures["makespan"] == 37.5
    assert (figures["slow_ranks"], figures["slow_links"]) == ({"3": 1.5}, {"0-1": 2})
    assert len(figures["makespans"]) == figures["runs"] == 100
    costs = Costs(p2p_time=0.25)
    plan = compile("1f1b", costs=costs, transport="nccl")
    expected = simulate_runs(plan, Noise(0.2, {3: 1.5}, {(0, 1): 2}), costs, runs=100)
    assert figures["makespans"] == list(expected.makespans)
    assert figures["percentile_95"] == expected.percentile(95)
    assert figures["delays"]["ranks"] == list(expected.delays.ranks)
    # The same call gives the same runs, another seed others.
    assert simulated("1f1b", noise)["noise"] == figures
    assert simulated("1f1b", noise, "--seed 1")["noise"] != figures
    capsys.readouterr()
    text = output("simulate 1f1b", noise)
    assert "makespan              37.5" in text
    for value in (
        expected.mean,
        expected.median,
        expected.percentile(95),
        expected.worst,
    ):
        assert f" {value:.5g} " in text
    assert "of the mean: rank 3 +" in text
    # Without jitter all runs are the same: there is one.
    assert exit_code("simulate 1f1b --slow rank=0:2 --ideal") == 0
    slow = simulate_runs(compile("1f1b"), Noise(slow_ranks={0: 2}), runs=1, ideal=True)
    assert f"with it               {slow.worst:.5g}" in capsys.readouterr().out
    assert "noise" not in output("simulate 1f1b --jitter 0")


@pytest.mark.core
@pytest.mark.parametrize(
    "command",
    [
        "simulate 1f1b --jitter 0.1",
        "simulate 1f1b --why",
        "compare 1f1b",
        "compare gpipe 1f1b --diff",
    ],
)
def test_large_times_have_no_exponent(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As those of costs in nanoseconds."""
    times = "--forward-times 10402000 --backward-times 17946000"
    assert exit_code(command, times, "--p2p-time 460000") in (0, 1)
    printed = capsys.readouterr().out
    assert re.search(r"\b\d{8,}\b", printed)
    assert not re.search(r"\de\+\d", printed)


def test_compare_on_a_transport(tmp_path: Path) -> None:
    """Of programs, and of a plan that was compiled for another one."""
    plan = str(tmp_path / "plan.json")
    assert schedc("compile 1f1b -o", plan).returncode == 0
    options = "--p2p-time 0.25 --transport nccl --json"
    rows = json.loads(schedc("compare 1f1b", plan, options).stdout)
    makespans = [row["figures"]["makespan"] for row in rows]
    slow = "--p2p-time 0.25 --transport nccl"
    assert makespans == [simulated(file, slow)["makespan"] for file in ("1f1b", plan)]
    assert {row["figures"]["transport"] for row in rows} == {"nccl"}


@pytest.mark.core
def test_programs_of_the_gallery_have_their_names() -> None:
    """Not the path of the file where they are installed, which takes half of a line."""
    sizes = "-p ranks=2 -p microbatches=4"
    table = schedc("compare 1f1b gpipe", sizes).stdout
    assert re.search(r"^1f1b +2 x 4 ", table, re.MULTILINE)
    assert re.search(r"^gpipe +2 x 4 ", table, re.MULTILINE)
    refused = schedc("compare 1f1b dualpipe -p microbatches=3").stdout
    assert "\nrefused: dualpipe: " in refused
    difference = schedc("compare 1f1b gpipe --diff", sizes).stdout
    assert ", from 1f1b\n" in difference
    assert ", from gpipe\n" in difference
    assert ", from 1f1b, proved" in schedc("view 1f1b --actions").stdout
    # A file is where it is, whatever it is called.
    assert ", from 1f1b, " not in schedc("view", ONE_F_ONE_B, "--actions").stdout


def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path) -> None:
    """Nor is a link: what it leads to is written."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    assert schedc("export 1f1b --to torch-csv -o", str(pipe)).returncode == 0
    assert os.read(reader, 100_000).startswith(b"0UNSHARD,")
    os.close(reader)
    assert pipe.is_fifo()
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    assert schedc("compile 1f1b -o", str(tmp_path / "link.json")).returncode == 0
    assert (tmp_path / "link.json").is_symlink()
    assert schedc("show", str(tmp_path / "real.json")).returncode == 0


@pytest.mark.slow
def test_the_compiler_never_imports_torch(tmp_path: Path) -> None:
    """Every command but `run`, with a torch that fails when it is imported."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    plan = str(tmp_path / "plan.json")
    table = str(tmp_path / "table.csv")
    environment = dict(os.environ, PYTHONPATH=str(tmp_path))
    for arguments in (
        ["compile", ONE_F_ONE_B, "-o", plan],
        ["show", plan],
        ["simulate", plan],
        ["export", plan, "--to torch-csv -o", table],
        ["import", table],
    ):
        subprocess.run(
            [sys.executable, "-m", "schedlang", *line_words(*arguments)],
            env=environment,
            check=True,
            timeout=60,
            stdout=subprocess.DEVNULL,
        )
    lines = "import sys; from schedlang import *; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", lines], env=environment, check=True, timeout=60
    )


def imported_by(*line: object) -> set[str]:
    """The modules that a command imports."""
    lines = "import sys; from schedlang.cli.main import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", lines, *line_words(*line)]
    return set(
        subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=True
        ).stderr.split()
    )


@pytest.mark.slow
def test_a_command_imports_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This is why it starts fast: `make bench WHAT=start` has the times."""
    found = imported_by("--help")
    assert {name for name in found if name.startswith("schedlang")} == {
        "schedlang",
        "schedlang.cli",
        "schedlang.cli.command_table",
        "schedlang.cli.extra",
        "schedlang.cli.main",
        "schedlang.cli.options",
        "schedlang.cli.command_line",
        "schedlang.cli.printing",
        "schedlang.cli.usage",
        "schedlang.cli.option_values",
        "schedlang.extras",
        "schedlang.extras.editor",
        "schedlang.extras.editor.lsp_command",
        "schedlang.extras.search",
        "schedlang.extras.search.optimize_command",
        "schedlang.extras.search.tune_command",
    }
    assert not {"attrs", "lark", "yaml", "json", "pathlib"} & found
    # Of a text that was not parsed before, and of one that was.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = imported_by("compile", ONE_F_ONE_B)
    assert {"lark", "schedlang.proof.prove"} <= found
    assert (
        not {
            "yaml",
            "concurrent.futures",
            "difflib",
            "fractions",
            "statistics",
            "subprocess",
        }
        & found
    )
    found = imported_by("compile", ONE_F_ONE_B)
    assert "schedlang.proof.prove" in found
    assert not {"lark", "logging", "random", "tempfile"} & found
    unneeded = (
        "schedlang.advice.advice",
        "schedlang.files.documents",
        "schedlang.language.parser",
        "schedlang.passes",
        "schedlang.plan.reader",
        "schedlang.plan.torch_tables",
        "schedlang.report",
    )
    assert not [name for name in found if name.startswith(unneeded)]
    assert "yaml" not in imported_by("simulate", ONE_F_ONE_B, "--p2p-time", "1")


@pytest.mark.slow
def test_extras_can_be_left_out() -> None:
    lines = "import sys; sys.modules['schedlang.extras'] = None; from schedlang.cli.main import main; sys.exit(main())"

    def without_extras(*line: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", lines, *line_words(*line)]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False
        )

    shown = without_extras("--help").stdout
    assert "  compile  " in shown
    assert "  optimize" not in shown
    for command in ("compile", "check", "simulate", "view", "compare"):
        assert without_extras(command, ONE_F_ONE_B).returncode == 0
    for arguments, module in [
        (["optimize", ONE_F_ONE_B], "search.optimize_command"),
        (["check", ONE_F_ONE_B, "--for microbatches=any"], "prove.prove_command"),
        (["compare", ONE_F_ONE_B, "zb_h1 --diff"], "difference.diff_command"),
    ]:
        done = without_extras(*arguments)
        assert done.returncode == 2
        assert f"`schedlang.extras.{module}`" in done.stderr


def test_a_small_command_hardly_looks_for_garbage() -> None:
    """All that it makes is gone when its process ends. With Python's own threshold it would look for
    garbage more than a hundred times.
    """
    lines = "import gc, sys; from schedlang.cli.main import main; main(); print(sum(each['collections'] for each in gc.get_stats()), file=sys.stderr)"
    command = [sys.executable, "-c", lines, "simulate", ONE_F_ONE_B]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True
    )
    assert int(result.stderr) < 40


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert schedlang.__version__ == project["version"]
    with pytest.raises(SystemExit) as caught:
        exit_code("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"schedc {project['version']}\n"


def test_public_names_are_imported_when_they_are_used() -> None:
    """The table that the program reads, and the imports that mypy reads, say the same."""
    tree = ast.parse(Path(schedlang.__file__).read_text())
    nodes = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level == 0
    ]
    seen = {
        name.name: node.module for node in nodes if node.module for name in node.names
    }
    assert dir(schedlang) == sorted(schedlang.__all__)
    for name in schedlang.__all__:
        assert getattr(schedlang, name) is getattr(sys.modules[str(seen[name])], name)
    assert {
        name for name, module in seen.items() if str(module).startswith("schedlang.")
    } == set(schedlang.__all__)
    with pytest.raises(AttributeError, match="has no `nothing`"):
        schedlang.nothing  # noqa: B018


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m schedlang show {ONE_F_ONE_B} -p microbatches=4000 | head -c 1"
    result = subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stderr == ""


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = dict(os.environ, XDG_CACHE_HOME=str(tmp_path / "file"))
    subprocess.run(
        [sys.executable, "-m", "schedlang", "compile", ONE_F_ONE_B],
        env=environment,
        check=True,
        timeout=60,
        stdout=subprocess.DEVNULL,
    )


def test_check(tmp_path: Path) -> None:
    explicit = str(PROGRAMS / "1f1b_explicit.sched")
    table = schedc("check", explicit, "-p microbatches=2 --transport all")
    assert table.returncode == 1
    verdicts = [line.split(maxsplit=1) for line in table.stdout.splitlines()]
    assert [verdict for name, verdict in verdicts if name != "nccl"] == ["proved"] * 7
    assert (
        "error[first-use]: rank 2 waits at its first batch for rank 0"
        in dict(verdicts)["nccl"]
    )
    plan = str(tmp_path / "plan.json")
    assert schedc("compile", explicit, "-p microbatches=2 -o", plan).returncode == 0
    assert schedc("check", plan, "--transport all").stdout == table.stdout
    found = json.loads(schedc("check", plan, "--transport nccl --json").stdout)
    assert [
        each["code"] for verdict in found["verdicts"] for each in verdict["diagnostics"]
    ] == ["first-use"]
    assert (
        schedc("compile", explicit, "-p microbatches=2 --transport nccl").returncode
        == 1
    )
    assert schedc("check", explicit).stdout == "proved for portable\n"


@pytest.mark.slow
def test_check_of_many_sizes() -> None:
    """They are checked by several processes, which come from one that has no other threads."""
    sizes = "--for ranks=2..4 --for microbatches=1..6"
    assert (
        schedc_process("check", ONE_F_ONE_B, sizes).stdout
        == "18 sizes proved, 0 refused by the program's own `require`\n"
    )
    explicit = str(PROGRAMS / "1f1b_explicit.sched")
    wrong = schedc_process("check", explicit, sizes, "--transport nccl")
    assert wrong.returncode == 1
    assert (
        "note: the smallest size where this is so: ranks = 3, microbatches = 2\n"
        in wrong.stderr
    )
    for options in ("--for ranks", "--for ranks=4..2", "--transport mpi"):
        assert schedc("check", ONE_F_ONE_B, options).returncode == 2
    large = "--for ranks=1..1000000 --for microbatches=1..2"
    for options in (f"--for ranks=1..{10**20}", large, f"{sizes} {sizes}"):
        refused = schedc("check", ONE_F_ONE_B, options)
        assert refused.returncode == 2
        assert "Traceback" not in refused.stderr


def test_which_sizes_hold() -> None:
    sizes = "--for ranks=2..4 --for microbatches=1..6"
    explicit = str(PROGRAMS / "1f1b_explicit.sched")
    wrong = schedc_process("check", explicit, sizes, "--transport nccl")
    assert wrong.stdout == (
        "15 sizes proved, 0 refused by the program's own `require`, 3 wrong\n\n"
        "microbatches  1 2 3 4 5 6\n"
        "   ranks = 2  . . . . . .\n"
        "   ranks = 3  . a . . . .\n"
        "   ranks = 4  . a a . . .\n\n"
        ".  proved\n"
        "a  error[first-use]: 3 sizes, the smallest ranks = 3, microbatches = 2: rank 1 waits at its "
        "first batch for rank 0, which never comes to one\n"
    )
    done = schedc_process("check", explicit, sizes, "--transport nccl --json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert [document[name] for name in ("proved", "refused", "wrong")] == [15, 0, 3]
    (reason,) = document["reasons"]
    assert (reason["sizes"], reason["verdict"]) == (3, "wrong")
    assert reason["smallest"] == {"ranks": 3, "microbatches": 2}
    assert reason["diagnostics"][0]["code"] == "first-use"
    failing = [
        tuple(size["params"].values())
        for size in document["sizes"]
        if size["reason"] == 0
    ]
    assert failing == [(3, 2), (4, 2), (4, 3)]


@pytest.mark.core
def test_what_is_wrong_at_every_size_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by `compile`, and before a size is compiled."""

    def compile(*_: object) -> None:
        pytest.fail("a size was compiled")

    monkeypatch.setattr("schedlang.cli.sizes.check_range", compile)
    right = Path(ONE_F_ONE_B).read_text()
    program = tmp_path / "wrong.sched"
    for wrong in (
        right.replace("F(m)", "F(m", 1),
        right.replace("F(m)", "F(mm)", 1),
        right.replace("param ranks", "parm ranks", 1),
    ):
        program.write_text(wrong)
        said = schedc("compile", str(program))
        done = schedc(
            "check", str(program), "--for ranks=2..40 --for microbatches=1..9"
        )
        assert (done.returncode, done.stdout, done.stderr) == (1, "", said.stderr)
    done = schedc("check", ONE_F_ONE_B, "--for rnks=2..40")
    assert done.stderr.startswith("error[unknown-parameter]")
    assert "there is `ranks`" in done.stderr


@pytest.mark.slow
def test_sizes_that_are_refused() -> None:
    """Each `require` is a reason of its own, and none makes the program wrong."""
    dualpipe = str(PROGRAMS / "dualpipe.sched")
    done = schedc_process("check", dualpipe, "--for ranks=2..3 --for microbatches=1..6")
    assert done.returncode == 0
    grid = done.stdout.splitlines()[2:5]
    assert grid == [
        "microbatches  1 2 3 4 5 6",
        "   ranks = 2  - - - . - .",
        "   ranks = 3  - - - - - -",
    ]
    assert done.stdout.count("\n-  refused: ") == 2
    sizes = "--for ranks=2..2 --for microbatches=1..6"
    document = json.loads(schedc_process("check", dualpipe, sizes, "--json").stdout)
    assert [size["reason"] for size in document["sizes"]] == [0, 1, 0, None, 0, None]
    # A grid that is too large stands in tens, and equal rows are one.
    large = schedc_process(
        "check", dualpipe, "--for ranks=2..3 --for microbatches=1..60"
    )
    assert large.stdout.splitlines()[2:7] == [
        "ranks = 2, microbatches = 1..60",
        "       1 ---.-.-.-. -.-.-.-.-. -.-.-.-.-. -.-.-.-.-. -.-.-.-.-.",
        "      51 -.-.-.-.-.",
        "ranks = 3, microbatches = 1..60",
        "  - 1..60",
    ]


def test_the_grid_on_the_page_is_that_of_the_command() -> None:
    page = (DOCS / "commands.md").read_text(encoding="utf-8")
    shown = re.search(
        r"^\$ schedc (check .*)\n([^`]*?)^```", page.replace("`require`", "R"), re.M
    )
    assert shown
    printed = schedc_process(*shown[1].split()).stdout
    assert printed.replace("`require`", "R") == shown[2]


def test_warnings_stand_beside_a_verdict() -> None:
    explicit = str(PROGRAMS / "1f1b_explicit.sched")
    for options, expected in [
        (
            [],
            "warning[mixed-transfers]: ranks 0 and 1 exchange batches as well as single transfers\n",
        ),
        (["--format github"], "::warning file="),
        (["--format json"], '"severity": "warning"'),
    ]:
        done = schedc("compile", explicit, "--transport nccl", *options)
        assert done.returncode == 0
        assert expected in done.stderr
        assert "no deadlock" in done.stdout
    assert schedc("compile", explicit).stderr == ""
    table = schedc("check", explicit, "--transport all")
    assert table.returncode == 0
    assert {line.split(maxsplit=1)[1] for line in table.stdout.splitlines()} == {
        "proved"
    }
    assert table.stderr.count("warning[") == 1
    verdicts = json.loads(schedc("check", explicit, "--transport all --json").stdout)[
        "verdicts"
    ]
    assert {each["transport"] for each in verdicts if each["warnings"]} == {"nccl"}


def test_a_run_that_cannot_end_well_does_not_begin() -> None:
    pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
    trace = [ONE_F_ONE_B, "--trace /no/such/folder/run.json"]
    steps = [str(PROGRAMS / "pipedream.sched"), "--steps 10000000000"]
    for options, complaint in [
        (trace, "there is no folder `/no/such/folder`"),
        (steps, "updates are more than"),
    ]:
        done = schedc("run", *options)
        assert done.returncode == 2
        assert complaint in done.stderr
