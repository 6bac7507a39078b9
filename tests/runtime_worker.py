"""Runs scenarios of `test_runtime.py` on real processes: imports torch once, then forks the ranks
of each scenario.

Reads one line of JSON per scenario, `[name, ranks, folder]`, and answers with `[seconds, exit
codes]`. What a rank prints is in `folder/<rank>.log`; what scenarios find out they write to
`folder/*.json`.
"""

import copy
import gc
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from skip_models import Skipping, in_order
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from schedlang import CompileError, Kind, Source, compile
from schedlang.plan.plan import Plan
from schedlang.ranks.lifetimes import Holds, Lifetime, lifetimes
from schedlang.ranks.weights import follow_weights
from schedlang.runtime import Pipeline
from schedlang.runtime.stage.shards import ShardedModule
from schedlang.runtime.stage.stage import Stage, StagePlan
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.layout import Layout

PROGRAMS = Path(__file__).parent.parent / "programs"
WIDTH = 8
ROWS = 3
LIMIT = 120

# Each rank holds two stages of a V, and takes microbatches in an order of its own making; stages 1
# and 2 are neighbours on one rank.
V = """schedule v {
    param ranks = 2
    param microbatches = 3
    stage s in 0 .. 2 * ranks on if s < ranks then s else 2 * ranks - 1 - s
    fn turned(m) = (m + 1) % microbatches
    fn back(m) = (2 * m + 2) % microbatches
    rank r {
        for m in 0 .. microbatches { F(r, turned(m)) }
        for m in 0 .. microbatches { F(2 * ranks - 1 - r, turned(m)) }
        for m in 0 .. microbatches { B(2 * ranks - 1 - r, microbatches - 1 - m) }
        for m in 0 .. microbatches { B(r, microbatches - 1 - m) }
    }
}
"""
# The second half of the stages of a V splits its backward, the first does not; both are updated.
UPDATES = """schedule updates {
    param ranks = 2
    param microbatches = 3
    stage s in 0 .. 2 * ranks on if s < ranks then s else 2 * ranks - 1 - s
    rank r {
        let late = 2 * ranks - 1 - r
        for m in 0 .. microbatches { F(r, m) }
        for m in 0 .. microbatches { F(late, m)  B(late, m) }
        for m in 0 .. microbatches { BW(r, m)  W(late, m) }
        U
    }
}
"""

# Slices whose forwards are run again, and whose backward is split.
SLICES = """schedule slices {
    param ranks = 2
    param microbatches = 3
    param slices = 3
    rank r {
        for m in 0 .. microbatches { for k in 0 .. slices { F(m, k) } }
        for m in 0 .. microbatches { for k in 0 .. slices { R(m, slices - 1 - k)  B(m, slices - 1 - k) } }
        repeat microbatches * slices { W }
    }
}
"""

# Proved for gloo alone: the first rank sends in an order, the second one receives in another.
CROSSED = """schedule crossed {
    param ranks = 2
    param microbatches = 2
    rank r {
        if r == 0 { F(0) F(1) send F(1) send F(0) recv B(0) B(0) recv B(1) B(1) }
        else { recv F(0) recv F(1) F(0) B(0) F(1) B(1) send B(1) send B(0) }
    }
}
"""


def program(name: str, **params: int) -> Plan:
    """A plan of a program in the gallery."""
    path = PROGRAMS / f"{name}.sched"
    return compile(Source(path.name, path.read_text()), params)


