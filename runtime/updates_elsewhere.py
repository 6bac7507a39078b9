"""Updates that change other memory than that of a stage's weights.

Where the runtime moves weights to other memory, an optimizer may go on to change the old memory:

    before    optimizer ──► flat tensor ◄── weights, as views of it
    after     optimizer ──► flat tensor     weights ──► memory of the runtime

From then on the weights stay as they are, and the training goes on without them. So the first
updates are watched: a gradient is there, and the weight with it must change.
"""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from schedlang.runtime.torch_private.tensors import local_part


class UpdatesElsewhere:
    """Warns if the first updates of a stage, as many as `patience` says, have left all weights with
    gradients as they were. `reason` says why the runtime moves the weights.
    """

    def __init__(
        self,
        stage: str,
        weights: Mapping[str, nn.Parameter],
        reason: str,
        patience: int = 1,
    ) -> None:
        self._stage = stage
        self._weights = weights
        self._reason = reason
        self._patience = patience
        #: Before an update, for each weight with a gradient that is not zero: the place of the
        #: largest one, and the weight's value there.
        self._largest: dict[str, tuple[int, Tensor]] = {}

    def before_update(self) -> None:
        """Keep values that the update must change; nothing once an update has changed some."""
        self._largest = {}
        for name, weight in self._weights.items() if self._patience else ():
            gradient = None if weight.grad is None else _values(weight.grad).abs()
            if gradient is not None and gradient.any():
                place = int(gradient.argmax())
                self._largest[name] = place, _value_at(weight, place)

    def gradients_are_gone(self) -> bool:
        """Whether the gradients that were there before the update are dropped, or zeros."""
        gradients = (
            (self._weights[name].grad, place)
            for name, (place, _) in self._largest.items()
        )
        return all(
            gradient is None or not _value_at(gradient, place)
            for gradient, place in gradients
        )

    def after_update(self) -> None:
        """Warn if all of these values are as they were."""
        if not self._largest:
            return
        if any(
            bool(_value_at(self._weights[name], place) != before)
            for name, (place, before) in self._largest.items()
        ):
            self._patience = 0
        else:
            self._patience -= 1
            if not self._patience:
                self._warn()
        self._largest = {}

    def _warn(self) -> None:
        warnings.warn(
            f"an update with gradients has left the weights of stage {self._stage} as they were, "
            f"and {self._reason}, so that weights move to other memory: if the optimizer changes "
            "memory of its own, such as one flat tensor with the weights as views, let it change "
            "the weights themselves",
            stacklevel=2,
        )


def _value_at(weight: Tensor, place: int) -> Tensor:
    return _values(weight).flatten()[place].clone()


def _values(tensor: Tensor) -> Tensor:
    """All values of a tensor that may be sparse; of a sharded tensor, those of this process."""
    local = local_part(tensor.detach())
    return local if local.layout == torch.strided else local.to_dense()
