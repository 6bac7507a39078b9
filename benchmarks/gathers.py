"""What `schedc optimize` gains by choosing when weights are gathered: `make bench WHAT=search`.

The first rows are programs of the gallery with `gather within` some places, in the memory that each
rank holds then; the last ones are programs that gather by hand. A row has the makespan before, the
one that is found, and the bound, which no schedule is below within this memory. A gather and a sum
of a stage take as long as a forward, half of it or twice as long; gathered weights take as much
memory as two activations.
"""

from collections import deque
from itertools import product

from attrs import frozen
from rows import Row, print_rows

from schedlang import Costs, compile
from schedlang.extras.search.optimize.optimize import optimize
from schedlang.extras.search.optimize.problem import Problem, peaks_of
from schedlang.passes.gather import gather

#: Seconds of the clock for one search.
LIMIT = 60.0
#: Programs, their sizes and chunks, and the places of the pass; without, they gather by hand.
SIZES = (
    ("interleaved_1f1b", 2, 4, 2, 1),
    ("interleaved_1f1b", 4, 8, 2, 1),
    ("interleaved_1f1b", 4, 8, 4, 2),
    ("zb_v", 4, 8, 2, 1),
    ("looped_bfs_sharded", 4, 8, 2, None),
    ("zeropp", 4, 16, 4, None),
)
TIMES = (0.5, 1.0, 2.0)
MEMORY = 2.0


@frozen
class Case:
    """A program at a size, and what a gather takes."""

    program: str
    ranks: int
    microbatches: int
    chunks: int
    places: int | None
    time: float

    def problem(self) -> Problem:
        """The problem in the memory that the program's own gathers take."""
        params = {"ranks": self.ranks, "microbatches": self.microbatches}
        if self.program != "zb_v":
            params["chunks"] = self.chunks
        costs = Costs(
            gather_times=(self.time,), sum_times=(self.time,), gather_memory=(MEMORY,)
        )
        plan = compile(self.program, params, costs)
        given = plan if self.places is None else gather(plan, self.places)
        return Problem.of(given, peaks_of(given))


CASES = [Case(*size, time) for size, time in product(SIZES, TIMES)]


def row(number: int, seconds: float) -> Row:
    """The row of a case."""
    case = CASES[number]
    problem = case.problem()
    before = problem.as_given.value
    answer = deque(optimize(problem, seconds, workers=1), maxlen=1)[0]
    size = f"{case.ranks} x {case.microbatches} x {case.chunks}"
    places = "by hand" if case.places is None else f"within {case.places}"
    text = f"{number:3} {case.program:18} {size:10} {places:8} {case.time:4}"
    text += f" {before:8.2f} {answer.value:8.2f} {answer.bound:8.2f} {answer.gap:7.2%}"
    counts = ["faster"] if answer.value < before else []
    if answer.value > before:
        counts.append("slower")
    if answer.is_best:
        counts.append("proved")
    return Row(text, counts)


def main() -> None:
    """Print a row for each case, and how many are faster than before, and proved."""
    head = f"    {'program':18} {'':10} {'gathers':8} time   before    found    bound     gap"
    print_rows("gathers", head, len(CASES), row, LIMIT)


if __name__ == "__main__":
    main()
