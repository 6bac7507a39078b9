"""The port through which parts are added to a stage, and to the walk over the plan.

By itself a stage runs its module forward and backward, and the walk makes the plan's actions one
after the other. All else is a part, and of one type: slices, skips, older versions of the weights,
copies to the host, sharded weights, sums over replicas, clipping. A part fills in those of these
moments that it needs:

    a step    begin_step ──────► the plan's actions ──────► end_step
                                 begin_anew, where a warm-up is run once more
    F, R      before_forward ──► the module runs ─────────► after_forward ──► recorded
    B, I      before_backward ─► autograd runs ───────────► after_backward
    W                            its gradients add up ────► after_weight
    U         before_update ───► the optimizer steps ─────► after_update
    between   after_step, when the losses are finite; validate, before weights are read or changed;
    steps     state_dict and load_state_dict, for checkpoints

The parts of a stage lie around its module like the layers of an onion, the first one innermost: on
the way in they are asked from the last one to the first, and on the way out the other way round.

What a part adds to a plan's actions is bound once, before the first step with that plan: `ops`
that it does itself, `boxes` of messages that it takes and gives, and `calls` before and after
actions. So a part that is not there costs nothing. A part of a stage does an op of the plan if it
has the method that the op's row names (`schedlang.schedule.kinds`), in place of the stage's own.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar

from attrs import define, field, frozen
from torch import Tensor

from schedlang.plan.plan import Plan
from schedlang.runtime.losses import Added
from schedlang.runtime.torch_private.pytrees import TreeSpec
from schedlang.runtime.values import Value, unflatten, wants_others
from schedlang.schedule.kinds import OPS, Kind

#: Kind, stage and microbatch.
Op = tuple[Kind, int, int]

#: What does an op, by its kind and stage: it is called with the microbatch, `U` with the update.
Ops = Mapping[tuple[Kind, int], Callable[[int], None]]

#: Of each value that a forward hands on, by what it is called in errors, which of its tensors want
#: a gradient.
Wants = dict[str, tuple[bool, ...]]

#: The gradients of some leaves, from roots and their gradients; None where there is none. Those of
#: other leaves may add up.
Walk = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor | None]
]

#: Where messages come from and go to, by microbatch: for each kind of transfer, and its number.
Boxes = Mapping[tuple[Kind, int], dict[int, Any]]


@frozen
class Together:
    """Two ops that a part makes side by side, by two calls in place of theirs; and the index of the
    second one.
    """

    second: int
    begin: Callable[[], None]
    end: Callable[[], None]


class When(Enum):
    """When an extra call is made: before the rank waits for what the action needs, or after the
    action.
    """

    BEFORE, AFTER = range(2)


@frozen
class ExtraCall:
    """A call before or after an action, by its index; one past the last action is the end of the
    step.

    Where the plan's own op is put off to this call, it is the `op`, and is recorded here.
    """

    index: int
    when: When
    call: Callable[[], None]
    op: Op | None = None


@define(eq=False)
class Forward:
    """One run of a stage's module on a microbatch: what goes in and what comes out.

    A run has a graph if a backward follows it: F has one, or where the microbatch is recomputed,
    R, which repeats it. An evaluation is never followed by a backward.
    """

    microbatch: int
    input: Value
    #: Keyword arguments of the module.
    options: Mapping[str, Any]
    has_graph: bool
    is_repeated: bool = False
    #: Whether the last stage computes its loss in this run: of two runs, in the second one.
    has_loss: bool = True
    #: What is called for the module's output.
    call: Callable[..., Any] = field(default=None)
    is_evaluation: bool = False
    #: Whether the backward of another microbatch runs in its midst.
    is_overlapped: bool = False
    #: What the loss compares the output with, on the last stage.
    target: Value = None
    #: The place of a slice in its microbatch.
    slice: int = 0
    #: Tensors in place of the module's own parameters and buffers, by name.
    substitutes: dict[str, Tensor] = field(factory=dict)
    #: Tensors that go in and may get a gradient: those of the input first, then those of each part.
    leaves: Sequence[Tensor] = ()
    #: Values beside the input that are held until the backward in any case.
    held: Sequence[Value] = ()
    #: What the module runs in.
    contexts: Sequence[AbstractContextManager[Any]] = ()
    #: What the module has returned, of which each part takes its own; in the end the output.
    returned: Value = None
    #: Tensors that came out and may have a gradient: those that parts took.
    roots: Sequence[Tensor] = ()
    #: Losses that the module has added; and the root of their sum.
    added: list[Added] = field(factory=list)
    total: Tensor | None = None
    #: Tensors in its midst at which the graph is cut.
    made: Sequence[Tensor] = ()
    #: Of a run that makes no graph: what would want a gradient if it made one.
    known: Wants | None = None
    #: What was handed on so far.
    wants: Wants = field(factory=dict)

    def handed_on(
        self, what: str, tensors: list[Tensor], tree: TreeSpec | None
    ) -> Value:
        """What others are given of `what` came out: leaves, which want a gradient where the graph
        of the backward to come has one for them.

        PipelineError where there are more tensors, or fewer, than are known.
        """
        wants = tuple(tensor.requires_grad for tensor in tensors)
        if self.known is not None:
            known = self.known[what]
            if len(wants) != len(known):
                raise wants_others(what, self.microbatch, wants, known)
            wants = known
        self.wants[what] = wants
        leaves = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(tensors, wants, strict=True)
        ]
        return unflatten(leaves, tree)


@define(eq=False)
class Backward:
    """One backward of a microbatch, from the gradients of its roots to those of its leaves.

    A gradient is None where there is none, as alone: of a root on which the loss does not depend,
    and of a leaf on which no root does.
    """

    microbatch: int
    roots: Sequence[Tensor]
    #: Of the roots: those of the output first, then those that each part adds.
    gradients: list[Tensor | None]
    #: Those of the input first, then those that each part added.
    leaves: Sequence[Tensor]
    from_input: int
    #: How the gradients of the leaves are computed.
    walk: Walk
    #: The same as in the forward, for a checkpoint inside the module that runs it again.
    substitutes: dict[str, Tensor] = field(factory=dict)
    #: Of the leaves.
    computed: Sequence[Tensor | None] = ()
    _taken: int = 0

    def starts(self) -> tuple[list[Tensor], list[Tensor]]:
        """The roots from which autograd starts, with their gradients: those that have a graph, and
        on which the loss depends.
        """
        roots = []
        gradients = []
        for root, gradient in zip(self.roots, self.gradients, strict=True):
            if gradient is not None and root.requires_grad:
                roots.append(root)
                gradients.append(gradient)
        return roots, gradients

    def take(self, count: int) -> list[Tensor | None]:
        """The gradients of the next leaves, for one who waits for them."""
        # Whoever added leaves in the forward takes as many gradients here, in the same order;
        # nobody needs to know how many the others have.
        begin = self._taken
        self._taken += count
        return list(self.computed[begin : self._taken])


class Part:
    """A part of a stage, or of the walk. Every moment does nothing until a part fills it in."""

    #: The plan's ops that it does, and its messages.
    ops: Ops = MappingProxyType({})
    boxes: Boxes = MappingProxyType({})
    #: The norms of a step's updates, before they were clipped.
    norms: Mapping[int, Tensor] = MappingProxyType({})
    #: Whether the batch of the last step was skipped.
    skipped = False

    @property
    def verdict(self) -> str | None:
        """What an audit has found, for the script."""
        return None

    def calls(self, plan: Plan, rank: int) -> Iterable[ExtraCall]:
        """What it does before and after the actions of this rank."""
        return ()

    def pairs(self, plan: Plan, rank: int) -> Mapping[int, Together]:
        """The ops of this rank that it makes side by side, by the index of the first one."""
        return {}

    def bind(self, stage: Any) -> None:
        """The stage around whose module the part lies is built."""

    def begin_step(self) -> None:
        """A training step begins."""

    def begin_anew(self) -> None:
        """A step that has begun starts over after its warm-up, with other weights."""

    def end_step(self) -> None:
        """All actions of a training step are done."""

    def before_forward(self, run: Forward) -> None:
        """The module is about to run: add what it takes."""

    def after_forward(self, run: Forward) -> None:
        """The module has run: take what is this part's of what it returned."""

    def recorded(self, run: Forward) -> None:
        """The graph of a forward is there, from its roots to its leaves, the loss among them."""

    def before_backward(self, run: Backward) -> None:
        """Autograd is about to run: add the gradients of what `after_forward` took."""

    def after_backward(self, run: Backward) -> None:
        """Autograd has run: take the gradients of what `before_forward` added."""

    def after_weight(self, microbatch: int) -> None:
        """The weight gradients of a split backward have been added up."""

    def before_update(self) -> None:
        """The gradient of an update is whole."""

    def after_update(self) -> None:
        """The optimizer has made its step."""

    def after_step(self) -> None:
        """A step is over, and its losses are finite where that was asked for."""

    def skip(self) -> None:
        """The batch is skipped on all ranks."""

    def validate(self) -> None:
        """The script is about to read or change weights: wait for what they are yet to become."""

    def walk_warm_up(
        self, walk: Callable[[], None], start_over: Callable[[], None]
    ) -> None:
        """Walk over the warm-up of a step; `start_over` gets ready to do so once more."""

    def state_dict(self) -> Any:
        """What a checkpoint needs beside modules and optimizers."""

    def load_state_dict(self, state: Any) -> None:
        """Go on where a checkpoint was made, whose weights the modules have by now."""


_Part = TypeVar("_Part", bound=Part)


def parts_by_stage(
    wanted: type[_Part], parts: Mapping[int, Sequence[Part]]
) -> dict[int, _Part]:
    """The part of a type that each stage has, by the number of the stage."""
    return {
        stage: part
        for stage, own in parts.items()
        for part in own
        if isinstance(part, wanted)
    }


def filled(parts: Iterable[Part], moment: str) -> list[Callable[..., None]]:
    """What is called in a moment: it costs nothing for those parts that do not fill it in."""
    return [
        getattr(part, moment)
        for part in parts
        if getattr(type(part), moment) is not getattr(Part, moment)
    ]


def methods_of(owner: object) -> dict[Kind, Callable[..., None]]:
    """By kind of op, the method of an object that the kind's row names, if it has that."""
    return {
        Kind(kind): getattr(owner, op.method)
        for kind, op in OPS.items()
        if isinstance(op.method, str) and hasattr(owner, op.method)
    }
