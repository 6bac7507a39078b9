"""The costs that a program gives its ops with `cost` and `memory`."""

from collections.abc import Iterable
from typing import Any

from schedlang.language import syntax
from schedlang.language.declarations import Price
from schedlang.language.faults import Fault, number_text
from schedlang.language.names import OBJECTIVES, OLD_OBJECTIVES
from schedlang.language.sites import Sites
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import OPS

#: What `Costs` call an op by its word: `forward` has a duration, `forward_times`, and may have a
#: `forward_memory`. Where a program splits backwards and writes no `I`, `B` is the input half.
_COSTS = {op.word: op.cost for op in OPS.values()}
_COSTS |= {"BW": "backward", "overlap": "overlap"}


def program_costs(prices: Iterable[Price], stages: int, sites: Sites) -> Costs:
    """The costs that a program gives for so many stages; a fault for a cost given twice, or below
    what it can be.
    """
    costs: dict[str, Any] = {}
    is_half = sites.splits_backward and not sites.writes_halves
    for price in prices:
        name = _name(price, is_half)
        if price.is_per_stage:
            values = [price.of(stage) for stage in range(stages)]
        else:
            values = [price.of()]
        if name in costs:
            same = not is_half and price.word in ("B", "BW")
            help = "where `B` is a whole backward, `B` and `BW` are one" if same else None
            message = f"`{'memory' if price.is_memory else 'cost'} {price.word}` is given already"
            raise Fault("repeated-part", message, price.location, help)
        if min(values) < 0 and not price.is_memory:
            message = f"a duration of {number_text(min(values))}, it must be 0 or more"
            raise Fault("negative-cost", message, price.value_location)
        costs[name] = float(values[0]) if name == "p2p_time" else tuple(map(float, values))
    return Costs(**costs)


def _name(price: Price, is_half: bool) -> str:
    """The field of `Costs` that a price is; `is_half`: `B` is the input half of a backward."""
    if price.word == "send":
        return "p2p_time"
    name = "input" if is_half and price.word == "B" else _COSTS[price.word]
    return f"{name}_memory" if price.is_memory else f"{name}_times"


def program_objective(items: Iterable[syntax.Node]) -> str:
    """What passes minimise: a property of a timeline."""
    names = [item.name.text for item in items if isinstance(item, syntax.Objective)]
    return OLD_OBJECTIVES.get(names[0], names[0]) if names else OBJECTIVES[0]
