"""See the weights that a script passes to `torch.nn.utils.clip_grad_norm_`.

Scripts import that function by name, so a private function that it calls is wrapped instead.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad

from schedlang.runtime.torch_private import instead, must, private

_NAME = "_clip_grads_with_norm_"


def tell_what_is_clipped(tell: Callable[[Sequence[Tensor]], None]) -> None:
    """Call `tell` with the weights of every following call of `clip_grad_norm_`."""
    instead(
        f"nn.utils.clip_grad.{_NAME}",
        lambda: _wrap(tell),
        None,
        "ranks that clip by norms of their own are not noticed",
    )


def _wrap(tell: Callable[[Sequence[Tensor]], None]) -> None:
    clip = private(clip_grad, _NAME)
    clipped: list[Tensor] = []

    def with_tell(
        to: Callable[[Sequence[Tensor]], object],
    ) -> Callable[..., None]:
        @wraps(clip)
        def clip_and_tell(parameters: Any, *given: Any, **options: Any) -> None:
            # `clip_grad_norm_` passes a list, which can be read twice.
            to(parameters)
            clip(parameters, *given, **options)

        return clip_and_tell

    weight = nn.Parameter(torch.ones(1, device="cpu"))
    weight.grad = torch.ones_like(weight)
    try:
        setattr(clip_grad, _NAME, with_tell(clipped.extend))
        clip_grad.clip_grad_norm_([weight], 0.5)
        must(len(clipped) == 1 and clipped[0] is weight and weight.grad < 1)
    except Exception:
        setattr(clip_grad, _NAME, clip)
        raise
    setattr(clip_grad, _NAME, with_tell(tell))
