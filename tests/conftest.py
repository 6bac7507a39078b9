"""Golden files: `pytest --update-golden` writes what the others are compared with."""

from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PROGRAMS = TESTS.parent / "programs"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write golden files instead of comparing")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, Path], None]:
    """Compare a text with a file."""

    def compare(text: str, path: Path) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} does not exist: run pytest --update-golden and read what it wrote"
        assert text == path.read_text(encoding="utf-8")

    return compare
