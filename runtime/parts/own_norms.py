"""A warning for scripts that clip gradients by the norm of a single rank.

`torch.nn.utils.clip_grad_norm_` sees only the gradients of this rank. So each rank would scale its
gradients by another factor, and by another one than a single process would.
"""

import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from weakref import WeakSet

from torch import Tensor, nn

from schedlang.runtime.door import Site
from schedlang.runtime.part import Part
from schedlang.runtime.torch_private.clip_grad import tell_what_is_clipped

#: The parts of all pipelines in this process.
_known: "WeakSet[OwnNorms]" = WeakSet()


class OwnNorms(Part):
    """The weights of a stage whose model has stages on other ranks, too."""

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._has_asked = False
        _share()
        _known.add(self)

    def look(self, clipped: Sequence[Tensor]) -> None:
        """Warn once if all gradients of the stage are clipped. Scripts may clip single layers by
        their own norms.
        """
        own = {id(each) for each in self._module.parameters() if each.grad is not None}
        if not own or self._has_asked or not own <= set(map(id, clipped)):
            return
        self._has_asked = True
        warnings.warn(
            f"`torch.nn.utils.clip_grad_norm_` clips stage {self._stage} by the norm of the "
            "gradients on this rank, each rank by another one: in one process it is that of all "
            "stages, as `pipeline.clip_grad_norm_(max_norm)` has it, which all ranks call",
            stacklevel=6,
        )


@cache
def _share() -> None:
    """Register the hook that tells all pipelines of this process which weights are clipped."""
    tell_what_is_clipped(_clipped)


def _clipped(weights: Sequence[Tensor]) -> None:
    for each in [*_known]:
        each.look(weights)


def of_stages(site: Site) -> Iterator[tuple[int, OwnNorms]]:
    """Make the part for stages of models that have other stages on other ranks."""
    layout = site.plan.layout
    for number, module in site.modules.items():
        pipeline = layout.pipeline_of[number]
        if not set(range(pipeline.start, pipeline.stop)) <= site.modules.keys():
            yield number, OwnNorms(number, module)