class Summed(nn.Module):
    """Where microbatches have slices: every position sees those before."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=dtype)

    def forward(
        self, x: torch.Tensor, past: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen = self.linear(x).cumsum(dim=1) + (0 if past is None else past)
        return torch.tanh(seen), seen[:, -1:]


def modules(
    stages: int,
    dtype: torch.dtype = torch.float64,
    sliced: bool = False,
    skips: tuple[tuple[int, int], ...] = (),
) -> list[nn.Module]:
    """All stages of a small model, the same on every rank."""
    torch.manual_seed(0)
    if sliced:
        return [Summed(dtype) for _ in range(stages)]
    found = [nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=dtype), nn.Tanh()) for _ in range(stages)]
    return (
        [Skipping(*each, later=[b for a, b in skips if a == n]) for n, each in enumerate(found)]
        if skips
        else found
    )


class Forgetful(Summed):
    """Returns nothing for the next slice."""

    def forward(self, x: torch.Tensor, past: torch.Tensor | None) -> torch.Tensor:
        return super().forward(x, past)[0]


def alone(model: list[nn.Module], x: torch.Tensor) -> torch.Tensor:
    """The output of all stages, of whole microbatches."""
    if isinstance(model[0], Skipping):
        return in_order(model, x)
    for each in model:
        x = each(x, None)[0] if isinstance(each, Summed) else each(x)
    return x


def batch(
    plan: Plan, seed: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = [ROWS * plan.microbatches, WIDTH]
    if plan.layout.slices > 1:
        shape.insert(1, 3 * plan.layout.slices)
    inputs = torch.randn(shape, generator=generator, dtype=dtype)
    return inputs, torch.randn(shape, generator=generator, dtype=dtype)


def pipeline(plan: Plan, model: list[nn.Module], **options: object) -> Pipeline:
    mine = plan.stages_of(dist.get_rank())
    return Pipeline(
        plan, {stage: model[stage] for stage in mine}, nn.functional.mse_loss, **options
    )


def report(name: str, value: object) -> None:
    folder = Path(os.environ["FOLDER"])
    (folder / f"{name}.json").write_text(json.dumps(value))


def difference(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((ours - expected).abs().max() / expected.abs().max()).detach())


# What must work.


@cache
def sweep_plans(ranks: int) -> dict[str, Plan]:
    """Every program that runs so far, at several sizes."""
    plans = {
        name: compile(Source(name, text), {"ranks": ranks})
        for name, text in (("v 3", V), ("slices 3", SLICES))
    }
    for path in sorted(PROGRAMS.glob("*.sched")):
        # 12 is more than the sends that may be under way.
        for microbatches in sorted(
            {1, ranks - 1, ranks, 2 * ranks + ranks % 2 if ranks > 2 else 12}
        ):
            # Not all programs are for all sizes.
            with suppress(CompileError):
                plan = program(path.stem, ranks=ranks, microbatches=microbatches)
                if Kind.U not in plan.ranks[0].kind:
                    plans[f"{path.stem} {microbatches}"] = plan
    return plans


def sweep() -> None:
    """Two accumulating steps of each plan, against one process."""
    found = {name: compare(plan) for name, plan in sweep_plans(dist.get_world_size()).items()}
    report(f"found{dist.get_rank()}", found)


def replicated(plan: Plan, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """All stages of a small model, the same on every rank, with replicas for all pipelines."""
    layout = plan.layout
    return [module for _ in layout.pipelines for module in one_model(layout, dtype)]


def one_model(layout: Layout, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    """The stages of a small model for a plan, without replicas."""
    return modules(layout.pieces, dtype, layout.slices > 1, layout.skips)


def compare(plan: Plan, dtype: torch.dtype = torch.float64, **options: float) -> list[float]:
    """The largest differences of losses and of gradients, of the stages on this rank.

    Two steps, whose gradients add up, with an evaluation between them, which leaves them alone.
    """
    model = replicated(plan, dtype)
    reference = one_model(plan.layout, dtype)
    scale = options.get("loss_scale", 1 / plan.microbatches)
    ours = pipeline(plan, model, **options)
    worst = [0.0, 0.0]
    for step in range(1 if plan.is_forward_only else 2):
        inputs, targets = batch(plan, step, dtype)
        expected = []
        for x, y in zip(
            inputs.chunk(plan.microbatches), targets.chunk(plan.microbatches), strict=True
        ):
            loss = nn.functional.mse_loss(alone(reference, x), y)
            (loss * scale).backward()
            expected.append(loss.detach())
        if plan.layout.slices > 1:
            # Put together again.
            for output, x in zip(
                ours.evaluate(inputs) or [], inputs.chunk(plan.microbatches), strict=False
            ):
                worst[0] = max(worst[0], difference(output, alone(reference, x)))
        evaluated = ours.evaluate(inputs, targets)
        found = [evaluated and torch.stack(evaluated)]
        if not plan.is_forward_only:
            found.append(ours.step(inputs, targets))
        for losses in found:
            worst[0] = max(worst[0], loss_difference(plan, losses, expected, dist.get_rank()))
    for stage in [] if plan.is_forward_only else plan.stages_of(dist.get_rank()):
        other_stage = reference[stage % len(reference)]
        for weight, other in zip(model[stage].parameters(), other_stage.parameters(), strict=True):
            assert weight.grad is not None
            assert other.grad is not None
            worst[1] = max(worst[1], difference(weight.grad, other.grad))
    return worst


def loss_difference(
    plan: Plan, losses: torch.Tensor | None, expected: list[torch.Tensor], rank: int
) -> float:
    """Of the losses on a rank, which are those of the pipelines that end here."""
    here = []
    begin = 0
    for each in plan.layout.pipelines:
        if plan.placement[each.stop - 1] == rank:
            here += expected[begin : begin + each.microbatches]
        begin += each.microbatches
    assert (losses is None) == (not here)
    return 0.0 if losses is None else difference(losses, torch.stack(here))


def scaled() -> None:
    """The sum of the losses, instead of the mean."""
    report(
        f"found{dist.get_rank()}", compare(program("1f1b", ranks=2, microbatches=3), loss_scale=1.0)
    )


def bfloat16() -> None:
    """The type of the activations is the modules' own."""
    plan = program("zb_h1", ranks=2, microbatches=3)
    report(f"found{dist.get_rank()}", compare(plan, torch.bfloat16))


