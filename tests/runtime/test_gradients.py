"""What the runtime computes, on real processes: losses, gradients and weights of one process."""

import copy
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from attrs import frozen

from tests.support.paths import GALLERY
from tests.support.ranks import Run
from tests.support.sizes import shares

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn

from schedlang import CompileError, Source, compile
from schedlang.plan.plan import Plan
from schedlang.ranks.weight_versions import follow_weights
from schedlang.runtime import Pipeline
from tests.support.models import (
    DELAYS,
    OPTIMIZERS,
    UPDATES,
    WIDTH,
    alone,
    batch,
    delayed,
    difference,
    loss_difference,
    modules,
    normed,
    one_model,
    pipeline,
    program,
    replicated,
    shared_out,
    update_batches,
    version_plan,
)

pytestmark = pytest.mark.processes

# Each rank holds two stages of a V, and takes microbatches in an order of its own making; stages 1
# and 2 are neighbours on one rank.
V = """schedule v {
    param ranks = 2
    param microbatches = 3
    stage s in 0 .. 2 * ranks on if s < ranks then s else 2 * ranks - 1 - s
    fn turned(m) = (m + 1) % microbatches
    fn back(m) = (2 * m + 2) % microbatches
    rank r {
        for m in 0 .. microbatches { F(r, turned(m)) }
        for m in 0 .. microbatches { F(2 * ranks - 1 - r, turned(m)) }
        for m in 0 .. microbatches { B(2 * ranks - 1 - r, microbatches - 1 - m) }
        for m in 0 .. microbatches { B(r, microbatches - 1 - m) }
    }
}
"""
# Slices whose forwards are run again, and whose backward is split.
SLICES = """schedule slices {
    param ranks = 2
    param microbatches = 3
    param slices = 3
    rank r {
        for m in 0 .. microbatches { for k in 0 .. slices { F(m, k) } }
        for m in 0 .. microbatches { for k in 0 .. slices { R(m, slices - 1 - k)  B(m, slices - 1 - k) } }
        repeat microbatches * slices { W }
    }
}
"""


OWN = {"v": V, "slices": SLICES}


@frozen
class Reference:
    """What one process makes of the batches that a plan is given."""

    #: Of each step, by microbatch.
    losses: list[list[torch.Tensor]]
    #: By microbatch, of each step, where microbatches have slices.
    outputs: list[list[torch.Tensor]]
    #: Of each stage, added up over the steps.
    gradients: list[list[torch.Tensor | None]]


def steps_of(plan: Plan) -> int:
    return 1 if plan.is_forward_only else 2


def in_one_process(
    plan: Plan, dtype: torch.dtype = torch.float64, loss_scale: float | None = None
) -> Reference:
    model = one_model(plan.layout, dtype)
    scale = loss_scale or 1 / plan.microbatches
    losses = []
    outputs = []
    for step in range(steps_of(plan)):
        found = [
            alone(model, x)
            for x in batch(plan, step, dtype)[0].chunk(plan.microbatches)
        ]
        targets = batch(plan, step, dtype)[1].chunk(plan.microbatches)
        each = [
            nn.functional.mse_loss(x, y) for x, y in zip(found, targets, strict=True)
        ]
        for loss in each:
            (loss * scale).backward()
        losses.append([loss.detach() for loss in each])
        outputs.append([x.detach() for x in found] if plan.layout.slices > 1 else [])
    gradients = [[weight.grad for weight in stage.parameters()] for stage in model]
    return Reference(losses, outputs, gradients)


