"""Let all ranks decide together whether a GradScaler skips an update.

A scaler decides from the gradients of one process. No public call lies between its look at
gradients and the decision; FSDP1's own scaler overrides the same private one.
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
    """Let all scalers use the results of `looked`, which gets what a scaler has found in the
    gradients of an optimizer, and of `updated` before a scaler changes its scale. If these return
    nothing, scalers work as without them.

    PipelineError if torch's scaler does not work as expected.
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
            # Enter the result as if it were that of one more optimizer.
            state = private(scaler, "_per_optimizer_states")[-1 - number]
            state["found_inf_per_device"] = {found.device: found}
        update(scaler, *given, **options)

    setattr(GradScaler, "_unscale_grads_", look_everywhere)  # noqa: B010
    setattr(GradScaler, "update", update_everywhere)  # noqa: B010


def looks_as_known(scaler: GradScaler) -> bool:
    """Whether a scaler looks at gradients by torch's own method."""
    name = "_unscale_grads_"
    return getattr(type(scaler), name, None) is getattr(GradScaler, name, None)


def _check_scaler() -> None:
    """Raise an error if a scaler does not look at gradients, or record its result, as expected."""
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
    # The scaler decides from these entries, also from one that belongs to no optimizer.
    states[id(optimizer)]["found_inf_per_device"] = {own.device: torch.zeros_like(own)}
    states[-1]["found_inf_per_device"] = found
    scaler.update()
    must(scaler.get_scale() == 2)
