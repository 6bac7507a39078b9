"""`python -m schedlang.runtime`, and a user's own script, under torchrun."""

import json
import re
from pathlib import Path
from time import perf_counter

import pytest

from schedlang import Costs, Plan, compile, read_plan
from schedlang.cli.main import main
from schedlang.extras.measured import compare as compare_run
from schedlang.extras.measured import read_run
from schedlang.schedule.costs import read_costs
from tests.support.paths import PROGRAMS
from tests.support.processes import python, torchrun
from tests.support.programs import plan_file
from tests.support.ranks import Run
from tests.support.sizes import sizes

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch.distributed as dist

from schedlang.examples.demo import trace_file
from tests.support.training import Train, printed_figures, run_script

pytestmark = pytest.mark.processes


def exit_codes(stderr: str) -> list[str]:
    """Those in torchrun's account of a failure."""
    return re.findall(r"exitcode  : (-?\d+)", stderr)


def test_training_is_that_of_one_process(train: Train, tmp_path: Path) -> None:
    plan = plan_file(tmp_path, "interleaved_1f1b", ranks=4, microbatches=4)
    done = train(4, plan, "--steps", 4, "--check")
    assert done.codes == [0] * 4, done.stderr
    check_training(done.stdout, "interleaved_1f1b", 4, 8)


