"""What a split backward costs: the time of B and W over that of one whole backward, here and in
torch's pipelining.

    python benchmarks/split.py [--rows 4] [--turns 21] [--compiled]

Every line is a stage of transformer blocks. In each turn it runs a whole backward and both splits,
on one thread; the figures are medians of the ratios of the turns, of CPU time. `forward` is the
forward that prepares the split over a plain one. Where the blocks are compiled, the whole backward
is that of `torch.compile(block)`, and torch's pipelining does not split it.
"""

import argparse
import copy
from collections.abc import Callable
from math import nan
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import (
    stage_backward_input,
    stage_backward_weight,
)
from torch.utils.checkpoint import checkpoint

from schedlang.runtime.parts.compiled import backend
from schedlang.runtime.parts.split_backward import Split

LENGTH = 64
HEADS = 8
#: Width, blocks, and whether their activations are checkpointed.
STAGES = (
    (128, 1, False),
    (512, 1, False),
    (512, 4, False),
    (1024, 1, False),
    (512, 1, True),
    (512, 4, True),
)


class Checkpointed(nn.Module):
    """A module whose activations are dropped in the forward and made again in the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: Tensor) -> Any:
        """(rows, length, width) to the same."""
        return checkpoint(self.inner, input, use_reentrant=False)


def blocks(width: int, layers: int, checkpointed: bool) -> nn.Sequential:
    """A stage."""
    each = (
        nn.TransformerEncoderLayer(width, HEADS, dropout=0.0, batch_first=True)
        for _ in range(layers)
    )
    return nn.Sequential(*map(Checkpointed, each) if checkpointed else each)


def compiled(module: nn.Sequential, backend: Any) -> nn.Sequential:
    """A copy of a stage, whose blocks are compiled, each by itself."""
    return nn.Sequential(
        *(torch.compile(copy.deepcopy(block), backend=backend) for block in module)
    )


class Turn:
    """One turn of a stage: seconds by name."""

    def __init__(
        self, plain: nn.Module, split: nn.Module, input: Tensor, compiled: bool
    ) -> None:
        self.plain = plain
        self.split = split
        self.input = input
        self.gradient = torch.randn_like(input)
        self.seconds: dict[str, float] = {}
        for run in (
            self.whole,
            self.halves,
            *([] if compiled else [self.halves_of_torch]),
        ):
            run(input.clone().requires_grad_())

    def timed(self, name: str, call: Callable[..., Any], *args: Any) -> Any:
        """Call something, and note its time."""
        start = process_time()
        result = call(*args)
        self.seconds[name] = process_time() - start
        return result

    def whole(self, input: Tensor) -> None:
        """F and a whole backward."""
        output = self.timed("F", self.plain, input)
        self.timed("whole", torch.autograd.backward, output, self.gradient)

    def halves(self, input: Tensor) -> None:
        """F, B and W here."""
        split = Split()
        with split:
            output = self.timed("F before B", self.split, input)
        self.timed("B", split.backward_input, [output], [self.gradient], [input])
        self.timed("W", split.backward_weight)

    def halves_of_torch(self, input: Tensor) -> None:
        """F, I and W in torch's pipelining."""
        output = self.plain(input)
        weights = list(self.plain.parameters())
        _, groups = self.timed(
            "torch I",
            stage_backward_input,
            [output],
            [self.gradient],
            [input],
            iter(weights),
        )
        self.timed("torch W", stage_backward_weight, iter(weights), groups)

    def ratio(self, over: str, *names: str) -> float:
        """The time of some over that of another, NaN where these were not run."""
        return sum(self.seconds.get(name, nan) for name in names) / self.seconds[over]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, default=4, help=f"sequences of {LENGTH} in a microbatch"
    )
    parser.add_argument("--turns", type=int, default=21)
    parser.add_argument(
        "--compiled", action="store_true", help="blocks in torch.compile"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"rows {options.rows}, length {LENGTH}, {options.turns} turns\n")
    print(
        "width  blocks  checkpoint  (B + W) / whole  torch: (I + W) / whole  B / whole  forward"
    )
    for width, layers, checkpointed in STAGES:
        module = blocks(width, layers, checkpointed)
        input = torch.randn(options.rows, LENGTH, width)
        modules = (module, module)
        if options.compiled:
            modules = (compiled(module, "inductor"), compiled(module, backend))
        # Once without being counted: compilation, and the first memory that is taken.
        Turn(*modules, input, options.compiled)
        turns = [Turn(*modules, input, options.compiled) for _ in range(options.turns)]
        figures = [
            median(turn.ratio(*names) for turn in turns)
            for names in (
                ("whole", "B", "W"),
                ("whole", "torch I", "torch W"),
                ("whole", "B"),
                ("F", "F before B"),
            )
        ]
        print(
            "{:5}  {:6}  {:>10}  {:15.2f}  {:22.2f}  {:9.2f}  {:7.2f}".format(
                width, layers, "yes" if checkpointed else "no", *figures
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
