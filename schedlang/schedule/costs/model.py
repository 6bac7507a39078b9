"""What actions cost: how long they take, and what they add to the memory of their rank."""

import warnings
from collections.abc import Iterable, Sequence
from functools import wraps
from itertools import accumulate
from math import inf
from operator import add, neg, sub
from typing import Any, TypeVar

import numpy as np
from attrs import evolve, field, fields, frozen

from schedlang.diagnostics.arguments import check_number, check_type, check_whole, shown
from schedlang.schedule.costs.transfers import Transfers
from schedlang.schedule.kinds import OPS, Kind

T = TypeVar("T")

#: What `Costs` call each kind of op: the duration of a `forward` is in `forward_times`.
COST_OF = {kind: op.cost for kind, op in OPS.items()}
_TIMES = tuple(f"{name}_times" for name in (*COST_OF.values(), "overlap"))
_LINKS = (
    "boundary_bytes",
    "ranks_per_node",
    "latency_in_node",
    "bandwidth_in_node",
    "latency_between_nodes",
    "bandwidth_between_nodes",
)
_MEMORY = ("forward_memory", "backward_memory", "input_memory", "weight_memory")
_BYTES = ("activation_bytes", "kept_bytes", "weights_bytes")

#: Of these there is one number; the others have one for all stages, or one per stage.
SINGLE = frozenset(["p2p_time", *_LINKS]) - {"boundary_bytes"}

#: What depends on each other: costs that give one of these leave none of them to others.
_TOGETHER = (
    ("forward_times",),
    ("backward_times", "input_times", "weight_times"),
    ("recompute_times",),
    ("update_times",),
    ("overlap_times",),
    ("offload_times",),
    ("reload_times",),
    ("p2p_time", *_LINKS),
    _MEMORY,
    ("activation_bytes", "kept_bytes"),
    ("weights_bytes",),
)

#: The largest number that is taken: sums and products of such ones are still numbers.
_MOST = 1e100

_Values = tuple[float, ...] | None

#: What arguments and attributes of `Costs` were called before they were called as in files.
_OLD_NAMES = {name.removesuffix("_times"): name for name in _TIMES} | {"p2p": "p2p_time"}


def _tuple(values: Sequence[float] | None) -> _Values:
    """A list of numbers as a tuple; what is no such list is left for the checks of `Costs`."""
    if values is None or isinstance(values, str) or not isinstance(values, Iterable):
        return values
    # Those of numpy count as what they are.
    return tuple(float(value) if isinstance(value, np.number) else value for value in values)


@frozen
class Durations:
    """How long ops take, for each kind on each stage; and ops that overlap together, by the stage
    of the first.
    """

    by_kind: dict[int, list[float]]
    overlap: list[float] | None = None

    def __getitem__(self, kind: int) -> list[float]:
        return self.by_kind[kind]

    def ends(self, ops: Sequence[tuple[int, ...]]) -> list[float]:
        """When each of some ops (kind, stage, …) that are issued as one ends, counted from their
        start.

        They count as one after the other. Where overlaps have a time of their own, each has the
        share of it that it has of their sum.
        """
        if len(ops) == 1:
            return [self.by_kind[ops[0][0]][ops[0][1]]]
        ends = list(accumulate(self.by_kind[kind][stage] for kind, stage, *_ in ops))
        if self.overlap is None:
            return ends
        together = self.overlap[ops[0][1]]
        return [together * end / ends[-1] if ends[-1] else together for end in ends]


def _with_old_names(cls: type[T]) -> type[T]:
    """A class that also takes its arguments, and gives its attributes, by their `_OLD_NAMES`."""
    init = cls.__init__

    @wraps(init)
    def with_old_names(self: T, *values: Any, **named: Any) -> None:
        renamed = {}
        for name, value in named.items():
            renamed[_new_name(name)] = value
        init(self, *values, **renamed)

    def attribute(self: T, name: str) -> Any:
        if name not in _OLD_NAMES:
            raise AttributeError(f"`{cls.__name__}` has no `{name}`", name=name, obj=self)
        return getattr(self, _new_name(name))

    cls.__init__ = with_old_names  # type: ignore[method-assign, assignment]
    cls.__getattr__ = attribute  # type: ignore[attr-defined]
    return cls


def _new_name(name: str) -> str:
    """The name that something has now, with a warning if it had another one."""
    if name not in _OLD_NAMES:
        return name
    message = f"`{name}` of `Costs` is `{_OLD_NAMES[name]}` now, as in files and options"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return _OLD_NAMES[name]


