"""Forwards and backwards that take turns, on one stage alone; and what is said where they do not."""

import logging
from collections.abc import Callable

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
from torch import Tensor, nn

from schedlang import Source, compile
from schedlang.runtime import Pipeline, PipelineError, end_component
from schedlang.runtime.components import overlapped_of
from schedlang.runtime.part import Part
from schedlang.runtime.parts.slices import Past
from schedlang.runtime.parts.split_backward import SplitBackwards
from schedlang.runtime.parts.turns import Overlaps
from schedlang.runtime.stage import Stage, StagePlan
from schedlang.schedule.kinds import Kind
from tests.support.ranks import Run
from tests.support.stages import do, weight_half

WIDTH = 6

ONE_RANK = """schedule one {
    param ranks = 1
    param microbatches = 3
    stage s in 0 .. 1 on 0
    rank r {
        F(next)
        repeat microbatches - 1 { overlap { F(next)  B(next) } }
        B(next)
    }
}
"""


class Two(nn.Module):
    """Two components; `between` makes of a value what goes from one to the other."""

    def __init__(self, between: Callable[[Tensor], Tensor] = end_component) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self.first(x).tanh())).sin()


class Residual(Two):
    """The same, whose second component takes more than what passes between them."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.first(x).tanh()
        return kept * self.second(end_component(kept.cos()))


class Cast(Two):
    """The same, which computes in 16 bits."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Remembering(Two):
    """The same for slices, whose past is what the first component made."""

    def forward(self, x: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        seen = self.first(x).tanh() + (0 if past is None else past)
        left = seen * 2
        return self.second(end_component(seen.cos())), left


def gradients(
    module: nn.Module, cut: bool, split: bool, slices: int = 1
) -> list[Tensor | None]:
    """The gradients of inputs and weights of two microbatches; where the first one's backward is
    `cut`, it runs in the midst of the second one's forward.
    """
    parts: list[Part] = [SplitBackwards({0, 1})] if split else []
    if slices > 1:
        parts.append(Past(1, slices, has_backward=True))
    overlaps = Overlaps({0, 1} if cut else set())
    parts.append(overlaps)
    stage = Stage(StagePlan(1), module, torch.device("cpu"), parts=parts)
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(4, WIDTH, generator=generator).requires_grad_() for _ in range(2)
    ]
    stage.inputs.update(enumerate(inputs))
    for microbatch in (0, 1):
        if microbatch and cut and slices == 1:
            backward = overlaps.overlapped_backward(0)
            stage.gradients[0] = [torch.ones_like(stage.outputs[0])]
            overlaps.overlap(stage.forward, 1, backward)
            assert backward.has_begun
            backward.finish()
        else:
            stage.forward(microbatch)
    # The other way round: with slices, gradients come from the last one to the first.
    for microbatch in (1, 0):
        if microbatch not in stage.input_gradients:
            stage.gradients[microbatch] = [torch.ones_like(stage.outputs[microbatch])]
            do(stage, Kind.B, microbatch)
    if split:
        for microbatch in (0, 1):
            weight_half(stage, microbatch)
    found = [stage.input_gradients[microbatch][0] for microbatch in (0, 1)]
    return [*found, *(weight.grad for weight in module.parameters())]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("module", [Two, Cast])
def test_gradients_are_those_of_one_after_the_other(
    module: type[nn.Module], split: bool
) -> None:
    ours = gradients(module(), cut=True, split=split)
    expected = gradients(module(), cut=False, split=split)
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("split", [False, True])
def test_a_root_may_be_of_any_component(split: bool) -> None:
    ours = gradients(Remembering(), cut=True, split=split, slices=2)
    expected = gradients(Remembering(), cut=False, split=split, slices=2)
    for one, other in zip(ours, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("split", [False, True])
def test_what_goes_past_the_end_of_a_component_is_refused(split: bool) -> None:
    with pytest.raises(PipelineError, match="did not pass through `end_component`"):
        gradients(Residual(), cut=True, split=split)


def test_a_value_must_be_of_tensors() -> None:
    with pytest.raises(PipelineError, match="what `end_component` is given is a tuple"):
        gradients(Two(lambda x: end_component((x, "no"))[0]), cut=True, split=False)


def test_a_method_that_cannot_be_called_is_refused() -> None:
    class Wrong(Two):
        def overlapped(self, forward: object) -> None: ...

    with pytest.raises(
        PipelineError, match="cannot be called with `forward` and `backward`"
    ):
        overlapped_of(Wrong(), 3)


def test_a_method_that_would_go_past_hooks_is_refused() -> None:
    class Own(Two):
        def overlapped(self, forward: object, backward: object) -> None: ...

    module = Own()
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(PipelineError, match=r"stage 3 .* hooks of the module itself"):
        overlapped_of(module, 3)


def test_what_is_no_method_is_not_called() -> None:
    module = Two()
    module.overlapped = nn.Linear(1, 1)
    assert overlapped_of(module, 0) is None


def said() -> list[list[str]]:
    """What is said in two steps, of a stage with components and of one without."""
    messages: list[list[str]] = []
    logger = logging.getLogger("schedlang.runtime")
    for between in (end_component, torch.sin):
        handler = logging.Handler()
        records: list[str] = []
        handler.emit = lambda record, to=records: to.append(record.getMessage())
        logger.addHandler(handler)
        plan = compile(Source("one.sched", ONE_RANK))
        ours = Pipeline(plan, {0: Two(between)}, nn.functional.mse_loss)
        for _ in range(2):
            ours.step(torch.randn(3, WIDTH), torch.randn(3, WIDTH))
        logger.removeHandler(handler)
        messages.append(records)
    return messages


@pytest.mark.processes
def test_one_after_the_other_is_said_once(run_ranks: Run) -> None:
    silent, telling = run_ranks(said, 1).results()[0]
    assert silent == []
    assert len(telling) == 1
    assert telling[0].startswith(
        "stage 0 on rank 0: forwards and backwards that the plan overlaps"
    )


def unrelated() -> str:
    """What becomes of a stage that has a method of that name for something else."""

    class Other(Two):
        def overlapped(self) -> bool:
            return True

    text = ONE_RANK.replace("overlap { F(next)  B(next) }", "F(next)  B(next)")
    plan = compile(Source("one.sched", text))
    Pipeline(plan, {0: Other()}, nn.functional.mse_loss)
    try:
        Pipeline(
            compile(Source("one.sched", ONE_RANK)), {0: Other()}, nn.functional.mse_loss
        )
    except PipelineError as error:
        return str(error)
    return ""


@pytest.mark.processes
def test_a_method_is_looked_at_where_the_plan_overlaps(run_ranks: Run) -> None:
    outcome = run_ranks(unrelated, 1)
    assert outcome.results()[0].startswith(
        "rank 0 failed: `overlapped` of stage 0 (Other)"
    )
