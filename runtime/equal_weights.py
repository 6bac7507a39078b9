"""Checks for weights of different stages that may be one weight of the model: the same object, the
same memory, or equal initial values.
"""

import json
import warnings
from collections.abc import Collection, Container, Mapping

import torch
from torch import Tensor, nn

from schedlang.plan.plan import Plan
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.processes import Processes
from schedlang.runtime.shared_memory import sharing
from schedlang.runtime.values import sample
from schedlang.runtime.watchdog import Watchdog


def check_common_weights(
    plan: Plan, modules: Mapping[int, nn.Module], tied: Container[int]
) -> None:
    """PipelineError if several stages of a rank have a weight whose id is not in `tied`, or weights
    that share memory.
    """
    first: dict[int, tuple[int, str]] = {}
    weights: dict[str, Tensor] = {}
    stages: dict[str, set[int]] = {}
    for stage, module in modules.items():
        for name, weight in module.named_parameters():
            if id(weight) not in first:
                weights[f"`{name}` of stage {stage}"] = weight
                stages[f"`{name}` of stage {stage}"] = {stage}
            other, known = first.setdefault(id(weight), (stage, name))
            are_alike = plan.layout.piece(other) == plan.layout.piece(stage)
            if not are_alike and id(weight) not in tied:
                missing = {other: known, stage: name}
                raise PipelineError(
                    f"stages {other} and {stage} have a weight in common: give `tied=[{missing}]`"
                )
    check_memory(weights, stages)


def check_memory(
    weights: Mapping[str, Tensor], stages: Mapping[str, Collection[int]]
) -> None:
    """PipelineError if trained weights of different stages share memory; both are by the words for
    a weight.
    """
    for group in sharing(weights):
        of_group = {stage for name in group for stage in stages[name]}
        if len(of_group) > 1 and any(weights[name].requires_grad for name in group):
            raise PipelineError(
                f"{group[0]} and {group[-1]} share memory, so that an update of one changes the "
                "other, and stages may be on different ranks: make them one parameter, which "
                "`split` ties, or name it in `tied`; or give each memory of its own (`.clone()`)"
            )


def warn_of_equal_weights(
    plan: Plan,
    modules: Mapping[int, nn.Module],
    tied: Container[int],
    processes: Processes,
    watchdog: Watchdog,
) -> None:
    """Warn once, on rank 0, of weights of different stages with equal initial values, unless their
    ids are in `tied`. If they are one weight of the model, each copy would get only a part of its
    gradient.
    """
    own = [
        (plan.layout.model_of(stage) + _sample(weight), plan.layout.piece(stage), name)
        for stage, module in modules.items()
        for name, weight in module.named_parameters()
        if weight.requires_grad and id(weight) not in tied and not _is_constant(weight)
    ]
    first: dict[str, tuple[int, str]] = {}
    pairs: list[tuple[tuple[int, str], tuple[int, str]]] = []
    gathered = watchdog.gather(json.dumps(own), "compared no weights")
    for theirs in gathered.values():
        for numbers, stage, name in json.loads(theirs):
            other = first.setdefault(numbers, (stage, name))
            # Equal weights within a stage are trained as in one process.
            if other[0] != stage and (other, (stage, name)) not in pairs:
                pairs.append((other, (stage, name)))
    if pairs and processes.own == min(gathered):
        (stage, name), (later, later_name) = pairs[0]
        more = f", and {len(pairs) - 1} more like them" if len(pairs) > 1 else ""
        warnings.warn(
            f"`{name}` of stage {stage} and `{later_name}` of stage {later} begin with the same "
            f"numbers{more}, and are trained apart: if they are one weight of the model, give "
            f"`tied=[{{{stage}: {name!r}, {later}: {later_name!r}}}]`",
            stacklevel=2,
        )


def _sample(weight: Tensor) -> str:
    """Shape and type of a weight, and a sum of the bits of some of its values."""
    return f"{list(weight.shape)} {weight.dtype} {bits_of(sample(weight).contiguous())}"


def _is_constant(weight: Tensor) -> bool:
    """Whether all values of a weight are equal, as those of norms and biases are at first."""
    some = sample(weight)
    return not some.numel() or bool((some == some[0]).all())


def bits_of(tensor: Tensor) -> int:
    """The sum of a tensor's bits as integers, which does not depend on the order of additions."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(
        tensor.element_size(), torch.uint8
    )
    return int(tensor.detach().reshape(-1).view(whole).sum(dtype=torch.int64))
