"""What is generated from the source is as its writer would write it now."""

import pytest

from tests.support.paths import ROOT
from tools.pages.__main__ import FROM_SOURCE, files

#: Pages whose rows take long: tests/project/test_docs.py looks at some of these.
LONG = ("gains", "transports")
#: Pages of what torch does.
NEED_TORCH = ("gpu", "together")


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in FROM_SOURCE if each not in LONG])
def test_files_are_current(name: str) -> None:
    if name in NEED_TORCH:
        pytest.importorskip(
            "torch", reason="the checks need torch", exc_type=ImportError
        )
    for path, text in files(name).items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, (
            f"run `make regenerate WHAT={name}`"
        )
