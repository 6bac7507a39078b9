"""Weights and gradients that hop from replica to replica: what is wrong with them, how long they
take, what they hold.
"""

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from schedlang import (
    CompileError,
    Costs,
    Kind,
    Schedule,
    Source,
    compile,
    read_plan,
    simulate,
    write_plan,
)
from schedlang.schedule.actions import Actions
from schedlang.schedule.transports import NAMES
from tests.support.damage import in_form
from tests.support.own_hops import comes_home
from tests.support.sections import cases, section
from tests.support.sizes import examples
from tests.support.verdict import proved

#: A stage with two replicas, each on a rank of its own, which is at home on rank 0.
PAIR = """schedule pair {
    param ranks = 2
    param microbatches = 2
    pipeline lane(d) in 0 .. ranks runs 1 stage s in 0 .. 1 on d
    %s
    rank r {
        if r == 0 { %s }
        if r == 1 { %s }
    }
}
"""
HOME = "send weights(lane(0, 0))  F(0)  B(0)  recv gradients(lane(0, 0))"
AWAY = "recv weights(lane(1, 0))  F(0)  B(0)  send gradients(lane(1, 0))  reshard"


GRADIENTS = (Kind.SEND_GRADIENTS, Kind.RECV_GRADIENTS)
WEIGHTS = (Kind.SEND_WEIGHTS, Kind.RECV_WEIGHTS)


def of_kinds(actions: Actions) -> list[tuple[int, int]]:
    return [*zip(actions.kind, actions.stage, strict=True)]


def pair(home: str = HOME, away: str = AWAY, items: str = "") -> Source:
    return Source("pair.sched", PAIR % (items, home, away))


def wrong(home: str = HOME, away: str = AWAY, items: str = "") -> str:
    with pytest.raises(CompileError) as caught:
        compile(pair(home, away, items))
    return str(caught.value)


def test_hops_are_in_the_plan_and_read_again(tmp_path: Path) -> None:
    plan = compile(pair())
    assert [actions.text() for actions in plan.ranks] == [
        "0SEND_WEIGHTS 0F0 0B0 0RECV_GRADIENTS",
        "1RECV_WEIGHTS 1F0 1B0 1SEND_GRADIENTS 1RESHARD",
    ]
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").ranks == plan.ranks


#: Programs, and what ranks 0 and 1 of a pair do, each with a mistake.
WRONG = Path(__file__).with_name("hops.txt")


def test_what_is_wrong_with_hops(golden: Callable[[str, Path], None]) -> None:
    sections = []
    for shown in cases(WRONG):
        program = shown if "schedule" in shown else PAIR % ("", *shown.split("\n"))
        with pytest.raises(CompileError) as caught:
            compile(Source("wrong.sched", program))
        sections.append(section(shown, str(caught.value)))
    golden("".join(sections), WRONG)


@pytest.mark.parametrize("transport", NAMES)
@pytest.mark.parametrize("name", ["held_at_the_end", "held_at_a_send"])
def test_what_stands_behind_a_wait_for_a_hop_comes_after_it(
    name: str, transport: str
) -> None:
    """Also transfers, which would otherwise be on their way once the op before is done."""
    (program,) = (shown for shown in cases(WRONG) if f"schedule {name} " in shown)
    with pytest.raises(CompileError) as caught:
        compile(Source("held.sched", program), transport=transport)
    (found,) = caught.value.diagnostics
    assert (found.code, found.message) == ("deadlock", "ranks 0-1 wait for each other")


@pytest.mark.parametrize("transport", NAMES)
def test_messages_are_placed_among_the_waits_for_hops(transport: str) -> None:
    """Rank 1 receives before it waits for weights, which rank 0 sends behind its activation."""
    program = """schedule passed_on {
        param ranks = 3
        param microbatches = 3
        pipeline lane(d) in 0 .. 3 runs 1 stage s in 0 .. 2 on if s == 1 then d else if d == 2 then 2 else 0
        rank r {
            if r == 0 { F(lane(1, 0), 0)  send weights(lane(0, 1))  F(lane(0, 0), 0)  F(lane(0, 1), 0) }
            if r == 1 { recv weights(lane(1, 1))  send weights(lane(1, 1))  F(lane(1, 1), 0) }
            if r == 2 { recv weights(lane(2, 1))  F(lane(2, 0), 0)  F(lane(2, 1), 0) }
            if r > 0 { reshard(lane(r, 1)) }
        }
    }"""
    plan = compile(Source("passed.sched", program), transport=transport)
    assert [actions.text() for actions in plan.ranks] == [
        "2F0 2SEND_F0 1SEND_WEIGHTS 0F0 1F0",
        "3RECV_WEIGHTS 3RECV_F0 3SEND_WEIGHTS 3F0 3RESHARD",
        "5RECV_WEIGHTS 4F0 5F0 5RESHARD",
    ]


