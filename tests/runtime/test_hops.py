"""Weights and gradients that travel from rank to rank, on real processes: training is that of one
process, and what is away takes no memory.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from schedlang import Plan
from schedlang.runtime import Pipeline, PipelineError
from schedlang.runtime.parts.hops import FlatGradients
from tests.support.mesh import mesh
from tests.support.models import batch, handing, program, replicated
from tests.support.paths import PROGRAMS
from tests.support.ranks import Run
from tests.support.sizes import STEPS
from tests.support.training import printed_figures

pytestmark = pytest.mark.processes

WIDTH = 8


class Mixed(nn.Module):
    """Weights of two types; one that nothing uses, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.full((WIDTH,), 0.1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * self.scale + self.shift


def mixed(pieces: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Mixed() for _ in range(pieces)]


def stages_of(plan: Plan, model: list[nn.Module], rank: int) -> dict[int, nn.Module]:
    """The stages of a rank, as replicas of the model."""
    layout = plan.layout
    return {
        stage: copy.deepcopy(model[layout.piece(stage)])
        for stage in plan.stages_of(rank)
    }


def weipipe(ranks: int, rounds: int = 2) -> Plan:
    return program("weipipe", ranks=ranks, microbatches=ranks * rounds)


def adamw(weights: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.1)


def momentum(weights: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9)


def home(plan: Plan, stage: int) -> bool:
    """By the program's own rule."""
    ranks = len(plan.ranks)
    return plan.placement[stage] == (ranks - plan.layout.piece(stage)) % ranks


def in_one_process(
    plan: Plan, model: list[nn.Module], optimizer: torch.optim.Optimizer, seed: int
) -> list[float]:
    """A step: microbatches add up their gradients in the order in which these come round."""
    inputs, targets = batch(plan, seed)
    lanes, rounds = len(plan.ranks), plan.layout.units(0)
    losses = [0.0] * plan.microbatches
    parts = [each.chunk(plan.microbatches) for each in (inputs, targets)]
    for turn in range(rounds):
        for lane in range(lanes):
            number = lane * rounds + turn
            x, y = (part[number] for part in parts)
            loss = nn.functional.mse_loss(nn.Sequential(*model)(x), y)
            (loss * (1 / plan.microbatches)).backward()
            losses[number] = float(loss)
    optimizer.step()
    optimizer.zero_grad()
    return losses


def trained(
    ranks: int,
    model_of: Callable[[int], list[nn.Module]],
    optimizer_of: Any,
    has_all: bool,
    steps: int,
) -> tuple[bool, list[int]]:
    """Whether a rank's losses and weights are those of one process, to the bit; and the bytes of
    its weights after each step, at home and elsewhere.
    """
    plan = weipipe(ranks)
    rank = dist.get_rank()
    model = model_of(plan.layout.pieces)
    stages = stages_of(plan, model, rank)
    weights = [weight for stage in stages.values() for weight in stage.parameters()]
    ours = Pipeline(plan, stages, nn.functional.mse_loss)
    # One that has those which are away as well finds no gradients there.
    optimizer = optimizer_of(weights if has_all else ours.parameters())
    alone = optimizer_of(nn.Sequential(*model).parameters())
    are_equal = True
    for seed in range(steps):
        losses = ours.step(*batch(plan, seed))
        optimizer.step()
        optimizer.zero_grad()
        expected = in_one_process(plan, model, alone, seed)
        first = rank * plan.layout.units(0)
        assert losses is not None
        are_equal &= losses.tolist() == expected[first : first + len(losses)]
    for stage, module in stages.items():
        if home(plan, stage):
            other = model[plan.layout.piece(stage)]
            pairs = zip(module.parameters(), other.parameters(), strict=True)
            are_equal &= all(torch.equal(own, expected) for own, expected in pairs)
    held = [
        sum(weight.untyped_storage().nbytes() for weight in module.parameters())
        for stage, module in stages.items()
        if not home(plan, stage)
    ]
    return are_equal, held


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("ranks", "model_of", "optimizer_of", "has_all"),
    [
        (4, mixed, adamw, False),
        (3, mixed, momentum, True),
        (2, mixed, adamw, True),
        (2, handing, adamw, False),
        (4, handing, momentum, False),
    ],
)
def test_steps_are_those_of_one_process_to_the_bit(
    run_ranks: Run,
    ranks: int,
    model_of: Any,
    optimizer_of: Any,
    has_all: bool,
    steps: int,
) -> None:
    given = ranks, model_of, optimizer_of, has_all, steps
    found = run_ranks(trained, ranks, *given).results()
    assert found == [(True, [0] * (ranks - 1))] * ranks


