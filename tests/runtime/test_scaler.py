"""Trainings whose losses `torch.amp.GradScaler` scales, on real processes: those of one process, also
where the gradients of a single rank overflow.
"""

from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import SGD

from schedlang.runtime import Pipeline
from tests.support.mesh import mesh
from tests.support.models import batch, difference, modules, program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

STEPS = 60
MICROBATCHES = 4


def new_scaler() -> GradScaler:
    """One whose scale grows so fast that gradients overflow every few steps."""
    return GradScaler(
        "cpu", init_scale=2.0**110, growth_factor=2.0**8, growth_interval=3
    )


class Unbounded(nn.Module):
    """Hands on what it is given, and has a weight whose gradient is infinite in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sqrt()


class Sides:
    """A training by a pipeline, and beside it the same in one process.

    The first `frozen` stages are not trained, and so have no optimizer. Where one is `unbounded`,
    it has a weight that no optimizer has, and that has an infinite gradient.
    """

    def __init__(
        self,
        schedule: str,
        of: DeviceMesh | None,
        frozen: int = 0,
        unbounded: int | None = None,
    ) -> None:
        self.replica = of.get_local_rank("dp") if of else 0
        self.replicas = of["dp"].size() if of else 1
        rank = of.get_local_rank("pp") if of else dist.get_rank()
        ranks = dist.get_world_size() // self.replicas
        self.plan = program(schedule, ranks=ranks, microbatches=MICROBATCHES)
        self.held = self.plan.stages_of(rank)
        model = modules(self.plan.layout.pieces, torch.float32)
        self.alone = modules(self.plan.layout.pieces, torch.float32)
        # Gradients of the last stage are the largest ones, and overflow first.
        for side in (model, self.alone):
            for module in side[:frozen]:
                module.requires_grad_(False)
            side[-1].register_forward_hook(lambda *given: 100 * given[-1])
        self.stages = {stage: model[stage] for stage in self.held}
        optimized = {stage: [*model[stage].parameters()] for stage in self.held}
        if unbounded is not None:
            for side in (model, self.alone):
                cast(nn.Sequential, side[unbounded]).append(Unbounded())
        self.scaler = new_scaler()
        self.scaler_alone = new_scaler()
        self.pipeline = Pipeline(
            self.plan,
            self.stages,
            nn.functional.mse_loss,
            mesh=of,
            loss_scale=self.scaler,
        )
        self.optimizers = [
            SGD(weights, 1e-5, momentum=0.9)
            for stage, weights in optimized.items()
            if stage >= frozen
        ]
        alone = [
            weight
            for weight in nn.ModuleList(self.alone[frozen:]).parameters()
            # All but that of `Unbounded`.
            if weight.ndim
        ]
        self.optimizer_alone = SGD(alone, 1e-5, momentum=0.9)

    def step(self, step: int, max_norm: float | None = None) -> None:
        """A step of both sides, in the loop that torch's documentation has."""
        self.pipeline.step(*self.batch(step, self.replica))
        if max_norm is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            self.pipeline.clip_grad_norm_(max_norm)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
            optimizer.zero_grad()
        self.scaler.update()
        for replica in range(self.replicas):
            inputs, targets = self.batch(step, replica)
            pairs = zip(
                inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True
            )
            for given, wanted in pairs:
                output = nn.Sequential(*self.alone)(given)
                loss = nn.functional.mse_loss(output, wanted)
                loss = loss / MICROBATCHES / self.replicas
                self.scaler_alone.scale(loss).backward()
        if max_norm is not None:
            self.scaler_alone.unscale_(self.optimizer_alone)
            weights = nn.ModuleList(self.alone).parameters()
            nn.utils.clip_grad_norm_(weights, max_norm)
        self.scaler_alone.step(self.optimizer_alone)
        self.optimizer_alone.zero_grad()
        self.scaler_alone.update()

    def batch(self, step: int, replica: int) -> list[torch.Tensor]:
        return [each.float() for each in batch(self.plan, 10 * step + replica)]

    def difference(self) -> float:
        """The largest difference of a weight of this rank."""
        return max(
            difference(one.detach(), other.detach())
            for stage in self.held
            for one, other in zip(
                self.stages[stage].parameters(),
                self.alone[stage].parameters(),
                strict=True,
            )
        )


