"""A backward in two halves gives the gradients of a whole one, to the bit, and keeps between them what W needs."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)

from torch import Tensor, nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from schedlang.runtime.gpt import Block, Embedding, Head  # noqa: E402
from schedlang.runtime.stage import Stage  # noqa: E402

ROWS, LENGTH, WIDTH = 2, 5, 32


class Does(nn.Module):
    """A module that computes what a function says, with some parts."""

    def __init__(self, function: Callable[..., Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, input: Tensor) -> Tensor:
        return self.function(self, input)


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.2, batch_first=True)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 4)


def frozen(module: nn.Module, name: str) -> nn.Module:
    module.get_parameter(name).requires_grad_(False)
    return module


def attend(self: Any, x: Tensor) -> Tensor:
    """Attention whose keys are not its queries, and of other widths."""
    return self.attention(x, x[..., :8], x[..., 8:24], need_weights=False)[0]


def tied(self: Any, bytes: Tensor) -> Tensor:
    return F.linear(torch.tanh(self.embedding(bytes)), self.embedding.weight)


def twice(self: Any, x: Tensor) -> Tensor:
    return self.part(torch.tanh(self.part(x)))


def autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return self.part(x).float()


def in_checkpoint(part: nn.Module, reentrant: bool = False) -> nn.Module:
    return Does(lambda self, x: checkpoint(self.part, x, use_reentrant=reentrant), part=part)


def nested(outer: bool, inner: bool) -> nn.Module:
    parts = nn.Sequential(in_checkpoint(encoder(), inner), linear())
    return nn.Sequential(linear(), in_checkpoint(parts, outer), linear())


#: Modules all of whose weight gradients are put off.
SPLIT: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "no bias": lambda: linear(bias=False),
    "only a bias": lambda: nn.Sequential(frozen(linear(), "weight"), nn.Tanh()),
    "only a weight": lambda: nn.Sequential(nn.Tanh(), frozen(linear(), "bias")),
    "block": lambda: Does(lambda self, x: self.block(self.up(x)), up=nn.Linear(WIDTH, 128), block=Block()),
    "encoder": encoder,
    "attention": lambda: Does(attend, attention=nn.MultiheadAttention(WIDTH, 4, kdim=8, vdim=16, batch_first=True)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.GroupNorm(5, LENGTH)),
    "used twice": lambda: Does(twice, part=linear()),
    "view of a weight": lambda: Does(lambda s, x: torch.tanh(x) @ s.part.weight.T + s.part(x), part=linear()),
    "matmul": lambda: Does(lambda self, x: torch.tanh(x @ self.weight), weight=weight(WIDTH, WIDTH)),
    "einsum": lambda: Does(lambda s, x: torch.einsum("rli,io->rlo", x, s.weight), weight=weight(WIDTH, WIDTH)),
    "weight by name": lambda: Does(lambda s, x: F.linear(weight=s.weight, input=x), weight=weight(WIDTH, WIDTH)),
    "not contiguous": lambda: Does(lambda s, x: s.part(x.mT.contiguous().mT), part=linear()),
    "one dimension": lambda: Does(lambda s, x: s.part(x[0, 0]), part=linear()),
    "four dimensions": lambda: Does(lambda s, x: s.part(x[:, None]), part=linear()),
    "in place": lambda: Does(lambda s, x: s.after(s.part(x).mul_(2).relu_()), part=linear(), after=linear()),
    "no gradient inside": lambda: Does(lambda s, x: s.part(x) + s.part(x.detach()), part=linear()),
    "autocast": lambda: Does(autocast, part=encoder()),
    "checkpoint": lambda: in_checkpoint(encoder()),
    "reentrant checkpoint": lambda: in_checkpoint(encoder(), reentrant=True),
    "checkpoint in autocast": lambda: Does(autocast, part=in_checkpoint(encoder())),
    **{f"nested {outer} {inner}": lambda o=outer, i=inner: nested(o, i) for outer in (0, 1) for inner in (0, 1)},
}
#: Modules with weights whose gradients are not put off, and the module that the warning names.
OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own weight": (lambda: nn.Sequential(linear(), Does(lambda s, x: x * s.scale, scale=weight(WIDTH))), "`1` (Does)"),
    "recurrent": (lambda: Does(lambda s, x: s.part(x)[0], part=nn.LSTM(WIDTH, WIDTH)), "`part` (LSTM)"),
    "parametrized": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear())), "`0.parametrizations"),
    "compiled": (lambda: nn.Sequential(linear(), torch.compile(encoder(), backend="aot_eager")), "`1._orig_mod.linear1`"),
    "both uses": (
        lambda: Does(lambda s, x: s.part(x) + x * s.part.weight.sum(), part=linear()),
        "`part` (Linear)",
    ),
    "in a reentrant checkpoint's stage": (lambda: nn.Sequential(in_checkpoint(linear(), True), linear()), ""),
}  # fmt: skip


def activations() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH)


def stage(module: nn.Module, split: bool, number: int = 1) -> Stage:
    return Stage(number, module, None, None, 1.0, split=range(9) if split else ())


def forward(stage: Stage, microbatch: int, input: Tensor) -> Tensor:
    """F, with a gradient for its output; the output."""
    torch.manual_seed(microbatch)
    stage.inputs[microbatch] = input.clone()
    stage.forward(microbatch)
    output = stage.outputs.pop(microbatch)
    stage.gradients[microbatch] = torch.randn(output.shape, dtype=output.dtype)
    return output


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: weight.grad for name, weight in module.named_parameters()}


def assert_same(found: object, expected: object) -> None:
    """Equal to the bit."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def compare(module: nn.Module, make_input: Callable[[], Tensor] = activations, number: int = 1) -> None:
    """Two microbatches, split and whole; what each op gives."""
    ours, whole = stage(module, True, number), stage(copy.deepcopy(module), False, number)
    inputs = [make_input() for _ in range(2)]
    for microbatch, input in enumerate(inputs):
        assert_same(forward(ours, microbatch, input), forward(whole, microbatch, input))
    for microbatch in range(2):
        ours.backward_input(microbatch)
    assert not any(gradient is not None for gradient in gradients(module).values())
    for microbatch in range(2):
        whole.backward(microbatch)
        ours.backward_weight(microbatch)
    assert_same(ours.input_gradients, whole.input_gradients)
    assert any(gradient is not None for gradient in gradients(module).values())
    assert_same(gradients(module), gradients(whole.module))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", SPLIT)
def test_both_halves_are_one_whole_backward(name: str) -> None:
    compare(SPLIT[name]())


def test_a_first_stage_needs_no_gradient_of_its_input() -> None:
    """Its layers off the way from its input to its output are split too."""
    model = nn.Sequential(Embedding(), Does(lambda s, x: s.part(x), part=Block()), Head())
    compare(model, lambda: torch.randint(256, (ROWS, LENGTH)), number=0)
    tied = Does(lambda s, x: F.linear(torch.tanh(s.bytes(x)), s.bytes.weight), bytes=nn.Embedding(256, WIDTH))
    compare(tied, lambda: torch.randint(256, (ROWS, LENGTH)), number=0)
