"""`schedc optimize` of programs that gather weights: where the gathers stand, against every schedule there is, and
against those that `gather within` writes.
"""

import math
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from random import Random

import pytest
from attrs import frozen

from schedlang import Costs, Kind, Source, compile, read_source, simulate
from schedlang.extras.search.optimize.evictions import Search
from schedlang.extras.search.optimize.optimize import judged, optimize
from schedlang.extras.search.optimize.problem import WAYS, Answer, Problem, peaks_of
from schedlang.passes.gather import gather
from tests.support.commands import exit_code, output

pytestmark = pytest.mark.slow

#: Rank 0 has the stages 0 and 2, rank 1 has stage 1 between them.
PROGRAM = """
schedule tiny {{
    param ranks = 2
    param microbatches = 2
    stage s in 0 .. 3 on s % 2
    objective {objective}
    rank r {{
        for c in 0 .. 2 - r       {{ for m in 0 .. microbatches {{ F(stage(c), m) }} }}
        for c in 0 .. 2 - r by -1 {{ for m in 0 .. microbatches {{ B(stage(c), m) }} }}
    }}
    gather
}}
"""
#: The ops of a microbatch on rank 0, and on rank 1.
LINES = [[("F", 0), ("F", 2), ("B", 2), ("B", 0)], [("F", 1), ("B", 1)]]
#: What a rank does: a kind by its letter, a stage and a microbatch. `+` gathers weights, `-` lets go of them, and `S`
#: sums gradients; these have the microbatch -1.
Small = tuple[str, int, int]


@frozen
class Drawn:
    """A tiny problem: its costs, what rank 0 may hold, and what is minimised."""

    costs: Costs
    limit: float
    objective: str

    def problem(self) -> Problem:
        text = PROGRAM.format(objective=self.objective)
        plan = compile(Source("tiny.sched", text), costs=self.costs)
        return Problem.of(plan, (self.limit, 99))


def drawn(seed: int) -> Drawn:
    rng = Random(seed)

    def each(*choices: float) -> list[float]:
        return [rng.choice(choices) for _ in range(3)]

    costs = Costs(
        forward_times=each(0.5, 1, 1, 1.3, 2),
        backward_times=each(1, 2, 2, 2.6),
        gather_times=each(0, 0.3, 1, 2),
        sum_times=each(0, 0.7, 2),
        gather_memory=each(1, 2, 1.5),
        p2p_time=rng.choice((0, 0.4, 1)),
    )
    return Drawn(
        costs, rng.choice((3.5, 4, 4, 5)), rng.choice(("makespan", "makespan", "span"))
    )


def merged(lines: list[list[Small]]) -> Iterator[list[Small]]:
    """Every order of the ops of some microbatches that keeps the order of each."""
    if not any(lines):
        yield []
    for number, line in enumerate(lines):
        if line:
            rest = [*lines[:number], line[1:], *lines[number + 1 :]]
            yield from ([line[0], *order] for order in merged(rest))


def orders_of(rank: int) -> list[list[Small]]:
    """Every order of the ops of a rank in which the first microbatch, which is like the other one, begins."""
    lines = [[(*op, number) for op in LINES[rank]] for number in range(2)]
    return [order for order in merged(lines) if order[0][2] == 0]


def with_gathers(order: list[Small], may_let_go: bool) -> Iterator[list[Small]]:
    """Every way to gather weights for an order; or only to gather them once, at the begin."""
    uses: dict[int, list[int]] = {}
    for index, (_, stage, _) in enumerate(order):
        uses.setdefault(stage, []).append(index)
    gaps = [(stage, gap) for stage in uses for gap in pairwise(uses[stage])]
    for chosen in product((False, True), repeat=len(gaps) if may_let_go else 0):
        let_go = [
            gap for gap, is_chosen in zip(gaps, chosen, strict=False) if is_chosen
        ]
        # Stage, the op that needs a gather, and where it may stand.
        needs = [(stage, use[0], range(use[0] + 1)) for stage, use in uses.items()]
        needs += [(stage, j, range(i + 1, j + 1)) for stage, (i, j) in let_go]
        needs.sort(key=lambda need: need[1])
        if not may_let_go:
            needs = [(stage, use, range(1)) for stage, use, _ in needs]
        for places in product(*(where for _, _, where in needs)):
            ends = {(stage, i) for stage, (i, _) in let_go}
            ends |= {(stage, use[-1]) for stage, use in uses.items()}
            found: list[Small] = []
            for index, op in enumerate(order):
                found += [
                    ("+", stage, -1)
                    for (stage, _, _), place in zip(needs, places, strict=True)
                    if place == index
                ]
                found.append(op)
                stage = op[1]
                if index == uses[stage][-1]:
                    found.append(("S", stage, -1))
                if (stage, index) in ends:
                    found.append(("-", stage, -1))
            yield found


