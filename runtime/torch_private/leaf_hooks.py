"""Hooks of leaves.

Torch has no way to ask for them, but whoever registers one gets a handle that knows them all.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

_Hook = Callable[[Any], Tensor | None]
_Hooks = dict[int, _Hook]

#: The hooks of leaves that were asked for, by the leaf's id: it alone holds them.
_before: WeakValueDictionary[int, Any] = WeakValueDictionary()
_after: WeakValueDictionary[int, Any] = WeakValueDictionary()


def _hooks_before(leaf: Tensor) -> _Hooks:
    """Those that see the gradient of a leaf (`Tensor.register_hook`)."""
    return _hooks_of(leaf, _before, leaf.register_hook)


def _hooks_after(leaf: Tensor) -> _Hooks:
    """Those that see what a leaf's gradients have added up to."""
    return _hooks_of(leaf, _after, leaf.register_post_accumulate_grad_hook)


def _hooks_of(
    leaf: Tensor,
    known: WeakValueDictionary[int, Any],
    register: Callable[..., RemovableHandle],
) -> _Hooks:
    hooks: _Hooks | None = known.get(id(leaf))
    if hooks is None:
        handle = register(_no_hook)
        hooks = known[id(leaf)] = handle.hooks_dict_ref()
        assert hooks is not None
        handle.remove()
    return hooks


def _no_hook(_: Tensor) -> None:
    """Leave a gradient as it is."""


def has_hooks(leaf: Tensor) -> bool:
    """Whether hooks are registered that see the gradient of a leaf, if it has one."""
    return leaf.requires_grad and bool(_hooks_before(leaf) or _hooks_after(leaf))


def has_hooks_before(tensor: Tensor) -> bool:
    """Whether hooks are registered that see the gradient of a tensor, which need not be a leaf."""
    if not tensor.requires_grad:
        return False
    handle = tensor.register_hook(_no_hook)  # type: ignore[no-untyped-call]
    hooks = handle.hooks_dict_ref()
    # Not kept by the tensor's id: the graph of one that is no leaf keeps its hooks when it is gone.
    handle.remove()
    return bool(hooks)


def has_hooks_after(leaf: Tensor) -> bool:
    """Whether hooks are registered that see what a leaf's gradients have added up to."""
    return leaf.requires_grad and bool(_hooks_after(leaf))


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


def copy_hooks(of: Tensor, to: Tensor) -> None:
    """Let another leaf have the hooks that see the gradient of a leaf (`Tensor.register_hook`)."""
    for hook in [*_hooks_before(of).values()]:
        to.register_hook(hook)  # type: ignore[no-untyped-call]


def without_hooks_after(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let hooks of some leaves that see what their gradients have added up to not be called in
    here.
    """
    hooked = [hooks for hooks in map(_hooks_after, leaves) if hooks]
    return _replaced(hooked, lambda _: _no_hook) if hooked else _NOTHING


def without_hooks(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let hooks of some leaves (`Tensor.register_hook`) not see what is computed in here.

    Autograd calls them also where a gradient is only asked for, and not added up in `.grad`. There
    is no public way to ask for it without.
    """
    hooked = [hooks for hooks in map(_hooks_before, leaves) if hooks]
    return _replaced(hooked, lambda _: _no_hook) if hooked else _NOTHING


def with_gradients_only(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let hooks of some leaves (`Tensor.register_hook`) not be called where there is no gradient:
    autograd calls them with None.
    """
    hooked = [hooks for hooks in map(_hooks_before, leaves) if hooks]
    return _replaced(hooked, _unless_none) if hooked else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _replaced(hooked: Iterable[_Hooks], by: Callable[[_Hook], _Hook]) -> Iterator[None]:
    """In here, other hooks in place of each."""
    kept = [(hooks, hooks.copy()) for hooks in hooked]
    for hooks, own in kept:
        hooks.update((number, by(hook)) for number, hook in own.items())
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def _unless_none(hook: _Hook) -> _Hook:
    return lambda gradient: None if gradient is None else hook(gradient)
