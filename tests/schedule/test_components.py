"""Ops made of components: how long two of them take together, and what follows from that."""

import re
from itertools import pairwise, permutations
from pathlib import Path
from random import Random

import pytest

from schedlang import Costs, compile, read_plan, simulate, write_plan
from schedlang.extras.search.tune.bounds import bounds_of
from schedlang.report.views import lay_out
from schedlang.report.views.svg import svg
from schedlang.schedule.costs import costs_of
from schedlang.schedule.costs.component_costs import Component, Piece, alone, together
from schedlang.schedule.kinds import Kind

#: A layer of experts, half of whose forward is all-to-all.
EXPERTS = {
    "F": [
        "attention 1 compute",
        "dispatch 1 all_to_all",
        "mlp 1 compute",
        "combine 1 all_to_all",
    ],
    "B": [
        "combine 1 all_to_all",
        "mlp 2 compute",
        "dispatch 1 all_to_all",
        "attention 2 compute",
    ],
}
TIMES = {
    "forward_times": (4,),
    "backward_times": (6,),
    "weight_times": (2,),
    "input_times": (4,),
}


def shortest(first: list[Piece], second: list[Piece]) -> float:
    """The least time of two ops, over all orders in which their components may begin."""
    best = float("inf")
    # An order says, one component after the other, which op's next component begins: 0 the first
    # op's, 1 the second one's.
    for order in set(permutations([0] * len(first) + [1] * len(second))):
        ahead = [list(first), list(second)]
        ends = [0.0, 0.0]
        free: dict[str, float] = {}
        for op in order:
            piece = ahead[op].pop(0)
            start = max(ends[op], free.get(piece.component.resource, 0.0))
            ends[op] = free[piece.component.resource] = start + piece.end - piece.start
        best = min(best, max(ends))
    return best


def chain(random: Random) -> list[Piece]:
    """An op of up to four components on up to three resources."""
    components = [
        Component(f"c{number}", random.choice([1, 2, 3, 0.7]), random.choice("abc"))
        for number in range(random.randint(1, 4))
    ]
    return alone(components, random.choice([1, 3.3, 5]))


def test_two_ops_take_the_least_time_that_any_order_allows() -> None:
    random = Random(0)
    for _ in range(200):
        first = chain(random)
        second = chain(random)
        placed = together(first, second)
        for own, before in zip(placed, (first, second), strict=True):
            assert [piece.component for piece in own] == [
                piece.component for piece in before
            ]
            for one, other in zip(own, before, strict=True):
                assert one.end - one.start == pytest.approx(other.end - other.start)
            assert all(one.end <= other.start + 1e-9 for one, other in pairwise(own))
        for one in placed[0]:
            for other in placed[1]:
                if one.component.resource == other.component.resource:
                    assert (
                        one.end <= other.start + 1e-9 or other.end <= one.start + 1e-9
                    )
        ends = [own[-1].end for own in placed]
        assert max(ends) == pytest.approx(shortest(first, second))


def test_shares_are_of_the_time_that_counts() -> None:
    durations = Costs(**TIMES, components=EXPERTS).durations(2)
    pair = [(Kind.F, 0, 0), (Kind.B, 1, 0)]
    # Together they take 6, in which the forward counts for 4 parts of 10.
    assert durations.ends(pair) == pytest.approx([6 * 4 / 10, 6])
    twice = Costs(
        forward_times=(8,), backward_times=(12,), components=EXPERTS
    ).durations(2)
    assert twice.ends(pair)[-1] == pytest.approx(12)
    assert durations.ends([(Kind.F, 0, 0)]) == [4]
    # What is not listed is one piece that computes, for 2 here, and all-to-alls take 1; of three
    # ops, one follows the other.
    assert durations.ends([(Kind.F, 0, 0), (Kind.W, 1, 0)])[-1] == pytest.approx(5)
    assert durations.ends([*pair, (Kind.W, 1, 1)])[-1] == pytest.approx(12)


