"""Overflows that `torch.amp.GradScaler` finds in the gradients of one rank, shared with all ranks.

If a gradient is not finite, a scaler skips the optimizer's step and lowers its scale. In one
process it sees the gradients of the whole model, here only those of a rank's stages. So all ranks
exchange what they have found, when a scaler looks at gradients for the first time after a step:

    rank 0   step │ all are finite ──────┐       ┌─► skip the update, smaller scale
    rank 1   step │ one has overflowed ──┴─ max ─┴─► skip the update, smaller scale
"""

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, count
from math import inf
from operator import attrgetter
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from schedlang.runtime.door import Rank
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.gradient_norms import norm_of
from schedlang.runtime.part import Part
from schedlang.runtime.parts.unknown_scalers import has_weights_of, unknown
from schedlang.runtime.processes import group_apart
from schedlang.runtime.torch_private.grad_scaler import looks_as_known, share_overflows
from schedlang.runtime.watchdog import Watchdog
from schedlang.runtime.wire import InFlight, Wire

#: The parts of all pipelines in this process.
_known: "WeakSet[Overflows]" = WeakSet()
_numbers = count()


class Overflows(Part):
    """Whether any gradient of the whole pipeline is not finite after a step, for the `scaler` that
    scales the losses.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        scaler: GradScaler,
        wire: Wire,
        watchdog: Watchdog,
    ) -> None:
        #: Pipelines are built in the same order on all ranks.
        self._number = next(_numbers)
        self._modules = modules
        self._scaler = scaler
        self._wire = wire
        self._watchdog = watchdog
        self._group = group_apart(wire.processes)
        #: Whether there was a step since a scaler has looked; the all-reduce, if it has begun; and
        #: its result after the last step.
        self._has_stepped = False
        self._in_flight: InFlight = []
        self._found: Tensor | None = None
        _share()
        _known.add(self)

    def begin_step(self) -> None:
        """Forget the last result. The scaler learns the device of its scale."""
        self._found = None
        self._scaler.scale(torch.zeros((), device=self._device))

    def end_step(self) -> None:
        """Note that there are new gradients."""
        self._has_stepped = True
        # A rank that trains nothing has no optimizer, so no scaler will look at gradients there. It
        # reports at once that none has overflowed, since others wait for it.
        trains = any(weight.requires_grad for weight in self._weights())
        if not trains and not self._in_flight:
            self._begin(_flag(False))

    def are_of(self, optimizer: Optimizer) -> bool:
        """Whether the optimizer has weights of this pipeline."""
        return has_weights_of(optimizer, self._modules)

    def found_by(self, scaler: GradScaler, own: Iterable[Tensor]) -> Tensor | None:
        """1 if any rank has found an overflow after the last step, in the gradients of its stages
        or by the scaler itself (`own`), otherwise 0; None if there was no step.
        """
        if scaler is not self._scaler and self._has_stepped:
            raise unknown(scaler, self._modules)
        if self._has_stepped:
            self._has_stepped = False
            if not self._in_flight:
                self._begin(self._look(own))
            self._wire.end_reduce(self._in_flight)
            ((_, found),) = self._in_flight
            self._in_flight = []
            self._found = found.to(self._device)
        return self._found

    def updates(self, scaler: GradScaler) -> Tensor | None:
        """The result for a scaler that updates its scale, also on a rank without an optimizer."""
        if scaler is not self._scaler:
            return None
        with self._watchdog.guard("in GradScaler.update"):
            found = self.found_by(scaler, ())
        self._found = None
        return found

    def looks(self, scaler: GradScaler, own: Iterable[Tensor]) -> Tensor | None:
        """The result for a scaler that looks at the gradients of an optimizer."""
        with self._watchdog.guard("in GradScaler.unscale_"):
            return self.found_by(scaler, own)

    def _begin(self, found: Tensor) -> None:
        """Begin the all-reduce with the result of this rank."""
        self._in_flight = self._wire.begin_reduce(found, dist.ReduceOp.MAX, self._group)

    def _look(self, own: Iterable[Tensor]) -> Tensor:
        """1 if a gradient that an optimizer uses is not finite, otherwise 0; on the CPU, since the
        host needs to read it.
        """
        weights = [*self._weights()]
        if not _are_finite(weights):
            # A scaler ignores weights without an optimizer. To find all optimizers is slow, so it
            # is done only if some gradient is not finite.
            optimized = _optimized()
            weights = [each for each in weights if id(each) in optimized]
        return _flag(not _are_finite(weights) or any(map(bool, own)))

    def _weights(self) -> Iterator[nn.Parameter]:
        return chain.from_iterable(
            module.parameters() for module in self._modules.values()
        )

    @property
    def _device(self) -> torch.device:
        return next((each.device for each in self._weights()), torch.device("cpu"))


def _are_finite(weights: Iterable[nn.Parameter]) -> bool:
    """Whether the gradients of these weights are finite."""
    gradients = [
        weight.grad.coalesce().values() if weight.grad.is_sparse else weight.grad
        for weight in weights
        if weight.grad is not None
    ]
    return bool(norm_of(gradients, inf).isfinite())


def _optimized() -> set[int]:
    """The ids of the weights of all optimizers in this process."""
    optimizers = [
        each for each in gc.get_objects() if issubclass(type(each), Optimizer)
    ]
    groups = chain.from_iterable(each.param_groups for each in optimizers)
    return {id(weight) for group in groups for weight in group["params"]}


def _flag(found: bool) -> Tensor:
    """The tensor in which a scaler notes whether it has found an overflow."""
    return torch.tensor(found, dtype=torch.float32)


@cache
def _share() -> None:
    """Register the hooks by which all scalers of this process share their overflows."""
    share_overflows(_looked, _updated)


def _looked(
    scaler: GradScaler, optimizer: Optimizer, own: Sequence[Tensor]
) -> list[Tensor]:
    """The results of the pipelines that have weights of this optimizer."""
    found = [each.looks(scaler, own) for each in _in_order() if each.are_of(optimizer)]
    return [each for each in found if each is not None]


def _updated(scaler: GradScaler) -> list[Tensor]:
    """The results of all pipelines that know this scaler."""
    found = [each.updates(scaler) for each in _in_order()]
    return [each for each in found if each is not None]


def _in_order() -> list[Overflows]:
    """The parts of this process in the order in which all ranks have built their pipelines."""
    return sorted(_known, key=attrgetter("_number"))


def of_rank(rank: Rank) -> Iterator[Overflows]:
    """Make the part for this rank's stages; PipelineError for an unknown kind of scaler."""
    setup = rank.site.setup
    scaler = setup.scaler
    assert scaler is not None
    if not looks_as_known(scaler):
        raise PipelineError(
            f"`loss_scale` is a {type(scaler).__name__}, which looks at gradients in a way "
            "of its own: give a `torch.amp.GradScaler`, which shares what it finds with all ranks"
        )
    yield Overflows(setup.modules, scaler, rank.wire, rank.watchdog)
