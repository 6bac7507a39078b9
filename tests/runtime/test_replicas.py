"""Stages with replicas in the plan itself, and optimizer steps on their summed gradients, on real
processes.
"""

import copy
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn

from schedlang import Plan, Source, compile
from schedlang.runtime import Pipeline
from tests.support.models import (
    OPTIMIZERS,
    WIDTH,
    batch,
    delayed,
    difference,
    normed,
    program,
    shared_out,
    update_batches,
)
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

# Two replicas of WPipe: each group of stages has its own updates, which wait for the other
# replica's gradients.
GROUPS = """schedule groups {
    param ranks = 4
    param microbatches = 8
    let run = microbatches / 2
    pipeline lane(i) in 0 .. 2 runs run stage s in 0 .. 4 on 2 * i + s % 2
    weights delay(1) on 0 .. 2
    weights delay(1) on 4 .. 6
    fn group(n) = n / 2 % 2
    fn mb(n) = n / 4 * 2 + n % 2
    rank r {
        let own = r / 2
        let at = r % 2
        let ahead = 3 - at
        warmup { for n in 0 .. ahead { F(lane(own, 2 * group(n) + at), mb(n)) } }
        steady {
            for n in 0 .. 2 * run {
                F(lane(own, 2 * group(n + ahead) + at), mb(n + ahead))
                B(lane(own, 2 * (1 - group(n)) + at), mb(n))
                if n == 2 * run - 3 { U(lane(own, 2 + at)) }
            }
            U(lane(own, at))
        }
    }
}
"""
# Two directions, with a split backward and updates at the end of a step; sums come in another order
# on each rank.
DIRECTIONS = """schedule directions {
    param ranks = 4
    param microbatches = 4
    pipeline down runs microbatches / 2 stage s in 0 .. ranks on s
    pipeline up   runs microbatches / 2 stage s in 0 .. ranks on ranks - 1 - s
    rank r {
        let s = ranks - 1 - r
        repeat microbatches / 2 { F(down(r), next)  F(up(s), next) }
        repeat microbatches / 2 { B(down(r), next)  B(up(s), next) }
        repeat microbatches { W }
        U(down(r))
        U(up(s))
    }
}
"""
PLANS: dict[str, tuple[Callable[[], Plan], list[int]]] = {
    "3-1": (partial(program, "pipedream_replicated", ranks=4, microbatches=6), [1, 1]),
    "1-3": (
        partial(program, "pipedream_replicated", ranks=4, first=1, microbatches=6),
        [1, 1],
    ),
    "2-2": (
        partial(program, "pipedream_replicated", ranks=4, first=2, microbatches=8),
        [1, 1],
    ),
    "groups": (lambda: compile(Source("groups.sched", GROUPS)), [1, 1, 0, 0]),
    "directions": (lambda: compile(Source("directions.sched", DIRECTIONS)), [0] * 4),
}


def piece(plan: Plan, stage: int) -> int:
    return stage - plan.layout.pipeline_of[stage].start


class Replicas:
    """The stages of this rank with their pipeline; replicas are one module, or each its own."""

    def __init__(self, plan: Plan, optimizer: str, shares: bool) -> None:
        self.plan = plan
        model = normed(plan.layout.pieces)
        numbers = plan.stages_of(dist.get_rank())
        self.stages = {
            stage: model[piece(plan, stage)]
            if shares
            else copy.deepcopy(model[piece(plan, stage)])
            for stage in numbers
        }
        of_modules = {
            module: OPTIMIZERS[optimizer](list(module.parameters()))
            for module in self.stages.values()
        }
        self.optimizers = {
            stage: of_modules[module] for stage, module in self.stages.items()
        }
        self.pipeline = Pipeline(
            plan, self.stages, nn.functional.mse_loss, optimizers=self.optimizers
        )

    def step(self, updates: range) -> list[float]:
        losses = self.pipeline.step(
            *(
                torch.cat(each)
                for each in zip(*update_batches(self.plan, updates), strict=True)
            )
        )
        return [] if losses is None else losses.tolist()

    def states(self) -> Any:
        both = {
            stage: (each.state_dict(), self.optimizers[stage].state_dict())
            for stage, each in self.stages.items()
        }
        return self.pipeline.state_dict(), both

    def load(self, states: Any) -> None:
        for stage, (module, optimizer) in states[1].items():
            self.stages[stage].load_state_dict(module)
            self.optimizers[stage].load_state_dict(optimizer)
        self.pipeline.load_state_dict(states[0])

    def worst(self, expected: list[nn.Module]) -> float:
        pairs = [
            (each, expected[piece(self.plan, stage)])
            for stage, each in self.stages.items()
        ]
        weights = [
            zip(ours.parameters(), theirs.parameters(), strict=True)
            for ours, theirs in pairs
        ]
        return max(difference(*weight) for each in weights for weight in each)


Case = tuple[Plan, list[int], str]


def case_of(name: str) -> Case:
    """A plan of some updates, with the delay of each stage's weights, and an optimizer."""
    make, delays = PLANS[name]
    plan = make()
    optimizer = ("momentum", "adamw")[list(PLANS).index(name) % 2]
    return plan.for_updates(10) if plan.kernels else plan, delays, optimizer


def in_one_process(case: Case) -> list[list[nn.Module]]:
    """The stages after two steps of one process whose gradients are as late, and later by one
    update.
    """
    plan, delays, optimizer = case
    updates = 2 * plan.layout.updates
    others = delays, [each + 1 for each in delays]
    return [delayed(plan, each, optimizer, updates) for each in others]


