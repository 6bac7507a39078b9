"""Tensors that share memory, such as two weights after `one.weight.data = other.weight.data`, after
`load_state_dict(assign=True)` of a tied weight, or where one is a view of a part of the other.

In one process, an update of one changes the other. So what moves weights to other memory must move
them together, or refuse them.
"""

from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

Key = TypeVar("Key")

#: The alignment of torch's allocators, in bytes.
_ALIGNMENT = 64


def sharing(tensors: Mapping[Key, Tensor]) -> list[list[Key]]:
    """The groups of tensors whose memory overlaps, by their keys; tensors that share no memory are
    in none.
    """
    spans = sorted(
        ((*_span(tensor), key) for key, tensor in tensors.items() if _is_plain(tensor)),
        key=lambda span: span[:2],
    )
    groups: list[list[Key]] = []
    end_of_group = 0
    for begin, end, key in spans:
        if begin >= end_of_group:
            groups.append([])
        groups[-1].append(key)
        end_of_group = max(end_of_group, end)
    return [group for group in groups if len(group) > 1]


def copies_of(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copies of some tensors; the copies share memory where the tensors do."""
    places: dict[Key, Tensor] = {}
    for group in sharing(tensors):
        spans = [_span(tensors[key]) for key in group]
        begin = min(start for start, _ in spans)
        begin -= begin % _ALIGNMENT
        size = max(end for _, end in spans) - begin
        memory = tensors[group[0]].new_empty(size, dtype=torch.uint8)
        for key in group:
            places[key] = _at_same_place(tensors[key], memory, begin)
    originals = {key: tensor.detach() for key, tensor in tensors.items()}
    return {
        key: places[key].copy_(tensor) if key in places else tensor.clone()
        for key, tensor in originals.items()
    }


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of the storages of some tensors."""
    return {
        tensor.untyped_storage().data_ptr() for tensor in tensors if _is_plain(tensor)
    }


def is_part(tensor: Tensor) -> bool:
    """Whether a tensor's memory is a part of a larger one, as if a script has laid out gradients in
    one flat tensor.
    """
    return _is_plain(tensor) and tensor.untyped_storage().nbytes() > tensor.nbytes


def _at_same_place(tensor: Tensor, memory: Tensor, begin: int) -> Tensor:
    """A tensor in other memory, as far behind its begin as the given tensor is behind `begin`."""
    offset = (tensor.data_ptr() - begin) // tensor.element_size()
    place = tensor.new_empty(0)
    return place.set_(memory.untyped_storage(), offset, tensor.size(), tensor.stride())


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own kind: not sparse, not on the meta device, no wrapper
    such as a DTensor, not without a shape yet, and not empty.
    """
    return (
        not is_lazy(tensor)
        and type(tensor.detach()) is Tensor
        and tensor.layout == torch.strided
        and tensor.numel() > 0
        and tensor.data_ptr() != 0
    )


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte, and of the byte behind its last one."""
    begin = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (last + 1) * tensor.element_size()
