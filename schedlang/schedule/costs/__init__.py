"""What a schedule costs: how long ops and transfers take, and what ranks hold.

Given by a program, by options of a command, in a file, or measured: all become `Costs`.
"""

from typing import TYPE_CHECKING

from schedlang.on_demand import on_demand
from schedlang.schedule.costs.cost_tables import Amounts, Durations, WrongNumber
from schedlang.schedule.costs.model import COSTS, UNIT, Costs, check_costs
from schedlang.schedule.costs.transfers import Transfers

if TYPE_CHECKING:
    from schedlang.schedule.costs.cost_files import read_costs
    from schedlang.schedule.costs.given import costs_of, make_costs
else:
    # For costs that a user gives.
    costs_of = on_demand("schedlang.schedule.costs.given.costs_of")
    make_costs = on_demand("schedlang.schedule.costs.given.make_costs")
    read_costs = on_demand("schedlang.schedule.costs.cost_files.read_costs")

__all__ = [
    "COSTS",
    "UNIT",
    "Amounts",
    "Costs",
    "Durations",
    "Transfers",
    "WrongNumber",
    "check_costs",
    "costs_of",
    "make_costs",
    "read_costs",
]
