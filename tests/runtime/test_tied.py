"""Weights that two stages have in common, on real processes: the training of one process."""

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.mesh import BYTES, PIPE, embedded, mesh, momentum, place, ties
from tests.support.models import ROWS, difference, loss_difference, program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes


#: Schedules, on how many ranks, and whether first and last stage have one parameter: they are on
#: one rank in a V.
TIED = [
    ("1f1b", 4, False),
    ("zb_v", 4, True),
    ("zb_v", 4, False),
    ("dualpipe", 4, False),
    ("dualpipe", 4, True),
    ("zb_h1", 2, False),
    ("zb_v", 2, True),
    ("dualpipe", 2, False),
]


def tied() -> dict[str, list[float]]:
    """For each case the largest difference from one process: of losses, norms, and weights after
    three updates.
    """
    of = mesh("dp", "pp")
    found = {}
    for name, ranks, is_same in TIED:
        plan = program(name, ranks=ranks, microbatches=2 * ranks)
        found[f"{name} {ranks} {is_same}"] = tied_updates(
            plan, of if ranks == PIPE else None, is_same
        )
    return found


def tied_updates(plan: Plan, of: DeviceMesh | None, is_same: bool) -> list[float]:
    replica, rank = place(of) if of else (0, dist.get_rank())
    replicas = 2 if of else 1
    pieces = plan.layout.pieces
    mine = plan.stages_of(rank)
    reference = nn.Sequential(*embedded(pieces, is_same=True))
    worst = [0.0, 0.0, 0.0]
    model = dict(enumerate(embedded(pieces, is_same) + embedded(pieces, is_same=False)))
    if is_same and len(plan.layout.pipelines) > 1:
        # On a rank that has both, the first stage and the last one of the other pipeline.
        for stage in mine:
            other = next(each for each in mine if each != stage)
            if stage % pieces == 0:
                model[other].scores.weight = model[stage].byte.weight
    ours = Pipeline(
        plan,
        {each: model[each] for each in mine},
        cross_entropy,
        mesh=of,
        tied=ties(pieces),
    )
    whole = nn.ModuleList(model[each] for each in mine)
    optimizers = [momentum(reference), momentum(whole)]
    for step in range(3):
        expected = [
            losses_of(plan, reference, *text(plan, 10 * step + each), replicas)
            for each in range(replicas)
        ]
        losses = ours.step(*text(plan, 10 * step + replica))
        worst[0] = max(worst[0], loss_difference(plan, losses, expected[replica], rank))
        norms = (
            ours.clip_grad_norm_(0.1),
            nn.utils.clip_grad_norm_(reference.parameters(), 0.1),
        )
        worst[1] = max(worst[1], difference(*norms))
        for each in optimizers:
            each.step()
            each.zero_grad()
    named = [
        (model[stage].get_parameter(name), other)
        for stage in mine
        for name, other in reference[stage % pieces].named_parameters()
    ]
    worst[2] = max(difference(*pair) for pair in named)
    return worst


def text(plan: Plan, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randint(BYTES, (2, ROWS * plan.microbatches), generator=generator)
    )


def losses_of(
    plan: Plan,
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    replicas: int,
) -> list:
    """Of each microbatch, whose gradients of the mean over replicas are added."""
    losses = []
    for x, y in zip(
        inputs.chunk(plan.microbatches), targets.chunk(plan.microbatches), strict=True
    ):
        losses.append(cross_entropy(model(x), y))
        (losses[-1] / plan.microbatches / replicas).backward()
    return [each.detach() for each in losses]


def test_training_with_a_tied_weight_is_that_of_one_process(run_ranks: Run) -> None:
    """With copies on several ranks, on one, and in both pipelines; with replicas; clipped."""
    for found in run_ranks(tied, 4).results():
        assert len(found) == 8
        for name, (loss, norm, weight) in found.items():
            assert loss < 1e-12, name
            assert norm < 1e-12, name
            assert weight < 1e-12, name
