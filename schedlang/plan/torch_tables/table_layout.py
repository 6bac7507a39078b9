"""What the cells of a table say of its layout: which stages and microbatches there are, and on
which rank each stage is.
"""

from collections.abc import Iterator
from itertools import count

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.schedule.actions import Actions
from schedlang.schedule.kinds import OPS
from schedlang.schedule.layout import Layout, Pipeline


def find_layout(source: Source, spans: list[Span], ranks: list[Actions]) -> Layout:
    """The layout of a table with these actions; CompileError where its cells contradict each
    other.
    """
    # Where each stage and each microbatch is first computed: the index of the cell's span.
    stage_cells: dict[int, int] = {}
    microbatch_cells: dict[int, int] = {}
    # The rank where each stage is first computed; and another one, if it is computed there too.
    holders: dict[int, int] = {}
    others: dict[int, tuple[int, int]] = {}
    for rank, actions in enumerate(ranks):
        for kind, stage, microbatch, cell, _ in map(actions.row, range(len(actions))):
            if kind not in OPS:
                continue
            stage_cells.setdefault(stage, cell)
            microbatch_cells.setdefault(microbatch, cell)
            if holders.setdefault(stage, rank) != rank:
                others.setdefault(stage, (rank, cell))
    if not holders:
        label = Label(Span(0, 0))
        raise CompileError(
            [Diagnostic("placement", "no cell computes anything", (label,), source)]
        )
    wrong: list[Diagnostic] = []
    for stage, (rank, cell) in others.items():
        message = (
            f"stage {stage} is computed on rank {rank}, and on rank {holders[stage]}"
        )
        first = (stage_cells[stage], "first here")
        wrong.append(_contradiction(source, spans, message, (cell, ""), first))
    wrong += _gap(source, spans, "stage", stage_cells)
    wrong += _gap(source, spans, "microbatch", microbatch_cells)
    if wrong:
        raise CompileError(wrong)
    # There is no gap, so the stages are 0, 1, 2, ...
    placement = tuple(holders[stage] for stage in range(len(holders)))
    pipeline = Pipeline("", 0, len(placement), len(microbatch_cells))
    return Layout(placement, (pipeline,))


def _gap(
    source: Source, spans: list[Span], noun: str, cells: dict[int, int]
) -> Iterator[Diagnostic]:
    """The first number that no cell computes, if a higher one is computed."""
    absent = next(number for number in count() if number not in cells)
    highest = max(cells)
    if absent < highest:
        message = f"no cell computes {noun} {absent}"
        label = (cells[highest], f"the first of {noun} {highest}")
        yield _contradiction(source, spans, message, label)


def _contradiction(
    source: Source, spans: list[Span], message: str, *texts: tuple[int, str]
) -> Diagnostic:
    """A diagnostic about some cells, and what it says at each."""
    labels = tuple(Label(spans[cell], text) for cell, text in texts)
    return Diagnostic("placement", message, labels, source)
