"""What actions cost: how long they take, and what they add to the memory of their rank."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, wraps
from itertools import accumulate
from math import inf
from numbers import Rational
from typing import Any, Self, TypeVar

import numpy as np
from attrs import evolve, field, fields, frozen

from schedlang.diagnostics.arguments import check_number, check_type, check_whole, shown
from schedlang.diagnostics.diagnostic import counted
from schedlang.schedule.columns import Floats, Ints
from schedlang.schedule.costs.components import (
    COMPUTE,
    Component,
    Components,
    Piece,
    alone,
    as_json,
    by_kind,
    components_of,
    together,
)
from schedlang.schedule.costs.transfers import Transfers
from schedlang.schedule.fixed_point import ANY, WHOLE, FixedPoint, fixed_point, half
from schedlang.schedule.kinds import OPS, ROWS, Kind
from schedlang.schedule.layout import Layout

T = TypeVar("T")

#: What `Costs` call each kind of op: the duration of a `forward` is in `forward_times`.
COST_OF = {kind: op.cost for kind, op in OPS.items() if not op.is_collective}
_KIND_OF = {name: kind for kind, name in COST_OF.items()}
_TIMES = tuple(f"{name}_times" for name in (*COST_OF.values(), "overlap"))
#: What goes on beside ops, once in an update of a stage.
_BESIDE = ("sum_times", "gather_times")
_LINKS = (
    "boundary_bytes",
    "ranks_per_node",
    "latency_in_node",
    "bandwidth_in_node",
    "latency_between_nodes",
    "bandwidth_between_nodes",
)
_MEMORY = (
    "forward_memory",
    "backward_memory",
    "input_memory",
    "weight_memory",
    "gather_memory",
)
_BANDWIDTHS = ("bandwidth_in_node", "bandwidth_between_nodes")
_LATENCIES = ("p2p_time", "link_times", "latency_in_node", "latency_between_nodes")
_BYTES = ("activation_bytes", "kept_bytes", "weights_bytes", "gathered_bytes")

#: How long transfers take is given by one of these, or by links.
_WAYS = ("p2p_time", "link_times")

#: Of these there is one number; the others have one for all stages, or one per stage.
SINGLE = frozenset(["p2p_time", *_LINKS]) - {"boundary_bytes"}
#: Of these, the number of a stage may be a list with one for each microbatch, and that of a
#: microbatch one for each of its slices.
_TIMES_BY_UNIT = frozenset(_TIMES) - {"update_times", "overlap_times"}
_MEMORY_BY_UNIT = frozenset(_MEMORY) - {"gather_memory"}
_BYTES_BY_UNIT = frozenset(["activation_bytes", "kept_bytes"])
_BY_UNIT = _TIMES_BY_UNIT | _MEMORY_BY_UNIT | _BYTES_BY_UNIT

#: What depends on each other: costs that give one of these leave none of them to others.
_TOGETHER = (
    ("forward_times",),
    ("backward_times", "input_times", "weight_times"),
    ("recompute_times",),
    ("update_times",),
    ("overlap_times", "components"),
    ("offload_times",),
    ("reload_times",),
    ("sum_times",),
    ("gather_times",),
    (*_WAYS, *_LINKS),
    _MEMORY,
    ("activation_bytes", "kept_bytes"),
    ("weights_bytes",),
    ("gathered_bytes",),
    ("capacity_bytes",),
)

#: The largest number that is taken: sums and products of such ones are still numbers.
_MOST = 1e100

_Values = tuple[float, ...] | None
#: The same, where there may be a number for each microbatch or slice.
_UnitValues = tuple[float | tuple[float | tuple[float, ...], ...], ...] | None
_Matrix = tuple[tuple[float, ...], ...] | None

#: What arguments and attributes of `Costs` were called before they were called as in files.
_OLD_NAMES = {name.removesuffix("_times"): name for name in _TIMES} | {
    "p2p": "p2p_time"
}


_CACHED = ("fixed_times", "fixed_memory", "fixed_bytes")


class WrongNumber(ValueError):
    """Costs are for another number of stages, microbatches, slices or ranks."""


def _tuple(values: Any) -> Any:
    """A list of numbers, or of such lists, as a tuple; what is none is left for the checks of
    `Costs`.
    """
    # Those of numpy count as what they are.
    if isinstance(values, np.number):
        return float(values)
    if isinstance(values, str) or not isinstance(values, Iterable):
        return values
    return tuple(map(_tuple, values))


@frozen
class Amounts:
    """A number for each kind of op on each stage, such as what it adds to the memory of its rank.

    Of kinds whose numbers differ by microbatch, `by_kind` has the means. `by_unit` has their
    tables, with a row for each stage: those of its microbatches in an update, or of their slices,
    of which it has `units[stage]`. All but means are numbers of the `fixed` point.
    """

    by_kind: dict[int, list[float]]
    by_unit: dict[int, Floats] = field(factory=dict)
    units: Ints = field(factory=lambda: np.ones(0, np.int64))
    fixed: FixedPoint = ANY

    def __getitem__(self, kind: int) -> list[float]:
        return self.by_kind[kind]

    @cached_property
    def _table(self) -> Floats:
        """The number of each kind on each stage; of kinds that have none, 0."""
        table = np.zeros((ROWS, len(self.by_kind[Kind.F])))
        for kind, numbers in self.by_kind.items():
            table[kind] = numbers
        return table

    def of(self, kind: Ints, stage: Ints, microbatch: Ints) -> Floats:
        """The numbers of some ops, of each by itself."""
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
        return evolve(self, by_kind=by_kind, by_unit=by_unit, fixed=WHOLE)

    def all(self) -> Iterator[float]:
        """All numbers that there are."""
        for kind, numbers in self.by_kind.items():
            table = self.by_unit.get(kind)
            yield from numbers if table is None else table[~np.isnan(table)].tolist()


@frozen
class Durations(Amounts):
    """How long ops take, each by itself; and ops that overlap together, by the stage of the
    first.
    """

    overlap: list[float] | None = None
    #: The components of kinds of ops that have some; others are one on `COMPUTE`.
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
        """When each of some ops (kind, stage, microbatch) that are issued as one ends, counted from
        their start.

        They count as one after the other. Where overlaps have a time of their own, or two ops have
        components that fit together, each has the share of it that it has of their sum.
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
        """When the components of each of some ops that are issued as one run, counted from their
        start: of two, as they fit together best; of more, one op after the other.
        """
        chains = []
        for op in ops:
            components = self.components.get(
                op[0], (Component(Kind(op[0]).name, 1.0, COMPUTE),)
            )
            chains.append(alone(components, self.time(*op)))
        if len(chains) == 2:
            return list(together(*chains))
        starts = accumulate((chain[-1].end for chain in chains), initial=0.0)
        return [
            [
                Piece(piece.component, start + piece.start, start + piece.end)
                for piece in chain
            ]
            for start, chain in zip(starts, chains, strict=False)
        ]


