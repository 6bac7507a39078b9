"""The versions of a stage's weights, for schedules whose gradients are late (PipeDream-2BW, arXiv
2006.09503).

Version v is what the weights are after v updates. With a delay of d, the microbatches of update k
read version max(k - d, 0), and the update starts from version k; so d + 1 versions are held. The
module's own parameters are the newest. No graph is made with them: a forward runs with leaves that
share the storage of their version, and a backward adds to the gradients of these leaves. So
storages can change places without autograd's knowing: it would not notice every change of a weight
between forward and backward, least of all by a fused optimizer.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.runtime.watch.watchdog import PipelineError
from schedlang.schedule.kinds import Kind


class Weights:
    """The weights of one stage, by version. `per_update` is the number of microbatches of an
    update.
    """

    def __init__(self, module: nn.Module, delay: int, per_update: int) -> None:
        self._parameters = {
            name: each for name, each in module.named_parameters() if each.requires_grad
        }
        self._delay = delay
        self._per_update = per_update
        #: Updates done, and done before this step.
        self._updates = self._before = 0
        self._versions = {0: self._newest()}

    def begin(self) -> None:
        """Begin a step, whose microbatches are numbered from 0."""
        self._before = self._updates

    def read(self, microbatch: int) -> dict[str, Tensor]:
        """The weights that a microbatch reads, in its forward and again in its backward."""
        return self._versions[self._version(self._before + microbatch // self._per_update)]

    def of_update(self) -> dict[str, Tensor]:
        """Those that the microbatches of the next update have read, which have its gradient."""
        return self._versions[self._version(self._updates)]

    def take(self) -> None:
        """Give the module's parameters the gradient of the next update, at the version that its
        microbatches read.
        """
        for name, leaf in self.of_update().items():
            self._parameters[name].grad = leaf.grad
            leaf.grad = None

    def update(self, optimizer: Optimizer) -> None:
        """The next update: the gradient that was taken, applied to the newest version."""
        # What nothing reads any more gives its place to the new version.
        free = self._versions.pop(self._updates - self._delay, None)
        for name, parameter in self._parameters.items():
            place = torch.empty_like(parameter.data) if free is None else free[name].data
            parameter.data = place.copy_(parameter.data)
        optimizer.step()
        optimizer.zero_grad()
        self._updates += 1
        self._versions[self._updates] = self._newest()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the module's weights: the updates done and the older
        versions.
        """
        older = [self._versions[version] for version in sorted(self._versions)[:-1]]
        copies = [
            {name: leaf.detach().clone() for name, leaf in version.items()} for version in older
        ]
        return {"updates": self._updates, "older": copies}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was made, whose weights the module has by now."""
        self._updates = state["updates"]
        older = state["older"]
        fits = all(each.keys() == self._parameters.keys() for each in older)
        if not fits or len(older) != min(self._delay, self._updates):
            raise PipelineError(
                "the checkpoint is not of a stage with such weights, or such a delay"
            )
        first = self._updates - len(older)
        self._versions = {first + each: _copied(version) for each, version in enumerate(older)}
        self._versions[self._updates] = self._newest()

    def _version(self, update: int) -> int:
        return max(update - self._delay, 0)

    def _newest(self) -> dict[str, Tensor]:
        return _leaves({name: each.data for name, each in self._parameters.items()})


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return _leaves({name: each.clone() for name, each in tensors.items()})


def _leaves(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # `data` has a count of changes of its own. Only of parameters is a backward split.
    return {name: nn.Parameter(each.data) for name, each in tensors.items()}


def delays(plan: Plan, rank: int) -> dict[int, int]:
    """For each stage of a rank, by how many updates the weights that its microbatches read are
    behind.

    PipelineError where it is not the same for all updates, but for the first ones, which read the
    first version.
    """
    found: dict[int, int] = dict.fromkeys(plan.stages_of(rank), 0)
    behind: set[tuple[int, int, int]] = set()
    done = dict.fromkeys(found, 0)
    actions = plan.ranks[rank]
    for kind, stage, microbatch in zip(
        actions.kind, actions.stage, actions.microbatch, strict=True
    ):
        if kind == Kind.U:
            done[stage] += 1
        elif kind == Kind.F:
            rule = plan.weights_of(stage)
            update = plan.layout.update_of(stage, microbatch)
            version = plan.version_read(stage, microbatch, done[stage])
            behind.add((stage, update, version))
            found[stage] = max(found[stage], rule.delay, update - version)
    for stage, update, version in sorted(behind):
        if version != max(update - found[stage], 0):
            raise PipelineError(
                f"update {update} of stage {stage} reads version {version} of the weights, "
                f"others are {found[stage]} updates behind"
            )
    return found
