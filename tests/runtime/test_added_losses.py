"""Losses that stages add, on real processes: they train and are reported as in one process."""

import gc
import re
from collections.abc import Callable
from functools import partial
from weakref import ref

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, add_loss, added_losses
from schedlang.runtime.part import Forward, Part
from schedlang.runtime.parts.added_losses import AddedLosses
from schedlang.runtime.stage import Stage, StagePlan
from tests.support.models import ROWS, WIDTH, batch, difference, program_with
from tests.support.ranks import Run
from tests.support.sizes import STEPS

pytestmark = pytest.mark.processes


class Experts(nn.Module):
    """Two experts, whose router is to use both alike (Shazeer et al. 2017, arXiv 1701.06538)."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        add_loss("balance", 2 * shares.mean(0).square().sum(), weight=0.1)
        parts = [expert(x) for expert in self.experts]
        return sum(shares[:, each : each + 1] * part for each, part in enumerate(parts))


class Early(nn.Module):
    """A layer, and a head that is to find what the inputs of the whole model add up to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, wanted: Tensor | None = None) -> Tensor:
        x = self.layer(x).tanh()
        if wanted is not None:
            add_loss("early", nn.functional.mse_loss(self.head(x)[:, 0], wanted))
        return x


def stages_of(plan: Plan, has_head: bool = True) -> list[nn.Module]:
    """Experts in all stages but the second, which has an early head."""
    torch.default_generator.manual_seed(0)
    stages = range(plan.layout.pieces)
    found = [Early() if has_head and stage == 1 else Experts() for stage in stages]
    for stage in stages:
        found[stage].double().requires_grad_(stage not in plan.layout.frozen)
    return found


def options_of(plan: Plan, inputs: Tensor) -> list[dict[str, Tensor]]:
    """What the early head is to find, by microbatch."""
    return [{"wanted": part.sum(1)} for part in inputs.chunk(plan.microbatches)]


def alone(
    plan: Plan, model: list[nn.Module], inputs: Tensor, targets: Tensor
) -> dict[str, float]:
    """The named losses of a step in one process, whose gradients add up."""
    sums: dict[str, float] = {}
    parts = zip(
        inputs.chunk(plan.microbatches), targets.chunk(plan.microbatches), strict=True
    )
    for x, y in parts:
        wanted = x.sum(1)
        with added_losses() as added:
            for stage in model:
                x = stage(x, wanted) if isinstance(stage, Early) else stage(x)
        loss = nn.functional.mse_loss(x, y)
        if torch.is_grad_enabled():
            ((loss + added.total) / plan.microbatches).backward()
        for name, value in {"loss": loss, **added}.items():
            sums[name] = sums.get(name, 0.0) + float(value.detach()) / plan.microbatches
    return sums


def off(ours: dict[str, float], expected: dict[str, float]) -> float:
    """How far named losses are from others, which have the same names."""
    assert ours.keys() == expected.keys()
    return max(abs(ours[name] / expected[name] - 1) for name in ours)


def trained(
    steps: int, name: str, lines: str = "", has_head: bool = True
) -> tuple[bool, float]:
    """Whether the weights of this rank are to the bit those of one process, after so many steps, and
    how far these and the named losses are at most; an evaluation comes between.
    """
    plan = program_with(name, lines)
    reference = stages_of(plan, has_head)
    model = stages_of(plan, has_head)
    stages = {s: model[plan.layout.piece(s)] for s in plan.stages_of(dist.get_rank())}
    every = {id(stage): stage for stage in (*stages.values(), *reference)}.values()
    weights = [
        weight
        for stage in every
        for weight in stage.parameters()
        if weight.requires_grad
    ]
    optimizer = torch.optim.SGD(weights, 0.05, momentum=0.9)
    ours = Pipeline(plan, stages, nn.functional.mse_loss, audit=True)
    worst = [0.0]
    for step in range(steps):
        inputs, targets = batch(plan, step)
        options = options_of(plan, inputs) if isinstance(stages.get(1), Early) else None
        ours.step(inputs, targets, options)
        worst.append(off(ours.named_losses(), alone(plan, reference, inputs, targets)))
        if step == 1:
            # Losses that are added in an evaluation are reported, and have no gradients.
            ours.evaluate(inputs, targets, options, rows=ROWS)
            with torch.no_grad():
                worst.append(
                    off(ours.named_losses(), alone(plan, reference, inputs, targets))
                )
        optimizer.step()
        optimizer.zero_grad()
    pairs = [
        pair
        for number, stage in stages.items()
        for pair in zip(
            stage.parameters(),
            reference[plan.layout.piece(number)].parameters(),
            strict=True,
        )
    ]
    worst += [difference(*pair) for pair in pairs]
    return all(torch.equal(*pair) for pair in pairs), max(worst)


