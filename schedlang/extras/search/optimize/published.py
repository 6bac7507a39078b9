"""Orders from published schedules: the programs of the gallery in all sizes that have the problem's
layout, and their orders after the passes, at the problem's costs and limits.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from time import monotonic

from attrs import evolve

from schedlang.compiler import ops_of
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.files.programs import names
from schedlang.files.sources import source_of
from schedlang.language import syntax
from schedlang.language.declarations import Unfinished, declare
from schedlang.language.faults import Fault
from schedlang.language.loading import load
from schedlang.language.trees import with_items
from schedlang.passes.fill import fill_within
from schedlang.passes.op_graph import Graph, Orders
from schedlang.passes.reorder import reorder
from schedlang.schedule.kinds import INPUT_HALVES, MAKERS, Kind
from schedlang.schedule.layout import Layout
from schedlang.schedule.schedule import Schedule

#: Passes that change which ops there are.
_OTHER_OPS = ("recompute", "gather")


def from_gallery(problem: Problem, known: Answer, seconds: float) -> Iterator[Answer]:
    """See `Solver`: the orders of published schedules, as they are and after the passes. It proves
    no bound.
    """
    deadline = monotonic() + seconds
    answer = known
    candidates: list[tuple[str, Orders]] = []
    for name, orders in published(problem):
        # With one stage on each rank, many programs have the same orders.
        if all(orders != other for _, other in candidates):
            candidates.append((name, orders))
        if monotonic() >= deadline:
            break
    # Passes take most of the time, so orders with a low objective come first, even if they exceed
    # the memory: passes often keep the objective while they lower the memory.
    candidates.sort(key=lambda candidate: problem.value_at_any_memory(candidate[1]))
    for name, orders in candidates:
        for changed in passed(problem, orders):
            value = problem.value(changed)
            if value < answer.value:
                answer = evolve(
                    answer, orders=changed, value=value, source=f"from {name}"
                )
                yield answer
            if answer.is_best or monotonic() >= deadline:
                return


def published(problem: Problem) -> Iterator[tuple[str, Orders]]:
    """The orders in which programs of the gallery run a problem's ops, each with the program's name
    and parameters. They may exceed the problem's memory.

    If only the problem has whole backwards, one stands in place of the program's input gradient. If
    only the program has them, both halves stand in place of the whole backward.
    """
    layout = problem.graph.schedule.layout
    for name in names():
        source, tree = load(source_of(name))
        if not _is_for_steps(tree):
            continue
        # They rely on the program's own costs and limits.
        left_out = (syntax.Pass, syntax.Assert)
        items = [item for item in tree.items if not isinstance(item, left_out)]
        bare = with_items(tree, items)
        for params in _sizes(bare, layout):
            try:
                if not _is_laid_out(bare, params, layout):
                    continue
                schedule = ops_of(source, bare, params)
            except CompileError:
                # The program has no such size.
                continue
            orders = _translated(problem.graph, schedule)
            if orders is not None:
                shape = ", ".join(f"{word} = {value}" for word, value in params.items())
                yield f"{name} ({shape})", orders


def _is_for_steps(tree: syntax.Schedule) -> bool:
    """Whether a program is a step with a flush, without recomputation or gathers."""
    passes = {item.name for item in tree.items if isinstance(item, syntax.Pass)}
    if passes.intersection(_OTHER_OPS):
        return False
    return not any(isinstance(item, syntax.Weights) for item in tree.items)


def _sizes(tree: syntax.Schedule, layout: Layout) -> Iterator[dict[str, int]]:
    """Parameters with which a program might have this layout."""
    known = {item.name.text for item in tree.items if isinstance(item, syntax.Param)}
    ranks = max(layout.placement) + 1
    microbatches = sum(pipeline.microbatches for pipeline in layout.pipelines)
    if not {"ranks", "microbatches"} <= known:
        return
    chunks = max(len(layout.stages_of(rank)) for rank in range(ranks))
    choices = {
        "ranks": [ranks],
        "microbatches": [microbatches],
        "chunks": [chunks],
        "waves": [max(chunks // 2, 1)],
        "slices": [layout.slices],
        # With groups of fewer microbatches than half of the ranks, ranks would always idle.
        "group": [size for size in range(ranks // 2, ranks + 1) if size],
        # Any amount, since the problem has its own limit.
        "memory": [microbatches * chunks],
    }
    mine = {word: values for word, values in choices.items() if word in known}
    for values in product(*mine.values()):
        yield dict(zip(mine, values, strict=True))


def _is_laid_out(
    tree: syntax.Schedule, params: Mapping[str, int], layout: Layout
) -> bool:
    """Whether a program has this layout: placement, pipelines and slices."""
    try:
        theirs = declare(tree, params).layout()
    except (Fault, Unfinished):
        return False
    stretches = [(pipeline.start, pipeline.stop) for pipeline in theirs.pipelines]
    mine = [(pipeline.start, pipeline.stop) for pipeline in layout.pipelines]
    return (theirs.placement, stretches, theirs.slices) == (
        layout.placement,
        mine,
        layout.slices,
    )


def _translated(graph: Graph, schedule: Schedule) -> Orders | None:
    """The orders of a schedule as nodes of a graph; None if the schedule lacks some node."""
    nodes = {op: node for node, ops in enumerate(graph.ops) for op in ops}
    # A whole backward may stand for its halves, and a half for the whole.
    all_backwards = (*MAKERS[Kind.B], Kind.W)
    has_weights = any(Kind.W in actions.kind for actions in schedule.ranks)
    stands_for = dict.fromkeys(MAKERS[Kind.B], all_backwards)
    if has_weights:
        stands_for |= dict.fromkeys(INPUT_HALVES, MAKERS[Kind.B])
    orders: Orders = []
    for actions in schedule.ranks:
        # Overlapped ops are one node, which stands at the place of the first op.
        order: dict[int, None] = {}
        for index in range(len(actions)):
            kind, stage, microbatch = actions.at(index)
            for op in stands_for.get(Kind(kind), (kind,)):
                node = nodes.get((op, stage, microbatch))
                if node is not None:
                    order[node] = None
        orders.append(list(order))
    return orders if sum(map(len, orders)) == len(graph.ops) else None


def passed(problem: Problem, orders: Orders) -> Iterator[Orders]:
    """These orders, and then their orders after the passes, at a problem's costs and limits. Each
    is computed when the caller asks for it, since passes are slow.
    """
    yield orders
    # Passes raise a CompileError for orders that deadlock.
    with suppress(CompileError):
        for schedule in _passed(problem, orders):
            changed = _translated(problem.graph, schedule)
            assert changed is not None
            yield changed


def _passed(problem: Problem, orders: Orders) -> Iterator[Schedule]:
    """The schedules that the passes make from these orders."""
    given = problem.graph.reordered(orders)
    fits = [given] if problem.fits(orders) else []
    filled = fill_within(given, min(problem.limits))
    if filled is not None:
        yield filled
        fits.insert(0, filled)
    yield from map(reorder, fits)
