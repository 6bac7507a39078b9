"""The proof against an oracle that executes plans, on random schedules and on every kind of damage to them."""

import random
from collections import Counter
from pathlib import Path

from attrs import evolve
from damage import damaged_plans, gallery, one_of
from hypothesis import given, settings
from strategies import oracle, schedules

from schedlang import CompileError, Costs, Schedule, compile, prove, read_source, simulate
from schedlang.lowering import lower

TESTS = Path(__file__).parent
PROGRAMS = sorted((TESTS.parent / "programs").glob("*.sched"))


def proved(schedule: Schedule) -> bool:
    try:
        prove(schedule)
    except CompileError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(schedules())
def test_every_schedule_that_can_run_is_lowered_and_proved(schedule: Schedule) -> None:
    lowered = lower(schedule)
    prove(lowered)
    assert oracle(lowered)
    assert [each.compute().text() for each in lowered.ranks] == [each.text() for each in schedule.ranks]


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_a_lower_bound_of_the_makespan(schedule: Schedule) -> None:
    """No rank works faster than its work, and no microbatch passes faster than through all stages and back."""
    execution = simulate(lower(schedule), Costs(p2p=0.5))
    crossings = sum(a != b for a, b in zip(schedule.placement, schedule.placement[1:], strict=False))
    path = len(schedule.placement) * 2 + 2 * 0.5 * crossings
    assert execution.timeline.makespan >= max([path, *execution.timeline.busy]) - 1e-9


#: Programs ask for different numbers; each has plans at two of these sizes at least.
SIZES = ((2, 1), (2, 2), (2, 4), (3, 1), (3, 3), (3, 6), (4, 4), (4, 8))


def test_damaged_plans_are_judged_as_by_the_oracle(block: int, tally: Counter[str]) -> None:
    disagreements = []
    for plan in damaged_plans(one_of(gallery(SIZES, slices=2)), 1000, random.Random(block), only=None):
        right = oracle(plan)
        tally["right" if right else "wrong"] += 1
        if proved(evolve(plan, transport="blocking")) != right:
            tally["disagreements"] += 1
            disagreements.append([each.text() for each in plan.ranks])
    assert not disagreements
    # Some damage is harmless: the test sees both verdicts.
    assert min(tally["right"], tally["wrong"]) > 100


def test_every_program_is_damaged() -> None:
    names = Counter(plan.source.path for plan in gallery(SIZES, slices=2))
    assert set(names) == set(map(str, PROGRAMS))
    assert min(names.values()) > 1


def test_cost_of_a_proof_grows_with_the_actions_only() -> None:
    """Steps of the machine, not seconds: twice the microbatches take twice the steps."""
    import sys

    def steps(microbatches: int) -> int:
        plan = compile(read_source(PROGRAMS[0]), {"ranks": 4, "microbatches": microbatches})
        count = 0

        def count_calls(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(count_calls)
        try:
            prove(plan)
        finally:
            sys.setprofile(None)
        return count

    assert steps(64) < 2.1 * steps(32)
