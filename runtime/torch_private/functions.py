"""The application of a `torch.autograd.Function`, as an op that function modes see.

Torch shows a function mode what the function's `forward` does, which has no gradient, and not
`apply`. Torch calls `Function.apply` by its name, and has no other place to stand in between.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from schedlang.runtime.torch_private.function_modes import enter, leave, mode_on_top

_apply: Any = Function.__dict__["apply"].__func__


class SeesFunctions(TorchFunctionMode):
    """A mode that is given functions, too, as `__torch_function__(cls.apply, …)`."""


def _shown(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
    mode = mode_on_top()
    # A function that is given another one may call blocks, as a checkpoint does.
    calls = any(callable(arg) for arg in args)
    if calls or not isinstance(mode, SeesFunctions) or not leave(mode):
        return _apply(cls, *args, **kwargs)
    try:
        show: Any = mode.__torch_function__
        return show(cls.apply, (), args, kwargs)
    finally:
        enter(mode)


@contextmanager
def functions_seen() -> Iterator[None]:
    """Show modes the functions that are applied meanwhile."""
    before = Function.__dict__["apply"]
    Function.apply = classmethod(_shown)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Function.apply = before  # type: ignore[method-assign]
