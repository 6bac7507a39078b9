"""An error for GradScalers that a pipeline does not know.

A scaler decides from the gradients of one process whether the optimizer steps, so ranks could
decide differently. If the pipeline gets the scaler as `loss_scale`, all ranks decide together
(`schedlang.runtime.parts.overflows`).
"""

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from weakref import WeakSet

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from schedlang.runtime.door import Rank
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Part
from schedlang.runtime.torch_private.scaler_looks import before_looks
from schedlang.runtime.watchdog import Watchdog

#: The parts of all pipelines in this process that know no scaler.
_known: "WeakSet[UnknownScalers]" = WeakSet()


class UnknownScalers(Part):
    """The stages of a pipeline without a scaler: no scaler may look at their gradients."""

    def __init__(self, modules: Mapping[int, nn.Module], watchdog: Watchdog) -> None:
        self._modules = modules
        self._watchdog = watchdog
        self._has_stepped = False
        _refuse_all()
        _known.add(self)

    def end_step(self) -> None:
        """Note that there are gradients."""
        self._has_stepped = True

    def refuse(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """PipelineError if an optimizer of the scaler has weights of the pipeline."""
        if not self._has_stepped or not has_weights_of(optimizer, self._modules):
            return
        with self._watchdog.guard("in GradScaler.unscale_"):
            raise unknown(scaler, self._modules)


def has_weights_of(optimizer: Optimizer, modules: Mapping[int, nn.Module]) -> bool:
    """Whether an optimizer has weights of these stages."""
    weights = chain.from_iterable(module.parameters() for module in modules.values())
    groups = (group["params"] for group in optimizer.param_groups)
    return not set(map(id, weights)).isdisjoint(map(id, chain.from_iterable(groups)))


def unknown(scaler: GradScaler, modules: Mapping[int, nn.Module]) -> PipelineError:
    """The error for a scaler that the pipeline of these stages does not know."""
    return PipelineError(
        f"a {type(scaler).__name__} looks at gradients of stages {[*modules]}, and the pipeline "
        "does not know it: each rank would decide by itself whether to skip an update. Give the "
        "pipeline the scaler, `loss_scale=scaler`, which then scales the losses, and leave "
        "`scaler.scale` out of `loss_fn`"
    )


@cache
def _refuse_all() -> None:
    """Register the hook by which these pipelines refuse all scalers of this process."""
    before_looks(_look)


def _look(scaler: GradScaler, optimizer: Optimizer) -> None:
    for each in [*_known]:
        each.refuse(scaler, optimizer)


def of_rank(rank: Rank) -> Iterator[UnknownScalers]:
    """Make the part for this rank."""
    yield UnknownScalers(rank.site.setup.modules, rank.watchdog)
