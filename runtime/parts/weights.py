"""Checks that forwards and backwards do not change the weights.

Autograd counts changes of a tensor in place, and refuses a backward whose weights have changed
since its forward; but it does not see changes of `weight.data`. In a pipeline, the forwards of
other microbatches run between a forward and its backward, so such a change would silently give
gradients of other weights. The same holds for a hook that steps an optimizer as soon as a gradient
is ready. And if the plan updates weights, forwards of the next update may run before the last
backwards of this one: a gradient that a forward adds by itself would count for the wrong update.
"""

from collections.abc import Iterator
from operator import attrgetter

from torch import Tensor, nn

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Backward, Forward, Part
from schedlang.runtime.setup import is_watched
from schedlang.runtime.torch_private.leaf_hooks import has_hooks_after
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.torch_private.wrappers import is_sharded
from schedlang.runtime.values import are_same, sample

_is_trained = attrgetter("requires_grad")


class SameWeights(Part):
    """Checks that a stage still has the parameters with which the pipeline was built, since norms,
    sums over ranks and weight versions refer to these.
    """

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._built_with = dict(module.named_parameters())

    def begin_step(self) -> None:
        """PipelineError if the module has other parameters now."""
        now = dict(self._module.named_parameters())
        before = self._built_with
        wrong = [f"`{name}` is new" for name in now.keys() - before.keys()]
        wrong += [f"`{name}` is gone" for name in before.keys() - now.keys()]
        wrong += [
            f"`{name}` was replaced"
            for name in now.keys() & before.keys()
            if now[name] is not before[name]
        ]
        if wrong:
            more = f", and {len(wrong) - 1} more like it" if len(wrong) > 1 else ""
            raise PipelineError(
                f"stage {self._stage} has other weights than when the pipeline was built: "
                f"{min(wrong)}{more}. What it clips, sums over ranks and keeps would still be the "
                "old ones: put adapters in before `Pipeline` is made, load weights before that or "
                "without `assign=True`, or make another `Pipeline` now"
            )


class FrozenUnderWay(Part):
    """Checks that no weight is frozen while microbatches are between their forward and their
    backward: autograd would drop the gradients that these have for it.
    """

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        named = dict(module.named_parameters())
        self._names = [*named]
        self._weights = [*named.values()]
        #: By microbatch, for each weight, whether it required a gradient after the forward.
        self._trained: dict[int, list[bool]] = {}

    def after_forward(self, run: Forward) -> None:
        """Keep which weights require a gradient."""
        if run.has_graph:
            self._trained[run.microbatch] = [*map(_is_trained, self._weights)]

    def before_backward(self, run: Backward) -> None:
        """PipelineError if one of these is frozen by now."""
        self._check(run.microbatch)

    def after_weight(self, microbatch: int) -> None:
        """PipelineError if one of these was frozen between the two halves of a backward."""
        self._check(microbatch)

    def _check(self, microbatch: int) -> None:
        before = self._trained[microbatch]
        now = [*map(_is_trained, self._weights)]
        # Twice for each microbatch, so it is to be quick.
        if now == before:
            return
        for name, was_trained, is_trained in zip(self._names, before, now, strict=True):
            if was_trained and not is_trained:
                raise PipelineError(
                    f"the weight `{name}` of stage {self._stage} was frozen between the forward "
                    f"and the backward of microbatch {microbatch}, by another forward or by a "
                    "hook, and so would lose its gradient: freeze weights between two steps"
                )


class Weights(Part):
    """Checks the weights of one stage. No forward may change them through `.data`; steps that are
    watched show it. Unless the plan updates them (`is_updated`), no hook may change them within a
    step; if it does, no forward may add to their gradients.
    """

    def __init__(self, stage: int, module: nn.Module, is_updated: bool) -> None:
        self._stage = stage
        self._module = module
        self._is_updated = is_updated
        self._steps = 0
        #: Before a forward that is watched, by name: each weight, its count of changes in place,
        #: and a sample of its values.
        self._before: dict[str, tuple[Tensor, int, Tensor]] = {}
        #: At the begin of a step, by name: weights with hooks after accumulation, and their counts.
        self._hooked: dict[str, tuple[Tensor, int]] = {}
        #: Before a forward, if the plan updates weights, by name: each weight, its gradient, and
        #: the gradient's count of changes in place.
        self._gradients: dict[str, tuple[Tensor, Tensor | None, int]] = {}

    def begin_step(self) -> None:
        """Count the steps; keep the counts of changes of weights with hooks."""
        self._steps += 1
        self.begin_anew()

    def begin_anew(self) -> None:
        """Keep the counts again, since the runtime has changed weights."""
        if not self._is_updated:
            self._hooked = {
                name: (weight, changes_of(weight))
                for name, weight in self._module.named_parameters()
                if has_hooks_after(weight)
            }

    def end_step(self) -> None:
        """PipelineError if a hook has changed a weight."""
        for name, (weight, changes) in self._hooked.items():
            if changes_of(weight) != changes:
                raise PipelineError(
                    f"the weight `{name}` of stage {self._stage} was changed within a step, by an "
                    "optimizer in a hook: other microbatches were on their way; update weights "
                    "after the step, or by `U` in the plan"
                )

    def before_forward(self, run: Forward) -> None:
        """Keep a sample of each weight's values in steps that are watched, and its gradient if the
        plan updates it.
        """
        if run.is_evaluation or not (is_watched(self._steps) or self._is_updated):
            return
        weights = dict(self._module.named_parameters()) | run.substitutes
        # A backward that overlaps with the forward may add to gradients.
        if self._is_updated and not run.is_overlapped:
            self._gradients = {
                name: (weight, weight.grad, _changes_of_gradient(weight))
                for name, weight in weights.items()
            }
        if is_watched(self._steps):
            self._before = {
                name: (weight, changes_of(weight), sample(weight).clone())
                for name, weight in weights.items()
            }

    def after_forward(self, run: Forward) -> None:
        """PipelineError if a weight has changed uncounted, or if its gradient has changed."""
        for name, (weight, gradient, changes) in self._gradients.items():
            if weight.grad is not gradient or _changes_of_gradient(weight) != changes:
                raise PipelineError(
                    f"the forward of stage {self._stage} adds to the gradient of its weight "
                    f"`{name}`, by a backward of its own: the plan updates weights within a step, "
                    "and another update's gradients may be there; add that loss to the one of the "
                    "model, or take a schedule with a flush"
                )
        self._gradients = {}
        for name, (weight, changes, before) in self._before.items():
            if changes_of(weight) == changes and not are_same(before, sample(weight)):
                raise PipelineError(
                    f"the forward of stage {self._stage} changes its weight `{name}` by `.data`, "
                    "which backwards of earlier microbatches do not see: change weights after an "
                    "update, or compute with a changed copy"
                )
        self._before = {}


def _changes_of_gradient(weight: Tensor) -> int:
    """The count of changes in place of a weight's gradient; 0 without a gradient."""
    return 0 if weight.grad is None else changes_of(weight.grad)


def of_stages(site: Site) -> Iterator[tuple[int, Part]]:
    """Make the parts for every stage; sharded weights come and go, so they are not compared."""
    for stage, module in site.modules.items():
        yield stage, SameWeights(stage, module)
        if site.plan.layout.trains(stage):
            yield stage, FrozenUnderWay(stage, module)
        if not is_sharded(module):
            yield stage, Weights(stage, module, site.plan.has_updates)
