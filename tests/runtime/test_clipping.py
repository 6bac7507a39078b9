"""Training that is clipped by the norm of all gradients, on real processes: that of one process."""

import math
import warnings
from itertools import product

import pytest
from attrs import frozen

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from schedlang import Source, compile
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.mesh import (
    PIPE,
    add_gradients,
    is_same_everywhere,
    mesh,
    momentum,
    place,
    weights,
)
from tests.support.models import (
    DELAYS,
    ROWS,
    UPDATES,
    Versions,
    batch,
    difference,
    modules,
    program,
    replicated,
    shared_out,
    version_plan,
)
from tests.support.ranks import Run
from tests.support.sizes import shares

pytestmark = pytest.mark.processes

#: Updates with late gradients that are compared: two steps of a plan, each with more of them than
#: any gradient is late.
COUNT = 24


#: Programs, numbers of ranks, and norms: some pipelines have copies of stages, and some replicas;
#: one of the norms needs no clipping.
CASES = product(("zb_v", "dualpipe"), (PIPE, 2 * PIPE), (2.0, 1.0, math.inf))


def clipped(cases: list[tuple[str, int, float]]) -> dict[str, list[float]]:
    """For each case the largest difference, from one process, of a norm and of a weight after three
    updates.
    """
    of = mesh("dp", "pp")
    found = {}
    for name, ranks, norm_type in cases:
        plan = program(name, ranks=ranks, microbatches=2 * ranks)
        on_mesh = of if ranks == PIPE else None
        found[f"{name} {ranks} {norm_type}"] = clipped_updates(plan, on_mesh, norm_type)
    return found


def clipped_updates(plan: Plan, of: DeviceMesh | None, norm_type: float) -> list[float]:
    replica, rank = place(of) if of else (0, dist.get_rank())
    model = replicated(plan)
    reference = modules(plan.layout.pieces)
    ours = Pipeline(
        plan,
        {each: model[each] for each in plan.stages_of(rank)},
        nn.functional.mse_loss,
        mesh=of,
    )
    whole = nn.ModuleList(reference)
    worst = [0.0, 0.0]
    optimizers = [
        momentum(whole),
        *(momentum(model[stage]) for stage in plan.stages_of(rank)),
    ]
    for step, limit in enumerate((0.01, 100.0, 0.01)):
        for each in range(2 if of else 1):
            add_gradients(
                plan, reference, *batch(plan, 10 * step + each), replicas=2 if of else 1
            )
        ours.step(*batch(plan, 10 * step + replica))
        norm = ours.clip_grad_norm_(limit, norm_type)
        worst[0] = max(
            worst[0],
            difference(
                norm, nn.utils.clip_grad_norm_(whole.parameters(), limit, norm_type)
            ),
        )
        # The second limit is above every norm: nothing is clipped there.
        assert (limit < norm) == (step != 1)
        for each in optimizers:
            each.step()
            each.zero_grad()
    worst[1] = max(
        difference(*pair)
        for pair in weights(model, reference * 2, plan.stages_of(rank))
    )
    return worst


@pytest.mark.parametrize("cases", shares(CASES))
def test_clipped_training_is_that_of_one_process(
    run_ranks: Run, cases: list[tuple[str, int, float]]
) -> None:
    """With stages that have copies in one pipeline, with replicas, and with both, by several norms."""
    for found in run_ranks(clipped, 4, cases).results():
        assert len(found) == len(cases)
        for name, (norm, weight) in found.items():
            assert norm < 1e-12, name
            assert weight < 1e-12, name


@frozen
class LateUpdates:
    """A plan that updates, with the delay of each stage's weights, and so many replicas of it."""

    plan: Plan
    delays: list[int]
    replicas: int


