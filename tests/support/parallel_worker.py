"""Runs scenarios of `test_parallel.py` on real processes, as `runtime_worker.py` does: pipelines on
a device mesh.
"""

import copy
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from schedlang import Kind, Source, compile
from schedlang.plan.plan import Plan
from schedlang.ranks import shards
from schedlang.runtime import Pipeline
from schedlang.runtime.gradients.sums import ReplicaSum
from schedlang.runtime.transport.precision import Rounding
from schedlang.schedule.forward_only import forward_only
from tests.support.runtime_worker import (
    DELAYS,
    LIMIT,
    ROWS,
    UPDATES,
    WIDTH,
    Does,
    alone,
    batch,
    difference,
    kill,
    loss_difference,
    main,
    modules,
    pipeline,
    program,
    replicated,
    report,
    sleep,
    version_plan,
)

PIPE = 2
BYTES = 12
#: With a split backward, two pipelines, two stages a rank, slices, recomputation, copies to the
#: host.
SCHEDULES = (
    "1f1b",
    "zb_v",
    "dualpipe",
    "interleaved_1f1b",
    "seq1f1b",
    "1f1b_recompute",
    "pipe_offload",
)


def mesh(*names: str) -> DeviceMesh:
    """Two ranks a pipeline, and two pipelines, along the dimensions of these names."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def place(of: DeviceMesh) -> tuple[int, int]:
    """Which replica this process belongs to, and which rank of the plan it is."""
    return of.get_local_rank("dp"), of.get_local_rank("pp")


def on(of: DeviceMesh, plan: Plan, model: list[nn.Module], **options: object) -> Pipeline:
    mine = {stage: model[stage] for stage in plan.stages_of(of.get_local_rank("pp"))}
    return Pipeline(plan, mine, nn.functional.mse_loss, mesh=of, **options)


def replicas() -> None:
    """For each schedule, the largest differences of losses and gradients from those of one process.

    That has the batches of both replicas. Two steps, whose gradients add up, with an evaluation
    between them.
    """
    larger = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "pp"))
    meshes = mesh("dp", "pp"), mesh("pp", "dp"), larger["dp", "pp"]
    found = {}
    for turn, name in enumerate(SCHEDULES):
        plan = program(name, ranks=PIPE, microbatches=2 * PIPE)
        found[name] = of_one_process(meshes[turn % 3], plan)
    report(f"found{dist.get_rank()}", found)


def of_one_process(of: DeviceMesh, plan: Plan) -> list[float]:
    (replica, rank) = place(of)
    slices = plan.layout.slices > 1
    model = replicated(plan)
    reference = modules(plan.layout.pieces, sliced=slices)
    ours = on(of, plan, model)
    worst = [0.0, 0.0]
    for step in range(2):
        expected = [
            add_gradients(plan, reference, *batch(plan, 10 * step + each)) for each in range(2)
        ]
        mine = batch(plan, 10 * step + replica)
        evaluated = ours.evaluate(*mine)
        for losses in (evaluated and torch.stack(evaluated), ours.step(*mine)):
            worst[0] = max(worst[0], loss_difference(plan, losses, expected[replica], rank))
    pairs = weights(model, reference * 2, plan.stages_of(rank))
    worst[1] = max(difference(mine.grad, other.grad) for mine, other in pairs)
    return worst


def weights(
    model: list[nn.Module], other: list[nn.Module], stages: list[int]
) -> list[tuple[nn.Parameter, ...]]:
    """Those of some stages, side by side."""
    sides = [
        [each for stage in stages for each in side[stage].parameters()] for side in (model, other)
    ]
    return list(zip(*sides, strict=True))


def add_gradients(
    plan: Plan,
    model: list[nn.Module],
    inputs: torch.Tensor,
    targets: torch.Tensor,
    replicas: int = 2,
) -> list:
    """Those of the mean over the microbatches of replicas; the losses of this one's."""
    losses = []
    for x, y in zip(inputs.chunk(plan.microbatches), targets.chunk(plan.microbatches), strict=True):
        loss = nn.functional.mse_loss(alone(model, x), y)
        (loss / plan.microbatches / replicas).backward()
        losses.append(loss.detach())
    return losses


