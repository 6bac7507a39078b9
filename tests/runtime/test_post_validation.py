"""Training whose updates are made before the norms that clip them are known, on real processes: that
of updates that wait for these, to the bit.
"""

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from attrs import field, frozen

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, add_loss
from schedlang.runtime.parts.post_validation import PostValidation
from tests.support.mesh import add_gradients, mesh
from tests.support.models import (
    OPTIMIZERS,
    WIDTH,
    batch,
    difference,
    kill,
    modules,
    pipeline,
    program,
    replicated,
    sleep,
)
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

STEPS = 15
LIMIT = 50.0
#: Nothing is above this one.
FAR = 1e9
#: Steps with far larger gradients than others, which are clipped: by themselves, several of them,
#: and every other one.
LARGE = {3, 6, 7, 8, 10, 12}

Optimizers = dict[int, Optimizer]


def updates_of(pipeline: Pipeline) -> PostValidation | None:
    """The updates that a pipeline makes after each step, if it does."""
    found = [part for part in pipeline._parts if isinstance(part, PostValidation)]
    return found[0] if found else None


class Noisy(nn.Module):
    """A stage that draws random numbers, counts in buffers, of which it replaces one, and adds a
    loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), nn.Tanh()
        )
        self.register_buffer("calls", torch.zeros(()))
        # Weights with such hooks must not change within a step, but by an update that is made anew.
        self.inner[0].bias.register_post_accumulate_grad_hook(lambda _: None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        output = self.inner(x) * (1 + 0.01 * self.calls)
        add_loss("square", output.square().mean(), 0.1)
        return output


def noisy(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Noisy().double() for _ in range(stages)]


@frozen
class Course:
    """What a training comes to: the losses of each step, by their names as well; the norms, where
    somebody asked for them; whether each update was made ahead of its norm; and what there is at
    the end.
    """

    losses: list[Tensor | None] = field(factory=list)
    named: list[dict[str, float]] = field(factory=list)
    norms: list[Tensor] = field(factory=list)
    were_ahead: list[bool] = field(factory=list)
    state: list[Tensor] = field(factory=list)


def state_of(
    model: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> list[Tensor]:
    """Weights, buffers, and what optimizers keep."""
    kept = [
        value
        for optimizer in optimizers
        for state in optimizer.state_dict()["state"].values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]
    weights = [value for module in model for value in module.state_dict().values()]
    return [value.clone() for value in (*weights, *kept)]


def are_same(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> bool:
    """Whether lists of tensors are the same, to the bit; what is no number is itself."""
    return len(one) == len(other) and all(
        a is b is None or torch.equal(a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5))
        for a, b in zip(one, other, strict=True)
    )


def given(plan: Plan, step: int, replica: int = 0) -> tuple[Tensor, Tensor]:
    """A batch, in some steps with far larger targets. One that comes after such a step is of
    another shape, for the first time.
    """
    inputs, targets = batch(plan, 100 * step + replica)
    if step - 1 == min(LARGE):
        inputs, targets = (
            inputs.repeat_interleave(2, dim=0),
            targets.repeat_interleave(2, dim=0),
        )
    return inputs, targets * (1e4 if step in LARGE else 1.0)


#: What the script does after a step, beside learning rates.
Then = Callable[[Pipeline, int, Course], object]


def course(
    plan: Plan,
    model: Sequence[nn.Module],
    waits: bool,
    optimizer: str = "momentum",
    then: Then = lambda *_: None,
    steps: int = STEPS,
    **options: object,
) -> Course:
    """That of a pipeline whose updates wait for their norms, or do not."""
    of = options.get("mesh")
    rank, replica = (
        (of.get_local_rank(name) for name in ("pp", "dp"))
        if of
        else (dist.get_rank(), 0)
    )
    torch.manual_seed(rank)
    mine = {stage: model[stage] for stage in plan.stages_of(rank)}
    optimizers = {
        stage: OPTIMIZERS[optimizer](list(module.parameters()))
        for stage, module in mine.items()
    }
    if not waits:
        options |= {"optimizers": optimizers, "max_norm": LIMIT}
    ours = Pipeline(plan, mine, nn.functional.mse_loss, **options)
    rates = [ExponentialLR(each, 0.95) for each in optimizers.values()]
    found = Course()
    for step in range(steps):
        found.losses.append(ours.step(*given(plan, step, replica)))
        if waits:
            found.norms.append(ours.clip_grad_norm_(LIMIT))
            for each in optimizers.values():
                each.step()
                each.zero_grad()
        else:
            found.were_ahead.append(updates_of(ours).was_ahead)
        then(ours, step, found)
        for each in rates:
            each.step()
    ours.validate()
    found.state.extend(state_of([*mine.values()], [*optimizers.values()]))
    return found


def both_ways(train: Callable[[bool], Course]) -> list[object]:
    """The steps whose updates are clipped, those whose updates are made anew, and what is the same
    in both ways.
    """
    waits = train(True)
    ahead = train(False)
    clipped = {step for step, norm in enumerate(waits.norms) if not norm <= LIMIT}
    # Ahead of their norms are those after an update that was not clipped.
    expected = {step for step in range(1, len(waits.norms)) if step - 1 not in clipped}
    found = {step for step, was_ahead in enumerate(ahead.were_ahead) if was_ahead}
    return [
        clipped,
        clipped & found,
        found == expected,
        all(norm in waits.norms for norm in ahead.norms),
        ahead.named == waits.named,
        are_same(ahead.losses, waits.losses),
        are_same(ahead.state, waits.state),
    ]


def ask_for_losses(ours: Pipeline, _: int, found: Course) -> None:
    found.named.append(ours.named_losses())


def ask_at_times(ours: Pipeline, step: int, found: Course) -> None:
    """Now and then some ranks ask for the norm, and all evaluate."""
    if updates_of(ours) is not None and step % 3 == dist.get_rank() % 3:
        found.norms.extend(ours.norms)
    if step % 4 == 3:
        found.losses.extend(ours.evaluate(batch(program("zb_v"), step)[0]) or ())


def without_bound(ours: Pipeline, step: int, _: Course) -> None:
    """In the last step, a gradient of one stage is infinite: those of all others become zeros."""
    if step == STEPS - 2 and 1 in ours._stages:
        bias = next(ours._stages[1].module.parameters())
        bias.register_hook(lambda gradient: gradient * math.inf)


#: Schedules, with stages, an optimizer, and what is done after each step.
CASES = {
    "zb_2p": (modules, "adamw", lambda *_: None),
    "zb_v": (noisy, "momentum", ask_for_losses),
    "zb_v asked": (noisy, "adamw", ask_at_times),
    "zb_h2": (noisy, "fused", without_bound),
}


def case_both_ways(name: str) -> list[object]:
    model, optimizer, then = CASES[name]
    plan = program(name.split()[0], ranks=4, microbatches=8)

    def train(waits: bool) -> Course:
        return course(plan, model(len(plan.placement)), waits, optimizer, then)

    return both_ways(train)


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_updates_that_wait(run_ranks: Run, name: str) -> None:
    """With random numbers, buffers and added losses; where ranks ask for norms, and evaluate; and
    with a gradient that is no number. Losses, weights, and what optimizers keep.
    """
    for clipped, anew, *same in run_ranks(case_both_ways, 4, name).results():
        # There may be more with noise.
        assert clipped >= LARGE
        assert len(anew) >= 3
        assert all(same), same


def as_in_one_process() -> dict[str, list[float]]:
    """For each case the largest difference of losses and of weights from one process."""
    found = {}
    for name, optimizer in (
        ("zb_2p", "adamw"),
        ("zb_v", "momentum"),
        ("zb_v", "adamw"),
    ):
        plan = program(name, ranks=4, microbatches=8)
        whole = nn.Sequential(*modules(len(plan.placement)))
        one = OPTIMIZERS[optimizer](list(whole.parameters()))
        rate = ExponentialLR(one, 0.95)
        losses = []
        for step in range(STEPS):
            losses.append(
                torch.stack(
                    add_gradients(plan, [*whole], *given(plan, step), replicas=1)
                )
            )
            nn.utils.clip_grad_norm_(whole.parameters(), LIMIT)
            one.step()
            one.zero_grad()
            rate.step()
        ours = course(plan, modules(len(plan.placement)), False, optimizer)
        mine = nn.ModuleList(whole[stage] for stage in plan.stages_of(dist.get_rank()))
        found[f"{name} {optimizer}"] = [
            max(
                difference(*pair)
                for pair in zip(ours.losses, losses, strict=True)
                if pair[0] is not None
            )
            if ours.losses[0] is not None
            else 0.0,
            max(
                difference(*pair)
                for pair in zip(ours.state, mine.state_dict().values(), strict=False)
            ),
        ]
    return found


def test_training_is_that_of_one_process(run_ranks: Run) -> None:
    for found in run_ranks(as_in_one_process, 4).results():
        assert len(found) == 3
        for name, (loss, weight) in found.items():
            assert loss < 1e-11, name
            assert weight < 1e-11, name


#: Steps of the schedules below: of the updates after them one is clipped that was made ahead.
FEW = 6
SCHEDULES = (
    "1f1b",
    "1f1b_recompute",
    "interleaved_1f1b",
    "chimera",
    "dualpipe",
    "seq1f1b",
    "unet_1f1b",
    "pipe_offload",
    "bpipe",
    "gpipe",
)


def schedules_both_ways() -> dict[str, list[object]]:
    found = {}
    for name in SCHEDULES:
        plan = program(name, ranks=4)
        train = partial(of_model, plan, partial(replicated, plan))
        found[name] = both_ways(train)
    plan = program("1f1b", ranks=4)
    found["tied"] = both_ways(
        partial(of_model, plan, tied, tied=[{0: "0.weight", 3: "0.weight"}])
    )
    of = mesh("dp", "pp")
    plan = program("zb_v", ranks=2)
    found["replicas"] = both_ways(partial(of_model, plan, partial(modules, 4), mesh=of))
    return found


def of_model(
    plan: Plan, model: Callable[[], list[nn.Module]], waits: bool, **options: object
) -> Course:
    return course(plan, model(), waits, steps=FEW, **options)


def tied() -> list[nn.Module]:
    model = modules(4)
    model[3][0].weight.data.copy_(model[0][0].weight.data)
    return model


def test_every_schedule_trains_as_with_updates_that_wait(run_ranks: Run) -> None:
    """Whatever its stages keep from forwards: with slices, skips, recomputation, replicas, copies
    to the host; with tied weights; and with replicas of the pipeline.
    """
    for found in run_ranks(schedules_both_ways, 4).results():
        assert len(found) == len(SCHEDULES) + 2
        for name, (clipped, anew, *same) in found.items():
            assert clipped == anew == {3}, name
            assert all(same), (name, same)


def saved(folder: Path) -> list[object]:
    """Whether a checkpoint after an update that is made anew has what one process would save; and
    whether a run that goes on from it comes to what it would have come to.
    """
    plan = program("zb_v", ranks=4)

    def save(ours: Pipeline, step: int, _: Course) -> None:
        if step == 3:
            ours.save(folder / str(updates_of(ours) is None), step)

    train = partial(course, plan, then=save)
    waits = train(noisy(8), waits=True, steps=4)
    ahead = train(noisy(8), waits=False, steps=4)
    path = f"step-3-rank-{dist.get_rank()}.pt"
    files = [torch.load(folder / str(each) / path)["states"] for each in (True, False)]
    stages = [
        [
            value
            for name in files[0]
            if "stage" in name
            for value in states[name].values()
        ]
        for states in files
    ]
    return [ahead.were_ahead[3], are_same(*stages), are_same(waits.state, ahead.state)]


def test_a_checkpoint_has_weights_that_are_right(
    run_ranks: Run, tmp_path: Path
) -> None:
    for is_ahead, stages, state in run_ranks(saved, 4, tmp_path).results():
        assert is_ahead
        assert stages
        assert state


def fails_at_the_update(what: Callable[[], None], timeout: float) -> None:
    """The last rank does something else than its third update, for which others have no wait before
    the norm.
    """
    plan = program("zb_2p", ranks=4, microbatches=8)
    model = modules(4)
    mine = dist.get_rank()
    optimizers = {mine: OPTIMIZERS["momentum"](list(model[mine].parameters()))}
    ours = pipeline(plan, model, optimizers=optimizers, max_norm=FAR, timeout=timeout)
    for step in range(4):
        if step == 2 and mine == 3:
            ours._after_step = [what]
        ours.step(*batch(plan, step))


@pytest.mark.parametrize(
    ("what", "timeout", "code", "cause"),
    [
        (
            partial(kill, None),
            30.0,
            -9,
            r"rank 3 is gone: rank \d lost its connection at \S+",
        ),
        (
            partial(sleep, None),
            2.0,
            1,
            r"rank 3 has made no progress for \d\.\d s at the update: rank \d has waited 2 s at \S+",
        ),
    ],
    ids=["killed", "stalls"],
)
def test_a_norm_is_not_waited_for_in_vain(
    run_ranks: Run, what: Callable[[], None], timeout: float, code: int, cause: str
) -> None:
    """The first three ranks wait for it where their warm-up ends."""
    outcome = run_ranks(partial(fails_at_the_update, what, timeout), 4)
    assert outcome.codes == [1, 1, 1, code], outcome.logs
    assert outcome.seconds < 20
    # The report begins with the cause; the others say that they stopped for it.
    for log in outcome.logs[:3]:
        assert re.search(
            rf"(?m)(stopped: |Error: |^){cause} \(zb_2p.sched:\d+\)", log
        ), outcome.logs
    if code == 1:
        assert re.search(
            r"rank 0 has waited \S+ s for [^.]*3 at 0F3", str(outcome.logs)
        )


def clip(ours: Pipeline) -> None:
    ours.clip_grad_norm_(1.0)


def change_weights(ours: Pipeline) -> None:
    with torch.no_grad():
        for stage in ours._stages.values():
            next(stage.module.parameters()).mul_(2)


class InPlace(nn.Module):
    """Changes what it is given."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(2) if dist.get_rank() == 0 else x)


