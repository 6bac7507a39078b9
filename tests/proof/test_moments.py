"""The order of moments: against an execution that is gone through op by op, and by plans in which one
thing is out of that order.
"""

import random

import numpy as np
import pytest
from attrs import evolve

from schedlang import Costs, Kind, Schedule, compile, simulate
from schedlang.lowering.fusion import fuse
from schedlang.proof.edges import ideal_events
from schedlang.proof.moments import Moments, follows_moments, global_events
from schedlang.schedule.layout import Layout, Pipeline
from tests.support.damage import in_form, random_ops, updated_ops
from tests.support.own_needs import needs
from tests.support.written import words, written, wrong

Op = tuple[int, int, int]

#: What ops make that others need, by their kind.
MADE = {
    Kind.F: (Kind.F,),
    Kind.B: (Kind.B, Kind.W),
    Kind.I: (Kind.B,),
    Kind.W: (Kind.W,),
    Kind.U: (),
}


def follows(plan: Schedule) -> bool:
    return follows_moments(plan, ideal_events(plan, plan.costs))


def executed(schedule: Schedule) -> tuple[list[Op], dict[Op, int]]:
    """The ops in the order in which they hand over, and how many do so before each starts."""
    durations = schedule.costs.durations(schedule.layout)
    lists = [
        [actions.row(index)[:3] for index in range(len(actions))]
        for actions in schedule.ranks
    ]
    order: list[Op] = []
    before: dict[Op, int] = {}
    made: set[Op] = set()
    at = [0] * len(lists)
    ends: dict[int, float] = {}
    now = 0.0
    while True:
        # All that end now hand over, first those whose rank has done less; then all start that can.
        for index, rank in sorted(
            (at[each], each) for each in ends if ends[each] == now
        ):
            kind, stage, unit = lists[rank][index]
            made |= {(makes, stage, unit) for makes in MADE[Kind(kind)]}
            order.append((kind, stage, unit))
            del ends[rank]
            at[rank] += 1
        for rank, ops in enumerate(lists):
            if rank not in ends and at[rank] < len(ops):
                op = ops[at[rank]]
                if made.issuperset(needs(schedule, *op)):
                    before[op] = len(order)
                    ends[rank] = now + durations[op[0]][op[1]]
        if not ends:
            return order, before
        now = min(ends.values())


def drawn(rng: random.Random) -> Schedule:
    """Ops in an order in which they can run, some of which take no time."""
    sizes = rng.choice([(1, 2, 2), (2, 2, 3), (3, 1, 3), (4, 1, 2)])
    ops = rng.choice([random_ops, lambda rng: updated_ops(sizes, 2, rng)])(rng)
    names = [
        f"{op}_times" for op in ("forward", "backward", "input", "weight", "update")
    ]
    times = {
        name: tuple(rng.choice([0.0, 0.0, 1.0, 2.0]) for _ in ops.placement)
        for name in names
    }
    schedule = evolve(ops, costs=Costs(**times))
    durations = schedule.costs.durations(schedule.layout)
    # Otherwise all messages of one time are of one round.
    some = any(
        not each for kind in (Kind.F, Kind.B, Kind.I) for each in durations[kind]
    )
    return schedule if some else drawn(rng)


def test_moments_are_those_of_the_execution() -> None:
    """Where some op takes no time and hands something on."""
    rng = random.Random(0)
    stuck = 0
    for _ in range(60):
        schedule = drawn(rng)
        columns = schedule.columns
        ops = [
            *zip(
                columns.kind.tolist(),
                columns.stage.tolist(),
                columns.microbatch.tolist(),
                strict=True,
            )
        ]
        moments = Moments(global_events(schedule))
        order, before = executed(schedule)
        there = [op in before for op in ops]
        assert moments.is_stuck.tolist() == [not each for each in there]
        runs = np.flatnonzero(there)
        in_order = runs[np.argsort(moments.hand_over[runs])]
        assert [ops[row] for row in in_order] == order
        assert [
            (moments.issue[row], op) for row, op in enumerate(ops) if there[row]
        ] == [(2 * before[op] + 1, op) for op in ops if op in before]
        assert moments.hand_over[in_order].tolist() == [
            2 * turn + 2 for turn in range(len(runs))
        ]
        # Each op that never runs has three moments: one for what it lacks comes before it.
        never = np.flatnonzero(moments.is_stuck)
        issue, hand_over = moments.issue[never], moments.hand_over[never]
        lacks = issue - 1
        assert (lacks < issue).all()
        assert (issue < hand_over).all()
        assert (np.append(2 * len(runs), hand_over[:-1])[: len(never)] < lacks).all()
        stuck += len(never) > 0
    assert 0 < stuck < 30


