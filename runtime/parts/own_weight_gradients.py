"""Layers that compute the gradients of their weights when they are told to, such as those of
Transformer Engine with `delay_wgrad_compute=True`.

A backward computes the gradients of such a layer's inputs alone, and leaves what its weights need
in a queue of the layer. The method `backward_dw` takes the oldest of these, and computes:

    B   autograd runs ─► layer's queue         in the order of the backwards
    W   `backward_dw` ◄─ layer's queue

Where the plan does not split a backward, `backward_dw` is called right after it.
"""

from collections import deque
from collections.abc import Container, Iterator, Sequence
from typing import Any

from torch import nn

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Backward, Part
from schedlang.schedule.kinds import Kind


class OwnWeightGradients(Part):
    """The weight gradients of some layers of a stage; its `split` microbatches have a W."""

    def __init__(
        self, stage: int, layers: Sequence[nn.Module], split: Container[int]
    ) -> None:
        self._stage = stage
        self._layers: Sequence[Any] = layers
        self._split = split
        #: The microbatches whose backward was, and whose W is yet to come.
        self._left: deque[int] = deque()

    def after_backward(self, run: Backward) -> None:
        """Without a W, compute the gradients now."""
        self._left.append(run.microbatch)
        if run.microbatch not in self._split:
            self.after_weight(run.microbatch)

    def after_weight(self, microbatch: int) -> None:
        """Let the layers compute the gradients of their oldest backward."""
        oldest = self._left.popleft()
        if oldest != microbatch:
            raise PipelineError(
                f"stage {self._stage} has layers that compute their weight gradients in the order "
                f"of the backwards (`backward_dw`), and the plan wants those of microbatch "
                f"{microbatch} before those of {oldest}: take a schedule whose W keep the order"
            )
        weights = [weight for layer in self._layers for weight in layer.parameters()]
        earlier = [weight.grad for weight in weights]
        # Some versions replace a gradient, and do not add to it.
        for weight in weights:
            weight.grad = None
        for layer in self._layers:
            layer.backward_dw()
        for weight, before in zip(weights, earlier, strict=True):
            if before is not None:
                weight.grad = before if weight.grad is None else before + weight.grad


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of a module with a method `backward_dw`, which calls those of layers inside."""
    if callable(getattr(module, "backward_dw", None)):
        return [module]
    return [layer for child in module.children() for layer in layers_of(child)]


def of_stages(site: Site) -> Iterator[tuple[int, OwnWeightGradients]]:
    """Make the part for stages with such layers."""
    for number, module in site.modules.items():
        layers = layers_of(module)
        if layers:
            split = site.microbatches_with([Kind.W], number)
            yield number, OwnWeightGradients(number, layers, split)
