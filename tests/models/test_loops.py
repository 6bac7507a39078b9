"""Random models in random training loops, under schedules of the gallery at random sizes."""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import pytest

from tests.support.ranks import Run

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
from tests.models.between import EXTRAS, LAYERS, WAY
from tests.models.features import blocks, find, in_loop, name_of, ways
from tests.models.loops import WORDS
from tests.models.model import train_and_update
from tests.models.schedules import column, draw_column
from tests.models.test_random import NOT_MIXED, REFUSED_BY_SOME, smaller
from tests.models.verdicts import (
    EQUAL,
    NOT_ALONE,
    REFUSED,
    ROUNDING,
    Cell,
    Verdict,
    is_for,
    outcomes,
)

pytestmark = pytest.mark.processes

#: How many models a block has. The core has the first block, which is smaller.
SMALL = 6
SIZE = 12


def cells_of(seed: int) -> list[Cell]:
    """Models in loops, each under a schedule; the block's number is the seed."""
    draw = random.Random(seed)
    cells: list[Cell] = []
    while len(cells) < (SIZE if seed else SMALL):
        name = in_loop(draw_model(draw), draw_words(draw))
        under = draw_column(draw)
        # Of what is refused, each ends its processes: one in a block.
        has_refused = any(find(each).is_mistake for each, _ in cells)
        feature = find(name)
        if is_for(feature, column(under)) and not (feature.is_mistake and has_refused):
            cells.append((name, under))
    return cells


def draw_model(draw: random.Random) -> str:
    """One to four stages of blocks that are trained alike everywhere, or with tensors of every kind
    between them.
    """
    stages = draw.randint(1, 4)
    if draw.random() < 0.3:
        return name_of([_between(draw) for _ in range(stages)], WAY)
    simple = [name for name in blocks() if name not in NOT_MIXED | REFUSED_BY_SOME]
    trained = [name for name in ways() if name in simple and is_plain(name)]
    chosen = [draw.choices(simple, k=draw.randint(1, 2)) for _ in range(stages)]
    return name_of(chosen, draw.choice(trained))


def _between(draw: random.Random) -> list[str]:
    return [*draw.choices([*LAYERS]), *draw.sample([*EXTRAS], draw.randint(0, 2))]


def is_plain(way: str) -> bool:
    """Whether a feature leaves the loop to others."""
    model = find(way).model(2)
    return (
        model.script is train_and_update
        and model.scaler is None
        and model.loss_scale == 1
    )


def draw_words(draw: random.Random) -> list[str]:
    """Some words of some groups, one at least."""
    groups = groupby(WORDS, lambda name: WORDS[name].group)
    words = [draw.choice([*names]) for _, names in groups]
    return draw.sample(words, draw.randint(1, len(words)))


def simpler(cell: Cell) -> Iterator[Cell]:
    """A model without one of its words, of its stages, or of their blocks."""
    name, under = cell
    model, *words = name.split(" & ")
    for place in range(len(words)):
        if len(words) > 1:
            yield in_loop(model, words[:place] + words[place + 1 :]), under
    for fewer, _ in smaller((model, under)):
        yield in_loop(fewer, words), under


def is_wrong(cell: Cell, verdict: Verdict) -> bool:
    """Whether a mistake is not refused, or something else is refused or not trained alike."""
    right = (REFUSED,) if find(cell[0]).is_mistake else (EQUAL, ROUNDING, NOT_ALONE)
    return verdict.kind not in right


@pytest.mark.core
@pytest.mark.blocks(42, large=True)
def test_a_loop_trains_as_alone(run_ranks: Run, tmp_path: Path, block: int) -> None:
    def wrong_of(cells: Iterable[Cell]) -> dict[Cell, Verdict]:
        folder = tmp_path / str(len([*tmp_path.iterdir()]))
        folder.mkdir()
        verdicts = outcomes(run_ranks, folder, dict.fromkeys(cells))
        return {
            cell: verdict
            for cell, verdict in verdicts.items()
            if is_wrong(cell, verdict)
        }

    smallest = {}
    for cell, verdict in wrong_of(cells_of(block)).items():
        # As long as anything smaller is wrong as well, that is the case to look at.
        while still := wrong_of(simpler(cell)):
            cell, verdict = next(iter(still.items()))
        smallest[cell] = verdict
    assert smallest == {}


def test_loops_that_were_wrong_once(run_ranks: Run, tmp_path: Path) -> None:
    """What such loops have found in the runtime, as small as they came."""
    cells = [
        ("linear layers & scaler that is off", "1f1b"),
        ("linear layers & scaler that is off", "pipedream_2bw"),
        (
            "tied inside a stage || options by parameter & replaced before",
            "late_split",
        ),
        # Torch's fused SGD fails where a weight has its first gradient after the first update.
        (
            "matrix products + functional weights | experts || fused sgd & overflow at the begin"
            " & other optimizers",
            "zb_2p ranks=2 microbatches=5",
        ),
    ]
    verdicts = outcomes(run_ranks, tmp_path, cells)
    assert not any(is_wrong(*each) for each in verdicts.items()), verdicts


def test_the_first_blocks_have_every_word() -> None:
    """With many schedules: what is drawn is tried."""
    cells = [cell for block in range(10) for cell in cells_of(block)]
    drawn = Counter(word for name, _ in cells for word in name.split(" & ")[1:])
    assert drawn.keys() == WORDS.keys()
    assert len({under.split()[0] for _, under in cells}) > 30
