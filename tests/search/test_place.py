"""Stages on other ranks: never worse than where they are, within memory, and proved."""

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedlang import Costs, Source, compile, simulate
from schedlang.extras.search.optimize.instance import Instance
from schedlang.extras.search.optimize.problem import Problem
from schedlang.extras.search.optimize.starts import starts
from schedlang.extras.search.partition import Layer, fit, place, solve
from schedlang.extras.search.partition.place import moved
from tests.support.commands import document

SIZE = {"ranks": 2, "microbatches": 4}
TIMES = st.integers(1, 6).map(float)
LOOP = compile("interleaved_zb", SIZE)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(TIMES, min_size=4, max_size=4), st.sampled_from(["interleaved_zb", "zb_v"])
)
def test_never_worse_and_proved(times: list[float], program: str) -> None:
    """And what is found compiles again, with its claims."""
    costs = Costs(
        forward_times=times, backward_times=[2 * time for time in times], p2p_time=0.5
    )
    problem = Problem.of(compile(program, SIZE, costs))
    placed = place(problem)
    before = problem.value(problem.graph.order)
    after = placed.value(placed.graph.order)
    assert after <= before
    assert placed.limits == problem.limits
    assert set(placed.graph.schedule.placement) == {0, 1}


@settings(max_examples=5, deadline=None)
@given(st.lists(TIMES, min_size=4, max_size=4))
def test_no_worse_than_any_placement_by_its_first_orders(times: list[float]) -> None:
    """One stage that moves, or two that change places, make no placement better; with four stages
    on two ranks that leaves few, and the best of all is found where nothing else is in the way.
    """
    costs = Costs(forward_times=times, backward_times=[2 * time for time in times])
    problem = Problem.of(compile("interleaved_zb", SIZE, costs), 100.0)
    placed = place(problem)
    found = placed.value(placed.graph.order)
    own = placed.graph.schedule.layout.placement
    for placement in product((0, 1), repeat=4):
        differs = [a != b for a, b in zip(placement, own, strict=True)]
        if sum(differs) != 1 or len(set(placement)) < 2:
            continue
        other = Problem.of(moved(problem.graph.schedule, placement), 100.0)
        first_orders = starts(Instance.of(other))
        assert found <= next(first_orders)[1] + 1e-9


def test_the_stages_of_a_moved_schedule_do_the_same_ops() -> None:
    """One microbatch after the other, on other ranks."""
    schedule = moved(Problem.of(LOOP).graph.schedule, (1, 1, 1, 0))
    words = [actions.text() for actions in schedule.ranks]
    assert words[0].startswith("3F0 3I0 3W0 3F1")
    assert words[1].startswith("0F0 1F0 2F0 2I0 2W0 1I0 1W0 0I0 0W0 0F1")
    own = sorted(" ".join(actions.compute().text() for actions in LOOP.ranks).split())
    assert sorted(" ".join(words).split()) == own


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("chimera", "several pipelines"),
        ("seq1f1b", "slices"),
        ("interleaved_overlap", "ops that overlap"),
    ],
)
def test_what_stays_where_it_is(program: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        place(Problem.of(compile(program, {"ranks": 4, "microbatches": 8})))


def test_partition_placement_and_order_together() -> None:
    """Never worse than partition and program, and a program that compiles to what was found."""
    layers = [Layer(1, 1, 1, name=f"layers.{index}") for index in range(8)]
    layers.append(Layer(3, 3, 3, name="head"))
    links = Costs(p2p_time=0.25)
    fits = [
        fit(layers, program, {"ranks": 2, "microbatches": 4}, links)
        for program in ("zb_v",)
    ]
    solution = solve(layers, fits, links)
    assert solution.makespan <= fits[0].makespan
    plan = compile(Source("found.sched", solution.program()), costs=solution.costs)
    assert plan.placement == solution.schedule.placement
    execution = simulate(plan, solution.costs)
    assert execution.timeline.makespan == pytest.approx(solution.makespan)


def test_a_capacity_is_kept() -> None:
    layers = [Layer(1, 1, 1, activation_bytes=1, weights_bytes=1) for _ in range(8)]
    fits = [fit(layers, "v_half", {"ranks": 2, "microbatches": 6}, capacity=14)]
    solution = solve(layers, fits, capacity=14)
    assert solution.execution.peak_bytes is not None
    assert max(solution.execution.peak_bytes) <= 14


def test_the_option_of_the_command(tmp_path: Path) -> None:
    """It says where the stages are, and writes a program that has them there."""
    path = tmp_path / "placed.sched"
    line = "optimize interleaved_zb -p ranks=2 -p microbatches=4 --place --forward-times 1,2,1,4"
    found = document(line, "--for 1s -o", path)
    assert found["value"] < found["given"]
    assert tuple(found["placement"]) == compile(path).placement
