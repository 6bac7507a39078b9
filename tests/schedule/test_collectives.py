"""Sums of gradients over replicas, and gathers of sharded weights, that take time beside the ops."""

import random
import re
from collections import defaultdict
from collections.abc import Callable
from math import isclose
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve

from schedlang import (
    Builder,
    CompileError,
    Costs,
    Kind,
    Noise,
    Plan,
    Source,
    Timeline,
    compile,
    prove,
    read_plan,
    read_source,
    simulate,
    simulate_runs,
    write_plan,
)
from schedlang.extras.search.optimize.problem import Problem
from schedlang.passes.gather import gather
from schedlang.plan.text import parse_actions
from schedlang.proof.running import run_on
from schedlang.proof.structure import check_structure
from schedlang.report.bubbles.explanation import explain_bubble, explanation_text
from schedlang.schedule.layout import Layout, Pipeline
from schedlang.schedule.schedule import WeightRule
from schedlang.schedule.transports import transports
from tests.support.damage import damaged_plans, random_plan, replicated_plan
from tests.support.paths import DIAGNOSTICS, GALLERY
from tests.support.strategies import make_schedule

#: The programs that leave gathers and sums to the runtime.
IMPLIED = [
    path
    for path in GALLERY
    if not re.search(r"reduce\(|send gradients", path.read_text())
]
TRANSPORTS = ("gloo", "nccl", "blocking", "nccl-edge")
#: Longer on some stages than on others.
TIMES = tuple(2.0 + 3.0 * (stage % 3) for stage in range(64))


def times_of(plan: Plan) -> tuple[float, ...]:
    return TIMES[: len(plan.placement)]


def sums_by_hand(plan: Plan, timeline: Timeline) -> dict[tuple[int, int, int], float]:
    """When each sum of a rank, piece and update is over, from when the ops have ended."""
    layout = plan.layout
    made: dict[tuple[int, int, int], float] = {}
    takes: dict[tuple[int, int], float] = {}
    for rank, bars in enumerate(timeline.ranks):
        for bar in bars:
            if bar.kind in (Kind.B, Kind.W):
                piece = layout.piece(bar.stage)
                update = layout.update_of(bar.stage, bar.microbatch)
                key = rank, piece, update
                # Of ops that overlap, all are done when the last one is.
                made[key] = max(made.get(key, 0.0), bar.end)
                times = times_of(plan)
                takes[piece, update] = max(
                    times[each] for each in layout.replicas(bar.stage)
                )
    ranks_of: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, piece, update in made:
        ranks_of[piece, update].append(rank)
    over: dict[tuple[int, int, int], float] = {}
    free: dict[Any, float] = defaultdict(float)

    def add(stream: Any, keys: list[tuple[int, int, int]]) -> None:
        begin = max([free[stream], *(made[key] for key in keys)])
        free[stream] = begin + takes[keys[0][1:]]
        over.update(dict.fromkeys(keys, free[stream]))

    # Those of one rank go one after the other, as their gradients are made; those of several ranks
    # update by update, for each piece.
    for key in sorted(made, key=lambda key: made[key]):
        if len(ranks_of[key[1:]]) == 1:
            add(key[0], [key])
    for piece, update in sorted(ranks_of):
        ranks = ranks_of[piece, update]
        if len(ranks) > 1:
            add((piece, "replicas"), [(rank, piece, update) for rank in ranks])
    return over


@pytest.mark.parametrize("path", IMPLIED, ids=lambda path: path.stem)
def test_sums_begin_with_the_last_gradient_and_all_waits_for_them(path: Path) -> None:
    plan = compile(read_source(path))
    for transport in TRANSPORTS:
        plan = evolve(plan, transport=transport)
        usual = simulate(plan, Costs(p2p_time=0.25)).timeline
        costs = Costs(p2p_time=0.25, sum_times=times_of(plan))
        timeline = simulate(plan, costs).timeline
        over = sums_by_hand(plan, timeline)
        ends = [bars.end[-1] for bars in timeline.ranks if bars]
        assert isclose(timeline.makespan, max([*ends, *over.values()]))
        if not len(plan.columns.where(Kind.U)):
            # Nothing waits but the end.
            assert timeline.ranks == usual.ranks
            continue
        for rank, bars in enumerate(timeline.ranks):
            before = 0.0
            for bar in bars:
                if bar.kind == Kind.U:
                    piece = plan.layout.piece(bar.stage)
                    begin = max(over[rank, piece, max(bar.microbatch, 0)], before)
                    # On others, a rank may have to wait for its transfers first.
                    assert bar.start > begin - 1e-9
                    assert transport == "blocking" or isclose(bar.start, begin)
                before = bar.end


