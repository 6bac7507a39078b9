"""The pass that writes gathers and sums: what it writes is what is implied without it."""

import pytest

from schedlang import (
    CompileError,
    Costs,
    Kind,
    Plan,
    Source,
    compile,
    read_source,
    simulate,
)
from schedlang.passes.gather import gather
from schedlang.proof.prove import prove
from schedlang.ranks.gather_order import shards_figures
from tests.support.paths import GALLERY

PROGRAM = """schedule chunks {{
    param ranks = 2
    param microbatches = 3
    stage s in 0 .. 3 * ranks on s % ranks
    memory gather = 100
    rank r {{
        for c in 0 .. 3       {{ for m in 0 .. microbatches {{ F(stage(c), m) }} }}
        for c in 0 .. 3 by -1 {{ for m in 0 .. microbatches {{ B(stage(c), m) }} }}
    }}
    {}
}}
"""
COSTS = Costs(gather_times=(0.7,), sum_times=(1.9,), p2p_time=0.3)


def program(text: str) -> Plan:
    return compile(Source("chunks.sched", PROGRAM.format(text)))


def has_its_own(plan: Plan) -> bool:
    """Whether a plan has replicas, several updates, or gathers: then others are implied."""
    is_replicated = len(plan.layout.pipelines) > 1 and not plan.layout.models
    return (
        is_replicated
        or plan.layout.updates > 1
        or bool(plan.columns.is_collective.any())
    )


@pytest.mark.slow
def test_what_is_written_takes_as_long_as_what_is_implied() -> None:
    """In all programs, with a place for each stage, as costs without it assume; and it passes the
    proof.
    """
    plans = [
        plan
        for plan in map(compile, map(read_source, GALLERY))
        if not has_its_own(plan)
    ]
    assert len(plans) > 30
    for plan in plans:
        written = gather(plan)
        prove(written)
        costs = COSTS.over(plan.costs)
        makespans = [
            simulate(each, costs).timeline.makespan for each in (written, plan)
        ]
        assert makespans[0] == pytest.approx(makespans[1]), plan.name


@pytest.mark.parametrize("places", [1, 2, 3])
def test_so_many_stages_are_gathered_at_once(places: int) -> None:
    plain = program("")
    plan = program(f"gather within {places}")
    assert max(simulate(plan).peak_memory) == 9 + 100 * places
    for rank, actions in enumerate(plan.ranks):
        gathers = list(actions.kind).count(Kind.UNSHARD)
        assert shards_figures(plain, rank, places).startswith(f"{gathers} gathers, ")
    assert (program("gather").ranks == plan.ranks) == (places == 3)


def test_there_is_a_place_at_least() -> None:
    with pytest.raises(CompileError, match="there is room for 0 gathered stages"):
        program("gather within 0")
