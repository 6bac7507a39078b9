"""A backward in two halves gives the gradients of a whole one, to the bit, and keeps between them
what W needs.
"""

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch", exc_type=ImportError
)

from torch import Tensor, nn  # noqa: E402
from torch.autograd.graph import register_multi_grad_hook  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from schedlang.examples.demo.gpt import CONTEXT, Block, Embedding, Head  # noqa: E402
from schedlang.runtime.errors import way_out  # noqa: E402
from schedlang.runtime.parts.repeats import Recomputed  # noqa: E402
from schedlang.runtime.parts.split_backward import SplitBackwards  # noqa: E402
from schedlang.runtime.stage import Stage, StagePlan  # noqa: E402
from schedlang.schedule.kinds import Kind  # noqa: E402
from tests.support.stages import do, weight_half  # noqa: E402
from tests.support.storages import Storages, counted_storages  # noqa: E402

# A linear layer of this width is just worth its split; narrower ones are not.
ROWS = 4
LENGTH = 16
WIDTH = 128


class Does(nn.Module):
    """A module that computes what a function says, with some parts."""

    def __init__(
        self, function: Callable[..., Tensor], **parts: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, input: Tensor) -> Tensor:
        return self.function(self, input)


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, 4, 2 * WIDTH, dropout=0.2, batch_first=True
    )


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
    return Does(
        lambda self, x: checkpoint(self.part, x, use_reentrant=reentrant), part=part
    )


def nested(outer: bool, inner: bool) -> nn.Module:
    parts = nn.Sequential(in_checkpoint(encoder(), inner), linear())
    return nn.Sequential(linear(), in_checkpoint(parts, outer), linear())


def forces(self: Any, x: Tensor) -> Tensor:
    """An energy's gradient by its input, which is differentiated once more in the backward."""
    if not x.requires_grad:
        x.requires_grad_()
    energy = (self.part(x).tanh() @ self.weight).square().sum()
    return x + torch.autograd.grad(energy, x, create_graph=True)[0] / 100


def penalized(self: Any, x: Tensor) -> Tensor:
    """A gradient by the weights in the forward."""
    y = (self.part(x) @ self.weight).tanh()
    weights = [self.weight, self.part.weight, self.part.bias]
    slopes = torch.autograd.grad(y.square().mean(), weights, create_graph=True)
    return y + slopes[0].sum(0) + slopes[1].sum(0) + slopes[2]


