"""The runtime: runs a plan on torch.distributed processes.

It is the same walk over the actions as the proof's (`schedlang.proof.prove`), with tensors. Read
it in this order:

    pipeline.py         `Pipeline`, one rank's part: the walk over the calls of a step
    calls.py            the plan's actions as calls, each bound once to all that it needs
    part.py             the port through which all else is added to a stage and to the walk
    values.py           what passes between stages, and processes.py, which processes run the plan
    stage/              a stage: what F, B, I, W, R and U mean on a torch module, and its parts
    transport/          tensors between ranks
    gradients/          sums, norms and updates of gradients that stages or replicas share
    watch/              heartbeats, and what ranks print when one fails
    saving/ cutting/    checkpoints and models in files; a model cut into stages
    example/            the command `torchrun -m schedlang.runtime PLAN`, which trains a small model
"""

from schedlang.runtime.cutting.block_costs import measure
from schedlang.runtime.cutting.layouts.even_layers import EvenLayers
from schedlang.runtime.cutting.model import split
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.losses import add_loss, added_losses
from schedlang.runtime.pipeline import Pipeline
from schedlang.runtime.saving.model_files import load_model, load_optimizers
from schedlang.runtime.stage.components import (
    OverlappedBackward,
    OverlappedForward,
    end_component,
)

__all__ = [
    "EvenLayers",
    "OverlappedBackward",
    "OverlappedForward",
    "Pipeline",
    "PipelineError",
    "add_loss",
    "added_losses",
    "end_component",
    "load_model",
    "load_optimizers",
    "measure",
    "split",
]
