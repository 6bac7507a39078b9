"""Models that hypothesis makes of features, under schedules that it picks: trained as alone, or
refused. `pytest tests/models/test_random.py --random 20000` tries so many.
"""

from collections.abc import Iterable, Iterator
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.support.ranks import Run

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
from tests.models.features import blocks, name_of, parts_of, ways
from tests.models.rows import random_row, read_row, write_row
from tests.models.schedules import MAKERS
from tests.models.verdicts import EQUAL, NOT_ALONE, ROUNDING, Cell, Verdict, outcomes

pytestmark = pytest.mark.processes

#: Processes are started for so many models at a time.
AT_ONCE = 60

#: What these do in place is refused, or fails alone behind some other layers; a weight of another
#: stage is refused everywhere; a compiled block takes a second. What a seed in a forward does to others depends on which of them are in its process.
NOT_MIXED = {
    "compiled block",
    "input changed in place",
    "input clamped without gradient",
    "relu in place first",
    "seeds in the forward",
    "weight clamped in the forward",
    "weight decayed in the forward",
    "weight of another stage",
}
#: What is refused under some schedules: each time new processes are started, so it is drawn seldom.
REFUSED_BY_SOME = {
    "batch norm",
    "buffer replaced",
    "buffers in one memory",
    "codebook",
    "counter in a buffer",
    "counter in an attribute",
    "counter that nothing reads",
    "counting after accumulation",
    "decay switched on",
    "evaluation between",
    "fake quantize",
    "float8 delayed",
    "float8 delayed gradients",
    "float8 delayed in an attribute",
    "float8 delayed in one buffer",
    "frozen by a gradient hook",
    "frozen by the third call",
    "frozen for a call",
    "gradient in a checkpoint",
    "gradient in the forward",
    "gradient of weights",
    "gradient wide",
    "hook after accumulation",
    "loss of its own",
    "moving average of outputs",
    "new spectral norm",
    "numpy random numbers",
    "old spectral norm",
    "optimizer in the backward",
    "other norms",
    "own generator",
    "python random numbers",
    "shared layer by hand",
    "thawed between",
    "thawed by the third call",
}
SELDOM = 50


def often(names: list[str]) -> list[str]:
    """The names of features, as often as they are to be drawn."""
    free = [name for name in names if name not in NOT_MIXED | REFUSED_BY_SOME]
    # As lists have it: each of the free ones stands there 50 times, each of the others once.
    return free * SELDOM + [name for name in names if name in REFUSED_BY_SOME]


@st.composite
def models(draw: st.DrawFn) -> Cell:
    """A model of one to three blocks in each of up to four stages, a way to train it, a schedule."""
    block = st.sampled_from(often(blocks()))
    stages = draw(
        st.lists(st.lists(block, min_size=1, max_size=3), min_size=1, max_size=4)
    )
    way = draw(st.sampled_from(often(ways())))
    return name_of(stages, way), draw(st.sampled_from(list(MAKERS)))


def test_random_models(
    run_ranks: Run,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    random_models: tuple[int, int],
) -> None:
    """Those of a block, whose number is the seed; a block that is kept is not tried again."""
    number, count = random_models
    rows = request.config.getoption("--rows")
    kept = read_row(rows, random_row(number)) or {}
    verdicts: dict[str, Verdict] = kept if len(kept) == count else {}
    wrong: dict[Cell, Verdict] = {}

    def judge(cells: Iterable[Cell]) -> dict[Cell, Verdict]:
        with TemporaryDirectory(dir=tmp_path) as folder:
            return outcomes(run_ranks, Path(folder), dict.fromkeys(cells))

    def wrong_of(found: dict[Cell, Verdict]) -> dict[Cell, Verdict]:
        """Those that are neither as alone nor refused."""
        return {
            cell: verdict
            for cell, verdict in found.items()
            if not verdict.is_right and verdict.kind != NOT_ALONE
        }

    # All are tried, and what is wrong is made smaller here: to hypothesis, a list would be one.
    @seed(number)
    @settings(
        max_examples=ceil(count / AT_ONCE),
        phases=[Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(models(), min_size=min(count, AT_ONCE), max_size=AT_ONCE, unique=True)
    )
    def check(cells: list[Cell]) -> None:
        found = judge(cells[: count - len(verdicts)])
        wrong.update(wrong_of(found))
        for (name, column), verdict in found.items():
            verdicts[f"{len(verdicts)} {name} under {column}"] = verdict

    if not verdicts:
        check()
    smallest = {}
    for cell, verdict in wrong.items():
        # As long as anything smaller is wrong as well, that is the case to look at.
        while still := wrong_of(judge(smaller(cell))):
            cell, verdict = next(iter(still.items()))
        smallest[cell] = verdict
    assert smallest == {}
    write_row(rows, random_row(number), verdicts)


def test_models_that_were_wrong_once(run_ranks: Run, tmp_path: Path) -> None:
    """What such models have found in the runtime, as small as they came."""
    cells = [("weight hook + reentrant checkpoint || foreach adam", "late_split")]
    verdicts = outcomes(run_ranks, tmp_path, cells)
    assert all(verdict.kind in (EQUAL, ROUNDING) for verdict in verdicts.values()), (
        verdicts
    )


def smaller(cell: Cell) -> Iterator[Cell]:
    """A model without one of its stages, or without one of their blocks."""
    name, column = cell
    stages, way = parts_of(name)
    for number, stage in enumerate(stages):
        rest = [stages[:number], stages[number + 1 :]]
        if len(stages) > 1:
            yield name_of([*rest[0], *rest[1]], way), column
        for place in range(len(stage)):
            if len(stage) > 1:
                fewer = stage[:place] + stage[place + 1 :]
                yield name_of([*rest[0], fewer, *rest[1]], way), column