def differentiates(function: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return Does(function, part=linear(), weight=weight(WIDTH, WIDTH))


#: Modules all of whose weight gradients are put off.
SPLIT: dict[str, Callable[[], nn.Module]] = {
    "linear": linear,
    "no bias": lambda: linear(bias=False),
    "only a bias": lambda: nn.Sequential(frozen(linear(), "weight"), nn.Tanh()),
    "only a weight": lambda: nn.Sequential(nn.Tanh(), frozen(linear(), "bias")),
    "block": lambda: Does(
        lambda self, x: self.block(self.up(x)), up=nn.Linear(WIDTH, 128), block=Block()
    ),
    "encoder": encoder,
    "attention": lambda: Does(
        attend,
        attention=nn.MultiheadAttention(WIDTH, 4, kdim=8, vdim=16, batch_first=True),
    ),
    "norms": lambda: nn.Sequential(
        nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH), nn.GroupNorm(4, LENGTH)
    ),
    "narrow": lambda: nn.Sequential(
        nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)
    ),
    "used in part": lambda: Does(lambda s, x: s.part(x) + s.part(x[:1]), part=linear()),
    "used twice": lambda: Does(twice, part=linear()),
    "view of a weight": lambda: Does(
        lambda s, x: torch.tanh(x) @ s.part.weight.T + s.part(x), part=linear()
    ),
    "scale and shift": lambda: Does(
        lambda s, x: s.a * x.tanh() + s.b, a=weight(WIDTH), b=weight(LENGTH, 1)
    ),
    "matmul": lambda: Does(
        lambda self, x: torch.tanh(x @ self.weight), weight=weight(WIDTH, WIDTH)
    ),
    "einsum": lambda: Does(
        lambda s, x: torch.einsum("rli,io->rlo", x, s.weight),
        weight=weight(WIDTH, WIDTH),
    ),
    "weight by name": lambda: Does(
        lambda s, x: F.linear(weight=s.weight, input=x), weight=weight(WIDTH, WIDTH)
    ),
    "not contiguous": lambda: Does(
        lambda s, x: s.part(x.mT.contiguous().mT), part=linear()
    ),
    "weight as input": lambda: Does(
        lambda s, x: x + s.part(s.row[:1]), part=linear(), row=weight(64, WIDTH)
    ),
    "one dimension": lambda: Does(lambda s, x: s.part(x[0, 0]), part=linear()),
    "four dimensions": lambda: Does(lambda s, x: s.part(x[:, None]), part=linear()),
    "in place": lambda: Does(
        lambda s, x: s.after(s.part(x).mul_(2).relu_()), part=linear(), after=linear()
    ),
    "no gradient inside": lambda: Does(
        lambda s, x: s.part(x) + s.part(x.detach()), part=linear()
    ),
    "autocast": lambda: Does(autocast, part=encoder()),
    "checkpoint": lambda: in_checkpoint(encoder()),
    "reentrant checkpoint": lambda: in_checkpoint(encoder(), reentrant=True),
    "checkpoint in autocast": lambda: Does(autocast, part=in_checkpoint(encoder())),
    **{
        f"nested {outer} {inner}": lambda o=outer, i=inner: nested(o, i)
        for outer in (0, 1)
        for inner in (0, 1)
    },
}
#: Modules with weights whose gradients are not put off, and the module that the warning names.
OTHERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "own weight": (
        lambda: nn.Sequential(
            linear(), Does(lambda s, x: x / s.scale, scale=weight(WIDTH))
        ),
        "`1` (Does)",
    ),
    "recurrent": (
        lambda: Does(lambda s, x: s.part(x)[0], part=nn.LSTM(WIDTH, WIDTH)),
        "`part` (LSTM)",
    ),
    "parametrized": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(linear())),
        "`0.parametrizations",
    ),
    "compiled": (
        lambda: nn.Sequential(linear(), torch.compile(encoder(), backend="aot_eager")),
        "`1._orig_mod.linear1` (Linear) and 3 more",
    ),
    "transformed": (
        lambda: Does(lambda s, x: torch.vmap(s.part)(x), part=linear()),
        "`part` (Linear)",
    ),
    "both uses": (
        lambda: Does(lambda s, x: s.part(x) + x * s.part.weight.sum(), part=linear()),
        "`part` (Linear)",
    ),
}


def activations() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH)


def stage(module: nn.Module, split: bool, number: int = 1) -> Stage:
    plan = StagePlan(number, ends_backward=not number)
    parts = [SplitBackwards(range(9))] if split else []
    return Stage(plan, module, torch.device("cpu"), parts=parts)


def forward(stage: Stage, microbatch: int, input: Tensor) -> Tensor:
    """F, with a gradient for its output; the output."""
    torch.manual_seed(microbatch)
    # The inputs of a model need no gradient, what a stage before has made does.
    wants = stage.number > 0 and input.is_floating_point()
    stage.inputs[microbatch] = input.clone().requires_grad_(wants)
    do(stage, Kind.F, microbatch)
    output = stage.outputs.pop(microbatch)
    # As if the stage behind had sent it; drawn after the same seed on both sides.
    stage.gradients[microbatch] = [torch.randn(output.shape, dtype=output.dtype)]
    return output


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: weight.grad for name, weight in module.named_parameters()}


