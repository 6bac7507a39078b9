"""Copies of weights that must stay alike: those of replicas, and of tied weights.

Copies begin alike, and the optimizer of each gets the same gradients, which are sums:

    rank 0   weight ─ forwards ─ gradient ─┐       ┌─► update
    rank 3   its copy ─ forwards ─ gradient ┴─ sum ─┴─► update

They drift apart if a forward changes the one that it has, or if a script treats them differently:
other options of the optimizer by the name of the weight, or noise of each rank's own. In one
process there is one weight, so the training would silently be another one.
"""

import warnings
from collections.abc import Iterator, Sequence

from torch import nn

from schedlang.runtime.door import Rank, Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Forward, Part
from schedlang.runtime.processes import Processes
from schedlang.runtime.setup import is_watched
from schedlang.runtime.shared_weights import (
    SharedWeights,
    check_hooks,
    fingerprints_of,
    unlike_copies,
)
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.torch_private.wrappers import is_sharded
from schedlang.runtime.watchdog import Watchdog


class Copies(Part):
    """Checks that no forward changes a weight of a stage in place, and no hook of a weight sees a
    part of the gradients' sum.
    """

    def __init__(
        self, stage: int, module: nn.Module, shared: Sequence[SharedWeights]
    ) -> None:
        self._stage = stage
        self._shared = shared
        group_of = {
            id(each): group.name for group in shared for each in group.parameters
        }
        #: The weights with copies: each with its name, and in words what has the copies.
        self._copied = [
            (weight, name, group_of[id(weight)])
            for name, weight in module.named_parameters()
            if id(weight) in group_of
        ]
        #: Before a forward, how often each of them was changed in place.
        self._changes: list[int] = []

    def begin_step(self) -> None:
        """PipelineError if the script has registered such a hook since the last step."""
        check_hooks(self._shared)

    def before_forward(self, run: Forward) -> None:
        """Count changes of the weights."""
        self._changes = [changes_of(weight) for weight, _, _ in self._copied]

    def after_forward(self, run: Forward) -> None:
        """PipelineError if the forward has changed a weight."""
        counts = zip(self._copied, self._changes, strict=True)
        for (weight, name, copies), changes in counts:
            if changes_of(weight) != changes:
                raise PipelineError(
                    f"the forward of stage {self._stage} changes its weight `{name}` in place, and "
                    f"{copies} would not all see that, as with `nn.Embedding(max_norm=…)`: change "
                    "weights after an update, or compute with a changed copy"
                )


class Drift(Part):
    """Warns once if copies of weights are not alike any more. Before steps that are watched, from
    the second one on, each rank leaves fingerprints of its own; rank 0 compares them once all are
    there, so no rank waits.
    """

    def __init__(
        self, shared: Sequence[SharedWeights], processes: Processes, watchdog: Watchdog
    ) -> None:
        self._shared = shared
        self._processes = processes
        self._watchdog = watchdog
        self._steps = 0
        self._has_warned = False
        #: The last step before which fingerprints were left that are not compared yet.
        self._left: int | None = None

    def begin_step(self) -> None:
        """Leave the fingerprints of this rank."""
        self._steps += 1
        if self._steps > 1 and is_watched(self._steps):
            own = fingerprints_of(self._shared, self._processes)
            self._watchdog.leave(f"copies/{self._steps}", own)
            self._left = self._steps

    def end_step(self) -> None:
        """Compare those of all ranks on rank 0."""
        if self._left is None or self._watchdog.rank != min(self._processes.all):
            return
        found = self._watchdog.left(f"copies/{self._left}")
        if found is None:
            return
        self._left = None
        unlike = unlike_copies(found, self._processes)
        if unlike is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{unlike} are not alike any more: each rank updates its own copy, so give all "
                "copies the same options of the optimizer, and let the script change all of them "
                "alike, with the same noise on all ranks",
                stacklevel=2,
            )


def _copied(site: Site) -> list[SharedWeights]:
    """The weights with copies."""
    are_several = site.processes.replicas.are_several
    return [group for group in site.shared if group.are_shared or are_several]


def of_stages(site: Site) -> Iterator[tuple[int, Copies]]:
    """Make the part for stages that have weights with copies; sharded weights come and go."""
    copied = _copied(site)
    for stage, module in site.modules.items():
        if copied and not is_sharded(module):
            yield stage, Copies(stage, module, copied)


def of_rank(rank: Rank) -> Iterator[Drift]:
    """Make the part for this rank. Weights that travel have no copies between two steps."""
    shared = [group for group in rank.site.shared if group.home is None]
    yield Drift(shared, rank.site.processes, rank.watchdog)
