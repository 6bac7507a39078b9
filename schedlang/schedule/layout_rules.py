"""The rules that a layout keeps: which placements, pipelines, edges and frozen stages are possible.

A program, a script and a plan file give a layout each in its own way. The rules stand here, once:
what is wrong is data, and who was given the layout says where that is: at a line of the program, in
an argument, or in a field of the file.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise

from attrs import frozen

from schedlang.diagnostics.diagnostic import counted
from schedlang.schedule.layout import Layout

#: The name of a pipeline among several: alone, or with a number.
_NAME = re.compile(r"[A-Za-z_]\w*(\(\d+\))?")
#: What to do about an edge between models with different numbers of microbatches.
_SHARED_STAGES = (
    "let both run as many; replicas of an encoder that share the microbatches of one decoder are "
    "pipelines, whose decoder stages are on the same ranks: `pipeline lane(i) in 0 .. 2 runs "
    "microbatches / 2 stage s in 0 .. 3 on if s == 0 then i else s + 1`"
)


@frozen
class WrongLayout:
    """A mistake in a field of a layout, or in `microbatches`.

    `item` is the index of the wrong item, or None if no single item is wrong. `code` is that of the
    diagnostic.
    """

    code: str
    field: str
    message: str
    item: int | None = None
    help: str | None = None


def wrong_with(
    layout: Layout, ranks: int, microbatches: int | None = None
) -> WrongLayout | None:
    """The first rule that a layout on so many ranks breaks, or None. `microbatches` is the number
    of microbatches of the model, if it is given apart.
    """
    broken = (wrong for rule in _RULES for wrong in rule(layout, ranks))
    return next(broken, None) or _wrong_share(layout, microbatches)


def without_stage(placement: Sequence[int], ranks: int) -> str | None:
    """The first of so many ranks without a stage, if there is one."""
    held = set(placement)
    idle = ranks - len(held)
    if not idle:
        return None
    # Stages may all be on high ranks, with the idle ones below, so the first gap is looked for.
    first = next(rank for rank in count() if rank not in held)
    others = f", like {counted(idle - 1, 'other rank')}" if idle > 1 else ""
    return f"rank {first} holds no stage{others}"


def _placement(layout: Layout, ranks: int) -> Iterator[WrongLayout]:
    """Every stage is on a rank."""
    if not layout.placement:
        yield WrongLayout("placement", "placement", "there are no stages")
    for stage, rank in enumerate(layout.placement):
        if not 0 <= rank < ranks:
            message = (
                f"stage {stage} is on rank {rank}, there are ranks 0 to {ranks - 1}"
            )
            yield WrongLayout("no-such-rank", "placement", message, stage)


def _every_rank(layout: Layout, ranks: int) -> Iterator[WrongLayout]:
    """Every rank has a stage."""
    idle = without_stage(layout.placement, ranks)
    if idle:
        help = (
            "place a stage on every rank, or let `ranks` be as many as there are in use"
        )
        yield WrongLayout("placement", "placement", idle, help=help)


def _pipelines(layout: Layout, _: int) -> Iterator[WrongLayout]:
    """The pipelines divide the stages among them, and those of one model have as many each."""
    pipelines = layout.pipelines
    # Each starts where the one before stops: the first at 0, and the last stops at the end.
    bounds = [0, *(pipeline.stop for pipeline in pipelines)]
    starts = [*(pipeline.start for pipeline in pipelines), len(layout.placement)]
    if starts != bounds or any(start >= stop for start, stop in pairwise(bounds)):
        message = (
            f"they must divide the {len(layout.placement)} stages among them, in order"
        )
        yield WrongLayout("pipelines", "pipelines", message)
    for item, pipeline in enumerate(pipelines):
        stages = pipeline.stop - pipeline.start
        is_part = stages < pipelines[0].stop and layout.follower(pipeline) is not None
        if stages != pipelines[0].stop and not layout.models and not is_part:
            has = counted(stages, "stage")
            message = f"the pipeline has {has}, the first one has {pipelines[0].stop}"
            help = (
                "pipelines are replicas of one model: cut all alike, or write `model`"
            )
            yield WrongLayout("pipelines", "pipelines", message, item, help)


def _names(layout: Layout, _: int) -> Iterator[WrongLayout]:
    """Several pipelines have a name each."""
    names = [pipeline.name for pipeline in layout.pipelines]
    is_alone = len(names) == 1 and not layout.models
    for item, name in enumerate(names):
        if not _NAME.fullmatch(name) and not (is_alone and not name):
            message = (
                f"the `name` {name!a} must be a word, such as `down` or `lane(1)`; the only "
                "pipeline of a plan may have none, `''`"
            )
            yield WrongLayout("pipelines", "pipelines", message, item)
        if names.count(name) > 1:
            message = f"two have the `name` {name!a}, each must have its own"
            yield WrongLayout("pipelines", "pipelines", message, item)


def _counts(layout: Layout, _: int) -> Iterator[WrongLayout]:
    """There are slices, updates, and microbatches for each update."""
    for field in ("slices", "updates"):
        number = getattr(layout, field)
        if number < 1:
            yield WrongLayout(
                "parameter", field, f"it is {number}, it must be 1 or more"
            )
    for item, pipeline in enumerate(layout.pipelines):
        number = pipeline.microbatches
        if number < 1:
            message = f"the pipeline runs {number} microbatches, it must run 1 or more"
            yield WrongLayout("pipelines", "pipelines", message, item)
        if layout.updates > 1 and number % layout.updates:
            message = (
                f"the pipeline runs {counted(number, 'microbatch')}, which do not divide into "
                f"{layout.updates} `updates`"
            )
            yield WrongLayout("pipelines", "pipelines", message, item)


def _edges(layout: Layout, _: int) -> Iterator[WrongLayout]:
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


def _handovers(layout: Layout, _: int) -> Iterator[WrongLayout]:
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


def _microbatches_of_edges(layout: Layout, _: int) -> Iterator[WrongLayout]:
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


def _frozen(layout: Layout, _: int) -> Iterator[WrongLayout]:
    """Some stages may be frozen, in order, but not all of them."""
    stages = layout.pieces
    for item, stage in enumerate(layout.frozen):
        if not 0 <= stage < stages:
            message = f"there is no stage {stage}, there are stages 0 to {stages - 1}"
            yield WrongLayout("frozen", "frozen", message, item)
    if list(layout.frozen) != sorted(set(layout.frozen)):
        yield WrongLayout("frozen", "frozen", "they must be in order, each once")
    if len(layout.frozen) == stages:
        message = "all stages are frozen, so there is nothing to train"
        help = "leave one out; or leave out the backwards, which makes an inference"
        yield WrongLayout("frozen", "frozen", message, help=help)


def _of_ranks(layout: Layout, ranks: int) -> Iterator[WrongLayout]:
    """Each rank has one link to the host, and one keeper, which is a rank; or none has."""
    for field in ("links", "keepers"):
        numbers = len(getattr(layout, field))
        if numbers not in (0, ranks):
            message = f"there must be one for each rank: {numbers} for {counted(ranks, 'rank')}"
            yield WrongLayout("placement", field, message)
    for rank, link in enumerate(layout.links):
        if link < 0:
            message = f"rank {rank} has the link {link}, links are numbers from 0"
            yield WrongLayout("placement", "links", message, rank)
    for rank, keeper in enumerate(layout.keepers):
        if not 0 <= keeper < ranks:
            message = f"rank {rank} is kept on rank {keeper}, there are ranks 0 to {ranks - 1}"
            yield WrongLayout("no-such-rank", "keepers", message, rank)


def _wrong_share(layout: Layout, microbatches: int | None) -> WrongLayout | None:
    """The pipelines share the microbatches; the first one of several models runs all."""
    if microbatches is None or layout.microbatches == microbatches:
        return None
    who = "the first model runs" if layout.models else "the pipelines run"
    message = (
        f"{who} {layout.microbatches} microbatches, `microbatches` is {microbatches}"
    )
    return WrongLayout("pipelines", "microbatches", message)


#: In order: each takes for granted what those before it ask for.
_RULES: tuple[Callable[[Layout, int], Iterator[WrongLayout]], ...] = (
    _placement,
    _pipelines,
    _counts,
    _names,
    _edges,
    _handovers,
    _microbatches_of_edges,
    _frozen,
    _of_ranks,
    _every_rank,
)
