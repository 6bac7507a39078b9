"""Pipelines on a device mesh, with replicas beside each other, on 2 x 2 real processes."""

import re

import pytest

from tests.support.launches import Run, fixtures

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
pytestmark = pytest.mark.processes

worker, run = fixtures("parallel_worker.py")


def test_gradients_over_replicas_are_those_of_one_process(run: Run) -> None:
    """With the batches of all replicas; losses are those of each replica's own batch."""
    for found in run("replicas", 4).found():
        assert len(found) == 7
        for name, (loss, gradient) in found.items():
            assert loss < 1e-12, name
            assert gradient < 1e-12, name


def test_sums_begin_while_other_stages_work(run: Run) -> None:
    """Each right after the last backward of its stage, all but one before the end."""
    for last, begins, actions in run("overlaps", 4).found():
        assert begins == last
        assert last[0] < last[1] < actions


def test_gradients_over_four_replicas_are_those_of_one_process(run: Run) -> None:
    """Of a pipeline over one rank."""
    assert max(run("of_four", 4).found()) < 1e-12


#: The last of four replicas, each of one rank.
FOURTH = r"rank 3 \(dp 3, pp 0\)"


def test_of_several_replicas_the_one_that_dies_is_named(run: Run) -> None:
    outcome = run("one_of_four_killed", 4)
    assert outcome.codes == [1, 1, 1, -9]
    cause = (
        rf"(stopped|Error): {FOURTH} is gone: rank \d \(dp \d, pp 0\) lost its connection at 0B3"
    )
    assert all(re.search(cause, log) for log in outcome.logs[:3]), outcome.logs


def test_of_several_replicas_the_one_that_stalls_is_named(run: Run) -> None:
    outcome = run("one_of_four_stalls", 4)
    assert outcome.codes == [1] * 4
    cause = rf"(stopped|Error): {FOURTH} has made no progress for \d\.\d s at 0F1 "
    assert all(re.search(cause, log) for log in outcome.logs), outcome.logs
    waits = rf"rank 0 \(dp 0, pp 0\) has waited \S+ s for rank 1 .* or rank 2 .* or {FOURTH} at 0B3"
    assert any(re.search(waits, log) for log in outcome.logs), outcome.logs


def test_updates_of_replicas_are_those_of_one_process(run: Run) -> None:
    """Late gradients too; both replicas have the same weights, to the bit."""
    for found in run("updates", 4).found():
        assert len(found) == 5
        for name, (weight, same) in found.items():
            assert weight < 1e-12, name
            assert same, name


def test_clipped_training_is_that_of_one_process(run: Run) -> None:
    """With stages that have copies in one pipeline, with replicas, and with both, by several norms."""
    for found in run("clipped", 4).found():
        assert len(found) == 12
        for name, (norm, weight) in found.items():
            assert norm < 1e-12, name
            assert weight < 1e-12, name


def test_updates_clipped_by_the_norm_of_all_stages_are_those_of_one_process(run: Run) -> None:
    """40 updates, of which some are clipped; on 4 ranks, and with replicas, of which all have the
    same, to the bit.
    """
    for found in run("clipped_updates_of_plans", 4).found():
        assert len(found) == 10
        for name, (norm, weight, same) in found.items():
            assert norm < 1e-12, name
            assert weight < 1e-11, name
            assert same, name


@pytest.mark.parametrize("scenario", ["sharded", "not_sharded"])
def test_a_pipeline_of_sharded_stages(run: Run, scenario: str) -> None:
    """And of stages that FSDP replicates."""
    for norm, gradient in run(scenario, 4).found():
        assert norm < 1e-12
        assert gradient < 1e-12


def test_weights_are_gathered_and_gradients_reduced_as_the_policy_says(run: Run) -> None:
    """With one place, two, and one for each stage; gradients and weights are those of one process."""
    for found in run("gathered", 4).found():
        assert len(found) == 18
        for name, ((difference,), seen, expected) in found.items():
            assert difference < 1e-12, name
            assert seen == expected, name
        one, two, all = (found[f"interleaved_1f1b {places}"][1] for places in (1, 2, None))
        assert one[0] > two[0] > all[0]
        assert (one[2], two[2], all[2]) == (1, 2, 3)