#: A whole backward, one in two halves, recomputation, several stages and replicas of a stage on a
#: rank, and frozen stages that add losses.
SCHEDULES = {
    "dualpipe": partial(trained, name="dualpipe", has_head=False),
    "zb_v": partial(trained, name="zb_v", has_head=False),
    "zb_h1": partial(trained, name="zb_h1"),
    "1f1b_recompute": partial(trained, name="1f1b_recompute"),
    "frozen": partial(trained, name="1f1b", lines="frozen 0 .. 1  frozen 2 .. 3"),
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_steps_are_those_of_one_process(run_ranks: Run, name: str, steps: int) -> None:
    for equal, worst in run_ranks(SCHEDULES[name], 4, steps).results():
        # Gradients of replicas are summed in another order.
        assert equal or name == "dualpipe"
        assert worst < 1e-10


def replicated() -> float:
    """Two replicas of a pipeline: how far the gradients and the named losses are."""
    plan = program_with("1f1b", "", ranks=2, microbatches=4)
    whole = program_with("1f1b", "", ranks=2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    reference = stages_of(plan, has_head=False)
    rank = mesh.get_local_rank("pp")
    stage = stages_of(plan, has_head=False)[rank]
    ours = Pipeline(plan, {rank: stage}, nn.functional.mse_loss, mesh=mesh)
    inputs, targets = batch(whole, 0)
    ours.step(*(part.chunk(2)[mesh.get_local_rank("dp")] for part in (inputs, targets)))
    expected = alone(whole, reference, inputs, targets)
    pairs = zip(stage.parameters(), reference[rank].parameters(), strict=True)
    gradients = [difference(one.grad, other.grad) for one, other in pairs]
    return max(off(ours.named_losses(), expected), *gradients)


def test_replicas(run_ranks: Run) -> None:
    assert max(run_ranks(replicated, 4).results()) < 1e-12


class Checkpointed(nn.Module):
    """A layer that adds a loss in a checkpoint, which runs it again."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.is_reentrant = is_reentrant

    def _run(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        add_loss("size", x.square().mean())
        return x

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=self.is_reentrant)


def checkpointed(is_reentrant: bool = False) -> float:
    """How far the gradient is from that of one process."""
    plan = program_with("gpipe", "", ranks=2)
    torch.default_generator.manual_seed(0)
    model = [Checkpointed(False) for _ in range(2)]
    model[1].is_reentrant = is_reentrant
    rank = dist.get_rank()
    inputs, targets = batch(plan, 0)
    Pipeline(plan, {rank: model[rank]}, nn.functional.mse_loss).step(inputs, targets)
    ours = model[rank].layer.weight.grad.clone()
    for stage in model:
        stage.zero_grad()
    alone(plan, model, inputs, targets)
    return difference(ours, model[rank].layer.weight.grad)


def test_a_checkpoint_adds_once(run_ranks: Run) -> None:
    assert run_ranks(checkpointed, 2).results() == [0.0, 0.0]


def added(value: object, name: str = "size") -> None:
    """A stage that adds a loss of its own making."""

    class Adds(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            add_loss(name, value if value is not None else super().forward(x))
            return super().forward(x)

    plan = program_with("gpipe", "", ranks=1)
    inputs, targets = batch(plan, 0)
    stage = Adds(WIDTH, WIDTH).double()
    Pipeline(plan, {0: stage}, nn.functional.mse_loss, stop_on_nan=True).step(
        inputs, targets
    )


@pytest.mark.parametrize(
    ("function", "ranks", "message"),
    [
        (
            partial(checkpointed, True),
            2,
            "stage 1 adds a loss without a graph, so it would not",
        ),
        (
            partial(added, None),
            1,
            r"`size` that a stage adds has the shape \[3, 8\], it must be",
        ),
        (
            partial(added, 0.5),
            1,
            "`size` that a stage adds is a float, it must be a scalar tensor",
        ),
        (
            partial(added, torch.tensor(1.0), "loss"),
            1,
            "has the name `loss`, which is that of",
        ),
        (
            partial(added, torch.tensor(torch.nan)),
            1,
            "loss `size` of stage 0 is not finite",
        ),
    ],
)
def test_what_cannot_be_a_loss(
    run_ranks: Run, function: Callable[[], None], ranks: int, message: str
) -> None:
    outcome = run_ranks(function, ranks)
    assert 1 in outcome.codes
    assert re.search(message, "\n".join(outcome.logs)), outcome.logs


def test_without_one_who_takes_it_nothing_is_added() -> None:
    """As where a model is called for its outputs alone."""
    add_loss("size", torch.ones(()))
    with added_losses() as found:
        assert found.total == 0.0
        add_loss("size", torch.ones(()), weight=3)
        add_loss("size", 2 * torch.ones(()))
    assert found == {"size": 3.0}
    assert found.total == 5.0


class Watching(Part):
    """Knows the last forward as long as it is there."""

    def before_forward(self, run: Forward) -> None:
        self.last = ref(run)


def test_a_forward_is_gone_when_it_is_over() -> None:
    """It holds what it was given and what it made: a circle would hold that until Python looks."""
    watching = Watching()
    parts = [AddedLosses(), watching]
    stage = Stage(StagePlan(1), nn.Linear(2, 2), torch.device("cpu"), parts=parts)
    stage.inputs[0] = torch.ones(1, 2, requires_grad=True)
    gc.disable()
    try:
        stage.forward(0)
        assert watching.last() is None
    finally:
        gc.enable()
