"""What tests of the runtime share."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.ranks import Run

if TYPE_CHECKING:
    from tests.support.training import Train


@pytest.fixture
def train(run_ranks: Run, tmp_path: Path) -> "Train":
    """Run `schedlang.runtime` as torchrun does: `train(4, program, "--steps", 3)`."""
    # It needs torch, which is not there for all tests.
    from tests.support.training import train

    return partial(train, run_ranks, tmp_path)
