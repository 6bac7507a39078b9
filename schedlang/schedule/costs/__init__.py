"""What a schedule costs: how long ops and transfers take, and what ranks hold.

Given by a program, by options of a command, in a file, or measured: all become `Costs`.
"""

from schedlang.schedule.costs.measured import measured_costs
from schedlang.schedule.costs.model import (
    NAMES,
    UNIT,
    Amounts,
    Costs,
    Durations,
    WrongNumber,
    check_costs,
)
from schedlang.schedule.costs.reading import costs_of, make_costs, read_costs
from schedlang.schedule.costs.transfers import Transfers

__all__ = [
    "NAMES",
    "UNIT",
    "Amounts",
    "Costs",
    "Durations",
    "Transfers",
    "WrongNumber",
    "check_costs",
    "costs_of",
    "make_costs",
    "measured_costs",
    "read_costs",
]
