"""What passes between stages, and what a batch is."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.models.families.state import language_model, tokens
from tests.models.model import (
    LENGTH,
    ROWS,
    WIDTH,
    Does,
    Model,
    chain,
    feature,
    linear,
    mean_square,
    rows,
)


def ends(stages: int, first: Any, middle: Any, last: Any, **how: Any) -> Model:
    """Stages that do what functions say, each with a small layer."""

    def stage(number: int) -> nn.Module:
        does = first if number == 0 else last if number == stages - 1 else middle
        return Does(does, part=linear())

    return chain(stage, stages, **how)


@feature("passing", not_for={"slices", "skips"})
def tuples(stages: int) -> Model:
    """Two tensors in a tuple"""
    return ends(
        stages,
        lambda self, x: (self.part(x), x.tanh()),
        lambda self, x, y: (self.part(x) + y, y * x),
        lambda self, x, y: self.part(x) * y,
    )


@feature("passing", not_for={"slices", "skips"})
def dictionaries(stages: int) -> Model:
    """Tensors in a dictionary, with lists in it, and a mask"""

    def first(self: Any, x: Tensor) -> dict[str, Any]:
        return {"x": self.part(x), "kept": [x.sin(), {"mask": x > 0}]}

    def middle(self: Any, given: dict[str, Any]) -> dict[str, Any]:
        mask = given["kept"][1]["mask"]
        return given | {"x": self.part(given["x"] + given["kept"][0]) * mask}

    return ends(stages, first, middle, lambda self, given: middle(self, given)["x"])


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@feature("passing", not_for={"slices", "skips"})
def named_tuples(stages: int) -> Model:
    """Tensors in a named tuple"""
    return ends(
        stages,
        lambda self, x: Pair(self.part(x), x.tanh()),
        lambda self, x, y: Pair(self.part(x) + y, y),
        lambda self, x, y: self.part(x) * y,
    )


@feature("passing", not_for={"slices", "skips"})
def masks_and_positions(stages: int) -> Model:
    """Boolean and integer tensors beside others"""

    def first(self: Any, x: Tensor) -> Any:
        return self.part(x), x[..., 0] > 0, torch.arange(x.shape[1], dtype=torch.int32)

    def middle(self: Any, x: Tensor, mask: Tensor, positions: Tensor) -> Any:
        return (
            self.part(x) * mask[..., None] + positions[:, None] * 0.1,
            ~mask,
            positions + 1,
        )

    return ends(stages, first, middle, lambda self, *given: middle(self, *given)[0])


@feature("passing", not_for={"slices", "skips"})
def only_integers(stages: int) -> Model:
    """A first stage that makes words, and nothing that has a gradient"""

    def stage(number: int) -> nn.Module:
        if number == 0:
            return Does(lambda self, x: (x + 1) % 11)
        layer = (
            linear()
            if number < stages - 1
            else nn.Sequential(linear(), nn.Linear(WIDTH, 11))
        )
        return nn.Sequential(nn.Embedding(11, WIDTH), layer) if number == 1 else layer

    return Model(
        [stage(number) for number in range(stages)],
        batch=tokens(),
        loss=language_model(2, nn.Embedding(11, WIDTH)).loss,
    )


@feature("passing", not_for={"slices", "skips"})
def scalar_beside(stages: int) -> Model:
    """An auxiliary loss, a tensor without dimensions, that stages add to"""

    def first(self: Any, x: Tensor) -> Any:
        y = self.part(x)
        return y, y.square().mean()

    def middle(self: Any, x: Tensor, extra: Tensor) -> Any:
        y = self.part(x)
        return y, extra + y.square().mean()

    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return mean_square(output[0], target) + 0.1 * output[1]

    return ends(stages, first, middle, middle, loss=loss)


@feature("passing", not_for={"slices", "skips"})
def integer_scalar_beside(stages: int) -> Model:
    """An integer tensor without dimensions beside another one"""
    return ends(
        stages,
        lambda self, x: (self.part(x), torch.tensor(2)),
        lambda self, x, n: (self.part(x) * n, n + 1),
        lambda self, x, n: self.part(x) * n,
    )


@feature("passing", not_for={"slices", "skips"})
def empty_tensor_beside(stages: int) -> Model:
    """A tensor without elements beside another one"""
    return ends(
        stages,
        lambda self, x: (self.part(x), x[:, :0] * 2),
        lambda self, x, none: (self.part(x), none),
        lambda self, x, none: self.part(x) + none.sum(),
    )


@feature("passing")
def not_contiguous(stages: int) -> Model:
    """Outputs that are transposed"""
    swapped = lambda self, x: self.part(x).transpose(0, 1).contiguous().transpose(0, 1)  # noqa: E731
    return ends(stages, swapped, swapped, swapped)


@feature("passing", not_for={"slices", "skips"})
def expanded(stages: int) -> Model:
    """Outputs that are expanded, so that many elements are one in memory"""
    spread = lambda self, x: self.part(x.mean(1)).unsqueeze(1).expand(-1, LENGTH, -1)  # noqa: E731
    return ends(stages, spread, spread, spread)


@feature("passing", not_for={"slices", "skips"})
def views_of_one(stages: int) -> Model:
    """Two outputs that are views of one tensor"""

    def both(self: Any, *given: Tensor) -> Any:
        y = self.part(given[0] if len(given) == 1 else torch.cat(given, -1))
        return y[..., :4], y[..., 4:]

    return ends(
        stages, both, both, lambda self, *given: torch.cat(both(self, *given), -1)
    )


@feature("passing", not_for={"slices", "skips"})
def one_tensor_twice(stages: int) -> Model:
    """One tensor in two places of an output"""

    def twice(self: Any, *given: Tensor) -> Any:
        y = self.part(given[0] if len(given) == 1 else given[0] * given[1])
        return y, y

    return ends(stages, twice, twice, lambda self, *given: twice(self, *given)[0])


@feature("passing", not_for={"slices", "skips"})
def input_handed_on(stages: int) -> Model:
    """A stage that hands on its input beside its output"""
    return ends(
        stages,
        lambda self, x: (self.part(x), x),
        lambda self, x, y: (self.part(x), y),
        lambda self, x, y: self.part(x) + y,
    )


@feature("passing", not_for={"slices", "skips"})
def weight_handed_on(stages: int) -> Model:
    """A stage that hands its weight to the next one"""

    def stage(number: int) -> nn.Module:
        if number == 0:
            return Does(
                lambda self, x: (self.part(x), self.part[0].weight), part=linear()
            )
        if number == stages - 1:
            return Does(lambda self, x, w: self.part(x) @ w, part=linear())
        return Does(lambda self, x, w: (self.part(x) @ w, w), part=linear())

    return chain(stage, stages)


@feature("passing", not_for={"slices", "skips"})
def output_that_is_not_used(stages: int) -> Model:
    """An output that the next stage does not use"""
    return ends(
        stages,
        lambda self, x: (self.part(x), self.part(x) * 2),
        lambda self, x, y: (self.part(x), x * 2),
        lambda self, x, y: self.part(x),
    )


@feature("passing", not_for={"slices", "skips"})
def output_without_gradient(stages: int) -> Model:
    """A detached output beside one that has a gradient"""
    return ends(
        stages,
        lambda self, x: (self.part(x), x.detach() * 2),
        lambda self, x, y: (self.part(x) + y, y.detach() + x.detach()),
        lambda self, x, y: self.part(x) * y,
    )


@feature("passing")
def identity_stage(stages: int) -> Model:
    """A stage that returns what it is given"""
    return chain(lambda number: nn.Identity() if number == 1 else linear(), stages)


@feature("passing")
def view_of_the_input(stages: int) -> Model:
    """A stage that returns a view of what it is given"""
    return chain(
        lambda number: (
            Does(lambda self, x: x.flip(-1)[..., :]) if number == 1 else linear()
        ),
        stages,
    )


@feature("passing", not_for={"slices", "skips"})
def complex_between(stages: int) -> Model:
    """Complex tensors between stages"""

    def spectrum(self: Any, x: Tensor) -> Tensor:
        return torch.fft.fft(self.part(x))

    def middle(self: Any, x: Tensor) -> Tensor:
        return torch.fft.fft(self.part(torch.fft.ifft(x).real)) * 1j

    return ends(stages, spectrum, middle, lambda self, x: self.part(x.real + x.imag))


@feature("passing")
def several_types(stages: int) -> Model:
    """Stages in float64, float32 and bfloat16"""
    # One for each of at most four stages: what passes has the type of the stage that made it.
    types = [torch.float64, torch.float32, torch.bfloat16, torch.float32]

    def cast(self: Any, x: Tensor) -> Tensor:
        return self.part(x.to(self.part[0].weight.dtype))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return mean_square(output.double(), target)

    return chain(
        lambda number: Does(cast, part=linear().to(types[number])),
        stages,
        loss=loss,
        tolerance=0.05,
    )


@feature("passing")
def keyword_arguments(stages: int) -> Model:
    """Keyword arguments of a microbatch"""
    scaled = lambda self, x, *, scale: self.part(x) * scale  # noqa: E731
    return chain(
        lambda _: Does(scaled, part=linear()),
        stages,
        options=lambda number: {"scale": 1.0 + number},
    )


@feature("passing", not_for={"slices", "skips"})
def batch_of_dictionaries(stages: int) -> Model:
    """Inputs and targets in dictionaries"""

    def draw(step: int, microbatches: int) -> Any:
        inputs, targets = rows(LENGTH, WIDTH)(step, microbatches)
        return {"x": inputs, "mask": inputs > 0}, {
            "y": targets,
            "weight": targets.abs(),
        }

    def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return (target["weight"] * (output - target["y"]).square()).mean()

    plain = lambda self, x: self.part(x)  # noqa: E731
    return ends(
        stages,
        lambda self, given: self.part(given["x"] * given["mask"]),
        plain,
        plain,
        batch=draw,
        loss=loss,
    )


@feature("passing", not_for={"slices"})
def longer_from_step_to_step(stages: int) -> Model:
    """Batches of another length in every step"""

    def draw(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
        return rows(LENGTH + step, WIDTH)(step, microbatches)

    return chain(lambda _: linear(), stages, batch=draw)


@feature("passing", not_for={"slices", "skips"})
def shape_by_microbatch(stages: int) -> Model:
    """Outputs whose shape depends on the microbatch"""

    def first(self: Any, x: Tensor) -> Tensor:
        return self.part(x[:, : 1 + int(x.sum() > 0)])

    def last(self: Any, x: Tensor) -> Tensor:
        return self.part(x).mean(1, keepdim=True).expand(-1, LENGTH, -1)

    return ends(stages, first, lambda self, x: self.part(x), last)


@feature("passing", is_mistake=True)
def more_targets_than_inputs(stages: int) -> Model:
    """Targets with another number of rows than inputs"""

    def draw(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
        inputs, _ = rows(LENGTH, WIDTH)(step, microbatches)
        return inputs, torch.zeros(ROWS * microbatches // 2, LENGTH, WIDTH)

    return chain(lambda _: linear(), stages, batch=draw)


@feature("passing", is_mistake=True, not_for={"slices", "skips"})
def number_between(stages: int) -> Model:
    """A Python number between stages"""
    return ends(
        stages,
        lambda self, x: (self.part(x), 2.0),
        lambda self, x, n: (self.part(x), n),
        lambda self, x, n: self.part(x),
    )


@feature("passing", not_for={"slices", "skips"})
def none_between(stages: int) -> Model:
    """None beside a tensor"""
    return ends(
        stages,
        lambda self, x: (self.part(x), None),
        lambda self, x, none: (self.part(x), none),
        lambda self, x, none: self.part(x),
    )


@feature("passing", not_for={"slices", "skips"})
def sparse_between(stages: int) -> Model:
    """A sparse tensor between stages"""
    return ends(
        stages,
        lambda self, x: self.part(x).to_sparse(),
        lambda self, x: self.part(x.to_dense()).to_sparse(),
        lambda self, x: self.part(x.to_dense()),
    )


class Prompt(nn.Module):
    """Notes the gradient of what is given to the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.part = linear()
        self.prompts: list[Tensor] = []

    @property
    def seen(self) -> list[float]:
        return [
            number
            for prompt in self.prompts
            if prompt.grad is not None
            for number in prompt.grad.flatten().tolist()
        ]

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x)


