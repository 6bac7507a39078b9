"""Recorded runs: drawn, and compared with what was predicted for them.

tests/cases/run.json was written by `schedc run programs/1f1b.sched -p ranks=2 -p microbatches=2
--steps 4 --trace …`; tests/runtime/test_training.py records others.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any
from xml.etree import ElementTree

import pytest

from schedlang import Bar, Costs, Kind, Plan, Source, compile, read_source, simulate
from schedlang.extras.measured import (
    Comparison,
    compare,
    comparison_json,
    notes_of,
    read_run,
    run_of,
)
from schedlang.report.views import lay_out
from schedlang.report.views.causes import causes_of
from schedlang.schedule.costs import read_costs
from schedlang.schedule.costs.measured import measured_costs
from tests.support.commands import exit_code, output
from tests.support.paths import CASES, GOLDEN, PROGRAMS
from tests.support.programs import plan_of
from tests.support.recorded import recorded_as

RECORDED = CASES / "run.json"
#: The program of the recorded run.
GIVEN = [str(PROGRAMS / "1f1b.sched"), str(RECORDED), "-p ranks=2 -p microbatches=2"]


def test_the_recorded_run() -> None:
    run = read_run(RECORDED)
    events = [
        each
        for each in json.loads(RECORDED.read_text())["traceEvents"]
        if each["ph"] == "X"
    ]
    assert len(run.actions) == len(events)
    assert len(run.steps) == 3
    for step in run.steps:
        assert [" ".join(map(str, bars)) for bars in step.ranks] == [
            each.compute().text() for each in run.plan.ranks
        ]
        assert min(bars[0].start for bars in step.ranks) == 0
    assert run.median.makespan == median(step.makespan for step in run.steps)
    # The last stage sends no activations: its forwards take what their events do.
    forwards = [each["dur"] for each in events if re.fullmatch(r"1F\d", each["name"])]
    assert run.costs.forward_times is not None
    assert run.costs.forward_times[1] == pytest.approx(fmean(forwards))
    # What `--costs` reads from the trace is the same.
    assert read_costs(RECORDED) == run.costs
    assert run.costs.p2p_time


def in_order(*actions: tuple[int, Bar]) -> list[tuple[int, Bar]]:
    return sorted(actions, key=lambda action: action[1].start)


def test_an_op_lasts_until_its_sends_have_begun() -> None:
    ops = (
        (0, Bar(Kind.F, 0, 0, 0, 5)),
        (0, Bar(Kind.F, 0, 1, 9, 14)),
        (1, Bar(Kind.F, 1, 0, 8, 20)),
    )
    sends = (0, Bar(Kind.SEND_F, 0, 0, 6, 8)), (0, Bar(Kind.SEND_F, 0, 1, 18, 19))
    receive = 0, Bar(Kind.RECV_B, 0, 0, 15, 17)
    # The second send is behind a wait.
    assert measured_costs(in_order(*ops, *sends, receive)).forward_times == (
        fmean([8, 5]),
        12,
    )
    assert measured_costs(in_order(*ops, *sends)).forward_times == (fmean([8, 10]), 12)
    assert measured_costs(in_order(*ops)).forward_times == (5, 12)


def test_a_transfer_is_timed_where_its_receiver_waits() -> None:
    ops = (0, Bar(Kind.F, 0, 0, 0, 4)), (1, Bar(Kind.F, 1, 0, 60, 61))
    first = (0, Bar(Kind.SEND_F, 0, 0, 10, 11)), (1, Bar(Kind.RECV_F, 1, 0, 4, 14))
    late = (0, Bar(Kind.SEND_F, 0, 1, 20, 21)), (1, Bar(Kind.RECV_F, 1, 1, 28, 29))
    back = (1, Bar(Kind.SEND_B, 1, 0, 30, 31)), (0, Bar(Kind.RECV_B, 0, 0, 29, 36))
    assert measured_costs(in_order(*ops, *first, *late, *back)).p2p_time == fmean(
        [3, 5]
    )
    assert measured_costs(in_order(*ops, *late)).p2p_time is None
    # The same transfer in two steps, the second time there before the send is through.
    again = (0, Bar(Kind.SEND_F, 0, 0, 52, 59)), (1, Bar(Kind.RECV_F, 1, 0, 50, 58))
    assert measured_costs(in_order(*ops, *first, *again)).p2p_time == fmean([3, 0])
    # A skip has one number at both ends.
    skip = (0, Bar(Kind.SEND_F, 2, 0, 30, 31)), (1, Bar(Kind.RECV_F, 2, 0, 29, 37))
    assert measured_costs(in_order(*ops, *first, *skip)).p2p_time == fmean([3, 6])


def compared(
    tmp_path: Path, plan: Plan, *steps: Costs, given: Costs | None = None
) -> Comparison:
    run = read_run(recorded_as(tmp_path / "run.json", plan, *steps))
    return compare(plan, run) if given is None else compare(plan, run, given)


@pytest.mark.parametrize(
    "name",
    ["1f1b", "interleaved_1f1b", "zb_h1", "dualpipe", "chimera", "1f1b_recompute"],
)
def test_a_run_that_goes_as_simulated_is_predicted(tmp_path: Path, name: str) -> None:
    plan = plan_of(name)
    costs = Costs(
        forward_times=(1100,),
        backward_times=(2000,),
        input_times=(1300,),
        weight_times=(900,),
        recompute_times=(1000,),
    )
    found = compared(tmp_path, plan, costs, costs)
    assert found.error == pytest.approx(0)
    assert found.predicted.busy == pytest.approx(found.measured.busy)
    assert found.predicted.idle == pytest.approx(found.measured.idle)
    assert found.stragglers == ()
    assert [each.ratio for each in found.durations] == pytest.approx(
        [1] * len(found.durations)
    )


def test_a_program_in_a_unit_of_its_own_is_predicted_by_what_was_measured(
    tmp_path: Path,
) -> None:
    program = tmp_path / "own.sched"
    text = (
        (PROGRAMS / "gpipe.sched")
        .read_text()
        .replace("param ranks", "cost F = 7  cost send = 5  param ranks", 1)
    )
    program.write_text(re.sub(r".*assert .*", "", text))
    plan = compile(read_source(program))
    costs = Costs(forward_times=(1100,), backward_times=(2000,), p2p_time=0)
    assert plan.costs.p2p_time == 5
    assert compared(tmp_path, plan, costs).error == pytest.approx(0)


def test_given_costs_predict_in_place_of_those_of_the_run(tmp_path: Path) -> None:
    plan = plan_of("gpipe", ranks=2, microbatches=2)
    found = compared(
        tmp_path,
        plan,
        Costs(forward_times=(100,), backward_times=(200,)),
        given=Costs(forward_times=(50,)),
    )
    assert found.measured.makespan == pytest.approx(900)
    assert (found.predicted.makespan, found.error) == (
        pytest.approx(750),
        pytest.approx(-1 / 6),
    )


def test_the_median_step(tmp_path: Path) -> None:
    plan = plan_of("1f1b", ranks=2, microbatches=2)
    steps = [
        Costs(forward_times=(each,), backward_times=(2 * each,))
        for each in (5.0, 1.0, 2.0, 4.0)
    ]
    found = compared(tmp_path, plan, *steps)
    assert [step.makespan for step in found.run.steps] == pytest.approx([45, 9, 18, 36])
    assert (found.step, found.measured.makespan) == (
        pytest.approx(27),
        pytest.approx(18),
    )


def test_stragglers_are_named(
    tmp_path: Path,
) -> None:
    plan = plan_of("interleaved_1f1b", ranks=4, chunks=2)
    slow = [1.0] * 8
    slow[2] = slow[6] = 1.5
    costs = Costs(
        forward_times=tuple(slow), backward_times=tuple(2 * each for each in slow)
    )
    # Rank 1 is now and then slower.
    late = [2.0 if stage == 1 else each for stage, each in enumerate(slow)]
    found = compared(
        tmp_path,
        plan,
        costs,
        Costs(forward_times=tuple(late), backward_times=costs.backward_times),
    )
    worst, other = found.stragglers
    assert (worst.rank, worst.stages, worst.ratio) == (2, (2, 6), pytest.approx(1.5))
    assert (other.rank, other.stages, other.spread) == (1, (1,), pytest.approx(2 / 3))
    assert comparison_json(found)["stragglers"][0] == {
        "rank": 2,
        "stages": (2, 6),
        "ratio": pytest.approx(1.5),
    }
    program = PROGRAMS / "interleaved_1f1b.sched"
    text = output(
        "compare",
        program,
        tmp_path / "run.json",
        "-p",
        "ranks=4",
        "-p",
        "chunks=2",
    )
    assert (
        "\nslow: stages 2, 6 on rank 2: the ops of a microbatch take up to 1.50x as long as on other stages\n"
        in text
    )
    assert (
        "\nunsteady: stage 1 on rank 1: the middle half of the ops of a kind spreads over 67% of the median\n"
        in text
    )


def test_what_stands_out_in_a_run(tmp_path: Path) -> None:
    """Ranks that hold up the others, and a first step that took longer; nothing in an even run."""
    plan = plan_of("1f1b")
    usual = Costs(forward_times=[1000], backward_times=[2000])
    slow = Costs(forward_times=[2000], backward_times=[4000])
    run = read_run(recorded_as(tmp_path / "run.json", plan, slow, usual, usual))
    notes = notes_of(run)
    assert notes[-1] == "the first step took 66 ms, 2.00x the median of 3 steps"
    even = read_run(recorded_as(tmp_path / "run.json", plan, usual, usual))
    assert notes_of(even) == []
    uneven = Costs(forward_times=[1000, 1000, 4000, 1000], backward_times=[2000])
    run = read_run(recorded_as(tmp_path / "run.json", plan, uneven))
    assert [note.split(":")[0] for note in notes_of(run)] == ["slow"]


def test_the_comparison_in_text(
    golden: Callable[[str, Path], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    golden(output("compare", *GIVEN), GOLDEN / "views" / "run.txt")


def test_costs_are_written_for_the_next_simulation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = {}
    for name in ("costs.json", "costs.yaml"):
        found = json.loads(
            output("compare", *GIVEN, "--json", "--write-costs", tmp_path / name)
        )
        assert read_costs(tmp_path / name) == read_run(RECORDED).costs
    again = json.loads(
        output(
            "simulate",
            GIVEN[0],
            *GIVEN[2:],
            "--costs",
            tmp_path / "costs.yaml",
            "--json",
        )
    )
    assert again["makespan"] == found["predicted"]["makespan"]
    assert again["busy"] == found["predicted"]["busy"]
    assert found["costs"] == read_run(RECORDED).costs.to_json()
    assert (
        found["error"]
        == found["predicted"]["makespan"] / found["measured"]["makespan"] - 1
    )
    assert found["measured"]["makespan"] == median(found["steps"])
    assert (
        exit_code(
            "compare", *GIVEN, "--write-costs", str(tmp_path / "none" / "costs.json")
        )
        == 2
    )
    assert "error[unwritable]" in capsys.readouterr().err


def test_every_view_draws_a_run(
    tmp_path: Path,
) -> None:
    run = read_run(RECORDED)
    text = output("view", RECORDED)
    title = "one_f_one_b (ranks = 2, microbatches = 2), measured"
    assert text.startswith(f"{title}: makespan {run.median.makespan / 1000:.5g} ms, ")
    for ending in ("svg", "html", "json", "png"):
        output("view", RECORDED, "-o", tmp_path / f"run.{ending}")
    assert (
        ElementTree.parse(tmp_path / "run.svg").findtext(
            "{http://www.w3.org/2000/svg}title"
        )
        == title
    )
    assert title in (tmp_path / "run.html").read_text()
    # In a viewer of traces it takes the time that it took.
    events = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    shown = {
        (each["name"], each["ts"], each["dur"]) for each in events if each["ph"] == "X"
    }
    assert shown == {
        (str(bar), bar.start, bar.end - bar.start)
        for bars in run.median.ranks
        for bar in bars
    }
    picture = lay_out(run.plan, run.execution())
    assert picture.memory[0][-1] == (run.median.ranks[0][-1].end, 0)
    assert run.execution().peak_activations == simulate(run.plan).peak_activations
    # Beside it, a program is predicted with the costs that the run shows.
    output("view", *GIVEN, "-o", tmp_path / "both.html")
    assert (
        f"one_f_one_b (ranks = 2, microbatches = 2) and {title}"
        in (tmp_path / "both.html").read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (
            ["compare", str(RECORDED)],
            "a recorded run is compared with its program or plan",
        ),
        (
            ["compare", GIVEN[0], GIVEN[0], str(RECORDED)],
            "a recorded run is compared with its program or plan",
        ),
        (
            ["compare", *GIVEN[:2]],
            "the run is of `one_f_one_b` (ranks = 2, microbatches = 2), `one_f_one_b` (ranks = 4",
        ),
        (
            ["compare", *GIVEN, "--forward-times 1 2 3"],
            "3 durations of `F` are given, there are 2 stages",
        ),
        (
            ["compare", GIVEN[0], "--write-costs costs.json"],
            "--write-costs writes what a recorded run shows",
        ),
        (
            ["view", str(RECORDED), "-p ranks=2"],
            "is a recorded run: it is drawn as it was",
        ),
        (
            ["view", str(RECORDED), "--p2p-time 2"],
            "is a recorded run: it is drawn as it was",
        ),
    ],
)
def test_wrong_usage(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        exit_code(*arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    """Leave out the first event of a name."""

    def change(document: dict[str, Any]) -> None:
        events = document["traceEvents"]
        events.remove(next(each for each in events if each["name"] == name))

    return change


@pytest.mark.parametrize(
    ("change", "code", "complaint"),
    [
        (lambda document: document.pop("otherData"), "trace", "the trace has no plan"),
        (
            lambda document: document.update(traceEvents=5),
            "trace",
            "the trace has no step",
        ),
        (
            without("1B0"),
            "trace",
            "step 0 of rank 1 in the trace does not have the ops of the plan in order",
        ),
        (
            lambda document: document["traceEvents"].__delitem__(slice(1, None)),
            "trace",
            "step 0 of rank 0",
        ),
        (
            lambda document: document["traceEvents"][0].update(dur=-1),
            "trace",
            "not a whole trace: `",
        ),
        (
            lambda document: document["traceEvents"][0].update(ts="soon"),
            "trace",
            "starts at soon",
        ),
        (
            lambda document: document["otherData"]["plan"].update(actions=[]),
            "plan",
            "must have 2 lines, one per rank",
        ),
    ],
)
def test_a_damaged_trace(
    tmp_path: Path,
    change: Callable[[dict[str, Any]], Any],
    code: str,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = json.loads(RECORDED.read_text())
    change(document)
    (tmp_path / "bad.json").write_text(json.dumps(document))
    assert exit_code("view", str(tmp_path / "bad.json")) == 1
    error = capsys.readouterr().err
    assert f"error[{code}]: `{tmp_path / 'bad.json'}`: " in error
    assert complaint in error


def test_a_trace_that_is_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cut.json").write_text(RECORDED.read_text()[:1000])
    assert exit_code("compare", GIVEN[0], str(tmp_path / "cut.json"), *GIVEN[2:]) == 1
    assert "error[trace]" in capsys.readouterr().err


def test_a_run_does_not_record_the_gathers_and_sums_of_its_plan(tmp_path: Path) -> None:
    plan = plan_of("looped_bfs_sharded", ranks=2, microbatches=2)
    run = read_run(recorded_as(tmp_path / "run.json", plan, Costs(), Costs()))
    comparison = compare(plan, run)
    assert comparison.measured.makespan == pytest.approx(comparison.predicted.makespan)
    assert causes_of(lay_out(run.plan, run.execution())).path


def test_ops_that_overlap_may_begin_in_any_order() -> None:
    text = """schedule overlapped {
        param ranks = 1  param microbatches = 2
        stage s in 0 .. 2 on 0
        rank r {
            F(0, 0)  F(1, 0)  F(0, 1)
            overlap { B(1, 0)  F(1, 1) }
            B(1, 1)  B(0, 0)  B(0, 1)
        }
    }"""
    plan = compile(Source("overlapped.sched", text))
    (bars,) = simulate(plan).timeline.ranks
    begun = [*bars[:3], bars[4], bars[3], *bars[5:]]
    (step,) = run_of(plan, [(0, bar) for bar in begun]).steps
    assert list(map(str, step.ranks[0])) == list(map(str, bars))