def compare(
    plan: Plan,
    expected: Reference,
    dtype: torch.dtype = torch.float64,
    **options: float,
) -> list[float]:
    """The largest differences of losses and of gradients, of the stages on this rank.

    Two steps, whose gradients add up, with an evaluation between them, which leaves them alone.
    """
    model = replicated(plan, dtype)
    ours = pipeline(plan, model, **options)
    worst = [0.0, 0.0]
    for step in range(steps_of(plan)):
        inputs, targets = batch(plan, step, dtype)
        if plan.layout.slices > 1:
            # Put together again.
            outputs = ours.evaluate(inputs) or []
            for output, right in zip(outputs, expected.outputs[step], strict=False):
                worst[0] = max(worst[0], difference(output, right))
        evaluated = ours.evaluate(inputs, targets)
        found = [evaluated and torch.stack(evaluated)]
        if not plan.is_forward_only:
            found.append(ours.step(inputs, targets))
        for losses in found:
            right = expected.losses[step]
            worst[0] = max(
                worst[0], loss_difference(plan, losses, right, dist.get_rank())
            )
    updated = set(map(id, ours.parameters()))
    for stage in [] if plan.is_forward_only else plan.stages_of(dist.get_rank()):
        right = expected.gradients[plan.layout.piece(stage)]
        for weight, gradient in zip(model[stage].parameters(), right, strict=True):
            assert (weight.grad is not None) == (id(weight) in updated)
            if weight.grad is None:
                continue
            assert gradient is not None
            worst[1] = max(worst[1], difference(weight.grad, gradient))
    return worst


def all_plans(names: list[str], ranks: int, sizes: tuple[int, ...]) -> dict[str, Plan]:
    """These programs, at several numbers of microbatches; those of this file have three."""
    plans = {}
    for name in names:
        if name in OWN:
            plans[f"{name} 3"] = compile(Source(name, OWN[name]), {"ranks": ranks})
            continue
        for microbatches in sizes:
            # Not all programs are for all sizes.
            with suppress(CompileError):
                plan = program(name, ranks=ranks, microbatches=microbatches)
                plans[f"{name} {microbatches}"] = plan
    return plans


def compare_all(plans: dict[str, Plan]) -> dict[str, list[float]]:
    """Two accumulating steps of each plan, against one process."""
    expected = shared_out(in_one_process, plans)
    return {name: compare(plan, expected[name]) for name, plan in plans.items()}


#: What has optimizer steps, frozen stages, a graph of stages, several models, or other numbers of
#: ranks: it has a test of its own.
APART = {
    "af_pipe",
    "distillation",
    "rlhf",
    "recycle",
    "1f1b_uneven",
    "frozen_1f1b",
    "two_encoders",
    "vocabulary_parallel",
    "pipedream",
    "pipedream_vertical",
    "pipedream_2bw",
    "pipemare",
    "wpipe",
    "gpipe_groups",
    "pipedream_replicated",
}


#: Ranks, and numbers of microbatches: 12 are more than the sends that may be under way.
SIZES = [(2, (1, 2, 12)), (4, (3, 8)), (3, (1, 2, 3, 7)), (4, (1, 3, 4, 8))]


@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    [*SIZES[:2], *(pytest.param(*size, marks=pytest.mark.large) for size in SIZES[2:])],
)
@pytest.mark.parametrize(
    "names", shares([*OWN, *sorted({path.stem for path in GALLERY} - APART)])
)
def test_losses_and_gradients_are_those_of_one_process(
    run_ranks: Run, names: list[str], ranks: int, microbatches: tuple[int, ...]
) -> None:
    """All programs that run so far, with fewer, as many and more microbatches than ranks; two steps, whose
    gradients add up.

    Losses are compared by number of microbatch, and one plan takes microbatches in another order.
    """
    plans = all_plans(names, ranks, microbatches)
    for found in run_ranks(compare_all, ranks, plans).results():
        # Their programs ask for an even number of ranks, or of microbatches for each rank.
        even = {"chimera", "dualpipe", "bitpipe", "helixpipe"} if ranks == 3 else set()
        # It asks for three microbatches per rank.
        many = {"stp"} if ranks > 2 else set()
        assert {case.split()[0] for case in found} == {*names} - even - many
        for case, (loss, gradient) in found.items():
            assert loss < 1e-12, case
            assert gradient < 1e-12, case


