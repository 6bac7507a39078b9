"""Programs that write their own transfers, on each transport, for any n.

The ideal execution does not decide these. If each rank has one growing piece, the induction over
updates (`schedlang.proof.repetition`) applies: n takes the place of the number of updates, and the
microbatches that n + 1 adds take the place of one more update.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import evolve, frozen

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.extras.prove.pieces.pieces import Orders
from schedlang.lowering import lower
from schedlang.proof.prove import prove
from schedlang.proof.repetition import goes_on, reached
from schedlang.schedule.actions import is_update
from schedlang.schedule.periods import repeat
from schedlang.schedule.schedule import Kernel, Schedule
from schedlang.schedule.transports import transports


class NotRepeated(Exception):
    """The induction does not apply, for this reason."""


@frozen
class Repeated:
    """Lowered schedules at n = 0 and n = 1, and for each rank the kernel that each further n
    repeats.
    """

    first: Schedule
    second: Schedule
    kernels: tuple[Kernel, ...]

    def on(self, transport: str) -> str:
        """`proved` or `wrong` for all n on a transport, or `unknown`."""
        first = evolve(self.first, transport=transport)
        try:
            prove(_as_updates(first, 1))
        except CompileError:
            second = evolve(self.second, transport=transport)
            return "wrong" if self._stands_at_once(first, second) else "unknown"
        before = first
        # No rank is ahead of another one by more rounds than there are.
        for times in range(1, first.layout.updates + 3):
            longer = repeat(first, self.kernels, times)
            try:
                prove(_as_updates(longer, 1))
            except CompileError:
                return "unknown"
            if goes_on(before, longer, self.kernels, times):
                return "proved"
            before = longer
        return "unknown"

    def _stands_at_once(self, first: Schedule, second: Schedule) -> bool:
        """Whether the ranks deadlock in the first repetition or before, on some rules that the
        transport stands for. Then they do so for all n.
        """
        ends = np.array([kernel.stop for kernel in self.kernels])
        for rules in transports(first.transport, first.columns.has_batches):
            places, _ = reached(first, rules)
            others, _ = reached(second, rules)
            if (places == others).all() and (places < ends).all():
                return True
        return False


def repeated(orders: Orders, schedules: Sequence[Schedule]) -> Repeated:
    """The kernels of orders, from the schedules at n = 0 and n = 1; NotRepeated with the reason."""
    grows = [units.by_n for units in orders.units]
    for constant, by_n, _ in orders.units:
        if not by_n or constant % by_n:
            raise NotRepeated("the microbatches are no multiple of those that repeat")
    counts = {constant // by_n for constant, by_n, _ in orders.units}
    if len(counts) != 1:
        raise NotRepeated("the pipelines run different numbers of microbatches")
    (updates,) = counts
    for pieces in orders.ranks:
        begun = False
        for piece in pieces:
            if piece.grows and (begun or piece.rounds.by_n != 1):
                raise NotRepeated(
                    "a rank has several loops with a growing number of rounds"
                )
            begun |= piece.grows
            for op in piece.ops:
                if is_update(op.kind):
                    raise NotRepeated("it has optimizer steps")
                _, by_n, by_round = op.microbatch
                further = by_round if piece.grows else by_n
                if further != (grows[op.stage] if begun else 0) or (
                    piece.grows and by_n
                ):
                    raise NotRepeated(
                        "a part of an order is not the same for every size"
                    )
        if not begun:
            raise NotRepeated("a rank has nothing that repeats")
    first, second = (
        _as_updates(lower(schedule), updates + n)
        for n, schedule in enumerate(schedules[:2])
    )
    lengths = np.diff(second.columns.first) - np.diff(first.columns.first)
    kernels = tuple(
        _kernel(first, second, rank, int(length)) for rank, length in enumerate(lengths)
    )
    once = repeat(first, kernels, 1)
    ranks = range(len(kernels))
    if any(_rows(once, rank) != _rows(second, rank) for rank in ranks):
        raise NotRepeated("the orders with transfers do not repeat")
    return Repeated(first, second, kernels)


def _as_updates(schedule: Schedule, updates: int) -> Schedule:
    return evolve(schedule, layout=evolve(schedule.layout, updates=updates), claims=())


def _kernel(first: Schedule, second: Schedule, rank: int, length: int) -> Kernel:
    """The rows of a rank that repeat."""
    one, other = (_rows(schedule, rank) for schedule in (first, second))
    # The two orders are equal up to where the longer one has its additional round:
    #
    #     n = 0    a b  x y         z
    #     n = 1    a b  x y  x y    z         alike up to the second x; so x y before it repeats
    same = next(
        (at for at in range(len(one)) if one[at] != other[at]),
        len(one),
    )
    if same < length:
        raise NotRepeated("a rank has nothing that repeats")
    return Kernel(same - length, same)


def _rows(schedule: Schedule, rank: int) -> list[tuple[int, ...]]:
    """The actions of a rank, each with the size of its batch."""
    columns = schedule.columns
    begin, end = columns.first[rank : rank + 2].tolist()
    rows = np.stack([columns.kind, columns.stage, columns.microbatch, columns.sizes])
    return list(map(tuple, rows[:, begin:end].T.tolist()))
