"""What searches for large problems find: published orders, blocks that repeat, and windows."""

from collections import Counter
from math import inf

import pytest

from schedlang import Costs, Source, compile, simulate
from schedlang.extras.search.optimize.blocks import program_of_block
from schedlang.extras.search.optimize.exact import exact
from schedlang.extras.search.optimize.instance import Instance
from schedlang.extras.search.optimize.periodic import Block, blocks
from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.extras.search.optimize.published import from_gallery, passed, published
from schedlang.extras.search.optimize.windows import windows

pytestmark = pytest.mark.slow

#: One microbatch after the other, on stages in a V, in a loop, or one on each rank.
PROGRAM = """
schedule plain {{
    param ranks = 4
    param microbatches = 8
    param chunks = {chunks}
    stage s in 0 .. ranks * chunks on {place}
    {objective}
    rank r {{
        for m in 0 .. microbatches {{
            for c in 0 .. chunks {{ F(stage(c), m) }}
            for c in 0 .. chunks {{ {backward} }}
        }}
    }}
}}
"""
PLACES = {
    "straight": (1, "s"),
    "V": (2, "if s < ranks then s else 2 * ranks - 1 - s"),
    "loop": (2, "s % ranks"),
}
MEASURED = Costs(
    forward_times=(18,),
    input_times=(17,),
    weight_times=(9,),
    backward_times=(26,),
    p2p_time=1,
)


def problem_of(
    place: str,
    ranks: int,
    microbatches: int,
    limit: float,
    costs: Costs | None = None,
    is_split: bool = True,
    objective: str = "makespan",
) -> Problem:
    chunks, on = PLACES[place]
    last = "stage(chunks - 1 - c), m"
    text = PROGRAM.format(
        chunks=chunks,
        place=on,
        objective=f"objective {objective}",
        backward=f"I({last})  W({last})" if is_split else f"B({last})",
    )
    params = {"ranks": ranks, "microbatches": microbatches}
    return Problem.of(
        compile(Source("plain.sched", text), params, costs or Costs()), limit
    )


def given(problem: Problem) -> Answer:
    """The order as it stands in the program."""
    orders = problem.graph.order
    return Answer(orders, problem.value(orders), Instance.of(problem).least, "as given")


def check(problem: Problem, answer: Answer) -> None:
    """The answer runs all ops of each rank once, within the limits, and takes as long as it says."""
    for rank, order in enumerate(answer.orders):
        assert Counter(order) == Counter(problem.graph.order[rank])
    assert problem.fits(answer.orders)
    assert problem.value(answer.orders) == answer.value < inf


@pytest.mark.parametrize(
    ("place", "limit", "is_split", "names"),
    [
        ("straight", 4, True, {"1f1b", "gpipe", "zb_h1", "zb_1p", "two_thirds_memory"}),
        ("straight", 4, False, {"1f1b", "gpipe", "zb_h1"}),
        ("V", 8, True, {"zb_v", "v_half", "v_min", "1f1b_v", "hanayo"}),
        ("loop", 8, True, {"interleaved_1f1b", "interleaved_low_memory", "looped_bfs"}),
    ],
)
def test_published_orders(
    place: str, limit: float, is_split: bool, names: set[str]
) -> None:
    """Programs with stages where the problem has them run all of its ops, and no other."""
    problem = problem_of(place, 4, 8, limit, is_split=is_split)
    orders = dict(published(problem))
    assert names <= {name.split(" ")[0] for name in orders}
    for order in orders.values():
        for rank, nodes in enumerate(order):
            assert Counter(nodes) == Counter(problem.graph.order[rank])
        for changed in passed(problem, order):
            assert problem.graph.ends(changed)


def test_published_orders_at_the_bound() -> None:
    """ZB-1p and ZB-V are the best within 1F1B's memory where all ops take as long."""
    for place, limit, least in (("straight", 4, 27), ("V", 8, 51)):
        problem = problem_of(place, 4, 8, limit)
        *_, answer = from_gallery(problem, given(problem), 60)
        check(problem, answer)
        assert answer.value == least == Instance.of(problem).least


