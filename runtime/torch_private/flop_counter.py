"""Torch's counter of floating-point operations, around a part of a model.

`FlopCounterMode` also tracks modules for a table, by hooks on all tensors between them. A backward
in two halves would run into these hooks, so the tracker is left out. Attention on CPUs is a
separate operator, which the counter does not know.
"""

from typing import Any, cast

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from schedlang.runtime.torch_private import instead, must, private


def _known() -> dict[Any, Any]:
    """The counting function for attention on CPUs, by operator."""
    aten = torch.ops.aten
    of_cpus = private(aten, "_scaled_dot_product_flash_attention_for_cpu")
    others = private(aten, "_scaled_dot_product_flash_attention")
    must(callable(flop_registry[others]))
    return {of_cpus: flop_registry[others]}


_MORE: dict[Any, Any] = instead(
    "ops.aten._scaled_dot_product_flash_attention_for_cpu",
    _known,
    {},
    "FLOPs leave out attention on CPUs",
)


class _NoTracker:
    """Replaces torch's tracker of modules: everything counts for one module."""

    parents = ("Global",)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class FlopCounter(FlopCounterMode):
    """A context that counts the floating-point operations inside it."""

    def __init__(self) -> None:
        super().__init__(display=False)
        # `custom_mapping` would wrap what the registry has wrapped already.
        self.flop_registry |= _MORE
        self.mod_tracker = cast(Any, _NoTracker())
