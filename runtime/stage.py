"""One stage: how F, B and U run on a torch module.

From F to B a stage holds the graph of the forward:

    F ──── graph of the forward ────► B

Everything else that a stage may do is a part (`schedlang.runtime.part`): split backwards,
recomputation, forwards that overlap backwards, added losses. Parts run the module's forward and
backward through the functions here.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.on_demand import on_demand
from schedlang.plan.plan import Plan
from schedlang.runtime.announcement import Shares
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
from schedlang.runtime.torch_private.engine import run_backward
from schedlang.runtime.torch_private.pytrees import TreeSpec
from schedlang.runtime.values import (
    Value,
    flatten,
    has_gradient,
    leaves_of,
    without_graph,
)
from schedlang.schedule.kinds import OPS, RECEIVES, SENDS, Kind

if TYPE_CHECKING:
    from schedlang.runtime.entry import changeable
    from schedlang.runtime.substitution import Substitution
else:
    # For stages that change their input in place, and for other tensors in place of the module's.
    changeable = on_demand("schedlang.runtime.entry.changeable")
    Substitution = on_demand("schedlang.runtime.substitution.Substitution")

_NO_OPTIONS: Mapping[str, Any] = {}
_NOTHING = nullcontext()


@frozen
class StagePlan:
    """What a plan says about a stage.

    `has_input` does not count the values of far edges. `has_output`: the next stage of its pipeline
    takes its output or gives gradients for it, or it makes the loss; `hands_on`: one of the first
    and the last. `is_first`: the stage takes inputs of the model. `is_end`: it hands on nothing,
    and has no `loss_fn`. `ends_backward`: its input needs no gradient, since it comes from outside
    or from a stage without a backward.
    `microbatches` are those of its model; another plan for a step may have more or fewer.
    """

    number: int
    has_input: bool = True
    has_output: bool = True
    hands_on: bool = True
    is_first: bool = True
    is_end: bool = False
    has_backward: bool = True
    ends_backward: bool = False
    microbatches: int = 1

    @classmethod
    def of(cls, plan: Plan, number: int) -> "StagePlan":
        """Look up the stage with this number in a plan."""
        layout = plan.layout
        return cls(
            number,
            layout.is_first(number) or layout.follows(number),
            layout.is_last(number)
            or layout.hands_on(number)
            or layout.returns_gradients(number + 1),
            layout.is_last(number) or layout.hands_on(number),
            layout.is_first(number),
            layout.is_end(number) and not layout.is_last(number),
            layout.has_backward[number],
            not layout.returns_gradients(number),
            layout.microbatches_of(number),
        )


def _walk_whole(
    roots: Sequence[Tensor], gradients: Sequence[Tensor], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """Run a whole backward, which adds to the gradients of weights; return those of the leaves."""
    if roots:
        run_backward(roots, gradients)
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def works_in_place(module: nn.Module) -> bool:
    """Whether any part of a module has `inplace` set."""
    return any(getattr(part, "inplace", False) is True for part in module.modules())


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast is off, as it should be for a backward, even if the step is
    inside `torch.autocast`.
    """
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


