"""The costs that a program gives its ops with `cost` and `memory`."""

from collections.abc import Callable, Iterable
from typing import Any

from schedlang import syntax
from schedlang.costs import Costs
from schedlang.faults import Fault
from schedlang.names import OBJECTIVES

#: The field of `Costs` that an op's word means; where the backward is split, `B` is its input half.
_FIELDS = {"F": "forward", "B": "backward", "BW": "backward", "W": "weight", "R": "recompute", "send": "p2p"}

#: Evaluates an expression, as a function of the name it may have.
Evaluate = Callable[[syntax.Name | None, syntax.Node], Callable[..., int]]


def program_costs(
    items: Iterable[syntax.Node], evaluate: Evaluate, place: Callable[[syntax.Node], int], splits: bool, stages: int
) -> Costs:
    """The costs among a program's items; a fault for a cost given twice, or below what it can be."""
    costs: dict[str, Any] = {}
    for item in items:
        if not isinstance(item, syntax.Cost):
            continue
        name = "input" if splits and item.word == "B" else _FIELDS[item.word]
        name += "_memory" if isinstance(item, syntax.Memory) else ""
        value = evaluate(item.stage, item.value)
        values = [value(stage) for stage in range(stages)] if item.stage else [value()]
        if name in costs:
            what = "memory" if isinstance(item, syntax.Memory) else "cost"
            help = (
                None
                if splits or item.word not in ("B", "BW")
                else "where nothing splits the backward, `B` and `BW` are one"
            )
            raise Fault("repeated-part", f"`{what} {item.word}` is given already", place(item), help)
        if min(values) < 0 and not isinstance(item, syntax.Memory):
            raise Fault("negative-cost", f"a duration of {min(values)}, it must be 0 or more", place(item.value))
        costs[name] = float(values[0]) if name == "p2p" else tuple(map(float, values))
    return Costs(**costs)


def program_objective(items: Iterable[syntax.Node]) -> str:
    """What passes minimise: a property of a timeline."""
    return next((OBJECTIVES[item.name.text] for item in items if isinstance(item, syntax.Objective)), "makespan")
