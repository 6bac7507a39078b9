"""Substitute tensors for a module's parameters and buffers for a while.

`torch.func.functional_call` does that for one forward. But a checkpoint runs its part of the
forward again in the backward, and must find the same tensors there.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

from torch import Tensor, nn

#: For each name of a tensor, the modules that have it, and its name there. Tied tensors have
#: several places, listed under the first of their names.
_Places = dict[str, list[tuple[nn.Module, str]]]


class Substitution:
    """Substitutes tensors for parameters and buffers of a module, by name."""

    def __init__(self, module: nn.Module) -> None:
        self._places = _places_in(module)

    @contextmanager
    def of(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """A context in which the module has these tensors."""
        places = self._places
        own = [
            (owner, key, getattr(owner, key))
            for name in tensors
            for owner, key in places[name]
        ]
        for name, tensor in tensors.items():
            for owner, key in places[name]:
                setattr(owner, key, tensor)
        try:
            yield
        finally:
            for owner, key, tensor in own:
                setattr(owner, key, tensor)


def _places_in(module: nn.Module) -> _Places:
    places: _Places = {}
    first: dict[int, str] = {}
    for prefix, owner in module.named_modules():
        own = chain(
            owner.named_parameters(recurse=False, remove_duplicate=False),
            owner.named_buffers(recurse=False, remove_duplicate=False),
        )
        for key, tensor in own:
            name = first.setdefault(id(tensor), f"{prefix}.{key}" if prefix else key)
            places.setdefault(name, []).append((owner, key))
    return places
