"""The stages that a rank holds, made for its part of a plan and connected with each other."""

from collections.abc import Mapping
from functools import partial

from torch import nn
from torch.optim import Optimizer

from schedlang.kinds import Kind
from schedlang.plan import Plan
from schedlang.runtime.checks import device_of
from schedlang.runtime.ranks import Ranks
from schedlang.runtime.slices import SlicedStage
from schedlang.runtime.stage import LossFn, Stage
from schedlang.runtime.watchdog import PipelineError
from schedlang.runtime.weights import Weights, delays


def connect(
    plan: Plan,
    ranks: Ranks,
    modules: Mapping[int, nn.Module],
    optimizers: Mapping[int, Optimizer],
    loss_fn: LossFn | None,
    loss_scale: float | None,
) -> dict[int, Stage]:
    """The stages of a rank; neighbours among them share their boxes."""
    layout, stages = plan.layout, dict[int, Stage]()
    if loss_scale is None:
        loss_scale = layout.updates / layout.microbatches / len(ranks.replicas.processes)
    weights = _weights(plan, ranks.own, modules)
    make = Stage if layout.slices == 1 else partial(SlicedStage, slices=layout.slices)
    for number in sorted(modules):
        stages[number] = make(
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
            raise PipelineError(f"stage {number} is sharded, so it cannot read older versions of its weights yet")
        if number + 1 in stages and not layout.is_last(number):
            following = stages[number + 1]
            following.inputs, stage.gradients = stage.outputs, following.input_gradients
    return stages


def _weights(plan: Plan, rank: int, modules: Mapping[int, nn.Module]) -> dict[int, Weights]:
    """The versions of the weights of stages that read late ones; replicas that are one module have them together."""
    found, behind = dict[int, Weights](), delays(plan, rank)
    first: dict[int, tuple[int, int, int]] = {}
    for number, module in modules.items():
        per_update = plan.layout.units(number) // plan.layout.updates
        same, *alike = first.setdefault(id(module), (number, behind[number], per_update))
        if alike != [behind[number], per_update]:
            raise PipelineError(f"stages {same} and {number} are one module, but read other versions of its weights")
        if behind[number]:
            found[number] = found[same] if same != number else Weights(module, behind[number], per_update)
    return found
