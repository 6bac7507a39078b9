"""Checks that the weights of a loss function are weights of its stage. Other weights would be
missing in the clipped norm, in sums over replicas, and in checkpoints.
"""

from collections.abc import Iterator
from itertools import chain

from torch import Tensor

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.graph_leaves import leaves_between
from schedlang.runtime.part import Forward, Part
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.pytrees import tree_flatten
from schedlang.runtime.values import wants_gradient


class LossWeights(Part):
    """Checks the weights of the loss, in the first forward of a last stage."""

    _stage: Stage

    def __init__(self) -> None:
        self._is_known = False

    def bind(self, stage: Stage) -> None:
        """Keep the last stage."""
        self._stage = stage

    def recorded(self, run: Forward) -> None:
        """PipelineError if `loss_fn` has weights that are no weights of the stage."""
        if self._is_known:
            return
        self._is_known = True
        # Targets may require gradients, for the script's own use.
        if wants_gradient(run.target):
            return
        # With late weights, a stage reads other tensors than its own parameters.
        weights = dict(self._stage.module.named_parameters()) | run.substitutes
        own = set(map(id, chain(weights.values(), run.leaves)))
        # A last stage may return anything that its loss takes.
        values, _ = tree_flatten(run.returned)
        returned = [
            each for each in values if isinstance(each, Tensor) and each.requires_grad
        ]
        others = [
            f"{list(leaf.shape)}"
            for leaf in leaves_between([run.roots[0]], returned)
            if id(leaf) not in own
        ]
        if others:
            way = (
                "let the forward of the last stage return them with its output, since the plan's "
                "weights are late,"
                if run.substitutes
                else "give each to the last stage before `Pipeline` is made, "
                f"`stages[{self._stage.number}].register_parameter(name, weight)`,"
            )
            raise PipelineError(
                f"`loss_fn` has weights of its own, of shape {', '.join(others)}, which no stage "
                "has: they would be in no norm that is clipped, in no sum over replicas and in no "
                f"file; {way} or freeze them"
            )


def of_stages(site: Site) -> Iterator[tuple[int, LossWeights]]:
    """Make the part for last stages with a loss and a backward."""
    for number in site.modules:
        if site.loss_of(number) is not None and site.plan.layout.has_backward[number]:
            yield number, LossWeights()
