"""CP-SAT, where Ctrl-C ends the wait for it."""

from threading import Thread

from ortools.sat.python import cp_model

#: How often a look at what else there is to do is taken, in seconds.
_GLANCE = 0.2


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
