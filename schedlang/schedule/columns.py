"""All actions of a schedule as numpy columns.

The actions of rank 0 come first, then those of rank 1, and so on; row i of all columns is action i:

    row          0    1    2         3    4       5    6     ...
    rank         0    0    0         0    1       1    1     ...
    kind         F    F    SEND_F    B    RECV_F  F    B     ...
    stage        0    0    0         0    1       1    1     ...
    microbatch   0    1    0         0    0       0    0     ...
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, overload

import numpy as np
from attrs import define, field, frozen
from numpy.typing import ArrayLike, NDArray

from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import OPS, ROWS, SENDS, STEPS, TRANSFERS, kinds_of, op_of

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


#: By kind, how many slots an op takes in a building block.
SLOTS = np.array([op_of(kind).slots for kind in range(ROWS)])
_STREAMS = [*dict.fromkeys(op.stream for op in OPS.values())]
#: By kind, the number of the stream of its rank on which an op runs.
STREAMS = np.array([_STREAMS.index(op_of(kind).stream) for kind in range(ROWS)])


@frozen(eq=False)
class Columns:
    """The actions of all ranks; rank r has the rows `first[r]` up to `first[r + 1]`.

    A transfer along a far edge has the number of that edge as its `stage` (see
    `schedlang.schedule.layout`). `group` is that of `Actions`.
    """

    kind: Ints
    stage: Ints
    microbatch: Ints
    group: Ints
    source: Ints
    rank: Ints
    first: Ints
    _rows: dict[tuple[int, ...], Ints] = field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def batch(self) -> Ints:
        """For each action, the first row of those that are issued together with it."""
        rows = np.arange(len(self), dtype=np.int32)
        # group                     0  1  1  0  2  2  2
        # rows, 0 inside a batch    0  1  0  3  4  0  0
        # the largest so far        0  1  1  3  4  4  4
        if self.group.any():
            same_group = (self.group[1:] > 0) & (self.group[1:] == self.group[:-1])
            rows[1:][same_group & (self.rank[1:] == self.rank[:-1])] = 0
            rows = np.maximum.accumulate(rows)
        return rows

    @cached_property
    def sizes(self) -> Ints:
        """For each action, how many are issued together with it, itself included."""
        return counts_of(self.batch, minlength=len(self))[self.batch]

    @cached_property
    def has_batches(self) -> bool:
        """Whether some transfers are issued as one."""
        return bool(self.group[self.is_transfer].any())

    @cached_property
    def is_transfer(self) -> Flags:
        """Which actions move a tensor between ranks."""
        return is_any(self.kind, *TRANSFERS)

    @cached_property
    def is_send(self) -> Flags:
        """Which actions send a tensor."""
        return is_any(self.kind, *SENDS.values())

    @cached_property
    def is_copy(self) -> Flags:
        """Which actions move activations to the host or back."""
        return is_any(self.kind, *kinds_of(lambda op: op.is_copy))

    @cached_property
    def is_background(self) -> Flags:
        """Which actions are ops of microbatches that run beside the ops of their rank, such as
        copies.
        """
        return self.is_beside & ~self.is_collective

    @cached_property
    def is_update(self) -> Flags:
        """Which actions are optimizer steps."""
        return is_any(self.kind, *STEPS)

    @cached_property
    def is_collective(self) -> Flags:
        """Which actions move weights or gradients of a whole stage between its replicas."""
        return is_any(self.kind, *kinds_of(lambda op: op.is_collective))

    @cached_property
    def is_beside(self) -> Flags:
        """Which actions run while their rank goes on: copies and collectives."""
        return is_any(self.kind, *kinds_of(lambda op: op.is_beside))

    @cached_property
    def is_computed(self) -> Flags:
        """Which actions are ops that their rank computes, one after the other."""
        return ~self.is_transfer & ~self.is_beside

    @cached_property
    def _by_kind(self) -> dict[int, Ints]:
        """The rows of each kind that occurs, in order."""
        order = np.argsort(self.kind, kind="stable").astype(np.int32)
        ends = np.cumsum(counts_of(self.kind)).tolist()
        slices = pairwise([0, *ends])
        return {
            kind: order[begin:end]
            for kind, (begin, end) in enumerate(slices)
            if begin < end
        }

    def where(self, *kinds: int) -> Ints:
        """The rows of some kinds, in order."""
        if kinds not in self._rows:
            of_kinds = [self._by_kind[kind] for kind in kinds if kind in self._by_kind]
            rows = np.concatenate([np.zeros(0, np.int32), *of_kinds])
            if len(of_kinds) > 1:
                # Lists that are in order each are merged, which is faster than to sort anew.
                rows.sort(kind="stable")
            self._rows[kinds] = rows
        return self._rows[kinds]

    def taken(self, rows: Ints) -> "Columns":
        """Some rows; `first` is right if their order keeps that of the ranks."""
        columns = {name: getattr(self, name)[rows] for name in _NAMES}
        rank = self.rank[rows]
        return Columns(
            **columns,
            rank=rank,
            first=np.searchsorted(rank, np.arange(len(self.first))),
        )

    def place(self, row: int) -> tuple[int, int]:
        """The rank of an action, and its index there."""
        rank = int(self.rank[row])
        return rank, int(row - self.first[rank])


#: The columns of `Actions`, in the order of `Actions.add`, and the types of their numbers.
_NAMES = ("kind", "stage", "microbatch", "source", "group")
_TYPES = (np.int8, np.int32, np.int32, np.int32, np.int32)


@define(eq=False, repr=False)
class Ranks(Sequence[Actions]):
    """The actions of each rank, stored as columns of all; those of a rank are taken out when
    somebody asks for them.
    """

    columns: Columns
    _taken: dict[int, Actions] = field(factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.columns.first) - 1

    @overload
    def __getitem__(self, index: int) -> Actions: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Actions, ...]: ...

    def __getitem__(self, index: int | slice) -> Actions | tuple[Actions, ...]:
        if isinstance(index, slice):
            return tuple(map(self._of, range(len(self))[index]))
        # Asked for thousands of times, and taken once.
        taken = self._taken.get(index)
        return self._of(range(len(self))[index]) if taken is None else taken

    def _of(self, rank: int) -> Actions:
        """The actions of one rank."""
        if rank not in self._taken:
            begin, end = self.columns.first[rank : rank + 2].tolist()
            table = [getattr(self.columns, name)[begin:end] for name in _NAMES]
            self._taken[rank] = actions_from(table)
        return self._taken[rank]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Ranks):
            return all(
                np.array_equal(
                    getattr(self.columns, name), getattr(other.columns, name)
                )
                for name in ("first", *_NAMES)
            )
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    def __repr__(self) -> str:
        return repr(tuple(self))


def columns_of(ranks: Sequence[Actions]) -> Columns:
    """The columns of all ranks' actions."""
    if isinstance(ranks, Ranks):
        return ranks.columns
    lengths = [len(actions) for actions in ranks]
    columns = {
        name: np.concatenate([np.asarray(getattr(actions, name)) for actions in ranks])
        if ranks
        else np.zeros(0, np.int32)
        for name in _NAMES
    }
    rank = repeated(np.arange(len(lengths), dtype=np.int32), lengths)
    return Columns(**columns, rank=rank, first=np.cumsum([0, *lengths]))


