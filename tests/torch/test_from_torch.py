"""Torch's own schedules in our runtime: on four processes, the gradients, losses and outputs that
torch's runtime makes of them.
"""

import itertools
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="these are torch's schedules", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules

import schedlang.torch
from tests.support.ranks import Run
from tests.torch.models import (
    MICROBATCHES,
    RANKS,
    SCHEDULES,
    Block,
    arguments,
    batch,
    built,
    distance,
    gradients,
    held,
    mean,
    stages,
    stages_of,
    total,
)

pytestmark = pytest.mark.processes


def stepped(of: Any, built_with: Any, seed: int = 0) -> tuple[list[Tensor], Any]:
    """A step of either runtime: losses by microbatch, and what it returns."""
    inputs, target = arguments(built_with, seed)
    losses: list[Tensor] = []
    output = of.step(*inputs, target=target, losses=losses)
    return [loss.detach() for loss in losses], output


def compared() -> dict[str, list[float]]:
    """For each schedule the largest differences of gradients, losses and outputs, and how many
    losses this rank has.
    """
    found = {}
    for name, (loss, scales) in itertools.product(
        SCHEDULES, [(mean, True), (total, False)]
    ):
        theirs = built(name, loss, scale_grads=scales)
        mine = built(name, loss, scale_grads=scales)
        losses, output = stepped(theirs, theirs)
        own_losses, own_output = stepped(schedlang.torch.pipeline(mine), mine)
        found[f"{name} {loss.__name__}"] = [
            distance(gradients(mine), gradients(theirs)),
            distance(own_losses, losses),
            distance([own_output], [output]),
            len(losses),
        ]
    return found


def test_every_schedule_of_torch_trains_as_in_torch(run_ranks: Run) -> None:
    results = run_ranks(compared, RANKS).results()
    assert all(len(found) == 2 * len(SCHEDULES) for found in results)
    for found in results:
        for name, (gradient, loss, output, _) in found.items():
            assert gradient < 1e-12, name
            assert loss < 1e-12, name
            assert output < 1e-12, name
    # The rank of the last stage has the losses, and no other one.
    for name in results[0]:
        _, in_v = SCHEDULES[name.split()[0]]
        counts = [found[name][3] for found in results]
        assert counts == ([MICROBATCHES, 0, 0, 0] if in_v else [0, 0, 0, MICROBATCHES])


def evaluated() -> dict[str, list[float]]:
    """An evaluation between two steps: differences of losses and outputs from those of one process,
    and of gradients from those of before it, and from twice those after another step.
    """
    found = {}
    for name in ("Schedule1F1B", "ScheduleZBVZeroBubble"):
        schedule = built(name)
        ours = schedlang.torch.pipeline(schedule)
        inputs, target = arguments(schedule, seed=1)
        stepped(ours, schedule)
        once = [
            gradient.clone() for gradient in gradients(schedule) if gradient is not None
        ]
        losses: list[Tensor] = []
        output = ours.eval(*inputs, target=target, losses=losses)
        kept = distance(gradients(schedule), once)
        stepped(ours, schedule)
        twice = distance(gradients(schedule), [2 * gradient for gradient in once])
        found[name] = [kept, twice]
        if target is not None:
            whole, _ = batch(seed=1)
            for number in range(RANKS * SCHEDULES[name][0]):
                whole = Block(number)(whole)
            parts = zip(
                whole.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True
            )
            found[name] += [
                distance([output], [whole.detach()]),
                distance(losses, [mean(*part).detach() for part in parts]),
            ]
    return found


def test_evaluations_leave_gradients_alone_and_steps_add_up(run_ranks: Run) -> None:
    """Torch's own evaluation divides gradients, and ends in an error where stages are in a V."""
    results = run_ranks(evaluated, RANKS).results()
    for found in results:
        assert max(itertools.chain(*found.values())) < 1e-12
    assert [len(found["Schedule1F1B"]) for found in results] == [2, 2, 2, 4]
    assert [len(found["ScheduleZBVZeroBubble"]) for found in results] == [4, 2, 2, 2]


def given_by_microbatch() -> list[float]:
    """Inputs, keywords and targets by microbatch, with keywords for the loss, against the same as a
    whole; and a step without outputs, whose modules came later.
    """
    name = "ScheduleInterleaved1F1B"
    whole = built(name)
    theirs = built(name)
    cut = built(name)
    inputs, target = arguments(whole)
    factor = batch(seed=2)[0][:, :1]
    loss_kwargs = {"factor": 3.0}
    whole_losses: list[Tensor] = []
    cut_losses: list[Tensor] = []
    theirs.step(*inputs, target=target, loss_kwargs=loss_kwargs, factor=factor)
    output = schedlang.torch.pipeline(whole).step(
        *inputs,
        target=target,
        losses=whole_losses,
        loss_kwargs=loss_kwargs,
        factor=factor,
    )
    ours = schedlang.torch.pipeline(cut)
    for stage in stages_of(cut):
        stage.submod = Block(stage.stage_index)
    nothing = ours.step(
        arg_mbs=[(part,) for part in inputs[0].chunk(MICROBATCHES)] if inputs else None,
        kwarg_mbs=[{"factor": part} for part in factor.chunk(MICROBATCHES)],
        target_mbs=None if target is None else list(target.chunk(MICROBATCHES)),
        losses=cut_losses,
        loss_kwargs=loss_kwargs,
        return_outputs=False,
    )
    assert nothing is None
    assert (output is None) == (target is None)
    return [
        distance(gradients(whole), gradients(theirs)),
        distance(gradients(cut), gradients(theirs)),
        distance(whole_losses, cut_losses),
    ]


