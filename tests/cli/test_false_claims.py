"""A program with claims that do not hold: what can be drawn or measured is, with the claims marked."""

import argparse
import json
import re
from pathlib import Path

import pytest

from schedlang.cli.command_table import parse
from schedlang.cli.serve import PageServer
from schedlang.compiler import ClaimError, compile
from tests.support.commands import schedc

#: GPipe, which claims the memory of 1F1B and less time than it takes.
FALSE = """\
schedule mine {
    param ranks = 3
    param microbatches = 4
    rank r {
        for m in 0 .. microbatches { F(m) }
        for m in 0 .. microbatches { B(m) }
        assert peak(r) <= 4 - r, "it holds as little as 1F1B"
    }
    assert makespan <= 10
}
"""
OF_ALL = "a claim does not hold: `makespan <= 10` is 18 <= 10"
OF_RANKS = "it holds as little as 1F1B: `peak(r) <= 4 - r` is 4 <= 3, on rank 1"


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The program's file, in the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("false.sched").write_text(FALSE)
    return "false.sched"


@pytest.mark.core
@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("simulate", "makespan              18 "),
        ("simulate --why", "critical path 18"),
        ("view", "makespan 18, 33.3% idle"),
        ("view --actions", "rank 2, stage 2"),
        ("view --json", "traceEvents"),
        ("compare", "3 x 4"),
        ("compare 1f1b --diff -p ranks=3 -p microbatches=4", "rank 0, stage 0"),
    ],
)
def test_what_can_be_drawn_or_measured_is(
    command: str, printed: str, program: str
) -> None:
    word, *others = command.split()
    done = schedc(word, program, *others)
    assert done.returncode == 1
    assert printed in done.stdout
    assert OF_ALL in done.stderr
    assert OF_RANKS in done.stderr


def test_other_commands_refuse_it(program: str) -> None:
    for command in (
        ["compile", program, "-o", "plan.json"],
        ["check", program],
        ["export", program, "--to", "torch-csv"],
        ["run", program],
    ):
        done = schedc(*command)
        assert done.returncode == 1
        assert OF_ALL in done.stderr
    assert not Path("plan.json").exists()


@pytest.mark.core
def test_pictures_mark_claims_and_their_ranks(program: str) -> None:
    lines = schedc("view", program).stdout.splitlines()
    assert [line for line in lines if line.startswith("! ")] == [
        f"! {OF_ALL}",
        f"! the schedule claims: {OF_RANKS}",
    ]
    rows = [line[:7] for line in lines if line.startswith("rank")]
    assert rows == ["rank 0 ", "rank 1!", "rank 2!"]
    rows = schedc("simulate", program).stdout.splitlines()[:3]
    assert [row[:7] for row in rows] == ["rank 0 ", "rank 1!", "rank 2!"]
    assert f"! {program}: {OF_ALL}" in schedc("compare", program, "1f1b").stdout
    # Text of an SVG stands in it as it is read, but for `<`.
    assert schedc("view", program, "-o", "false.svg").returncode == 1
    picture = Path("false.svg").read_text()
    assert f">! {OF_ALL.replace('<', '&lt;')}</text>" in picture
    assert re.findall(r">(rank \d!?)<", picture) == ["rank 0", "rank 1!", "rank 2!"]
    assert schedc("view", program, "-o", "false.html").returncode == 1
    page = Path("false.html").read_text()
    assert '"wrongRanks":[1,2]' in page


def test_the_served_page_has_the_picture_and_the_claims(program: str) -> None:
    options: argparse.Namespace = parse(["view", program, "--serve"])
    with PageServer(options) as server:
        drawn = server.draw({})
        assert drawn.wrong is None
        (picture,) = drawn.pictures
        assert picture.wrong_ranks == [1, 2]
        assert f"! {OF_ALL}" in json.dumps(server.data(""), ensure_ascii=False)
        # What was said of one drawing is not said again of the next one.
        assert len(server.draw({}).pictures[0].wrong) == 2
    assert options.wrong == []


def test_ranks_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("costs.json").write_text('{"activation_bytes": [10], "weights_bytes": [0]}')
    sizes = ["-p", "ranks=3", "-p", "microbatches=4", "--costs", "costs.json"]
    done = schedc("view", "gpipe", *sizes, "--capacity-bytes", "50,50,35")
    assert done.returncode == 1
    assert "! rank 2 holds 40 bytes at its peak" in done.stdout
    assert "\nrank 2!" in done.stdout
    assert "\nrank 1 " in done.stdout
    assert "error[capacity]" in done.stderr


def test_the_error_has_the_plan() -> None:
    with pytest.raises(ClaimError) as caught:
        compile(FALSE)
    plan = caught.value.plan
    assert plan.wrong == tuple(caught.value.diagnostics)
    assert len(plan.ranks) == 3
    assert plan.wrong[0].ranks == ()
    assert plan.wrong[1].ranks == (1, 2)
