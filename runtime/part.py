"""The interface of parts, which add features to a stage, and to the walk over the plan.

Without parts, a stage runs its module forward and backward, and the walk runs the plan's actions
one after the other. Every other feature is a part, a subclass of `Part`: slices, skips, older
versions of the weights, copies to the host, sharded weights, sums over replicas, clipping. A part
overrides the methods that it needs; they are called at these moments:

    a step    begin_step ──────► the plan's actions ──────► end_step
                                 begin_anew, if the warm-up runs again
    F, R      before_forward ──► the module runs ─────────► after_forward ──► recorded
    B, I      before_backward ─► autograd runs ───────────► after_backward
    W                            gradients add up ────────► after_weight
    U         before_update ───► the optimizer steps ─────► after_update
    between   after_step, when the losses are finite; validate, before weights are read or changed;
    steps     state_dict and load_state_dict, for checkpoints

The parts of a stage lie around its module in layers, the first part innermost. On the way in they
are called from the last to the first, and on the way out from the first to the last.

Before the first step with a plan, a part says once what it adds to the plan's actions: `ops` that
it runs itself, `boxes` for its messages, and `calls` before and after actions. So a part that is
not there costs nothing. A part of a stage runs an op of the plan, in place of the stage, if it has
the method that the op's row names (`schedlang.schedule.kinds`).
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

#: The functions that run ops, by kind and stage: they are called with the microbatch; for `U` with
#: the number of the update.
Ops = Mapping[tuple[Kind, int], Callable[[int], None]]

#: For each value that a forward hands on, whether each of its tensors needs a gradient. The key is
#: the name of the value in errors.
Wants = dict[str, tuple[bool, ...]]

#: Computes the gradients of some leaves from roots and their gradients; None for a leaf without
#: one. Gradients of other leaves may add up in `.grad`.
Walk = Callable[
    [Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor | None]
]

#: The dictionaries, by microbatch, that messages are taken from and put into: by the kind of the
#: transfer, and its number.
Boxes = Mapping[tuple[Kind, int], dict[int, Any]]


@frozen
class Together:
    """Two ops that a part runs overlapped, by two calls in place of the ops' own; `second` is the
    index of the second op.
    """

    second: int
    begin: Callable[[], None]
    end: Callable[[], None]


class When(Enum):
    """When an extra call is made: before the rank waits for the inputs of the action, or after the
    action.
    """

    BEFORE, AFTER = range(2)


@frozen
class ExtraCall:
    """A call before or after the action with this index; the index after the last action is the
    end of the step.

    If an op of the plan is postponed to this call, it is the `op`, and is recorded here.
    """

    index: int
    when: When
    call: Callable[[], None]
    op: Op | None = None


@define(eq=False)
class Forward:
    """One run of a stage's module on a microbatch, with its inputs and outputs.

    A run has a graph if a backward follows it: the run of F, or of R if the microbatch is
    recomputed. In an evaluation, no run has one.
    """

    microbatch: int
    input: Value
    #: Keyword arguments of the module.
    options: Mapping[str, Any]
    has_graph: bool
    is_repeated: bool = False
    #: Whether the last stage computes its loss in this run; of two runs, it is the second one.
    has_loss: bool = True
    #: The function that is called in place of the module.
    call: Callable[..., Any] = field(default=None)
    is_evaluation: bool = False
    #: Whether the backward of another microbatch runs during this run.
    is_overlapped: bool = False
    #: The target of the loss, on the last stage.
    target: Value = None
    #: The place of a slice in its microbatch.
    slice: int = 0
    #: Tensors in place of the module's own parameters and buffers, by name.
    substitutes: dict[str, Tensor] = field(factory=dict)
    #: Input tensors that may get a gradient: those of the input first, then those of each part.
    leaves: Sequence[Tensor] = ()
    #: Other values that are held until the backward in any case.
    held: Sequence[Value] = ()
    #: The contexts in which the module runs.
    contexts: Sequence[AbstractContextManager[Any]] = ()
    #: The returned value, from which each part takes its own values; the output remains.
    returned: Value = None
    #: Output tensors that may have a gradient: those that parts took.
    roots: Sequence[Tensor] = ()
    #: Losses that the module has added; and the root of their sum.
    added: list[Added] = field(factory=list)
    total: Tensor | None = None
    #: Tensors within the module at which the graph is cut.
    made: Sequence[Tensor] = ()
    #: For a run without a graph: which tensors would need a gradient if it had one.
    known: Wants | None = None
    #: Which tensors of the values handed on so far need a gradient.
    wants: Wants = field(factory=dict)

    def handed_on(
        self, what: str, tensors: list[Tensor], tree: TreeSpec | None
    ) -> Value:
        """The value that other stages get: leaves that require a gradient if the graph of the later
        backward has one for them. `what` is the name of the value in errors.

        PipelineError if the number of tensors is not the known one.
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

    A gradient is None, as in plain autograd, for a root on which the loss does not depend, and for
    a leaf on which no root depends.
    """

    microbatch: int
    roots: Sequence[Tensor]
    #: Gradients of the roots: those of the output first, then those that each part adds.
    gradients: list[Tensor | None]
    #: The leaves of the input first, then those that each part added.
    leaves: Sequence[Tensor]
    from_input: int
    #: How the gradients of the leaves are computed.
    walk: Walk
    #: As in the forward, for a checkpoint inside the module that runs it again.
    substitutes: dict[str, Tensor] = field(factory=dict)
    #: The gradients of the leaves.
    computed: Sequence[Tensor | None] = ()
    _taken: int = 0

    def starts(self) -> tuple[list[Tensor], list[Tensor]]:
        """The roots from which autograd starts, and their gradients: the roots that have a graph,
        and on which the loss depends.
        """
        roots = []
        gradients = []
        for root, gradient in zip(self.roots, self.gradients, strict=True):
            if gradient is not None and root.requires_grad:
                roots.append(root)
                gradients.append(gradient)
        return roots, gradients

    def take(self, count: int) -> list[Tensor | None]:
        """Take the gradients of the next leaves."""
        # Each part takes as many gradients here as it added leaves in the forward, in the same
        # order, so no part needs to know the number of the others' leaves.
        begin = self._taken
        self._taken += count
        return list(self.computed[begin : self._taken])


class Part:
    """A part of a stage, or of the walk. Each method does nothing unless a part overrides it."""

    #: The plan's ops that it runs, and the dictionaries of its messages.
    ops: Ops = MappingProxyType({})
    boxes: Boxes = MappingProxyType({})
    #: The norms of a step's updates, before they were clipped.
    norms: Mapping[int, Tensor] = MappingProxyType({})
    #: Whether the batch of the last step was skipped.
    skipped = False

    @property
    def verdict(self) -> str | None:
        """The result of an audit, for the script."""
        return None

    def calls(self, plan: Plan, rank: int) -> Iterable[ExtraCall]:
        """The calls that it adds before and after actions of this rank."""
        return ()

    def pairs(self, plan: Plan, rank: int) -> Mapping[int, Together]:
        """The ops of this rank that it runs overlapped, by the index of the first one."""
        return {}

    def bind(self, stage: Any) -> None:
        """The stage of this part has been built."""

    def begin_step(self) -> None:
        """A training step begins."""

    def begin_anew(self) -> None:
        """The step starts over after its warm-up, with other weights."""

    def end_step(self) -> None:
        """All actions of a training step are done."""

    def before_forward(self, run: Forward) -> None:
        """The module is about to run: add inputs."""

    def after_forward(self, run: Forward) -> None:
        """The module has run: take this part's values from the returned one."""

    def recorded(self, run: Forward) -> None:
        """The graph of a forward is complete, from its roots to its leaves, with the loss."""

    def before_backward(self, run: Backward) -> None:
        """Autograd is about to run: add the gradients of the values that `after_forward` took."""

    def after_backward(self, run: Backward) -> None:
        """Autograd has run: take the gradients of the inputs that `before_forward` added."""

    def after_weight(self, microbatch: int) -> None:
        """The weight gradients of a split backward have been added up."""

    def before_update(self) -> None:
        """The gradient of an update is complete."""

    def after_update(self) -> None:
        """The optimizer has made its step."""

    def after_step(self) -> None:
        """A step is over, and its losses are finite, if that is checked."""

    def skip(self) -> None:
        """The batch is skipped on all ranks."""

    def validate(self) -> None:
        """The script is about to read or change weights: finish updates that are under way."""

    def walk_warm_up(
        self, walk: Callable[[], None], start_over: Callable[[], None]
    ) -> None:
        """Run the warm-up of a step; `start_over` prepares a second run."""

    def state_dict(self) -> Any:
        """The state that a checkpoint needs besides modules and optimizers."""

    def load_state_dict(self, state: Any) -> None:
        """Restore this state, after the modules have the weights of the checkpoint."""


_Part = TypeVar("_Part", bound=Part)


def parts_by_stage(
    wanted: type[_Part], parts: Mapping[int, Sequence[Part]]
) -> dict[int, _Part]:
    """The part of this type of each stage that has one, by the number of the stage."""
    return {
        stage: part
        for stage, own in parts.items()
        for part in own
        if isinstance(part, wanted)
    }


def filled(parts: Iterable[Part], moment: str) -> list[Callable[..., None]]:
    """The methods of this name that parts override; the others need no call."""
    return [
        getattr(part, moment)
        for part in parts
        if getattr(type(part), moment) is not getattr(Part, moment)
    ]


def methods_of(owner: object) -> dict[Kind, Callable[..., None]]:
    """The methods of an object that rows of kinds name, by kind of op."""
    return {
        Kind(kind): getattr(owner, op.method)
        for kind, op in OPS.items()
        if isinstance(op.method, str) and hasattr(owner, op.method)
    }
