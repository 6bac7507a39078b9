"""What the lines of programs cost, against the figures of the whole."""

from pathlib import Path

import pytest

from schedlang import Source, compile, read_source, simulate
from schedlang.diagnostics.source import Span
from schedlang.report.lines import line_costs
from tests.support.paths import GALLERY

ALL = Span(0, 10**9)


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_the_lines_together_are_the_whole(path: Path) -> None:
    plan = compile(read_source(path))
    execution = simulate(plan)
    costs = line_costs(plan, execution)
    cost = costs.within(ALL)
    timeline = execution.timeline
    assert cost.runs + cost.waits == pytest.approx(timeline.makespan)
    assert cost.held == pytest.approx(max(execution.peak_memory))
    assert costs.peak_rank == execution.peak_memory.index(costs.peak)
    idle = timeline.makespan * len(plan.ranks) - sum(timeline.busy)
    assert costs.idle == pytest.approx(idle)
    # What comes behind the last op of a rank is before no op.
    behind = sum(
        timeline.makespan - max(bar.end for bar in rank) for rank in timeline.ranks
    )
    assert cost.idle == pytest.approx(idle - behind)


def test_each_line_has_its_own() -> None:
    text = """schedule s {
        param ranks = 2
        param microbatches = 3
        rank r {
            repeat microbatches { F(next) }
            repeat microbatches { B(next) }
        }
    }"""
    plan = compile(Source("s.sched", text))
    costs = line_costs(plan, simulate(plan))
    first, second = (text.index(op) for op in ("F(next)", "B(next)"))
    forward, backward = (
        costs.places[Span(place, place + 7)] for place in (first, second)
    )
    # 0F0 1F0 1F1 1F2 1B0 1B1 1B2 0B2 is the critical path: four forwards, four backwards of 2.
    assert (forward.runs, backward.runs) == (4, 8)
    # Rank 1 waits 1 for its first forward, rank 0 waits 3 for its first backward.
    assert (forward.idle, backward.idle) == (1, 3)
    assert (forward.held, backward.held) == (3, 0)
