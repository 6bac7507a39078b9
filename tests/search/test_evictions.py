"""`schedc optimize --offload --recompute`: which activations are evicted, against every schedule there is, and
against programs that copy by hand.
"""

import json
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from attrs import frozen

from schedlang import Costs, Source, compile, read_source, simulate
from schedlang.extras.search.optimize.evictions import Search
from schedlang.extras.search.optimize.optimize import judged, optimize
from schedlang.extras.search.optimize.problem import WAYS, Problem
from tests.support.commands import exit_code, output

pytestmark = pytest.mark.slow

#: Two ranks, all forwards first.
PROGRAM = """
schedule tiny {{
    param ranks = 2
    param microbatches = {microbatches}
    {objective}
    rank r {{
        for m in 0 .. microbatches {{ F(m) }}
        for m in 0 .. microbatches {{ {backward} }}
    }}
}}
"""
#: The ops of a microbatch on a rank, by the way in which its activation is evicted: O and L are the
#: copies, R runs F again. The backward follows.
LINES = {"": "F", "offload": "FOL", "recompute": "FR"}
#: What each of these costs.
NAMES = {
    "F": "forward",
    "B": "backward",
    "I": "input",
    "W": "weight",
    "R": "recompute",
    "O": "offload",
    "L": "reload",
}
#: An op of a rank by its letter and its microbatch.
Small = tuple[str, int]
#: When each op starts and ends, by rank, letter and microbatch.
Times = dict[tuple[int, str, int], tuple[float, float]]


@frozen
class Drawn:
    """A tiny problem: its costs, its sizes, and in which ways activations may be evicted."""

    costs: Costs
    microbatches: int
    backward: str
    objective: str
    ways: tuple[str, ...]
    limits: tuple[float, float]

    def problem(self) -> Problem:
        text = PROGRAM.format(
            microbatches=self.microbatches,
            objective=f"objective {self.objective}",
            backward="  ".join(f"{letter}(m)" for letter in self.backward),
        )
        plan = compile(Source("tiny.sched", text), costs=self.costs)
        return Problem.of(plan, self.limits, [WAYS[way] for way in self.ways])


def drawn(seed: int, microbatches: int = 2) -> Drawn:
    """A problem. With three microbatches, rank 1 has room for all of them."""
    rng = Random(seed)

    def times(*choices: float) -> list[float]:
        return [rng.choice(choices) for _ in range(2)]

    backward = "IW" if seed % 4 == 3 and microbatches == 2 else "B"
    costs: dict[str, Any] = {
        f"{NAMES[letter]}_times": times(0.5, 1, 1, 1.3, 2, 3)
        for letter in f"F{backward}R"
    }
    costs |= {f"{NAMES[letter]}_times": times(0.2, 0.5, 1, 2) for letter in "OL"}
    costs["p2p_time"] = rng.choice((0, 0.4, 1))
    ways = (("offload",), ("offload", "recompute"), ("recompute",), ("offload",))
    return Drawn(
        Costs(**costs),
        microbatches,
        backward,
        rng.choice(("makespan", "span")),
        ways[seed % 4] if microbatches == 2 else ("offload",),
        rng.choice(((1, 1), (1, 2), (2, 1))) if microbatches == 2 else (2, 3),
    )


def merged(lines: tuple[str, ...]) -> Iterator[list[Small]]:
    """Every order of the ops of some microbatches that keeps the order of each."""
    if not any(lines):
        yield []
    for microbatch, line in enumerate(lines):
        if line:
            rest = (*lines[:microbatch], line[1:], *lines[microbatch + 1 :])
            yield from ([(line[0], microbatch), *order] for order in merged(rest))


