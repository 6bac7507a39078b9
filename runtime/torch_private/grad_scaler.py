"""The decision of a GradScaler, taken by all ranks together.

A scaler decides by the gradients of one process whether an update is made. There is no public
place between its look at them and the decision; FSDP1's own scaler takes the same private one.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.torch_private import must, private


def share_overflows(
    looked: Callable[[GradScaler, Optimizer, Sequence[Tensor]], Sequence[Tensor]],
    updated: Callable[[GradScaler], Sequence[Tensor]],
) -> None:
    """Let all scalers decide by what `looked` gives: it is told what one has found in the gradients
    of an optimizer. And by what `updated` gives before a scaler changes its scale. Where these give
    nothing, all is as without them.

    PipelineError where torch's scaler does not work as known.
    """
    try:
        look = private(GradScaler, "_unscale_grads_")
        update = GradScaler.update
        _check_scaler()
    except Exception as error:
        raise PipelineError(
            f"to skip an update on all ranks needs private parts of GradScaler that torch "
            f"{torch.__version__} does not have ({type(error).__name__}: {error}): train with a "
            "version of torch that schedlang is tested with, or scale the loss by a number, "
            "`loss_scale`"
        ) from None

    @wraps(look)
    def look_everywhere(
        scaler: GradScaler, optimizer: Optimizer, *given: Any
    ) -> dict[torch.device, Tensor]:
        own: dict[torch.device, Tensor] = look(scaler, optimizer, *given)
        return {
            each.device: each for each in looked(scaler, optimizer, [*own.values()])
        } or own

    @wraps(update)
    def update_everywhere(scaler: GradScaler, *given: Any, **options: Any) -> None:
        for number, found in enumerate(updated(scaler)):
            # As though one more optimizer had been looked at.
            state = private(scaler, "_per_optimizer_states")[-1 - number]
            state["found_inf_per_device"] = {found.device: found}
        update(scaler, *given, **options)

    setattr(GradScaler, "_unscale_grads_", look_everywhere)  # noqa: B010
    setattr(GradScaler, "update", update_everywhere)  # noqa: B010


def looks_as_known(scaler: GradScaler) -> bool:
    """Whether a scaler looks at gradients as torch's own does, and not in a way of its own."""
    name = "_unscale_grads_"
    return getattr(type(scaler), name, None) is getattr(GradScaler, name, None)


def _check_scaler() -> None:
    """An error where a scaler does not look at gradients, or does not note what it found, as it
    is known to.
    """
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones((), device="cpu"))
    weight = nn.Parameter(torch.ones(1, device="cpu"))
    weight.grad = torch.full_like(weight, inf)
    optimizer = torch.optim.SGD([weight], 1.0)
    scaler.unscale_(optimizer)
    states = private(scaler, "_per_optimizer_states")
    found = states[id(optimizer)]["found_inf_per_device"]
    (own,) = found.values()
    must(own == 1)
    # What counts is noted there, also for something else than an optimizer.
    states[id(optimizer)]["found_inf_per_device"] = {own.device: torch.zeros_like(own)}
    states[-1]["found_inf_per_device"] = found
    scaler.update()
    must(scaler.get_scale() == 2)