def updates() -> None:
    """Optimizer steps in the plan; weights after two steps, and no gradients left."""
    plan = compile(Source("updates.sched", UPDATES))
    model = modules(len(plan.placement))
    reference = modules(len(plan.placement))
    optimizers = {
        each: torch.optim.SGD(model[each].parameters(), 0.1)
        for each in plan.stages_of(dist.get_rank())
    }
    ours = pipeline(plan, model, optimizers=optimizers)
    whole = torch.optim.SGD(nn.Sequential(*reference).parameters(), 0.1)
    for step in range(2):
        inputs, targets = batch(plan, step)
        ours.step(inputs, targets)
        nn.functional.mse_loss(nn.Sequential(*reference)(inputs), targets).backward()
        whole.step()
        whole.zero_grad()
    worst = 0.0
    for stage in plan.stages_of(dist.get_rank()):
        for weight, other in zip(
            model[stage].parameters(), reference[stage].parameters(), strict=True
        ):
            assert weight.grad is None
            worst = max(worst, difference(weight.detach(), other.detach()))
    report(f"found{dist.get_rank()}", [0.0, worst])


# Schedules that update: by name, the delay of each stage's weights for some ranks.
DELAYS = {
    "pipedream": lambda ranks: [ranks - 1 - stage for stage in range(ranks)],
    "pipedream_vertical": lambda ranks: [ranks - 1] * ranks,
    "pipedream_2bw": lambda ranks: [1] * ranks,
    "wpipe": lambda ranks: [1] * ranks + [0] * ranks,
    "gpipe_groups": lambda ranks: [0] * (2 * ranks),
}
OPTIMIZERS = {
    "sgd": lambda weights: torch.optim.SGD(weights, 0.1),
    "momentum": lambda weights: torch.optim.SGD(weights, 0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda weights: torch.optim.AdamW(weights, 0.01),
    "fused": lambda weights: torch.optim.AdamW(weights, 0.01, fused=True),
}


LATE = [
    *(("pipedream_2bw", optimizer) for optimizer in OPTIMIZERS),
    ("pipedream", "adamw"),
    ("pipedream_vertical", "momentum"),
    ("wpipe", "fused"),
    ("gpipe_groups", "momentum"),
]


def normed(stages: int) -> list[nn.Module]:
    """Stages with a layer of every kind whose backward reads its weights."""
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        for _ in range(stages)
    ]


