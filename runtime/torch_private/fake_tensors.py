"""Fake tensors, as torch calls tensors that have a shape, a type and a device, and no data; ops on
them give fake tensors of the right shapes.

`torch.compile` and `torch.export` work with them, and torch has no public name for them. Without
this part there is no other way: `split` cuts no model that does more than call its blocks.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

#: The attribute in which a fake tensor keeps the one that it stands in for.
_KEPT = "_kept"


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has no data."""
    return isinstance(tensor, FakeTensor)


def kept_by(tensor: Tensor) -> Tensor:
    """The tensor that a fake one stands in for and keeps, or the same one."""
    kept: Tensor = tensor.__dict__.get(_KEPT, tensor)
    return kept


class FakeTensors:
    """Makes fake tensors."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[tuple[object, ...], Tensor] = {}

    def __deepcopy__(self, memo: Any) -> "FakeTensors":
        # A fake tensor has no data that copies of a stage would share.
        return self

    def like(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A new one of the same shape and type."""
        with self._mode:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
        return made.requires_grad_() if tensor.requires_grad else made

    def in_place_of(self, tensor: Tensor) -> Tensor:
        """A new one that stands in for a tensor and keeps it, see `kept_by`."""
        made = self.like(tensor.detach(), tensor.device)
        made.__dict__[_KEPT] = tensor
        return made

    def of_value(
        self, value: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """The one that stands in for a value where it has this shape; the same each time."""
        key = value, shape, dtype, device
        if key not in self._made:
            model = torch.empty((), dtype=dtype).expand(shape)
            self._made[key] = self.like(model, device)
        return self._made[key]

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Where an op needs data, torch raises an error; this keeps it from writing a page into its
        log besides. Nor does it warn of the gradients that it looks for.
        """
        log = logging.getLogger("torch._subclasses.fake_tensor")
        was_disabled = log.disabled
        log.disabled = True
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
                yield
        finally:
            log.disabled = was_disabled