def least_held(order: list[Small], tiny: Drawn) -> float:
    """What rank 0 holds at most at least, if gathers took no time and began as late as they may."""
    assert tiny.costs.gather_memory is not None
    held = most = 0.0
    there: set[int] = set()
    for letter, stage, _ in order:
        weights = tiny.costs.gather_memory[stage]
        if letter in "FB" and stage not in there:
            there.add(stage)
            held += weights
        held += letter == "F"
        most = max(most, held)
        held -= letter == "B"
        if letter == "-":
            there.remove(stage)
            held -= weights
    return most


def value_of(orders: tuple[list[Small], list[Small]], tiny: Drawn) -> float:
    """The objective of some orders, as docs/costs.md says; infinite if rank 0 holds too much."""
    costs = tiny.costs
    latency = costs.p2p_time or 0.0
    clock = [0.0, 0.0]
    following = [0, 0]
    stream = dict.fromkeys(product((0, 1), "+S"), 0.0)
    ends: dict[Small, float] = {}
    gathered: dict[int, float] = {}
    starts: list[list[float]] = [[], []]
    #: What rank 0 takes and gives back: the time, and the amount; what is given back comes first.
    changes: list[tuple[float, float]] = []
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while following[rank] < len(order):
                action = order[following[rank]]
                letter, stage, microbatch = action
                if letter in "+S":
                    begin = max(clock[rank], stream[rank, letter])
                    times = costs.gather_times if letter == "+" else costs.sum_times
                    assert times is not None
                    stream[rank, letter] = begin + times[stage]
                    if letter == "+":
                        gathered[stage] = stream[rank, letter]
                elif letter == "-":
                    begin = clock[rank]
                else:
                    step = -1 if letter == "F" else 1
                    before = letter, stage + step, microbatch
                    begin = max(clock[rank], gathered[stage])
                    if 0 <= stage + step <= 2:
                        if before not in ends:
                            break
                        begin = max(begin, ends[before] + latency)
                    times = (
                        costs.forward_times if letter == "F" else costs.backward_times
                    )
                    assert times is not None
                    clock[rank] = ends[action] = begin + times[stage]
                    starts[rank].append(begin)
                if rank == 0:
                    assert costs.gather_memory is not None
                    weights = costs.gather_memory[stage]
                    amount = {"F": 1, "B": -1, "S": 0, "+": weights, "-": -weights}[
                        letter
                    ]
                    changes.append((clock[0] if letter == "B" else begin, amount))
                following[rank] += 1
                moved = True
    if following != list(map(len, orders)):
        return math.inf
    held = 0.0
    for _, amount in sorted((round(time, 6), amount) for time, amount in changes):
        held += amount
        if held > tiny.limit + 1e-9:
            return math.inf
    if tiny.objective == "span":
        return max(clock[rank] - starts[rank][0] for rank in (0, 1))
    # The first gather, or the first op, begins at 0.
    return max(*clock, *stream.values())


@pytest.mark.parametrize(
    "seed", [pytest.param(1, marks=pytest.mark.core), *(n for n in range(12) if n != 1)]
)
def test_no_schedule_at_all_is_better(seed: int) -> None:
    """Of every order of ops and gathers; and the program that is written is that schedule."""
    tiny = drawn(seed)
    problem = tiny.problem()
    *_, answer = optimize(problem, 60.0, workers=1)
    values = (
        value_of((first, second), tiny)
        for order in orders_of(0)
        for first in with_gathers(order, may_let_go=True)
        if least_held(first, tiny) <= tiny.limit
        for other in orders_of(1)
        for second in with_gathers(other, may_let_go=False)
    )
    least = min(values, default=math.inf)
    assert answer.value == pytest.approx(least)
    if least == math.inf:
        return
    assert answer.is_best
    plan = compile(Source("best.sched", judged(problem, answer, "portable").text))
    execution = simulate(plan, ideal=True)
    assert getattr(execution.timeline, plan.objective) == pytest.approx(least)
    assert list(execution.peak_memory) == problem.peaks(answer)
    assert execution.peak_memory[0] <= tiny.limit


def problem_within(name: str, places: int | None, **params: int) -> Problem:
    """A program with `gather within` some places, or with gathers by hand, in the memory that it takes on each rank."""
    costs = Costs(gather_times=(1,), sum_times=(0.5,), gather_memory=(2.5,))
    plan = compile(name, params, costs)
    given = plan if places is None else gather(plan, places)
    return Problem.of(given, peaks_of(given))


def is_kept(problem: Problem, answer: Answer) -> bool:
    """Whether the program that is written takes as long as is said, and stays within the limits."""
    plan = compile(Source("best.sched", judged(problem, answer, "portable").text))
    execution = simulate(plan, ideal=True)
    assert execution.timeline.makespan == pytest.approx(answer.value)
    pairs = zip(execution.peak_memory, problem.limits, strict=True)
    return all(peak <= limit for peak, limit in pairs)


