"""The report at the end of a training."""

import os
from collections.abc import Mapping
from math import isnan

from schedlang.diagnostics.diagnostic import counted
from schedlang.examples.demo.training import Training
from schedlang.examples.demo.workload import ROWS, Workload
from schedlang.extras.measured import Run, comparison_text
from schedlang.extras.measured import compare as compare_run

#: By the type of messages, the largest relative difference that another order of the same float32
#: additions explains. Where messages are rounded, it may let a number be rounded to its neighbour.
TOLERANCES = {"": 1e-5, "bf16": 2**-8, "fp16": 2**-11}


def print_header(workload: Workload) -> None:
    """Print what is about to run."""
    plan = workload.plan
    weights = sum(
        weight.numel() for layer in workload.layers() for weight in layer.parameters()
    )
    replicas = f", replicas {workload.replicas}" if workload.replicas > 1 else ""
    sizes = (
        f"ranks {len(plan.ranks)}, stages {len(plan.placement)}, microbatches "
        f"{plan.microbatches}{replicas}"
    )
    does = "evaluates" if plan.is_forward_only else "trains"
    how = ""
    if not plan.is_forward_only:
        how = f", {workload.recipe.text(plan)}"
    most = sum(workload.of_models.values()) * ROWS * workload.context
    bytes = f"{most:,} bytes per step"
    if workload.unequal:
        bytes = f"up to {bytes}, in microbatches of unequal lengths"
    print(
        f"{plan.name} ({sizes}) {does} a GPT of {weights:,} parameters on {bytes}{how}",
        flush=True,
    )


def report(
    workload: Workload, run: Run, trainings: list[Training]
) -> dict[str, object]:
    """Print where the time went; the figures for machines. `trainings` are those of all ranks."""
    found = compare_run(run.plan, run)
    print(f"\n{comparison_text(found)}")
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    if cores < len(trainings) and workload.device.type == "cpu":
        print(
            f"\n{len(trainings)} ranks share {cores} cores: ops take longer when ranks work at "
            "once, so this is no"
        )
        print("measurement of the schedule")
    writer = trainings[workload.writer]
    print(f"\n{writer.report}")
    # The first step also pays for what torch sets up once.
    seconds = writer.seconds[1:] or writer.seconds
    steps = writer.first + len(writer.losses)
    tokens = sum(map(workload.tokens, range(steps - len(seconds), steps)))
    loss = total_losses(trainings)[-1]
    speed = tokens / sum(seconds)
    print(f"\n{counted(steps, 'step')}, a loss of {loss:.4f}, {speed:,.0f} tokens/s")
    return {
        "steps": steps,
        "loss": loss,
        "tokens_per_second": speed,
        "predicted_idle": found.predicted.idle,
        "measured_idle": found.measured.idle,
        "report": writer.report,
    }


def total_losses(trainings: list[Training]) -> list[float]:
    """The mean loss of each step, to which the ranks of all last stages add."""
    return [
        sum(parts)
        for parts in zip(
            *(training.losses for training in trainings if training.losses), strict=True
        )
    ]


def compare(
    trainings: list[Training],
    losses: list[float],
    reference: Training,
    message_type: str = "",
) -> dict[str, float]:
    """Print whether this is the training of the reference run, where messages have a type, and the
    largest differences, relative to its figures; and give these.
    """
    last = reference.losses[-len(losses) :]
    loss_error = max(
        abs(ours - other) / abs(other) for ours, other in zip(losses, last, strict=True)
    )
    ours = {
        name: gradient
        for training in trainings
        for name, gradient in training.gradients.items()
    }
    assert ours.keys() == reference.gradients.keys()
    errors = {
        name: float((ours[name] - other).abs().max() / other.abs().max())
        for name, other in reference.gradients.items()
    }
    figures = {"loss_error": loss_error}
    largest = f"over {counted(len(losses), 'step')} of a loss {loss_error:.1e}"
    # An evaluation has none.
    if errors:
        worst = max(errors, key=lambda name: (isnan(errors[name]), errors[name]))
        figures["gradient_error"] = errors[worst]
        largest += (
            f", of {counted(len(errors), 'gradient')} {errors[worst]:.1e} (`{worst}`)"
        )
    what = "training" if errors else "evaluation"
    if is_rounding(figures, message_type):
        print(f"\nright: this is the same {what} as in one process, but for rounding")
    else:
        print(f"\nwrong: this is not the same {what} as in one process")
    tolerance = TOLERANCES[message_type]
    print(
        f"largest difference {largest}; up to {tolerance:.0e} is rounding", flush=True
    )
    return figures


def is_rounding(differences: Mapping[str, float], message_type: str = "") -> bool:
    """Whether another order of the same additions explains all of these; NaN it does not."""
    tolerance = TOLERANCES[message_type]
    return all(each <= tolerance for each in differences.values())
