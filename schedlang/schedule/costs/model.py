"""What actions cost: how long they take, and what they add to the memory of their rank."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, wraps
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
from attrs import Attribute, evolve, field, fields, frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.diagnostics.wrong_arguments import check_type, shown
from schedlang.schedule.arrays import Floats
from schedlang.schedule.costs.cost_tables import (
    Amounts,
    Durations,
    Tables,
    WrongNumber,
    has_lists,
    spread,
)
from schedlang.schedule.costs.fields import (
    Cost,
    bandwidth,
    cost,
    leaves,
    memory_of,
    time_of,
)
from schedlang.schedule.costs.transfers import Transfers
from schedlang.schedule.fixed_point import ANY, FixedPoint, fixed_point, half
from schedlang.schedule.kinds import INPUT_HALVES, OPS, Kind
from schedlang.schedule.layout import Layout

if TYPE_CHECKING:
    from schedlang.schedule.costs.component_costs import Components

T = TypeVar("T")

# Whatever is given, a field has tuples.
_Values = Sequence[float] | None
#: The same, where there may be a number for each microbatch or slice.
_UnitValues = Sequence[float | Sequence[float | Sequence[float]]] | None
_Matrix = Sequence[Sequence[float]] | None


def _components(given: Any) -> Any:
    # Loaded by plans with components alone.
    if given is None:
        return None
    from schedlang.schedule.costs.component_costs import components_of

    return components_of(given)


def _with_added_kinds(_: type, known: list["Attribute[Any]"]) -> list["Attribute[Any]"]:
    """The fields of `Costs`, and for each added kind of op a duration and an amount of memory. By
    default the duration is that of a forward, and the row of the kind says the memory.
    """
    by_name = {each.name: each for each in known}
    added = []
    for op in OPS.values():
        if op.cost and f"{op.cost}_times" not in by_name:
            for what, default in (("times", "forward_times"), ("memory", None)):
                like = by_name[f"forward_{what}"]
                about = evolve(
                    like.metadata["cost"],
                    called=like.metadata["cost"].called.replace("F", op.word),
                    default=default,
                )
                name = f"{op.cost}_{what}"
                metadata = {"cost": about}
                added.append(like.evolve(name=name, alias=name, metadata=metadata))
    return [*known, *added]


def _remembered(
    find: Callable[["Costs", Layout | int], T],
) -> Callable[["Costs", Layout | int], T]:
    """Let costs remember the result of a method for the layout that it was asked for last: a
    compilation asks again at each of its steps.
    """

    @wraps(find)
    def of_last(costs: "Costs", layout: Layout | int) -> T:
        last, found = costs._last.get(find, (None, None))
        if last is not layout:
            found = find(costs, layout)
            costs._last[find] = layout, found
        return cast(T, found)

    return of_last


@frozen(repr=False, field_transformer=_with_added_kinds)
class Costs:
    """How long ops and transfers take, and what they hold.

    A cost is a sequence with one number for all stages, or with one for each stage. None means not
    given; the comments of the fields say what stands in for it. If an op's time or memory differs
    by microbatch, the entry of a stage is a sequence with a number for each microbatch of its
    pipeline; with slices, the entry of a microbatch is a sequence with a number for each slice.

    Times have any unit, the same for all, and so have the times of simulations. Memory has a unit
    of its own. Bytes are bytes, and a bandwidth is bytes per unit of time. The names are those of
    files and options (docs/costs.md). TypeError for what is no number; ValueError for a time below
    0, for NaN and infinity, and for costs that contradict each other.
    """

    # How long ops take. Without, they have the unit costs of the pipeline papers: a forward is 1, a
    # whole backward 2 or its halves together, and a half of it half of that.
    forward_times: _UnitValues = time_of("`F`", 1.0)
    backward_times: _UnitValues = time_of("`B`", 2.0, together="backward")
    input_times: _UnitValues = time_of("`I`", "backward_times", together="backward")
    weight_times: _UnitValues = time_of("`W`", "backward_times", together="backward")
    recompute_times: _UnitValues = time_of("`R`", "forward_times")
    update_times: _Values = cost("time", "stage", "durations of `U`")
    #: A copy to a rank that keeps what is away takes as long as its bytes, where they are given.
    offload_times: _UnitValues = time_of("`offload`", "forward_times")
    reload_times: _UnitValues = time_of("`reload`", "offload_times")
    #: Exchanges of what a stage takes; without, they take no time.
    exchange_times: _UnitValues = time_of("`exchange F`")
    exchange_back_times: _UnitValues = time_of("`exchange B`", "exchange_times")
    #: Ops that `overlap`, together; without, as long as one after the other.
    overlap_times: _Values = cost(
        "time", "stage", "durations of overlaps", together="overlap"
    )
    #: Instead: for kinds of ops, their components in order, as `{"F": ["attention 2 compute", …]}`;
    #: two ops that overlap take what these take where they fit together best (docs/costs.md).
    components: "Components | None" = field(default=None, converter=_components)

    #: The sum of a stage's gradients over its replicas, and the gather of its sharded weights.
    sum_times: _Values = cost("time", "stage", "times of sums")
    gather_times: _Values = cost("time", "stage", "times of gathers")

    # How long a transfer between ranks takes: `p2p_time`; or by `link_times`, a row for each rank
    # that sends, with a number for each that receives; or what its link makes of its size, see
    # `Transfers`; without any, 0.
    p2p_time: float | None = cost("latency", "number")
    link_times: _Matrix = cost("latency", "link")
    boundary_bytes: _Values = cost("size", "stage")
    #: The part of `boundary_bytes` that is sent, where messages are rounded; without, all.
    sent_share: float | None = cost("size", "number", together="share")
    ranks_per_node: int | None = cost("link", "whole")
    latency_in_node: float | None = cost("latency", "number")
    bandwidth_in_node: float | None = bandwidth()
    latency_between_nodes: float | None = cost("latency", "number")
    bandwidth_between_nodes: float | None = bandwidth()

    # What an op adds to what its rank holds. Without, the last use, a weight half or a whole
    # backward, gives back what there is.
    forward_memory: _UnitValues = memory_of("`F`", 1.0)
    backward_memory: _UnitValues = memory_of("`B`", None)
    input_memory: _UnitValues = memory_of("`I`")
    weight_memory: _UnitValues = memory_of("`W`", None)
    #: A message between stages takes it from its buffer on; without, nothing.
    message_memory: _Values = cost("memory", "stage", "memories of messages")
    #: A gather adds it, and the end of the gathered weights gives it back.
    gather_memory: _Values = cost("memory", "stage", "memories of gathers")

    # Bytes are counted where they are given: those of an activation from the forward to the last
    # use, of which some are kept from an input half to its weight half; those of each version of a
    # stage's weights; and with these, `boundary_bytes` of each message between stages.
    activation_bytes: _UnitValues = cost("bytes", "unit", together="activation")
    kept_bytes: _UnitValues = cost(
        "bytes", "unit", default="activation_bytes", together="activation"
    )
    weights_bytes: _Values = cost("bytes", "stage")
    gathered_bytes: _Values = cost("bytes", "stage")
    #: What a rank has room for; without, as much as it needs.
    capacity_bytes: _Values = cost("room", "rank")

    #: The number of stages that a run was measured on: none of its numbers stands for other stages.
    measured_stages: int | None = field(default=None, eq=False)

    def __attrs_post_init__(self) -> None:
        """TypeError for what is no number, ValueError for one that cannot be a cost, and for costs
        that do not go together.
        """
        for name in self._given():
            COSTS[name].check(name, getattr(self, name))
        transfers = self._given("latency", "bandwidth", "link")
        for name, says in (
            ("link_times", "are the times of all transfers, `{}` says others"),
            ("p2p_time", "is the time of every transfer, `{}` says that they differ"),
        ):
            others = [other for other in transfers if other != name]
            if name in transfers and others:
                raise ValueError(f"`{name}` {says.format(others[0])}")
        if self._given("bandwidth") and self.boundary_bytes is None:
            raise ValueError(
                "a bandwidth needs `boundary_bytes`: transfers take bytes / bandwidth"
            )
        if self.ranks_per_node is None and not (
            self.latency_between_nodes is self.bandwidth_between_nodes is None
        ):
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

    def _given(self, *groups: str) -> list[str]:
        """The names of the costs that are given, of all groups or of some."""
        return [
            name
            for name, about in COSTS.items()
            if getattr(self, name) is not None and (about.group in groups or not groups)
        ]

    def over(self, others: "Costs") -> "Costs":
        """These costs, with the others where these leave something open."""
        chosen: dict[str, Any] = {}
        for names in _TOGETHER.values():
            mine = any(getattr(self, name) is not None for name in names)
            chosen |= {name: getattr(self if mine else others, name) for name in names}
        measured = self.measured_stages or others.measured_stages
        return Costs(**chosen, measured_stages=measured)

    @property
    def gives_times(self) -> bool:
        """Whether any duration is given."""
        given = self._given("time", "latency", "bandwidth", "link")
        return bool(given) or self.components is not None

    @property
    def gives_memory(self) -> bool:
        """Whether any amount of memory is given."""
        return bool(self._given("memory"))

    @property
    def gives_bytes(self) -> bool:
        """Whether it is given how many bytes anything takes."""
        return bool(self._given("bytes"))

    @property
    def differ_by_microbatch(self) -> bool:
        """Whether some op takes longer for one microbatch, or slice, than for another, or more
        memory.
        """
        return self._have_lists("time", "memory", "bytes")

    def _have_lists(self, *groups: str) -> bool:
        """Whether some costs of these groups have a list with one for each microbatch."""
        return any(has_lists(getattr(self, name)) for name in self._given(*groups))

    @cached_property
    def _last(self) -> dict[Callable[..., Any], tuple[Layout | int, Any]]:
        """By method of these costs: the layout that it was asked for last, and the result."""
        return {}

    @cached_property
    def fixed_times(self) -> FixedPoint:
        """The common denominator of all times; none if components or bandwidths determine them."""
        if self.components is not None or self._given("bandwidth"):
            return ANY
        given = self._numbers(self._given("time", "latency"))
        if self.input_times is None or self.weight_times is None:
            # Each half that is not given is half of a whole backward.
            given |= set(map(half, self._numbers(["backward_times"])))
        return fixed_point(given)

    @cached_property
    def fixed_memory(self) -> FixedPoint:
        """The common denominator of all amounts of memory."""
        return fixed_point(self._numbers(self._given("memory")))

    @cached_property
    def fixed_bytes(self) -> FixedPoint:
        """The common denominator of all amounts of bytes, and of capacities."""
        return fixed_point(self._numbers(self._given("bytes", "size", "room")))

    def _numbers(self, names: Iterable[str]) -> set[Any]:
        """The numbers that some costs are given with."""
        values = [getattr(self, name) for name in names]
        return {
            number for each in values if each is not None for number in leaves(each)
        }

    def check(self, layout: Layout | int) -> None:
        """ValueError for costs whose numbers of stages, microbatches, slices or ranks are not those
        of a layout; or whose number of stages is not the given one.
        """
        self.durations(layout)
        stages = layout if isinstance(layout, int) else len(layout.placement)
        if not isinstance(layout, int):
            self._check_ranks(max(layout.placement) + 1)
        self.transfers(stages)
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

    @_remembered
    def durations(self, layout: Layout | int) -> Durations:
        """The durations of ops in a layout; or on so many stages, if they do not differ by
        microbatch. ValueError for a wrong number of values.
        """
        is_by_link = self._goes_by_link(layout)
        groups = ("time", "bytes") if is_by_link else ("time",)
        tables = Tables.of(layout, self._have_lists(*groups))
        self._check_measured(tables.stages)
        # A half takes half of a whole backward, and a whole one as long as its halves.
        takes = self._tables(tables, "time")
        for name in ("input_times", "weight_times"):
            if getattr(self, name) is None:
                takes[name] = takes[name] / 2
        if self.backward_times is None:
            takes["backward_times"] = takes["input_times"] + takes["weight_times"]
        if is_by_link and self.offload_times is None:
            takes["offload_times"] = self._to_keepers(tables, takes["forward_times"])
            if self.reload_times is None:
                takes["reload_times"] = takes["offload_times"]
        no_time = np.zeros((tables.stages, 1))
        by_kind = {
            kind: takes[f"{op.cost}_times"] if op.cost else no_time
            for kind, op in OPS.items()
        }
        if not isinstance(layout, int) and layout.frozen:
            # A backward that does nothing takes no time.
            for kind in INPUT_HALVES:
                has_backward = np.array(layout.has_backward)[:, np.newaxis]
                by_kind[kind] = by_kind[kind] * has_backward
        overlap = takes["overlap_times"][:, 0].tolist()
        return Durations(
            *tables.numbers(by_kind, self.fixed_times),
            None if self.overlap_times is None else overlap,
            {Kind[kind]: each for kind, each in self.components or ()},
        )

    def _tables(self, tables: Tables, group: str) -> dict[str, Floats]:
        """A table of each cost of a group that is given, or has a default."""
        found: dict[str, Floats] = {}
        for name, about in COSTS.items():
            values = getattr(self, name)
            if about.group != group or (values is None and about.default is None):
                continue
            if isinstance(about.default, str):
                default = found[about.default]
            else:
                default = np.full((tables.stages, 1), about.default, np.float64)
            found[name] = tables.spread(_called(name), values, default)
        return found

    def _goes_by_link(self, layout: Layout | int) -> bool:
        """Whether the time of copies to keeping ranks follows from bytes and links."""
        has_keepers = not isinstance(layout, int) and bool(layout.keepers)
        has_sizes = self.activation_bytes is not None
        return has_keepers and has_sizes and bool(self._given("bandwidth"))

    def _to_keepers(self, tables: Tables, forward: Floats) -> Floats:
        """The durations of copies to the ranks that keep activations, by their bytes."""
        assert not isinstance(tables.layout, int)
        layout = tables.layout
        transfers = self.transfers(tables.stages)
        sizes = tables.spread(
            _called("activation_bytes"), self.activation_bytes, forward
        )
        times = [
            [transfers.time_of(size, rank, layout.keepers[rank]) for size in of_stage]
            for of_stage, rank in zip(sizes.tolist(), layout.placement, strict=True)
        ]
        return np.array(times)

    def every_duration(self, layout: Layout | int) -> dict[str, list[float]]:
        """All durations by stage, given or by default, under the names of the costs, such as
        `forward`; a mean where they differ by microbatch. `overlap` only if it is given.
        """
        durations = self.durations(layout)
        by_name = {name: durations[kind] for name, kind in KIND_OF.items()}
        if durations.overlap is not None:
            by_name["overlap"] = durations.overlap
        return by_name

    @property
    def are_of_any_stage(self) -> bool:
        """Whether ops take as long on every stage: no duration has a list with a number for each,
        nor was any measured.
        """
        given = [getattr(self, name) for name in self._given("time")]
        is_for_stages = self.components is not None or self.measured_stages is not None
        has_lists = self._have_lists("time") or any(len(each) > 1 for each in given)
        return not has_lists and not is_for_stages

    def transfers(self, stages: int) -> Transfers:
        """The times of transfers. ValueError for a wrong number of sizes."""
        latency = float(self.latency_in_node or self.p2p_time or 0)
        bandwidth = self.bandwidth_in_node or inf
        # What is not said of links between nodes is as inside one.
        latency_between = self.latency_between_nodes
        if latency_between is None:
            latency_between = latency
        bandwidth_between = self.bandwidth_between_nodes or bandwidth
        share = 1.0 if self.sent_share is None else self.sent_share
        return Transfers(
            (latency, latency_between),
            (bandwidth, bandwidth_between),
            tuple(share * size for size in self._of_stages("boundary_bytes", stages)),
            self.ranks_per_node,
            self.link_times,
        )

    def _of_stages(self, name: str, stages: int) -> list[float]:
        """A number for each stage, by default 0; ValueError for a wrong number of them."""
        return spread(_called(name), getattr(self, name), [0.0] * stages)

    def sums(self, stages: int) -> list[float]:
        """For each stage the duration of the sum of its gradients over replicas. ValueError for a
        wrong number of values.
        """
        return self._of_stages("sum_times", stages)

    def gathers(self, stages: int) -> list[float]:
        """For each stage the duration of a gather of its weights. ValueError as above."""
        return self._of_stages("gather_times", stages)

    def bytes_of_weights(self, stages: int) -> list[float]:
        """For each stage the bytes of one version of its weights. ValueError as above."""
        return self._of_stages("weights_bytes", stages)

    @_remembered
    def memory(self, layout: Layout | int) -> Amounts:
        """What each kind of op adds to the memory of its rank, in a layout; or on so many stages
        that are all trained. ValueError as above.

        A forward that is recomputed adds its amount only while it runs.
        """
        tables = Tables.of(layout, self._have_lists("memory"))
        given = self._tables(tables, "memory")
        adds = {name.removesuffix("_memory"): each for name, each in given.items()}
        # By default, the last use gives back all that there is.
        adds.setdefault("backward", -adds["forward"])
        adds.setdefault("weight", -adds["forward"] - adds["input"])
        messages = adds["message"][:, 0].tolist()
        return _changes(tables, adds, messages, self.fixed_memory)

    def bytes(self, layout: Layout | int) -> Amounts | None:
        """The bytes that each kind of op adds to its rank, as above; None if no bytes are given."""
        if not self.gives_bytes:
            return None
        tables = Tables.of(layout, self._have_lists("bytes"))
        given = self._tables(tables, "bytes")
        held = given["activation_bytes"]
        kept = given["kept_bytes"]
        adds = {
            "forward": held,
            "backward": -held,
            "input": kept - held,
            "weight": -kept,
            "gather": given["gathered_bytes"],
        }
        messages = self._of_stages("boundary_bytes", tables.stages)
        return _changes(tables, adds, messages, self.fixed_bytes)

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
        """The costs that are given, as a file has them."""
        given = {name: getattr(self, name) for name in self._given()}
        numbers = {
            name: value if type(value) is int else _as_json(value)
            for name, value in given.items()
        }
        return numbers | self._components_json

    @property
    def _components_json(self) -> dict[str, Any]:
        """The components as a file has them, if there are any."""
        if self.components is None:
            return {}
        lists = {kind: list(map(str, each)) for kind, each in self.components}
        return {"components": lists}

    def __repr__(self) -> str:
        given = {name: shown(getattr(self, name)) for name in self._given()}
        arguments = [f"{name}={value}" for name, value in given.items()]
        arguments += [
            f"{name}={value}" for name, value in self._components_json.items()
        ]
        return f"Costs({', '.join(arguments)})"


#: What can be given as numbers, here and in a file; times can also be given at a command. Beside
#: them there are `components`.
COSTS: dict[str, Cost] = {
    each.name: each.metadata["cost"] for each in fields(Costs) if each.metadata
}
#: The names of costs that depend on each other: who gives one of them gives all.
_TOGETHER = dict[str, list[str]]()
for _name, _cost in COSTS.items():
    _TOGETHER.setdefault(_cost.depends_on or _name, []).append(_name)
_TOGETHER["overlap"].append("components")
#: The kind of op that has a duration, by what `Costs` call it: that of a `forward` is in
#: `forward_times`.
KIND_OF = {op.cost: kind for kind, op in OPS.items() if not op.is_collective}
#: The costs that leave everything open: unit costs.
UNIT = Costs()


def unit_costs() -> Costs:
    """The costs that leave everything open."""
    return UNIT


def check_costs(costs: Any) -> None:
    """TypeError unless an argument is costs."""
    check_type("costs", costs, Costs, "Costs, such as Costs(p2p_time=0.1)")


def _called(name: str) -> str:
    """The name of a cost in messages."""
    return COSTS[name].called or f"`{name}`"


def _changes(
    tables: Tables, adds: dict[str, Floats], messages: list[float], fixed: FixedPoint
) -> Amounts:
    """What messages take, and what each kind of op adds to memory: the amount that is given, or
    else what a forward adds, times what the op's row says. The end of gathered weights gives back
    what the gather added.
    """
    signs = {"bring": 1, "drop": -1}
    amounts = {
        kind: signs.get(op.weights, 0) * adds["gather"]
        if op.is_of_stage
        else adds.get(op.cost, op.holds * adds["forward"])
        for kind, op in OPS.items()
    }
    layout = tables.layout
    if not isinstance(layout, int) and layout.frozen:
        # Where a stage is frozen no `W` follows, so an `I` gives back all that a whole backward
        # does; or nothing, where nothing is kept for it.
        stages = range(tables.stages)
        trains = np.array([layout.trains(each) for each in stages])[:, np.newaxis]
        has_backward = np.array(layout.has_backward)[:, np.newaxis]
        last_use = np.where(has_backward, adds["backward"], 0.0)
        for kind in INPUT_HALVES:
            amounts[kind] = np.where(trains, amounts[kind], last_use)
    return Amounts(*tables.numbers(amounts, fixed), messages=messages)


def _as_json(value: Any) -> Any:
    """A number, or nested tuples of numbers as nested lists."""
    return list(map(_as_json, value)) if isinstance(value, tuple) else float(value)