def test_training_with_a_tied_weight_is_that_of_one_process(run: Run) -> None:
    """With copies on several ranks, on one, and in both pipelines; with replicas; clipped."""
    for found in run("tied", 4).found():
        assert len(found) == 8
        for name, (loss, norm, weight) in found.items():
            assert loss < 1e-12, name
            assert norm < 1e-12, name
            assert weight < 1e-12, name


def test_pipelines_on_rows_of_a_mesh_are_on_their_own(run: Run) -> None:
    for process, (has_losses, worst) in enumerate(run("alone_on_a_mesh", 4).found()):
        assert has_losses == (process % 2 == 1)
        assert worst < 1e-12


def test_a_weight_that_one_replica_does_not_use(run: Run) -> None:
    assert max(run("unused", 4).found()) < 1e-12


def test_checkpoints_are_those_of_all_replicas(run: Run) -> None:
    assert run("checkpoints", 4).found() == [[1, 6]] * 4


def test_messages_of_fewer_bits(run: Run) -> None:
    """Gradients are those of one process that rounds the same; they are near those of one that does
    not.
    """
    near = {"None": 1e-5, "torch.bfloat16": 5e-2, "torch.float16": 5e-3}
    for found in run("rounded", 4).found():
        assert len(found) == 18
        for name, (same, other, bytes, tensors) in found.items():
            schedule, scale, type = name.split()
            exact = found[f"{schedule} {scale} None"]
            assert same < 1e-5, name
            assert (0 if type == "None" else 1e-5) <= other < near[type], name
            assert tensors == exact[3] > 0
            # An exponent for each tensor.
            assert bytes == exact[2] / (1 if type == "None" else 2) + (
                2 * tensors if "float16" in type.split(".") else 0
            )


def test_shapes_change_from_step_to_step(run: Run) -> None:
    """Rows and length of microbatches: losses, outputs and gradients are those of one process."""
    for found in run("reshapes", 4).found():
        assert len(found) == 8
        for name, worst in found.items():
            assert worst < (1e-5 if "float16" in name else 1e-12), name


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        ("other_type", r"rank \d failed: rank \d has another `transfer_dtype`"),
        (
            "eight_bits",
            r"rank \d failed: `transfer_dtype` is torch.float8_e5m2, it must be torch.bfloat16 or torch.float16",
        ),
    ],
)
def test_types_of_messages_that_are_refused(run: Run, scenario: str, message: str) -> None:
    outcome = run(scenario, 4)
    assert outcome.codes == [1] * 4
    for log in outcome.logs:
        assert re.search(rf"(stopped|Error): {message}$", log, re.M), outcome.logs


