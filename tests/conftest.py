"""Golden files, `pytest --update-golden` writes them; how many plans to try, and what came of it:
`make explore`.
"""

import gc
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.ranks import RankServer, Run, runner
from tests.support.selection import COLLECTED, in_part, mark, part, targets_of
from tests.support.sizes import LARGE, MORE, USUAL, sizes

# How long one example takes depends on what else the machine does. Where a test does not say how many
# there are, hypothesis makes up 100.
settings.register_profile(LARGE, deadline=None)
settings.register_profile(USUAL, deadline=None, max_examples=100 // MORE)
settings.load_profile(USUAL)

# Until all tests are collected, there is no garbage to look for.
gc.disable()


def blocks(text: str) -> range:
    first, _, end = text.partition("..")
    return range(int(first), int(end))


#: So many random models are kept as one row, where `--rows` says so.
MODELS_AT_ONCE = 500


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write golden files instead of comparing",
    )
    parser.addoption(
        "--blocks",
        type=blocks,
        metavar="A..B",
        help="try these blocks of random and damaged plans",
    )
    parser.addoption(
        "--tally",
        type=Path,
        metavar="FOLDER",
        help="leave what tests count, for tools/pages/verification.py",
    )
    parser.addoption(
        "--rows",
        type=Path,
        metavar="FOLDER",
        help="keep the rows of the table of models, for tools/pages/models.py; one that is there "
        "is not made again",
    )
    parser.addoption(
        "--random", type=int, default=20, metavar="N", help="try so many random models"
    )
    parser.addoption(
        "--part",
        type=part,
        default=(0, 1),
        metavar="K/N",
        help="run part K of N of the tests only",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a `block` runs once for each block of plans, and one with `random_models` for
    each of so many models at most; the block's number is the seed.
    """
    if "block" in metafunc.fixturenames:
        few = metafunc.definition.get_closest_marker("blocks")
        default = list[object](range(few.args[0] if few else 1))
        if few and few.kwargs.get("large"):
            default = sizes(default, lambda block: block != 0)
        metafunc.parametrize("block", metafunc.config.getoption("--blocks") or default)
    if "random_models" in metafunc.fixturenames:
        count = metafunc.config.getoption("--random")
        blocks = [
            (number, min(MODELS_AT_ONCE, count - begin))
            for number, begin in enumerate(range(0, count, MODELS_AT_ONCE))
        ]
        metafunc.parametrize(
            "random_models", blocks, ids=[str(number) for number, _ in blocks]
        )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Mark the tests of `make test`, before `-m` chooses, and leave out the other parts."""
    mark(items, targets_of(config.getini("markers")))
    config.stash[COLLECTED] = list(items)
    chosen = config.getoption("--part")
    config.hook.pytest_deselected(
        items=[item for item in items if not in_part(item, *chosen)]
    )
    items[:] = [item for item in items if in_part(item, *chosen)]


def pytest_collection_finish() -> None:
    """What is imported and collected stays until the end, and is not looked through for garbage."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Counter[str]]:
    """What a test counts; a test that runs again replaces what it counted before."""
    counts: Counter[str] = Counter()
    yield counts
    folder = request.config.getoption("--tally")
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{re.sub(r'[^a-z0-9]+', '_', request.node.name)}.json"
        found = {
            "test": request.node.originalname,
            "params": request.node.callspec.params,
            "counts": counts,
        }
        path.write_text(json.dumps(found))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, Path], None]:
    """Compare a text with a file."""

    def compare(text: str, path: Path) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), (
            f"{path} does not exist: run pytest --update-golden and read what it wrote"
        )
        assert text == path.read_text(encoding="utf-8")

    return compare


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    """One process that forks the ranks of all tests, so that torch is imported once."""
    server = RankServer()
    yield server
    server.stop()


@pytest.fixture
def run_ranks(rank_server: RankServer, tmp_path: Path) -> Run:
    """Call a function on so many ranks, as real processes: `run_ranks(function, 4, *arguments)`."""
    return runner(rank_server, tmp_path)
