"""Checks before a pipeline runs; each raises PipelineError if something is wrong."""

import json
import warnings
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from attrs import evolve, fields
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from schedlang.diagnostics.diagnostic import counted
from schedlang.plan.plan import Plan
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.processes import PIPELINE, Processes, backend_of
from schedlang.runtime.setup import Setup, SliceLengths, Tied
from schedlang.runtime.torch_private.wrappers import sums_in_backwards
from schedlang.runtime.watchdog import Watchdog
from schedlang.schedule.kinds import STEPS
from schedlang.schedule.layout import Layout
from schedlang.schedule.transports import (
    NCCL,
    NCCL_EAGER,
    NCCL_EDGE,
    PORTABLE,
    Transport,
)


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


def check_mesh(mesh: DeviceMesh | None) -> None:
    """Check that there is a process group, and that the mesh has the right dimensions."""
    if not dist.is_initialized():
        raise PipelineError(
            "there is no process group: call torch.distributed.init_process_group first"
        )
    if mesh is None:
        return
    names = mesh.mesh_dim_names or ()
    if PIPELINE not in names or len(names) > 2:
        raise PipelineError(
            f"the mesh has the dimensions ({', '.join(names)}): it must have `{PIPELINE}`, and at "
            'most one more, along which the replicas are, as in `mesh["dp", "pp"]`'
        )
    if mesh.get_coordinate() is None:
        raise PipelineError(f"rank {dist.get_rank()} is not in the mesh")


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


def check_alike(own: Plan, plan: Plan) -> None:
    """PipelineError unless the plan of a step has the same stages and connections as the plan of
    the pipeline: only the order and the number of microbatches may differ.
    """
    if plan.is_forward_only:
        raise PipelineError(
            "the plan of this step has forwards alone and cannot train: call `evaluate`"
        )
    layouts = [_without_microbatches(each.layout) for each in (own, plan)]
    for each in fields(Layout):
        ours, theirs = (getattr(layout, each.name) for layout in layouts)
        if ours != theirs:
            raise PipelineError(
                f"the plan of this step has other {each.name} than that of the pipeline, and only "
                f"the microbatches and the order may differ: {theirs} in place of {ours}"
            )
    if plan.transport != own.transport:
        raise PipelineError(
            f"the plan of this step is proved for `{plan.transport}`, and that of the pipeline for "
            f"`{own.transport}`: compile both for one transport"
        )
    if plan.message_type != own.message_type:
        theirs, ours = (each.message_type or "no type" for each in (plan, own))
        raise PipelineError(
            f"the plan of this step rounds messages to {theirs}, and that of the pipeline to "
            f"{ours}: write the same `send` in both programs"
        )


def _without_microbatches(layout: Layout) -> Layout:
    pipelines = (evolve(each, microbatches=0) for each in layout.pipelines)
    return evolve(layout, pipelines=tuple(pipelines))


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
    _check_slices(plan, setup.slice_lengths)
    _check_frozen(plan, setup.modules, setup.tied)


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


def _check_slices(plan: Plan, lengths: SliceLengths | None) -> None:
    """Check that there is a length for each slice of the plan."""
    slices = plan.layout.slices
    if lengths is None:
        return
    if slices == 1:
        raise PipelineError(
            "the plan has no slices, so it has no use for `slice_lengths`"
        )
    if not callable(lengths) and len(lengths) != slices:
        raise PipelineError(
            f"`slice_lengths` has {counted(len(lengths), 'length')}, and a microbatch of the plan "
            f"has {slices} slices"
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


def _check_frozen(plan: Plan, modules: Mapping[int, nn.Module], tied: Tied) -> None:
    """Check that exactly the frozen stages of the plan have weights that need no gradient; warn of
    a stage that the plan trains for nothing.
    """
    layout = plan.layout
    for number, module in modules.items():
        weights = dict(module.named_parameters())
        wanting = [name for name, weight in weights.items() if weight.requires_grad]
        if (
            weights
            and not wanting
            and layout.trains(number)
            and not plan.is_forward_only
        ):
            piece = layout.piece(number)
            warnings.warn(
                f"no weight of stage {number} wants a gradient, and the plan trains it: `frozen "
                f"{piece} .. {piece + 1}` in the program leaves out what is done for nothing",
                stacklevel=2,
            )
        if not layout.trains(number):
            check_frozen_weights(plan, number, weights)
        _check_tied(plan, number, weights, tied)


def check_frozen_weights(
    plan: Plan, number: int, weights: Mapping[str, nn.Parameter]
) -> None:
    """PipelineError if a weight of a stage that the plan freezes requires a gradient."""
    wanting = [name for name, weight in weights.items() if weight.requires_grad]
    if wanting:
        others = counted(len(wanting) - 1, "other")
        more = f" and {others}" if len(wanting) > 1 else ""
        raise PipelineError(
            f"stage {number} is frozen in the plan, and its weight `{wanting[0]}`{more} would "
            "be trained: freeze the module, `requires_grad_(False)`, or take the stage out of "
            f"`frozen` in {plan.source.path}"
        )


def _check_tied(
    plan: Plan, number: int, weights: Mapping[str, nn.Parameter], tied: Tied
) -> None:
    """Check that no trained weight of a stage is tied to a weight of a frozen stage."""
    piece = plan.layout.piece(number)
    for names in tied:
        stages = range(len(plan.placement))
        by_piece = {
            plan.layout.piece(stage): name
            for stage, name in names.items()
            if stage in stages
        }
        own = weights.get(by_piece.get(piece, ""))
        frozen = [other for other in by_piece if other in plan.layout.frozen]
        if own is not None and own.requires_grad and frozen:
            raise PipelineError(
                f"the weight `{by_piece[piece]}` of stage {number} would be trained, and is tied "
                f"to `{by_piece[frozen[0]]}` of stage {frozen[0]}, which is frozen in the plan: "
                "freeze both or none"
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


#: Torch's backends for GPUs, and whether a group that is bound to a device has one communicator
#: for everything. `nccl-lazy` (torch's main line, c10d's LazyBackend) makes one for each two ranks
#: at the first transfer that is issued alone, bound or not, and sends batches over that of the
#: group: the transport `nccl`.
BACKENDS_FOR_GPUS = {"nccl": True, "nccl2": True, "nccl-lazy": False}


def check_transport(
    plan: Plan, group: dist.ProcessGroup, device: torch.device
) -> Transport:
    """Check that the group can send tensors of this device, and that the plan is proved for that.
    Returns the transport of messages on GPUs.
    """
    backend = backend_of(group, device)
    if device.type == "cuda" and backend not in BACKENDS_FOR_GPUS:
        how = "has no backend" if backend is None else f"has `{backend}`"
        raise PipelineError(
            f"the stages are on a GPU, and the process group {how} for tensors there: only NCCL "
            "sends them. Use init_process_group('cpu:gloo,cuda:nccl')"
        )
    # If the group was bound to a device, torch makes NCCL's communicator at once; otherwise at its
    # first use, where ranks wait for each other. The proof knows both as transports.
    is_bound = group.bound_device_id is not None
    used = NCCL_EAGER if is_bound and BACKENDS_FOR_GPUS.get(str(backend)) else NCCL
    # gloo runs every plan: a rank waits for nothing but what it needs, and messages are matched by
    # their tags.
    if device.type == "cuda" and plan.transport not in (
        PORTABLE,
        NCCL_EDGE.name,
        used.name,
    ):
        raise PipelineError(
            f"the plan is proved for `{plan.transport}` alone, and its tensors go by `{used.name}`"
        )
    return NCCL_EDGE if plan.transport == NCCL_EDGE.name else used
