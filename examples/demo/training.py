"""Trains the small GPT of the command with a plan."""

from collections.abc import Mapping, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from schedlang.examples.demo.checkpoint_folder import CheckpointFolder
from schedlang.examples.demo.gpt import loss_and_bytes, next_byte_loss
from schedlang.examples.demo.progress_lines import Progress
from schedlang.examples.demo.trace_file import clock_offset
from schedlang.examples.demo.workload import Workload
from schedlang.runtime.pipeline import Pipeline
from schedlang.runtime.processes import PIPELINE
from schedlang.runtime.step_report import Report
from schedlang.runtime.values import Value
from schedlang.schedule.timeline import Bar

#: The most steps at the end that are recorded.
RECORDED = 10


@define
class Training:
    """The results of a training on one rank.

    `first` is how many steps a checkpoint had. `losses` is what the rank's microbatches add to the
    mean loss of each step, on ranks of last stages only; `seconds` how long each took there.
    `gradients` are the last step's, by their names in the model; `recorded` the compute ops of the
    recorded steps, and `messages` their sends and waits for receives, in the clock of the last
    stage's rank with the `offset`; `report` is that of these steps, the same on all ranks; `audits`
    what an audit of the first step has found.
    """

    first: int = 0
    losses: list[float] = field(factory=list)
    seconds: list[float] = field(factory=list)
    gradients: dict[str, Tensor] = field(factory=dict)
    recorded: list[list[Bar]] = field(factory=list)
    messages: list[list[Bar]] = field(factory=list)
    report: Report = field(factory=Report)
    audits: list[str] = field(factory=list)
    offset: float = 0.0


def train(
    workload: Workload,
    steps: int,
    timeout: float,
    checkpoints: CheckpointFolder | None = None,
    audit: bool = False,
    stop_on_nan: bool = False,
) -> Training:
    """Train with the plan, together with all other ranks, or evaluate, where it has no backward;
    the rank of the last stage prints a line per step.

    With checkpoints, it goes on from the last one.
    """
    plan = workload.plan
    training = Training()
    progress = Progress(workload.writer, steps)
    replica, rank = divmod(dist.get_rank(), len(plan.ranks))
    stages = workload.stages(plan.stages_of(rank))
    of_modules = {
        module: _optimizer_that_keeps(training, workload, module)
        for module in stages.values()
    }
    if checkpoints:
        checkpoints.load(stages, list(of_modules.values()))
    updated = filter(plan.layout.trains, stages) if plan.has_updates else ()
    own = {stage: of_modules[stages[stage]] for stage in updated}
    pipeline = Pipeline(
        plan,
        stages,
        loss_and_bytes if workload.unequal else next_byte_loss,
        mesh=_mesh(workload),
        optimizers=own,
        audit=audit,
        stop_on_nan=stop_on_nan,
        timeout=timeout,
    )
    others = [] if plan.has_updates else list(of_modules.values())
    if checkpoints:
        training.first = checkpoints.resume(pipeline, others)
    begins = range(training.first, steps, plan.layout.updates)
    # The first step also pays for what torch sets up once.
    recorded = begins[1:][-RECORDED:] or begins
    for step in begins:
        start = perf_counter()
        pipeline.record = progress.is_bar or step in recorded
        _run(pipeline, workload, step, replica)
        for optimizer in others:
            optimizer.step()
            optimizer.zero_grad()
        if step in recorded:
            training.recorded.append(pipeline.bars)
            training.messages.append(pipeline.messages)
        if step == recorded[-1]:
            training.report = pipeline.report()
        losses = {
            model: pipeline.mean_over_replicas(each)
            for model, each in _losses(pipeline, workload, step).items()
        }
        if losses:
            busy = sum(bar.end - bar.start for bar in pipeline.bars)
            seconds = perf_counter() - start
            _keep_losses(training, workload, step, losses, seconds, busy, progress)
        if checkpoints and checkpoints.is_due(step, step + plan.layout.updates, steps):
            checkpoints.save(pipeline, step + plan.layout.updates, others)
    training.audits = pipeline.audits
    training.offset = clock_offset(workload.writer)
    return training


