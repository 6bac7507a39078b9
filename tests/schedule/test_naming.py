"""Stages, microbatches and actions are called alike wherever people read of them."""

import json
import re
from pathlib import Path

import pytest

from schedlang import CompileError, Kind, Plan, compile, simulate
from schedlang.diagnostics.source import Source
from schedlang.report.views import lay_out
from schedlang.report.views.html import page
from schedlang.report.views.labels import Labels
from schedlang.report.views.svg import svg
from schedlang.report.views.terminal import draw
from schedlang.report.views.trace import trace
from schedlang.schedule.actions import is_collective
from schedlang.schedule.costs.traces import traced_actions
from tests.support.commands import exit_code, output
from tests.support.paths import GALLERY, PROGRAMS
from tests.support.programs import plan_of


def names(plan: Plan, rank: int) -> list[str]:
    return plan.names.text(plan.ranks[rank].compute()).split()


def test_stages_of_several_pipelines_are_called_as_programs_write_them() -> None:
    plan = plan_of("gems", ranks=2, microbatches=2)
    assert names(plan, 0) == ["down(0)F0", "down(0)B0", "up(1)F0", "up(1)B0"]
    assert plan.names.stages(plan.stages_of(1)) == "stages down(1), up(0)"
    lanes = plan_of("pipedream_replicated", ranks=3)
    assert [lanes.names.stage(stage) for stage in range(4)] == [
        "lane(0,0)",
        "lane(0,1)",
        "lane(1,0)",
        "lane(1,1)",
    ]
    # An update has the number of its own, a transfer that of its stage.
    assert "lane(0,0)U1" in names(lanes, 0)
    assert lanes.name_of(0, 1) == "lane(0,0)SEND_F0"


def test_slices_are_those_of_their_microbatch() -> None:
    plan = plan_of("seq1f1b", ranks=1, microbatches=2, slices=3)
    assert plan.ranks[0].compute().text().split()[:4] == ["0F0", "0F1", "0F2", "0B2"]
    assert names(plan, 0)[:5] == [
        "0F(m0.k0)",
        "0F(m0.k1)",
        "0F(m0.k2)",
        "0B(m0.k2)",
        "0F(m1.k0)",
    ]
    assert plan.names.microbatches(6) == "slices m0.k0 to m1.k2"


def test_one_pipeline_of_whole_microbatches_has_the_plans_own_numbers() -> None:
    plan = plan_of("interleaved_1f1b", ranks=2, microbatches=4)
    assert plan.names.are_numbers
    assert [plan.names.text(actions) for actions in plan.ranks] == [
        actions.text() for actions in plan.ranks
    ]


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_no_two_actions_of_a_plan_have_one_name(path: Path) -> None:
    plan = plan_of(path.stem)
    for rank, actions in enumerate(plan.ranks):
        # A stage may be gathered more than once.
        of_one = [i for i, kind in enumerate(actions.kind) if not is_collective(kind)]
        called = [plan.name_of(rank, index) for index in of_one]
        assert len(set(called)) == len(called)
        assert all(
            re.fullmatch(r"[a-z\d(),]+[A-Z]+(_[FB])?(\d*|\(m\d+\.k\d+\))", name)
            for name in called
        )


