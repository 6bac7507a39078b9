"""What ranks hold, step by step, where several changes come at one time."""

from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given

from schedlang import (
    CompileError,
    Costs,
    Schedule,
    Source,
    compile,
    prove,
    read_source,
    simulate,
)
from schedlang.extras.prove.pieces.prover import prove_for_all
from schedlang.extras.search.optimize.problem import Problem
from schedlang.lowering import lower
from schedlang.passes.op_graph import Graph
from schedlang.proof.memory import levels
from schedlang.ranks.lifetimes import lifetimes, peak, peak_messages
from schedlang.report.bubbles.alternatives import Alternatives
from schedlang.report.bubbles.op_waits import waits
from schedlang.schedule.costs import UNIT
from schedlang.schedule.timeline import Bar, Bars, Timeline
from tests.support.paths import GALLERY
from tests.support.sizes import examples
from tests.support.strategies import schedules
from tests.support.written import written


def test_what_changes_nothing_is_shown_as_it_ends() -> None:
    """The half for the inputs gives nothing back; it takes from 1 to 2."""
    (steps,) = simulate(written("0F0 0I0 0W0")).memory
    assert steps == ((0, 1), (2, 1), (3, 0))


def test_ops_that_take_no_time_hold_what_they_make() -> None:
    costs = Costs(forward_times=(0,), backward_times=(0,))
    plan = written("0F0 0B0 0F1 0B1", microbatches=2)
    assert simulate(plan, costs).memory == (((0, 1), (0, 0), (0, 1), (0, 0)),)
    assert simulate(plan, costs).peak_activations == (1,)


def test_what_is_dropped_at_once_comes_behind_what_is_kept() -> None:
    """Stage 0 takes no time, and keeps 5; of stage 1 there is 2 until it is dropped."""
    costs = Costs(forward_times=(0, 1), forward_memory=(5, 2))
    plan = written("0F0 1F0 1R0 1B0 0B0", placement=(0, 0))
    (steps,) = simulate(plan, costs).memory
    assert steps == ((0, 5), (0, 7), (0, 5), (1, 7), (4, 5), (6, 0))


#: A backward, and a forward that overlaps with it, in both orders.
OVERLAPS = ("(0B0;0F1)", "(0F1;0B0)")


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("forward", [0, 1])
@pytest.mark.parametrize("backward", [0, 2])
def test_ops_that_overlap_begin_together_and_end_together(
    overlap: str, forward: float, backward: float
) -> None:
    """Also where they take no time: all take, then all give back."""
    costs = Costs(
        forward_times=(forward,),
        backward_times=(backward,),
        forward_memory=(3,),
        activation_bytes=(10,),
        weights_bytes=(100,),
    )
    plan = written(f"0F0 {overlap} 0B1", microbatches=2)
    execution = simulate(plan, costs)
    assert execution.peak_activations == (2,)
    assert execution.peak_memory == (6,)
    assert execution.peak_bytes == (120,)
    end = 2 * forward + backward
    ((first, second, third, last),) = execution.memory
    assert (first, second, third) == ((0, 3), (forward, 6), (end, 3))
    assert last == (end + backward, 0)


@pytest.mark.parametrize("overlap", ["(0F0;0F1)", "(0F1;0F0)"])
def test_forwards_that_overlap_hold_theirs_together_though_they_drop_them(
    overlap: str,
) -> None:
    assert prove(written(overlap, microbatches=2)).peak_activations == (2,)
    again = written(f"{overlap} 0R0 0B0 0R1 0B1", microbatches=2)
    assert prove(again).peak_activations == (2,)


@pytest.mark.parametrize("overlap", ["(0B0;0F2)", "(0F2;0B0)"])
def test_recorded_ops_that_overlap_hold_theirs_together(overlap: str) -> None:
    """A run records copies among the ops, and what overlaps one behind the other."""
    plan = written(f"0F0 0OFFLOAD0 0F1 0RELOAD0 {overlap} 0B1 0B2", microbatches=3)
    (actions,) = plan.ranks
    rows = [actions.row(index)[:3] for index in range(len(actions))]
    bars = Bars.of(Bar(*row, at, at + 1.0) for at, row in enumerate(rows))
    (held,) = levels(plan, Timeline((bars,)), UNIT.memory(plan.layout))
    assert held.steps == [
        (0, 1),
        (2, 0),
        (2, 1),
        (3, 2),
        (4, 3),
        (6, 2),
        (7, 1),
        (8, 0),
    ]


OVERLAPPING = """schedule overlapping {
    param ranks = 1
    param microbatches = 4
    rank r {
        F(0)
        for m in 0 .. microbatches - 1 { overlap { %s } }
        B(microbatches - 1)
        assert peak(r) <= %d for all
    }
}
"""


