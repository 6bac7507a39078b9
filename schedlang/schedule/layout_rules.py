"""The rules that a layout keeps: which placements, pipelines, edges and frozen stages are possible.

A program, a script and a plan file give a layout each in its own way. The rules stand here, once:
what is wrong is data, and who was given the layout says where that is: at a line of the program, in
an argument, or in a field of the file.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from typing import TYPE_CHECKING

from schedlang.diagnostics.diagnostic import counted
from schedlang.on_demand import on_demand
from schedlang.schedule.layout import Layout
from schedlang.schedule.wrong_layout import WrongLayout

if TYPE_CHECKING:
    from schedlang.schedule.edge_rules import wrong_edges
else:
    # For layouts with edges or skips.
    wrong_edges = on_demand("schedlang.schedule.edge_rules.wrong_edges")

#: The name of a pipeline among several: alone, or with a number.
_NAME = re.compile(r"[A-Za-z_]\w*(\(\d+\))?")


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
    """The rules of edges and skips, where there are some."""
    if layout.edges or layout.skips:
        yield from wrong_edges(layout)


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
    _frozen,
    _of_ranks,
    _every_rank,
)