def assert_same(found: object, expected: object, tolerance: float = 0) -> None:
    """Equal to the bit, or where sums have another order to rounding."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def compare(
    module: nn.Module,
    make_input: Callable[[], Tensor] = activations,
    number: int = 1,
    tolerance: float = 0,
) -> None:
    """Two microbatches, split and whole; what each op gives."""
    ours = stage(module, True, number)
    whole = stage(copy.deepcopy(module), False, number)
    inputs = [make_input() for _ in range(2)]
    for microbatch, input in enumerate(inputs):
        outputs = forward(ours, microbatch, input), forward(whole, microbatch, input)
        assert_same(*outputs, tolerance)
    for microbatch in range(2):
        ours.backward(microbatch)
    # B has left all of them to W.
    assert not any(gradient is not None for gradient in gradients(module).values())
    for microbatch in range(2):
        whole.backward(microbatch)
        weight_half(ours, microbatch)
    assert_same(ours.input_gradients, whole.input_gradients, tolerance)
    assert any(gradient is not None for gradient in gradients(module).values())
    assert_same(gradients(module), gradients(whole.module), tolerance)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("name", SPLIT)
def test_both_halves_are_one_whole_backward(name: str) -> None:
    compare(SPLIT[name]())


def test_a_first_stage_needs_no_gradient_of_its_input() -> None:
    """Its layers off the way from its input to its output are split too."""
    model = nn.Sequential(
        Embedding(CONTEXT), Does(lambda s, x: s.part(x), part=Block()), Head()
    )
    compare(model, lambda: torch.randint(256, (ROWS, LENGTH)), number=0)
    tied = Does(
        lambda s, x: F.linear(torch.tanh(s.bytes(x)), s.bytes.weight),
        bytes=nn.Embedding(256, WIDTH),
    )
    compare(tied, lambda: torch.randint(256, (ROWS, LENGTH)), number=0)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding="same", padding_mode="reflect"),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(8, 4, 2, stride=2, groups=2),
        nn.GroupNorm(2, 4),
        nn.Flatten(2),
        nn.Conv1d(4, 6, 3, groups=2),
        nn.InstanceNorm1d(6, affine=True),
    )


def test_convolutions_and_their_norms() -> None:
    compare(convolutions(), lambda: torch.randn(ROWS, 3, 6, 6))


def test_modules_in_bfloat16() -> None:
    compare(encoder().bfloat16(), lambda: activations().bfloat16())


@pytest.mark.parametrize("name", OTHERS)
def test_other_weights_get_their_gradients_all_the_same(name: str) -> None:
    make, named = OTHERS[name]
    message = rf"^stage 1 computes weight gradients in B and not in W, those of .*{re.escape(named)}"
    with pytest.warns(UserWarning, match=message) as warned:
        compare(make())
    assert len(warned) == 1


def test_a_compiled_block_is_compiled_once() -> None:
    """Not once per microbatch."""
    graphs = []
    block = torch.compile(
        linear(), backend=lambda graph, _: graphs.append(graph) or graph
    )
    ours = stage(block, split=True)
    for microbatch in range(3):
        forward(ours, microbatch, activations())
    assert len(graphs) == 1


def test_other_weights_in_a_reentrant_checkpoint_get_their_gradients_in_b() -> None:
    """Such a checkpoint leaves no choice."""
    inside = Does(lambda s, x: s.part(x) / s.scale, part=linear(), scale=weight(WIDTH))
    module = in_checkpoint(inside, reentrant=True)
    ours = stage(module, split=True)
    whole = stage(copy.deepcopy(module), split=False)
    input = activations()
    forward(ours, 0, input), forward(whole, 0, input)
    ours.backward(0)
    assert inside.scale.grad is not None
    assert inside.part.weight.grad is None
    weight_half(ours, 0)
    whole.backward(0)
    assert_same(gradients(module), gradients(whole.module))


def test_beside_a_reentrant_checkpoint_hooks_see_gradients_only() -> None:
    """Autograd calls hooks with None where there is no gradient, as in B of weights that W has."""
    first = linear()
    ours = stage(
        nn.Sequential(first, in_checkpoint(linear(), reentrant=True)), split=True
    )
    seen: list[bool] = []
    first.weight.register_hook(lambda gradient: seen.append(gradient is None))
    forward(ours, 0, activations())
    ours.backward(0)
    assert seen == []
    weight_half(ours, 0)
    assert seen == [False]


def test_each_half_fires_the_hooks_of_its_weights_once() -> None:
    """As DDP and FSDP hook them: after the gradient of the microbatch is added, and never in B."""
    module = nn.Sequential(encoder(), Does(twice, part=linear()))
    fired: list[tuple[str, Tensor]] = []
    accumulators = []
    for name, each in module.named_parameters():
        each.register_post_accumulate_grad_hook(
            lambda weight, name=name: fired.append((name, weight.grad.clone()))
        )
        # The node of autograd that adds to `.grad`: DDP and FSDP hook that one.
        accumulators.append(torch.autograd.graph.get_gradient_edge(each).node)
        accumulators[-1].register_hook(
            lambda *_, name=name: fired.append((f"{name} node", torch.zeros(())))
        )
    ours = stage(module, split=True)
    for microbatch in range(2):
        forward(ours, microbatch, activations())
        ours.backward(microbatch)
    assert fired == []
    for microbatch in range(2):
        weight_half(ours, microbatch)
        names = {name for name, _ in module.named_parameters()}
        assert sorted(name for name, _ in fired) == sorted(
            [*names, *(f"{name} node" for name in names)]
        )
        found = dict(fired)
        assert all(
            torch.equal(found[name], each.grad)
            for name, each in module.named_parameters()
        )
        fired.clear()


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_several_weights_sees_all_gradients_of_a_microbatch_at_once(
    mode: str,
) -> None:
    """`register_multi_grad_hook`, of weights of several layers, of which B computes some."""
    modules = encoder(), Does(twice, part=linear()), nn.LayerNorm(WIDTH)
    module = nn.Sequential(*modules)
    whole = copy.deepcopy(module)
    seen: dict[str, list[Any]] = {"ours": [], "whole": []}
    for name, each in (("ours", module), ("whole", whole)):
        torch.autograd.graph.register_multi_grad_hook(
            [*each.parameters()], seen[name].append, mode=mode
        )
    ours = stage(module, split=True)
    alone = stage(whole, split=False)
    for microbatch in range(2):
        input = activations()
        forward(ours, microbatch, input), forward(alone, microbatch, input)
        ours.backward(microbatch), alone.backward(microbatch)
    assert seen["ours"] == []
    for microbatch in range(2):
        weight_half(ours, microbatch)
        assert len(seen["ours"]) == microbatch + 1
    assert len(seen["whole"]) == 2
    if mode == "all":
        torch.testing.assert_close(seen["ours"], seen["whole"])


@pytest.mark.parametrize("is_view", [True, False])
def test_a_hook_of_several_gradients_sees_a_view_of_the_input(is_view: bool) -> None:
    seen: list[Any] = []

    def hooked(self: Does, x: Tensor) -> Tensor:
        x = x.view_as(x) if is_view else x
        register_multi_grad_hook([x], seen.append)
        return self.part(x)

    ours = stage(Does(hooked, part=linear()), True)
    forward(ours, 0, activations())
    if is_view:
        ours.backward(0)
        assert_same([*seen[0]], ours.input_gradients[0])
        return
    with pytest.raises(RuntimeError) as error:
        ours.backward(0)
    assert "x.view_as(x)" in (way_out(error.value) or "")


def test_operations_of_both_halves_are_counted_as_those_of_a_whole_backward() -> None:
    counts = []
    for split in (True, False):
        ours = stage(nn.Sequential(encoder(), linear()), split)
        with FlopCounterMode(display=False) as counter:
            forward(ours, 0, activations())
            ours.backward(0)
            if split:
                weight_half(ours, 0)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_the_weights_are_those_that_the_forward_used() -> None:
    """Not the module's own, which may be another version by then."""
    module = encoder()
    own = {
        name: nn.Parameter(weight.detach() + 1)
        for name, weight in module.named_parameters()
    }
    compare_to = copy.deepcopy(module)
    ours = stage(
        Does(lambda _, x: torch.func.functional_call(module, own, (x,))), split=True
    )
    compare_to.load_state_dict(own)
    whole = stage(compare_to, split=False)
    input = activations()
    forward(ours, 0, input), forward(whole, 0, input)
    whole.backward(0)
    ours.backward(0)
    weight_half(ours, 0)
    assert all(gradient is None for gradient in gradients(module).values())
    assert_same(
        {name: weight.grad for name, weight in own.items()}, gradients(compare_to)
    )


