"""Norms of gradients that are whole, or cut over device meshes (DTensor), and clipping by a norm.

Torch computes with tensors of one mesh alone. With tensor parallelism and FSDP, the gradients of a
stage lie on several:

    layers that are cut      (dp, tp)        norm of each mesh, then the norm of these
    other layers             (dp)
    without a mesh           whole
"""

from collections.abc import Iterable

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def norm_of(gradients: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of some gradients, the same on all processes that have parts of them."""
    norms = [get_total_norm(each, norm_type) for each in _by_mesh(gradients)]
    # The norm of tensors that are cut over a mesh is a DTensor of partial norms.
    whole = [
        norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms
    ]
    return whole[0] if len(whole) == 1 else get_total_norm(whole, norm_type)


def clip_to(weights: Iterable[Tensor], max_norm: float, norm: Tensor) -> None:
    """Scale the gradients of some weights, whose norm this is, to a norm of at most `max_norm`."""
    for each in _by_mesh(weights):
        clip_grads_with_norm_(each, max_norm, norm)


def _by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return [*found.values()]
