"""The time that each block of a model takes, measured: it runs by itself, forward and backward."""

from collections.abc import Sequence
from math import inf
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from schedlang.runtime.arguments import check_blocks, check_input, check_model
from schedlang.runtime.model.split import blocks_of, with_only
from schedlang.runtime.torch_private.engine import run_backward
from schedlang.runtime.values import Value, detached, flatten, leaves_of

#: All blocks run in turn, so many times in a row, and so many turns; the fastest run of a block
#: counts. The first run of a turn also pays for what torch sets up once, and in some turns the
#: machine may have other work.
_RUNS = 3
_TURNS = 5


def measure(
    model: nn.Module, input: Value, blocks: Sequence[str] = ("",)
) -> list[float]:
    """The seconds that each block takes, for the `costs` of `split`, which says what blocks are.

    `input` is a microbatch of the model's, on the device to measure on. Each block runs in the
    model without the others, less what that takes without any. Blocks that print alike are measured
    once. The model is left as it is; blocks on the meta device get weights for the time of their
    run. Where there is a process group, its rank 0 measures, and tells the others.
    """
    check_model(model)
    check_blocks(blocks)
    check_input("input", input)
    costs: list[list[float]] = [[]]
    if not dist.is_initialized() or dist.get_rank() == 0:
        with torch.random.fork_rng():
            # All blocks once, and over again: so a disturbance of a second does not fall on one
            # block alone.
            turns = [_measure(model, input, blocks) for _ in range(_TURNS)]
        *seconds, between = (min(each) for each in zip(*turns, strict=True))
        costs = [[max(each - between, 0.0) for each in seconds]]
    if dist.is_initialized():
        dist.broadcast_object_list(costs, src=0)
    return costs[0]


def _measure(model: nn.Module, value: Value, blocks: Sequence[str]) -> list[float]:
    """The seconds that the model takes with each block alone, and in the end without any."""
    named = blocks_of(model, blocks)
    costs = []
    known: dict[str, tuple[float, Value]] = {}
    for name, block in named.items():
        # The layers of a transformer are measured once and not a hundred times.
        if repr(block) not in known:
            known[repr(block)] = _run(with_only(model, named, {name}), value)
        seconds, value = known[repr(block)]
        costs.append(seconds)
    _, passed_on = known[repr(next(iter(named.values())))]
    return [*costs, _run(with_only(model, named, ()), passed_on)[0]]


def _run(stage: nn.Module, value: Value) -> tuple[float, Value]:
    """The seconds of a forward and backward of a stage, and its output."""
    tensors, tree = flatten(value, "the input")
    device = tensors[0].device
    seconds = inf
    state = {
        name: _filled(tensor, device)
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers())
    }
    for _ in range(_RUNS):
        given = detached(tensors, tree)
        for leaf in leaves_of(given):
            leaf.requires_grad_()
        _synchronize(device)
        start = perf_counter()
        output = functional_call(
            stage, state, given if isinstance(given, tuple) else (given,)
        )
        made, tree_made = flatten(output, "the output of a block")
        if roots := [tensor for tensor in made if tensor.requires_grad]:
            run_backward(roots, [torch.ones_like(root) for root in roots])
        _synchronize(device)
        seconds = min(seconds, perf_counter() - start)
    return seconds, detached(made, tree_made)


def _filled(tensor: Tensor, device: torch.device) -> Tensor:
    """A weight or buffer to run with, which leaves the model's alone."""
    if not tensor.is_meta:
        found = tensor.detach().to(device, copy=True)
    elif tensor.is_floating_point():
        found = torch.randn(tensor.shape, dtype=tensor.dtype, device=device) * 0.02
    else:
        found = torch.zeros_like(tensor, device=device)
    return found.requires_grad_(tensor.requires_grad)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