def _with_old_names(cls: type[T]) -> type[T]:
    """A class that also takes its arguments, and gives its attributes, by their `_OLD_NAMES`."""
    init = cls.__init__

    @wraps(init)
    def with_old_names(self: T, *values: Any, **named: Any) -> None:
        renamed = {}
        for name, value in named.items():
            renamed[_new_name(name)] = value
        init(self, *values, **renamed)

    # It finds the cached properties.
    cached = cls.__getattr__  # type: ignore[attr-defined]

    def attribute(self: T, name: str) -> Any:
        if name in _CACHED:
            return cached(self, name)
        if name not in _OLD_NAMES:
            raise AttributeError(
                f"`{cls.__name__}` has no `{name}`", name=name, obj=self
            )
        return getattr(self, _new_name(name))

    cls.__init__ = with_old_names  # type: ignore[method-assign, assignment]
    cls.__getattr__ = attribute  # type: ignore[attr-defined]
    return cls


def _new_name(name: str) -> str:
    """The name that something has now, with a warning if it had another one."""
    if name not in _OLD_NAMES:
        return name
    message = (
        f"`{name}` of `Costs` is `{_OLD_NAMES[name]}` now, as in files and options"
    )
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return _OLD_NAMES[name]


@_with_old_names
@frozen(repr=False)
class Costs:
    """How long ops and transfers take, and what they hold: a sequence with one number for all
    stages, or with one per stage; None is not given, and what stands in for it is said beside the
    fields. Where an op's time or memory differs by microbatch, the number of a stage is a sequence
    with one per microbatch of its pipeline, and that of a microbatch, where there are slices, one
    with a number per slice.

    Times are in any unit, all in the same, and so is the time of simulations; memory is in a unit
    of its own; bytes are bytes, a bandwidth is bytes per unit of time. The names are those of files
    and options (docs/costs.md). TypeError for what is no number; ValueError for a time below 0, for
    NaN and infinity, and for costs that do not go together.
    """

    # How long ops take. Without, they have the unit costs of the pipeline papers: a forward is 1,
    # a whole backward 2 or its halves together, a half of it half of that; a recomputation is a
    # forward, and so is a copy to the host, or back; an optimizer step is 0.
    forward_times: _UnitValues = field(default=None, converter=_tuple)
    backward_times: _UnitValues = field(default=None, converter=_tuple)
    input_times: _UnitValues = field(default=None, converter=_tuple)
    weight_times: _UnitValues = field(default=None, converter=_tuple)
    recompute_times: _UnitValues = field(default=None, converter=_tuple)
    update_times: _Values = field(default=None, converter=_tuple)
    offload_times: _UnitValues = field(default=None, converter=_tuple)
    reload_times: _UnitValues = field(default=None, converter=_tuple)
    #: Ops that `overlap`, together; without, as long as one after the other.
    overlap_times: _Values = field(default=None, converter=_tuple)
    #: Instead: for kinds of ops, their components in order, as `{"F": ["attention 2 compute", …]}`;
    #: two ops that overlap take what these take where they fit together best (docs/costs.md).
    components: Components | None = field(default=None, converter=components_of)

    # How long the sum of a stage's gradients over its replicas takes, and the gather of its weights
    # where they are sharded over them; without, no time.
    sum_times: _Values = field(default=None, converter=_tuple)
    gather_times: _Values = field(default=None, converter=_tuple)

    # How long a transfer between ranks takes: `p2p_time`; or by `link_times`, a row for each rank
    # that sends, with a number for each that receives; or what its link makes of its size, see
    # `Transfers`; without any, 0.
    p2p_time: float | None = None
    link_times: _Matrix = field(default=None, converter=_tuple)
    boundary_bytes: _Values = field(default=None, converter=_tuple)
    ranks_per_node: int | None = None
    latency_in_node: float | None = None
    bandwidth_in_node: float | None = None
    latency_between_nodes: float | None = None
    bandwidth_between_nodes: float | None = None

    # What an op adds to what its rank holds. Without, 1 for a forward, nothing for an input half;
    # the last use, a weight half or a whole backward, gives back what there is.
    forward_memory: _UnitValues = field(default=None, converter=_tuple)
    backward_memory: _UnitValues = field(default=None, converter=_tuple)
    input_memory: _UnitValues = field(default=None, converter=_tuple)
    weight_memory: _UnitValues = field(default=None, converter=_tuple)
    gather_memory: _Values = field(default=None, converter=_tuple)

    # Bytes are counted where they are given: those of an activation from the forward to the last
    # use, of which some are kept from an input half to its weight half; and those of each version
    # of a stage's weights.
    activation_bytes: _UnitValues = field(default=None, converter=_tuple)
    kept_bytes: _UnitValues = field(default=None, converter=_tuple)
    weights_bytes: _Values = field(default=None, converter=_tuple)
    gathered_bytes: _Values = field(default=None, converter=_tuple)
    #: What a rank has room for: one number for all ranks, or one per rank; without, as much as it
    #: needs.
    capacity_bytes: _Values = field(default=None, converter=_tuple)

    #: The number of stages that a run was measured on: none of its numbers stands for other stages.
    measured_stages: int | None = field(default=None, eq=False)

    def __attrs_post_init__(self) -> None:
        """TypeError for what is no number, ValueError for one that cannot be a cost, and for costs
        that do not go together.
        """
        for name in self._given(NAMES):
            (_check_single if name in SINGLE else _check_values)(
                name, getattr(self, name)
            )
        links = self._given(_LINKS)
        if self.link_times is not None:
            _check_matrix(self.link_times)
            others = self._given(("p2p_time", *_LINKS))
            if others:
                raise ValueError(
                    f"`link_times` are the times of all transfers, `{others[0]}` says others"
                )
        bandwidths = self._given(_BANDWIDTHS)
        between_nodes = self._given(
            ("latency_between_nodes", "bandwidth_between_nodes")
        )
        if self.p2p_time is not None and links:
            raise ValueError(
                f"`p2p_time` is the time of every transfer, `{links[0]}` says that they differ"
            )
        if bool(bandwidths) != (self.boundary_bytes is not None):
            raise ValueError(
                "`boundary_bytes` and a bandwidth go together: transfers take bytes / bandwidth"
            )
        if self.ranks_per_node is None and between_nodes:
            raise ValueError(
                "`ranks_per_node` says which ranks are on one node: there is more than one"
            )
        if self.overlap_times is not None and self.components is not None:
            raise ValueError(
                "`overlap_times` says how long ops that overlap take, and `components` lets it be "
                "worked out: give one of them"
            )
        if self.kept_bytes is not None and self.activation_bytes is None:
            raise ValueError(
                "`kept_bytes` is the part of `activation_bytes` that the weight half needs"
            )

    def _given(self, fields: Sequence[str]) -> list[str]:
        return [field for field in fields if getattr(self, field) is not None]

    def over(self, others: "Costs") -> "Costs":
        """These costs, and where they leave something open, the others."""
        chosen: dict[str, Any] = {}
        for names in _TOGETHER:
            mine = bool(self._given(names))
            chosen |= {name: getattr(self if mine else others, name) for name in names}
        measured = self.measured_stages or others.measured_stages
        return Costs(**chosen, measured_stages=measured)

    @property
    def gives_times(self) -> bool:
        """Whether any duration is given."""
        return bool(self._given((*_TIMES, "components", *_BESIDE, *_WAYS, *_LINKS)))

    @property
    def gives_memory(self) -> bool:
        """Whether any amount of memory is given."""
        return bool(self._given(_MEMORY))

    @property
    def gives_bytes(self) -> bool:
        """Whether it is given how many bytes anything takes."""
        return bool(self._given(_BYTES))

    @property
    def differ_by_microbatch(self) -> bool:
        """Whether some op takes longer for one microbatch, or slice, than for another, or more
        memory.
        """
        return self._have_lists(_BY_UNIT)

    def _have_lists(self, names: Iterable[str]) -> bool:
        """Whether some of these costs have a list with one for each microbatch."""
        return any(
            _has_lists(getattr(self, name)) for name in self._given(tuple(names))
        )

    @cached_property
    def fixed_times(self) -> FixedPoint:
        """The common denominator of all times; none where components or bandwidths make them."""
        if self.components is not None or self._given(_BANDWIDTHS):
            return ANY
        given = self._leaves((*_TIMES, *_BESIDE, *_LATENCIES))
        if self.input_times is None or self.weight_times is None:
            # Each half that is not given is half of a whole backward.
            given |= set(map(half, self._leaves(("backward_times",))))
        return fixed_point(given)

    @cached_property
    def fixed_memory(self) -> FixedPoint:
        """The common denominator of all amounts of memory."""
        return fixed_point(self._leaves(_MEMORY))

    @cached_property
    def fixed_bytes(self) -> FixedPoint:
        """The common denominator of all amounts of bytes, and of capacities."""
        return fixed_point(self._leaves((*_BYTES, "capacity_bytes")))

    def _leaves(self, names: Sequence[str]) -> set[Any]:
        """The numbers that some costs are given with."""
        found: set[Any] = set()
        for name in self._given(names):
            values = getattr(self, name)
            found.update(_leaves(values if isinstance(values, tuple) else (values,), 3))
        return found

    def check(self, layout: Layout | int) -> None:
        """ValueError where what is given per stage, microbatch, slice or rank is not for those of a
        layout; or per stage, not for so many stages.
        """
        self.durations(layout)
        stages = layout if isinstance(layout, int) else len(layout.placement)
        if not isinstance(layout, int):
            self._check_ranks(max(layout.placement) + 1)
        self.transfers(stages)
        self.sums(stages)
        self.gathers(stages)
        self.memory(layout)
        self.bytes(layout)
        self.bytes_of_weights(stages)

    def _check_ranks(self, ranks: int) -> None:
        """ValueError where what is given per rank is not for so many ranks."""
        if self.link_times is not None and len(self.link_times) != ranks:
            raise WrongNumber(
                f"`link_times` are for {len(self.link_times)} ranks, there are {ranks}"
            )
        self.capacities(ranks)

    def _check_measured(self, stages: int) -> None:
        """ValueError where they were measured on another number of stages than there are."""
        measured = self.measured_stages
        if measured in (None, stages):
            return
        missing = range(measured, stages)
        message = f"{counted(measured, 'stage')} measured, there are {stages}"
        if missing:
            absent = (
                f"stage{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            )
            message += f": no op of {absent}; each rank has a trace of its own, give all of them"
        raise WrongNumber(message)

    def durations(self, layout: Layout | int) -> Durations:
        """How long compute actions take in a layout, or on each of so many stages if they are alike
        for all microbatches; ValueError for a wrong number of values.
        """
        by_unit = _TIMES_BY_UNIT | (
            _BYTES_BY_UNIT if self._goes_by_link(layout) else frozenset()
        )
        tables = self._tables(by_unit, layout)
        stages = tables.stages
        self._check_measured(stages)

        def spread(name: str, values: Any, default: Floats) -> Floats:
            return tables.spread(f"durations of {name}", values, default)

        # Columns of one number for each stage, or tables with one for each of its microbatches.
        ones = np.ones((stages, 1))
        forward = spread("`F`", self.forward_times, ones)
        # A half takes half of a whole backward, and a whole one as long as its halves.
        half = spread("`B`", self.backward_times, 2 * ones) / 2
        input = spread("`I`", self.input_times, half)
        weight = spread("`W`", self.weight_times, half)
        offload = spread(
            "`offload`", self.offload_times, self._to_keepers(tables, forward)
        )
        takes: dict[int, Floats] = {
            Kind.F: forward,
            Kind.B: spread("`B`", self.backward_times, input + weight),
            Kind.I: input,
            Kind.W: weight,
            Kind.R: spread("`R`", self.recompute_times, forward),
            Kind.U: spread("`U`", self.update_times, 0 * ones),
            Kind.OFFLOAD: offload,
            Kind.RELOAD: spread("`reload`", self.reload_times, offload),
            Kind.RESHARD: 0 * ones,
        }
        takes |= dict.fromkeys(
            (kind for kind, op in OPS.items() if op.cost == "gather"),
            np.array(self.gathers(stages))[:, np.newaxis],
        )
        takes |= dict.fromkeys(
            (kind for kind, op in OPS.items() if op.cost == "sum"),
            np.array(self.sums(stages))[:, np.newaxis],
        )
        if not isinstance(layout, int) and layout.frozen:
            # A backward that does nothing takes no time.
            takes[Kind.I] = input * np.array(layout.has_backward)[:, np.newaxis]
        overlap = _spread("durations of overlaps", self.overlap_times, [0.0] * stages)
        return Durations(
            *tables.numbers(takes, self.fixed_times),
            None if self.overlap_times is None else overlap,
            by_kind(self.components),
        )

    def _tables(self, names: Iterable[str], layout: Layout | int) -> "_Tables":
        """What makes tables of some costs; ValueError where they differ by microbatch, and there is
        no layout.
        """
        stages = layout if isinstance(layout, int) else len(layout.placement)
        units = np.ones(stages, np.int64)
        if self._have_lists(names):
            if isinstance(layout, int):
                raise ValueError(
                    "the costs differ by microbatch: they are for a layout"
                )
            units = np.array(list(map(layout.units_of_update, range(stages))), np.int64)
        return _Tables(layout, stages, units)

    def _goes_by_link(self, layout: Layout | int) -> bool:
        """Whether what is copied to a rank that keeps it takes as long as its bytes by the link."""
        bandwidths = self._given(_BANDWIDTHS)
        has_keepers = not isinstance(layout, int) and bool(layout.keepers)
        return has_keepers and bool(bandwidths) and self.activation_bytes is not None

    def _to_keepers(self, tables: "_Tables", forward: Floats) -> Floats:
        """How long a copy of activations takes on each stage where nobody says so: as long as a
        forward; to a rank that keeps them, as long as their bytes take by the link to it, where
        both are given.
        """
        layout = tables.layout
        if isinstance(layout, int) or not self._goes_by_link(layout):
            return forward
        transfers = self.transfers(tables.stages)
        sizes = tables.spread("`activation_bytes`", self.activation_bytes, forward)
        times = [
            [transfers.time_of(size, rank, layout.keepers[rank]) for size in of_stage]
            for of_stage, rank in zip(sizes.tolist(), layout.placement, strict=True)
        ]
        return np.array(times)

    def every_duration(self, layout: Layout | int) -> dict[str, list[float]]:
        """How long everything takes on each stage, given or not, by what costs call it, such as
        `forward`, on average over its microbatches; `overlap` only if it is given.
        """
        durations = self.durations(layout)
        by_name = {name: durations[kind] for kind, name in COST_OF.items()}
        if durations.overlap is not None:
            by_name["overlap"] = durations.overlap
        return by_name

    def faster(
        self, name: str, stage: int, layout: Layout | int, factor: float
    ) -> "Costs":
        """The costs if something, such as `forward`, took `factor` times as long on a stage."""
        durations = self.durations(layout)
        changed: dict[str, Any] = {}
        for cost, means in self.every_duration(layout).items():
            values: list[Any] = list(means)
            kind = _KIND_OF.get(cost)
            if kind in durations.by_unit and not isinstance(layout, int):
                rows = zip(
                    durations.by_unit[kind], durations.units.tolist(), strict=True
                )
                values = [_nested(row[:length], layout.slices) for row, length in rows]
            if cost == name:
                values[stage] = _scaled(values[stage], factor)
            changed[f"{cost}_times"] = tuple(values)
        return evolve(self, **changed)

    def transfers(self, stages: int) -> Transfers:
        """How long transfers take; ValueError for a wrong number of sizes."""
        latency = float(self.latency_in_node or self.p2p_time or 0)
        bandwidth = self.bandwidth_in_node or inf
        # What is not said of links between nodes is as inside one.
        latency_between = self.latency_between_nodes
        if latency_between is None:
            latency_between = latency
        bandwidth_between = self.bandwidth_between_nodes or bandwidth
        sizes = _spread("`boundary_bytes`", self.boundary_bytes, [0.0] * stages)
        return Transfers(
            (latency, latency_between),
            (bandwidth, bandwidth_between),
            tuple(sizes),
            self.ranks_per_node,
            self.link_times,
        )

    def sums(self, stages: int) -> list[float]:
        """How long the sum of each stage's gradients over its replicas takes; ValueError for a
        wrong number of values.
        """
        return _spread("times of sums", self.sum_times, [0.0] * stages)

    def gathers(self, stages: int) -> list[float]:
        """How long a gather of each stage's weights takes; ValueError as above."""
        return _spread("times of gathers", self.gather_times, [0.0] * stages)

    def memory(self, layout: Layout | int) -> Amounts:
        """For each kind of compute action, what it adds to the memory of its rank, in a layout, or
        on each of so many stages that are trained; ValueError as above.

        A forward whose activations are dropped adds its amount only while it runs.
        """
        tables = self._tables(_MEMORY_BY_UNIT, layout)
        ones = np.ones((tables.stages, 1))
        forward = tables.spread("memories of `F`", self.forward_memory, ones)
        input = tables.spread("memories of `I`", self.input_memory, 0 * ones)
        # By default, the last use gives back all that there is.
        backward = tables.spread("memories of `B`", self.backward_memory, -forward)
        weight = tables.spread("memories of `W`", self.weight_memory, -forward - input)
        gathered = tables.spread("memories of gathers", self.gather_memory, 0 * ones)
        return tables.changes(
            forward, backward, input, weight, gathered, self.fixed_memory
        )

    def bytes(self, layout: Layout | int) -> Amounts | None:
        """For each kind of compute action, the bytes that it adds to its rank, as above; None if
        none are given.

        ValueError as above.
        """
        if not self.gives_bytes:
            return None
        tables = self._tables(_BYTES_BY_UNIT, layout)
        zeros = np.zeros((tables.stages, 1))
        held = tables.spread("`activation_bytes`", self.activation_bytes, zeros)
        kept = tables.spread("`kept_bytes`", self.kept_bytes, held)
        gathered = tables.spread("`gathered_bytes`", self.gathered_bytes, zeros)
        return tables.changes(
            held, -held, kept - held, -kept, gathered, self.fixed_bytes
        )

    def bytes_of_weights(self, stages: int) -> list[float]:
        """What one version of each stage's weights takes; ValueError as above."""
        return _spread("`weights_bytes`", self.weights_bytes, [0.0] * stages)

    def capacities(self, ranks: int) -> list[float] | None:
        """The bytes that each rank has room for; None if none are given, ValueError for a wrong
        number.
        """
        given = self.capacity_bytes
        if given is None:
            return None
        if len(given) not in (1, ranks):
            raise WrongNumber(
                f"{len(given)} `capacity_bytes` are given, there are {ranks} ranks"
            )
        return list(map(float, given)) * (ranks if len(given) == 1 else 1)

    def to_json(self) -> dict[str, Any]:
        """What is given, as a file has it."""
        given = {name: getattr(self, name) for name in self._given(NAMES)}
        numbers = {
            name: value if type(value) is int else _as_json(value)
            for name, value in given.items()
        }
        return numbers | (
            {} if self.components is None else {"components": as_json(self.components)}
        )

    def __repr__(self) -> str:
        given = [f"{name}={shown(getattr(self, name))}" for name in self._given(NAMES)]
        if self.components is not None:
            given.append(f"components={as_json(self.components)}")
        return f"Costs({', '.join(given)})"


#: The names of what can be given as numbers, here and in a file; times can also be given at a
#: command. Beside them there are `components`.
NAMES = tuple(
    attribute.name
    for attribute in fields(Costs)
    if attribute.name not in ("components", "measured_stages")
)
#: The costs that leave everything open: unit costs.
UNIT = Costs()


def check_costs(costs: Any) -> None:
    """TypeError unless an argument is costs."""
    check_type("costs", costs, Costs, "Costs, such as Costs(p2p_time=0.1)")


def gives_back(name: str) -> bool:
    """Whether a cost may be below 0: an op may give memory back. A gather may not, whose drop does
    so, and nothing takes less than no time.
    """
    return name in _MEMORY_BY_UNIT


def _check_values(name: str, values: Any) -> None:
    """Whether the values of a cost, one for all stages or one per stage, are numbers that can be
    costs; or of some costs lists of these.
    """
    depth = 3 if name in _BY_UNIT else 2 if name == "link_times" else 1
    numbers = list(_leaves(values, depth)) if isinstance(values, tuple) else None
    if numbers is None or not all(map(_is_number, set(map(type, numbers)))):
        wanted = "numbers, one for all stages or one for each, such as (1.0,)"
        raise TypeError(f"`{name}` is {shown(values)}: it must be {wanted}")
    least = -_MOST if gives_back(name) else 0
    if not numbers or not all(least <= value <= _MOST for value in numbers):
        raise ValueError(
            f"`{name}` must be numbers from {least:g} to {_MOST:g}, not {shown(values)}"
        )


def _is_number(kind: type[Any]) -> bool:
    """Whether a cost may be of a type; fractions are exact costs."""
    return kind is not bool and issubclass(kind, (float, Rational))


def _leaves(values: tuple[Any, ...], depth: int) -> Iterator[Any]:
    """What stands in a list, or in lists of so many levels."""
    for value in values:
        if isinstance(value, tuple) and depth > 1 and value:
            yield from _leaves(value, depth - 1)
        else:
            yield value


def _as_json(value: Any) -> Any:
    """A number, or all numbers of nested tuples in lists."""
    return list(map(_as_json, value)) if isinstance(value, tuple) else float(value)


def _has_lists(values: tuple[Any, ...]) -> bool:
    """Whether some value is a list with one for each microbatch."""
    return any(isinstance(value, tuple) for value in values)


def _check_matrix(rows: Any) -> None:
    """Whether the times of links are a square."""
    for row in rows:
        if not isinstance(row, tuple) or len(row) != len(rows):
            raise ValueError(
                f"`link_times` must have a row for each rank, with a number for each rank: it has "
                f"{len(rows)} rows, and one of them is {shown(row)}"
            )


def _check_single(name: str, value: Any) -> None:
    """Whether the one number of a cost can be one."""
    if name == "ranks_per_node":
        check_whole(name, value, least=1)
        return
    check_number(name, value)
    least = 1 / _MOST if name.startswith("bandwidth") else 0
    if not least <= value <= _MOST:
        raise ValueError(
            f"`{name}` is {value:g}: it must be a number from {least:g} to {_MOST:g}"
        )


@frozen
class _Tables:
    """Makes tables with a row for each stage: one number for all microbatches, or one for each of
    its `units` in an update.
    """

    layout: Layout | int
    stages: int
    units: Ints

    def spread(self, what: str, values: Any, default: Floats) -> Floats:
        """The table of what is given; ValueError for a wrong number of values."""
        if values is None:
            return default
        if isinstance(self.layout, int) or not _has_lists(values):
            alike = _spread(what, values, [0.0] * self.stages)
            return np.array(alike, np.float64)[:, np.newaxis]
        return _by_unit(what, values, self.layout, self.units)

    def changes(
        self,
        forward: Floats,
        backward: Floats,
        input: Floats,
        weight: Floats,
        gathered: Floats,
        fixed: FixedPoint,
    ) -> Amounts:
        """What each kind of op adds to memory: a recomputation or a copy back what the forward did;
        and a gather until its end.
        """
        if not isinstance(self.layout, int) and self.layout.frozen:
            # Where a stage is frozen no `W` follows, so an `I` gives back all that a whole backward
            # does; or nothing, where nothing is kept for it.
            stages = range(self.stages)
            trains = np.array([self.layout.trains(each) for each in stages])[
                :, np.newaxis
            ]
            has_backward = np.array(self.layout.has_backward)[:, np.newaxis]
            input = np.where(trains, input, np.where(has_backward, backward, 0.0))
        amounts = {kind: op.holds * forward for kind, op in OPS.items()}
        amounts |= {
            Kind.UNSHARD: gathered,
            Kind.RECV_WEIGHTS: gathered,
            Kind.RESHARD: -gathered,
        }
        amounts |= {Kind.B: backward, Kind.I: input, Kind.W: weight}
        return Amounts(*self.numbers(amounts, fixed))

    def numbers(
        self, tables: dict[int, Floats], fixed: FixedPoint
    ) -> tuple[dict[int, list[float]], dict[int, Floats], Ints, FixedPoint]:
        """The tables as `Amounts` have them."""
        if fixed.scale > 1:
            # Some are sums, such as a backward of its halves.
            tables = {
                kind: fixed.numbers(fixed.counts(table))
                for kind, table in tables.items()
            }
        means = {kind: _means(table, self.units) for kind, table in tables.items()}
        by_unit = {kind: table for kind, table in tables.items() if table.shape[1] > 1}
        return means, by_unit, self.units, fixed


def _spread(what: str, values: _Values, default: list[float]) -> list[float]:
    """One value per stage."""
    if values is None:
        return default
    return list(map(float, _of_stages(what, values, len(default))))


def _of_stages(what: str, values: tuple[T, ...], stages: int) -> tuple[T, ...]:
    """The value of each stage, where there may be one for all."""
    if len(values) not in (1, stages):
        raise WrongNumber(f"{len(values)} {what} are given, there are {stages} stages")
    return values * (stages if len(values) == 1 else 1)


def _by_unit(what: str, values: tuple[Any, ...], layout: Layout, units: Ints) -> Floats:
    """A row for each stage with a value for each of its microbatches in an update, or slices of
    these; what a row has too many is not a number.
    """
    table = np.full((len(units), int(units.max())), np.nan)
    for stage, value in enumerate(_of_stages(what, values, len(units))):
        microbatches = int(units[stage]) // layout.slices
        row = value if isinstance(value, tuple) else (value,) * microbatches
        if len(row) != microbatches:
            raise WrongNumber(
                f"{len(row)} {what} are given for the microbatches of stage {stage}, there are "
                f"{microbatches}"
            )
        for microbatch, entry in enumerate(row):
            of_slices = entry if isinstance(entry, tuple) else (entry,)
            if len(of_slices) not in (1, layout.slices):
                raise WrongNumber(
                    f"{len(of_slices)} {what} are given for the slices of microbatch {microbatch} "
                    f"on stage {stage}, there are {layout.slices}"
                )
            first = microbatch * layout.slices
            table[stage, first : first + layout.slices] = of_slices
    return table


def _means(table: Floats, units: Ints) -> list[float]:
    """The mean of each row, over as many values as it has."""
    if table.shape[1] == 1:
        means: list[float] = table[:, 0].tolist()
        return means
    return [
        float(row[:length].mean()) for row, length in zip(table, units, strict=True)
    ]


def _nested(row: Floats, slices: int) -> tuple[Any, ...]:
    """The values of a stage's microbatches, and slices, as `Costs` has them."""
    if slices == 1:
        return tuple(row.tolist())
    return tuple(map(tuple, row.reshape(-1, slices).tolist()))


def _scaled(value: Any, factor: float) -> Any:
    """A number, or all numbers in nested tuples, times a factor."""
    if isinstance(value, tuple):
        return tuple(_scaled(each, factor) for each in value)
    return value * factor
