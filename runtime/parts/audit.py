"""The audit: in the first step, each stage runs in the pipeline and once more alone.

Alone, the plain module runs with a whole backward by autograd: no forward is recomputed, no
backward is split, nothing is copied to the host. It gets the inputs of the stage in the pipeline:

    inputs, random state, buffers ──► F in the pipeline ──► outputs          the same?
                └── copies ─────────► alone ──────────────► outputs
    gradients of the outputs ───────► B, or I and W ──────► gradients        the same?
                └───────────────────► alone ──────────────► gradients

So the audit finds the first op that differs, and the stage that is the cause.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from math import inf, isnan
from typing import Any

import torch
from attrs import define
from torch import Tensor, nn

from schedlang.plan.plan import Plan
from schedlang.runtime.door import Site
from schedlang.runtime.entry import changeable
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.graph_leaves import leaves_between
from schedlang.runtime.losses import Taking, root_of
from schedlang.runtime.part import Backward, ExtraCall, Forward, Part, When
from schedlang.runtime.random_state import random_state, set_random_state
from schedlang.runtime.stage import works_in_place
from schedlang.runtime.substitution import Substitution
from schedlang.runtime.torch_private.engine import run_backward
from schedlang.runtime.torch_private.hidden_hooks import (
    copy_hooks,
    without_hooks_after,
)
from schedlang.runtime.torch_private.leaf_hooks import (
    has_hooks_after,
    has_hooks_of_both,
)
from schedlang.runtime.torch_private.pytrees import tree_flatten, tree_unflatten
from schedlang.runtime.values import dense_parts, has_gradient, leaves_of, tolerance
from schedlang.schedule.kinds import AWAY, MAKERS, REPEATS, Kind

#: The kinds of ops that run a forward, or the input half of its backward.
_OF_INPUT = {Kind.F, *MAKERS[Kind.B]}


@define(eq=False)
class _Alone:
    """The run of a microbatch on the stage alone, from its forward to its backward."""

    #: Copies of the stage's input tensors, by the ids of these tensors, which are kept alive.
    copies: dict[int, Tensor]
    originals: list[Tensor]
    returned: Any
    roots: Sequence[Tensor]
    #: By name, the weights that the stage reads in the pipeline; and the tensors that replace its
    #: buffers and its trained weights here.
    weights: dict[str, Tensor]
    substitutes: dict[str, Tensor]

    def know(self, run: Forward) -> None:
        """Map the input tensors of a second run of the forward to the copies of the first run."""
        # They are other objects with the same values, in the same order.
        tensors = _tensors_of(run)
        copies = [self.copies[id(tensor)] for tensor in self.originals]
        self.copies |= {
            id(tensor): copy for tensor, copy in zip(tensors, copies, strict=True)
        }
        self.originals += tensors
        self.know_leaves(run)

    def know_leaves(self, run: Forward) -> None:
        """Map the leaves of a run to copies. A stage that works in place gets other tensors than
        the leaves, so the copies of those tensors stand for the leaves.
        """
        for leaf, given in zip(run.leaves, leaves_of(run.input), strict=False):
            self.copies[id(leaf)] = self.copies[id(given)]


class Audit(Part):
    """Compares a stage in the pipeline with the stage alone, in the first step; PipelineError if
    they differ.

    `others` are the parts that take values from the module's result, and `loss` is that of the last
    stage. The gradients of `shared` weights, which other stages of this rank have too, are not
    compared.
    """

    def __init__(
        self,
        plan: Plan,
        stage: int,
        module: nn.Module,
        device: torch.device,
        loss: Callable[..., tuple[Tensor, object]] | None,
        others: Sequence[Part],
        shared: frozenset[int],
    ) -> None:
        self._plan = plan
        self._stage = stage
        self._module = module
        self._device = device
        self._loss = loss
        self._others = others
        self._shared = shared
        self._works_in_place = works_in_place(module)
        self._is_first_step = False
        self._steps = 0
        self._alone: dict[int, _Alone] = {}
        #: By name, the weights that the last backward has used, their gradients before the step,
        #: and the sums of gradients of the stage alone.
        self._weights: dict[str, Tensor] = {}
        self._earlier: dict[str, Tensor | None] = {}
        self._sums: dict[str, Tensor] = {}
        self._compared = 0
        self._worst = 0.0

    def calls(self, plan: Plan, rank: int) -> Iterator[ExtraCall]:
        """Compare the gradients of an update after its last backward."""
        last: dict[int, int] = {}
        actions = plan.ranks[rank]
        ops = zip(actions.kind, actions.stage, actions.microbatch, strict=True)
        for index, (kind, stage, microbatch) in enumerate(ops):
            if stage == self._stage and kind in MAKERS[Kind.W]:
                last[plan.layout.update_of(stage, microbatch)] = index
        for index in last.values():
            yield ExtraCall(index, When.AFTER, self._compare_weights)

    def begin_step(self) -> None:
        """Keep the gradients from before the first step."""
        self._steps += 1
        self._is_first_step = self._steps == 1
        if self._is_first_step:
            self._ask_about_hooks()
            self._earlier = {
                name: None if weight.grad is None else weight.grad.clone()
                for name, weight in self._module.named_parameters()
            }

    def _ask_about_hooks(self) -> None:
        """Warn of a module with hooks of its forward and of its backward, if forwards of other
        microbatches run between the two: the hooks may pass values from one to the other.
        """
        actions = self._plan.ranks[self._plan.placement[self._stage]]
        ops = zip(actions.kind, actions.stage, strict=True)
        own = [kind for kind, stage in ops if stage == self._stage]
        if all(
            later != Kind.F
            for kind, later in pairwise(each for each in own if each in _OF_INPUT)
            if kind == Kind.F
        ):
            return
        names = [
            name or "the module itself"
            for name, part in self._module.named_modules()
            if has_hooks_of_both(part)
        ]
        if names:
            warnings.warn(
                f"stage {self._stage} has hooks of the forward and of the backward of "
                f"`{names[0]}`{f' and {len(names) - 1} more' if names[1:] else ''}: what the first "
                "keep is that of another microbatch when the others are called, unless they keep "
                "one for each; a hook of the output, `output.register_hook`, sees its own forward",
                stacklevel=2,
            )

    def before_forward(self, run: Forward) -> None:
        """Run the stage alone, on copies."""
        if not self._is_first_step or run.is_evaluation:
            return
        if run.is_repeated:
            self._alone[run.microbatch].know(run)
            return
        # A forward may change its inputs, draw random numbers, and update its buffers. So this run
        # gets copies, and the random state is restored: the run in the pipeline, which follows,
        # finds everything unchanged.
        given, tree = tree_flatten((run.input, dict(run.options)))
        originals = _tensors_of(run)
        copies = {id(tensor): _copy(tensor) for tensor in originals}
        input, options = tree_unflatten(
            [copies.get(id(value), value) for value in given], tree
        )
        if self._works_in_place:
            input = changeable(input)
        alone = Forward(
            run.microbatch, input, options, has_graph=True, is_repeated=True
        )
        parameters = dict(self._module.named_parameters())
        weights: dict[str, Tensor] = {**parameters}
        weights |= {
            name: tensor for name, tensor in run.substitutes.items() if name in weights
        }
        # With the stage's own weights, this backward would add to the gradients of the training.
        substitutes = {
            **{name: each.clone() for name, each in self._module.named_buffers()},
            **run.substitutes,
            **{
                name: _leaf_of(weight, parameters[name])
                for name, weight in weights.items()
                if weight.requires_grad
            },
        }
        state = random_state(self._device)
        # Alone there is one run, which makes the graph, also if the pipeline recomputes the
        # forward.
        with torch.enable_grad(), Substitution(self._module).of(substitutes):
            arguments = input if isinstance(input, tuple) else (input,)
            with Taking(alone.added):
                alone.returned = self._module(*arguments, **options)
            returned = alone.returned
            # Parts take their values from the result, as in the pipeline, and add their roots.
            for part in self._others:
                part.after_forward(alone)
            output = alone.returned
            if self._loss is not None:
                output, _ = self._loss(output, run.target)
            added = root_of(alone.added)
        set_random_state(self._device, state)
        roots = [*leaves_of(output), *([] if added is None else [added]), *alone.roots]
        known = _Alone(copies, originals, returned, roots, weights, substitutes)
        known.know_leaves(run)
        self._alone[run.microbatch] = known

    def after_forward(self, run: Forward) -> None:
        """Compare the outputs of the module."""
        if not self._is_first_step or run.is_evaluation:
            return
        alone = self._alone[run.microbatch]
        kind = Kind.R if run.is_repeated else Kind.F
        ours, _ = tree_flatten(run.returned)
        expected, _ = tree_flatten(alone.returned)
        for number, (one, other) in enumerate(zip(ours, expected, strict=False)):
            what = f"tensor {number} of its output"
            self._compare(kind, run.microbatch, what, one, other)
            if (
                run.has_graph
                and isinstance(one, Tensor)
                and one.requires_grad != other.requires_grad
            ):
                wants = "wants a gradient, and alone none"
                if other.requires_grad:
                    wants = "wants no gradient, and alone one"
                raise self._differs(kind, run.microbatch, what, wants)
        if not self._plan.layout.has_backward[self._stage]:
            del self._alone[run.microbatch]

    def after_backward(self, run: Backward) -> None:
        """Run the backward of the stage alone, and compare the gradients of its inputs."""
        alone = self._alone.pop(run.microbatch, None)
        if alone is None:
            return
        pairs = zip(alone.roots, run.gradients, strict=True)
        # The stage alone starts from the gradients that came in the pipeline, so a fault of a later
        # stage does not show here.
        starts = [
            (root, gradient)
            for root, gradient in pairs
            if gradient is not None and root.requires_grad
        ]
        leaves = [alone.copies.get(id(leaf)) for leaf in run.leaves]
        self._weights = alone.weights
        wanted = {
            name: alone.substitutes[name]
            for name, weight in alone.weights.items()
            if weight.requires_grad
        }
        others = {}
        if starts:
            others = self._run_backward(alone, starts, [*leaves, *wanted.values()])
        for number, (leaf, ours) in enumerate(zip(leaves, run.computed, strict=True)):
            what = f"the gradient of tensor {number} of its input"
            expected = None if leaf is None else leaf.grad
            self._compare(Kind.B, run.microbatch, what, ours, expected)
        for name, leaf in wanted.items():
            parts = [leaf.grad, others.get(id(alone.weights[name]))]
            for gradient in parts:
                if gradient is not None:
                    earlier = self._sums.get(name)
                    self._sums[name] = (
                        gradient if earlier is None else earlier + gradient
                    )

    def _run_backward(
        self,
        alone: _Alone,
        starts: Sequence[tuple[Tensor, Tensor]],
        own: Sequence[Tensor | None],
    ) -> dict[int, Tensor | None]:
        """Run a whole backward of the stage alone, which adds up gradients in its `own` leaves.

        Returns the gradients of other leaves by their ids, such as weights of the loss function;
        these leaves get their earlier gradients back.
        """
        # Not `torch.autograd.grad`, which reentrant checkpoints refuse. A checkpoint runs its
        # forward again, with the same weights and buffers as in the first run.
        roots, gradients = zip(*starts, strict=True)
        ids = {id(leaf) for leaf in own}
        found = leaves_between(roots, ())
        others = {
            id(leaf): leaf
            for leaf in (*found, *alone.weights.values())
            if id(leaf) not in ids and leaf.requires_grad
        }
        kept = [(leaf, leaf.grad) for leaf in others.values()]
        for leaf in others.values():
            leaf.grad = None
        state = random_state(self._device)
        with (
            Substitution(self._module).of(alone.substitutes),
            torch.autocast(self._device.type, enabled=False),
            without_hooks_after(others.values()),
        ):
            run_backward(roots, gradients)
        set_random_state(self._device, state)
        added = {number: leaf.grad for number, leaf in others.items()}
        for leaf, gradient in kept:
            leaf.grad = gradient
        return added

    def _compare_weights(self) -> None:
        """Compare the sums of gradients of an update."""
        if not self._is_first_step:
            return
        for name, weight in self._weights.items():
            # Other stages may have added to a shared weight, and a hook may have changed its sum.
            if id(weight) in self._shared or has_hooks_after(weight):
                continue
            ours = weight.grad
            earlier = self._earlier.get(name)
            if ours is not None and earlier is not None:
                ours = ours - earlier
            self._compare(
                Kind.W, None, f"the gradient of `{name}`", ours, self._sums.get(name)
            )
        self._sums = {}

    def _compare(
        self, kind: Kind, microbatch: int | None, what: str, ours: Any, alone: Any
    ) -> None:
        if not isinstance(ours, Tensor) and not isinstance(alone, Tensor):
            return
        off = _difference(ours, alone)
        self._compared += 1
        self._worst = max(self._worst, off)
        if isinstance(ours, Tensor) and off <= tolerance(ours):
            return
        differs = "is missing" if ours is None else "is there and alone is none"
        if ours is not None and alone is not None:
            differs = f"differs from it alone by {off:.1e} of the largest number"
        raise self._differs(kind, microbatch, what, differs)

    def _differs(
        self, kind: Kind, microbatch: int | None, what: str, how: str
    ) -> PipelineError:
        """The error that says what differs, and how."""
        names = self._plan.names
        op = "its backwards"
        if microbatch is not None:
            op = names.action(kind, self._stage, microbatch)
        reasons = (
            "; ".join(self._reasons()) or "the stage keeps something from call to call"
        )
        return PipelineError(
            f"audit of stage {names.stage(self._stage)}, {op}: {what} {how}. What may be the "
            f"reason: {reasons}"
        )

    def _reasons(self) -> Iterator[str]:
        """Differences between this stage in the plan and the stage alone, as possible causes."""
        of_kinds = self._plan.microbatches_with
        if of_kinds(REPEATS, self._stage):
            yield "its forwards are run again (R)"
        if of_kinds([Kind.W], self._stage):
            yield "its backwards are in two halves (I and W)"
        if of_kinds(AWAY, self._stage):
            yield "its activations go to the host and back"
        if self._plan.has_updates:
            yield "its weights are updated within a step"
        if len(self._plan.layout.replicas(self._stage)) > 1:
            yield "it has replicas"
        if any(True for _ in self._module.buffers()):
            yield "it has buffers"

    @property
    def verdict(self) -> str:
        """A sentence about the comparison, if all tensors were alike."""
        return (
            f"stage {self._plan.names.stage(self._stage)} computes what it computes alone: "
            f"{self._compared} tensors compared, the largest difference {self._worst:.1e}"
        )


def _tensors_of(run: Forward) -> list[Tensor]:
    """The input tensors of a run."""
    given, _ = tree_flatten((run.input, dict(run.options)))
    return [value for value in given if isinstance(value, Tensor)]


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _leaf_of(weight: Tensor, parameter: nn.Parameter) -> nn.Parameter:
    """A leaf with the memory and the hooks of a module's weight, and its own gradient."""
    leaf = nn.Parameter(weight.data)
    # A script may attach tensors to its weights to which a backward adds.
    leaf.__dict__.update(
        (name, value.clone() if isinstance(value, Tensor) else value)
        for name, value in vars(parameter).items()
    )
    copy_hooks(parameter, leaf)
    return leaf


