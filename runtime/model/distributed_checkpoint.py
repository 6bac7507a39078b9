"""A training in torch's own format of checkpoints (DCP): under any plan, by any number of ranks.

    dcp.save(dcp_state(plan, stages, optimizers), checkpoint_id="step-12")     # or dcp.async_save
    load_dcp("step-12", stages, optimizers)

Each value has one name in the checkpoint, whoever wrote it, and these are the names that torchtitan
writes:

    layers.0.attention.wq.weight                           a weight or a buffer of the model
    optimizer.state.layers.0.attention.wq.weight.exp_avg   what an optimizer keeps for a weight

A rank reads what it needs. Torch writes the tensors of replicas once, and those that FSDP has
sharded in parts, which any other sharding reads again.
"""

import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.runtime.arguments import check_plan, check_stages
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.model.checkpoint import reason
from schedlang.runtime.model.model_arguments import check_folder, check_optimizers
from schedlang.runtime.model.model_files import ModelPart
from schedlang.runtime.model.named_state import (
    keeps_nothing,
    kept_by,
    load_kept,
    name_in,
    weights_and_buffers,
)

#: What stands before the name of a weight where an optimizer keeps something for it.
_KEPT = "optimizer.state."


def dcp_state(
    plan: Plan, stages: Mapping[int, nn.Module], optimizers: Sequence[Optimizer] = ()
) -> dict[str, Any]:
    """What all ranks together give `torch.distributed.checkpoint.save`: this rank's part of the
    model, and what its optimizers keep, by names of the whole model.

    The stages are those of `split`. PipelineError where a plan has several models:
    `Pipeline.save_model` has a folder for each.
    """
    check_plan(plan)
    check_stages(stages)
    check_optimizers(optimizers)
    models = ModelPart(plan, 0, stages, optimizers).modules
    if len(models) > 1:
        raise PipelineError(
            f"the plan has the models {', '.join(models)}, and a checkpoint of torch has one: "
            "`save_model` has a folder for each"
        )
    kept: dict[int, Mapping[str, Any]] = {}
    for optimizer in optimizers:
        kept |= kept_by(optimizer)
    state: dict[str, Any] = {}
    for modules in models.values():
        for module in modules:
            state |= weights_and_buffers(module)
            for name, weight in module.named_parameters():
                for key, value in kept.get(id(weight), {}).items():
                    state[f"{_KEPT}{name}.{key}"] = value
    return state


def load_dcp(
    folder: str | Path,
    stages: Mapping[int, nn.Module],
    optimizers: Iterable[Optimizer] = (),
) -> None:
    """Load the weights of some stages, of `split` or the whole model, and what optimizers keep for
    them, from a checkpoint of `dcp_state`, or of torchtitan. All ranks call it together.

    Options of optimizers, such as learning rates, are the script's. PipelineError on all ranks
    where a weight of one is not there, or has another shape.
    """
    check_folder(folder)
    check_stages(stages)
    check_optimizers(optimizers)
    reader = FileSystemReader(folder)
    try:
        there = reader.read_metadata().state_dict_metadata
    # A damaged file may raise anything.
    except Exception as error:
        raise PipelineError(
            f"`{folder}` is no checkpoint of torch: {reason(error)}"
        ) from error
    optimizers = [*optimizers]
    # Torch reads tensors in place, and puts what is no tensor into the dictionary.
    weights = {number: _weights(there, stages, number) for number in stages}
    values = {key: value for of in weights.values() for key, value in of.values()}
    kept = _kept(there, stages) if optimizers else {}
    for of in kept.values():
        values |= of
    if not any(kept.values()) and not all(map(keeps_nothing, optimizers)):
        raise PipelineError(f"`{folder}` has a model without optimizers")
    try:
        with warnings.catch_warnings():
            # A script of one process has no process group, and means it so.
            warnings.filterwarnings("ignore", "torch.distributed is")
            load(values, storage_reader=reader)
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        raise PipelineError(
            f"`{folder}` does not fit the stages of rank {rank}: {failure}"
        ) from error
    for number, module in stages.items():
        loaded = {name: values[key] for name, (key, _) in weights[number].items()}
        module.load_state_dict(loaded, strict=False)
    load_kept(
        stages,
        optimizers,
        lambda names: [
            {key.rpartition(".")[2]: values[key] for key in kept[name]}
            for name in names
        ],
    )


def _weights(
    there: Container[str], stages: Mapping[int, nn.Module], number: int
) -> dict[str, tuple[str, Any]]:
    """The weights and buffers of a stage by name, each with its name in a checkpoint."""
    found = {}
    for name, tensor in weights_and_buffers(stages[number]).items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            raise PipelineError(
                f"`{name}` of stage {number} is on the meta device, and a checkpoint of torch is "
                "read into weights that are there: make them with `module.to_empty(device=…)`"
            )
        found[name] = name_in(there, name, stages), tensor
    return found


def _kept(
    there: Mapping[str, Any], stages: Mapping[int, nn.Module]
) -> dict[str, dict[str, Any]]:
    """Room for what optimizers keep, by the name of the weight and by the name in a checkpoint."""
    keys: dict[str, list[str]] = {}
    for key in there:
        if key.startswith(_KEPT):
            name, _, _ = key.removeprefix(_KEPT).rpartition(".")
            keys.setdefault(name, []).append(key)
    return {
        name: {
            key: _room_for(there[key], weight)
            for key in keys.get(name_in(keys, name, stages), [])
        }
        for module in stages.values()
        for name, weight in module.named_parameters()
    }


def _room_for(saved: Any, weight: Tensor) -> Any:
    """Room for what an optimizer keeps for a weight: in parts as the weight, if it is of its
    shape.
    """
    if not isinstance(saved, TensorStorageMetadata):
        return None
    if saved.size == weight.shape:
        return torch.empty_like(weight, dtype=saved.properties.dtype)
    return torch.empty(saved.size, dtype=saved.properties.dtype)
