"""Models and optimizers that a pipeline saves and loads, by several ranks and by one."""

import os
import re
import signal
import warnings
from collections.abc import Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, AdamW, Optimizer

from schedlang.runtime import (
    Pipeline,
    PipelineError,
    load_model,
    load_optimizers,
    load_state,
    split,
)
from tests.support.cut_models import ROWS, alone, sequence
from tests.support.models import OPTIMIZERS, difference, pipeline, program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes


def replicas(folder: Path) -> float:
    """Two replicas of a pipeline: how far what they save is from one process, trained on the
    batches of both.
    """
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    plan = program("1f1b", ranks=2, microbatches=8)
    stages = split(sequence(), plan, rank=both.get_local_rank("pp"))
    optimizers = [
        OPTIMIZERS["momentum"](stage.parameters()) for stage in stages.values()
    ]
    batches = torch.randn(
        2,
        2,
        8 * ROWS,
        8,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )
    ours = Pipeline(plan, stages, nn.functional.mse_loss, mesh=both)
    ours.step(*batches[both.get_local_rank("dp")])
    optimizers[0].step()
    ours.save_model(folder, optimizers=optimizers)
    whole = sequence()
    loaded = sequence()
    for batch in batches:
        alone(whole, nn.functional.mse_loss, *batch)
    for weight in whole.parameters():
        weight.grad /= 2
    OPTIMIZERS["momentum"](whole.parameters()).step()
    load_model(folder, {0: loaded})
    assert len(list(folder.glob("model-*"))) == 2
    pairs = zip(loaded.parameters(), whole.parameters(), strict=True)
    return max(difference(*each) for each in pairs)


def test_replicas_of_a_pipeline_save_one_model(run_ranks: Run, tmp_path: Path) -> None:
    assert max(run_ranks(replicas, 4, tmp_path / "saved").results()) < 1e-12


class WithMasters(Optimizer):
    """Keeps the weights in float32."""

    def __init__(self, weights: Iterable[nn.Parameter]) -> None:
        super().__init__(weights, {})

    @torch.no_grad()
    def step(self) -> None:
        for weight in self.param_groups[0]["params"]:
            state = self.state[weight]
            if not state:
                state["master"] = weight.float().clone()
            state["master"] -= 1e-3 * weight.grad.float()
            weight.copy_(state["master"])


def on_with_masters(folder: Path, way: str) -> list[tuple[str, bool]]:
    """A run that goes on, beside one that has not stopped: the types of the masters, and whether
    the weights are the same to the bit.
    """
    plan = program("1f1b", ranks=2, microbatches=8)

    def begin() -> tuple[Pipeline, dict[int, nn.Module], list[Optimizer]]:
        stages = split(sequence().bfloat16(), plan)
        optimizers = [WithMasters(stage.parameters()) for stage in stages.values()]
        return Pipeline(plan, stages, mean_square), stages, optimizers

    def train(
        pipeline: Pipeline, optimizers: list[Optimizer], steps: Iterable[int]
    ) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(2, 8 * ROWS, 8, generator=generator).bfloat16()
            pipeline.step(*batch)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    uncut, its_stages, its_optimizers = begin()
    train(uncut, its_optimizers, range(3))
    uncut.save(folder / "kept", 3, its_optimizers)
    uncut.save_model(folder / "model", 3, its_optimizers)
    train(uncut, its_optimizers, range(3, 6))
    ours, stages, optimizers = begin()
    if way == "resume":
        assert ours.resume(folder / "kept", optimizers) == 3
    else:
        load_model(folder / "model", stages)
        load_optimizers(folder / "model", stages, optimizers)
    masters = [
        each["master"] for optimizer in optimizers for each in optimizer.state.values()
    ]
    types = [str(each.dtype) for each in masters]
    train(ours, optimizers, range(3, 6))
    return [
        (dtype, torch.equal(one, other))
        for number, stage in stages.items()
        for dtype, one, other in zip(
            types, stage.parameters(), its_stages[number].parameters(), strict=True
        )
    ]


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target.float())