def momentum(module: nn.Module, limit: float = math.inf) -> torch.optim.Optimizer:
    """Clips the gradient of its module, as the pages have it for plans with updates."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.01)

    def clip(*_: object) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), limit)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def updates() -> None:
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
        optimizers = {stage: momentum(model[stage], limit) for stage in plan.stages_of(rank)}
        ours = on(of, plan, model, optimizers=optimizers)
        reference = copy.deepcopy(model)
        for step in range(2):
            ours.step(*batch(plan, 10 * step + replica))
        late_updates(plan, reference, delays(PIPE), limit)
        pairs = weights(model, reference, plan.stages_of(rank))
        worst = max(difference(*pair) for pair in pairs)
        found[name] = [worst, all(is_same_everywhere(mine.detach(), of) for mine, _ in pairs)]
    report(f"found{dist.get_rank()}", found)


def is_same_everywhere(tensor: torch.Tensor, of: DeviceMesh) -> bool:
    """Whether both replicas have the same, to the bit."""
    both = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor, group=of.get_group("dp"))
    return torch.equal(*both)


def late_updates(plan: Plan, model: list[nn.Module], delays: list[int], limit: float) -> None:
    """What one process makes of both replicas' batches, with gradients that are so late."""
    versions = [[copy.deepcopy(each)] for each in model]
    optimizers = [momentum(each, limit) for each in model]
    per_update = plan.microbatches // plan.layout.updates
    for step in range(2):
        both = [
            [part.split(ROWS * per_update) for part in batch(plan, 10 * step + replica)]
            for replica in range(2)
        ]
        for update in range(plan.layout.updates):
            number = step * plan.layout.updates + update
            read = [
                each[max(number - delay, 0)] for each, delay in zip(versions, delays, strict=True)
            ]
            for inputs, targets in both:
                loss = nn.functional.mse_loss(nn.Sequential(*read)(inputs[update]), targets[update])
                (loss / 2).backward()
            for master, old, optimizer, kept in zip(model, read, optimizers, versions, strict=True):
                for weight, other in zip(master.parameters(), old.parameters(), strict=True):
                    weight.grad = other.grad
                    other.grad = None
                optimizer.step()
                kept.append(copy.deepcopy(master))


def clipped() -> None:
    """For each case the largest difference, from one process, of a norm and of a weight after three
    updates.

    Some pipelines have copies of stages, and some replicas; one of the norms needs no clipping.
    """
    of = mesh("dp", "pp")
    found = {}
    for name, ranks, norm_type in product(
        ("zb_v", "dualpipe"), (PIPE, 2 * PIPE), (2.0, 1.0, math.inf)
    ):
        plan = program(name, ranks=ranks, microbatches=2 * ranks)
        on_mesh = of if ranks == PIPE else None
        found[f"{name} {ranks} {norm_type}"] = clipped_updates(plan, on_mesh, norm_type)
    report(f"found{dist.get_rank()}", found)


def clipped_updates(plan: Plan, of: DeviceMesh | None, norm_type: float) -> list[float]:
    replica, rank = place(of) if of else (0, dist.get_rank())
    model = replicated(plan)
    reference = modules(plan.layout.pieces)
    ours = Pipeline(
        plan, {each: model[each] for each in plan.stages_of(rank)}, nn.functional.mse_loss, mesh=of
    )
    whole = nn.ModuleList(reference)
    worst = [0.0, 0.0]
    optimizers = [momentum(whole), *(momentum(model[stage]) for stage in plan.stages_of(rank))]
    for step, limit in enumerate((0.01, 100.0, 0.01)):
        for each in range(2 if of else 1):
            add_gradients(plan, reference, *batch(plan, 10 * step + each), replicas=2 if of else 1)
        ours.step(*batch(plan, 10 * step + replica))
        norm = ours.clip_grad_norm_(limit, norm_type)
        worst[0] = max(
            worst[0],
            difference(norm, nn.utils.clip_grad_norm_(whole.parameters(), limit, norm_type)),
        )
        assert (limit < norm) == (step != 1)
        for each in optimizers:
            each.step()
            each.zero_grad()
    worst[1] = max(
        difference(*pair) for pair in weights(model, reference * 2, plan.stages_of(rank))
    )
    return worst


