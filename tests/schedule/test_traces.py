"""Costs from traces: one of each rank, those of torch's own pipelining, and what they lack."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from schedlang import CompileError, Costs, compile, read_costs, simulate
from tests.support.commands import exit_code, output
from tests.support.paths import PROGRAMS

#: What an op takes on each stage of the model.
FORWARD = (10.0, 12.0, 14.0, 16.0)
BACKWARD = (20.0, 24.0, 28.0, 32.0)


def event(name: str, start: float, duration: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "pid": 7} | more


def events_of(
    stages: Iterable[int], prefix: str = "", backward: str = "B"
) -> list[dict[str, Any]]:
    """The ops of two microbatches on some stages, as one rank records them."""
    events = [event("aten::linear", 0, 3)]
    for stage in stages:
        for microbatch in range(2):
            start = 100 * microbatch
            forward = f"{prefix}{stage}F{microbatch}"
            events.append(event(forward, start, FORWARD[stage]))
            name = f"{prefix}{stage}{backward}{microbatch}"
            events.append(event(name, start + 50, BACKWARD[stage]))
    return events


def write(path: Path, events: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps({"traceEvents": events}))
    return str(path)


@pytest.mark.parametrize("prefix", ["", "PP:"])
@pytest.mark.parametrize("placement", [[[0], [1]], [[0, 2], [1, 3]], [[0, 3], [1, 2]]])
def test_traces_of_each_rank_together_are_the_costs(
    placement: list[list[int]], prefix: str, tmp_path: Path
) -> None:
    files = [
        write(tmp_path / f"rank{rank}.json", events_of(stages, prefix))
        for rank, stages in enumerate(placement)
    ]
    count = sum(map(len, placement))
    expected = Costs(forward_times=FORWARD[:count], backward_times=BACKWARD[:count])
    assert read_costs(*files) == expected
    assert read_costs(tmp_path) == expected


def test_a_command_takes_several_traces_or_their_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        write(tmp_path / f"{rank}.json", events_of([rank], "PP:")) for rank in (0, 1)
    ]
    command = "simulate 1f1b -p ranks=2 -p microbatches=2 --json"
    of_files = json.loads(output(command, "--costs", files[0], "--costs", files[1]))
    # As a shell writes `--costs *.json`.
    assert json.loads(output(command, "--costs", *files)) == of_files
    assert json.loads(output(command, "--costs", str(tmp_path))) == of_files
    plan = compile(PROGRAMS / "1f1b.sched", {"ranks": 2, "microbatches": 2})
    costs = Costs(forward_times=FORWARD[:2], backward_times=BACKWARD[:2])
    assert of_files["makespan"] == simulate(plan, costs).timeline.makespan
    for more in (["x.json --costs", *files], ["--costs", *files, "--colour"]):
        with pytest.raises(SystemExit):
            exit_code(command, *more)
    error = capsys.readouterr().err
    assert "`x.json` is one argument too many" in error
    assert "there is no option `--colour`" in error


@pytest.mark.parametrize(
    ("program", "ranks", "stages", "missing"),
    [
        ("1f1b", 2, [1], "none of stage 0"),
        ("1f1b", 4, [0], "no op of stages 1, 2, 3"),
        ("1f1b", 4, [0, 1, 2], "no op of stage 3"),
        ("interleaved_1f1b", 2, [0, 2], "none of stage 1"),
    ],
)
def test_a_trace_of_some_stages_is_not_taken_for_all(
    program: str,
    ranks: int,
    stages: list[int],
    missing: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trace = write(tmp_path / "trace.json", events_of(stages))
    sizes = ["-p", f"ranks={ranks}", "-p microbatches=4"]
    for command in ("compile", "simulate", "view"):
        with suppress(SystemExit):
            assert exit_code(command, program, *sizes, "--costs", trace) != 0
        error = capsys.readouterr().err
        assert missing in error
        assert "a trace of its own" in error


def test_a_trace_of_one_stage_is_not_taken_for_all_in_python(tmp_path: Path) -> None:
    costs = read_costs(write(tmp_path / "trace.json", events_of([0])))
    path = PROGRAMS / "1f1b.sched"
    with pytest.raises(ValueError, match="no op of stages 1, 2, 3"):
        compile(path, {"ranks": 4, "microbatches": 4}, costs=costs)
    plan = compile(path, {"ranks": 4, "microbatches": 4})
    # Also where they stand over the costs of a program.
    for given in (costs, costs.over(plan.costs), Costs(p2p_time=1).over(costs)):
        with pytest.raises(ValueError, match="no op of stages 1, 2, 3"):
            simulate(plan, given)


def test_costs_of_fewer_layers_than_a_model_has_are_not_of_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tune` may cut the stages of a run into others: it knows which ones were measured."""
    size = "--ranks 2 --batch 2 -p ranks=2"
    whole = write(tmp_path / "whole.json", events_of([0, 1]))
    assert exit_code("tune 1f1b", size, "--costs", whole, "--layers 3") == 0
    part = write(tmp_path / "part.json", events_of([1]))
    assert exit_code("tune 1f1b", size, "--costs", part, "--layers 3") == 2
    assert "none of stage 0" in capsys.readouterr().err


