"""Weights that share memory without being one parameter: they move together, or are refused."""

import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from schedlang.runtime import PipelineError, split
from schedlang.runtime.equal_weights import check_common_weights
from schedlang.runtime.model.model_files import _write as write
from schedlang.runtime.parts.hops import TravellingStage
from schedlang.runtime.parts.versions import WeightVersions
from schedlang.runtime.shared_memory import copies_of, sharing
from tests.support.models import program

WIDTH = 6


def some_tensors() -> dict[str, Tensor]:
    """Tensors that share memory in every way, and some that share none."""
    matrix = torch.arange(36.0).view(WIDTH, WIDTH)
    flat = torch.arange(100.0)
    return {
        "matrix": matrix,
        "its rows": matrix[2:4],
        "its columns": matrix[:, 3:],
        "its transpose": matrix.T,
        "its last bytes": matrix.view(torch.uint8)[-1:, -3:],
        "alone": torch.ones(5),
        "begin of a flat one": flat[:50],
        "end of a flat one": flat[50:],
        "empty": torch.ones(0),
        "without a shape": nn.LazyLinear(3).weight,
        "on no device": torch.ones(3, device="meta"),
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.view_as_complex(flat[:50].view(25, 2)),
    }


def test_tensors_that_share_memory_are_found() -> None:
    groups = {frozenset(group) for group in sharing(some_tensors())}
    assert groups == {
        frozenset(
            name for name in some_tensors() if name.startswith(("matrix", "its"))
        ),
        frozenset(["begin of a flat one", "complex"]),
    }


def test_copies_share_memory_where_the_tensors_do() -> None:
    """A change of one changes the copies of others as it changes the others."""
    dense = {
        name: tensor
        for name, tensor in some_tensors().items()
        if not is_lazy(tensor) and not tensor.is_sparse and not tensor.is_meta
    }
    for changed in dense:
        tensors = {
            name: tensor for name, tensor in some_tensors().items() if name in dense
        }
        copies = copies_of(tensors)
        assert copies.keys() == tensors.keys()
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        copies[changed].fill_(7)
        for name, tensor in tensors.items():
            # The tensors themselves stay as they are.
            assert torch.equal(tensor, before[name])
        tensors[changed].fill_(7)
        for name, tensor in tensors.items():
            assert torch.equal(copies[name], tensor), (changed, name)
            assert copies[name].stride() == tensor.stride()


def by_data() -> list[nn.Linear]:
    """Two layers whose weights share memory, and are two parameters."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    layers[1].weight.data = layers[0].weight.data
    return layers


def test_stages_of_a_rank_that_share_memory_are_refused() -> None:
    plan = program("zb_v", ranks=2)
    first, last = by_data()
    with pytest.raises(
        PipelineError,
        match="`weight` of stage 0 and `weight` of stage 3 share memory",
    ):
        check_common_weights(plan, {0: first, 3: last}, ())
    # Frozen ones stay as they are.
    for layer in (first, last):
        layer.requires_grad_(False)
    check_common_weights(plan, {0: first, 3: last}, ())


def test_split_refuses_weights_of_two_stages_that_share_memory() -> None:
    plan = program("1f1b", ranks=2)
    first, last = by_data()
    model = nn.Sequential(first, nn.Linear(WIDTH, WIDTH), nn.Tanh(), last)
    with pytest.raises(
        PipelineError,
        match=r"`0.weight` and `3.weight` share memory.*one parameter, which `split` ties",
    ):
        split(model, plan, rank=0)
    last.weight = first.weight
    assert split(model, plan, rank=0).tied == [{0: "0.weight", 1: "3.weight"}]
    # Views of one flat tensor share none.
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)]
    flat = torch.zeros(2, WIDTH, WIDTH)
    for layer, part in zip(layers, flat, strict=True):
        layer.weight.data = part
    split(nn.Sequential(*layers), plan, rank=0)


class Followed(nn.Module):
    """A weight, and something in its memory that is not trained."""

    def __init__(self, make: Callable[[nn.Module, Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
        make(self, self.weight.data[1:3])


@pytest.mark.parametrize(
    "make",
    [
        lambda module, part: module.register_buffer("some", part),
        lambda module, part: setattr(module, "some", nn.Parameter(part, False)),
    ],
    ids=["buffer", "frozen"],
)
def test_versions_refuse_what_would_not_follow_updates(make: Any) -> None:
    with pytest.raises(
        PipelineError,
        match="`some` of stage 2 shares memory with the weight `weight` and is not trained",
    ):
        WeightVersions(2, Followed(make), 1, 4)


def test_versions_keep_trained_weights_in_one_memory() -> None:
    """Through updates: what one weight becomes, the other is."""
    model = nn.Sequential(*by_data())
    versions = WeightVersions(0, model, 1, 1)
    for update in range(4):
        versions.before_update()
        with torch.no_grad():
            model[0].weight += 1
        versions.after_update()
        for one, other in combinations(model, 2):
            assert one.weight.data_ptr() == other.weight.data_ptr(), update


def test_weights_that_travel_and_share_memory_are_refused() -> None:
    message = "`0.weight` and `1.weight` of stage 0 share memory, and each would travel"
    with pytest.raises(PipelineError, match=re.escape(message)):
        TravellingStage("0", nn.Sequential(*by_data()), cast(Any, None), None)


def test_files_have_each_of_them(tmp_path: Path) -> None:
    dense = {
        name: tensor
        for name, tensor in some_tensors().items()
        if not is_lazy(tensor) and not tensor.is_sparse and not tensor.is_meta
    }
    write(tmp_path / "weights.safetensors", dense)
    read = load_file(tmp_path / "weights.safetensors")
    assert read.keys() == dense.keys()
    for name, tensor in dense.items():
        assert torch.equal(read[name], tensor), name
