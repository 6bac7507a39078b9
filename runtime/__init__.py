"""Runs a plan on real processes: the same walk over the actions as `schedlang.machine`, with tensors.

`Pipeline` is one rank's part of it; `torchrun -m schedlang.runtime PLAN` trains a small model with it.
"""

from schedlang.runtime.pipeline import Pipeline
from schedlang.runtime.watchdog import PipelineError

__all__ = ["Pipeline", "PipelineError"]