def clipped_updates_of_plans() -> None:
    """For each schedule that updates: the largest differences, from one process, of a norm and of a
    weight.

    After 40 updates; on 4 ranks, and on 2 with replicas, and whether these are the same.
    """
    of = mesh("dp", "pp")
    found = {}
    updates = Source("updates.sched", UPDATES)
    for name, ranks in product(
        ("pipedream_2bw", "pipedream", "pipedream_vertical", "gpipe_groups", "updates"), (2, 4)
    ):
        plan = (
            compile(updates, {"ranks": ranks}) if name == "updates" else version_plan(name, ranks)
        )
        delays = DELAYS[name](ranks) if name in DELAYS else [0] * len(plan.placement)
        plan = plan.for_updates(20) if plan.kernels else plan
        found[f"{name} {ranks}"] = clipped_late(plan, delays, of if ranks == PIPE else None)
    report(f"found{dist.get_rank()}", found)


def clipped_late(plan: Plan, delays: list[int], of: DeviceMesh | None) -> list[float]:
    (replica, rank) = place(of) if of else (0, dist.get_rank())
    replicas = 2 if of else 1
    begin = [each.double() for each in modules(len(plan.placement))]
    expected, _ = late_norms(plan, begin, delays, replicas, math.inf)
    limit = sorted(expected)[20]
    expected, reference = late_norms(plan, begin, delays, replicas, limit)
    assert min(expected) < limit < max(expected)
    model = copy.deepcopy(begin)
    mine = {stage: model[stage] for stage in plan.stages_of(rank)}
    optimizers = {stage: momentum(model[stage]) for stage in mine}
    ours = Pipeline(
        plan, mine, nn.functional.mse_loss, mesh=of, optimizers=optimizers, max_norm=limit
    )
    norms = list[float]()
    ours.record = True
    for step in range(40 // plan.layout.updates):
        ours.step(*batch(plan, 10 * step + replica))
        norms += map(float, ours.norms)
        assert sorted(map(str, ours.bars)) == sorted(plan.ranks[rank].compute().text().split())
    worst = max(abs(a - b) / b for a, b in zip(norms, expected, strict=True))
    pairs = weights(model, reference, plan.stages_of(rank))
    same = all(is_same_everywhere(each.detach(), of) for each, _ in pairs) if of else True
    return [worst, max(difference(*pair) for pair in pairs), same]


def late_norms(
    plan: Plan, begin: list[nn.Module], delays: list[int], replicas: int, limit: float
) -> tuple[list[float], list[nn.Module]]:
    """The norms of 40 updates in one process whose gradients are so late, and the weights that come
    of it.
    """
    model = copy.deepcopy(begin)
    per_update = plan.microbatches // plan.layout.updates
    norms = []
    versions = [[copy.deepcopy(each)] for each in model]
    optimizer = momentum(nn.ModuleList(model))
    for step in range(40 // plan.layout.updates):
        all = [
            [part.split(ROWS * per_update) for part in batch(plan, 10 * step + each)]
            for each in range(replicas)
        ]
        for update in range(plan.layout.updates):
            read = [
                each[max(len(norms) - delay, 0)]
                for each, delay in zip(versions, delays, strict=True)
            ]
            for inputs, targets in all:
                loss = nn.functional.mse_loss(nn.Sequential(*read)(inputs[update]), targets[update])
                (loss / replicas).backward()
            for master, old in zip(model, read, strict=True):
                for weight, other in zip(master.parameters(), old.parameters(), strict=True):
                    weight.grad = other.grad
                    other.grad = None
            norms.append(float(nn.utils.clip_grad_norm_(nn.ModuleList(model).parameters(), limit)))
            optimizer.step()
            for master, kept in zip(model, versions, strict=True):
                kept.append(copy.deepcopy(master))
    return norms, model


def sharded(shard: Callable[..., object] = fully_shard) -> None:
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
            nn.functional.mse_loss(reference(batch(plan, each)[0]), batch(plan, each)[1]) / 2
        ).backward()
    ours.step(*batch(plan, replica))
    norms = ours.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    pairs = zip(model[rank].parameters(), reference[rank].parameters(), strict=True)
    worst = max(difference(mine.grad.full_tensor(), other.grad) for mine, other in pairs)
    report(f"found{dist.get_rank()}", [difference(*norms), worst])


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
    return any(each.is_unsharded or each._all_gather_result is not None for each in groups)


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
#: With stages that take turns, some of three a rank; a split backward; two pipelines;
#: recomputation; updates.
SHARDED = {
    "interleaved_1f1b": program("interleaved_1f1b", ranks=PIPE, microbatches=4, chunks=3),
    "zb_v": program("zb_v", ranks=PIPE, microbatches=4),
    "dualpipe": program("dualpipe", ranks=PIPE, microbatches=4),
    "1f1b_recompute": program("1f1b_recompute", ranks=PIPE, microbatches=4),
    "updates": compile(Source("updates.sched", UPDATES)),
    "flushes": compile(Source("flushes.sched", FLUSHES)),
}
#: FSDP gathers a stage in two parts: its first layer, and the others.
PARTS = 2


def deep(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    layers = partial(nn.Linear, WIDTH, WIDTH, dtype=torch.float64)
    return [
        nn.Sequential(layers(), nn.Tanh(), layers(), nn.LayerNorm(WIDTH, dtype=torch.float64))
        for _ in range(stages)
    ]


def gathered() -> None:
    """For each schedule and number of places: the largest difference from one process, of gradients
    or of weights.

    After two steps with an evaluation between them. Then how often weights were gathered, gradients
    reduced, and the most stages at once; and the same by the policy.
    """
    of = mesh("dp", "pp")
    found = {}
    for (name, plan), places in product(SHARDED.items(), (1, 2, None)):
        found[f"{name} {places}"] = in_places(of, plan, places)
    report(f"found{dist.get_rank()}", found)


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
        stage: torch.optim.SGD(model[stage].parameters(), 0.1) for stage in mine if updated
    }
    ours = on(of["pp"], plan, model, max_gathered=places, optimizers=optimizers)
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
        shards.shards(each.ranks[rank], mine, places or len(mine))
        for each in (plan, forward_only(plan))
    )
    gathers = 2 * steps.count(shards.Does.UNSHARD) + forwards.count(shards.Does.UNSHARD)
    expected = [PARTS * gathers, 2 * PARTS * steps.count(shards.Does.REDUCE_GRAD), steps.peak()]
    return [
        [worst],
        [seen.counts["_allgather_base_"], seen.counts["_reduce_scatter_base_"], seen.peak],
        expected,
    ]


