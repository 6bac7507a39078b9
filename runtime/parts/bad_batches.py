"""Batches that are skipped on all ranks (`skip_if`): one rank meets an exception of the script's
own in a forward or a loss, or a function of the script says so of the losses.

A rank that meets one cannot leave the step, for others wait for what it sends. So it goes on with
zeros in place of what the forward would have returned, and all ranks agree at the end:

    rank 1   F0  F1: BadBatch, zeros go on  B0  F2  B1 …  ┐
    rank 0   F0  F1  F2  B0 …                             ┴─ max ─► no gradients, no losses
"""

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from schedlang.runtime.door import Rank, Site
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.meshes import counting_together
from schedlang.runtime.part import Forward, Part, parts_by_stage
from schedlang.runtime.processes import Replicas
from schedlang.runtime.results import Results
from schedlang.runtime.shared_memory import is_part
from schedlang.runtime.stage import Stage
from schedlang.runtime.torch_private.pytrees import tree_flatten, tree_unflatten
from schedlang.runtime.values import has_gradient, look_of
from schedlang.runtime.wire import Wire

_LOG = logging.getLogger("schedlang.runtime")


class Exceptions(Part):
    """The exceptions of some types in the forwards of a stage, and in its loss."""

    def __init__(self, types: tuple[type[Exception], ...]) -> None:
        self._types = types
        #: The first one of this step.
        self.met: Exception | None = None
        #: By the shapes that go in, what a forward has returned.
        self._returned: dict[Hashable, Any] = {}
        self._stage: Stage | None = None
        self._is_evaluation = False

    def bind(self, stage: Stage) -> None:
        """Also catch what the loss raises."""
        self._stage = stage
        if stage.loss is not None:
            stage.loss = partial(self._loss, stage.loss)

    def begin_step(self) -> None:
        """Nothing has been met."""
        self.met = None

    def before_forward(self, run: Forward) -> None:
        """Catch what the module raises; an evaluation is not skipped."""
        self._is_evaluation = run.is_evaluation
        if not run.is_evaluation:
            run.call = partial(self._call, run.call, run)

    def _call(
        self, module: Callable[..., Any], run: Forward, *arguments: Any, **options: Any
    ) -> Any:
        leaves, tree = tree_flatten((arguments, options))
        look = (run.slice, run.has_graph, look_of(leaves))
        try:
            returned = module(*arguments, **options)
        except self._types as error:
            self._meet(error)
            if look in self._returned:
                return _zeros(self._returned[look], self._roots(leaves))
            # What it returns is not known yet: it may be that for zeros.
            arguments, options = tree_unflatten([*map(_zero, leaves)], tree)
            try:
                return module(*arguments, **options)
            except Exception as another:
                raise PipelineError(
                    f"{type(error).__name__}: {error} (the batch cannot be skipped, since nothing "
                    "is known yet of what the stage returns for inputs of this shape, and zeros in "
                    f"place of them end in {type(another).__name__}: {another})"
                ) from error
        if look not in self._returned:
            self._returned[look] = _model_of(returned)
        return returned

    def _loss(self, loss: Callable[..., Any], output: Any, target: Any) -> Any:
        try:
            return loss(output, target)
        except self._types as error:
            if self._is_evaluation:
                raise
            self._meet(error)
            tensors, _ = tree_flatten(output)
            roots = self._roots(tensors)
            dtype = roots[0].dtype if roots else None
            return _root(roots, torch.zeros((), dtype=dtype)), {}

    def _roots(self, inputs: Sequence[Any]) -> list[Tensor]:
        """What goes into a forward and may have a gradient: tensors, and the stage's weights."""
        assert self._stage is not None
        tensors = [each for each in inputs if isinstance(each, Tensor)]
        tensors += self._stage.module.parameters()
        return [each for each in tensors if each.requires_grad]

    def _meet(self, error: Exception) -> None:
        self.met = self.met or error