@pytest.mark.parametrize(
    ("name", "places", "params"),
    [
        pytest.param(
            "interleaved_1f1b",
            1,
            {"ranks": 2, "microbatches": 4},
            marks=pytest.mark.core,
        ),
        ("interleaved_1f1b", 1, {"ranks": 4, "microbatches": 8}),
        ("interleaved_1f1b", 2, {"ranks": 4, "microbatches": 16, "chunks": 4}),
        # Two ops that overlap use two stages at once.
        ("dualpipe_v", 2, {"ranks": 2, "microbatches": 6}),
        ("looped_bfs_sharded", None, {"ranks": 2, "microbatches": 4}),
        # It sums gradients after each unit of microbatches.
        ("zeropp", None, {"ranks": 2, "microbatches": 4}),
    ],
    ids=str,
)
def test_no_slower_than_the_pass_and_by_hand(
    name: str, places: int | None, params: dict[str, int]
) -> None:
    """In the memory that each rank of the program holds."""
    problem = problem_within(name, places, **params)
    before = problem.as_given.value
    assert before < math.inf
    *_, answer = optimize(problem, 10.0, workers=1)
    assert answer.bound <= answer.value <= before
    assert is_kept(problem, answer)


def test_one_gather_of_a_stage_where_there_is_room() -> None:
    """Nothing is faster, and none is let go of that is gathered again."""
    problem = problem_within("interleaved_1f1b", 2, ranks=2, microbatches=4)
    *_, answer = optimize(problem, 10.0, workers=1)
    assert answer.is_best
    assert answer.schedule is not None
    assert len(answer.schedule.columns.where(Kind.UNSHARD)) == 4


def test_weights_are_let_go_of_until_the_rest_fits() -> None:
    """All stages at once take 2.5 more than there is, and what is used last is gathered again."""
    problem = problem_within("interleaved_1f1b", 1, ranks=4, microbatches=8)
    search = Search(problem, Random(0))
    at_first = search.execute(search.candidate_of(gather(problem.bare.graph.schedule)))
    assert at_first.over > 0
    outcome = search.fitted(problem.graph.order, ())
    assert outcome.over == 0
    assert outcome.value == problem.value_of(outcome.schedule) < math.inf
    gathers = [
        len(each.schedule.columns.where(Kind.UNSHARD)) for each in (at_first, outcome)
    ]
    assert gathers[0] < gathers[1]


def test_forwards_that_run_again_have_their_weights() -> None:
    """Where activations are recomputed and weights gathered, which is better than gathers alone."""
    text = PROGRAM.format(objective="makespan").replace(
        "microbatches = 2", "microbatches = 3"
    )
    costs = Costs(gather_memory=(1,), gather_times=(0.5,), recompute_times=(0.2,))
    plan = compile(Source("tiny.sched", text), costs=costs)
    values = []
    for ways in ([], [WAYS["recompute"]]):
        problem = Problem.of(plan, (3, 4), ways)
        *_, answer = optimize(problem, 20.0, workers=1)
        assert is_kept(problem, answer)
        values.append(answer.value)
    assert values[1] < values[0]
    assert answer.schedule is not None
    assert len(answer.schedule.columns.where(Kind.R))


def test_sums_alone_are_judged_by() -> None:
    """The last sum is behind the last backward, whatever the order; rank 1 has time for its own."""
    text = """schedule summed {
        param ranks = 2
        param microbatches = 2
        cost sum = 2
        rank r { repeat microbatches { F(next) }  repeat microbatches { B(next) }  reduce }
    }"""
    problem = Problem.of(compile(Source("summed.sched", text)))
    *_, answer = optimize(problem, 10.0, workers=1)
    assert answer.value == answer.bound == 9 + 2
    assert is_kept(problem, answer)


def test_the_command_says_how_often_weights_are_gathered(tmp_path: Path) -> None:
    path = tmp_path / "tiny.sched"
    path.write_text(PROGRAM.format(objective="makespan"))
    best = tmp_path / "best.sched"
    out = output("optimize", str(path), "--for 10s -o", str(best))
    assert "per rank, gathers of weights" in out
    assert best.read_text().count("unshard") >= 3
    assert simulate(compile(read_source(best)), ideal=True).timeline.makespan > 0


@pytest.mark.parametrize("option", ["--block", "--place"])
def test_what_does_not_gather(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.sched"
    path.write_text(PROGRAM.format(objective="makespan"))
    with pytest.raises(SystemExit):
        exit_code("optimize", str(path), option)
    assert "the copies and gathers of the program" in capsys.readouterr().err


def test_gathers_of_several_ranks_keep_their_places() -> None:
    plan = gather(compile("gems"))
    with pytest.raises(ValueError, match="its gathers are events of several ranks"):
        Problem.of(plan)
