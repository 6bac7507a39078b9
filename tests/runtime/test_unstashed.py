"""Backwards that read newer weights than their forwards, on real processes, against gradients that
are written out here.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.paths import PROGRAMS
from tests.support.ranks import Run

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedlang import Source, compile
from schedlang.plan.plan import Plan
from tests.support.models import (
    OPTIMIZERS,
    difference,
    normed,
    pipeline,
    program,
    update_batches,
)
from tests.support.sizes import sizes
from tests.support.training import Train, printed_figures

pytestmark = pytest.mark.processes

UPDATES = 10
#: Two steps of so many updates: the second one starts from a pipeline that is empty.
STEPS = 2
# Backwards in halves.
HALVES = """schedule halves {
    param ranks = 4
    param microbatches = 2
    weights unstashed
    rank r {
        let ahead = ranks - 1 - r
        warmup { for m in 0 .. ahead { F(m) } }
        steady { for m in 0 .. microbatches { F(m + ahead)  I(m) }  W(0)  W(1)  U }
    }
}
"""


class Written:
    """A layer norm, a linear layer and tanh, whose backward is written out: it goes through the
    weights that it is given, with what the forward has kept.
    """

    def __init__(self, weights: list[Tensor], x: Tensor) -> None:
        self.weights = weights
        scale, shift, matrix, bias = weights
        centred = x - x.mean(1, keepdim=True)
        self.factor = 1 / torch.sqrt((centred**2).mean(1, keepdim=True) + 1e-5)
        self.normal = centred * self.factor
        self.middle = self.normal * scale + shift
        self.output = torch.tanh(self.middle @ matrix.T + bias)

    def backward(
        self, weights: list[Tensor], gradient: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        scale, _, matrix, _ = weights
        inner = gradient * (1 - self.output**2)
        middle = inner @ matrix
        normal = middle * scale
        input = self.factor * (
            normal
            - normal.mean(1, keepdim=True)
            - self.normal * (normal * self.normal).mean(1, keepdim=True)
        )
        of_weights = [
            (middle * self.normal).sum(0),
            middle.sum(0),
            inner.T @ self.middle,
        ]
        return input, [*of_weights, inner.sum(0)]


def written(plan: Plan, optimizer: str, reads_again: str = "newest") -> list[nn.Module]:
    """What one process makes of it: forward n of a stage that runs d forwards ahead comes right
    before its backward n - d, and all M backwards of an update before the update. A backward reads
    the newest weights again, or those that its forward has "stashed".
    """
    ranks = len(plan.ranks)
    stages = exact(ranks)
    optimizers = [OPTIMIZERS[optimizer](list(each.parameters())) for each in stages]
    per_update = plan.microbatches // UPDATES
    for start in range(0, STEPS * UPDATES, UPDATES):
        kept = [[_weights(each)] for each in stages]
        for update, (inputs, targets) in enumerate(batches(plan, start)):
            pairs = zip(
                inputs.chunk(per_update), targets.chunk(per_update), strict=True
            )
            for number, (x, y) in enumerate(pairs, update * per_update):
                made: list[Written] = []
                for stage in range(ranks):
                    ahead = ranks - 1 - stage
                    version = max(number - ahead, 0) // per_update
                    made.append(
                        Written(kept[stage][version], made[-1].output if made else x)
                    )
                gradient = 2 * (made[-1].output - y) / y.numel() / per_update
                for stage in reversed(range(ranks)):
                    newest = _weights(stages[stage])
                    again = made[stage].weights if reads_again == "stashed" else newest
                    gradient, found = made[stage].backward(again, gradient)
                    for weight, each in zip(
                        stages[stage].parameters(), found, strict=True
                    ):
                        weight.grad = (
                            each if weight.grad is None else weight.grad + each
                        )
            for stage, each in enumerate(optimizers):
                each.step()
                each.zero_grad()
                kept[stage].append(_weights(stages[stage]))
    return stages


def exact(stages: int) -> list[nn.Module]:
    return [each.double() for each in normed(stages)]


def batches(plan: Plan, start: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of the updates of a step."""
    found = update_batches(plan, range(start, start + UPDATES))
    return [(inputs.double(), targets.double()) for inputs, targets in found]


def _weights(stage: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in stage.parameters()]