@pytest.mark.parametrize("name", ["gems", "seq1f1b"])
def test_every_view_has_these_names(
    name: str,
) -> None:
    plan = plan_of(name, ranks=2, microbatches=4)
    execution = simulate(plan)
    called = {word for rank in range(2) for word in names(plan, rank)}
    events = json.loads(trace(lay_out(plan, execution)))["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} == called
    arguments = [str(PROGRAMS / f"{name}.sched"), "-p ranks=2 -p microbatches=4"]
    assert set(output("show", *arguments, "--compute --ranks").split()) == called
    # A page writes them of these parts, a box has the microbatch without its letters.
    data = json.loads(
        re.findall(r'id="data">(.*?)</script>', page([lay_out(plan, execution)]))[0]
    )[0]
    assert data["stages"] == [
        plan.names.stage(stage) for stage in range(len(plan.placement))
    ]
    assert data["microbatches"][-1] == plan.names.microbatch(
        len(data["microbatches"]) - 1
    )


def labels_of(name: str, **params: int) -> Labels:
    return Labels(plan_of(name, **params).layout)


def test_labels_are_cut_between_words_and_tell_the_stages_of_a_rank_apart() -> None:
    """Never within a parenthesis; the stage is left out first, then the letter of the kind."""
    names = labels_of("weipipe", ranks=4, microbatches=8)
    assert names.tags == ("l0", "l1", "l2", "l3")
    assert all("(" not in prefix for prefix in names.prefixes)
    names = labels_of("chimera", ranks=4, microbatches=8)
    assert names.labels(Kind.B, 4, 3) == ["uB3", "B3", "3"]
    assert names.stages_beside(0) == "down(0), up(3)"
    names = labels_of("interleaved_1f1b", ranks=2, microbatches=4)
    assert names.labels(Kind.F, 3, 2) == ["3F2", "F2", "2"]
    assert names.stages_beside(1) == "stages 1, 3"
    names = labels_of("1f1b", ranks=2, microbatches=4)
    assert names.labels(Kind.F, 1, 2) == ["F2", "2"]


def test_a_narrow_picture_says_what_its_numbers_stand_for() -> None:
    plan = plan_of("gems", ranks=2, microbatches=4)
    timeline = simulate(plan).timeline
    drawn = draw(timeline, plan.names, 120)
    assert "uF0" in drawn
    assert drawn.splitlines()[-1] == "d is down, u is up"
    # Where there is room for letters alone, there is nothing to explain.
    assert " is " not in draw(timeline, plan.names, 40)
    slices = plan_of("seq1f1b", ranks=2, microbatches=2)
    drawn = draw(simulate(slices).timeline, slices.names, 120)
    assert "F1.1" in drawn
    assert "F3" not in drawn
    assert drawn.splitlines()[-1] == "0.1 is slice 1 of microbatch 0"
    assert ">(0.1 is slice 1 of microbatch 0)<" in svg(
        lay_out(slices, simulate(slices))
    )
    assert "slice" not in svg(lay_out(plan, simulate(plan)))


def test_messages_have_these_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lacking.sched"
    file.write_text(
        "schedule lacking { param ranks = 2 param microbatches = 2\n"
        "pipeline down runs 1 stage s in 0 .. 2 on s\n"
        "pipeline up runs 1 stage s in 0 .. 2 on 1 - s\n"
        "rank r { F(down(r), 0) F(up(1 - r), 0) B(down(r), 0) if r == 1 { B(up(0), 0) } } }"
    )
    assert exit_code("compile", str(file)) == 1
    message = "the backward of microbatch 0 never runs on stage up(1)"
    assert message in capsys.readouterr().err
    file.write_text(
        "schedule lacking { param ranks = 1 param microbatches = 2 param slices = 2\n"
        "rank r { for m in 0 .. 2 { F(m, 0) F(m, 1) } B(0, 1) B(0, 0) B(1, 1) } }"
    )
    assert exit_code("compile", str(file)) == 1
    assert (
        "the backward of slice m1.k0 never runs on stage 0" in capsys.readouterr().err
    )


def test_the_trace_of_named_actions_still_says_what_they_cost(tmp_path: Path) -> None:
    plan = plan_of("gems", ranks=2, microbatches=2)
    events = json.loads(trace(lay_out(plan, simulate(plan))))["traceEvents"]
    read = {(bar.kind, bar.stage, bar.microbatch) for _, bar in traced_actions(events)}
    ops = [actions.compute() for actions in plan.ranks]
    assert read == {
        actions.row(index)[:3] for actions in ops for index in range(len(actions))
    }


def test_a_program_of_one_pipeline_with_a_name() -> None:
    plan = compile(
        Source(
            "one.sched",
            "schedule one { param ranks = 2 param microbatches = 1\n"
            "pipeline down runs 1 stage s in 0 .. 2 on s rank r { F(down(r), 0) B(down(r), 0) } }",
        )
    )
    assert names(plan, 1) == ["1F0", "1B0"]


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ("F(up(r), 0)", "`F` of stage up(0) on rank 0, it is on rank 1"),
        ("F(up(1 - r), next) F(up(1 - r), next)", "of stage up(1), all 1 are done"),
    ],
)
def test_messages_of_the_language_have_these_names(rank: str, message: str) -> None:
    text = (
        "schedule wrong { param ranks = 2 param microbatches = 2\n"
        "pipeline down runs 1 stage s in 0 .. 2 on s\n"
        f"pipeline up runs 1 stage s in 0 .. 2 on 1 - s rank r {{ {rank} }} }}"
    )
    with pytest.raises(CompileError) as caught:
        compile(Source("wrong.sched", text))
    assert message in caught.value.diagnostics[0].message


def test_ops_of_a_block_that_collide_have_these_names() -> None:
    text = (
        "schedule wrong { param ranks = 2 param microbatches = 2\n"
        "pipeline down runs 1 stage s in 0 .. 2 on s\n"
        "pipeline up runs 1 stage s in 0 .. 2 on 1 - s\n"
        "block m every 6 { stage s in 0 .. 2 {\n"
        "F(down(s), m) at s F(up(s), m) at 1 B(down(s), m) at 9 B(up(s), m) at 15 } } }"
    )
    with pytest.raises(CompileError) as caught:
        compile(Source("wrong.sched", text))
    message = "`up(0)F0` and `down(1)F0` collide on rank 1 in slot 1"
    assert message in caught.value.diagnostics[0].message


def test_what_is_said_of_stages_has_these_names() -> None:
    arguments = [str(PROGRAMS / "gems.sched"), "-p ranks=2 -p microbatches=2"]
    assert "backward on stage up(1): 2 -> 1.8" in output("explain-bubble", *arguments)
    assert "rank 0, stages down(0), up(1)\n" in output("show", *arguments, "--frees")
    assert "down(0)UNSHARD down(0)F0" in output("show", *arguments, "--shards 1")
