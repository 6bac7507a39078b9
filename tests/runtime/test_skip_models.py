"""Models with skips on real processes: their gradients are those of the same model in one process."""

import copy
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import DOCS, PROGRAMS
from tests.support.ranks import Run

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from schedlang import Source
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline, split
from schedlang.schedule.layout import Layout
from tests.support.models import difference, program
from tests.support.plans import compiled
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
from tests.support.training import Train, printed_figures

pytestmark = pytest.mark.processes

MICROBATCHES = 8
ROWS = 3
#: The lines of a U-Net and of a translator, for so many stages.
UNET = "skip s in 0 .. ({stages} - 1) / 2 from s to {stages} - 1 - s"
TRANSLATOR = """
    skip s in 0 .. 1 from 0 to {stages} / 2
    skip s in {stages} / 2 + 1 .. {stages} from {stages} / 2 - 1 to s
"""


def plan_of(name: str, lines: str, **params: int) -> Plan:
    """A plan of a program in the gallery with more lines, without what it claims."""
    text = re.sub(
        r"^ *assert .*\n", "", (PROGRAMS / f"{name}.sched").read_text(), flags=re.M
    )
    place = text.index("\n", text.index("param microbatches")) + 1
    params = {"ranks": 4, "microbatches": MICROBATCHES} | params
    # The lines ask how many stages there are, which the program says by its other parameters.
    stages = compiled(Source(name, text), params).layout.pieces
    text = text[:place] + lines.format(stages=stages) + "\n" + text[place:]
    return compiled(Source(f"{name}.sched", text), params)


