"""Hooks of leaves.

Torch has no way to ask for them, but whoever registers one gets a handle that knows them all.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Hook = Callable[[Any], Tensor | None]
Hooks = dict[int, Hook]

#: The hooks of leaves that were asked for, by the leaf's id: it alone holds them.
_before: WeakValueDictionary[int, Any] = WeakValueDictionary()
_after: WeakValueDictionary[int, Any] = WeakValueDictionary()


def hooks_before(leaf: Tensor) -> Hooks:
    """Those that see the gradient of a leaf (`Tensor.register_hook`)."""
    return _hooks_of(leaf, _before, leaf.register_hook)


def hooks_after(leaf: Tensor) -> Hooks:
    """Those that see what a leaf's gradients have added up to."""
    return _hooks_of(leaf, _after, leaf.register_post_accumulate_grad_hook)


def _hooks_of(
    leaf: Tensor,
    known: WeakValueDictionary[int, Any],
    register: Callable[..., RemovableHandle],
) -> Hooks:
    hooks: Hooks | None = known.get(id(leaf))
    if hooks is None:
        handle = register(no_hook)
        hooks = known[id(leaf)] = handle.hooks_dict_ref()
        assert hooks is not None
        handle.remove()
    return hooks


def no_hook(_: Tensor) -> None:
    """Leave a gradient as it is."""


def has_hooks(leaf: Tensor) -> bool:
    """Whether hooks are registered that see the gradient of a leaf, if it has one."""
    return leaf.requires_grad and bool(hooks_before(leaf) or hooks_after(leaf))


def has_hooks_before(tensor: Tensor) -> bool:
    """Whether hooks are registered that see the gradient of a tensor, which need not be a leaf."""
    if not tensor.requires_grad:
        return False
    handle = tensor.register_hook(no_hook)  # type: ignore[no-untyped-call]
    hooks = handle.hooks_dict_ref()
    # Not kept by the tensor's id: the graph of one that is no leaf keeps its hooks when it is gone.
    handle.remove()
    return bool(hooks)


def has_hooks_after(leaf: Tensor) -> bool:
    """Whether hooks are registered that see what a leaf's gradients have added up to."""
    return leaf.requires_grad and bool(hooks_after(leaf))


def has_hooks_of_both(module: nn.Module) -> bool:
    """Whether hooks of a module's forward and of its backward are registered, as far as torch says
    so.
    """
    return all(
        any(getattr(module, f"_{which}{kind}_hooks", ()) for kind in ("", "_pre"))
        for which in ("forward", "backward")
    )


def has_hooks_of_all_modules() -> bool:
    """Whether hooks are registered for all modules, as `FlopCounterMode` does."""
    return bool(getattr(torch.nn.modules.module, "_global_forward_pre_hooks", None))
