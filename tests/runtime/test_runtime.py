"""The runtime on real processes: what it computes, and how it ends when something goes wrong."""

import os
import re
import sys

import pytest

from tests.support.launches import Run, fixtures
from tests.support.paths import ROOT

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)

pytestmark = pytest.mark.processes


#: What has optimizer steps: it has a test of its own.
UPDATED = {
    "pipedream",
    "pipedream_vertical",
    "pipedream_2bw",
    "wpipe",
    "gpipe_groups",
    "pipedream_replicated",
}


worker, run = fixtures("runtime_worker.py")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_losses_and_gradients_are_those_of_one_process(run: Run, ranks: int) -> None:
    """All programs, with fewer, as many and more microbatches than ranks; two steps, whose
    gradients add up.

    Losses are compared by number of microbatch, and one plan takes microbatches in another order.
    """
    outcome = run("sweep", ranks)
    programs = {path.stem for path in ROOT.glob("programs/*.sched")} - UPDATED
    for found in outcome.found():
        even = {"chimera", "dualpipe", "bitpipe"} if ranks == 3 else set()
        assert {case.split()[0] for case in found} == programs - even | {"v", "slices"}
        for case, (loss, gradient) in found.items():
            assert loss < 1e-12, case
            assert gradient < 1e-12, case


@pytest.mark.parametrize(
    ("scenario", "tolerance"), [("scaled", 1e-12), ("bfloat16", 2e-2), ("updates", 1e-12)]
)
def test_options_of_a_pipeline(run: Run, scenario: str, tolerance: float) -> None:
    for loss, gradient in run(scenario, 2).found():
        assert loss < tolerance
        assert gradient < tolerance


@pytest.mark.parametrize("ranks", [2, 4])
def test_late_gradients_are_those_of_one_process(run: Run, ranks: int) -> None:
    """To the bit: with and without a checkpoint, and not those of other delays; with as many
    versions as claimed.
    """
    for rank in run("versions", ranks).found():
        assert len(rank) == (8 if ranks == 2 else 5)
        assert {name: found for name, found in rank.items() if found != [True] * 4} == {}


def test_a_recorded_step_has_all_compute_ops_in_order_of_time(run: Run) -> None:
    bars = run("records", 2).found("bars")
    assert [[word for word, _, _ in rank] for rank in bars] == [
        ["0F0", "0F1", "0I0", "0W0", "0F2", "0I1", "0W1", "0I2", "0W2"],
        ["1F0", "1I0", "1F1", "1I1", "1W0", "1F2", "1I2", "1W1", "1W2"],
    ]
    for rank in bars:
        times = [time for _, start, end in rank for time in (start, end)]
        assert times == sorted(times)
    # Ranks of one machine have one clock: microbatch 0 is on the second after it was on the first.
    assert bars[1][0][1] > bars[0][0][2]


def test_a_plan_for_gloo_alone_runs_on_gloo(run: Run) -> None:
    for loss, gradient in run("crossed", 2).found():
        assert loss < 1e-12
        assert gradient < 1e-12


def test_stages_take_containers_and_options(run: Run) -> None:
    assert max(run("containers", 3).found()) < 1e-12


def test_what_is_held_does_not_grow_with_the_microbatches(run: Run) -> None:
    for few, more, most in run("boundary", 3).found():
        assert few == more == most


def test_what_is_held_is_what_the_plan_says(run: Run) -> None:
    """To the tensor. Of a backward that is split less: its output is let go of with the first half."""
    splits = ("zb_h1", "zb_v", "dualpipe")
    for rank in run("holds", 4).found():
        assert len(rank) == 9
        assert {
            name: least for name, (least, _) in rank.items() if least < 0 and name not in splits
        } == {}
        assert {name: most for name, (_, most) in rank.items() if most != 0} == {}


def test_tensors_need_not_be_contiguous(run: Run) -> None:
    assert run("strided", 3).found() == [None, None, 2]


@pytest.mark.parametrize("scenario", ["data_parallel", "sharded"])
def test_replicas_of_a_split_stage_get_the_mean_gradient(run: Run, scenario: str) -> None:
    assert max(run(scenario, 2).found()) < 1e-12


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such a policy for threads")
def test_threads_of_gloo_do_not_interrupt_the_main_thread(run: Run) -> None:
    assert run("threads", 2).found() == [[[os.SCHED_BATCH], os.SCHED_OTHER]] * 2


def test_a_stage_that_ignores_its_input_passes_zeros_back(run: Run) -> None:
    assert run("ignores_input", 3).codes == [0, 0, 0]