def test_only_what_is_not_hidden_counts() -> None:
    plan = compile("1f1b")

    def makespan(**costs: Any) -> float:
        return simulate(plan, Costs(**costs)).timeline.makespan

    assert makespan() == 33
    # Rank 0 ends last; the last backward of rank 3 has been over for 6 then.
    assert makespan(sum_times=[5]) == 38
    assert makespan(sum_times=(0, 0, 0, 6)) == 33
    assert makespan(sum_times=(0, 0, 0, 8)) == 35
    # The first op of rank 0 waits for its weights; those of rank 3 are there before it has inputs.
    assert makespan(gather_times=[2]) == 35
    assert makespan(gather_times=(0, 0, 0, 3)) == 33
    assert makespan(gather_times=(0, 0, 0, 4)) == 34


def test_gathers_begin_one_op_early() -> None:
    plan = compile("interleaved_1f1b", {"ranks": 2, "microbatches": 4})
    timeline = simulate(plan, Costs(gather_times=[1.5])).timeline
    # Stage 2 is the second chunk of rank 0: its weights are gathered while the op before runs.
    gather = next(
        each for each in timeline.beside if plan.columns.stage[each.before] == 2
    )
    first = next(index for index, bar in enumerate(timeline.ranks[0]) if bar.stage == 2)
    before, use = timeline.ranks[0][first - 1 : first + 1]
    assert (before.stage, gather.start, gather.end) == (
        0,
        before.start,
        before.start + 1.5,
    )
    assert use.start == max(before.end, gather.end)
    # One for each update: before it, weights are of the version before.
    plan = compile("pipedream_2bw")
    timeline = simulate(plan, Costs(gather_times=[1])).timeline
    assert len(timeline.beside) == plan.layout.updates * len(plan.ranks)
    columns = plan.columns
    for each in timeline.beside:
        rank, _ = columns.place(each.before)
        steps = np.flatnonzero((columns.rank == rank) & (columns.kind == Kind.U))
        earlier = np.count_nonzero(steps < each.before)
        ends = [bar.end for bar in timeline.ranks[rank] if bar.kind == Kind.U]
        assert earlier == 0 or each.start >= ends[earlier - 1]


@pytest.mark.parametrize(
    "name",
    [
        "1f1b",
        "interleaved_1f1b",
        "gems",
        "dualpipe",
        "zb_h1",
        "wpipe",
        "pipedream_replicated",
    ],
)
@pytest.mark.parametrize(
    "costs",
    [
        Costs(p2p_time=0.3, sum_times=[5]),
        Costs(p2p_time=0.3, gather_times=[3]),
        Costs(sum_times=[5], gather_times=[3], update_times=[0.5]),
    ],
    ids=["sums", "gathers", "both"],
)
def test_what_ranks_wait_for_them_is_told(name: str, costs: Costs) -> None:
    """Causes add up to the idle time, and the parts of the critical path to the makespan."""
    plan = compile(name)
    for transport in ("gloo", "nccl"):
        plan = evolve(plan, transport=transport)
        timeline = simulate(plan, costs).timeline
        found = explain_bubble(plan, costs)
        idle = len(plan.ranks) * timeline.makespan - sum(timeline.busy)
        assert isclose(sum(found.idle.length), idle)
        assert isclose(sum(segment.length for segment in found.path), timeline.makespan)
        communication = ("transfer", "transport", "collective")
        told = (each.length for each in found.idle if each.cause in communication)
        assert isclose(found.exposed, sum(told), abs_tol=1e-9)
        assert any(each.cause == "collective" for each in found.idle)
        # Without them, nobody waits for any.
        free = evolve(costs, sum_times=None, gather_times=None)
        assert all(
            each.cause != "collective" for each in explain_bubble(plan, free).idle
        )
    assert "collective  gradients are summed" in explanation_text(found)


@pytest.mark.parametrize(
    ("times", "makespan", "stage", "rank_0", "rank_3"),
    [
        # Rank 3 makes its last gradient at 27, rank 0 at 33.
        ((3, 1, 1, 8), 36, 0, 3, 3),
        ((3, 1, 1, 10), 37, 3, 4, 10),
    ],
)
def test_a_wait_for_a_sum_is_about_its_stage(
    times: tuple[float, ...], makespan: float, stage: int, rank_0: float, rank_3: float
) -> None:
    found = explain_bubble(compile("1f1b"), Costs(sum_times=times))
    waiting = [each for each in found.idle if each.cause == "collective"]
    assert found.makespan == makespan
    assert {each.subject for each in waiting} == {(stage,)}
    for rank, length in ((0, rank_0), (3, rank_3)):
        assert sum(each.length for each in waiting if each.rank == rank) == length
    assert found.path[-1].kind == "collective"


@pytest.mark.parametrize("name", ["zb_h1", "gems", "wpipe", "interleaved_1f1b"])
@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_runs_with_noise_have_them_too(name: str, transport: str) -> None:
    plan = evolve(compile(name), transport=transport)
    costs = Costs(sum_times=[3], gather_times=[2], p2p_time=0.1)
    still = simulate_runs(plan, Noise(), costs, runs=1)
    assert (
        still.makespans
        == (still.makespan,)
        == (simulate(plan, costs).timeline.makespan,)
    )
    # Long sums are the makespan, nearly: these differ from run to run as the jitter says.
    long = Costs(sum_times=[1e6], p2p_time=0.1)
    runs = simulate_runs(plan, Noise(jitter=0.1), long, runs=400)
    assert np.std(runs.makespans) > 0.02 * runs.mean
    assert runs.delays.transfers > 0.9 * (runs.mean - runs.makespan) > 0