def is_periodic(instance: Instance, block: Block) -> bool:
    """Whether no rank has two things to do at a time, however often a block repeats, and all ops
    wait for what they need: looked at time by time.
    """
    scale = block.unit / instance.unit
    busy: set[tuple[int, int]] = set()
    for chain, starts in zip(instance.chains, block.start, strict=True):
        for start in starts:
            for time in range(start, start + round(instance.time[chain[0]] / scale)):
                slot = instance.rank[chain[0]], time % block.interval
                if slot in busy:
                    return False
                busy.add(slot)
    start_of = {
        node: start
        for chain, starts in zip(instance.chains, block.start, strict=True)
        for node, start in zip(chain, starts, strict=False)
    }
    return all(
        start_of[second] * scale >= start_of[first] * scale + lag
        for first, second, lag in instance.lags
        if first in start_of and second in start_of
    )


@pytest.mark.parametrize(
    ("place", "ranks", "limit", "is_split", "costs"),
    [
        ("straight", 4, 4, True, Costs()),
        ("straight", 5, 5, False, Costs()),
        ("V", 4, 4, True, Costs()),
        ("V", 4, 6, True, MEASURED),
        ("V", 5, 10, True, Costs()),
        ("loop", 4, 8, True, Costs()),
    ],
)
def test_a_block_as_a_program(
    place: str, ranks: int, limit: float, is_split: bool, costs: Costs
) -> None:
    """A block that was found for few microbatches is proved for 64, and what it claims holds."""
    problem = problem_of(place, ranks, 8, limit, costs, is_split)
    instance = Instance.of(problem)
    block = next(blocks(instance, [], 60))
    assert is_periodic(instance, block)
    text = program_of_block(instance, block)
    assert "assert makespan <=" in text
    execution = simulate(compile(Source("block.sched", text), {"microbatches": 64}))
    assert max(execution.peak_activations) <= limit
    work = max(execution.timeline.busy)
    assert execution.timeline.makespan <= 63 * block.interval + block.length
    # With an interval as long as the work, only the begin and the end of all are idle.
    if block.interval * 64 == work:
        assert execution.timeline.makespan < work + block.length


def test_a_block_begins_from_what_is_known() -> None:
    """V-Min's own interval is found again, whatever else is tried before."""
    problem = problem_of("V", 6, 24, 6)
    instance = Instance.of(problem)
    *_, known = from_gallery(problem, given(problem), 60)
    block = next(blocks(instance, instance.in_chains(known.orders), 60))
    assert block.interval == 6
    assert problem.fits(block.orders(instance))


def test_no_blocks_where_microbatches_are_few() -> None:
    assert list(blocks(Instance.of(problem_of("V", 2, 1, 4)), [], 10)) == []


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("place", ["straight", "V"])
def test_windows_come_to_the_best(place: str, objective: str) -> None:
    """Of small problems, which one window has all of, as the exact search; and never worse."""
    problem = problem_of(place, 2, 3, 3, MEASURED, objective=objective)
    answer = given(problem)
    for better in windows(problem, answer, 60):
        check(problem, better)
        assert better.value < answer.value
        answer = better
    *_, best = exact(problem, given(problem), 60)
    assert best.is_best
    assert answer.value == best.value


def test_large_problems_get_better() -> None:
    """From the published order on, within the memory; the best is known to be above the bound."""
    problem = problem_of("V", 4, 8, 6, MEASURED, is_split=False)
    *_, known = from_gallery(problem, given(problem), 60)
    # The first one that is better is enough: how far it gets in some time is the benchmark's. The
    # first window that gains is found in 0.2 s.
    answer = next(windows(problem, known, 10))
    check(problem, answer)
    assert Instance.of(problem).least <= answer.value < known.value
