"""Microbatches and slices that need not be alike: how much each microbatch counts, and sequences
cut at given places.

    step([x0, x1, x2], [y0, y1, y2], counts=[7, 2, 4])      losses l0, l1, l2, means over so many

    the step's gradient is that of (7 l0 + 2 l1 + 4 l2) / 13, as of one batch of all of them
"""

from collections.abc import Iterable, Sequence
from math import isfinite
from numbers import Integral, Real

import torch
from torch import Tensor

from schedlang.diagnostics.diagnostic import counted
from schedlang.plan.plan import Plan
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.microbatches import Microbatches
from schedlang.runtime.setup import SliceLengths
from schedlang.runtime.values import (
    Value,
    ValueSpec,
    cut,
    flatten,
    size_along,
    unflatten,
)


def specs_of(values: Sequence[Value]) -> list[ValueSpec]:
    """Shapes and types of inputs by microbatch; PipelineError where these are not microbatches of
    one model: they may differ in shape alone, and none may be empty.
    """
    specs: list[ValueSpec] = []
    for number, value in enumerate(values):
        tensors, tree = flatten(value, f"`inputs[{number}]`")
        spec = ValueSpec.of(tensors, tree)
        if tensors and not any(tensor.numel() for tensor in tensors):
            raise PipelineError(
                f"`inputs[{number}]` is {spec}: a microbatch must have a row"
            )
        first = specs[0] if specs else spec
        if spec.tree != first.tree:
            raise PipelineError(
                f"`inputs[{number}]` has its tensors in other containers than `inputs[0]`: "
                "microbatches may differ in shape alone"
            )
        if spec.types != first.types:
            raise PipelineError(
                f"`inputs[{number}]` is {spec}, and `inputs[0]` {first}: microbatches may differ "
                "in shape alone"
            )
        specs.append(spec)
    return specs


def check_list(inputs: Microbatches, must_be_alike: bool) -> None:
    """PipelineError where a list is not one of microbatches of one model; or where they differ,
    and nothing says how much the loss of each counts: that of one with few rows would count as
    much as that of one with many.
    """
    specs = specs_of(inputs.values)
    others = ((number, spec) for number, spec in enumerate(specs) if spec != specs[0])
    number, other = next(others, (0, None))
    if must_be_alike and other is not None:
        raise PipelineError(
            f"`inputs[{number}]` is {other}, and `inputs[0]` {specs[0]}, so it must be said "
            "how much the loss of each counts: `counts=[…]`, the rows or tokens that each is a "
            "mean of"
        )


def check_count(name: str, batch: Microbatches, microbatches: int) -> None:
    """PipelineError for another number of microbatches than the plan has."""
    count = len(batch.values)
    if count != microbatches:
        way_out = ""
        if name == "inputs" and count:
            way_out = (
                f": give the step on all ranks a plan for as many, such as "
                f"`plan=plan.for_microbatches({count})`"
            )
        raise PipelineError(
            f"`{name}` are a list of {count} microbatches, and the plan has {microbatches}{way_out}"
        )


def check_counts(counts: Sequence[float], microbatches: int, has_scale: bool) -> None:
    """PipelineError for what cannot say how much each microbatch counts, also where `loss_scale`
    says it.
    """
    if isinstance(counts, str) or not hasattr(counts, "__len__"):
        raise PipelineError(
            f"`counts` is {counts!r}: it must be a list of numbers of rows or tokens, one for each "
            "microbatch"
        )
    if len(counts) != microbatches:
        raise PipelineError(
            f"`counts` are {len(counts)}, one for each microbatch, and the plan has {microbatches}"
        )
    for number, count in enumerate(counts):
        is_number = isinstance(count, Real | Tensor)
        if not is_number or not isfinite(count) or count < 0:
            raise PipelineError(
                f"`counts[{number}]` is {count!r}: it must be a number of rows or tokens, 0 or more"
            )
    if has_scale:
        raise PipelineError(
            "`loss_scale` says what every loss is multiplied by, and `counts` say it, too: it must "
            "be one of the two"
        )


