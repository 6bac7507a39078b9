"""The runtime: runs a plan on torch.distributed processes.

It is the same walk over the actions as the proof's (`schedlang.proof.prove`), with tensors. Read
it in this order:

    pipeline.py         `Pipeline`, one rank's part: the walk over the calls of a step
    calls.py            the plan's actions as calls, each bound once to all that it needs
    stage.py            a stage: what F and B mean on a torch module
    messages.py         tensors between ranks, and wire.py, on which they go
    part.py             the port through which all else is added to a stage and to the walk
    watchdog.py         heartbeats, and how a rank sees that another one has failed
    failure.py          how all ranks end then
    failure_report.py   what is printed then, and the file with the tracebacks
    standby.py          training that goes on when a rank dies
    decoding.py         text by forwards, token by token
    late_updates.py     updates that make good for late gradients
    door.py             the parts: which there are, and when a plan or a module needs one
    parts/              one file a part, imported where it is needed
    model/              a model cut into stages, checkpoints, and models in files
    torch_private/      private parts of torch

The command `torchrun -m schedlang.runtime PLAN` trains the model of `schedlang.examples.demo`. A
name is imported when it is first used (PEP 562): a pipeline loads neither what cuts models nor what
saves them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from schedlang.runtime.components import OverlappedBackward as OverlappedBackward
    from schedlang.runtime.components import OverlappedForward as OverlappedForward
    from schedlang.runtime.components import end_component as end_component
    from schedlang.runtime.decoding import Decoding as Decoding
    from schedlang.runtime.errors import PipelineError as PipelineError
    from schedlang.runtime.late_updates import error_feedback as error_feedback
    from schedlang.runtime.losses import add_loss as add_loss
    from schedlang.runtime.losses import added_losses as added_losses
    from schedlang.runtime.model.block_costs import measure as measure
    from schedlang.runtime.model.distributed_checkpoint import dcp_state as dcp_state
    from schedlang.runtime.model.distributed_checkpoint import load_dcp as load_dcp
    from schedlang.runtime.model.layouts.even_layers import EvenLayers as EvenLayers
    from schedlang.runtime.model.model_files import load_model as load_model
    from schedlang.runtime.model.model_files import load_optimizers as load_optimizers
    from schedlang.runtime.model.model_files import load_state as load_state
    from schedlang.runtime.model.split import split as split
    from schedlang.runtime.pipeline import Pipeline as Pipeline
    from schedlang.runtime.standby import Standby as Standby

_MODULES = {
    "Decoding": "decoding",
    "EvenLayers": "model.layouts.even_layers",
    "OverlappedBackward": "components",
    "OverlappedForward": "components",
    "Pipeline": "pipeline",
    "PipelineError": "errors",
    "Standby": "standby",
    "add_loss": "losses",
    "added_losses": "losses",
    "dcp_state": "model.distributed_checkpoint",
    "end_component": "components",
    "error_feedback": "late_updates",
    "load_dcp": "model.distributed_checkpoint",
    "load_model": "model.model_files",
    "load_optimizers": "model.model_files",
    "load_state": "model.model_files",
    "measure": "model.block_costs",
    "split": "model.split",
}

__all__ = list(_MODULES)


def __dir__() -> list[str]:
    """The public names, also before they are imported."""
    return __all__


def __getattr__(name: str) -> Any:
    """A public name, from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module `{__name__}` has no `{name}`", name=name)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
