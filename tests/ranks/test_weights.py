"""Which versions of weights ops read, and how many a rank holds, of plans that are written out."""

import pytest
from attrs import evolve

from schedlang.ranks.weight_versions import follow_weights
from schedlang.schedule.layout import Layout, Pipeline
from schedlang.schedule.schedule import WeightRule
from tests.support.written import words, written, wrong


def of_updates(updates: int) -> Layout:
    """One stage, with a microbatch for each update."""
    return Layout((0,), (Pipeline("", 0, 1, updates),), updates=updates)


@pytest.mark.parametrize(
    ("rule", "held", "staleness"),
    [
        # One forward ahead at first, and then two: before `0U4` versions 2 to 4 are there, of which
        # `0B4` still reads 2, and `0B5` will read 3.
        (WeightRule("stash"), 3, 2),
        (WeightRule("delay", 2), 3, 2),
        (WeightRule("unstashed"), 1, 2),
    ],
    ids=str,
)
def test_versions_that_are_held(rule: WeightRule, held: int, staleness: int) -> None:
    plan = written(
        "0F0 0F1 0B0 0U0 0B1 0U1 0F2 0F3 0F4 0B2 0U2 0F5 0B3 0U3 0B4 0U4 0B5 0U5",
        layout=of_updates(6),
    )
    versions = follow_weights(evolve(plan, weights=(rule,)))
    assert not versions.findings
    assert versions.held == versions.held_of == (held,)
    assert versions.staleness == staleness


def test_without_updates_nothing_reads_a_version() -> None:
    versions = follow_weights(written("0F0 0B0"))
    assert versions.read == {}
    assert versions.held == (1,)


def test_updates_of_which_none_is_made() -> None:
    (told,) = wrong(written("0F0 0B0 0F1 0B1", layout=of_updates(2)))
    assert told.code == "update"
    assert told.message == "`0B1` of update 1 adds to the gradient of update 0"
    assert words(told) == ["0B1"]


def test_a_step_before_all_gradients_on_a_rank_that_stands_still() -> None:
    """What the rank has not come to is not told to be in a wrong order."""
    plan = written(
        "0RECV_B0 0U 0F0 0SEND_F0 0B0",
        "1RECV_F0 1F0 1B0 1SEND_B0 1U",
        transport="blocking",
    )
    (told,) = wrong(plan)
    assert told.code == "update"
    assert told.message == "`0B0` of update 0 adds to the gradient of update 1"
