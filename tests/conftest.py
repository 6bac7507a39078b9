"""Golden files, `pytest --update-golden` writes them; and how long to explore, `make explore`."""

from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PROGRAMS = TESTS.parent / "programs"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing")
    parser.addoption("--explore", type=int, default=1, metavar="N", help="try N times as many damaged plans")


@pytest.fixture
def times(request: pytest.FixtureRequest) -> int:
    """How many times as many damaged plans are tried as in the default run."""
    return int(request.config.getoption("--explore"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, Path], None]:
    """Compare a text with a file."""

    def compare(text: str, path: Path) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} does not exist: run pytest --update-golden and read what it wrote"
        assert text == path.read_text(encoding="utf-8")

    return compare