def _model_of(returned: Any) -> Any:
    """The same with tensors that take no memory."""
    leaves, tree = tree_flatten(returned)
    models = [
        torch.empty((), dtype=leaf.dtype, device=leaf.device)
        .expand(leaf.shape)
        .requires_grad_(leaf.requires_grad)
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]
    return tree_unflatten(models, tree)


def _zeros(model: Any, roots: Sequence[Tensor]) -> Any:
    """Zeros of the shapes that a forward has returned, with a graph that begins at the roots."""
    leaves, tree = tree_flatten(model)
    zeros = [
        leaf
        if not isinstance(leaf, Tensor)
        else _root(roots if leaf.requires_grad else (), _zeros_like(leaf))
        for leaf in leaves
    ]
    return tree_unflatten(zeros, tree)


def _zeros_like(model: Tensor) -> Tensor:
    """Zeros of the shape of a tensor that may be an expanded one."""
    return torch.zeros(model.shape, dtype=model.dtype, device=model.device)


def _root(roots: Sequence[Tensor], value: Tensor) -> Tensor:
    """A value with a graph that begins at some tensors, and takes none of their numbers, which may
    be no numbers.
    """
    for root in roots:
        value = value.to(root.device) + root.flatten()[:0].sum().to(value.dtype)
    return value


def _zero(leaf: Any) -> Any:
    """Zeros in place of a tensor that goes into a forward."""
    if not isinstance(leaf, Tensor):
        return leaf
    zeros = torch.zeros_like(leaf, requires_grad=False)
    return _root([leaf], zeros) if leaf.requires_grad and has_gradient(leaf) else zeros


class BadBatches(Part):
    """What all ranks agree on after a step: whether its batch is skipped."""

    def __init__(
        self,
        are_bad: Callable[[Any], bool] | None,
        stages: Mapping[int, Stage],
        caught: Sequence[Exceptions],
        wire: Wire,
        results: Results,
    ) -> None:
        #: Says of the losses of this rank whether their batch is bad.
        self._are_bad = are_bad
        self._stages = stages
        self._caught = caught
        self._wire = wire
        self._results = results
        modules = [stage.module for stage in stages.values()]
        self._counting: list[Replicas] = counting_together(
            wire.processes.replicas, modules
        )

    def begin_step(self) -> None:
        """This batch is not known to be bad."""
        self.skipped = False

    def after_step(self) -> None:
        """Tell all ranks, and skip the batch if any of them wants that."""
        wants = torch.tensor(float(self._wants()))
        self._wire.reduce(wants, dist.ReduceOp.MAX)
        for replicas in self._counting:
            self._wire.end_sum(self._wire.begin_sum(wants, replicas), replicas)
        if wants:
            self.skip()

    def skip(self) -> None:
        """Forget what the batch has made: losses, outputs and gradients."""
        self.skipped = True
        self._results.begin()
        for stage in self._stages.values():
            for weight in stage.module.parameters():
                if weight.grad is not None and is_part(weight.grad):
                    weight.grad.zero_()
                else:
                    weight.grad = None

    def _wants(self) -> bool:
        for each in self._caught:
            if each.met is not None:
                error = each.met
                _LOG.warning(
                    "the batch is skipped: %s: %s", type(error).__name__, error
                )
                return True
        losses = self._results.losses
        if self._are_bad is None or not losses:
            return False
        # Of several models, a dictionary by their names.
        return bool(self._are_bad(losses.get("", losses)))


def of_stages(site: Site) -> Iterator[tuple[int, Part]]:
    """What looks for exceptions around the stages that are trained."""
    types = site.setup.skipped_exceptions
    for stage in site.modules if types else ():
        yield stage, Exceptions(types)


def of_rank(rank: Rank) -> Iterator[Part]:
    """The agreement of all ranks."""
    setup = rank.site.setup
    are_bad: Any = None if setup.skipped_exceptions else setup.skip_if
    caught = parts_by_stage(Exceptions, rank.site.parts)
    yield BadBatches(are_bad, rank.stages, [*caught.values()], rank.wire, rank.results)
