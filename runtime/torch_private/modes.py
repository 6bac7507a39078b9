"""Modes and transforms around a call."""

from collections.abc import Callable
from typing import Any

import torch
import torch.overrides
from torch.overrides import has_torch_function

from schedlang.runtime.torch_private import instead, must, private


def _torchs_modes() -> Callable[[], bool]:
    from torch.utils._device import DeviceContext

    modes = private(torch.overrides, "_get_current_function_mode_stack")
    with torch.device("cpu"):
        must(isinstance(modes()[-1], DeviceContext))
    return lambda: any(not isinstance(mode, DeviceContext) for mode in modes())


_is_other: Callable[[], bool] = instead(
    "torch.overrides._get_current_function_mode_stack",
    _torchs_modes,
    lambda: True,
    "within `torch.device`, B computes all weight gradients, and W none",
)

#: A tensor that is handed to a mode, if one is on.
_ANY = (torch.zeros((), device="cpu"),)


def has_other_modes() -> bool:
    """Whether a call inside a mode is also inside other ones, which may change what it does; not
    those of `torch.device`, which only say where new tensors are.
    """
    return has_torch_function(_ANY) and _is_other()


class _Probe(torch.autograd.Function):
    """A function that says nothing of transforms, so that torch refuses it inside of them."""

    @staticmethod
    def forward(ctx: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any) -> None: ...


def is_transformed() -> bool:
    """Whether a call is inside a transform of `torch.func`, whose tensors are not what they
    seem.
    """
    try:
        _Probe.apply()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return True
    return False
