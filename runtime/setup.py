"""What a script gives to a pipeline beside the plan."""

from collections.abc import Mapping

import torch
from attrs import frozen
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.runtime.microbatches import SliceLengths
from schedlang.runtime.parts.repeats import Verify
from schedlang.runtime.parts.shared_weights import Tied
from schedlang.runtime.stage import LossFn


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

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler whose scale the losses are multiplied by, if there is one."""
        return self.loss_scale if isinstance(self.loss_scale, GradScaler) else None

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
