"""What ops cost: given by a program, by its user, and kept in the plan."""

import json
import re
from pathlib import Path

import pytest
from attrs import evolve

from schedlang import (
    CompileError,
    Costs,
    Plan,
    Source,
    compile,
    read_plan,
    read_source,
    simulate,
    write_plan,
)
from schedlang.cli.main import main
from schedlang.passes.op_graph import Graph
from schedlang.proof.prove import ideal_execution
from schedlang.ranks.weight_versions import follow_weights
from schedlang.schedule.costs import costs_of, read_costs
from schedlang.schedule.kinds import Kind
from tests.support.paths import PROGRAMS

PARAMS = "param ranks = 2  param microbatches = 2"


# One microbatch after the other: nothing overlaps, but weight gradients with what comes next.
def program(items: str, split: bool = False) -> Plan:
    backward = "B(next) W" if split else "B(next)"
    text = f"schedule s {{ {PARAMS} {items} rank r {{ F(next) {backward} F(next) {backward} }} }}"
    return compile(Source("s.sched", text))


@pytest.mark.parametrize(
    ("items", "split", "makespan"),
    [
        ("", False, 4 * (1 + 2)),
        ("cost F = 3", False, 4 * (3 + 2)),
        ("cost F(s) = 1 + s  cost B = 5", False, 2 * (1 + 2 + 2 * 5)),
        ("cost BW = 5", False, 4 * (1 + 5)),
        ("cost send = 2", False, 4 * (1 + 2 + 2)),
        ("cost B = 3  cost W = 2", True, 4 * (1 + 3) + 2 * 2),
    ],
)
def test_durations(items: str, split: bool, makespan: float) -> None:
    assert simulate(program(items, split)).timeline.makespan == pytest.approx(makespan)


def test_a_split_backward_and_a_whole_one_have_their_own_costs() -> None:
    text = f"schedule s {{ {PARAMS} cost B = 3 cost W = 4 cost BW = 5 rank r {{ F(0) F(1) BW(0) B(1) W }} }}"
    assert (
        simulate(compile(Source("s.sched", text))).timeline.busy == [2 + 5 + 3 + 4] * 2
    )


def test_a_whole_backward_is_its_halves_and_a_half_is_half_of_it() -> None:
    stages = 2
    assert Costs(input_times=(3,), weight_times=(1, 2)).durations(stages)[2] == [4, 5]
    assert Costs(backward_times=(3,)).durations(stages)[3] == [1.5, 1.5]
    assert Costs(forward_times=(3,)).durations(stages)[5] == [3, 3]


def test_what_the_user_gives_goes_first_and_the_rest_stays_the_programs() -> None:
    plan = program(
        "cost F = 3  cost B = 4  cost W = 4  cost send = 1  memory F = 2", split=True
    )
    assert plan.costs.over(Costs(forward_times=(9,), recompute_times=(7,))) == Costs(
        forward_times=(3,),
        input_times=(4,),
        weight_times=(4,),
        p2p_time=1,
        recompute_times=(7,),
        forward_memory=(2,),
    )
    assert (
        simulate(plan, Costs(backward_times=(2,))).timeline.busy
        == [2 * (3 + 1 + 1)] * 2
    )
    assert simulate(plan, Costs(backward_times=(2,))).peak_memory == (2, 2)


def test_memory() -> None:
    text = f"schedule s {{ {PARAMS} memory F(s) = 3 + s  memory B = 0 - 1  rank r {{ F(0) F(1) B(0) B(1) W W }} }}"
    execution = simulate(compile(Source("s.sched", text)))
    assert execution.peak_memory == (6, 8)
    assert execution.peak_activations == (2, 2)


def test_claims_hold_at_the_programs_costs() -> None:
    assert program("cost F = 3  memory F = 5  assert makespan == 20 and work == 10")
    with pytest.raises(CompileError, match="the figures are makespan 20"):
        program("cost F = 3  assert makespan == 10")


