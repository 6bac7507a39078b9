"""One stage: what F, B, I, W, R and U mean on a torch module.

The life of a microbatch on a stage, by the way in which the plan runs its backward. What is held
between two ops stands on the line:

    whole              F ──── graph of the forward ────► B
    split              F ──── graph of the forward ────► I ──── layers' inputs, ────► W
                                                                output gradients
    recomputed         F ── input, random state ──► R ──── graph ────► B, or I and W

Forward and backward are the same in all of them. Whatever else a stage may have is a part (see
`schedlang.runtime.part`).
"""

import warnings
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.ranks.overlaps import overlapped_pairs
from schedlang.runtime.announcement import Shares
from schedlang.runtime.components import (
    Components,
    OverlappedBackward,
    OverlappedForward,
    overlapped_of,
)
from schedlang.runtime.entry import changeable, works_in_place
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.losses import Taking, root_of, total_of
from schedlang.runtime.part import (
    Backward,
    Boxes,
    Forward,
    Ops,
    Part,
    Wants,
    filled,
    ops_of,
)
from schedlang.runtime.random_state import (
    State,
    random_state,
    set_random_state,
)
from schedlang.runtime.setup import LossFn
from schedlang.runtime.split_backward import (
    Split,
    has_reentrant_checkpoint,
    leaves_between,
    warn_of,
)
from schedlang.runtime.substitution import Substitution
from schedlang.runtime.torch_private.engine import run_backward
from schedlang.runtime.torch_private.leaf_hooks import has_hooks_of_all_modules
from schedlang.runtime.torch_private.pytrees import TreeSpec, tree_flatten
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.values import (
    Value,
    flatten,
    has_gradient,
    leaves_of,
    look_of,
    of_its_own,
    wants_gradient,
    wants_others,
    without_graph,
)
from schedlang.schedule.kinds import OPS, RECEIVES, REPEATS, SENDS, Kind

_NO_OPTIONS: Mapping[str, Any] = {}
_NO_EXTRAS: Mapping[str, Any] = {}
_NOTHING = nullcontext()


@frozen
class StagePlan:
    """What a plan says about a stage: its number, whether it has an input and an output at all,
    beside what passes along far edges, whether it takes inputs of the model, and whether it is an
    end, which hands on nothing and has no
    `loss_fn`; whether it has a backward, and whether that ends here, since the input comes from
    outside or from a stage without one; and of which microbatches the forward is recomputed, or the
    backward split, or overlapped by a forward; and whether any forward overlaps a backward. A stage
    that does not take turns runs its forwards and backwards whole, one after the other.
    """

    number: int
    has_input: bool = True
    has_output: bool = True
    is_first: bool = True
    is_end: bool = False
    has_backward: bool = True
    ends_backward: bool = False
    recomputed: Container[int] = ()
    split: Container[int] = ()
    overlapped: Container[int] = ()
    overlaps: bool = False
    takes_turns: bool = True

    @classmethod
    def of(cls, plan: Plan, number: int) -> "StagePlan":
        """What a plan says about the stage with this number."""
        layout = plan.layout
        return cls(
            number,
            layout.is_first(number) or layout.follows(number),
            layout.is_last(number) or layout.hands_on(number),
            layout.is_first(number),
            layout.is_end(number) and not layout.is_last(number),
            layout.has_backward[number],
            not layout.follows(number) or not layout.has_backward[number - 1],
            plan.microbatches_with(REPEATS, number),
            plan.microbatches_with((Kind.W,), number),
            *_overlaps(plan, number),
        )


def _overlaps(plan: Plan, number: int) -> tuple[set[int], bool]:
    """The microbatches whose backward on a stage runs beside a forward; and whether any forward on
    it runs beside a backward.
    """
    actions = plan.ranks[plan.placement[number]]
    pairs = overlapped_pairs(actions)
    backwards = [index for index in pairs.values() if actions.stage[index] == number]
    overlaps = any(actions.stage[index] == number for index in pairs)
    return {actions.microbatch[index] for index in backwards}, overlaps


