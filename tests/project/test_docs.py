"""The pages on costs and bubbles name everything that there is, and their examples work."""

import re
from pathlib import Path

import pytest

from schedlang import compile, simulate
from schedlang.report.bubbles.attribution import CAUSES
from schedlang.schedule.costs import COSTS, read_costs
from tests.support.paths import DOCS, GALLERY
from tools.pages import gains, transports

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
    assert execution.peak_bytes == (
        4 * 1.2e9 + 5e9,
        3 * 1.2e9 + 4e9,
        2 * 1.2e9 + 4e9,
        1.2e9 + 5e9,
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
    text = page("reports/published-gains")
    assert gains.HEAD in text
    assert f"## {section.title}\n\n{section.text}\n" in text
    assert f"\n{section.reasons}\n" in text
    shown = section.sizes[QUICK.get(section.title, 0)]
    assert section.rows((shown,))[0] in text.splitlines()


@pytest.mark.slow
def test_the_table_of_transports_is_that_of_its_command() -> None:
    """Some programs, which show what the page says; the others take as long again."""
    lines = page("reports/transport-table").splitlines()
    assert page("reports/transport-table").startswith(transports.HEAD)
    for name in ("1f1b", "interleaved_1f1b", "dualpipe", "zb_h1"):
        found = [
            transports.makespans(name, latency) for latency in transports.LATENCIES
        ]
        assert transports.row(name, found) in lines
    assert [line.split()[1] for line in lines if line.startswith("| ")][2:-1] == [
        path.stem for path in GALLERY
    ]
