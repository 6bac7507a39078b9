"""The costs that a program gives its ops with `cost` and `memory`."""

from collections.abc import Iterable
from typing import Any

from schedlang.language import syntax
from schedlang.language.declarations import Declarations
from schedlang.language.faults import Fault
from schedlang.language.names import OBJECTIVES
from schedlang.schedule.costs import Costs

#: The field of `Costs` that an op's word means; where the backward is split, `B` is its input half.
_FIELDS = {
    "F": "forward",
    "B": "backward",
    "BW": "backward",
    "W": "weight",
    "R": "recompute",
    "U": "update",
    "send": "p2p",
    "offload": "offload",
    "reload": "reload",
    "overlap": "overlap",
}


def program_costs(items: Iterable[syntax.Node], declared: Declarations, splits: bool) -> Costs:
    """The costs among a program's items; a fault for a cost given twice, or below what it
    can be.
    """
    costs: dict[str, Any] = {}
    for item in items:
        if not isinstance(item, syntax.Cost):
            continue
        is_memory = isinstance(item, syntax.Memory)
        name = "input" if splits and item.word == "B" else _FIELDS[item.word]
        name += "_memory" if is_memory else ""
        value = declared.function(item.stage, item.value)
        values = (
            [value(stage) for stage in range(len(declared.placement))] if item.stage else [value()]
        )
        if name in costs:
            same = not splits and item.word in ("B", "BW")
            help = "where nothing splits the backward, `B` and `BW` are one" if same else None
            message = f"`{'memory' if is_memory else 'cost'} {item.word}` is given already"
            raise Fault("repeated-part", message, declared.codegen.place(item), help)
        if min(values) < 0 and not is_memory:
            message = f"a duration of {min(values)}, it must be 0 or more"
            raise Fault("negative-cost", message, declared.codegen.place(item.value))
        costs[name] = float(values[0]) if name == "p2p" else tuple(map(float, values))
    return Costs(**costs)


def program_objective(items: Iterable[syntax.Node]) -> str:
    """What passes minimise: a property of a timeline."""
    return next(
        (OBJECTIVES[item.name.text] for item in items if isinstance(item, syntax.Objective)),
        "makespan",
    )
