"""Pull ops forward into bubbles, without raising peak memory.

Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), section 2.4:
forwards and backwards move to the earliest slots that their inputs, the order of their kind and the
memory allow. Either only ops of the warm-up and the cool-down move, or all do. Both ways are tried
in whole slots, at unit costs; a local search then improves their orders at the real costs.
"""

from math import inf

from attrs import evolve, frozen

from schedlang.passes.best_order import best_order
from schedlang.passes.board import Board
from schedlang.passes.op_graph import ROUNDING, Graph, Orders
from schedlang.passes.polish import polish
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
    # The search finds at least the given order.
    assert reordered is not None
    return reordered


@frozen
class _Trial:
    """Orders, the ends of all nodes, and the objective; it is infinite for orders that exceed the
    memory limit or deadlock.
    """

    orders: Orders
    ends: list[float]
    value: float


def _trial(graph: Graph, orders: Orders, limit: float) -> _Trial:
    """Execute these orders within the memory limit."""
    ends = graph.ends(orders)
    if not ends or graph.highest_peak(orders) > limit + ROUNDING:
        return _Trial(orders, ends, inf)
    return _Trial(orders, ends, graph.objective(orders, ends))


def _moved(graph: Graph, limit: float, share: float) -> list[Orders]:
    """The orders after moves, and the given order, the best first; among equals the given one."""
    schedule = graph.schedule
    # Ops move by whole slots, so they need integer widths: those that they have at unit costs. The
    # orders that come of it are then judged at the real costs.
    slots = graph
    most = limit
    if schedule.costs != UNIT:
        slots = Graph(evolve(schedule, costs=UNIT))
        most = slots.highest_peak(slots.order)
    given = _trial(slots, slots.order, most)
    trials = [given, _moved_all(slots, given, most)]
    is_alike = graph.runs_like(slots)
    # The second way keeps the steady phase as it is. It is worth a trial if the first one is above
    # the lower bound, or if the real costs differ from unit costs.
    if trials[-1].value > slots.least_objective + ROUNDING or not is_alike:
        around_steady = Board(slots, given.orders, given.ends, most, steady=True)
        trials.append(_trial(slots, around_steady.moved_forward(), most))
    if slots is not graph:
        tried = [trial.orders for trial in trials]
        if not is_alike:
            tried[1:] = [polish(graph, orders, limit, share) for orders in tried[1:]]
        # At the real costs. `sorted` is stable, so the given order comes first among equals.
        trials = [_trial(graph, orders, limit) for orders in tried]
    return [trial.orders for trial in sorted(trials, key=lambda trial: trial.value)]


def _moved_all(graph: Graph, given: _Trial, limit: float) -> _Trial:
    """Let every op move, for a few rounds, or until a round gains nothing or reaches the lower
    bound.
    """
    best = given
    for _ in range(_MOST_ROUNDS):
        if best.value <= graph.least_objective + ROUNDING:
            break
        board = Board(graph, best.orders, best.ends, limit, steady=False)
        moved = _trial(graph, board.moved_forward(), limit)
        if moved.value >= best.value:
            break
        best = moved
        if board.is_settled(moved.ends):
            break
    return best
