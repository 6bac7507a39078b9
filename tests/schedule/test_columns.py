"""Columns of all ranks, and the actions of one that are taken out of them."""

import pickle

import numpy as np
import pytest
from attrs import evolve

from schedlang import compile
from schedlang.schedule.arrays import how_many_before, pairs_within
from schedlang.schedule.columns import Ranks, actions_of, columns_of
from schedlang.schedule.schedule import Schedule
from tests.support.paths import PROGRAMS


@pytest.fixture(scope="module")
def plan() -> Schedule:
    return compile(PROGRAMS / "dualpipe_v.sched", {"ranks": 4, "microbatches": 8})


def test_ranks_are_a_sequence_of_their_actions(plan: Schedule) -> None:
    ranks = plan.ranks
    assert isinstance(ranks, Ranks)
    each = tuple(ranks)
    assert len(each) == len(ranks) == 4
    assert ranks[-1] == each[3]
    assert ranks[1:3] == each[1:3]
    assert [actions.text() for actions in ranks] == [actions.text() for actions in each]
    with pytest.raises(IndexError):
        ranks[4]


def test_ranks_equal_the_same_actions_however_they_are_kept(plan: Schedule) -> None:
    each = tuple(plan.ranks)
    again = actions_of(4, columns_of(each))
    assert again == plan.ranks
    assert plan.ranks == each
    assert each == plan.ranks
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert plan.ranks != each[:3]
    # The same rows, but one more of them on rank 0 and one less on rank 1.
    columns = columns_of(each)
    rank = columns.rank.copy()
    rank[len(each[0])] = 0
    assert actions_of(4, evolve(columns, rank=rank)) != plan.ranks


def test_how_many_before_counts_the_same_keys() -> None:
    assert how_many_before(np.array([5, 0, 5, 5, 0, 7])).tolist() == [0, 0, 1, 2, 1, 0]
    assert how_many_before(np.zeros(0, np.int64)).tolist() == []


def test_pairs_within_groups_are_in_both_orders() -> None:
    one, other = pairs_within(np.array([1, 0, 1, 2, 1]))
    assert list(zip(one.tolist(), other.tolist(), strict=True)) == [
        (0, 2),
        (0, 4),
        (2, 0),
        (2, 4),
        (4, 0),
        (4, 2),
    ]
