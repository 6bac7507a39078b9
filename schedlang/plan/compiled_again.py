"""How a plan has its program compiled once more.

The compiler stands above the plans that it makes. So nothing here knows it: whoever asks
`schedlang` for a name has it say what compiles.
"""

import warnings
from collections.abc import Callable
from typing import Any

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.schedule.schedule import Schedule

_compiling: list[Callable[..., Any]] = []


def compile_with(compile: Callable[..., Any]) -> None:
    """Say what compiles."""
    _compiling[:] = [compile]


def compiled_for(plan: Schedule, microbatches: int) -> Any:
    """The plan of the program of another plan, for this number of microbatches. CompileError if a
    rank has no room for it; claims that do not hold are warnings.
    """
    (compile,) = _compiling
    made = compile(
        plan.source.alone,
        plan.params | plan.lists | {"microbatches": microbatches},
        plan.costs,
        plan.is_forward_only,
        plan.transport,
    )
    for wrong in made.wrong:
        if wrong.code != "assert":
            raise CompileError(list(made.wrong))
        warnings.warn(f"{made.title}: {wrong.message}", stacklevel=4)
    return made