def plans_with_updates() -> dict[str, LateUpdates]:
    """On 4 ranks, and on 2 with replicas."""
    found = {}
    updates = Source("updates.sched", UPDATES)
    for name, ranks in product(
        ("pipedream_2bw", "pipedream", "pipedream_vertical", "gpipe_groups", "updates"),
        (2, 4),
    ):
        plan = (
            compile(updates, {"ranks": ranks})
            if name == "updates"
            else version_plan(name, ranks)
        )
        delays = DELAYS[name](ranks) if name in DELAYS else [0] * len(plan.placement)
        plan = plan.for_updates(COUNT // 2) if plan.kernels else plan
        found[f"{name} {ranks}"] = LateUpdates(plan, delays, 2 if ranks == PIPE else 1)
    return found


def clipped_updates_of_plans(cases: dict[str, LateUpdates]) -> dict[str, list[float]]:
    """For each case: the largest differences, from one process, of a norm and of a weight after all
    updates, and whether replicas are the same.
    """
    of = mesh("dp", "pp")
    expected = shared_out(clipped_in_one_process, cases)
    return {
        name: clipped_late(
            case.plan, of if case.replicas == 2 else None, *expected[name]
        )
        for name, case in cases.items()
    }


def clipped_late(
    plan: Plan,
    of: DeviceMesh | None,
    limit: float,
    expected: list[float],
    reference: list[nn.Module],
) -> list[float]:
    (replica, rank) = place(of) if of else (0, dist.get_rank())
    model = doubles(plan)
    mine = {stage: model[stage] for stage in plan.stages_of(rank)}
    optimizers = {stage: momentum(model[stage]) for stage in mine}
    ours = Pipeline(
        plan,
        mine,
        nn.functional.mse_loss,
        mesh=of,
        optimizers=optimizers,
        max_norm=limit,
    )
    norms = list[float]()
    ours.record = True
    for step in range(COUNT // plan.layout.updates):
        ours.step(*batch(plan, 10 * step + replica))
        norms += map(float, ours.norms)
        assert sorted(map(str, ours.bars)) == sorted(
            plan.ranks[rank].compute().text().split()
        )
    worst = max(abs(a - b) / b for a, b in zip(norms, expected, strict=True))
    pairs = weights(model, reference, plan.stages_of(rank))
    same = (
        all(is_same_everywhere(each.detach(), of) for each, _ in pairs) if of else True
    )
    return [worst, max(difference(*pair) for pair in pairs), same]


def doubles(plan: Plan) -> list[nn.Module]:
    return [each.double() for each in modules(len(plan.placement))]


def clipped_in_one_process(
    case: LateUpdates,
) -> tuple[float, list[float], list[nn.Module]]:
    """A limit that clips about half of the updates, their norms, and the stages after them."""
    norms, _ = late_norms(case, math.inf)
    # The median of the norms without clipping.
    limit = sorted(norms)[COUNT // 2]
    norms, stages = late_norms(case, limit)
    assert min(norms) < limit < max(norms)
    return limit, norms, stages


def late_norms(case: LateUpdates, limit: float) -> tuple[list[float], list[nn.Module]]:
    """The norms of all updates in one process whose gradients are so late, and the stages after
    them.
    """
    plan = case.plan
    stages = doubles(plan)
    versions = Versions(stages)
    whole = nn.ModuleList(stages)
    optimizer = momentum(whole)
    per_update = plan.microbatches // plan.layout.updates
    norms = []
    for step in range(COUNT // plan.layout.updates):
        batches = [
            [part.split(ROWS * per_update) for part in batch(plan, 10 * step + each)]
            for each in range(case.replicas)
        ]
        for update in range(plan.layout.updates):
            read = versions.read(case.delays)
            for inputs, targets in batches:
                loss = nn.functional.mse_loss(read(inputs[update]), targets[update])
                (loss / case.replicas).backward()
            versions.take_gradients()
            norms.append(float(nn.utils.clip_grad_norm_(whole.parameters(), limit)))
            versions.update(optimizer)
    return norms, stages


def test_updates_clipped_by_the_norm_of_all_stages_are_those_of_one_process(
    run_ranks: Run,
) -> None:
    """Updates of which some are clipped; on 4 ranks, and with replicas, of which all have the
    same, to the bit.
    """
    for found in run_ranks(clipped_updates_of_plans, 4, plans_with_updates()).results():
        assert len(found) == 10
        for name, (norm, weight, same) in found.items():
            assert norm < 1e-12, name
            assert weight < 1e-11, name
            assert same, name


def clipped_by_script(whole: bool) -> list[str]:
    """What is said where a script clips this rank's stages, or each of their layers."""
    plan = program("1f1b", ranks=2, microbatches=4)
    rank = dist.get_rank()
    stages = {rank: nn.Sequential(*modules(2))}
    pipeline = Pipeline(plan, stages, nn.functional.mse_loss)
    parts = [*stages.values()] if whole else [*stages[rank]]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(2):
            pipeline.step(*batch(plan, step))
            pipeline.clip_grad_norm_(1.0)
            for part in parts:
                nn.utils.clip_grad_norm_(part.parameters(), 0.1)
    return [
        str(each.message)
        for each in said
        if "`torch.nn.utils.clip_grad_norm_`" in str(each.message)
        and each.filename == __file__
    ]


@pytest.mark.core
def test_a_script_that_clips_each_rank_by_itself_is_asked_once(run_ranks: Run) -> None:
    for rank, said in enumerate(run_ranks(clipped_by_script, 2, True).results()):
        assert len(said) == 1
        assert (
            f"clips stage {rank} by the norm of the gradients on this rank" in said[0]
        )
    assert run_ranks(clipped_by_script, 2, False).results() == [[], []]
