"""Blocks in `torch.compile` whose backwards are split."""

import copy
import shutil
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch", exc_type=ImportError
)

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from schedlang.runtime.parts import compiled  # noqa: E402
from schedlang.runtime.parts.compiled import backend  # noqa: E402
from tests.runtime.test_split_backward import (  # noqa: E402
    LENGTH,
    ROWS,
    WIDTH,
    Does,
    activations,
    compare,
    encoder,
    forward,
    in_checkpoint,
    linear,
    stage,
    weight,
)

# Inductor, when it is imported; and what traces a block, when its input comes from another one.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),
]

#: Gradients are sums in another order than those of the block alone.
ROUNDING = 2e-4


class Block(nn.Module):
    """A module that is compiled; a copy is not, so that it can be compared with."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self._compiled = [torch.compile(module, backend=backend, **options)]

    def forward(self, *inputs: Tensor) -> Tensor:
        return (self._compiled or [self.module])[0](*inputs)

    def __deepcopy__(self, memory: Any) -> "Block":
        block = Block(copy.deepcopy(self.module, memory))
        block._compiled = []
        return block


@pytest.fixture(autouse=True)
def _forgets() -> None:
    """What an earlier test has compiled is not used in this one."""
    torch._dynamo.reset()


@pytest.fixture
def as_graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Graphs run as they are, which is a second faster than to compile them; what they are of."""
    graphs = []

    def as_it_is(graph: torch.fx.GraphModule, _: Sequence[Any], **options: Any) -> Any:
        graphs.append("backward" if options.get("is_backward") else "forward")

        def run(arguments: list[Any]) -> Any:
            given = arguments.copy()
            # As inductor's own code does: what is given is let go of as soon as it is read; and of
            # what it writes into tensors of its own, autograd can have no graph.
            arguments.clear()
            assert not (options.get("is_backward") and torch.is_grad_enabled())
            return list(graph(*given))

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    monkeypatch.setattr(compiled, "compile_graph", as_it_is)
    return graphs


def mixed(self: Any, x: Tensor) -> Tensor:
    """Two weights of one layer each, one of both, and a scale."""
    return F.gelu(self.up(x) @ self.up.weight) * self.scale + self.norm(x)


def checkpointed(self: Any, x: Tensor) -> Tensor:
    return checkpoint(self.part, x, use_reentrant=False)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(LENGTH, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.ConvTranspose1d(8, LENGTH, 3, padding=1, bias=False),
    )