@pytest.mark.parametrize("way", ["resume", "load_optimizers"])
def test_what_an_optimizer_keeps_has_the_type_that_it_had(
    run_ranks: Run, tmp_path: Path, way: str
) -> None:
    """Also where it is another one than that of the weights."""
    for found in run_ranks(on_with_masters, 2, tmp_path, way).results():
        assert found
        assert set(found) == {("torch.float32", True)}


def optimizer_in_parts(
    weights: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None
) -> Any:
    """Torch's own, of which each process keeps the state of some weights."""
    with warnings.catch_warnings():
        # Of what is imported beside it.
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(weights, AdamW, group)


def in_parts(folder: Path) -> list[float]:
    """Optimizers that keep a part on each replica: the largest difference of what they keep from
    that of one process, in the files and after loading these; and what is said before all of it is
    in one place.
    """
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    plan = program("1f1b", ranks=2, microbatches=8)
    stages = split(sequence(), plan, rank=both.get_local_rank("pp"))
    weights = [each for stage in stages.values() for each in stage.parameters()]
    group = both["dp"].get_group()
    ours = Pipeline(plan, stages, nn.functional.mse_loss, mesh=both)
    optimizer = optimizer_in_parts(weights, group)
    whole = AdamW(weights)
    batch = torch.randn(2, 8 * ROWS, 8, generator=torch.Generator().manual_seed(1))
    ours.step(*batch.double())
    optimizer.step()
    optimizer.consolidate_state_dict(0)
    ours.save_model(folder, 1, [optimizer])
    whole.step()
    again = optimizer_in_parts(weights, group)
    load_optimizers(folder, stages, [again])
    from_files = AdamW(weights)
    load_optimizers(folder, stages, [from_files])
    return [
        difference(state[weight]["exp_avg"], whole.state[weight]["exp_avg"])
        for state in (from_files.state, again.optim.state)
        for weight in state
    ]


def test_an_optimizer_in_parts_is_saved_whole(run_ranks: Run, tmp_path: Path) -> None:
    for off in run_ranks(in_parts, 4, tmp_path / "saved").results():
        # All weights of a stage in one process, and some of them in this part.
        assert len(off) > 7
        assert max(off) < 1e-12


def is_told(folder: Path) -> tuple[str, str]:
    """What is said of optimizers whose state is not where it is looked for."""
    plan = program("1f1b", ranks=1, microbatches=8)
    stages = split(sequence(), plan)
    ours = Pipeline(plan, stages, nn.functional.mse_loss)
    with pytest.warns(UserWarning, match="AdamW keeps nothing") as caught:
        ours.save_model(folder, optimizers=[AdamW(stages[0].parameters())])
    ours.save_model(folder, optimizers=[SGD(stages[0].parameters(), 0.1)])
    optimizer = optimizer_in_parts(stages[0].parameters())
    with pytest.raises(PipelineError) as raised:
        ours.save_model(folder, optimizers=[optimizer])
    return str(caught[0].message), str(raised.value)


def test_an_optimizer_that_keeps_nothing_is_a_question(
    run_ranks: Run, tmp_path: Path
) -> None:
    (said,) = run_ranks(is_told, 1, tmp_path / "saved").results()
    assert said[0].startswith("AdamW keeps nothing for any weight")
    assert "what ZeroRedundancyOptimizer keeps cannot be saved" in said[1]
    assert "consolidate_state_dict" in said[1]


def updated(folder: Path) -> tuple[int, bool]:
    """A pipeline that updates by itself, with late weights: whether the newest are saved, and what
    AdamW keeps.
    """
    plan = program("pipedream_2bw", ranks=2, microbatches=4).for_updates(6)
    stages = split(sequence(), plan)
    optimizers = {
        stage: OPTIMIZERS["adamw"](module.parameters())
        for stage, module in stages.items()
    }
    ours = Pipeline(plan, stages, nn.functional.mse_loss, optimizers=optimizers)
    ours.step(
        *torch.randn(
            2,
            plan.microbatches,
            8,
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(1),
        )
    )
    ours.save_model(folder)
    whole = sequence()
    optimizer = OPTIMIZERS["adamw"](whole.parameters())
    load_model(folder, {0: whole})
    load_optimizers(folder, {0: whole}, [optimizer])
    weights = dict(whole.named_parameters())
    same = []
    for stage, module in stages.items():
        for name, weight in module.named_parameters():
            theirs = optimizer.state[weights[name]]
            kept = optimizers[stage].state[weight]
            same += [
                torch.equal(weight, weights[name]),
                theirs["step"] == 6,
                kept.keys() == theirs.keys(),
            ]
            same += [torch.equal(each, theirs[key]) for key, each in kept.items()]
    return len(same), all(map(bool, same))