def test_the_plan_keeps_the_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    write_plan(program("cost F(s) = 3  memory F = 2"), path)
    assert json.loads(path.read_text())["costs"] == {
        "forward_times": [3.0, 3.0],
        "forward_memory": [2.0],
    }
    assert read_plan(path).costs == Costs(forward_times=(3, 3), forward_memory=(2,))
    for arguments, makespan in (
        ([], 20),
        (["--forward-times", "1"], 12),
        (["--p2p-time", "2"], 28),
    ):
        assert main(["simulate", str(path), "--json", *arguments]) == 0
        figures = json.loads(capsys.readouterr().out)
        assert (figures["makespan"], figures["peak_memory"]) == (makespan, [2, 2])
    assert main(["simulate", str(path)]) == 0
    assert "peak memory 2 2 per rank, in the program's amounts" in " ".join(
        capsys.readouterr().out.split()
    )


def test_a_step_and_an_overlap_have_costs() -> None:
    assert simulate(program("cost U = 7")).timeline.makespan == 4 * 3  # nothing updates
    text = f"schedule s {{ {PARAMS} cost U(s) = 7 + s rank r {{ F(0) B(0) F(1) B(1) U }} }}"
    assert simulate(compile(Source("s.sched", text))).timeline.busy == [6 + 7, 6 + 8]
    one = "param ranks = 1  param microbatches = 2"
    text = f"schedule s {{ {one} cost overlap = 2 rank r {{ F(0) overlap {{ F(1) B(0) }} B(1) }} }}"
    timeline = simulate(compile(Source("s.sched", text))).timeline
    assert [bar.end for bar in timeline.ranks[0]] == pytest.approx([1, 1 + 2 / 3, 3, 5])
    assert (
        simulate(
            compile(Source("s.sched", text)), Costs(overlap_times=(3,))
        ).timeline.makespan
        == 6
    )


# Two nodes of two ranks; the link between them is slower in both ways.
LINKS = {
    "ranks_per_node": 2,
    "boundary_bytes": [100, 200, 100, 0],
    "latency_in_node": 0.5,
    "bandwidth_in_node": 100,
    "latency_between_nodes": 1,
    "bandwidth_between_nodes": 50,
}


