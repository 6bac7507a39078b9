"""Stages that are not pure: they count, write in place, hand on what they keep, draw numbers."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.model import (
    LENGTH,
    WIDTH,
    Does,
    Model,
    chain,
    feature,
    linear,
    rows,
    weight,
)


@feature("state")
def counter_in_a_buffer(stages: int) -> Model:
    """A buffer that every forward counts up, and that the output depends on"""

    def count(self: Any, x: Tensor) -> Tensor:
        # A forward that is run again for its backward must not count again.
        self.count += 1
        return self.part(x) * (1 + 0.1 * self.count.item())

    return chain(lambda _: Does(count, part=linear(), count=torch.zeros(())), stages)


@feature("state")
def counter_that_nothing_reads(stages: int) -> Model:
    """A buffer that every forward counts up"""

    def count(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return self.part(x)

    return chain(
        lambda _: Does(count, part=linear(), count=torch.zeros((), dtype=torch.int64)),
        stages,
    )


@feature("state")
def counter_in_an_attribute(stages: int) -> Model:
    """A Python number that every forward counts up, and that the output depends on"""

    def count(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        return self.part(x) * (1 + 0.1 * self.count)

    return chain(lambda _: Does(count, part=linear(), count=0), stages)


@feature("state")
def moving_average_of_outputs(stages: int) -> Model:
    """A buffer with a moving average of what a layer makes, which is subtracted from it"""

    def centre(self: Any, x: Tensor) -> Tensor:
        y = self.part(x)
        self.mean.mul_(0.9).add_(y.detach().mean((0, 1)), alpha=0.1)
        return y - self.mean.clone()

    return chain(lambda _: Does(centre, part=linear(), mean=torch.zeros(WIDTH)), stages)


@feature("state")
def buffer_replaced(stages: int) -> Model:
    """A buffer that every forward replaces by another tensor"""

    def replace(self: Any, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return self.part(x - self.mean)

    return chain(
        lambda _: Does(replace, part=linear(), mean=torch.zeros(WIDTH)), stages
    )


@feature("state")
def codebook(stages: int) -> Model:
    """Vector quantization: a codebook in a buffer, which forwards move"""

    def quantize(self: Any, x: Tensor) -> Tensor:
        y = self.part(x)
        with torch.no_grad():
            flat = y.flatten(0, 1)
            chosen = torch.cdist(flat, self.codes).argmin(1)
            near = self.codes[chosen].view_as(y)
            self.codes.index_add_(0, chosen, 0.1 * (flat - self.codes[chosen]))
        return y + (near - y).detach() * 0.5

    return chain(
        lambda _: Does(quantize, part=linear(), codes=torch.randn(5, WIDTH)), stages
    )


@feature("state", not_for={"slices", "skips"})
def returned_buffer(stages: int) -> Model:
    """A stage that hands on its buffer, which the next forward changes"""

    def fill(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        # The next microbatch writes over it while this one's message may still be under way.
        self.kept.copy_(x.detach().mean(0, keepdim=True).expand_as(x))
        return self.part(x), self.kept

    def stage(number: int) -> nn.Module:
        first = Does(fill, part=linear(), kept=torch.zeros(2, LENGTH, WIDTH))
        last = Does(lambda self, x, kept: self.part(x) + kept, part=linear())
        if number == stages - 1:
            return last
        return first if number == 0 else Both(first, last)

    return chain(stage, stages)


class Both(nn.Module):
    """Takes what the stage before made of two values, and makes two."""

    def __init__(self, first: nn.Module, last: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.last = last

    def forward(self, x: Tensor, kept: Tensor) -> Any:
        return self.first(self.last(x, kept))


@feature("state", not_for={"slices", "skips"})
def running_hidden_state(stages: int) -> Model:
    """A hidden state that is kept from microbatch to microbatch, without its graph"""

    def carry(self: Any, x: Tensor) -> Tensor:
        y = self.part(x + self.hidden)
        self.hidden = y.detach()
        return y

    return chain(
        lambda _: Does(carry, part=linear(), hidden=torch.zeros(2, LENGTH, WIDTH)),
        stages,
    )


@feature("state")
def cached_mask(stages: int) -> Model:
    """A mask that the first forward makes and later ones read"""

    def masked(self: Any, x: Tensor) -> Tensor:
        # The first forward of all makes it, also where that one is run without gradients.
        if self.mask is None:
            self.mask = torch.arange(x.shape[-1]) % 2
        return self.part(x * self.mask)

    return chain(lambda _: Does(masked, part=linear(), mask=None), stages)


@feature("state", not_for={"slices", "skips"})
def input_changed_in_place(stages: int) -> Model:
    """Stages that begin by changing their input in place"""

    def change(self: Any, x: Tensor) -> Tensor:
        return self.part(x.mul_(0.5))

    # Alone, the output of a tanh may not be changed: its backward reads it.
    def stage(_: int) -> nn.Module:
        return Does(
            change,
            part=nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
            ),
        )

    return chain(stage, stages)


# The slices of a row are views of one tensor, of which autograd knows one version.
@feature("state", not_for={"slices"})
def first_input_changed_in_place(stages: int) -> Model:
    """A first stage that changes the batch in place"""

    def stage(number: int) -> nn.Module:
        if number:
            return linear()
        return Does(lambda self, x: self.part(x.mul_(0.5).add_(1)), part=linear())

    return chain(stage, stages)


@feature("state", not_for={"slices", "skips"})
def integer_input_changed_in_place(stages: int) -> Model:
    """Stages that change in place an integer tensor that they are given"""

    def begin(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.part(x), torch.ones(len(x), dtype=torch.int64)

    def middle(self: Any, x: Tensor, depth: Tensor) -> tuple[Tensor, Tensor]:
        # In place: what the stage before has sent must not change with it.
        depth += 1
        return self.part(x) * depth[:, None, None].clone(), depth

    def stage(number: int) -> nn.Module:
        if number == 0:
            return Does(begin, part=linear())
        if number == stages - 1:
            return Does(lambda self, x, depth: middle(self, x, depth)[0], part=linear())
        return Does(middle, part=linear())

    return chain(stage, stages)


# Alone, what a skip or a slice has is changed with it.
@feature("state", not_for={"slices", "skips"})
def relu_in_place_first(stages: int) -> Model:
    """Stages that begin with a ReLU in place"""

    def stage(_: int) -> nn.Module:
        return nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    return chain(stage, stages)


# Alone, what a skip or a slice has is changed with it.
@feature("state", not_for={"slices", "skips"})
def data_changed_in_place(stages: int) -> Model:
    """Stages that change their input behind autograd's back, by `.data`"""

    def change(self: Any, x: Tensor) -> Tensor:
        x.data.mul_(0.5)
        return self.part(x)

    def stage(_: int) -> nn.Module:
        return Does(
            change,
            part=nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)
            ),
        )

    return chain(stage, stages)


