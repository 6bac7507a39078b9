"""Whether forwards and backwards leave the weights alone.

Autograd counts changes of a tensor in place, and refuses a backward whose weights were changed
after its forward. It does not see what is done by way of `weight.data`. Alone every forward is
followed by its backward; in a pipeline the forwards of other microbatches come between them, and
the gradients would be those of other weights, without a word. So they would where a hook steps an
optimizer as soon as a gradient is there.
"""

from torch import Tensor, nn

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.part import Forward, Part
from schedlang.runtime.torch_private import changes_of, has_hooks_after
from schedlang.runtime.values import are_same, sample


class Weights(Part):
    """The weights of one stage, which the first forward must not change behind autograd's back; and
    where the plan does not update them (`is_updated`), no hook within a step.
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

    def begin_step(self) -> None:
        """Note how often weights with hooks have been changed."""
        if not self._is_updated:
            self._hooked = {
                name: (weight, changes_of(weight))
                for name, weight in self._module.named_parameters()
                if has_hooks_after(weight)
            }

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
        """Keep some numbers of each weight."""
        if self._is_first and not run.is_evaluation:
            weights = dict(self._module.named_parameters()) | run.substitutes
            self._before = {
                name: (weight, changes_of(weight), sample(weight).clone())
                for name, weight in weights.items()
            }

    def after_forward(self, run: Forward) -> None:
        """PipelineError where one has changed uncounted."""
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
