"""Stages that FSDP has sharded: what is gathered and reduced, and when."""

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang import Kind, Source, compile
from schedlang.plan.plan import Plan
from schedlang.ranks import gather_order
from schedlang.runtime.parts.shards import ShardedModule
from schedlang.runtime.parts.split_backward import SplitBackwards
from schedlang.runtime.stage import Stage, StagePlan
from schedlang.schedule.forward_only import forward_only
from tests.support.mesh import PIPE, add_gradients, mesh, on, place, weights
from tests.support.models import (
    ROWS,
    UPDATES,
    WIDTH,
    batch,
    difference,
    handing,
    modules,
    program,
)
from tests.support.ranks import Run
from tests.support.stages import weight_half

pytestmark = pytest.mark.processes


def middle(module: nn.Module) -> Stage:
    """A stage between others, whose backwards are split."""
    parts = [SplitBackwards(range(2))]
    return Stage(StagePlan(1), module, torch.device("cpu"), parts=parts)


def fully_sharded() -> float:
    """FSDP in a stage averages the gradients among its shards, whatever comes between its B and its
    W.
    """
    rank = dist.get_rank()
    module = nn.Sequential(*modules(2))
    reference = nn.Sequential(*modules(2))
    inputs, gradients = torch.randn(2, 2, 2, ROWS, WIDTH, dtype=torch.float64).unbind()
    mesh = dist.init_device_mesh("cpu", (2,))
    fully_shard(module[1], mesh=mesh)
    fully_shard(module, mesh=mesh)
    stage = middle(module)
    stage.inputs.update(enumerate(inputs[rank].clone()))
    stage.gradients.update(
        (microbatch, [each]) for microbatch, each in enumerate(gradients[rank])
    )
    sharded = ShardedModule(module)
    sharded.unshard()
    for op in (stage.forward, stage.backward):
        for microbatch in range(2):
            op(microbatch)
    for microbatch in range(2):
        sharded.wait()
        weight_half(stage, microbatch)
        sharded.end_backward()
    sharded.reduce()
    sharded.reshard()
    torch.autograd.backward(reference(inputs), gradients / 2)
    weights = zip(module.parameters(), reference.parameters(), strict=True)
    return max(
        difference(ours.grad.full_tensor(), whole.grad) for ours, whole in weights
    )


def test_shards_of_a_split_stage_get_the_mean_gradient(run_ranks: Run) -> None:
    assert max(run_ranks(fully_sharded, 2).results()) < 1e-12


def pipeline_of_sharded(shard: Callable[..., object]) -> list[float]:
    """FSDP over one dimension of the mesh, the pipeline over the other: a norm, and clipped
    gradients.
    """
    of = mesh("dp", "pp")
    plan = program("zb_h1", ranks=PIPE, microbatches=4)
    replica, rank = place(of)
    model = modules(PIPE)
    reference = nn.Sequential(*modules(PIPE))
    shard(model[rank], mesh=of["dp"])
    ours = on(of["pp"], plan, model)
    for each in range(2):
        (
            nn.functional.mse_loss(
                reference(batch(plan, each)[0]), batch(plan, each)[1]
            )
            / 2
        ).backward()
    ours.step(*batch(plan, replica))
    norms = (
        ours.clip_grad_norm_(0.01),
        nn.utils.clip_grad_norm_(reference.parameters(), 0.01),
    )
    pairs = zip(model[rank].parameters(), reference[rank].parameters(), strict=True)
    worst = max(
        difference(mine.grad.full_tensor(), other.grad) for mine, other in pairs
    )
    return [difference(*norms), worst]


@pytest.mark.parametrize("shard", [fully_shard, replicate])
def test_a_pipeline_of_sharded_stages(
    run_ranks: Run, shard: Callable[..., object]
) -> None:
    """And of stages that FSDP replicates."""
    for norm, gradient in run_ranks(pipeline_of_sharded, 4, shard).results():
        assert norm < 1e-12
        assert gradient < 1e-12


# Several updates in a step, with a flush before each.
FLUSHES = """schedule flushes {
    param ranks = 2
    param microbatches = 2
    stage s in 0 .. 2 * ranks on s % ranks
    rank r {
        steady {
            for c in 0 .. 2 { for m in 0 .. microbatches { F(c * ranks + r, m) } }
            for c in 0 .. 2 { for m in 0 .. microbatches { B((1 - c) * ranks + r, m) } }
            U
        }
    }
}
"""


#: FSDP gathers a stage in two parts: its first layer, and the others.
PARTS = 2


