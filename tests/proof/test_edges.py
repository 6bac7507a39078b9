"""Who waits for whom on a transport, by times that are worked out by hand."""

import numpy as np
import pytest
from attrs import evolve

from schedlang import CompileError, Costs, Schedule
from schedlang.proof.edges import ideal_events, transport_events
from schedlang.proof.graph import NOTHING
from schedlang.proof.prove import run_on, simulate
from schedlang.schedule.kinds import RECEIVES
from schedlang.schedule.layout import Layout, Pipeline
from schedlang.schedule.timeline import Beside
from schedlang.schedule.transports import ATOMIC, BLOCKING, Transport, transports
from tests.support.written import written


def starts(plan: Schedule, costs: Costs, transport: str = "gloo") -> dict[str, float]:
    """When each op and each copy of a plan starts."""
    timeline = simulate(evolve(plan, transport=transport), costs).timeline
    bars = [bar for bars in (*timeline.ranks, *timeline.copies) for bar in bars]
    return {str(bar): bar.start for bar in bars}


#: What rank 0 does behind its first send, and rank 1 before it comes to the receive.
LATE = (
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
    "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
)


@pytest.mark.parametrize("transport", ["blocking", "nccl", "nccl-eager"])
def test_a_transfer_takes_its_time_from_when_both_sides_are_there(
    transport: str,
) -> None:
    """Rank 1 stands at its receive from 0 on, and rank 0 comes to its send at 1; the first gradient
    is sent at 5.5, behind both forwards.
    """
    plan = written(*LATE, microbatches=2)
    costs = Costs(p2p_time=0.5)
    found = starts(plan, costs, transport)
    assert found["1F0"] == 1.5
    assert found["0F1"] == (1.5 if transport == "blocking" else 1)
    assert found["0B0"] == found["1B0"] + 2.5


@pytest.mark.parametrize(
    ("transport", "start"),
    [
        ("gloo", 5.5),
        ("nccl", 5.5),
        ("nccl-eager", 5.5),
        ("blocking", 5.5),
        ("buffered", 1),
    ],
)
def test_a_rank_waits_until_what_it_sent_is_received(
    transport: str, start: float
) -> None:
    """Rank 1 comes to its receive at 5, and the way takes 0.5."""
    layout = Layout((0, 1, 1, 0), (Pipeline("a", 0, 2, 2), Pipeline("b", 2, 4, 1)))
    plan = written(
        "0F0 0SEND_F0 0WAIT_SEND_F0 0F1 0SEND_F1 0WAIT_SEND_F1 3RECV_F0 3F0 3B0 3SEND_B0 "
        "3WAIT_SEND_B0 0RECV_B0 0B0 0RECV_B1 0B1",
        "2F0 1RECV_F0 1F0 1RECV_F1 1F1 2SEND_F0 2WAIT_SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0 "
        "1WAIT_SEND_B0 1B1 1SEND_B1 1WAIT_SEND_B1",
        layout=layout,
    )
    costs = Costs(forward_times=(1, 1, 5, 1), p2p_time=0.5)
    assert starts(plan, costs, transport)["0F1"] == start


def test_a_rank_waits_for_sends_of_gradients_alone_too() -> None:
    """Rank 0 comes to the receive behind a forward that takes until 12."""
    plan = written(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_SEND_B1",
        microbatches=2,
    )
    costs = Costs(forward_times=(6, 1), p2p_time=0.5)
    assert starts(plan, costs)["1F1"] == 12.5


def test_a_wait_for_what_is_received_first_of_all() -> None:
    """The receive is the first action of the plan."""
    plan = written(
        "1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0",
        "0F0 0SEND_F0 0WAIT_SEND_F0 0RECV_B0 0B0",
        placement=(1, 0),
    )
    assert starts(plan, Costs(p2p_time=0.5)) == {
        "0F0": 0,
        "0WAIT_SEND_F0": 1.5,
        "1F0": 1.5,
        "1B0": 2.5,
        "1WAIT_SEND_B0": 5,
        "0B0": 5,
    }


