"""What actions cost: how long they take, and what they add to the memory of their rank."""

import json
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from math import isfinite
from operator import add, neg
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

from schedlang.diagnostics import CompileError, Diagnostic
from schedlang.kinds import Kind
from schedlang.source import read_source

#: The names of what can be given in a file; durations also at the command.
NAMES = {
    "forward_times": "forward", "backward_times": "backward", "input_times": "input", "weight_times": "weight",
    "recompute_times": "recompute", "p2p_time": "p2p", "offload_times": "offload", "reload_times": "reload",
    "forward_memory": "forward_memory", "backward_memory": "backward_memory",
    "input_memory": "input_memory", "weight_memory": "weight_memory",
}  # fmt: skip

#: What depends on each other: costs that give one of these leave none of them to others.
_TOGETHER = (
    ("forward",), ("backward", "input", "weight"), ("recompute",), ("p2p",), ("offload",), ("reload",),
    ("forward_memory", "backward_memory", "input_memory", "weight_memory"),
)  # fmt: skip

_Values = tuple[float, ...] | None


@frozen
class Costs:
    """Durations and memory in any unit each: one value for all stages, or one per stage; None is not given.

    Durations not given are the unit costs of the pipeline papers: a forward is 1, a whole backward 2 or its halves
    together, a half of it half of that; a recomputation is a forward, and so is a copy to the host, or back; `p2p`, for
    any transfer between ranks, is 0.
    Memory is what an op adds to what its rank holds: if not given, 1 for a forward, nothing for an input half; the last
    use, a weight half or a whole backward, gives back what there is.
    """

    forward: _Values = None
    backward: _Values = None
    input: _Values = None
    weight: _Values = None
    recompute: _Values = None
    p2p: float | None = None
    offload: _Values = None
    reload: _Values = None
    forward_memory: _Values = None
    backward_memory: _Values = None
    input_memory: _Values = None
    weight_memory: _Values = None

    def over(self, others: "Costs") -> "Costs":
        """These costs, and where they leave something open, the others."""
        chosen: dict[str, Any] = {}
        for names in _TOGETHER:
            mine = any(getattr(self, name) is not None for name in names)
            chosen |= {name: getattr(self if mine else others, name) for name in names}
        return Costs(**chosen)

    @property
    def gives_times(self) -> bool:
        """Whether any duration is given."""
        return any(getattr(self, field) is not None for name, field in NAMES.items() if "time" in name)

    @property
    def gives_memory(self) -> bool:
        """Whether any amount of memory is given."""
        return any(getattr(self, field) is not None for name, field in NAMES.items() if "memory" in name)

    def latency(self, sender: int, receiver: int) -> float:
        """How long a message is on its way from one rank to another."""
        return self.p2p or 0.0

    def durations(self, stages: int) -> dict[int, list[float]]:
        """For each kind of compute action, its duration on each stage; ValueError for a wrong number of values."""
        forward = _spread("durations of `F`", self.forward, [1.0] * stages)
        half = [each / 2 for each in _spread("durations of `B`", self.backward, [2.0] * stages)]
        input = _spread("durations of `I`", self.input, half)
        weight = _spread("durations of `W`", self.weight, half)
        offload = _spread("durations of `offload`", self.offload, forward)
        return {
            Kind.F: forward,
            Kind.B: _spread("durations of `B`", self.backward, list(map(add, input, weight))),
            Kind.I: input,
            Kind.W: weight,
            Kind.R: _spread("durations of `R`", self.recompute, forward),
            Kind.U: [0.0] * stages,
            Kind.OFFLOAD: offload,
            Kind.RELOAD: _spread("durations of `reload`", self.reload, offload),
        }

    def memory(self, stages: int) -> dict[int, list[float]]:
        """For each kind of compute action, what it adds to the memory of its rank, on each stage; ValueError as above.

        A forward whose activations are dropped adds its amount only while it runs.
        """
        forward = _spread("memories of `F`", self.forward_memory, [1.0] * stages)
        input = _spread("memories of `I`", self.input_memory, [0.0] * stages)
        return {
            Kind.F: forward,
            Kind.B: _spread("memories of `B`", self.backward_memory, list(map(neg, forward))),
            Kind.I: input,
            Kind.W: _spread("memories of `W`", self.weight_memory, [-each for each in map(add, forward, input)]),
            Kind.R: forward,
            Kind.U: [0.0] * stages,
            Kind.OFFLOAD: [-each for each in forward],
            Kind.RELOAD: forward,
        }

    def to_json(self) -> dict[str, Any]:
        """What is given, as a file has it."""
        given = asdict(self)
        return {name: given[field] for name, field in NAMES.items() if given[field] is not None}


#: The costs that leave everything open: unit costs.
UNIT = Costs()


def _spread(what: str, values: _Values, default: list[float]) -> list[float]:
    """One value per stage."""
    if values is None:
        return default
    if len(values) not in (1, len(default)):
        raise ValueError(f"{len(values)} {what} are given, there are {len(default)} stages")
    return list(values) * (len(default) if len(values) == 1 else 1)


def make_costs(lists: Mapping[str, Sequence[float]]) -> Costs:
    """Costs from the user's lists, by their `NAMES`; ValueError for what cannot be one."""
    given: dict[str, Any] = {}
    for name, values in lists.items():
        if name not in NAMES:
            close = get_close_matches(name, NAMES, n=1)
            raise ValueError(f"there is no cost `{name}`{f', there is `{close[0]}`' if close else ''}")
        if not values or not all(isfinite(each) and (each >= 0 or "memory" in name) for each in values):
            raise ValueError(f"`{name}` must be numbers{'' if 'memory' in name else ' from 0'}")
        given[NAMES[name]] = float(values[0]) if name == "p2p_time" else tuple(map(float, values))
    return Costs(**given)


def costs_of(document: Any) -> Costs:
    """Costs from an object such as `{"forward_times": [1, 1.5], "p2p_time": 0.1}`; ValueError says what is wrong."""
    if not isinstance(document, dict):
        raise ValueError('it must be an object, such as {"forward_times": [1, 2]}')
    lists = {name: values if isinstance(values, list) else [values] for name, values in document.items()}
    for name, values in lists.items():
        if not all(type(each) in (int, float) for each in values):
            raise ValueError(f"`{name}` must be numbers")
    return make_costs(lists)


def read_costs(path: str | Path) -> Costs:
    """Costs from a JSON file; CompileError says what is wrong with it."""
    try:
        return costs_of(json.loads(read_source(path).text))
    except (ValueError, RecursionError) as error:
        raise CompileError([Diagnostic("costs", f"costs in `{path}`: {error}", file=str(path))]) from None
