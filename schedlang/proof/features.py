"""What a schedule may have beside forwards, backwards and messages: one row for each feature.

A row says which schedules have the feature, and which file of this folder knows about it. The file
is imported for these schedules alone. It has some of these functions:

    wrong_structure(schedule)    what the structure of the schedule lacks, or has twice
    wrong_plan(schedule)         what a plan must not have, though a program may
    wrong_reads(schedule)        which ops read other weights than they should
    place(threads)               puts events of the feature into the event graph

Where several features are wrong, the first row is told. The functions of a moment run in the order
of the rows.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from attrs import frozen

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.on_demand import on_demand
from schedlang.schedule.costs import Costs
from schedlang.schedule.kinds import BETWEEN, MEETS
from schedlang.schedule.schedule import Schedule

if TYPE_CHECKING:
    from schedlang.schedule.findings import diagnose
else:
    # For schedules that are wrong.
    diagnose = on_demand("schedlang.schedule.findings.diagnose")


@frozen
class Feature:
    """A row: whether a schedule has the feature at some costs, and the file that knows about it."""

    file: str
    is_in: Callable[[Schedule, Costs], object]


FEATURES = (
    # Optimizer steps in the schedule, and rules for which version of the weights an op reads.
    Feature(
        "optimizer_steps",
        lambda schedule, costs: (
            schedule.has_updates or schedule.weights or schedule.layout.updates > 1
        ),
    ),
    # Stages whose weights do not change.
    Feature("frozen_stages", lambda schedule, costs: schedule.layout.frozen),
    # Pipelines that run ahead of others.
    Feature("pipelines_ahead", lambda schedule, costs: schedule.layout.handovers),
    # Ops on streams of their own that meet no other rank, such as copies to the host.
    Feature("background_ops", lambda schedule, costs: schedule.columns.is_beside.any()),
    # Gathers of weights and sums of gradients that take time, and that no program writes.
    Feature(
        "unwritten_collectives",
        lambda schedule, costs: costs.sum_times or costs.gather_times,
    ),
    # Exchanges of what a stage takes from a neighbour of its rank.
    Feature(
        "exchange_pairs", lambda schedule, costs: len(schedule.columns.where(*BETWEEN))
    ),
    # Ops that meet others, which the program writes: gathers, sums, hops and exchanges.
    Feature(
        "collectives",
        lambda schedule, costs: (
            schedule.columns.is_collective.any() or len(schedule.columns.where(*MEETS))
        ),
    ),
)


def functions(
    name: str, schedule: Schedule, costs: Costs
) -> Iterator[Callable[..., Any]]:
    """The functions with a name, from the files of the features that a schedule has."""
    for feature in FEATURES:
        if feature.is_in(schedule, costs):
            file = import_module(f"schedlang.proof.{feature.file}")
            if hasattr(file, name):
                yield getattr(file, name)


def check(name: str, schedule: Schedule) -> None:
    """CompileError with the findings of the first feature that has any."""
    for find in functions(name, schedule, schedule.costs):
        findings = list(find(schedule))
        if findings:
            raise CompileError(diagnose(schedule, findings))
