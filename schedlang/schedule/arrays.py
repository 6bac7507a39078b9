"""Computations with numpy arrays of integers, such as columns of actions."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.integer]
Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]


# numpy counts by its type of indices, and takes no wider numbers for it. In a browser that has 32
# bits, and so have its numbers where nobody says how many.


def repeated(values: NDArray[Any], times: ArrayLike) -> NDArray[Any]:
    """Repeat each value; `times` says how often."""
    return np.repeat(values, np.asarray(times, np.intp))


def counts_of(
    numbers: ArrayLike, weights: ArrayLike | None = None, minlength: int = 0
) -> NDArray[Any]:
    """How often each number from 0 on occurs; with weights, their sums."""
    return np.bincount(np.asarray(numbers, np.intp), weights, minlength)


def is_any(kind: Ints, *kinds: int) -> Flags:
    """Which of some kinds are among those wanted."""
    # Kinds are bytes, so a comparison takes a small part of what a look into a table would.
    flags = np.zeros(len(kind), bool)
    for one in kinds:
        # An enum would be made an array first, which takes longer than to compare a small plan.
        flags |= kind == int(one)
    return flags


def repeats(keys: Ints) -> tuple[Ints, Ints]:
    """The items whose key an earlier item has, and for each the first item that has it. Keys are 0
    or more.
    """
    nothing = np.zeros(0, np.int64)
    if not len(keys):
        return nothing, nothing
    # Most schedules repeat nothing. To see that by counting is faster than by sorting, as long as
    # the counts do not take much more room than the keys.
    are_near = keys.max() < 8 * len(keys) + 1000
    if are_near and counts_of(keys).max() == 1:
        return nothing, nothing
    _, first, item = np.unique(keys, return_index=True, return_inverse=True)
    later = np.flatnonzero(first[item] != np.arange(len(keys)))
    return later, first[item[later]]


def members(lengths: Ints, lists: Ints) -> tuple[Ints, Ints]:
    """The members of `lists`. The lists lie one after the other in an array, and have some lengths;
    `lists` has their numbers. For each member, the item of `lists` that it belongs to, and its
    place in the array.
    """
    # Three lists of lengths 2, 0 and 1 lie at 0, 1 and 2. The members of the lists 2, 0, 0:
    #
    #     item     0    1  1    2  2
    #     place    2    0  1    0  1
    counts = lengths[lists]
    item = repeated(np.arange(len(lists)), counts)
    nth = np.arange(len(item)) - repeated(np.cumsum(counts) - counts, counts)
    begins = np.cumsum(lengths) - lengths
    return item, begins[lists[item]] + nth


def how_many_before(keys: Ints) -> Ints:
    """For each key, how many equal keys stand before it. Keys are 0 or more."""
    # Small numbers are sorted faster.
    order = np.argsort(
        keys.astype(np.min_scalar_type(int(keys.max(initial=0)))), kind="stable"
    )
    places = np.arange(len(keys))
    is_first = np.diff(keys[order], prepend=-1) != 0
    before = np.empty(len(keys), np.int64)
    before[order] = places - np.maximum.accumulate(np.where(is_first, places, 0))
    return before


def pairs_within(groups: Ints) -> tuple[Ints, Ints]:
    """All pairs of two items of one group, in both orders. `groups` has the group of each item, a
    number of 0 or more.
    """
    in_groups = np.argsort(groups, kind="stable")
    one, other = members(counts_of(groups), groups[in_groups])
    differ = one != other
    return in_groups[one[differ]], in_groups[other[differ]]
