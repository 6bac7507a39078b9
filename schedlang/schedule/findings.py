"""What the checks find in a schedule, and its way to the user: one mistake in a loop is one
diagnostic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.source import Label
from schedlang.schedule.schedule import Schedule

if TYPE_CHECKING:
    from schedlang.diagnostics.repair import Edit
    from schedlang.diagnostics.waiting_ranks import Wait


@frozen
class Finding:
    """Something wrong with one action of one rank; places are indices into the schedule's spans.

    What is wrong with ranks that wait is said by their `waits`, in place of the label and the
    related ones. `numbers` are those of the stages or far edges of transfers that the texts name.
    The finding is the first of `times` that are alike. A claim about all of a schedule has no rank.
    `edits` change the program so that this, and what is found at the same place, is right.
    """

    code: str
    message: str
    rank: int | None
    place: int = 0
    label: str = ""
    related: tuple[tuple[int, str], ...] = ()
    help: str | None = None
    waits: tuple[Wait, ...] = ()
    numbers: tuple[int, ...] = ()
    times: int = 1
    edits: tuple[Edit, ...] = ()


def here(schedule: Schedule, row: int) -> str:
    """An action and its rank, as messages name it."""
    rank, index = schedule.columns.place(row)
    return f"`{schedule.name_of(rank, index)}` on rank {rank}"


def amiss(
    schedule: Schedule, code: str, row: int, message: str, help: str | None = None
) -> Finding:
    """What is wrong with an action, by its row in the schedule's columns."""
    columns = schedule.columns
    rank = int(columns.rank[row])
    return Finding(code, message, rank, int(columns.source[row]), help=help)


def diagnose(schedule: Schedule, findings: list[Finding]) -> list[Diagnostic]:
    """One diagnostic for each code and place, with the number of actions and the ranks that it
    stands for.
    """
    groups: dict[tuple[str, int], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.place), []).append(finding)
    return [_diagnostic(schedule, group) for group in groups.values()]


def _diagnostic(schedule: Schedule, group: list[Finding]) -> Diagnostic:
    first = group[0]
    labels = [label for wait in first.waits for label in wait.labels()]
    if not labels:
        places = ((first.place, first.label), *first.related)
        labels = [
            Label(schedule.spans[place], text)
            for place, text in places
            if place < len(schedule.spans)
        ]
    notes = _far_edges(schedule, first)
    more = sum(finding.times for finding in group) - 1
    ranks = sorted({finding.rank for finding in group if finding.rank is not None})
    if more:
        notes = (*notes, f"and {more} more, on {ranks_text(ranks)}")
    return Diagnostic(
        first.code,
        first.message,
        tuple(labels),
        schedule.source,
        notes,
        first.help,
        schedule.source.path,
        first.waits,
        edits=first.edits,
        ranks=tuple(ranks),
    )


def _far_edges(schedule: Schedule, finding: Finding) -> tuple[str, ...]:
    """What the numbers of far edges mean that a finding names, since they look like those of
    stages.
    """
    named = set(finding.numbers)
    for wait in finding.waits:
        named.update(wait.numbers())
    numbers = [number for number in schedule.layout.far_edges if number in named]
    return tuple(edge_text(schedule, number) for number in numbers)


def edge_text(schedule: Schedule, number: int) -> str:
    """What a far edge's number stands for."""
    earlier, later = schedule.layout.far_edges[number]
    names = schedule.names
    what = "skip" if schedule.layout.is_skip(number) else "edge"
    return f"{number} is the {what} from stage {names.stage(earlier)} to stage {names.stage(later)}"


def ranks_text(ranks: list[int]) -> str:
    """Sorted ranks as people write them: `rank 2`, `ranks 0-3, 6`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"