def test_what_never_runs_comes_behind_all_that_does() -> None:
    layout = Layout((0, 1), (Pipeline("a", 0, 1, 1), Pipeline("b", 1, 2, 1)))
    moments = Moments(global_events(written("0B0", "1F0 1B0", layout=layout)))
    assert moments.is_stuck.tolist() == [True, False, False]
    assert moments.issue[0] - 1 > moments.hand_over[1:].max()


ONE_MESSAGE = ("0F0 0SEND_F0", "1RECV_F0 1F0")
SKIP = Layout((0, 1, 2), (Pipeline("", 0, 3, 1),), skips=((0, 2),))


@pytest.mark.parametrize(
    "plan",
    [
        written(*ONE_MESSAGE),
        # The first action of all is a receive.
        written(*ONE_MESSAGE[::-1], placement=(1, 0)),
        # A copy is begun before a message goes.
        written(
            "0F0 0OFFLOAD0 0RELOAD0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"
        ),
        # One op hands over two messages.
        written(
            "0F0 0SEND_F0 3SEND_F0 3RECV_B0 0RECV_B0 0B0",
            "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
            "3RECV_F0 2RECV_F0 2F0 2B0 2SEND_B0 3SEND_B0",
            layout=SKIP,
        ),
        # Batches that meet batches.
        fuse(compile("1f1b", {"ranks": 3, "microbatches": 6})),
        # Messages that take their time.
        compile("1f1b", {"ranks": 4, "microbatches": 6}, Costs(p2p_time=1.5)),
    ],
    ids=["one", "receive first", "copy", "skip", "batches", "time"],
)
def test_what_is_in_the_order_of_its_moments(plan: Schedule) -> None:
    assert follows(plan)
    assert not wrong(plan)


def test_a_receive_of_a_message_that_there_is_not() -> None:
    """It stands before all else, where nothing is out of order."""
    plan = written("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_B0 1RECV_F0 1F0 1B0 1SEND_B0")
    assert not follows(plan)
    (told,) = wrong(plan)
    assert told.message == "`1RECV_B0` has no other rank to reach"
    assert words(told) == ["1RECV_B0"]


def test_a_message_that_goes_twice_in_place_of_another_one() -> None:
    """Of one op, for its neighbour, and none by the skip."""
    plan = written(
        "0F0 0SEND_F0 0SEND_F0 3RECV_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        "3RECV_F0 2RECV_F0 2F0 2B0 2SEND_B0 3SEND_B0",
        layout=SKIP,
    )
    assert not follows(plan)
    assert "unmatched-receive" in {each.code for each in wrong(plan)}


@pytest.mark.parametrize(
    "ways",
    [
        Costs(link_times=[[9] * 2] * 2),
        Costs(boundary_bytes=(9,), bandwidth_in_node=1),
        Costs(latency_in_node=9),
        Costs(boundary_bytes=(9,), bandwidth_between_nodes=1, ranks_per_node=1),
        Costs(latency_between_nodes=9, ranks_per_node=1),
        Costs(sum_times=(9,)),
        Costs(gather_times=(9,)),
    ],
    ids=range(7),
)
def test_what_is_handed_over_is_there_at_once(ways: Costs) -> None:
    plan = written("0F0 0SEND_F0 0RECV_B0 0B0 0U", "1RECV_F0 1F0 1B0 1SEND_B0 1U")
    assert simulate(plan, ways, ideal=True).timeline.makespan > 6
    assert global_events(evolve(plan, costs=ways)).timeline().makespan == 6


def test_copies_take_no_time_where_moments_count() -> None:
    plan = written("0F0 0OFFLOAD0 0RELOAD0 0B0")
    plan = evolve(plan, costs=Costs(offload_times=(2,), reload_times=(3,)))
    (copies,) = global_events(plan).timeline().copies
    assert [(bar.start, bar.end) for bar in copies] == [(1, 1), (1, 1)]


@pytest.mark.parametrize("program", ["weipipe", "zeropp", "looped_bfs_sharded"])
def test_gathers_sums_and_hops_have_moments(program: str) -> None:
    """Those of several ranks; what stands before a wait for a hop cannot stand behind it."""
    plan = compile(program, {"ranks": 4, "microbatches": 8})
    events = ideal_events(plan, plan.costs)
    assert follows_moments(plan, events)
    sends = [kind == Kind.SEND_WEIGHTS for kind in plan.ranks[1].kind]
    for index in np.flatnonzero(sends).tolist():
        rows = [plan.ranks[1].row(each) for each in range(len(plan.ranks[1]))]
        rows.append(rows.pop(index))
        late = evolve(plan, ranks=(plan.ranks[0], in_form(rows), *plan.ranks[2:]))
        assert not ideal_events(late, late.costs).graph.is_whole
        assert not follows_moments(late, ideal_events(late, late.costs))