@pytest.mark.skipif(
    "loss_kwargs" not in signature(schedules.PipelineScheduleMulti.step).parameters,
    reason="torch 2.11 gives a loss no keywords",
)
def test_a_batch_may_be_given_by_microbatch(run_ranks: Run) -> None:
    for differences in run_ranks(given_by_microbatch, RANKS).results():
        assert max(differences) < 1e-12


def loaded(folder: Path) -> dict[str, float]:
    """Tables that were loaded, of compute ops or with communication, against torch with the same;
    and two pipelines beside each other on a mesh.
    """
    found = {}
    for form in ("compute_only", "compute_comms"):
        file = folder / f"{form}.{dist.get_rank()}.csv"
        built("ScheduleZBVZeroBubble")._dump_csv(str(file), format=form)
        made = []
        for _ in range(2):
            own = stages(held(dist.get_rank(), "ScheduleZBVZeroBubble"), 2 * RANKS)
            made.append(
                schedules._PipelineScheduleRuntime(own, MICROBATCHES, loss_fn=mean)
            )
            made[-1]._load_csv(str(file), format=form)
        theirs, mine = made
        stepped(theirs, theirs)
        stepped(schedlang.torch.pipeline(mine), mine)
        found[form] = distance(gradients(mine), gradients(theirs))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    theirs = built("ScheduleInterleaved1F1B", group=mesh.get_group("pp"))
    mine = built("ScheduleInterleaved1F1B", group=mesh.get_group("pp"))
    seed = mesh.get_local_rank("dp")
    stepped(theirs, theirs, seed)
    stepped(schedlang.torch.pipeline(mine), mine, seed)
    found["mesh"] = distance(gradients(mine), gradients(theirs))
    return found


def test_loaded_tables_and_groups_of_processes(run_ranks: Run, tmp_path: Path) -> None:
    for found in run_ranks(loaded, RANKS, tmp_path).results():
        assert set(found) == {"compute_only", "compute_comms", "mesh"}
        assert max(found.values()) < 1e-12


def without_a_loss() -> float:
    """A schedule without a loss: `step` runs its forwards."""
    theirs = built("ScheduleInterleaved1F1B", loss=None)
    mine = built("ScheduleInterleaved1F1B", loss=None)
    inputs, _ = arguments(mine)
    with torch.no_grad():
        output = theirs.step(*inputs)
    ours = schedlang.torch.pipeline(mine)
    assert ours.step(*inputs, return_outputs=False) is None
    return distance([ours.step(*inputs)], [output])


def test_a_schedule_without_a_loss_runs_forwards(run_ranks: Run) -> None:
    assert max(run_ranks(without_a_loss, RANKS).results()) < 1e-12


class Product(torch.autograd.Function):
    """A linear layer that leaves what the gradients of its weights need in a list."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, left: list[Any]
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.left = left
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        x, weight = ctx.saved_tensors
        ctx.left.append((x, gradient))
        return gradient @ weight, None, None, None


class Delaying(Block):
    """A block whose weights get their gradients from functions that `build` makes."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.left: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        return Product.apply(x, *self.linear.parameters(), self.left).tanh()

    def build(self) -> Callable[[], None]:
        """What computes the weight gradients of the backward that is over."""
        ((x, gradient),) = self.left
        self.left.clear()

        def compute() -> None:
            computed = gradient.T @ x, gradient.sum(0)
            for weight, its in zip(self.linear.parameters(), computed, strict=True):
                weight.grad = its if weight.grad is None else weight.grad + its

        return compute


def builders() -> dict[str, float]:
    """For schedules with and without W, the difference of gradients that functions of the stages
    have computed (`dw_builder`) from those of torch's own backwards.
    """
    found = {}
    for name in ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV"):
        theirs = built(name)
        mine = built(name)
        for stage in stages_of(mine):
            delaying = Delaying(stage.stage_index)
            stage.submod, stage.dw_builder = delaying, delaying.build
        stepped(theirs, theirs)
        stepped(schedlang.torch.pipeline(mine), mine)
        found[name] = distance(gradients(mine), gradients(theirs))
    return found


def test_a_builder_of_a_stage_computes_weight_gradients_at_w(run_ranks: Run) -> None:
    for found in run_ranks(builders, RANKS).results():
        assert max(found.values()) < 1e-12, found
