"""Trains the small GPT with a plan, and again without one, to compare."""

import copy
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor, nn

from schedlang.kinds import Kind
from schedlang.plan import Plan
from schedlang.runtime.corpus import draw_batch
from schedlang.runtime.gpt import CONTEXT, build_gpt, next_byte_loss, run_gpt
from schedlang.runtime.pipeline import Pipeline
from schedlang.runtime.progress import Progress
from schedlang.runtime.trace import clock_offset
from schedlang.runtime.weights import delays
from schedlang.timeline import Bar

#: Rows of a microbatch.
ROWS = 4
#: The most steps at the end that are recorded.
RECORDED = 10


@define
class Training:
    """What came out on one rank.

    `first` is how many steps a checkpoint had. `losses` is what the rank's microbatches add to the mean loss of each
    step, on ranks of last stages only; `seconds` how long each took there. `gradients` are the last step's, by stage
    and parameter; `recorded` the compute ops of the recorded steps, and `messages` their sends and waits for receives,
    in the clock of the last stage's rank with the `offset`.
    """

    first: int = 0
    losses: list[float] = field(factory=list)
    seconds: list[float] = field(factory=list)
    gradients: dict[str, Tensor] = field(factory=dict)
    recorded: list[list[Bar]] = field(factory=list)
    messages: list[list[Bar]] = field(factory=list)
    offset: float = 0.0


@frozen
class Checkpoints:
    """The folder of a run's checkpoints, and after how many steps one is written, at least."""

    folder: Path
    every: int


def train(
    plan: Plan, corpus: Tensor, steps: int, seed: int, timeout: float, checkpoints: Checkpoints | None = None
) -> Training:
    """Train with the plan, together with all other ranks; the rank of the last stage prints a line per step.

    With checkpoints, it goes on from the last one.
    """
    training, progress = Training(), Progress(plan, steps)
    stages = build_stages(plan, plan.stages_of(dist.get_rank()), seed)
    of_modules = {module: _noting_optimizer(training, plan, stage, module) for stage, module in stages.items()}
    optimizers = {stage: of_modules[module] for stage, module in stages.items()}
    actions = plan.ranks[dist.get_rank()]
    updated = {stage for kind, stage in zip(actions.kind, actions.stage, strict=True) if kind == Kind.U}
    pipeline = Pipeline(
        plan, stages, next_byte_loss, optimizers={stage: optimizers[stage] for stage in updated}, timeout=timeout
    )
    others = [] if updated else [*of_modules.values()]
    if checkpoints:
        training.first = pipeline.resume(checkpoints.folder, others)
    begins = range(training.first, steps, plan.layout.updates)
    # The first step also pays for what torch sets up once.
    recorded = begins[1:][-RECORDED:] or begins
    for step in begins:
        start = perf_counter()
        pipeline.record = progress.is_bar or step in recorded
        losses = pipeline.step(*_batches(plan, corpus, seed, step))
        for optimizer in others:
            optimizer.step()
            optimizer.zero_grad()
        if step in recorded:
            training.recorded.append(pipeline.bars)
            training.messages.append(pipeline.messages)
        if losses is not None:
            busy = sum(bar.end - bar.start for bar in pipeline.bars)
            _note(training, plan, losses, perf_counter() - start, busy, progress)
        end = step + plan.layout.updates
        if checkpoints and (end >= steps or end // checkpoints.every > step // checkpoints.every):
            pipeline.save(checkpoints.folder, end, others)
    training.offset = clock_offset(plan.placement[-1])
    return training


def _note(training: Training, plan: Plan, losses: Tensor, seconds: float, busy: float, progress: Progress) -> None:
    """Note and tell the losses of a step, by its updates."""
    updates = plan.layout.updates
    for each in losses.view(updates, -1):
        training.losses.append(float(each.sum()) * updates / plan.microbatches)
        training.seconds.append(seconds / updates)
        step = training.first + len(training.losses)
        progress.show(step, float(each.mean()), tokens(plan) / seconds, 1 - busy / seconds)


def build_stages(plan: Plan, numbers: Iterable[int], seed: int) -> dict[int, nn.Module]:
    """Some stages of the model; stages of several pipelines that are replicas are one module."""
    layout = plan.layout
    parts = build_gpt(layout.pieces, seed, layout.slices, layout.skips)
    return {number: parts[number - layout.pipeline_of[number].start] for number in numbers}


def train_alone(plan: Plan, corpus: Tensor, steps: int, seed: int) -> Training:
    """The same training in this process, without schedule or messages; where gradients are late, as late."""
    training, per_update = Training(), plan.microbatches // plan.layout.updates
    parts = build_gpt(plan.layout.pieces, seed)
    optimizers = [_optimizer(part) for part in parts]
    behind = {stage: late for rank in range(len(plan.ranks)) for stage, late in delays(plan, rank).items()}
    #: For each part the weights that the next update's microbatches read, and all later ones.
    versions = [deque([copy.deepcopy(part)], behind[stage] + 1) for stage, part in enumerate(parts)]
    for step in range(steps):
        read = [each[0] for each in versions]
        model = partial(run_gpt, read, plan.layout.skips)
        training.losses.append(_add_gradients(model, *_batch(plan, corpus, seed, step), per_update))
        for part, other, optimizer, kept in zip(parts, read, optimizers, versions, strict=True):
            for weight, old in zip(part.parameters(), other.parameters(), strict=True):
                weight.grad, old.grad = old.grad, None
            optimizer.step()
            kept.append(copy.deepcopy(part))
    for stage, part in enumerate(parts):
        _keep_gradients(training, stage, part)
    return training


def _add_gradients(model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor, microbatches: int) -> float:
    """Add the gradient of the mean loss of some microbatches, one by one; that loss."""
    losses = []
    for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
        loss = next_byte_loss(model(x), y)
        torch.autograd.backward(loss / microbatches)
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def tokens(plan: Plan) -> int:
    """Bytes in a batch, that of all updates of the plan."""
    return plan.microbatches * ROWS * CONTEXT


def _batches(plan: Plan, corpus: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """What is trained on in a step of the plan, which may make several updates."""
    batches = [_batch(plan, corpus, seed, each) for each in range(step, step + plan.layout.updates)]
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs), torch.cat(targets)


def _batch(plan: Plan, corpus: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """What is trained on in one update."""
    return draw_batch(corpus, plan.microbatches // plan.layout.updates * ROWS, CONTEXT, seed * 1_000_003 + step)


def _noting_optimizer(training: Training, plan: Plan, stage: int, module: nn.Module) -> torch.optim.SGD:
    """One that notes the gradients, at the last moment at which they are whole, whoever updates."""
    optimizer = _optimizer(module)
    piece = stage - plan.layout.pipeline_of[stage].start
    optimizer.register_step_pre_hook(partial(_keep_gradients, training, piece, module))
    return optimizer


def _optimizer(module: nn.Module) -> torch.optim.SGD:
    # Not Adam: it divides by the gradient's own size, so rounding errors of tiny gradients would grow to full steps.
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _keep_gradients(training: Training, stage: int, module: nn.Module, *_: Any) -> None:
    for name, weight in module.named_parameters():
        assert weight.grad is not None
        training.gradients[f"stage {stage}, {name}"] = weight.grad.clone()
