"""The hooks of leaves.

Torch has no call that returns them, but registering a hook returns a handle that refers to them
all.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Hook = Callable[[Any], Tensor | None]
Hooks = dict[int, Hook]

#: The hooks of leaves, by the leaf's id; only the leaf keeps them alive.
_before: WeakValueDictionary[int, Any] = WeakValueDictionary()
_after: WeakValueDictionary[int, Any] = WeakValueDictionary()


def hooks_before(leaf: Tensor) -> Hooks:
    """The hooks that see a gradient of a leaf (`Tensor.register_hook`)."""
    return _hooks_of(leaf, _before, leaf.register_hook)


def hooks_after(leaf: Tensor) -> Hooks:
    """The hooks that see the sum of a leaf's gradients, after accumulation."""
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
    """Whether a leaf that requires a gradient has any hooks."""
    return leaf.requires_grad and bool(hooks_before(leaf) or hooks_after(leaf))


def has_hooks_before(tensor: Tensor) -> bool:
    """Whether a tensor, which need not be a leaf, has hooks that see its gradient."""
    if not tensor.requires_grad:
        return False
    handle = tensor.register_hook(no_hook)  # type: ignore[no-untyped-call]
    hooks = handle.hooks_dict_ref()
    # Not cached by id, since the graph keeps the hooks of a tensor that is no leaf after its end.
    handle.remove()
    return bool(hooks)


def has_hooks_after(leaf: Tensor) -> bool:
    """Whether a leaf has hooks that see the sum of its gradients."""
    return leaf.requires_grad and bool(hooks_after(leaf))


def has_hooks_of_both(module: nn.Module) -> bool:
    """Whether a module has hooks of its forward and hooks of its backward."""
    return all(
        any(getattr(module, f"_{which}{kind}_hooks", ()) for kind in ("", "_pre"))
        for which in ("forward", "backward")
    )


def has_hooks_of_all_modules() -> bool:
    """Whether there are global module hooks, such as those of `FlopCounterMode`."""
    return bool(getattr(torch.nn.modules.module, "_global_forward_pre_hooks", None))
