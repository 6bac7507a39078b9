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

#: A tensor as the argument of `has_torch_function`.
_ANY = (torch.zeros((), device="cpu"),)


def has_other_modes() -> bool:
    """Whether a call inside a mode is also inside other modes, which may change its result. Modes
    of `torch.device` do not count, since they only place new tensors.
    """
    return has_torch_function(_ANY) and _is_other()


class _Probe(torch.autograd.Function):
    """A function without support for transforms, so that torch refuses it inside them."""

    @staticmethod
    def forward(ctx: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any) -> None: ...


def is_transformed() -> bool:
    """Whether a call is inside a transform of `torch.func`, where tensors are wrappers."""
    try:
        _Probe.apply()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return True
    return False