@pytest.mark.parametrize(
    ("program", "ranks", "microbatches", "stages"),
    [("dualpipe", 8, 20, 8), ("dualpipe", 4, 8, 4), ("dualpipe_v", 4, 10, 8)],
)
def test_the_bubble_is_the_one_that_is_published(
    program: str, ranks: int, microbatches: int, stages: int
) -> None:
    """(PP/2 - 1)(F&B + B - 3W), on the ranks that wait most (DualPipe's README)."""
    costs = Costs(
        **TIMES,
        components=EXPERTS | {"I": [word.replace("2", "1") for word in EXPERTS["B"]]},
    )
    plan = compile(program, {"ranks": ranks, "microbatches": microbatches}, costs)
    timeline = simulate(plan).timeline
    idle = timeline.makespan - min(timeline.busy)
    # F&B together takes 6, and so does a backward alone; W takes 2.
    assert idle == pytest.approx((stages / 2 - 1) * (6 + 6 - 3 * 2))


def test_a_plan_keeps_them(tmp_path: Path) -> None:
    costs = costs_of({"components": EXPERTS, "forward_times": 4})
    plan = compile("dualpipe", costs=costs)
    write_plan(plan, tmp_path / "plan.json")
    kept = read_plan(tmp_path / "plan.json")
    assert kept.costs == plan.costs == costs
    assert kept.costs.to_json()["components"] == EXPERTS
    assert simulate(kept).timeline.makespan == simulate(plan).timeline.makespan
    assert eval(repr(costs), {"Costs": Costs}) == costs
    # Given ones replace those of the program, and its overlap.
    assert Costs(overlap_times=(3,)).over(costs).components is None


def test_a_step_is_not_said_to_take_longer_than_it_does() -> None:
    costs = Costs(**TIMES, components=EXPERTS)
    plan = compile("interleaved_overlap", {"ranks": 2, "microbatches": 64}, costs)
    assert bounds_of(plan.layout, costs).time <= simulate(plan).timeline.makespan


def test_every_resource_has_a_lane() -> None:
    plan = compile("dualpipe", costs=Costs(**TIMES, components=EXPERTS))
    execution = simulate(plan)
    picture = lay_out(plan, execution)
    assert [lane.resource for lane in picture.lanes] == ["compute", "all_to_all"]
    for rank, bars in enumerate(execution.timeline.ranks):
        boxes = [box for lane in picture.lanes for box in lane.rows[rank]]
        for lane in picture.lanes:
            row = [(box.bar.start, box.bar.end) for box in lane.rows[rank]]
            assert all(end <= start + 1e-9 for (_, end), (start, _) in pairwise(row))
        # In a pair, two ops take less than their own times.
        own = sum(plan.costs.durations(plan.layout).time(*bar[:3]) for bar in bars)
        assert sum(box.bar.end - box.bar.start for box in boxes) == pytest.approx(own)
        assert max(box.bar.end for box in boxes) == pytest.approx(max(bars.end))
    assert ">all_to_all</text>" in svg(picture)
    assert lay_out(plan, simulate(plan, Costs(overlap_times=(8,)))).lanes == ()


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            {"X": ["a 1 compute"]},
            ValueError,
            "`components` of 'X': the kinds of ops that have some",
        ),
        (
            {"F": "a 1 compute"},
            TypeError,
            "`components` of F is 'a 1 compute': it must be a list",
        ),
        ({"F": []}, ValueError, "`components` of F is an empty list: leave F out"),
        (
            {"F": ["a compute"]},
            ValueError,
            "`components` of F has 'a compute': it must be such as",
        ),
        (
            {"F": ["a much compute"]},
            ValueError,
            "`components` of F has 'a much compute'",
        ),
        ({"F": ["a 0 compute"]}, ValueError, "the share of a is 0, not above 0"),
        ({"F": ["a nan compute"]}, ValueError, "the share of a is nan, not above 0"),
        (["a 1 compute"], TypeError, "it must be lists by the kinds of ops, such as"),
    ],
)
def test_what_cannot_be_components(
    given: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        Costs(components=given)
    assert message in str(raised.value)
    with pytest.raises(ValueError, match=re.escape(message)):
        costs_of({"components": given})


def test_an_overlap_has_one_length() -> None:
    with pytest.raises(
        ValueError, match="`overlap_times` says how long ops that overlap take"
    ):
        Costs(overlap_times=(3,), components=EXPERTS)
