"""How plans and executions look in a shell and in a notebook."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from schedlang import (
    CompileError,
    Costs,
    Layout,
    Schedule,
    compile,
    open_plan,
    simulate,
    write_plan,
)
from schedlang.plan.file import Parts
from tests.support.paths import PROGRAMS

#: A line of a terminal, twice.
MOST = 160


@pytest.mark.parametrize("name", ["1f1b", "dualpipe", "pipedream"])
def test_a_repr_is_a_line_that_says_what_it_is(name: str) -> None:
    plan = compile(PROGRAMS / f"{name}.sched")
    execution = simulate(plan)
    timeline = execution.timeline
    shown = [
        plan,
        execution,
        timeline,
        timeline.ranks[0],
        plan.ranks[0],
        plan.layout,
        plan.source,
    ]
    assert [repr(each) for each in shown if len(repr(each)) > MOST] == []
    assert repr(plan).startswith(f"<Plan {plan.name} (ranks = 4, microbatches = ")
    assert f"makespan {timeline.makespan:g}" in repr(execution)
    assert plan.ranks[0].word(0) in repr(plan.ranks[0])


def test_a_repr_of_much_is_as_short() -> None:
    plan = compile(
        PROGRAMS / "interleaved_1f1b.sched", {"ranks": 64, "microbatches": 64}
    )
    assert len(repr(plan.layout)) < 2 * MOST
    assert len(repr(Costs(forward_times=[1.0] * 128))) < MOST
    assert repr(Costs(forward_times=(1, 2), p2p_time=0.5)) == (
        "Costs(forward_times=(1, 2), p2p_time=0.5)"
    )


def test_a_repr_reads_no_ranks_of_a_large_plan(tmp_path: Path) -> None:
    plan = compile(PROGRAMS / "1f1b.sched")
    write_plan(plan, tmp_path / "plan.json")
    opened = open_plan(tmp_path / "plan.json")
    (tmp_path / "plan.json").unlink()
    assert isinstance(opened.ranks, Parts)
    assert repr(opened) == repr(plan)


def test_a_repr_of_an_error_names_the_first_mistake() -> None:
    with pytest.raises(CompileError) as wrong:
        compile(
            "schedule s { param ranks = 2 param microbatches = 2 rank r { F(0) F(1) B(x) C } }"
        )
    assert re.fullmatch(r"<CompileError [a-z-]+: [^\n]*>", repr(wrong.value))


def test_a_notebook_draws_plans_and_executions() -> None:
    plan = compile(PROGRAMS / "zb_h1.sched")
    execution = simulate(plan, Costs(forward_times=(3.0,)))
    for shown in (plan, execution):
        html = shown._repr_html_()
        assert html is not None
        picture = ElementTree.fromstring(html).find("{http://www.w3.org/2000/svg}svg")
        assert picture is not None
        assert "rank 3" in {
            text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")
        }
    # At other costs it is another picture.
    assert plan._repr_html_() != execution._repr_html_()


def test_a_notebook_draws_no_more_than_can_be_seen() -> None:
    plan = compile(PROGRAMS / "1f1b.sched", {"ranks": 32, "microbatches": 512})
    html = plan._repr_html_()
    assert html is not None
    assert "<svg" not in html
    assert "write_view" in html
    assert "&lt;Plan one_f_one_b" in html


def test_an_execution_of_no_plan_is_not_drawn() -> None:
    plan = compile(PROGRAMS / "1f1b.sched")
    schedule = Schedule(
        "s", plan.params, plan.layout, plan.ranks, plan.source, plan.spans
    )
    assert simulate(schedule)._repr_html_() is None
    assert isinstance(schedule.layout, Layout)
