"""How plans and executions look in a shell and in a notebook."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import schedlang
from schedlang import (
    CompileError,
    Costs,
    Layout,
    Schedule,
    compile,
    open_plan,
    simulate,
    view,
    write_plan,
)
from schedlang.cli.main import main
from schedlang.plan.file import Parts
from tests.support.paths import DOCS, PROGRAMS

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


def framed(html: str | None) -> list[dict[str, Any]]:
    """The data of the schedules on the page that is in the frame of a cell."""
    assert html is not None
    frame = ElementTree.fromstring(html).find("iframe")
    assert frame is not None
    page = frame.attrib["srcdoc"]
    assert "allow-same-origin" not in frame.attrib["sandbox"]
    (data,) = re.findall(r'id="data">(.*?)</script>', page)
    found: list[dict[str, Any]] = json.loads(data)
    return found


@pytest.mark.core
def test_a_notebook_has_the_page_of_plans_and_executions() -> None:
    """In a cell, with all that it needs, in less than the room of a photograph."""
    plan = compile(PROGRAMS / "zb_h1.sched")
    execution = simulate(plan, Costs(forward_times=(3.0,)))
    for shown in (plan, execution):
        html = shown._repr_html_()
        (data,) = framed(html)
        assert data["title"] == "zb_h1 (ranks = 4, microbatches = 8)"
        assert len(str(html)) < 150_000
    # At other costs it is another picture.
    assert plan._repr_html_() != execution._repr_html_()


def test_several_stand_side_by_side_on_one_page() -> None:
    """Plans at their share of the model, as `schedc view` has them; executions as they are."""
    shown = view("1f1b", "interleaved_1f1b")
    plain, interleaved = framed(shown._repr_html_())
    assert interleaved["figures"].startswith("makespan 28.5,")
    assert "marks" not in plain
    executions = [simulate(compile(name)) for name in ("1f1b", "interleaved_1f1b")]
    _, interleaved = framed(view(*executions)._repr_html_())
    assert interleaved["figures"].startswith("makespan 57,")


#: Two ranks that wait for each other.
WRONG = (DOCS / "errors" / "deadlock.md").read_text().split("```")[1].partition("\n")[2]


class Shell:
    """What the extension needs of IPython."""

    def __init__(self) -> None:
        self.user_ns: dict[str, Any] = {}
        self.magics: dict[str, Any] = {}

    def register_magic_function(self, magic: Any, kind: str, name: str) -> None:
        assert kind == "cell"
        self.magics[name] = magic


@pytest.mark.core
def test_a_cell_is_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    """`%%sched NAME ranks=2` compiles it, shows it, and names its plan; what is wrong is printed,
    with the repair that is proved.
    """
    shell = Shell()
    schedlang.load_ipython_extension(shell)
    cell = (PROGRAMS / "1f1b.sched").read_text()
    plan = shell.magics["sched"]("mine ranks=2 microbatches=4", cell)
    assert plan.params == {"ranks": 2, "microbatches": 4}
    assert shell.user_ns == {"mine": plan}
    assert framed(plan._repr_html_())
    assert shell.magics["sched"]("", WRONG) is None
    told = capsys.readouterr().out
    assert "error[deadlock]" in told
    assert "= repair: " in told
    with pytest.raises(ValueError, match="`ranks=x` is not NAME=VALUE"):
        shell.magics["sched"]("ranks=x", cell)


@pytest.mark.core
def test_an_error_that_is_shown_has_the_repair_that_schedc_proposes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "wrong.sched"
    program.write_text(WRONG)
    with pytest.raises(CompileError) as wrong:
        schedlang.compile(program)
    # Looking for it takes many trials: a script that only catches the error waits for none.
    assert wrong.value.diagnostics[0].repair is None
    assert main(["compile", str(program), "--color", "never"]) == 1
    told, _, see = capsys.readouterr().err.partition("\n\nsee:")
    assert see
    assert str(wrong.value) == told
    assert wrong.value.diagnostics[0].repair is not None
    # Advice is for the program's own costs.
    with pytest.raises(CompileError) as wrong:
        schedlang.compile(program, costs=Costs(p2p_time=1.0))
    assert "= repair: " not in str(wrong.value)


def test_a_notebook_draws_no_more_than_can_be_seen() -> None:
    plan = compile(PROGRAMS / "1f1b.sched", {"ranks": 32, "microbatches": 512})
    html = plan._repr_html_()
    assert html is not None
    assert "<iframe" not in html
    assert "write_view" in html
    assert "&lt;Plan one_f_one_b" in html


def test_an_execution_of_no_plan_is_not_drawn() -> None:
    plan = compile(PROGRAMS / "1f1b.sched")
    schedule = Schedule(
        "s", plan.params, plan.layout, plan.ranks, plan.source, plan.spans
    )
    assert simulate(schedule)._repr_html_() is None
    assert isinstance(schedule.layout, Layout)