def test_a_transfer_takes_the_latency_and_the_bytes_over_the_bandwidth_of_its_link() -> (
    None
):
    text = "schedule s { param ranks = 4 param microbatches = 1 rank r { F(0) B(0) } }"
    plan = compile(Source("s.sched", text))
    in_node = 0.5 + 100 / 100
    between = 1 + 200 / 50
    assert simulate(plan, costs_of(LINKS)).timeline.makespan == 4 * 3 + 2 * (
        2 * in_node + between
    )
    one_node = {"boundary_bytes": 100, "bandwidth_in_node": 50}
    assert simulate(plan, costs_of(one_node)).timeline.makespan == 4 * 3 + 6 * 2
    # Between nodes it is as inside, where nothing else is said; and what is given replaces all that
    # a plan says.
    assert (
        simulate(plan, costs_of(one_node | {"ranks_per_node": 3})).timeline.makespan
        == 4 * 3 + 6 * 2
    )
    assert costs_of(one_node).over(costs_of(LINKS)) == costs_of(one_node)
    assert costs_of({"p2p_time": 1}).over(costs_of(LINKS)) == Costs(p2p_time=1)


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        (
            {"p2p_time": 1, "latency_in_node": 1},
            "`p2p_time` is the time of every transfer",
        ),
        ({"p2p_time": [1, 2]}, "`p2p_time` is one number"),
        ({"bandwidth_in_node": 1}, "a bandwidth needs `boundary_bytes`"),
        ({"boundary_bytes": 1, "bandwidth_in_node": 0}, "`bandwidth_in_node` is 0"),
        (
            {"latency_between_nodes": 1},
            "`ranks_per_node` says which ranks are on one node",
        ),
        (
            {"ranks_per_node": 1.5},
            "`ranks_per_node` is 1.5: it must be a whole number from 1",
        ),
        (
            {"ranks_per_node": 0},
            "`ranks_per_node` is 0: it must be a whole number from 1",
        ),
        ({"kept_bytes": 1}, "`kept_bytes` is the part of `activation_bytes`"),
        ({"activation_bytes": -1}, "`activation_bytes` must be numbers from 0"),
        (
            {"traceEvents": [{"ph": "X", "name": "step", "dur": 1}]},
            "the trace has no actions",
        ),
    ],
)
def test_costs_that_do_not_go_together(
    document: dict[str, object], complaint: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        costs_of(document)


@pytest.mark.parametrize(
    "name", ["boundary_bytes", "activation_bytes", "weights_bytes"]
)
def test_bytes_are_for_all_stages_or_for_each(name: str) -> None:
    costs = costs_of({name: [1, 2, 3]})
    with pytest.raises(ValueError, match=f"3 `{name}` are given, there are 2 stages"):
        simulate(program(""), costs)


def test_bytes() -> None:
    text = f"schedule s {{ {PARAMS} rank r {{ F(0) F(1) B(0) B(1) W W }} }}"
    plan = compile(Source("s.sched", text))
    assert simulate(plan).peak_bytes is None
    assert simulate(plan, Costs(activation_bytes=(10, 20))).peak_bytes == (20, 40)
    assert simulate(plan, Costs(weights_bytes=(3, 4))).peak_bytes == (3, 4)
    # What is kept from the input half to the weight half can be more than what the forward leaves.
    more = Costs(activation_bytes=(10,), kept_bytes=(30,), weights_bytes=(1,))
    assert simulate(plan, more).peak_bytes == (61, 61)
    two = compile("pipedream_2bw")
    assert simulate(two, Costs(weights_bytes=(5,))).peak_bytes == tuple(
        5.0 * each for each in follow_weights(two).held
    )
    chunks = compile(
        "interleaved_1f1b",
        {"ranks": 2, "microbatches": 2, "chunks": 2},
    )
    assert simulate(chunks, Costs(weights_bytes=(1, 2, 3, 4))).peak_bytes == (
        1 + 3,
        2 + 4,
    )


def test_each_direction_moves_the_bytes_between_its_stages() -> None:
    """Nothing overlaps: the activations of both microbatches, and their gradients, go between
    stages 0 and 1.
    """
    costs = Costs(boundary_bytes=(1, 100), bandwidth_in_node=1)
    for ideal in (True, False):
        assert simulate(program(""), costs, ideal).timeline.makespan == 4 * (1 + 2 + 1)


def test_memory_over_time() -> None:
    items = "param ranks = 1  param microbatches = 2  memory F = 3  memory B = -3  rank r { F(0) F(1) B(0) B(1) }"
    execution = simulate(compile(Source("s.sched", f"schedule s {{ {items} }}")))
    assert execution.memory == (((0, 3), (1, 6), (4, 3), (6, 0)),)
    assert (execution.peak_memory, execution.peak_activations) == ((6,), (2,))


def test_a_file_is_json_or_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "costs.json").write_text('{"forward_times": [1, 2], "p2p_time": 25e-2}')
    (tmp_path / "costs.yaml").write_text(
        "# measured\nforward_times:\n  - 1\n  - 2.0\np2p_time: 25e-2\n"
    )
    assert (
        read_costs(tmp_path / "costs.yaml")
        == read_costs(tmp_path / "costs.json")
        == Costs((1, 2), p2p_time=0.25)
    )
    for text, complaint in [
        ("forward_times: [1", "while parsing a flow sequence"),
        ("- 1", "it must be an object"),
        ("1: 2", "there is no cost `1`"),
        ("", "is an empty file, not costs"),
        (
            "forward_times: !!python/object/apply:os.getcwd []",
            "could not determine a constructor",
        ),
        ("forward_times: 1e400", "`forward_times` must be numbers from 0"),
    ]:
        (tmp_path / "bad.yml").write_text(text)
        assert (
            main(
                [
                    "simulate",
                    str(PROGRAMS / "1f1b.sched"),
                    "--costs",
                    str(tmp_path / "bad.yml"),
                ]
            )
            == 2
        )
        assert complaint in capsys.readouterr().err


def test_costs_of_a_measured_run(tmp_path: Path) -> None:
    """The means of a trace bring back the durations that it was made with."""
    plan = program("cost B = 3  cost W = 2", split=True)
    costs = Costs(forward_times=(1, 4), input_times=(2, 3), weight_times=(5, 6))
    bars = [bar for rank in simulate(plan, costs).timeline.ranks for bar in rank]
    events: list[dict[str, object]] = [
        {"ph": "X", "name": str(bar), "dur": bar.end - bar.start} for bar in bars
    ]
    events += [{"ph": "M", "name": "process_name"}, {"ph": "X", "name": "step"}]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert read_costs(tmp_path / "trace.json") == costs