def sharded_versions() -> None:
    """Stages that read older versions of their weights, which FSDP does not keep."""
    of = mesh("dp", "pp")
    plan = version_plan("pipedream_2bw", PIPE)
    rank = of.get_local_rank("pp")
    model = deep(PIPE)
    fully_shard(model[rank], mesh=of["dp"])
    on(of["pp"], plan, model, optimizers={rank: momentum(model[rank])})


def no_place() -> None:
    of = mesh("dp", "pp")
    on(of["pp"], program("1f1b", ranks=PIPE), modules(PIPE), max_gathered=0)


class Input(nn.Module):
    """Bytes to vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.mix(self.byte(x)))


class Output(nn.Module):
    """Vectors to a score for each byte, by its vector of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scores = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(torch.tanh(self.mix(x)))


def embedded(stages: int, is_same: bool) -> list[nn.Module]:
    """Stages whose first and last one have the same weight, in one parameter or in two."""
    torch.manual_seed(0)
    model = [Input(), *(nn.Linear(WIDTH, WIDTH) for _ in range(stages - 2)), Output()]
    if is_same:
        model[-1].scores.weight = model[0].byte.weight
    else:
        model[-1].scores.weight.data.copy_(model[0].byte.weight.data)
    return [each.double() for each in model]


def text(plan: Plan, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(BYTES, (2, ROWS * plan.microbatches), generator=generator))