@_with_old_names
@frozen(repr=False)
class Costs:
    """How long ops and transfers take, and what they hold: a sequence with one number for all
    stages, or with one per stage; None is not given, and what stands in for it is said beside the
    fields.

    Times are in any unit, all in the same, and so is the time of simulations; memory is in a unit
    of its own; bytes are bytes, a bandwidth is bytes per unit of time. The names are those of files
    and options (docs/costs.md). TypeError for what is no number; ValueError for a time below 0, for
    NaN and infinity, and for costs that do not go together.
    """

    # How long ops take. Without, they have the unit costs of the pipeline papers: a forward is 1,
    # a whole backward 2 or its halves together, a half of it half of that; a recomputation is a
    # forward, and so is a copy to the host, or back; an optimizer step is 0.
    forward_times: _Values = field(default=None, converter=_tuple)
    backward_times: _Values = field(default=None, converter=_tuple)
    input_times: _Values = field(default=None, converter=_tuple)
    weight_times: _Values = field(default=None, converter=_tuple)
    recompute_times: _Values = field(default=None, converter=_tuple)
    update_times: _Values = field(default=None, converter=_tuple)
    offload_times: _Values = field(default=None, converter=_tuple)
    reload_times: _Values = field(default=None, converter=_tuple)
    #: Ops that `overlap`, together; without, as long as one after the other.
    overlap_times: _Values = field(default=None, converter=_tuple)

    # How long a transfer between ranks takes: `p2p_time`, or what its link makes of its size, see
    # `Transfers`; without either, 0.
    p2p_time: float | None = None
    boundary_bytes: _Values = field(default=None, converter=_tuple)
    ranks_per_node: int | None = None
    latency_in_node: float | None = None
    bandwidth_in_node: float | None = None
    latency_between_nodes: float | None = None
    bandwidth_between_nodes: float | None = None

    # What an op adds to what its rank holds. Without, 1 for a forward, nothing for an input half;
    # the last use, a weight half or a whole backward, gives back what there is.
    forward_memory: _Values = field(default=None, converter=_tuple)
    backward_memory: _Values = field(default=None, converter=_tuple)
    input_memory: _Values = field(default=None, converter=_tuple)
    weight_memory: _Values = field(default=None, converter=_tuple)

    # Bytes are counted where they are given: those of an activation from the forward to the last
    # use, of which some are kept from an input half to its weight half; and those of each version
    # of a stage's weights.
    activation_bytes: _Values = field(default=None, converter=_tuple)
    kept_bytes: _Values = field(default=None, converter=_tuple)
    weights_bytes: _Values = field(default=None, converter=_tuple)

    def __attrs_post_init__(self) -> None:
        """TypeError for what is no number, ValueError for one that cannot be a cost, and for costs
        that do not go together.
        """
        for name in self._given(NAMES):
            (_check_single if name in SINGLE else _check_values)(name, getattr(self, name))
        links = self._given(_LINKS)
        bandwidths = self._given(("bandwidth_in_node", "bandwidth_between_nodes"))
        between_nodes = self._given(("latency_between_nodes", "bandwidth_between_nodes"))
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
        return Costs(**chosen)

    @property
    def gives_times(self) -> bool:
        """Whether any duration is given."""
        return bool(self._given((*_TIMES, "p2p_time", *_LINKS)))

    @property
    def gives_memory(self) -> bool:
        """Whether any amount of memory is given."""
        return bool(self._given(_MEMORY))

    def check(self, stages: int) -> None:
        """ValueError where what is given per stage is not for so many stages."""
        self.durations(stages)
        self.transfers(stages)
        self.memory(stages)
        self.bytes(stages)
        self.bytes_of_weights(stages)

    def durations(self, stages: int) -> Durations:
        """How long compute actions take on each stage; ValueError for a wrong number of values."""
        forward = _spread("durations of `F`", self.forward_times, [1.0] * stages)
        # A half takes half of a whole backward, and a whole one as long as its halves.
        whole = _spread("durations of `B`", self.backward_times, [2.0] * stages)
        half = [duration / 2 for duration in whole]
        input = _spread("durations of `I`", self.input_times, half)
        weight = _spread("durations of `W`", self.weight_times, half)
        offload = _spread("durations of `offload`", self.offload_times, forward)
        by_kind: dict[int, list[float]] = {
            Kind.F: forward,
            Kind.B: _spread("durations of `B`", self.backward_times, list(map(add, input, weight))),
            Kind.I: input,
            Kind.W: weight,
            Kind.R: _spread("durations of `R`", self.recompute_times, forward),
            Kind.U: _spread("durations of `U`", self.update_times, [0.0] * stages),
            Kind.OFFLOAD: offload,
            Kind.RELOAD: _spread("durations of `reload`", self.reload_times, offload),
        }
        overlap = _spread("durations of overlaps", self.overlap_times, [0.0] * stages)
        return Durations(by_kind, None if self.overlap_times is None else overlap)

    def every_duration(self, stages: int) -> dict[str, list[float]]:
        """How long everything takes on each stage, given or not, by what costs call it, such as
        `forward`; `overlap` only if it is given.
        """
        durations = self.durations(stages)
        by_name = {name: durations[kind] for kind, name in COST_OF.items()}
        if durations.overlap is not None:
            by_name["overlap"] = durations.overlap
        return by_name

    def faster(self, name: str, stage: int, stages: int, factor: float) -> "Costs":
        """The costs if something, such as `forward`, took `factor` times as long on a stage."""
        lists = {name: list(values) for name, values in self.every_duration(stages).items()}
        lists[name][stage] *= factor
        changed: dict[str, Any] = {f"{name}_times": tuple(values) for name, values in lists.items()}
        return evolve(self, **changed)

    def transfers(self, stages: int) -> Transfers:
        """How long transfers take; ValueError for a wrong number of sizes."""
        latency = self.latency_in_node or self.p2p_time or 0.0
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
        )

    def memory(self, stages: int) -> dict[int, list[float]]:
        """For each kind of compute action, what it adds to the memory of its rank, on each stage;
        ValueError as above.

        A forward whose activations are dropped adds its amount only while it runs.
        """
        forward = _spread("memories of `F`", self.forward_memory, [1.0] * stages)
        input = _spread("memories of `I`", self.input_memory, [0.0] * stages)
        # By default, the last use gives back all that there is.
        all_forward = list(map(neg, forward))
        backward = _spread("memories of `B`", self.backward_memory, all_forward)
        all_left = list(map(sub, all_forward, input))
        weight = _spread("memories of `W`", self.weight_memory, all_left)
        return _changes(forward, backward, input, weight)

    def bytes(self, stages: int) -> dict[int, list[float]] | None:
        """For each kind of compute action, the bytes that it adds to its rank, on each stage; None
        if none are given.

        ValueError as above.
        """
        if not self._given(_BYTES):
            return None
        held = _spread("`activation_bytes`", self.activation_bytes, [0.0] * stages)
        kept = _spread("`kept_bytes`", self.kept_bytes, held)
        backward = list(map(neg, held))
        input = list(map(sub, kept, held))
        weight = list(map(neg, kept))
        return _changes(held, backward, input, weight)

    def bytes_of_weights(self, stages: int) -> list[float]:
        """What one version of each stage's weights takes; ValueError as above."""
        return _spread("`weights_bytes`", self.weights_bytes, [0.0] * stages)

    def to_json(self) -> dict[str, Any]:
        """What is given, as a file has it."""
        given = {name: getattr(self, name) for name in self._given(NAMES)}
        return {
            name: list(map(float, value)) if isinstance(value, tuple) else value
            for name, value in given.items()
        }

    def __repr__(self) -> str:
        given = (f"{name}={shown(getattr(self, name))}" for name in self._given(NAMES))
        return f"Costs({', '.join(given)})"