def test_what_stands_behind_the_end_of_weights_begins_after_it() -> None:
    """What rank 1 sends at 5 is received at 8, and only then it begins to receive other weights."""
    program = """schedule behind {
        param ranks = 2
        param microbatches = 2
        pipeline lane(d) in 0 .. ranks runs 1 stage s in 0 .. 2 on d
        rank r {
            if r == 0 {
                for s in 0 .. 2 { send weights(lane(0, s)) }
                F(lane(0, 0), 0)  F(lane(0, 1), 0)  B(lane(0, 1), 0)  recv gradients(lane(0, 1))
                send weights(lane(0, 0))  B(lane(0, 0), 0)  recv gradients(lane(0, 0))
            } else {
                for s in 0 .. 2 { recv weights(lane(1, s)) }
                F(lane(1, 0), 0)  reshard(lane(1, 0))
                F(lane(1, 1), 0)  B(lane(1, 1), 0)  send gradients(lane(1, 1))  reshard(lane(1, 1))
                recv weights(lane(1, 0))  B(lane(1, 0), 0)  send gradients(lane(1, 0))  reshard(lane(1, 0))
            }
        }
    }"""
    costs = Costs(gather_times=(1.0,), sum_times=(3.0,))
    timeline = simulate(compile(Source("behind.sched", program)), costs).timeline
    times = [(str(bar), *bar[3:]) for bar in timeline.copies[1]]
    assert times[3:6] == [
        ("3SEND_GRADIENTS", 5.0, 8.0),
        ("3RESHARD", 8.0, 8.0),
        ("2RECV_WEIGHTS", 8.0, 9.0),
    ]


def test_hops_are_in_no_exchange_and_no_stream() -> None:
    exchange = HOME.replace(
        "send weights(lane(0, 0))", "overlap { send weights(lane(0, 0)) }"
    )
    message = "error[overlap]: `send weights` goes on beside what follows by itself: it stands alone\n"
    assert wrong(exchange).startswith(message)
    streamed = """schedule streamed {
        param ranks = 2
        param microbatches = 2
        pipeline lane(d) in 0 .. ranks runs 1 stage s in 0 .. 1 on d
        rank r { steady { send weights(lane(r, 0))  F(0)  B(0)  U } }
    }"""
    with pytest.raises(
        CompileError, match="`send weights` in `steady`: a schedule without a"
    ):
        compile(Source("streamed.sched", streamed))


def test_transfers_of_microbatches_are_placed_beside_hops() -> None:
    """Two stages on two ranks, in both directions: activations travel, and so do weights."""
    program = """schedule both {
        param ranks = 2
        param microbatches = 2
        pipeline down runs 1 stage s in 0 .. 2 on s
        pipeline up runs 1 stage s in 0 .. 2 on 1 - s
        rank r {
            if r == 0 { send weights(down(0)) } else { recv weights(up(0)) }
            if r == 0 { recv weights(up(1)) } else { send weights(down(1)) }
            F(down(r), 0)  F(up(1 - r), 0)  B(up(1 - r), 0)  B(down(r), 0)
            if r == 0 { send gradients(up(1)) } else { recv gradients(down(1)) }
            if r == 0 { recv gradients(down(0)) } else { send gradients(up(0)) }
            reshard(up(1 - r))
        }
    }"""
    plan = compile(Source("both.sched", program))
    kinds = {Kind(kind) for actions in plan.ranks for kind in actions.kind}
    assert {Kind.SEND_F, Kind.SEND_WEIGHTS, Kind.RECV_GRADIENTS} <= kinds
    assert comes_home(plan)


def test_ops_wait_for_weights_and_the_end_for_gradients() -> None:
    costs = Costs(gather_times=(2.0,), sum_times=(3.0,))
    execution = simulate(compile(pair()), costs)
    timeline = execution.timeline
    assert [bars[0].start for bars in timeline.ranks] == [0.0, 2.0]
    hops = {Kind(bar.kind): bar[3:] for bars in timeline.copies for bar in bars}
    assert hops[Kind.SEND_WEIGHTS] == hops[Kind.RECV_WEIGHTS] == (0.0, 2.0)
    assert hops[Kind.SEND_GRADIENTS] == hops[Kind.RECV_GRADIENTS] == (5.0, 8.0)
    # What was sent is there until it is over.
    assert hops[Kind.RESHARD] == (8.0, 8.0)
    assert timeline.makespan == 8.0


