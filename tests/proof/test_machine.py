"""The proof against an oracle that executes plans, on random schedules and on every kind of damage
to them.
"""

import random
from collections import Counter
from itertools import chain

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from schedlang import (
    Actions,
    CompileError,
    Costs,
    Schedule,
    compile,
    prove,
    read_source,
    simulate,
)
from schedlang.diagnostics.source import Span
from schedlang.lowering import lower
from schedlang.plan.text import parse_actions
from schedlang.proof.execution import Execution
from schedlang.proof.prove import can_run
from schedlang.proof.structure import check_structure
from tests.support.damage import damaged_plans, gallery, one_of, replicated_plan
from tests.support.features import featured_plan, random_costs, with_features
from tests.support.own_memory import most_held
from tests.support.paths import GALLERY
from tests.support.sizes import examples
from tests.support.strategies import make_schedule, oracle, schedules
from tests.support.travelling import travelling_ops, travelling_plan


def proved(schedule: Schedule) -> Execution | None:
    try:
        return prove(schedule)
    except CompileError:
        return None


@pytest.mark.parametrize(
    ("text", "code", "wrong"),
    [
        ("0F0 0F1 2F0", "no-such-stage", "there are stages 0 to 1"),
        ("0F0 0F1 1F0", "not-on-this-rank", "stage 1 is on rank 1"),
        ("0F0 0F1 0F2", "no-such-microbatch", "there are microbatches 0 to 1"),
        ("0F0 0F1 0U1", "update", "there are updates 0 to 0"),
    ],
)
def test_actions_that_cannot_be(text: str, code: str, wrong: str) -> None:
    """Of a schedule that was made without a program; each action has a place of its own."""
    # The last action is the wrong one, so it is the third place that must be named.
    actions = parse_actions(text, [0, 1, 2])
    schedule = make_schedule((0, 1), 2, (actions, Actions()))
    schedule = evolve(schedule, spans=tuple(Span(each, each + 1) for each in range(3)))
    with pytest.raises(CompileError) as caught:
        check_structure(schedule)
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == (code, f"`{text[-3:]}` on rank 0: {wrong}")
    assert [label.span for label in found.labels] == [Span(2, 3)]


def test_of_many_actions_that_cannot_be_one_is_told() -> None:
    schedule = make_schedule(
        (0, 1), 2, (Actions(), parse_actions("2F0 2F1 2B0", [0, 0, 0]))
    )
    with pytest.raises(CompileError) as caught:
        check_structure(schedule)
    assert [each.notes for each in caught.value.diagnostics] == [
        ("and 2 more, on rank 1",)
    ]


def test_a_copy_is_in_no_group() -> None:
    actions = parse_actions("0F0 0F1 0OFFLOAD1", [0, 1, 2])
    actions.group[2] = 1
    with pytest.raises(
        CompileError, match=r"`0OFFLOAD1` on rank 0: it goes on beside .* stands alone"
    ) as caught:
        check_structure(make_schedule((0, 1), 2, (actions, Actions())))
    assert [each.code for each in caught.value.diagnostics] == ["overlap"]


@pytest.mark.parametrize(
    ("first", "runs"),
    [("0F0 0B0", True), ("0F0 0F0 0B0", False), ("0B0 0F0", False), ("0F0", False)],
)
def test_ops_can_run_if_they_are_all_there_and_in_order(first: str, runs: bool) -> None:
    ranks = tuple(
        parse_actions(text, [0] * len(text.split())) for text in (first, "1F0 1B0")
    )
    assert can_run(make_schedule((0, 1), 1, ranks)) == runs


@examples(300)
@given(schedules(), st.randoms(use_true_random=False))
@pytest.mark.slow
def test_every_schedule_that_can_run_is_lowered_and_proved(
    schedule: Schedule, rng: random.Random
) -> None:
    """Also with copies, gathers and sums in their places, and at any costs."""
    if rng.random() < 0.7:
        schedule = with_features(schedule, rng)
    lowered = lower(schedule)
    prove(lowered)
    assert oracle(lowered)
    assert [each.compute().text() for each in lowered.ranks] == [
        each.text() for each in schedule.ranks
    ]


@pytest.mark.slow
def test_every_order_of_hops_that_can_run_is_lowered_and_proved() -> None:
    """Messages have places among the waits for hops in which they run on every transport."""
    count = 0
    rng = random.Random("hops")
    for _ in range(150):
        schedule = travelling_ops(rng)
        if rng.random() < 0.5:
            schedule = evolve(schedule, costs=random_costs(schedule, rng))
        if can_run(schedule):
            prove(lower(schedule))
            count += 1
    assert count > 100


@examples(100)
@given(schedules())
def test_a_lower_bound_of_the_makespan(schedule: Schedule) -> None:
    """No rank works faster than its work, and no microbatch passes faster than along any way through
    the stages and back to the first that is trained.
    """
    execution = simulate(lower(schedule), Costs(p2p_time=0.5))
    layout = schedule.layout
    there: list[float] = []
    back: list[float] = []
    for stage, before in enumerate(layout.before):
        crosses = {
            e: 0.5 * (layout.placement[e] != layout.placement[stage]) for e in before
        }
        # The longest way to a stage, where a forward takes 1, and 0.5 to another rank; then the
        # longest one back from it, where a backward takes at least 1.
        there.append(1 + max((there[e] + crosses[e] for e in before), default=0.0))
        ways = [back[e] + crosses[e] for e in before if layout.has_backward[e]]
        back.append(layout.has_backward[stage] + max(ways, default=0.0))
    longest = max(map(sum, zip(there, back, strict=True)))
    assert (
        execution.timeline.makespan >= max([longest, *execution.timeline.busy]) - 1e-9
    )


#: Programs ask for different numbers; each has plans at two of these sizes at least.
SIZES = (
    (2, 1),
    (2, 2),
    (2, 4),
    (2, 6),
    (3, 1),
    (3, 3),
    (3, 9),
    (4, 4),
    (4, 8),
    (5, 6),
    (5, 12),
)


@pytest.mark.slow
def test_damaged_plans_are_judged_as_by_the_oracle(
    block: int, tally: Counter[str]
) -> None:
    disagreements = []
    rng = random.Random(block)
    drawn = {
        one_of(gallery(SIZES, slices=2)): 1000,
        replicated_plan: 300,
        featured_plan: 300,
        travelling_plan: 300,
    }
    plans = [
        damaged_plans(draw, count, rng, only=None) for draw, count in drawn.items()
    ]
    for plan in chain(*plans):
        right = oracle(plan)
        tally["right" if right else "wrong"] += 1
        execution = proved(evolve(plan, transport="blocking"))
        held = most_held(plan)
        is_held = not execution or held in (None, [*execution.peak_activations])
        if bool(execution) != right or not is_held:
            tally["disagreements"] += 1
            disagreements.append([each.text() for each in plan.ranks])
    assert not disagreements
    # Some damage is harmless: the test sees both verdicts.
    assert min(tally["right"], tally["wrong"]) > 100


@pytest.mark.slow
def test_every_program_is_damaged() -> None:
    names = Counter(plan.source.path for plan in gallery(SIZES, slices=2))
    assert set(names) == set(map(str, GALLERY))
    assert min(names.values()) > 1


def test_cost_of_a_proof_grows_with_the_actions_only() -> None:
    """Steps of the machine, not seconds: twice the microbatches take twice the steps."""
    import sys

    def steps(microbatches: int) -> int:
        plan = compile(
            read_source(GALLERY[0]), {"ranks": 4, "microbatches": microbatches}
        )
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
