"""Checks that the weights that a stage or its loss computes with are weights of the stage. Others
would be missing in updates, in the clipped norm, in sums over replicas, and in checkpoints.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from torch import Tensor, nn

from schedlang.runtime.door import Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.graph_leaves import leaves_between
from schedlang.runtime.part import Forward, Part
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.pytrees import tree_flatten
from schedlang.runtime.torch_private.wrappers import is_sharded
from schedlang.runtime.values import wants_gradient


class ForeignWeights(Part):
    """Looks for such weights in the first forward of a stage that makes a graph."""

    _stage: Stage

    def __init__(self, is_sharded: bool) -> None:
        #: Then a forward reads other tensors than the parameters.
        self._is_sharded = is_sharded
        self._is_known = False

    def bind(self, stage: Stage) -> None:
        """Keep the stage."""
        self._stage = stage

    def recorded(self, run: Forward) -> None:
        """PipelineError if the stage or `loss_fn` has weights that are no weights of its module."""
        if self._is_known:
            return
        self._is_known = True
        # With late weights, a stage reads other tensors than its own parameters.
        weights = dict(self._stage.module.named_parameters()) | run.substitutes
        own = set(map(id, chain(weights.values(), run.leaves)))
        if self._stage.loss is not None:
            self._check_loss(run, own)
        if self._is_sharded:
            return
        # The script may hand in a weight, and read its gradient.
        given, _ = tree_flatten((run.input, dict(run.options), run.target))
        own |= set(map(id, given))
        roots = [root for root in (*run.roots, *run.made) if root.requires_grad]
        others = [
            leaf
            for leaf in leaves_between(roots, ())
            if isinstance(leaf, nn.Parameter) and id(leaf) not in own
        ]
        if others:
            number = self._stage.number
            raise PipelineError(
                f"the forward of stage {number} computes with weights of shape {_shapes(others)} "
                "that its module does not have, such as one of another stage: each rank has a copy "
                "of its own, and its gradient would be in no update, norm, sum or file. Make it a "
                f"weight of the stage, `stages[{number}].register_parameter(name, weight)`, before "
                "`Pipeline` is made, and name it in `tied` if several stages have it; or freeze it"
            )

    def _check_loss(self, run: Forward, own: set[int]) -> None:
        # Targets may require gradients, for the script's own use.
        if wants_gradient(run.target):
            return
        # A last stage may return anything that its loss takes.
        values, _ = tree_flatten(run.returned)
        returned = [
            each for each in values if isinstance(each, Tensor) and each.requires_grad
        ]
        leaves = leaves_between([run.roots[0]], returned)
        others = [leaf for leaf in leaves if id(leaf) not in own]
        if others:
            way = (
                "let the forward of the last stage return them with its output, since the plan's "
                "weights are late,"
                if run.substitutes
                else "give each to the last stage before `Pipeline` is made, "
                f"`stages[{self._stage.number}].register_parameter(name, weight)`,"
            )
            raise PipelineError(
                f"`loss_fn` has weights of its own, of shape {_shapes(others)}, which no stage "
                "has: they would be in no norm that is clipped, in no sum over replicas and in no "
                f"file; {way} or freeze them"
            )


def _shapes(leaves: Iterable[Tensor]) -> str:
    return ", ".join(f"{list(leaf.shape)}" for leaf in leaves)


def of_stages(site: Site) -> Iterator[tuple[int, ForeignWeights]]:
    """Make the part for stages with a backward."""
    for number, module in site.modules.items():
        if site.plan.layout.has_backward[number]:
            yield number, ForeignWeights(is_sharded(module))
