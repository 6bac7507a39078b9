"""What a schedule costs: how long ops and transfers take, and what ranks hold.

Given by a program, by options of a command, in a file, or measured: all become `Costs`.
"""

from schedlang.costs.measured import measured_costs
from schedlang.costs.model import NAMES, UNIT, Costs, Durations
from schedlang.costs.reading import costs_of, make_costs, read_costs
from schedlang.costs.transfers import Transfers

__all__ = [
    "NAMES", "UNIT", "Costs", "Durations", "Transfers", "costs_of", "make_costs", "measured_costs", "read_costs",
]  # fmt: skip
