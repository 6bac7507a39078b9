"""Pull ops forward into bubbles, without raising peak memory.

Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), section 2.4:
forwards and backwards move to the earliest slots that their inputs, their own kind's order and the
memory allow, in the warm-up and the cool-down, or all along. Both ways are tried, in whole slots,
and what they give is improved for the real costs.
"""

from math import inf

from attrs import evolve

from schedlang.passes.board import Board
from schedlang.passes.graph import ROUNDING, Graph, Orders
from schedlang.passes.polish import polish
from schedlang.passes.search import best_order
from schedlang.passes.squeeze import squeeze
from schedlang.schedule.costs import UNIT
from schedlang.schedule.schedule import Schedule

_MOST_ROUNDS = 4


def reorder(schedule: Schedule) -> Schedule:
    """The schedule with each rank's ops in the best order found for its objective, without slots.

    The peak of no rank rises above the highest peak of the given schedule. CompileError for a
    schedule that cannot run.
    """
    reordered = best_order(squeeze(schedule), _moved)
    # At least the order as it was is found.
    assert reordered is not None
    return reordered


def _moved(graph: Graph, limit: float, share: float) -> list[Orders]:
    """The orders after moves, and the order as it was, the best first; of equals that."""
    schedule = graph.schedule
    slots = graph if schedule.costs == UNIT else Graph(evolve(schedule, costs=UNIT))
    moved, is_best = _moved_all(slots)
    tried = [moved]
    if not is_best or not graph.runs_like(slots):
        around_steady = Board(slots, slots.order, slots.highest_peak(slots.order), steady=True)
        tried.append(around_steady.moved_forward())
    if not graph.runs_like(slots):
        tried = [polish(graph, orders, limit, share) for orders in tried]
    return sorted([graph.order, *tried], key=lambda orders: _value(graph, orders, limit))


def _value(graph: Graph, orders: Orders, limit: float) -> float:
    """What is minimised; infinite for orders that hold too much, or cannot run."""
    ends = graph.ends(orders)
    if not ends or graph.highest_peak(orders) > limit + ROUNDING:
        return inf
    return graph.objective(orders, ends)


def _moved_all(graph: Graph) -> tuple[Orders, bool]:
    """The orders after some rounds in which every op may move; and whether there are no better
    ones.
    """
    best = graph.order
    limit = graph.highest_peak(best)
    value = _value(graph, best, limit)
    least = graph.least_objective() + ROUNDING
    for _ in range(_MOST_ROUNDS):
        if value <= least:
            break
        moved = Board(graph, best, limit, steady=False).moved_forward()
        moved_value = _value(graph, moved, limit)
        if moved_value >= value:
            break
        best = moved
        value = moved_value
    return best, value <= least