def deep(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    layers = partial(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)
    return [
        nn.Sequential(
            layers(), nn.Tanh(), layers(), nn.LayerNorm(WIDTH, dtype=torch.float64)
        )
        for _ in range(stages)
    ]


def sharded_plans() -> dict[str, Plan]:
    """With stages that take turns, some of three a rank; a split backward; two pipelines;
    recomputation; updates.
    """
    four = {"ranks": PIPE, "microbatches": 4}
    return {
        "interleaved_1f1b": program("interleaved_1f1b", **four, chunks=3),
        "zb_v": program("zb_v", **four),
        "dualpipe": program("dualpipe", **four),
        "1f1b_recompute": program("1f1b_recompute", **four),
        "updates": compile(Source("updates.sched", UPDATES)),
        "flushes": compile(Source("flushes.sched", FLUSHES)),
    }


def gathered(plans: dict[str, Plan]) -> dict[str, list[list[float]]]:
    """For each schedule and number of places: the largest difference from one process, of gradients
    or of weights.

    After two steps with an evaluation between them. Then how often weights were gathered, gradients
    reduced, and the most stages at once; and the same by the policy.
    """
    of = mesh("dp", "pp")
    found = {}
    for name, plan in plans.items():
        # Where a rank has three stages, two places are neither one nor all.
        has_three = len(plan.stages_of(0)) == 3
        for places in (1, 2, None) if has_three else (1, None):
            found[f"{name} {places}"] = in_places(of, plan, places)
    return found


def in_places(of: DeviceMesh, plan: Plan, places: int | None) -> list[list[float]]:
    (replica, rank) = place(of)
    layout = plan.layout
    model = [stage for _ in layout.pipelines for stage in deep(layout.pieces)]
    reference = nn.Sequential(*deep(layout.pieces))
    mine = plan.stages_of(rank)
    for stage in mine:
        fully_shard(model[stage][0], mesh=of["dp"])
        fully_shard(model[stage], mesh=of["dp"])
    updated = Kind.U in plan.ranks[rank].kind
    optimizers = {
        stage: torch.optim.SGD(model[stage].parameters(), 0.1)
        for stage in mine
        if updated
    }
    ours = on(of["pp"], plan, model, max_gathered=places, optimizers=optimizers)
    # Two steps and an evaluation, so that what the plan does once is seen twice.
    with Collectives([model[stage] for stage in mine]) as seen:
        ours.step(*batch(plan, replica))
        ours.evaluate(*batch(plan, replica))
        ours.step(*batch(plan, 10 + replica))
    for seed, update in product((0, 10), range(layout.updates)):
        for each in range(2):
            inputs, targets = (
                part.chunk(layout.updates)[update] for part in batch(plan, seed + each)
            )
            (nn.functional.mse_loss(reference(inputs), targets) / 2).backward()
        if updated:
            torch.optim.SGD(reference.parameters(), 0.1).step()
            reference.zero_grad()
    pairs = [
        [each if updated else each.grad for each in pair]
        for pair in weights(model, [*reference] * 2, mine)
    ]
    worst = max(difference(own.full_tensor(), other) for own, other in pairs)
    steps, forwards = (
        gather_order.shards(each.ranks[rank], mine, places or len(mine))
        for each in (plan, forward_only(plan))
    )
    gathers = 2 * steps.count(Kind.UNSHARD) + forwards.count(Kind.UNSHARD)
    expected = [
        PARTS * gathers,
        2 * PARTS * steps.count(Kind.REDUCE_GRAD),
        steps.peak(),
    ]
    return [
        [worst],
        [
            seen.counts["_allgather_base_"],
            seen.counts["_reduce_scatter_base_"],
            seen.peak,
        ],
        expected,
    ]


class Collectives(TorchDispatchMode):
    """Counts gathers and reductions of weights; and of some stages, how many have theirs at once at
    most.
    """

    def __init__(self, stages: list[nn.Module]) -> None:
        super().__init__()
        self.stages = stages
        self.counts = Counter[str]()
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        self.counts[function.__name__.split(".")[0]] += 1
        self.peak = max(self.peak, sum(map(has_weights, self.stages)))
        return function(*args, **(kwargs or {}))


def has_weights(stage: nn.Module) -> bool:
    """Whether the weights of a sharded stage are gathered, or on their way."""
    groups = [
        group
        for each in stage._get_fsdp_state()._state_ctx.all_states
        for group in each._fsdp_param_groups
    ]
    return any(
        each.is_unsharded or each._all_gather_result is not None for each in groups
    )


def test_weights_are_gathered_and_gradients_reduced_as_the_policy_says(
    run_ranks: Run,
) -> None:
    """With one place, two, and one for each stage; gradients and weights are those of one process."""
    for found in run_ranks(gathered, 4, sharded_plans()).results():
        assert len(found) == 13
        for name, ((worst,), seen, expected) in found.items():
            assert worst < 1e-12, name
            assert seen == expected, name
        one, two, all = (
            found[f"interleaved_1f1b {places}"][1] for places in (1, 2, None)
        )
        assert one[0] > two[0] > all[0]
        assert (one[2], two[2], all[2]) == (1, 2, 3)


def handed_on() -> float:
    """The weights of a stage are free when the next one on the same rank uses what it was handed."""
    of = mesh("dp", "pp")
    plan = program("zb_v", ranks=PIPE, microbatches=4)
    replica, rank = place(of)
    model = handing(plan.layout.pieces)
    reference = copy.deepcopy(model)
    for stage in plan.stages_of(rank):
        fully_shard(model[stage], mesh=of["dp"])
    ours = on(of["pp"], plan, model, max_gathered=1)
    ours.step(*batch(plan, replica))
    for each in range(2):
        add_gradients(plan, reference, *batch(plan, each))
    pairs = weights(model, reference, plan.stages_of(rank))
    return max(difference(own.grad.full_tensor(), other.grad) for own, other in pairs)


def test_a_sharded_stage_hands_on_its_weight(run_ranks: Run) -> None:
    assert max(run_ranks(handed_on, 4).results()) < 1e-12
