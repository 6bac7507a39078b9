"""Plans that a test writes word by word: each word is a place of its own, which messages underline."""

import re
from collections.abc import Iterator

from attrs import evolve

from schedlang import Actions, CompileError, Kind, Schedule, Source, prove
from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.diagnostics.source import Span
from schedlang.schedule.actions import NO_MICROBATCH
from schedlang.schedule.layout import Layout, Pipeline
from tests.support.strategies import make_schedule

_WORD = re.compile(r"(\d+)([A-Z_]+)(\d*)")
#: Two pipelines of one microbatch: rank 0 holds stages 0 and 3, and rank 1 their replicas 2 and 1.
BOTH_WAYS = Layout((0, 1, 1, 0), (Pipeline("down", 0, 2, 1), Pipeline("up", 2, 4, 1)))


def written(
    *ranks: str,
    placement: tuple[int, ...] = (),
    microbatches: int = 1,
    transport: str = "portable",
    layout: Layout | None = None,
    at_one_place: bool = False,
) -> Schedule:
    """A plan of so many ranks, by default with a stage on each; a layout says all of it. `at_one_place`
    all actions come from the first word, as those of a loop do.
    """
    text = "\n".join(ranks)
    spans = tuple(Span(*word.span()) for word in _WORD.finditer(text))
    places = iter([0] * len(spans) if at_one_place else range(len(spans)))
    actions = tuple(_actions(rank, places) for rank in ranks)
    placement = placement or tuple(range(len(ranks)))
    plan = make_schedule(placement, microbatches, actions)
    return evolve(
        plan,
        layout=layout or plan.layout,
        source=Source("plan", text),
        spans=spans,
        transport=transport,
    )


def _actions(text: str, places: Iterator[int]) -> Actions:
    """Those of a plan file, and waits for sends, which only tables of torch have."""
    actions = Actions()
    for group, token in enumerate(text.split(), start=1):
        for stage, kind, microbatch in _WORD.findall(token):
            of_unit = int(microbatch or NO_MICROBATCH)
            in_group = group if ";" in token else 0
            actions.add(Kind[kind], int(stage), of_unit, next(places), in_group)
    return actions


def wrong(plan: Schedule) -> list[Diagnostic]:
    """All that is wrong with a plan; nothing where it is proved."""
    try:
        prove(plan)
    except CompileError as error:
        return error.diagnostics
    return []


def words(diagnostic: Diagnostic) -> list[str]:
    """The words that a message underlines."""
    assert diagnostic.source is not None
    return [
        diagnostic.source.text[label.span.start : label.span.end]
        for label in diagnostic.labels
    ]


def labels(diagnostic: Diagnostic) -> list[tuple[str, str]]:
    """The words that a message underlines, each with what it says there."""
    texts = [label.text for label in diagnostic.labels]
    return list(zip(words(diagnostic), texts, strict=True))
