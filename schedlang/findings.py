"""What the checks find in a schedule, and its way to the user: one mistake in a loop is one diagnostic."""

from attrs import frozen

from schedlang.diagnostics import Diagnostic, Label
from schedlang.schedule import Schedule
from schedlang.waits import Wait


@frozen
class Finding:
    """Something wrong with one action of one rank; places are indices into the schedule's spans.

    What is wrong with ranks that wait is said by their `waits`, in place of the label and the related ones.
    """

    code: str
    message: str
    rank: int
    place: int = 0
    label: str = ""
    related: tuple[tuple[int, str], ...] = ()
    help: str | None = None
    waits: tuple[Wait, ...] = ()


def diagnose(schedule: Schedule, findings: list[Finding]) -> list[Diagnostic]:
    """One diagnostic for each code and place, with the number of actions and the ranks that it stands for."""
    groups: dict[tuple[str, int], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.code, finding.place), []).append(finding)
    return [_diagnostic(schedule, group) for group in groups.values()]


def _diagnostic(schedule: Schedule, group: list[Finding]) -> Diagnostic:
    first = group[0]
    places = ((first.place, first.label), *first.related)
    labels = [Label(schedule.spans[place], text) for place, text in places if place < len(schedule.spans)]
    notes: tuple[str, ...] = ()
    if len(group) > 1:
        notes = (f"and {len(group) - 1} more, on {ranks_text(sorted({each.rank for each in group}))}",)
    return Diagnostic(
        first.code,
        first.message,
        tuple([label for wait in first.waits for label in wait.labels()] or labels),
        schedule.source,
        notes,
        first.help,
        schedule.source.path,
        first.waits,
    )


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
