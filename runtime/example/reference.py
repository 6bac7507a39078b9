"""The reference run: what the command does again in one process, without schedule or messages, to
compare with.
"""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from attrs import evolve
from torch import Tensor

from schedlang.runtime.example.gpt import cut_gpt, next_byte_loss, run_gpt
from schedlang.runtime.example.train import Training, keep_gradients
from schedlang.runtime.example.workload import Workload
from schedlang.runtime.stage.versions import delays


def train_reference(workload: Workload, steps: int) -> Training:
    """The same updates from the first one on. Where the plan's gradients are late, these are as
    late.
    """
    training = Training()
    plan = workload.plan
    parts = cut_gpt(workload.layers(), evolve(plan.layout, skips=()), sliced=False)
    optimizers = list(map(workload.optimizer, parts))
    behind = {
        stage: late for rank in range(len(plan.ranks)) for stage, late in delays(plan, rank).items()
    }
    #: For each part the weights that the next update's microbatches read, and all later ones.
    # With a delay of d the oldest of d + 1 versions is read; a deque of that length lets go of
    # older ones by itself, and while it fills up, its first is version 0, as for the plan.
    versions = [deque([copy.deepcopy(part)], behind[stage] + 1) for stage, part in enumerate(parts)]
    for step in range(steps):
        read = [kept[0] for kept in versions]
        model = partial(run_gpt, read, plan.layout)
        trains = not plan.is_forward_only
        training.losses.append(_run(model, workload, step, trains))
        if not trains:
            continue
        for part, other, optimizer, kept in zip(parts, read, optimizers, versions, strict=True):
            for weight, old in zip(part.parameters(), other.parameters(), strict=True):
                weight.grad = old.grad
                old.grad = None
            optimizer.step()
            kept.append(copy.deepcopy(part))
    for part in parts:
        keep_gradients(training, part)
    return training


def _run(
    run: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    workload: Workload,
    update: int,
    trains: bool,
) -> float:
    """Run the microbatches of an update one by one, and give their mean loss, of several models the
    mean of these; where it `trains`, its gradients add up.
    """
    losses: dict[str, list[Tensor]] = {}
    counts = workload.of_models
    batches = {model: workload.cut(update, model) for model in counts}
    for number in range(max(counts.values())):
        here = [model for model, count in counts.items() if number < count]
        with torch.set_grad_enabled(trains):
            outputs = run({model: batches[model][number][0] for model in here})
            of_models = {
                model: _share_of_loss(output, batches[model], number)
                for model, output in outputs.items()
            }
        for model, loss in of_models.items():
            if loss.requires_grad:
                torch.autograd.backward(loss / counts[model])
            losses.setdefault(model, []).append(loss.detach())
    means = [float(torch.stack(of_model).mean()) for of_model in losses.values()]
    return sum(means) / len(means)


def _share_of_loss(output: Tensor, batch: Sequence[tuple[Tensor, Tensor]], number: int) -> Tensor:
    """The loss of a microbatch, as its bytes count in the batch."""
    _, targets = batch[number]
    bytes = sum(y.numel() for _, y in batch)
    # 1.0 where all are alike.
    return next_byte_loss(output, targets) * (targets.numel() * len(batch) / bytes)
