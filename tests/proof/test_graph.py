"""The event graph: its walk against the definition, and the order of moments against the walk."""

import random
import tracemalloc
from collections.abc import Callable
from math import inf
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given

from schedlang import (
    CompileError,
    Costs,
    Schedule,
    Source,
    compile,
    read_source,
    simulate,
)
from schedlang.lowering import lower
from schedlang.lowering.fusion import fuse
from schedlang.proof import graph as of_graph
from schedlang.proof.edges import ideal_events
from schedlang.proof.graph import (
    NEVER,
    NOTHING,
    Graph,
    Items,
    walk,
)
from schedlang.proof.message_edges import transport_events
from schedlang.proof.moments import follows_moments
from schedlang.proof.order import check_order
from schedlang.proof.structure import check_structure
from schedlang.schedule.arrays import Floats
from schedlang.schedule.needs import all_needs_of
from schedlang.schedule.schedule import once
from schedlang.schedule.transports import transports
from tests.support.damage import (
    damaged_plans,
    gallery,
    one_of,
    random_plan,
    replicated_plan,
)
from tests.support.features import featured_plan
from tests.support.own_needs import needs
from tests.support.paths import GALLERY
from tests.support.sizes import examples
from tests.support.strategies import schedules
from tests.support.transports import TRANSPORTS

#: Far more work than ops: of what is indexed by microbatch, a machine has not the memory.
FAR = """
schedule s {
    param ranks = 2
    param microbatches = 9000000
    rank r { for m in 0 .. 1500 { F(m) B(m) } }
}
"""


def some_graph(rng: random.Random) -> Graph:
    """A few threads whose items wait for any others, some for one that never comes."""
    items = Items()
    count = rng.randint(1, 12)
    threads = np.array([rng.randrange(3) for _ in range(count)])
    items.add(
        threads, np.array(rng.sample(range(count), count)), rng.choice([0.0, 1.0, 2.5])
    )
    for _ in range(rng.randint(0, 2 * count)):
        waiter = np.array([rng.randrange(count)])
        target = np.array([NEVER if rng.random() < 0.05 else rng.randrange(count)])
        items.wait(waiter, target, rng.choice([0.0, 0.5]), at_begin=rng.random() < 0.5)
    # No waits at all are waits too: tables without a row.
    items.wait(np.zeros(0, np.int64), np.zeros(0, np.int64))
    return items.graph()


def by_definition(graph: Graph) -> list[float]:
    """When each event happens, from the definition again and again until nothing changes."""
    times = [inf] * len(graph.waits)
    # Each round settles one more event at least, of those that ever happen.
    for _ in range(len(times) + 1):
        for event in range(len(times)):
            before = 0.0 if event in graph.first else times[event - 1]
            other = int(graph.waits[event])
            arrival = (
                0.0 if other == NOTHING else inf if other == NEVER else times[other]
            )
            start = max(before, arrival + float(graph.delay[event]))
            times[event] = start + float(graph.takes[event])
    return times


