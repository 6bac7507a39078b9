"""Function modes that are left and entered again: in a block of a model, no op needs a look; and
whether a transform of functions is under way.

Torch enters and leaves function modes by `with` alone, and a block begins and ends in two hooks; it
has no public name for the other. Without these parts there is no other way: `split` cuts no model
that does more than call its blocks.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def leave(mode: TorchFunctionMode) -> bool:
    """Leave the function mode that was entered last; False where that is another one."""
    if mode_on_top() is not mode:
        return False
    torch._C._pop_torch_function_stack()
    return True


def enter(mode: TorchFunctionMode) -> None:
    """Enter a function mode."""
    torch._C._push_on_torch_function_stack(mode)


def is_transformed() -> bool:
    """Whether ops run within `torch.vmap` or another transform of `torch.func`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def mode_on_top() -> Any:
    """The function mode that was entered last, or None."""
    depth = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(depth - 1) if depth else None