#: The names of what can be given, here and in a file; times can also be given at a command.
NAMES = tuple(attribute.name for attribute in fields(Costs))
#: The costs that leave everything open: unit costs.
UNIT = Costs()


def check_costs(costs: Any) -> None:
    """TypeError unless an argument is costs."""
    check_type("costs", costs, Costs, "Costs, such as Costs(p2p_time=0.1)")


def _check_values(name: str, values: Any) -> None:
    """Whether the values of a cost, one for all stages or one per stage, are numbers that can be
    costs.
    """
    if not isinstance(values, tuple) or not set(map(type, values)) <= {int, float}:
        wanted = "numbers, one for all stages or one for each, such as (1.0,)"
        raise TypeError(f"`{name}` is {shown(values)}: it must be {wanted}")
    # An op may give memory back; nothing takes less than no time.
    least = -_MOST if name in _MEMORY else 0
    if not values or not all(least <= value <= _MOST for value in values):
        raise ValueError(
            f"`{name}` must be numbers from {least:g} to {_MOST:g}, not {shown(values)}"
        )


def _check_single(name: str, value: Any) -> None:
    """Whether the one number of a cost can be one."""
    if name == "ranks_per_node":
        check_whole(name, value, least=1)
        return
    check_number(name, value)
    least = 1 / _MOST if name.startswith("bandwidth") else 0
    if not least <= value <= _MOST:
        raise ValueError(f"`{name}` is {value:g}: it must be a number from {least:g} to {_MOST:g}")


def _changes(
    forward: list[float], backward: list[float], input: list[float], weight: list[float]
) -> dict[int, list[float]]:
    """What each kind of op adds to memory: a recomputation or a copy back what the forward did."""
    amounts = {kind: [op.holds * amount for amount in forward] for kind, op in OPS.items()}
    return amounts | {Kind.B: backward, Kind.I: input, Kind.W: weight}


def _spread(what: str, values: _Values, default: list[float]) -> list[float]:
    """One value per stage."""
    if values is None:
        return default
    if len(values) not in (1, len(default)):
        raise ValueError(f"{len(values)} {what} are given, there are {len(default)} stages")
    return list(values) * (len(default) if len(values) == 1 else 1)
