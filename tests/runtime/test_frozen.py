"""Frozen stages on real processes: the rest trains as in one process, and nothing is done in vain."""

import copy
import re
import warnings
from collections.abc import Callable, Iterable

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, PipelineError, split
from tests.support.models import alone, batch, difference, one_model, program_with
from tests.support.ranks import Run
from tests.support.sizes import STEPS

pytestmark = pytest.mark.processes

#: A prefix; stages before, between and behind trained ones; all but the first one.
PREFIX = "frozen 0 .. 2"
BETWEEN = "frozen 0 .. 1  frozen 2 .. 3"
ADAPTED = "frozen 1 .. 4"


def model_of(plan: Plan) -> list[nn.Module]:
    """The stages of a small model, of which those that are frozen in the plan are frozen."""
    stages = one_model(plan.layout)
    for number, stage in enumerate(stages):
        stage.requires_grad_(number not in plan.layout.frozen)
    return stages


def own_of(plan: Plan, model: list[nn.Module]) -> dict[int, nn.Module]:
    """This rank's stages; replicas on one rank are one module."""
    return {
        stage: model[plan.layout.piece(stage)]
        for stage in plan.stages_of(dist.get_rank())
    }


def sgd(stage: nn.Module) -> torch.optim.Optimizer | None:
    weights = [weight for weight in stage.parameters() if weight.requires_grad]
    return torch.optim.SGD(weights, 0.1, momentum=0.9) if weights else None


