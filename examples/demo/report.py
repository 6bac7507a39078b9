"""The report at the end of a training."""

import os

from schedlang.examples.demo.train import Training
from schedlang.examples.demo.workload import ROWS, Workload
from schedlang.extras.measured import Run, comparison_text
from schedlang.extras.measured import compare as compare_run

#: The largest relative difference that another order of the same float32 additions explains.
TOLERANCE = 1e-5


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
    plan = run.plan
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
    writer = trainings[plan.placement[-1]]
    # The first step also pays for what torch sets up once.
    seconds = writer.seconds[1:] or writer.seconds
    steps = writer.first + len(writer.losses)
    tokens = sum(map(workload.tokens, range(steps - len(seconds), steps)))
    return {
        "steps": steps,
        "loss": total_losses(trainings)[-1],
        "tokens_per_second": tokens / sum(seconds),
        "predicted_idle": found.predicted.idle,
        "measured_idle": found.measured.idle,
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
    trainings: list[Training], losses: list[float], reference: Training
) -> dict[str, float]:
    """Print the largest differences from the reference run, relative to its figures, and give
    them.
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
    print(f"largest difference of the loss, over {len(losses)} steps: {loss_error:.1e}")
    figures = {"loss_error": loss_error}
    # An evaluation has none.
    if errors:
        worst = max(errors, key=lambda name: errors[name])
        print(
            f"largest difference of a gradient, of {len(errors)}: {errors[worst]:.1e} ({worst})"
        )
        figures["gradient_error"] = errors[worst]
    if max(figures.values()) > TOLERANCE:
        print(f"these are not the same training: {TOLERANCE:.0e} would be rounding")
    return figures