def test_a_program_gives_them(tmp_path: Path) -> None:
    text = """
    schedule s {
        param ranks = 2
        param microbatches = 2
        let sum = 3
        cost sum(s) = sum + s
        cost gather = 0.5
        rank r { F(0) F(1) B(0) B(1) U }
        assert makespan == 12.5, "with a gather before and a sum behind"
    }
    """
    plan = compile(Source("s.sched", text))
    assert (plan.costs.sum_times, plan.costs.gather_times) == ((3.0, 4.0), (0.5,))
    write_plan(plan, tmp_path / "s.json")
    assert read_plan(tmp_path / "s.json").costs == plan.costs
    # Those of the user go before.
    free = Costs(sum_times=[0], gather_times=[0])
    assert (
        simulate(plan, free).timeline.makespan == simulate(plan).timeline.makespan - 3.5
    )
    with pytest.raises(CompileError, match="`cost sum` with 2 names"):
        compile(Source("s.sched", text.replace("sum(s) =", "sum(s, m) =")))
    with pytest.raises(CompileError, match="given already"):
        compile(
            Source("s.sched", text.replace("cost gather", "cost sum = 2 cost gather"))
        )
    with pytest.raises(
        ValueError, match="3 times of sums are given, there are 2 stages"
    ):
        simulate(plan, Costs(sum_times=(1, 2, 3)))
    with Builder("b", ranks=2, microbatches=1, costs=Costs(sum_times=(3, 4))) as b:
        for rank in range(2):
            b.forward(rank, 0)
            b.backward(rank, 0)
    assert "cost sum(s) = " in b.text()
    assert compile(Source("b.sched", b.text())).costs == b.plan.costs


def test_a_sum_behind_that_of_a_later_update_is_told_as_a_wrong_update() -> None:
    """Sums of one stage go in the order of updates: the first never comes before the second step."""
    pipelines = (Pipeline("p0", 0, 1, 2), Pipeline("p1", 1, 2, 2))
    texts = [
        f"{stage}F1 {stage}F0 {stage}B1 {stage}U1 {stage}B0 {stage}U0"
        for stage in (0, 1)
    ]
    ranks = tuple(parse_actions(text, [0] * 6) for text in texts)
    schedule = evolve(
        make_schedule((0, 1), 4, ranks),
        layout=Layout((0, 1), pipelines, updates=2),
        weights=(WeightRule("delay", 1),) * 2,
        costs=Costs(sum_times=[1.0]),
    )
    message = r"`p0\(0\)B1` of update 1 adds to the gradient of update 0"
    for judge in (prove, simulate):
        with pytest.raises(CompileError, match=message):
            judge(schedule)


@pytest.mark.parametrize("name", ["sum", "gather"])
def test_a_search_judges_by_those_that_are_written(name: str) -> None:
    plan = compile("1f1b", costs=Costs(**{f"{name}_times": (2,)}))
    with pytest.raises(ValueError, match=f"has {name}s that it does not write"):
        Problem.of(plan)
    problem = Problem.of(gather(plan))
    assert problem.as_given.value == simulate(plan, ideal=True).timeline.makespan


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in sorted(DIAGNOSTICS.glob("*.sched"))
        if path.stem.startswith(("dead", "u_"))
    ],
    ids=lambda path: path.stem,
)
def test_what_is_wrong_is_told_in_the_same_words(path: Path) -> None:
    source = read_source(path)
    told = []
    for costs in (Costs(), Costs(sum_times=[2], gather_times=[1])):
        with pytest.raises(CompileError) as caught:
            compile(source, costs=costs)
        told.append([(each.code, each.message) for each in caught.value.diagnostics])
    assert told[0] == told[1]


@pytest.mark.parametrize(
    "draw", [random_plan, replicated_plan], ids=["random", "replicated"]
)
def test_verdicts_do_not_depend_on_them(draw: Callable[[random.Random], Plan]) -> None:
    """Of plans that were damaged, too: the same is wrong, in the same words."""
    told = []
    for plan in damaged_plans(draw, 60, random.Random(5)):
        try:
            check_structure(plan)
        except CompileError:
            continue
        slow = evolve(plan.costs, sum_times=[2.0], gather_times=[1.0])
        for name in ("gloo", "nccl", "blocking"):
            verdicts: list[list[str]] = []
            for costs in (plan.costs, slow):
                try:
                    run_on(plan, costs, transports(name)[0])
                    verdicts.append([])
                except CompileError as error:
                    verdicts.append([each.message for each in error.diagnostics])
            assert verdicts[0] == verdicts[1]
            told.append(bool(verdicts[0]))
    # Many plans are wrong, and many right: both verdicts are compared.
    assert 20 < sum(told) < len(told) - 20
