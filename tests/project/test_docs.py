"""The pages on costs and bubbles name everything that there is, and their examples work."""

import re
import runpy
from pathlib import Path

import pytest

from schedlang import compile, simulate
from schedlang.report.bubbles.attribution import CAUSES
from schedlang.schedule.costs import COSTS, read_costs
from tests.support.paths import DOCS, GALLERY, ROOT


def page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text(encoding="utf-8")


def test_every_cost_is_explained_and_the_example_is_one(tmp_path: Path) -> None:
    text = page("costs")
    assert [name for name in COSTS if f"`{name}`" not in text] == []
    example = re.search(r"^```yaml.*?\n(.*?)^```", text, re.M | re.S)
    assert example
    (tmp_path / "costs.yaml").write_text(example[1])
    costs = read_costs(tmp_path / "costs.yaml")
    execution = simulate(compile("1f1b"), costs)
    assert execution.peak_bytes == (
        4 * 1.2e9 + 5e9,
        3 * 1.2e9 + 4e9,
        2 * 1.2e9 + 4e9,
        1.2e9 + 5e9,
    )


def test_every_cause_is_explained() -> None:
    text = page("bubbles")
    assert sorted(re.findall(r"^\| (\w+) \| ", text, re.M)) == sorted(
        [*CAUSES, "cause"]
    )


@pytest.mark.slow
def test_the_gains_of_published_schedules_are_those_of_their_command() -> None:
    """Of each table a row, which shows what the page says; the others take as long again."""
    lines = page("published-gains").splitlines()
    command = runpy.run_path(str(ROOT / "benchmarks" / "gains.py"))
    for text in (
        "HEAD",
        "VOCABULARY_TEXT",
        "RECYCLE_TEXT",
        "RECYCLE_REASONS",
        "SLIMPIPE_TEXT",
    ):
        assert command[text] in page("published-gains")
    setting = command["SETTINGS"][0]
    assert command["vocabulary_row"](setting, command["gains_of"](setting)) in lines
    assert command["recycle_row"](3, 4, 6) in lines
    assert command["slimpipe_row"](8, 32) in lines
    assert command["PIPEMARE_TEXT"] in page("published-gains")
    assert command["pipemare_row"](107) in lines
    assert command["STP_TEXT"] in page("published-gains")
    assert command["stp_row"](2, 0.2) in lines
    assert command["BPIPE_TEXT"] in page("published-gains")
    assert command["bpipe_row"](8) in lines
    for text in ("MARIO_TEXT", "MARIO_REASONS", "DYNAPIPE_TEXT", "DYNAPIPE_REASONS"):
        assert command[text] in page("published-gains")
    assert command["mario_row"](8, 8) in lines
    assert command["dynapipe_row"](0.5) in lines


@pytest.mark.slow
def test_the_table_of_transports_is_that_of_its_command() -> None:
    """Of some programs, which show what the page says; the others take as long again."""
    lines = page("transport-table").splitlines()
    command = runpy.run_path(str(ROOT / "benchmarks" / "transports.py"))
    assert page("transport-table").startswith(command["HEAD"])
    for name in ("1f1b", "interleaved_1f1b", "dualpipe", "zb_h1"):
        found = [
            command["makespans"](name, latency) for latency in command["LATENCIES"]
        ]
        assert command["row"](name, found) in lines
    assert [line.split()[1] for line in lines if line.startswith("| ")][2:-1] == [
        path.stem for path in GALLERY
    ]
