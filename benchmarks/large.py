"""How far `schedc optimize` is from the bound that it proves at large sizes: `make bench-search`.

At 16 x 64 and 32 x 128, one stage on each rank and two in a V, within 1F1B's memory and twice as
much, at unit costs and at measured-like ones, drawn as those of benchmarks/search.py.

`python benchmarks/large.py 20` looks for 20 seconds of processor time at each.
"""

import random
import sys
from itertools import product
from time import process_time

from published import searched
from search import Drawn, costs_of, problem_of

SIZES = ((16, 64), (32, 128))
LIMIT = 60.0


def main() -> None:
    """Print a row for each instance."""
    limit = float(sys.argv[1]) if len(sys.argv) > 1 else LIMIT
    print(f"{'':47} {'found':>9} {'bound':>9} {'gap':>6} {'seconds':>7}  found by")
    choices = product(SIZES, ("one", "V"), (False, True), (1.0, 2.0))
    for (ranks, microbatches), placement, is_measured, share in choices:
        drawn = Drawn(ranks, microbatches, placement, True, is_measured, is_measured, share)
        problem = problem_of(drawn, costs_of(drawn, random.Random(0)))
        begin = process_time()
        answer = searched(problem, limit)
        figures = f"{answer.value:9.2f} {answer.bound:9.2f} {answer.gap:6.2%}"
        seconds = process_time() - begin
        print(f"{drawn} {figures} {seconds:7.1f}  {answer.source}", flush=True)


if __name__ == "__main__":
    main()
