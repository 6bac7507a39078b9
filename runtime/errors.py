"""The errors of the runtime."""

import re

import torch.distributed as dist

#: Advice for errors of torch that a model meets only in a pipeline, by a part of their text.
_WAYS_OUT = {
    "a leaf Variable that requires grad is being used in an in-place operation": (
        "the stage changes its input in place; let it change a copy, `x = x.clone()`"
    ),
    "modified by an inplace operation": (
        "what a forward has saved for its backward was changed before that ran, perhaps a buffer, "
        "by the forward of a later microbatch; let the forward use a copy, `self.buffer.clone()`"
    ),
    "Inplace update to inference tensor": (
        "`evaluate` is outside of `torch.inference_mode`, so that the model can be trained "
        "afterwards; let the script make the tensor outside of it, too"
    ),
    "DataLoader worker": (
        "a process of this rank's DataLoader has ended, perhaps for want of memory; with "
        "`num_workers=0` there is none"
    ),
    "cannot register a hook on a tensor that doesn't require gradient": (
        "where a plan recomputes a forward (`R`), the first one makes no graph; register the hook "
        "if the tensor requires grad"
    ),
    "does not require grad and does not have a grad_fn": (
        "where a plan recomputes a forward (`R`), the first one makes no graph; a stage that "
        "differentiates inside its forward does so in `torch.enable_grad()`"
    ),
    "A leaf node was passed to _will_engine_execute_node": (
        "`register_multi_grad_hook` cannot see the input of a stage whose backward is split (`W`): "
        "let it see a view, `x = x.view_as(x)`, or take a schedule with whole backwards"
    ),
    "appears to not have been used in the graph": (
        "the graph of a stage begins at its input, so gradients do not go on across stages: what "
        "needs some, as a penalty on them, must be in one stage"
    ),
    "must be Tensor, not dict": (
        "a dictionary of a batch reaches the first stage as one argument, as the next ones what "
        "the stage before returns: give what passes from stage to stage as `inputs`, such as "
        "`batch['input_ids']`, and keyword arguments of the modules, such as a mask, by their "
        "names, or by `options` where they are not to be cut, on every rank"
    ),
    "got an unexpected keyword argument": (
        "keyword arguments of `step` and `evaluate`, and `options`, go to all modules of this "
        "rank by their names: give them on the ranks whose modules take them"
    ),
    "has no attribute 'loss'": (
        "`loss_fn(output, targets)` is given what the last stage returns. A model that computes "
        "its loss from labels would do so on every stage: compute it in `loss_fn`, from labels "
        "that are `targets`, or add it by `add_loss`"
    ),
    "can't retain_grad on Tensor that has requires_grad=False": (
        "where a plan recomputes a forward (`R`), the first one makes no graph; retain the "
        "gradient if the tensor requires grad"
    ),
}


#: Advice for errors in a script, between two steps.
_WAYS_OUT_OF_SCRIPTS = {
    "does not require grad and does not have a grad_fn": (
        "the losses that `step` returns have no graph: the step has made their backwards, so that "
        "all gradients are in `.grad`, and optimizers come next"
    ),
}


def way_out(error: BaseException, in_script: bool = False) -> str | None:
    """Advice for an error of torch in a step, or in the script between two steps; None if there is
    none.
    """
    told = str(error)
    ways = {**_WAYS_OUT, **_WAYS_OUT_OF_SCRIPTS} if in_script else _WAYS_OUT
    return next((way for text, way in ways.items() if text in told), None)


class PipelineError(Exception):
    """The error that stopped the pipeline: it names the rank, the action with its program line, and
    the reason; after a failed step also what every rank was doing.
    """


class LostRank(PipelineError):
    """The connection to another rank broke, or to one of several."""

    def __init__(self, ranks: set[int], reason: str) -> None:
        super().__init__(reason)
        self.ranks = ranks


def is_of_connection(error: RuntimeError) -> bool:
    """Whether an error comes from a connection between ranks. Calls of a process group may also
    raise others, for a tensor that cannot be sent, or from a signal handler.
    """
    # gloo has no types: its messages begin with a line of its source, `[…/gloo/…/pair.cc:534]`.
    is_of_gloo = re.match(r"\[[^]]*\bgloo/", str(error))
    return isinstance(error, dist.DistError) or is_of_gloo is not None


def raise_if_lost(ranks: set[int], error: RuntimeError) -> None:
    """Raise LostRank if an error comes from a connection to these ranks."""
    if is_of_connection(error):
        raise LostRank(ranks, str(error)) from error