class Stage:
    """A stage and its microbatches in flight.

    Four dictionaries, by microbatch, hold the tensors that pass from stage to stage until they are
    used, which is once: `inputs` and `gradients` (of the outputs, None for a tensor without one)
    come in, `outputs` and `input_gradients` go out. If the next stage is on the same rank, the two
    stages share dictionaries. `targets` and `options`, which are the module's keyword arguments,
    stay for the whole step.

    The output of a last stage with a `loss` is the detached loss. By microbatch, `extras` are the
    other entries that the loss function returned, and `results`, if they are asked for, what the
    module returned.
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
        #: The factor of losses before their backward, by the number of microbatches of a step; and
        #: the factor in this step.
        self._scale_now = scale
        self._scale = 1.0
        #: The sums of the losses that the module has added in this step, by name.
        self.added: dict[str, Tensor] = {}
        self.optimizer = optimizer
        self.parts = parts
        # A backward calls parts in the reverse order of its forward: gradients of roots are added
        # in the order in which parts took values from the output, and gradients of leaves are taken
        # in the order in which parts added inputs. So each part only counts its own roots and
        # leaves.
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
        #: The weights of this step's losses relative to each other.
        self.shares = Shares()
        self.extras: dict[int, Mapping[str, Any]] = {}
        self.keeps_results = False
        self.results: dict[int, Value] = {}
        self.options: Mapping[int, Mapping[str, Any]] = {}
        #: From F to B: how many leaves belong to the input, all leaves, and the roots.
        self._live: dict[int, tuple[int, Sequence[Tensor], Sequence[Tensor]]] = {}
        self.works_in_place = works_in_place(module)
        self._has_warned_of_nothing = False
        for part in parts:
            part.bind(self)

    @property
    def ops(self) -> Ops:
        """The method that runs each op of this stage. The op's row names it; it belongs to the
        outermost part that has it, or to the stage itself.
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
        """The dictionaries that messages of this stage are taken from and put into."""
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

    def follow(self, plan: Plan) -> None:
        """Take the microbatches of this plan from now on."""
        self.plan = StagePlan.of(plan, self.number)

    def add_before_forward(self, call: Callable[[Forward], None]) -> None:
        """Add a function that is called before each forward, after those of all parts."""
        self._before_forward.append(call)

    def begin_step(self) -> None:
        """A training step begins."""
        self._scale = self._scale_now(self.plan.microbatches)
        # A script may have replaced layers, or put in buffers.
        self.__dict__.pop("_substitution", None)
        for call in self._before_step:
            call()

    def begin_anew(self) -> None:
        """The step starts over, with other weights."""
        self.added = {}
        for call in self._before_anew:
            call()

    def end_step(self) -> None:
        """All actions of a training step are done."""
        for call in self._after_step:
            call()

    @cached_property
    def _substitution(self) -> Substitution:
        """Puts tensors in place of the module's own, within a step."""
        return Substitution(self.module)

    def forward(self, microbatch: int) -> None:
        """F: compute the output, or the loss on the last stage; keep the graph for the backward."""
        input = self.take_input(microbatch)
        run = Forward(microbatch, input, self.options_of(microbatch), has_graph=True)
        self.put_output(microbatch, self.record(run))

    def backward(self, microbatch: int) -> None:
        """B: compute the gradients of the weights, which add up, and of the input. Also I of frozen
        stages, which have no W.
        """
        run = self.begin_backward(microbatch)
        with self.surroundings(run):
            run.computed = run.walk(*run.starts(), run.leaves)
        self.end_backward(run)

    def evaluate(self, microbatch: int) -> None:
        """F without a backward. The last stage computes the loss if there are targets, otherwise it
        keeps the output.
        """
        input = self.inputs.pop(microbatch) if self.plan.has_input else ()
        options = self.options_of(microbatch)
        run = Forward(microbatch, input, options, has_graph=False, is_evaluation=True)
        output = self.run(run)
        if self.plan.hands_on:
            self.outputs[microbatch] = output

    def update(self, _: int = 0) -> None:
        """U: the optimizer's step; then clear gradients."""
        self.begin_update()
        self.end_update()

    def begin_update(self) -> None:
        """The first half of U, after which parameters have the gradient of the update."""
        for part in self.parts:
            part.before_update()

    def end_update(self) -> None:
        """The second half of U: the optimizer's step. A stage without weights has no optimizer."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        # If the step is inside `torch.autocast`, its cache has casts of the old weights.
        torch.clear_autocast_cache()
        for part in self.parts:
            part.after_update()

    def options_of(self, microbatch: int) -> Mapping[str, Any]:
        """The module's keyword arguments for a microbatch."""
        return self.options.get(microbatch, _NO_OPTIONS)

    def take_input(self, microbatch: int) -> Value:
        """The input of a forward in training."""
        return self.inputs.pop(microbatch) if self.plan.has_input else ()

    def put_output(self, microbatch: int, output: Value) -> None:
        """Store the output of a forward in training for the next stage."""
        if self.plan.hands_on:
            self.outputs[microbatch] = output

    def record(self, run: Forward) -> Value:
        """Run a forward, and keep its graph for the backward; return its output."""
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
            # The backward starts from the scale, so the loss stays as `loss_fn` returned it.
            scale = self.scale_of(microbatch)
            self.gradients[microbatch] = [torch.full_like(tensors[0], scale)]
            return tensors[0].detach()
        return self.hand_on(run, output)

    def hand_on(self, run: Forward, output: Value) -> Value:
        """The part of an output that the next stage gets."""
        if not self.plan.has_output:
            return ()
        return run.handed_on(self._output_name, *self._tensors_of(output))

    def run(self, run: Forward) -> Value:
        """Run the module; return its output, or the loss on the last stage."""
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
        # The contexts are nested, the first one outermost.
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
        """Warn that no output of a forward requires a gradient, for example after frozen stages;
        PipelineError for a loss, or for a stage that hands on nothing.
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
        # If all weights of the stage are frozen, there was a warning before the first step.
        if not self._has_warned_of_nothing and (any(weights) or not weights):
            self._has_warned_of_nothing = True
            warnings.warn(
                f"the output of stage {self.number} ({types}) does not require grad, so its "
                "backward has nothing to do",
                stacklevel=2,
            )

    def begin_backward(self, microbatch: int) -> Backward:
        """Prepare a backward: its roots, their gradients, and its leaves."""
        from_input, leaves, roots = self._live.pop(microbatch)
        gradients = self.gradients.pop(microbatch) if self.plan.has_output else []
        run = Backward(microbatch, roots, gradients, leaves, from_input, _walk_whole)
        for call in self._before_backward:
            call(run)
        return run

    def surroundings(self, run: Backward) -> AbstractContextManager[Any]:
        """The context of a backward: without autocast, and with the forward's substituted tensors,
        since a checkpoint may run it again.
        """
        if not run.substitutes:
            return without_autocast(self.device)
        surroundings = ExitStack()
        surroundings.enter_context(without_autocast(self.device))
        surroundings.enter_context(self._substitution.of(run.substitutes))
        return surroundings

    def end_backward(self, run: Backward) -> None:
        """Store the gradients that a backward has computed for the stage before."""
        own = run.take(run.from_input)
        # If the backward ends here, the gradient of the input is not needed, nor computed.
        if not self.plan.ends_backward:
            self.input_gradients[run.microbatch] = own
        for call in self._after_backward:
            call(run)

    def scale_of(self, microbatch: int) -> float:
        """The factor of the losses of a microbatch, including those that modules add."""
        return self._scale * self.shares.of(microbatch)
