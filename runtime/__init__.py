"""Runs a plan on real processes: the same walk over the actions as `schedlang.proof.prove`, with
tensors.

`Pipeline` is one rank's part of it; `split` cuts a model into its stages. `torchrun -m
schedlang.runtime PLAN` trains a small model.
"""

from schedlang.runtime.cutting.block_costs import measure
from schedlang.runtime.cutting.model import split
from schedlang.runtime.pipeline import Pipeline
from schedlang.runtime.saving.model_files import load_model, load_optimizers
from schedlang.runtime.watch.watchdog import PipelineError

__all__ = ["Pipeline", "PipelineError", "load_model", "load_optimizers", "measure", "split"]
