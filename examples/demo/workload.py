"""The workload of the command, which is the same for all plans: a small GPT, and batches of text
for it.
"""

from collections.abc import Iterable

import torch
from attrs import field, frozen
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.examples.demo.corpus import draw_batch
from schedlang.examples.demo.gpt import CONTEXT, build_gpt, cut_gpt
from schedlang.examples.demo.recipe import Recipe
from schedlang.plan.plan import Plan
from schedlang.runtime.values import Value

#: Rows of a microbatch.
ROWS = 4


@frozen
class Workload:
    """A model with so many blocks, a batch for each update, and how to train with it. Model and
    batches follow from the `seed` and the number of microbatches alone.

    So a training can go on with a plan for another number of ranks as it would have with its own.
    The microbatches are those of all `replicas` of the plan; the first replica has the first
    processes. Where they are `unequal`, each has rows of a length of its own. Stages and batches
    are on the `device`.
    """

    plan: Plan
    corpus: Tensor = field(repr=False)
    blocks: int
    seed: int
    replicas: int
    recipe: Recipe
    unequal: bool = False
    device: torch.device = field(default=torch.device("cpu"))

    def layers(self) -> list[nn.Module]:
        """The layers of the whole model."""
        return build_gpt(self.blocks, self.seed, max(CONTEXT, self.context))

    @property
    def context(self) -> int:
        """The bytes of a row: as many as divide into the plan's slices."""
        slices = self.plan.layout.slices
        return max(CONTEXT // slices, 1) * slices

    @property
    def writer(self) -> int:
        """The rank that says how it goes: that of a last stage, which has losses."""
        layout = self.plan.layout
        return self.plan.placement[layout.trained[-1].stop - 1]

    def optimizer(self, module: nn.Module) -> Optimizer:
        """The optimizer of a part of the model."""
        return self.recipe.make(module.parameters(), self.plan)

    def stages(self, numbers: Iterable[int]) -> dict[int, nn.Sequential]:
        """Some stages of the plan; those of several pipelines that are replicas are one module."""
        layout = self.plan.layout
        parts = cut_gpt(self.layers(), layout, layout.slices > 1)
        return {
            number: parts[layout.piece(number)].to(self.device) for number in numbers
        }

    @property
    def microbatches(self) -> int:
        """The microbatches of an update, in all replicas."""
        return self.plan.microbatches // self.plan.layout.updates * self.replicas

    @property
    def of_models(self) -> dict[str, int]:
        """The same of each model, by its name; the only one of a plan has none."""
        layout = self.plan.layout
        per_update = self.replicas / layout.updates
        return {
            layout.model_of(pipeline.start): int(
                layout.microbatches_of(pipeline.start) * per_update
            )
            for pipeline in layout.pipelines
        }

    @property
    def losing(self) -> list[str]:
        """The models that have a loss: they hand on to no other."""
        layout = self.plan.layout
        lasts = filter(layout.is_last, range(len(layout.placement)))
        return list(dict.fromkeys(map(layout.model_of, lasts)))

    def lengths(self, update: int, model: str = "") -> list[int]:
        """How many bytes a row of each microbatch of an update has: from a quarter of those that
        the model sees at once, where they are unequal. Models with as many microbatches have the
        same.
        """
        count = self.of_models[model]
        if not self.unequal:
            return [self.context] * count
        slices = self.plan.layout.slices
        most = self.context // slices
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + update)
        drawn = torch.randint(
            max(most // 4, 1), most + 1, (count,), generator=generator
        )
        return [slices * length for length in drawn.tolist()]

    def mean_bytes(self, update: int, model: str) -> float:
        """The bytes of a microbatch of an update, on average."""
        lengths = self.lengths(update, model)
        return ROWS * sum(lengths) / len(lengths)

    def tokens(self, update: int) -> int:
        """The bytes in the batches of an update."""
        return ROWS * sum(sum(self.lengths(update, model)) for model in self.of_models)

    def batch(self, update: int, model: str = "") -> tuple[Tensor, Tensor]:
        """The batch of an update for a model: inputs and targets. Models with as many microbatches
        have the same.
        """
        rows = self.of_models[model] * ROWS
        inputs, targets = draw_batch(
            self.corpus, rows, self.context, self.seed * 1_000_003 + update
        )
        return inputs.to(self.device), targets.to(self.device)

    def cut(self, update: int, model: str = "") -> list[tuple[Tensor, Tensor]]:
        """The batch of an update for a model by microbatch."""
        inputs, targets = (
            data.chunk(self.of_models[model]) for data in self.batch(update, model)
        )
        triples = zip(inputs, targets, self.lengths(update, model), strict=True)
        return [(x[:, :length], y[:, :length]) for x, y, length in triples]

    def share(self, update: int, replica: int) -> tuple[Value, Value]:
        """A replica's share of the batches of a step, which makes as many updates as the plan has;
        of several models by their names. Microbatches that are unequal are lists.
        """
        shares = {
            model: self._share(update, replica, model) for model in self.of_models
        }
        if not self.plan.layout.models:
            return shares[""]
        inputs, targets = zip(*shares.values(), strict=True)
        return dict(zip(shares, inputs, strict=True)), dict(
            zip(shares, targets, strict=True)
        )

    def _share(self, update: int, replica: int, model: str) -> tuple[Value, Value]:
        updates = range(update, update + self.plan.layout.updates)
        if self.unequal:
            size = self.of_models[model] // self.replicas
            own = slice(replica * size, (replica + 1) * size)
            pairs = [
                pair for number in updates for pair in self.cut(number, model)[own]
            ]
            return [x for x, _ in pairs], [y for _, y in pairs]
        batches = [self.batch(number, model) for number in updates]
        parts = [
            [data.chunk(self.replicas)[replica] for data in batch] for batch in batches
        ]
        inputs, targets = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(targets)
