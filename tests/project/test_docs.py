"""The pages on costs and bubbles name everything that there is, and their examples work."""

import re
from pathlib import Path

import pytest

from schedlang import compile, simulate
from schedlang.report.bubbles.attribution import CAUSES
from schedlang.schedule.costs import COSTS, read_costs
from tests.support.paths import DOCS, GALLERY
from tools.pages import gains, transport_table
from tools.pages.tables import with_rows

#: Which row of a table is looked at, if it is not the first.
QUICK = {"PipeMare": 3}


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
    message = 33.5e6
    assert execution.peak_bytes == (
        4 * 1.2e9 + 5e9 + 6 * message,
        3 * 1.2e9 + 4e9 + 6 * message,
        2 * 1.2e9 + 4e9 + 6 * message,
        1.2e9 + 5e9 + 3 * message,
    )


def test_every_cause_is_explained() -> None:
    _, text = page("pictures").split("## Why ranks are idle")
    assert sorted(re.findall(r"^\| (\w+) \| ", text, re.M)) == sorted(
        [*CAUSES, "cause"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("section", gains.SECTIONS, ids=lambda section: section.title)
def test_the_gains_of_published_schedules_are_those_of_their_command(
    section: gains.Section,
) -> None:
    """A row of each table; the others take as long again."""
    place = QUICK.get(section.title, 0)
    (row,) = section.rows((section.sizes[place],))
    assert row == rows_of(page("reports/published-gains"), section.title)[place]


def test_every_published_schedule_has_a_section_and_a_row_for_each_size() -> None:
    text = page("reports/published-gains")
    assert re.findall("^## (.*)", text, re.M) == [each.title for each in gains.SECTIONS]
    for section in gains.SECTIONS:
        assert len(rows_of(text, section.title)) == len(section.sizes)


def rows_of(text: str, title: str) -> list[str]:
    """The rows of the table in a section of a page."""
    _, _, behind = text.partition(f"## {title}\n")
    lines = re.findall(r"^\|.*", behind.partition("\n## ")[0], re.M)
    return lines[2:]


def test_only_the_rows_of_a_table_are_written() -> None:
    text = page("reports/published-gains")
    written = with_rows(text, "STP", ["| a |", "| b |"])
    assert rows_of(written, "STP") == ["| a |", "| b |"]
    assert with_rows(written, "STP", rows_of(text, "STP")) == text
    with pytest.raises(ValueError, match="no table below `Nobody`"):
        with_rows(text, "Nobody", [])


@pytest.mark.slow
def test_the_table_of_transports_is_that_of_its_command() -> None:
    """Some programs, which show what the page says; the others take as long again."""
    lines = page("reports/transport-table").splitlines()
    for name in ("1f1b", "interleaved_1f1b", "dualpipe", "zb_h1"):
        found = [
            transport_table.makespans(name, latency)
            for latency in transport_table.LATENCIES
        ]
        assert transport_table.row(name, found) in lines
    assert [line.split()[1] for line in lines if line.startswith("| ")][2:-1] == [
        path.stem for path in GALLERY
    ]
