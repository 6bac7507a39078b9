"""Parts of all models for CP-SAT: the literal that says which of two ops comes first, the memory of
a rank, and a call of the solver that Ctrl-C ends.
"""

from collections.abc import Mapping, Sequence
from threading import Thread

from ortools.sat.python import cp_model

from schedlang.extras.search.optimize.instance import Instance

#: Whether one op comes before another one: a known value, or a literal.
Before = bool | cp_model.LiteralT
#: The interval at which the main thread wakes while the solver runs, in seconds.
_GLANCE = 0.2


class Impossible(Exception):
    """No such orders exist, as is clear without a search."""


def solved(
    model: cp_model.CpModel, workers: int, effort: float, seconds: float
) -> tuple[cp_model.CpSolver, bool]:
    """Solve a model within a deterministic time (`effort`) and some seconds; return the solver, and
    whether it found a solution.
    """
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = workers
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = max(seconds, 0.01)
    status = solve(solver, model)
    return solver, status in (cp_model.OPTIMAL, cp_model.FEASIBLE)


def which_is_first(
    model: cp_model.CpModel,
    first: cp_model.IntVar,
    second: cp_model.IntVar,
    takes: int,
    other_takes: int,
) -> cp_model.IntVar:
    """A literal that says which of two ops comes first; the other one starts after its end."""
    literal = model.new_bool_var("")
    model.add(second - first >= takes).only_enforce_if(literal)
    model.add(first - second >= other_takes).only_enforce_if(~literal)
    return literal


def hold_within(
    model: cp_model.CpModel,
    instance: Instance,
    nodes: Sequence[int],
    before: Mapping[tuple[int, int], Before],
    room: int,
) -> None:
    """Limit a rank's memory to `room` whenever one of these nodes runs.

    `before` says of two nodes whether the first one comes before the second. Raises Impossible if
    no order of the nodes stays within the room.
    """
    # When a node starts, its rank holds the changes by all nodes before it:
    #
    #     rise[n] + Σ change[o] · (o before n)  <=  room
    #
    # Known literals are numbers here. No constraint is needed if it holds even when every open
    # literal adds its most.
    changing = [node for node in nodes if instance.change[node]]
    for node in nodes:
        # A node that does not raise the memory fits whenever the node before it did.
        if instance.rise[node] <= 0:
            continue
        left = room - instance.rise[node]
        literals = []
        amounts = []
        for other in changing:
            if other == node:
                continue
            is_before = before.get((other, node), False)
            if isinstance(is_before, bool):
                left -= instance.change[other] * is_before
            else:
                literals.append(is_before)
                amounts.append(instance.change[other])
        if sum(amount for amount in amounts if amount > 0) <= left:
            continue
        if sum(amount for amount in amounts if amount < 0) > left:
            raise Impossible
        model.add(cp_model.LinearExpr.weighted_sum(literals, amounts) <= left)


def solve(solver: cp_model.CpSolver, model: cp_model.CpModel) -> int:
    """Run the solver in a thread and return its status. An exception that ends the wait, such as
    KeyboardInterrupt, also stops the solver.
    """
    parameters = solver.parameters
    # The solver's own handler of Ctrl-C would end this model alone, and the search would go on.
    parameters.catch_sigint_signal = False
    workers = parameters.num_workers
    if workers > 1:
        # OR-tools aborts the process where one worker refutes a model while others load it
        # (`heuristics.fixed_search != nullptr`), so one worker loads it before.
        parameters.num_workers = 1
        parameters.stop_after_root_propagation = True
        status = _run(solver, model)
        if status == cp_model.INFEASIBLE:
            return status
        parameters.num_workers = workers
        parameters.stop_after_root_propagation = False
    return _run(solver, model)


def _run(solver: cp_model.CpSolver, model: cp_model.CpModel) -> int:
    statuses: list[int] = []
    thread = Thread(
        target=lambda: statuses.append(int(solver.solve(model))), daemon=True
    )
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_GLANCE)
    except BaseException:
        # Repeated, since a solver that has not begun yet ignores the first call.
        while thread.is_alive():
            solver.stop_search()
            thread.join(_GLANCE)
        raise
    return statuses[0]