def test_a_forward_may_have_a_backward_of_its_own() -> None:
    def slope(self: Any, x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        (found,) = torch.autograd.grad(self.part(inner).sum(), inner)
        return self.part(x) + found

    compare(Does(slope, part=linear()))


@pytest.mark.parametrize("in_a_checkpoint", [False, True])
@pytest.mark.parametrize("function", [forces, penalized])
def test_a_forward_may_be_differentiated_twice(
    function: Any, in_a_checkpoint: bool
) -> None:
    module = differentiates(function)
    # What comes by the gradient's own gradient is no layer.
    with pytest.warns(UserWarning, match="in B and not in W"):
        compare(in_checkpoint(module) if in_a_checkpoint else module, tolerance=1e-5)


def test_inside_autocast_only_linear_layers_are_differentiated_twice() -> None:
    module = differentiates(forces)
    with pytest.raises(
        RuntimeError, match=r"inside autocast a stage cannot .* twice .*`matmul`"
    ):
        compare(Does(autocast, part=module))


def test_a_layer_may_have_a_loss_of_its_own() -> None:
    """It is in `.grad` when the forward is over, and W adds nothing to it."""

    def trained(self: Any, x: Tensor) -> Tensor:
        y = (self.part(x.detach()) @ self.weight).tanh()
        y.square().mean().backward()
        return self.after(x + y.detach())

    module = Does(trained, part=linear(), weight=weight(WIDTH, WIDTH), after=linear())
    alone = copy.deepcopy(module)
    input = activations()
    ours = stage(module, True)
    whole = stage(alone, False)
    forward(ours, 0, input), forward(whole, 0, input)
    of_its_own = {
        name: each for name, each in gradients(module).items() if "after" not in name
    }
    assert all(gradient is not None for gradient in of_its_own.values())
    assert_same(gradients(module), gradients(alone))
    ours.backward(0)
    weight_half(ours, 0)
    whole.backward(0)
    assert_same(gradients(module), gradients(alone))


def test_microbatches_may_take_turns_in_any_order() -> None:
    module = encoder()
    ours = stage(module, split=True)
    whole = stage(copy.deepcopy(module), split=False)
    for microbatch in range(3):
        input = activations()
        forward(ours, microbatch, input), forward(whole, microbatch, input)
    for microbatch in (2, 0, 1):
        ours.backward(microbatch)
    for microbatch in (1, 2, 0):
        whole.backward(microbatch)
        weight_half(ours, microbatch)
    assert_same(gradients(module), gradients(whole.module))


def test_a_recomputed_forward_is_split_too() -> None:
    module = encoder()
    parts = [Recomputed(range(1)), SplitBackwards(range(1))]
    ours = Stage(StagePlan(1), module, torch.device("cpu"), parts=parts)
    whole = stage(copy.deepcopy(module), split=False)
    input = activations()
    forward(ours, 0, input), forward(whole, 0, input)
    torch.manual_seed(5)
    do(ours, Kind.R, 0)
    ours.backward(0)
    weight_half(ours, 0)
    whole.backward(0)
    assert_same(gradients(module), gradients(whole.module))


# What is held, and what is run.


@pytest.fixture
def storages() -> Iterator[Storages]:
    with counted_storages() as storages:
        yield storages


SIZE = ROWS * LENGTH * WIDTH * 4


@pytest.mark.parametrize(
    "wrap", [lambda module: module, in_checkpoint], ids=["plain", "checkpoint"]
)
def test_between_the_halves_only_inputs_of_layers_and_gradients_of_their_outputs_are_held(
    storages: Storages, wrap: Callable[[nn.Module], nn.Module]
) -> None:
    """Three layers: two inputs that the forward has made, two gradients that the backward has made."""
    ours = stage(
        wrap(
            nn.Sequential(
                linear(), nn.Tanh(), linear(), nn.Sigmoid(), linear(), nn.Tanh()
            )
        ),
        split=True,
    )
    before = storages.held()
    input = activations()
    forward(ours, 0, input)
    ours.backward(0)
    del ours.input_gradients[0]
    # Its clone is the input of the first layer, and Tanh makes the gradient of the last one's
    # output.
    assert storages.held() - before - SIZE == SIZE * (1 + 2 + 3)
    weight_half(ours, 0)
    assert storages.held() - before - SIZE == sum(
        each.grad.nbytes for each in ours.module.parameters()
    )


def test_of_narrow_layers_their_gradients_are_held(storages: Storages) -> None:
    """From the second forward on: the first one shows that there is no reentrant checkpoint."""
    ours = stage(
        nn.Sequential(nn.Linear(WIDTH, 2), nn.Tanh(), nn.Linear(2, WIDTH)), split=True
    )
    forward(ours, 0, activations())
    ours.backward(0)
    weight_half(ours, 0)
    ours.gradients.clear(), ours.input_gradients.clear()
    before = storages.held()
    forward(ours, 1, activations())
    ours.backward(1)
    ours.input_gradients.clear()
    assert storages.held() - before == sum(
        each.nbytes for each in ours.module.parameters()
    )
    weight_half(ours, 1)
    assert storages.held() == before


def test_a_checkpoint_holds_its_input_and_is_recomputed_once(
    storages: Storages,
) -> None:
    calls = []
    part = nn.Sequential(
        encoder(),
        Does(lambda s, x: calls.append(len(calls)) or s.part(x), part=linear()),
    )
    ours = stage(in_checkpoint(part), split=True)
    before = storages.held()
    forward(ours, 0, activations())
    # The input, the gradient of the output and the output, which its graph refers to; and random
    # states.
    assert storages.held() - before < 3.5 * SIZE
    ours.backward(0)
    weight_half(ours, 0)
    assert len(calls) == 2
