"""What the cutting of a model needs of torch beside its public parts: tensors that have a shape and
no memory but say that they are on a device, and a function mode that is set aside for a while.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode


class Shapes:
    """Makes tensors without memory, of which ops make others of the right shapes."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._made: dict[tuple[object, ...], Tensor] = {}

    def __deepcopy__(self, memo: Any) -> "Shapes":
        # Tensors without numbers are the same in all copies of a stage.
        return self

    def stand_in(
        self,
        number: int,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """The tensor of a shape that stands in for a value; the same each time."""
        key = number, shape, dtype, device
        if key not in self._made:
            self._made[key] = self.of(
                torch.empty((), dtype=dtype).expand(shape), device
            )
        return self._made[key]

    def of(self, tensor: Tensor, device: torch.device) -> Tensor:
        """A tensor of the same shape and type."""
        with self._mode:
            made = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )
        return made.requires_grad_(tensor.requires_grad)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """An op whose result no shape tells is an error, and not a page of torch's log besides."""
        log = logging.getLogger("torch._subclasses.fake_tensor")
        was_disabled = log.disabled
        log.disabled = True
        try:
            yield
        finally:
            log.disabled = was_disabled


def set_aside(mode: TorchFunctionMode) -> bool:
    """Take a function mode from the top of those that are entered; False if it is not there."""
    if not _is_on_top(mode):
        return False
    torch._C._pop_torch_function_stack()
    return True


def put_back(mode: TorchFunctionMode) -> None:
    """Enter a mode again that was set aside."""
    torch._C._push_on_torch_function_stack(mode)


def _is_on_top(mode: Any) -> bool:
    depth = torch._C._len_torch_function_stack()
    return bool(depth) and torch._C._get_function_stack_at(depth - 1) is mode
