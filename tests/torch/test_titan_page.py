"""What docs/torch.md says of programs holds, without torchtitan."""

import re

import pytest

from schedlang import compile
from schedlang.plan.torch_tables import export_table
from tests.support.paths import DOCS

RANKS = 4
#: For each kind of placement, the rank of each stage, as torchtitan builds them.
PLACES = {
    "1F1B": [0, 1, 2, 3],
    "Interleaved1F1B": [0, 1, 2, 3, 0, 1, 2, 3],
    "ZBVZeroBubble": [0, 1, 2, 3, 3, 2, 1, 0],
}
ROWS = re.findall(
    r"^\| \w+[^|]* \| `(\w+)` \| (.*) \|$",
    (DOCS / "torch.md").read_text(encoding="utf-8"),
    re.M,
)


@pytest.mark.parametrize(("schedule", "programs"), ROWS)
def test_programs_place_their_stages_as_torchtitan_does(
    schedule: str, programs: str
) -> None:
    for name in re.findall(r"`(\w+)`", programs):
        plan = compile(name, {"ranks": RANKS, "microbatches": 8})
        assert list(plan.placement) == PLACES[schedule], name
        assert export_table(plan, "torch-csv-compute").count("\n") == RANKS


def test_all_rows_of_the_table_are_looked_at() -> None:
    assert [schedule for schedule, _ in ROWS] == list(PLACES)
