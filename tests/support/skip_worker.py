"""Runs scenarios of `test_skip_models.py` on real processes, as `runtime_worker.py` its own: models
with skips.
"""

import copy
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from schedlang import Source, compile
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, split
from schedlang.schedule.layout import Layout
from tests.support.paths import PROGRAMS
from tests.support.runtime_worker import difference, main, report
from tests.support.skip_models import (
    LENGTH,
    WIDTH,
    WORDS,
    Skipping,
    Summing,
    Translator,
    UNet,
    in_order,
)

MICROBATCHES = 8
ROWS = 3
#: The lines of a U-Net and of a translator, for so many stages.
UNET = "skip s in 0 .. ({stages} - 1) / 2 from s to {stages} - 1 - s"
TRANSLATOR = """
    skip s in 0 .. 1 from 0 to {stages} / 2
    skip s in {stages} / 2 + 1 .. {stages} from {stages} / 2 - 1 to s
"""
#: Skips of all kinds among 8 stages: over each other, several from one stage, several to one,
#: within a rank of a V.
MANY = "skip s in 0 .. 3 from s to 7 - s skip s in 0 .. 3 from 0 to 3 + s skip s in 2 .. 5 from s to 7 "


def plan_of(name: str, lines: str, **params: int) -> Plan:
    """A plan of a program in the gallery with more lines, without what it claims."""
    text = re.sub(r"^ *assert .*\n", "", (PROGRAMS / f"{name}.sched").read_text(), flags=re.M)
    place = text.index("\n", text.index("param microbatches")) + 1
    params = {"ranks": 4, "microbatches": MICROBATCHES} | params
    stages = compile(Source(name, text), params).layout.pieces
    text = text[:place] + lines.format(stages=stages) + "\n" + text[place:]
    return compile(Source(f"{name}.sched", text), params)


def batch(model: nn.Module, seed: int) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = MICROBATCHES * ROWS
    if isinstance(model, Translator):
        source, given, following = torch.randint(WORDS, (3, rows, 5), generator=generator)
        return {"source": source, "given": given}, following
    inputs, targets = torch.randn(2, rows, WIDTH, LENGTH, generator=generator, dtype=torch.float64)
    return inputs, targets


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    if targets.dtype == torch.int64:
        return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
    return nn.functional.mse_loss(output, targets)


def alone(model: Callable[[Any], Tensor], inputs: Any, targets: Tensor) -> Tensor:
    """The losses of the microbatches in one process, and the gradients in the weights."""
    losses = []
    for part, wanted in enumerate(targets.chunk(MICROBATCHES)):
        loss = loss_of(
            model(tree_map(lambda each, part=part: each.chunk(MICROBATCHES)[part], inputs)), wanted
        )
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def stages_of(plan: Plan, model: nn.Module) -> dict[int, nn.Module]:
    """This rank's stages of all pipelines, which have copies of the model."""
    starts = {
        number: plan.layout.pipeline_of[number].start for number in plan.stages_of(dist.get_rank())
    }
    copies = {start: copy.deepcopy(model).stages() for start in set(starts.values())}
    return {number: copies[start][number - start] for number, start in starts.items()}


def compare(plan: Plan, model: nn.Module) -> float:
    """How far losses, outputs and gradients are from those of one process, in two steps that add
    up.
    """
    stages = stages_of(plan, model)
    found = [0.0]
    ours = Pipeline(plan, stages, loss_of)
    for step in range(2):
        inputs, targets = batch(model, step)
        with torch.no_grad():
            expected = model(inputs)
        outputs = ours.evaluate(inputs)
        losses = ours.step(inputs, targets)
        right = alone(model, inputs, targets)
        if losses is not None and len(plan.layout.pipelines) == 1:
            found += [difference(torch.cat(outputs), expected), difference(losses, right)]
    return max(found + of_gradients(plan, stages, model))


def of_gradients(plan: Plan, stages: dict[int, nn.Module], model: nn.Module) -> list[float]:
    """How far the gradients of this rank's stages are from those of the whole model."""
    found = []
    for number, stage in stages.items():
        whole = model.stages()[number - plan.layout.pipeline_of[number].start]
        for weight, other in zip(stage.parameters(), whole.parameters(), strict=True):
            found.append(difference(weight.grad, other.grad))
    return found