@pytest.mark.parametrize("name", ["zb_1p", "dualpipe", "zb_v"])
def test_passes_and_the_machine_count_alike(name: str) -> None:
    """Passes look for the best order on a graph of their own: its times are those of the
    simulation.
    """
    costs = costs_of(
        {key: value for key, value in LINKS.items() if key != "boundary_bytes"}
        | {"boundary_bytes": 100, "overlap_times": 2.5, "update_times": 0.5}
    )
    plan = compile(name, {}, costs)
    graph = Graph(
        evolve(plan, ranks=tuple(actions.compute() for actions in plan.ranks))
    )
    assert plan.costs.ranks_per_node == 2
    assert max(graph.ends(graph.order)) == pytest.approx(
        simulate(plan, costs).timeline.makespan
    )


def test_ops_that_overlap_hand_over_together_at_every_size() -> None:
    """Each microbatch more takes the same time more, however many actions there are by then."""
    text = """
schedule overlapped {
    param ranks = 4
    param microbatches
    cost F = 1  cost B = 7  cost overlap = 11  cost send = 1
    rank r {
        let warmup = min(ranks - r, microbatches)
        repeat warmup { F(next) }
        repeat microbatches - warmup { overlap { F(next) B(next) } }
        repeat warmup { B(next) }
    }
}
"""
    plans = [
        compile(Source("overlapped.sched", text), {"microbatches": each})
        for each in (98, 99, 100, 101, 200)
    ]
    makespans = [simulate(plan, ideal=True).timeline.makespan for plan in plans]
    assert makespans == [2353, 2377, 2401, 2425, 2425 + 99 * 24]


def test_an_ideal_execution_is_of_its_schedule_and_costs() -> None:
    """Its memory is worked out of both, as that of an execution on a transport."""
    plan = program("cost send = 1")
    costs = Costs(forward_times=(2, 3))
    ideal = simulate(plan, costs, ideal=True)
    assert ideal.schedule is plan
    assert ideal.transport == "ideal"
    of_ops = ideal_execution(plan)
    assert of_ops is not None
    assert of_ops.transport == "ideal"
    assert ideal.costs == simulate(plan, costs).costs == costs.over(plan.costs)


@pytest.mark.core
def test_messages_of_fewer_bits_take_half_the_time(tmp_path: Path) -> None:
    """By the plan's file, too, and at costs that a user gives; what ranks hold has all its bits."""
    costs = Costs(boundary_bytes=(10,), bandwidth_in_node=10, weights_bytes=(0,))
    whole = compile(f"schedule whole {{ {ROUNDED} }}")
    rounded = compile(f"schedule rounded {{ {ROUNDED} send bf16 }}")
    assert (whole.message_type, rounded.message_type) == ("", "bf16")
    path = tmp_path / "plan.json"
    write_plan(rounded, path)
    for plan in (rounded, read_plan(path)):
        assert plan == rounded
        assert simulate(plan, costs).timeline.makespan == 12 + 4 * 0.5
        assert simulate(plan, costs).peak_bytes == simulate(whole, costs).peak_bytes
    assert simulate(whole, costs).timeline.makespan == 12 + 4 * 1
    wrong = path.read_text().replace('"message_type": "bf16"', '"message_type": "bf15"')
    path.write_text(wrong)
    with pytest.raises(CompileError, match="`message_type` must be one of bf16, fp16"):
        read_plan(path)


#: Nothing overlaps: each of two microbatches goes to stage 1 and comes back.
ROUNDED = """
    param ranks = 2
    param microbatches = 2
    rank r { F(0) B(0) F(1) B(1) }
"""


def test_costs_remember_the_last_layout_alone() -> None:
    costs = Costs(forward_times=[2], forward_memory=[3])
    two, four = (
        compile(read_source(PROGRAMS / "1f1b.sched"), {"ranks": ranks}).layout
        for ranks in (2, 4)
    )
    for layout, stages in ((two, 2), (four, 4), (two, 2)):
        assert costs.durations(layout)[Kind.F] == [2] * stages
        assert costs.memory(layout)[Kind.F] == [3] * stages
        assert costs.durations(layout) is costs.durations(layout)
    slower = evolve(costs, forward_times=[5])
    assert slower.durations(two)[Kind.F] == [5, 5]
