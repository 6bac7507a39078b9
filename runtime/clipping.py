"""The norm of the gradients of a whole pipeline, as `torch.nn.utils.get_total_norm` has it of one module."""

from collections.abc import Sequence
from math import inf

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import get_total_norm

from schedlang.runtime.copies import Copies
from schedlang.runtime.wire import Wire


def total_norm(copies: Sequence[Copies], rank: int, norm_type: float, device: torch.device, wire: Wire) -> Tensor:
    """The norm of all gradients, on all ranks the same to the bit.

    A weight that has copies counts once, on the first rank that has one.
    """
    counted = [same[0].grad for each in copies if each.ranks[0] == rank for same in each.weights]
    norm = get_total_norm([each for each in counted if each is not None], norm_type)
    # Of FSDP's parts of a stage.
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    # All ranks alike, also one that counts nothing.
    norm = norm.to(device, torch.float64)
    if norm_type == inf:
        wire.reduce(norm, dist.ReduceOp.MAX)
        return norm
    powers = norm**norm_type
    wire.reduce(powers, dist.ReduceOp.SUM)
    return powers ** (1 / norm_type)
