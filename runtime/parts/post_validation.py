"""Updates that do not wait for the norm of all gradients, by which they are to be clipped
(post-validation: Qi et al. 2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4).

To wait would let all ranks begin their next step together, and a schedule has no bubble only if
they need not. So each rank updates its stages as if there was nothing to clip, and begins the next
step. The norm is there at the end of that step's warm-up, as a rule:

    rank 0   … W │ U │ F0 F1 F2 F3 ▼ …           ▼ the norm is looked at
    rank 3              … W │ U │ F0 ▼ I0 …      U the sum over all ranks begins, and the update

If there was something to clip, each rank puts back what its optimizers have changed, makes the
update with clipped gradients, and runs its warm-up once more (`schedlang.ranks.warm_up`).

No rank waits in vain: each has its part of a norm before the step that looks at it, and all look at
one norm, so that all start over or none does.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from schedlang.runtime.door import Rank
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Part
from schedlang.runtime.parts.again import BeforeForwards
from schedlang.runtime.parts.clipping import own_norm
from schedlang.runtime.processes import group_apart
from schedlang.runtime.setup import Setup
from schedlang.runtime.shared_weights import SharedWeights
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.wire import InFlight, Wire

#: Where the norm is summed: the host, which has to know it, waits for no kernel then.
_HOST = torch.device("cpu")


class PostValidation(Part):
    """The updates of a rank's stages, one after each step, with gradients clipped to `max_norm`.

    An update is made ahead of its norm if the one before was not clipped, for those that are
    clipped come together.
    """

    def __init__(
        self,
        max_norm: float,
        stages: Mapping[int, Stage],
        device: torch.device,
        shared: Iterable[SharedWeights],
        wire: Wire,
    ) -> None:
        self._max_norm = max_norm
        self._stages = stages
        self._device = device
        self._shared = [*shared]
        self._weights = [weight for each in self._shared for weight in each.parameters]
        self._wire = wire
        self._group = group_apart(wire.processes)
        # Stages that are one module may have one optimizer.
        optimizers = {id(stage.optimizer): stage.optimizer for stage in stages.values()}
        self._optimizers = [each for each in optimizers.values() if each is not None]
        self._in_flight: InFlight = []
        #: What the last update has changed, if its norm is not known yet; and how often each weight
        #: had been changed by then.
        self._ahead: list[Undo] = []
        self._changed: list[int] = []
        #: Whether the last update was made ahead of its norm; and whether it was clipped, as far
        #: as that is known.
        self.was_ahead = False
        self.was_clipped = True

    def after_step(self) -> None:
        """Update all stages, whose gradients are there, and let go of these."""
        square = own_norm(self._shared, 2.0, _HOST, self._wire.processes.own) ** 2
        self._in_flight = self._wire.begin_reduce(
            square, dist.ReduceOp.SUM, self._group
        )
        self.was_ahead = not self.was_clipped
        if self.was_ahead:
            self._ahead = [Undo(optimizer) for optimizer in self._optimizers]
        else:
            self._take_norm()
            self._clip()
        gradients = [weight.grad for weight in self._weights if weight.grad is not None]
        changes = [*map(changes_of, gradients)]
        for each in self._ahead or self._optimizers:
            each.step()
        self._changed = [*map(changes_of, self._weights)]
        if [*map(changes_of, gradients)] != changes:
            raise PipelineError(
                "an optimizer changes gradients in place, as SGD with `nesterov` does, and a step "
                "that is made anew needs them: give it `foreach=False`, or call `clip_grad_norm_` "
                "after each step in place of `max_norm`"
            )
        self._let_go()

    def walk_warm_up(
        self, walk: Callable[[], None], start_over: Callable[[], None]
    ) -> None:
        """The walk over the warm-up, and once more where the update before it was made anew."""
        self._check()
        before = BeforeForwards(self._stages, self._device)
        walk()
        before.check()
        self.validate()
        if self.was_ahead and self.was_clipped:
            start_over()
            before.undo()
            walk()

    def _check(self) -> None:
        """PipelineError where somebody else has changed a weight, whose update may yet be made
        anew.
        """
        if self._ahead and [*map(changes_of, self._weights)] != self._changed:
            raise PipelineError(
                "a weight was changed after a step, whose update may have to be made anew: call "
                "`validate` before the script changes weights"
            )

    def validate(self) -> None:
        """Wait for the norm of the last update, if it is not known. If there was something to clip,
        the update is made anew.
        """
        if not self._in_flight:
            return
        self._take_norm()
        if self.was_clipped:
            for each in self._ahead:
                each.undo()
            self._clip()
            for each in self._ahead:
                each.step_anew()
            self._let_go()
        self._ahead = []

    def _take_norm(self) -> None:
        ((_, square),) = self._in_flight
        self._wire.end_reduce(self._in_flight)
        self._in_flight = []
        self.norms = {0: square**0.5}
        self.was_clipped = _scales(self.norms[0], self._max_norm)

    def _clip(self) -> None:
        clip_grads_with_norm_(self._weights, self._max_norm, self.norms[0])

    def _let_go(self) -> None:
        for weight in self._weights:
            weight.grad = None
        # Where a step is inside `torch.autocast`, that keeps casts of the weights as they were.
        torch.clear_autocast_cache()


def _scales(norm: Tensor, max_norm: float) -> bool:
    """Whether gradients of such a norm are clipped, or become no numbers; torch is asked."""
    one = nn.Parameter(torch.ones_like(norm))
    one.grad = torch.ones_like(norm)
    clip_grads_with_norm_(one, max_norm, norm)
    return bool(one.grad != 1)


class Undo:
    """A step of an optimizer that may have to be made anew, and what it changes, as it was before.

    Weights and state are copies: these are exact for every optimizer, which a step computed
    backwards is not. The gradients are those that were there.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        weights = [
            weight for group in optimizer.param_groups for weight in group["params"]
        ]
        #: Each with its gradient, and what it was.
        self._weights = [
            (weight, weight.grad, weight.detach().clone())
            for weight in weights
            if weight.grad is not None
        ]
        self._state = {key: deepcopy(value) for key, value in optimizer.state.items()}
        # What groups say of their weights: a step may change it, and so may the script after it.
        self._before = _groups(optimizer)
        self._after = self._before
        self._since = self._before

    def step(self) -> None:
        """The step, as if there was nothing to clip."""
        self._optimizer.step()
        self._after = _groups(self._optimizer)

    def undo(self) -> None:
        """Put back all that the step has changed, and the gradients."""
        self._since = _groups(self._optimizer)
        for group, before in zip(
            self._optimizer.param_groups, self._before, strict=True
        ):
            group.update(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        with torch.no_grad():
            for weight, gradient, before in self._weights:
                weight.copy_(before)
                weight.grad = gradient

    def step_anew(self) -> None:
        """The step with what the gradients are now; then what the script has changed since the
        first one, as learning rates, is as it was.
        """
        self._optimizer.step()
        groups = zip(
            self._optimizer.param_groups, self._after, self._since, strict=True
        )
        for group, after, since in groups:
            group.update(
                {
                    name: since[name]
                    for name in since
                    if _differ(since[name], after[name])
                }
            )


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What an optimizer's groups have beside weights."""
    return [
        {name: deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return bool(one != other)


def _check_optimizers(setup: Setup) -> None:
    """Whether all stages of a rank have an optimizer for the update after each step."""
    trained = {
        stage
        for stage, module in setup.modules.items()
        if any(weight.requires_grad for weight in module.parameters())
    }
    if not trained <= setup.optimizers.keys() <= setup.modules.keys():
        raise PipelineError(
            "with `max_norm` the pipeline updates its stages after each step, here those of "
            f"{sorted(trained)}, and `optimizers` has {sorted(setup.optimizers)}: give it the "
            "optimizer of each, or call `clip_grad_norm_` after each step"
        )


def of_rank(rank: Rank) -> Iterator[PostValidation]:
    """The updates of all stages."""
    max_norm = rank.site.setup.max_norm
    assert max_norm is not None
    _check_optimizers(rank.site.setup)
    device = rank.site.device
    yield PostValidation(max_norm, rank.stages, device, rank.site.shared, rank.wire)