@pytest.mark.parametrize(
    "transport",
    [
        None,
        *transports("gloo"),
        *transports("nccl"),
        *transports("buffered:1"),
        BLOCKING,
        ATOMIC,
    ],
    ids=lambda each: each.name if each else "ideal",
)
def test_each_delay_is_the_way_of_a_message(transport: Transport | None) -> None:
    """Which noise in a simulation makes longer: of each message, by its receive."""
    plan = written(
        "0F0 0SEND_F0 0WAIT_SEND_F0 0F1 (0SEND_F1;0RECV_B0) 0WAIT_SEND_F1 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 (1RECV_F1;1SEND_B0) 1WAIT_SEND_B0 1F1 1B1 1SEND_B1 1WAIT_SEND_B1",
        microbatches=2,
    )
    costs = Costs(p2p_time=0.5)
    if transport is None:
        events = ideal_events(plan, costs)
    else:
        events = transport_events(plan, costs, transport)
    graph = events.graph
    receive = np.append(events.receive, NOTHING)[graph.edge]
    receives = plan.columns.where(*RECEIVES.values())
    assert set(receive[graph.delay > 0].tolist()) == set(receives.tolist())
    assert set(receive[graph.delay == 0].tolist()) <= {NOTHING}


#: The first action of all is a batch, or a receive alone; rank 1 sends both messages singly.
FIRST = (
    "1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
)


def test_a_batch_in_front_of_all_is_complete_together_with_what_it_meets() -> None:
    """So the first send, which is over only with the batch, waits for the second one behind it."""
    plan = written(
        f"(1RECV_F0;1RECV_F1) {FIRST[0]}", FIRST[1], placement=(1, 0), microbatches=2
    )
    run_on(plan, plan.costs, BLOCKING)
    with pytest.raises(CompileError, match="wait for each other"):
        run_on(plan, plan.costs, ATOMIC)


def test_batches_in_front_of_all_that_meet() -> None:
    sends, receives = (
        FIRST[1].replace("0SEND_F0 0F1 0SEND_F1", "0F1 (0SEND_F0;0SEND_F1)"),
        FIRST[0],
    )
    plan = written(
        f"(1RECV_F0;1RECV_F1) {receives}", sends, placement=(1, 0), microbatches=2
    )
    run_on(plan, plan.costs, ATOMIC)


@pytest.mark.parametrize("transport", ["gloo", "nccl", "blocking"])
def test_transfers_without_ops(transport: str) -> None:
    with pytest.raises(CompileError) as caught:
        simulate(written("0SEND_F0", "1RECV_F0", transport=transport))
    (told,) = caught.value.diagnostics
    assert told.message == "`0SEND_F0` on rank 0 runs before `0F0`"


def beside(plan: Schedule, costs: Costs) -> list[Beside]:
    """The sums and gathers that take time, with the actions after and before them."""
    return sorted(simulate(plan, costs, ideal=True).timeline.beside)


#: Two stages on one rank, with a step each.
STEPS = "0F0 1F0 1B0 0B0 0U 1U"


def test_a_step_waits_for_the_sum_of_its_stage() -> None:
    """Sums over replicas outside of the plan: that of stage 1 goes from 4 to 6, and then that of
    stage 0 from 6 to 9.
    """
    plan = written(STEPS, placement=(0, 0))
    costs = Costs(sum_times=(3, 2))
    assert beside(plan, costs) == [(2, 5, 4, 6), (3, 4, 6, 9)]
    assert starts(plan, costs) | {"0F0": 0} == {
        "0F0": 0,
        "1F0": 1,
        "1B0": 2,
        "0B0": 4,
        "0U": 9,
        "1U": 9,
    }


def test_sums_that_take_no_time_have_no_place() -> None:
    plan = written(STEPS, placement=(0, 0))
    assert beside(plan, Costs(sum_times=(3, 0))) == [(3, 4, 6, 9)]
    # Nor has one where the program writes it: it has its own.
    text = "0F0 1F0 1B0 0B0 0REDUCE_GRAD 0U 1U"
    assert beside(written(text, placement=(0, 0)), Costs(sum_times=(3, 0))) == [
        (3, 5, 6, 9)
    ]


