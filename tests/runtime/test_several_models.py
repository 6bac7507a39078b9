"""Several models in one plan, on real processes: each is what it is when it is trained alone."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from tests.support.paths import PROGRAMS
from tests.support.ranks import Run

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import compile
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from schedlang.schedule.layout import Layout
from tests.support.models import difference

pytestmark = pytest.mark.processes

ROWS = 2
WIDTH = 6
STEPS = 20
#: The models of a plan, each as its stages.
Models = dict[str, list[nn.Module]]
#: Runs all models on a microbatch of each, and gives their losses and other results.
Alone = Callable[[Models, Mapping[str, Tensor], Mapping[str, Tensor]], dict[str, Tensor]]


class Judged(nn.Module):
    """The last stage of a model that is kept near what another one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return self.layer(x).tanh(), other


def near(output: Sequence[Tensor], target: Tensor) -> Tensor:
    own, other = output
    return nn.functional.mse_loss(own, target) + nn.functional.mse_loss(own, other)


def stages_of(plan: Plan, judged: str) -> Models:
    """The models of a plan, the same on all ranks, frozen where the plan has them so."""
    torch.manual_seed(0)
    layout = plan.layout
    models: Models = {}
    for pipeline in layout.pipelines:
        models[pipeline.name] = [
            nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.Tanh())
            for _ in range(pipeline.start, pipeline.stop)
        ]
    models[judged][-1] = Judged()
    for stage in layout.frozen:
        pipeline = layout.pipeline_of[stage]
        models[pipeline.name][stage - pipeline.start].requires_grad_(False)
    return models


def batch(layout: Layout, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Inputs and targets of each model; those with as many microbatches have the same inputs."""
    inputs, targets = {}, {}
    for number, pipeline in enumerate(layout.pipelines):
        generator = torch.Generator().manual_seed(seed)
        shape = pipeline.microbatches * ROWS, WIDTH
        inputs[pipeline.name] = torch.randn(*shape, generator=generator, dtype=torch.float64)
        generator.manual_seed(seed + 100 * number)
        targets[pipeline.name] = torch.randn(*shape, generator=generator, dtype=torch.float64)
    return inputs, targets


def through(stages: Sequence[nn.Module], x: Tensor) -> Tensor:
    for stage in stages:
        x = stage(x)
    return x


def judged_by(other: str, own: str) -> Alone:
    """One model beside another that it is kept near; more are trained for themselves."""

    def alone(
        models: Models, inputs: Mapping[str, Tensor], targets: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        losses = {}
        for name in inputs:
            if name == own:
                *stages, last = models[own]
                with torch.no_grad():
                    given = through(models[other], inputs[other])
                losses[own] = near(last(through(stages, inputs[own]), given), targets[own])
            elif name != other:
                output = through(models[name], inputs[name])
                losses[name] = nn.functional.mse_loss(output, targets[name])
        return losses

    return alone


def train(plan: Plan, other: str, own: str, with_outputs: bool = False) -> dict[str, Any]:
    """What 20 steps give with the plan, and in one process: losses and weights, and how far they
    are from each other.
    """
    layout = plan.layout
    models, whole = stages_of(plan, own), stages_of(plan, own)
    alone = judged_by(other, own)
    mine = plan.stages_of(dist.get_rank())
    stages = {}
    for stage in mine:
        pipeline = layout.pipeline_of[stage]
        stages[stage] = models[pipeline.name][stage - pipeline.start]
    losses = {each.name: nn.functional.mse_loss for each in layout.pipelines if each.name != other}
    losses[own] = near
    makers = {own: torch.optim.AdamW, "critic": torch.optim.SGD}
    optimizers, others = {}, []
    for stage in filter(layout.trains, mine):
        make = makers[layout.model_of(stage)]
        optimizers[stage] = make(stages[stage].parameters(), lr=0.01)
    for name, parts in whole.items():
        if name in makers:
            weights = [weight for part in parts for weight in part.parameters()]
            others.append(makers[name](weights, lr=0.01))
    updates = plan.has_updates
    pipeline = Pipeline(plan, stages, losses, optimizers=optimizers if updates else None)
    found: list[float] = []
    names: set[str] = set()
    for step in range(STEPS):
        inputs, targets = batch(layout, step)
        assert pipeline.step(inputs, targets, return_outputs=with_outputs) == (
            (None, None) if with_outputs else None
        )
        named = pipeline.named_losses()
        right: dict[str, list[Tensor]] = {}
        parts = {
            each.name: (
                inputs[each.name].chunk(each.microbatches),
                targets[each.name].chunk(each.microbatches),
                each.microbatches,
            )
            for each in layout.pipelines
        }
        for number in range(max(count for _, _, count in parts.values())):
            here = {name: each for name, each in parts.items() if number < each[2]}
            for name, loss in alone(
                whole,
                {name: values[number] for name, (values, _, _) in here.items()},
                {name: values[number] for name, (_, values, _) in here.items()},
            ).items():
                (loss / parts[name][2]).backward()
                right.setdefault(name, []).append(loss.detach())
        assert named.keys() == {f"{name}.loss" for name in right}
        for name, each in right.items():
            found.append(abs(named[f"{name}.loss"] - float(torch.stack(each).mean())))
            if name in pipeline.losses:
                names.add(name)
                found.append(difference(pipeline.losses[name], torch.stack(each)))
        for optimizer in [*([] if updates else optimizers.values()), *others]:
            optimizer.step()
            optimizer.zero_grad()
    for stage, module in stages.items():
        pipeline_of = layout.pipeline_of[stage]
        other_module = whole[pipeline_of.name][stage - pipeline_of.start]
        for weight, expected in zip(module.parameters(), other_module.parameters(), strict=True):
            found.append(difference(weight.detach(), expected.detach()))
    return {"worst": max(found), "losses": sorted(names)}


def teacher_and_student() -> list[dict[str, Any]]:
    """The gallery's program, at two depths of the teacher."""
    return [
        train(
            compile(PROGRAMS / "distillation.sched", {"microbatches": 4, "teachers": teachers}),
            "teacher",
            "student",
        )
        for teachers in (2, 4)
    ]


def test_a_frozen_teacher_beside_its_student(run_ranks: Run) -> None:
    results = run_ranks(teacher_and_student, 4).results()
    for found in results:
        assert [each["worst"] for each in found] == [0.0, 0.0]
    assert [each["losses"] for each in results[3]] == [["student"], ["student"]]


def actor_and_critic() -> dict[str, Any]:
    """Three models, two of which train, with other optimizers and numbers of microbatches."""
    plan = compile(PROGRAMS / "rlhf.sched", {"critic_microbatches": 3})
    return train(plan, "reference", "actor", with_outputs=True)


def test_actor_critic_and_reference(run_ranks: Run) -> None:
    results = run_ranks(actor_and_critic, 4).results()
    assert max(each["worst"] for each in results) == 0.0
    assert [each["losses"] for each in results] == [[], [], ["critic"], ["actor"]]
