"""`schedc optimize`: the best order, against every order there is, and against recorded ones."""

import json
import math
import os
import random
import signal
import threading
from collections.abc import Iterator
from functools import cache
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from schedlang import (
    CompileError,
    Costs,
    Source,
    compile,
    read_source,
    simulate,
    write_plan,
)
from schedlang.extras.search.optimize.constraints import Effort, look
from schedlang.extras.search.optimize.instance import Instance, chains_of
from schedlang.extras.search.optimize.optimize import judged, optimize
from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.extras.search.optimize.starts import starts
from schedlang.passes.op_graph import Graph
from tests.support.commands import exit_code, output
from tests.support.paths import CASES, GALLERY

pytestmark = pytest.mark.slow

RECORDED = json.loads((CASES / "zero_bubble.json").read_text())["cases"]

#: A program with every op, in an order that is right and far from the best.
PROGRAM = """
schedule any {{
    param ranks = 2
    param microbatches = 2
    {stages}
    {objective}
    rank r {{
        for c in 0 .. {chunks} {{ for m in 0 .. microbatches {{ F(stage(c), m) }} }}
        for c in 0 .. {chunks} {{ for m in 0 .. microbatches {{ {backward} }} }}
    }}
}}
"""
V = "stage s in 0 .. 2 * ranks on if s < ranks then s else 2 * ranks - 1 - s"
LOOP = "stage s in 0 .. 2 * ranks on s % ranks"


def problem_of(
    ranks: int,
    microbatches: int,
    stages: str = "",
    is_split: bool = True,
    costs: Costs | None = None,
    limit: float | None = None,
    objective: str = "makespan",
) -> Problem:
    chunks = 2 if stages else 1
    last = f"stage({chunks - 1} - c), m"
    text = PROGRAM.format(
        stages=stages,
        chunks=chunks,
        objective=f"objective {objective}",
        backward=f"I({last})  W({last})" if is_split else f"B({last})",
    )
    params = {"ranks": ranks, "microbatches": microbatches}
    return Problem.of(
        compile(Source("any.sched", text), params, costs or Costs()), limit
    )


def best_of(problem: Problem, enough: float = -math.inf) -> Answer:
    """The best answer, or the first one that is good enough; the time is for a machine that has
    much else to do.
    """
    for answer in optimize(problem, 600.0, workers=1):
        if answer.value <= enough:
            break
    return answer


def needed_by(graph: Graph) -> list[set[int]]:
    """For each node all that it needs, also by way of other ranks."""
    needed: list[set[int]] = [set() for _ in graph.ops]
    # As often as the longest chain is long, what is needed is needed by what needs that.
    changes = True
    while changes:
        before = [len(nodes) for nodes in needed]
        for node, needs in enumerate(graph.needs):
            for need, _ in needs:
                needed[node] |= {need} | needed[need]
        changes = before != [len(nodes) for nodes in needed]
    return needed


def every_order(needed: list[set[int]], nodes: list[int]) -> Iterator[list[int]]:
    """Every order of a rank's nodes in which none stands before what it needs: any other cannot
    run, whatever other ranks do.
    """
    if not nodes:
        yield []
    for node in nodes:
        if needed[node].isdisjoint(nodes):
            for rest in every_order(
                needed, [other for other in nodes if other != node]
            ):
                yield [node, *rest]


def peak(graph: Graph, order: list[int]) -> float:
    """The most that is held, as written in docs/costs.md: what a node adds is there while it runs,
    what it lets go, once it has.
    """
    held = most = 0.0
    for node in order:
        most = max(most, held + max(graph.rise[node], 0.0))
        held += graph.change[node]
    return most