def updates(case: Case) -> list[list[float]]:
    """Weights after 20 updates or more in two steps, with a checkpoint between, against one
    process.

    And against one whose gradients are as late by one more, or in time.
    """
    torch.set_default_dtype(torch.float64)
    found = []
    (expected,) = shared_out(in_one_process, {"case": case}).values()
    plan, _, optimizer = case
    count = plan.layout.updates
    for shares in (True, False):
        ours = Replicas(plan, optimizer, shares)
        ours.step(range(count))
        states = ours.states()
        ours = Replicas(plan, optimizer, shares)
        ours.load(states)
        ours.step(range(count, 2 * count))
        found.append([ours.worst(each) for each in expected])
    return found


@pytest.mark.parametrize("name", PLANS)
def test_weights_are_those_of_one_process(run_ranks: Run, name: str) -> None:
    """And not those of gradients that are one update later. Replicas on one rank are one module, or
    two.
    """
    for found in run_ranks(updates, 4, case_of(name)).results():
        assert len(found) == 2
        for right, later in found:
            assert right < 1e-12
            assert later > 1e-6


def losses() -> list[list[float]]:
    """A rank gives the losses of its microbatches in their order, update by update."""
    plan = PLANS["3-1"][0]().for_updates(5)
    found = Replicas(plan, "sgd", shares=True).step(range(5))
    parts = normed(2)
    expected = []
    for inputs, targets in update_batches(plan, range(2)):
        # The first two updates read the first version.
        for x, y in zip(inputs.chunk(6), targets.chunk(6), strict=True):
            expected.append(float(nn.functional.mse_loss(nn.Sequential(*parts)(x), y)))
    return [found[:12], expected] if found else []


def test_losses_are_in_the_order_of_the_batch(run_ranks: Run) -> None:
    found = [each for each in run_ranks(losses, 4).results() if each]
    assert len(found) == 1
    ours, expected = found[0]
    assert ours == pytest.approx(expected)


def one_of_two_optimizers() -> None:
    plan = program("pipedream_replicated", ranks=3)
    parts = normed(2)
    stages = {
        stage: parts[piece(plan, stage)] for stage in plan.stages_of(dist.get_rank())
    }
    optimizers = {
        stage: torch.optim.SGD(each.parameters(), 0.1) for stage, each in stages.items()
    }
    Pipeline(plan, stages, nn.functional.mse_loss, optimizers=optimizers)


def test_one_module_has_one_optimizer(run_ranks: Run) -> None:
    outcome = run_ranks(one_of_two_optimizers, 3)
    assert outcome.codes == [1] * 3
    assert re.search(
        r"rank 2 failed: stages 1 and 3 are one module, give them one optimizer",
        outcome.logs[2],
    )


def killed() -> None:
    """A rank dies before it joins a sum that others wait for."""
    ours = Replicas(PLANS["3-1"][0]().for_updates(5), "sgd", shares=True)
    if dist.get_rank() == 1:
        ours.stages[2].register_full_backward_pre_hook(lambda *_: os._exit(9))
    ours.step(range(5))


def test_one_who_dies_before_a_sum_is_named(run_ranks: Run) -> None:
    outcome = run_ranks(killed, 4)
    assert [code for rank, code in enumerate(outcome.codes) if rank != 1] == [1] * 3
    assert outcome.codes[1] == 9
    assert all(
        re.search(r"rank 1 is gone", log)
        for rank, log in enumerate(outcome.logs)
        if rank != 1
    ), outcome.logs


def sizes_of_batches() -> tuple[float, list[int]]:
    """How far gradients are from those of one process, and how many messages batches have, where a
    stage has many weights.
    """
    plan = program("gems", ranks=2, microbatches=2)
    torch.default_generator.manual_seed(0)
    model = [Many() for _ in range(plan.layout.pieces)]
    stages = {
        stage: copy.deepcopy(model[piece(plan, stage)])
        for stage in plan.stages_of(dist.get_rank())
    }
    sizes = list[int]()
    batch_isend_irecv = dist.batch_isend_irecv

    def noted(operations: list[dist.P2POp]) -> list[dist.Work]:
        sizes.append(len(operations))
        return batch_isend_irecv(operations)

    dist.batch_isend_irecv = noted
    inputs, targets = batch(plan, 0)
    Pipeline(plan, stages, nn.functional.mse_loss).step(inputs, targets)
    nn.functional.mse_loss(nn.Sequential(*model)(inputs), targets).backward()
    return max(
        difference(one.grad, other.grad)
        for stage, module in stages.items()
        for one, other in zip(
            module.parameters(), model[piece(plan, stage)].parameters(), strict=True
        )
    ), sizes


class Many(nn.Module):
    """A stage of 200 weights."""

    def __init__(self) -> None:
        super().__init__()
        weights = [torch.randn(WIDTH, dtype=torch.float64) for _ in range(200)]
        self.weights = nn.ParameterList(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * torch.stack([*self.weights]).mean(0)).tanh()


def test_sums_are_sent_in_batches_that_nccl_takes(run_ranks: Run) -> None:
    for worst, sizes in run_ranks(sizes_of_batches, 2).results():
        assert worst < 1e-12
        assert sum(sizes) == 2 * 2 * (200 + 1)
        assert max(sizes) <= 256
