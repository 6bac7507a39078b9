"""Faults that ranks have met, as diagnostics."""

from collections.abc import Iterable

from attrs import frozen

from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.language.faults import Fault
from schedlang.schedule.findings import ranks_text


@frozen
class Met:
    """A fault, the rank that made it, and the values of its names there."""

    fault: Fault
    rank: int | None
    values: str


def diagnostics(
    source: Source, spans: tuple[Span, ...], met: Iterable[Met]
) -> list[Diagnostic]:
    """Faults as diagnostics; one mistake met on several ranks is one diagnostic."""
    groups: dict[tuple[str, int], list[Met]] = {}
    for each in met:
        groups.setdefault((each.fault.code, each.fault.location), []).append(each)
    return [_diagnostic(source, spans, group) for group in groups.values()]


def _diagnostic(
    source: Source, spans: tuple[Span, ...], group: list[Met]
) -> Diagnostic:
    """The diagnostic for a mistake, with the values of names on the first rank that made it."""
    fault = group[0].fault
    notes = [f"here with {group[0].values}"] if group[0].values else []
    if len(group) > 1:
        others = [met.rank for met in group[1:] if met.rank is not None]
        notes.append(f"and on {ranks_text(others)}")
    labels = {fault.location: "", **fault.labels}
    places = tuple(Label(spans[location], text) for location, text in labels.items())
    return Diagnostic(
        fault.code, fault.message, places, source, tuple(notes), fault.help
    )
