"""Activations that are copied to the host and back: the same gradients, and the memory is free in
between.
"""

import copy
from collections.abc import Iterable

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch", exc_type=ImportError
)

from torch import Tensor, nn  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from schedlang.examples.demo.gpt import Block  # noqa: E402
from schedlang.runtime.part import Part  # noqa: E402
from schedlang.runtime.parts.offload import CopiesOfCpu, Offload  # noqa: E402
from schedlang.runtime.parts.split_backward import SplitBackwards  # noqa: E402
from schedlang.runtime.stage import Stage, StagePlan  # noqa: E402
from schedlang.schedule.kinds import Kind  # noqa: E402
from tests.support.stages import weight_half  # noqa: E402
from tests.support.storages import counted_storages  # noqa: E402

SHAPE = 2, 16, 128


class InCheckpoint(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(self.part, input, use_reentrant=False)


class WithTangent(nn.Module):
    """A layer and its derivative along its input."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(128, 128)

    def forward(self, input: Tensor) -> Tensor:
        along = torch.ones_like(input)
        value, tangent = torch.func.jvp(
            lambda x: self.part(x).tanh(), (input,), (along,)
        )
        return value + tangent


def stage(module: nn.Module, offloaded: set[int], split: bool) -> Stage:
    cpu = torch.device("cpu")
    parts: list[Part] = [SplitBackwards({0, 1})] if split else []
    parts.append(Offload(1, module, cpu, offloaded, CopiesOfCpu()))
    return Stage(StagePlan(1), module, cpu, parts=parts)


def gradients(ours: Stage, split: bool, offloads: bool) -> list[Tensor]:
    """Of the input and the weights, for two microbatches, of which the first is on the host while
    the second runs.
    """
    for microbatch in range(2):
        torch.manual_seed(microbatch)
        ours.inputs[microbatch] = torch.randn(SHAPE, requires_grad=True)
        ours.gradients[microbatch] = [torch.randn(SHAPE)]
        ours.forward(microbatch)
        if not microbatch and offloads:
            ours.ops[Kind.OFFLOAD, 1](microbatch)
    for microbatch in range(2):
        if not microbatch and offloads:
            ours.ops[Kind.RELOAD, 1](microbatch)
        ours.backward(microbatch)
        if split:
            weight_half(ours, microbatch)
    return [
        *(each for box in ours.input_gradients.values() for each in box),
        *(p.grad for p in ours.module.parameters()),
    ]


MODULES = {
    "block": Block,
    "dropout": lambda: nn.TransformerEncoderLayer(
        128, 4, 64, dropout=0.3, batch_first=True
    ),
    "checkpoint": lambda: nn.Sequential(InCheckpoint(Block()), Block()),
    "tangent": lambda: nn.Sequential(nn.Linear(128, 128), nn.Tanh(), WithTangent()),
    "norm": lambda: nn.Sequential(nn.BatchNorm1d(16), nn.Linear(128, 128)),
}


# Torch's own, when its forward derivatives are loaded.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("ignore:stage 1 computes weight gradients in B:UserWarning")
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_are_those_without_copies(name: str, split: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    expected = gradients(
        stage(copy.deepcopy(module), set(), split), split, offloads=False
    )
    found = gradients(stage(module, {0}, split), split, offloads=True)
    assert len(found) == len(expected) > 2
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_the_memory_is_free_while_the_copy_is_away(split: bool) -> None:
    ours = stage(
        nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 512), nn.Tanh()),
        {0},
        split,
    )
    ours.inputs[0] = torch.randn(SHAPE, requires_grad=True)
    ours.gradients[0] = [torch.randn(2, 16, 512)]
    activation = 2 * 16 * 128 * 4
    output = 2 * 16 * 512 * 4
    others = {
        StorageWeakRef(each.untyped_storage())
        for each in (ours.inputs[0], *ours.module.parameters())
    }
    with counted_storages() as storages:

        def held(made: Iterable[StorageWeakRef]) -> int:
            return sum(
                storages.made[each] for each in set(made) - others if not each.expired()
            )

        ours.forward(0)
        made = list(storages.made)
        assert held(made) == activation + output
        ours.ops[Kind.OFFLOAD, 1](0)
        # Of what the forward has made, the output is left, which is on its way to the next stage;
        # and there are copies.
        assert held(made) == output
        assert held(storages.made) == activation + 2 * output
        ours.ops[Kind.RELOAD, 1](0)
        assert held(storages.made) == activation + 2 * output
        ours.outputs.clear()
        ours.backward(0)
        if split:
            weight_half(ours, 0)
        gradients = [
            *ours.input_gradients[0],
            *(each.grad for each in ours.module.parameters()),
        ]
        assert held(storages.made) == sum(each.nbytes for each in gradients)
