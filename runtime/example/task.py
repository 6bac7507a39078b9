"""What the command trains, whatever the plan: a small GPT, on batches of the source of Python's
standard library.
"""

from collections.abc import Iterable

import torch
from attrs import field, frozen
from torch import Tensor, nn

from schedlang.plan.plan import Plan
from schedlang.runtime.example.corpus import draw_batch
from schedlang.runtime.example.gpt import CONTEXT, build_gpt, cut_gpt

#: Rows of a microbatch.
ROWS = 4


@frozen
class Task:
    """A model with so many blocks, and a batch for each update: the same for the same `seed`, and
    as many microbatches.

    So a training goes on as it would have, when it goes on with a plan for another number of ranks.
    The microbatches are those of all `replicas` of the plan; the first of them have the first
    processes.
    """

    plan: Plan
    corpus: Tensor = field(repr=False)
    blocks: int
    seed: int
    replicas: int

    def layers(self) -> list[nn.Module]:
        """The whole model, by its names."""
        return build_gpt(self.blocks, self.seed)

    def stages(self, numbers: Iterable[int]) -> dict[int, nn.Sequential]:
        """Some stages of the plan; those of several pipelines that are replicas are one module."""
        layout = self.plan.layout
        parts = cut_gpt(self.layers(), layout, layout.slices > 1)
        return {number: parts[number - layout.pipeline_of[number].start] for number in numbers}

    @property
    def microbatches(self) -> int:
        """The microbatches of an update, in all replicas."""
        return self.plan.microbatches // self.plan.layout.updates * self.replicas

    @property
    def tokens(self) -> int:
        """The bytes in the batch of an update."""
        return self.microbatches * ROWS * CONTEXT

    def batch(self, update: int) -> tuple[Tensor, Tensor]:
        """What is trained on in an update: inputs and targets."""
        return draw_batch(
            self.corpus, self.microbatches * ROWS, CONTEXT, self.seed * 1_000_003 + update
        )

    def share(self, update: int, replica: int) -> tuple[Tensor, Tensor]:
        """What a replica trains on in a step, which makes several updates where the plan has
        them.
        """
        batches = [self.batch(each) for each in range(update, update + self.plan.layout.updates)]
        parts = [[data.chunk(self.replicas)[replica] for data in each] for each in batches]
        inputs, targets = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(targets)
