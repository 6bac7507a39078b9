"""Functions of modules that most programs do not need.

A module declares such functions behind its imports, for type checkers as imports and for Python as
names of functions:

    if TYPE_CHECKING:
        from schedlang.proof.capacity import check_capacity
    else:
        check_capacity = on_demand("schedlang.proof.capacity.check_capacity")

So compiling a program loads what that program uses.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def on_demand(path: str) -> Callable[..., Any]:
    """The function with this path. Its module is imported when the function is called."""
    module, _, name = path.rpartition(".")

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return call
