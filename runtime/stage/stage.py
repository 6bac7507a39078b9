"""One stage: what F, B, I, W, R, U, OFFLOAD and RELOAD mean on a torch module."""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

# Torch imports this in the first backward, which takes a second: here all ranks do so at once, and
# not one by one as the gradient comes down the pipeline.
import torch.fx.experimental.symbolic_shapes
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from schedlang.runtime.stage.offload import Offload, copy_stream
from schedlang.runtime.stage.sharded import sharded
from schedlang.runtime.stage.split_backward import (
    Split,
    has_reentrant_checkpoint,
    run_backward,
    warn_of,
)
from schedlang.runtime.stage.values import Value, flatten, has_gradient, unflatten
from schedlang.runtime.stage.weights import Weights
from schedlang.runtime.watch.watchdog import PipelineError
from schedlang.schedule.kinds import Kind

#: Loss of one microbatch: a scalar, from the last stage's output and the targets.
LossFn = Callable[[Value, Value], Tensor]

_NO_OPTIONS: Mapping[str, Any] = {}


class Stage:
    """A stage and its microbatches in flight.

    The four boxes hold what passes by microbatch, from the moment it is there to its one use:
    `inputs` and `gradients` (of the outputs, one for each tensor that has one) come in, `outputs`
    and `input_gradients` go out. Where the neighbour stage is on the same rank, its box and this
    one's are the same dictionary. `targets` and `options`, the keyword arguments of the module, are
    there for the whole step.

    The last stage has a `loss_fn`: its output is then the loss, detached, whose gradient is
    `loss_scale`. Of the `recomputed` microbatches, F keeps only the input, and R makes the rest
    again before the backward. The `split` ones have their backward in two halves; of the
    `offloaded` ones, what F keeps for it is copied to the host and back.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module,
        device: torch.device,
        *,
        is_first: bool,
        loss_fn: LossFn | None,
        loss_scale: float,
        optimizer: Optimizer | None = None,
        recomputed: Container[int] = (),
        split: Container[int] = (),
        offloaded: Container[int] = (),
        weights: Weights | None = None,
    ) -> None:
        self.number = number
        self.module = module
        self.device = device
        self.is_first = is_first
        self.optimizer = optimizer
        self.loss_fn = loss_fn
        self.recomputed = recomputed
        self.split = split
        self.offloaded = offloaded
        self.inputs: dict[int, Value] = {}
        self.outputs: dict[int, Value] = {}
        self.gradients: dict[int, list[Tensor]] = {}
        self.input_gradients: dict[int, list[Tensor]] = {}
        self.targets: dict[int, Value] = {}
        self.options: dict[int, Mapping[str, Any]] = {}
        #: The weights by version, where they are not simply the module's; and as FSDP has sharded
        #: them, where it has.
        self.weights = weights
        self.sharded = sharded(module)
        self._loss_scale = loss_scale
        #: Tensors of the input and of the output that have gradients, from F (or R) to the last use
        #: of either.
        self._live: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        #: The halves of a backward, from F (or R) to W.
        self._splits: dict[int, Split] = {}
        #: What goes to the host, from F to RELOAD; a GPU copies on a stream of its own.
        self._offloads: dict[int, Offload] = {}
        self._copies = copy_stream(device) if offloaded else None
        #: Whether the module has reentrant checkpoints; the first split forward shows it, and what
        #: is out of reach.
        self._is_reentrant: bool | None = None
        self._warned = False
        #: Input and random state, from F to R.
        self._again: dict[int, tuple[Value, Tensor]] = {}

    def box(self, kind: Kind, number: int) -> dict[int, Any]:
        """Where what passes by a transfer comes from or goes to."""
        return {
            Kind.SEND_F: self.outputs,
            Kind.RECV_F: self.inputs,
            Kind.SEND_B: self.input_gradients,
            Kind.RECV_B: self.gradients,
        }[kind]

    def begin(self, options: dict[int, Mapping[str, Any]]) -> None:
        """Begin a step."""
        self.options = options
        if self.weights is not None:
            self.weights.begin()

    def forward(self, microbatch: int) -> None:
        """F: the output, and on the last stage the loss."""
        input = self.inputs.pop(microbatch)
        if microbatch in self.recomputed:
            self._again[microbatch] = input, _random_state(self.device)
            with torch.no_grad():
                self.outputs[microbatch] = self._run(microbatch, input)
        else:
            self.outputs[microbatch] = self._record(microbatch, input)

    def evaluate(self, microbatch: int) -> None:
        """F without a backward to come; on the last stage the loss if there are targets, and else
        the output.
        """
        output = self._call(microbatch, self.inputs.pop(microbatch), None)
        self.outputs[microbatch] = (
            self._loss(microbatch, output) if microbatch in self.targets else output
        )

    def recompute(self, microbatch: int) -> None:
        """R: the forward again, with the random numbers of the first time."""
        input, state = self._again.pop(microbatch)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            _set_random_state(self.device, state)
            self._record(microbatch, input)

    def _record(self, microbatch: int, input: Value) -> Value:
        """The output of the module, whose graph is kept for the backward."""
        inputs = self._leaves(microbatch, input)
        if microbatch in self.split:
            self._splits[microbatch] = Split(splits_all=self._is_reentrant is not False)
        if microbatch in self.offloaded:
            self._offloads[microbatch] = self._offload(microbatch, input)
        with (
            self._splits.get(microbatch, nullcontext()),
            self._offloads.get(microbatch, nullcontext()),
        ):
            output = self._run(microbatch, input)
        tensors, tree = flatten(output, f"the output of stage {self.number}")
        outputs = [each for each in tensors if has_gradient(each)]
        if not any(each.requires_grad for each in outputs):
            what = "output" if self.loss_fn is None else "loss"
            types = ", ".join(str(each.dtype) for each in tensors)
            raise PipelineError(
                f"the {what} of stage {self.number} ({types}) does not require grad, so it has no "
                "backward"
            )
        self._live[microbatch] = inputs, outputs
        if microbatch in self.split and self._is_reentrant is None:
            self._is_reentrant = has_reentrant_checkpoint(
                each for each in outputs if each.requires_grad
            )
        if self.loss_fn is not None:
            self.gradients[microbatch] = [
                torch.full_like(each, self._loss_scale) for each in outputs
            ]
        return unflatten([each.detach() for each in tensors], tree)

    def _offload(self, microbatch: int, input: Value) -> Offload:
        if self.sharded:
            raise PipelineError(
                f"stage {self.number} is sharded, so its activations cannot be offloaded yet"
            )
        weights = (
            self.module.parameters()
            if self.weights is None
            else self.weights.read(microbatch).values()
        )
        stays = [*weights, *self.module.buffers(), *flatten(input, "")[0]]
        return Offload(self.device, stays, self._copies)

    def _leaves(self, microbatch: int, input: Value) -> list[Tensor]:
        """What the forward takes that gets a gradient."""
        return [] if self.is_first else with_gradients(input)

    def _run(self, microbatch: int, input: Value) -> Value:
        """The module's output, or on the last stage its loss."""
        output = self._call(microbatch, input, self.weights)
        return output if self.loss_fn is None else self._loss(microbatch, output)

    def _call(self, microbatch: int, input: Value, weights: Weights | None) -> Value:
        arguments = input if isinstance(input, tuple) else (input,)
        options = self._options(microbatch)
        if weights is None:
            return self.module(*arguments, **options)
        return functional_call(self.module, weights.read(microbatch), arguments, dict(options))

    def _options(self, microbatch: int) -> Mapping[str, Any]:
        """The keyword arguments of the module."""
        return self.options.get(microbatch, _NO_OPTIONS)

    def _loss(self, microbatch: int, output: Value) -> Tensor:
        if self.loss_fn is None:
            raise PipelineError("there are targets, but no `loss_fn`")
        loss = self.loss_fn(output, self.targets[microbatch])
        if not isinstance(loss, Tensor) or loss.ndim:
            found = (
                f"has the shape {list(loss.shape)}"
                if isinstance(loss, Tensor)
                else f"is a {type(loss).__name__}"
            )
            raise PipelineError(f"the loss {found}, it must be a scalar tensor")
        return loss

    def backward(self, microbatch: int) -> None:
        """B: the gradients of the weights, which add up, and of the input."""
        inputs, outputs = self._live.pop(microbatch)
        run_backward(*_roots(outputs, self._gradients(microbatch)))
        self._pass_back(microbatch, inputs, [each.grad for each in inputs])

    def backward_input(self, microbatch: int) -> None:
        """I: the gradients of the inputs."""
        inputs, outputs = self._live.pop(microbatch)
        split = self._splits[microbatch]
        found = split.backward_input(*_roots(outputs, self._gradients(microbatch)), inputs)
        self._pass_back(microbatch, inputs, found)
        if split.splits_all and split.others and not self._warned:
            self._warned = True
            warn_of(split.others, self.module, self.number)

    def backward_weight(self, microbatch: int) -> None:
        """W: the gradients of the weights, which add up."""
        if self.sharded:
            self.sharded.wait()
        self._splits.pop(microbatch).backward_weight()
        if self.sharded:
            self.sharded.end_backward()

    def offload(self, microbatch: int) -> None:
        """OFFLOAD: what the backward needs goes to the host."""
        self._offloads[microbatch].offload()

    def reload(self, microbatch: int) -> None:
        """RELOAD: it comes back."""
        self._offloads.pop(microbatch).reload()

    def update(self) -> None:
        """U: the optimizer's step, and gradients start anew."""
        self.take()
        self.apply()

    def take(self) -> None:
        """The first half of U: the module's parameters have the gradient of the update."""
        if self.weights is not None:
            self.weights.take()

    def apply(self) -> None:
        """The second one: the optimizer's step."""
        assert self.optimizer is not None
        if self.weights is None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.weights.update(self.optimizer)

    def trained(self) -> list[Tensor]:
        """The weights that have the gradient of the update under way."""
        if self.weights is not None:
            return [*self.weights.of_update().values()]
        return [each for each in self.module.parameters() if each.requires_grad]

    def _gradients(self, microbatch: int) -> list[Tensor]:
        """The gradients of what the forward made."""
        return self.gradients.pop(microbatch)

    def _pass_back(
        self, microbatch: int, inputs: list[Tensor], gradients: Sequence[Tensor | None]
    ) -> None:
        if not self.is_first:
            self.input_gradients[microbatch] = or_zeros(inputs, gradients)


def with_gradients(value: Value) -> list[Tensor]:
    """The tensors of a value whose gradients are wanted, as leaves of the graph to come."""
    return [each.requires_grad_() for each in flatten(value, "")[0] if has_gradient(each)]


def or_zeros(tensors: list[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Gradients of tensors for one who waits for them, even where nothing depends on a tensor."""
    pairs = zip(tensors, gradients, strict=True)
    return [
        torch.zeros_like(tensor) if gradient is None else gradient for tensor, gradient in pairs
    ]


def _roots(outputs: list[Tensor], gradients: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs from which a backward starts, with their gradients: those that do not only pass
    by.
    """
    if all(each.requires_grad for each in outputs):
        return outputs, gradients
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
