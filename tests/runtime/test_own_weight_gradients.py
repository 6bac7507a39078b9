"""Layers that compute their weight gradients when they are told to, as those of Transformer Engine
do, on real processes: at the plan's W, or after a whole backward; weights are those of one process.
"""

from collections import deque
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import Source, compile
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.mesh import add_gradients
from tests.support.models import WIDTH, batch, difference, pipeline, program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, queue: deque[Any]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.queue.append((gradient, x))
        return gradient @ weight, None, None


class Delayed(nn.Module):
    """A linear layer in the form that Transformer Engine's have with `delay_wgrad_compute`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64) / 3)
        self.queue: deque[tuple[Tensor, Tensor]] = deque()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return _Matmul.apply(x, self.weight, self.queue)

    def backward_dw(self) -> None:
        """Like theirs, it replaces a gradient that is there."""
        self.calls += 1
        gradient, x = self.queue.popleft()
        self.weight.grad = gradient.t() @ x


def model(stages: int, is_delayed: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    found = []
    for delayed in [Delayed() for _ in range(stages)]:
        layer: nn.Module = delayed
        if not is_delayed:
            layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
            layer.weight.data = delayed.weight.data
        norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        found.append(nn.Sequential(norm, layer, nn.Tanh()))
    return found


def trains(name: str, ranks: int) -> float:
    """The largest difference of gradients after two steps, which add up."""
    plan = program(name, ranks=ranks, microbatches=4)
    ours = model(len(plan.placement), is_delayed=True)
    alone = model(len(plan.placement), is_delayed=False)
    built = pipeline(plan, ours)
    for seed in range(2):
        inputs, targets = batch(plan, seed)
        built.step(inputs, targets)
        add_gradients(plan, alone, inputs, targets, replicas=1)
    found = []
    for number in plan.stages_of(dist.get_rank()):
        assert ours[number][1].calls == 2 * plan.microbatches
        pairs = zip(ours[number].parameters(), alone[number].parameters(), strict=True)
        found += [difference(one.grad, other.grad) for one, other in pairs]
    return max(found)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("1f1b", 2), ("zb_h1", 2), ("zb_v", 2), ("1f1b_recompute", 2), ("zb_h1", 3)],
)
def test_layers_that_compute_their_own_weight_gradients(
    name: str, ranks: int, run_ranks: Run
) -> None:
    assert max(run_ranks(partial(trains, name, ranks), ranks).results()) < 1e-12


def one_stage(text: str, **options: Any) -> Plan:
    plan = compile(Source("own.sched", text))
    stages = {0: model(1, is_delayed=True)[0]}
    Pipeline(plan, stages, nn.functional.mse_loss, **options).step(*batch(plan, 0))
    return plan


BACKWARDS_ORDER = """schedule own {
    param ranks = 1
    param microbatches = 2
    stage s in 0 .. 1 on 0
    rank r { F(0, 0) F(0, 1) I(0, 0) I(0, 1) W(0, 1) W(0, 0) }
}
"""


def test_weight_gradients_in_another_order_than_the_backwards(run_ranks: Run) -> None:
    run = run_ranks(partial(one_stage, BACKWARDS_ORDER), 1)
    assert run.codes == [1]
    assert "the plan wants those of microbatch 1 before those of 0" in run.logs[0]


def test_an_audit_would_fill_the_queues_of_layers(run_ranks: Run) -> None:
    text = BACKWARDS_ORDER.replace("W(0, 1) W(0, 0)", "W(0, 0) W(0, 1)")
    run = run_ranks(partial(one_stage, text, audit=True), 1)
    assert run.codes == [1]
    assert "(`backward_dw`), which cannot be with an audit of the stages" in run.logs[0]
