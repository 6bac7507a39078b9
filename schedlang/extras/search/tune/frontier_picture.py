"""The time of a step against the memory of a rank: what was simulated, and its frontier."""

from math import inf

from schedlang.extras.plots.plot_rows import Axis, Chart, Form, Limit, Row, bytes_axis
from schedlang.extras.search.tune.candidates import Training
from schedlang.extras.search.tune.tuning import Result, Tuning
from schedlang.extras.search.tune.tuning_text import (
    Units,
    command_of,
    gigabytes,
    name_of,
)

#: Results slower than the fastest by more than this factor are left out.
_SLOWEST = 2.5
#: So are those that hold more than this factor of the memory that there is.
_FULLEST = 1.5


def check_bytes(training: Training) -> None:
    """ValueError where the costs do not say how many bytes are held."""
    if all(layers.costs.bytes(layers.count) is None for layers in training.layers):
        raise ValueError(
            "the picture is of bytes, which the costs do not have: add `activation_bytes` and "
            "`weights_bytes`"
        )


def frontier_chart(tuning: Tuning, units: Units, transport: str) -> Chart:
    """The chart of what a search has simulated."""
    training = tuning.training
    slowest = _SLOWEST * tuning.frontier[0].time
    most = _FULLEST * training.memory
    on_frontier = set(map(id, tuning.frontier))
    rows = [
        _row(result, id(result) in on_frontier, transport)
        for result in tuning.results
        if result.time <= slowest and result.bytes <= most
    ]
    unit = "s" if units.seconds else "in the unit of the costs"
    limit = None
    if training.memory < inf:
        limit = Limit(training.memory, gigabytes(training.memory))
    return Chart(
        title=f"{training.ranks} ranks, a batch of {training.batch}: step time against memory",
        form=Form.POINTS,
        x=bytes_axis("bytes", [row["bytes"] for row in rows]),
        y=Axis("step", f"step, {unit}"),
        rows=rows,
        series="program",
        limit=limit,
    )


def _row(result: Result, is_frontier: bool, transport: str) -> Row:
    """A result as a row."""
    candidate = result.candidate
    size = candidate.size
    return {
        "program": name_of(candidate),
        "replicas": size.replicas,
        "ranks": size.ranks,
        "microbatches": size.microbatches,
        "samples": size.samples,
        "bytes": result.bytes,
        "step": result.time,
        "idle": result.idle,
        "frontier": is_frontier,
        "command": command_of(candidate, transport, None, "plan.json"),
    }
