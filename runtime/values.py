"""Values that pass between stages: a tensor, or tensors in tuples, lists and dictionaries."""

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from itertools import chain
from typing import Any
from zlib import crc32

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.torch_private.pytrees import (
    TreeSpec,
    tree_flatten,
    tree_unflatten,
)
from schedlang.runtime.torch_private.tensors import bytes_of, local_part

#: A tensor, or tensors in containers.
Value = Any


def flatten(value: Value, what: str) -> tuple[list[Tensor], TreeSpec | None]:
    """The tensors of a value, and the structure of the value: None for a single tensor.

    PipelineError if the value has anything else; the error calls it `what`.
    """
    if isinstance(value, Tensor):
        return [value], None
    tensors, tree = tree_flatten(value)
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            holds = "" if tensor is value else f" that holds a {type(tensor).__name__}"
            must = "it must be a tensor, or tensors in tuples, lists or dictionaries"
            raise PipelineError(f"{what} is a {type(value).__name__}{holds}: {must}")
    return tensors, tree


def unflatten(tensors: list[Tensor], tree: TreeSpec | None) -> Value:
    """The inverse of `flatten`."""
    return tensors[0] if tree is None else tree_unflatten(tensors, tree)


def has_gradient(tensor: Tensor) -> bool:
    """Whether a tensor between stages may have a gradient, unlike one of indices or a mask."""
    return tensor.is_floating_point() or tensor.is_complex()


def leaves_of(value: Value) -> list[Tensor]:
    """The tensors of a value that may have a gradient. Those that want one have `requires_grad`, as
    leaves of the stage's graph.
    """
    return [tensor for tensor in flatten(value, "")[0] if has_gradient(tensor)]


def detached(tensors: list[Tensor], tree: TreeSpec | None) -> Value:
    """The value of these tensors as leaves, without their graph; a leaf wants a gradient if its
    tensor did.
    """
    return unflatten(
        [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors],
        tree,
    )


def of_its_own(value: Value) -> Value:
    """A value with the same memory for another run of the module, as new tensors without hooks."""
    return detached(*flatten(value, "a value"))


def without_graph(value: Any) -> Any:
    """The value with its tensors detached; it may have any other objects, too."""
    values, tree = tree_flatten(value)
    kept = [part.detach() if isinstance(part, Tensor) else part for part in values]
    return tree_unflatten(kept, tree)


def trainable(value: Any) -> Any:
    """The value with copies of tensors from `torch.inference_mode`, which autograd cannot save for
    a backward; it may have any other objects, too.
    """
    values, tree = tree_flatten(value)
    are_made_there = [
        isinstance(part, Tensor) and part.is_inference() for part in values
    ]
    if not any(are_made_there):
        return value
    pairs = zip(values, are_made_there, strict=True)
    copies = [part.clone() if is_one else part for part, is_one in pairs]
    return tree_unflatten(copies, tree)


def are_of_inference(modules: Iterable[nn.Module]) -> bool:
    """Whether a weight or a buffer of these modules was made in `torch.inference_mode`."""
    tensors = (chain(module.parameters(), module.buffers()) for module in modules)
    return any(tensor.is_inference() for tensor in chain.from_iterable(tensors))


def wants_gradient(value: Value) -> bool:
    """Whether any tensor of a value wants a gradient."""
    return any(tensor.requires_grad for tensor in flatten(value, "")[0])


