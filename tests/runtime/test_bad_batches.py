"""Batches that are skipped on all ranks, and iterators of batches: the steps around a bad batch are
those of a training without it.
"""

import copy
import warnings
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.mesh import mesh
from tests.support.models import batch, program, replicated
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

MICROBATCHES = 4
#: The steps whose batch is bad on some rank.
STEPS = 4
BAD = (0, 2)


class BadBatch(Exception):
    """What a script raises."""


class Picky(nn.Module):
    """Raises an exception for one microbatch of a bad step, also where it is run again."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        #: How many microbatches go well before the one that does not; None if all do.
        self.good: int | None = None
        self.at_zeros = False
        self.seen: list[Tensor] = []

    def forward(self, *given: Any, **options: Any) -> Any:
        if self.good is not None and (given[0].any() or self.at_zeros):
            if not any(torch.equal(given[0], each) for each in self.seen):
                self.seen.append(given[0].detach().clone())
            bad = self.seen[self.good : self.good + 1]
            if self.at_zeros or any(torch.equal(given[0], each) for each in bad):
                raise BadBatch("a row is empty")
        return self.inner(*given, **options)


def weights_and_states(
    modules: list[nn.Module], optimizers: list[AdamW]
) -> list[Tensor]:
    """All that a training changes."""
    states = [each.state_dict()["state"] for each in optimizers]
    kept = [
        value for state in states for own in state.values() for value in own.values()
    ]
    weights = [each for module in modules for each in module.parameters()]
    return copy.deepcopy([*weights, *kept])


def trained(
    plan: Plan, on_rank: int | None, where: str, good: int
) -> tuple[list[Tensor], list[bool]]:
    """What a rank has after some steps, of which some are bad on one rank, or are not made; and which
    were skipped.
    """
    rank = dist.get_rank()
    model = replicated(plan)
    held = plan.stages_of(rank)
    stages = {stage: Picky(model[stage]) for stage in held}
    raises = False

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if raises:
            raise BadBatch("a target is none")
        return nn.functional.mse_loss(output, target)

    ours = Pipeline(plan, stages, loss_fn, skip_if=BadBatch, timeout=20)
    optimizers = [AdamW(each.parameters(), 0.01) for each in stages.values()]
    skipped = []
    for step in range(STEPS):
        is_bad = step in BAD
        if is_bad and on_rank is None:
            continue
        is_here = is_bad and rank == on_rank
        raises = is_here and where == "loss"
        picky = stages[held[-1]]
        picky.good = good if is_here and where == "forward" else None
        picky.seen.clear()
        losses = ours.step(*batch(plan, step))
        skipped.append(ours.skipped)
        assert ours.skipped == is_bad
        assert losses is None or not is_bad
        if is_bad:
            assert ours.losses == {}
            assert ours.named_losses() == {}
            assert all(weight.grad is None for weight in ours.parameters())
        # An optimizer that has no gradients does nothing, so a script need not ask.
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return weights_and_states([*stages.values()], optimizers), skipped


def compared(name: str, ranks: int, where: str, good: int) -> None:
    """Trainings that are bad on each rank in turn are equal to one without the bad batches."""
    sizes = {"slices": 2} if name == "seq1f1b" else {}
    plan = program(name, ranks=ranks, microbatches=MICROBATCHES, **sizes)
    expected, _ = trained(plan, None, where, good)
    lasts = [plan.placement[each.stop - 1] for each in plan.layout.pipelines]
    for on_rank in range(ranks) if where == "forward" else lasts:
        found, skipped = trained(plan, on_rank, where, good)
        assert skipped == [step in BAD for step in range(STEPS)]
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@pytest.mark.core
@pytest.mark.parametrize("where", ["forward", "loss"])
def test_an_exception_on_each_rank_in_turn(run_ranks: Run, where: str) -> None:
    """To the bit; no rank waits, optimizers keep their states, gradients are gone."""
    run = run_ranks(compared, 4, "1f1b", 4, where, 1)
    run.results()


@pytest.mark.parametrize("good", [0, 1])
@pytest.mark.parametrize(
    "name",
    [
        "zb_v",
        "1f1b_recompute",
        "interleaved_1f1b",
        "gems",
        "seq1f1b",
        "unet_1f1b",
        "dualpipe_v",
        "interleaved_overlap",
        "pipe_offload",
    ],
)
def test_an_exception_under_other_schedules(
    run_ranks: Run, name: str, good: int
) -> None:
    run_ranks(compared, 2, name, 2, "forward", good).results()


def judged() -> list[tuple[bool, list[float]]]:
    """Steps that a function of the losses skips where they are not finite, with replicas; whether each
    was skipped, and the weights behind it.
    """
    plan = program("1f1b", ranks=2, microbatches=MICROBATCHES)
    of = mesh("dp", "pp")
    replica = of.get_local_rank("dp")
    rank = of.get_local_rank("pp")
    stages = {rank: replicated(plan)[rank]}
    ours = Pipeline(
        plan,
        stages,
        nn.functional.mse_loss,
        mesh=of,
        skip_if=lambda losses: not losses.isfinite().all(),
        timeout=20,
    )
    optimizer = AdamW(stages[rank].parameters(), 0.01)
    found = []
    for step in range(3):
        inputs, targets = batch(plan, 2 * step + replica)
        if step == 1 and replica == 0:
            targets[5] = torch.inf
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        weights = [float(each.detach().sum()) for each in stages[rank].parameters()]
        found.append((ours.skipped, weights))
    return found


def test_a_function_of_the_losses_skips_in_all_replicas(run_ranks: Run) -> None:
    for rank in run_ranks(judged, 4).results():
        assert [skipped for skipped, _ in rank] == [False, True, False]
        (_, first), (_, second), (_, third) = rank
        assert first == second != third


def laid_out() -> list[float]:
    """The norm of a flat tensor, of which all gradients are views, after steps of which the second one
    is skipped.
    """
    plan = program("1f1b", ranks=2, microbatches=MICROBATCHES)
    rank = dist.get_rank()
    stage = replicated(plan)[rank]
    weights = [*stage.parameters()]
    sizes = [weight.numel() for weight in weights]
    flat = torch.zeros(sum(sizes), dtype=torch.float64)
    for weight, part in zip(weights, flat.split(sizes), strict=True):
        weight.grad = part.view(weight.shape)
    ours = Pipeline(
        plan,
        {rank: stage},
        nn.functional.mse_loss,
        skip_if=lambda losses: not losses.isfinite().all(),
        timeout=20,
    )
    norms = []
    for step in range(3):
        inputs, targets = batch(plan, step)
        if step == 1:
            targets[5] = torch.inf
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours.step(inputs, targets)
        norms.append(float(flat.norm()))
        flat.zero_()
    return norms


def test_gradients_stay_in_the_memory_of_the_script(run_ranks: Run) -> None:
    for first, second, third in run_ranks(laid_out, 2).results():
        assert second == 0 < min(first, third)


class Batches:
    """An iterator over some batches, which goes on behind one that cannot be made."""

    def __init__(self, plan: Plan, steps: int, bad: int | None = None) -> None:
        self.plan = plan
        self.steps = steps
        self.bad = bad
        self.step = -1

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Any:
        self.step += 1
        if self.step == self.steps:
            raise StopIteration
        if self.step == self.bad:
            raise BadBatch("a file is missing")
        inputs, targets = batch(self.plan, self.step)
        return (
            {"inputs": inputs, "targets": targets}
            if self.step % 2
            else (inputs, targets)
        )


def by_iterator(
    on: tuple[int, ...], bad_rank: int | None = None
) -> tuple[list[bool], list[float | None]]:
    """The steps with the batches of an iterator, on the ranks that have one, beside a training by
    `step`: which were skipped, and the losses.
    """
    plan = program("1f1b", ranks=4, microbatches=MICROBATCHES)
    rank = dist.get_rank()
    stages = {rank: replicated(plan)[rank]}
    loss_fn = nn.functional.mse_loss
    ours = Pipeline(plan, stages, loss_fn, skip_if=BadBatch, timeout=20)
    optimizer = AdamW(stages[rank].parameters(), 0.01)
    batches = Batches(plan, 4, 1 if rank == bad_rank else None)
    skipped = []
    losses = []
    while True:
        try:
            own = ours.train_batch(batches if rank in on else None)
        except StopIteration:
            break
        skipped.append(ours.skipped)
        losses.append(None if own is None else float(own.sum()))
        optimizer.step()
        optimizer.zero_grad()
    return skipped, losses


@pytest.mark.core
def test_the_ranks_that_need_batches_have_iterators(run_ranks: Run) -> None:
    """The first and the last one, or all: the same losses; and on each rank in turn a batch that
    cannot be made, which all skip.
    """
    *others, first_and_last = run_ranks(by_iterator, 4, (0, 3)).results()
    assert all(each == ([False] * 4, [None] * 4) for each in others)
    *_, on_all = run_ranks(by_iterator, 4, (0, 1, 2, 3)).results()
    assert on_all == first_and_last
    assert len(set(on_all[1])) == 4


def test_a_batch_that_a_rank_cannot_make_is_skipped_on_all(run_ranks: Run) -> None:
    without = []
    for rank in range(4):
        found = run_ranks(by_iterator, 4, (0, 1, 2, 3), rank).results()
        assert all(skipped == [False, True, False, False] for skipped, _ in found)
        _, losses = found[3]
        assert losses[1] is None
        without.append(losses)
    assert without == [without[0]] * 4


def ends(what: str) -> None:
    """Iterators that do not fit together, or batches that are none."""
    plan = program("1f1b", ranks=2, microbatches=MICROBATCHES)
    rank = dist.get_rank()
    ours = Pipeline(
        plan, {rank: replicated(plan)[rank]}, nn.functional.mse_loss, timeout=20
    )
    batches: Any = iter([batch(plan, step) for step in range(2 + rank)])
    if what == "none":
        batches = None
    elif what == "list":
        batches = [batch(plan, 0)]
    elif what == "triple":
        batches = iter([(1, 2, 3)])
    elif what == "dictionary":
        batches = iter([{"input_ids": 1, "labels": 2}])
    elif what == "unknown":
        batches = Batches(plan, 4, 1 if rank else None)
    while True:
        ours.train_batch(batches)


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "uneven",
            "the iterator of rank 0 has ended, and that of rank 1 has another batch: all must have "
            "as many batches",
        ),
        ("none", "no rank has given an iterator to `train_batch`"),
        ("list", "`train_batch` is given a list: it must be an iterator, `iter(…)`"),
        (
            "triple",
            "the iterator gives a tuple of 3: a batch is a pair of inputs and targets",
        ),
        (
            "dictionary",
            "the iterator gives a dictionary of ['input_ids', 'labels']: a batch is a pair",
        ),
        ("unknown", "rank 1 failed: BadBatch: a file is missing"),
    ],
)
def test_iterators_that_end_a_run(run_ranks: Run, what: str, told: str) -> None:
    run = run_ranks(ends, 2, what)
    assert any(told in log for log in run.logs), run.logs
    assert run.codes == [1, 1]
    assert run.seconds < 20


def refused(what: str) -> None:
    name = "pipedream_2bw" if what == "updates" else "1f1b"
    plan = program(name, ranks=2, microbatches=MICROBATCHES)
    rank = dist.get_rank()
    stages = {rank: Picky(replicated(plan)[rank])}
    given: dict[str, Any] = {"skip_if": BadBatch}
    if what in ("updates", "max_norm"):
        given["optimizers"] = {rank: AdamW(stages[rank].parameters())}
    if what == "max_norm":
        given["max_norm"] = 1.0
    if what == "others":
        given["skip_if"] = BadBatch if rank else ValueError
    ours = Pipeline(plan, stages, nn.functional.mse_loss, timeout=20, **given)
    # Nothing is known yet of what the stage returns, and it does not take zeros.
    stages[rank].good = 0 if rank else None
    stages[rank].at_zeros = True
    ours.step(*batch(plan, 0))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        (
            "updates",
            "and the plan updates its stages before that: take a plan without `U`",
        ),
        ("max_norm", "and the pipeline makes the updates: take a plan without `U`"),
        ("others", "has another `skip_if`: all ranks must be given the same"),
        (
            "zeros",
            "rank 1 failed at 1F0 (1f1b.sched:9): BadBatch: a row is empty (the batch cannot be "
            "skipped, since nothing is known yet of what the stage returns for inputs of this shape",
        ),
    ],
)
def test_what_cannot_be_skipped_is_told(run_ranks: Run, what: str, told: str) -> None:
    run = run_ranks(refused, 2, what)
    assert any(told in log for log in run.logs), run.logs
    assert run.codes == [1, 1]
    assert run.seconds < 20
