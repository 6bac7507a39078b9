"""Functions of torch whose inner calls a TorchFunctionMode must see.

A mode sees a call of such a Python function as a whole, since its first lines pass the call to the
mode, and torch has no option to change that. So the functions are copied with a
`has_torch_function` that always returns False.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from schedlang.runtime.torch_private import instead, must


def _body_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of a Python function of torch whose first lines do not pass the call to a mode."""
    must(isinstance(function, FunctionType))
    assert isinstance(function, FunctionType)
    must("has_torch_function" in function.__code__.co_names)
    names = function.__globals__ | {"has_torch_function": lambda _: False}
    body = FunctionType(
        function.__code__,
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    body.__kwdefaults__ = function.__kwdefaults__
    return body


def _entered(function: Callable[..., Any], but: str) -> dict[Callable[..., Any], Any]:
    """A dictionary from a function to its copy; empty if it cannot be copied."""
    body = instead(
        f"{function.__name__}.__code__", partial(_body_of, function), None, but
    )
    return {} if body is None else {function: body}


#: Functions that are no layers, but call some. Backwards do if they have a checkpoint.
BODIES = {
    **_entered(
        F.multi_head_attention_forward, "B computes the weight gradients of attention"
    ),
    **_entered(torch.autograd.backward, "B computes all weight gradients, and W none"),
    **_entered(torch.autograd.grad, "B computes all weight gradients, and W none"),
}


def public_engine(
    outputs: Sequence[Any],
    gradients: Sequence[Tensor],
    keep_graph: bool,
    _: bool,
    inputs: Sequence[Any],
    allow_unused: bool,
    adds_up: bool,
) -> Sequence[Tensor | None]:
    """Autograd's engine by copies of torch's public functions, which do not pass the call to a
    mode: see `schedlang.runtime.torch_private.engine`.
    """
    if adds_up:
        backward = BODIES.get(torch.autograd.backward, torch.autograd.backward)
        backward(outputs, gradients, keep_graph, inputs=inputs or None)
        return ()
    grad = BODIES.get(torch.autograd.grad, torch.autograd.grad)
    found: Sequence[Tensor | None] = grad(
        outputs, inputs, gradients, keep_graph, allow_unused=allow_unused
    )
    return found