@frozen(eq=False)
class Loss:
    """The loss of the last stage."""

    function: LossFn

    def __call__(
        self, output: Value, target: Value
    ) -> tuple[Tensor, Mapping[str, Any]]:
        """The loss of a microbatch, and what else its dictionary has; PipelineError where the loss
        is no scalar.
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
            # As the one of a model of transformers without labels.
            way_out = ": `loss_fn(output, targets)` computes it"
        raise PipelineError(f"the loss {wrong}, it must be a scalar tensor{way_out}")


def _backward_whole(
    roots: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Add up the gradients of weights; gives those of the leaves."""
    if roots:
        run_backward(roots, gradients)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


class Stage:
    """A stage and its microbatches in flight.

    Four dictionaries hold what passes from stage to stage, by microbatch, from the moment it is
    there to its one use: `inputs` and `gradients` (of the outputs, one for each tensor that may
    have one, None where there is none) come in, `outputs` and `input_gradients` go out. Tensors
    that want a gradient require it. Where the next stage is on the same rank,
    the two stages share theirs. `targets` and `options`, the module's keyword arguments, are there
    for the whole step.

    On the last stage, which has a `loss`, the output is the loss, detached; beside it are there, by
    microbatch, the `extras` that the loss function has given, and where they are asked for, the
    `results`, what the module returned.
    """

    def __init__(
        self,
        plan: StagePlan,
        module: nn.Module,
        device: torch.device,
        *,
        loss: Loss | None = None,
        scale: Callable[[], float] = lambda: 1.0,
        optimizer: Optimizer | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        self.plan = plan
        self.number = plan.number
        self._output_name = f"the output of stage {plan.number}"
        self.module = module
        self.device = device
        self.loss = loss
        #: What losses are multiplied by before their backward, which may be another number in each
        #: step; and in this one.
        self._scale_now = scale
        self._scale = 1.0
        #: By name, the sums of the losses that the module has added in this step.
        self.added: dict[str, Tensor] = {}
        #: From F (or R) to the backward: the microbatches of which some loss was added.
        self._have_added: set[int] = set()
        self.optimizer = optimizer
        self.parts = parts
        # A backward goes the way of its forward back: it adds gradients in the order in which parts
        # took values from what was returned, and gives them out in the order in which parts added
        # to what goes in. So roots and leaves need no names, each part counts its own.
        inwards = parts[::-1]
        self._before_step = filled(parts, "begin_step")
        self._before_anew = filled(parts, "begin_anew")
        self._after_step = filled(parts, "end_step")
        self._before_forward = filled(inwards, "before_forward")
        self._after_forward = filled(parts, "after_forward")
        self._before_backward = filled(parts, "before_backward")
        self._after_backward = filled(inwards, "after_backward")
        self.inputs: dict[int, Value] = {}
        self.outputs: dict[int, Value] = {}
        self.gradients: dict[int, list[Tensor | None]] = {}
        self.input_gradients: dict[int, list[Tensor | None]] = {}
        self.targets: dict[int, Value] = {}
        #: How much the losses of this step count beside each other.
        self.shares = Shares()
        self.extras: dict[int, Mapping[str, Any]] = {}
        self.keeps_results = False
        self.results: dict[int, Value] = {}
        self.options: Mapping[int, Mapping[str, Any]] = {}
        #: From F (or R) to the backward: how many leaves are of the input, all leaves, the roots.
        self._live: dict[int, tuple[int, Sequence[Tensor], Sequence[Tensor]]] = {}
        #: The halves of a backward, from F (or R) to W.
        self._splits: dict[int, Split] = {}
        #: Of forwards that were cut where components end, from F (or R) to the backward.
        self._components: dict[int, Components] = {}
        #: The backward beside the forward that runs now; the module's own way to run both; and
        #: whether they have ever taken turns.
        self._beside: OverlappedBackward | None = None
        self._own_overlapped = (
            overlapped_of(module, plan.number) if plan.overlaps else None
        )
        self.takes_turns = self._own_overlapped is not None
        #: Of recomputed microbatches, from F to R: the input, the random state, and what of the
        #: outputs wants a gradient.
        self._again: dict[int, tuple[Value, State, Wants]] = {}
        #: What of the outputs wants a gradient, by what the module was given.
        self._wants: dict[Hashable, Wants] = {}
        #: Whether the module has reentrant checkpoints; the first split forward shows it.
        self._is_reentrant: bool | None = None
        #: The stages before and after, where they are on this rank; and how often the tensors that
        #: wait for the one after had been changed in place.
        self.stage_before: Stage | None = None
        self.stage_after: Stage | None = None
        self._handed_on: dict[int, list[int]] = {}
        #: Whether this step is inside `torch.autocast`.
        self._is_in_autocast = False
        self._works_in_place = works_in_place(module)
        self._substitution = Substitution(module)
        #: Whether it is known of what the loss is made.
        self._knows_loss = False
        self._has_warned = False
        self._has_warned_of_nothing = False

    @property
    def ops(self) -> Ops:
        """What does each op of this stage."""
        found = ops_of(self, self.number)
        for kind, op in OPS.items():
            if callable(op.method):
                found[Kind(kind), self.number] = partial(op.method, self)
        for part in self.parts:
            found |= part.ops
        return found

    @property
    def boxes(self) -> Boxes:
        """Where the messages of this stage come from and go to."""
        own: dict[Kind, dict[int, Any]] = {
            SENDS[Kind.F]: self.outputs,
            RECEIVES[Kind.F]: self.inputs,
            SENDS[Kind.B]: self.input_gradients,
            RECEIVES[Kind.B]: self.gradients,
        }
        found = {(kind, self.number): box for kind, box in own.items()}
        for part in self.parts:
            found |= part.boxes
        return found

    def pass_to(self, following: "Stage") -> None:
        """Share what passes with the next stage, which is on the same rank."""
        self.stage_after = following
        following.stage_before = self
        following.inputs = self.outputs
        self.gradients = following.input_gradients

    def begin_step(self) -> None:
        """A training step begins."""
        self._is_in_autocast = torch.is_autocast_enabled(self.device.type)
        self._scale = self._scale_now()
        for call in self._before_step:
            call()

    def begin_anew(self) -> None:
        """The step that has begun starts over, with other weights."""
        self.added = {}
        for call in self._before_anew:
            call()

    def end_step(self) -> None:
        """All actions of a training step are done."""
        for call in self._after_step:
            call()

    def forward(self, microbatch: int) -> None:
        """F: the output, and on the last stage the loss."""
        input = self.inputs.pop(microbatch) if self.plan.has_input else ()
        if self.stage_before is not None:
            self.stage_before.check_kept(microbatch, input)
        if microbatch in self.plan.recomputed:
            state = random_state(self.device)
            # Tensors of its own, or R would call the hooks that this run registers as well.
            wants = self._run_without_graph(microbatch, of_its_own(input))
            self._again[microbatch] = input, state, wants
        elif not self.plan.has_backward:
            self._check_wants_none(input)
            self._run_without_graph(microbatch, input)
        else:
            run = Forward(microbatch, input, self._options(microbatch), has_graph=True)
            output = self._record(run)
            if self.plan.has_output:
                self.outputs[microbatch] = output
        if self.stage_after is not None:
            self._handed_on[microbatch] = self._changes_of(self.outputs[microbatch])

    def _check_wants_none(self, input: Value) -> None:
        """PipelineError where inputs of the model want a gradient from a stage without a backward.
        What an earlier such stage hands on may want one, as with adapters, and gets none alone.
        """
        if self.plan.is_first and wants_gradient(input):
            raise PipelineError(
                f"`inputs` of stage {self.number} want a gradient, and the stage is frozen in the "
                "plan, so no backward comes to them: detach them, or take the stage out of `frozen`"
            )

    def _run_without_graph(self, microbatch: int, input: Value) -> Wants:
        """Make the output by a run that no backward follows; gives what of it wants a gradient."""
        run = Forward(microbatch, input, self._options(microbatch), has_graph=False)
        with torch.no_grad():
            output = self._run(run)
        # The last stage has its loss in R, if it has a backward.
        if self.loss is None and self.plan.has_output:
            self.outputs[microbatch] = self._hand_on(run, output)
        elif not self.plan.has_backward and self.plan.has_output:
            self.outputs[microbatch] = without_graph(output)
        return run.wants

    def _find_wants(self, run: Forward) -> None:
        """Let a run without a graph know what of its outputs wants a gradient, as the graph of its
        backward will say.

        The first run that is given such tensors finds that out: it makes the graph, which is
        dropped with it. So no forward is run more often than the plan says.
        """
        look = self._look_of(run)
        run.known = self._wants.get(look)
        if run.known is None:
            self._wants[look] = run.wants
            run.contexts = [torch.enable_grad(), *run.contexts]
            with torch.enable_grad():
                # Where there is no graph, a leaf may be changed in place.
                run.input = changeable(run.input)

    def _look_of(self, run: Forward) -> Hashable:
        """All on which it depends what of the outputs wants a gradient."""
        given, _ = tree_flatten((run.input, dict(run.options)))
        trained = tuple(weight.requires_grad for weight in self.module.parameters())
        return run.slice, self.module.training, trained, look_of(given)

    def recompute(self, microbatch: int) -> None:
        """R: the forward again, with the random numbers of the first time.

        PipelineError where other outputs want a gradient than later stages were told.
        """
        input, state, told = self._again.pop(microbatch)
        options = self._options(microbatch)
        run = Forward(microbatch, input, options, has_graph=True, is_repeated=True)
        run.goes_on_with = random_state(self.device)
        set_random_state(self.device, state)
        output = self._record(run)
        for what, wants in run.wants.items():
            if wants != told[what]:
                raise wants_others(what, microbatch, wants, told[what])
        if self.loss is not None:
            self.outputs[microbatch] = output

    def evaluate(self, microbatch: int) -> None:
        """F without a backward: on the last stage the loss if there are targets, and else the
        output.
        """
        input = self.inputs.pop(microbatch) if self.plan.has_input else ()
        options = self._options(microbatch)
        run = Forward(microbatch, input, options, has_graph=False, is_evaluation=True)
        output = self._run(run)
        if self.plan.has_output:
            self.outputs[microbatch] = output

    def overlap(self, microbatch: int, backward: OverlappedBackward) -> None:
        """F, and in its midst components of the backward of another microbatch, of this stage or
        another one of the rank.
        """
        self._beside = backward
        try:
            self.forward(microbatch)
        finally:
            self._beside = None
        self.takes_turns = self.takes_turns or backward.has_begun

    def overlapped_backward(self, microbatch: int) -> OverlappedBackward:
        """B, or I, which goes on one component at a time."""
        components = self._components.get(microbatch)
        count = 1 if components is None else len(components.ends) + 1
        return OverlappedBackward(self._backward(microbatch), count)

    def backward(self, microbatch: int) -> None:
        """B: the gradients of the weights, which add up, and of the input; or I, those of the input
        alone, where a W follows. Where none does, since the weights are frozen, that is all.
        """
        for _ in self._backward(microbatch):
            pass

    def _backward(self, microbatch: int) -> Iterator[None]:
        """A backward, which stops after each component."""
        run = self._begin_backward(microbatch)
        split = self._splits[microbatch] if microbatch in self.plan.split else None
        walk = _backward_whole if split is None else split.backward_input

        # A generator must not be inside a context while it pauses: what runs between two components
        # is another microbatch's forward.
        def walk_inside(
            roots: Sequence[Tensor],
            gradients: Sequence[Tensor],
            leaves: Sequence[Tensor],
        ) -> Sequence[Tensor | None]:
            with self._surroundings(run):
                return walk(roots, gradients, leaves)

        components = self._components.pop(microbatch, None)
        computed: Sequence[Tensor | None] = ()
        if components is None:
            computed = walk_inside(*run.starts(), run.leaves)
            yield
        else:
            starts = zip(*run.starts(), strict=True)
            scale = self._scale_of(microbatch)
            for gradients in components.walk_back(
                starts, run.leaves, walk_inside, scale
            ):
                computed = gradients
                yield
        self._end_backward(run, computed)
        if (
            split is not None
            and split.splits_all
            and split.others
            and not self._has_warned
        ):
            self._has_warned = True
            warn_of(split.others, self.module, self.number)

    def backward_weight(self, microbatch: int) -> None:
        """W: the gradients of the weights, which add up."""
        with self._without_autocast():
            self._splits.pop(microbatch).backward_weight()

    def update(self, _: int = 0) -> None:
        """U: the optimizer's step, and gradients start anew."""
        self.begin_update()
        self.end_update()

    def begin_update(self) -> None:
        """The first half of U: the module's parameters have the gradient of the update."""
        for part in self.parts:
            part.before_update()

    def end_update(self) -> None:
        """The second half of U: the optimizer's step; a stage without weights has none."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        # Where the step is inside `torch.autocast`, that keeps casts of the weights as they were.
        torch.clear_autocast_cache()
        for part in self.parts:
            part.after_update()

    def _options(self, microbatch: int) -> Mapping[str, Any]:
        return self.options.get(microbatch, _NO_OPTIONS)

    def _record(self, run: Forward) -> Value:
        """The output of a run whose graph is kept for the backward."""
        microbatch = run.microbatch
        if not self.plan.ends_backward:
            run.leaves = leaves_of(run.input)
            is_split = microbatch in self.plan.split
            if self._works_in_place or (is_split and has_hooks_of_all_modules()):
                run.input = changeable(run.input)
        from_input = len(run.leaves)
        if microbatch in self.plan.split:
            split = Split(splits_all=self._is_reentrant is not False)
            self._splits[microbatch] = split
            run.contexts = [split]
        components = None
        if microbatch in self.plan.overlapped:
            components = Components(True, self._works_in_place, run.added)
        output = self._run(run, components)
        tensors, _ = self._tensors_of(output)
        # A module that names no ends of components has a backward in one piece.
        if components is not None and components.ends:
            self._components[microbatch] = components
        roots = [*filter(has_gradient, tensors), *run.roots]
        added = root_of(run.added) if run.added else None
        if added is not None:
            self._have_added.add(microbatch)
            roots.append(added)
        if components is not None:
            components.total = added
        if not any(root.requires_grad for root in roots):
            self._has_no_backward(tensors)
        self._live[microbatch] = from_input, run.leaves, roots
        # The first split forward did not know it, and has split all layers, which is right in both
        # cases.
        if microbatch in self.plan.split and self._is_reentrant is None:
            self._is_reentrant = has_reentrant_checkpoint(
                root for root in (*roots, *self._made(microbatch)) if root.requires_grad
            )
        if self.loss is not None:
            # The backward starts from the scale, and the loss stays as `loss_fn` gave it.
            if not self._knows_loss:
                self._check_loss(run, tensors[0])
            scale = self._scale_of(microbatch)
            self.gradients[microbatch] = [torch.full_like(tensors[0], scale)]
            return tensors[0].detach()
        return self._hand_on(run, output) if self.plan.has_output else ()

    def _hand_on(self, run: Forward, output: Value) -> Value:
        return run.handed_on(self._output_name, *self._tensors_of(output))

    def _check_loss(self, run: Forward, loss: Tensor) -> None:
        """PipelineError where `loss_fn` has weights that are no weights of the stage."""
        self._knows_loss = True
        # Targets may want gradients, for the script's own use.
        if wants_gradient(run.target):
            return
        # Where the stage reads late weights, these are other tensors than its own.
        weights = dict(self.module.named_parameters()) | run.substitutes
        own = set(map(id, chain(weights.values(), run.leaves)))
        # A last stage may return anything that its loss takes.
        values, _ = tree_flatten(run.returned)
        returned = [
            each for each in values if isinstance(each, Tensor) and each.requires_grad
        ]
        others = [
            f"{list(leaf.shape)}"
            for leaf in leaves_between([loss], returned)
            if id(leaf) not in own
        ]
        if others:
            way = (
                "let the forward of the last stage return them with its output, since the plan's "
                "weights are late,"
                if run.substitutes
                else "give each to the last stage before `Pipeline` is made, "
                f"`stages[{self.number}].register_parameter(name, weight)`,"
            )
            raise PipelineError(
                f"`loss_fn` has weights of its own, of shape {', '.join(others)}, which no stage "
                "has: they would be in no norm that is clipped, in no sum over replicas and in no "
                f"file; {way} or freeze them"
            )

    def _made(self, microbatch: int) -> Iterator[Tensor]:
        """What the components of a forward have made for one another."""
        if microbatch in self._components:
            for end in self._components[microbatch].ends:
                yield from end.made

    def _tensors_of(self, output: Value) -> tuple[list[Tensor], TreeSpec | None]:
        return flatten(output, self._output_name)

    def _has_no_backward(self, tensors: Sequence[Tensor]) -> None:
        """Say that nothing that came out of a forward wants a gradient, as where all that went
        before is frozen; of a loss, or of a stage that hands on nothing, PipelineError.
        """
        if self.plan.is_end:
            raise PipelineError(
                f"stage {self.number} hands on nothing, and adds no loss that requires grad, so "
                "its backward has nothing to do: call `add_loss` in its forward, or freeze it in "
                "the program"
            )
        types = ", ".join(str(tensor.dtype) for tensor in tensors)
        if self.loss is not None:
            raise PipelineError(
                f"the loss of stage {self.number} ({types}) does not require grad, so it has no "
                "backward"
            )
        weights = [weight.requires_grad for weight in self.module.parameters()]
        # Of a stage whose weights are all frozen, a warning was given before the first step.
        if not self._has_warned_of_nothing and (any(weights) or not weights):
            self._has_warned_of_nothing = True
            warnings.warn(
                f"the output of stage {self.number} ({types}) does not require grad, so its "
                "backward has nothing to do",
                stacklevel=2,
            )

    def _run(self, run: Forward, components: Components | None = None) -> Value:
        """Run the module and take its output, or on the last stage the loss."""
        if self._beside is not None:
            run.is_overlapped = True
            # This forward's own backward may be whole: its components are counted here for the
            # other one's sake, which goes on at each end.
            components = Components() if components is None else components
            if self._own_overlapped is None and self.plan.takes_turns:
                components.at_end = self._beside.advance
            run.contexts = [*run.contexts, self._beside.beside(run, self.device)]
        if components is not None:
            run.contexts = [*run.contexts, components]
        run.target = self.targets.get(run.microbatch)
        for call in self._before_forward:
            call(run)
        if not (run.has_graph or run.is_evaluation):
            self._find_wants(run)
        elif run.has_graph and self.plan.recomputed and not run.is_repeated:
            # Of the same stage, other microbatches are recomputed.
            self._wants.setdefault(self._look_of(run), run.wants)
        if run.substitutes:
            run.contexts = [self._substitution.of(run.substitutes), *run.contexts]
        return self._call_in(run.contexts, run)

    def _call_in(
        self, contexts: Sequence[AbstractContextManager[Any]], run: Forward
    ) -> Value:
        if not contexts:
            return self._call(run)
        # One inside the other, the first one outermost.
        with contexts[0]:
            return self._call_in(contexts[1:], run)

    def _call(self, run: Forward) -> Value:
        arguments = run.input if isinstance(run.input, tuple) else (run.input,)
        with Taking(run.added):
            run.returned = self._returned(arguments, run)
        # A forward that is run again has them then.
        if run.added:
            self._take_added(run)
        if run.goes_on_with is not None:
            set_random_state(self.device, run.goes_on_with)
        for call in self._after_forward:
            call(run)
        if not self.plan.has_output:
            return ()
        if run.is_evaluation and run.target is None:
            return run.returned
        # Of two forwards, the second one has the loss.
        is_first_of_two = (
            not (run.has_graph or run.is_evaluation) and self.plan.has_backward
        )
        if self.loss is not None and not is_first_of_two:
            return self._loss_of(run, self.loss)
        if run.is_evaluation:
            raise PipelineError(
                "there are targets, but no `loss_fn`: give one to the pipeline, or no targets"
            )
        return run.returned

    def _returned(self, arguments: tuple[Any, ...], run: Forward) -> Any:
        """What the module returns."""
        if self._beside is None or self._own_overlapped is None:
            return self.module(*arguments, **run.options)
        forward = OverlappedForward(arguments, run.options)
        return self._own_overlapped(forward=forward, backward=self._beside)

    def _take_added(self, run: Forward) -> None:
        """Sum the losses that the module has added; of a forward that is run again, then."""
        if run.has_graph and not all(each.has_graph for each in run.added):
            raise PipelineError(
                f"stage {self.number} adds a loss without a graph, so it would not be trained: add "
                "it outside of `torch.no_grad`, and of a checkpoint with `use_reentrant=True`"
            )
        is_again = run.microbatch in self.plan.recomputed
        if run.has_graph or run.is_evaluation or not is_again:
            share = self.shares.of(run.microbatch)
            for name, total in total_of(run.added).items():
                value = total * share
                self.added[name] = (
                    self.added[name] + value if name in self.added else value
                )

    def _loss_of(self, run: Forward, loss: Loss) -> Tensor:
        value, extras = loss(run.returned, run.target)
        if extras:
            self.extras[run.microbatch] = extras
        if self.keeps_results:
            self.results[run.microbatch] = without_graph(run.returned)
        return value

    def check_kept(self, microbatch: int, output: Value) -> None:
        """PipelineError where a later forward has changed an output that the next stage takes
        now.
        """
        if self._changes_of(output) != self._handed_on.pop(microbatch):
            raise PipelineError(
                f"the output of stage {self.number} for microbatch {microbatch} was changed in "
                "place by a later forward: return a copy of what the stage keeps"
            )

    def _changes_of(self, output: Value) -> list[int]:
        tensors, _ = self._tensors_of(output)
        return [changes_of(tensor) for tensor in tensors]

    def _begin_backward(self, microbatch: int) -> Backward:
        from_input, leaves, roots = self._live.pop(microbatch)
        gradients = self.gradients.pop(microbatch) if self.plan.has_output else []
        run = Backward(microbatch, roots, gradients, leaves, from_input)
        for call in self._before_backward:
            call(run)
        if microbatch in self._have_added:
            self._have_added.remove(microbatch)
            scale = self._scale_of(microbatch)
            run.gradients.append(torch.full_like(roots[-1], scale))
        return run

    def _scale_of(self, microbatch: int) -> float:
        """What the losses of a microbatch are multiplied by, also those that it has added."""
        return self._scale * self.shares.of(microbatch)

    def _surroundings(self, run: Backward) -> AbstractContextManager[Any]:
        """What autograd runs in, as alone: not in the `torch.autocast` of the forward; and with the
        tensors that the forward had, for a checkpoint that runs it again.
        """
        if not run.substitutes and not self._is_in_autocast:
            return _NOTHING
        surroundings = ExitStack()
        surroundings.enter_context(self._without_autocast())
        if run.substitutes:
            surroundings.enter_context(self._substitution.of(run.substitutes))
        return surroundings

    def _without_autocast(self) -> AbstractContextManager[Any]:
        """A step may be inside `torch.autocast`, of which a script alone keeps its backward."""
        if self._is_in_autocast:
            return torch.autocast(self.device.type, enabled=False)
        return _NOTHING

    def _end_backward(self, run: Backward, computed: Sequence[Tensor | None]) -> None:
        run.computed = computed
        own = run.take(run.from_input)
        # Where the backward ends here, nobody wants the gradient of the input, and none is
        # computed.
        if not self.plan.ends_backward:
            self.input_gradients[run.microbatch] = own
        for call in self._after_backward:
            call(run)