NAMES = ["rank 0 (dp 0, pp 0)", "rank 1 (dp 0, pp 1)", "rank 2 (dp 1, pp 0)", "rank 3 (dp 1, pp 1)"]
FIRST, SECOND, THIRD, LAST = map(re.escape, NAMES)
PLACE = r"at \d\w+\d \(1f1b.sched:\d+\)"
RANK = r"rank \d \(dp \d, pp \d\)"
#: In a pipeline of sharded stages.
SHARD = r"rank \d \(pp \d\)"
CAUSES = {
    "killed": rf"{LAST} is gone: {RANK} lost its connection {PLACE}: .*",
    "stalls": rf"{LAST} has made no progress for \d\.\d s at 1F1 \S+(: {RANK} has waited 2 s {PLACE})?",
    "idles": rf"{THIRD} has made no progress for \d\.\d s between two steps: {RANK} has waited 2 s {PLACE}",
    "does_not_clip": rf"{THIRD} has made no progress .* between two steps: {RANK} has waited 2 s .*",
    "does_not_average": rf"{THIRD} has made no progress .* between two steps: {RANK} has waited 2 s .*",
    "clips_updates": rf"{RANK} failed: the plan updates its stages itself \(`U`\), .* `register_step_pre_hook`",
    "clips_killed": rf"{LAST} is gone: {RANK} lost its connection at \S+ \(pipedream_2bw.sched:\d+\): .*",
    "clips_stalls": rf"{LAST} has made no progress for \d\.\d s at 1F5 \S+(: {RANK} has waited 2 s at .*)?",
    "clips_groups": rf"{RANK} failed: `max_norm` is for the updates of a plan, but before `2F4` \(wpipe.sched:\d+\) "
    r"rank 0 would wait in vain for the norm of update 0: rank 0 has its part of it only after `0U0` "
    r"\(wpipe.sched:\d+\): clip each stage in a hook of its optimizer, `register_step_pre_hook`",
    "clips_nothing": rf"{RANK} failed: `max_norm` is for the updates of a plan, but the plan does not update stage 0 "
    r"itself \(`U`\): call `clip_grad_norm_` after each step",
    "clips_to_zero": rf"{RANK} failed: `max_norm` is 0.0, it must be above 0",
    "clips_alone": rf"{RANK} failed: {RANK} has another `max_norm`",
    "clips_shards": rf"{SHARD} failed: the stages are sharded, so `max_norm` cannot clip their updates yet",
    "other_start": rf"{RANK} failed: the tied `byte.weight` of stage 0 and `scores.weight` of stage 1 on {RANK} and on "
    rf"{RANK} differ: they must begin with the same weights",
    "on_one_side": rf"{RANK} failed: {RANK} has another `tied`",
    "undeclared": rf"{RANK} failed: stages 0 and 3 have a weight in common: give "
    r"`tied=\[{0: 'byte.weight', 3: 'scores.weight'}\]`",
    "no_such_weight": rf"{RANK} failed: `tied` has .*, but stage 0 has no parameter `byte.bias`",
    "no_such_stage": rf"{RANK} failed: `tied` has .* of stage 2, but the plan has 2 stages",
    "tied_updates": rf"{RANK} failed: the plan updates its stages itself \(`U`\), so none of their weights can be tied",
    "throws": rf"{THIRD} failed at 0F1 \S+: ValueError: boom",
    "differ": rf"{RANK} failed: the replicas of stage 1 on {SECOND} and on {LAST} differ: .*",
    "sharded_versions": rf"{SHARD} failed: stage \d is sharded, so it cannot read older versions of its weights yet",
    "no_place": rf"{SHARD} failed: `max_gathered` is 0, it must be 1 or more",
    "too_few": rf"{RANK} failed: the plan needs 4 ranks, the mesh has 2 along `pp`",
}


@pytest.mark.parametrize("scenario", CAUSES)
def test_all_replicas_end_and_name_ranks_by_their_place_in_the_mesh(
    run: Run, scenario: str
) -> None:
    outcome = run(scenario, 4)
    died = {3} if "killed" in scenario else set()
    assert outcome.codes == [-9 if each in died else 1 for each in range(4)], outcome.logs
    assert outcome.seconds < 20
    for rank in set(range(4)) - died:
        assert re.search(rf"(stopped|Error): {CAUSES[scenario]}$", outcome.logs[rank], re.M), (
            outcome.logs
        )
    if scenario in ("killed", "stalls", "idles", "throws", "does_not_clip", "does_not_average"):
        standings = [re.findall(rf"^  ({RANK}) (?:has|was)", log, re.M) for log in outcome.logs]
        assert scenario != "does_not_clip" or re.search(
            rf"{LAST} has waited .* {THIRD} in clip_gr", str(outcome.logs)
        )
        assert sorted(map(tuple, standings)) == [(), (), (), tuple(NAMES)], outcome.logs


@pytest.mark.parametrize(
    ("scenario", "found"), [("no_pp", r"\(dp, tp\)"), ("three_dimensions", r"\(dp, tp, pp\)")]
)
def test_a_mesh_of_other_dimensions_is_refused(run: Run, scenario: str, found: str) -> None:
    outcome = run(scenario, 4)
    assert outcome.codes == [1] * 4
    for log in outcome.logs:
        assert re.search(
            rf"PipelineError: the mesh has the dimensions {found}: it must have `pp`, and at most one",
            log,
        )