def train_alone(plan: Plan, steps: int) -> tuple[list[Tensor], list[nn.Module]]:
    """The losses of each step in one process, and the model after them."""
    model = model_of(plan)
    optimizers = [optimizer for optimizer in map(sgd, model) if optimizer]
    losses = []
    for step in range(steps):
        inputs, targets = batch(plan, step)
        of_step = []
        parts = zip(
            inputs.chunk(plan.microbatches),
            targets.chunk(plan.microbatches),
            strict=True,
        )
        for x, y in parts:
            loss = nn.functional.mse_loss(alone(model, x), y)
            (loss / plan.microbatches).backward()
            of_step.append(loss.detach())
        losses.append(torch.stack(of_step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


def trained(steps: int, name: str, lines: str, **params: int) -> tuple[bool, float]:
    """Whether all weights and losses of this rank are to the bit those of one process, and how far
    they are at most.
    """
    plan = program_with(name, lines, **params)
    expected, reference = train_alone(plan, steps)
    stages = own_of(plan, model_of(plan))
    optimizers = [
        optimizer for optimizer in map(sgd, set(stages.values())) if optimizer
    ]
    pairs = []
    with warnings.catch_warnings():
        # Nothing here is done in vain, so nothing may be warned of.
        warnings.simplefilter("error")
        ours = Pipeline(plan, stages, nn.functional.mse_loss)
        for step in range(steps):
            losses = ours.step(*batch(plan, step))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if losses is not None and len(plan.layout.pipelines) == 1:
                pairs.append((losses, expected[step]))
    for number, stage in stages.items():
        other = reference[plan.layout.piece(number)]
        pairs += zip(stage.parameters(), other.parameters(), strict=True)
        if number in plan.layout.frozen:
            assert all(weight.grad is None for weight in stage.parameters())
    return all(torch.equal(*pair) for pair in pairs), max(
        difference(*pair) for pair in pairs
    )


#: Every way of freezing, and every way of a backward.
CASES = {
    "1f1b prefix": ("1f1b", PREFIX),
    "1f1b adapted": ("1f1b", ADAPTED),
    "1f1b_explicit": ("1f1b_explicit", BETWEEN),
    "zb_h1": ("zb_h1", BETWEEN),
    "zb_v": ("zb_v", ADAPTED),
    "dualpipe": ("dualpipe", PREFIX),
    "1f1b_recompute": ("1f1b_recompute", BETWEEN),
    "seq1f1b": ("seq1f1b", PREFIX),
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("case", CASES)
def test_steps_are_those_of_one_process(run_ranks: Run, case: str, steps: int) -> None:
    """To the bit, but where gradients of replicas or of slices are summed."""
    for equal, worst in run_ranks(trained, 4, steps, *CASES[case]).results():
        assert equal or case in ("dualpipe", "seq1f1b")
        assert worst < 1e-12


def updated() -> dict[str, float]:
    """Schedules without a flush, whose trained stages read late weights."""
    found = {}
    for name, microbatches in (("pipedream_2bw", 4), ("pipedream", 1)):
        plan = program_with(name, PREFIX, microbatches=microbatches).for_updates(6)
        model = model_of(plan)
        stages = own_of(plan, model)
        optimizers = {
            stage: sgd(stages[stage]) for stage in stages if plan.layout.trains(stage)
        }
        before = copy.deepcopy(model)
        Pipeline(plan, stages, nn.functional.mse_loss, optimizers=optimizers).step(
            *batch(plan, 0)
        )
        for number, stage in stages.items():
            moved = [
                difference(*pair)
                for pair in zip(
                    stage.parameters(), before[number].parameters(), strict=True
                )
            ]
            assert bool(max(moved)) == plan.layout.trains(number)
        found[name] = max(moved)
    return found


def test_only_trained_stages_are_updated(run_ranks: Run) -> None:
    """`weights delay(1)` of all stages leaves frozen ones one version."""
    for found in run_ranks(updated, 4).results():
        assert len(found) == 2


def evaluated() -> list[bool]:
    """Forwards alone, and forwards with losses between two steps."""
    plan = program_with("1f1b", PREFIX)
    model = model_of(plan)
    ours = Pipeline(plan, own_of(plan, model), nn.functional.mse_loss)
    found = []
    for step in range(2):
        inputs, targets = batch(plan, step)
        ours.step(inputs, targets)
        outputs = ours.evaluate(inputs)
        with torch.no_grad():
            expected = alone(model, inputs)
        if outputs is not None:
            found.append(torch.allclose(torch.cat(outputs), expected))
    return found


def test_evaluation(run_ranks: Run) -> None:
    assert run_ranks(evaluated, 4).results() == [[], [], [], [True, True]]


def kept() -> int:
    """How many values of a step are left at its end, in all of this rank's stages."""
    plan = program_with("1f1b", PREFIX)
    ours = Pipeline(plan, own_of(plan, model_of(plan)), nn.functional.mse_loss)
    ours.step(*batch(plan, 0))
    boxes = [box for stage in ours._stages.values() for box in stage.boxes.values()]
    live = [stage._live for stage in ours._stages.values()]
    return sum(map(len, [*boxes, *live]))


def test_nothing_is_kept_beyond_a_step(run_ranks: Run) -> None:
    assert run_ranks(kept, 4).results() == [0, 0, 0, 0]


def sharded_and_replicated() -> float:
    """Two replicas of a pipeline of two ranks; or their shards."""
    plan = program_with("1f1b", "frozen 0 .. 1", ranks=2, microbatches=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    worst = 0.0
    for is_sharded in (False, True):
        model = model_of(plan)
        reference = copy.deepcopy(model)
        inputs, targets = batch(program_with("1f1b", "", ranks=2), 0)
        for x, y in zip(inputs.chunk(8), targets.chunk(8), strict=True):
            (nn.functional.mse_loss(alone(reference, x), y) / 8).backward()
        rank = mesh.get_local_rank("pp")
        own = model[rank]
        if is_sharded:
            fully_shard(own, mesh=mesh["dp"])
        share = [part.chunk(2)[mesh.get_local_rank("dp")] for part in (inputs, targets)]
        # FSDP has replicas of its own.
        used = mesh["pp"] if is_sharded else mesh
        Pipeline(plan, {rank: own}, nn.functional.mse_loss, mesh=used).step(*share)
        for weight, other in zip(
            own.parameters(), reference[rank].parameters(), strict=True
        ):
            assert (weight.grad is None) == (other.grad is None) == (rank == 0)
            if weight.grad is not None:
                gradient = weight.grad.full_tensor() if is_sharded else weight.grad
                worst = max(worst, difference(gradient, other.grad))
    return worst


def test_replicas_and_shards(run_ranks: Run) -> None:
    assert max(run_ranks(sharded_and_replicated, 4).results()) < 1e-12


def thawed() -> None:
    """The module of a stage that the plan freezes wants gradients."""
    plan = program_with("gpipe", "frozen 0 .. 1", ranks=2)
    Pipeline(plan, own_of(plan, one_model(plan.layout)), nn.functional.mse_loss)


def tied() -> None:
    """A weight of a frozen stage is trained in another one."""
    plan = program_with("gpipe", "frozen 0 .. 1", ranks=2)
    stages = own_of(plan, model_of(plan))
    names = [{0: "0.weight", 1: "0.weight"}]
    Pipeline(plan, stages, nn.functional.mse_loss, tied=names)


class Thawing(nn.Module):
    """A layer that thaws itself."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.part(x)
        self.requires_grad_(True)
        return y


def thawed_in_forwards() -> None:
    """The forward of a frozen stage thaws it."""
    plan = program_with("gpipe", "frozen 0 .. 1", ranks=2)
    model = [Thawing(stage) for stage in model_of(plan)]
    pipeline = Pipeline(plan, own_of(plan, model), nn.functional.mse_loss)
    pipeline.evaluate(*batch(plan, 0))
    pipeline.step(*batch(plan, 0))


def thawed_between_steps() -> None:
    """The script thaws a stage that is frozen behind a trained one."""
    plan = program_with("gpipe", "frozen 1 .. 2", ranks=2)
    model = model_of(plan)
    pipeline = Pipeline(plan, own_of(plan, model), nn.functional.mse_loss)
    pipeline.step(*batch(plan, 0))
    model[1].requires_grad_(True)
    pipeline.step(*batch(plan, 1))


def gradients_of_inputs() -> None:
    """The inputs of a frozen stage want gradients, and no backward comes to them."""
    plan = program_with("gpipe", "frozen 0 .. 1", ranks=2)
    pipeline = Pipeline(plan, own_of(plan, model_of(plan)), nn.functional.mse_loss)
    inputs, targets = batch(plan, 0)
    pipeline.step(inputs.requires_grad_(), targets)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            gradients_of_inputs,
            r"`inputs` of stage 0 want a gradient, and the stage is frozen in the plan, so no "
            r"backward comes to them: detach them, or take the stage out of `frozen`",
        ),
        (
            thawed,
            r"rank 0.*stage 0 is frozen in the plan, and its weight `0.weight` and 1 other would "
            r"be trained: freeze the module, `requires_grad_\(False\)`, or take the stage out of "
            r"`frozen` in gpipe.sched",
        ),
        (
            thawed_in_forwards,
            r"rank 0.*stage 0 is frozen in the plan, and its weight `part.0.weight` and 1 other "
            r"would be trained",
        ),
        (
            thawed_between_steps,
            r"rank 1.*stage 1 is frozen in the plan, and its weight `0.weight` and 1 other would "
            r"be trained",
        ),
        (
            tied,
            r"the weight `0.weight` of stage 1 would be trained, and is tied to `0.weight` of "
            r"stage 0, which is frozen in the plan: freeze both or none",
        ),
    ],
)
def test_what_disagrees_is_refused(
    run_ranks: Run, function: Callable[[], None], message: str
) -> None:
    outcome = run_ranks(function, 2)
    assert outcome.codes == [1, 1]
    assert re.search(message, "\n".join(outcome.logs)), outcome.logs


def in_vain() -> list[str]:
    """The plan trains a stage whose module is frozen."""
    plan = program_with("gpipe", "", ranks=2)
    model = one_model(plan.layout)
    model[0].requires_grad_(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Pipeline(plan, own_of(plan, model), nn.functional.mse_loss)
    return [str(warning.message) for warning in caught]


def test_what_a_plan_trains_for_nothing_is_a_warning(run_ranks: Run) -> None:
    (message,), nothing = run_ranks(in_vain, 2).results()
    assert message == (
        "no weight of stage 0 wants a gradient, and the plan trains it: `frozen 0 .. 1` in the "
        "program leaves out what is done for nothing"
    )
    assert nothing == []


def blocks(frozen: Iterable[int], count: int = 8) -> nn.Sequential:
    """Blocks of one size, some of them frozen."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    for number in frozen:
        model[number].requires_grad_(False)
    return model


def test_frozen_stages_are_given_frozen_blocks() -> None:
    """And more of them, as they have less to do."""
    plan = program_with("gpipe", "frozen 0 .. 1", ranks=2)
    stages = split(blocks(range(4)), plan, rank=0)
    assert stages.partition.cuts == (0, 4, 8)
    # Of a frozen block there is the forward alone, a third of what a trained one takes.
    assert stages.partition.costs[:5] == pytest.approx([17 / 3] * 4 + [17])
    stages = split(blocks(range(7)), plan, rank=0)
    assert stages.partition.cuts == (0, 5, 8)
    with pytest.raises(
        PipelineError, match="the frozen stages 0, and the model no blocks there"
    ):
        split(blocks([1, 2]), plan, rank=0)


def test_behind_a_trained_block_a_frozen_one_has_gradients_of_inputs() -> None:
    plan = program_with("gpipe", "frozen 1 .. 2", ranks=2)
    stages = split(blocks(range(2, 8)), plan, rank=0)
    # Forward and the half of the backward for the inputs: two thirds.
    assert stages.partition.costs == pytest.approx([17] * 2 + [17 * 2 / 3] * 6)
    assert stages.partition.cuts[1] in (3, 4)
