"""What memory of tensors is still there."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class Storages(TorchDispatchMode):
    """The memory that operations have made; `held()` is what of it is still there, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self.made[StorageWeakRef(storage)] = storage.nbytes()
        return result

    def held(self) -> int:
        return sum(size for storage, size in self.made.items() if not storage.expired())


@contextmanager
def counted_storages() -> Iterator[Storages]:
    """Without the garbage collector: memory must not wait for it."""
    gc.collect()
    gc.disable()
    try:
        with Storages() as storages:
            yield storages
    finally:
        gc.enable()
