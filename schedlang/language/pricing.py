"""The costs that a program gives its ops with `cost` and `memory`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from schedlang.diagnostics.diagnostic import number_text
from schedlang.language.declarations import Price
from schedlang.language.faults import Fault
from schedlang.language.sites import Sites
from schedlang.schedule.costs import COSTS, Costs
from schedlang.schedule.fixed_point import as_float
from schedlang.schedule.kinds import OPS
from schedlang.schedule.layout import Layout

if TYPE_CHECKING:
    from fractions import Fraction

#: What `Costs` call an op by its word: `forward` has a duration, `forward_times`, and may have a
#: `forward_memory`. Where a program splits backwards and writes no `I`, `B` is the input half.
_COSTS = {op.word: op.cost for op in OPS.values()}
_COSTS |= {"BW": "backward", "send": "message"}
_COSTS |= {word: word for word in ("gather", "overlap", "sum")}
#: What transfers take is said once.
_SENDS = frozenset(["p2p_time", "link_times"])
#: Of how many indices the cost of an op is that differs by microbatch.
_OF_MICROBATCH = 2


def program_costs(prices: Iterable[Price], layout: Layout, sites: Sites) -> Costs:
    """The costs that a program gives. A fault for a cost that is given twice, or is below its least
    value.
    """
    costs: dict[str, Any] = {}
    is_half = sites.b_is_half
    for price in prices:
        name = _name(price, is_half)
        if name in costs or (name in _SENDS and _SENDS & costs.keys()):
            same = not is_half and price.word in ("B", "BW")
            help = (
                "where `B` is a whole backward, `B` and `BW` are one" if same else None
            )
            message = f"`{_item(price)}` is given already"
            raise Fault("repeated-part", message, price.location, help)
        costs[name] = _values(price, layout, COSTS[name].gives_back)
    return Costs(**costs)


def _name(price: Price, is_half: bool) -> str:
    """The field of `Costs` that a price is; `is_half`: `B` is the input half of a backward."""
    if price.word == "capacity":
        return "capacity_bytes"
    if _is_of_links(price):
        return "link_times" if price.indices else "p2p_time"
    name = "input" if is_half and price.word == "B" else _COSTS[price.word]
    return f"{name}_memory" if price.is_memory else f"{name}_times"


def _is_of_links(price: Price) -> bool:
    """Whether a price is the time of transfers between ranks."""
    return price.word == "send" and not price.is_memory


def _item(price: Price) -> str:
    """How messages name the line of a price."""
    if price.word == "capacity":
        return price.word
    return f"{'memory' if price.is_memory else 'cost'} {price.word}"


def _values(price: Price, layout: Layout, may_be_negative: bool) -> Any:
    """The value of a price for each stage, microbatch, slice or rank, as `Costs` takes them."""

    def of(*indices: int) -> float | Fraction:
        value = price.of(*indices)
        if value < 0 and not may_be_negative:
            what = price.word if price.is_memory else "duration"
            message = f"a {what} of {number_text(value)}, it must be 0 or more"
            raise Fault("negative-cost", message, price.value_location)
        return as_float(value)

    ranks = range(max(layout.placement) + 1)
    if price.word == "capacity" and price.indices:
        return [of(rank) for rank in ranks]
    if _is_of_links(price):
        if not price.indices:
            return of()
        # Within a rank nothing is sent.
        return [[of(r, q) if r != q else 0.0 for q in ranks] for r in ranks]
    if not price.indices:
        return [of()]
    stages = range(len(layout.placement))
    if price.indices == 1:
        return [of(stage) for stage in stages]
    microbatches = [
        range(layout.units_of_update(stage) // layout.slices) for stage in stages
    ]
    if price.indices == _OF_MICROBATCH:
        return [[of(s, m) for m in microbatches[s]] for s in stages]
    slices = range(layout.slices)
    return [[[of(s, m, k) for k in slices] for m in microbatches[s]] for s in stages]