@pytest.mark.parametrize("steps", STEPS)
def test_the_command_runs_it_as_one_process_does(train: Callable, steps: int) -> None:
    done = train(
        *(2, PROGRAMS / "weipipe.sched"),
        *("-p", "microbatches=4", "--steps", steps, "--check"),
    )
    assert done.codes == [0, 0], done.stderr
    figures = printed_figures(done.stdout)
    assert figures["steps"] == steps
    assert figures["loss_error"] < 1e-5


def held_within_a_step() -> tuple[list[int], list[int]]:
    """Of the memory that autograd has saved a stage's weights from: the bytes after a step, of each
    that is not at home; and of how many stages a rank has had weights at once, before each forward
    and backward.
    """
    plan = weipipe(4)
    rank = dist.get_rank()
    stages = stages_of(plan, replicated(plan)[: plan.layout.pieces], rank)
    storages: dict[int, torch.UntypedStorage] = {}
    at_once = []

    def look(stage: int, module: nn.Module, *_: Any) -> None:
        storages[stage] = module[0].weight.untyped_storage()
        at_once.append(sum(each.nbytes() > 0 for each in storages.values()))

    for stage, module in stages.items():
        module.register_forward_pre_hook(partial(look, stage))
        module.register_full_backward_pre_hook(partial(look, stage))
    size = sum(weight.nbytes for weight in stages[plan.stages_of(rank)[0]].parameters())
    ours = Pipeline(plan, stages, nn.functional.mse_loss)
    ours.step(*batch(plan, 0))
    after = [
        storages[stage].nbytes() for stage in sorted(storages) if not home(plan, stage)
    ]
    at_home = [
        storages[stage].nbytes() for stage in sorted(storages) if home(plan, stage)
    ]
    assert at_home == [size]
    return after, at_once


def test_what_is_away_takes_no_memory(run_ranks: Run) -> None:
    for after, at_once in run_ranks(held_within_a_step, 4).results():
        # Autograd keeps the storages of weights, but nothing is in them.
        assert after == [0] * 3
        # By the middle, weights of all 4 stages have been there.
        assert len(at_once) == 16
        assert min(at_once[8:-1]) == 2


