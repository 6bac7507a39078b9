"""Trains the small GPT with a plan, and again without one, to compare."""

from collections.abc import Iterable
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor, nn

from schedlang.kinds import Kind
from schedlang.plan import Plan
from schedlang.runtime.corpus import draw_batch
from schedlang.runtime.gpt import CONTEXT, build_gpt, next_byte_loss
from schedlang.runtime.pipeline import Pipeline
from schedlang.timeline import Bar

#: Rows of a microbatch.
ROWS = 4
#: Steps at the end that are recorded.
RECORDED = 3


@define
class Training:
    """What came out on one rank.

    `losses` is what the rank's microbatches add to the mean loss of each step, on ranks of last stages only; `seconds`
    how long each took there. `gradients` are the last step's, by stage and parameter; `recorded` the compute ops of the
    recorded steps.
    """

    losses: list[float] = field(factory=list)
    seconds: list[float] = field(factory=list)
    gradients: dict[str, Tensor] = field(factory=dict)
    recorded: list[list[Bar]] = field(factory=list)


def train(plan: Plan, corpus: Tensor, steps: int, seed: int, timeout: float) -> Training:
    """Train with the plan, together with all other ranks; the rank of the last stage prints a line per step."""
    training = Training()
    rank = dist.get_rank()
    stages = build_stages(plan, plan.stages_of(rank), seed)
    optimizers = {stage: _optimizer(module) for stage, module in stages.items()}
    for stage, optimizer in optimizers.items():
        # The last moment at which gradients are whole, whether the plan or the loop below updates.
        piece = stage - plan.layout.pipeline_of[stage].start
        optimizer.register_step_pre_hook(partial(_keep_gradients, training, piece, stages[stage]))
    actions = plan.ranks[rank]
    updated = {stage for kind, stage in zip(actions.kind, actions.stage, strict=True) if kind == Kind.U}
    pipeline = Pipeline(
        plan, stages, next_byte_loss, optimizers={stage: optimizers[stage] for stage in updated}, timeout=timeout
    )
    for step in range(steps):
        start = perf_counter()
        pipeline.record = step >= steps - RECORDED
        losses = pipeline.step(*_batch(plan, corpus, seed, step))
        for stage in optimizers.keys() - updated:
            optimizers[stage].step()
            optimizers[stage].zero_grad()
        if pipeline.record:
            training.recorded.append(pipeline.bars)
        if losses is not None:
            training.losses.append(float(losses.sum()) / plan.microbatches)
            training.seconds.append(perf_counter() - start)
            if rank == plan.placement[-1]:
                speed = tokens(plan) / training.seconds[-1]
                print(f"step {step + 1:>3}  loss {float(losses.mean()):.4f}  {speed:>9,.0f} tokens/s", flush=True)
    return training


def build_stages(plan: Plan, numbers: Iterable[int], seed: int) -> dict[int, nn.Module]:
    """Some stages of the model; stages of several pipelines that are replicas begin with the same weights."""
    starts = {number: plan.layout.pipeline_of[number].start for number in numbers}
    models = {start: build_gpt(plan.layout.pieces, seed) for start in set(starts.values())}
    return {number: models[start][number - start] for number, start in starts.items()}


def train_alone(plan: Plan, corpus: Tensor, steps: int, seed: int) -> Training:
    """The same training in this process, without stages, schedule or messages."""
    training = Training()
    parts = build_gpt(plan.layout.pieces, seed)
    model = nn.Sequential(*parts)
    optimizer = _optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        inputs, targets = _batch(plan, corpus, seed, step)
        losses = []
        for x, y in zip(inputs.chunk(plan.microbatches), targets.chunk(plan.microbatches), strict=True):
            loss = next_byte_loss(model(x), y)
            torch.autograd.backward(loss / plan.microbatches)
            losses.append(loss.detach())
        training.losses.append(float(torch.stack(losses).mean()))
        optimizer.step()
    for stage, part in enumerate(parts):
        _keep_gradients(training, stage, part)
    return training


def tokens(plan: Plan) -> int:
    """Bytes in a batch."""
    return plan.microbatches * ROWS * CONTEXT


def _batch(plan: Plan, corpus: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
    return draw_batch(corpus, plan.microbatches * ROWS, CONTEXT, seed * 1_000_003 + step)


def _optimizer(module: nn.Module) -> torch.optim.SGD:
    # Not Adam: it divides by the gradient's own size, so rounding errors of tiny gradients would grow to full steps.
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _keep_gradients(training: Training, stage: int, module: nn.Module, *_: Any) -> None:
    for name, weight in module.named_parameters():
        assert weight.grad is not None
        training.gradients[f"stage {stage}, {name}"] = weight.grad.clone()
