"""Pipelines on a device mesh, with replicas beside each other, on 2 x 2 real processes."""

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from schedlang import Kind
from schedlang.plan.plan import Plan
from schedlang.runtime.parts.sums import ReplicaSum
from tests.support.mesh import (
    PIPE,
    SCHEDULES,
    add_gradients,
    is_same_everywhere,
    mesh,
    momentum,
    on,
    place,
    weights,
)
from tests.support.models import (
    DELAYS,
    ROWS,
    WIDTH,
    Does,
    Versions,
    alone,
    batch,
    difference,
    kill,
    loss_difference,
    modules,
    program,
    replicated,
    sleep,
    version_plan,
)
from tests.support.ranks import Run

pytestmark = pytest.mark.processes


def replicas() -> dict[str, list[float]]:
    """For each schedule, the largest differences of losses and gradients from those of one process.

    That has the batches of both replicas. Two steps, whose gradients add up, with an evaluation
    between them.
    """
    larger = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "pp"))
    # The dimension of the pipeline first, last, and in a part of a larger mesh.
    meshes = mesh("dp", "pp"), mesh("pp", "dp"), larger["dp", "pp"]
    found = {}
    for turn, name in enumerate(SCHEDULES):
        plan = program(name, ranks=PIPE, microbatches=2 * PIPE)
        found[name] = of_one_process(meshes[turn % 3], plan)
    return found


def of_one_process(of: DeviceMesh, plan: Plan) -> list[float]:
    (replica, rank) = place(of)
    slices = plan.layout.slices > 1
    model = replicated(plan)
    reference = modules(plan.layout.pieces, sliced=slices)
    ours = on(of, plan, model)
    worst = [0.0, 0.0]
    for step in range(2):
        expected = [
            add_gradients(plan, reference, *batch(plan, 10 * step + each))
            for each in range(2)
        ]
        mine = batch(plan, 10 * step + replica)
        evaluated = ours.evaluate(*mine)
        for losses in (evaluated and torch.stack(evaluated), ours.step(*mine)):
            worst[0] = max(
                worst[0], loss_difference(plan, losses, expected[replica], rank)
            )
    pairs = weights(model, reference * 2, plan.stages_of(rank))
    worst[1] = max(difference(mine.grad, other.grad) for mine, other in pairs)
    return worst


def test_gradients_over_replicas_are_those_of_one_process(run_ranks: Run) -> None:
    """With the batches of all replicas; losses are those of each replica's own batch."""
    for found in run_ranks(replicas, 4).results():
        assert len(found) == 7
        for name, (loss, gradient) in found.items():
            assert loss < 1e-12, name
            assert gradient < 1e-12, name


def overlaps() -> list[Any]:
    """Where in its actions each stage of a rank has its last backward, and begins its sum; and how
    many there are.
    """
    of = mesh("dp", "pp")
    plan = program("zb_v", ranks=PIPE, microbatches=4)
    rank = of.get_local_rank("pp")
    calls = on(of, plan, modules(len(plan.placement)))._training
    actions = plan.ranks[rank]
    last = [
        max(
            index
            for index, _, op in calls
            if op and op[0] in (Kind.B, Kind.W) and op[1] == stage
        )
        for stage in plan.stages_of(rank)
    ]
    begins = [
        index
        for index, call, _ in calls
        if getattr(call, "__func__", None) is ReplicaSum.begin
    ]
    return [sorted(last), begins, len(actions)]


def test_sums_begin_while_other_stages_work(run_ranks: Run) -> None:
    """Each right after the last backward of its stage, all but one before the end."""
    for last, begins, actions in run_ranks(overlaps, 4).results():
        assert begins == last
        # The sum of the stage that is done first goes on while the other one works.
        assert last[0] < last[1] < actions


def of_four(what: Callable[[torch.Tensor], object] | None = None) -> float:
    """Four replicas of a pipeline over one rank: the difference of gradients, or something that
    happens to the last.
    """
    of = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "pp"))
    plan = program("1f1b", ranks=1, microbatches=4)
    replica = of.get_local_rank("dp")
    model = modules(1)
    reference = modules(1)
    if what:
        model = [Does(model[0], 5 if replica == 3 else math.inf, what)]
    ours = on(of, plan, model, timeout=2 if what is sleep else 60)
    for step in range(2):
        for each in range(4):
            add_gradients(plan, reference, *batch(plan, 10 * step + each), replicas=4)
        ours.step(*batch(plan, 10 * step + replica))
    # The mean of 0, 1, 2 and 3 is 1.5.
    given = torch.tensor([1.0, 10.0]) * replica
    assert ours.mean_over_replicas(given).tolist() == [1.5, 15.0]
    assert given.tolist() == [replica, 10 * replica]
    return max(difference(*pair) for pair in gradients(model, reference))


def gradients(
    model: list[nn.Module], other: list[nn.Module]
) -> list[tuple[torch.Tensor, ...]]:
    return [(mine.grad, theirs.grad) for mine, theirs in weights(model, other, [0])]


def test_gradients_over_four_replicas_are_those_of_one_process(run_ranks: Run) -> None:
    """Of a pipeline over one rank."""
    assert max(run_ranks(of_four, 4).results()) < 1e-12


#: The last of four replicas, each of one rank.
FOURTH = r"rank 3 \(dp 3, pp 0\)"


def test_of_several_replicas_the_one_that_dies_is_named(run_ranks: Run) -> None:
    outcome = run_ranks(of_four, 4, kill)
    assert outcome.codes == [1, 1, 1, -9]
    cause = rf"(stopped|Error): {FOURTH} is gone: rank \d \(dp \d, pp 0\) lost its connection at 0B3"
    assert all(re.search(cause, log) for log in outcome.logs[:3]), outcome.logs


