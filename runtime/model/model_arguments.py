"""Checks of the arguments of functions that cut, save and load models, before anything else:
TypeError or ValueError names an argument of a wrong type, or one that no model could take.
"""

from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import nn
from torch.optim import Optimizer

from schedlang.diagnostics.wrong_arguments import (
    check_number,
    check_type,
    check_whole,
    shown,
)
from schedlang.plan.plan import Plan
from schedlang.runtime.arguments import check_list, check_shapes
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.values import flatten


def check_model(model: Any) -> None:
    """Check that this is a model, and not its class."""
    check_type("model", model, nn.Module, "a module of torch")
    check_shapes("model", model)


def check_blocks(blocks: Any) -> None:
    """Check names of submodules."""
    what = "names of submodules, such as ('embedding', 'layers', 'head')"
    if not isinstance(blocks, str):
        check_list("blocks", blocks, str, what)


def check_input(name: str, value: Any) -> None:
    """Check a microbatch of a model."""
    try:
        tensors, _ = flatten(value, f"`{name}`")
    except PipelineError as error:
        raise TypeError(str(error)) from None
    if not tensors:
        raise ValueError(
            f"`{name}` has no tensors: it must be a microbatch of the model"
        )


def check_folder(folder: Any) -> None:
    """Check the path of a folder."""
    check_type("folder", folder, (str, PathLike), "the path of a folder")


def check_optimizers(optimizers: Any) -> None:
    """Check a list of optimizers."""
    check_list(
        "optimizers", optimizers, Optimizer, "optimizers of torch, such as [optimizer]"
    )


def check_state(state: Any) -> None:
    """Check the objects that a script saves beside a model, by the script's own names."""
    what = 'a dictionary of objects with a state, such as {"scheduler": scheduler}'
    check_type("state", state, Mapping, what)
    for name, each in state.items():
        if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
            raise TypeError(
                f"`state[{name!r}]` is {shown(each)}, which has no `state_dict` and "
                "`load_state_dict`"
            )


def check_rank(rank: Any, plan: Plan) -> None:
    """Check a rank of a plan."""
    check_whole("rank", rank, 0, len(plan.ranks) - 1)


def check_block_costs(costs: Any) -> None:
    """Check the costs of blocks."""
    what = "numbers, one for each block, as `measure` returns them"
    check_list("costs", costs, (int, float), what)
    for index, cost in enumerate(costs):
        check_number(f"costs[{index}]", cost)