@frozen
class ValueSpec:
    """The shapes and types of a value's tensors, which of them want a gradient, and the structure
    of the value.
    """

    shapes: tuple[torch.Size, ...]
    types: tuple[torch.dtype, ...]
    want_gradients: tuple[bool, ...]
    tree: TreeSpec | None

    @classmethod
    def of(cls, tensors: list[Tensor], tree: TreeSpec | None) -> "ValueSpec":
        """The spec of a flattened value; PipelineError for a tensor that cannot be sent."""
        for tensor in tensors:
            if tensor.is_nested:
                raise PipelineError(
                    f"a nested tensor ({tensor.layout}) cannot pass between ranks: hand on "
                    "`x.to_padded_tensor(0.0)`, or of a jagged one `x.values()` and `x.offsets()`"
                )
            if tensor.layout != torch.strided:
                raise PipelineError(
                    f"a tensor of layout {tensor.layout} cannot pass between ranks: make it dense, "
                    "`to_dense()`"
                )
        return cls(
            tuple(tensor.shape for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            tree,
        )

    def matches(self, tensors: list[Tensor], tree: TreeSpec | None) -> bool:
        """Whether a flattened value has these shapes and types, and this structure."""
        if len(tensors) != len(self.shapes) or tree != self.tree:
            return False
        for tensor, shape, dtype in zip(tensors, self.shapes, self.types, strict=True):
            if tensor.shape != shape or tensor.dtype != dtype:
                return False
        return True

    @cached_property
    def wanting(self) -> list[int]:
        """The indices of the tensors that want a gradient."""
        return [index for index, wants in enumerate(self.want_gradients) if wants]

    def models(self) -> list[Tensor]:
        """Tensors of these shapes and types that take no memory, for `torch.empty_like`."""
        parts = zip(self.shapes, self.types, strict=True)
        return [torch.empty((), dtype=dtype).expand(shape) for shape, dtype in parts]

    def __str__(self) -> str:
        parts = zip(self.shapes, self.types, strict=True)
        return " and ".join(
            f"{str(dtype).removeprefix('torch.')} {list(shape)}"
            for shape, dtype in parts
        )


def check_plain(tensors: Iterable[Tensor], what: str) -> None:
    """PipelineError if `what` has a tensor that consists of others, such as a DTensor or a nested
    tensor: a message has one plain tensor.
    """
    for tensor in tensors:
        if tensor.is_nested:
            raise PipelineError(
                f"{what} is a nested tensor ({tensor.layout}), which cannot pass between ranks: "
                "return `x.to_padded_tensor(0.0)`, or of a jagged one `x.values()` and "
                "`x.offsets()`"
            )
        # The result of an asynchronous collective of tensor parallelism is plain after a wait, and
        # sending it waits.
        is_on_its_way = hasattr(tensor, "trigger_wait")
        if hasattr(tensor, "__tensor_flatten__") and not is_on_its_way:
            way_out = ""
            if isinstance(tensor, DTensor):
                way_out = (
                    ": return `x.to_local()`, of which the next stage makes a DTensor again by "
                    "`DTensor.from_local(x, mesh, placements)`, or `x.full_tensor()`"
                )
            raise PipelineError(
                f"{what} is a {type(tensor).__name__}, which cannot pass between ranks{way_out}"
            )


#: The approximate limit of values in the sample of a tensor.
_SAMPLE = 4096


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Dense tensors with all values of a tensor that may be sparse or nested."""
    if tensor.is_nested:
        return [*tensor.unbind()]
    return [tensor if tensor.layout == torch.strided else tensor.to_dense()]


def sample(tensor: Tensor) -> Tensor:
    """Some values of a tensor, for comparisons; of a sharded tensor, values of this process's
    shard.
    """
    # To compare a DTensor would gather it.
    flat = local_part(tensor).detach().flatten()
    return flat[:: len(flat) // _SAMPLE + 1]


def checksum(value: Value, waits_for_gpu: bool) -> int:
    """A checksum of the shapes and of some values of a value's tensors; 0 without any dense tensor,
    or if it would need a wait for a GPU.
    """
    tensors = [part for part in tree_flatten(value)[0] if isinstance(part, Tensor)]
    for tensor in tensors:
        if tensor.layout != torch.strided or not (tensor.is_cpu or waits_for_gpu):
            return 0
    if not tensors or any(tensor.is_meta for tensor in tensors):
        return 0
    found = 0
    for tensor in tensors:
        found = crc32(str([*tensor.shape]).encode(), found)
        found = crc32(bytes_of(sample(tensor)), found)
    # Never 0.
    return found + 1


def are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of one shape have the same values, where NaN equals NaN."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def tolerance(tensor: Tensor) -> float:
    """The largest difference by rounding, relative to the largest value: half of the digits of the
    type. Integers must be equal.
    """
    return float(torch.finfo(tensor.dtype).eps ** 0.5) if has_gradient(tensor) else 0.0


def look_of(values: Sequence[Any]) -> Hashable:
    """A key of the tensors among these values: their shapes, types, and whether they want a
    gradient.
    """
    return tuple(
        (None if value.is_nested else value.shape, value.dtype, value.requires_grad)
        for value in values
        if isinstance(value, Tensor)
    )


def wants_others(
    what: str, microbatch: int, wants: Sequence[bool], told: Sequence[bool]
) -> PipelineError:
    """The error if other tensors of a value want a gradient than the next stage knows."""
    when = (
        "in the first step with inputs of this shape, and the next stage goes by that"
    )
    if len(wants) != len(told):
        return PipelineError(
            f"{what} has {len(wants)} tensors for microbatch {microbatch}, but had {len(told)} "
            f"{when}: return as many for all microbatches"
        )
    pairs = enumerate(zip(wants, told, strict=True))
    number, now = next(
        (number, now) for number, (now, before) in pairs if now != before
    )
    which = what if len(wants) == 1 else f"tensor {number} of {what}"
    return PipelineError(
        f"{which} wants {'a' if now else 'no'} gradient for microbatch {microbatch}, but wanted "
        f"{'none' if now else 'one'} {when}: after freezing or unfreezing weights, build a new "
        "pipeline; where the stage decides it by microbatch, let it return `x.detach()` for all "
        "or for none"
    )


def size_along(dim: int, batch: Value, name: str) -> int:
    """The size of a batch's tensors along a dimension, such as the number of rows; PipelineError if
    they differ.
    """
    tensors, _ = flatten(batch, f"`{name}`")
    if not tensors:
        raise PipelineError(f"`{name}` have no tensors, and so no microbatches")
    sizes = {tensor.shape[dim] if tensor.ndim > dim else 0 for tensor in tensors}
    if len(sizes) > 1:
        raise PipelineError(
            f"the tensors of `{name}` have the sizes {' and '.join(map(str, sorted(sizes)))} along "
            f"dimension {dim}"
        )
    return sizes.pop()


def cut(value: Value, sizes: Sequence[int], dim: int = 0) -> list[Value]:
    """Cut all tensors of a value along a dimension into parts of these sizes."""
    tensors, tree = flatten(value, "a batch")
    parts = zip(*(_parts(tensor, sizes, dim) for tensor in tensors), strict=True)
    return [unflatten(list(part), tree) for part in parts]


def _parts(tensor: Tensor, sizes: Sequence[int], dim: int) -> Sequence[Tensor]:
    """Parts of a tensor, each with its own count of changes in place: if a stage changes one,
    autograd must not take that for a change of the others.
    """
    parts = tensor.split_with_sizes(list(sizes), dim)
    return parts if tensor.requires_grad else [part.data for part in parts]
