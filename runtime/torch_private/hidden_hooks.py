"""Disable hooks of leaves for a while, or change how they are called."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor

from schedlang.runtime.torch_private.leaf_hooks import (
    Hook,
    Hooks,
    hooks_after,
    hooks_before,
    no_hook,
)


def copy_hooks(of: Tensor, to: Tensor) -> None:
    """Copy the hooks of a leaf (`Tensor.register_hook`) to another one."""
    for hook in [*hooks_before(of).values()]:
        to.register_hook(hook)  # type: ignore[no-untyped-call]


def without_hooks_after(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """A context in which the hooks after accumulation of these leaves are not called."""
    hooked = [hooks for hooks in map(hooks_after, leaves) if hooks]
    return _replaced(hooked, lambda _: no_hook) if hooked else _NOTHING


def without_hooks(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """A context in which the hooks of these leaves (`Tensor.register_hook`) are not called.

    Autograd calls them even if a gradient is only returned and not added to `.grad`. There is no
    public way to get it without.
    """
    hooked = [hooks for hooks in map(hooks_before, leaves) if hooks]
    return _replaced(hooked, lambda _: no_hook) if hooked else _NOTHING


def with_gradients_only(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """A context in which the hooks of these leaves (`Tensor.register_hook`) are not called without
    a gradient, for which autograd calls them with None.
    """
    hooked = [hooks for hooks in map(hooks_before, leaves) if hooks]
    return _replaced(hooked, _unless_none) if hooked else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _replaced(hooked: Iterable[Hooks], by: Callable[[Hook], Hook]) -> Iterator[None]:
    """A context in which each hook is replaced by another one."""
    kept = [(hooks, hooks.copy()) for hooks in hooked]
    for hooks, own in kept:
        hooks.update((number, by(hook)) for number, hook in own.items())
    try:
        yield
    finally:
        for hooks, own in kept:
            hooks.update(own)


def _unless_none(hook: Hook) -> Hook:
    return lambda gradient: None if gradient is None else hook(gradient)
