"""Schedule → schedule: changes of order that leave every rank's ops as they are."""

from schedlang.passes.fill import fill_weights
from schedlang.passes.recompute import recompute
from schedlang.passes.reorder import reorder
from schedlang.passes.squeeze import squeeze

__all__ = ["fill_weights", "recompute", "reorder", "squeeze"]
