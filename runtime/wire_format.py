"""The shapes and types of a message's tensors, at the stages and on their way."""

from typing import TYPE_CHECKING

from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from schedlang.runtime.precision import Rounding


@frozen(eq=False)
class WireFormat:
    """Shapes and types of a message's tensors, at the stages (`models`) and on their way
    (`packed`).
    """

    models: list[Tensor]
    rounding: "Rounding | None"
    packed: list[Tensor]

    @classmethod
    def of(cls, models: list[Tensor], rounding: "Rounding | None") -> "WireFormat":
        """The format of tensors with these shapes and types at the stages."""
        return cls(
            models,
            rounding,
            [rounding.room(model) for model in models] if rounding else models,
        )

    def pack(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors to send."""
        if self.rounding is None:
            return [tensor.contiguous() for tensor in tensors]
        return [self.rounding.pack(tensor.detach()) for tensor in tensors]

    def unpack(self, tensors: list[Tensor]) -> list[Tensor]:
        """The tensors at the stage, from those that were received."""
        return (
            tensors
            if self.rounding is None
            else [*map(self.rounding.unpack, tensors, self.models)]
        )
