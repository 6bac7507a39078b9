"""The stages that a rank holds, made for its part of a plan and connected with each other."""

from collections.abc import Callable, Mapping
from functools import partial

from torch import nn
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.runtime.checks import device_of
from schedlang.runtime.stage.skips import Skip, SkippingStage, SlicedSkippingStage
from schedlang.runtime.stage.slices import SlicedStage
from schedlang.runtime.stage.stage import LossFn, Stage
from schedlang.runtime.stage.weights import Weights, delays
from schedlang.runtime.transport.ranks import Ranks
from schedlang.runtime.watch.watchdog import PipelineError
from schedlang.schedule.kinds import Kind
from schedlang.schedule.layout import Layout


def connect(
    plan: Plan,
    ranks: Ranks,
    modules: Mapping[int, nn.Module],
    optimizers: Mapping[int, Optimizer],
    loss_fn: LossFn | None,
    loss_scale: float | None,
) -> dict[int, Stage]:
    """The stages of a rank; neighbours among them share their boxes."""
    layout = plan.layout
    stages = dict[int, Stage]()
    if loss_scale is None:
        loss_scale = layout.updates / layout.microbatches / len(ranks.replicas.processes)
    weights = _weights(plan, ranks.own, modules)
    skips = _skips(layout)
    for number in sorted(modules):
        stages[number] = _kind_of(number, layout, skips)(
            number,
            modules[number],
            device_of(modules),
            is_first=layout.is_first(number),
            loss_fn=loss_fn if layout.is_last(number) else None,
            loss_scale=loss_scale / layout.slices,
            optimizer=optimizers.get(number),
            recomputed=plan.microbatches_with(Kind.R, number),
            split=plan.microbatches_with(Kind.W, number),
            offloaded=plan.microbatches_with(Kind.OFFLOAD, number),
            weights=weights.get(number),
        )
    for number, stage in stages.items():
        if stage.sharded and stage.weights:
            raise PipelineError(
                f"stage {number} is sharded, so it cannot read older versions of its weights yet"
            )
        if number + 1 in stages and not layout.is_last(number):
            following = stages[number + 1]
            following.inputs, stage.gradients = stage.outputs, following.input_gradients
    return stages


def _weights(plan: Plan, rank: int, modules: Mapping[int, nn.Module]) -> dict[int, Weights]:
    """The versions of the weights of stages that read late ones; replicas that are one module have
    them together.
    """
    found = dict[int, Weights]()
    behind = delays(plan, rank)
    first: dict[int, tuple[int, int, int]] = {}
    for number, module in modules.items():
        per_update = plan.layout.units(number) // plan.layout.updates
        same, *alike = first.setdefault(id(module), (number, behind[number], per_update))
        if alike != [behind[number], per_update]:
            raise PipelineError(
                f"stages {same} and {number} are one module, but read other versions of its weights"
            )
        if behind[number]:
            found[number] = (
                found[same] if same != number else Weights(module, behind[number], per_update)
            )
    return found


def _skips(layout: Layout) -> dict[int, Skip]:
    """The skips of a plan, by their numbers."""
    found: dict[int, Skip] = {}
    for number, (earlier, later) in layout.skip_stages.items():
        start = layout.pipeline_of[earlier].start
        found[number] = Skip(
            earlier - start, later - start, f"what stage {earlier} returns for stage {later}"
        )
    return found


def _kind_of(stage: int, layout: Layout, skips: Mapping[int, Skip]) -> Callable[..., Stage]:
    """What makes a stage, with slices or without, with skips or without."""
    sliced = {"slices": layout.slices} if layout.slices > 1 else {}
    before = {
        number: skips[number] for number, (_, later) in layout.skip_stages.items() if later == stage
    }
    after = {
        number: skips[number]
        for number, (earlier, _) in layout.skip_stages.items()
        if earlier == stage
    }
    if before or after:
        return partial(
            SlicedSkippingStage if sliced else SkippingStage, before=before, after=after, **sliced
        )
    return partial(SlicedStage, **sliced) if sliced else Stage
