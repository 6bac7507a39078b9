"""When each action runs on each rank: predicted by a walk, or measured by the runtime."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from schedlang.diagnostics.diagnostic import counted
from schedlang.schedule.actions import SHOWN, first_words, is_copy, word
from schedlang.schedule.fixed_point import ANY, FixedPoint


class Bar(NamedTuple):
    """One compute action, or one copy to or from the host, in time.

    `start` and `end` are in the unit of the costs, or in seconds; `kind` is a `Kind`, and stages
    and microbatches are numbered as in the plan.
    """

    kind: int
    stage: int
    microbatch: int
    start: float
    end: float

    def __str__(self) -> str:
        return word(*self[:3])


class Beside(NamedTuple):
    """A sum of gradients over replicas, or a gather of sharded weights, which runs beside the ops
    of a rank.

    A sum begins once the action `after` has ended. The op `before` waits for the sum or the gather.
    Both are rows of the schedule's columns, or -1 where there is none.
    """

    after: int
    before: int
    start: float
    end: float


@define
class Bars(Sequence[Bar]):
    """Bars in order of time, as columns: item i of all columns is bar i."""

    kind: "array[int]" = field(factory=lambda: array("b"))
    stage: "array[int]" = field(factory=lambda: array("i"))
    microbatch: "array[int]" = field(factory=lambda: array("i"))
    start: "array[float]" = field(factory=lambda: array("d"))
    end: "array[float]" = field(factory=lambda: array("d"))

    @classmethod
    def of(cls, bars: Iterable[Bar]) -> "Bars":
        """The columns of some bars."""
        columns = cls()
        for bar in bars:
            columns.add(*bar)
        return columns

    @classmethod
    def from_columns(cls, *columns: NDArray[Any]) -> "Bars":
        """The bars of some columns, in the order of the fields."""
        bars = cls()
        for target, column in zip(bars.columns, columns, strict=True):
            target.frombytes(column.astype(target.typecode).tobytes())
        return bars

    def add(
        self, kind: int, stage: int, microbatch: int, start: float, end: float
    ) -> None:
        """Append one bar."""
        self.kind.append(kind)
        self.stage.append(stage)
        self.microbatch.append(microbatch)
        self.start.append(start)
        self.end.append(end)

    def __repr__(self) -> str:
        return f"<Bars {first_words(map(str, self[:SHOWN]), len(self))}>"

    @property
    def columns(self) -> "tuple[array[Any], ...]":
        """Its columns, in the order of the fields of a bar."""
        return self.kind, self.stage, self.microbatch, self.start, self.end

    def __len__(self) -> int:
        return len(self.kind)

    @overload
    def __getitem__(self, index: int) -> Bar: ...

    @overload
    def __getitem__(self, index: slice) -> list[Bar]: ...

    def __getitem__(self, index: int | slice) -> Bar | list[Bar]:
        fields = [column[index] for column in self.columns]
        if isinstance(index, slice):
            return list(map(Bar._make, zip(*fields, strict=True)))
        return Bar._make(fields)

    def __iter__(self) -> Iterator[Bar]:
        return map(Bar._make, zip(*self.columns, strict=True))


@frozen
class Timeline:
    """The ops of every rank in order of time, in the unit of the costs or in seconds. `copies` has
    what runs beside them: copies, exchanges, and the gathers and sums that the program writes.
    """

    # Idle time is counted three ways in the field. In this makespan of 9, both ranks work for 6:
    #
    #     rank 0    F F · · B B · B B     bubble_over_ideal       6 idle of 12 that are worked
    #     rank 1    · F B B F B B · ·     bubble_over_makespan    6 idle of 18
    #                                     bubble_of_span          3 idle of rank 0's 9
    ranks: tuple[Bars, ...]
    copies: tuple[Bars, ...] = ()
    #: The sums and gathers that take time.
    beside: tuple[Beside, ...] = ()
    #: The common denominator of all times, but of those at which one of two ops that overlap ends:
    #: `fixed.exact(makespan)` is the makespan as a whole number or a fraction.
    fixed: FixedPoint = ANY

    def __repr__(self) -> str:
        return f"<Timeline of {counted(len(self.ranks), 'rank')}: makespan {self.makespan:.10g}>"

    @cached_property
    def makespan(self) -> float:
        """From the first start on any rank to the last end on any rank, of ops and of sums and
        gathers that take time.
        """
        ends = [np.max(bars.end).item() for bars in self.ranks if bars]
        end = max([*ends, *(each.end for each in self.beside)], default=0.0)
        return self.fixed.difference(self.start, end)

    @cached_property
    def start(self) -> float:
        """When the first op, sum or gather starts."""
        starts = [np.min(bars.start).item() for bars in self.ranks if bars]
        return min([*starts, *(each.start for each in self.beside)], default=0.0)

    @cached_property
    def busy(self) -> list[float]:
        """For each rank, the time spent in actions."""
        return [self.fixed.total(bars.start, bars.end) for bars in self.ranks]

    @property
    def copying(self) -> list[float]:
        """For each rank, the time that its copies to and from the host take, beside its actions."""
        return [
            sum((bar.end - bar.start for bar in bars if is_copy(bar.kind)), 0.0)
            for bars in self.copies
        ]

    @cached_property
    def spans(self) -> list[float]:
        """For each rank, the time from its own first start to its own last end."""
        # A rank runs one op at a time, so the first bar starts first, and the last one ends last.
        return [
            self.fixed.difference(bars.start[0], bars.end[-1]) if bars else 0.0
            for bars in self.ranks
        ]

    @property
    def span(self) -> float:
        """The longest time from a rank's own first start to its own last end."""
        return max(self.spans)

    @property
    def idle(self) -> list[float]:
        """For each rank, the share of the makespan in which it does not work."""
        makespan = self.makespan
        return [1 - busy / makespan if makespan else 0.0 for busy in self.busy]

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over working time, both summed over the ranks: (P-1)/M for 1F1B."""
        work = sum(self.busy)
        return (len(self.ranks) * self.makespan - work) / work if work else 0.0

    @property
    def bubble_over_makespan(self) -> float:
        """Idle time over all time: (P-1)/(M+P-1) for 1F1B."""
        return sum(self.idle) / len(self.idle)

    @property
    def bubble_of_span(self) -> float:
        """The idle share of the longest span of a rank, which the zero-bubble papers call the
        bubble rate.

        The span of a rank is the time from its own first start to its own last end. Idle time
        before the first op and after the last one does not count (Qi et al., Zero Bubble Pipeline
        Parallelism, section 5.3).
        """
        span, busy = max(zip(self.spans, self.busy, strict=True))
        return (span - busy) / span if span else 0.0
