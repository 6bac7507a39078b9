"""Programs that are compiled for as many ranks as were started, and go on when that number changes."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from schedlang import compile
from tests.support.paths import PROGRAMS
from tests.support.processes import ENVIRONMENT, LIMIT, children, until, worker_of

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch

from schedlang.examples.demo.gpt import build_gpt, cut_gpt
from schedlang.examples.demo.recipe import Recipe
from schedlang.examples.demo.workload import Workload
from tests.support.training import Train, printed_figures

pytestmark = pytest.mark.processes

RUNTIME = [sys.executable, "-m", "schedlang.runtime"]


def torchrun(ranks: int) -> list[str]:
    launch = [
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
        "-m",
        "schedlang.runtime",
    ]
    return [sys.executable, "-m", *launch]


def run(
    command: list[str], program: object, *options: object
) -> subprocess.CompletedProcess[str]:
    line = [*command, str(program), *map(str, options)]
    return subprocess.run(
        line, capture_output=True, text=True, timeout=LIMIT, env=ENVIRONMENT
    )


def losses(out: str) -> dict[int, float]:
    """What was printed, by step."""
    return {
        int(step): float(loss)
        for step, loss in re.findall(r"^step +(\d+)  loss (\d\.\d{4}) ", out, re.M)
    }


def figures(done: subprocess.CompletedProcess[str]) -> dict:
    assert done.returncode == 0, done.stderr
    return printed_figures(done.stdout)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("1f1b", {"ranks": 1}),
        ("1f1b", {"ranks": 3}),
        ("zb_v", {"ranks": 4}),
        ("dualpipe", {"ranks": 4}),
        ("seq1f1b", {"ranks": 5}),
        ("interleaved_1f1b", {"ranks": 2, "chunks": 5}),
    ],
)
def test_any_number_of_stages_makes_the_same_model(
    name: str, params: dict[str, int]
) -> None:
    """Each weight is in one stage of a pipeline, by one name; no stage has more than its share of
    blocks.
    """
    plan = compile(name, params)
    task = Workload(plan, torch.empty(0), 8, seed=3, replicas=1, recipe=Recipe())
    whole = torch.nn.Sequential(*build_gpt(8, seed=3)).state_dict()
    stages = task.stages(range(len(plan.placement)))
    for pipeline in plan.layout.pipelines:
        mine = [
            stages[stage].state_dict() for stage in range(pipeline.start, pipeline.stop)
        ]
        found = {name: each for state in mine for name, each in state.items()}
        assert sum(map(len, mine)) == len(found)
        assert found.keys() == whole.keys()
        assert all(torch.equal(each, whole[name]) for name, each in found.items())
        blocks = [
            len({name.split(".")[0] for name in state if "query_key_value" in name})
            for state in mine
        ]
        # 8 blocks shared out among the stages, the quotient rounded up.
        assert max(blocks) == -(-8 // len(mine))


def test_more_stages_than_layers_are_refused() -> None:
    plan = compile("1f1b", {"ranks": 11})
    with pytest.raises(ValueError, match="10 blocks for 11 stages"):
        cut_gpt(build_gpt(8, seed=0), plan.layout, sliced=False)


@pytest.mark.faults
def test_a_killed_run_goes_on_with_other_numbers_of_ranks_and_another_schedule(
    tmp_path: Path,
) -> None:
    """On 4 ranks until one is killed, then on 2, and on 4 again: the losses of one process that was
    never cut.
    """
    kept = tmp_path / "kept"
    out = ""
    options = ["--checkpoint", str(kept), "--every", "3", "--steps"]
    command = [*torchrun(4), str(PROGRAMS / "1f1b.sched"), *options, "100"]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT
    ) as process:
        try:
            until((kept / "step-3").exists)
            os.kill(worker_of(process.pid, 1), signal.SIGKILL)
            out, errors = process.communicate(timeout=LIMIT)
        finally:
            process.terminate()
    assert process.returncode == 1
    # Between two steps, torchrun ends the others before they miss it.
    assert re.search(r"rank 1 (is gone|was last seen)", errors), errors
    # How far it came depends on when it was killed; from then on everything is said.
    reached = max(
        int(each.name.removeprefix("step-")) for each in kept.glob("step-*[0-9]")
    )
    second = run(torchrun(2), PROGRAMS / "1f1b.sched", *options, reached + 3, "--check")
    schedc = [sys.executable, "-m", "schedlang", "run"]
    third = run(schedc, PROGRAMS / "zb_v.sched", *options, reached + 6, "--check")
    # The third checkpoint is one too many; it is said once, and before the first is gone.
    assert (
        third.stderr.count("keeps the newest 2 checkpoints, older ones are deleted\n")
        == 1
    )
    found = losses(out)
    for done, begin in ((second, reached), (third, reached + 3)):
        assert figures(done)["loss_error"] <= 1e-5
        assert figures(done)["gradient_error"] <= 1e-5
        assert list(losses(done.stdout)) == [begin + 1, begin + 2, begin + 3]
        found |= losses(done.stdout)
    uncut = run(RUNTIME, PROGRAMS / "gpipe.sched", "--steps", reached + 6)
    expected = losses(uncut.stdout)
    assert len(expected) == reached + 6 >= 9
    # They are printed with four digits.
    assert {step: found[step] for step in expected} == pytest.approx(
        expected, abs=1.01e-4
    )
    assert sorted(each.name for each in kept.iterdir()) == [
        f"step-{step}" for step in sorted([reached + 3, reached + 6], key=str)
    ]


#: Two nodes at most; how long one waits for the other when there could be two, and when it is given
#: up.
NODES = [
    "--nnodes",
    "1:2",
    "--nproc-per-node",
    "2",
    "--max-restarts",
    "3",
    "--rdzv-backend",
    "c10d",
]
PATIENCE = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"


class Node:
    """A torchrun of two processes, which writes to a log; `is_host` has the store."""

    def __init__(self, folder: Path, port: int, number: int, is_host: bool) -> None:
        self.log = folder / f"node{number}"
        launch = [
            *NODES,
            "--rdzv-endpoint",
            f"localhost:{port}",
            "--rdzv-conf",
            f"is_host={int(is_host)},{PATIENCE}",
        ]
        options = [
            "--checkpoint",
            str(folder / "kept"),
            "--every",
            "3",
            "--steps",
            "1000",
            "--timeout",
            "30",
        ]
        command = [
            *launch,
            "-m",
            "schedlang.runtime",
            str(PROGRAMS / "1f1b.sched"),
            *options,
        ]
        line = [sys.executable, "-m", "torch.distributed.run", *command]
        with self.log.open("w") as log:
            # Or torch waits for the nodes of before, as docs/training.md has it.
            environment = ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            self.torchrun = subprocess.Popen(
                line, stdout=log, stderr=log, env=environment
            )

    def kill(self) -> None:
        """All at once, as when a machine fails."""
        processes = (
            [self.torchrun.pid, *children(self.torchrun.pid)]
            if self.torchrun.poll() is None
            else []
        )
        for each in processes:
            os.kill(each, signal.SIGKILL)
        self.torchrun.wait()


@pytest.mark.faults
def test_torchrun_goes_on_with_the_nodes_that_there_are(tmp_path: Path) -> None:
    """Two nodes of two processes, of which one dies, and another one comes: on 4 ranks, on 2, and
    on 4 again.
    """
    kept = tmp_path / "kept"
    with socket.socket() as free:
        # The system chooses a port that is free, which the nodes then take.
        free.bind(("localhost", 0))
        port = free.getsockname()[1]

    def newest() -> int:
        return max(
            [int(each.name.removeprefix("step-")) for each in kept.glob("step-*[0-9]")],
            default=0,
        )

    def parts() -> set[str]:
        path = kept / f"step-{newest()}"
        return {
            each.name.split(".")[0][-len("of-00004") :] for each in path.glob("model-*")
        }

    nodes = [
        Node(tmp_path, port, 0, is_host=True),
        Node(tmp_path, port, 1, is_host=False),
    ]
    try:
        until(lambda: newest() >= 3)
        assert parts() == {"of-00004"}
        nodes[1].kill()
        until(lambda: parts() == {"of-00002"})
        nodes.append(Node(tmp_path, port, 2, is_host=False))
        until(lambda: parts() == {"of-00004"})
    finally:
        for each in nodes:
            each.kill()
    found = dict[int, float]()
    for each in nodes:
        found |= losses(each.log.read_text())
    reached = newest()
    uncut = losses(run(RUNTIME, PROGRAMS / "gpipe.sched", "--steps", reached).stdout)
    assert {step: found[step] for step in uncut} == pytest.approx(uncut, abs=1.01e-4)


@pytest.mark.faults
def test_the_model_of_a_run_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    """One with a block for each of 12 stages goes on with a single stage; the other way round is an
    error.
    """
    for first, second in (("12", "1"), ("1", "12")):
        options = [
            "-p",
            "microbatches=2",
            "--checkpoint",
            tmp_path / f"kept{first}",
            "--steps",
        ]
        interleaved = PROGRAMS / "interleaved_1f1b.sched"
        assert (
            run(RUNTIME, interleaved, "-p", f"chunks={first}", *options, 2).returncode
            == 0
        )
        done = run(
            RUNTIME, interleaved, "-p", f"chunks={second}", *options, 3, "--check"
        )
        if first == "12":
            assert figures(done)["steps"] == 3
            assert figures(done)["loss_error"] <= 1e-5
        else:
            assert (done.returncode, done.stderr) == (
                1,
                f"the model `{tmp_path}/kept1/step-2` has 10 layers, too few for 12 stages\n",
            )


LATE = PROGRAMS / "pipedream_2bw.sched"
IN_TIME = PROGRAMS / "gpipe.sched"


@pytest.mark.faults
def test_replicas_of_a_plan_that_updates_go_on(tmp_path: Path) -> None:
    """With older versions of weights, by `schedc run`."""
    plan = [
        LATE,
        "-p",
        "ranks=2",
        "-p",
        "microbatches=2",
        "--replicas",
        2,
        "--checkpoint",
        tmp_path / "kept",
    ]
    for steps in (3, 6):
        done = run(
            [sys.executable, "-m", "schedlang", "run"],
            *plan,
            "--every",
            3,
            "--steps",
            steps,
            "--check",
        )
        assert done.returncode == 0, done.stderr
    assert figures(done)["steps"] == 6
    assert figures(done)["loss_error"] <= 1e-5
    assert figures(done)["gradient_error"] <= 1e-5


@pytest.mark.faults
def test_older_versions_of_weights_are_for_their_own_plan(tmp_path: Path) -> None:
    """Not for another number of ranks, nor another schedule; nor does a plan that needs them go on
    without.
    """
    late, in_time = (
        ["--steps", "1", "--checkpoint", tmp_path / name]
        for name in ("late", "in_time")
    )
    assert run(torchrun(2), LATE, *late).returncode == 0
    assert run(RUNTIME, IN_TIME, *in_time).returncode == 0
    for program, options, message in (
        (
            LATE,
            late,
            r"rank 0 failed: the checkpoint `\S+/step-3-rank-0\.pt` is of `pipedream_2bw` with ranks = 2, "
            r"microbatches = 4, not of `pipedream_2bw` with ranks = 1, microbatches = 4: it has older "
            r"versions of the weights of its own stages, so resume with its own plan, or in another folder",
        ),
        (
            IN_TIME,
            late,
            r"`\S+` has the checkpoints of a plan that alone goes on from them: use another folder",
        ),
        (
            LATE,
            in_time,
            r"`\S+` has models, and the stages of `pipedream_2bw` also read older versions of their "
            r"weights: it cannot go on from there, use another folder",
        ),
    ):
        done = run(RUNTIME, program, *options)
        assert done.returncode == 1
        assert re.search(rf"^{message}\n", done.stderr), done.stderr
    done = run(torchrun(3), PROGRAMS / "unet_1f1b.sched", *in_time)
    assert (
        "has models, and `unet_1f1b` has skips, so its model depends on its stages: it cannot go on"
        in done.stderr
    )


def test_a_program_that_is_not_for_this_number_is_said_once(train: Train) -> None:
    done = train(3, PROGRAMS / "dualpipe.sched")
    assert done.codes == [1, 1, 1]
    assert done.stderr.count("error[require]") == 1, done.stderr


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (
            "ranks=1",
            "`ranks` is how many processes are started: leave out `-p ranks`\n",
        ),
        ("rnks=1", None),
    ],
)
def test_parameters_of_the_program(
    train: Train, parameter: str, message: str | None
) -> None:
    done = train(0, IN_TIME, "-p", parameter)
    assert done.codes == [1]
    assert (
        done.stderr == message
        if message
        else done.stderr.startswith("error[unknown-parameter]")
    ), done.stderr


def test_a_program_that_does_not_come_is_not_waited_for(
    train: Train, tmp_path: Path
) -> None:
    """Rank 0 reads from a pipe to which nobody writes."""
    program = tmp_path / "pipe.sched"
    os.mkfifo(program)
    done = train(2, program, "--timeout", 3)
    assert done.codes == [-signal.SIGTERM, 1]
    assert re.search(
        r"^rank 1 lost another rank at the start: Timed out waiting 3000ms",
        done.stderr,
        re.M,
    )
