"""Tables of costs: a number for each kind of op on each stage, and for each of its microbatches or
slices where these differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from attrs import evolve, field, frozen

from schedlang.schedule.arrays import Floats, Ints
from schedlang.schedule.fixed_point import ANY, WHOLE, FixedPoint
from schedlang.schedule.kinds import ROWS, Kind
from schedlang.schedule.layout import Layout

if TYPE_CHECKING:
    from schedlang.schedule.costs.component_costs import Component, Piece

T = TypeVar("T")


class WrongNumber(ValueError):
    """Costs are for another number of stages, microbatches, slices or ranks."""


@frozen
class Amounts:
    """A number for each kind of op on each stage, such as the memory that it adds to its rank.

    `by_kind` has the means of numbers that differ by microbatch. `by_unit` has the numbers
    themselves: a table with a row for each stage, and in it a number for each microbatch of an
    update, or each slice; stage s has `units[s]` of them. `messages` has the number of each message
    between stages, by the earlier stage; none if messages count nothing. All numbers but means are
    numbers of the `fixed` point.
    """

    by_kind: dict[int, list[float]]
    by_unit: dict[int, Floats] = field(factory=dict)
    units: Ints = field(factory=lambda: np.ones(0, np.int64))
    fixed: FixedPoint = ANY
    messages: Sequence[float] = field(default=(), kw_only=True)

    def __getitem__(self, kind: int) -> list[float]:
        return self.by_kind[kind]

    @cached_property
    def _table(self) -> Floats:
        """The numbers by kind and stage; 0 for kinds without."""
        table = np.zeros((ROWS, len(self.by_kind[Kind.F])))
        for kind, numbers in self.by_kind.items():
            table[kind] = numbers
        return table

    def of(self, kind: Ints, stage: Ints, microbatch: Ints) -> Floats:
        """The number of each of some ops."""
        numbers: Floats = self._table[kind, stage]
        for differing, by_unit in self.by_unit.items():
            rows = np.flatnonzero(kind == int(differing))
            stages = stage[rows]
            numbers[rows] = by_unit[stages, microbatch[rows] % self.units[stages]]
        return numbers

    def counted(self) -> Self:
        """The same in whole numbers, which floats add up exactly."""
        if self.fixed.scale == 1:
            return self
        counts = self.fixed.counts
        by_kind = {kind: counts(means).tolist() for kind, means in self.by_kind.items()}
        by_unit = {kind: counts(table) for kind, table in self.by_unit.items()}
        messages = counts(self.messages).tolist()
        return evolve(
            self, by_kind=by_kind, by_unit=by_unit, fixed=WHOLE, messages=messages
        )

    def all(self) -> Iterator[float]:
        """All numbers that there are."""
        for kind, numbers in self.by_kind.items():
            table = self.by_unit.get(kind)
            yield from numbers if table is None else table[~np.isnan(table)].tolist()


@frozen
class Durations(Amounts):
    """The durations of single ops. `overlap` has those of ops that overlap, by the stage of the
    first one.
    """

    overlap: list[float] | None = None
    #: The components of kinds of ops that have some.
    components: dict[int, tuple[Component, ...]] = field(factory=dict)

    @property
    def add_up(self) -> bool:
        """Whether ops that overlap take as long as one after the other."""
        return self.overlap is None and not self.components

    def counted(self) -> Self:
        """The same in whole numbers, which floats add up exactly."""
        counted = super().counted()
        if self.overlap is None:
            return counted
        return evolve(counted, overlap=self.fixed.counts(self.overlap).tolist())

    def all(self) -> Iterator[float]:
        """All durations that there are."""
        yield from super().all()
        yield from self.overlap or ()

    def time(self, kind: int, stage: int, microbatch: int) -> float:
        """How long an op takes on its own."""
        if kind in self.by_unit:
            return float(self.by_unit[kind][stage, microbatch % self.units[stage]])
        return self.by_kind[kind][stage]

    def ends(self, ops: Sequence[tuple[int, int, int]]) -> list[float]:
        """The ends of ops (kind, stage, microbatch) that are issued as one, counted from their
        start.

        They run one after the other. If overlaps have a duration of their own, or the components of
        two ops fit together, each op has its share of that.
        """
        if len(ops) == 1:
            return [self.time(*ops[0])]
        ends = list(accumulate(self.time(*op) for op in ops))
        if self.add_up:
            return ends
        if self.overlap is not None:
            together = self.overlap[ops[0][1]]
        else:
            together = max(pieces[-1].end for pieces in self.pieces(ops))
        shares = [together * end / ends[-1] if ends[-1] else together for end in ends]
        # The last one has all of it, which a quotient may miss by rounding.
        return [*shares[:-1], together]

    def pieces(self, ops: Sequence[tuple[int, int, int]]) -> list[list[Piece]]:
        """When the components of ops that are issued as one run, counted from their start. Two ops
        run as they fit together best, more ops one after the other.
        """
        # Loaded by plans with components alone.
        from schedlang.schedule.costs.component_costs import pieces_of

        return pieces_of(
            [
                (Kind(kind).name, self.components.get(kind), self.time(kind, *unit))
                for kind, *unit in ops
            ]
        )


@frozen
class Tables:
    """Makes tables with a row for each stage: one number for all microbatches, or one for each of
    its `units` in an update.
    """

    layout: Layout | int
    stages: int
    units: Ints

    @classmethod
    def of(cls, layout: Layout | int, by_unit: bool) -> Self:
        """Tables for a layout, or for a number of stages; ValueError where costs differ `by_unit`,
        and there is no layout.
        """
        if isinstance(layout, int):
            if by_unit:
                raise ValueError(
                    "the costs differ by microbatch: they are for a layout"
                )
            return cls(layout, layout, np.ones(layout, np.int64))
        stages = len(layout.placement)
        units = np.ones(stages, np.int64)
        if by_unit:
            units = np.array(list(map(layout.units_of_update, range(stages))), np.int64)
        return cls(layout, stages, units)

    def spread(self, called: str, values: Any, default: Floats) -> Floats:
        """The table of what is given; ValueError for a wrong number of values."""
        if values is None:
            return default
        if isinstance(self.layout, int) or not has_lists(values):
            alike = spread(called, values, [0.0] * self.stages)
            return np.array(alike, np.float64)[:, np.newaxis]
        return _by_unit(called, values, self.layout, self.units)

    def numbers(
        self, tables: Mapping[int, Floats], fixed: FixedPoint
    ) -> tuple[dict[int, list[float]], dict[int, Floats], Ints, FixedPoint]:
        """The arguments of `Amounts` for these tables."""
        if fixed.scale > 1:
            # Some are sums, such as a backward of its halves.
            tables = {
                kind: fixed.numbers(fixed.counts(table))
                for kind, table in tables.items()
            }
        means = {kind: _means(table, self.units) for kind, table in tables.items()}
        by_unit = {kind: table for kind, table in tables.items() if table.shape[1] > 1}
        return means, by_unit, self.units, fixed


def has_lists(values: Any) -> bool:
    """Whether the value of some stage is a list with one for each microbatch."""
    return isinstance(values, tuple) and any(isinstance(each, tuple) for each in values)


def spread(called: str, values: Any, default: list[float]) -> list[float]:
    """One value per stage."""
    if values is None:
        return default
    return list(map(float, _of_stages(called, values, len(default))))


def _of_stages(called: str, values: tuple[T, ...], stages: int) -> tuple[T, ...]:
    """The value of each stage. One value may stand for all stages."""
    if len(values) not in (1, stages):
        raise WrongNumber(
            f"{len(values)} {called} are given, there are {stages} stages"
        )
    return values * (stages if len(values) == 1 else 1)


def _by_unit(
    called: str, values: tuple[Any, ...], layout: Layout, units: Ints
) -> Floats:
    """A row for each stage with a value for each microbatch of an update, or each slice. Rows are
    filled up with NaN.
    """
    table = np.full((len(units), int(units.max())), np.nan)
    for stage, value in enumerate(_of_stages(called, values, len(units))):
        microbatches = int(units[stage]) // layout.slices
        row = value if isinstance(value, tuple) else (value,) * microbatches
        if len(row) != microbatches:
            raise WrongNumber(
                f"{len(row)} {called} are given for the microbatches of stage {stage}, there are "
                f"{microbatches}"
            )
        if layout.slices == 1 and tuple not in set(map(type, row)):
            # A whole row at once: each batch may come with costs of its own.
            table[stage, :microbatches] = row
            continue
        for microbatch, entry in enumerate(row):
            of_slices = entry if isinstance(entry, tuple) else (entry,)
            if len(of_slices) not in (1, layout.slices):
                raise WrongNumber(
                    f"{len(of_slices)} {called} are given for the slices of microbatch "
                    f"{microbatch} on stage {stage}, there are {layout.slices}"
                )
            first = microbatch * layout.slices
            table[stage, first : first + layout.slices] = of_slices
    return table


def _means(table: Floats, units: Ints) -> list[float]:
    """The mean of each row, NaN left out."""
    if table.shape[1] == 1:
        means: list[float] = table[:, 0].tolist()
        return means
    # Rows of one length at once: each batch may come with costs of its own.
    found = np.empty(len(table))
    for length in set(units.tolist()):
        rows = units == length
        found[rows] = table[rows, :length].mean(axis=1)
    means = found.tolist()
    return means
