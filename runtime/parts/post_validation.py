"""Post-validation: updates that do not wait for the norm by which gradients are clipped (Qi et al.
2024, Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 4).

Waiting for the norm would be a barrier between steps, and add a bubble to schedules that have none.
So each rank updates its stages as if nothing had to be clipped, and begins the next step. The norm
usually arrives before the end of that step's warm-up:

    rank 0   … W │ U │ F0 F1 F2 F3 ▼ …           ▼ check the norm
    rank 3              … W │ U │ F0 ▼ I0 …      U begin the all-reduce of the norm, and update

If gradients must be clipped, each rank restores the state from before the update, updates with
clipped gradients, and runs its warm-up once more (`schedlang.ranks.warm_up`).

This cannot deadlock: each rank has its part of a norm before the step that checks it. And all ranks
check the same norm, so either all of them start over or none.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.runtime.door import Rank
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.gradient_norms import clip_to
from schedlang.runtime.part import Part
from schedlang.runtime.parts.again import BeforeForwards
from schedlang.runtime.parts.clipping import own_norm
from schedlang.runtime.processes import group_apart
from schedlang.runtime.setup import Setup
from schedlang.runtime.shared_weights import SharedWeights
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.wire import InFlight, Wire

#: The norm is summed on the CPU, so that the host can read it without waiting for kernels.
_HOST = torch.device("cpu")


class PostValidation(Part):
    """The updates of a rank's stages, one after each step, with gradients clipped to `max_norm`.

    An update is made ahead of its norm only if the last one was not clipped, since updates that
    need clipping come in rows.
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
        #: The state from before the last update, while its norm is unknown; and each weight's count
        #: of changes in place after that update.
        self._ahead: list[Undo] = []
        self._changed: list[int] = []
        #: Whether the last update was made ahead of its norm; and whether the last update whose
        #: norm is known was clipped.
        self.was_ahead = False
        self.was_clipped = True

    def after_step(self) -> None:
        """Update all stages, and drop the gradients."""
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
        """Run the warm-up, and once more if the update before it had to be repeated."""
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
        """PipelineError if the script has changed a weight whose update may have to be repeated."""
        if self._ahead and [*map(changes_of, self._weights)] != self._changed:
            raise PipelineError(
                "a weight was changed after a step, whose update may have to be made anew: call "
                "`validate` before the script changes weights"
            )

    def validate(self) -> None:
        """Wait for the norm of the last update, if it is unknown. If gradients must be clipped,
        undo the update and repeat it.
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
        clip_to(self._weights, self._max_norm, self.norms[0])

    def _let_go(self) -> None:
        for weight in self._weights:
            weight.grad = None
        # Inside `torch.autocast`, the cache has casts of the old weights.
        torch.clear_autocast_cache()


def _scales(norm: Tensor, max_norm: float) -> bool:
    """Whether torch scales gradients of this norm, or turns them into NaN."""
    one = nn.Parameter(torch.ones_like(norm))
    one.grad = torch.ones_like(norm)
    clip_to([one], max_norm, norm)
    return bool(one.grad != 1)


class Undo:
    """A step of an optimizer that can be undone and repeated: the state from before the step.

    Weights and the optimizer's state are copied, which is exact for every optimizer; to compute a
    step backwards would not be. Gradients are not copied.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        weights = [
            weight for group in optimizer.param_groups for weight in group["params"]
        ]
        #: Each weight with its gradient and a copy.
        self._weights = [
            (weight, weight.grad, weight.detach().clone())
            for weight in weights
            if weight.grad is not None
        ]
        self._state = {key: deepcopy(value) for key, value in optimizer.state.items()}
        # The options of parameter groups: a step may change them, and so may the script after it.
        self._before = _groups(optimizer)
        self._after = self._before
        self._since = self._before

    def step(self) -> None:
        """Make the step with unclipped gradients."""
        self._optimizer.step()
        self._after = _groups(self._optimizer)

    def undo(self) -> None:
        """Restore weights, state, options and gradients."""
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
        """Repeat the step with the current gradients. Options that the script has changed since the
        first step, such as learning rates, keep their new values.
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
    """Copies of the options of an optimizer's groups."""
    return [
        {name: deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def _differ(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return not torch.equal(one, other)
    return bool(one != other)


def _check_optimizers(setup: Setup) -> None:
    """PipelineError unless all trained stages of a rank have an optimizer."""
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
    """Make the part for the updates of all stages."""
    max_norm = rank.site.setup.max_norm
    assert max_norm is not None
    _check_optimizers(rank.site.setup)
    device = rank.site.device
    yield PostValidation(max_norm, rank.stages, device, rank.site.shared, rank.wire)
