"""Hooks of leaves that are not called for a while, or in another way."""

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
    """Let another leaf have the hooks that see the gradient of a leaf (`Tensor.register_hook`)."""
    for hook in [*hooks_before(of).values()]:
        to.register_hook(hook)  # type: ignore[no-untyped-call]


def without_hooks_after(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let hooks of some leaves that see what their gradients have added up to not be called in
    here.
    """
    hooked = [hooks for hooks in map(hooks_after, leaves) if hooks]
    return _replaced(hooked, lambda _: no_hook) if hooked else _NOTHING


def without_hooks(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let hooks of some leaves (`Tensor.register_hook`) not see what is computed in here.

    Autograd calls them also where a gradient is only asked for, and not added up in `.grad`. There
    is no public way to ask for it without.
    """
    hooked = [hooks for hooks in map(hooks_before, leaves) if hooks]
    return _replaced(hooked, lambda _: no_hook) if hooked else _NOTHING


def with_gradients_only(leaves: Iterable[Tensor]) -> AbstractContextManager[None]:
    """Let hooks of some leaves (`Tensor.register_hook`) not be called where there is no gradient:
    autograd calls them with None.
    """
    hooked = [hooks for hooks in map(hooks_before, leaves) if hooks]
    return _replaced(hooked, _unless_none) if hooked else _NOTHING


_NOTHING = nullcontext()


@contextmanager
def _replaced(hooked: Iterable[Hooks], by: Callable[[Hook], Hook]) -> Iterator[None]:
    """In here, other hooks in place of each."""
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
