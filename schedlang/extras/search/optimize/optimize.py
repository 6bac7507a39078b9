"""Run all searches one after the other: greedy orders, the gallery and the passes, repeating
blocks, windows, and the exact search.
"""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from math import inf
from time import monotonic

from attrs import evolve, frozen

from schedlang.compiler import compile
from schedlang.diagnostics.activity import doing
from schedlang.diagnostics.source import Source
from schedlang.extras.search.optimize.evictions import evicting, gathers_of, uses_of
from schedlang.extras.search.optimize.gathers import Gathers
from schedlang.extras.search.optimize.instance import Instance
from schedlang.extras.search.optimize.problem import Answer, Problem, Solver
from schedlang.extras.search.optimize.program_text import can_write_times, program_of
from schedlang.extras.search.optimize.published import from_gallery, published
from schedlang.extras.search.optimize.starts import from_greedy
from schedlang.passes.op_graph import Orders
from schedlang.proof.prove import simulate
from schedlang.schedule.costs import UNIT

#: With more ops, the exact search hardly ever ends with a proof.
_MOST_AT_ONCE = 800
#: Orders without evictions are sought within so many times the memory, for a share of the time.
_FACTORS = (inf, 2.0, 1.5, 1.0)
_SHARE_WITHOUT = 0.08
#: The most orders within one of these memories from which the search begins, the best ones.
_MOST_ORDERS = 3


def optimize(
    problem: Problem, seconds: float, workers: int = 1, seed: int = 0
) -> Iterator[Answer]:
    """Yield answers, each at least as good as the one before. The first is the given order; its
    value is infinite if it exceeds the memory limits.

    The search ends when an answer is proved to be the best, or after `seconds`; the caller may stop
    earlier. If the value stays infinite, no order was found that fits into memory. ImportError says
    how to install the solver, if it is missing.
    """
    check_solver()
    if not problem.is_bare:
        yield from _with_more(problem, seconds, workers, seed)
        return
    begin = monotonic()
    least = Instance.of(problem)
    answer = problem.as_given
    # This answer has no orders; it only raises the bound.
    answer = answer.better(Answer([], inf, least.value_of(least.least), ""))
    answer = least.closed(answer)
    yield answer
    for solver, share in _solvers(problem, workers, seed):
        left = seconds - (monotonic() - begin)
        if answer.is_best or left <= 0:
            return
        for found in solver(problem, answer, left * share):
            answer = least.closed(answer.better(found))
            _tell(answer)
            yield answer


def _with_more(
    problem: Problem, seconds: float, workers: int, seed: int
) -> Iterator[Answer]:
    """The same if activations may be evicted, or weights are gathered. First none is, within the
    memory and within more or less, which gives a bound and orders from which the search begins.
    """
    from schedlang.extras.search.optimize.exact_evictions import evicting_exactly

    begin = monotonic()
    answer = problem.as_given
    yield answer
    gathers = gathers_of(problem, uses_of(problem))
    orders = [problem.graph.order]
    for limits, is_bound in _limits_without(problem, gathers):
        if answer.is_best:
            return
        bare = evolve(problem.bare, limits=limits)
        of_limits: list[Orders] = []
        for found in optimize(bare, seconds * _SHARE_WITHOUT, workers, seed):
            if found.orders not in [*orders, *of_limits]:
                of_limits.append(found.orders)
            # Orders without gathers and sums are no answer where the problem has some.
            is_answer = not (problem.gathered or problem.summed)
            value = problem.value(found.orders) if is_answer else inf
            bound = gathers.bound_of(found.bound) if is_bound else 0.0
            answer = answer.better(evolve(found, value=value, bound=bound))
            _tell(answer)
            yield answer
        orders += of_limits[-_MOST_ORDERS:]
    if problem.gathered:
        # Which order takes the fewest gathers, the graph alone does not show.
        orders += [each for _, each in published(problem.bare) if each not in orders]
    solvers: list[tuple[Solver, float]] = [
        (partial(evicting, orders=orders, seed=seed), 0.2),
        (partial(evicting_exactly, workers=workers, seed=seed), 0.7),
        (partial(evicting, orders=orders, seed=seed + 1), 1.0),
    ]
    for solver, share in solvers:
        left = seconds - (monotonic() - begin)
        if answer.is_best or left <= 0:
            return
        for found in solver(problem, answer, left * share):
            # The last one of a solver may have the same value with fewer evictions.
            answer = evolve(found, bound=max(found.bound, answer.bound))
            _tell(answer)
            yield answer


def _limits_without(
    problem: Problem, gathers: Gathers
) -> Iterator[tuple[tuple[float, ...], bool]]:
    """Limits within which orders of the graph alone are sought; and whether no answer is below the
    bound of those.
    """
    if problem.ways:
        # Evictions cannot go below a bound for any memory, but below one for this memory.
        for factor in _FACTORS:
            limits = tuple(
                inf if factor == inf else limit * factor for limit in problem.limits
            )
            yield limits, factor == inf
        return
    # Where there are any, the weights of one stage at least are there when a rank runs an op.
    for places in range(min(gathers.most, 1), gathers.most + 1):
        limits = gathers.least_limits(places)
        if min(limits) >= 0:
            yield limits, places <= 1


def check_solver() -> None:
    """Raise an ImportError that says how to install the solver, if it is missing."""
    if find_spec("ortools") is None:
        raise ImportError(
            "to optimize takes OR-tools: pip install 'schedlang[optimize]'"
        )


@frozen
class Judged:
    """An answer as a program: its `text`, which compiles and is proved, and its `makespan` on a
    transport.
    """

    text: str
    transport: str
    makespan: float


def judged(
    problem: Problem, answer: Answer, transport: str, file: str | None = None
) -> Judged:
    """Write an answer as a program, compile it for a transport, and simulate its plan there at the
    costs of the problem. CompileError, with the name `file`, if a claim does not hold.
    """
    text = program_of(problem, answer)
    costs = problem.graph.schedule.costs
    given = UNIT if can_write_times(problem) else costs
    plan = compile(
        Source(file or f"{problem.graph.schedule.name}, as found", text),
        costs=given,
        transport=transport,
    )
    # The transport named here is the one that is simulated.
    execution = simulate(plan, costs)
    return Judged(text, execution.transport, execution.timeline.makespan)


def _solvers(
    problem: Problem, workers: int, seed: int
) -> Iterator[tuple[Solver, float]]:
    """The searches, the quickest first, each with its share of the time."""
    yield partial(from_greedy, seed=seed), 0.1
    yield from_gallery, 0.2
    from schedlang.extras.search.optimize.exact import exact
    from schedlang.extras.search.optimize.periodic import periodic
    from schedlang.extras.search.optimize.windows import windows

    # Repeating blocks and windows find better orders for problems of any size.
    if len(problem.graph.ops) > _MOST_AT_ONCE:
        yield partial(periodic, workers=workers), 0.3
        yield partial(windows, workers=workers), 1.0
    yield partial(exact, workers=workers, seed=seed), 1.0


def _tell(answer: Answer) -> None:
    """Report the best value and the bound as progress."""
    if answer.value < inf:
        doing(
            f"best {answer.value:.10g}, none below {answer.bound:.10g}, gap {answer.gap:.2%}"
        )
    else:
        doing(f"no order yet, none below {answer.bound:.10g}")