def time_of(graph: Graph, orders: tuple[list[int], ...], objective: str) -> float:
    """The makespan or span of some orders, from what nodes need; infinite if they cannot run."""
    ends: dict[int, float] = {}
    starts: dict[int, float] = {}
    following = [0] * len(orders)
    clock = [0.0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while following[rank] < len(order):
                node = order[following[rank]]
                if any(need not in ends for need, _ in graph.needs[node]):
                    break
                arrivals = [ends[need] + delay for need, delay in graph.needs[node]]
                starts[node] = max([clock[rank], *arrivals])
                clock[rank] = ends[node] = starts[node] + graph.time[node]
                following[rank] += 1
                moved = True
    if len(ends) < len(graph.ops):
        return math.inf
    if objective == "span":
        return max(ends[order[-1]] - starts[order[0]] for order in orders)
    return max(ends.values()) - min(starts.values())


@cache
def least_of_all(seed: int) -> float:
    """The least objective of all orders there are of the problem of a seed that hold no more than
    they may.
    """
    problem = drawn(seed)
    graph = problem.graph
    needed = needed_by(graph)
    of_ranks = [
        [
            order
            for order in every_order(needed, nodes)
            if peak(graph, order) <= limit + 1e-9
        ]
        for nodes, limit in zip(graph.order, problem.limits, strict=True)
    ]
    objective = graph.schedule.objective
    times = (time_of(graph, orders, objective) for orders in product(*of_ranks))
    return min(times, default=math.inf)


#: Ranks, microbatches, stages, and whether backwards are split: as large as all orders allow.
TINY = [
    (2, 2, "", True),
    (3, 2, "", True),
    (2, 3, "", False),
    (3, 2, "", False),
    (2, 2, V, False),
    (2, 2, LOOP, False),
]


def drawn(seed: int) -> Problem:
    """A tiny problem, whatever it costs."""
    rng = random.Random(seed)
    ranks, microbatches, stages, is_split = TINY[seed % len(TINY)]
    count = ranks * (2 if stages else 1)

    def times() -> list[float]:
        return [rng.choice((0.5, 1, 1, 1.3, 2, 3)) for _ in range(count)]

    costs = {"forward_times": times(), "p2p_time": rng.choice((0, 0, 0.4, 1))}
    if is_split:
        costs |= {"input_times": times(), "weight_times": times()}
    else:
        costs["backward_times"] = times()
    if rng.random() < 0.3 and is_split:
        # A forward holds two: one is let go of with the input's half of the backward, one with the
        # weight's.
        costs |= {"forward_memory": [2], "input_memory": [-1], "weight_memory": [-1]}
    elif rng.random() < 0.2:
        # More is let go of than a forward has taken.
        last = "weight_memory" if is_split else "backward_memory"
        costs |= {"forward_memory": [1], last: [-2]}
    objective = rng.choice(("makespan", "span"))
    limit = rng.randint(1, 4)
    return problem_of(
        ranks, microbatches, stages, is_split, Costs(**costs), limit, objective
    )


@pytest.mark.parametrize("seed", range(24))
def test_no_order_at_all_is_better(seed: int) -> None:
    """Of every order, also those in which microbatches overtake each other; and the program that is
    written takes as long, and holds as much.
    """
    problem = drawn(seed)
    answer = best_of(problem)
    least = least_of_all(seed)
    assert answer.value == pytest.approx(least)
    if least == math.inf:
        return
    assert answer.is_best
    plan = compile(Source("best.sched", judged(problem, answer, "portable").text))
    execution = simulate(plan, ideal=True)
    assert getattr(execution.timeline, plan.objective) == pytest.approx(least)
    assert list(execution.peak_memory) == [
        problem.graph.peak(order) for order in answer.orders
    ]


@pytest.mark.parametrize("seed", range(24))
def test_a_look_at_some_ranks_is_a_bound(seed: int) -> None:
    """What a rank, or two neighbours, come to by themselves is no more than the least of all."""
    problem = drawn(seed)
    least = least_of_all(seed)
    if least == math.inf:
        return
    instance = Instance.of(problem)
    high = instance.units(least)
    assert instance.least <= high
    every = range(len(problem.limits))
    for ranks in [*([rank] for rank in every), *map(list, pairwise(every))]:
        outcome = look(instance, instance.least, high, Effort(5.0, 60.0), ranks)
        assert outcome.orders is not None
        assert outcome.value is not None
        assert outcome.value <= high


@given(seed=st.integers(0, 10**6), extra=st.integers(0, 3), slack=st.integers(0, 2))
def test_what_is_held_over_time_fits(seed: int, extra: int, slack: int) -> None:
    """In any order that fits, what nodes hold is at no time more than the limit allows for, and
    each holds it for as long as is said, or longer.
    """
    rng = random.Random(seed)
    stages = rng.choice(("", V, LOOP))
    is_split = rng.random() < 0.5
    names = ("input", "weight") if is_split else ("backward",)
    costs = {f"{name}_memory": [-rng.choice((0, 1, 1, 2))] for name in names}
    costs["forward_memory"] = [rng.choice((1, 2))]
    costs["p2p_time"] = rng.choice((0, 0.5))
    problem = problem_of(
        2 + extra % 2, 2 + extra, stages, is_split, Costs(**costs), slack + 2.0
    )
    instance = Instance.of(problem)
    for orders, _ in islice(starts(instance, seed), 5):
        end = [instance.units(value) for value in problem.graph.ends(orders)]
        for rank in range(len(problem.limits)):
            holdings, beside = instance.holdings(rank)
            spans = [
                (end[h.taker] - instance.time[h.taker], end[h.user], h)
                for h in holdings
            ]
            for start, stop, holding in spans:
                assert stop - start >= holding.long
                held = sum(
                    h.amount for begin, until, h in spans if begin <= start < until
                )
                assert held <= instance.limits[rank] + beside


def test_microbatches_of_other_costs_may_overtake_each_other() -> None:
    """Those that are alike come in their order, and no others."""
    alike = chains_of(problem_of(2, 3))
    # Two ranks with F, I and W each: six chains of three microbatches.
    assert sorted(map(len, alike)) == [3] * 6
    odd_ones_take_longer = Costs(forward_times=[[1, 2, 1, 2], [1, 2, 1, 2]])
    problem = problem_of(2, 4, is_split=False, costs=odd_ones_take_longer)
    # Two ranks with F and B, for short microbatches and for long ones: eight chains of two.
    assert sorted(map(len, chains_of(problem))) == [2] * 8
    answer = best_of(problem)
    assert answer.is_best


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_every_program_of_the_gallery_can_be_written(path: Path) -> None:
    """Its order, as though it had been found, is a program that takes as long."""
    refusal = ""
    try:
        problem = Problem.of(compile(read_source(path)))
    except ValueError as error:
        refusal = str(error)
    if refusal:
        assert (
            "only their own order fits them" in refusal
            or "no end to bring near" in refusal
        )
        return
    answer = problem.as_given
    plan = compile(Source("same.sched", judged(problem, answer, "portable").text))
    assert getattr(
        simulate(plan, ideal=True).timeline, plan.objective
    ) == pytest.approx(answer.value)


@pytest.mark.parametrize(
    "costs",
    [
        Costs(forward_times=[[1, 2, 1, 2], [1.5, 1.5, 1, 1]], p2p_time=0.5),
        Costs(forward_times=(1, 2), link_times=[[0, 0.25], [1.5, 0]]),
        Costs(weight_times=[[1, 2, 3, 4]], link_times=[[0, 0.25], [0.25, 0]]),
    ],
    ids=["by microbatch", "by link", "by both"],
)
def test_the_program_has_its_costs(costs: Costs) -> None:
    """By microbatch and by link, so that it claims what was found without them given again."""
    problem = problem_of(2, 4, costs=costs)
    *_, answer = optimize(problem, 2.0, workers=1)
    text = judged(problem, answer, "portable").text
    assert "assert makespan <=" in text
    plan = compile(Source("best.sched", text))
    assert simulate(plan, ideal=True).timeline.makespan == pytest.approx(answer.value)
    stages = plan.layout
    assert plan.costs.every_duration(stages) == costs.every_duration(stages)
    # The claim counts: with a smaller figure the program is refused.
    claimed = text.replace(
        f"assert makespan <= {answer.value:g}", "assert makespan <= 1"
    )
    with pytest.raises(CompileError):
        compile(Source("best.sched", claimed))


def test_latencies_are_given_again() -> None:
    """A program cannot say them, so it claims no time."""
    costs = Costs(latency_in_node=0.5)
    problem = problem_of(2, 4, costs=costs)
    *_, answer = optimize(problem, 2.0, workers=1)
    text = judged(problem, answer, "portable").text
    assert "assert makespan" not in text
    assert "give them with --costs" in text
    plan = compile(Source("best.sched", text), costs=costs)
    assert simulate(plan, ideal=True).timeline.makespan == pytest.approx(answer.value)


def test_ops_that_overlap_stay_together() -> None:
    plan = compile("interleaved_overlap", {"ranks": 2, "microbatches": 4})
    problem = Problem.of(plan)
    given = problem.value(problem.graph.order)
    answer = best_of(problem, enough=given)
    assert answer.value <= given
    assert compile(Source("best.sched", judged(problem, answer, "portable").text))


#: The programs of recorded searches, whose orders are where a search begins.
SEARCHED = {
    "ZB-1p": "zb_1p",
    "ZB-2p": "zb_2p",
    "ZB-V": "zb_v",
    "V-Half": "v_half",
    "V-Min": "v_min",
}
SMALL = [case for case in RECORDED if case["schedule"] in SEARCHED and case["p"] <= 8]


@pytest.mark.parametrize(
    "case", SMALL, ids=lambda case: f"{case['schedule']}-{case['p']}-{case['m']}"
)
def test_never_worse_than_a_recorded_search(case: dict[str, Any]) -> None:
    """At the same placement, costs and memory; by span as the zero-bubble papers count, or by
    makespan.
    """
    costs = Costs(
        forward_times=[case["cost_f"]],
        input_times=[case["cost_b"]],
        weight_times=[case["cost_w"]],
        p2p_time=case["comm"],
    )
    params = {"ranks": case["p"], "microbatches": case["m"]}
    limit = max(case["peak_chunk_activations_until_W"])
    if case["mem_limit"]:
        activation, _, kept = map(int, case["mem_deltas"])
        memory = int(case["mem_limit"]) // activation // case["chunks"]
        params |= {"activation": activation, "kept": -kept, "memory": memory}
        limit = case["mem_limit"]
    program = SEARCHED[case["schedule"]]
    plan = compile(program, params, costs)
    recorded = case["cost"] if plan.objective == "span" else case["flush_makespan"]
    answer = best_of(Problem.of(plan, limit), enough=recorded + 1e-6)
    assert answer.value <= recorded + 1e-6
    # No bound is above what is known to be possible.
    assert answer.bound <= recorded + 1e-6


def test_the_command_says_how_good_it_is(
    tmp_path: Any,
) -> None:
    path = tmp_path / "best.sched"
    arguments = ["optimize zb_h1 -p ranks=3 -p microbatches=4 -o", str(path)]
    document = json.loads(output(*arguments, "--json"))
    assert document["proved"]
    assert document["value"] == document["bound"] == 14
    plan = compile(read_source(path))
    assert simulate(plan, ideal=True).timeline.makespan == 14


def test_a_span_that_is_refuted_at_once(tmp_path: Path) -> None:
    """Of the program, and of its plan file, which has the objective, too."""
    program = tmp_path / "span.sched"
    program.write_text("""schedule span {
        param ranks = 3  param microbatches = 4
        objective span
        rank r { repeat microbatches { F(next) }  repeat microbatches { B(next) } }
    }""")
    plan = tmp_path / "span.json"
    write_plan(compile(read_source(program)), plan)
    for path in (program, plan):
        document = json.loads(output("optimize", str(path), "--json"))
        assert document["objective"] == "span"
        assert document["value"] == document["bound"] == 18


@pytest.mark.parametrize(
    ("costs", "claim"),
    [
        # In floats, 11.7 + 9.1 is a little less than 20.8.
        ((10.3, 11.7, 9.1), "assert makespan <= 287.5\n"),
        ((0.1, 0.2, 0.4), "assert makespan <= 6.2\n"),
        # Measured ones have too many digits for exact sums: the claim leaves room for it.
        ((0.01234567890123457, 0.02345678901234569, 0.03456789012345671), "<= 0.63"),
    ],
)
def test_at_decimals_the_program_claims_what_was_found(
    costs: tuple[float, ...], claim: str, tmp_path: Path
) -> None:
    path = tmp_path / "best.sched"
    kinds = ("forward", "input", "weight")
    times = [
        f"--{kind}-times={time!r}" for kind, time in zip(kinds, costs, strict=True)
    ]
    assert exit_code("optimize zb_h1", *times, "--for 5s -o", str(path)) == 0
    assert claim in path.read_text()
    assert exit_code("check", str(path)) == 0


def test_a_block_at_decimals_claims_its_makespan(tmp_path: Path) -> None:
    path = tmp_path / "block.sched"
    times = "--forward-times=0.1 --input-times=0.2 --weight-times=0.4"
    arguments = ["optimize zb_h1", times, "--block --for 5s"]
    assert exit_code(*arguments, "-o", str(path)) == 0
    assert "assert makespan <= 0.7 * (microbatches - 1) + 1.9" in path.read_text()
    assert exit_code("check", str(path), "-p microbatches=12") == 0


@pytest.mark.parametrize("option", [[], ["--block"]])
def test_what_was_found_is_kept_whatever_fails_then(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here a cost has more digits than numbers of programs may have."""
    path = tmp_path / "best.sched"
    arguments = "optimize zb_h1 --forward-times=0.0000000000000000001"
    assert exit_code(arguments, "--for 3s", *option, "-o", str(path)) == 1
    out, err = capsys.readouterr()
    assert f"wrote {path}" in out
    assert "a number of more than 18 digits" in err
    assert f"{path}:" in err
    assert "rank r {" in path.read_text() or "block m every" in path.read_text()


def test_a_bound_that_is_exact_is_proved_to_the_last_digit() -> None:
    costs = Costs(forward_times=(1000.0001,), backward_times=(2000.0002,))
    problem = problem_of(2, 4, is_split=False, costs=costs)
    value = problem.value(problem.graph.order)
    # A ten-millionth less was once taken for rounding.
    answer = Answer(problem.graph.order, value, value - 0.0001, "nobody")
    assert not answer.is_best
    assert not Instance.of(problem).closed(answer).is_best


def test_too_little_memory_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("optimize 1f1b -p ranks=2 --memory 0") == 1
    assert "no order was found that holds at most 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory", "named"), [("nan", "nan"), ("4,-1", "-1"), ("-2", "-2")]
)
@pytest.mark.parametrize("option", [[], ["--block"]])
def test_memory_that_is_none_is_refused(
    memory: str, named: str, option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        exit_code("optimize v_half -p ranks=2", f"--memory={memory}", *option)
    message = f"what a rank may hold at most is a number from 0, not {named}\n"
    assert message in capsys.readouterr().err


def test_what_has_no_end_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        exit_code("optimize pipedream")
    assert "it has no flush" in capsys.readouterr().err


def test_without_the_solver_it_is_said_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "schedlang.extras.search.optimize.optimize.find_spec", lambda name: None
    )
    assert exit_code("optimize 1f1b") == 2
    assert "pip install 'schedlang[optimize]'" in capsys.readouterr().err


def test_a_block_is_for_any_number_of_microbatches(
    tmp_path: Any,
) -> None:
    """ZB-V in half of its memory, without a rank that ever waits once all are under way."""
    path = tmp_path / "block.sched"
    arguments = "optimize zb_v -p ranks=3 -p microbatches=6 --memory 4"
    document = json.loads(output(arguments, "--block -o", str(path), "--json"))
    assert document["interval"] == document["work"] == 6
    # Six microbatches, each 6 after the one before, and the last one as long as a block.
    assert document["makespan"] <= 5 * 6 + document["length"]
    execution = simulate(compile(read_source(path), {"microbatches": 40}), ideal=True)
    assert execution.timeline.makespan <= 39 * 6 + document["length"]
    assert max(execution.peak_memory) <= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["dualpipe"], "a block is for one pipeline of whole microbatches"),
        (["zb_v --place"], "--block keeps stages where they are"),
    ],
)
def test_what_has_no_block(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        exit_code("optimize", *arguments, "--block")
    assert message in capsys.readouterr().err


def test_no_block_in_too_little_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code("optimize 1f1b -p ranks=2 --memory 0 --block") == 1
    assert "no block was found that holds at most 0" in capsys.readouterr().err


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C as at a terminal: what runs in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_it_with_the_best_so_far(
    tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the solver is at work, of which Python sees nothing; what is written is whole."""
    solve = cp_model.CpSolver.solve
    begun = threading.Event()

    def solve_until_interrupted(
        solver: cp_model.CpSolver, model: cp_model.CpModel
    ) -> Any:
        begun.set()
        os.kill(os.getpid(), signal.SIGINT)
        return solve(solver, model)

    monkeypatch.setattr(cp_model.CpSolver, "solve", solve_until_interrupted)
    path = tmp_path / "best.sched"
    size = "-p ranks=4 -p microbatches=8 --memory 6"
    assert exit_code("optimize zb_v", size, "--for 10m -o", str(path), "--json") == 0
    assert begun.is_set()
    said = capsys.readouterr()
    assert "interrupted: this is the best so far" in said.err
    document = json.loads(said.out)
    assert document["bound"] < document["value"]
    assert [item.name for item in tmp_path.iterdir()] == ["best.sched"]
    execution = simulate(compile(read_source(path)), ideal=True)
    assert execution.timeline.makespan == document["value"]


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_before_any_order_writes_nothing(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> Iterator[Answer]:
        signal.raise_signal(signal.SIGINT)
        yield from ()

    monkeypatch.setattr(
        "schedlang.extras.search.optimize.optimize.optimize", interrupted
    )
    path = tmp_path / "best.sched"
    assert exit_code("optimize zb_v -o", str(path)) == 130
    assert not list(tmp_path.iterdir())


def test_a_look_ends_with_its_time() -> None:
    """Before all constraints are there, if need be."""
    instance = Instance.of(problem_of(2, 4, V))
    outcome = look(instance, 0, instance.least, Effort(math.inf, seconds=0.0))
    assert outcome.orders is None
    assert outcome.bound == 0
