"""What all models for CP-SAT have in common: which of two ops comes first, what a rank holds; and
the wait for the solver, which Ctrl-C ends.
"""

from collections.abc import Mapping, Sequence
from threading import Thread

from ortools.sat.python import cp_model

from schedlang.extras.search.optimize.instance import Instance

#: Whether one op comes before another one: known, or a literal.
Before = bool | cp_model.LiteralT
#: How often a look at what else there is to do is taken, in seconds.
_GLANCE = 0.2


class Impossible(Exception):
    """There are no such orders, as is known without a search."""


def solved(
    model: cp_model.CpModel, workers: int, effort: float, seconds: float
) -> tuple[cp_model.CpSolver, bool]:
    """A solver after it has looked for a solution of a model, and whether it has one. It may take
    some deterministic time, and some seconds.
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
    """A literal that says which of two starts comes first; the other one is behind its end."""
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
    """Let a rank, with so much room, hold no more than that when any of these nodes starts.

    `before` says of two nodes whether the first one comes first, True or False where that is known.
    Impossible where the room cannot do.
    """
    # When a node starts, its rank holds what all nodes before it have left:
    #
    #     rise[n] + Σ change[o] · (o before n)  <=  room
    #
    # Where a literal is known, it is a number; and where even the most that the open ones may
    # add fits, there is nothing to say.
    changing = [node for node in nodes if instance.change[node]]
    for node in nodes:
        # What does not rise above what was held before fits if that did.
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
    """The status of a model once it is solved, or its time is over; what ends the wait, such as
    KeyboardInterrupt, stops the solver too.
    """
    # Its own way to take Ctrl-C would end this model alone, and the search would go on.
    solver.parameters.catch_sigint_signal = False
    statuses: list[int] = []
    thread = Thread(
        target=lambda: statuses.append(int(solver.solve(model))), daemon=True
    )
    thread.start()
    try:
        while thread.is_alive():
            thread.join(_GLANCE)
    except BaseException:
        # Again and again: a solver that has yet to begin does not hear the first time.
        while thread.is_alive():
            solver.stop_search()
            thread.join(_GLANCE)
        raise
    return statuses[0]