def rerouted() -> list[list[float]]:
    """The microbatches of a rank that is lost, on the replicas of its stage: the first or the last."""
    plans = [program("recycle", ranks=5, microbatches=6, lost=lost) for lost in (0, 1)]
    return [compare(plan, in_one_process(plan)) for plan in plans]


def test_a_lost_rank_changes_nothing_of_what_is_trained(run_ranks: Run) -> None:
    for found in run_ranks(rerouted, 5).results():
        for loss, gradient in found:
            assert loss < 1e-12
            assert gradient < 1e-12


def trained_with_one_module_of_each_stage(plan: Plan) -> list[float]:
    """Twenty steps in which a rank has one module of a stage for all pipelines that run it there."""
    layout = plan.layout
    pieces = modules(layout.pieces)
    reference = nn.Sequential(*modules(layout.pieces))
    mine = {
        stage: pieces[layout.piece_of[stage]]
        for stage in plan.stages_of(dist.get_rank())
    }
    ours = Pipeline(plan, mine, nn.functional.mse_loss)
    own = {layout.piece_of[stage] for stage in mine}
    weights = [weight for piece in own for weight in pieces[piece].parameters()]
    optimizer = torch.optim.SGD(weights, 0.1)
    whole = torch.optim.SGD(reference.parameters(), 0.1)
    for step in range(20):
        inputs, targets = batch(plan, step)
        ours.step(inputs, targets)
        nn.functional.mse_loss(reference(inputs), targets).backward()
        for each in (optimizer, whole):
            each.step()
            each.zero_grad()
    expected = [weight for piece in own for weight in reference[piece].parameters()]
    shared = len(mine) - len(own)
    return [
        max(map(difference, weights, expected)),
        float(shared and len({layout.units(stage) for stage in mine}) > 1),
    ]


def test_a_helper_has_one_module_for_its_own_stage_and_that_of_a_lost_rank(
    run_ranks: Run,
) -> None:
    """They are replicas with different numbers of microbatches."""
    plan = program("recycle", ranks=5, microbatches=6)
    found = run_ranks(trained_with_one_module_of_each_stage, 5, plan).results()
    assert max(worst for worst, _ in found) < 1e-12
    # Two helpers of three replicas.
    assert sum(is_helper for _, is_helper in found) == 2


@pytest.mark.parametrize(
    "generators", [pytest.param(1, marks=pytest.mark.core), 0], ids=["both", "encoder"]
)
def test_encoders_on_all_ranks_share_one_language_model(
    run_ranks: Run, generators: int
) -> None:
    """BigMac's encoders, and its generators, are replicas; its language model is there once."""
    plan = program("bigmac", ranks=4, microbatches=8, generators=generators)
    found = run_ranks(trained_with_one_module_of_each_stage, 4, plan).results()
    assert max(worst for worst, _ in found) < 1e-12


def uneven() -> list[float]:
    plan = program("1f1b_uneven", microbatches=6)
    return compare(plan, in_one_process(plan))


def test_stages_of_listed_sizes(run_ranks: Run) -> None:
    for loss, gradient in run_ranks(uneven, 4).results():
        assert loss < 1e-12
        assert gradient < 1e-12


def scaled() -> list[float]:
    """The sum of the losses, instead of the mean."""
    plan = program("1f1b", ranks=2, microbatches=3)
    return compare(plan, in_one_process(plan, loss_scale=1.0), loss_scale=1.0)


def bfloat16() -> list[float]:
    """The type of the activations is the modules' own."""
    plan = program("zb_h1", ranks=2, microbatches=3)
    return compare(plan, in_one_process(plan, torch.bfloat16), torch.bfloat16)


