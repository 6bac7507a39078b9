"""The arguments of `Pipeline` other than the plan."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.runtime.values import Value

#: Computes the loss of one microbatch from the last stage's output and the targets: a scalar, or a
#: dictionary whose entry `loss` is the scalar.
LossFn = Callable[[Value, Value], Tensor | Mapping[str, Any]]

#: The names by stage of each tied weight.
Tied = Sequence[Mapping[int, str]]

#: When the outputs of two runs of a forward are compared: in some steps (`is_watched`), always, or
#: never.
Verify = Literal["some", "always", "never"]

#: The first steps, all of which are watched.
_FIRST = 4

#: The lengths of the slices of a sequence, or a function that returns them for the length of the
#: sequence.
SliceLengths = Sequence[int] | Callable[[int], Sequence[int]]

#: What makes all ranks skip a batch: types of exceptions, or a function of this rank's losses.
SkipIf = type[Exception] | tuple[type[Exception], ...] | Callable[[Any], bool]


@frozen(eq=False)
class Setup:
    """A rank's part of the model, and how to train it: the arguments of `Pipeline`, which explains
    them.
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
    cuda_graphs: bool = False

    @property
    def skipped_exceptions(self) -> tuple[type[Exception], ...]:
        """The types of exceptions that skip a batch, if there are any."""
        types = self.skip_if if isinstance(self.skip_if, tuple) else (self.skip_if,)
        return tuple(each for each in types if isinstance(each, type))

    @property
    def scaler(self) -> GradScaler | None:
        """The scaler of the losses, if there is one; one with `enabled=False` scales nothing."""
        scaler = self.loss_scale
        return (
            scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None
        )

    @property
    def fixed_scale(self) -> float | None:
        """The fixed factor of the losses, if the script gives one."""
        return None if isinstance(self.loss_scale, GradScaler) else self.loss_scale

    def ends_with_update(self, plan: Plan) -> bool:
        """Whether each step ends with an update by the pipeline: a clipped one, if the plan has no
        updates itself.
        """
        return self.max_norm is not None and not plan.has_updates

    def loss_of(self, model: str) -> LossFn | None:
        """The loss function of a model, by the model's name, if it has one."""
        if isinstance(self.loss_fn, Mapping):
            return self.loss_fn.get(model)
        return self.loss_fn


def is_watched(step: int) -> bool:
    """Whether a step is one of those in which stages are watched for what they must not do; steps
    count from 1. What begins late is found late, and the checks take no time in the long run. A
    step that is captured as a CUDA graph is none: the checks read tensors, and a graph holds no
    work of the host.
    """
    is_power_of_two = step & (step - 1) == 0
    return (step <= _FIRST or is_power_of_two) and not is_captured()


def is_captured() -> bool:
    """Whether the ops that are launched now go into a CUDA graph, and do not run."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