def _difference(ours: Any, alone: Any) -> float:
    """The largest difference, relative to the largest number; infinite if shapes differ."""
    if not isinstance(ours, Tensor) or not isinstance(alone, Tensor):
        return inf
    pairs = dense_parts(ours), dense_parts(alone)
    if len(pairs[0]) != len(pairs[1]):
        return inf
    return max(map(_difference_of_dense, *pairs), default=0.0)


def _difference_of_dense(ours: Tensor, alone: Tensor) -> float:
    if ours.shape != alone.shape:
        return inf
    differs = (ours != alone) & ~(ours.isnan() & alone.isnan())
    if not differs.any():
        return 0.0
    if not has_gradient(ours):
        return inf
    off = float((ours - alone)[differs].abs().max() / alone[~alone.isnan()].abs().max())
    return inf if isnan(off) else off


def of_stages(site: Site) -> Iterator[tuple[int, Audit]]:
    """Make the part for every stage; parts further out take values from a module's result."""
    for stage, module in site.modules.items():
        elsewhere = {
            id(weight)
            for other_stage, other in site.modules.items()
            for weight in other.parameters()
            if other_stage != stage
        }
        shared = frozenset(elsewhere & set(map(id, module.parameters())))
        others = [*site.parts[stage]]
        loss = site.loss_of(stage)
        yield stage, Audit(site.plan, stage, module, site.device, loss, others, shared)
