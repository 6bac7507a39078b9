"""CP-SAT, where Ctrl-C ends the wait for it."""

from threading import Thread

from ortools.sat.python import cp_model

#: How often a look at what else there is to do is taken, in seconds.
_GLANCE = 0.2


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