def totals_of(counts: Sequence[float], updates: int) -> list[float]:
    """How much the microbatches of each update count together."""
    size = len(counts) // updates
    return [
        float(sum(counts[begin : begin + size]))
        for begin in range(0, len(counts), size)
    ]


def check_slices(plan: Plan, lengths: SliceLengths) -> None:
    """Check that there is a length for each slice of the plan."""
    slices = plan.layout.slices
    if slices == 1:
        raise PipelineError(
            "the plan has no slices, so it has no use for `slice_lengths`"
        )
    if not callable(lengths) and len(lengths) != slices:
        raise PipelineError(
            f"`slice_lengths` has {counted(len(lengths), 'length')}, and a microbatch of the plan "
            f"has {slices} slices"
        )


def cut_slices(
    name: str,
    microbatches: Sequence[Value],
    slices: int,
    rows: int,
    given: SliceLengths | None,
) -> tuple[list[Value], list[list[int]]]:
    """The slices of some microbatches; and their lengths, if lengths are given. `rows` is the
    dimension of the rows.
    """
    along = _along(rows)
    units: list[Value] = []
    lengths: list[list[int]] = []
    for microbatch in microbatches:
        size = size_along(along, microbatch, name)
        if given is not None:
            of_one = lengths_of(size, name, along, slices, given)
            lengths.append(of_one)
        elif not size or size % slices:
            raise PipelineError(
                f"`{name}` have the size {size} along dimension {along}, which does not divide "
                f"into {slices} slices"
            )
        else:
            of_one = [size // slices] * slices
        units += cut(microbatch, of_one, along)
    return units, lengths


def join_slices(parts: Sequence[Value], slices: int, rows: int) -> list[Value]:
    """The inverse of `cut_slices`."""
    return [
        _joined(parts[begin : begin + slices], _along(rows))
        for begin in range(0, len(parts), slices)
    ]


def _joined(parts: Sequence[Value], dim: int) -> Value:
    """Values as one, whose tensors lie one behind the other along a dimension."""
    tensors, trees = zip(*(flatten(part, "the output") for part in parts), strict=True)
    return unflatten(
        [torch.cat(pieces, dim) for pieces in zip(*tensors, strict=True)], trees[0]
    )


def _along(rows: int) -> int:
    """The dimension along which microbatches are cut into slices: the first one that is not that of
    the rows.
    """
    return 0 if rows else 1


def lengths_of(
    size: int, name: str, dim: int, slices: int, given: SliceLengths
) -> list[int]:
    """How long the slices of a microbatch are, whose tensors have a size along the dimension of
    sequences; PipelineError where these lengths are not those of so many slices.
    """
    values = given(size) if callable(given) else given
    # A function of the script's own may return anything.
    lengths = [*values] if isinstance(values, Iterable) else []
    are_lengths = all(
        isinstance(length, Integral) and length >= 1 for length in lengths
    )
    if len(lengths) != slices or not are_lengths:
        raise PipelineError(
            f"`slice_lengths` gives {values!r} for a length of {size}: it must be {slices} lengths "
            "of 1 or more, one for each slice of the plan"
        )
    if sum(lengths) != size:
        way_out = ""
        if not callable(given):
            way_out = "; for other lengths, give a function of the length, which returns those "
            way_out += "of its slices"
        raise PipelineError(
            f"`{name}` have the size {size} along dimension {dim}, and `slice_lengths` {lengths} "
            f"make {sum(lengths)}{way_out}"
        )
    return lengths


def shares_of_slices(lengths: Sequence[int]) -> list[float]:
    """How much the slices of a microbatch count, by their lengths: 1.0 on average."""
    return [length * len(lengths) / sum(lengths) for length in lengths]
