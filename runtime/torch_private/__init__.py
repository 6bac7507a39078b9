"""All private parts of torch that the runtime uses, one file for each use.

Nothing else in the runtime reads a private name of torch. Each file says why it needs its part, and
tries it when it is imported. If a version of torch lacks the part, the file has a fallback, which
is slower or splits the backwards of fewer layers, and a warning names the part. There is no
fallback for FSDP2 and GradScaler: without their parts, sharded stages and scalers are refused when
a pipeline is built.
"""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch

_Part = TypeVar("_Part")


def private(owner: object, *names: str) -> Any:
    """Follow a path of attributes from an object to a private one."""
    for name in names:
        owner = getattr(owner, name)
    return owner


def instead(name: str, part: Callable[[], _Part], other: _Part, but: str) -> _Part:
    """The part that a function finds and tries. If that fails, return the fallback `other`, and
    warn of its drawback, `but`.
    """
    try:
        # The modes that may be on at import must not change the trial.
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
    """ValueError if a part does not work as expected."""
    if not holds:
        raise ValueError("it does something else")
