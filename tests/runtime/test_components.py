"""Forwards and backwards that take turns, component by component, on real processes: they train as
in one process.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from schedlang import Source
from schedlang.plan.plan import Plan
from schedlang.runtime import (
    OverlappedBackward,
    OverlappedForward,
    Pipeline,
    add_loss,
    added_losses,
    end_component,
)
from tests.support.models import WIDTH, batch, difference, program
from tests.support.plans import compiled
from tests.support.ranks import Run
from tests.support.sizes import STEPS, sizes
from tests.support.training import Train, printed_figures

pytestmark = pytest.mark.processes

# 1F1B whose steady forwards overlap backwards: of each half, of whole ones, of recomputed ones.
OVERLAPPED = """schedule overlapped {{
    param ranks = 4
    param microbatches = 8
    stage s in 0 .. ranks on s
    rank r {{
        let warmup = min(2 * (ranks - 1 - r) + 1, microbatches)
        repeat warmup {{ F(next) {kept} }}
        repeat microbatches - warmup {{ {before} overlap {{ F(next)  {backward}(next) }} {kept} {after} }}
        repeat warmup {{ {before} {backward}(next) {after} }}
        {end}
    }}
    {lines}
}}
"""


def overlapped(backward: str = "B", **ops: str) -> Plan:
    """A plan whose steady forwards overlap backwards, with more ops `before` and `after` each
    backward, after each forward (`kept`) and at the `end`, and more `lines`.
    """
    none = dict.fromkeys(["before", "kept", "after", "end", "lines"], "")
    text = OVERLAPPED.format(backward=backward, **(none | ops))
    return compiled(Source("overlapped.sched", text), {})


class Expert(nn.Module):
    """A stage of three components, whose middle one adds a loss, with a residual stream; it notes
    what of it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.events: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.components(x, end_component)

    def components(self, x: Tensor, end: Callable[..., object]) -> Tensor:
        x = x + self.noted("attention", self.attention(x).tanh())
        x = end(x)
        shares = self.router(x).softmax(-1)
        add_loss("balance", 2 * shares.mean(0).square().sum(), weight=0.1)
        parts = [expert(x) for expert in self.experts]
        mixed = sum(
            shares[:, each : each + 1] * part for each, part in enumerate(parts)
        )
        x, mixed = end((x, self.noted("experts", mixed)))
        return self.noted("combine", self.norm(x + mixed))

    def noted(self, name: str, value: Tensor) -> Tensor:
        self.events.append(f"F {name}")
        if value.requires_grad:
            # The gradient of a component's value is there when its backward has run.
            value.register_hook(lambda _: self.events.append(f"B {name}"))
        return value


class Own(Expert):
    """The same, with an order of its own: all of the backward after the first component."""

    def overlapped(
        self, *, forward: OverlappedForward, backward: OverlappedBackward
    ) -> Tensor:
        def end(value: object) -> object:
            value = end_component(value)
            while backward.left:
                backward.advance()
            return value

        return self.components(*forward.inputs, end)


class Checkpointed(Expert):
    """The same, of which a component runs again in the backward, in whose midst nothing stops."""

    def components(self, x: Tensor, end: Callable[..., object]) -> Tensor:
        x = end(x + checkpoint(self.attention, x, use_reentrant=False).tanh())
        x = end(checkpoint(self.twice, x, use_reentrant=False))
        return self.norm(x)

    def twice(self, x: Tensor) -> Tensor:
        return sum(expert(end_component(x)) for expert in self.experts)


