"""Weights that a stage returns, itself or as views, where the plan frees their memory: sharded
weights after RESHARD, and weights that travel. The value is copied then, since the next stage reads
it later.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from schedlang.runtime.door import Site
from schedlang.runtime.part import Forward, Part
from schedlang.runtime.shared_memory import storages_of
from schedlang.runtime.torch_private.pytrees import tree_flatten, tree_unflatten


class ReturnedWeights(Part):
    """Copies what a stage returns of its weights."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def after_forward(self, run: Forward) -> None:
        """Put copies in place of returned tensors that lie in the memory of weights."""
        values, tree = tree_flatten(run.returned)
        # Not before, since each gather may put the weights elsewhere.
        memory = storages_of(self._module.parameters())
        is_weight = [
            isinstance(value, Tensor) and bool(storages_of([value]) & memory)
            for value in values
        ]
        if any(is_weight):
            copied = [
                value.clone() if copies else value
                for value, copies in zip(values, is_weight, strict=True)
            ]
            run.returned = tree_unflatten(copied, tree)


def of_stages(site: Site) -> Iterator[tuple[int, ReturnedWeights]]:
    """Make the part for each stage of a rank whose plan frees weights."""
    for number, module in site.modules.items():
        yield number, ReturnedWeights(module)
