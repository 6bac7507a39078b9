"""The pass `greedy`: an order for each batch, found by list scheduling and proved."""

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from math import inf

import numpy as np
import pytest
from attrs import evolve

from schedlang import (
    CompileError,
    Costs,
    Plan,
    Source,
    compile,
    prove,
    read_source,
    simulate,
)
from schedlang.compiler import ops_of
from schedlang.language.loading import load
from schedlang.passes.greedy import most_urgent_first
from schedlang.passes.op_graph import Graph
from schedlang.proof.running import run_on
from schedlang.proof.structure import check_structure
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import PORTABLE, transports
from tests.support.damage import changed
from tests.support.paths import PROGRAMS
from tests.support.strategies import oracle

#: Programs of all forms: one stage or several on a rank, halves, blocks, graphs, overlaps, two
#: pipelines, slices, recomputation; and their sizes, ranks and microbatches.
NAMES = (
    "1f1b",
    "gpipe",
    "zb_h1",
    "interleaved_1f1b",
    "v_half",
    "two_encoders",
    "dualpipe",
    "chimera",
    "seq1f1b",
    "1f1b_recompute",
)
SIZES = ((2, 4), (4, 8))


@cache
def greedy(name: str) -> Source:
    """A program of the gallery whose order is only that from which the pass begins."""
    source = read_source(PROGRAMS / f"{name}.sched")
    text = source.text.rstrip()
    assert text.endswith("}")
    return Source(source.path, f"{text[:-1]}    greedy\n}}\n")


def costs_of(plan: Plan, seed: int) -> Costs:
    """Random times and amounts of memory for each stage and microbatch of a batch."""
    drawn = random.Random(seed)
    layout = plan.layout

    def numbers(least: int, most: int) -> list[object]:
        rows = []
        for stage in range(len(layout.placement)):
            units = layout.units_of_update(stage)
            row = [drawn.randint(least, most) for _ in range(units)]
            slices = layout.slices
            parts = [row[first : first + slices] for first in range(0, units, slices)]
            rows.append(row if slices == 1 else parts)
        return rows

    return Costs(
        forward_times=numbers(1, 40),
        backward_times=numbers(2, 80),
        forward_memory=numbers(1, 9),
        p2p_time=drawn.choice([None, 0, 3]),
    )


def batch(seed: int) -> tuple[Plan, Plan]:
    """The plan of a random program for a random batch, and the one in the program's own order."""
    drawn = random.Random(seed)
    name = drawn.choice(NAMES)
    ranks, microbatches = drawn.choice(SIZES)
    params = {"ranks": ranks, "microbatches": microbatches}
    given = read_source(PROGRAMS / f"{name}.sched")
    costs = costs_of(compile(given, params), seed)
    return compile(greedy(name), params, costs), compile(given, params, costs)


def ops(plan: Plan) -> list[Counter[tuple[int, int, int]]]:
    return [
        Counter(each.row(index)[:3] for index in range(len(each)))
        for each in (actions.compute() for actions in plan.ranks)
    ]


def is_right(schedule: Schedule) -> bool:
    """Whether a schedule is right by the whole proof, which walks the graph of each set of rules
    that a portable plan must satisfy, and by an oracle that carries out its values.
    """
    try:
        check_structure(schedule)
        for rules in transports(PORTABLE, schedule.columns.has_batches):
            run_on(schedule, schedule.costs, rules)
    except CompileError:
        return False
    return oracle(schedule)


def is_proved(schedule: Schedule) -> bool:
    try:
        prove(schedule)
    except CompileError:
        return False
    return True


BATCHES = [
    pytest.param(range(50), id="few", marks=pytest.mark.core),
    pytest.param(range(50, 1000), id="others", marks=pytest.mark.large),
]


@pytest.mark.parametrize("seeds", BATCHES)
def test_each_batch_gets_a_plan_that_the_whole_proof_accepts(
    seeds: Iterable[int],
) -> None:
    """It has the ops of the program, takes no longer than the program's own order at the batch's
    costs, and holds no more. If it is damaged, the proof that `compile` makes says what the whole
    proof says.
    """
    shorter = 0
    verdicts = Counter[bool]()
    for seed in seeds:
        plan, given = batch(seed)
        assert ops(plan) == ops(given)
        assert is_right(evolve(plan))
        one, other = (simulate(each, ideal=True) for each in (plan, given))
        assert one.timeline.makespan <= other.timeline.makespan
        assert max(one.peak_memory) <= max(other.peak_memory)
        shorter += one.timeline.makespan < other.timeline.makespan
        schedule = changed(plan, random.Random(seed))
        verdict = is_proved(schedule)
        assert verdict == is_right(evolve(schedule))
        verdicts[verdict] += 1
    assert shorter > len(list(seeds)) / 4
    assert min(verdicts[True], verdicts[False]) > 0


