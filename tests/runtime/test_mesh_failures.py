"""How a run on a device mesh ends when something goes wrong: all ranks name each by its place."""

import math
import re
import time
from collections.abc import Callable
from functools import partial

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from schedlang import Kind
from schedlang.runtime import Pipeline
from tests.support.mesh import PIPE, embedded, mesh, momentum, on, place, ties
from tests.support.models import (
    Does,
    batch,
    kill,
    modules,
    program,
    sleep,
    version_plan,
)
from tests.support.ranks import LIMIT, Run

pytestmark = pytest.mark.processes


def fails(what: Callable[[torch.Tensor], object], process: int) -> None:
    """Something happens at the second forward of a process."""
    of = mesh("dp", "pp")
    plan = program("1f1b", ranks=PIPE, microbatches=4)
    replica, rank = place(of)
    # All processes have the same modules, and in one of them it happens.
    model = [Does(each, math.inf, what) for each in modules(PIPE)]
    if dist.get_rank() == process:
        model[rank].call = 1
    ours = on(of, plan, model, timeout=2 if what is sleep else 60)
    for step in range(2):
        ours.step(*batch(plan, step + replica))


def throw(_: torch.Tensor) -> torch.Tensor:
    raise ValueError("boom")


def idles() -> None:
    """A process does not come to the second step."""
    of = mesh("dp", "pp")
    plan = program("1f1b", ranks=PIPE, microbatches=4)
    ours = on(of, plan, modules(PIPE), timeout=2)
    ours.step(*batch(plan, 0))
    if dist.get_rank() == 2:
        time.sleep(LIMIT)
    ours.step(*batch(plan, 1))


def does_not_come(joins: Callable[[Pipeline], object]) -> None:
    """A process does not come to what all do together after a step."""
    of = mesh("dp", "pp")
    plan = program("1f1b", ranks=PIPE, microbatches=4)
    ours = on(of, plan, modules(PIPE), timeout=2)
    ours.step(*batch(plan, 0))
    if dist.get_rank() == 2:
        time.sleep(LIMIT)
    joins(ours)
    ours.step(*batch(plan, 1))


def clips_after_the_step(ours: Pipeline) -> None:
    ours.clip_grad_norm_(1.0)


def averages_after_the_step(ours: Pipeline) -> None:
    ours.mean_over_replicas(torch.ones(1))


def clips_updates() -> None:
    plan = version_plan("pipedream_2bw", PIPE)
    model = [each.double() for each in modules(PIPE)]
    of = mesh("dp", "pp")
    rank = of.get_local_rank("pp")
    on(of, plan, model, optimizers={rank: momentum(model[rank])}).clip_grad_norm_(1.0)


def clips(
    name: str,
    max_norms: tuple[float, ...] = (1.0,) * 4,
    shard: bool = False,
    what: object = None,
) -> None:
    """A plan whose updates are clipped, of which something is wrong, or to one process of which
    something happens.
    """
    of = mesh("dp", "pp")
    plan = program("gpipe", ranks=PIPE) if name == "gpipe" else version_plan(name, PIPE)
    model = [each.double() for each in modules(len(plan.placement))]
    rank = of.get_local_rank("pp")
    if shard:
        fully_shard(model[rank], mesh=of["dp"])
    updates = Kind.U in plan.ranks[rank].kind
    optimizers = {
        stage: momentum(model[stage]) for stage in plan.stages_of(rank) if updates
    }
    if what:
        model = [
            Does(each, 5 if dist.get_rank() == 3 else math.inf, what) for each in model
        ]
    options = {
        "max_norm": max_norms[dist.get_rank()],
        "timeout": 2 if what is sleep else 60,
    }
    ours = on(of["pp"] if shard else of, plan, model, optimizers=optimizers, **options)
    ours.step(*batch(plan, dist.get_rank() // PIPE))


def ties_wrongly(name: str, plan: str = "1f1b", **given: list[dict[int, str]]) -> None:
    """First and last stage of two, of which something is wrong."""
    of = mesh("dp", "pp")
    plan = program(plan, ranks=PIPE)
    model = embedded(len(plan.placement), is_same=name == "undeclared")
    if name == "other_start":
        model[-1].scores.weight.data[0] += 1
    rank = of.get_local_rank("pp")
    has_updates = name == "tied_updates"
    optimizers = (
        {stage: momentum(model[stage]) for stage in plan.stages_of(rank)}
        if has_updates
        else None
    )
    given = given or {"tied": ties(len(plan.placement))}
    if name == "on_one_side" and rank == 1:
        given = {}
    on(of, plan, model, optimizers=optimizers, **given)


def differ() -> None:
    """One process has other weights."""
    model = modules(PIPE)
    if dist.get_rank() == 3:
        model[1][0].bias.data[0] += 1
    on(mesh("dp", "pp"), program("1f1b", ranks=PIPE), model)


def sharded_versions() -> None:
    """Stages that read older versions of their weights, which FSDP does not keep."""
    of = mesh("dp", "pp")
    plan = version_plan("pipedream_2bw", PIPE)
    rank = of.get_local_rank("pp")
    model = modules(PIPE)
    fully_shard(model[rank], mesh=of["dp"])
    on(of["pp"], plan, model, optimizers={rank: momentum(model[rank])})


def no_place() -> None:
    of = mesh("dp", "pp")
    on(of["pp"], program("1f1b", ranks=PIPE), modules(PIPE), max_gathered=0)


def on_a_mesh(*names: str, ranks: int = PIPE) -> None:
    of = mesh(*names)
    plan = program("1f1b", ranks=ranks)
    Pipeline(plan, dict(enumerate(modules(1))), nn.functional.mse_loss, mesh=of)


def three_dimensions() -> None:
    of = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "pp"))
    Pipeline(program("1f1b", ranks=PIPE), {}, mesh=of)