def every_order(tiny: Drawn, rank: int) -> list[list[Small]]:
    """Every order of a rank, with every choice of evictions."""
    ways = ["", *tiny.ways]
    if tiny.limits[rank] >= tiny.microbatches:
        # There is room for all, and an eviction only adds ops.
        ways = [""]
    lines = [LINES[way] + tiny.backward for way in ways]
    every = product(lines, repeat=tiny.microbatches)
    orders = [
        order
        for chosen in every
        for order in merged(chosen)
        if at_once(order, tiny) <= tiny.limits[rank]
    ]
    if rank == 1:
        return orders
    # Microbatches are alike, so they may begin in their order.
    return [
        order
        for order in orders
        if (first := [number for letter, number in order if letter == "F"])
        == sorted(first)
    ]


def at_once(order: list[Small], tiny: Drawn) -> int:
    """The most activations that a rank holds at least, if copies took no time."""
    held = most = 0
    for letter, microbatch in order:
        if letter in "FRL":
            held += 1
            most = max(most, held)
        if letter in f"O{tiny.backward[-1]}":
            held -= 1
        # A forward that is run again drops its activation.
        held -= letter == "F" and ("R", microbatch) in order
    return most


def execute(orders: tuple[list[Small], ...], costs: Costs) -> Times:
    """When each op starts and ends, as docs/costs.md says; empty if ranks wait for each other."""
    # For each rank, when it and its link are free, and the next op of its order.
    clock = [0.0, 0.0]
    link = [0.0, 0.0]
    following = [0, 0]
    latency = costs.p2p_time or 0.0
    times: Times = {}
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while following[rank] < len(order):
                letter, microbatch = order[following[rank]]
                begin = clock[rank]
                if letter in "OL":
                    begin = max(begin, link[rank])
                if (letter == "F" and rank == 1) or (letter in "BI" and rank == 0):
                    made = times.get((1 - rank, letter, microbatch))
                    if made is None:
                        break
                    begin = max(begin, made[1] + latency)
                if letter in "BI":
                    copied = times.get((rank, "L", microbatch), (0.0, 0.0))
                    begin = max(begin, copied[1])
                end = begin + getattr(costs, f"{NAMES[letter]}_times")[rank]
                if letter in "OL":
                    link[rank] = end
                else:
                    clock[rank] = end
                times[rank, letter, microbatch] = begin, end
                following[rank] += 1
                moved = True
    return times if following == list(map(len, orders)) else {}


def fits(times: Times, rank: int, tiny: Drawn) -> bool:
    """Whether a rank never holds more activations than it may."""
    held = []
    for microbatch in range(tiny.microbatches):
        taken, forward = times[rank, "F", microbatch]
        _, end = times[rank, tiny.backward[-1], microbatch]
        if (rank, "O", microbatch) in times:
            held.append((taken, times[rank, "O", microbatch][1]))
            held.append((times[rank, "L", microbatch][0], end))
        elif (rank, "R", microbatch) in times:
            # A forward whose activation is dropped holds it when it begins.
            held.append((taken, min(forward, taken + 1e-6)))
            held.append((times[rank, "R", microbatch][0], end))
        else:
            held.append((taken, end))
    return all(
        sum(start <= time < end - 1e-9 for start, end in held) <= tiny.limits[rank]
        for time, _ in held
    )


def least_of_all(tiny: Drawn) -> float:
    """The least objective of every schedule that stays within the limits."""
    least = math.inf
    for orders in product(every_order(tiny, 0), every_order(tiny, 1)):
        times = execute(orders, tiny.costs)
        if not times:
            continue
        starts: list[list[float]] = [[], []]
        ends: list[list[float]] = [[], []]
        for (rank, letter, _), (start, end) in times.items():
            if letter not in "OL":
                starts[rank].append(start)
                ends[rank].append(end)
        value = max(map(max, ends)) - min(map(min, starts))
        if tiny.objective == "span":
            value = max(max(ends[rank]) - min(starts[rank]) for rank in (0, 1))
        if value < least - 1e-9 and all(fits(times, rank, tiny) for rank in (0, 1)):
            least = value
    return least