def test_of_several_replicas_the_one_that_stalls_is_named(run_ranks: Run) -> None:
    outcome = run_ranks(of_four, 4, sleep)
    assert outcome.codes == [1] * 4
    cause = rf"{FOURTH} has made no progress for \d+\.\d s at 0F1 "
    assert all(re.search(cause, log) for log in outcome.logs), outcome.logs
    waits = rf"rank 0 \(dp 0, pp 0\) has waited \S+ s for rank 1 .* or rank 2 .* or {FOURTH} at 0B3"
    assert any(re.search(waits, log) for log in outcome.logs), outcome.logs


def updates() -> dict[str, list[float]]:
    """For each schedule that updates: the largest difference of a weight after two steps, and
    whether replicas differ.

    One clips its stages.
    """
    of = mesh("dp", "pp")
    found = {}
    replica, rank = place(of)
    for name, delays in DELAYS.items():
        limit = 0.01 if name == "pipedream_2bw" else math.inf
        plan = version_plan(name, PIPE)
        model = [each.double() for each in modules(len(plan.placement))]
        optimizers = {
            stage: momentum(model[stage], limit) for stage in plan.stages_of(rank)
        }
        ours = on(of, plan, model, optimizers=optimizers)
        reference = copy.deepcopy(model)
        for step in range(2):
            ours.step(*batch(plan, 10 * step + replica))
        late_updates(plan, reference, delays(PIPE), limit)
        pairs = weights(model, reference, plan.stages_of(rank))
        worst = max(difference(*pair) for pair in pairs)
        found[name] = [
            worst,
            all(is_same_everywhere(mine.detach(), of) for mine, _ in pairs),
        ]
    return found


def late_updates(
    plan: Plan, model: list[nn.Module], delays: list[int], limit: float
) -> None:
    """What one process makes of both replicas' batches, with gradients that are so late."""
    versions = Versions(model)
    optimizers = [momentum(each, limit) for each in model]
    per_update = plan.microbatches // plan.layout.updates
    for step in range(2):
        both = [
            [part.split(ROWS * per_update) for part in batch(plan, 10 * step + replica)]
            for replica in range(2)
        ]
        for update in range(plan.layout.updates):
            read = versions.read(delays)
            for inputs, targets in both:
                loss = nn.functional.mse_loss(read(inputs[update]), targets[update])
                (loss / 2).backward()
            versions.update(*optimizers)


def test_updates_of_replicas_are_those_of_one_process(run_ranks: Run) -> None:
    """Late gradients too; both replicas have the same weights, to the bit."""
    for found in run_ranks(updates, 4).results():
        assert len(found) == 5
        for name, (weight, same) in found.items():
            assert weight < 1e-12, name
            assert same, name


def alone_on_a_mesh() -> tuple[bool, float]:
    """Pipelines that have nothing to do with each other, at once, on the rows of a mesh."""
    of = mesh("dp", "pp")
    plan = program("zb_h1", ranks=PIPE, microbatches=4)
    replica, rank = place(of)
    model = modules(PIPE)
    reference = modules(PIPE)
    for each in (*model, *reference):
        for weight in each.parameters():
            weight.data += replica
    inputs, targets = batch(plan, replica)
    losses = on(of["pp"], plan, model).step(inputs, targets)
    nn.functional.mse_loss(alone(reference, inputs), targets).backward()
    worst = [
        difference(mine.grad, other.grad)
        for mine, other in weights(model, reference, [rank])
    ]
    return losses is not None, max(worst)


def test_pipelines_on_rows_of_a_mesh_are_on_their_own(run_ranks: Run) -> None:
    for process, (has_losses, worst) in enumerate(
        run_ranks(alone_on_a_mesh, 4).results()
    ):
        assert has_losses == (process % 2 == 1)
        assert worst < 1e-12


def unused() -> float:
    """A weight that one replica does not use has the other's gradient there."""
    of = mesh("dp", "pp")
    plan = program("1f1b", ranks=PIPE, microbatches=2)
    replica, rank = place(of)

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList(
                nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # One replica is given negative numbers and the other positive ones, so each goes its
            # own way.
            return self.ways[int(x[0, 0] > 0)](x.abs())

    torch.manual_seed(0)
    model = [Chooses() for _ in range(PIPE)]
    reference = copy.deepcopy(model)
    batches = [
        torch.full((2 * ROWS, WIDTH), sign, dtype=torch.float64) for sign in (-1.0, 1.0)
    ]
    for each in batches:
        (nn.functional.mse_loss(reference[0](each), each) / 2).backward()
    on(of, plan, [model[0], nn.Identity() if rank == 0 else Passes()]).step(
        batches[replica], batches[replica]
    )
    pairs = weights(model, reference, [0])
    return max(difference(a.grad, b.grad) for a, b in pairs) if rank == 0 else 0.0


class Passes(nn.Module):
    """A stage without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_weight_that_one_replica_does_not_use(run_ranks: Run) -> None:
    assert max(run_ranks(unused, 4).results()) < 1e-12


def checkpoints(folder: Path) -> list[int]:
    """Each process has a file of its own; one replica has a newer one."""
    of = mesh("dp", "pp")
    plan = program("1f1b", ranks=PIPE, microbatches=4)
    ours = on(of, plan, modules(PIPE))
    ours.save(folder, 1)
    # Only one replica comes to the second checkpoint, so the newest that all have is the first.
    if of.get_local_rank("dp") == 1:
        ours.save(folder, 2)
    dist.barrier()
    return [ours.resume(folder), len(list(folder.iterdir()))]


def test_checkpoints_are_those_of_all_replicas(run_ranks: Run, tmp_path: Path) -> None:
    assert run_ranks(checkpoints, 4, tmp_path / "kept").results() == [[1, 6]] * 4
