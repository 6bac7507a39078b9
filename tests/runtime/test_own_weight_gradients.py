"""Layers that compute their weight gradients when they are told to, as those of Transformer Engine
do, on real processes: at the plan's W, or after a whole backward; weights are those of one process.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang import Source, compile
from schedlang.runtime import Pipeline
from schedlang.runtime.parts.own_weight_gradients import Layers
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
        self.weight.grad = self.oldest()

    def oldest(self) -> Tensor:
        """The gradient of the oldest backward."""
        self.calls += 1
        gradient, x = self.queue.popleft()
        return gradient.t() @ x


class Built(nn.Sequential):
    """A stage with a builder in the form of torch's `PipelineStage(…, dw_builder=…)`."""

    def dw_builder(self) -> Callable[[], None]:
        """The layer's gradient from the backward that is over, which is then added up."""
        gradient, x = self[1].queue.popleft()

        def compute() -> None:
            self[1].queue.append((gradient, x))
            of_weight = self[1].oldest()
            weight = self[1].weight
            weight.grad = of_weight if weight.grad is None else weight.grad + of_weight

        return compute


def model(stages: int, form: str) -> list[nn.Module]:
    """Stages whose layer computes its weight gradient in a form, or plain ones."""
    torch.manual_seed(0)
    found: list[nn.Module] = []
    for delayed in [Delayed() for _ in range(stages)]:
        layer: nn.Module = delayed
        if form == "plain":
            layer = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)
            layer.weight.data = delayed.weight.data
        if form == "dw_builder":
            layer.backward_dw = None
        norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        made = Built if form == "dw_builder" else nn.Sequential
        found.append(made(norm, layer, nn.Tanh()))
    return found


def trains(name: str, ranks: int, form: str) -> float:
    """The largest difference of gradients after two steps, which add up."""
    plan = program(name, ranks=ranks, microbatches=4)
    ours = model(len(plan.placement), form)
    alone = model(len(plan.placement), "plain")
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


@pytest.mark.parametrize("form", ["backward_dw", "dw_builder"])
@pytest.mark.parametrize(
    ("name", "ranks"),
    [("1f1b", 2), ("zb_h1", 2), ("zb_v", 2), ("1f1b_recompute", 2), ("zb_h1", 3)],
)
def test_layers_that_compute_their_own_weight_gradients(
    name: str, ranks: int, form: str, run_ranks: Run
) -> None:
    assert max(run_ranks(partial(trains, name, ranks, form), ranks).results()) < 1e-12


def test_gradients_add_up_in_the_memory_of_the_script() -> None:
    """A script may have laid out gradients in a flat tensor."""
    layer = Delayed()
    flat = torch.zeros(layer.weight.numel(), dtype=torch.float64)
    layer.weight.grad = flat.view(layer.weight.shape)
    layers = Layers(0, [layer])
    for _ in range(2):
        layer(
            torch.ones(1, WIDTH, dtype=torch.float64, requires_grad=True)
        ).sum().backward()
        layers.build(0)()
    assert torch.equal(flat, torch.full_like(flat, 2))


def one_stage(text: str, form: str = "backward_dw", **options: Any) -> float:
    """A step of one stage; the largest difference of its gradients from those of a plain one."""
    plan = compile(Source("own.sched", text))
    ours, alone = (model(1, each)[0] for each in (form, "plain"))
    loss_fn = nn.functional.mse_loss
    Pipeline(plan, {0: ours}, loss_fn, **options).step(*batch(plan, 0))
    add_gradients(plan, [alone], *batch(plan, 0), replicas=1)
    pairs = zip(ours.parameters(), alone.parameters(), strict=True)
    return max(difference(one.grad, other.grad) for one, other in pairs)


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


def test_a_builder_computes_weight_gradients_in_any_order(run_ranks: Run) -> None:
    run = run_ranks(partial(one_stage, BACKWARDS_ORDER, "dw_builder"), 1)
    assert run.results()[0] < 1e-12


def test_an_audit_would_fill_the_queues_of_layers(run_ranks: Run) -> None:
    text = BACKWARDS_ORDER.replace("W(0, 1) W(0, 0)", "W(0, 0) W(0, 1)")
    run = run_ranks(partial(one_stage, text, audit=True), 1)
    assert run.codes == [1]
    assert "`dw_builder`), which cannot be with an audit of the stages" in run.logs[0]