@pytest.mark.parametrize(
    ("seed", "microbatches"),
    [
        pytest.param(1, 2, marks=pytest.mark.core),
        *((seed, 2) for seed in range(12) if seed != 1),
        *(pytest.param(seed, 3, marks=pytest.mark.large) for seed in (8, 9, 10, 12)),
    ],
)
def test_no_schedule_at_all_is_better(seed: int, microbatches: int) -> None:
    """Of every order of ops and copies; and the program that is written is that schedule."""
    tiny = drawn(seed, microbatches)
    problem = tiny.problem()
    *_, answer = optimize(problem, 60.0, workers=1)
    least = least_of_all(tiny)
    assert answer.value == pytest.approx(least)
    if least == math.inf:
        return
    assert answer.is_best
    plan = compile(Source("best.sched", judged(problem, answer, "portable").text))
    execution = simulate(plan, ideal=True)
    assert getattr(execution.timeline, plan.objective) == pytest.approx(least)
    assert list(execution.peak_memory) == problem.peaks(answer)
    assert all(
        peak <= limit
        for peak, limit in zip(execution.peak_memory, problem.limits, strict=True)
    )


@pytest.mark.parametrize("name", ["offload", "recompute"])
def test_an_order_that_needs_more_memory_is_made_to_fit(name: str) -> None:
    """In 1F1B, rank 0 holds eight activations; four are enough, if others are evicted."""
    plan = compile("1f1b", {"ranks": 8, "microbatches": 24})
    problem = Problem.of(plan, 4, [WAYS[name]])
    search = Search(problem, Random(0))
    outcome = search.fitted(problem.graph.order, problem.ways)
    assert outcome.over == 0
    assert outcome.value == problem.value_of(outcome.schedule) < math.inf
    evicted = {stage for stage, _ in outcome.candidate.evictions}
    # The last four ranks hold no more than four activations in any case.
    assert evicted == {0, 1, 2, 3}


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8)])
def test_no_slower_than_copies_by_hand(ranks: int, microbatches: int) -> None:
    """In the memory that each rank of the program holds, on the links that they share."""
    plan = compile("pipe_offload", {"ranks": ranks, "microbatches": microbatches})
    by_hand = simulate(plan, ideal=True)
    problem = Problem.of(plan, by_hand.peak_memory)
    assert problem.as_given.value == by_hand.timeline.makespan
    *_, answer = optimize(problem, 10.0, workers=1)
    assert answer.value <= by_hand.timeline.makespan
    best = compile(Source("best.sched", judged(problem, answer, "portable").text))
    execution = simulate(best, ideal=True)
    assert execution.timeline.makespan == pytest.approx(answer.value)
    pairs = zip(execution.peak_memory, by_hand.peak_memory, strict=True)
    assert all(peak <= limit for peak, limit in pairs)


def test_copies_that_gain_nothing_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1F1B fits into its own memory, whatever is offloaded by hand."""
    path = tmp_path / "needless.sched"
    path.write_text(
        """schedule needless {
    param ranks = 2
    param microbatches = 2
    rank r {
        for m in 0 .. microbatches { F(m)  offload(m)  reload(m)  B(m) }
    }
}
"""
    )
    best = tmp_path / "best.sched"
    arguments = ["optimize", str(path), "--peak 2 -o", str(best), "--json"]
    assert exit_code(*arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["proved"]
    assert document["value"] == 9 < document["given"]
    assert document["offloads"] == [0, 0]
    assert "offload" not in best.read_text().replace("offloads", "")
    assert exit_code("check", str(best)) == 0


def test_the_command_says_what_is_evicted(
    tmp_path: Path,
) -> None:
    best = tmp_path / "best.sched"
    size = "-p ranks=3 -p microbatches=3 --peak 2"
    out = output("optimize 1f1b", size, "--offload -o", str(best))
    assert "activations that are copied to the host and back" in out
    execution = simulate(compile(read_source(best)), ideal=True)
    assert max(execution.peak_memory) <= 2


@pytest.mark.parametrize("option", ["--block --place"])
def test_what_does_not_evict(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        exit_code("optimize 1f1b --offload", option)
    assert (
        "are for programs whose activations stay in memory" in capsys.readouterr().err
    )
