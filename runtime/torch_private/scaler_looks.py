"""A hook for the moment at which a GradScaler looks at gradients.

`GradScaler.unscale_` cannot be used, since fused optimizers bypass it. FSDP1's own scaler overrides
the same private method.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from torch.amp import GradScaler
from torch.optim import Optimizer

_LOOK = "_unscale_grads_"


def before_looks(call: Callable[[GradScaler, Optimizer], None]) -> None:
    """Call a function before any scaler of this process looks at the gradients of an optimizer. It
    is never called if this version of torch lacks the private method.
    """
    look = getattr(GradScaler, _LOOK, None)
    if look is None:
        return

    @wraps(look)
    def look_after(scaler: GradScaler, optimizer: Optimizer, *given: Any) -> Any:
        call(scaler, optimizer)
        return look(scaler, optimizer, *given)

    setattr(GradScaler, _LOOK, look_after)