def scaled(
    schedule: str,
    on_mesh: bool,
    frozen: int,
    max_norm: float | None,
    unbounded: int | None = None,
) -> tuple[float, int, int, int]:
    """The largest difference of a weight, in how many steps the scales differed, how often the
    scale grew, and how often it became smaller.
    """
    sides = Sides(schedule, mesh("dp", "pp") if on_mesh else None, frozen, unbounded)
    scale = sides.scaler.get_scale()
    differed = grew = shrank = 0
    for step in range(STEPS):
        sides.step(step, max_norm)
        now = sides.scaler.get_scale()
        differed += now != sides.scaler_alone.get_scale()
        grew += now > scale
        shrank += now < scale
        scale = now
    return sides.difference(), differed, grew, shrank


def goes_wrong(what: str) -> None:
    """A training by a scaler that cannot be right."""
    updated = what in ("updates", "max_norm")
    name = "pipedream_2bw" if what == "updates" else "1f1b"
    plan = program(name, ranks=2, microbatches=MICROBATCHES)
    rank = dist.get_rank()
    stages = {rank: modules(2, torch.float32)[rank]}
    optimizer = SGD(stages[rank].parameters(), 0.1)
    scaler = new_scaler()
    scaler.scale(torch.ones(()))
    loss_fn = nn.functional.mse_loss
    options: dict[str, Any] = {"loss_scale": scaler}
    if what == "unknown":
        options = {}
        loss_fn = lambda *given: scaler.scale(nn.functional.mse_loss(*given))  # noqa: E731
    elif what == "number":
        options = {"loss_scale": scaler.get_scale() / MICROBATCHES}
    elif what == "scales":
        scaler.update(2.0 ** (10 + rank))
    elif what == "FSDP1":
        options = {"loss_scale": ShardedGradScaler("cpu")}
    if updated:
        options["optimizers"] = {rank: optimizer}
    if what == "max_norm":
        options["max_norm"] = 1.0
    pipeline = Pipeline(plan, stages, loss_fn, timeout=20, **options)
    pipeline.step(*[each.float() for each in batch(plan, 0)])
    scaler.step(optimizer)


UNKNOWN = (
    "a GradScaler looks at gradients of stages [{rank}], and the pipeline does not know it: each "
    "rank would decide by itself whether to skip an update. Give the pipeline the scaler, "
    "`loss_scale=scaler`"
)
MESSAGES = {
    "unknown": UNKNOWN,
    "number": UNKNOWN,
    "scales": "has another `loss_scale`: all ranks must be given the same",
    "updates": "`loss_scale` is a GradScaler, and the plan (`U`) makes the updates",
    "max_norm": "`loss_scale` is a GradScaler, and the pipeline (`max_norm`) makes the updates",
    "FSDP1": "`loss_scale` is a ShardedGradScaler, which looks at gradients in a way of its own",
}


@pytest.mark.parametrize("what", MESSAGES)
def test_what_cannot_be_scaled_is_refused(what: str, run_ranks: Run) -> None:
    run = run_ranks(goes_wrong, 2, what)
    said = [MESSAGES[what].format(rank=rank) for rank in range(2)]
    assert any(each in log for each in said for log in run.logs), run.logs
    assert run.codes == [1, 1]
    # Nobody has waited for a rank that has failed.
    assert run.seconds < 20


@pytest.mark.parametrize(
    ("schedule", "ranks", "on_mesh", "frozen", "max_norm"),
    [
        ("1f1b", 2, False, 0, None),
        ("zb_v", 2, False, 0, 1.0),
        ("1f1b", 2, False, 1, 1.0),
        ("1f1b", 4, True, 0, None),
    ],
    ids=["", "several stages on a rank, clipped", "a frozen rank", "replicas"],
)
def test_scaled_training_is_that_of_one_process(
    run_ranks: Run,
    schedule: str,
    ranks: int,
    on_mesh: bool,
    frozen: int,
    max_norm: float | None,
) -> None:
    """All ranks skip the same updates, and have the same scale after each."""
    done = run_ranks(scaled, ranks, schedule, on_mesh, frozen, max_norm)
    for off, differed, grew, shrank in done.results():
        assert off < 1e-4
        assert differed == 0
        assert grew > 3
        assert shrank > 3


def test_weights_without_an_optimizer_skip_no_update(run_ranks: Run) -> None:
    """A scaler looks at the weights of its optimizers alone."""
    done = run_ranks(scaled, 2, "1f1b", False, 0, None, 0)
    for off, differed, grew, shrank in done.results():
        assert off < 1e-4
        assert differed == 0
        assert grew > 3
        assert shrank > 3
