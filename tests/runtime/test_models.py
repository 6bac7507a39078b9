"""Models of users: how they are cut into stages, and that these train as in one process."""

import copy
import re
from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import Tensor, nn

from schedlang.runtime import Pipeline, PipelineError, measure, split
from tests.support.cut_models import (
    LENGTH,
    ROWS,
    VOCABULARY,
    alone,
    gradients,
    loss_of,
    sequence,
)
from tests.support.models import difference, program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes


def sequences() -> dict[str, tuple[bool, float]]:
    """A Sequential under schedules of all kinds of placement: whether gradients are to the bit, and
    how far at most.
    """
    inputs, targets = torch.randn(
        2, 8 * ROWS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    found = {}
    for name in ("1f1b", "interleaved_1f1b", "zb_v", "dualpipe"):
        plan = program(name, ranks=4, microbatches=8)
        reference = sequence()
        alone(reference, nn.functional.mse_loss, inputs, targets)
        stages = split(sequence(), plan)
        Pipeline(plan, stages, nn.functional.mse_loss).step(inputs, targets)
        pairs = list(gradients(stages, reference))
        found[name] = [
            all(torch.equal(*each) for each in pairs),
            # A rank may have no layers but those without weights.
            max((difference(*each) for each in pairs), default=0.0),
        ]
    return found


def test_a_sequential_is_cut_for_every_placement(run_ranks: Run) -> None:
    """To the bit, but where the gradients of two pipelines are summed."""
    for found in run_ranks(sequences, 4).results():
        for name, (equal, worst) in found.items():
            assert equal or name == "dualpipe"
            assert worst < 1e-12


class Encode(nn.Module):
    """Changes what an encoder has so far; the first one embeds, and keeps that for the last stage
    of the decoder.
    """

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.embed = (
            nn.Embedding(VOCABULARY, 16, dtype=torch.float64) if is_first else None
        )
        self.layer = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, passed: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.embed is not None:
            start = self.embed(passed.pop("source"))
            passed = passed | {"memory": start, "skip": start}
        return passed | {
            "memory": passed["memory"] + self.layer(passed["memory"]).tanh()
        }


class Decode(nn.Module):
    """Looks at all of what the encoder made; the first one embeds its own tokens."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.embed = (
            nn.Embedding(VOCABULARY, 16, dtype=torch.float64) if is_first else None
        )
        self.look = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)

    def forward(self, passed: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.embed is not None:
            passed = passed | {"x": self.embed(passed.pop("tokens"))}
        x = passed["x"]
        memory = passed["memory"]
        return passed | {"x": x + self.look(x, memory, memory, need_weights=False)[0]}


class Scores(nn.Module):
    """The end of the decoder, which also has what the encoder began with."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(32, VOCABULARY, dtype=torch.float64)

    def forward(self, passed: dict[str, Tensor]) -> Tensor:
        return self.scores(torch.cat([passed["x"], passed["skip"]], -1))


def encoder_decoder() -> dict[str, float]:
    """An encoder and a decoder, and an edge from first to last: how far gradients are from those of
    one process.
    """
    generator = torch.Generator().manual_seed(1)
    source, given, targets = torch.randint(
        VOCABULARY, (3, 8 * ROWS, LENGTH), generator=generator
    )
    inputs = {"source": source, "tokens": given}
    found = {}
    for name in ("1f1b", "interleaved_1f1b", "zb_v", "dualpipe"):
        torch.manual_seed(0)
        firsts = (True, False, False, False)
        model = nn.Sequential(*map(Encode, firsts), *map(Decode, firsts), Scores())
        reference = copy.deepcopy(model)
        plan = program(name, ranks=4, microbatches=8)
        for part in range(8):
            mine = {key: value.chunk(8)[part] for key, value in inputs.items()}
            (loss_of(reference(mine), targets.chunk(8)[part]) / 8).backward()
        stages = split(model, plan)
        Pipeline(plan, stages, loss_of).step(inputs, targets)
        found[name] = max(difference(*each) for each in gradients(stages, reference))
    return found


def test_stages_that_are_not_neighbours(run_ranks: Run) -> None:
    """All stages of a decoder need what the encoder made, and the last one what the first began
    with.
    """
    for found in run_ranks(encoder_decoder, 4).results():
        assert len(found) == 4
        assert max(found.values()) < 1e-12


WITH_GLUE = "all that is done to it must be done in blocks"


class Model(nn.Module):
    """Four blocks, between which something may be done, or not all of them called."""

    def __init__(
        self,
        glue: Callable[[Tensor, int], Tensor] = lambda x, _: x,
        calls: Sequence[int] = range(4),
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.glue = glue
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        for place in self.calls:
            x = self.glue(self.layers[place](x), place)
        return x


PLAN = program("1f1b", ranks=2)


def first_forward(model: nn.Module) -> None:
    """Of all stages, one after the other."""
    x = torch.ones(2, 4)
    for rank in range(2):
        x = split(model, PLAN, ["layers"], rank=rank)[rank](x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Model(lambda x, place: x + 1 if place == 0 else x),
            f"the model gives block `layers.1` something else than what block `layers.0` returns: {WITH_GLUE}",
        ),
        (
            Model(lambda x, place: x.mul_(2) if place == 3 else x),
            f"the model returns something else than what block `layers.3` returns: {WITH_GLUE}",
        ),
        (
            Model(lambda x, _: x.flatten()),
            f"the model gives block `layers.1` something else than what block `layers.0` returns: {WITH_GLUE}",
        ),
        (
            Model(calls=[0, 2, 1, 3]),
            "the model calls block `layers.2` after `layers.0`, where `blocks` has `layers.1`",
        ),
        (
            Model(calls=[0, 1, 2]),
            "the model calls no block after `layers.2`, where `blocks` has `layers.3`",
        ),
        (
            Model(calls=[0, 1, 2, 3, 3]),
            "the model calls block `layers.3` after `layers.3`, where `blocks` has the end",
        ),
    ],
)
def test_a_model_that_does_more_than_call_its_blocks_is_found_out(
    model: Model, message: str
) -> None:
    with pytest.raises(PipelineError, match=re.escape(message)):
        first_forward(model)