def test_schedc_run_is_a_training_of_all_ranks() -> None:
    sizes = ["-p", "ranks=2", "-p", "microbatches=4"]
    options = ["--steps", "4", "--check"]
    command = ["-m", "schedlang", "run", PROGRAMS / "zb_h1.sched", *sizes, *options]
    # Where a terminal knows few characters, ranks print their pictures all the same.
    done = python(*command, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    check_training(done.stdout, "zb_h1", 2, 2)


def test_a_run_that_fails_says_so_in_its_own_words() -> None:
    """Without the launcher's log behind it."""
    options = ["-p", "ranks=2", "-p", "microbatches=1", "--lr", "1e30", "--stop-on-nan"]
    done = python("-m", "schedlang", "run", PROGRAMS / "1f1b.sched", *options)
    assert done.returncode == 1
    assert "the loss is not finite for microbatch 0 (nan)" in done.stderr
    report = r" *rank \d|  tracebacks of all ranks: "
    assert all(re.match(report, line) for line in done.stderr.splitlines()), done.stderr


def check_training(out: str, name: str, ranks: int, stages: int) -> None:
    """What 4 steps print: a loss that goes down, and figures."""
    lines = out.splitlines()
    assert re.fullmatch(
        rf"{name} \(ranks {ranks}, stages {stages}, microbatches 4\) trains a GPT .*",
        lines[0],
    )
    losses = [
        float(loss)
        for loss in re.findall(
            r"^step +\d+  loss (\d\.\d{4}) .* tokens/s$", out, re.MULTILINE
        )
    ]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    figures = printed_figures(out)
    assert figures["steps"] == 4
    assert figures["loss"] == pytest.approx(losses[-1], abs=1e-4)
    assert figures["tokens_per_second"] > 0
    assert figures["loss_error"] <= 1e-5
    assert figures["gradient_error"] <= 1e-5
    for idle in (figures["predicted_idle"], figures["measured_idle"]):
        assert len(idle) == ranks
        assert all(0 <= share < 1 for share in idle)


@pytest.mark.parametrize(
    ("name", "exact"),
    [("pipedream_2bw", True), pytest.param("dualpipe", False, marks=pytest.mark.large)],
)
def test_training_with_late_gradients_and_with_replicas(
    train: Train, tmp_path: Path, name: str, exact: bool
) -> None:
    plan = plan_file(tmp_path, name, ranks=2, microbatches=4)
    trace = tmp_path / "trace.json"
    done = train(2, plan, "--steps", 3, "--check", "--trace", trace)
    assert done.codes == [0, 0], done.stderr
    run = read_run(trace)
    check_trace(run.plan, json.loads(trace.read_text())["traceEvents"])
    # The first step of a plan with a flush is a warm-up, and not recorded.
    assert run.plan.layout.updates * len(run.steps) == (3 if exact else 2)
    assert 0 < sum(each.makespan for each in run.steps) < 60e6
    assert read_costs(trace) == run.costs
    found = compare_run(read_plan(plan), run)
    # In one clock, ranks do not work longer than the steps take.
    assert all(0 <= idle < 1 for idle in (*found.predicted.idle, *found.measured.idle))
    assert main(["view", str(trace)]) == 0
    figures = printed_figures(done.stdout)
    assert figures["steps"] == 3
    assert figures["loss_error"] <= (0 if exact else 1e-5)
    assert figures["gradient_error"] <= (0 if exact else 1e-5)


@pytest.mark.parametrize(
    "name",
    sizes(["pipedream_2bw", "dualpipe", "seq1f1b"], lambda name: name != "seq1f1b"),
)
def test_training_with_microbatches_of_unequal_lengths(
    train: Train, tmp_path: Path, name: str
) -> None:
    plan = plan_file(tmp_path, name, ranks=2, microbatches=4)
    done = train(2, plan, "--steps", 3, "--check", "--unequal")
    assert done.codes == [0, 0], done.stderr
    assert (
        "bytes per step, in microbatches of unequal lengths"
        in done.stdout.splitlines()[0]
    )
    figures = printed_figures(done.stdout)
    assert figures["loss_error"] <= 1e-5
    assert figures["gradient_error"] <= 1e-5


def test_replicas_with_microbatches_of_unequal_lengths(
    train: Train, tmp_path: Path
) -> None:
    plan = plan_file(tmp_path, "1f1b", ranks=2, microbatches=2)
    done = train(4, plan, "--steps", 2, "--check", "--unequal", "--replicas", 2)
    assert done.codes == [0] * 4, done.stderr
    figures = printed_figures(done.stdout)
    assert figures["loss_error"] <= 1e-5
    assert figures["gradient_error"] <= 1e-5


def offset_of_clocks(ahead: float, boot: Path) -> float:
    """That of this rank to rank 0, where each rank's clock is so many seconds ahead of the last."""
    trace_file._BOOT = boot
    trace_file.perf_counter = lambda: perf_counter() + ahead * dist.get_rank()
    return trace_file.clock_offset(0)


def test_clocks_are_compared_only_between_machines(
    run_ranks: Run, tmp_path: Path
) -> None:
    boot = tmp_path / "boot"
    apart = run_ranks(offset_of_clocks, 3, 100.0, boot).results()
    assert apart == [0.0, pytest.approx(-100, abs=1), pytest.approx(-200, abs=1)]
    boot.write_text("one machine")
    assert run_ranks(offset_of_clocks, 3, 0.0, boot).results() == [0.0] * 3


def check_trace(plan: Plan, events: list[dict]) -> None:
    """Every op and message of a rank is there, and no receive is over before its send began: clocks
    are aligned.
    """
    spans = [each for each in events if each["ph"] == "X"]
    for rank, actions in enumerate(plan.ranks):
        names = {plan.name_of(rank, index) for index in range(len(actions))}
        assert names <= {each["name"] for each in spans if each["pid"] == rank}
    sends = {
        each["args"]["action"]: each["ts"]
        for each in spans
        if each["args"]["action"] == "0SEND_F0"
    }
    ends = {
        each["args"]["action"]: each["ts"] + each["dur"]
        for each in spans
        if each["args"]["action"] == "1RECV_F0"
    }
    assert ends["1RECV_F0"] > sends["0SEND_F0"]


@pytest.mark.parametrize(
    "name", sizes(["seq1f1b", "unet_1f1b", "wpipe"], lambda name: name != "wpipe")
)
def test_an_audit_of_slices_skips_and_late_weights(
    train: Train, tmp_path: Path, name: str
) -> None:
    found = train(2, PROGRAMS / f"{name}.sched", "--steps", 2, "--audit")
    assert found.codes == [0, 0], found.stderr
    stages = re.findall(
        r"^audit, rank \d: stage (\d) computes what it computes alone",
        found.stdout,
        re.M,
    )
    assert sorted(stages) == sorted(set(stages))
    assert len(stages) >= 2


def test_one_process_needs_no_launcher(train: Train, tmp_path: Path) -> None:
    plan = plan_file(tmp_path, "gpipe", ranks=1, microbatches=2)
    done = train(0, plan, "--steps", 1)
    assert done.codes == [0], done.stderr
    figures = printed_figures(done.stdout)
    assert "gradient_error" not in figures
    assert figures["measured_idle"][0] < 0.5


def test_a_program_is_compiled_for_the_costs_that_are_given(
    train: Train, tmp_path: Path
) -> None:
    """Every process reads the options, and the plan in the trace is for these costs."""
    trace = tmp_path / "trace.json"
    options = ["--forward-times", "1,1.4", "--weight-times", "0.5", "--p2p-time", "0.1"]
    done = train(2, PROGRAMS / "zb_2p.sched", *options, "--steps", 1, "--trace", trace)
    assert done.codes == [0, 0], done.stderr
    costs = Costs(forward_times=(1, 1.4), weight_times=(0.5,), p2p_time=0.1)
    plan = compile(PROGRAMS / "zb_2p.sched", {"ranks": 2}, costs)
    assert read_run(trace).plan.ranks == plan.ranks
    assert read_run(trace).plan.costs == plan.costs
    for wrong, message in [
        (
            ["--forward-times", "1,2,3"],
            "3 durations of `F` are given, there are 2 stages",
        ),
        (["--p2p-time", "-1"], "`p2p_time` is -1"),
    ]:
        done = train(2, PROGRAMS / "zb_2p.sched", *wrong)
        assert 0 not in done.codes
        assert message in done.stderr
        assert "Traceback" not in done.stderr
    done = train(2, plan_file(tmp_path, "1f1b", ranks=2), "--p2p-time", 1)
    assert done.codes == [1, 1]
    assert "costs decide about the order of a program" in done.stderr


def test_a_wrong_number_of_processes(train: Train, tmp_path: Path) -> None:
    plan = plan_file(tmp_path, "1f1b", ranks=4, microbatches=4)
    message = f"the plan needs 4 processes, {{}} started: torchrun --nproc-per-node 4 -m schedlang.runtime {plan}\n"
    done = train(0, plan)
    assert (done.codes, done.stderr) == ([1], message.format("1 was"))
    done = train(2, plan)
    assert (done.codes, done.stderr) == ([1, 1], message.format("2 were"))


def test_replicas(train: Train, tmp_path: Path) -> None:
    """Losses are means over replicas; the trace is of the first one; and what they train is what
    one pipeline does.
    """
    program = PROGRAMS / "zb_v.sched"
    trace = tmp_path / "trace.json"
    kept = tmp_path / "kept"
    options = ["--checkpoint", kept, "--check", "--steps"]
    # Two replicas of 4 microbatches have the batch of one pipeline with 8, which goes on from their
    # checkpoint below.
    half = ["-p", "microbatches=4", "--replicas", 2]
    done = train(4, program, *half, *options, 3, "--trace", trace)
    assert done.codes == [0] * 4, done.stderr
    assert done.stdout.startswith(
        "zb_v (ranks 2, stages 4, microbatches 4, replicas 2) trains a GPT of "
    )
    figures = printed_figures(done.stdout)
    losses = re.findall(r"^step +\d+  loss (\d\.\d{4}) ", done.stdout, re.MULTILINE)
    assert float(losses[-1]) == pytest.approx(figures["loss"], abs=1e-4)
    assert figures["loss_error"] <= 1e-5
    assert figures["gradient_error"] <= 1e-5
    assert len(figures["measured_idle"]) == 2
    check_trace(read_run(trace).plan, json.loads(trace.read_text())["traceEvents"])
    done = train(0, program, "-p", "microbatches=8", *options, 5)
    assert done.codes == [0], done.stderr
    figures = printed_figures(done.stdout)
    assert figures["steps"] == 5
    assert figures["loss_error"] <= 1e-5


@pytest.mark.parametrize(
    ("ranks", "replicas", "message"),
    [
        (
            1,
            1,
            "the plan needs 1 process, 2 were started: torchrun --nproc-per-node 1 -m schedlang.runtime {plan}, or "
            "--replicas 2",
        ),
        (
            2,
            3,
            "3 replicas of the plan need 6 processes, 2 were started: torchrun --nproc-per-node 6 "
            "-m schedlang.runtime {plan} --replicas 3, or --replicas 1",
        ),
        (None, 3, "3 replicas need a multiple of 3 processes, not 2"),
    ],
)
def test_a_wrong_number_of_replicas(
    train: Train, tmp_path: Path, ranks: int | None, replicas: int, message: str
) -> None:
    plan = (
        plan_file(tmp_path, "1f1b", ranks=ranks) if ranks else PROGRAMS / "1f1b.sched"
    )
    done = train(2, plan, "--replicas", replicas)
    assert (done.codes, done.stderr) == ([1, 1], message.format(plan=plan) + "\n")


def test_a_plan_that_cannot_be_read(train: Train, tmp_path: Path) -> None:
    done = train(0, tmp_path / "none.json")
    assert done.codes == [1]
    assert done.stderr.startswith("error[unreadable]: cannot read ")
    assert "Traceback" not in done.stderr


USER = """
import os, signal, sys, torch
import torch.distributed as dist
from schedlang import read_plan
from schedlang.runtime import Pipeline

class Fails(torch.nn.Linear):
    def forward(self, input):
        if dist.get_rank() == 1:
            if sys.argv[2] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if sys.argv[2] == "raises":
                raise ValueError("boom")
        return super().forward(input)

dist.init_process_group("gloo")
plan = read_plan(sys.argv[1])
pipeline = Pipeline(plan, {dist.get_rank(): Fails(2, 2)}, torch.nn.functional.mse_loss)
pipeline.step(torch.ones(8, 2), torch.ones(8, 2))
if dist.get_rank() == 1:
    if sys.argv[2] == "ends":
        sys.exit()
    raise ValueError("between")
pipeline.step(torch.ones(8, 2), torch.ones(8, 2))
"""


def report(errors: str, cause: str) -> str:
    """The one report in what ranks print to one terminal."""
    (found,) = re.findall(rf"^{cause}$(?:\n  .*)*", errors, re.MULTILINE)
    assert "stopped: " not in errors
    return str(found)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("raises", r"rank 1 failed at 1F0 \(1f1b.sched:\d+\): ValueError: boom"),
        ("raises_between", r"rank 1 failed: ValueError: between"),
    ],
)
def test_ranks_report_before_the_launcher_ends_them(
    run_ranks: Run, tmp_path: Path, end: str, message: str
) -> None:
    script = tmp_path / "user.py"
    script.write_text(USER)
    plan = plan_file(tmp_path, "1f1b", ranks=3, microbatches=4)
    done = run_script(run_ranks, tmp_path, 3, script, plan, end)
    assert done.codes == [1, 1, 1], done.stderr
    (kept,) = re.findall("tracebacks of all ranks: (.*)", report(done.stderr, message))
    assert Path(kept).read_text().count("=== rank ") == 3