@pytest.mark.parametrize("ops", ["B(m)  F(m + 1)", "F(m + 1)  B(m)"])
def test_claims_of_what_overlaps_are_proved_alike(ops: str) -> None:
    """At one size, for all sizes, and by a rank's closed form."""
    compile(Source("right.sched", OVERLAPPING % (ops, 2)))
    with pytest.raises(CompileError, match=r"2 <= 1"):
        compile(Source("wrong.sched", OVERLAPPING % (ops, 1)))
    proof = prove_for_all(OVERLAPPING % (ops, 2))
    assert "proved for all: peak(r) <= 2" in proof.text


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_passes_and_alternatives_hold_as_much_of_what_overlaps(overlap: str) -> None:
    plan = written(f"0F0 {overlap} 0B1", microbatches=2)
    graph = Graph(plan)
    assert graph.highest_peak(graph.order) == 2
    of_waits = waits(plan, simulate(plan).timeline, UNIT)
    assert Alternatives(of_waits, 0, UNIT.memory(plan.layout)).peak == 2


@pytest.mark.parametrize("overlap", ["(1F1;2B0)", "(2B0;1F1)"])
def test_messages_of_what_overlaps_are_held_together(overlap: str) -> None:
    """Two are made as the one that stage 1 was handed is still used."""
    plan = written(
        f"0F0 1F0 2F0 0F1 {overlap} 2F1 1B0 0B0 2B1 1B1 0B1",
        placement=(0, 0, 0),
        microbatches=2,
    )
    prove(plan)
    assert peak_messages(plan) == [3]


#: All memory is that of messages.
OF_MESSAGES = Costs(forward_memory=(0,), input_memory=(0,), message_memory=(1,))


@pytest.mark.parametrize("transport", ["portable", "nccl"])
@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_messages_take_memory_as_long_as_the_rank_holds_them(
    path: Path, transport: str
) -> None:
    """By times as by the order of actions alone; and what is held is told in the order of time."""
    plan = compile(read_source(path), transport=transport)
    execution = simulate(plan, OF_MESSAGES)
    assert list(execution.peak_memory) == peak_messages(plan)
    for steps in execution.memory:
        times = [time for time, _ in steps]
        assert times == sorted(times)


@examples(200)
@given(schedules())
def test_what_is_held_is_activations_and_messages_together(schedule: Schedule) -> None:
    """Counted by the order of actions, apart from all times."""
    plan = lower(schedule)
    held = [peak(lifetimes(plan, rank)) for rank in range(len(plan.ranks))]
    costs = Costs(message_memory=(1,), activation_bytes=(10,), boundary_bytes=(10,))
    execution = simulate(plan, costs)
    assert list(execution.peak_memory) == held
    assert execution.peak_bytes == tuple(10 * each for each in held)


MESSAGES = """schedule messages {
    param ranks = 2
    param microbatches = 4
    memory F = 2
    memory send(s) = 0.5 + s
    capacity = 100
    rank r {
        let warmup = min(ranks - 1 - r, microbatches)
        repeat warmup { F(next) }
        repeat microbatches - warmup { F(next)  B(next) }
        repeat warmup { B(next) }
        assert peak(0) == 6 and peak(1) == 3.5
    }
}
"""


@pytest.mark.core
def test_a_program_says_what_its_messages_take() -> None:
    """Rank 0 holds two activations and four messages, since receives begin two ops early; rank 1
    holds an activation and three messages.
    """
    plan = compile(MESSAGES)
    assert plan.costs.message_memory == (0.5, 1.5)
    assert simulate(plan).peak_memory == (6, 3.5)
    with pytest.raises(CompileError, match="is 6 == 5"):
        compile(MESSAGES.replace("== 6", "== 5"))


@pytest.mark.core
def test_messages_count_in_the_capacity_of_a_rank() -> None:
    """Room for activations and weights alone is too little."""
    program = MESSAGES.replace("memory F = 2\n    memory send(s) = 0.5 + s\n", "")
    program = program.replace("peak(0) == 6 and peak(1) == 3.5", "peak(r) <= 2")
    costs = Costs(activation_bytes=(30,), weights_bytes=(35,))
    assert simulate(compile(program, costs=costs)).peak_bytes == (95, 65)
    with_messages = evolve(costs, boundary_bytes=(2,), p2p_time=1)
    with pytest.raises(CompileError, match="rank 0 holds 103 bytes at its peak"):
        compile(program, costs=with_messages)


def test_whoever_counts_activations_alone_refuses_memory_of_messages() -> None:
    text = prove_for_all(MESSAGES).text
    assert "not proved for microbatches >= 5: it has a `memory send`" in text
    with pytest.raises(ValueError, match="messages take memory there"):
        Problem.of(compile(MESSAGES))
