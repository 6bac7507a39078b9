"""Blocks shared out among stages: against all cuts that there are."""

from itertools import combinations
from random import Random
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlang import Layout, Pipeline
from schedlang.runtime.model.partition import Partition, partition


def one(*placement: int) -> Layout:
    return Layout(placement, (Pipeline("", 0, len(placement), 8),))


def two(ranks: int, down: int, up: int) -> Layout:
    pipelines = Pipeline("down", 0, ranks, down), Pipeline("up", ranks, 2 * ranks, up)
    return Layout((*range(ranks), *reversed(range(ranks))), pipelines)


#: One stage per rank; a V, also one with a stage in its middle; two pipelines, also of different
#: weight.
MIRRORED = [
    one(0),
    one(0, 1, 2),
    one(0, 1, 2, 3),
    one(0, 1, 1, 0),
    one(0, 1, 2, 1, 0),
    two(3, 4, 4),
    two(4, 5, 3),
]
INTERLEAVED = [one(0, 1, 0, 1), one(0, 1, 2, 0, 1, 2)]

#: Numbers that add up without rounding.
COSTS = st.integers(0, 24).map(lambda eighths: eighths / 8)


def all_of(layout: Layout, costs: list[float]) -> list[Partition]:
    inner = combinations(range(1, len(costs)), layout.pieces - 1)
    return [Partition(layout, tuple(costs), (0, *each, len(costs))) for each in inner]


@given(st.data())
def test_no_cuts_are_better(data: st.DataObject) -> None:
    """Of the fastest slowest stage, and then, where ranks have a piece and its mirror image, the
    slowest rank.
    """
    layout = data.draw(st.sampled_from(MIRRORED + INTERLEAVED))
    costs = data.draw(
        st.lists(COSTS, min_size=layout.pieces, max_size=layout.pieces + 5).filter(any)
    )
    found = partition(costs, layout)
    others = all_of(layout, costs)
    assert found in others
    assert max(found.pieces) == min(max(each.pieces) for each in others)
    if layout in MIRRORED:
        assert max(found.ranks) == min(
            max(each.ranks) for each in others if max(each.pieces) == max(found.pieces)
        )


def test_costs_that_do_not_add_up_exactly() -> None:
    """Equal blocks go into equal stages, whatever sums of 0.1 are."""
    assert partition([0.1] * 32, one(0, 1, 2, 3, 3, 2, 1, 0)).cuts == tuple(
        range(0, 33, 4)
    )


def test_many_blocks_are_cut_in_a_moment() -> None:
    """As many as the largest models have: no even cuts, and nothing alike."""
    random = Random(0)
    costs = [0.1, *(1 + 0.2 * random.random() for _ in range(126)), 2.3]
    start = perf_counter()
    for layout in (
        one(*range(16)),
        one(*range(16), *reversed(range(16))),
        two(16, 32, 32),
    ):
        assert 0 < partition(costs, layout).imbalance < 0.3
    assert perf_counter() - start < 10


def test_the_report() -> None:
    names = ["embedding", *(f"layers.{each}" for each in range(8)), "head"]
    assert partition([0.1, *[1] * 8, 0.5], two(4, 4, 4)).report(names) == (
        "stage 0 on rank 0, stage 4 on rank 3: embedding to layers.1, 24.4% of the work\n"
        "stage 1 on rank 1, stage 5 on rank 2: layers.2 to layers.3, 23.3% of the work\n"
        "stage 2 on rank 2, stage 6 on rank 1: layers.4 to layers.5, 23.3% of the work\n"
        "stage 3 on rank 3, stage 7 on rank 0: layers.6 to head, 29.1% of the work\n"
        "stage 3 limits: it has 16.3% more than an even share, and no split has less\n"
        "rank 0 works 7.0% more than an even share"
    )


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ([1, 1], "2 blocks for 3 stages, of which each has one or more"),
        ([1, -1, 1], "the costs of the blocks must be numbers from 0, not all 0"),
        (
            [1, float("nan"), 1],
            "the costs of the blocks must be numbers from 0, not all 0",
        ),
        ([0, 0, 0], "the costs of the blocks must be numbers from 0, not all 0"),
    ],
)
def test_what_cannot_be_cut(costs: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(costs, one(0, 1, 2))
