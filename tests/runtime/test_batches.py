"""Batches as people have them: of any size in an evaluation, with rows along any dimension, and
losses that come with more than the loss. On real processes, against one.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.models import (
    OPTIMIZERS,
    WIDTH,
    alone,
    difference,
    one_model,
    pipeline,
    program,
    replicated,
)
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

#: Rows of a batch, and those of a microbatch: fewer than microbatches, one over, several rounds.
SIZES = [(1, None), (3, None), (9, None), (8, 2), (11, 3), (23, 2), (40, 3)]
PLANS: dict[str, dict[str, int]] = {
    "1f1b": {"microbatches": 4},
    "zb_v": {"microbatches": 4},
    "1f1b_recompute": {"microbatches": 4},
    "gems": {"microbatches": 4},
    "seq1f1b": {"microbatches": 3, "slices": 2},
    "unet_1f1b": {"microbatches": 4},
    "forward_only": {"microbatches": 4},
}


def squared(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def rows_of(plan: Plan, rows: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(rows)
    shape = (
        [rows, 2 * plan.layout.slices, WIDTH]
        if plan.layout.slices > 1
        else [rows, WIDTH]
    )
    return torch.randn(shape, dtype=torch.float64), torch.randn(
        shape, dtype=torch.float64
    )


def evaluates(name: str) -> float:
    """The largest difference of outputs and losses, over all sizes; training steps in between."""
    plan = program(name, ranks=2, **PLANS[name])
    ours = pipeline(plan, replicated(plan))
    worst = [0.0]
    for rows, of_microbatch in SIZES:
        inputs, targets = rows_of(plan, rows)
        # Without a number of rows, as many as let one round take all.
        size = of_microbatch or -(-rows // plan.microbatches)
        outputs = ours.evaluate(inputs, rows=of_microbatch)
        losses = ours.evaluate(inputs, targets, rows=of_microbatch)
        right = [alone(one_model(plan.layout), part) for part in inputs.split(size)]
        assert (outputs is None) == (losses is None)
        if len(plan.layout.pipelines) == 1 and dist.get_rank() == plan.placement[-1]:
            pairs = zip(right, targets.split(size), strict=True)
            expected = [
                nn.functional.mse_loss(output, target) for output, target in pairs
            ]
            assert len(outputs) == len(losses) == len(right)
            worst.append(difference(torch.cat(outputs), torch.cat(right)))
            worst.append(difference(torch.stack(losses), torch.stack(expected)))
        elif outputs is not None:
            # One of several pipelines: what it has is among what there should be.
            for output in outputs:
                same = [other for other in right if other.shape == output.shape]
                worst.append(min(difference(output, other) for other in same))
        if not plan.is_forward_only:
            ours.step(*rows_of(plan, 2 * plan.microbatches))
    return max(worst)


@pytest.mark.parametrize("name", PLANS)
def test_evaluation_takes_any_number_of_rows(name: str, run_ranks: Run) -> None:
    assert max(run_ranks(partial(evaluates, name), 2).results()) < 1e-12


def all_rows(name: str) -> int:
    plan = program(name, ranks=2, **PLANS[name])
    ours = pipeline(plan, replicated(plan))
    return len(
        torch.cat(ours.evaluate(rows_of(plan, 23)[0], rows=2) or [torch.empty(0)])
    )


def test_several_pipelines_share_the_rows(run_ranks: Run) -> None:
    assert sum(run_ranks(partial(all_rows, "gems"), 2).results()) == 23


def evaluates_a_few_of_many_updates() -> int:
    plan = program("pipedream_2bw", ranks=2, microbatches=4).for_updates(25)
    model = replicated(plan)
    optimizers = {
        stage: OPTIMIZERS["sgd"](model[stage].parameters())
        for stage in plan.stages_of(dist.get_rank())
    }
    ours = pipeline(plan, model, optimizers=optimizers)
    return len(ours.evaluate(rows_of(plan, 6)[0]) or [])


def test_evaluation_of_a_plan_for_many_updates(run_ranks: Run) -> None:
    # 100 microbatches a step, and 6 rows.
    assert run_ranks(evaluates_a_few_of_many_updates, 2).results() == [0, 6]


def options_of_rounds() -> float:
    """Keyword arguments by microbatch, over several rounds."""

    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: float) -> Tensor:
            return x * scale

    plan = program("1f1b", ranks=2, microbatches=2)
    ours = pipeline(plan, [Scaled(), Scaled()])
    inputs = rows_of(plan, 5)[0]
    options = [{"scale": float(number)} for number in range(5)]
    outputs = ours.evaluate(inputs, options=options, rows=1)
    expected = torch.stack([row * number * number for number, row in enumerate(inputs)])
    return (
        0.0 if outputs is None else float((torch.cat(outputs) - expected).abs().max())
    )


def test_options_go_with_their_microbatches(run_ranks: Run) -> None:
    assert run_ranks(options_of_rounds, 2).results() == [0.0, 0.0]


def belongs_together(what: str) -> bool:
    """A step on a batch of which each rank has what it needs, and something else beside."""
    plan = program("1f1b", ranks=2, microbatches=4)
    inputs, targets = rows_of(plan, 8)
    is_last = dist.get_rank() == 1
    model = replicated(plan)
    if what == "augmented":
        # Each rank draws numbers of its own; those of the first stage count.
        torch.manual_seed(dist.get_rank())
        inputs = inputs + torch.randn_like(inputs)
    given: dict[str, list[Any]] = {
        "augmented": [inputs, targets],
        "halves": [None, targets] if is_last else [inputs, None],
        "no inputs on the last": [None if is_last else inputs, targets],
        "other targets on the first": [inputs, targets if is_last else targets[:1]],
        "anything on the first": [inputs, targets if is_last else "nothing"],
    }[what]
    losses = pipeline(plan, model).step(*given)
    return (losses is not None) == is_last


@pytest.mark.parametrize(
    "what",
    [
        "augmented",
        "halves",
        "no inputs on the last",
        "other targets on the first",
        "anything on the first",
    ],
)
def test_a_rank_needs_its_half_of_the_batch(what: str, run_ranks: Run) -> None:
    assert run_ranks(partial(belongs_together, what), 2).results() == [True, True]


class Tabled(nn.Module):
    """Keeps a table from its first forward on, as rotary embeddings do."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.table: Tensor | None = None

    def forward(self, *given: Any, **options: Any) -> Any:
        if self.table is None:
            self.table = torch.linspace(1, 2, WIDTH, dtype=torch.float64)
        return self.inner(*(given[0] * self.table, *given[1:]), **options)