class Buffered(Expert):
    """The same, with random numbers, a buffer, and a change in place at the begin of a component."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.BatchNorm1d(WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def components(self, x: Tensor, end: Callable[..., object]) -> Tensor:
        x = end(self.mean(self.attention(x)))
        x = end(self.experts[0](self.relu(x)))
        return self.norm(self.experts[1](self.relu(x)))


def build(plan: Plan, kind: type[nn.Module]) -> list[nn.Module]:
    """One model for a plan, the same on every rank."""
    torch.default_generator.manual_seed(0)
    found = [kind().double() for _ in range(plan.layout.pieces)]
    for stage in plan.layout.frozen:
        found[stage].requires_grad_(False)
    return found


def step_alone(
    plan: Plan, model: list[nn.Module], inputs: Tensor, targets: Tensor
) -> None:
    parts = zip(
        inputs.chunk(plan.microbatches), targets.chunk(plan.microbatches), strict=True
    )
    for x, y in parts:
        with added_losses() as added:
            for stage in model:
                x = stage(x)
        loss = nn.functional.mse_loss(x, y) + added.total
        (loss / plan.microbatches).backward()


def trained(
    plan: Plan, kind: type[nn.Module], steps: int
) -> tuple[bool, float, list[str]]:
    """Whether the weights of this rank are to the bit those of one process, after so many steps, and
    how far they are at most; and what a rank's first stage did in the first step.
    """
    reference = build(plan, kind)
    model = build(plan, kind)
    stages = {s: model[plan.layout.piece(s)] for s in plan.stages_of(dist.get_rank())}
    # Each module once: replicas on a rank are one.
    every = {id(stage): stage for stage in (*stages.values(), *reference)}.values()
    weights = [
        weight
        for stage in every
        for weight in stage.parameters()
        if weight.requires_grad
    ]
    optimizer = torch.optim.SGD(weights, 0.05, momentum=0.9)
    # An audit takes a stage that works in place for another one.
    audit = kind is not Buffered
    ours = Pipeline(plan, stages, nn.functional.mse_loss, audit=audit)
    first = next(iter(stages.values()))
    events: list[str] = []
    for step in range(steps):
        inputs, targets = batch(plan, step)
        first.events.clear()
        ours.step(inputs, targets)
        events = first.events.copy()
        step_alone(plan, reference, inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
    pairs = [
        pair
        for number, stage in stages.items()
        for pair in zip(
            stage.state_dict().values(),
            reference[plan.layout.piece(number)].state_dict().values(),
            strict=True,
        )
    ]
    worst = max(difference(*pair) for pair in pairs)
    return all(torch.equal(*pair) for pair in pairs), worst, events


SPLIT = {"backward": "I", "after": "W(next)"}

#: By name, a schedule, and the stages that it trains.
CASES: dict[str, tuple[Callable[[], Plan], type[Expert]]] = {
    "whole": (overlapped, Expert),
    "late halves": (
        partial(overlapped, "I", end="repeat microbatches { W(next) }"),
        Expert,
    ),
    "recomputed halves": (partial(overlapped, before="R(next)", **SPLIT), Expert),
    "frozen": (partial(overlapped, lines="frozen 2 .. 3"), Expert),
    "offloaded": (
        partial(overlapped, before="reload(next)", kept="offload(next)"),
        Expert,
    ),
    "dualpipe": (partial(program, "dualpipe"), Expert),
    "dualpipe_v": (partial(program, "dualpipe_v"), Expert),
    "stp": (partial(program, "stp"), Expert),
    "interleaved": (partial(program, "interleaved_overlap"), Expert),
    "own order": (overlapped, Own),
    "own order, halves": (partial(overlapped, **SPLIT), Own),
    "checkpoints, halves": (partial(overlapped, **SPLIT), Checkpointed),
    "buffers": (overlapped, Buffered),
}

#: Those that are put together from what others try.
MORE_CASES = {
    "late halves",
    "recomputed halves",
    "frozen",
    "dualpipe_v",
    "interleaved",
    "own order, halves",
}


def case(name: str, steps: int) -> tuple[bool, float, list[str]]:
    """What one of them comes to."""
    plan, kind = CASES[name]
    return trained(plan(), kind, steps)


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", sizes(CASES, MORE_CASES.__contains__))
def test_steps_are_those_of_one_process(name: str, steps: int, run_ranks: Run) -> None:
    turns = [
        "F attention",
        "B combine",
        "F experts",
        "B experts",
        "F combine",
        "B attention",
    ]
    for rank, (equal, worst, events) in enumerate(
        run_ranks(partial(case, name, steps), 4).results()
    ):
        assert worst < 1e-12
        # Gradients are summed in another order: those of replicas, and weight halves that are left
        # behind whole backwards of later microbatches.
        assert equal or name in ("dualpipe", "stp")
        # Where the warm-up's forwards end, which have three components each.
        steady = events[3 * (2 * (3 - rank) + 1) :]
        if name == "whole":
            assert steady[:6] == turns
        if name == "own order":
            assert steady[:4] == [turns[0], *turns[1::2]]


# A pair of slices, with skips; and updates whose forwards read older versions of the weights.
SLICED = """schedule sliced {
    param ranks = 4
    param microbatches = 4
    param slices = 2
    stage s in 0 .. ranks on s
    skip s in 0 .. 1 from 0 to 3
    fn last(i) = slices - 1 - i % slices
    rank r {
        let all = microbatches * slices
        let warmup = min(2 * (ranks - 1 - r) + slices, all)
        for i in 0 .. warmup { F(i / slices, i % slices) }
        for i in warmup .. all {
            overlap { F(i / slices, i % slices)  B((i - warmup) / slices, last(i - warmup)) }
        }
        for i in all - warmup .. all { B(i / slices, last(i)) }
    }
}
"""
STASHED = """schedule stashed {
    param ranks = 3
    param microbatches = 1
    weights stash
    rank r {
        let ahead = ranks - r
        warmup { for m in 0 .. ahead { F(m) } }
        steady { overlap { F(ahead)  B(0) }  U }
    }
}
"""


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("text", "ranks"), [pytest.param(SLICED, 4, marks=pytest.mark.large), (STASHED, 3)]
)
def test_the_example_takes_turns(
    text: str, ranks: int, steps: int, train: Train, tmp_path: Path
) -> None:
    path = tmp_path / "overlapped.sched"
    path.write_text(text)
    trained = train(ranks, path, "--steps", steps, "--check", "--audit")
    assert trained.codes == [0] * ranks, trained.stderr
    figures = printed_figures(trained.stdout)
    assert figures["gradient_error"] <= 1e-5
    assert "one after the other" not in trained.stderr