def batch(model: nn.Module, seed: int) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = MICROBATCHES * ROWS
    if isinstance(model, Translator):
        source, given, following = torch.randint(
            WORDS, (3, rows, 5), generator=generator
        )
        return {"source": source, "given": given}, following
    inputs, targets = torch.randn(
        2, rows, WIDTH, LENGTH, generator=generator, dtype=torch.float64
    )
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
            model(
                tree_map(lambda each, part=part: each.chunk(MICROBATCHES)[part], inputs)
            ),
            wanted,
        )
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def stages_of(plan: Plan, model: nn.Module) -> dict[int, nn.Module]:
    """This rank's stages of all pipelines, which have copies of the model."""
    starts = {
        number: plan.layout.pipeline_of[number].start
        for number in plan.stages_of(dist.get_rank())
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
            found += [
                difference(torch.cat(outputs), expected),
                difference(losses, right),
            ]
    return max(found + of_gradients(plan, stages, model))


def of_gradients(
    plan: Plan, stages: dict[int, nn.Module], model: nn.Module
) -> list[float]:
    """How far the gradients of this rank's stages are from those of the whole model."""
    found = []
    for number, stage in stages.items():
        whole = model.stages()[number - plan.layout.pipeline_of[number].start]
        for weight, other in zip(stage.parameters(), whole.parameters(), strict=True):
            found.append(difference(weight.grad, other.grad))
    return found


def models() -> dict[str, float]:
    """A U-Net and a translator under schedules of one and of two chunks, also where they split the
    backward.
    """
    found = {}
    for name in (
        "1f1b",
        "zb_h1",
        "zb_v",
        "interleaved_1f1b",
        "dualpipe",
        "1f1b_recompute",
    ):
        for lines, make in ((UNET, UNet), (TRANSLATOR, Translator)):
            plan = plan_of(name, lines)
            torch.manual_seed(0)
            found[f"{name} {make.__name__}"] = compare(plan, make(plan.layout.pieces))
    return found


def test_a_unet_and_a_translator(run_ranks: Run) -> None:
    """What the first half of a U-Net makes goes to its mirror image, what an encoder makes to all
    of its decoder.
    """
    for found in run_ranks(models, 4).results():
        assert len(found) == 12
        assert max(found.values()) < 1e-12, found


def test_the_stages_of_the_page_are_those_of_a_unet() -> None:
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python[^\n]*\n(class Down.*?)^```", page, re.M | re.S)
    names = {"torch": torch, "nn": torch.nn, "F": torch.nn.functional}
    exec(block, names)
    model = UNet(3)
    x = torch.randn(2, WIDTH, LENGTH, dtype=torch.float64)
    down = names["Down"](*model.down, later=2)
    up = names["Up"](*model.up, earlier=0)
    output, given = down(x)
    assert torch.equal(up(model.bottom[0](output), {0: given[2]}), model(x))


#: Skips of all kinds among 8 stages: over each other, several from one stage, several to one,
#: within a rank of a V.
MANY = "skip s in 0 .. 3 from s to 7 - s skip s in 0 .. 3 from 0 to 3 + s skip s in 2 .. 5 from s to 7 "


class Chain(nn.Module):
    """Any stages with skips."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        linear = partial(nn.Linear, LENGTH, LENGTH, dtype=torch.float64)
        make = Summing if layout.slices > 1 else Skipping
        later = [
            [b for a, b in layout.skips if a == stage] for stage in range(layout.pieces)
        ]
        self.parts = nn.ModuleList(
            make(linear(), nn.Tanh(), later=each) for each in later
        )

    def forward(self, x: Tensor) -> Tensor:
        return in_order(self.parts, x)

    def stages(self) -> list[nn.Module]:
        return list(self.parts)


def graphs() -> dict[str, float]:
    """Skips of all kinds, with copies to the host, runs of the forward again, and slices, too."""
    found = {}
    for name in (
        "interleaved_1f1b",
        "zb_v",
        "pipe_offload",
        "interleaved_overlap",
        "looped_bfs",
    ):
        for lines in (
            (MANY, MANY + "recompute 2 .. 6")
            if name in ("looped_bfs", "interleaved_1f1b")
            else (MANY,)
        ):
            plan = plan_of(name, lines)
            torch.manual_seed(0)
            found[f"{name} {len(lines)}"] = compare(plan, Chain(plan.layout))
    for name, lines in (
        ("terapipe", ""),
        ("seq1f1b", ""),
        ("seq1f1b", "recompute 0 .. 3 fill W"),
    ):
        plan = plan_of(
            name,
            f"skip s in 0 .. 2 from s to 3 skip s in 0 .. 1 from 0 to 2 {lines}",
            slices=2,
        )
        torch.manual_seed(0)
        found[f"{name} {lines}"] = compare(plan, Chain(plan.layout))
    return found


def test_skips_of_all_kinds(run_ranks: Run) -> None:
    for found in run_ranks(graphs, 4).results():
        assert len(found) == 10
        assert max(found.values()) < 1e-12, found


def steps() -> list[list[float]]:
    """The losses of 20 steps of a U-Net, ours and those of one process."""
    plan = plan_of("1f1b", UNET)
    torch.manual_seed(0)
    model = UNet(4)
    stages = stages_of(plan, model)
    found = []
    ours = Pipeline(plan, stages, loss_of)
    optimizers = [
        torch.optim.AdamW(each.parameters(), 0.01) for each in (model, *stages.values())
    ]
    for step in range(20):
        # Two batches in turn, so that the loss goes down within 20 steps.
        inputs, targets = batch(model, step % 2)
        losses = ours.step(inputs, targets)
        right = alone(model, inputs, targets)
        for each in optimizers:
            each.step()
            each.zero_grad()
        if losses is not None:
            found.append([float(losses.mean()), float(right.mean())])
    return found


def test_losses_stay_those_of_one_process(run_ranks: Run) -> None:
    (found,) = filter(None, run_ranks(steps, 4).results())
    assert len(found) == 20
    assert max(abs(ours - right) for ours, right in found) < 1e-12
    assert found[-1][0] < found[0][0] - 0.05


def other_inputs() -> list[float]:
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
            inputs, targets = (
                each[: rows * MICROBATCHES] for each in batch(model, rows)
            )
            losses = ours.step(inputs, targets)
            right = alone(model, inputs, targets)
            worst = max(worst, 0.0 if losses is None else difference(losses, right))
        worst = max(worst, *of_gradients(plan, stages, model))
        found.append(worst)
    return found


def test_steps_with_other_inputs_and_half_the_bits(run_ranks: Run) -> None:
    """What passes by a skip is found out anew for inputs of another shape; `transfer_dtype` is also
    for skips.
    """
    for shapes, rounded in run_ranks(other_inputs, 4).results():
        assert shapes < 1e-12
        assert 1e-4 < rounded < 0.1


def on_a_mesh() -> list[float]:
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
        stages = {
            number: copy.deepcopy(model.parts[number])
            for number in plan.stages_of(rank)
        }
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
                    weight.grad.full_tensor()
                    if isinstance(weight.grad, DTensor)
                    else weight.grad
                )
                # Two batches have added up in the reference; replicas take the mean.
                found.append(difference(mine, other.grad / 2))
    return found


def test_replicas_and_sharded_stages_with_skips(run_ranks: Run) -> None:
    for found in run_ranks(on_a_mesh, 4).results():
        assert len(found) == 8
        assert max(found) < 1e-12


def test_skips_of_a_schedule_without_a_flush(train: Train, tmp_path: Path) -> None:
    """With older versions of the weights, as in one process."""
    text = (PROGRAMS / "pipedream_2bw.sched").read_text()
    late = tmp_path / "late.sched"
    line = "param microbatches = 4"
    late.write_text(text.replace(line, f"{line} skip s in 0 .. 2 from s to s + 2"))
    assert late.read_text() != text
    done = train(4, late, "--steps", 3, "--check")
    assert done.codes == [0] * 4, done.stdout + done.stderr
    figures = printed_figures(done.stdout)
    assert figures["loss_error"] < 1e-6
    assert figures["gradient_error"] < 1e-5


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
    plan = program("unet_1f1b", ranks=3)
    linear = nn.Linear(LENGTH, LENGTH, dtype=torch.float64)
    stages = {
        stage: Breaking(change, linear, later=[2] if stage == 0 else [])
        for stage in [dist.get_rank()]
    }
    Pipeline(plan, stages, loss_of).step(*batch(linear, 0))


def return_nothing(x: Tensor) -> Any:
    return x


def give_to_another_stage(x: Tensor) -> Any:
    return x, {1: x}


def give_text(x: Tensor) -> Any:
    return x, {2: "text"}


def give_another_shape(x: Tensor) -> Any:
    return x, {2: x[1:]}


WANTED = r"where the plan has skips, it must return two values, its output and a dictionary of what it gives to the"
FAILURES = {
    "nothing": (
        return_nothing,
        "0F2",
        rf"stage 0 returns a Tensor: {WANTED} stages \[2\]",
    ),
    "other_stage": (
        give_to_another_stage,
        "0F2",
        rf"stage 0 returns values for the stages \[1\]: {WANTED} stages \[2\]",
    ),
    "text": (
        give_text,
        "0F2",
        r"what stage 0 returns for stage 2 is a str: it must be a tensor, or .*",
    ),
    "shape": (
        give_another_shape,
        "3SEND_F2",
        r"what stage 0 returns for stage 2 is float64 \[2, 4, 16\] for microbatch 2, "
        r"but float64 \[3, 4, 16\] in the first step with inputs of this shape",
    ),
}


@pytest.mark.parametrize("scenario", FAILURES)
def test_what_does_not_match_the_plan_is_one_error(
    run_ranks: Run, scenario: str
) -> None:
    change, place, message = FAILURES[scenario]
    outcome = run_ranks(fails, 3, change)
    assert outcome.codes == [1, 1, 1], outcome.logs
    for log in outcome.logs:
        assert re.search(
            rf"rank 0 failed at {place} \(unet_1f1b.sched:\d+\): {message}$", log, re.M
        ), outcome.logs


def by_split() -> None:
    split(nn.Sequential(*(nn.Linear(1, 1) for _ in range(4))), plan_of("1f1b", UNET))


def test_split_cuts_for_plans_without_skips(run_ranks: Run) -> None:
    outcome = run_ranks(by_split, 4)
    message = "the plan has skips, whose stages take and return more than blocks: build"
    assert outcome.codes == [1] * 4
    assert all(message in log for log in outcome.logs), outcome.logs
