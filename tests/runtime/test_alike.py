"""Models that keep something, change something, or leave something out in their forwards and
backwards train as they do alone, whatever the schedule; where they cannot, they are refused.
"""

import copy
import random
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import pytest
from attrs import frozen

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from schedlang import Source, compile
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.models import program
from tests.support.ranks import Run

pytestmark = pytest.mark.processes

WIDTH = 8
ROWS = 3
MICROBATCHES = 4
STEPS = 2

WHOLE = "1f1b"
SPLIT = "zb_h1"
RECOMPUTED = "1f1b_recompute"
TWO_PIPELINES = "gems"
ONE = (WHOLE, SPLIT, RECOMPUTED)


class Stage(nn.Module):
    """A stage that computes what a function says, with some parts and a linear layer."""

    def __init__(self, function: Callable[..., Any], **parts: object) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(WIDTH, WIDTH)
        for name, part in parts.items():
            # A plain tensor becomes a buffer, which moves and is saved with the module.
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def plain(self: Any, x: Tensor) -> Tensor:
    return torch.tanh(self.linear(x))


def plain_stages(count: int) -> list[nn.Module]:
    return [Stage(plain) for _ in range(count)]


def everywhere(
    function: Callable[..., Any], **parts: Callable[[], object]
) -> Callable[[int], Any]:
    """All stages do the same."""

    def make(count: int) -> list[nn.Module]:
        return [
            Stage(function, **{name: part() for name, part in parts.items()})
            for _ in range(count)
        ]

    return make


def only(
    stage: int, function: Callable[..., Any], **parts: Callable[[], object]
) -> Any:
    """One stage does something, the others nothing special."""

    def make(count: int) -> list[nn.Module]:
        stages = plain_stages(count)
        stages[stage] = Stage(
            function, **{name: part() for name, part in parts.items()}
        )
        return stages

    return make


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


@frozen
class Case:
    """Stages, and the schedules under which they train as alone."""

    make: Callable[[int], list[nn.Module]]
    schedules: tuple[str, ...] = ()