def nesterov(weights: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(weights, 0.1, momentum=0.9, nesterov=True, foreach=True)


def is_refused(
    model: list[nn.Module] | None = None,
    optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = OPTIMIZERS["sgd"],
    then: Callable[[Pipeline], object] = repr,
    schedule: str = "1f1b",
) -> None:
    """Some steps of what cannot be trained with `max_norm`."""
    plan = program(schedule, ranks=2)
    model = model or modules(len(plan.placement))
    optimizers = {
        stage: optimizer(list(model[stage].parameters()))
        for stage in plan.stages_of(dist.get_rank())
        if optimizer
    }
    ours = pipeline(plan, model, optimizers=optimizers, max_norm=FAR)
    for step in range(3):
        ours.step(*batch(plan, step))
        then(ours)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            partial(is_refused, optimizer=None),
            r"with `max_norm` the pipeline updates its stages after each step, here those of \[\d\], and "
            r"`optimizers` has \[\]: give it the optimizer of each, or call `clip_grad_norm_` after each step",
        ),
        (
            partial(is_refused, optimizer=nesterov),
            r"an optimizer changes gradients in place, as SGD with `nesterov` does, and a step .* `foreach=False`, .*",
        ),
        (
            partial(is_refused, [InPlace(each) for each in modules(2)]),
            r"a stage changes its inputs, targets or options in place, and with `max_norm` its forwards .*",
        ),
        (
            partial(is_refused, then=clip),
            r"the pipeline has `max_norm`, so its steps end with updates .* `norms` has the norm of the last one",
        ),
        (
            partial(is_refused, then=change_weights),
            r"a weight was changed after a step, whose update may have to be made anew: call `validate` .*",
        ),
        (
            partial(is_refused, schedule="rlhf"),
            r"the plan trains several models, of which each has a norm of its own, so `max_norm` cannot .*",
        ),
    ],
    ids=["no_optimizers", "nesterov", "in_place", "clips_twice", "changes", "models"],
)
def test_what_cannot_be_made_anew_is_refused(
    run_ranks: Run, body: Callable[[], None], message: str
) -> None:
    outcome = run_ranks(body, 2)
    assert outcome.codes == [1, 1]
    for log in outcome.logs:
        assert re.search(
            rf"(stopped|Error): rank \d failed.*: {message}$", log, re.M
        ), outcome.logs