@feature("passing", not_for={"replicas"})
def inputs_with_a_gradient(stages: int) -> Model:
    """Inputs that are a leaf, whose gradient is wanted"""
    first = Prompt()

    def draw(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
        inputs, targets = rows(LENGTH, WIDTH)(step, microbatches)
        # One leaf for all steps, whose gradient adds up.
        if not first.prompts:
            first.prompts.append(inputs.requires_grad_())
        return first.prompts[0], targets

    return chain(lambda number: linear() if number else first, stages, batch=draw)


@feature("passing")
def batch_written_over(stages: int) -> Model:
    """Batches that are written into one tensor, step after step"""
    memory: list[Tensor] = []

    def draw(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
        batch = rows(LENGTH, WIDTH)(step, microbatches)
        if not memory:
            memory.extend(batch)
        for kept, new in zip(memory, batch, strict=True):
            kept.copy_(new)
        return memory[0], memory[1]

    return chain(lambda _: linear(), stages, batch=draw)


@feature("passing", is_mistake=True)
def loss_of_each_row(stages: int) -> Model:
    """A loss that is no scalar"""
    loss = lambda output, target: (output - target).square().mean((1, 2))  # noqa: E731
    return chain(lambda _: linear(), stages, loss=loss)


@feature("passing", is_mistake=True)
def loss_as_a_number(stages: int) -> Model:
    """A loss that is a Python number"""
    return chain(lambda _: linear(), stages, loss=lambda output, target: 1.0)


@feature("passing")
def loss_that_is_not_finite(stages: int) -> Model:
    """A loss that is infinite for one microbatch"""

    def draw(step: int, microbatches: int) -> tuple[Tensor, Tensor]:
        inputs, targets = rows(LENGTH, WIDTH)(step, microbatches)
        # Of the last row, which is in the last microbatch.
        targets[-1, -1, -1] = torch.inf
        return inputs, targets

    return chain(lambda _: linear(), stages, batch=draw)
