"""The runtime: runs a plan on torch.distributed processes.

It is the same walk over the actions as the proof's (`schedlang.proof.prove`), with tensors. Read
it in this order:

    pipeline.py         `Pipeline`, one rank's part: the walk over the calls of a step
    calls.py            the plan's actions as calls, each bound once to all that it needs
    part.py             the port through which all else is added to a stage and to the walk
    values.py           what passes between stages, and processes.py, which processes run the plan
    stage.py            a stage: what F, B, I, W, R and U mean on a torch module
    messages.py         tensors between ranks: wire.py, exchange.py, announcement.py
    watchdog.py         heartbeats, and what ranks print when one fails
    parts/              what a plan or a module may need beside: one file a part
    model/              a model cut into stages, checkpoints, and models in files

The command `torchrun -m schedlang.runtime PLAN` trains the model of `schedlang.examples.demo`.
"""

from schedlang.runtime.components import (
    OverlappedBackward,
    OverlappedForward,
    end_component,
)
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.losses import add_loss, added_losses
from schedlang.runtime.model.block_costs import measure
from schedlang.runtime.model.layouts.even_layers import EvenLayers
from schedlang.runtime.model.model_files import (
    load_model,
    load_optimizers,
    load_state,
)
from schedlang.runtime.model.split import split
from schedlang.runtime.pipeline import Pipeline

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
    "load_state",
    "measure",
    "split",
]