def made(case: Case, count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [stage.double() for stage in case.make(count)]


def batches() -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of all steps; random numbers after them are the same everywhere."""
    torch.manual_seed(1)
    shape = STEPS, 2, MICROBATCHES * ROWS, WIDTH
    return [(x.clone(), y) for x, y in torch.randn(shape, dtype=torch.float64)]


def in_one_process(stages: list[nn.Module]) -> list[Tensor]:
    """The losses; the stages have their gradients, added up over the steps."""
    losses = []
    for inputs, targets in batches():
        for x, target in zip(
            inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True
        ):
            value: Any = x.clone()
            for stage in stages:
                value = stage(value)
            loss = mean_square(value, target)
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
    return losses


def off_by(ours: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference; endless where only one of them is there."""
    if ours is None or expected is None:
        return 0.0 if ours is expected else float("inf")
    # Where all expected numbers are 0, any difference is endless, and none is 0.
    return float((ours - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def compared(schedule: str, case: Case) -> dict[str, float]:
    """How far losses, gradients and buffers of this rank are from those of one process."""
    plan = small(schedule)
    pieces = plan.layout.pieces
    alone = made(case, pieces)
    expected = in_one_process(alone)
    own = {
        number: made(case, pieces)[plan.layout.piece(number)]
        for number in plan.stages_of(dist.get_rank())
    }
    pipeline = Pipeline(plan, own, mean_square)
    found: list[Tensor] = []
    for inputs, targets in batches():
        losses = pipeline.step(inputs, targets)
        found += [] if losses is None else losses
    differences = {}
    # Only the rank of the last stage has losses.
    if found:
        differences["losses"] = off_by(torch.stack(found), torch.stack(expected))
    for number, stage in own.items():
        reference = alone[plan.layout.piece(number)]
        for (name, weight), right in zip(
            stage.named_parameters(), reference.parameters(), strict=True
        ):
            differences[f"{name} of stage {number}"] = off_by(weight.grad, right.grad)
        for (name, buffer), right in zip(
            stage.named_buffers(), reference.buffers(), strict=True
        ):
            differences[f"{name} of stage {number}"] = off_by(buffer, right)
    return differences


def small(name: str) -> Plan:
    return program(name, ranks=2, microbatches=MICROBATCHES)


def compare_all(what: str) -> dict[str, dict[str, float]]:
    return {
        schedule: {
            name: off
            for name, off in compared(schedule, CASES[what]).items()
            # `not <=` and not `>`: a NaN is no agreement.
            if not off <= 1e-12
        }
        for schedule in CASES[what].schedules
    }


# What stages do.


def twice_as_much(gradient: Tensor) -> Tensor:
    return 2 * gradient


def clipped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def hook_inside(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    y.register_hook(twice_as_much)
    return torch.tanh(y)


def changed_later(self: Any, x: Tensor) -> Tensor:
    """The buffer changes from the second forward on."""
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls > 1:
        self.number += 1
    return self.linear(x) * float(self.number)


def detached_now_and_then(self: Any, x: Tensor) -> Tensor:
    """Only some microbatches have a gradient for the stages before."""
    return self.linear(x if float(x.detach().sum()) > 0 else x.detach())


def gives_a_gradient_now_and_then(self: Any, x: Tensor) -> Tensor:
    """The next stage is told once whether it is given one."""
    y = plain(self, x)
    return y if float(y.detach().sum()) > 0 else y.detach()


def asks_for_gradients(self: Any, x: Tensor) -> Tensor:
    return plain(self, x) * (2 if torch.is_grad_enabled() else 1)


def frozen_stages(*numbers: int) -> Callable[[int], list[nn.Module]]:
    def make(count: int) -> list[nn.Module]:
        stages = plain_stages(count)
        for number in numbers:
            stages[number].requires_grad_(False)
        return stages

    return make


def calls(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.linear(x) * self.calls


def noisy_from_the_second_step(self: Any, x: Tensor) -> Tensor:
    """Recomputed, a stage is called twice for each microbatch."""
    self.calls = getattr(self, "calls", 0) + 1
    factor = random.random() if self.calls > 2 * MICROBATCHES else 1.0
    return self.linear(x) * factor


def decayed_from_the_second_call(self: Any, x: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    if self.calls > 1:
        self.linear.weight.data.mul_(0.9)
    return self.linear(x)


def penalized(self: Any, x: Tensor) -> Tensor:
    """Differentiates twice: the norm of a gradient is part of the output."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = self.linear(x).square().sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.tanh(self.linear(x)) + gradient


def checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    def function(self: Any, x: Tensor) -> Tensor:
        return checkpoint(partial(plain, self), x, use_reentrant=reentrant)

    return function


def one_weight_in_two_stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    stages = plain_stages(count)
    stages[1].linear.weight = stages[0].linear.weight
    return stages


def updates_in_hooks(count: int) -> list[nn.Module]:
    stages = plain_stages(count)
    for stage in stages:
        for weight in stage.parameters():
            optimizer = torch.optim.SGD([weight], 0.1)
            weight.register_post_accumulate_grad_hook(
                lambda _, step=optimizer.step: step()
            )
    return stages


def passes_nested(layout: torch.layout) -> Callable[[int], list[nn.Module]]:
    def packed(self: Any, x: Tensor) -> Tensor:
        return torch.nested.as_nested_tensor([*self.linear(x)], layout=layout)

    def make(count: int) -> list[nn.Module]:
        stages = plain_stages(count)
        stages[0] = Stage(packed)
        stages[1] = Stage(lambda self, x: self.linear(x.to_padded_tensor(0.0)))
        return stages

    return make


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


#: What `tests/models` does not have: there, features train as alone under schedules of every kind.
CASES: dict[str, Case] = {
    "plain": Case(plain_stages),
    "a hook inside": Case(everywhere(hook_inside), (WHOLE, SPLIT)),
    "a counter that begins late": Case(
        everywhere(changed_later, number=lambda: torch.ones(())), (WHOLE, SPLIT)
    ),
    "a counter of the first stage": Case(
        only(0, changed_later, number=lambda: torch.ones(()))
    ),
    "a counter of the last stage": Case(
        only(1, changed_later, number=lambda: torch.ones(()))
    ),
    "noise from the second step": Case(only(1, noisy_from_the_second_step)),
    "a decay from the second call": Case(only(0, decayed_from_the_second_call)),
    "a detach now and then": Case(only(1, detached_now_and_then), ONE),
    "a gradient inside": Case(everywhere(penalized), ONE),
    "frozen at first": Case(frozen_stages(0)),
    "one weight in two stages": Case(one_weight_in_two_stages),
    "an optimizer in a hook": Case(updates_in_hooks),
    "a jagged tensor": Case(passes_nested(torch.jagged)),
    "a nested tensor": Case(passes_nested(torch.strided)),
    "a gradient now and then": Case(only(0, gives_a_gradient_now_and_then)),
    "a look at whether gradients are enabled": Case(
        everywhere(asks_for_gradients), (WHOLE, SPLIT)
    ),
}
NESTED = (
    r"is a nested tensor \(torch.\w+\), which cannot pass between ranks: "
    r"return `x.to_padded_tensor\(0.0\)`"
)
NOW_AND_THEN = (
    r"the output of stage 0 wants (a|no) gradient for microbatch \d, but wanted "
    r"(one|none) in the first step"
)
#: By case, what a refusal says under which schedules.
REFUSED: list[tuple[str, str, str]] = [
    ("a hook inside", RECOMPUTED, "register the hook if the tensor requires grad"),
    ("an optimizer in a hook", WHOLE, "was changed within a step, by an"),
    (
        "an optimizer in a hook",
        RECOMPUTED,
        r"a weight of stage \d was changed between the forward",
    ),
    ("a jagged tensor", WHOLE, NESTED),
    ("a jagged tensor", RECOMPUTED, NESTED),
    ("a nested tensor", WHOLE, NESTED),
    ("a nested tensor", RECOMPUTED, NESTED),
    ("a gradient now and then", WHOLE, NOW_AND_THEN),
    ("a gradient now and then", RECOMPUTED, NOW_AND_THEN),
    (
        "a look at whether gradients are enabled",
        RECOMPUTED,
        "whether gradients are enabled",
    ),
    ("noise from the second step", RECOMPUTED, "returns something else when its"),
    ("a decay from the second call", WHOLE, r"changes its weight .* by `\.data`"),
    ("a counter that begins late", TWO_PIPELINES, "has replicas of it"),
    # Its second forward is that of another microbatch, or the repetition of its first one.
    ("a counter of the first stage", RECOMPUTED, "which its first one did not"),
    ("a counter of the last stage", RECOMPUTED, "returns something else when its"),
]


@pytest.mark.parametrize("what", [what for what in CASES if CASES[what].schedules])
def test_trains_as_alone(run_ranks: Run, what: str) -> None:
    for differences in run_ranks(partial(compare_all, what), 2).results():
        assert all(not off for off in differences.values()), differences


def refused(what: str, schedule: str) -> None:
    compared(schedule, CASES[what])


@pytest.mark.parametrize(("what", "schedule", "pattern"), REFUSED)
@pytest.mark.slow
def test_is_refused(run_ranks: Run, what: str, schedule: str, pattern: str) -> None:
    outcome = run_ranks(partial(refused, what, schedule), 2)
    assert outcome.has_started()
    assert outcome.codes == [1, 1]
    for log in outcome.logs:
        assert re.search(pattern, log), log


# Schedules that update: the same model written in two ways.


def trained(
    schedule: str,
    make: Callable[[int], list[nn.Module]],
    rate: float = 0.1,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Tensor]:
    """The weights of this rank after some updates."""
    plan = program(schedule, ranks=2)
    if plan.kernels:
        plan = plan.for_updates(5)
    torch.manual_seed(0)
    stages = make(2)
    own = {number: stages[number] for number in plan.stages_of(dist.get_rank())}
    optimizers = {
        number: torch.optim.SGD(stage.parameters(), rate)
        for number, stage in own.items()
    }
    pipeline = Pipeline(plan, own, mean_square, optimizers=optimizers)
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(
        2, ROWS * plan.microbatches, WIDTH, generator=generator
    )
    for _ in range(2):
        with context():
            pipeline.step(inputs, targets)
    return [weight.detach() for stage in own.values() for weight in stage.parameters()]


def hooks_that_double(count: int) -> list[nn.Module]:
    stages = plain_stages(count)
    for stage in stages:
        for weight in stage.parameters():
            weight.register_hook(twice_as_much)
    return stages


def in_autocast(self: Any, x: Tensor) -> Tensor:
    with autocast():
        return plain(self, x)


def same_twice() -> dict[str, float]:
    """How far two ways to write the same model are from each other, under schedules whose gradients
    are late.
    """
    pairs: dict[
        str, tuple[Callable[[str], list[Tensor]], Callable[[str], list[Tensor]]]
    ] = {
        "hooks": (
            # Gradients twice as large at half the rate move the weights as far.
            lambda name: trained(name, hooks_that_double, rate=0.1),
            lambda name: trained(name, plain_stages, rate=0.2),
        ),
        "checkpoint": (
            lambda name: trained(name, everywhere(checkpointed(False))),
            lambda name: trained(name, plain_stages),
        ),
        "reentrant checkpoint": (
            lambda name: trained(name, only(1, checkpointed(True))),
            lambda name: trained(name, only(1, plain)),
        ),
        "autocast": (
            lambda name: trained(name, plain_stages, context=autocast),
            lambda name: trained(name, everywhere(in_autocast)),
        ),
    }
    differences = {}
    for what, (one, other) in pairs.items():
        for name in ("pipedream", "pipedream_2bw", "pipedream_vertical"):
            weights = zip(one(name), other(name), strict=True)
            differences[f"{what} under {name}"] = max(off_by(a, b) for a, b in weights)
    return differences


def test_late_gradients_are_those_of_the_model_however_it_is_written(
    run_ranks: Run,
) -> None:
    for differences in run_ranks(same_twice, 2).results():
        assert max(differences.values()) < 1e-6, differences


def with_a_loss_of_its_own(self: Any, x: Tensor) -> Tensor:
    y = self.part(x.detach())
    y.square().mean().backward()
    return torch.tanh(self.linear(x)) + y.detach()


def trained_with_losses_of_their_own(schedule: str) -> None:
    trained(
        schedule,
        everywhere(with_a_loss_of_its_own, part=lambda: nn.Linear(WIDTH, WIDTH)),
    )


@pytest.mark.parametrize(
    "schedule", ["pipedream", "pipedream_2bw", "pipedream_vertical"]
)
def test_forwards_with_gradients_are_refused_where_updates_overlap(
    run_ranks: Run, schedule: str
) -> None:
    outcome = run_ranks(partial(trained_with_losses_of_their_own, schedule), 2)
    assert outcome.has_started()
    assert outcome.codes == [1, 1]
    said = "adds to the gradient of its weight `part.weight`, by a backward of its own"
    for log in outcome.logs:
        assert said in log


# What is said of a model or a batch.


def warned(what: str, targets: float = 0.0) -> list[str]:
    """The warnings of two steps."""
    plan = small(WHOLE)
    torch.manual_seed(dist.get_rank())
    stages = CASES[what].make(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        own = {dist.get_rank(): stages[dist.get_rank()]}
        pipeline = Pipeline(plan, own, mean_square)
        for _ in range(2):
            inputs = torch.randn(MICROBATCHES * ROWS, WIDTH)
            wanted = torch.zeros_like(inputs)
            # Those of microbatch 1.
            wanted[ROWS : 2 * ROWS] = targets
            pipeline.step(inputs, wanted)
    return [str(warning.message) for warning in caught]


def test_asks_once_about_weights_that_begin_alike(run_ranks: Run) -> None:
    first, second = run_ranks(partial(warned, "one weight in two stages"), 2).results()
    (message,) = first
    assert (
        "`linear.weight` of stage 0 and `linear.weight` of stage 1 begin with the same"
        in message
    )
    assert "tied=[{0: 'linear.weight', 1: 'linear.weight'}]" in message
    assert not second


def test_says_once_that_a_backward_has_nothing_to_do(run_ranks: Run) -> None:
    first, second = run_ranks(partial(warned, "frozen at first"), 2).results()
    (message,) = first
    assert message.startswith(
        "no weight of stage 0 wants a gradient, and the plan trains it"
    )
    assert not second


def test_says_once_which_loss_is_not_finite(run_ranks: Run) -> None:
    first, second = run_ranks(partial(warned, "plain", float("inf")), 2).results()
    assert not first
    (message,) = second
    assert (
        message
        == "step 1 of the pipeline: the loss is not finite for microbatch 1 (inf)"
    )


def hooked_at_both_sides(shares: bool) -> list[str]:
    """The warnings of a step in which both stages have hooks of what passes between them."""

    def first(self: Any, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.register_hook(twice_as_much)
        # A view has hooks of its own, so that those of `y` are not hooks of what passes.
        return y if shares else y.view_as(y)

    def second(self: Any, x: Tensor) -> Tensor:
        x.register_hook(clipped)
        return self.linear(x)

    own = {dist.get_rank(): [Stage(first), Stage(second)][dist.get_rank()]}
    inputs = torch.randn(MICROBATCHES * ROWS, WIDTH)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = Pipeline(small(WHOLE), own, mean_square)
        for _ in range(2):
            pipeline.step(inputs, inputs)
    return [str(warning.message) for warning in caught]


def test_asks_once_about_hooks_at_both_sides_of_a_tensor(run_ranks: Run) -> None:
    shared, apart = (
        run_ranks(partial(hooked_at_both_sides, way), 2).results() for way in (1, 0)
    )
    (message,), others = shared
    assert message.startswith(
        "stage 0 has hooks of what it returns, and stage 1 of what it is"
    )
    assert not others
    assert apart == [[], []]


def with_words() -> list[float]:
    """The losses of a step whose last stage returns more than tensors, which its loss takes."""

    def last(self: Any, x: Tensor) -> dict[str, Any]:
        return {"output": self.linear(x), "name": "last", "none": None}

    def loss(output: dict[str, Any], target: Tensor) -> Tensor:
        assert (output["name"], output["none"]) == ("last", None)
        return mean_square(output["output"], target)

    torch.manual_seed(0)
    own = {dist.get_rank(): [Stage(plain), Stage(last)][dist.get_rank()]}
    batch = torch.randn(MICROBATCHES * ROWS, WIDTH)
    losses = Pipeline(small(WHOLE), own, loss).step(batch, batch)
    return [] if losses is None else losses.tolist()


def test_the_last_stage_may_return_what_its_loss_takes(run_ranks: Run) -> None:
    first, last = run_ranks(with_words, 2).results()
    assert not first
    assert len(last) == MICROBATCHES


def other_rows() -> None:
    plan = small(WHOLE)
    own = {dist.get_rank(): plain_stages(1)[0]}
    rows = MICROBATCHES * (4 if dist.get_rank() == 0 else 2)
    Pipeline(plan, own, mean_square).step(
        torch.ones(rows, WIDTH), torch.ones(rows, WIDTH)
    )


def test_inputs_and_targets_of_other_numbers_of_rows_are_refused(
    run_ranks: Run,
) -> None:
    outcome = run_ranks(other_rows, 2)
    assert outcome.codes == [1, 1]
    for log in outcome.logs:
        assert (
            "`inputs` have 16 rows, and `targets` have 8: both must have a row" in log
        )


# The audit of a first step.

#: What an audit finds alike.
AUDITED = (
    WHOLE,
    SPLIT,
    RECOMPUTED,
    "pipedream_2bw",
    "pipedream",
    "pipe_offload",
    "zb_v",
    "gpipe",
)


def audited(schedule: str) -> list[str]:
    plan = program(schedule, ranks=2)
    if plan.kernels:
        plan = plan.for_updates(3)
    torch.manual_seed(0)
    stages = everywhere(dropped, drop=lambda: nn.Dropout(0.5))(plan.layout.pieces)
    own = {number: stages[number] for number in plan.stages_of(dist.get_rank())}
    optimizers = {
        number: torch.optim.SGD(own[number].parameters(), 0.1) for number in own
    }
    if not plan.has_updates:
        optimizers = {}
    pipeline = Pipeline(plan, own, mean_square, optimizers=optimizers, audit=True)
    inputs, targets = torch.randn(2, ROWS * plan.microbatches, WIDTH)
    for _ in range(2):
        pipeline.step(inputs, targets)
    return pipeline.audits


def dropped(self: Any, x: Tensor) -> Tensor:
    return torch.tanh(self.drop(self.linear(x)))


def audit_all() -> dict[str, list[str]]:
    return {schedule: audited(schedule) for schedule in AUDITED}


def test_an_audit_finds_nothing_where_all_is_well(run_ranks: Run) -> None:
    for verdicts in run_ranks(audit_all, 2).results():
        for schedule, of_stages in verdicts.items():
            assert of_stages, schedule
            for verdict in of_stages:
                assert re.fullmatch(
                    r"stage \d computes what it computes alone: [1-9]\d* tensors compared, the "
                    r"largest difference \d\.\de[+-]\d\d",
                    verdict,
                )


def audit_in_place() -> dict[str, list[str]]:
    return {schedule: in_place(schedule) for schedule in (WHOLE, SPLIT)}


def in_place(schedule: str) -> list[str]:
    """Every stage changes what it is given in place."""
    plan = program(schedule, ranks=2)
    torch.manual_seed(dist.get_rank())
    own = {
        number: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
        for number in plan.stages_of(dist.get_rank())
    }
    pipeline = Pipeline(plan, own, mean_square, audit=True)
    torch.manual_seed(2)
    pipeline.step(*torch.randn(2, ROWS * plan.microbatches, WIDTH))
    return pipeline.audits


def test_an_audit_of_stages_that_change_their_inputs_in_place(run_ranks: Run) -> None:
    for verdicts in run_ranks(audit_in_place, 2).results():
        for schedule, of_stages in verdicts.items():
            assert of_stages, schedule
            assert all(
                "computes what it computes alone" in verdict for verdict in of_stages
            )


def audit_of_hidden_backwards() -> dict[str, list[bool]]:
    """Whether trainings with an audit end as those without one do."""
    return {schedule: audited_or_not(schedule) for schedule in (WHOLE, RECOMPUTED)}


def audited_or_not(schedule: str) -> list[bool]:
    """A reentrant checkpoint, which changes buffers in the backward, too; a hook of what has added
    up; and a loss that knows a weight by itself.
    """
    found = []
    for audit in (False, True):
        plan = small(schedule)
        torch.manual_seed(dist.get_rank())
        norm = nn.BatchNorm1d(WIDTH)
        stage = Stage(norm_in_a_checkpoint, norm=norm, seen=[], drop=nn.Dropout(0.5))
        norm.weight.register_post_accumulate_grad_hook(
            lambda weight, seen=stage.seen: seen.append(weight.grad.clone())
        )
        loss = partial(decayed, stage.linear.weight)
        pipeline = Pipeline(plan, {dist.get_rank(): stage}, loss, audit=audit)
        for _ in range(2):
            pipeline.step(*torch.ones(2, ROWS * MICROBATCHES, WIDTH).cumsum(1))
        gradients = [each.grad for each in stage.parameters()]
        found.append([*gradients, *stage.buffers(), *stage.seen, torch.get_rng_state()])
    return [*map(torch.equal, *found), len(found[0]) == len(found[1])]


def decayed(weight: Tensor, output: Tensor, target: Tensor) -> Tensor:
    return mean_square(output, target) + weight.square().mean()


def norm_in_a_checkpoint(self: Any, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return self.drop(self.norm(self.linear(x)))

    return checkpoint(inner, self.linear(x), use_reentrant=True)  # type: ignore[no-any-return]


def test_an_audit_leaves_the_training_as_it_is(run_ranks: Run) -> None:
    for found in run_ranks(audit_of_hidden_backwards, 2).results():
        for schedule, are_same in found.items():
            assert all(are_same), schedule


def without_a_graph_from_the_second_step() -> None:
    """With one microbatch, the first step has no forward without a graph."""
    plan = program(RECOMPUTED, ranks=2, microbatches=1)
    stage = Stage(asks_for_gradients)
    pipeline = Pipeline(plan, {dist.get_rank(): stage}, mean_square)
    for _ in range(2):
        pipeline.step(*torch.ones(2, ROWS, WIDTH))


def test_forwards_without_a_graph_are_compared_once(run_ranks: Run) -> None:
    outcome = run_ranks(without_a_graph_from_the_second_step, 2)
    assert outcome.codes == [1, 1]
    for log in outcome.logs:
        assert "look whether gradients are enabled" in log


def audit_of_a_secret() -> None:
    """The second stage counts its calls, of which an audit makes some."""
    plan = small(WHOLE)
    torch.manual_seed(0)
    stage = Stage(calls if dist.get_rank() else plain)
    rows = MICROBATCHES * ROWS
    pipeline = Pipeline(plan, {dist.get_rank(): stage}, mean_square, audit=True)
    pipeline.step(torch.ones(rows, WIDTH), torch.ones(rows, WIDTH))


def test_an_audit_names_the_first_op_that_differs(run_ranks: Run) -> None:
    outcome = run_ranks(audit_of_a_secret, 2)
    assert outcome.codes == [1, 1]
    for log in outcome.logs:
        assert (
            "audit of stage 1, 1F0: tensor 0 of its output differs from it alone by"
            in log
        )
        assert "keeps something from call to call" in log


def no_tensors() -> None:
    own = {dist.get_rank(): plain_stages(1)[0]}
    Pipeline(small(WHOLE), own, mean_square).step(
        torch.ones(MICROBATCHES * ROWS, WIDTH), {}
    )


def test_targets_without_tensors_are_refused(run_ranks: Run) -> None:
    outcome = run_ranks(no_tensors, 2)
    assert outcome.codes == [1, 1]
    for log in outcome.logs:
        assert "`targets` have no tensors" in log


RECOMPUTED_SKIP = """schedule recomputed_skip {
    param ranks = 1
    param microbatches = 2
    stage s in 0 .. 3 on 0
    skip s in 0 .. 1 from 0 to 2
    recompute 0 .. 3
    rank r {
        for m in 0 .. microbatches { for s in 0 .. 3 { F(s, m) } }
        for m in 0 .. microbatches { for s in 0 .. 3 { B(2 - s, m) } }
    }
}
"""
RECOMPUTED_SLICES = """schedule recomputed_slices {
    param ranks = 1
    param microbatches = 2
    param slices = 2
    recompute 0 .. 1
    rank r {
        for m in 0 .. microbatches { for k in 0 .. slices { F(m, k) } }
        for m in 0 .. microbatches { for k in 0 .. slices { B(m, slices - 1 - k) } }
    }
}
"""


def doubled(tensor: Tensor) -> Tensor:
    """The same, whose gradient is doubled by a hook of its own: once for each time it is run."""
    if tensor.requires_grad:
        tensor.register_hook(twice_as_much)
    return tensor


class GivesSkip(nn.Linear):
    def forward(self, x: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        y = super().forward(x)
        return y.tanh(), {2: y}


class TakesSkip(nn.Linear):
    def forward(self, x: Tensor, *, skips: dict[int, Tensor]) -> Tensor:
        return super().forward(x) + doubled(skips[0])


class TakesPast(nn.Linear):
    def forward(self, x: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        total = y.sum(1, keepdim=True)
        if past is not None:
            y = y + doubled(past)
        return y.tanh(), total


def in_one_graph(model: list[nn.Module], x: Tensor) -> Tensor:
    """The same as above, and nothing is run again."""
    if len(model) == 1:
        first, second = x.chunk(2, 1)
        one, past = model[0](first)
        return torch.cat([one, model[0](second, past)[0]], 1)
    y, skips = model[0](x)
    return model[2](model[1](y), skips={0: skips[2].clone()})


def hooks_of_what_is_held(text: str) -> float:
    plan = compile(Source("own.sched", text))
    torch.manual_seed(0)
    kinds = [GivesSkip, nn.Linear, TakesSkip] if "skip" in plan.name else [TakesPast]
    model: list[nn.Module] = [kind(WIDTH, WIDTH, dtype=torch.float64) for kind in kinds]
    reference = copy.deepcopy(model)
    shape = [4, WIDTH] if len(model) > 1 else [4, 2, WIDTH]
    inputs, targets = torch.randn(2, *shape, dtype=torch.float64)
    for x, y in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        (F.mse_loss(in_one_graph(reference, x), y) / 2).backward()
    Pipeline(plan, dict(enumerate(model)), F.mse_loss).step(inputs, targets)
    pairs = zip(
        chain.from_iterable(stage.parameters() for stage in model),
        chain.from_iterable(stage.parameters() for stage in reference),
        strict=True,
    )
    return max(float((one.grad - other.grad).abs().max()) for one, other in pairs)


@pytest.mark.parametrize(
    "text", [RECOMPUTED_SKIP, RECOMPUTED_SLICES], ids=["skip", "past"]
)
def test_hooks_of_what_is_held_for_a_second_run_are_called_once(
    run_ranks: Run, text: str
) -> None:
    assert run_ranks(partial(hooks_of_what_is_held, text), 1).results()[0] < 1e-12