def ties(stages: int) -> list[dict[int, str]]:
    return [{0: "byte.weight", stages - 1: "scores.weight"}]


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


def tied() -> None:
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
    report(f"found{dist.get_rank()}", found)


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
        plan, {each: model[each] for each in mine}, cross_entropy, mesh=of, tied=ties(pieces)
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
        norms = ours.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
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


def losses_of(
    plan: Plan, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, replicas: int
) -> list:
    """Of each microbatch, whose gradients of the mean over replicas are added."""
    losses = []
    for x, y in zip(inputs.chunk(plan.microbatches), targets.chunk(plan.microbatches), strict=True):
        losses.append(cross_entropy(model(x), y))
        (losses[-1] / plan.microbatches / replicas).backward()
    return [each.detach() for each in losses]


class Rounds(torch.autograd.Function):
    """What a message does to an activation, and one to its gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        context.rounding = rounding
        return rounding.unpack(rounding.pack(x), x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return context.rounding.unpack(context.rounding.pack(gradient), gradient), None


class Counts:
    """The bytes of tensors of floating point numbers that a rank sends."""

    def __init__(self, ours: Pipeline) -> None:
        self.bytes = self.tensors = 0
        self.wire = ours._exchange._wire
        self.send = self.wire._send
        self.wire._send = self.count

    def count(self, tensors: list[torch.Tensor], *where: int) -> dist.Work:
        self.bytes += sum(each.nbytes for each in tensors if each.is_floating_point())
        self.tensors += sum(each.is_floating_point() for each in tensors)
        return self.send(tensors, *where)


def rounded() -> None:
    """For each schedule, type and scale of the loss: differences of gradients, and bytes sent in a
    step.

    The differences are from one process that rounds as the messages do, and from one that does not.
    """
    found = {}
    for name, scale in product(("1f1b", "zb_v", "dualpipe"), (1.0, 1e-9)):
        plan = program(name, ranks=4, microbatches=8)
        for type in (None, torch.bfloat16, torch.float16):
            found[f"{name} {scale:g} {type}"] = rounding_errors(plan, type, scale)
    report(f"found{dist.get_rank()}", found)


def rounding_errors(plan: Plan, type: torch.dtype | None, scale: float) -> list[float]:
    model = replicated(plan, torch.float32)
    pieces = plan.layout.pieces
    ours = pipeline(plan, model, transfer_dtype=type, loss_scale=scale)
    gradients = []
    for rounding in (type, None):
        reference = modules(pieces, torch.float32)
        parts = [data.chunk(plan.microbatches) for data in batch(plan, 0, torch.float32)]
        for start, x, y in zip(starts_of(plan), *parts, strict=True):
            (
                nn.functional.mse_loss(rounding_as(plan, start, reference, x, rounding), y) * scale
            ).backward()
        gradients.append(reference)
    ours.step(*batch(plan, 0, torch.float32))
    for weight in (weight for stage in model for weight in stage.parameters()):
        weight.grad = None
    counts = Counts(ours)
    ours.step(*batch(plan, 0, torch.float32))
    worst = [
        max(
            difference(a.grad, b.grad)
            for a, b in weights(model, each * 2, plan.stages_of(dist.get_rank()))
        )
        for each in gradients
    ]
    return [*worst, counts.bytes, counts.tensors]


def rounding_as(
    plan: Plan, start: int, model: list[nn.Module], x: torch.Tensor, type: torch.dtype | None
) -> torch.Tensor:
    """The output for a microbatch of a pipeline, of which what goes between ranks is rounded, if to
    a type.
    """
    for piece, stage in enumerate(model):
        x = alone([stage], x)
        if type and piece + 1 < len(model) and plan.peer(Kind.SEND_F, start + piece) is not None:
            x = Rounds.apply(x, Rounding(type))
    return x


def starts_of(plan: Plan) -> list[int]:
    """For each microbatch the first stage that it comes to."""
    return [each.start for each in plan.layout.pipelines for _ in range(each.microbatches)]


#: Rows of a microbatch and its length, by step: shapes that were seen come again, after others.
SHAPES = [(3, 4), (1, 6), (3, 4), (5, 2), (1, 6)]


def reshapes() -> None:
    """For each schedule and type of messages, the largest difference from one process in steps of
    changing shapes.
    """
    cases = [(name, None) for name in SCHEDULES if name != "pipe_offload"]
    found = {}
    for name, type in (*cases, ("1f1b", torch.bfloat16), ("zb_v", torch.float16)):
        plan = program(name, ranks=4, microbatches=8)
        found[f"{name} {type}"] = reshaping_error(
            plan, type, torch.float32 if type else torch.float64
        )
    report(f"found{dist.get_rank()}", found)


class Halves(nn.Module):
    """A stage whose output is half as long as its input, where there are no slices."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x[:, ::2] + x[:, 1::2])


