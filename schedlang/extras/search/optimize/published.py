"""What published schedules give at a problem's placement: the programs of the gallery, each in all
of its sizes that fit, and what the passes make of them at the problem's costs and limits.
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
from schedlang.files.reading import source_of
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

#: What is left out of a program: what it says of other costs and limits than the problem's.
_LEFT_OUT = (syntax.Pass, syntax.Fill, syntax.Assert)


def from_gallery(problem: Problem, known: Answer, seconds: float) -> Iterator[Answer]:
    """See `Solver`: the orders of published schedules, and what the passes make of them. It proves
    nothing.
    """
    deadline = monotonic() + seconds
    answer = known
    candidates: list[tuple[str, Orders]] = []
    for name, orders in published(problem):
        # Many programs are alike where there is one stage on each rank.
        if all(orders != other for _, other in candidates):
            candidates.append((name, orders))
        if monotonic() >= deadline:
            break
    # Passes take most of the time, so what is quick by itself comes first: it stays so where they
    # only have to move what it holds too much of.
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
    and parameters.

    A whole backward stands where a program has the half that others wait for, and halves stand
    together where it has a whole one. Orders may hold more than the problem allows.
    """
    layout = problem.graph.schedule.layout
    for name in names():
        source, tree = load(source_of(name))
        if not _is_for_steps(tree):
            continue
        items = [item for item in tree.items if not isinstance(item, _LEFT_OUT)]
        bare = with_items(tree, items)
        for params in _sizes(bare, layout):
            try:
                if not _is_laid_out(bare, params, layout):
                    continue
                schedule = ops_of(source, bare, params)
            except CompileError:
                # Not for this size.
                continue
            orders = _translated(problem.graph, schedule)
            if orders is not None:
                shape = ", ".join(f"{word} = {value}" for word, value in params.items())
                yield f"{name} ({shape})", orders


def _is_for_steps(tree: syntax.Schedule) -> bool:
    """Whether a program is for steps with a flush, without recomputation."""
    others = (syntax.Weights, syntax.Recompute, syntax.Gather)
    return not any(isinstance(item, others) for item in tree.items)


def _sizes(tree: syntax.Schedule, layout: Layout) -> Iterator[dict[str, int]]:
    """The parameters with which a program may have a layout."""
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
        # Groups of fewer microbatches than half of the ranks would leave ranks idle all along.
        "group": [size for size in range(ranks // 2, ranks + 1) if size],
        # As much as one likes: the limit is the problem's.
        "memory": [microbatches * chunks],
    }
    mine = {word: values for word, values in choices.items() if word in known}
    for values in product(*mine.values()):
        yield dict(zip(mine, values, strict=True))


def _is_laid_out(
    tree: syntax.Schedule, params: Mapping[str, int], layout: Layout
) -> bool:
    """Whether the stages of a program are where a layout has them."""
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
    """The orders of a schedule with the nodes of a graph; None if some of them are not there."""
    nodes = {op: node for node, ops in enumerate(graph.ops) for op in ops}
    # A whole backward may stand for its halves, and a half for the whole.
    all_backwards = (*MAKERS[Kind.B], Kind.W)
    has_weights = any(Kind.W in actions.kind for actions in schedule.ranks)
    stands_for = dict.fromkeys(MAKERS[Kind.B], all_backwards)
    if has_weights:
        stands_for |= dict.fromkeys(INPUT_HALVES, MAKERS[Kind.B])
    orders: Orders = []
    for actions in schedule.ranks:
        # Ops that overlap are one node, which comes with the first of them.
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
    """Some orders, and what the passes make of them at a problem's costs, within its limits; each
    as it is asked for, since passes take their time.
    """
    yield orders
    # Where ranks wait for each other in these orders, there is nothing to be made of them.
    with suppress(CompileError):
        for schedule in _passed(problem, orders):
            changed = _translated(problem.graph, schedule)
            assert changed is not None
            yield changed


def _passed(problem: Problem, orders: Orders) -> Iterator[Schedule]:
    """What the passes make of some orders."""
    given = problem.graph.reordered(orders)
    fits = [given] if problem.fits(orders) else []
    filled = fill_within(given, min(problem.limits))
    if filled is not None:
        yield filled
        fits.insert(0, filled)
    yield from map(reorder, fits)
