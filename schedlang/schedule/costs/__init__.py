"""What a schedule costs: how long ops and transfers take, and what ranks hold.

Given by a program, by options of a command, in a file, or measured: all become `Costs`.
"""

from schedlang.schedule.costs.model import COSTS, UNIT, Costs, check_costs
from schedlang.schedule.costs.reading import costs_of, make_costs, read_costs
from schedlang.schedule.costs.tables import Amounts, Durations, WrongNumber
from schedlang.schedule.costs.transfers import Transfers

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
