"""Runs scenarios of `test_parallel.py` on real processes, as `runtime_worker.py` does: pipelines on a device mesh."""

import copy
import math
import os
import signal
import time
from functools import partial

import torch
import torch.distributed as dist
from runtime_worker import (
    DELAYS,
    LIMIT,
    ROWS,
    WIDTH,
    Does,
    alone,
    batch,
    difference,
    loss_difference,
    main,
    modules,
    program,
    replicated,
    report,
    version_plan,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from schedlang.plan import Plan
from schedlang.runtime import Pipeline

PIPE = 2
#: With a split backward, two pipelines, two stages a rank, slices, recomputation, copies to the host.
SCHEDULES = ("1f1b", "zb_v", "dualpipe", "interleaved_1f1b", "seq1f1b", "1f1b_recompute", "pipe_offload")


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

    That has the batches of both replicas. Two steps, whose gradients add up, with an evaluation between them.
    """
    meshes = mesh("dp", "pp"), mesh("pp", "dp")
    found = {}
    for turn, name in enumerate(SCHEDULES):
        plan = program(name, ranks=PIPE, microbatches=2 * PIPE)
        found[name] = of_one_process(meshes[turn % 2], plan)
    report(f"found{dist.get_rank()}", found)


def of_one_process(of: DeviceMesh, plan: Plan) -> list[float]:
    (replica, rank), slices = place(of), plan.layout.slices > 1
    model, reference = replicated(plan), modules(plan.layout.pieces, sliced=slices)
    ours, worst = on(of, plan, model), [0.0, 0.0]
    for step in range(2):
        expected = [add_gradients(plan, reference, *batch(plan, 10 * step + each)) for each in range(2)]
        mine = batch(plan, 10 * step + replica)
        evaluated = ours.evaluate(*mine)
        for losses in (evaluated and torch.stack(evaluated), ours.step(*mine)):
            worst[0] = max(worst[0], loss_difference(plan, losses, expected[replica], rank))
    pairs = weights(model, reference * 2, plan.stages_of(rank))
    worst[1] = max(difference(mine.grad, other.grad) for mine, other in pairs)
    return worst


def weights(model: list[nn.Module], other: list[nn.Module], stages: list[int]) -> list[tuple[nn.Parameter, ...]]:
    """Those of some stages, side by side."""
    sides = [[each for stage in stages for each in side[stage].parameters()] for side in (model, other)]
    return list(zip(*sides, strict=True))


def add_gradients(plan: Plan, model: list[nn.Module], inputs: torch.Tensor, targets: torch.Tensor) -> list:
    """Those of the mean over the microbatches of two replicas; the losses of this one's."""
    losses = []
    for x, y in zip(inputs.chunk(plan.microbatches), targets.chunk(plan.microbatches), strict=True):
        loss = nn.functional.mse_loss(alone(model, x), y)
        (loss / plan.microbatches / 2).backward()
        losses.append(loss.detach())
    return losses


def momentum(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9, weight_decay=0.01)


def updates() -> None:
    """For each schedule that updates: the largest difference of a weight after two steps, and of two replicas."""
    of, found = mesh("dp", "pp"), {}
    replica, rank = place(of)
    for name, delays in DELAYS.items():
        plan = version_plan(name, PIPE)
        model = [each.double() for each in modules(len(plan.placement))]
        optimizers = {stage: momentum(model[stage]) for stage in plan.stages_of(rank)}
        ours, reference = on(of, plan, model, optimizers=optimizers), copy.deepcopy(model)
        for step in range(2):
            ours.step(*batch(plan, 10 * step + replica))
        late_updates(plan, reference, delays(PIPE), 2)
        pairs = weights(model, reference, plan.stages_of(rank))
        worst = max(difference(*pair) for pair in pairs)
        found[name] = [worst, all(is_same_everywhere(mine.detach(), of) for mine, _ in pairs)]
    report(f"found{dist.get_rank()}", found)


def is_same_everywhere(tensor: torch.Tensor, of: DeviceMesh) -> bool:
    """Whether both replicas have the same, to the bit."""
    both = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(both, tensor, group=of.get_group("dp"))
    return torch.equal(*both)


def late_updates(plan: Plan, model: list[nn.Module], delays: list[int], steps: int) -> None:
    """What one process makes of both replicas' batches, with gradients that are so late."""
    versions, optimizers = [[copy.deepcopy(each)] for each in model], [momentum(each) for each in model]
    per_update = plan.microbatches // plan.layout.updates
    for step in range(steps):
        both = [[part.split(ROWS * per_update) for part in batch(plan, 10 * step + replica)] for replica in range(2)]
        for update in range(plan.layout.updates):
            number = step * plan.layout.updates + update
            read = [each[max(number - delay, 0)] for each, delay in zip(versions, delays, strict=True)]
            for inputs, targets in both:
                loss = nn.functional.mse_loss(nn.Sequential(*read)(inputs[update]), targets[update])
                (loss / 2).backward()
            for master, old, optimizer, kept in zip(model, read, optimizers, versions, strict=True):
                for weight, other in zip(master.parameters(), old.parameters(), strict=True):
                    weight.grad, other.grad = other.grad, None
                optimizer.step()
                kept.append(copy.deepcopy(master))


def alone_on_a_mesh() -> None:
    """Pipelines that have nothing to do with each other, at once, on the rows of a mesh."""
    of, plan = mesh("dp", "pp"), program("zb_h1", ranks=PIPE, microbatches=4)
    replica, rank = place(of)
    model, reference = modules(PIPE), modules(PIPE)
    for each in (*model, *reference):
        for weight in each.parameters():
            weight.data += replica
    inputs, targets = batch(plan, replica)
    losses = on(of["pp"], plan, model).step(inputs, targets)
    nn.functional.mse_loss(alone(reference, inputs), targets).backward()
    worst = [difference(mine.grad, other.grad) for mine, other in weights(model, reference, [rank])]
    report(f"found{dist.get_rank()}", [losses is not None, max(worst)])


def unused() -> None:
    """A weight that one replica does not use has the other's gradient there."""
    of, plan = mesh("dp", "pp"), program("1f1b", ranks=PIPE, microbatches=2)
    replica, rank = place(of)

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ways = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.ways[int(x[0, 0] > 0)](x.abs())

    torch.manual_seed(0)
    model = [Chooses() for _ in range(PIPE)]
    reference = copy.deepcopy(model)
    batches = [torch.full((2 * ROWS, WIDTH), sign, dtype=torch.float64) for sign in (-1.0, 1.0)]
    for each in batches:
        (nn.functional.mse_loss(reference[0](each), each) / 2).backward()
    on(of, plan, [model[0], nn.Identity() if rank == 0 else Passes()]).step(batches[replica], batches[replica])
    pairs = weights(model, reference, [0])
    report(f"found{dist.get_rank()}", max(difference(a.grad, b.grad) for a, b in pairs) if rank == 0 else 0.0)


class Passes(nn.Module):
    """A stage without weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def checkpoints() -> None:
    """Each process has a file of its own; one replica has a newer one."""
    of, plan = mesh("dp", "pp"), program("1f1b", ranks=PIPE, microbatches=4)
    ours, kept = on(of, plan, modules(PIPE)), os.path.join(os.environ["FOLDER"], "kept")
    ours.save(kept, 1)
    if of.get_local_rank("dp") == 1:
        ours.save(kept, 2)
    dist.barrier()
    report(f"found{dist.get_rank()}", [ours.resume(kept), len(os.listdir(kept))])


# What must fail well.


def fails(what: object, process: int) -> None:
    """Something happens at the second forward of a process."""
    of, plan = mesh("dp", "pp"), program("1f1b", ranks=PIPE, microbatches=4)
    replica, rank = place(of)
    model = [Does(each, math.inf, what) for each in modules(PIPE)]
    if dist.get_rank() == process:
        model[rank].call = 1
    ours = on(of, plan, model, timeout=2 if what is sleep else 60)
    for step in range(2):
        ours.step(*batch(plan, step + replica))


def kill(_: torch.Tensor) -> torch.Tensor:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def sleep(_: torch.Tensor) -> torch.Tensor:
    time.sleep(LIMIT)
    raise AssertionError


def throw(_: torch.Tensor) -> torch.Tensor:
    raise ValueError("boom")


def idles() -> None:
    """A process does not come to the second step."""
    of, plan = mesh("dp", "pp"), program("1f1b", ranks=PIPE, microbatches=4)
    ours = on(of, plan, modules(PIPE), timeout=2)
    ours.step(*batch(plan, 0))
    if dist.get_rank() == 2:
        time.sleep(LIMIT)
    ours.step(*batch(plan, 1))


def differ() -> None:
    """One process has other weights."""
    model = modules(PIPE)
    if dist.get_rank() == 3:
        model[1][0].bias.data[0] += 1
    on(mesh("dp", "pp"), program("1f1b", ranks=PIPE), model)


def on_a_mesh(*names: str, ranks: int = PIPE) -> None:
    of, plan = mesh(*names), program("1f1b", ranks=ranks)
    Pipeline(plan, dict(enumerate(modules(1))), nn.functional.mse_loss, mesh=of)


def three_dimensions() -> None:
    of = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "tp", "pp"))
    Pipeline(program("1f1b", ranks=PIPE), {}, mesh=of)


SCENARIOS = {
    each.__name__: each
    for each in (replicas, updates, alone_on_a_mesh, unused, checkpoints, idles, differ, three_dimensions)
} | {
    "killed": partial(fails, kill, 3),
    "stalls": partial(fails, sleep, 3),
    "throws": partial(fails, throw, 2),
    "no_pp": partial(on_a_mesh, "dp", "tp"),
    "too_few": partial(on_a_mesh, "dp", "pp", ranks=4),
}  # fmt: skip

if __name__ == "__main__":
    main(SCENARIOS.__getitem__)