def updates() -> list[float]:
    """Optimizer steps in the plan; weights after two steps, and no gradients left."""
    plan = compile(Source("updates.sched", UPDATES))
    model = modules(len(plan.placement))
    reference = modules(len(plan.placement))
    optimizers = {
        each: torch.optim.SGD(model[each].parameters(), 0.1)
        for each in plan.stages_of(dist.get_rank())
    }
    ours = pipeline(plan, model, optimizers=optimizers)
    whole = torch.optim.SGD(nn.Sequential(*reference).parameters(), 0.1)
    for step in range(2):
        inputs, targets = batch(plan, step)
        ours.step(inputs, targets)
        nn.functional.mse_loss(nn.Sequential(*reference)(inputs), targets).backward()
        whole.step()
        whole.zero_grad()
    worst = 0.0
    for stage in plan.stages_of(dist.get_rank()):
        for weight, other in zip(
            model[stage].parameters(), reference[stage].parameters(), strict=True
        ):
            assert weight.grad is None
            worst = max(worst, difference(weight.detach(), other.detach()))
    return [0.0, worst]


@pytest.mark.parametrize(
    ("train", "tolerance"), [(scaled, 1e-12), (bfloat16, 2e-2), (updates, 1e-12)]
)
def test_options_of_a_pipeline(
    run_ranks: Run, train: Callable[[], list[float]], tolerance: float
) -> None:
    for loss, gradient in run_ranks(train, 2).results():
        assert loss < tolerance
        assert gradient < tolerance


LATE = [
    *(("pipedream_2bw", optimizer) for optimizer in OPTIMIZERS),
    ("pipedream", "adamw"),
    ("pipedream_vertical", "momentum"),
    ("wpipe", "fused"),
    ("gpipe_groups", "momentum"),
]


def late_plans(ranks: int) -> dict[str, tuple[Plan, list[int], str]]:
    """For some schedules and optimizers, the plan, and the delay of each stage's weights."""
    cases = LATE if ranks == 2 else LATE[len(OPTIMIZERS) - 1 :]
    return {
        f"{name} {optimizer}": (
            version_plan(name, ranks),
            DELAYS[name](ranks),
            optimizer,
        )
        for name, optimizer in cases
    }


def one_process_later(case: tuple[Plan, list[int], str]) -> list[list[nn.Module]]:
    """The stages of one process whose gradients are as late, later by one update, and in time."""
    plan, delays, optimizer = case
    others = delays, [each + 1 for each in delays], [0 for _ in delays]
    return [delayed(plan, each, optimizer, 2 * plan.layout.updates) for each in others]


def versions(
    cases: dict[str, tuple[Plan, list[int], str]], folder: Path
) -> dict[str, list[bool]]:
    """Weights after two steps of some updates each, against one process with late gradients.

    For every case: whether they are the same to the bit, without and with a checkpoint between the
    steps; and whether they differ from those of gradients that are one update later, and of
    gradients in time.
    """
    rank = dist.get_rank()
    found = {}
    expected = shared_out(one_process_later, cases)
    for name, (plan, delays, optimizer) in cases.items():
        mine = plan.stages_of(rank)
        # What is claimed of the memory: the newest version, and one for each update that weights
        # are late.
        assert (
            1 + max(delays[stage] for stage in mine) == follow_weights(plan).held[rank]
        )
        uncut = two_steps(plan, delays, optimizer)
        resumed = two_steps(plan, delays, optimizer, folder)
        right, later, in_time = expected[name]
        found[name] = [
            same(uncut, right, mine),
            same(resumed, right, mine),
            not same(uncut, later, mine),
            not any(delays) or not same(uncut, in_time, mine),
        ]
    return found