class Chain(nn.Module):
    """Any stages with skips."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        linear = partial(nn.Linear, LENGTH, LENGTH, dtype=torch.float64)
        make = Summing if layout.slices > 1 else Skipping
        later = [[b for a, b in layout.skips if a == stage] for stage in range(layout.pieces)]
        self.parts = nn.ModuleList(make(linear(), nn.Tanh(), later=each) for each in later)

    def forward(self, x: Tensor) -> Tensor:
        return in_order(self.parts, x)

    def stages(self) -> list[nn.Module]:
        return list(self.parts)


def models() -> None:
    """A U-Net and a translator under schedules of one and of two chunks, also where they split the
    backward.
    """
    found = {}
    for name in ("1f1b", "zb_h1", "zb_v", "interleaved_1f1b", "dualpipe", "1f1b_recompute"):
        for lines, make in ((UNET, UNet), (TRANSLATOR, Translator)):
            plan = plan_of(name, lines)
            torch.manual_seed(0)
            found[f"{name} {make.__name__}"] = compare(plan, make(plan.layout.pieces))
    report(f"found{dist.get_rank()}", found)


def graphs() -> None:
    """Skips of all kinds, with copies to the host, runs of the forward again, and slices, too."""
    found = {}
    for name in ("interleaved_1f1b", "zb_v", "pipe_offload", "interleaved_overlap", "looped_bfs"):
        for lines in (
            (MANY, MANY + "recompute s in 2 .. 6")
            if name in ("looped_bfs", "interleaved_1f1b")
            else (MANY,)
        ):
            plan = plan_of(name, lines)
            torch.manual_seed(0)
            found[f"{name} {len(lines)}"] = compare(plan, Chain(plan.layout))
    for name, lines in (
        ("terapipe", ""),
        ("seq1f1b", ""),
        ("seq1f1b", "recompute s in 0 .. 3 fill W"),
    ):
        plan = plan_of(
            name, f"skip s in 0 .. 2 from s to 3 skip s in 0 .. 1 from 0 to 2 {lines}", slices=2
        )
        torch.manual_seed(0)
        found[f"{name} {lines}"] = compare(plan, Chain(plan.layout))
    report(f"found{dist.get_rank()}", found)


def steps() -> None:
    """The losses of 20 steps of a U-Net, ours and those of one process."""
    plan = plan_of("1f1b", UNET)
    torch.manual_seed(0)
    model = UNet(4)
    stages = stages_of(plan, model)
    found = []
    ours = Pipeline(plan, stages, loss_of)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (model, *stages.values())]
    for step in range(20):
        inputs, targets = batch(model, step % 2)
        losses = ours.step(inputs, targets)
        right = alone(model, inputs, targets)
        for each in optimizers:
            each.step()
            each.zero_grad()
        if losses is not None:
            found.append([float(losses.mean()), float(right.mean())])
    report(f"found{dist.get_rank()}", found)


def other_inputs() -> None:
    """Steps with other numbers of rows in turn; and one whose messages are rounded."""
    plan = plan_of("1f1b", UNET)
    found = []
    for options in ({}, {"transfer_dtype": torch.bfloat16}):
        torch.manual_seed(0)
        model = UNet(4)
        worst = 0.0
        stages = stages_of(plan, model)
        ours = Pipeline(plan, stages, loss_of, **options)
        for rows in (ROWS, 1, ROWS, 1):
            inputs, targets = (each[: rows * MICROBATCHES] for each in batch(model, rows))
            losses = ours.step(inputs, targets)
            right = alone(model, inputs, targets)
            worst = max(worst, 0.0 if losses is None else difference(losses, right))
        worst = max(worst, *of_gradients(plan, stages, model))
        found.append(worst)
    report(f"found{dist.get_rank()}", found)


def on_a_mesh() -> None:
    """Two replicas of two ranks, and two of which FSDP has the weights: how far gradients are from
    their mean.
    """
    of = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica = of.get_local_rank("dp")
    rank = of.get_local_rank("pp")
    plan = plan_of("looped_bfs", "skip s in 2 .. 4 from 0 to s", ranks=2)
    found = list[float]()
    for mesh in (of, of["pp"]):
        torch.manual_seed(0)
        model = Chain(plan.layout)
        stages = {number: copy.deepcopy(model.parts[number]) for number in plan.stages_of(rank)}
        if mesh is not of:
            for stage in stages.values():
                fully_shard(stage, mesh=of["dp"])
        for each in range(2):
            alone(model, *batch(model, each))
        Pipeline(plan, stages, loss_of, mesh=mesh).step(*batch(model, replica))
        for number, stage in stages.items():
            for weight, other in zip(
                stage.parameters(), model.parts[number].parameters(), strict=True
            ):
                mine = (
                    weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
                )
                found.append(difference(mine, other.grad / 2))
    report(f"found{dist.get_rank()}", found)


class Breaking(Skipping):
    """Returns something else for its third microbatch."""

    def __init__(
        self, change: Callable[[Tensor], Any], *layers: nn.Module, later: Iterable[int]
    ) -> None:
        super().__init__(*layers, later=later)
        self.change = change
        self.calls = 0

    def forward(self, x: Tensor, skips: dict[int, Tensor] | None = None) -> Any:
        returned = super().forward(x, skips)
        self.calls = self.calls + 1
        return self.change(returned[0]) if self.later and self.calls == 3 else returned


def fails(change: Callable[[Tensor], Any]) -> None:
    """A step in which the first of three stages returns something else."""
    plan = compile(
        Source("unet_1f1b.sched", (PROGRAMS / "unet_1f1b.sched").read_text()), {"ranks": 3}
    )
    linear = nn.Linear(LENGTH, LENGTH, dtype=torch.float64)
    stages = {
        stage: Breaking(change, linear, later=[2] if stage == 0 else [])
        for stage in [dist.get_rank()]
    }
    Pipeline(plan, stages, loss_of).step(*batch(linear, 0))


def by_split() -> None:
    split(nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))), plan_of("1f1b", UNET))


SCENARIOS = {
    each.__name__: each for each in (models, graphs, steps, other_inputs, on_a_mesh, by_split)
}
SCENARIOS |= {
    "nothing": partial(fails, lambda x: x),
    "other_stage": partial(fails, lambda x: (x, {1: x})),
    "text": partial(fails, lambda x: (x, {2: "text"})),
    "shape": partial(fails, lambda x: (x, {2: x[1:]})),
}

if __name__ == "__main__":
    main(SCENARIOS.__getitem__)