def _run(pipeline: Pipeline, workload: Workload, step: int, replica: int) -> None:
    """Make a step, or an evaluation. In a graph of stages, all of a model that take inputs get the
    same.
    """
    layout = workload.plan.layout
    inputs, targets = workload.share(step, replica)
    counts = _counts(inputs) if workload.unequal else None
    for part in layout.pipelines:
        firsts = [
            stage - part.start
            for stage in layout.firsts
            if layout.pipeline_of[stage] == part
        ]
        if layout.models:
            given = inputs[part.name]
            inputs = {**inputs, part.name: _to_all(firsts, given)}
        elif part is layout.pipelines[0]:
            inputs = _to_all(firsts, inputs)
    if workload.plan.is_forward_only:
        pipeline.evaluate(inputs, targets)
    else:
        pipeline.step(inputs, targets, counts=counts)


def _counts(inputs: Value) -> Any:
    """The bytes of each microbatch of a list; of several models by their names."""
    if isinstance(inputs, Mapping):
        return {model: _counts(of_model) for model, of_model in inputs.items()}
    return [x.numel() for x in inputs]


def _to_all(firsts: Sequence[int], inputs: Value) -> Value:
    """The inputs of a model, for each of the stages that take some."""
    return dict.fromkeys(firsts, inputs) if len(firsts) > 1 else inputs


def _losses(pipeline: Pipeline, workload: Workload, step: int) -> dict[str, Tensor]:
    """The losses of a step by model, where the rank has any: the mean over all microbatches is that
    over all bytes.
    """
    if not workload.unequal:
        return pipeline.losses
    layout = workload.plan.layout
    extras = iter(pipeline.extras)
    by_model: dict[str, Tensor] = {}
    for model, losses in pipeline.losses.items():
        bytes = [next(extras)["bytes"] for _ in range(len(losses) * layout.slices)]
        # By update, microbatch and slice; (updates, microbatches of each) in the end.
        of_microbatches = (
            torch.tensor(bytes).view(layout.updates, -1, layout.slices).sum(dim=2)
        )
        on_average = [
            workload.mean_bytes(update, model)
            for update in range(step, step + layout.updates)
        ]
        counts = of_microbatches / torch.tensor(on_average).view(-1, 1)
        by_model[model] = losses * counts.flatten().to(losses.device)
    return by_model


def _mesh(workload: Workload) -> DeviceMesh | None:
    """The processes of the replicas, if there are several."""
    shape = workload.replicas, len(workload.plan.ranks)
    return (
        init_device_mesh(workload.device.type, shape, mesh_dim_names=("dp", PIPELINE))
        if workload.replicas > 1
        else None
    )


def _keep_losses(
    training: Training,
    workload: Workload,
    first: int,
    losses: Mapping[str, Tensor],
    seconds: float,
    busy: float,
    progress: Progress,
) -> None:
    """Keep and print the losses of a step, means over replicas, for each of its updates; of several
    models the mean.
    """
    updates = workload.plan.layout.updates
    tokens = sum(workload.tokens(update) for update in range(first, first + updates))
    microbatches = workload.of_models
    models = len(workload.losing)
    of_updates = {model: each.view(updates, -1) for model, each in losses.items()}
    for update in range(updates):
        of_update = {model: each[update] for model, each in of_updates.items()}
        parts = [
            float(each.sum()) / microbatches[model] for model, each in of_update.items()
        ]
        training.losses.append(sum(parts) / models)
        training.seconds.append(seconds / updates)
        step = training.first + len(training.losses)
        means = [float(each.mean()) for each in of_update.values()]
        progress.show(
            step, sum(means) / len(means), tokens / seconds, idle=1 - busy / seconds
        )


def _optimizer_that_keeps(
    training: Training, workload: Workload, module: nn.Module
) -> Optimizer:
    """An optimizer that keeps the gradients right before its step, when they are whole, whether the
    plan makes the step or the script.
    """
    optimizer = workload.optimizer(module)
    optimizer.register_step_pre_hook(partial(keep_gradients, training, module))
    return optimizer


def keep_gradients(training: Training, module: nn.Module, *_: Any) -> None:
    """Keep the gradients of a stage that is about to be updated."""
    for name, weight in module.named_parameters():
        if weight.grad is not None:
            training.gradients[name] = weight.grad.to("cpu", copy=True)
