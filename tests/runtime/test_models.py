"""Models of users: how they are cut into stages, their files, and that they train as in one
process.
"""

import copy
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from schedlang import compile, read_source
from schedlang.plan.plan import Plan
from tests.support.launches import Outcome, Run, fixtures
from tests.support.paths import DOCS, PROGRAMS

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from schedlang.runtime import PipelineError, load_model, load_optimizers, measure, split

pytestmark = pytest.mark.processes

worker, run = fixtures("model_worker.py")


def test_a_sequential_is_cut_for_every_placement(run: Run) -> None:
    """To the bit, but where the gradients of two pipelines are summed."""
    for found in run("sequences", 4).found():
        for name, (equal, worst) in found.items():
            assert equal or name == "dualpipe"
            assert worst < 1e-12


def test_stages_that_are_not_neighbours(run: Run) -> None:
    """All stages of a decoder need what the encoder made, and the last one what the first began
    with.
    """
    for found in run("encoder_decoder", 4).found():
        assert len(found) == 4
        assert max(found.values()) < 1e-12


def test_a_llama_of_transformers_trains_in_slices(run: Run) -> None:
    """Each rank loads its own slice alone; of two pipelines it has two."""
    shares = {"zb_v": 0, "dualpipe": 0}
    for found in run("llamas", 4).found():
        for name, (equal, worst, share) in found.items():
            assert equal or name == "dualpipe"
            assert worst < 1e-5
            assert share < (0.35 if name == "zb_v" else 0.6)
            shares[name] += share
    assert shares == {"zb_v": pytest.approx(1), "dualpipe": pytest.approx(2)}


def test_the_models_that_the_page_names_are_cut_as_they_are(run: Run) -> None:
    (found,) = run("families", 1).found()
    assert set(found.values()) == {True}
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    assert [name for name in found if name not in page] == []


def test_the_program_of_the_page_works(run: Run) -> None:
    assert run("page", 2).found() == [True, True]


def test_tied_weights_are_found_and_stay_tied(run: Run) -> None:
    """Wherever their stages are; also from a file in which they have one name."""
    for found in run("tied_llamas", 4).found():
        assert list(found) == ["zb_v", "dualpipe", "1f1b", "end"]
        # AdamW divides by gradients, of which some are little more than rounding.
        assert found.pop("end") < 1e-2
        assert max(found.values()) < 1e-5


def test_replicas_of_a_pipeline_save_one_model(run: Run) -> None:
    assert max(run("mesh", 4).found()) < 1e-12


def test_a_run_goes_on_under_another_schedule_and_number_of_ranks(run: Run, tmp_path: Path) -> None:
    """20 steps with AdamW, to the bit: losses, and the weights as `from_pretrained` reads them in
    the end.
    """
    (first,) = filter(None, run("first_half", 4).found())
    (tmp_path / "port").unlink()
    ours, others = run("second_half", 2).found()
    losses, expected, same = others
    assert first + losses == expected
    assert len(expected) == 20
    assert expected[-1] < expected[0] - 0.1
    assert same
    assert ours[0] == []


def test_a_pipeline_that_updates_saves_its_newest_weights(run: Run) -> None:
    """Of 14 weights, themselves and what AdamW keeps of each."""
    found = run("updated", 2).found()
    assert sum(count for count, _ in found) == 14 * 6
    assert [same for _, same in found] == [True, True]


def test_a_model_is_saved_whole_or_not_at_all(run: Run, tmp_path: Path) -> None:
    """A rank dies; the next attempt, in the same place, is not harmed by what is left of the first."""
    outcome = run("dies_while_saving", 2)
    assert outcome.codes == [1, -9]
    assert re.search(
        r"rank 1 has not written its part of the model within 2 s$", outcome.logs[0], re.M
    )
    assert not (tmp_path / "saved").exists()
    assert (tmp_path / "saved.new").exists()
    (tmp_path / "port").unlink()
    (tmp_path / "again").write_text("")
    assert run("dies_while_saving", 2).found() == [3, 3]
    assert not (tmp_path / "saved.new").exists()


@pytest.mark.parametrize(
    ("scenario", "message"),
    [
        (
            "names_twice",
            r"two stages have a weight `0\.weight`: save_model is for stages of one model, by `split`",
        ),
        (
            "apart",
            r"`\S+00002-of-00002\.safetensors` is not there for rank 0: all ranks must share the folder",
        ),
        ("nowhere", r"the model `\S+/file/saved` cannot be written: (Not a directory|File exists)"),
        (
            "still_empty",
            r"the stages are on the meta device: give them their weights first, by `load_model`",
        ),
    ],
)
def test_what_cannot_be_saved_or_run_is_one_error(run: Run, scenario: str, message: str) -> None:
    outcome: Outcome = run(scenario, 2)
    assert outcome.codes == [1, 1], outcome.logs
    for log in outcome.logs:
        assert re.search(rf"rank \d failed: {message}$", log, re.M), outcome.logs


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