def test_a_pipeline_that_updates_saves_its_newest_weights(
    run_ranks: Run, tmp_path: Path
) -> None:
    """Of 14 weights, themselves and what AdamW keeps of each."""
    found = run_ranks(updated, 2, tmp_path / "saved").results()
    assert sum(count for count, _ in found) == 14 * 6
    assert [same for _, same in found] == [True, True]


def split_pipeline(dies: bool = False) -> Pipeline:
    """A pipeline of two ranks, of which the second one may die when it is to be saved."""
    plan = program("1f1b", ranks=2, microbatches=8)
    stages = split(sequence(), plan)
    if dies and dist.get_rank() == 1:
        # It dies when its weights are asked for, with its file not yet written.
        stages[1].register_state_dict_pre_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        )
    return Pipeline(plan, stages, nn.functional.mse_loss, timeout=2)


def saves(folder: Path, dies: bool) -> int:
    """The step of the model that was saved."""
    split_pipeline(dies).save_model(folder, 3)
    return load_model(folder, {0: sequence()})


def test_a_model_is_saved_whole_or_not_at_all(run_ranks: Run, tmp_path: Path) -> None:
    """A rank dies; the next attempt, in the same place, is not harmed by what is left of the first."""
    folder = tmp_path / "saved"
    outcome = run_ranks(saves, 2, folder, True)
    assert outcome.codes == [1, -9]
    assert re.search(
        r"rank 1 has not written its part of the model within 2 s$",
        outcome.logs[0],
        re.M,
    )
    assert not folder.exists()
    assert (tmp_path / "saved.new").exists()
    assert run_ranks(saves, 2, folder, False).results() == [3, 3]
    assert not (tmp_path / "saved.new").exists()