def test_sums_of_replicas_on_one_rank_go_beside_those_of_several() -> None:
    """Rank 0 holds both replicas of the second stage, and one of the first."""
    layout = Layout((0, 0, 1, 0), (Pipeline("a", 0, 2, 1), Pipeline("b", 2, 4, 1)))
    plan = written(
        "0F0 1F0 3RECV_F0 3F0 1B0 0B0 3B0 3SEND_B0 0U 1U 3U",
        "2F0 2SEND_F0 2RECV_B0 2B0 2U",
        layout=layout,
    )
    found = beside(plan, Costs(sum_times=(5, 7) * 2))
    # The last gradient of the second stage is made at 9, and that of the first at 11.
    times = sorted((each.start, each.end) for each in found)
    assert times == [(9, 16), (11, 16), (11, 16)]


def test_a_gather_is_waited_for() -> None:
    plan = written("0F0 0B0")
    assert starts(plan, Costs(gather_times=(9,))) == {"0F0": 9, "0B0": 10}
    assert beside(plan, Costs(gather_times=(9,))) == [(-1, 0, 0, 9)]


def test_times_at_other_costs_than_those_of_the_program() -> None:
    """Where the program writes gathers: its own times are kept, others are not taken for them."""
    plan = written("0UNSHARD 0F0 0B0 0RESHARD")
    for forward in (1, 5, 1):
        costs = Costs(forward_times=(forward,), gather_times=(2,))
        assert simulate(plan, costs, ideal=True).timeline.makespan == 4 + forward


@pytest.mark.parametrize("reload", [0, 1])
def test_copies_take_turns_on_a_shared_link(reload: float) -> None:
    """Also where those in one direction take no time: rank 0 comes to both of its copies at 1."""
    layout = Layout(
        (0, 1), (Pipeline("a", 0, 1, 1), Pipeline("b", 1, 2, 1)), links=(0, 0)
    )
    texts = ("0F0 0OFFLOAD0 0RELOAD0 0B0", "1F0 1OFFLOAD0 1RELOAD0 1B0")
    plan = written(*texts, layout=layout)
    found = starts(plan, Costs(offload_times=(4,), reload_times=(reload,)))
    assert (found["0OFFLOAD0"], found["0RELOAD0"]) == (1, 5)
    assert (found["1OFFLOAD0"], found["1RELOAD0"]) == (5 + reload, 9 + reload)


def test_overlapping_ops_have_the_times_of_their_microbatches() -> None:
    """They are shown one behind the other; together they take 5, and then 7."""
    plan = written("0F0 (0F1;0B0) (0F2;0B1) 0B2", microbatches=3)
    costs = Costs(forward_times=((1, 2, 3),), backward_times=((3, 4, 5),))
    assert starts(plan, costs) == {
        "0F0": 0,
        "0F1": 1,
        "0B0": 3,
        "0F2": 6,
        "0B1": 9,
        "0B2": 13,
    }


#: Three models of one stage, all on one rank.
MODELS = Layout(
    (0, 0, 0),
    tuple(Pipeline(name, at, at + 1, 1) for at, name in enumerate("abc")),
    models=True,
)


@pytest.mark.parametrize(
    ("text", "ops"),
    [
        # A forward behind its gather, and a step behind its sum, begin together.
        (
            "2F0 2B0 0F0 0B0 0REDUCE_GRAD 1UNSHARD (1F0;0U) 1B0 1RESHARD",
            {"1F0": 15, "0U": 16},
        ),
        # A step stands four actions before a forward, and its stream behind that of gathers.
        (
            "0F0 0B0 0REDUCE_GRAD 0U 2F0 2B0 1UNSHARD 1F0 1B0 1RESHARD",
            {"0U": 5, "1F0": 17},
        ),
    ],
    ids=["together", "apart"],
)
def test_ops_wait_for_gathers_and_sums_alike(text: str, ops: dict[str, float]) -> None:
    plan = written(text, layout=MODELS)
    found = starts(plan, Costs(gather_times=(0, 9, 0), sum_times=(2,)))
    assert {op: found[op] for op in ops} == ops
