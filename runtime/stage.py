"""One stage: what F, B, I, W, R and U mean on a torch module."""

import sys
from collections.abc import Callable, Container
from contextlib import nullcontext
from typing import Any

import torch

# Torch imports this in the first backward, which takes a second: here all ranks do so at once, and not one by one as
# the gradient comes down the pipeline.
import torch.fx.experimental.symbolic_shapes
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.runtime.split import Split, warn_of
from schedlang.runtime.watchdog import PipelineError

#: Loss of one microbatch: a scalar, from the last stage's output and the targets.
LossFn = Callable[[Tensor, Tensor], Tensor]


class Stage:
    """A stage and its microbatches in flight.

    The four boxes hold tensors by microbatch, from the moment they are there to their one use: `inputs` and
    `gradients` (of the outputs) come in, `outputs` and `input_gradients` go out. Where the neighbour stage is on the
    same rank, its box and this one's are the same dictionary.

    The last stage has a `loss_fn`: its output is then the loss, detached, whose gradient is `loss_scale`. Of the
    `recomputed` microbatches, F keeps only the input, and R makes the rest again before the backward. The `split`
    ones have their backward in two halves.
    """

    def __init__(
        self,
        number: int,
        module: nn.Module,
        optimizer: Optimizer | None,
        loss_fn: LossFn | None,
        loss_scale: float,
        recomputed: Container[int] = (),
        split: Container[int] = (),
    ) -> None:
        self.number, self.module, self.optimizer = number, module, optimizer
        self.loss_fn, self.loss_scale = loss_fn, loss_scale
        self.recomputed, self.split = recomputed, split
        self.inputs: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.gradients: dict[int, Tensor] = {}
        self.input_gradients: dict[int, Tensor] = {}
        self.targets: dict[int, Tensor] = {}
        #: Input and output with its graph, from F (or R) to the last use of either.
        self._live: dict[int, tuple[Tensor, Tensor]] = {}
        #: The halves of a backward, from F (or R) to W.
        self._splits: dict[int, Split] = {}
        self._warned = False
        self._sharded = _fsdp_modules(module)
        #: Input, targets and random state, from F to R.
        self._again: dict[int, tuple[Tensor, Tensor | None, Tensor]] = {}

    def forward(self, microbatch: int) -> None:
        """F: the output, and on the last stage the loss."""
        input, targets = self.inputs.pop(microbatch), self.targets.pop(microbatch, None)
        if self.number:
            input.requires_grad_()
        if microbatch in self.recomputed:
            self._again[microbatch] = input, targets, _random_state(input.device)
            with torch.no_grad():
                output = self._run(input, targets)
            # What is to be known of the output until R: its shape and type.
            self._live[microbatch] = input, torch.empty_like(output, device="meta")
        else:
            output = self._run_for_backward(microbatch, input, targets)
        if self.loss_fn is not None:
            self.gradients[microbatch] = torch.full_like(output, self.loss_scale)
        self.outputs[microbatch] = output.detach()

    def recompute(self, microbatch: int) -> None:
        """R: the forward again, with the random numbers of the first time."""
        input, targets, state = self._again.pop(microbatch)
        with torch.random.fork_rng([input.device] if input.device.type == "cuda" else []):
            _set_random_state(input.device, state)
            self._run_for_backward(microbatch, input, targets)

    def _run_for_backward(self, microbatch: int, input: Tensor, targets: Tensor | None) -> Tensor:
        """The output with its graph, which waits for the backward."""
        if microbatch in self.split:
            self._splits[microbatch] = Split()
        with self._splits.get(microbatch, nullcontext()):
            output = self._differentiable(self._run(input, targets))
        self._live[microbatch] = input, output
        return output

    def _run(self, input: Tensor, targets: Tensor | None) -> Tensor:
        """The module's output, or on the last stage its loss."""
        output = self._tensor("output", self.module(input))
        if self.loss_fn is None:
            return output
        assert targets is not None
        loss = self._tensor("loss", self.loss_fn(output, targets))
        if loss.ndim:
            raise PipelineError(f"the loss has the shape {list(loss.shape)}, it must be a scalar")
        return loss

    def backward(self, microbatch: int) -> None:
        """B: the gradients of the weights, which add up, and of the input."""
        input, output = self._live.pop(microbatch)
        torch.autograd.backward(output, self.gradients.pop(microbatch))
        if self.number:
            self._pass_back(microbatch, input, input.grad)

    def backward_input(self, microbatch: int) -> None:
        """I: the gradient of the input."""
        input, output = self._live.pop(microbatch)
        split = self._splits[microbatch]
        found = split.backward_input(output, self.gradients.pop(microbatch), input)
        if self.number:
            self._pass_back(microbatch, input, found)
        if split.others and not self._warned:
            self._warned = True
            warn_of(split.others, self.module, self.number)

    def backward_weight(self, microbatch: int) -> None:
        """W: the gradients of the weights, which add up."""
        for each in self._sharded:
            each.unshard()
        self._splits.pop(microbatch).backward_weight()
        # FSDP reduces gradients at the end of a backward, and has not seen this one.
        for state in (each._get_fsdp_state() for each in self._sharded):
            if state._is_root:
                state._root_post_backward_final_callback()

    def update(self) -> None:
        """U: the optimizer's step, and gradients start anew."""
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()

    def output_like(self, microbatch: int) -> Tensor:
        """The output whose gradient is still to come, for its shape, type and device."""
        return self._live[microbatch][1]

    def _pass_back(self, microbatch: int, input: Tensor, gradient: Tensor | None) -> None:
        # The stage before waits for a gradient, even where the output does not depend on the input.
        self.input_gradients[microbatch] = torch.zeros_like(input) if gradient is None else gradient

    def _tensor(self, what: str, value: object) -> Tensor:
        """What a module or loss function has returned, if it is one tensor."""
        if not isinstance(value, Tensor):
            raise PipelineError(f"the {what} of stage {self.number} is a {type(value).__name__}, it must be one tensor")
        return value

    def _differentiable(self, value: Tensor) -> Tensor:
        """An output or a loss, if a backward can start from it."""
        if not value.requires_grad:
            what = "output" if self.loss_fn is None else "loss"
            raise PipelineError(
                f"the {what} of stage {self.number} ({value.dtype}) does not require grad, so it has no backward"
            )
        return value


def _fsdp_modules(module: nn.Module) -> list[Any]:
    """The parts of a module that `fully_shard` has sharded; the import for it alone would take a second."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [each for each in module.modules() if isinstance(each, fsdp.FSDPModule)]


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