def reshaping_error(plan: Plan, type: torch.dtype | None, dtype: torch.dtype) -> float:
    """Of losses, gradients that add up, and outputs of evaluations, which have the shape of the
    step before.
    """
    rank = dist.get_rank()
    pieces = plan.layout.pieces
    slices = plan.layout.slices
    model = replicated(plan, dtype)
    reference = modules(pieces, dtype, slices > 1)
    for stages, halves in (
        ((model, range(1, len(model), pieces)), (reference, [1])) if slices == 1 else ()
    ):
        for each in halves:
            stages[each] = Halves(stages[each])
    ours = pipeline(plan, model, transfer_dtype=type)
    worst = [0.0]
    generator = torch.Generator().manual_seed(0)
    other = torch.zeros(plan.microbatches, 2, WIDTH, dtype=dtype)
    for rows, length in SHAPES:
        shape = plan.microbatches * rows, length, WIDTH
        inputs = torch.randn(shape, generator=generator, dtype=dtype)
        shape = shape[0], length if slices > 1 else length // 2, WIDTH
        targets = torch.randn(shape, generator=generator, dtype=dtype)
        outputs = evaluated(plan, reference, other, type)
        worst.append(loss_difference(plan, joined(ours.evaluate(other)), outputs, rank))
        losses = []
        for start, x, y in zip(
            starts_of(plan),
            *(each.chunk(plan.microbatches) for each in (inputs, targets)),
            strict=True,
        ):
            losses.append(nn.functional.mse_loss(rounding_as(plan, start, reference, x, type), y))
            (losses[-1] / plan.microbatches).backward()
        worst.append(
            loss_difference(
                plan, ours.step(inputs, targets), [each.detach() for each in losses], rank
            )
        )
        other = inputs
    pairs = weights(model, reference * 2, plan.stages_of(rank))
    return max(*worst, *(difference(a.grad, b.grad) for a, b in pairs))


def evaluated(
    plan: Plan, model: list[nn.Module], inputs: torch.Tensor, type: torch.dtype | None
) -> list[torch.Tensor]:
    with torch.no_grad():
        parts = zip(starts_of(plan), inputs.chunk(plan.microbatches), strict=True)
        return [rounding_as(plan, start, model, x, type) for start, x in parts]


