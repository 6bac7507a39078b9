"""Whether ranks have room for what they hold."""

from math import inf

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.proof.execution import Execution
from schedlang.ranks.weight_versions import bytes_of_weights
from schedlang.schedule.findings import Finding, diagnose

#: Sums of bytes that are not whole may be rounded by this part of them.
_ROUNDING = 1e-12
_HELP = (
    "hold less: fewer microbatches in flight, `recompute`, `offload`, another number of ranks; or "
    "say that there is more, with `capacity` or `--capacity-bytes`"
)


def check_capacity(execution: Execution) -> None:
    """CompileError where a rank's peak, of activations, messages and weights, is more than its
    capacity; the rank with the least room first.
    """
    full = fullness(execution)
    if full is None or max(full) <= 1 + _ROUNDING:
        return
    schedule = execution.schedule
    capacities = execution.costs.capacities(len(full))
    weights = bytes_of_weights(schedule, execution.costs)
    assert capacities is not None
    assert execution.peak_bytes is not None
    findings = []
    for rank in sorted(range(len(full)), key=lambda rank: -full[rank]):
        if full[rank] > 1 + _ROUNDING:
            message = (
                f"rank {rank} holds {execution.peak_bytes[rank]:,.0f} bytes at its peak, of which "
                f"{weights[rank]:,.0f} are weights; its capacity is {capacities[rank]:,.0f}"
            )
            findings.append(Finding("capacity", message, rank, help=_HELP))
    raise CompileError(diagnose(schedule, findings))


def fullness(execution: Execution) -> list[float] | None:
    """For each rank its peak bytes as a part of its capacity; None where either is not known."""
    capacities = execution.costs.capacities(len(execution.schedule.ranks))
    peaks = execution.peak_bytes
    if capacities is None or peaks is None:
        return None
    return [
        _part(peak, capacity) for peak, capacity in zip(peaks, capacities, strict=True)
    ]


def _part(peak: float, capacity: float) -> float:
    """A peak as a part of a capacity. Without any room, nothing fits but nothing."""
    if capacity:
        return peak / capacity
    return inf if peak else 0.0
