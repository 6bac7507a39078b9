"""Steps that take another plan than that of their pipeline, with more microbatches or fewer, or in
another order: losses, gradients and weights are those of one process.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
from attrs import evolve

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD

from schedlang import CompileError, compile, open_plan, read_plan, write_plan
from schedlang.plan.plan import Plan
from schedlang.runtime import Pipeline
from tests.support.mesh import add_gradients, mesh, on, place
from tests.support.models import (
    OPTIMIZERS,
    batch,
    difference,
    loss_difference,
    modules,
    one_model,
    pipeline,
    program,
    program_with,
    replicated,
)
from tests.support.ranks import Run

#: By schedule, ranks, parameters, and the microbatches of the steps, one after the other: other
#: backwards, copies to the host and to other ranks, forwards that overlap backwards, two pipelines,
#: slices, skips.
STEPS: dict[str, tuple[int, dict[str, int], Sequence[int]]] = {
    "1f1b": (3, {"microbatches": 4}, (1, 8, 3, 4, 2, 7, 5, 6, 1)),
    "zb_v": (2, {"microbatches": 4}, (6, 1, 3, 8, 2, 4, 7, 5, 6)),
    "zb_h1": (4, {"microbatches": 8}, (1, 5, 8, 2)),
    "interleaved_1f1b": (2, {"microbatches": 4}, (2, 8, 4, 6)),
    "1f1b_recompute": (2, {"microbatches": 4}, (6, 1, 4)),
    "pipe_offload": (2, {"microbatches": 8}, (4, 8, 2)),
    "bpipe": (4, {"microbatches": 8}, (6, 8, 12)),
    "dualpipe_v": (2, {"microbatches": 8}, (4, 10, 8)),
    "gems": (2, {"microbatches": 4}, (2, 8, 4)),
    "seq1f1b": (2, {"microbatches": 3, "slices": 2}, (1, 5, 3)),
    "unet_1f1b": (2, {"microbatches": 4}, (1, 6, 4)),
}


def differences(
    ours: Pipeline, own: Plan, plans: Sequence[Plan], alone: list[nn.Module]
) -> list[float]:
    """Those of the losses of steps with these plans from what one process has, and at the end of
    the gradients, which add up.
    """
    found = []
    for seed, plan in enumerate(plans):
        inputs, targets = batch(plan, seed)
        expected = add_gradients(plan, alone, inputs, targets, replicas=1)
        losses = ours.step(inputs, targets, plan=plan)
        found.append(loss_difference(plan, losses, expected, dist.get_rank()))
    for number, stage in ours._stages.items():
        whole = alone[own.layout.piece(number)].parameters()
        for weight, other in zip(stage.module.parameters(), whole, strict=True):
            found.append(difference(weight.grad, other.grad))
    return found


def takes_other_numbers(name: str) -> float:
    ranks, params, counts = STEPS[name]
    own = program(name, ranks=ranks, **params)
    ours = pipeline(own, replicated(own))
    plans = [own.for_microbatches(count) for count in counts]
    assert [plan.microbatches for plan in plans] == [*counts]
    return max(differences(ours, own, plans, one_model(own.layout)))


@pytest.mark.processes
@pytest.mark.parametrize("name", STEPS)
def test_another_number_of_microbatches_in_each_step(name: str, run_ranks: Run) -> None:
    ranks, *_ = STEPS[name]
    assert max(run_ranks(partial(takes_other_numbers, name), ranks).results()) < 1e-12


def takes_other_orders() -> float:
    own = program("zb_h1", ranks=2, microbatches=4)
    others = [
        program("gpipe", ranks=2, microbatches=6),
        program("1f1b", ranks=2, microbatches=3),
        own,
    ]
    ours = pipeline(own, replicated(own))
    worst = differences(ours, own, others, one_model(own.layout))
    # An evaluation between steps is by the pipeline's own plan.
    inputs, _ = batch(own, 7)
    ours.step(*batch(others[0], 8), plan=others[0])
    outputs = ours.evaluate(inputs)
    if outputs is not None:
        assert len(outputs) == own.microbatches
    return max(worst)


@pytest.mark.core
@pytest.mark.processes
def test_a_plan_of_another_order_in_a_step(run_ranks: Run) -> None:
    assert max(run_ranks(takes_other_orders, 2).results()) < 1e-12


def updates_with_a_scaler() -> float:
    """Weights after updates that are scaled, clipped, and of lists that count by their rows."""
    own = program("1f1b", ranks=2, microbatches=2)
    model = modules(2)
    alone = modules(2)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    rank = dist.get_rank()
    ours = Pipeline(own, {rank: model[rank]}, nn.functional.mse_loss, loss_scale=scaler)
    optimizer = SGD(model[rank].parameters(), 0.1)
    of_alone = SGD(nn.ModuleList(alone).parameters(), 0.1)
    for seed, count in enumerate((3, 1, 5)):
        plan = own.for_microbatches(count)
        inputs, targets = batch(plan, seed)
        rows = [*range(1, count)]
        rows.append(len(inputs) - sum(rows))
        lists = [*inputs.split(rows)], [*targets.split(rows)]
        ours.step(*lists, counts=rows, plan=plan)
        scaler.unscale_(optimizer)
        norm = ours.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        nn.functional.mse_loss(nn.Sequential(*alone)(inputs), targets).backward()
        whole = nn.utils.clip_grad_norm_(nn.ModuleList(alone).parameters(), 0.5)
        of_alone.step()
        of_alone.zero_grad()
        assert difference(norm, whole) < 1e-12
    pairs = zip(model[rank].parameters(), alone[rank].parameters(), strict=True)
    return max(difference(*pair) for pair in pairs)


@pytest.mark.processes
def test_scaled_and_clipped_updates_of_other_numbers(run_ranks: Run) -> None:
    assert max(run_ranks(updates_with_a_scaler, 2).results()) < 1e-12


def updates_ahead() -> float:
    """Weights after updates that are made before their norms are known."""
    own = program("zb_h1", ranks=2, microbatches=4)
    model = modules(2)
    alone = modules(2)
    rank = dist.get_rank()
    optimizers = {rank: OPTIMIZERS["adamw"](model[rank].parameters())}
    ours = pipeline(own, model, optimizers=optimizers, max_norm=0.2)
    of_alone = OPTIMIZERS["adamw"](nn.ModuleList(alone).parameters())
    for seed, count in enumerate((4, 1, 6, 2)):
        plan = own.for_microbatches(count)
        inputs, targets = batch(plan, seed)
        ours.step(inputs, targets, plan=plan)
        add_gradients(plan, alone, inputs, targets, replicas=1)
        nn.utils.clip_grad_norm_(nn.ModuleList(alone).parameters(), 0.2)
        of_alone.step()
        of_alone.zero_grad()
    ours.validate()
    pairs = zip(model[rank].parameters(), alone[rank].parameters(), strict=True)
    return max(difference(*pair) for pair in pairs)


@pytest.mark.processes
def test_updates_ahead_of_their_norms(run_ranks: Run) -> None:
    assert max(run_ranks(updates_ahead, 2).results()) < 1e-9


def trains_replicas(counts: tuple[int, int]) -> float:
    of = mesh("dp", "pp")
    replica, rank = place(of)
    own = program("1f1b", ranks=2, microbatches=2)
    model = modules(2)
    alone = modules(2)
    ours = on(of, own, model)
    plan = own.for_microbatches(counts[replica])
    ours.step(*batch(plan, replica), plan=plan)
    for seed, count in enumerate(counts):
        theirs = own.for_microbatches(count)
        add_gradients(theirs, alone, *batch(theirs, seed), replicas=2)
    pairs = zip(model[rank].parameters(), alone[rank].parameters(), strict=True)
    return max(difference(one.grad, other.grad) for one, other in pairs)


@pytest.mark.processes
def test_replicas_take_one_number(run_ranks: Run) -> None:
    assert max(run_ranks(partial(trains_replicas, (3, 3)), 4).results()) < 1e-12
    run = run_ranks(partial(trains_replicas, (3, 5)), 4)
    assert run.codes == [1] * 4
    assert any(
        "replicas of the pipeline have begun a step of other" in log for log in run.logs
    )


def disagrees() -> None:
    own = program("1f1b", ranks=3, microbatches=4)
    ours = pipeline(own, replicated(own), timeout=20.0)
    plan = own.for_microbatches(2)
    is_told = dist.get_rank() < 2
    ours.step(*batch(plan, 0), plan=plan if is_told else None)


@pytest.mark.core
@pytest.mark.processes
def test_ranks_that_take_different_plans_end_at_once(run_ranks: Run) -> None:
    run = run_ranks(disagrees, 3)
    assert run.codes == [1] * 3
    assert run.seconds < 15
    assert any(
        "rank 2 failed" in log and "rank 0 has begun a step with another plan" in log
        for log in run.logs
    ), run.logs


def reports() -> list[dict[str, float]]:
    own = program("1f1b", ranks=2, microbatches=2)
    ours = pipeline(own, replicated(own))
    ours.record = True
    for seed, count in enumerate((1, 4, 3)):
        plan = own.for_microbatches(count)
        ours.step(*batch(plan, seed), plan=plan)
        # The forwards and backwards of this rank's stage, for each microbatch.
        assert len(ours.bars) == 2 * count
    return ours.report()


@pytest.mark.processes
def test_a_report_counts_what_each_plan_computes(run_ranks: Run) -> None:
    one, other = run_ranks(reports, 2).results()
    assert one == other
    assert one["steps"] == 3
    samples = one["samples_per_second"] * one["seconds_per_step"] * one["steps"]
    assert samples == pytest.approx(3 * (1 + 4 + 3))


def refused(own: Plan, other: Plan, options: dict[str, Any]) -> None:
    model = replicated(own)
    if own.has_updates:
        mine = own.stages_of(dist.get_rank())
        optimizers = {each: SGD(model[each].parameters(), 0.1) for each in mine}
        options = {"optimizers": optimizers} | options
    pipeline(own, model, **options).step(*batch(other, 0), plan=other)


def plan_of(name: str, **params: int) -> Plan:
    return program(name, ranks=2, **params)


#: What a step is refused, each with the plan of the pipeline, that of the step, and options.
REFUSED: dict[str, tuple[Plan, Plan, dict[str, Any], str]] = {
    "a layout": (
        plan_of("1f1b", microbatches=4),
        plan_of("zb_v", microbatches=4),
        {},
        "has other placement than that of the pipeline",
    ),
    "forwards": (
        plan_of("1f1b", microbatches=4),
        plan_of("forward_only", microbatches=4),
        {},
        "has forwards alone and cannot train",
    ),
    "a transport": (
        plan_of("1f1b", microbatches=4),
        evolve(plan_of("1f1b", microbatches=4), transport="gloo"),
        {},
        "is proved for `gloo`, and that of the pipeline for `portable`",
    ),
    "a type of messages": (
        plan_of("1f1b", microbatches=4),
        program_with("1f1b", "send bf16", ranks=2, microbatches=4),
        {},
        "rounds messages to bf16, and that of the pipeline to no type",
    ),
    "a part": (
        plan_of("1f1b", microbatches=4),
        plan_of("zb_h1", microbatches=4),
        {},
        "has backwards in two halves (`I` and `W`) on stage",
    ),
    "versions": (
        plan_of("pipedream_2bw", microbatches=4),
        plan_of("pipedream_2bw", microbatches=6),
        {},
        "reads older versions of its weights",
    ),
    "audit": (
        plan_of("1f1b", microbatches=4),
        plan_of("1f1b", microbatches=3),
        {"audit": True},
        "give `step` no other `plan`",
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("what", REFUSED)
def test_a_step_refuses_a_plan_that_is_not_of_its_pipeline(
    what: str, run_ranks: Run
) -> None:
    own, other, options, message = REFUSED[what]
    run = run_ranks(partial(refused, own, other, options), 2)
    assert run.codes == [1, 1]
    assert any(message in log for log in run.logs), run.logs


@pytest.mark.core
@pytest.mark.parametrize("name", ["zb_v", "pipedream_2bw", "forward_only"])
def test_a_plan_has_plans_of_its_program_for_other_numbers(
    name: str, tmp_path: Any
) -> None:
    params = {"ranks": 2, "microbatches": 4}
    plan = compile(name, params, transport="nccl")
    write_plan(plan, tmp_path / "plan.json")
    for own in (
        plan,
        read_plan(tmp_path / "plan.json"),
        open_plan(tmp_path / "plan.json"),
    ):
        other = own.for_microbatches(6)
        expected = compile(name, params | {"microbatches": 6}, transport="nccl")
        assert other.to_json() == expected.to_json()
        assert own.for_microbatches(6) is other
        assert own.for_microbatches(4) is own
        assert other.for_microbatches(4).to_json() == plan.to_json()


def takes_a_number_that_a_claim_is_not_of() -> float:
    own = program("interleaved_1f1b", ranks=2, microbatches=4, least=1)
    ours = pipeline(own, replicated(own))
    with pytest.warns(UserWarning, match="a claim does not hold"):
        plans = [own.for_microbatches(count) for count in (3, 5, 7)]
    return max(differences(ours, own, plans, one_model(own.layout)))


@pytest.mark.processes
def test_a_claim_of_another_number_is_a_warning(run_ranks: Run) -> None:
    run = run_ranks(takes_a_number_that_a_claim_is_not_of, 2)
    assert max(run.results()) < 1e-12


@pytest.mark.core
def test_numbers_that_a_program_does_not_take() -> None:
    plan = compile("gems", {"ranks": 2, "microbatches": 4})
    with pytest.raises(CompileError, match="the two pipelines run half"):
        plan.for_microbatches(3)
    with pytest.raises(ValueError, match="`microbatches` is 0"):
        plan.for_microbatches(0)
    # A table of torch has no parameters.
    with pytest.raises(ValueError, match="of no program with a parameter"):
        evolve(plan, params={}).for_microbatches(2)