def joined(outputs: list[torch.Tensor] | None) -> torch.Tensor | None:
    return None if outputs is None else torch.stack(outputs)


def other_type() -> None:
    types = [torch.float16, None, None, None]
    pipeline(program("1f1b", ranks=4), modules(4), transfer_dtype=types[dist.get_rank()])


def eight_bits() -> None:
    pipeline(program("1f1b", ranks=4), modules(4), transfer_dtype=torch.float8_e5m2)


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
        {stage: momentum(model[stage]) for stage in plan.stages_of(rank)} if has_updates else None
    )
    given = given or {"tied": ties(len(plan.placement))}
    if name == "on_one_side" and rank == 1:
        given = {}
    on(of, plan, model, optimizers=optimizers, **given)


def alone_on_a_mesh() -> None:
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
    worst = [difference(mine.grad, other.grad) for mine, other in weights(model, reference, [rank])]
    report(f"found{dist.get_rank()}", [losses is not None, max(worst)])


def overlaps() -> None:
    """Where in its actions each stage of a rank has its last backward, and begins its sum; and how
    many there are.
    """
    of = mesh("dp", "pp")
    plan = program("zb_v", ranks=PIPE, microbatches=4)
    rank = of.get_local_rank("pp")
    calls = on(of, plan, modules(len(plan.placement)))._training
    actions = plan.ranks[rank]
    last = [
        max(index for index, _, op in calls if op and op[0] in (Kind.B, Kind.W) and op[1] == stage)
        for stage in plan.stages_of(rank)
    ]
    begins = [
        index for index, call, _ in calls if getattr(call, "__func__", None) is ReplicaSum.begin
    ]
    report(f"found{dist.get_rank()}", [sorted(last), begins, len(actions)])


def unused() -> None:
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
            return self.ways[int(x[0, 0] > 0)](x.abs())

    torch.manual_seed(0)
    model = [Chooses() for _ in range(PIPE)]
    reference = copy.deepcopy(model)
    batches = [torch.full((2 * ROWS, WIDTH), sign, dtype=torch.float64) for sign in (-1.0, 1.0)]
    for each in batches:
        (nn.functional.mse_loss(reference[0](each), each) / 2).backward()
    on(of, plan, [model[0], nn.Identity() if rank == 0 else Passes()]).step(
        batches[replica], batches[replica]
    )
    pairs = weights(model, reference, [0])
    report(
        f"found{dist.get_rank()}",
        max(difference(a.grad, b.grad) for a, b in pairs) if rank == 0 else 0.0,
    )


