"""Who waits for whom on a transport, by times that are worked out by hand."""

import numpy as np
import pytest
from attrs import evolve

from schedlang import CompileError, Costs, Schedule
from schedlang.proof.edges import ideal_events
from schedlang.proof.events import Events
from schedlang.proof.graph import NOTHING, Graph
from schedlang.proof.message_edges import transport_events
from schedlang.proof.prove import simulate
from schedlang.proof.running import run_on
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
    """Rank 0 comes to the receive behind forwards that take until 18; the next message is there at
    12.5.
    """
    plan = written(
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0RECV_B0 0B0 0RECV_B1 0B1 0RECV_B2 0B2",
        "1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1WAIT_SEND_B1 "
        "1RECV_F2 1F2 1B2 1SEND_B2 1WAIT_SEND_B2",
        microbatches=3,
    )
    costs = Costs(forward_times=(6, 1), p2p_time=0.5)
    assert starts(plan, costs)["1F1"] == 18.5


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


#: Two ranks with copies on one link.
SHARED = Layout((0, 1), (Pipeline("a", 0, 1, 1), Pipeline("b", 1, 2, 1)), links=(0, 0))
COPIES = ("0F0 0OFFLOAD0 0RELOAD0 0B0", "1F0 1OFFLOAD0 1RELOAD0 1B0")


@pytest.mark.parametrize("ideal", [False, True])
@pytest.mark.parametrize("reload", [0, 1])
def test_copies_take_turns_on_a_shared_link(reload: float, ideal: bool) -> None:
    """Also where those in one direction take no time: rank 0 comes to both of its copies at 1."""
    plan = written(*COPIES, layout=SHARED)
    costs = Costs(offload_times=(4,), reload_times=(reload,))
    copies = [
        (str(bar), bar.start)
        for bars in simulate(plan, costs, ideal).timeline.copies
        for bar in bars
    ]
    assert copies == [
        ("0OFFLOAD0", 1),
        ("0RELOAD0", 5),
        ("1OFFLOAD0", 5 + reload),
        ("1RELOAD0", 9 + reload),
    ]


def test_a_copy_that_is_late_because_of_others_loses_its_turn() -> None:
    """Rank 0 comes to its second offload at 12, since its first backward waits for a copy until 9;
    and rank 1 to its own at 6. Without the copies they would come at 4 and at 6.
    """
    pipelines = (Pipeline("a", 0, 1, 2), Pipeline("b", 1, 2, 1))
    plan = written(
        "0F0 0OFFLOAD0 0RELOAD0 0B0 0F1 0OFFLOAD1 0RELOAD1 0B1",
        COPIES[1],
        layout=evolve(SHARED, pipelines=pipelines),
    )
    costs = Costs(forward_times=(1, 6), offload_times=(4,), reload_times=(4,))
    found = starts(plan, costs)
    assert (found["0OFFLOAD0"], found["1OFFLOAD0"], found["0OFFLOAD1"]) == (1, 9, 17)


def test_turns_are_looked_for_until_they_stay() -> None:
    """Rank 0 comes to its second reload at 14, while the first one of rank 1 takes until 18; by the
    times of the first order that is found, it would come after the second one of rank 1.
    """
    pipelines = (Pipeline("a", 0, 1, 2), Pipeline("b", 1, 2, 2))
    plan = written(
        "0F0 0OFFLOAD0 0F1 0OFFLOAD1 0RELOAD0 0B0 0RELOAD1 0B1",
        "1F0 1OFFLOAD0 1F1 1OFFLOAD1 1RELOAD0 1B0 1RELOAD1 1B1",
        layout=evolve(SHARED, pipelines=pipelines),
    )
    costs = Costs(
        forward_times=(1, 2),
        backward_times=(2, 3),
        offload_times=(5, 1),
        reload_times=(1, 4),
    )
    found = starts(plan, costs)
    names = ("0RELOAD0", "1RELOAD0", "0RELOAD1", "1RELOAD1")
    assert [found[name] for name in names] == [11, 14, 18, 21]


def test_copies_take_turns_by_the_times_that_count() -> None:
    """As in a run with noise, also where the program writes gathers."""
    plan = written(
        f"0UNSHARD {COPIES[0]} 0RESHARD",
        f"1UNSHARD {COPIES[1]} 1RESHARD",
        layout=SHARED,
    )
    asked: list[Events] = []

    def graph_of(events: Events) -> Graph:
        asked.append(events)
        return events.graph

    ideal_events(plan, plan.costs, graph_of)
    assert asked


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


def test_ops_that_begin_together_wait_for_a_gather_and_a_sum() -> None:
    plan = written(
        "2F0 2B0 0F0 0B0 0REDUCE_GRAD 1UNSHARD (1F0;0U) 1B0 1RESHARD", layout=MODELS
    )
    found = starts(plan, Costs(gather_times=(0, 9, 0), sum_times=(2,)))
    assert (found["1F0"], found["0U"]) == (15, 16)


@pytest.mark.parametrize(
    ("between", "start"),
    [
        ("2F0 2B0", 17),
        ("2F0 2I0 2W0", 17),
        ("2F0 2R0 2I0 2W0", 18),
        ("2F0 2OFFLOAD0 2RELOAD0 2I0 2W0", 19),
    ],
)
def test_one_op_waits_for_a_sum_and_one_behind_it_for_a_gather(
    between: str, start: float
) -> None:
    """However many actions there are between the two."""
    plan = written(
        f"0F0 0B0 0REDUCE_GRAD 0U {between} 1UNSHARD 1F0 1B0 1RESHARD", layout=MODELS
    )
    found = starts(plan, Costs(gather_times=(0, 9, 0), sum_times=(2,)))
    assert (found["0U"], found["1F0"]) == (5, start)


def test_what_is_begun_behind_the_release_of_weights_waits_for_it() -> None:
    """Rank 1 drops the weights of stage 2 at 11, once their gradients have been sent; then only it
    begins the sum of stage 3.
    """
    layout = Layout((0, 0, 1, 1), (Pipeline("a", 0, 2, 1), Pipeline("b", 2, 4, 1)))
    plan = written(
        "0SEND_WEIGHTS 0F0 1F0 1B0 0B0 0RECV_GRADIENTS 1REDUCE_GRAD",
        "2RECV_WEIGHTS 2F0 3F0 3B0 2B0 2SEND_GRADIENTS 2RESHARD 3REDUCE_GRAD",
        layout=layout,
    )
    found = starts(plan, Costs(sum_times=(5, 1) * 2))
    names = ("2SEND_GRADIENTS", "2RESHARD", "3REDUCE_GRAD")
    assert [found[name] for name in names] == [6, 11, 11]
