"""How far `schedc optimize` is from its proved bound at large sizes: `make bench WHAT=search`.

At 16 x 64 and 32 x 128, one stage on each rank and two in a V, within 1F1B's memory and twice as
much, at unit costs and at measured-like ones, drawn as those of benchmarks/search.py.

`python benchmarks/large.py --limit 20` looks for 20 seconds at each; more is in
benchmarks/rows.py.
"""

import random
from itertools import product
from time import process_time

from published import searched
from rows import Row, print_rows
from search import Drawn, costs_of, problem_of

SIZES = ((16, 64), (32, 128))
LIMIT = 60.0
CHOICES = list(product(SIZES, ("one", "V"), (False, True), (1.0, 2.0)))


def row(number: int, limit: float) -> Row:
    """The row of an instance."""
    (ranks, microbatches), placement, is_measured, share = CHOICES[number]
    drawn = Drawn(ranks, microbatches, placement, True, is_measured, is_measured, share)
    problem = problem_of(drawn, costs_of(drawn, random.Random(0)))
    begin = process_time()
    answer = searched(problem, limit)
    figures = f"{answer.value:9.2f} {answer.bound:9.2f} {answer.gap:6.2%}"
    seconds = process_time() - begin
    text = f"{drawn} {figures} {seconds:7.1f}  {answer.source}"
    return Row(text, ["within 3 % of the bound"] if answer.gap <= 0.03 else [])


def main() -> None:
    """Print a row for each instance."""
    head = f"{'':47} {'found':>9} {'bound':>9} {'gap':>6} {'seconds':>7}  found by"
    print_rows("large", head, len(CHOICES), row, LIMIT)


if __name__ == "__main__":
    main()
