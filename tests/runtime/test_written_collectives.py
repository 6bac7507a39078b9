"""Gathers and sums that a plan says itself, on four processes: made where it says, and as many; and
weights after training are those of one process.
"""

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from schedlang import Kind, Source, compile
from schedlang.plan.plan import Plan
from tests.runtime.test_sharded import PARTS, Collectives, deep
from tests.support.mesh import PIPE, mesh, on, place
from tests.support.models import batch, difference, program
from tests.support.ranks import Run
from tests.support.sizes import STEPS

pytestmark = pytest.mark.processes

#: Gradients are summed twice in a step, and an update is in the plan.
TWICE = """schedule twice {
    param ranks = 2
    param microbatches = 4
    rank r {
        unshard  repeat 2 { F(next) }  repeat 2 { B(next) }  reduce  reshard
        unshard  repeat 2 { F(next) }  repeat 2 { B(next) }  reduce  reshard
        U
    }
}
"""
#: Only sums are written: the runtime gathers.
SUMS = """schedule sums {
    param ranks = 2
    param microbatches = 4
    stage s in 0 .. 2 * ranks on s % ranks
    rank r {
        for c in 0 .. 2 { repeat microbatches { F(stage(c), next) } }
        for c in 0 .. 2 by -1 {
            repeat microbatches { I(stage(c), next) }
            repeat microbatches { W(stage(c), next) }
            reduce(stage(c))
        }
    }
}
"""


def plans() -> dict[str, Plan]:
    return {
        "looped_bfs_sharded": program("looped_bfs_sharded", ranks=PIPE, microbatches=4),
        "twice": compile(Source("twice.sched", TWICE)),
        "sums": compile(Source("sums.sched", SUMS)),
    }


def trained(
    plans: dict[str, Plan], is_sharded: bool, steps: int
) -> dict[str, tuple[float, list[float]]]:
    """For each plan the largest difference from one process, of weights after training; and the
    gathers and reductions of the last step, with those of the plan.
    """
    return {name: train(plan, is_sharded, steps) for name, plan in plans.items()}


def train(plan: Plan, is_sharded: bool, steps: int) -> tuple[float, list[float]]:
    of = mesh("dp", "pp")
    replica, rank = place(of)
    model = deep(plan.layout.pieces)
    reference = nn.Sequential(*deep(plan.layout.pieces))
    mine = plan.stages_of(rank)
    for stage in mine if is_sharded else ():
        fully_shard(model[stage][0], mesh=of["dp"])
        fully_shard(model[stage], mesh=of["dp"])
    updates = Kind.U in plan.ranks[rank].kind
    optimizers = {
        stage: torch.optim.SGD(model[stage].parameters(), 0.1, momentum=0.9)
        for stage in mine
    }
    ours = on(
        of["pp"] if is_sharded else of,
        plan,
        model,
        optimizers=optimizers if updates else {},
    )
    alone = torch.optim.SGD(reference.parameters(), 0.1, momentum=0.9)
    with Collectives([model[stage] for stage in mine] if is_sharded else []) as seen:
        for step in range(steps):
            seen.counts.clear()
            ours.step(*batch(plan, 2 * step + replica))
            for optimizer in () if updates else optimizers.values():
                optimizer.step()
                optimizer.zero_grad()
    for step in range(steps):
        for each in range(2):
            inputs, targets = batch(plan, 2 * step + each)
            (nn.functional.mse_loss(reference(inputs), targets) / 2).backward()
        alone.step()
        alone.zero_grad()
    worst = max(
        difference(own.full_tensor() if is_sharded else own, other)
        for stage in mine
        for own, other in zip(
            model[stage].parameters(), reference[stage].parameters(), strict=True
        )
    )
    kinds = list(plan.ranks[rank].kind)
    gathers = kinds.count(Kind.UNSHARD) or len(mine)
    return worst, [
        seen.counts["_allgather_base_"] - PARTS * gathers,
        seen.counts["_reduce_scatter_base_"] - PARTS * kinds.count(Kind.REDUCE_GRAD),
    ]


@pytest.mark.parametrize("steps", STEPS)
def test_weights_are_gathered_and_gradients_summed_where_the_plan_says(
    run_ranks: Run, steps: int
) -> None:
    for found in run_ranks(trained, 4, plans(), True, steps).results():
        assert len(found) == 3
        for name, (worst, counts) in found.items():
            assert worst < 1e-12, name
            assert counts == [0, 0], name


@pytest.mark.parametrize("steps", STEPS)
def test_replicas_that_are_not_sharded_are_summed_where_the_plan_says(
    run_ranks: Run, steps: int
) -> None:
    for found in run_ranks(trained, 4, plans(), False, steps).results():
        for name, (worst, _) in found.items():
            assert worst < 1e-12, name