def test_views_of_all_are_not_taken_for_more() -> None:
    """As transformers takes the last positions of a text, which may be all."""
    first_forward(Model(lambda x, _: x[:, slice(0, None)]))


def test_a_list_of_blocks_is_called_in_its_order() -> None:
    blocks = [nn.Linear(4, 4) for _ in range(4)]
    x = torch.ones(2, 4)
    stages = [split(nn.ModuleList(blocks), PLAN, rank=rank)[rank] for rank in range(2)]
    assert [list(dict(stage.named_parameters()))[::2] for stage in stages] == [
        ["0.weight", "1.weight"],
        ["2.weight", "3.weight"],
    ]
    assert torch.equal(stages[1](stages[0](x)), nn.Sequential(*blocks)(x))
    assert len(measure(nn.ModuleList(blocks), x)) == 4


@pytest.mark.parametrize(
    ("blocks", "costs", "message"),
    [
        (
            [""],
            None,
            "the model itself, a `Model`, is no list of blocks: name its submodules",
        ),
        (["layer"], None, "the model has no block `layer`"),
        (
            ["layers.0", "layers.1"],
            None,
            "the weight `layers.2.weight` is in none of the blocks",
        ),
        (["layers"], [1, 1], "the model has 4 blocks, `costs` has 2"),
        (
            ["layers"],
            [1, 1, 1, -1],
            "do not cut the model: the costs of the blocks must be numbers from 0, not all 0",
        ),
    ],
)
def test_what_split_cannot_cut(
    blocks: list[str], costs: list[float] | None, message: str
) -> None:
    with pytest.raises(PipelineError, match=re.escape(message)):
        split(Model(), PLAN, blocks, costs, rank=0)


def test_each_stage_has_its_own_copy_of_a_tied_weight() -> None:
    """Also where both are on one rank, or two optimizers would have the same weight."""
    model = Model()
    model.layers[3].weight = tied = model.layers[0].weight
    stages = split(model, program("zb_v", ranks=2), ["layers"], rank=0)
    assert stages.tied == [{0: "layers.0.weight", 3: "layers.3.weight"}]
    first, last = (
        dict(stages[stage].named_parameters())[name]
        for stage, name in stages.tied[0].items()
    )
    assert first is tied is model.layers[3].weight
    assert last is not tied
    assert torch.equal(last, tied)


def test_what_is_shared_and_slices_are_not_cut() -> None:
    activation = nn.ReLU()
    with pytest.raises(
        PipelineError, match="the blocks `1` and `3` are one module: they must be two"
    ):
        split(
            nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4), activation),
            PLAN,
            rank=0,
        )
    with pytest.raises(PipelineError, match="the plan has slices"):
        split(Model(), program("terapipe"), ["layers"], rank=0)


def test_a_measure_finds_the_slow_blocks_and_leaves_the_model_alone() -> None:
    """Even where the model has no weights yet."""
    layers = [
        nn.Tanh(),
        nn.Linear(1024, 1024),
        nn.Tanh(),
        nn.Linear(1024, 1024),
        nn.BatchNorm1d(1024),
    ]
    full = nn.Sequential(*layers)
    empty = copy.deepcopy(full).to("meta")
    before = copy.deepcopy(full.state_dict())
    for model in (empty, full):
        costs = measure(model, torch.ones(256, 1024))
        # Layers of one kind and size are measured as one, so that their costs are equal.
        assert costs[1] == costs[3] > 2 * costs[0] == 2 * costs[2]
    assert all(
        torch.equal(each, before[name]) for name, each in full.state_dict().items()
    )
    assert all(each.grad is None for each in full.parameters())
