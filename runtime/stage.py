"""One stage: what F, B and U mean on a torch module.

What is held between two ops stands on the line:

    F ──── graph of the forward ────► B

All else that a stage may do is a part (`schedlang.runtime.part`): backwards in halves, forwards
that are run again, forwards that overlap backwards, losses of its own. Parts run the module,
forward and backward, by the functions here.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.runtime.announcement import Shares
from schedlang.runtime.entry import changeable, works_in_place
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.last_loss import Loss
from schedlang.runtime.part import (
    Backward,
    Boxes,
    Forward,
    Ops,
    Part,
    filled,
    methods_of,
)
from schedlang.runtime.substitution import Substitution
from schedlang.runtime.torch_private.engine import run_backward
from schedlang.runtime.torch_private.pytrees import TreeSpec
from schedlang.runtime.torch_private.tensors import changes_of
from schedlang.runtime.values import (
    Value,
    flatten,
    has_gradient,
    leaves_of,
    without_graph,
)
from schedlang.schedule.kinds import OPS, RECEIVES, SENDS, Kind

_NO_OPTIONS: Mapping[str, Any] = {}
_NOTHING = nullcontext()


@frozen
class StagePlan:
    """What a plan says about a stage: its number, whether it has an input and an output at all,
    beside what passes along far edges, whether it takes inputs of the model, and whether it is an
    end, which hands on nothing and has no `loss_fn`; whether it has a backward, and whether that
    ends here, since the input comes from outside or from a stage without one; and the microbatches
    of its model, of which another plan for a step may have more or fewer.
    """

    number: int
    has_input: bool = True
    has_output: bool = True
    is_first: bool = True
    is_end: bool = False
    has_backward: bool = True
    ends_backward: bool = False
    microbatches: int = 1

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
            layout.microbatches_of(number),
        )


def _walk_whole(
    roots: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Add up the gradients of weights; gives those of the leaves."""
    if roots:
        run_backward(roots, gradients)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A step may be inside `torch.autocast`; a backward is not, as a script alone has it."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


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
        scale: Callable[[int], float] = lambda microbatches: 1.0,
        optimizer: Optimizer | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        self.plan = plan
        self.number = plan.number
        self._output_name = f"the output of stage {plan.number}"
        self.module = module
        self.device = device
        self.loss: Callable[[Value, Value], tuple[Tensor, Mapping[str, Any]]] | None = (
            loss
        )
        #: What losses are multiplied by before their backward: of each step by its microbatches,
        #: and in this step.
        self._scale_now = scale
        self._scale = 1.0
        #: By name, the sums of the losses that the module has added in this step.
        self.added: dict[str, Tensor] = {}
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
        self._recorded = filled(inwards, "recorded")
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
        #: From F to the backward: how many leaves are of the input, all leaves, the roots.
        self._live: dict[int, tuple[int, Sequence[Tensor], Sequence[Tensor]]] = {}
        #: The stages before and after, where they are on this rank; and how often the tensors that
        #: wait for the one after had been changed in place.
        self.stage_before: Stage | None = None
        self.stage_after: Stage | None = None
        self._handed_on: dict[int, list[int]] = {}
        self.works_in_place = works_in_place(module)
        self._substitution = Substitution(module)
        self._has_warned_of_nothing = False
        for part in parts:
            part.bind(self)

    @property
    def ops(self) -> Ops:
        """What does each op of this stage: the method that the op's row names, of the outermost
        part that has it, or of the stage itself.
        """
        does: dict[Kind, Callable[[int], None]] = {
            Kind(kind): partial(op.method, self)
            for kind, op in OPS.items()
            if callable(op.method)
        }
        for owner in (self, *self.parts):
            does |= methods_of(owner)
        found = {(kind, self.number): call for kind, call in does.items()}
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

    def follow(self, plan: Plan) -> None:
        """Take the microbatches of this plan from now on."""
        self.plan = StagePlan.of(plan, self.number)

    def add_before_forward(self, call: Callable[[Forward], None]) -> None:
        """Make a call before each forward from now on, when all parts have added what they do."""
        self._before_forward.append(call)

    def begin_step(self) -> None:
        """A training step begins."""
        self._scale = self._scale_now(self.plan.microbatches)
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
        """F: the output, and on the last stage the loss; the graph is kept for the backward."""
        input = self.take_input(microbatch)
        run = Forward(microbatch, input, self.options_of(microbatch), has_graph=True)
        self.put_output(microbatch, self.record(run))

    def backward(self, microbatch: int) -> None:
        """B: the gradients of the weights, which add up, and of the input; or I, those of the input
        alone. Where no W follows an I, since the weights are frozen, both are the same.
        """
        run = self.begin_backward(microbatch)
        with self.surroundings(run):
            run.computed = run.walk(*run.starts(), run.leaves)
        self.end_backward(run)

    def evaluate(self, microbatch: int) -> None:
        """F without a backward: on the last stage the loss if there are targets, and else the
        output.
        """
        input = self.inputs.pop(microbatch) if self.plan.has_input else ()
        options = self.options_of(microbatch)
        run = Forward(microbatch, input, options, has_graph=False, is_evaluation=True)
        output = self.run(run)
        if self.plan.has_output:
            self.outputs[microbatch] = output

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

    def options_of(self, microbatch: int) -> Mapping[str, Any]:
        """The module's keyword arguments for a microbatch."""
        return self.options.get(microbatch, _NO_OPTIONS)

    def take_input(self, microbatch: int) -> Value:
        """The input of a forward in training."""
        input = self.inputs.pop(microbatch) if self.plan.has_input else ()
        if self.stage_before is not None:
            self.stage_before.check_kept(microbatch, input)
        return input

    def put_output(self, microbatch: int, output: Value) -> None:
        """Leave the output of a forward in training to whoever takes it."""
        if self.plan.has_output:
            self.outputs[microbatch] = output
        if self.stage_after is not None:
            self._handed_on[microbatch] = self._changes_of(output)

    def record(self, run: Forward) -> Value:
        """The output of a run whose graph is kept for the backward."""
        microbatch = run.microbatch
        if not self.plan.ends_backward:
            run.leaves = leaves_of(run.input)
            if self.works_in_place:
                run.input = changeable(run.input)
        from_input = len(run.leaves)
        output = self.run(run)
        tensors, _ = self._tensors_of(output)
        run.roots = [*filter(has_gradient, tensors), *run.roots]
        if not any(root.requires_grad for root in run.roots):
            self._has_no_backward(tensors)
        self._live[microbatch] = from_input, run.leaves, run.roots
        for call in self._recorded:
            call(run)
        if self.loss is not None:
            # The backward starts from the scale, and the loss stays as `loss_fn` gave it.
            scale = self.scale_of(microbatch)
            self.gradients[microbatch] = [torch.full_like(tensors[0], scale)]
            return tensors[0].detach()
        return self.hand_on(run, output)

    def hand_on(self, run: Forward, output: Value) -> Value:
        """What the next stage is given of an output."""
        if not self.plan.has_output:
            return ()
        return run.handed_on(self._output_name, *self._tensors_of(output))

    def run(self, run: Forward) -> Value:
        """Run the module and take its output, or on the last stage the loss."""
        run.call = self.module
        run.target = self.targets.get(run.microbatch)
        for call in self._before_forward:
            call(run)
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
        run.returned = run.call(*arguments, **run.options)
        for call in self._after_forward:
            call(run)
        if not self.plan.has_output:
            return ()
        if run.is_evaluation and run.target is None:
            return run.returned
        if self.loss is not None and run.has_loss:
            return self._loss_of(run, self.loss)
        if run.is_evaluation:
            raise PipelineError(
                "there are targets, but no `loss_fn`: give one to the pipeline, or no targets"
            )
        return run.returned

    def _loss_of(
        self,
        run: Forward,
        loss: Callable[[Value, Value], tuple[Tensor, Mapping[str, Any]]],
    ) -> Tensor:
        value, extras = loss(run.returned, run.target)
        if extras:
            self.extras[run.microbatch] = extras
        if self.keeps_results:
            self.results[run.microbatch] = without_graph(run.returned)
        return value

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

    def begin_backward(self, microbatch: int) -> Backward:
        """A backward, with all that it begins with."""
        from_input, leaves, roots = self._live.pop(microbatch)
        gradients = self.gradients.pop(microbatch) if self.plan.has_output else []
        run = Backward(microbatch, roots, gradients, leaves, from_input, _walk_whole)
        for call in self._before_backward:
            call(run)
        return run

    def surroundings(self, run: Backward) -> AbstractContextManager[Any]:
        """What autograd runs in: as alone, and with the tensors that the forward had, for a
        checkpoint that runs it again.
        """
        if not run.substitutes:
            return without_autocast(self.device)
        surroundings = ExitStack()
        surroundings.enter_context(without_autocast(self.device))
        surroundings.enter_context(self._substitution.of(run.substitutes))
        return surroundings

    def end_backward(self, run: Backward) -> None:
        """Hand on the gradients that a backward has computed."""
        own = run.take(run.from_input)
        # Where the backward ends here, nobody wants the gradient of the input, and none is
        # computed.
        if not self.plan.ends_backward:
            self.input_gradients[run.microbatch] = own
        for call in self._after_backward:
            call(run)

    def scale_of(self, microbatch: int) -> float:
        """What the losses of a microbatch are multiplied by, also those that it has added."""
        return self._scale * self.shares.of(microbatch)
