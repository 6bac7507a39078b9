"""The edges on which plans send, and the rounds in which their communicators are made."""

import random
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlang import CompileError, Plan, compile, read_source
from schedlang.ranks.connections import Edge, edges_of, rounds
from schedlang.schedule.actions import is_send, is_transfer
from schedlang.schedule.layout import Layout, Pipeline
from tests.support.paths import GALLERY

SIZES = ((4, 1), (2, 4), (3, 6), (3, 8), (4, 8), (5, 6), (6, 12))


def plans(path: Path) -> Iterator[Plan]:
    """A program at several sizes, for training and without backwards."""
    for ranks, microbatches in SIZES:
        for forward_only in (False, True):
            # Not all programs are for all sizes.
            with suppress(CompileError):
                params = {"ranks": ranks, "microbatches": microbatches}
                yield compile(read_source(path), params, forward_only=forward_only)


def sent_on(plan: Plan) -> set[Edge]:
    """The edges of a plan's actions, as both sides see them."""
    edges: tuple[set[Edge], set[Edge]] = set(), set()
    for rank, actions in enumerate(plan.ranks):
        for index, kind in enumerate(actions.kind):
            if is_transfer(kind):
                peer = plan.peer_of(rank, index)
                assert peer is not None
                edges[is_send(kind)].add(
                    (rank, peer) if is_send(kind) else (peer, rank)
                )
    assert edges[0] == edges[1]
    return edges[0]


def all_are_made(orders: list[list[Edge]]) -> bool:
    """Whether all communicators are made, where each rank goes through its own in its order and
    waits at each for the other rank.
    """
    left = [list(order) for order in orders]
    while any(left):
        first = [order[0] if order else None for order in left]
        met = [edge for edge in first if edge and first[edge[0]] == first[edge[1]]]
        if not met:
            return False
        left = [order[1:] if order and order[0] in met else order for order in left]
    return True


def orders(edges: Iterable[Edge], ranks: int) -> list[list[Edge]]:
    """Each rank's communicators in the order in which it makes them; each has heard of the edges in
    another order.
    """
    rng = random.Random(0)
    heard = sorted(edges)
    found = []
    for rank in range(ranks):
        rng.shuffle(heard)
        found.append([edge for each in rounds(heard) for edge in each if rank in edge])
    return found


def test_orders_that_do_not_match_are_seen() -> None:
    circle = [[(0, 1), (2, 0)], [(1, 2), (0, 1)], [(2, 0), (1, 2)]]
    assert not all_are_made(circle)
    assert all_are_made([circle[0], [(0, 1), (1, 2)], [(1, 2), (2, 0)]])
    assert not all_are_made([[(0, 1)], []])


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_every_edge_of_a_plan_is_made_once_and_by_both_of_its_ranks(path: Path) -> None:
    seen = 0
    for plan in plans(path):
        edges = edges_of(plan.layout, plan.is_forward_only)
        assert set(edges) == sent_on(plan)
        assert sorted(edge for each in rounds(edges) for edge in each) == edges
        assert all_are_made(orders(edges, len(plan.ranks)))
        seen += len(edges) > 2
    # Where weights travel instead of activations, nothing is sent from stage to stage.
    assert seen or path.stem == "weipipe"


RANKS = st.integers(0, 8)


@given(st.sets(st.tuples(RANKS, RANKS).filter(lambda edge: edge[0] != edge[1])))
def test_in_a_round_no_rank_comes_twice(edges: set[Edge]) -> None:
    found = rounds(edges)
    assert sorted(edge for each in found for edge in each) == sorted(edges)
    for each in found:
        ranks = [rank for edge in each for rank in edge]
        assert ranks
        assert len(ranks) == len(set(ranks))
    assert all_are_made(orders(edges, 9))


def test_rounds_by_hand() -> None:
    """Two chunks on four ranks, each way by itself."""
    plan = compile("interleaved_1f1b", {"ranks": 4, "chunks": 2})
    assert rounds(edges_of(plan.layout)) == [
        [(0, 1), (2, 3)],
        [(1, 0), (3, 2)],
        [(0, 3), (1, 2)],
        [(3, 0), (2, 1)],
    ]


def test_rounds_are_those_of_torch() -> None:
    """Of torch 2.15, for stages on any ranks."""
    reason = "torch before 2.15 has no communicators for each edge"
    of_torch = pytest.importorskip(
        "torch.distributed.pipelining._p2p", reason=reason, exc_type=ImportError
    )
    rng = random.Random(0)
    for _ in range(300):
        ranks = rng.randint(2, 9)
        placement = tuple(
            rng.randrange(ranks) for _ in range(rng.randint(2, 3 * ranks))
        )
        layout = Layout(placement, (Pipeline("stages", 0, len(placement), 1),))
        found = tuple(map(tuple, rounds(edges_of(layout))))
        assert found == of_torch._directed_edge_split_rounds(placement), placement
