"""The time that each block of a model takes, measured: it runs by itself, forward and backward."""

from collections.abc import Mapping, Sequence
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from schedlang.runtime.errors import PipelineError
from schedlang.runtime.model.model_arguments import (
    check_blocks,
    check_input,
    check_model,
)
from schedlang.runtime.model.split import Blocks, blocks_of, cut_by, stage_alone
from schedlang.runtime.torch_private.engine import run_backward
from schedlang.runtime.values import Value, detached, flatten, leaves_of

if TYPE_CHECKING:
    from schedlang.runtime.model.stage_forward import BetweenBlocks

#: All blocks run in turn, so many times in a row, and so many turns; the fastest run of a block
#: counts. The first run of a turn also pays for what torch sets up once, and in some turns the
#: machine may have other work.
_RUNS = 3
_TURNS = 5


def measure(
    model: nn.Module,
    input: Value,
    blocks: Sequence[str] = ("",),
    *,
    options: Mapping[str, Any] | None = None,
) -> list[float]:
    """The seconds that each call of a block takes, for the `costs` of `split`, which says what
    blocks are; of a model that does more than call them, with what it does until the next call.

    `input` is a microbatch of the model's, on the device to measure on, and `options` are those of
    its steps. Each block runs in the model without the others, less what that takes without any.
    Blocks that print alike are measured once. The model is left as it is; blocks on the meta device
    get weights for the time of their run. Where there is a process group, its rank 0 measures, and
    tells the others.
    """
    check_model(model)
    check_blocks(blocks)
    check_input("input", input)
    costs: list[list[float]] = [[]]
    if not dist.is_initialized() or dist.get_rank() == 0:
        with torch.random.fork_rng():
            # All blocks once, and over again: so a disturbance of a second does not fall on one
            # block alone.
            blocks_by_name, between = _cut(model, input, blocks, options or {})
            turns = [
                _measure(model, input, options or {}, blocks_by_name, between)
                for _ in range(_TURNS)
            ]
        *seconds, between = (min(each) for each in zip(*turns, strict=True))
        costs = [[max(each - between, 0.0) for each in seconds]]
    if dist.is_initialized():
        dist.broadcast_object_list(costs, src=0)
    return costs[0]


def _cut(
    model: nn.Module, input: Value, blocks: Sequence[str], options: Mapping[str, Any]
) -> tuple[Blocks, "BetweenBlocks | None"]:
    """The blocks, and what the model does beside them, if it is no chain of these."""
    is_list = isinstance(model, nn.ModuleList | nn.Sequential)
    if is_list or tuple(blocks) != ("",):
        named = blocks_of(model, blocks)
        try:
            _run(stage_alone(model, named, None, range(1)), input, options, 1)
        except PipelineError:
            # It does more than call these blocks.
            pass
        else:
            return named, None
    return cut_by(model, blocks, input, options)


def _measure(
    model: nn.Module,
    value: Value,
    options: Mapping[str, Any],
    blocks: Blocks,
    between: "BetweenBlocks | None",
) -> list[float]:
    """The seconds that the model takes with each call of a block alone, and in the end without
    any.
    """
    calls = [*blocks] if between is None else between.record.blocks
    costs = []
    known: dict[str, float] = {}
    for place, name in enumerate(calls):
        stage = stage_alone(model, blocks, between, range(place, place + 1))
        given = value
        # The layers of a transformer are measured once and not a hundred times.
        alike = repr(blocks[name])
        runs = 1 if alike in known else _RUNS
        seconds, value = _run(stage, given, options, runs)
        costs.append(known.setdefault(alike, seconds))
    last = len(calls) - 1
    without = stage_alone(model, blocks, between, range(last, last))
    return [*costs, _run(without, given, options, _RUNS)[0]]


def _run(
    stage: nn.Module, value: Value, options: Mapping[str, Any], runs: int
) -> tuple[float, Value]:
    """The seconds of a forward and backward of a stage, the fastest of some runs; its output."""
    tensors, tree = flatten(value, "the input")
    device = tensors[0].device
    seconds = inf
    state = {
        name: _filled(tensor, device)
        for name, tensor in (*stage.named_parameters(), *stage.named_buffers())
    }
    for _ in range(runs):
        given = detached(tensors, tree)
        for leaf in leaves_of(given):
            leaf.requires_grad_()
        _synchronize(device)
        start = perf_counter()
        arguments = given if isinstance(given, tuple) else (given,)
        output = functional_call(stage, state, arguments, {**options})
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
