"""`schedc pipeline` in the place of the visualizer: every recorded case of it that ran, its options
and its keys.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from schedlang import Costs, Plan, simulate
from schedlang.extras.pipeline_tool.quirks import quirky_bubble_rate, quirky_timeline
from schedlang.extras.pipeline_tool.settings import Settings, settings_of
from schedlang.report.views.table import table
from schedlang.schedule.timeline import Timeline
from tests.support.commands import exit_code, output
from tests.support.paths import CASES

RECORDED = json.loads((CASES / "visualizer.json").read_text())["cases"]
RUNNABLE = [case for case in RECORDED if case.get("makespan") is not None]


def name(case: dict[str, Any]) -> str:
    config = case["config"]
    size = [
        config.get(key)
        for key in (
            "num_devices",
            "num_stages",
            "num_batches",
            "p2p_latency",
            "p2p_time",
        )
    ]
    return f"{case['tool'].split()[0]}-{case['strategy']}-{'-'.join(str(each) for each in size if each is not None)}"


def settings(case: dict[str, Any]) -> Settings:
    config = {key: value for key, value in case["config"].items() if value is not None}
    return settings_of([config, {"strategy": case["strategy"]}])


def is_quirky(case: dict[str, Any]) -> bool:
    """Whether the later version counts time, or ideal time, as no latency of edges does."""
    if case["tool"].startswith("v0"):
        return False
    times = case["config"]["op_times"]
    latency = case["config"]["p2p_latency"]
    splits = case["strategy"] in ("zb1p", "dualpipe", "dualpipe_v")
    overlaps = case["strategy"].startswith("dualpipe") or "overlap" in case["strategy"]
    if latency:
        return splits or case["tool"].startswith("head")
    uneven = times["backward_D"] + times["backward_W"] != times["backward"]
    return (splits and uneven) or (
        overlaps
        and times["overlapped_forward_backward"] != times["forward"] + times["backward"]
    )


def check(case: dict[str, Any], plan: Plan, timeline: Timeline, rate: float) -> None:
    assert timeline.makespan == pytest.approx(case["makespan"])
    assert rate == pytest.approx(case["bubble_rate"])
    orders = case.get("order") or case.get("order_1based")
    starts = case.get("starts")
    if orders:
        for rank, actions in enumerate(plan.ranks):
            batches = list(actions.compute().batches())
            assert len(batches) == len(orders[str(rank)].split())
            if "order" in case:
                words = [
                    "+".join(map(actions.compute().word, batch)) for batch in batches
                ]
                assert words == [word.strip("()") for word in orders[str(rank)].split()]
            firsts = [batch.start for batch in batches]
            assert [
                timeline.ranks[rank][first].start for first in firsts
            ] == pytest.approx(starts[str(rank)], abs=1e-9)
    if case.get("device_busy_time"):
        assert timeline.busy == pytest.approx(case["device_busy_time"])


@pytest.mark.parametrize(
    "case", [case for case in RUNNABLE if not is_quirky(case)], ids=name
)
def test_cases_of_edge_latency(case: dict[str, Any]) -> None:
    found = settings(case)
    plan = found.plan()
    timeline = simulate(plan, found.costs).timeline
    check(case, plan, timeline, timeline.bubble_over_ideal)


@pytest.mark.parametrize(
    "case",
    [case for case in RUNNABLE if is_quirky(case) or case["tool"].startswith("head")],
    ids=name,
)
def test_cases_with_the_quirks(case: dict[str, Any]) -> None:
    found = settings(case)
    plan = found.plan()
    timeline = quirky_timeline(plan, found.costs, gaps=case["tool"].startswith("head"))
    check(case, plan, timeline, quirky_bubble_rate(plan, timeline, found.costs))


def test_every_case_that_ran_is_met() -> None:
    """By one of the two tests above; those that ended in an error are schedules that fit no
    devices, or fewer microbatches than devices.
    """
    errors = [case for case in RECORDED if case not in RUNNABLE]
    assert {case["strategy"] for case in errors} == {"1f1b", "dualpipe"}
    for case in errors:
        if case["strategy"] == "1f1b":
            assert (
                simulate(settings(case).plan(), settings(case).costs).timeline.makespan
                > 0
            )


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert exit_code("pipeline --no-visualization", *arguments) == 0
    captured = capsys.readouterr()
    return captured.out.splitlines()[-1] + "\n" + captured.err


def test_options_and_their_short_forms(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys) == "Bubble rate: 0.3000\n"
    assert printed(capsys, "--num-stages 4 --num-batches 8") == "Bubble rate: 0.3750\n"
    long = "--forward-times 1 1 1 2 --backward-times 2 2 2 4"
    assert printed(capsys, "-s 4 -b 8", long) == "Bubble rate: 0.9000\n"
    assert printed(capsys, "-s 4 -b 8 -f 1 1 1 2 -bw 2 2 2 4").startswith(
        "Bubble rate: 0.9000"
    )
    assert printed(capsys, "-s 4 -b 8 --p2p-time 0.5") == "Bubble rate: 0.7083\n"
    # Fewer microbatches than stages, where the tool ended in an IndexError.
    assert printed(capsys, "-s 4 -b 2") == "Bubble rate: 1.5000\n"


def test_lists_are_filled_up_or_cut_with_a_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    full = printed(capsys, "-s 3 -f 1 2 2 -bw 2 2 2")
    short = printed(capsys, "-s 3 -f 1 2 -bw 2 2 2")
    long = printed(capsys, "-s 3 -f 1 2 2 9 -bw 2 2 2")
    assert (
        short
        == full
        + "warning: there are 2 forward times for 3 stages: the last one is repeated\n"
    )
    assert (
        long
        == full
        + "warning: there are 4 forward times for 3 stages: the others are left out\n"
    )


def test_the_picture(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert output("pipeline -o drawn.svg").splitlines()[1:] == [
        "wrote drawn.svg",
        "Bubble rate: 0.3000",
    ]
    assert exit_code("pipeline") == 0
    assert exit_code("pipeline -o none.svg --no-visualization") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "drawn.svg",
        "pipeline_1f1b.png",
    ]
    with pytest.raises(SystemExit):
        exit_code("pipeline -o drawn.gif")


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two files of the tool's own documentation; what is given as an option overrides them, a
    default does not.
    """
    first = tmp_path / "sample_config.json"
    first.write_text(
        """{"num_stages": 6, "num_batches": 12, "forward_times": [0.8, 1.0, 1.2, 1.0, 0.9, 1.1],
        "backward_times": [1.6, 2.0, 2.4, 2.0, 1.8, 2.2], "output_file": "pipeline_1f1b_custom.png"}"""
    )
    assert printed(capsys, "--config", str(first)) == "Bubble rate: 0.5500\n"
    second = tmp_path / "sample_config.yaml"
    second.write_text(
        "# Pipeline Parallelism Configuration\nnum_stages: 5\nnum_batches: 8\nforward_times:\n  - 0.9\n  - 1.1\n"
        "  - 1.0\n  - 0.8\n  - 1.2\nbackward_times:\n  - 1.8\n  - 2.2\n  - 2.0\n  - 1.6\n  - 2.4\n"
        'output_file: "pipeline_1f1b_yaml.png"\n'
    )
    assert printed(capsys, "-c", str(second)) == "Bubble rate: 0.6750\n"
    assert (
        printed(capsys, "-c", str(second), "--p2p-time 0.05") == "Bubble rate: 0.6917\n"
    )
    later = tmp_path / "later.yaml"
    later.write_text(
        "strategy: zb1p\nnum_devices: 4\nnum_stages: 4\nnum_batches: 8\nop_times: {backward_D: 1.1}\n"
    )
    split = ["op_times.backward_D=1.1", "op_times.backward_W=0.9"]
    assert (
        printed(capsys, "-c", str(later), split[1], "--compat")
        == "Bubble rate: 0.1500\n"
    )
    assert printed(
        capsys, "strategy=zb1p num_stages=4 num_batches=8", *split, "--compat"
    ) == ("Bubble rate: 0.1500\n")
    by_stage = "'op_times.forward={0: 0.8, 1: 1.2, 2: 1.5, 3: 0.9}'"
    assert (
        printed(capsys, "num_batches=8", by_stage, "'op_times.backward=[1, 2, 2, 3]'")
        == "Bubble rate: 0.6008\n"
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["stages=4"], "there is no key `stages`, there is `num_stages`"),
        (["op_times.warmup=4"], "there is no key `op_times.warmup`"),
        (["op_times.forward=[]"], "there are no forward times"),
        (
            ["strategy=gpipe"],
            "there is no strategy `gpipe`, there are 1f1b, interleave",
        ),
        (["-s 0"], "`0` is not a whole number from 1"),
        (["num_batches=two"], "`num_batches` is two, it must be a whole number from 1"),
        (
            ["num_devices=2"],
            "`1f1b` has 1 per device, there are 4 stages and 2 devices",
        ),
        (
            ["strategy=interleave", "num_devices=3"],
            "`interleave` has as many on each device",
        ),
        (["'op_times.forward={0: 1}'"], "there is no forward time for stage 1"),
        (["op_times.forward=fast"], "`forward times` must be numbers, it has 'fast'"),
        (["--p2p-time -1"], "`p2p_time` is -1: it must be a number from 0"),
        (["p2p_latency=slow"], "`p2p_latency` must be numbers, it has 'slow'"),
        (["op_times=[1"], "while parsing a flow sequence"),
        (["four"], "`four` is not KEY=VALUE"),
    ],
)
def test_wrong_usage(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        exit_code("pipeline", *arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_file_that_is_nested_too_deep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(SystemExit):
        exit_code("pipeline -c", str(tmp_path / "deep.json"))
    assert "deep.json`: it is nested too deep" in capsys.readouterr().err


def test_a_size_that_the_schedule_refuses_is_a_diagnostic(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code("pipeline strategy=dualpipe num_stages=4 num_batches=4") == 1
    assert (
        "error[require]: the schedule requires: there are at least two microbatches"
        in capsys.readouterr().err
    )


def test_the_table_loses_no_op() -> None:
    times = "-f 1 1 1 1 -bw 1 1 1 1"
    lines = output(
        "pipeline -s 4 -b 8", times, "--table --no-visualization"
    ).splitlines()[1:-1]
    assert lines[:3] == [
        "Pipeline Timeline (4 stages, 8 microbatches):",
        "Time\tStage 0\tStage 1\tStage 2\tStage 3",
        "-" * 46,
    ]
    rows = [line.split("\t") for line in lines[3:]]
    assert [row[0] for row in rows] == [str(time) for time in range(2 * 8 + 2 * 3)]
    assert rows[3][1:] == ["F(4)", "F(3)", "F(2)", "F(1)"]
    assert rows[4][1:] == ["-", "-", "-", "B(1)"]
    for stage in range(4):
        ops = [row[1 + stage] for row in rows if row[1 + stage] != "-"]
        assert sorted(ops) == sorted(
            f"{kind}({m})" for kind in "FB" for m in range(1, 9)
        )


@pytest.mark.parametrize(
    "strategy", ["interleave", "zb1p", "dualpipe", "1f1b_interleave_overlap"]
)
def test_the_table_of_any_schedule_has_every_op(strategy: str) -> None:
    stages = 8 if "interleave" in strategy else 4
    size = {"num_devices": 4, "num_stages": stages, "num_batches": 8}
    found = settings_of([{"strategy": strategy, "p2p_time": 0.3, **size}])
    plan = found.plan()
    timeline = simulate(plan, Costs(forward_times=(0.0,))).timeline
    for given in (timeline, simulate(plan, found.costs).timeline):
        lines = [line.split("\t")[1:] for line in table(plan, given).splitlines()[3:]]
        for stage in range(len(plan.placement)):
            words = [
                word
                for line in lines
                for word in line[stage].split("+")
                if word not in "-|"
            ]
            assert len(words) == sum(
                each.stage == stage for bars in given.ranks for each in bars
            )
