"""The loss of a last stage, computed by the script's function."""

from collections.abc import Mapping
from typing import Any

from attrs import frozen
from torch import Tensor

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.setup import LossFn
from schedlang.runtime.values import Value, without_graph

_NO_EXTRAS: Mapping[str, Any] = {}


@frozen(eq=False)
class Loss:
    """The loss of the last stage."""

    function: LossFn

    def __call__(
        self, output: Value, target: Value
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """Compute the loss of a microbatch, and the other entries of its dictionary; PipelineError
        if the loss is no scalar.
        """
        loss = self.function(output, target)
        if isinstance(loss, Tensor) and not loss.ndim:
            return loss, _NO_EXTRAS
        extras: dict[str, Any] = {}
        if isinstance(loss, Mapping):
            if "loss" not in loss:
                keys = ", ".join(f"`{key}`" for key in loss) or "nothing"
                raise PipelineError(
                    f"`loss_fn` gives a dictionary of {keys}: one of its keys must be `loss`"
                )
            extras = {key: value for key, value in loss.items() if key != "loss"}
            loss = loss["loss"]
        if isinstance(loss, Tensor) and not loss.ndim:
            return loss, without_graph(extras)
        if isinstance(loss, Tensor):
            wrong = f"has the shape {list(loss.shape)}"
        else:
            wrong = f"is a {type(loss).__name__}"
        way_out = ""
        if loss is None:
            # For example, the loss of a transformers model without labels.
            way_out = ": `loss_fn(output, targets)` computes it"
        raise PipelineError(f"the loss {wrong}, it must be a scalar tensor{way_out}")