#: Modules that are compiled as a whole, all of whose gradients are left to W.
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "encoder": lambda: nn.TransformerEncoderLayer(
        WIDTH, 4, WIDTH, 0.0, batch_first=True
    ),
    "several uses": lambda: Does(
        mixed, up=linear(bias=False), scale=weight(WIDTH), norm=nn.LayerNorm(WIDTH)
    ),
    "convolutions": convolutions,
    "checkpoint inside": lambda: Does(
        checkpointed, part=nn.Sequential(linear(), nn.GELU(), linear())
    ),
    "a view of the result": lambda: Does(
        lambda s, x: s.part(x).transpose(1, 2).reshape(ROWS, LENGTH, WIDTH),
        part=linear(),
    ),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_both_halves_are_one_whole_backward(name: str, as_graphs: list[str]) -> None:
    compare(Block(BLOCKS[name]()), tolerance=ROUNDING)
    # One graph for F, one for I and one for W, each compiled once for both microbatches.
    assert as_graphs == ["forward", "backward", "backward"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_in_a_checkpoint(reentrant: bool, as_graphs: list[str]) -> None:
    block = in_checkpoint(
        nn.Sequential(Block(linear()), nn.Tanh(), linear()), reentrant
    )
    compare(nn.Sequential(block, linear()), tolerance=ROUNDING)
    assert as_graphs.count("backward") == 2


def test_a_first_stage_needs_no_gradient_of_its_input(as_graphs: list[str]) -> None:
    block = nn.Sequential(nn.Embedding(256, WIDTH), linear())
    compare(
        Block(block), lambda: torch.randint(256, (ROWS, LENGTH)), 0, tolerance=ROUNDING
    )


def test_weights_that_others_use_as_well(as_graphs: list[str]) -> None:
    part = linear()
    module = Does(
        lambda s, x: s.block(x) + F.linear(x, s.part.weight),
        block=Block(part),
        part=part,
    )
    compare(module, tolerance=ROUNDING)


def test_a_block_may_hand_on_its_input(as_graphs: list[str]) -> None:
    """What comes out of it is also what came out of the one before."""

    def both(self: Any, x: Tensor) -> Any:
        return x, self.part(x)

    def join(self: Any, x: Tensor) -> Tensor:
        y, z = self.second(self.first(x))
        return y + z

    second = Block(Does(both, part=linear()))
    compare(Does(join, first=Block(linear()), second=second), tolerance=ROUNDING)


def test_weights_that_are_not_trained(as_graphs: list[str]) -> None:
    block = nn.Sequential(linear(), nn.Tanh(), linear())
    block[2].requires_grad_(False)
    compare(Block(block), tolerance=ROUNDING)


def test_shapes_may_change(as_graphs: list[str]) -> None:
    module = Block(nn.Sequential(linear(), nn.Tanh(), linear()), dynamic=True)
    for rows in (ROWS, ROWS + 1, ROWS + 3):
        compare(
            module,
            lambda rows=rows: torch.randn(rows, LENGTH, WIDTH),
            tolerance=ROUNDING,
        )
        module.zero_grad()
    assert as_graphs == ["forward", "backward", "backward"]


def test_a_forward_may_be_differentiated_for_itself(as_graphs: list[str]) -> None:
    def slope(self: Any, x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.part(inner).square().sum(), inner)
        return self.part(x) + gradient

    compare(Does(slope, part=Block(linear())), tolerance=ROUNDING)


def test_alone_a_backward_is_whole(as_graphs: list[str]) -> None:
    block = linear()
    ours = activations().requires_grad_()
    alone = activations().requires_grad_()
    with torch.no_grad():
        alone.copy_(ours)
    expected = copy.deepcopy(block)
    torch.compile(block, backend=backend)(ours).square().sum().backward()
    expected(alone).square().sum().backward()
    for one, other in [
        (ours, alone),
        *zip(block.parameters(), expected.parameters(), strict=True),
    ]:
        torch.testing.assert_close(one.grad, other.grad, rtol=ROUNDING, atol=ROUNDING)


def test_weights_of_which_b_computes_the_gradients_are_named(
    as_graphs: list[str],
) -> None:
    """A module of which torch compiles nothing: the backend is inductor's all the same."""
    module = nn.Sequential(
        Block(linear()), torch.compile(linear(), backend="aot_eager")
    )
    with pytest.warns(UserWarning, match="in B and not in W, those of `1._orig_mod`"):
        compare(module, tolerance=ROUNDING)


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor needs a C++ compiler")
@pytest.mark.large
def test_inductor() -> None:
    module = Block(nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.GELU(), linear()))
    compare(module, tolerance=ROUNDING)
    assert isinstance(forward(stage(module, True), 7, activations()), Tensor)


@pytest.mark.parametrize(
    "asked", [{"mode": "reduce-overhead"}, {"options": {"triton.cudagraphs": True}}]
)
def test_cuda_graphs_are_refused(asked: dict[str, Any]) -> None:
    """The next microbatch's I would write over what W of this one reads."""
    with pytest.raises(Exception, match='take mode="max-autotune-no-cudagraphs"'):
        Block(linear(), **asked)(activations())


def test_a_mode_of_inductor(as_graphs: list[str]) -> None:
    compare(Block(linear(), mode="max-autotune-no-cudagraphs"), tolerance=ROUNDING)
    assert as_graphs == ["forward", "backward", "backward"]


def test_another_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, examples: graph)
    with pytest.raises(Exception, match='without backend="schedlang": I then computes'):
        Block(linear())(activations())


def test_it_has_a_name() -> None:
    (entry,) = entry_points(group="torch_dynamo_backends", name="schedlang")
    assert entry.load() is backend


def test_encoder_of_many_layers_has_as_many_blocks(as_graphs: list[str]) -> None:
    module = nn.Sequential(*[Block(encoder().eval()) for _ in range(2)])
    compare(module, tolerance=ROUNDING)