PROGRAM = """schedule s {
    param ranks = 4
    param microbatches = 8
    rank r { repeat microbatches { F(next) } repeat microbatches { B(next) } }
    greedy
}"""
DIGEST = f"""
from schedlang import Costs, compile
lengths = [907, 31, 433, 2048, 512, 77, 1500, 640]
costs = Costs(forward_times=[[length * 0.37 for length in lengths]] * 4, p2p_time=0.1)
print(compile({PROGRAM!r}, costs=costs).digest)
"""


def test_every_process_finds_the_same_order() -> None:
    """Ranks need not tell each other which order they have found: it follows from the costs."""
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def by_definition(
    graph: Graph, urgency: list[float], room: list[float]
) -> tuple[list[list[int]], list[float]] | None:
    """The execution of list scheduling, by asking every node whether it can start at the moment."""
    ranks = range(len(graph.order))
    orders: list[list[int]] = [[] for _ in ranks]
    ends = [inf] * len(graph)
    free = [0.0 for _ in ranks]
    held = [0.0 for _ in ranks]
    left = set(range(len(graph)))
    now = 0.0

    def arrival(node: int) -> float:
        return max((ends[maker] + late for maker, late in graph.needs[node]), default=0)

    def next_node(rank: int) -> int | None:
        """The node that the rank can start now."""
        if free[rank] > now:
            return None
        # Of each room the most urgent one; of several rooms those that fit.
        first: dict[float, int] = {}
        for node in sorted(left, key=lambda node: (-urgency[node], node)):
            if graph.rank[node] == rank and arrival(node) <= now:
                first.setdefault(room[node] if graph.rise[node] > 0 else inf, node)
        fits = [
            node
            for most, node in first.items()
            if held[rank] <= most - graph.rise[node]
        ]
        return min(fits, key=lambda node: (-urgency[node], node), default=None)

    while left:
        # A node that takes no time may let another rank start one at the same moment.
        for rank in ranks:
            node = next_node(rank)
            if node is not None:
                left.remove(node)
                orders[rank].append(node)
                ends[node] = free[rank] = now + graph.time[node]
                held[rank] += graph.change[node]
                break
        else:
            moments = [time for time in (*free, *map(arrival, left)) if time > now]
            now = min(moments, default=inf)
            if now == inf:
                return None
    return orders, ends


@pytest.mark.parametrize("seed", range(40))
def test_each_rank_runs_the_most_urgent_of_its_ready_nodes(seed: int) -> None:
    """Also where many things happen at one moment, some ops take no time, and memory is short."""
    drawn = random.Random(seed)
    name = NAMES[seed % len(NAMES)]
    given, params = load(read_source(PROGRAMS / f"{name}.sched"))
    ranks, microbatches = drawn.choice(SIZES)
    size = {"ranks": ranks, "microbatches": microbatches}
    stages = len(ops_of(given, params, size).placement)
    times = [drawn.choice((0, 1, 1, 2)) for _ in range(stages)]
    costs = Costs(
        forward_times=times,
        backward_times=[drawn.choice((time, 2 * time, 3)) for time in times],
        p2p_time=drawn.choice((0, 0.5, 1)),
    )
    graph = Graph(ops_of(given, params, size, costs))
    urgency = [float(drawn.randint(0, 9)) for _ in range(len(graph))]
    least = max(graph.rise)
    room = graph.room(drawn.choice((least, 2 * least, inf)))
    found = most_urgent_first(graph, len(graph.order), urgency, room)
    assert found == by_definition(graph, urgency, room.tolist())


def test_a_graph_that_runs_out_of_room_is_given_up() -> None:
    """No forward fits, so no op of the rank ever runs: the pass does not take such an order."""
    program = Source("s.sched", PROGRAM.replace("greedy", ""))
    graph = Graph(ops_of(*load(program), {"ranks": 1, "microbatches": 2}))
    room = np.zeros(len(graph))
    assert most_urgent_first(graph, 1, graph.least_tails, room) is None
