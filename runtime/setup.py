"""What a script gives to a pipeline beside the plan."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.runtime.values import Value

#: Loss of one microbatch, from the last stage's output and the targets: a scalar, or a dictionary
#: that has it as `loss`.
LossFn = Callable[[Value, Value], Tensor | Mapping[str, Any]]

#: For each weight that is tied, its names by stage.
Tied = Sequence[Mapping[int, str]]

#: When what two runs of a forward return is compared: in the first step, and of inputs whose shapes
#: are known; always; or never.
Verify = Literal["first", "always", "never"]

#: How long the slices of a sequence are: a length for each, or a function that gives these for a
#: length of the whole sequence.
SliceLengths = Sequence[int] | Callable[[int], Sequence[int]]

#: What skips a batch: exceptions of the script's own, or a function of the losses of this rank.
SkipIf = type[Exception] | tuple[type[Exception], ...] | Callable[[Any], bool]


@frozen(eq=False)
class Setup:
    """A rank's part of the model, and how to train it: the arguments of `Pipeline`, which says what
    they mean.
    """

    modules: Mapping[int, nn.Module]
    loss_fn: LossFn | Mapping[str, LossFn] | None
    optimizers: Mapping[int, Optimizer]
    tied: Tied
    loss_scale: float | GradScaler | None
    transfer_dtype: torch.dtype | None
    max_gathered: int | None
    max_norm: float | None
    verify: Verify
    audit: bool
    batch_dim: int | tuple[int, int]
    slice_lengths: SliceLengths | None
    stop_on_nan: bool
    skip_if: SkipIf | None = None
    survives_loss: bool = False

    @property
    def skipped_exceptions(self) -> tuple[type[Exception], ...]:
        """The exceptions that skip a batch, if it is exceptions that do."""
        types = self.skip_if if isinstance(self.skip_if, tuple) else (self.skip_if,)
        return tuple(each for each in types if isinstance(each, type))

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler whose scale the losses are multiplied by, if there is one. One with
        `enabled=False` scales nothing.
        """
        scaler = self.loss_scale
        return (
            scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None
        )

    @property
    def fixed_scale(self) -> float | None:
        """The number that the losses are multiplied by, if the script gives one."""
        return None if isinstance(self.loss_scale, GradScaler) else self.loss_scale

    def ends_with_update(self, plan: Plan) -> bool:
        """Whether each step ends with an update by the pipeline: one that is clipped, and that the
        plan does not make itself.
        """
        return self.max_norm is not None and not plan.has_updates

    def loss_of(self, model: str) -> LossFn | None:
        """The loss of a model by its name, if it has one."""
        if isinstance(self.loss_fn, Mapping):
            return self.loss_fn.get(model)
        return self.loss_fn
