"""The workload of the command, which is the same for all plans: a small GPT, and batches of text
for it.
"""

from collections.abc import Iterable

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.runtime.example.corpus import draw_batch
from schedlang.runtime.example.gpt import CONTEXT, build_gpt, cut_gpt
from schedlang.runtime.example.recipe import Recipe
from schedlang.runtime.values import Value

#: Rows of a microbatch.
ROWS = 4


@frozen
class Workload:
    """A model with so many blocks, a batch for each update, and how to train with it. Model and
    batches follow from the `seed` and the number of microbatches alone.

    So a training can go on with a plan for another number of ranks as it would have with its own.
    The microbatches are those of all `replicas` of the plan; the first replica has the first
    processes. Where they are `unequal`, each has rows of a length of its own.
    """

    plan: Plan
    corpus: Tensor = field(repr=False)
    blocks: int
    seed: int
    replicas: int
    recipe: Recipe
    unequal: bool = False

    def layers(self) -> list[nn.Module]:
        """The layers of the whole model."""
        return build_gpt(self.blocks, self.seed, max(CONTEXT, self.context))

    @property
    def context(self) -> int:
        """The bytes of a row: as many as divide into the plan's slices."""
        slices = self.plan.layout.slices
        return max(CONTEXT // slices, 1) * slices

    def optimizer(self, module: nn.Module) -> Optimizer:
        """The optimizer of a part of the model."""
        return self.recipe.make(module.parameters(), self.plan)

    def stages(self, numbers: Iterable[int]) -> dict[int, nn.Sequential]:
        """Some stages of the plan; those of several pipelines that are replicas are one module."""
        layout = self.plan.layout
        parts = cut_gpt(self.layers(), layout, layout.slices > 1)
        return {number: parts[number - layout.pipeline_of[number].start] for number in numbers}

    @property
    def microbatches(self) -> int:
        """The microbatches of an update, in all replicas."""
        return self.plan.microbatches // self.plan.layout.updates * self.replicas

    def lengths(self, update: int) -> list[int]:
        """How many bytes a row of each microbatch of an update has: from a quarter of those that
        the model sees at once, where they are unequal.
        """
        if not self.unequal:
            return [self.context] * self.microbatches
        slices = self.plan.layout.slices
        most = self.context // slices
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + update)
        least = max(most // 4, 1)
        drawn = torch.randint(least, most + 1, (self.microbatches,), generator=generator)
        return [slices * length for length in drawn.tolist()]

    def tokens(self, update: int) -> int:
        """The bytes in the batch of an update."""
        return ROWS * sum(self.lengths(update))

    def cut(self, update: int) -> list[tuple[Tensor, Tensor]]:
        """The batch of an update by microbatch."""
        inputs, targets = (data.chunk(self.microbatches) for data in self.batch(update))
        triples = zip(inputs, targets, self.lengths(update), strict=True)
        return [(x[:, :length], y[:, :length]) for x, y, length in triples]

    def batch(self, update: int) -> tuple[Tensor, Tensor]:
        """The batch of an update: inputs and targets."""
        return draw_batch(
            self.corpus, self.microbatches * ROWS, self.context, self.seed * 1_000_003 + update
        )

    def share(self, update: int, replica: int) -> tuple[Value, Value]:
        """A replica's share of the batches of a step, which makes as many updates as the plan has:
        inputs and targets, which are lists where microbatches are unequal.
        """
        updates = range(update, update + self.plan.layout.updates)
        if self.unequal:
            size = self.microbatches // self.replicas
            own = slice(replica * size, (replica + 1) * size)
            pairs = [pair for number in updates for pair in self.cut(number)[own]]
            return [x for x, _ in pairs], [y for _, y in pairs]
        batches = [self.batch(number) for number in updates]
        parts = [[data.chunk(self.replicas)[replica] for data in batch] for batch in batches]
        inputs, targets = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(targets)
