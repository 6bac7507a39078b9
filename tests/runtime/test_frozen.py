"""Frozen stages on real processes: the rest trains as in one process, and nothing is done in vain."""

import re
import warnings

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import Source, compile
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.models import alone, batch, difference, one_model
from tests.support.paths import PROGRAMS
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

STEPS = 20
#: A prefix; stages before, between and behind trained ones; all but the first one.
PREFIX = "frozen 0 .. 2"
BETWEEN = "frozen 0 .. 1  frozen 2 .. 3"
ADAPTED = "frozen 1 .. 4"


def plan_of(name: str, lines: str, **params: int) -> Plan:
    """A plan of a program in the gallery with more lines, without what it claims."""
    text = re.sub(r"^ *assert .*\n", "", (PROGRAMS / f"{name}.sched").read_text(), flags=re.M)
    place = text.rindex("}")
    text = f"{text[:place]}    {lines}\n}}\n"
    return compile(Source(f"{name}.sched", text), {"ranks": 4, "microbatches": 8} | params)


def model_of(plan: Plan) -> list[nn.Module]:
    """The stages of a small model, of which those that are frozen in the plan are frozen."""
    stages = one_model(plan.layout)
    for number, stage in enumerate(stages):
        stage.requires_grad_(number not in plan.layout.frozen)
    return stages


def own_of(plan: Plan, model: list[nn.Module]) -> dict[int, nn.Module]:
    """This rank's stages; replicas on one rank are one module."""
    return {stage: model[plan.layout.piece(stage)] for stage in plan.stages_of(dist.get_rank())}


def sgd(stage: nn.Module) -> torch.optim.Optimizer | None:
    weights = [weight for weight in stage.parameters() if weight.requires_grad]
    return torch.optim.SGD(weights, 0.1, momentum=0.9) if weights else None


def train_alone(plan: Plan, steps: int) -> tuple[list[Tensor], list[nn.Module]]:
    """The losses of each step in one process, and the model after them."""
    model = model_of(plan)
    optimizers = [optimizer for optimizer in map(sgd, model) if optimizer]
    losses = []
    for step in range(steps):
        inputs, targets = batch(plan, step)
        of_step = []
        parts = zip(inputs.chunk(plan.microbatches), targets.chunk(plan.microbatches), strict=True)
        for x, y in parts:
            loss = nn.functional.mse_loss(alone(model, x), y)
            (loss / plan.microbatches).backward()
            of_step.append(loss.detach())
        losses.append(torch.stack(of_step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


def trained(name: str, lines: str, **params: int) -> tuple[bool, float]:
    """Whether all weights and losses of this rank are to the bit those of one process, and how far
    they are at most.
    """
    plan = plan_of(name, lines, **params)
    expected, reference = train_alone(plan, STEPS)
    stages = own_of(plan, model_of(plan))
    optimizers = [optimizer for optimizer in map(sgd, set(stages.values())) if optimizer]
    pairs = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = Pipeline(plan, stages, nn.functional.mse_loss)
        for step in range(STEPS):
            losses = ours.step(*batch(plan, step))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if losses is not None and len(plan.layout.pipelines) == 1:
                pairs.append((losses, expected[step]))
    for number, stage in stages.items():
        other = reference[plan.layout.piece(number)]
        pairs += zip(stage.parameters(), other.parameters(), strict=True)
        if number in plan.layout.frozen:
            assert all(weight.grad is None for weight in stage.parameters())
    return all(torch.equal(*pair) for pair in pairs), max(difference(*pair) for pair in pairs)


def schedules() -> dict[str, tuple[bool, float]]:
    names = ("1f1b", "1f1b_explicit", "zb_h1", "zb_v", "dualpipe", "1f1b_recompute", "seq1f1b")
    return {
        f"{name} {lines}": trained(name, lines)
        for name in names
        for lines in (PREFIX, BETWEEN, ADAPTED)
    }


def test_twenty_steps_are_those_of_one_process(run_ranks: Run) -> None:
    """To the bit, but where gradients of replicas or of slices are summed."""
    for found in run_ranks(schedules, 4).results():
        assert len(found) == 21
        for name, (equal, worst) in found.items():
            assert equal or name.startswith(("dualpipe", "seq1f1b")), name
            assert worst < 1e-12, name