def evaluates_in_inference_mode(name: str) -> float:
    """An evaluation as inference scripts make it, and a step on what the script made there."""
    plan = program(name, ranks=2, **PLANS[name])
    model = replicated(plan)
    if name != "unet_1f1b":
        model = [Tabled(each) for each in model]
    ours = pipeline(plan, model)
    with torch.inference_mode():
        inputs, targets = rows_of(plan, 8)
        inside = ours.evaluate(inputs, targets)
        outputs = ours.evaluate(inputs)
    with torch.no_grad():
        outside = ours.evaluate(inputs, targets)
    losses = ours.step(inputs, targets)
    if losses is None or inside is None or outside is None:
        return 0.0
    assert outputs is not None
    # A script may train with what it has evaluated, as with the scores of a reference.
    assert not any(each.is_inference() for each in (*outputs, *inside))
    return max(
        difference(torch.stack(inside), torch.stack(outside)),
        difference(losses, torch.stack(outside)),
    )


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "unet_1f1b"])
def test_an_evaluation_in_inference_mode(name: str, run_ranks: Run) -> None:
    assert max(run_ranks(partial(evaluates_in_inference_mode, name), 2).results()) == 0


def serves_a_model_of_inference_mode() -> float:
    """A model made there, with a buffer that its forwards change."""
    plan = program("forward_only", ranks=2, microbatches=2)
    with torch.inference_mode():
        model = [nn.BatchNorm1d(WIDTH, dtype=torch.float64) for _ in range(2)]
        inputs, _ = rows_of(plan, 4)
        outputs = pipeline(plan, model).evaluate(inputs)
        expected = [model[1](model[0](part)) for part in inputs.chunk(2)]
    if outputs is None:
        return 0.0
    return difference(torch.cat(outputs), torch.cat(expected))