NAMES = [
    "rank 0 (dp 0, pp 0)",
    "rank 1 (dp 0, pp 1)",
    "rank 2 (dp 1, pp 0)",
    "rank 3 (dp 1, pp 1)",
]
FIRST, SECOND, THIRD, LAST = map(re.escape, NAMES)
PLACE = r"at \d\w+\d \(1f1b.sched:\d+\)"
RANK = r"rank \d \(dp \d, pp \d\)"
#: In a pipeline of sharded stages.
SHARD = r"rank \d \(pp \d\)"
#: What goes wrong: what the ranks do, and the cause that all of them name.
CAUSES = {
    "killed": (
        partial(fails, kill, 3),
        rf"{LAST} is gone: {RANK} lost its connection {PLACE}: .*",
    ),
    "stalls": (
        partial(fails, sleep, 3),
        rf"{LAST} has made no progress for \d\.\d s at 1F1 \S+(: {RANK} has waited 2 s {PLACE})?",
    ),
    "idles": (
        idles,
        rf"{THIRD} has made no progress for \d\.\d s between two steps: {RANK} has waited 2 s {PLACE}",
    ),
    "does_not_clip": (
        partial(does_not_come, clips_after_the_step),
        rf"{THIRD} has made no progress .* between two steps: {RANK} has waited 2 s .*",
    ),
    "does_not_average": (
        partial(does_not_come, averages_after_the_step),
        rf"{THIRD} has made no progress .* between two steps: {RANK} has waited 2 s .*",
    ),
    "clips_updates": (
        clips_updates,
        rf"{RANK} failed: the plan updates its stages itself \(`U`\), .* `register_step_pre_hook`",
    ),
    "clips_killed": (
        partial(clips, "pipedream_2bw", what=kill),
        rf"{LAST} is gone: {RANK} lost its connection at \S+ \(pipedream_2bw.sched:\d+\): .*",
    ),
    "clips_stalls": (
        partial(clips, "pipedream_2bw", what=sleep),
        rf"{LAST} has made no progress for \d\.\d s at 1F5 \S+(: {RANK} has waited 2 s at .*)?",
    ),
    "clips_groups": (
        partial(clips, "wpipe"),
        rf"{RANK} failed: `max_norm` is for the updates of a plan, but before `2F4` \(wpipe.sched:\d+\) "
        r"rank 0 would wait in vain for the norm of update 0: rank 0 has its part of it only after `0U0` "
        r"\(wpipe.sched:\d+\): clip each stage in a hook of its optimizer, `register_step_pre_hook`",
    ),
    "clips_nothing": (
        partial(clips, "gpipe"),
        rf"{RANK} failed: with `max_norm` the pipeline updates its stages after each step, here those of "
        r"\[\d\], and `optimizers` has \[\]: give it the optimizer of each, or call `clip_grad_norm_` after .*",
    ),
    "clips_to_zero": (
        partial(clips, "pipedream_2bw", (0.0,) * 4),
        rf"{RANK} failed: `max_norm` is 0.0, it must be above 0",
    ),
    "clips_alone": (
        partial(clips, "pipedream_2bw", (1.0, 1.0, 2.0, 1.0)),
        rf"{RANK} failed: {RANK} has another `max_norm`: all ranks must be given the same",
    ),
    "clips_shards": (
        partial(clips, "gpipe", shard=True),
        rf"{SHARD} failed: the stages are sharded, so `max_norm` cannot clip their updates yet",
    ),
    "other_start": (
        partial(ties_wrongly, "other_start"),
        rf"{RANK} failed: the tied `byte.weight` of stage 0 and `scores.weight` of stage 1 on {RANK} and on "
        rf"{RANK} differ: they must begin with the same weights",
    ),
    "on_one_side": (
        partial(ties_wrongly, "on_one_side"),
        rf"{RANK} failed: {RANK} has another `tied`: all ranks must be given the same",
    ),
    "undeclared": (
        partial(ties_wrongly, "undeclared", "zb_v", tied=[]),
        rf"{RANK} failed: stages 0 and 3 have a weight in common: give "
        r"`tied=\[{0: 'byte.weight', 3: 'scores.weight'}\]`",
    ),
    "no_such_weight": (
        partial(ties_wrongly, "", tied=[{0: "byte.bias", 1: "scores.weight"}]),
        rf"{RANK} failed: `tied` has .*, but stage 0 has no parameter `byte.bias`",
    ),
    "no_such_stage": (
        partial(ties_wrongly, "", tied=[{0: "byte.weight", 2: "scores.weight"}]),
        rf"{RANK} failed: `tied` has .* of stage 2, but the plan has 2 stages",
    ),
    "tied_updates": (
        partial(ties_wrongly, "tied_updates", "pipedream_2bw"),
        rf"{RANK} failed: the plan updates its stages itself \(`U`\), so none of their weights can be tied",
    ),
    "throws": (
        partial(fails, throw, 2),
        rf"{THIRD} failed at 0F1 \S+: ValueError: boom",
    ),
    "differ": (
        differ,
        rf"{RANK} failed: the replicas of stage 1 on {SECOND} and on {LAST} differ: .*",
    ),
    "sharded_versions": (
        sharded_versions,
        rf"{SHARD} failed: stage \d is sharded, so it cannot read older versions of its weights yet",
    ),
    "no_place": (
        no_place,
        rf"{SHARD} failed: `max_gathered` is 0, it must be 1 or more",
    ),
    "too_few": (
        partial(on_a_mesh, "dp", "pp", ranks=4),
        rf"{RANK} failed: the plan needs 4 ranks, the mesh has 2 along `pp`",
    ),
}


