"""What `schedc optimize --offload --recompute` gains in little memory: `make bench WHAT=search`.

The first rows are programs of the gallery in a share of the memory that they hold. They have the
makespan without evictions, that with copies, that with recomputation, and that with
both; then the bound, which no schedule is below at any memory or, if it is proved, within this one.
A copy to the host takes as long as a forward, half of it or twice as long. The last rows are
`pipe_offload`, which copies by hand, in the memory that each of its ranks holds.
"""

from collections import deque
from itertools import product
from math import inf

from attrs import frozen
from rows import Row, print_rows

from schedlang import Costs, compile, simulate
from schedlang.extras.search.optimize.optimize import optimize
from schedlang.extras.search.optimize.problem import WAYS, Answer, Problem

#: Seconds of the clock for one search.
LIMIT = 20.0
SIZES = (
    ("1f1b", 4, 8),
    ("1f1b", 8, 16),
    ("zb_h1", 4, 8),
    ("interleaved_1f1b", 4, 8),
)
SHARES = (0.5, 0.75)
COPIES = (0.5, 1.0, 2.0)
BY_HAND = ((2, 4), (4, 8), (4, 16), (8, 16))


@frozen
class Case:
    """A program at a size; `share` is the memory that a rank may hold, of the most that one holds
    there, and `copy` what a copy takes. Without them the memory of each rank is what it holds.
    """

    program: str
    ranks: int
    microbatches: int
    share: float | None = None
    copy: float = 1.0

    def problem(self, *ways: str) -> Problem:
        """The problem, if activations may be evicted in some ways."""
        params = {"ranks": self.ranks, "microbatches": self.microbatches}
        costs = Costs(offload_times=(self.copy,), reload_times=(self.copy,))
        plan = compile(self.program, params, costs)
        held = simulate(plan, costs, ideal=True).peak_memory
        limits = held if self.share is None else (float(int(self.share * max(held))),)
        return Problem.of(plan, limits, [WAYS[way] for way in ways])


CASES = [
    *(Case(*size, share, copy) for size, share, copy in product(SIZES, SHARES, COPIES)),
    *(Case("pipe_offload", *size) for size in BY_HAND),
]


def searched(problem: Problem, seconds: float) -> Answer:
    """The best answer after so many seconds of the clock, or before, if it is proved."""
    return deque(optimize(problem, seconds, workers=1), maxlen=1)[0]


def row(number: int, seconds: float) -> Row:
    """The row of a case."""
    case = CASES[number]
    counts = []
    if case.share is None:
        problem = case.problem()
        before = problem.as_given.value
        answers = [searched(problem, seconds)]
        counts.append(
            "by hand: worse" if answers[0].value > before else "by hand: not worse"
        )
    else:
        before = searched(case.problem(), seconds).value
        choices = (["offload"], ["recompute"], ["offload", "recompute"])
        answers = [searched(case.problem(*ways), seconds) for ways in choices]
    answer = answers[-1]
    size = f"{case.ranks} x {case.microbatches}"
    share = "" if case.share is None else f"{case.share:.2f}"
    values = [before, *(each.value for each in answers), answer.bound]
    figures = " ".join(
        "       -" if value == inf else f"{value:8.2f}" for value in values
    )
    text = f"{number:3} {case.program:17} {size:7} {share:6} {case.copy:4} {figures}"
    text += f" {answer.gap:7.2%}"
    if answer.is_best:
        counts.append("proved")
    return Row(text, counts)


def main() -> None:
    """Print a row for each case, and how many are proved."""
    head = f"    {'program':17} {'':7} memory copy  without  offload      run     both"
    head += "    bound     gap"
    print_rows("offload", head, len(CASES), row, LIMIT)


if __name__ == "__main__":
    main()