def plan_of(program: str, **params: int) -> Plan:
    return compile(read_source(PROGRAMS / f"{program}.sched"), params)


PLAN = plan_of("1f1b", ranks=2)


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
            "`blocks` and `costs` do not cut the model: 1 block for 2 stages, of which each has one or more",
        ),
        (["layer"], None, "the model has no block `layer`"),
        (["layers.0", "layers.1"], None, "the weight `layers.2.weight` is in none of the blocks"),
        (["layers"], [1, 1], "the model has 4 blocks, `costs` has 2"),
        (
            ["layers"],
            [1, 1, 1, -1],
            "do not cut the model: the costs of the blocks must be numbers from 0, not all 0",
        ),
    ],
)
def test_what_split_cannot_cut(blocks: list[str], costs: list[float] | None, message: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(message)):
        split(Model(), PLAN, blocks, costs, rank=0)


def test_each_stage_has_its_own_copy_of_a_tied_weight() -> None:
    """Also where both are on one rank, or two optimizers would have the same weight."""
    model = Model()
    model.layers[3].weight = tied = model.layers[0].weight
    stages = split(model, plan_of("zb_v", ranks=2), ["layers"], rank=0)
    assert stages.tied == [{0: "layers.0.weight", 3: "layers.3.weight"}]
    first, last = (
        dict(stages[stage].named_parameters())[name] for stage, name in stages.tied[0].items()
    )
    assert first is tied is model.layers[3].weight
    assert last is not tied
    assert torch.equal(last, tied)


def test_what_is_shared_and_slices_are_not_cut() -> None:
    activation = nn.ReLU()
    with pytest.raises(
        PipelineError, match="the blocks `1` and `3` are one module: they must be two"
    ):
        split(nn.Sequential(nn.Linear(4, 4), activation, nn.Linear(4, 4), activation), PLAN, rank=0)
    with pytest.raises(PipelineError, match="the plan has slices"):
        split(Model(), plan_of("terapipe"), ["layers"], rank=0)


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
        assert costs[1] == costs[3] > 2 * costs[0] == 2 * costs[2]
    assert all(torch.equal(each, before[name]) for name, each in full.state_dict().items())
    assert all(each.grad is None for each in full.parameters())


def model_in(folder: Path) -> dict[int, nn.Module]:
    """A model, and a file of it."""
    stages = {0: Model()}
    save_file(stages[0].state_dict(), folder / "model.safetensors")
    return stages


def test_files_that_are_of_no_use(tmp_path: Path) -> None:
    stages = model_in(tmp_path)
    assert load_model(tmp_path, stages) == 0
    with pytest.raises(
        PipelineError,
        match=r"`\S+/optimizer.safetensors.index.json` cannot be read: No such file or d",
    ):
        load_optimizers(tmp_path, stages, [])
    with pytest.raises(PipelineError, match=r"`\S+` has no `0\.weight`"):
        load_model(tmp_path, {0: nn.Sequential(nn.Linear(4, 4))})
    other = Model()
    other.layers[2] = nn.Linear(4, 5)
    with pytest.raises(
        PipelineError, match=r"`layers\.2\.weight` is \[4, 4\] in `\S+`, here \[5, 4\]"
    ):
        load_model(tmp_path, {0: other})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(PipelineError, match=r"cannot be read: .*header"):
        load_model(tmp_path, stages)


def test_weights_do_not_live_in_their_file(tmp_path: Path) -> None:
    whole = model_in(tmp_path)[0].state_dict()
    with torch.device("meta"):
        model = Model()
    load_model(tmp_path, {0: model})
    os.truncate(tmp_path / "model.safetensors", 100)
    assert all(torch.equal(each, whole[name]) for name, each in model.state_dict().items())


def test_a_buffer_in_no_file_is_not_left_empty(tmp_path: Path) -> None:
    model_in(tmp_path)
    with torch.device("meta"):
        model = Model()
        model.register_buffer("positions", torch.arange(4), persistent=False)
    with pytest.raises(PipelineError, match="`positions` is on the meta device and in no file"):
        load_model(tmp_path, {0: model})
