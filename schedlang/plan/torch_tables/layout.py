"""Which stages and microbatches a table has, and on which rank each stage is: what its cells say of
it.
"""

from collections.abc import Iterator
from itertools import count

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.schedule.actions import Actions, is_transfer
from schedlang.schedule.layout import Layout, Pipeline


def find_layout(source: Source, spans: list[Span], ranks: list[Actions]) -> Layout:
    """The layout of a table with these actions; CompileError where its cells contradict each
    other.
    """
    #: Where each stage and microbatch is first computed: the place, and for a stage the rank.
    stages: dict[int, tuple[int, int]] = {}
    microbatches: dict[int, int] = {}
    elsewhere: dict[int, tuple[int, int]] = {}
    for rank, actions in enumerate(ranks):
        for kind, stage, microbatch, place, _ in map(actions.row, range(len(actions))):
            if not is_transfer(kind):
                microbatches.setdefault(microbatch, place)
                if stages.setdefault(stage, (place, rank))[1] != rank:
                    elsewhere.setdefault(stage, (place, rank))
    if not stages:
        raise CompileError(
            [Diagnostic("placement", "no cell computes anything", (Label(Span(0, 0)),), source)]
        )
    found: list[Diagnostic] = []
    for stage, (place, rank) in elsewhere.items():
        first, holder = stages[stage]
        message = f"stage {stage} is computed on rank {rank}, and on rank {holder}"
        found.append(_contradiction(source, spans, message, (place, ""), (first, "first here")))
    found += _gap(source, spans, "stage", {stage: place for stage, (place, _) in stages.items()})
    found += _gap(source, spans, "microbatch", microbatches)
    if found:
        raise CompileError(found)
    placement = tuple(stages[stage][1] for stage in range(len(stages)))
    return Layout(placement, (Pipeline("", 0, len(stages), len(microbatches)),))


def _gap(
    source: Source, spans: list[Span], noun: str, places: dict[int, int]
) -> Iterator[Diagnostic]:
    """The first number that no cell computes, if there are higher ones."""
    absent = next(number for number in count() if number not in places)
    highest = max(places)
    if absent < highest:
        place = (places[highest], f"the first of {noun} {highest}")
        yield _contradiction(source, spans, f"no cell computes {noun} {absent}", place)


def _contradiction(
    source: Source, spans: list[Span], message: str, *places: tuple[int, str]
) -> Diagnostic:
    labels = tuple(Label(spans[place], text) for place, text in places)
    return Diagnostic("placement", message, labels, source)
