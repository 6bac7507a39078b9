"""Checks of the arguments of public functions, before anything else: TypeError or ValueError names
an argument of a wrong type, or one that no plan could take.

Arguments that are wrong for a plan, or differ between ranks, are found together with the other
ranks, see `schedlang.runtime.checks`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from schedlang.diagnostics.wrong_arguments import (
    check_choice,
    check_flag,
    check_number,
    check_type,
    check_whole,
    shown,
)
from schedlang.plan.plan import Plan
from schedlang.runtime.setup import Setup, Verify


def check_pipeline(plan: Any, setup: Setup, mesh: Any, timeout: Any) -> None:
    """Check the arguments of `Pipeline`."""
    check_plan(plan)
    check_stages(setup.modules)
    if isinstance(setup.loss_fn, Mapping):
        for model, loss_fn in setup.loss_fn.items():
            _check_callable(f"loss_fn[{model!r}]", loss_fn)
    else:
        _check_callable("loss_fn", setup.loss_fn)
    _check_optional("mesh", mesh, DeviceMesh, 'a DeviceMesh, such as mesh["pp"]')
    what = (
        'a list of the names by stage of each tied weight, such as [{0: "a", 3: "b"}]'
    )
    check_list("tied", setup.tied, Mapping, what)
    _check_optional(
        "transfer_dtype", setup.transfer_dtype, torch.dtype, "a dtype of torch"
    )
    if setup.fixed_scale is not None:
        check_number("loss_scale", setup.fixed_scale)
    if setup.max_gathered is not None:
        check_whole("max_gathered", setup.max_gathered)
    if setup.max_norm is not None:
        check_number("max_norm", setup.max_norm)
    check_choice("verify", setup.verify, get_args(Verify))
    check_flag("audit", setup.audit)
    check_flag("stop_on_nan", setup.stop_on_nan)
    check_flag("survives_loss", setup.survives_loss)
    check_flag("cuda_graphs", setup.cuda_graphs)
    _check_skip_if(setup.skip_if)
    _check_batch_dim(setup.batch_dim)
    _check_slice_lengths(setup.slice_lengths)
    what = "a mapping of stages to optimizers, such as {0: optimizer}"
    _check_by_stage(
        "optimizers", setup.optimizers, Optimizer, what, "an optimizer of torch"
    )
    check_number("timeout", timeout, above=0)


def check_plan(plan: Any) -> None:
    """Check that this is a plan, and not the path of one."""
    what = "a Plan: `read_plan(path)` reads one, `compile(program)` makes one"
    check_type("plan", plan, Plan, what)


def check_stages(stages: Any) -> None:
    """Check modules by the numbers of their stages."""
    what = (
        "a mapping of stages to modules, such as {0: module}, or what `split` returns"
    )
    _check_by_stage("stages", stages, nn.Module, what, "a module of torch")
    for stage, module in stages.items():
        check_shapes(f"stages[{stage}]", module)


def check_shapes(name: str, module: nn.Module) -> None:
    """Check that all weights have shapes; lazy ones get theirs in a first forward."""
    for weight_name, weight in module.named_parameters():
        if is_lazy(weight):
            raise ValueError(
                f"`{name}` has a weight `{weight_name}` without a shape, as a LazyLinear has until "
                "its first forward: run the model once on a microbatch, before it is cut"
            )


def check_list(
    name: str, values: Any, wanted: type | tuple[type, ...], what: str
) -> None:
    """Check a list of values of a type. A string is refused, although it is a list of letters."""
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise TypeError(f"`{name}` is {shown(values)}: it must be {what}")
    # An iterator can be read only once, so its values are not checked here.
    for index, value in enumerate(() if isinstance(values, Iterator) else values):
        check_type(f"{name}[{index}]", value, wanted, f"one of {what}")


def _check_callable(name: str, value: Any) -> None:
    if value is not None and not callable(value):
        raise TypeError(
            f"`{name}` is {shown(value)}: it must be a function of output and targets"
        )
    if isinstance(value, type):
        # For example `nn.CrossEntropyLoss` instead of an instance: calling it would make a module.
        example = f"an instance, such as {value.__name__}()"
        raise TypeError(f"`{name}` is {shown(value)}: it must be {example}")


def _check_optional(name: str, value: Any, wanted: type, what: str) -> None:
    if value is not None:
        check_type(name, value, wanted, what)


def _check_by_stage(name: str, values: Any, wanted: type, what: str, one: str) -> None:
    check_type(name, values, Mapping, what)
    for stage, value in values.items():
        check_whole(f"a stage in {name}", stage, 0)
        check_type(f"{name}[{stage}]", value, wanted, one)


def _check_slice_lengths(lengths: Any) -> None:
    if lengths is None or callable(lengths):
        return
    what = (
        "the lengths of slices, such as [512, 256, 256], or a function that gives them"
    )
    check_list("slice_lengths", lengths, int, what)
    for index, length in enumerate(lengths):
        check_whole(f"slice_lengths[{index}]", length, 1)


def _check_skip_if(skip_if: Any) -> None:
    """Check types of exceptions, or a function."""
    for each in skip_if if isinstance(skip_if, tuple) else (skip_if,):
        is_type = isinstance(each, type) and issubclass(each, Exception)
        is_function = callable(each) and not isinstance(each, type)
        if (
            skip_if is not None
            and not is_type
            and (skip_if is not each or not is_function)
        ):
            raise TypeError(
                f"`skip_if` is {shown(skip_if)}: it must be a type of exceptions, several in a "
                "tuple, or a function of the losses"
            )


def _check_batch_dim(dims: Any) -> None:
    pair = dims if isinstance(dims, tuple) else (dims, dims)
    if len(pair) != 2:
        what = "a dimension, or a pair of those of inputs and targets"
        raise ValueError(f"`batch_dim` is {shown(dims)}: it must be {what}")
    for dim in pair:
        check_whole("batch_dim", dim)
