"""Costs from numbers by their names, as options, files and plans give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from schedlang.on_demand import on_demand
from schedlang.schedule.costs.fields import Cost
from schedlang.schedule.costs.model import COSTS, Costs


def make_costs(lists: Mapping[str, Sequence[float]], components: Any = None) -> Costs:
    """Costs from the user's lists by their names, and the components of ops; ValueError for what
    cannot be one.
    """
    given: dict[str, Any] = {"components": components}
    for name, values in lists.items():
        if name not in COSTS:
            from difflib import get_close_matches

            close = get_close_matches(str(name), COSTS, n=1)
            there_is = f", there is `{close[0]}`" if close else ""
            raise ValueError(f"there is no cost `{name}`{there_is}")
        cost = COSTS[name]
        if cost.is_single and len(values) != 1:
            raise ValueError(f"`{name}` is one number")
        given[name] = _single(cost, values[0]) if cost.is_single else tuple(values)
    try:
        return Costs(**given)
    except TypeError as error:
        raise ValueError(str(error)) from None


def _single(cost: Cost, value: float) -> float | int:
    """The one number of a cost that is no list; a file may write a whole one as 2.0."""
    is_whole = cost.shape == "whole" and value == value // 1
    return int(value) if is_whole else value


def costs_of(document: Any) -> Costs:
    """Costs from an object such as `{"forward_times": [1, 1.5], "p2p_time": 0.1}`; ValueError says
    what is wrong.

    An object with `traceEvents` is a trace in Chrome's format; of its actions, the mean durations
    are taken.
    """
    if not isinstance(document, dict):
        raise ValueError('it must be an object, such as {"forward_times": [1, 2]}')
    if "traceEvents" in document:
        traced_costs = on_demand("schedlang.schedule.costs.cost_files.traced_costs")
        costs: Costs = traced_costs([document])
        return costs
    lists = {}
    for name, values in document.items():
        if name == "components":
            continue
        lists[name] = values if isinstance(values, list) else [values]
        if not all(map(_are_numbers, lists[name])):
            raise ValueError(f"`{name}` must be numbers")
    return make_costs(lists, document.get("components"))


def _are_numbers(value: Any) -> bool:
    """Whether a value is a number, or a list of such, as those of microbatches and slices are."""
    if isinstance(value, list):
        return all(map(_are_numbers, value))
    # Not `isinstance`: True is an int as well.
    return type(value) in (int, float)
