"""Exchanges between two stages of a rank: when they run, what is wrong with them, and that all
processes of a group come to them in one order.
"""

import random
from collections.abc import Iterator

import pytest
from attrs import evolve

from schedlang import (
    CompileError,
    Costs,
    Kind,
    Plan,
    Schedule,
    Source,
    compile,
    prove,
    simulate,
)
from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import BETWEEN, MEETS
from schedlang.schedule.layout import Layout, Pipeline
from schedlang.schedule.transports import NAMES
from tests.support.damage import changed
from tests.support.explorer import right_on

#: One rank with attention, experts, and the sum of what they give.
LAYER = """schedule layer {
    param ranks = 1
    param microbatches = 2
    stage s in 0 .. 3 on 0
    cost exchange F = 2
    rank r {
        F(0, 0)  exchange F(1, 0)
        F(0, 1)  exchange F(1, 1)
        for m in 0 .. 2 { F(1, m)  exchange F(2, m) }
        for m in 0 .. 2 { F(2, m)  B(2, m)  exchange B(1, m) }
        for m in 0 .. 2 { B(1, m)  exchange B(0, m) }
        for m in 0 .. 2 { B(0, m) }
    }
}
"""


def test_they_run_beside_the_ops_and_what_takes_them_waits() -> None:
    """The first ops and exchanges, with a digit for the stage that runs or takes:

    ops          00·1·1·22…
    exchanges    ·11112222…
    """
    execution = simulate(compile(Source("layer.sched", LAYER)))
    (ops,) = execution.timeline.ranks
    (beside,) = execution.timeline.copies
    times = {
        (Kind(bar.kind).name, bar.stage, bar.microbatch): bar for bar in (*ops, *beside)
    }

    def span(kind: str, stage: int, microbatch: int) -> tuple[float, float]:
        bar = times[kind, stage, microbatch]
        return bar.start, bar.end

    # Both begin once their op is over; the second one behind the first.
    assert span("EXCHANGE_F", 1, 0) == (1, 3)
    assert span("EXCHANGE_F", 1, 1) == (3, 5)
    assert span("F", 1, 0) == (3, 4)
    assert span("EXCHANGE_F", 2, 0) == (5, 7)
    assert span("F", 1, 1) == (5, 6)
    # A forward on the last stage waits for the exchange of its own microbatch alone.
    assert span("F", 2, 0) == (7, 8)
    assert span("B", 2, 0) == (8, 10)


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("F(0, 0)  exchange F(1, 0)", "exchange F(1, 0)  F(0, 0)", "order"),
        ("F(1, m)  exchange F(2, m)", "exchange F(2, m)  F(1, m)", "order"),
        ("exchange B(0, m) }", "}", "exchange"),
        ("exchange F(2, m) }", "}", "exchange"),
        ("F(0, 0)  exchange", "exchange F(0, 0)  F(0, 0)  exchange", "exchange"),
        ("F(2, m)  B(2, m)", "F(2, m)  exchange B(2, m)  B(2, m)", "exchange"),
        ("exchange F(1, 0)", "exchange F(1, 0)  exchange F(1, 0)", "repeated-op"),
        ("exchange F(1, 0)", "exchange F(1, 7)", "no-such-microbatch"),
        (
            "stage s in 0 .. 3",
            "edge s in 0 .. 2 from s to 2  stage s in 0 .. 3",
            "exchange",
        ),
    ],
)
def test_what_is_wrong_with_them(old: str, new: str, code: str) -> None:
    assert old in LAYER
    with pytest.raises(CompileError) as caught:
        compile(Source("layer.sched", LAYER.replace(old, new)))
    assert {each.code for each in caught.value.diagnostics} == {code}


def test_they_stand_between_stages_of_one_rank() -> None:
    text = LAYER.replace("ranks = 1", "ranks = 2").replace("on 0", "on s / 2")
    with pytest.raises(CompileError, match="stage 2 after it is on rank 1"):
        compile(
            Source(
                "layer.sched",
                text[: text.index("rank r")]
                + """rank r {
            for m in 0 .. 2 { if r == 0 { F(0, m)  F(1, m) } else { F(2, m) } }
            for m in 0 .. 2 { if r == 0 { exchange B(1, m)  B(1, m)  B(0, m) } else { B(2, m) } }
        }
    }
    """,
            )
        )


def test_an_inference_exchanges_activations_alone() -> None:
    plan = compile("experts_1f1b", {"ranks": 2, "microbatches": 3}, forward_only=True)
    words = plan.ranks[0].text().split()
    assert words[:5] == ["0F0", "1EXCHANGE_F0", "1F0", "2EXCHANGE_F0", "2F0"]
    assert not any("EXCHANGE_B" in word for word in words)


def test_frozen_stages_exchange_nothing_back() -> None:
    """What stands behind them still exchanges gradients, down to the first that is trained."""
    frozen = LAYER.replace("cost exchange F", "frozen 0 .. 1\n    cost exchange F")
    plan = compile(Source("layer.sched", frozen))
    back = [word for word in plan.ranks[0].text().split() if "EXCHANGE_B" in word]
    assert back == ["1EXCHANGE_B0", "1EXCHANGE_B1"]


