"""Layers that compute the gradients of their weights when they are told to, such as those of
Transformer Engine with `delay_wgrad_compute=True`.

A backward computes the gradients of such a layer's inputs alone, and leaves what its weights need
in a queue of the layer. The method `backward_dw` takes the oldest of these, and computes:

    B   autograd runs ─► layer's queue         in the order of the backwards
    W   `backward_dw` ◄─ layer's queue

A stage may also have a method `dw_builder`, as a `PipelineStage` of torch has one. It is called
after a backward, and returns a function that computes the weight gradients of that backward:

    B   autograd runs, then `dw_builder()` ─► function
    W   function()                                           in any order

Where the plan does not split a backward, the weight gradients are computed right after it.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

from torch import nn

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Backward, Part
from schedlang.runtime.shared_weights import add_gradient
from schedlang.schedule.kinds import Kind

#: Is called after the backward of a microbatch; returns what computes its weight gradients.
_Builder = Callable[[int], Callable[[], None]]


class OwnWeightGradients(Part):
    """The weight gradients that a stage computes by itself; its `split` microbatches have a W."""

    def __init__(self, builders: Sequence[_Builder], split: Container[int]) -> None:
        self._builders = builders
        self._split = split
        #: What computes the weight gradients, by microbatch: from the backward to W.
        self._left: dict[int, list[Callable[[], None]]] = {}

    def after_backward(self, run: Backward) -> None:
        """Without a W, compute the gradients now."""
        self._left[run.microbatch] = [build(run.microbatch) for build in self._builders]
        if run.microbatch not in self._split:
            self.after_weight(run.microbatch)

    def after_weight(self, microbatch: int) -> None:
        """Compute the weight gradients of a microbatch."""
        for compute in self._left.pop(microbatch):
            compute()


class Layers:
    """Layers of a stage with a method `backward_dw`, which computes the gradients of the oldest
    backward.
    """

    def __init__(self, stage: int, layers: Sequence[nn.Module]) -> None:
        self._stage = stage
        self._layers: Sequence[Any] = layers
        #: The microbatches whose backward was, and whose weight gradients are yet to come.
        self._queue: deque[int] = deque()

    def build(self, microbatch: int) -> Callable[[], None]:
        """Note a backward; return what computes its weight gradients."""
        self._queue.append(microbatch)
        return partial(self._compute, microbatch)

    def _compute(self, microbatch: int) -> None:
        """Let the layers compute the gradients of their oldest backward."""
        oldest = self._queue.popleft()
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
            if weight.grad is None:
                weight.grad = before
            else:
                weight.grad = add_gradient(before, weight.grad)


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The layers of a module with a method `backward_dw`, which calls those of layers inside."""
    if callable(getattr(module, "backward_dw", None)):
        return [module]
    return [layer for child in module.children() for layer in layers_of(child)]


def _built(builder: Callable[[], Callable[[], None]], _: int) -> Callable[[], None]:
    """What the builder of a stage returns after the backward of a microbatch."""
    return builder()


def of_stages(site: Site) -> Iterator[tuple[int, OwnWeightGradients]]:
    """Make the part for stages with such layers, or with a `dw_builder`."""
    for number, module in site.modules.items():
        builders: list[_Builder] = []
        layers = layers_of(module)
        if layers:
            builders.append(Layers(number, layers).build)
        builder = getattr(module, "dw_builder", None)
        if callable(builder):
            builders.append(partial(_built, builder))
        if builders:
            split = site.microbatches_with([Kind.W], number)
            yield number, OwnWeightGradients(builders, split)
