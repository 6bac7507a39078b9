"""Other tensors in place of a module's own.

`torch.func.functional_call` puts them there for one forward. A checkpoint runs its part of the
forward again in the backward, and must find the same ones there.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

from torch import Tensor, nn


class Substitution:
    """Puts other tensors in place of parameters and buffers of a module for a while, by name."""

    def __init__(self, module: nn.Module) -> None:
        #: For each name, the modules that have the tensor, and its name there. Tied tensors are in
        #: several places, under the first of their names.
        self._places: dict[str, list[tuple[nn.Module, str]]] = {}
        first: dict[int, str] = {}
        for prefix, owner in module.named_modules():
            own = chain(
                owner.named_parameters(recurse=False, remove_duplicate=False),
                owner.named_buffers(recurse=False, remove_duplicate=False),
            )
            for key, tensor in own:
                name = first.setdefault(
                    id(tensor), f"{prefix}.{key}" if prefix else key
                )
                self._places.setdefault(name, []).append((owner, key))

    @contextmanager
    def of(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the module have these tensors in here."""
        own = [
            (owner, key, getattr(owner, key))
            for name in tensors
            for owner, key in self._places[name]
        ]
        for name, tensor in tensors.items():
            for owner, key in self._places[name]:
                setattr(owner, key, tensor)
        try:
            yield
        finally:
            for owner, key, tensor in own:
                setattr(owner, key, tensor)
