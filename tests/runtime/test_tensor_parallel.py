"""A pipeline along one dimension of a mesh, and layers cut over the other by torch's tensor
parallelism.
"""

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from schedlang.runtime import Pipeline
from tests.support.models import WIDTH, batch, difference, program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

PIPE = 2
#: One backward, halves of backwards with two stages a rank, two pipelines, and forwards that are
#: run again.
SCHEDULES = ("1f1b", "zb_v", "dualpipe", "1f1b_recompute")
#: Enough that momentum has come of several, and shapes are long known.
UPDATES = 8


def layers(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Tanh(),
            nn.Linear(2 * WIDTH, WIDTH),
            # All processes have its weights whole.
            nn.LayerNorm(WIDTH),
        ).double()
        for _ in range(stages)
    ]


def whole(weight: Tensor) -> Tensor:
    """A weight in one piece, whether it is cut or not."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def gradients() -> dict[str, list[float]]:
    """For each schedule, after some updates with a clipped gradient, the largest differences from one
    process.

    Of losses, norms, weights.
    """
    mesh = init_device_mesh("cpu", (2, PIPE), mesh_dim_names=("tp", "pp"))
    return {name: differences(name, mesh) for name in SCHEDULES}


def differences(name: str, mesh: DeviceMesh) -> list[float]:
    plan = program(name, ranks=PIPE, microbatches=2 * PIPE)
    pieces = plan.layout.pieces
    rank = mesh.get_local_rank("pp")
    reference = nn.Sequential(*layers(pieces))
    parts = layers(pieces)
    for each in parts:
        parallelize_module(
            each, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
    stages = {
        stage: parts[stage - plan.layout.pipeline_of[stage].start]
        for stage in plan.stages_of(rank)
    }
    ours = Pipeline(plan, stages, nn.functional.mse_loss, mesh=mesh["pp"])
    mine = nn.ModuleList(stages.values())
    optimizers = [
        torch.optim.SGD(each.parameters(), 0.1, momentum=0.9)
        for each in (mine, reference)
    ]
    worst = [0.0, 0.0, 0.0]
    for step in range(UPDATES):
        inputs, targets = batch(plan, step)
        loss = nn.functional.mse_loss(reference(inputs), targets)
        loss.backward()
        losses = ours.step(inputs, targets)
        if losses is not None and name != "dualpipe":
            worst[0] = max(worst[0], difference(losses.mean(), loss))
        norms = (
            ours.clip_grad_norm_(0.1),
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1),
        )
        worst[1] = max(worst[1], difference(*norms))
        for each in optimizers:
            each.step()
            each.zero_grad()
    for stage, module in stages.items():
        other = reference[stage - plan.layout.pipeline_of[stage].start]
        pairs = zip(module.parameters(), other.parameters(), strict=True)
        worst[2] = max(
            worst[2],
            *(difference(whole(weight), full) for weight, full in pairs),
        )
    return worst


def test_losses_norms_and_weights_are_those_of_one_process(run_ranks: Run) -> None:
    for found in run_ranks(gradients, 4).results():
        assert len(found) == 4
        for name, worst in found.items():
            assert max(worst) < 1e-12, name


#: Plans that keep two versions of weights, one for each update in flight, and none.
LATE = ("pipedream_2bw", "pipedream", "pipemare")


def late(name: str) -> list[float]:
    """The largest differences of losses and weights, of cut stages from whole ones."""
    mesh = init_device_mesh("cpu", (2, PIPE), mesh_dim_names=("tp", "pp"))
    plan = program(name, ranks=PIPE, microbatches=1 if name != "pipedream_2bw" else 2)
    plan = plan.for_updates(UPDATES)
    rank = mesh.get_local_rank("pp")
    sides = []
    for cuts in (True, False):
        part = layers(PIPE)[rank]
        if cuts:
            ways = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(part, mesh["tp"], ways)
        optimizer = torch.optim.SGD(part.parameters(), 0.1, momentum=0.9)
        optimizers = {rank: optimizer}
        ours = Pipeline(
            plan,
            {rank: part},
            nn.functional.mse_loss,
            mesh=mesh["pp"],
            optimizers=optimizers,
        )
        losses = [ours.step(*batch(plan, seed)) for seed in range(2)]
        sides.append((losses, part))
    (losses, cut), (expected, uncut) = sides
    pairs = zip(cut.parameters(), uncut.parameters(), strict=True)
    return [
        max(
            (difference(*each) for each in zip(losses, expected, strict=True))
            if expected[0] is not None
            else [0.0]
        ),
        max(difference(whole(weight), full) for weight, full in pairs),
    ]


@pytest.mark.parametrize("name", LATE)
def test_late_weights_of_cut_stages_are_those_of_whole_ones(
    run_ranks: Run, name: str
) -> None:
    for found in run_ranks(late, 4, name).results():
        assert max(found) < 1e-12
