"""Schedule → schedule: what changes the order of a rank's ops, adds some, or leaves some out."""

from schedlang.passes.fill import fill_weights, fill_within
from schedlang.passes.gather import gather
from schedlang.passes.recompute import recompute
from schedlang.passes.reorder import reorder
from schedlang.passes.squeeze import squeeze

__all__ = ["fill_weights", "fill_within", "gather", "recompute", "reorder", "squeeze"]