def test_a_rank_that_makes_fewer_steps_is_told_from_one_that_dies(
    run_ranks: Run, tmp_path: Path
) -> None:
    script = tmp_path / "user.py"
    script.write_text(USER)
    plan = plan_file(tmp_path, "1f1b", ranks=3, microbatches=4)
    done = run_script(run_ranks, tmp_path, 3, script, plan, "ends")
    assert done.codes[::2] == [1, 1], done.stderr
    uneven = (
        r"rank 1 is gone: rank \d lost its connection at \S+ \(1f1b.sched:\d+\): .* \(its script "
        r"ended after step 1, and this is step 2: all ranks must make as many steps\)"
    )
    told = report(done.stderr, uneven)
    assert "\n  rank 1 was last seen at the end of its script\n" in told


def test_torchrun_tells_which_rank_was_killed_and_the_others_why_they_end(
    tmp_path: Path,
) -> None:
    script = tmp_path / "user.py"
    script.write_text(USER)
    plan = plan_file(tmp_path, "1f1b", ranks=3, microbatches=4)
    done = torchrun(3, script, plan, "killed")
    assert sorted(exit_codes(done.stderr)) == sorted(["1", "1", "-9"]), done.stderr
    gone = r"rank 1 is gone: rank \d lost its connection at \S+ \(1f1b.sched:\d+\): .*"
    assert "\n  rank 1 was last seen at " in report(done.stderr, gone)