def trained(plan: Plan, optimizer: str) -> tuple[float, float]:
    """How far the stages of this rank are from what is written out, and from that with stashed
    weights.
    """
    mine = plan.stages_of(dist.get_rank())
    model = exact(len(plan.placement))
    optimizers = {
        each: OPTIMIZERS[optimizer](list(model[each].parameters())) for each in mine
    }
    ours = pipeline(plan, model, optimizers=optimizers)
    places = [model[each][1].weight.data_ptr() for each in mine]
    for start in range(0, STEPS * UPDATES, UPDATES):
        ours.step(
            *(torch.cat(each) for each in zip(*batches(plan, start), strict=True))
        )
    # Updates are made in place, and there is nothing that a checkpoint would need beside the model.
    assert places == [model[each][1].weight.data_ptr() for each in mine]
    assert ours.state_dict() == {}
    worst = []
    for reads_again in ("newest", "stashed"):
        right = written(plan, optimizer, reads_again)
        worst.append(
            max(
                difference(one.detach(), other.detach())
                for stage in mine
                for one, other in zip(
                    model[stage].parameters(), right[stage].parameters(), strict=True
                )
            )
        )
    return worst[0], worst[1]


def several(cases: dict[str, tuple[Plan, str]]) -> dict[str, tuple[float, float]]:
    return {name: trained(*case) for name, case in cases.items()}


def test_backwards_read_the_newest_weights(run_ranks: Run) -> None:
    """20 updates, also by an optimizer whose changes autograd does not count."""
    plans = {
        f"pipemare {microbatches}": program(
            "pipemare", ranks=4, microbatches=microbatches
        )
        for microbatches in (1, 2, 3)
    }
    plans["halves"] = compile(Source("s.sched", HALVES))
    cases = {
        f"{name}, {optimizer}": (plan.for_updates(UPDATES), optimizer)
        for name, plan in plans.items()
        for optimizer in ("momentum", "fused")
    }
    found = run_ranks(several, 4, cases).results()
    for name in cases:
        assert max(rank[name][0] for rank in found) < 1e-12, name
        # As far as ranks run ahead, stashed weights are others; the last rank feels it by what
        # those before it hand on.
        assert min(rank[name][1] for rank in found) > 1e-4, name


def autocast() -> None:
    with torch.autocast("cpu"):
        refused(exact(4))


def parametrized() -> None:
    model = exact(4)
    nn.utils.parametrizations.weight_norm(model[0][1])
    refused(model)


class Checkpointed(nn.Module):
    """A stage whose backward runs its forward again."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


def checkpointed() -> None:
    refused([Checkpointed(each) for each in exact(4)])


def moved() -> None:
    """An optimizer that gives weights other memory."""

    class Mover(torch.optim.SGD):
        def step(self) -> None:
            for group in self.param_groups:
                for weight in group["params"]:
                    weight.data = weight.data - 0.1 * weight.grad

    refused(exact(4), Mover)


def refused(
    model: list[nn.Module], kind: type[torch.optim.Optimizer] = torch.optim.SGD
) -> None:
    plan = program("pipemare", ranks=4).for_updates(UPDATES)
    (mine,) = plan.stages_of(dist.get_rank())
    optimizers = {mine: kind(list(model[mine].parameters()), 0.1)}
    ours = pipeline(plan, model, optimizers=optimizers)
    ours.step(*(torch.cat(each) for each in zip(*batches(plan, 0), strict=True)))


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (autocast, r"the forward of stage \d casts its weights \(torch.autocast\)"),
        (parametrized, r"`1` of stage 0 computes its weights from others"),
        (
            checkpointed,
            "a checkpoint that runs its forward again in the backward, or a hook, reads weights",
        ),
        (moved, r"the optimizer gives the weight `0.weight` of stage \d other memory"),
    ],
)
def test_what_backwards_would_not_see_is_refused(
    run_ranks: Run, train: Callable[[], None], reason: str
) -> None:
    failed = run_ranks(train, 4)
    assert re.search(reason, "".join(failed.logs)), failed.logs
    assert any(failed.codes)


@pytest.mark.parametrize("steps", sizes([8, 20], lambda steps: steps > 8))
def test_the_example_is_that_of_one_process(train: Train, steps: int) -> None:
    """More updates than any stage is ahead of the last one."""
    options = "--steps", steps, "--check", "--audit"
    trained = train(4, PROGRAMS / "pipemare.sched", *options)
    assert trained.codes == [0] * 4, trained.stderr
    figures = printed_figures(trained.stdout)
    assert figures["gradient_error"] <= 1e-5
    assert figures["loss_error"] <= 1e-5


SLICED = """schedule sliced {
    param ranks = 1
    param microbatches = 1
    param slices = 2
    weights unstashed
    rank r {
        warmup {}
        steady { F(0, 0)  F(0, 1)  B(0, 1)  B(0, 0)  U }
    }
}
"""


def test_what_no_process_trains_alike_is_not_compared(
    train: Train, tmp_path: Path
) -> None:
    path = tmp_path / "sliced.sched"
    path.write_text(SLICED)
    done = train(1, path, "--steps", 1, "--check")
    assert done.codes == [1]
    assert "there is no one process to compare it with" in done.stderr
    assert "Traceback" not in done.stderr