def test_gradients_come_home_into_the_memory_of_the_script() -> None:
    """A script may have laid out gradients in a flat tensor, also of a weight that is frozen since."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    flat = torch.zeros(9)
    for weight, part in zip(weights, flat.split(3), strict=True):
        weight.grad = part
    gradients = FlatGradients(weights)
    gradients.begin()
    weights[0].grad += 1
    total = gradients.in_one_piece() + 1
    # The home may send its own gradients, too.
    gradients.drop()
    weights[2].requires_grad_(False)
    gradients.put(total)
    assert flat.tolist() == [2, 2, 2, 1, 1, 1, 0, 0, 0]
    for weight, part in zip(weights, flat.split(3), strict=True):
        assert weight.grad.data_ptr() == part.data_ptr()


def clipped() -> bool:
    """Gradients of two steps, clipped together, and losses of an evaluation."""
    plan = weipipe(4)
    rank = dist.get_rank()
    model = mixed(plan.layout.pieces)
    stages = stages_of(plan, model, rank)
    ours = Pipeline(plan, stages, nn.functional.mse_loss)
    whole = nn.Sequential(*model)
    for seed in range(2):
        ours.step(*batch(plan, seed))
        inputs, targets = batch(plan, seed)
        for x, y in zip(inputs.chunk(8), targets.chunk(8), strict=True):
            (nn.functional.mse_loss(whole(x), y) / 8).backward()
    norm = ours.clip_grad_norm_(0.01)
    expected = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
    are_equal = bool(torch.isclose(norm, expected.double(), rtol=1e-6))
    for stage, module in stages.items():
        others = model[plan.layout.piece(stage)].parameters()
        for own, other in zip(module.parameters(), others, strict=True):
            if not home(plan, stage) or other.grad is None:
                are_equal &= own.grad is None
            else:
                are_equal &= bool(torch.allclose(own.grad, other.grad, rtol=1e-5))
    losses = ours.evaluate(*batch(plan, 7))
    assert losses is not None
    inputs, targets = (
        each.chunk(8)[2 * rank : 2 * rank + 2] for each in batch(plan, 7)
    )
    pairs = zip(losses, inputs, targets, strict=True)
    return are_equal and all(
        torch.isclose(loss, nn.functional.mse_loss(whole(x), y)) for loss, x, y in pairs
    )


def test_gradients_of_two_steps_are_clipped_at_home_and_evaluations_have_weights(
    run_ranks: Run,
) -> None:
    assert run_ranks(clipped, 4).results() == [True] * 4


def saved(folder: Path) -> list[bool]:
    """Whether a training goes on from a checkpoint as if there had been none, and the files of the
    model have the weights of this rank's stage.
    """
    plan = weipipe(4)
    rank = dist.get_rank()

    def built() -> tuple[Pipeline, dict[int, nn.Module], torch.optim.Optimizer]:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)]
        model = [
            nn.Sequential(OrderedDict([(f"layer{number}", layer), ("tanh", nn.Tanh())]))
            for number, layer in enumerate(layers)
        ]
        stages = stages_of(plan, model, rank)
        ours = Pipeline(plan, stages, nn.functional.mse_loss)
        return ours, stages, momentum(ours.parameters())

    def go_on(ours: Pipeline, optimizer: torch.optim.Optimizer, seeds: range) -> None:
        for seed in seeds:
            ours.step(*batch(plan, seed))
            optimizer.step()
            optimizer.zero_grad()

    ours, stages, optimizer = built()
    go_on(ours, optimizer, range(3))
    ours.save(folder / "checkpoints", 3, [optimizer])
    go_on(ours, optimizer, range(3, 6))
    ours.save_model(folder / "model", 6, [optimizer])
    again, others, resumed = built()
    found = [again.resume(folder / "checkpoints", [resumed]) == 3]
    go_on(again, resumed, range(3, 6))
    files = [load_file(path) for path in (folder / "model").glob("model-*.safetensors")]
    weights = {name: weight for file in files for name, weight in file.items()}
    found.append(len(weights) == 8)
    for stage, module in stages.items():
        pairs = zip(module.parameters(), others[stage].parameters(), strict=True)
        found += [torch.equal(one, other) for one, other in pairs]
        if home(plan, stage):
            pairs = ((weights[name], own) for name, own in module.named_parameters())
            found += [torch.equal(one, other) for one, other in pairs]
            continue
        for refused in (module.state_dict, partial(module.load_state_dict, {})):
            with pytest.raises(PipelineError, match="are at home as stage lane"):
                refused()
    return found


def test_checkpoints_have_each_stage_from_its_home(
    run_ranks: Run, tmp_path: Path
) -> None:
    for found in run_ranks(saved, 4, tmp_path).results():
        assert all(found)


def refused(what: str) -> None:
    plan = weipipe(2)
    model = replicated(plan)
    options: dict[str, dict[str, Any]] = {
        "audit": {"audit": True},
        "max_norm": {"max_norm": 1.0},
        "mesh": {"mesh": mesh("dp", "pp")} if what == "mesh" else {},
        "tied": {"tied": [{0: "0.bias", 1: "0.bias"}]},
    }
    rank = dist.get_rank() % 2
    stages = {stage: model[stage] for stage in plan.stages_of(rank)}
    for module in model:
        module[0].bias.requires_grad_(what != "thawed")
    ours = Pipeline(plan, stages, nn.functional.mse_loss, **options.get(what, {}))
    if what == "second":
        Pipeline(plan, stages, nn.functional.mse_loss)
    for module in model:
        if what == "thawed":
            module.requires_grad_(True)
        else:
            module.float()
    ours.step(*batch(plan, 0))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("audit", "with an audit of the stages it cannot do so yet"),
        (
            "max_norm",
            "with `max_norm`, which the pipeline clips its updates to it cannot",
        ),
        ("tied", "with tied weights it cannot do so yet"),
        ("converted", "lie in other memory than that in which they do"),
        ("thawed", "was thawed, and its gradients would not travel"),
        (
            "second",
            "have no elements: where another pipeline passes them on from rank to rank",
        ),
    ],
)
def test_what_does_not_go_together_with_it_is_refused(
    run_ranks: Run, what: str, message: str
) -> None:
    logs = run_ranks(refused, 2, what).logs
    assert any(message in log for log in logs), logs


def test_replicas_of_the_pipeline_are_refused(run_ranks: Run) -> None:
    message = "with replicas of the pipeline along another dimension of the mesh"
    logs = run_ranks(refused, 4, "mesh").logs
    assert any(message in log for log in logs), logs
