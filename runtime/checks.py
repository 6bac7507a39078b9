"""Checks before a pipeline runs; each raises PipelineError if something is wrong."""

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from schedlang.diagnostics.diagnostic import counted
from schedlang.on_demand import on_demand
from schedlang.plan.plan import Plan
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.processes import PIPELINE, Processes
from schedlang.runtime.setup import Setup, SliceLengths
from schedlang.runtime.torch_private.wrappers import sums_in_backwards
from schedlang.runtime.watchdog import Watchdog
from schedlang.schedule.kinds import STEPS

if TYPE_CHECKING:
    from schedlang.runtime.frozen_checks import check_frozen
    from schedlang.runtime.unlike_microbatches import check_slices
else:
    # For stages that the plan freezes.
    check_frozen = on_demand("schedlang.runtime.frozen_checks.check_frozen")
    # For slices of given lengths.
    check_slices = on_demand("schedlang.runtime.unlike_microbatches.check_slices")


def wrong_number(plan: Plan, started: int, replicas: int = 1) -> str | None:
    """The error, if any, in the number of processes for these replicas of the plan."""
    needed = len(plan.ranks) * replicas
    if needed == started:
        return None
    what = (
        "the plan needs" if replicas == 1 else f"{replicas} replicas of the plan need"
    )
    plural = "" if needed == 1 else "es"
    return f"{what} {needed} process{plural}, {started} {'was' if started == 1 else 'were'} started"


def check_plan(plan: Plan, processes: Processes, stages: Collection[int]) -> None:
    """Check the number of processes, and the stages of this one, against the plan."""
    wrong = wrong_number(plan, len(processes.pipeline))
    along = len(processes.pipeline)
    if wrong is not None and processes.are_of_mesh:
        wrong = (
            f"the plan needs {counted(len(plan.ranks), 'rank')}, the mesh has {along} along "
            f"`{PIPELINE}`"
        )
    if wrong is not None:
        raise PipelineError(wrong)
    held = plan.stages_of(processes.own)
    if sorted(stages) != held:
        raise PipelineError(
            f"the plan gives this rank the stages {held}, `stages` has {sorted(stages)}"
        )


def check_setup(plan: Plan, rank: int, setup: Setup) -> None:
    """Check that a rank was given what the plan needs there."""
    actions = plan.ranks[rank]
    _check_wrappers(setup.modules)
    _check_losses(plan, plan.stages_of(rank), setup)
    updated = sorted(
        {
            stage
            for kind, stage in zip(actions.kind, actions.stage, strict=True)
            if kind in STEPS
        }
    )
    # Torch has no optimizer for a stage without weights.
    trained = {
        stage
        for stage in updated
        if any(True for _ in setup.modules[stage].parameters())
    }
    # If steps end with an update by the pipeline, that needs the optimizers of all stages.
    if not setup.ends_with_update(plan) and not (
        trained <= setup.optimizers.keys() <= set(updated)
    ):
        raise PipelineError(
            f"the plan updates the stages {updated}, `optimizers` has {sorted(setup.optimizers)}"
        )
    if setup.max_gathered is not None and setup.max_gathered < 1:
        raise PipelineError(
            f"`max_gathered` is {setup.max_gathered}, it must be 1 or more"
        )
    if setup.max_norm is not None and not setup.max_norm > 0:
        raise PipelineError(f"`max_norm` is {setup.max_norm}, it must be above 0")
    if setup.slice_lengths is not None:
        check_slices(plan, setup.slice_lengths)
    if plan.layout.frozen:
        check_frozen(plan, setup.modules, setup.tied)
    _warn_of_untrained(plan, setup.modules)


def _check_wrappers(modules: Mapping[int, nn.Module]) -> None:
    """PipelineError if a wrapper of a stage sums gradients after the backward of each microbatch,
    which only the pipeline may do.
    """
    for number, module in modules.items():
        for name, part in module.named_modules():
            if sums_in_backwards(part):
                inside = f", in `{name}`," if name else ""
                raise PipelineError(
                    f"stage {number} is{inside} in {type(part).__name__}, which takes the forward "
                    "and the backward of a microbatch to follow one another: replicas would get "
                    "other gradients, and wait for each other. Give the pipeline the module itself "
                    "(`.module`; accelerate's `prepare` wraps it), and the replicas as a dimension "
                    'of the mesh, `Pipeline(…, mesh=mesh["dp", "pp"])`, or shard the module by '
                    "`fully_shard` (docs/training.md)"
                )


