"""Warm-ups that can be run once more, against their definition, and every interleaving of them."""

import pytest
from attrs import evolve
from hypothesis import given

from schedlang import Plan, Source, compile, simulate
from schedlang.lowering import alternatives, lower
from schedlang.ranks.warm_up import warm_ups
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule
from tests.support.explorer import all_end
from tests.support.strategies import schedules

FORWARD = (Kind.F, Kind.SEND_F, Kind.RECV_F)
TRANSPORTS = ("blocking", "atomic", "nccl-warm", "nccl-edge", "buffered:1", "gloo")


def by_definition(schedule: Schedule) -> list[int]:
    """Warm-ups that are cut, batch by batch, until nothing is left of whose ends one is outside."""
    ends = [len(actions) for actions in schedule.ranks]
    layout = schedule.layout
    before: list[int] = []
    while before != ends:
        before = ends
        inside = {
            actions.row(index)[:3]
            for actions, end in zip(schedule.ranks, ends, strict=True)
            for index in range(end)
        }
        ends = []
        for actions, last in zip(schedule.ranks, before, strict=True):
            end = 0
            for batch in actions.batches():
                needed = []
                for kind, number, microbatch in (
                    actions.row(index)[:3] for index in batch
                ):
                    if kind in (Kind.SEND_F, Kind.RECV_F):
                        needed.append((*layout.counterpart(kind, number), microbatch))
                    if kind == Kind.RECV_F:
                        needed.append(
                            (Kind.F, layout.ends(kind, number)[0], microbatch)
                        )
                kinds = {actions.kind[index] for index in batch}
                if (
                    batch.stop > last
                    or not kinds <= {*FORWARD}
                    or not inside >= {*needed}
                ):
                    break
                end = batch.stop
            ends.append(end)
    return ends


def cut(schedule: Schedule, ends: list[int]) -> Schedule:
    """The warm-ups, twice."""
    ranks = tuple(
        actions.issued_as(
            [[*batch] for batch in actions.batches() if batch.stop <= end] * 2
        )
        for actions, end in zip(schedule.ranks, ends, strict=True)
    )
    return evolve(schedule, ranks=ranks)


def words(plan: Plan) -> list[str]:
    """The forwards in the warm-up of each rank."""
    return [
        " ".join(
            actions.word(index) for index in range(end) if actions.kind[index] == Kind.F
        )
        for actions, end in zip(plan.ranks, warm_ups(plan), strict=True)
    ]


@given(schedules())
def test_both_ends_of_each_message_are_inside_or_outside(schedule: Schedule) -> None:
    lowered = lower(schedule)
    changes = [*alternatives("blocking").values(), *alternatives("nccl").values()]
    for each in (lowered, *(change(lowered) for change in changes)):
        assert warm_ups(each) == by_definition(each)


@given(schedules())
def test_warm_ups_run_through_by_themselves_where_the_schedule_does(
    schedule: Schedule,
) -> None:
    lowered = lower(schedule)
    twice = cut(lowered, warm_ups(lowered))
    for transport in TRANSPORTS:
        assert all_end(twice, transport) or not all_end(lowered, transport), transport


def test_warm_ups_of_published_schedules() -> None:
    for name in ("1f1b", "zb_h2", "zb_2p", "zb_v"):
        assert words(compile(name, {"ranks": 4})) == [
            "0F0 0F1 0F2 0F3",
            "1F0 1F1 1F2",
            "2F0 2F1",
            "3F0",
        ]
    assert words(compile("gpipe", {"ranks": 2, "microbatches": 2})) == [
        "0F0 0F1",
        "1F0 1F1",
    ]
    # All that a rank does which has no backward.
    plan = compile(Source("frozen.sched", FROZEN))
    assert warm_ups(plan)[0] == len(plan.ranks[0])


FROZEN = """schedule frozen {
    param ranks = 2
    param microbatches = 2
    frozen 0 .. 1
    rank r {
        repeat microbatches { F(next) }
        if r == 1 { repeat microbatches { B(next) } }
    }
}
"""


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("name", ["zb_h2", "zb_2p", "zb_v"])
def test_all_ranks_end_a_step_before_the_next_warm_up_ends(
    name: str, ranks: int
) -> None:
    """By the simulation: in schedules without a bubble by span, a step repeats after its span, and
    what is known where the step before has ended everywhere comes in time for all ranks.
    """
    plan = compile(name, {"ranks": ranks, "microbatches": 3 * ranks})
    timeline = simulate(plan, ideal=True).timeline
    for rank, end in enumerate(warm_ups(plan)):
        forwards = plan.ranks[rank].kind[:end].count(Kind.F)
        following = [*timeline.ranks[rank]][forwards]
        assert timeline.makespan + 1 <= following.start + timeline.span
