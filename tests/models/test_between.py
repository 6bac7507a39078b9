"""Models with tensors of every kind between their stages, under every schedule that recomputes."""

import random
import re
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS
from tests.support.ranks import Run

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
from tests.models.between import EXTRAS, LAYERS, WAY
from tests.models.features import name_of
from tests.models.schedules import RECOMPUTING
from tests.models.test_random import smaller
from tests.models.verdicts import EQUAL, ROUNDING, Cell, Verdict, outcomes

pytestmark = pytest.mark.processes

#: How many models a block has. The core has the first block, which is smaller.
SMALL = 6
SIZE = 38


def cells_of(seed: int) -> list[Cell]:
    """Models of one to four stages, each under a schedule; the block's number is the seed."""
    draw = random.Random(seed)
    cells = []
    for number in range(SIZE if seed else SMALL):
        stages = [
            [
                *draw.choices([*LAYERS], k=draw.randint(1, 2)),
                *draw.sample([*EXTRAS], draw.randint(0, 3)),
            ]
            for _ in range(draw.randint(1, 4))
        ]
        column = [*RECOMPUTING][(seed + number) % len(RECOMPUTING)]
        cells.append((name_of(stages, WAY), column))
    return cells


@pytest.mark.core
@pytest.mark.blocks(14, large=True)
def test_a_stage_is_given_gradients_where_it_has_them_alone(
    run_ranks: Run, tmp_path: Path, block: int
) -> None:
    def wrong_of(cells: list[Cell]) -> dict[Cell, Verdict]:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        verdicts = outcomes(run_ranks, folder, dict.fromkeys(cells))
        return {
            cell: verdict
            for cell, verdict in verdicts.items()
            if verdict.kind not in (EQUAL, ROUNDING)
        }

    smallest = {}
    for cell, verdict in wrong_of(cells_of(block)).items():
        # As long as anything smaller is wrong as well, that is the case to look at.
        while still := wrong_of([*smaller(cell)]):
            cell, verdict = next(iter(still.items()))
        smallest[cell] = verdict
    assert smallest == {}


def test_all_schedules_of_the_gallery_that_recompute_are_tried() -> None:
    texts = {path.stem: path.read_text() for path in PROGRAMS.glob("*.sched")}
    recomputing = {
        name for name, text in texts.items() if re.search(r"^[^#]*\bR\(", text, re.M)
    }
    assert recomputing
    assert recomputing <= RECOMPUTING.keys()