@feature("state", not_for={"slices", "skips"})
def input_clamped_without_gradient(stages: int) -> Model:
    """Stages that clamp their input in place, under torch.no_grad"""

    def clamp(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(0.5)
        return self.part(x)

    def stage(_: int) -> nn.Module:
        return Does(clamp, part=nn.Sequential(linear(), nn.Linear(WIDTH, WIDTH)))

    return chain(stage, stages)


class Written(torch.autograd.Function):
    """A sine that is written into memory which is there already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mark_dirty(memory)
        return memory.copy_(x.sin())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * x.cos(), None


@feature("state", not_for={"slices", "skips"})
def output_in_a_workspace(stages: int) -> Model:
    """A stage whose output is always in the same memory"""
    return _in_workspace(stages, Tensor.detach)


@feature("state", not_for={"slices", "skips"})
def output_in_a_hidden_workspace(stages: int) -> Model:
    """A stage whose output is always in the same memory, which is written over by `.data`, as by a
    CUDA graph
    """
    return _in_workspace(stages, lambda tensor: tensor.data)


def _in_workspace(stages: int, alias: Callable[[Tensor], Tensor]) -> Model:
    def write(self: Any, x: Tensor) -> Tensor:
        if not self.memory:
            self.memory.append(torch.empty_like(x))
        return Written.apply(self.part(x), alias(self.memory[0]))

    return chain(lambda _: Does(write, part=linear(), memory=[]), stages)


@feature("state")
def weight_decayed_in_the_forward(stages: int) -> Model:
    """Weights that every forward makes smaller, by `.data`"""

    def decay(self: Any, x: Tensor) -> Tensor:
        self.part[0].weight.data.mul_(0.9)
        return self.part(x)

    return chain(lambda _: Does(decay, part=linear()), stages)


@feature("state")
def weight_clamped_in_the_forward(stages: int) -> Model:
    """Weights that the forward clamps in place, as in a critic"""

    def clamp(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.part[0].weight.clamp_(-0.2, 0.2)
        return self.part(x)

    return chain(lambda _: Does(clamp, part=linear()), stages)


@feature("state", draws=True)
def python_random_numbers(stages: int) -> Model:
    """Random numbers of Python in the forward"""
    return chain(
        lambda _: Does(
            lambda self, x: self.part(x) * (1 + random.random()), part=linear()
        ),
        stages,
    )


@feature("state", draws=True)
def numpy_random_numbers(stages: int) -> Model:
    """Random numbers of numpy in the forward"""
    return chain(
        lambda _: Does(
            lambda self, x: self.part(x) * (1 + numpy.random.rand()), part=linear()
        ),
        stages,
    )


@feature("state")
def own_generator(stages: int) -> Model:
    """Random numbers of a torch.Generator that the module has"""

    def noisy(self: Any, x: Tensor) -> Tensor:
        return self.part(x) + 0.1 * torch.randn(x.shape, generator=self.generator)

    return chain(
        lambda stage: Does(
            noisy, part=linear(), generator=torch.Generator().manual_seed(stage)
        ),
        stages,
    )


@feature("state", draws=True)
def seeds_in_the_forward(stages: int) -> Model:
    """A forward that sets the seed of torch, and draws"""

    def noisy(self: Any, x: Tensor) -> Tensor:
        seed = int(torch.randint(1000, ()))
        torch.manual_seed(seed)
        return self.part(x) + 0.1 * torch.randn_like(x)

    return chain(lambda _: Does(noisy, part=linear()), stages)


@feature("state")
def buffers_in_one_memory(stages: int) -> Model:
    """A buffer that every forward counts up, and a view of it that the output depends on"""

    def count(self: Any, x: Tensor) -> Tensor:
        self.counts[0] += 1
        return self.part(x) * (1 + 0.1 * self.first)

    def stage(_: int) -> nn.Module:
        counts = torch.zeros(3)
        return Does(count, part=linear(), counts=counts, first=counts[:1])

    return chain(stage, stages)


@feature("state")
def weights_in_one_memory(stages: int) -> Model:
    """Two layers whose weights share memory, by `.data`, and are two parameters"""

    def stage(_: int) -> nn.Module:
        first = linear()
        second = linear()
        second[0].weight.data = first[0].weight.data
        return nn.Sequential(first, second)

    return chain(stage, stages)


@feature("state")
def weight_in_another_one(stages: int) -> Model:
    """A weight that is a view of some rows of another"""

    def both(self: Any, x: Tensor) -> Tensor:
        return self.part(x) + F.linear(x, self.some).repeat(1, 1, 2)

    def stage(_: int) -> nn.Module:
        part = linear()
        rows_of_it = part[0].weight.data[2 : 2 + WIDTH // 2]
        return Does(both, part=part, some=nn.Parameter(rows_of_it))

    return chain(stage, stages)


def tokens(microbatch_rows: int = 2, words: int = 11) -> Any:
    def draw(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + step)
        shape = (2, microbatch_rows * microbatches, LENGTH)
        inputs, targets = torch.randint(words, shape, generator=generator)
        return inputs, targets

    return draw


def words_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def language_model(stages: int, embedding: nn.Module, **how: Any) -> Model:
    """An embedding, layers, and scores for each word."""
    layers: list[nn.Module] = [linear() for _ in range(stages)]
    layers[0] = nn.Sequential(embedding, layers[0])
    layers[-1] = nn.Sequential(layers[-1], nn.Linear(WIDTH, 11))
    how = {"batch": tokens(), "loss": words_loss} | how
    return Model(layers, **how)


@feature("state")
def embedding_with_padding(stages: int) -> Model:
    """An embedding with padding_idx"""
    return language_model(stages, nn.Embedding(11, WIDTH, padding_idx=0))


@feature("state")
def embedding_with_max_norm(stages: int) -> Model:
    """An embedding with max_norm, whose forward changes its weight in place"""
    return language_model(stages, nn.Embedding(11, WIDTH, max_norm=1.0))


@feature("state")
def sparse_embedding(stages: int) -> Model:
    """An embedding with sparse gradients"""
    optimizer = lambda module: torch.optim.SGD(module.parameters(), 0.1)  # noqa: E731
    return language_model(
        stages, nn.Embedding(11, WIDTH, sparse=True), optimizer=optimizer
    )


@feature("state")
def embedding_scaled_by_frequency(stages: int) -> Model:
    """An embedding with scale_grad_by_freq"""
    return language_model(stages, nn.Embedding(11, WIDTH, scale_grad_by_freq=True))


@feature("state", not_for={"slices", "skips"})
def bag_of_words(stages: int) -> Model:
    """EmbeddingBag"""

    def draw(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
        inputs, _ = tokens()(step, microbatches)
        return inputs, rows(WIDTH)(step, microbatches)[1]

    layers: list[nn.Module] = [linear() for _ in range(stages)]
    layers[0] = nn.Sequential(nn.EmbeddingBag(11, WIDTH), layers[0])
    return Model(layers, batch=draw)


@feature("state")
def weights_as_positions(stages: int) -> Model:
    """A learned position that is added to every row, and a frozen buffer of sines"""

    def place(self: Any, x: Tensor) -> Tensor:
        return self.part(x + self.place[: x.shape[1]] + self.sines[: x.shape[1]])

    sines = torch.arange(LENGTH * WIDTH).view(LENGTH, WIDTH).double().sin()
    return chain(
        lambda _: Does(
            place, part=linear(), place=weight(LENGTH, WIDTH), sines=sines.clone()
        ),
        stages,
    )