#: Some transports: a rank waits at transfers, or before ops; batches are atomic, or not.
TRANSPORTS = ("blocking", "gloo", "portable")
#: Two processes of a group, each with a pipeline of its own, and how rank 1 goes about it.
GROUP = """schedule group {
    param ranks = 2
    param microbatches = 4
    pipeline lane(d) in 0 .. 2 runs 2 stage s in 0 .. 2 on %s
    rank r {
        if r == 0 { for m in 0 .. 2 { F(lane(0, 0), m)  exchange F(lane(0, 1), m) } }
        %s
        for m in 0 .. 2 { F(lane(r, 1), m) }
        for m in 0 .. 2 { B(lane(r, 1), m)  exchange B(lane(r, 0), m) }
        for m in 0 .. 2 { B(lane(r, 0), m) }
    }
}
"""


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            "else { for m in 0 .. 2 { F(lane(1, 0), m)  exchange F(lane(1, 1), m) } }",
            "",
        ),
        (
            "else { for m in 0 .. 2 by -1 { F(lane(1, 0), m)  exchange F(lane(1, 1), m) } }",
            "ranks 0-1 come to exchanges in different orders: rank 0 makes "
            "`lane(0,1)EXCHANGE_F0` before `lane(0,1)EXCHANGE_F1`, rank 1 makes "
            "`lane(1,1)EXCHANGE_F1` before `lane(1,1)EXCHANGE_F0`",
        ),
    ],
    ids=["in one order", "in two orders"],
)
def test_a_group_comes_to_them_in_one_order(other: str, said: str) -> None:
    source = Source("group.sched", GROUP % ("d", other))
    if not said:
        compile(source)
        return
    with pytest.raises(CompileError) as caught:
        compile(source)
    (told,) = caught.value.diagnostics
    assert (told.code, told.message) == ("collective", said)


def test_all_of_a_group_exchange_the_same() -> None:
    one = "else { for m in 0 .. 2 { F(lane(1, 0), m) } }"
    text = GROUP % ("d", one)
    text = text.replace(
        "exchange B(lane(r, 0), m)", "if r == 0 { exchange B(lane(0, 0), m) }"
    )
    with pytest.raises(CompileError, match="not all replicas of its stage exchange"):
        compile(Source("group.sched", text))


def side_by_side(plan: Plan, processes: int) -> Schedule:
    """The plan as so many processes of a group run it, each in a pipeline of its own: what is one
    process in the plan is one of each pipeline here.
    """
    ranks = len(plan.ranks)
    (only,) = plan.layout.pipelines
    stages = len(plan.layout.placement)
    placement = tuple(
        rank + ranks * process
        for process in range(processes)
        for rank in plan.layout.placement
    )
    pipelines = tuple(
        Pipeline(
            f"of {number}",
            only.start + stages * number,
            only.stop + stages * number,
            only.microbatches,
        )
        for number in range(processes)
    )
    actions = []
    for process in range(processes):
        for own in plan.ranks:
            moved = Actions()
            for index in range(len(own)):
                kind, stage, microbatch, source, group = own.row(index)
                moved.add(kind, stage + stages * process, microbatch, source, group)
            actions.append(moved)
    return evolve(
        plan,
        layout=Layout(placement, pipelines),
        ranks=tuple(actions),
        costs=Costs(),
    )


def plans_side_by_side() -> Iterator[tuple[Plan, Schedule]]:
    for ranks, microbatches in ((1, 2), (2, 1), (2, 2), (3, 2)):
        plan = compile("experts_1f1b", {"ranks": ranks, "microbatches": microbatches})
        yield plan, side_by_side(plan, 2)


def test_a_group_that_runs_one_plan_ends() -> None:
    """What is proved of the plan of one process holds for all of a group: exchanges add no cycle."""
    for _, schedule in plans_side_by_side():
        for transport in NAMES:
            prove(evolve(schedule, transport=transport))


def is_proved(schedule: Schedule) -> bool:
    try:
        prove(schedule)
    except CompileError:
        return False
    return True


def test_damaged_groups_are_judged_as_by_the_explorer() -> None:
    rng = random.Random(0)
    seen = set()
    schedules = [schedule for _, schedule in plans_side_by_side()][:3]
    for _ in range(60):
        schedule = evolve(rng.choice(schedules), transport=rng.choice(TRANSPORTS))
        for _ in range(rng.randrange(1, 3)):
            schedule = changed(schedule, rng)
        is_right = is_proved(schedule)
        assert is_right == right_on(schedule, [schedule.transport])[schedule.transport]
        seen.add(is_right)
    assert seen == {True, False}


def test_those_that_stand_between_stages_meet_a_group() -> None:
    assert {*BETWEEN} <= {*MEETS}


def test_exchanges_back_may_take_longer() -> None:
    """Without a time of their own, they take as long as those before forwards."""

    def durations(text: str) -> set[tuple[str, float]]:
        (beside,) = simulate(compile(Source("layer.sched", text))).timeline.copies
        return {(Kind(bar.kind).name, bar.end - bar.start) for bar in beside}

    assert durations(LAYER) == {("EXCHANGE_F", 2), ("EXCHANGE_B", 2)}
    longer = LAYER.replace("rank r {", "cost exchange B = 5\n    rank r {")
    assert durations(longer) == {("EXCHANGE_F", 2), ("EXCHANGE_B", 5)}
