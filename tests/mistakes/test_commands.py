"""Command lines with a mistake: what each is told, and its exit code.

`commands.txt` has a line for each: the exit code, what is typed behind `schedc`, and a part of the
message. All are run in one folder; none may change what is in it, and none is answered with a
traceback, or with more than it takes.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.commands import schedc
from tests.support.paths import CASES, PROGRAMS
from tests.support.tables import rows

#: The program or plan is wrong; the command line is.
WRONG = 1
USAGE = 2

MISTAKES = rows(Path(__file__).with_name("commands.txt").read_text())


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


@pytest.mark.parametrize(("exit_code", "command", "message"), MISTAKES)
def test_mistake(exit_code: str, command: str, message: str, folder: Path) -> None:
    before = content(folder)
    done = schedc(command)
    assert message in done.stderr
    assert done.returncode == int(exit_code)
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
    assert len({command for _, command, _ in MISTAKES}) == len(MISTAKES) > 180


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
