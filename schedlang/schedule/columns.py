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
from typing import overload

import numpy as np
from attrs import define, field, frozen

from schedlang.schedule.actions import Actions
from schedlang.schedule.arrays import Flags, Ints, counts_of, is_any, repeated
from schedlang.schedule.kinds import OPS, ROWS, SENDS, STEPS, TRANSFERS, kinds_of, op_of

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


def op_names(stages: int, columns: Columns) -> Ints:
    """For each op, a number for its kind and stage, where there are so many stages."""
    return columns.kind.astype(np.int64) * stages + columns.stage
