"""Whether forwards and backwards leave the weights alone.

Autograd counts changes of a tensor in place, and refuses a backward whose weights were changed
after its forward. It does not see what is done by way of `weight.data`. Alone every forward is
followed by its backward; in a pipeline the forwards of other microbatches come between them, and
the gradients would be those of other weights, without a word. So they would where a hook steps an
optimizer as soon as a gradient is there. And where the plan updates the weights, forwards of the
next update may come before the last backwards of this one: a gradient that a forward adds up by
itself would be counted for the wrong update.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Forward, Part
from schedlang.runtime.torch_private.leaf_hooks import has_hooks_after
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.torch_private.wrappers import is_sharded
from schedlang.runtime.values import are_same, sample


class SameWeights(Part):
    """The parameters of one stage, which must be those with which the pipeline was built: norms,
    sums over ranks and versions are of these.
    """

    def __init__(self, stage: int, module: nn.Module) -> None:
        self._stage = stage
        self._module = module
        self._built_with = dict(module.named_parameters())

    def begin_step(self) -> None:
        """PipelineError where the module has others by now."""
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


class Weights(Part):
    """The weights of one stage, which the first forward must not change behind autograd's back; and
    where the plan does not update them (`is_updated`), no hook within a step. Where it does, no
    forward may add to their gradients.
    """

    def __init__(self, stage: int, module: nn.Module, is_updated: bool) -> None:
        self._stage = stage
        self._module = module
        self._is_updated = is_updated
        self._is_first = True
        #: Before the first forward, by name: how often each was changed in place, and some numbers.
        self._before: dict[str, tuple[Tensor, int, Tensor]] = {}
        #: Of weights with a hook that sees what has added up, by name, at the begin of a step.
        self._hooked: dict[str, tuple[Tensor, int]] = {}
        #: Before a forward, where the plan updates weights: each weight by its name, its gradient,
        #: and how often that was changed in place.
        self._gradients: dict[str, tuple[Tensor, Tensor | None, int]] = {}

    def begin_step(self) -> None:
        """Note how often weights with hooks have been changed."""
        if not self._is_updated:
            self._hooked = {
                name: (weight, changes_of(weight))
                for name, weight in self._module.named_parameters()
                if has_hooks_after(weight)
            }

    def begin_anew(self) -> None:
        """Note it once more: weights have been changed, and by no hook."""
        self.begin_step()

    def end_step(self) -> None:
        """PipelineError where a hook has changed one."""
        for name, (weight, changes) in self._hooked.items():
            if changes_of(weight) != changes:
                raise PipelineError(
                    f"the weight `{name}` of stage {self._stage} was changed within a step, by an "
                    "optimizer in a hook: other microbatches were on their way; update weights "
                    "after the step, or by `U` in the plan"
                )

    def before_forward(self, run: Forward) -> None:
        """Keep some numbers of each weight, and where the plan updates it, what its gradient is."""
        if run.is_evaluation or not (self._is_first or self._is_updated):
            return
        weights = dict(self._module.named_parameters()) | run.substitutes
        # A backward in the midst of the forward does add to gradients.
        if self._is_updated and not run.is_overlapped:
            self._gradients = {
                name: (weight, weight.grad, _changes_of_gradient(weight))
                for name, weight in weights.items()
            }
        if self._is_first:
            self._before = {
                name: (weight, changes_of(weight), sample(weight).clone())
                for name, weight in weights.items()
            }

    def after_forward(self, run: Forward) -> None:
        """PipelineError where one has changed uncounted, or its gradient has."""
        for name, (weight, gradient, changes) in self._gradients.items():
            if weight.grad is not gradient or _changes_of_gradient(weight) != changes:
                raise PipelineError(
                    f"the forward of stage {self._stage} adds to the gradient of its weight "
                    f"`{name}`, by a backward of its own: the plan updates weights within a step, "
                    "and another update's gradients may be there; add that loss to the one of the "
                    "model, or take a schedule with a flush"
                )
        self._gradients = {}
        if not self._is_first or run.is_evaluation:
            return
        self._is_first = False
        for name, (weight, changes, before) in self._before.items():
            if changes_of(weight) == changes and not are_same(before, sample(weight)):
                raise PipelineError(
                    f"the forward of stage {self._stage} changes its weight `{name}` by `.data`, "
                    "which backwards of earlier microbatches do not see: change weights after an "
                    "update, or compute with a changed copy"
                )
        self._before = {}


def _changes_of_gradient(weight: Tensor) -> int:
    """How often a weight's gradient was changed in place; 0 where there is none."""
    return 0 if weight.grad is None else changes_of(weight.grad)


def of_stages(site: Site) -> Iterator[tuple[int, Part]]:
    """Those of all stages; the weights of sharded ones come and go."""
    for stage, module in site.modules.items():
        yield stage, SameWeights(stage, module)
        if not is_sharded(module):
            yield stage, Weights(stage, module, site.plan.has_updates)
