"""The rules that the edges and skips of a layout keep."""

from collections.abc import Iterator, Sequence
from itertools import chain

from schedlang.diagnostics.diagnostic import counted
from schedlang.schedule.layout import Layout
from schedlang.schedule.wrong_layout import WrongLayout

#: What to do about an edge between models with different numbers of microbatches.
_SHARED_STAGES = (
    "let both run as many; replicas of an encoder that share the microbatches of one decoder are "
    "pipelines, whose decoder stages are on the same ranks: `pipeline lane(i) in 0 .. 2 runs "
    "microbatches / 2 stage s in 0 .. 3 on if s == 0 then i else s + 1`"
)


def wrong_edges(layout: Layout) -> Iterator[WrongLayout]:
    """What is wrong with the edges and skips of a layout."""
    # In order: each takes for granted what those before it ask for.
    return chain.from_iterable(
        rule(layout) for rule in (_edges, _handovers, _microbatches_of_edges)
    )


def _edges(layout: Layout) -> Iterator[WrongLayout]:
    """Edges and skips lead forward, each once, and a skip does not lead to the next stage."""
    known = set[tuple[int, int]]()
    yield from _wrong_pairs(layout, "edge", layout.edges, known)
    yield from _wrong_pairs(layout, "skip", layout.skips, known)


def _wrong_pairs(
    layout: Layout,
    code: str,
    pairs: Sequence[tuple[int, int]],
    known: set[tuple[int, int]],
) -> Iterator[WrongLayout]:
    """What is wrong with edges, or with skips, by the word for them; `known` are those before."""
    for item, ends in enumerate(pairs):
        handed_over = layout.handovers.get(ends[1]) if code == "edge" else None
        wrong = None if handed_over == ends[0] else _wrong_ends(layout, *ends)
        if handed_over not in (None, ends[0]):
            wrong = (
                f"leads to where that from stage {handed_over} hands microbatches over"
            )
        if not wrong and code == "skip" and _is_next(layout, *ends):
            wrong = "leads to the next stage, which gets what that one makes anyway"
        if ends in known:
            wrong = "is there already"
        known.add(ends)
        if wrong:
            message = f"the {code} from stage {ends[0]} to stage {ends[1]} {wrong}"
            yield WrongLayout(code, f"{code}s", message, item)


def _wrong_ends(layout: Layout, earlier: int, later: int) -> str | None:
    """What is wrong with the stages that an edge joins."""
    stages = layout.pieces
    if not 0 <= earlier < stages or not 0 <= later < stages:
        return f"leads to no stage: there are stages 0 to {stages - 1}"
    first = layout.pipeline_of[earlier]
    second = layout.pipeline_of[later]
    if later <= earlier and first != second:
        return (
            f"leads back from `{first.name}` to `{second.name}`, which is declared before it: "
            f"declare `{first.name}` first"
        )
    if later <= earlier:
        return "does not lead forward"
    return None


def _handovers(layout: Layout) -> Iterator[WrongLayout]:
    """An edge to another pipeline of the model leads to the next piece of the model. A pipeline
    that runs ahead hands all of its stages over to one pipeline, which does not run ahead.
    """
    others = {
        "edges of a stage graph": layout.graph,
        "skips": layout.skips,
        "slices": layout.slices > 1,
    }
    given = [name for name, is_there in others.items() if is_there]
    for item, (earlier, later) in enumerate(layout.edges):
        if layout.handovers.get(later) != earlier:
            continue
        first = layout.pipeline_of[earlier]
        second = layout.pipeline_of[later]
        wrong = ""
        if layout.piece(later) != layout.piece(earlier) + 1:
            wrong = "must lead to the next stage there"
        elif later > earlier:
            wrong = f"must lead back to it: declare `{second.name}` first"
        elif layout.follower(second) is not None:
            wrong = f"cannot be: `{second.name}` hands its own microbatches over"
        elif layout.follower(first) != second:
            wrong = f"cannot be: `{first.name}` hands over to two pipelines"
        elif first.stop - 1 not in layout.handovers.values():
            wrong = f"must have others beside it: `{first.name}` hands over its last stage, too"
        elif given:
            wrong = f"does not go together with {given[0]} yet"
        if wrong:
            message = (
                f"the edge from stage {earlier} to stage {later} hands microbatches of "
                f"`{first.name}` over to `{second.name}`, and {wrong}"
            )
            yield WrongLayout("edge", "edges", message, item)


def _microbatches_of_edges(layout: Layout) -> Iterator[WrongLayout]:
    """Edges and skips join stages of pipelines that run as many microbatches."""
    yield from _unequal_pairs(layout, "edge", layout.edges)
    yield from _unequal_pairs(layout, "skip", layout.skips)


def _unequal_pairs(
    layout: Layout, code: str, pairs: Sequence[tuple[int, int]]
) -> Iterator[WrongLayout]:
    """Edges, or skips, between pipelines that run different numbers of microbatches."""
    for item, ends in enumerate(pairs):
        first, second = (layout.pipeline_of[stage] for stage in ends)
        if first.microbatches != second.microbatches:
            message = (
                f"the {code} from stage {ends[0]} to stage {ends[1]} leads from the model "
                f"`{first.name}`, which runs {counted(first.microbatches, 'microbatch')}, to "
                f"`{second.name}`, which runs {second.microbatches}"
            )
            yield WrongLayout(code, f"{code}s", message, item, _SHARED_STAGES)


def _is_next(layout: Layout, earlier: int, later: int) -> bool:
    """Whether a stage follows another one in their pipeline."""
    is_same = layout.pipeline_of[earlier] == layout.pipeline_of[later]
    return is_same and later == earlier + 1
