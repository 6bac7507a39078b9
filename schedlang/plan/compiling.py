"""How a plan has its program compiled once more.

The compiler stands above the plans that it makes. So nothing here knows it: whoever asks
`schedlang` for a name has it say what compiles.
"""

from collections.abc import Callable
from typing import Any

_compiling: list[Callable[..., Any]] = []


def compile_with(compile: Callable[..., Any]) -> None:
    """Say what compiles."""
    _compiling[:] = [compile]


def compiled(*given: Any) -> Any:
    """The plan of a program, given as `schedlang.compile` takes it; its `wrong` are claims that do
    not hold, and ranks without room.
    """
    (compile,) = _compiling
    return compile(*given)
