"""How many layers each stage has, which rank each stage is on, and the schedule, together.

`partition` shares layers out evenly for a schedule; `fit` also moves layers to where a simulation
shows them to do most, in turn with the schedule's passes.
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