class Passes(nn.Module):
    """A stage without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def checkpoints() -> None:
    """Each process has a file of its own; one replica has a newer one."""
    of = mesh("dp", "pp")
    plan = program("1f1b", ranks=PIPE, microbatches=4)
    ours = on(of, plan, modules(PIPE))
    kept = os.path.join(os.environ["FOLDER"], "kept")
    ours.save(kept, 1)
    if of.get_local_rank("dp") == 1:
        ours.save(kept, 2)
    dist.barrier()
    report(f"found{dist.get_rank()}", [ours.resume(kept), len(os.listdir(kept))])


# What must fail well.


def fails(what: object, process: int) -> None:
    """Something happens at the second forward of a process."""
    of = mesh("dp", "pp")
    plan = program("1f1b", ranks=PIPE, microbatches=4)
    replica, rank = place(of)
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


def of_four(what: object = None) -> None:
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
    given = torch.tensor([1.0, 10.0]) * replica
    assert ours.mean_over_replicas(given).tolist() == [1.5, 15.0]
    assert given.tolist() == [replica, 10 * replica]
    report(f"found{replica}", max(difference(*pair) for pair in gradients(model, reference)))


def gradients(model: list[nn.Module], other: list[nn.Module]) -> list[tuple[torch.Tensor, ...]]:
    return [(mine.grad, theirs.grad) for mine, theirs in weights(model, other, [0])]


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


def clips_updates() -> None:
    plan = version_plan("pipedream_2bw", PIPE)
    model = [each.double() for each in modules(PIPE)]
    of = mesh("dp", "pp")
    rank = of.get_local_rank("pp")
    on(of, plan, model, optimizers={rank: momentum(model[rank])}).clip_grad_norm_(1.0)


def clips(
    name: str, max_norms: tuple[float, ...] = (1.0,) * 4, shard: bool = False, what: object = None
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
    optimizers = {stage: momentum(model[stage]) for stage in plan.stages_of(rank) if updates}
    if what:
        model = [Does(each, 5 if dist.get_rank() == 3 else math.inf, what) for each in model]
    options = {"max_norm": max_norms[dist.get_rank()], "timeout": 2 if what is sleep else 60}
    ours = on(of["pp"] if shard else of, plan, model, optimizers=optimizers, **options)
    ours.step(*batch(plan, dist.get_rank() // PIPE))


def differ() -> None:
    """One process has other weights."""
    model = modules(PIPE)
    if dist.get_rank() == 3:
        model[1][0].bias.data[0] += 1
    on(mesh("dp", "pp"), program("1f1b", ranks=PIPE), model)


def on_a_mesh(*names: str, ranks: int = PIPE) -> None:
    of = mesh(*names)
    plan = program("1f1b", ranks=ranks)
    Pipeline(plan, dict(enumerate(modules(1))), nn.functional.mse_loss, mesh=of)


def three_dimensions() -> None:
    of = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "pp"))
    Pipeline(program("1f1b", ranks=PIPE), {}, mesh=of)


SCENARIOS = (
    {
        each.__name__: each
        for each in (
            replicas,
            updates,
            clipped,
            clipped_updates_of_plans,
            sharded,
            gathered,
            sharded_versions,
            no_place,
            tied,
            overlaps,
            rounded,
            reshapes,
            other_type,
            eight_bits,
            alone_on_a_mesh,
            unused,
            checkpoints,
            idles,
            differ,
            clips_updates,
            three_dimensions,
        )
    }
    | {
        "does_not_clip": partial(does_not_come, lambda ours: ours.clip_grad_norm_(1.0)),
        "does_not_average": partial(
            does_not_come, lambda ours: ours.mean_over_replicas(torch.ones(1))
        ),
        "undeclared": partial(ties_wrongly, "undeclared", "zb_v", tied=[]),
        "tied_updates": partial(ties_wrongly, "tied_updates", "pipedream_2bw"),
        "no_such_weight": partial(ties_wrongly, "", tied=[{0: "byte.bias", 1: "scores.weight"}]),
        "no_such_stage": partial(ties_wrongly, "", tied=[{0: "byte.weight", 2: "scores.weight"}]),
    }
    | {name: partial(ties_wrongly, name) for name in ("other_start", "on_one_side")}
    | {
        "clips_killed": partial(clips, "pipedream_2bw", what=kill),
        "clips_stalls": partial(clips, "pipedream_2bw", what=sleep),
        "clips_groups": partial(clips, "wpipe"),
        "clips_nothing": partial(clips, "gpipe"),
        "clips_to_zero": partial(clips, "pipedream_2bw", (0.0,) * 4),
        "clips_alone": partial(clips, "pipedream_2bw", (1.0, 1.0, 2.0, 1.0)),
        "clips_shards": partial(clips, "gpipe", shard=True),
        "of_four": of_four,
        "one_of_four_killed": partial(of_four, kill),
        "one_of_four_stalls": partial(of_four, sleep),
        "killed": partial(fails, kill, 3),
        "stalls": partial(fails, sleep, 3),
        "throws": partial(fails, throw, 2),
        "not_sharded": partial(sharded, replicate),
        "no_pp": partial(on_a_mesh, "dp", "tp"),
        "too_few": partial(on_a_mesh, "dp", "pp", ranks=4),
    }
)

if __name__ == "__main__":
    main(SCENARIOS.__getitem__)
