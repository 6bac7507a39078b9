"""The gradients of an activation in a message.

Gradients are sent back for the tensors of an activation that want one. If the loss does not depend
on a tensor, for example because of a `detach`, it has no gradient. In the first step, every message
begins with flags that say which gradients exist; later steps leave out those that no message of the
first step had.
"""

from typing import TYPE_CHECKING

import torch
from attrs import define
from torch import Tensor

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.values import ValueSpec, has_gradient
from schedlang.runtime.wire_format import WireFormat

if TYPE_CHECKING:
    from schedlang.runtime.precision import Rounding


@define(eq=False)
class Gradients:
    """The gradients of an activation in a message: for each tensor that may have one (`models`),
    whether it is sent. In a first step, `were_there` notes which gradients any message has had.
    """

    models: list[Tensor]
    are_sent: list[bool]
    rounding: "Rounding | None"
    device: torch.device
    is_first: bool
    were_there: list[bool]
    format: WireFormat
    #: Whether all gradients are sent without flags: the usual case after a first step.
    _are_all_sent: bool

    @classmethod
    def first(
        cls, spec: ValueSpec, rounding: "Rounding | None", device: torch.device
    ) -> "Gradients":
        """The format of a first step: gradients of all tensors that want one."""
        # An activation of three tensors; the sender has detached c, and the loss ignores b:
        #
        #     models       a      b      c
        #     are_sent     True   True   False      the tensors that want a gradient
        # were_there   True   False             the gradients in messages of the first step: none
        #                                           for b, so later steps send only that of a
        pairs = zip(spec.models(), spec.want_gradients, strict=True)
        wanted = [(model, wants) for model, wants in pairs if has_gradient(model)]
        models = [model for model, _ in wanted]
        are_sent = [wants for _, wants in wanted]
        return cls._of(models, are_sent, rounding, device, is_first=True)

    @classmethod
    def _of(
        cls,
        models: list[Tensor],
        are_sent: list[bool],
        rounding: "Rounding | None",
        device: torch.device,
        is_first: bool,
    ) -> "Gradients":
        sent = [
            model for model, is_sent in zip(models, are_sent, strict=True) if is_sent
        ]
        were_there = [False] * len(sent)
        format = WireFormat.of(sent, rounding)
        are_all_sent = all(are_sent) and not is_first
        return cls(
            models,
            are_sent,
            rounding,
            device,
            is_first,
            were_there,
            format,
            are_all_sent,
        )

    def of_later_steps(self) -> "Gradients":
        """The format of later steps: gradients that some message of the first step had."""
        # The lists differ in length: `were_there` has entries only for gradients that are sent.
        there = iter(self.were_there)
        are_sent = [is_sent and next(there) for is_sent in self.are_sent]
        return self._of(
            self.models, are_sent, self.rounding, self.device, is_first=False
        )

    def pack(self, gradients: list[Tensor | None], what: str) -> list[Tensor]:
        """The tensors to send; in a first step, flags come first: which gradients exist."""
        if self._are_all_sent:
            pairs = zip(gradients, self.models, strict=True)
            return self.format.pack(
                [self._or_zeros(gradient, model) for gradient, model in pairs]
            )
        tensors = []
        are_there = []
        for gradient, model, is_sent in zip(
            gradients, self.models, self.are_sent, strict=True
        ):
            if is_sent:
                are_there.append(gradient is not None)
                tensors.append(self._or_zeros(gradient, model))
            elif gradient is not None and not self.is_first:
                raise PipelineError(
                    f"{what} has a gradient now, and had none in the first step with inputs of "
                    "this shape: after freezing or unfreezing weights, build a new pipeline"
                )
        # A missing gradient is sent as zeros, so that the receiver knows the length of a message.
        packed = self.format.pack(tensors)
        if not self.is_first:
            return packed
        self._note(are_there)
        return [torch.tensor(are_there, dtype=torch.uint8), *packed]

    def room(self, device: torch.device) -> list[Tensor]:
        """Empty tensors to receive them into."""
        rooms = [torch.empty_like(model, device=device) for model in self.format.packed]
        if self.is_first:
            rooms.insert(0, torch.empty(len(rooms), dtype=torch.uint8))
        return rooms

    def unpack(self, received: list[Tensor]) -> list[Tensor | None]:
        """The received gradients, for all tensors that may have one."""
        if self._are_all_sent:
            return [*self.format.unpack(received)]
        are_there = [True] * len(self.format.packed)
        if self.is_first:
            are_there = received[0].bool().tolist()
            received = received[1:]
            self._note(are_there)
        sent = zip(self.format.unpack(received), are_there, strict=True)
        gradients: list[Tensor | None] = []
        for is_sent in self.are_sent:
            gradient, is_there = next(sent) if is_sent else (None, False)
            gradients.append(gradient if is_there else None)
        return gradients

    def _or_zeros(self, gradient: Tensor | None, model: Tensor) -> Tensor:
        return (
            torch.zeros_like(model, device=self.device)
            if gradient is None
            else gradient
        )

    def _note(self, are_there: list[bool]) -> None:
        self.were_there = [
            a or b for a, b in zip(self.were_there, are_there, strict=True)
        ]