def test_the_walk_is_the_definition() -> None:
    rng = random.Random(0)
    whole = 0
    for _ in range(500):
        graph = some_graph(rng)
        times = by_definition(graph)
        assert walk(graph).tolist() == times
        assert graph.is_whole == (inf not in times)
        whole += graph.is_whole
    # Graphs that come to their end and such that do not, many of each.
    assert 50 < whole < 450


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that are walked from now on."""
    graphs: list[Graph] = []

    def counted(graph: Graph) -> Floats:
        graphs.append(graph)
        return walk(graph)

    monkeypatch.setattr(of_graph, "walk", counted)
    return graphs


def test_a_graph_takes_the_times_of_an_equal_one(walked: list[Graph]) -> None:
    rng = random.Random(0)
    one = some_graph(rng)
    other = some_graph(rng)
    assert one.times is evolve(one).among([other, one]).times
    assert len(walked) == 1
    # A single number makes it another graph.
    late = evolve(one, takes=one.takes + np.eye(1, len(one.takes))[0])
    assert late.among([other, one]) is late


def test_compiling_walks_the_graph_of_the_ops_once(walked: list[Graph]) -> None:
    compile("1f1b", {"ranks": 3, "microbatches": 5})
    assert len(walked) == 1


def test_an_item_waits_until_another_one_is_over_and_no_longer() -> None:
    items = Items()
    items.add(np.array([0, 1]), np.array([0, 0]), 2.0)
    items.wait(np.array([1]), np.array([0]))
    graph = items.graph()
    assert graph.ends.tolist() == [2.0, 4.0]
    # Of one item to wait for there is one event.
    assert len(graph.waits) == 2


def test_a_graph_without_items() -> None:
    items = Items()
    nothing = np.zeros(0, np.int64)
    items.add(nothing, nothing)
    items.wait(nothing, nothing)
    assert items.graph().is_whole
    assert items.graph().times.tolist() == []


def test_an_item_waits_in_the_order_in_which_its_edges_were_given() -> None:
    items = Items()
    items.add(np.arange(3), np.zeros(3, np.int64))
    waiters = np.tile([2, 1, 0], 40)
    items.wait(waiters, np.roll(waiters, 1))
    edges = items.graph().edge.reshape(3, 40)
    assert (waiters[edges] == np.arange(3)[:, np.newaxis]).all()
    assert (np.diff(edges) > 0).all()


def test_a_thread_without_items_keeps_no_other_one() -> None:
    items = Items()
    items.add(np.array([1, 3]), np.array([0, 0]), 2.0)
    items.wait(np.array([1]), np.array([0]))
    assert items.graph().ends.tolist() == [2.0, 4.0]


def test_what_is_found_once_of_a_schedule_is_not_that_of_an_equal_one() -> None:
    @once
    def found(schedule: Schedule) -> list[Schedule]:
        return [schedule]

    one = compile("1f1b")
    other = evolve(one)
    assert found(one) is found(one)
    assert found(other) is not found(one)


@examples(200)
@given(schedules())
def test_what_the_compiler_places_is_in_the_order_of_its_moments(
    schedule: Schedule,
) -> None:
    lowered = lower(schedule)
    assert follows_moments(lowered, ideal_events(lowered, lowered.costs))


def test_the_gallery_is_proved_by_its_moments() -> None:
    """Or the quick proof would be one that nobody gets; also with messages exchanged in batches."""
    plans = gallery(((4, 8),))
    assert len(plans) > 25
    assert any(plan.columns.has_batches for plan in plans)
    for plan in plans:
        # Frozen stages are timed with backwards that take no time, which the plan leaves out.
        if not plan.layout.frozen:
            assert follows_moments(plan, ideal_events(plan, plan.costs)), plan.name


def of_gallery(rng: random.Random) -> Schedule:
    return one_of(gallery(((2, 4), (3, 3), (4, 4)), slices=2))(rng)


def fused_of_gallery(rng: random.Random) -> Schedule:
    """Plans whose ranks exchange messages in batches."""
    plan = of_gallery(rng)
    return plan if plan.columns.has_batches else fuse(plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [random_plan, replicated_plan, featured_plan, of_gallery, fused_of_gallery],
    ids=["random", "replicated", "featured", "gallery", "fused"],
)
def test_what_follows_its_moments_runs_on_every_transport(
    draw: Callable[[random.Random], Schedule],
) -> None:
    """The quick proof says yes to nothing that the graph of a transport says no to."""
    follows = 0
    for plan in damaged_plans(draw, 200, random.Random(1)):
        try:
            check_structure(plan)
        except CompileError:
            continue
        if not follows_moments(plan, ideal_events(plan, plan.costs)):
            continue
        follows += 1
        assert not list(check_order(plan))
        for name in TRANSPORTS:
            for transport in transports(name, plan.columns.has_batches):
                events = transport_events(plan, plan.costs, transport)
                assert events.graph.is_whole
                assert events.channels is not None
                assert not len(events.channels.alone)
                assert not list(events.channels.mismatched())
    assert follows > 10


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_ideal_times_do_not_depend_on_the_transport(path: Path) -> None:
    # Numbers whose sums are rounded: times must be equal to the bit, not only about as long.
    costs = Costs(
        forward_times=(0.1,),
        input_times=(0.7,),
        weight_times=(0.3,),
        overlap_times=(1.1,),
        p2p_time=0.05,
    )
    plan = compile(read_source(path))
    ideal = [
        simulate(evolve(plan, transport=name), costs, ideal=True).timeline
        for name in TRANSPORTS
    ]
    assert all(each == ideal[0] for each in ideal)


def test_what_is_held_is_no_more_than_there_are_actions() -> None:
    wrong = "never runs on stage 0, nor that of 8998499 other microbatches"
    tracemalloc.start()
    try:
        with pytest.raises(CompileError, match=wrong):
            compile(Source("far.sched", FAR))
        # Two stages of nine million microbatches: a table of these, with eight bytes each, has 144
        # MB.
        assert tracemalloc.get_traced_memory()[1] < 10**8
    finally:
        tracemalloc.stop()


@examples(200)
@given(schedules())
@pytest.mark.slow
def test_needs_are_those_of_each_op(schedule: Schedule) -> None:
    for plan in [schedule, lower(schedule), *gallery(((4, 4),), slices=2)[::7]]:
        columns = plan.columns
        found: dict[int, list[tuple[int, int, int]]] = {}
        all_needs = all_needs_of(plan)
        rows = (
            all_needs.user,
            all_needs.made,
            all_needs.stage,
            all_needs.microbatch,
        )
        for row, *need in zip(*(column.tolist() for column in rows), strict=True):
            found.setdefault(row, []).append((need[0], need[1], need[2]))
        for row in np.flatnonzero(~columns.is_transfer).tolist():
            op = (
                int(column[row])
                for column in (columns.kind, columns.stage, columns.microbatch)
            )
            assert found.get(row, []) == needs(plan, *op)
