"""The hooks of tensors and modules, for which torch has no public call."""

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


def with_hooks_inside(module: nn.Module) -> Callable[..., Any]:
    """The forward of a module with its hooks, which the module has no longer itself: another
    forward that is put into its place may call this one.
    """
    hooks = {
        name: found
        for name, found in vars(module).items()
        if name.endswith("_hooks") and "state_dict" not in name
    }
    if not any(hooks.values()):
        return module.forward
    for name, found in hooks.items():
        setattr(module, name, type(found)())
    return _Inside(module, {**hooks, "forward": module.forward})


class _Inside:
    """Calls a module with other hooks, and another forward, than it has otherwise."""

    def __init__(self, module: nn.Module, inside: dict[str, Any]) -> None:
        self._module = module
        self._inside = inside

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self._module)
        outside = {name: own[name] for name in self._inside}
        own.update(self._inside)
        try:
            return self._module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            own.update(outside)


def has_hooks_of_all_modules() -> bool:
    """Whether there are global module hooks, such as those of `FlopCounterMode`."""
    return bool(getattr(torch.nn.modules.module, "_global_forward_pre_hooks", None))