def two_steps(
    plan: Plan, delays: list[int], optimizer: str, folder: Path | None = None
) -> list[nn.Module]:
    """The stages after two steps; where there is a folder, the second is made by what a checkpoint
    in it brings to life.
    """
    mine = plan.stages_of(dist.get_rank())
    updates = plan.layout.updates
    others = squares() if folder is None else set()
    model = normed(len(plan.placement))
    optimizers = {
        each: OPTIMIZERS[optimizer](list(model[each].parameters())) for each in mine
    }
    ours = pipeline(plan, model, optimizers=optimizers)
    step(ours, plan, range(updates))
    if folder is None:
        others |= {
            each[1].weight.data_ptr()
            for stage, each in enumerate(model)
            if stage not in mine
        }
        # Each stage has one square matrix, so there are as many of these as there are versions.
        assert len(squares() - others) == sum(1 + delays[stage] for stage in mine)
    else:
        file = folder / f"checkpoint{dist.get_rank()}"
        states = {
            each: (model[each].state_dict(), optimizers[each].state_dict())
            for each in mine
        }
        torch.save([ours.state_dict(), states], file)
        model = [
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())
            for _ in model
        ]
        optimizers = {
            each: OPTIMIZERS[optimizer](list(model[each].parameters())) for each in mine
        }
        ours = pipeline(plan, model, optimizers=optimizers)
        state, states = torch.load(file)
        for each in mine:
            model[each].load_state_dict(states[each][0])
            optimizers[each].load_state_dict(states[each][1])
        ours.load_state_dict(state)
    step(ours, plan, range(updates, 2 * updates))
    return model


def step(ours: Pipeline, plan: Plan, updates: range) -> None:
    ours.step(
        *(torch.cat(each) for each in zip(*update_batches(plan, updates), strict=True))
    )


def same(ours: list[nn.Module], other: list[nn.Module], stages: list[int]) -> bool:
    """Whether stages have the same weights, to the bit."""
    pairs = [
        zip(ours[stage].parameters(), other[stage].parameters(), strict=True)
        for stage in stages
    ]
    return all(torch.equal(*pair) for pairs_of in pairs for pair in pairs_of)