@pytest.mark.parametrize("scenario", CAUSES)
def test_all_replicas_end_and_name_ranks_by_their_place_in_the_mesh(
    run_ranks: Run, scenario: str
) -> None:
    body, cause = CAUSES[scenario]
    outcome = run_ranks(body, 4)
    died = {3} if "killed" in scenario else set()
    assert outcome.codes == [-9 if each in died else 1 for each in range(4)], (
        outcome.logs
    )
    assert outcome.seconds < 20
    for rank in set(range(4)) - died:
        assert re.search(rf"(^|stopped: |Error: ){cause}$", outcome.logs[rank], re.M), (
            outcome.logs
        )
    if scenario in (
        "killed",
        "stalls",
        "idles",
        "throws",
        "does_not_clip",
        "does_not_average",
    ):
        # One rank prints where all four stood.
        standings = [
            re.findall(rf"^  ({RANK}) (?:has|was)", log, re.M) for log in outcome.logs
        ]
        assert scenario != "does_not_clip" or re.search(
            rf"{LAST} has waited .* {THIRD} in clip_gr", str(outcome.logs)
        )
        assert sorted(map(tuple, standings)) == [(), (), (), tuple(NAMES)], outcome.logs


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (partial(on_a_mesh, "dp", "tp"), r"\(dp, tp\)"),
        (three_dimensions, r"\(dp, tp, pp\)"),
    ],
)
def test_a_mesh_of_other_dimensions_is_refused(
    run_ranks: Run, body: Callable[[], None], found: str
) -> None:
    outcome = run_ranks(body, 4)
    assert outcome.codes == [1] * 4
    for log in outcome.logs:
        assert re.search(
            rf"PipelineError: the mesh has the dimensions {found}: it must have `pp`, and at most one",
            log,
        )