def test_of_several_files_each_is_a_trace(tmp_path: Path) -> None:
    trace = write(tmp_path / "rank0.json", events_of([0]))
    (tmp_path / "costs.json").write_text('{"forward_times": [1, 2]}')
    with pytest.raises(CompileError, match=r"costs\.json` is no trace"):
        read_costs(trace, tmp_path / "costs.json")
    with pytest.raises(CompileError, match=r"costs\.json` is no trace"):
        read_costs(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CompileError, match="has no file"):
        read_costs(tmp_path / "empty")


def test_older_letters_of_torch(tmp_path: Path) -> None:
    """Torch 2.5 writes `B` for an input half, `BW` for a whole backward."""
    whole = write(tmp_path / "whole.json", events_of([0], "PP:", "BW"))
    assert read_costs(whole) == Costs(forward_times=(10,), backward_times=(20,))
    halves = [*events_of([0], "PP:"), event("PP:0W0", 400, 7)]
    assert read_costs(write(tmp_path / "halves.json", halves)) == Costs(
        forward_times=(10,), input_times=(20,), weight_times=(7,)
    )


def test_sends_of_torch_are_begun_in_their_ranges_and_end_later(tmp_path: Path) -> None:
    """So they say nothing of how long a transfer takes, and add nothing to the op before."""
    sends = [event("PP:0SEND_F0", 10, 5), event("PP:1RECV_F0", 9, 8)]
    trace = write(tmp_path / "trace.json", [*events_of([0, 1], "PP:"), *sends])
    assert read_costs(trace) == Costs(
        forward_times=FORWARD[:2], backward_times=BACKWARD[:2]
    )


def on_device(events: list[dict[str, Any]], stream: int) -> list[dict[str, Any]]:
    return [
        each | {"cat": "gpu_user_annotation", "pid": 0, "tid": stream}
        for each in events
    ]


def test_ranges_of_the_device_go_before_those_of_threads(tmp_path: Path) -> None:
    """A thread launches kernels; a stream of messages has ranges of the same names."""
    launches = [each | {"dur": 1} for each in events_of([0], "PP:")]
    kernels = on_device(events_of([0], "PP:"), 7)
    messages = on_device([event("PP:0F0", 0, 2)], 20)
    trace = write(tmp_path / "trace.json", [*launches, *messages, *kernels])
    assert read_costs(trace) == Costs(forward_times=(10,), backward_times=(20,))
    forwards = [each for each in kernels if "F" in each["name"]]
    trace = write(tmp_path / "forwards.json", [*launches, *forwards])
    with pytest.raises(CompileError, match="no range of `B` on the device"):
        read_costs(trace)


def test_ranges_without_stages_are_named(tmp_path: Path) -> None:
    """Torch's schedules of one stage a rank name their ranges so."""
    trace = write(tmp_path / "trace.json", [event("Forward 0", 0, 10)])
    with pytest.raises(CompileError, match="`Forward 0`, have no stage"):
        read_costs(trace)
