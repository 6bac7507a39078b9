"""Search the partition of a model into stages, the placement of stages on ranks, and the schedule.

`partition` balances the ranks' work for a given schedule. `fit` also moves layers between stages as
long as that shortens the simulated step, and runs the schedule's passes again in between. `solve`
also moves stages to other ranks.
"""

from schedlang.extras.search.partition.balance import Sizes, partition
from schedlang.extras.search.partition.joint import Fit, fit, gallery, search
from schedlang.extras.search.partition.layer_costs import (
    Layer,
    costs_of_stages,
    fixed_of_runs,
    layers_of_run,
    names_by_stage,
)
from schedlang.extras.search.partition.place import place
from schedlang.extras.search.partition.solve import Solution, solve

__all__ = [
    "Fit",
    "Layer",
    "Sizes",
    "Solution",
    "costs_of_stages",
    "fit",
    "fixed_of_runs",
    "gallery",
    "layers_of_run",
    "names_by_stage",
    "partition",
    "place",
    "search",
    "solve",
]
