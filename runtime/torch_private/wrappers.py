"""Find out whether torch has wrapped a module: to sum its gradients in each backward, or to shard
it.

The composable form of DDP can be recognised only by a class in a private module.
"""

import sys
from typing import Any

from torch import nn

#: The classes of wrappers, by module. A module that was not imported wraps nothing, and to import
#: it just for the check takes a second.
_WRAPPERS = {
    "torch.nn.parallel": "DistributedDataParallel",
    "torch.distributed.fsdp": "FullyShardedDataParallel",
    "torch.distributed._composable.replicate": "DDP",
}


def sums_in_backwards(module: nn.Module) -> bool:
    """Whether a module is in DistributedDataParallel, as a wrapper or by torch's composable
    `replicate`, or in the FSDP before `fully_shard`.
    """
    wrappers = (
        getattr(sys.modules.get(path), name, None) for path, name in _WRAPPERS.items()
    )
    return isinstance(module, tuple(each for each in wrappers if each is not None))


def sharded_parts(module: nn.Module) -> list[Any]:
    """The parts of a module that `fully_shard` has sharded."""
    # If FSDP was not imported, nothing is sharded; to import it just for the check takes a second.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [part for part in module.modules() if isinstance(part, fsdp.FSDPModule)]


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 has sharded a part of a module."""
    return bool(sharded_parts(module))


def left_whole(module: nn.Module) -> list[str]:
    """The names of trained weights that FSDP2 has not sharded, if it has sharded other parts of the
    module.
    """
    if not is_sharded(module):
        return []
    return [
        name
        for name, weight in module.named_parameters()
        if weight.requires_grad and not hasattr(weight, "device_mesh")
    ]
