"""Compiling takes time linear in the actions: executed lines are counted at two sizes, so that no
clock decides.
"""

import sys
from types import FrameType
from typing import Any

import pytest

from schedlang import compile, read_source
from schedlang.compiler import compile_tree
from schedlang.language.loading import load
from schedlang.language.syntax import Schedule
from tests.support.paths import PROGRAMS

#: How many more lines an action may take at the larger size.
MORE = 1.02


@pytest.fixture(scope="module", autouse=True)
def all_is_loaded() -> None:
    """What is imported at its first use is no work on actions."""
    for name in ("interleaved_1f1b", "zb_1p", "1f1b_v"):
        compile(name).to_json()


def lines_per_action(
    source: Any, tree: Schedule, ranks: int, microbatches: int
) -> float:
    """The lines of Python, and rounds of comprehensions, for each action of the plan and of its
    text.
    """
    lines = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        plan = compile_tree(
            source, tree, {"ranks": ranks, "microbatches": microbatches}
        )
        plan.to_json()
    finally:
        sys.settrace(before)
    return lines / sum(map(len, plan.ranks))


PLAIN = [
    "1f1b",
    "chimera",
    "dualpipe",
    "gpipe",
    "interleaved_1f1b",
    "pipe_offload",
    "seq1f1b",
    "wpipe",
    "zb_h1",
]
#: With passes that look for a better order.
SEARCHED = ["1f1b_v", "v_half", "v_zb", "zb_1p"]


def test_most_of_the_work_is_done_by_columns() -> None:
    """What is left of it on each action is the program itself, and a walk over some of the events."""
    loaded = load(read_source(PROGRAMS / "interleaved_1f1b.sched"))
    small, large = (
        lines_per_action(*loaded, 4, microbatches) for microbatches in (64, 256)
    )
    assert large < small < 30


@pytest.mark.parametrize("name", PLAIN + SEARCHED)
def test_lines_per_action(name: str) -> None:
    """In microbatches and in ranks."""
    loaded = load(read_source(PROGRAMS / f"{name}.sched"))
    small = lines_per_action(*loaded, 4, 16)
    assert lines_per_action(*loaded, 4, 64) < MORE * small
    assert lines_per_action(*loaded, 12, 24) < MORE * small
