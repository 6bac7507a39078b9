"""What actions cost: how long they take, and what they add to the memory of their rank."""

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from operator import add, neg, sub
from typing import Any

from attrs import evolve, frozen

from schedlang.schedule.costs.transfers import Transfers
from schedlang.schedule.kinds import OPS, Kind

#: The fields that say how long ops of a kind take.
DURATIONS = {kind: op.cost for kind, op in OPS.items()}
_TIMES = (*DURATIONS.values(), "overlap")
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

#: The names of what can be given in a file, and their fields of `Costs`; durations can also be
#: given at a command.
NAMES = {f"{name}_times": name for name in _TIMES} | {"p2p_time": "p2p"}
NAMES |= {name: name for name in (*_LINKS, *_MEMORY, *_BYTES)}

#: Of these there is one number; the others have one for all stages, or one per stage.
SINGLE = frozenset(["p2p", *_LINKS]) - {"boundary_bytes"}

#: What depends on each other: costs that give one of these leave none of them to others.
_TOGETHER = (
    ("forward",),
    ("backward", "input", "weight"),
    ("recompute",),
    ("update",),
    ("overlap",),
    ("offload",),
    ("reload",),
    ("p2p", *_LINKS),
    _MEMORY,
    ("activation_bytes", "kept_bytes"),
    ("weights_bytes",),
)

_Values = tuple[float, ...] | None


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


@frozen
class Costs:
    """Durations and memory, each in a unit of its own: one value for all stages, or one per stage;
    None is not given. What stands in for it is said beside the fields.
    """

    # How long ops take. Without, they have the unit costs of the pipeline papers: a forward is 1,
    # a whole backward 2 or its halves together, a half of it half of that; a recomputation is a
    # forward, and so is a copy to the host, or back; an optimizer step is 0.
    forward: _Values = None
    backward: _Values = None
    input: _Values = None
    weight: _Values = None
    recompute: _Values = None
    update: _Values = None
    offload: _Values = None
    reload: _Values = None
    #: Ops that `overlap`, together; without, as long as one after the other.
    overlap: _Values = None

    # How long a transfer between ranks takes: `p2p`, or what its link makes of its size, see
    # `Transfers`; without either, 0.
    p2p: float | None = None
    boundary_bytes: _Values = None
    ranks_per_node: int | None = None
    latency_in_node: float | None = None
    bandwidth_in_node: float | None = None
    latency_between_nodes: float | None = None
    bandwidth_between_nodes: float | None = None

    # What an op adds to what its rank holds. Without, 1 for a forward, nothing for an input half;
    # the last use, a weight half or a whole backward, gives back what there is.
    forward_memory: _Values = None
    backward_memory: _Values = None
    input_memory: _Values = None
    weight_memory: _Values = None

    # Bytes are counted where they are given: those of an activation from the forward to the last
    # use, of which some are kept from an input half to its weight half; and those of each version
    # of a stage's weights.
    activation_bytes: _Values = None
    kept_bytes: _Values = None
    weights_bytes: _Values = None

    def __attrs_post_init__(self) -> None:
        """ValueError for costs that do not go together."""
        links = self._given(_LINKS)
        bandwidths = self._given(("bandwidth_in_node", "bandwidth_between_nodes"))
        between_nodes = self._given(("latency_between_nodes", "bandwidth_between_nodes"))
        if self.p2p is not None and links:
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
        return bool(self._given((*_TIMES, "p2p", *_LINKS)))

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
        forward = _spread("durations of `F`", self.forward, [1.0] * stages)
        # A half takes half of a whole backward, and a whole one as long as its halves.
        whole = _spread("durations of `B`", self.backward, [2.0] * stages)
        half = [duration / 2 for duration in whole]
        input = _spread("durations of `I`", self.input, half)
        weight = _spread("durations of `W`", self.weight, half)
        offload = _spread("durations of `offload`", self.offload, forward)
        by_kind: dict[int, list[float]] = {
            Kind.F: forward,
            Kind.B: _spread("durations of `B`", self.backward, list(map(add, input, weight))),
            Kind.I: input,
            Kind.W: weight,
            Kind.R: _spread("durations of `R`", self.recompute, forward),
            Kind.U: _spread("durations of `U`", self.update, [0.0] * stages),
            Kind.OFFLOAD: offload,
            Kind.RELOAD: _spread("durations of `reload`", self.reload, offload),
        }
        overlap = _spread("durations of overlaps", self.overlap, [0.0] * stages)
        return Durations(by_kind, None if self.overlap is None else overlap)

    def every_duration(self, stages: int) -> dict[str, list[float]]:
        """The duration on each stage of every field, given or not; of `overlap` only if it is
        given.
        """
        durations = self.durations(stages)
        by_field = {field: durations[kind] for kind, field in DURATIONS.items()}
        if durations.overlap is not None:
            by_field["overlap"] = durations.overlap
        return by_field

    def faster(self, field: str, stage: int, stages: int, factor: float) -> "Costs":
        """The costs if what a field is about took `factor` times as long on a stage."""
        lists = {name: list(values) for name, values in self.every_duration(stages).items()}
        lists[field][stage] *= factor
        changed: dict[str, Any] = {name: tuple(values) for name, values in lists.items()}
        return evolve(self, **changed)

    def transfers(self, stages: int) -> Transfers:
        """How long transfers take; ValueError for a wrong number of sizes."""
        latency = self.latency_in_node or self.p2p or 0.0
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
        given = ((name, getattr(self, field)) for name, field in NAMES.items())
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in given
            if value is not None
        }


#: The costs that leave everything open: unit costs.
UNIT = Costs()


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
