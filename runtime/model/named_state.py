"""What a model's weights and buffers are, and what optimizers keep for them, by the names that they
have in the whole model: the same under every plan.
"""

import warnings
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, Optimizer

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.model.checkpoint import load_optimizer
from schedlang.runtime.model.split import Stages


def weights_and_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Weights and buffers of a module by name; a weight with two names has one."""
    others = other_names(module)
    return {
        name: tensor
        for name, tensor in module.state_dict().items()
        if name not in others
    }


def other_names(module: nn.Module) -> dict[str, str]:
    """The further names of weights that have several, each with the first."""
    first = {id(weight): name for name, weight in module.named_parameters()}
    names = {
        name: first[id(weight)]
        for name, weight in module.named_parameters(remove_duplicate=False)
    }
    return {name: first for name, first in names.items() if name != first}


def name_in(names: Container[str], name: str, stages: Mapping[int, nn.Module]) -> str:
    """The name of a weight that is among some, its own or that of a tied one; its own if there is
    none.
    """
    tied = stages.tied if isinstance(stages, Stages) else ()
    others = (
        other for same in tied if name in same.values() for other in same.values()
    )
    return next((other for other in (name, *others) if other in names), name)


def kept_by(optimizer: Optimizer) -> dict[int, Mapping[str, Any]]:
    """What an optimizer keeps, by the id of the weight, as its `state_dict` has it: one that is in
    parts on several processes, or that wraps another, keeps it elsewhere than in `state`.
    """
    name = type(optimizer).__name__
    try:
        state = optimizer.state_dict()
    except RuntimeError as error:
        raise PipelineError(
            f"what {name} keeps cannot be saved: {' '.join(str(error).split())}"
        ) from error
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    places = [each for group in state["param_groups"] for each in group["params"]]
    if not state["state"] and not keeps_nothing(optimizer):
        warnings.warn(
            f"{name} keeps nothing for any weight, so there is nothing of it in the files: if it "
            "has made a step, its `state_dict` does not have what it keeps",
            stacklevel=2,
        )
    return {
        id(weight): state["state"][place]
        for weight, place in zip(weights, places, strict=True)
        if place in state["state"]
    }


def in_parts_as(weight: Tensor, value: Any) -> Any:
    """A tensor of a weight's shape, cut over a mesh as the weight is (DTensor); other values as
    they are.
    """
    is_whole = isinstance(value, Tensor) and not isinstance(value, DTensor)
    if not isinstance(weight, DTensor) or not is_whole or value.shape != weight.shape:
        return value
    mesh = weight.device_mesh
    # Every process has the whole tensor, and takes its own part of it.
    return distribute_tensor(
        value.to(mesh.device_type), mesh, weight.placements, src_data_rank=None
    )


def keeps_nothing(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps nothing for any weight, by what it is."""
    return isinstance(optimizer, SGD) and not any(
        group["momentum"] for group in optimizer.param_groups
    )


def load_kept(
    stages: Mapping[int, nn.Module],
    optimizers: Iterable[Optimizer],
    read: Callable[[Sequence[str]], Iterable[Mapping[str, Any]]],
) -> None:
    """Give optimizers what they have kept for the weights of some stages: `read` gives it for each
    of some names. Options, such as learning rates, stay as they are.

    PipelineError where an optimizer has a weight that is in no stage.
    """
    names = {
        id(weight): name
        for module in stages.values()
        for name, weight in module.named_parameters()
    }
    for optimizer in optimizers:
        weights = [
            weight for group in optimizer.param_groups for weight in group["params"]
        ]
        if any(id(weight) not in names for weight in weights):
            raise PipelineError(
                "an optimizer has a weight that is in none of the stages"
            )
        kept = [
            {key: in_parts_as(weight, value) for key, value in of.items()}
            for weight, of in zip(
                weights, read([names[id(weight)] for weight in weights]), strict=True
            )
        ]
        # As `state_dict` has it, which some optimizers have only when all ranks ask for it.
        places = count()
        groups = [
            {**group, "params": [next(places) for _ in group["params"]]}
            for group in optimizer.param_groups
        ]
        load_optimizer(
            optimizer, {"state": dict(enumerate(kept)), "param_groups": groups}
        )