def actions_of(ranks: int, columns: Columns) -> Ranks:
    """The actions of each rank, from columns in the order of ranks. Their `first` is ignored."""
    table = {
        name: getattr(columns, name).astype(dtype, copy=False)
        for name, dtype in zip(_NAMES, _TYPES, strict=True)
    }
    rank = columns.rank.astype(np.int32, copy=False)
    return Ranks(
        Columns(**table, rank=rank, first=np.searchsorted(rank, np.arange(ranks + 1)))
    )


def joined(parts: Sequence[Columns]) -> Columns:
    """Columns one behind the other. They are not in the order of ranks, so their `first` is
    meaningless.
    """
    table = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("rank", *_NAMES)
    }
    return Columns(**table, first=parts[0].first)


def table_of(actions: Actions) -> Ints:
    """The actions of one rank, a column for each and a row for each field: kind, stage, microbatch,
    source, group.
    """
    return np.array([np.asarray(getattr(actions, name)) for name in _NAMES], np.int32)


def actions_from(table: Iterable[Ints]) -> Actions:
    """The actions of one rank, from a table as `table_of` makes it."""
    actions = Actions()
    for name, column in zip(_NAMES, table, strict=True):
        target = getattr(actions, name)
        target.frombytes(column.astype(target.typecode).tobytes())
    return actions


def is_any(kind: Ints, *kinds: int) -> Flags:
    """Which of some kinds are among those wanted."""
    # Kinds are bytes, so a comparison takes a small part of what a look into a table would.
    flags = np.zeros(len(kind), bool)
    for one in kinds:
        # An enum would be made an array first, which takes longer than to compare a small plan.
        flags |= kind == int(one)
    return flags


def op_names(stages: int, columns: Columns) -> Ints:
    """For each op, a number for its kind and stage, where there are so many stages."""
    return columns.kind.astype(np.int64) * stages + columns.stage


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