class Counted(torch.optim.SGD):
    """Keeps numbers of Python, as Adafactor of transformers does."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                kept = self.state[weight]
                kept["step"] = kept.get("step", 0) + 1
                kept["RMS"] = float(weight.detach().norm())
                kept["is_late"] = kept["step"] > 1


def counts(folder: Path) -> list[type]:
    """The types of what was loaded, if it is what was saved."""
    plan = program("1f1b", ranks=2, microbatches=8)
    stages = split(sequence(), plan)
    (stage,) = stages.values()
    optimizer, other = [Counted(stage.parameters(), 0.1) for _ in range(2)]
    for _ in range(2):
        optimizer.step()
    ours = Pipeline(plan, stages, nn.functional.mse_loss)
    ours.save_model(folder, optimizers=[optimizer])
    load_optimizers(folder, stages, [other])
    for weight in stage.parameters():
        assert other.state[weight] == optimizer.state[weight]
    return [type(other.state[weight][key]) for key in ("step", "RMS", "is_late")]


def test_numbers_of_python_that_an_optimizer_keeps(
    run_ranks: Run, tmp_path: Path
) -> None:
    found = run_ranks(counts, 2, tmp_path / "saved").results()
    assert found == [[int, float, bool]] * 2


def saves_when_told(folder: Path, told: tuple[int, int], steps: int) -> list[int]:
    """Each rank is told to save in a forward of its own; after which steps the model was there, and
    in the end the step that it is of.
    """
    plan = program("1f1b", ranks=2, microbatches=8)
    stages = split(sequence(), plan)
    ours = Pipeline(plan, stages, nn.functional.mse_loss, timeout=20)
    signal.signal(signal.SIGUSR1, lambda *_: ours.save_model(folder, 7))
    forwards = count()

    def tell(*_: object) -> None:
        if next(forwards) == told[dist.get_rank()]:
            signal.raise_signal(signal.SIGUSR1)

    for stage in stages.values():
        stage.register_forward_pre_hook(tell)
    batch = torch.ones(8 * ROWS, 8, dtype=torch.float64)
    there = []
    for step in range(steps):
        ours.step(batch, batch)
        if folder.exists():
            there.append(step)
    return there


@pytest.mark.parametrize(
    ("told", "steps", "there"),
    [((3, 5), 3, [1, 2]), ((2, 11), 4, [2, 3]), ((2, 11), 2, [])],
    ids=["one step", "two steps", "no step is left"],
)
def test_a_handler_saves_within_a_step(
    run_ranks: Run,
    tmp_path: Path,
    told: tuple[int, int],
    steps: int,
    there: list[int],
) -> None:
    folder = tmp_path / "saved"
    run = run_ranks(saves_when_told, 2, folder, told, steps)
    assert run.results() == [there, there]
    if there:
        assert load_model(folder, {0: sequence()}) == 7


def names_twice(folder: Path) -> None:
    """Stages that were made one by one: both have a weight `0.weight`."""
    plan = program("1f1b", ranks=2, microbatches=2)
    model = [nn.Sequential(nn.Linear(8, 8)) for _ in range(2)]
    pipeline(plan, model).save_model(folder / "saved")


def apart(folder: Path) -> None:
    """The ranks have a folder each."""
    split_pipeline().save_model(folder / f"{dist.get_rank()}" / "saved")


def nowhere(folder: Path) -> None:
    (folder / "file").write_text("")
    split_pipeline().save_model(folder / "file" / "saved")


def still_empty(_: Path) -> None:
    plan = program("1f1b", ranks=2, microbatches=2)
    with torch.device("meta"):
        Pipeline(plan, split(sequence(), plan), nn.functional.mse_loss)


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (
            names_twice,
            r"two stages have a weight `0\.weight`: save_model is for stages of one model, by `split`",
        ),
        (
            apart,
            r"`\S+00002-of-00002\.safetensors` is not there for rank 0: all ranks must share the folder",
        ),
        (
            nowhere,
            r"the model `\S+/file/saved` cannot be written: (Not a directory|File exists)",
        ),
        (
            still_empty,
            r"the stages are on the meta device: give them their weights first, by `load_model`",
        ),
    ],
)
def test_what_cannot_be_saved_or_run_is_one_error(
    run_ranks: Run, tmp_path: Path, fails: Callable[[Path], None], message: str
) -> None:
    outcome = run_ranks(fails, 2, tmp_path)
    assert outcome.codes == [1, 1], outcome.logs
    for log in outcome.logs:
        assert re.search(rf"rank \d failed: {message}$", log, re.M), outcome.logs


def linears() -> nn.Module:
    return nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))})


def model_in(folder: Path) -> dict[int, nn.Module]:
    """A model, and a file of it."""
    stages = {0: linears()}
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
    other = linears()
    other["layers"][2] = nn.Linear(4, 5)
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
        model = linears()
    load_model(tmp_path, {0: model})
    # Weights that were a map of the file would end the process with a bus error when they are read.
    os.truncate(tmp_path / "model.safetensors", 100)
    assert all(
        torch.equal(each, whole[name]) for name, each in model.state_dict().items()
    )


def test_a_buffer_in_no_file_is_not_left_empty(tmp_path: Path) -> None:
    model_in(tmp_path)
    with torch.device("meta"):
        model = linears()
        model.register_buffer("positions", torch.arange(4), persistent=False)
    with pytest.raises(
        PipelineError, match="`positions` is on the meta device and in no file"
    ):
        load_model(tmp_path, {0: model})


class Position:
    """A data loader's state."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def with_state(folder: Path) -> tuple[int, int, list[float], int]:
    """What a script keeps beside a model, saved by two ranks and read as by any number of them."""
    plan = program("1f1b", ranks=2, microbatches=8)
    stages = split(sequence(), plan)
    ours = Pipeline(plan, stages, nn.functional.mse_loss)
    optimizer = SGD(ours.parameters(), lr=1.0, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = {"scheduler": scheduler, "loader": Position(3)}
    with (
        pytest.warns(match="there is no model in")
        if dist.get_rank() == 0
        else (warnings.catch_warnings())
    ):
        begin = load_model(folder, stages)
    load_optimizers(folder, stages, [optimizer])
    load_state(folder, state)
    for step in range(2):
        ours.step(*torch.randn(2, 8 * ROWS, 8, dtype=torch.float64).unbind())
        optimizer.step()
        scheduler.step()
        ours.save_model(folder / f"step-{step + 1}", step + 1, [optimizer], state)
    new = SGD(ours.parameters(), lr=1.0, momentum=0.9)
    position = Position(0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(new, 0.5)
    load_state(folder, {"scheduler": schedule, "loader": position})
    new.step()
    schedule.step()
    rates = [new.param_groups[0]["lr"], schedule.get_last_lr()[0]]
    return begin, load_model(folder, stages), rates, position.position


def test_a_script_keeps_its_schedulers_and_loaders_with_the_model(
    run_ranks: Run, tmp_path: Path
) -> None:
    """The newest of several, with the rate that a scheduler goes on from; and step 0 before."""
    for found in run_ranks(with_state, 2, tmp_path / "saved").results():
        assert found == (0, 2, [0.125, 0.125], 3)


def other_states(folder: Path, what: str) -> None:
    plan = program("1f1b", ranks=2, microbatches=8)
    stages = split(sequence(), plan)
    ours = Pipeline(plan, stages, nn.functional.mse_loss)
    rank = dist.get_rank()
    if what == "by rank":
        ours.save_model(folder / "saved", 1, state={"loader": Position(rank)})
    ours.save_model(folder / "saved", 1, state={"loader": Position(1)})
    if what == "a function":
        ours.save_model(folder / "other", 1, state={"loader": Position(print)})  # type: ignore[arg-type]
    elif what == "no state":
        ours.save_model(folder / "other", 1, state={"loader": 5})  # type: ignore[dict-item]
    elif what == "a list":
        ours.save_model(folder / "other", 1, state=[5])  # type: ignore[arg-type]
    elif what == "a file":
        load_model(folder / "saved" / "state.pt", stages)
    elif what == "damaged":
        (folder / "saved" / "state.pt").write_text("damaged")
        dist.barrier()
        load_state(folder / "saved", {"loader": Position(0)})
    elif what == "no states":
        dist.barrier()
        (folder / "saved" / "state.pt").unlink(missing_ok=True)
        dist.barrier()
        load_state(folder / "saved", {"loader": Position(0)})
    names = {"other names": ["loader", "scheduler"]}.get(what, [])
    load_state(folder / "saved", dict.fromkeys(names, Position(0)))


@pytest.mark.parametrize(
    ("what", "why"),
    [
        (
            "by rank",
            "rank 1 has another state of `loader` than rank 0: save_model keeps",
        ),
        ("other names", r"has `loader`, and here `loader`, `scheduler` was asked for"),
        ("no names", r"has `loader`, and here nothing was asked for"),
        (
            "a function",
            "the state of `loader` cannot be saved, since torch would not read",
        ),
        ("no state", r"`state\['loader'\]` is 5, which has no `state_dict`"),
        (
            "a list",
            r"`state` is \[5\]: it must be a dictionary of objects with a state",
        ),
        ("a file", "state.pt` is a file, and a model is in a folder"),
        ("damaged", "state.pt` cannot be read: .* it may be damaged"),
        ("no states", "saved` has no states of a script"),
    ],
)
def test_states_of_a_script_that_do_not_fit(
    run_ranks: Run, tmp_path: Path, what: str, why: str
) -> None:
    outcome = run_ranks(other_states, 2, tmp_path, what)
    assert re.search(why, "".join(outcome.logs))


def without_values(folder: Path) -> None:
    with torch.device("meta"):
        stages = split(sequence(), program("1f1b", ranks=2, microbatches=8))
    load_model(folder / "typo", stages)


def test_weights_that_are_nowhere_are_not_trained(
    run_ranks: Run, tmp_path: Path
) -> None:
    outcome = run_ranks(without_values, 2, tmp_path)
    assert re.search(
        "there is no model in .*typo. yet, and `.*` of stage", outcome.logs[0]
    )