def update_batches(plan: Plan, updates: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of some updates."""
    rows = ROWS * plan.microbatches // plan.layout.updates
    generators = (torch.Generator().manual_seed(update) for update in updates)
    return [tuple(torch.randn(2, rows, WIDTH, generator=each)) for each in generators]


def delayed(plan: Plan, delays: list[int], optimizer: str, updates: int) -> list[nn.Module]:
    """What one process makes of gradients that are so late: all versions of all stages are kept as
    modules.
    """
    masters = normed(len(delays))
    versions = [[copy.deepcopy(each)] for each in masters]
    optimizers = [OPTIMIZERS[optimizer](list(each.parameters())) for each in masters]
    per_update = plan.microbatches // plan.layout.updates
    for update, (inputs, targets) in enumerate(update_batches(plan, range(updates))):
        read = [each[max(update - delay, 0)] for each, delay in zip(versions, delays, strict=True)]
        for x, y in zip(inputs.chunk(per_update), targets.chunk(per_update), strict=True):
            (nn.functional.mse_loss(nn.Sequential(*read)(x), y) / per_update).backward()
        for master, old, each, kept in zip(masters, read, optimizers, versions, strict=True):
            for weight, other in zip(master.parameters(), old.parameters(), strict=True):
                weight.grad = other.grad
                other.grad = None
            each.step()
            kept.append(copy.deepcopy(master))
    return masters


def same(ours: list[nn.Module], other: list[nn.Module], stages: list[int]) -> bool:
    """Whether stages have the same weights, to the bit."""
    pairs = [
        zip(ours[stage].parameters(), other[stage].parameters(), strict=True) for stage in stages
    ]
    return all(torch.equal(*pair) for pairs_of in pairs for pair in pairs_of)


def versions() -> None:
    """Weights after two steps of some updates each, against one process with late gradients.

    For every schedule and optimizer: whether they are the same to the bit, without and with a
    checkpoint between the steps; and whether they differ from those of gradients that are one
    update later, and of gradients in time.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    found = {}
    for name, optimizer in LATE if ranks == 2 else LATE[len(OPTIMIZERS) - 1 :]:
        plan = version_plan(name, ranks)
        delays = DELAYS[name](ranks)
        mine = plan.stages_of(rank)
        updates = 2 * plan.layout.updates
        assert 1 + max(delays[stage] for stage in mine) == follow_weights(plan).held[rank]
        uncut = two_steps(plan, delays, optimizer)
        resumed = two_steps(plan, delays, optimizer, resume=True)
        right = delayed(plan, delays, optimizer, updates)
        later = delayed(plan, [each + 1 for each in delays], optimizer, updates)
        in_time = delayed(plan, [0 for _ in delays], optimizer, updates)
        found[f"{name} {optimizer}"] = [
            same(uncut, right, mine),
            same(resumed, right, mine),
            not same(uncut, later, mine),
            not any(delays) or not same(uncut, in_time, mine),
        ]
    report(f"found{rank}", found)


def version_plan(name: str, ranks: int) -> Plan:
    """A plan with enough updates to tell every delay from others."""
    plan = program(name, ranks=ranks, **({"microbatches": 2 * ranks} if name == "wpipe" else {}))
    return plan.for_updates(max(plan.layout.updates, ranks + 3)) if plan.kernels else plan


def two_steps(
    plan: Plan, delays: list[int], optimizer: str, resume: bool = False
) -> list[nn.Module]:
    """The stages after two steps; where it is to resume, the second is made by what a checkpoint
    brings to life.
    """
    mine = plan.stages_of(dist.get_rank())
    updates = plan.layout.updates
    others = set() if resume else squares()
    model = normed(len(plan.placement))
    optimizers = {each: OPTIMIZERS[optimizer](list(model[each].parameters())) for each in mine}
    ours = pipeline(plan, model, optimizers=optimizers)
    step(ours, plan, range(updates))
    if not resume:
        others |= {
            each[1].weight.data_ptr() for stage, each in enumerate(model) if stage not in mine
        }
        assert len(squares() - others) == sum(1 + delays[stage] for stage in mine)
    if resume:
        file = Path(os.environ["FOLDER"]) / f"checkpoint{dist.get_rank()}"
        states = {each: (model[each].state_dict(), optimizers[each].state_dict()) for each in mine}
        torch.save([ours.state_dict(), states], file)
        model = [
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in model
        ]
        optimizers = {each: OPTIMIZERS[optimizer](list(model[each].parameters())) for each in mine}
        ours = pipeline(plan, model, optimizers=optimizers)
        state, states = torch.load(file)
        for each in mine:
            model[each].load_state_dict(states[each][0])
            optimizers[each].load_state_dict(states[each][1])
        ours.load_state_dict(state)
    step(ours, plan, range(updates, 2 * updates))
    return model


def step(ours: Pipeline, plan: Plan, updates: range) -> None:
    ours.step(*(torch.cat(each) for each in zip(*update_batches(plan, updates), strict=True)))


def squares() -> set[int]:
    """Where the square matrices are that are trained: of weights and their versions."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    return {
        each.data_ptr() for each in tensors if each.requires_grad and each.shape == (WIDTH, WIDTH)
    }


def records() -> None:
    """The compute ops of one step with their times, and none of a step that is not recorded."""
    plan = program("zb_h1", ranks=2, microbatches=3)
    ours = pipeline(plan, modules(2))
    ours.step(*batch(plan, 0))
    assert ours.bars == []
    ours.record = True
    ours.step(*batch(plan, 1))
    report(f"bars{dist.get_rank()}", [[str(each), each.start, each.end] for each in ours.bars])


def middle(module: nn.Module) -> Stage:
    """A stage between others, whose backwards are split."""
    return Stage(StagePlan(1, split=range(2)), module, torch.device("cpu"))


def data_parallel() -> None:
    """DDP around a stage averages the gradients among its replicas in W, and not before."""
    rank = dist.get_rank()
    module = modules(1)[0]
    reference = modules(1)[0]
    inputs, gradients = torch.randn(2, 2, 2, ROWS, WIDTH, dtype=torch.float64).unbind()
    stage = middle(DistributedDataParallel(module))
    for microbatch in range(2):
        with nullcontext() if microbatch else stage.module.no_sync():
            stage.inputs[microbatch] = inputs[rank, microbatch].clone()
            stage.forward(microbatch)
        stage.gradients[microbatch] = [gradients[rank, microbatch]]
        before = [None if each.grad is None else each.grad.clone() for each in module.parameters()]
        stage.backward_input(microbatch)
        torch.testing.assert_close(
            [each.grad for each in module.parameters()], before, rtol=0, atol=0
        )
        stage.backward_weight(microbatch)
    torch.autograd.backward(reference(inputs), gradients / 2)
    report(
        f"found{rank}",
        max(
            map(
                lambda a, b: difference(a.grad, b.grad), module.parameters(), reference.parameters()
            )
        ),
    )


def sharded() -> None:
    """FSDP in a stage averages the gradients among its shards, whatever comes between its B and its
    W.
    """
    from torch.distributed.fsdp import fully_shard

    rank = dist.get_rank()
    module = nn.Sequential(*modules(2))
    reference = nn.Sequential(*modules(2))
    inputs, gradients = torch.randn(2, 2, 2, ROWS, WIDTH, dtype=torch.float64).unbind()
    mesh = dist.init_device_mesh("cpu", (2,))
    fully_shard(module[1], mesh=mesh)
    fully_shard(module, mesh=mesh)
    stage = middle(module)
    stage.inputs.update(enumerate(inputs[rank].clone()))
    stage.gradients.update((microbatch, [each]) for microbatch, each in enumerate(gradients[rank]))
    sharded = ShardedModule(module)
    sharded.unshard()
    for op in (stage.forward, stage.backward_input):
        for microbatch in range(2):
            op(microbatch)
    for microbatch in range(2):
        sharded.wait()
        stage.backward_weight(microbatch)
        sharded.end_backward()
    sharded.reduce()
    sharded.reshard()
    torch.autograd.backward(reference(inputs), gradients / 2)
    weights = zip(module.parameters(), reference.parameters(), strict=True)
    report(
        f"found{rank}",
        max(difference(ours.grad.full_tensor(), whole.grad) for ours, whole in weights),
    )


def crossed() -> None:
    """A plan that would hang if sends or receives blocked, or met in order."""
    with suppress(CompileError):
        compile(Source("crossed.sched", CROSSED))
        raise AssertionError("the plan is portable")
    report(
        f"found{dist.get_rank()}",
        compare(compile(Source("crossed.sched", CROSSED), transport="gloo")),
    )


class Containers(nn.Module):
    """Takes and returns two tensors with gradients and one without, in containers; and has options."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.is_last = is_last

    def forward(
        self, x: torch.Tensor, rest: dict[str, torch.Tensor] | None = None, *, scale: float
    ) -> object:
        rest = {"skip": x, "mask": torch.arange(len(x)) % 2} if rest is None else rest
        x = self.inner(x) * scale + rest["skip"] * rest["mask"][:, None]
        return x if self.is_last else (x, rest)


def containers() -> None:
    """Tensors in containers, and options by microbatch; outputs of an evaluation, losses and
    gradients of a step.
    """
    found = []
    for name in ("1f1b", "zb_h1"):
        plan = program(name, ranks=3, microbatches=4)
        torch.manual_seed(0)
        model = [Containers(stage == 2) for stage in range(3)]
        reference = copy.deepcopy(model)
        inputs, targets = batch(plan, 0)
        options = [{"scale": 1.0 + each} for each in range(4)]
        losses = []
        outputs = []
        for x, y, option in zip(inputs.chunk(4), targets.chunk(4), options, strict=True):
            first = reference[0](x, **option)
            outputs.append(reference[2](*reference[1](*first, **option), **option))
            losses.append(nn.functional.mse_loss(outputs[-1], y))
        (sum(losses) / 4).backward()
        ours = pipeline(plan, model)
        evaluated = ours.evaluate(inputs, options=options)
        stepped = ours.step(inputs, targets, options)
        assert (stepped is None) == (evaluated is None) == (dist.get_rank() != 2)
        if stepped is not None:
            found.append(difference(torch.stack(evaluated), torch.stack(outputs)))
            found.append(difference(stepped, torch.stack(losses)))
        weights = zip(
            model[dist.get_rank()].parameters(),
            reference[dist.get_rank()].parameters(),
            strict=True,
        )
        found += [difference(ours.grad, other.grad) for ours, other in weights]
    report(f"found{dist.get_rank()}", max(found))


def boundary() -> None:
    """The most activations and gradients that are held at once in a step of 1F1B, for more and more
    microbatches.
    """
    found = []
    for microbatches in (8, 16, 32):
        plan = program("1f1b", ranks=3, microbatches=microbatches)
        model = modules(3)
        held: list[int] = []
        model[dist.get_rank()].register_forward_hook(
            lambda *_, held=held: held.append(activations())
        )
        ours = pipeline(plan, model)
        for step in range(2):
            ours.step(*batch(plan, step))
        found.append(max(held))
    report(f"found{dist.get_rank()}", found)


def activations() -> int:
    """How many tensors as large as an activation there are, in storages of their own: not those of
    a batch.
    """
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    storages = [each.untyped_storage() for each in tensors if each.shape == (ROWS, WIDTH)]
    return len({each.data_ptr() for each in storages if each.nbytes() == 8 * ROWS * WIDTH})


HOLDS = [
    "1f1b",
    "interleaved_1f1b",
    "1f1b_recompute",
    "gpipe",
    "chimera",
    "zb_h1",
    "zb_v",
    "dualpipe",
    "unet_1f1b",
]


def holds() -> None:
    """After each op of a step, how many more tensors are held, beside batch and weights, than the
    plan says.

    For each schedule, the least and the most.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    found = {}
    for name in HOLDS:
        plan = program(name, ranks=ranks, microbatches=4 * ranks)
        ours = pipeline(plan, replicated(plan))
        # A step with new inputs finds out what they look like: it begins receives later, and waits
        # for sends later.
        ours.step(*batch(plan, 0))
        assert activations() == 0
        counts: dict[int, int] = {}
        ours._training = [
            (
                index,
                partial(counting, call, index, counts) if op and not is_transfer(op[0]) else call,
                op,
            )
            for index, call, op in ours._training
        ]
        ours.step(*batch(plan, 1))
        more = [counts[index] - tensors for index, tensors in tensors_after(plan, rank).items()]
        found[name] = [min(more), max(more)]
    report(f"found{rank}", found)


def counting(call: Callable[[], None], index: int, counts: dict[int, int]) -> None:
    call()
    counts[index] = activations()


def tensors_after(plan: Plan, rank: int) -> dict[int, int]:
    """How many tensors there are by the plan when an op has ended."""
    found = [(each, tensors_of(plan, each)) for each in lifetimes(plan, rank)]
    return {
        index: len(
            set().union(*(tensors for each, tensors in found if each.start <= index < each.stop))
        )
        for index, kind in enumerate(plan.ranks[rank].kind)
        if not is_transfer(kind)
    }


def tensors_of(plan: Plan, lifetime: Lifetime) -> set[object]:
    """The tensors of an activation or a message: outputs of ops, or gradients of their inputs, by
    stage, microbatch.

    An activation is input and output of its stage, and the inputs of a pipeline's first stage are
    those of the batch. Where there is a skip, which brings a copy of an output, the input is also
    the sum with that.
    """
    stage, kind, microbatch = re.match(r"(\d+)([A-Z_]+)(\d+)", lifetime.name).groups()
    stage = int(stage)
    microbatch = int(microbatch)
    if lifetime.what == Holds.ACTIVATION:
        input = set() if plan.layout.is_first(stage) else {("F", stage - 1, microbatch)}
        skips = [number for number, (_, later) in plan.layout.skip_stages.items() if later == stage]
        input |= {(what, number, microbatch) for number in skips for what in ("RECV_F", "sum")}
        return input | {(kind, stage, microbatch)}
    if stage in plan.layout.skip_stages:
        earlier, _ = plan.layout.skip_stages[stage]
        return {("F", earlier, microbatch) if kind == "SEND_F" else (kind, stage, microbatch)}
    maker = {
        "RECV_F": ("F", stage - 1),
        "RECV_B": ("B", stage + 1),
        "SEND_F": ("F", stage),
        "F": ("F", stage),
    }
    return {(*maker.get(kind, ("B", stage)), microbatch)}


class Strided(nn.Module):
    """Its output and its input's gradient are not contiguous."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.inner(input.transpose(0, 1)).transpose(0, 1)


def strided() -> None:
    """What passes need not be contiguous."""
    plan = program("1f1b", ranks=3, microbatches=2)
    ours = pipeline(plan, [Strided(each) for each in modules(3)])
    x = torch.randn(6, WIDTH, WIDTH, dtype=torch.float64)
    losses = ours.step(x, x)
    report(f"found{dist.get_rank()}", None if losses is None else len(losses))


def ignores_input() -> None:
    """A stage whose output does not depend on its input still passes a gradient back: zeros."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.weight.expand(len(input), WIDTH)

    for name in ("1f1b", "zb_h1"):
        plan = program(name, ranks=3, microbatches=2)
        model = modules(3)
        model[1] = Constant()
        pipeline(plan, model).step(*batch(plan, 0))
        if dist.get_rank() == 0:
            assert all(
                not each.grad.any() for each in model[0].parameters() if each.grad is not None
            )
            assert all(each.grad is not None for each in model[0].parameters())


# What must fail well. `Does` runs something at the n-th forward of one stage.


class Does(nn.Module):
    def __init__(self, inner: nn.Module, call: int, what: object) -> None:
        super().__init__()
        self.inner = inner
        self.call = call
        self.what = what

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = self.inner(input)
        self.call -= 1
        return output if self.call >= 0 else self.what(output)


def fails(what: object, stage: int = 1, call: int = 2, **options: object) -> None:
    """Two steps of 1F1B, with something that happens at forward `call` of a stage."""
    plan = program("1f1b", ranks=dist.get_world_size(), microbatches=4)
    model = modules(len(plan.placement))
    model[stage] = Does(model[stage], call, what)
    ours = pipeline(plan, model, **options)
    for step in range(2):
        ours.step(*batch(plan, step))


def throw(_: torch.Tensor) -> torch.Tensor:
    raise ValueError("boom\nand more")


def kill(_: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def sleep(_: torch.Tensor) -> torch.Tensor:
    time.sleep(LIMIT)
    raise AssertionError


def indivisible() -> None:
    plan = program("1f1b", ranks=2, microbatches=4)
    pipeline(plan, modules(2)).step(torch.ones(7, WIDTH), torch.ones(7, WIDTH))


def no_targets() -> None:
    plan = program("1f1b", ranks=2, microbatches=4)
    pipeline(plan, modules(2)).step(batch(plan, 0)[0])


def other_plan() -> None:
    plan = program("1f1b", ranks=3, microbatches=4 + (dist.get_rank() == 2))
    pipeline(plan, modules(3)).step(*batch(plan, 0))


def other_message() -> None:
    """Two pipelines of one plan, which the ranks step in different order."""
    plan = program("1f1b", ranks=2, microbatches=4)
    ours = [pipeline(plan, modules(2)), pipeline(plan, modules(2))]
    ours[dist.get_rank()].step(*batch(plan, 0))


def absent() -> None:
    plan = program("1f1b", ranks=2, microbatches=4)
    if dist.get_rank() == 0:
        time.sleep(2)
    pipeline(plan, modules(2), timeout=1).step(*batch(plan, 0))


def idles() -> None:
    """Rank 1 does not come to the second step."""
    plan = program("1f1b", ranks=3, microbatches=4)
    ours = pipeline(plan, modules(3), timeout=1)
    ours.step(*batch(plan, 0))
    if dist.get_rank() == 1:
        time.sleep(LIMIT)
    ours.step(*batch(plan, 1))


def crashes_between() -> None:
    """The script fails on rank 1, not the pipeline."""
    plan = program("1f1b", ranks=dist.get_world_size(), microbatches=4)
    ours = pipeline(plan, modules(dist.get_world_size()))
    ours.step(*batch(plan, 0))
    assert dist.get_rank() != 1, "between"
    ours.step(*batch(plan, 1))


def later(seconds: float, what: signal.Signals) -> None:
    """Send this process a signal, even if it is stopped by then."""
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), what)
        os._exit(0)


def stopped(_: torch.Tensor) -> torch.Tensor:
    later(5, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError


def signalled(what: signal.Signals) -> None:
    """Rank 0 gets a signal while it waits inside gloo for rank 1, which sleeps."""
    # A job in the background of a shell ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = program("1f1b", ranks=3, microbatches=4)
    model = modules(3)
    model[1] = Does(model[1], 2, partial(alarm, what))
    report(f"pid{dist.get_rank()}", os.getpid())
    pipeline(plan, model).step(*batch(plan, 0))


def alarm(what: signal.Signals, output: torch.Tensor) -> torch.Tensor:
    time.sleep(1)
    os.kill(json.loads((Path(os.environ["FOLDER"]) / "pid0.json").read_text()), what)
    return sleep(output)


def threads() -> None:
    """Whether gloo's threads leave the core to the main thread."""
    pipeline(program("1f1b", ranks=2), modules(2))
    names = {
        int(each.parent.name): each.read_text().strip()
        for each in Path("/proc/self/task").glob("*/comm")
    }
    policies = {
        os.sched_getscheduler(thread) for thread, name in names.items() if name == "gloo_tcp_loop"
    }
    report(f"found{dist.get_rank()}", [sorted(policies), os.sched_getscheduler(os.getpid())])


def vector_loss() -> None:
    plan = program("1f1b", ranks=2, microbatches=4)
    model = modules(2)
    mine = {stage: model[stage] for stage in plan.stages_of(dist.get_rank())}
    Pipeline(plan, mine, lambda output, target: (output - target) ** 2).step(*batch(plan, 0))


SCENARIOS = {
    "sweep": sweep,
    "scaled": scaled,
    "bfloat16": bfloat16,
    "updates": updates,
    "versions": versions,
    "records": records,
    "crossed": crossed,
    "containers": containers,
    "boundary": boundary,
    "holds": holds,
    "strided": strided,
    "data_parallel": data_parallel,
    "sharded": sharded,
    "ignores_input": ignores_input,
    "threads": threads,
    "throws": lambda: fails(throw),
    "throws_at_the_store": lambda: fails(throw, stage=0),
    "shape": lambda: fails(lambda x: x[1:], stage=0),
    "shape_later": lambda: fails(lambda x: x[1:], stage=0, call=6),
    "dtype": lambda: fails(lambda x: x.float(), stage=0),
    "list": lambda: fails(lambda x: [x, None]),
    "text": lambda: fails(str),
    "integers": lambda: fails(lambda x: x.long()),
    "detached": lambda: fails(lambda x: x.detach()),
    "vector_loss": vector_loss,
    "killed": lambda: fails(kill),
    "store_killed": lambda: fails(kill, stage=0, call=5),
    "stalls": lambda: fails(sleep, timeout=1),
    "stopped": lambda: fails(stopped, timeout=1),
    "indivisible": indivisible,
    "no_targets": no_targets,
    "other_plan": other_plan,
    "other_message": other_message,
    "absent": absent,
    "idles": idles,
    "crashes_between": crashes_between,
    "terminated": lambda: signalled(signal.SIGTERM),
    "interrupted": lambda: signalled(signal.SIGINT),
    "processes": lambda: pipeline(program("1f1b", ranks=4), modules(4)),
    "no_past": lambda: pipeline(
        program("seq1f1b", ranks=2), [Forgetful(torch.float64) for _ in range(2)]
    ).step(*batch(program("seq1f1b", ranks=2), 0)),
    "stages": lambda: Pipeline(
        program("1f1b", ranks=2), {0: modules(1)[0]}, nn.functional.mse_loss
    ),
    "no_loss": lambda: Pipeline(program("1f1b", ranks=2), {dist.get_rank(): modules(1)[0]}),
    "replicas": lambda: pipeline(program("gems", ranks=2, microbatches=2), modules(4)),
    "optimizers": lambda: pipeline(compile(Source("updates.sched", UPDATES)), modules(4)),
}


def rank_main(scenario: Callable[[], None], rank: int, ranks: int, folder: Path) -> None:
    """One rank of a scenario."""
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ["FOLDER"] = str(folder)
    port = folder / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        port.with_suffix(".new").write_text(str(store.port))
        port.with_suffix(".new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.005)
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    scenario()
    dist.barrier()
    dist.destroy_process_group()


def fork(scenario: Callable[[], None], rank: int, ranks: int, folder: Path) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        rank_main(scenario, rank, ranks, folder)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)


def main(scenario: Callable[[str], Callable[[], None]]) -> None:
    """Run scenarios, which are known by their names."""
    torch.set_num_threads(1)
    # What is imported is not looked through when tensors are counted.
    gc.freeze()
    for line in sys.stdin:
        name, ranks, folder = json.loads(line)
        if name == "sweep":
            # Once, and not in every rank.
            sweep_plans(ranks)
        start = time.monotonic()
        children = [fork(scenario(name), rank, ranks, Path(folder)) for rank in range(ranks)]
        codes: dict[int, int] = {}
        while len(codes) < ranks:
            for child in children:
                if child not in codes:
                    pid, status = os.waitpid(child, os.WNOHANG)
                    if pid:
                        codes[child] = os.waitstatus_to_exitcode(status)
                    elif time.monotonic() - start > LIMIT:
                        os.kill(child, signal.SIGKILL)
            time.sleep(0.01)
        print(
            json.dumps([time.monotonic() - start, [codes[child] for child in children]]), flush=True
        )


if __name__ == "__main__":
    main(SCENARIOS.__getitem__)
