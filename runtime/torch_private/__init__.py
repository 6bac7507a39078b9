"""All private parts of torch that the runtime uses, one file for each use of them.

Nothing else in the runtime reads a name of torch with an underscore in front. A file says why it
needs such a part, tries it when it is imported, and has another way where a version of torch lacks
it: slower, or with fewer layers whose backward is split. A warning then names the part. FSDP2 and
GradScaler have no other way: without their parts, sharded stages and scalers are refused when a
pipeline is built.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Part = TypeVar("_Part")


def private(owner: object, *names: str) -> Any:
    """A private attribute of an attribute of an object."""
    for name in names:
        owner = getattr(owner, name)
    return owner


def instead(name: str, part: Callable[[], _Part], other: _Part, but: str) -> _Part:
    """A part as a function finds and tries it; or where that fails, the other way, with a warning
    that says what is not as good.
    """
    try:
        # As in a process that does nothing else.
        with torch.inference_mode(False), torch.enable_grad():
            return part()
    except Exception as error:
        warnings.warn(
            f"torch {torch.__version__} has no `{name}` that does what schedlang.runtime takes it "
            f"for ({type(error).__name__}: {error}): {but}",
            stacklevel=3,
        )
        return other


def must(holds: object) -> None:
    """ValueError where a part does something else than what is wanted of it."""
    if not holds:
        raise ValueError("it does something else")