def test_a_model_made_in_inference_mode_is_served(run_ranks: Run) -> None:
    assert run_ranks(serves_a_model_of_inference_mode, 2).results() == [0.0, 0.0]


class Recurrent(nn.Module):
    """Rows along the second dimension, as torch's recurrent layers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


def last_position(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[-1], target)


def steps_along(
    dims: int | tuple[int, int], loss_fn: Callable[..., Tensor], target: Tensor
) -> float:
    """A step and an evaluation, of inputs of shape (length, rows, width)."""
    plan = program("1f1b", ranks=2, microbatches=3)
    torch.manual_seed(0)
    model = [Recurrent(), Recurrent()]
    inputs = torch.randn(5, 6, WIDTH, dtype=torch.float64)
    of_targets = dims[1] if isinstance(dims, tuple) else dims
    parts = zip(inputs.chunk(3, 1), target.chunk(3, of_targets), strict=True)
    expected = torch.stack([loss_fn(model[1](model[0](x)), y) for x, y in parts])
    stages = {dist.get_rank(): model[dist.get_rank()]}
    ours = Pipeline(plan, stages, loss_fn, batch_dim=dims)
    evaluated = ours.evaluate(inputs, target)
    losses = ours.step(inputs, target)
    if losses is None:
        return 0.0
    return max(
        difference(torch.stack(evaluated), expected), difference(losses, expected)
    )


def test_rows_along_the_second_dimension(run_ranks: Run) -> None:
    target = torch.randn(5, 6, WIDTH, dtype=torch.float64)
    run = run_ranks(partial(steps_along, 1, nn.functional.mse_loss, target), 2)
    assert max(run.results()) < 1e-12


def test_rows_of_targets_along_another_dimension(run_ranks: Run) -> None:
    target = torch.arange(6) % WIDTH
    run = run_ranks(partial(steps_along, (1, 0), last_position, target), 2)
    assert max(run.results()) < 1e-12


def returns_outputs(name: str) -> float:
    """Losses, and what the last stage has returned, of a step."""
    plan = program(name, ranks=2, **PLANS[name])
    ours = pipeline(plan, replicated(plan))
    inputs, targets = rows_of(plan, 2 * plan.microbatches)
    for _ in range(2):
        losses, outputs = ours.step(inputs, targets, return_outputs=True)
    assert ours.step(inputs, targets) is None or losses is not None
    if outputs is None:
        return 0.0
    assert not any(output.requires_grad for output in outputs)
    expected = [
        alone(one_model(plan.layout), part) for part in inputs.chunk(plan.microbatches)
    ]
    return difference(torch.cat(outputs), torch.cat(expected))


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "1f1b_recompute", "seq1f1b"])
def test_a_step_returns_outputs(name: str, run_ranks: Run) -> None:
    assert max(run_ranks(partial(returns_outputs, name), 2).results()) < 1e-12


def with_more(output: Tensor, target: Tensor) -> dict[str, Any]:
    loss = squared(output, target)
    return {"loss": loss, "largest": output.max(), "rows": len(output)}


def extras(name: str) -> Any:
    plan = program(name, ranks=2, **PLANS[name])
    stages = {
        stage: replicated(plan)[stage] for stage in plan.stages_of(dist.get_rank())
    }
    ours = Pipeline(plan, stages, with_more)
    inputs, targets = rows_of(plan, 2 * plan.microbatches)
    plain = Pipeline(plan, stages, squared)
    losses = ours.step(inputs, targets)
    others = plain.step(inputs, targets)
    assert losses is None or torch.equal(losses, others)
    trained = ours.extras
    ours.evaluate(inputs, targets)
    if losses is None:
        return [len(trained), len(ours.extras)]
    assert [extra["rows"] for extra in trained] == [2] * plan.microbatches
    assert not any(extra["largest"].requires_grad for extra in trained)
    same = [
        one["largest"] == other["largest"]
        for one, other in zip(trained, ours.extras, strict=True)
    ]
    right = [
        alone(one_model(plan.layout), part).max()
        for part in inputs.chunk(plan.microbatches)
    ]
    worst = difference(
        torch.stack([extra["largest"] for extra in trained]), torch.stack(right)
    )
    assert worst < 1e-12
    return [sum(same), len(ours.extras)]


@pytest.mark.parametrize("name", ["1f1b", "1f1b_recompute"])
def test_what_comes_with_the_loss_is_handed_back(name: str, run_ranks: Run) -> None:
    assert run_ranks(partial(extras, name), 2).results() == [[0, 0], [4, 4]]


def goes_wrong(what: str) -> None:
    plan = program("1f1b", ranks=2, microbatches=2)
    model = replicated(plan)
    mine = {stage: model[stage] for stage in plan.stages_of(dist.get_rank())}
    inputs, targets = rows_of(plan, 4)
    if what == "no loss":
        Pipeline(
            plan, mine, lambda output, target: {"total": squared(output, target)}
        ).step(inputs, targets)
    elif what == "options":
        pipeline(plan, model).evaluate(inputs, options=[{}, {}], rows=1)
    elif what == "targets":
        pipeline(plan, model).evaluate(inputs, targets[:3])
    elif what == "rows":
        pipeline(plan, model).evaluate(inputs, rows=0)
    elif what == "forwards":
        forwards = program("forward_only", ranks=2, microbatches=2)
        pipeline(forwards, model).step(inputs, targets)
    elif what == "no inputs":
        pipeline(plan, model).step(targets=targets)
    elif what == "no gradients":
        with torch.inference_mode():
            pipeline(plan, model).step(inputs, targets)
    elif what == "uneven":
        pipeline(plan, model).step(inputs[:3], targets[:3])
    else:
        assert what == "nan"
        # The last row is in the last of two microbatches.
        inputs[3] = torch.nan
        ours = Pipeline(plan, mine, squared, stop_on_nan=True)
        ours.step(inputs, targets)
        print("went on")


MESSAGES = {
    "no loss": "`loss_fn` gives a dictionary of `total`: one of its keys must be `loss`",
    "options": "`options` are 2, one for each microbatch, and there are 4 microbatches",
    "targets": "`inputs` have 4 rows, and `targets` have 3: both must have a row for every example",
    "rows": "`rows` is 0, it must be 1 or more",
    "forwards": "the plan has forwards alone and cannot train: call `evaluate`",
    "no inputs": "there are no `inputs` for stage 0, which is on this rank and takes them",
    "no gradients": "`step` trains, and gradients are off here, as in `torch.no_grad()` or",
    "uneven": "`inputs` for stage 0 have 3 rows, which do not divide into 2 microbatches",
    "nan": "step 1 of the pipeline: the loss is not finite for microbatch 1 (nan)",
}


@pytest.mark.parametrize("what", MESSAGES)
def test_what_cannot_be_is_refused(what: str, run_ranks: Run) -> None:
    run = run_ranks(partial(goes_wrong, what), 2)
    assert any(MESSAGES[what] in log for log in run.logs), run.logs
    assert run.codes == [1, 1]
    assert not any("went on" in log for log in run.logs)