# For each scenario: how many ranks, which rank finds it out (None: whoever is first), and what all
# of them say.
PLACE = r"\(1f1b.sched:\d+\)"
FAILURES = {
    "throws": (3, 1, rf"rank 1 failed at 1F2 {PLACE}: ValueError: boom"),
    "throws_at_the_store": (3, 0, rf"rank 0 failed at 0F2 {PLACE}: ValueError: boom"),
    "shape": (
        3,
        0,
        rf"rank 0 failed at 0SEND_F2 {PLACE}: the output of stage 0 is float64 \[2, 8\] for microbatch 2, "
        r"but float64 \[3, 8\] in the first step with inputs of this shape",
    ),
    "shape_later": (
        3,
        0,
        rf"rank 0 failed at 0SEND_F2 {PLACE}: .* is float64 \[2, 8\] .* but float64 \[3, 8\] .*",
    ),
    "dtype": (
        3,
        0,
        rf"rank 0 failed at 0SEND_F2 {PLACE}: the output of stage 0 is float32 \[3, 8\] for microbatch 2, "
        r"but float64 \[3, 8\] in the first step with inputs of this shape",
    ),
    "text": (
        3,
        1,
        rf"rank 1 failed at 1F2 {PLACE}: the output of stage 1 is a str: it must be a tensor, or .*",
    ),
    "list": (
        3,
        1,
        rf"rank 1 failed at 1F2 {PLACE}: the output of stage 1 is a list that holds a NoneType: it must .*",
    ),
    "integers": (
        3,
        1,
        rf"rank 1 failed at 1F2 {PLACE}: the output of stage 1 \(torch.int64\) does not require grad.*",
    ),
    "detached": (
        3,
        1,
        rf"rank 1 failed at 1F2 {PLACE}: the output of stage 1 .* does not require grad.*",
    ),
    "vector_loss": (
        2,
        1,
        rf"rank 1 failed at 1F0 {PLACE}: the loss has the shape \[3, 8\], it must be a scalar .*",
    ),
    "indivisible": (
        2,
        None,
        r"rank \d failed: `\w+` has 7 rows, which do not divide into 4 microbatches",
    ),
    "no_targets": (2, 1, r"rank 1 failed: `targets` is a NoneType: it must be a tensor, or .*"),
    "other_message": (
        2,
        1,
        rf"rank 1 failed at 1RECV_F0 {PLACE}: rank 0 has begun a step of another pipeline",
    ),
    "other_plan": (3, None, r"rank \d failed: rank \d has another plan"),
    "processes": (2, None, r"rank \d failed: the plan needs 4 processes, 2 were started"),
    "no_past": (
        2,
        0,
        r"rank 0 failed at 0F0 \(seq1f1b.sched:\d+\): stage 0 returns a Tensor: where .* two .*",
    ),
    "stages": (
        2,
        1,
        r"rank 1 failed: the plan gives this rank the stages \[1\], `stages` has \[0\]",
    ),
    "no_loss": (2, 1, r"rank 1 failed: the last stage is on this rank, so it needs a `loss_fn`"),
    "replicas": (
        2,
        None,
        r"rank \d failed: the replicas of stage \d on rank 0 and on rank 1 differ: .*",
    ),
    "optimizers": (
        2,
        None,
        r"rank \d failed: the plan updates the stages \[\d, \d\], `optimizers` has \[\]",
    ),
    "absent": (2, 1, r"rank 1 failed: rank 0 has built no pipeline within 1 s"),
    "stalls": (3, None, rf"rank 1 has made no progress for \d\.\d s at 1F2 {PLACE}.*"),
    "idles": (
        3,
        None,
        r"rank 1 has made no progress for \d\.\d s between two steps: rank \d has waited 1 s at .*",
    ),
    "terminated": (3, None, rf"rank 0 was terminated at 0B\d {PLACE}"),
    "interrupted": (3, None, rf"rank 0 was interrupted at 0B\d {PLACE}"),
}


@pytest.mark.parametrize("scenario", FAILURES)
def test_all_ranks_say_what_went_wrong_and_exit(run: Run, scenario: str) -> None:
    ranks, finder, message = FAILURES[scenario]
    outcome = run(scenario, ranks)
    assert outcome.codes == [1] * ranks, outcome.logs
    raised = [
        rank for rank, log in enumerate(outcome.logs) if says(log, rf".*PipelineError: {message}")
    ]
    printed = [
        rank
        for rank, log in enumerate(outcome.logs)
        if says(log, rf"rank {rank}: stopped: {message}")
    ]
    assert sorted(raised + printed) == list(range(ranks)), outcome.logs
    # Who finds it out raises, for the user to see where, or reports; the others have nothing to
    # add.
    assert finder is None or raised == [finder]
    reports = [rank for rank, log in enumerate(outcome.logs) if "\n  rank 0 " in log]
    assert len(reports) == (
        ".sched:" in message or scenario in ("idles", "indivisible", "no_targets")
    ), outcome.logs
    assert all(outcome.logs[rank].count("\n") == 1 for rank in {*printed} - {*reports}), (
        outcome.logs
    )
    assert (
        len({line for rank in printed for line in re.findall("stopped: (.*)", outcome.logs[rank])})
        == 1
    )
    assert outcome.seconds < 15


def says(log: str, line: str) -> bool:
    return re.search(rf"^{line}$", log, re.MULTILINE) is not None


def test_an_exception_of_a_stage_keeps_its_traceback(run: Run) -> None:
    log = run("throws", 3).logs[1]
    assert "in throw" in log
    assert "ValueError: boom\nand more\n" in log


@pytest.mark.parametrize(("scenario", "code"), [("killed", -9), ("crashes_between", 1)])
def test_a_rank_that_dies_is_named_by_the_others(run: Run, scenario: str, code: int) -> None:
    outcome = run(scenario, 4)
    assert outcome.codes == [1, code, 1, 1]
    for rank in (0, 2, 3):
        assert says(
            outcome.logs[rank],
            r".*(stopped|Error): rank 1 is gone: rank \d lost its connection at .*",
        )
    assert outcome.seconds < 15


def test_the_rank_that_holds_the_store_may_die(run: Run) -> None:
    outcome = run("store_killed", 3)
    assert outcome.codes == [-9, 1, 1]
    # Rank 2 does not talk to rank 0 but for the store, where it might have read the cause.
    for rank in (1, 2):
        assert says(
            outcome.logs[rank],
            rf".*(stopped|Error): rank 0 is gone: rank {rank} lost (its connection|the) .*",
        )
    assert outcome.seconds < 15


def test_a_rank_that_does_not_answer_is_named_by_the_others(run: Run) -> None:
    outcome = run("stopped", 3)
    assert outcome.codes == [1, -9, 1]
    for rank in (0, 2):
        assert says(
            outcome.logs[rank],
            rf"rank {rank}: stopped: rank 1 does not answer: rank \d has waited 1 s at .*",
        )
