"""The hooks of tensors and modules, for which torch has no public call."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Hook = Callable[[Any], Tensor | None]
Hooks = dict[int, Hook]


def hooks_before(tensor: Tensor) -> Hooks:
    """The hooks that see a gradient of a tensor (`Tensor.register_hook`); torch calls what stands
    in this dictionary.
    """
    return tensor._backward_hooks or {}


def hooks_after(leaf: Tensor) -> Hooks:
    """The hooks that see the sum of a leaf's gradients, after accumulation
    (`Tensor.register_post_accumulate_grad_hook`).
    """
    return leaf._post_accumulate_grad_hooks or {}


def no_hook(_: Tensor) -> None:
    """Leave a gradient as it is."""


def has_hooks(leaf: Tensor) -> bool:
    """Whether a leaf that requires a gradient has any hooks."""
    return leaf.requires_grad and bool(hooks_before(leaf) or hooks_after(leaf))


def has_hooks_before(tensor: Tensor) -> bool:
    """Whether a tensor, which need not be a leaf, has hooks that see its gradient."""
    return tensor.requires_grad and bool(hooks_before(tensor))


def has_hooks_after(leaf: Tensor) -> bool:
    """Whether a leaf has hooks that see the sum of its gradients."""
    return leaf.requires_grad and bool(hooks_after(leaf))


def has_hooks_of_both(module: nn.Module) -> bool:
    """Whether a module has hooks of its forward and hooks of its backward."""
    return all(
        any(getattr(module, f"_{which}{kind}_hooks", ()) for kind in ("", "_pre"))
        for which in ("forward", "backward")
    )


def forward_hooks(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The hooks that see the output of a module (`Module.register_forward_hook`), by torch's
    numbers of them.
    """
    return module._forward_hooks


def takes_keywords(module: nn.Module, number: int) -> bool:
    """Whether a forward hook of a module sees its keyword arguments, too."""
    return number in module._forward_hooks_with_kwargs


def with_hooks_inside(module: nn.Module) -> nn.Module:
    """A module that calls the forward of another one, with the hooks of that, which then has none.

    Both have the same parts.
    """
    inner = copy.copy(module)
    inner.forward = module.forward
    for name, hooks in vars(module).items():
        if name.endswith("_hooks") and "state_dict" not in name:
            setattr(module, name, type(hooks)())
    return inner


def has_hooks_of_all_modules() -> bool:
    """Whether there are global module hooks, such as those of `FlopCounterMode`."""
    return bool(getattr(torch.nn.modules.module, "_global_forward_pre_hooks", None))