def _check_losses(plan: Plan, held: Sequence[int], setup: Setup) -> None:
    """Check that the last stages of a rank have a loss function if they have a backward."""
    layout = plan.layout
    names = [pipeline.name for pipeline in layout.pipelines]
    if isinstance(setup.loss_fn, Mapping) and not (
        layout.models and setup.loss_fn.keys() <= set(names)
    ):
        models = f"the models {', '.join(names)}" if layout.models else "one model"
        raise PipelineError(
            f"`loss_fn` is for {[*setup.loss_fn]}, and the plan has {models}"
        )
    for stage in filter(layout.is_last, held):
        has_loss = setup.loss_of(layout.model_of(stage)) is not None
        # A frozen model needs no loss: its output is a result, such as the scores of a reference.
        needs_one = not layout.models or layout.has_backward[stage]
        if not has_loss and needs_one and not plan.is_forward_only:
            of_model = (
                f" of the model `{layout.model_of(stage)}`" if layout.models else ""
            )
            raise PipelineError(
                f"the last stage{of_model} is on this rank, so it needs a `loss_fn`"
            )


def _warn_of_untrained(plan: Plan, modules: Mapping[int, nn.Module]) -> None:
    """Warn of a stage that the plan trains for nothing."""
    layout = plan.layout
    for number, module in modules.items():
        wanting = [weight.requires_grad for weight in module.parameters()]
        if (
            wanting
            and not any(wanting)
            and layout.trains(number)
            and not plan.is_forward_only
        ):
            piece = layout.piece(number)
            warnings.warn(
                f"no weight of stage {number} wants a gradient, and the plan trains it: `frozen "
                f"{piece} .. {piece + 1}` in the program leaves out what is done for nothing",
                stacklevel=2,
            )


def check_same(
    plan: Plan, setup: Setup, processes: Processes, watchdog: Watchdog
) -> None:
    """Compare arguments that must be the same on all ranks, which also waits for all of them."""
    own = {
        "plan": plan.digest,
        "`tied`": str([*map(dict, setup.tied)]),
        "`transfer_dtype`": str(setup.transfer_dtype),
        "`loss_scale`": str(setup.scaler and setup.scaler.state_dict()),
        "`max_norm`": str(setup.max_norm),
        "`slice_lengths`": _in_words(setup.slice_lengths),
        "`stop_on_nan`": str(setup.stop_on_nan),
        "`skip_if`": str(setup.skipped_exceptions or setup.skip_if is not None),
    }
    for rank, theirs in watchdog.gather(json.dumps(own), "built no pipeline").items():
        # Compare one by one, so that the error names the argument.
        for what, value in json.loads(theirs).items():
            if value != own[what]:
                raise PipelineError(
                    f"{processes.name(rank)} has another {what}: all ranks must be given the same"
                )


def _in_words(lengths: SliceLengths | None) -> str:
    return "a function" if callable(lengths) else str(lengths and [*lengths])


def device_of(stages: Mapping[int, nn.Module]) -> torch.device | None:
    """The device of a rank's modules, which must be the same; None if they have no weights."""
    devices = {
        weight.device for stage in stages.values() for weight in stage.parameters()
    }
    if len(devices) > 1:
        raise PipelineError(
            f"the stages of a rank must be on one device, not on {', '.join(map(str, devices))}"
        )
    if torch.device("meta") in devices:
        raise PipelineError(
            "the stages are on the meta device: give them their weights first, by `load_model`"
        )
    return devices.pop() if devices else None


def agree_on_device(
    own: torch.device | None, processes: Processes, watchdog: Watchdog
) -> torch.device:
    """The device of this rank. A rank without weights computes on the same type of device as the
    others. PipelineError if some compute on the CPU and others on a GPU.
    """
    own_type = "" if own is None else own.type
    types = watchdog.gather(own_type, "built no pipeline")
    known = {rank: each for rank, each in types.items() if each}
    for rank, each in known.items():
        first, expected = next(iter(known.items()))
        if each != expected:
            raise PipelineError(
                f"{processes.name(first)} has its stages on the device `{expected}`, and "
                f"{processes.name(rank)} on `{each}`: move the modules of all ranks to one type "
                "of device before the pipeline is built"
            )
    if own is not None:
        return own
    device_type = next(iter(known.values()), "cpu")
    if device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device_type)