def test_a_rank_waits_at_a_send_for_what_it_passes_on() -> None:
    """Rank 1 passes the weights on before it uses them, and rank 2 gets them two hops late."""
    program = """schedule relay {
        param ranks = 3
        param microbatches = 3
        pipeline lane(d) in 0 .. ranks runs 1 stage s in 0 .. 1 on d
        cost gather = 2
        memory gather = 10
        rank r {
            if r > 0 { recv weights(lane(r, 0)) }
            if r < 2 { send weights(lane(r, 0)) }
            F(0)  B(0)
            if r > 1 { send gradients(lane(r, 0)) }
            if r == 0 { recv gradients(lane(0, 0)) }
            if r == 1 { send weights(lane(1, 0)) }
            if r == 2 { reshard  recv weights(lane(2, 0)) }
            if r == 1 { send gradients(lane(1, 0)) }
            if r == 2 { recv gradients(lane(2, 0))  send gradients(lane(2, 0)) }
            if r == 0 { recv gradients(lane(0, 0)) }
            if r > 0 { reshard }
        }
    }"""
    execution = simulate(compile(Source("relay.sched", program)))
    starts = [bars[0].start for bars in execution.timeline.ranks]
    assert starts == [0.0, 2.0, 4.0]
    assert execution.peak_memory == (1.0, 11.0, 11.0)


def test_a_rank_waits_to_drop_weights_that_come_for_nobody() -> None:
    program = """schedule unused {
        param ranks = 2
        param microbatches = 2
        pipeline lane(d) in 0 .. ranks runs 1 stage s in 0 .. 2 on d
        rank r {
            if r == 0 { send weights(lane(0, 0)) } else { recv weights(lane(1, 0)) }
            F(lane(r, 0), 0)
            if r == 0 { send weights(lane(0, 0)) } else { reshard(lane(1, 0))  recv weights(lane(1, 0)) }
            if r == 1 { reshard(lane(1, 0)) }
            F(lane(r, 1), 0)
            B(lane(r, 1), 0)
            if r == 0 { send weights(lane(0, 0)) } else { recv weights(lane(1, 0)) }
            B(lane(r, 0), 0)
            if r == 0 { recv gradients(lane(0, 0)) } else { send gradients(lane(1, 0)) }
            if r == 1 { reshard(lane(1, 0)) }
        }
    }"""
    plan = compile(Source("unused.sched", program))
    # What does not hop is gathered, which rank 1 begins once it has waited.
    for gathered, start in ((0.0, 5.0), (2.0, 7.0)):
        costs = Costs(gather_times=(2.0, gathered, 2.0, gathered))
        bars = simulate(plan, costs).timeline.ranks[1]
        assert [bar.start for bar in bars[:2]] == [2.0, start]


def test_frozen_stages_send_no_gradients() -> None:
    program = Path("programs/weipipe.sched").read_text()
    plan = compile(
        Source(
            "w.sched",
            program.replace("    rank r {", "    frozen 0 .. 1\n    rank r {"),
        )
    )
    sent = {
        stage
        for actions in plan.ranks
        for kind, stage in of_kinds(actions)
        if kind in GRADIENTS
    }
    assert {plan.layout.piece(stage) for stage in sent} == {1, 2, 3}
    moved = {
        stage
        for actions in plan.ranks
        for kind, stage in of_kinds(actions)
        if kind in WEIGHTS
    }
    assert {plan.layout.piece(stage) for stage in moved} == {0, 1, 2, 3}


def test_an_inference_keeps_the_weights_on_their_way() -> None:
    plan = compile(pair(), forward_only=True)
    assert plan.is_forward_only
    assert plan.ranks[1].text() == "1RECV_WEIGHTS 1F0 1RESHARD"


@st.composite
def damaged(draw: st.DrawFn) -> Schedule:
    """WeiPipe with some of its actions at other places of their rank, or left out."""
    ranks = draw(st.integers(2, 4))
    plan = compile(
        "weipipe", {"ranks": ranks, "microbatches": ranks * draw(st.integers(1, 2))}
    )
    lists = [[actions.row(i) for i in range(len(actions))] for actions in plan.ranks]
    for _ in range(draw(st.integers(0, 3))):
        rows = lists[draw(st.integers(0, ranks - 1))]
        beside = [i for i, row in enumerate(rows) if row[2] < 0]
        which = draw(st.sampled_from(beside))
        row = rows.pop(which)
        if draw(st.booleans()):
            rows.insert(max(0, which + draw(st.integers(-3, 3))), row)
    return evolve(plan, ranks=tuple(map(in_form, lists)))


@given(schedule=damaged())
@examples(200)
def test_the_proof_says_what_going_round_the_ranks_finds(schedule: Schedule) -> None:
    plan = proved(schedule)
    assert (plan is not None) == comes_home(schedule)
    if plan is not None:
        assert simulate(plan).timeline.makespan < inf
