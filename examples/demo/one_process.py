"""The reference run: what the command does again in one process, without schedule or messages, to
compare with.
"""

import copy
from collections import deque
from collections.abc import Sequence

import torch
from attrs import evolve
from torch import Tensor, nn

from schedlang.examples.demo.gpt import cut_gpt, next_byte_loss, run_gpt
from schedlang.examples.demo.training import Training, keep_gradients
from schedlang.examples.demo.workload import Workload
from schedlang.plan.plan import Plan
from schedlang.ranks.weight_versions import follow_weights
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.parts.versions import delays
from schedlang.runtime.precision import rounding_of
from schedlang.schedule.kinds import Kind


def check_comparable(plan: Plan) -> None:
    """PipelineError for a plan that no process trains alike."""
    is_one = len(plan.layout.pipelines) == 1 and plan.layout.slices == 1
    if not is_one and any(rule.keeps_none for rule in plan.weights):
        raise PipelineError(
            f"`{plan.name}` reads other weights for each slice or replica, as they come: there is "
            "no one process to compare it with. Leave `--check` out"
        )


def train_reference(workload: Workload, steps: int) -> Training:
    """The same updates from the first one on. Where the plan's gradients are late, these are as
    late.
    """
    training = Training()
    plan = workload.plan
    parts = cut_gpt(workload.layers(), evolve(plan.layout, skips=()), sliced=False)
    for part in parts:
        part.to(workload.device)
    optimizers = list(map(workload.optimizer, parts))
    weights = _Weights(plan, parts)
    for step in range(steps):
        weights.update = step
        for optimizer in optimizers:
            optimizer.zero_grad()
        trains = not plan.is_forward_only
        training.losses.append(_run(weights, workload, step, trains))
        if not trains:
            continue
        weights.take_gradients()
        for optimizer in optimizers:
            optimizer.step()
        weights.keep()
    for part in parts:
        keep_gradients(training, part)
    return training


class _Weights:
    """The parts of the model, `read` with the weights that the plan's microbatches read: themselves
    where they are always the newest, and else copies.
    """

    def __init__(self, plan: Plan, parts: Sequence[nn.Module]) -> None:
        self.plan = plan
        self.update = 0
        self._parts = parts
        ranks = range(len(plan.ranks))
        behind = {
            stage: late for rank in ranks for stage, late in delays(plan, rank).items()
        }
        rules = [plan.weights_of(stage) for stage in range(len(parts))]
        self._unstashed = [stage for stage, rule in enumerate(rules) if rule.keeps_none]
        self._versions = follow_weights(plan).read
        #: For each stage with older weights those that the next update's microbatches read, and all
        #: later ones.
        # With a delay of d the oldest of d + 1 versions is read; a deque of that length lets go of
        # older ones by itself, and while it fills up, its first is version 0, as for the plan.
        self._kept = {
            stage: deque([copy.deepcopy(part)], behind[stage] + 1)
            for stage, part in enumerate(parts)
            if behind[stage] or stage in self._unstashed
        }
        self.read = [
            copy.deepcopy(part) if stage in self._kept else part
            for stage, part in enumerate(parts)
        ]

    def before_forward(self, microbatch: int) -> None:
        """Read what the plan's forwards read of a microbatch of the update."""
        for stage, kept in self._kept.items():
            behind = len(kept) - 1
            if stage in self._unstashed:
                here = self.update % self.plan.layout.updates
                unit = here * self.plan.layout.units_of_update(stage) + microbatch
                behind = here - self._versions.get((Kind.F, stage, unit), here)
            _put(self.read[stage], kept[-1 - behind])

    def before_backward(self) -> None:
        """Where nothing is kept, read the newest, in the memory that the forward has read."""
        for stage in self._unstashed:
            _put(self.read[stage], self._kept[stage][-1])

    def take_gradients(self) -> None:
        """Give the parts the gradients of the copies that were read."""
        for stage in self._kept:
            pairs = zip(
                self._parts[stage].parameters(),
                self.read[stage].parameters(),
                strict=True,
            )
            for weight, old in pairs:
                weight.grad = old.grad
                old.grad = None

    def keep(self) -> None:
        """There is a new version."""
        for stage, kept in self._kept.items():
            kept.append(copy.deepcopy(self._parts[stage]))


def _put(part: nn.Module, weights: nn.Module) -> None:
    """Give a part the weights of another one, which autograd does not notice."""
    for own, other in zip(part.parameters(), weights.parameters(), strict=True):
        own.data.copy_(other.data)


def _run(weights: _Weights, workload: Workload, update: int, trains: bool) -> float:
    """Run the microbatches of an update one by one, and give their mean loss, of several models the
    mean of these; where it `trains`, its gradients add up.
    """
    losses: dict[str, list[Tensor]] = {}
    counts = workload.of_models
    plan = workload.plan
    rounding = rounding_of(plan, None) if plan.message_type else None
    sent = rounding.sent if rounding else None
    batches = {model: workload.cut(update, model) for model in counts}
    for number in range(max(counts.values())):
        here = [model for model, count in counts.items() if number < count]
        weights.before_forward(number)
        with torch.set_grad_enabled(trains):
            inputs = {model: batches[model][number][0] for model in here}
            outputs = run_gpt(weights.read, plan.layout, inputs, sent)
            of_models = {
                model: _share_of_loss(output, batches[model], number)
                for model, output in outputs.items()
            }
        weights.before_backward()
        for model, loss in of_models.items():
            if loss.requires_grad:
                torch.autograd.backward(loss / counts[model])
            losses.setdefault(model, []).append(loss.detach())
    means = [float(torch.stack(of_model).mean()) for of_model in losses.values()]
    return sum(means) / len(means)


def _share_of_loss(
    output: Tensor, batch: Sequence[tuple[Tensor, Tensor]], number: int
) -> Tensor:
    """The loss of a microbatch, as its bytes count in the batch."""
    _, targets = batch[number]
    bytes = sum(y.numel() for _, y in batch)
    # 1.0 where all are alike.
    return next_byte_loss(output, targets) * (targets.numel() * len(batch) / bytes)