def squares() -> set[int]:
    """Where the square matrices are that are trained: of weights and their versions."""
    gc.collect()
    # What stands in for a weight that may not be read is a tensor of a class of its own.
    plain = torch.Tensor, nn.Parameter
    tensors = (each for each in gc.get_objects() if type(each) in plain)
    return {
        each.data_ptr()
        for each in tensors
        if each.requires_grad and each.shape == (WIDTH, WIDTH)
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_late_gradients_are_those_of_one_process(
    run_ranks: Run, ranks: int, tmp_path: Path
) -> None:
    """To the bit: with and without a checkpoint, and not those of other delays; with as many
    versions as claimed.
    """
    for rank in run_ranks(versions, ranks, late_plans(ranks), tmp_path).results():
        assert len(rank) == (8 if ranks == 2 else 5)
        assert {
            name: found for name, found in rank.items() if found != [True] * 4
        } == {}


def records() -> list[tuple[str, float, float]]:
    """The compute ops of one step with their times, and none of a step that is not recorded."""
    plan = program("zb_h1", ranks=2, microbatches=3)
    ours = pipeline(plan, modules(2))
    ours.step(*batch(plan, 0))
    assert ours.bars == []
    ours.record = True
    ours.step(*batch(plan, 1))
    return [(str(each), each.start, each.end) for each in ours.bars]


def test_a_recorded_step_has_all_compute_ops_in_order_of_time(run_ranks: Run) -> None:
    bars = run_ranks(records, 2).results()
    assert [[word for word, _, _ in rank] for rank in bars] == [
        ["0F0", "0F1", "0I0", "0W0", "0F2", "0I1", "0W1", "0I2", "0W2"],
        ["1F0", "1I0", "1F1", "1I1", "1W0", "1F2", "1I2", "1W1", "1W2"],
    ]
    for rank in bars:
        times = [time for _, start, end in rank for time in (start, end)]
        assert times == sorted(times)
    # Ranks of one machine have one clock: microbatch 0 is on the second after it was on the first.
    assert bars[1][0][1] > bars[0][0][2]


# Proved for gloo alone: the first rank sends in an order, the second one receives in another.
CROSSED = """schedule crossed {
    param ranks = 2
    param microbatches = 2
    rank r {
        if r == 0 { F(0) F(1) send F(1) send F(0) recv B(0) B(0) recv B(1) B(1) }
        else { recv F(0) recv F(1) F(0) B(0) F(1) B(1) send B(1) send B(0) }
    }
}
"""


def crossed() -> list[float]:
    """A plan that would hang if sends or receives blocked, or met in order."""
    with suppress(CompileError):
        compile(Source("crossed.sched", CROSSED))
        raise AssertionError("the plan is portable")
    plan = compile(Source("crossed.sched", CROSSED), transport="gloo")
    return compare(plan, in_one_process(plan))


def test_a_plan_for_gloo_alone_runs_on_gloo(run_ranks: Run) -> None:
    for loss, gradient in run_ranks(crossed, 2).results():
        assert loss < 1e-12
        assert gradient < 1e-12


class Containers(nn.Module):
    """Takes and returns two tensors with gradients and one without, in containers; and has options."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.is_last = is_last

    def forward(
        self,
        x: torch.Tensor,
        rest: dict[str, torch.Tensor] | None = None,
        *,
        scale: float,
    ) -> object:
        # The first stage is given a tensor alone, and begins the rest.
        rest = {"skip": x, "mask": torch.arange(len(x)) % 2} if rest is None else rest
        x = self.inner(x) * scale + rest["skip"] * rest["mask"][:, None]
        return x if self.is_last else (x, rest)


def containers() -> float:
    """Tensors in containers, and options by microbatch; outputs of an evaluation, losses and
    gradients of a step.
    """
    found = []
    for name in ("1f1b", "zb_h1"):
        plan = program(name, ranks=3, microbatches=4)
        torch.manual_seed(0)
        model = [Containers(stage == 2) for stage in range(3)]
        reference = copy.deepcopy(model)
        inputs, targets = batch(plan, 0)
        options = [{"scale": 1.0 + each} for each in range(4)]
        losses = []
        outputs = []
        for x, y, option in zip(
            inputs.chunk(4), targets.chunk(4), options, strict=True
        ):
            first = reference[0](x, **option)
            outputs.append(reference[2](*reference[1](*first, **option), **option))
            losses.append(nn.functional.mse_loss(outputs[-1], y))
        (sum(losses) / 4).backward()
        ours = pipeline(plan, model)
        evaluated = ours.evaluate(inputs, options=options)
        stepped = ours.step(inputs, targets, options)
        assert (stepped is None) == (evaluated is None) == (dist.get_rank() != 2)
        if stepped is not None:
            found.append(difference(torch.stack(evaluated), torch.stack(outputs)))
            found.append(difference(stepped, torch.stack(losses)))
        weights = zip(
            model[dist.get_rank()].parameters(),
            reference[dist.get_rank()].parameters(),
            strict=True,
        )
        found += [difference(ours.grad, other.grad) for ours, other in weights]
    return max(found)


def test_stages_take_containers_and_options(run_ranks: Run) -> None:
    assert max(run_ranks(containers, 3).results()) < 1e-12


class Strided(nn.Module):
    """Its output and its input's gradient are not contiguous."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.inner(input.transpose(0, 1)).transpose(0, 1)


def strided() -> int | None:
    """What passes need not be contiguous."""
    plan = program("1f1b", ranks=3, microbatches=2)
    ours = pipeline(plan, [Strided(each) for each in modules(3)])
    x = torch.randn(6, WIDTH, WIDTH, dtype=torch.float64)
    losses = ours.step(x, x)
    return None if losses is None else len(losses)


def test_tensors_need_not_be_contiguous(run_ranks: Run) -> None:
    assert run_ranks(strided, 3).results() == [None, None, 2]


def ignores_input() -> None:
    """Nothing before a stage whose output does not depend on its input has a gradient."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self.weight.expand(len(input), WIDTH)

    for name in ("1f1b", "zb_h1"):
        plan = program(name, ranks=3, microbatches=2)
        model = modules(3)
        model[1] = Constant()
        pipeline(plan, model).step(*batch(plan, 0))
        if dist.get_rank() == 0:
            assert all(weight.grad is None for weight in model[0].parameters())


def test_nothing_before_a_stage_that_ignores_its_input_has_a_gradient(
    run_ranks: Run,
) -> None:
    run_ranks(ignores_input, 3).results()
