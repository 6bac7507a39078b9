"""How many optima `schedc optimize` proves, and what simpler ways give: `make bench WHAT=search`.

A hundred instances are drawn by `instances`, all from one seed. For each it prints what the
search found, the bound that it proved, the gap between the two and the processor time; beside it
what a plain greedy gives. The search has one thread here, and LIMIT seconds of processor time,
whatever else the machine does: on two idle cores, `schedc optimize --for 60s` has twice as much.

`python benchmarks/search.py 0:10` looks at the first ten. What is stopped goes on when it is called
again; `--for 10m` stops it by itself (benchmarks/rows.py).
"""

import random
from collections.abc import Iterator
from itertools import islice
from math import inf
from time import process_time

from attrs import frozen
from rows import Row, print_rows

from schedlang import Costs, Source, compile
from schedlang.extras.search.optimize.instance import Instance
from schedlang.extras.search.optimize.optimize import optimize
from schedlang.extras.search.optimize.problem import Answer, Problem
from schedlang.extras.search.optimize.starts import greedy
from schedlang.schedule.kinds import Kind

COUNT = 100
SEED = 0
#: Seconds of processor time for one instance.
LIMIT = 60.0

PLACEMENTS = {
    "one": "",
    "V": "stage s in 0 .. 2 * ranks on if s < ranks then s else 2 * ranks - 1 - s",
    "loop": "stage s in 0 .. 2 * ranks on s % ranks",
}


@frozen
class Drawn:
    """An instance: its sizes, where stages are, which ops there are, what they cost, and how many
    activations a rank may hold; `share` is that over what 1F1B holds: one microbatch for each rank.
    """

    ranks: int
    microbatches: int
    placement: str
    is_split: bool
    is_measured: bool
    has_transfers: bool
    share: float

    @property
    def chunks(self) -> int:
        """How many stages a rank has."""
        return 1 if self.placement == "one" else 2

    @property
    def limit(self) -> int:
        """What a rank may hold, in activations of a stage."""
        return int(self.share * self.ranks * self.chunks)

    def __str__(self) -> str:
        ops = "F I W" if self.is_split else "F B"
        costs = "measured" if self.is_measured else "unit"
        transfers = "transfers" if self.has_transfers else "-"
        sizes = f"{self.ranks} x {self.microbatches}"
        words = f"{sizes:7} {self.placement:5} {ops:6} {costs:9} {transfers:10}"
        return f"{words} {self.limit:3} ({self.share:.2f})"


def instances() -> Iterator[tuple[Drawn, Costs]]:
    """Every attribute is drawn evenly from its values, but half of the instances have one stage on
    each rank, and a quarter each two in a V and in a loop.

    Unit costs are those of the papers, a transfer takes a quarter of a forward. Measured-like ones
    are what profiles of transformers look like (Qi et al. 2024, Zero Bubble Pipeline Parallelism,
    table 6): a forward of about 10 on each stage, its input half a little more, its weight half two
    thirds to nine tenths, each stage otherwise by some percent; the last one has the head of the
    model, a fifth more; a transfer takes 1.1.
    """
    rng = random.Random(SEED)
    for _ in range(COUNT):
        drawn = Drawn(
            ranks=rng.randint(4, 8),
            microbatches=rng.randint(8, 16),
            placement=rng.choice(("one", "one", "V", "loop")),
            is_split=rng.choice((True, False)),
            is_measured=rng.choice((True, False)),
            has_transfers=rng.choice((True, False)),
            share=rng.choice((0.5, 0.75, 1.0, 1.5, 2.0)),
        )
        yield drawn, costs_of(drawn, rng)


def costs_of(drawn: Drawn, rng: random.Random) -> Costs:
    """The costs of an instance."""
    stages = range(drawn.ranks * drawn.chunks)
    if not drawn.is_measured:
        return Costs(p2p_time=0.25 if drawn.has_transfers else None)
    forward = [round(rng.uniform(9.0, 11.0), 1) for _ in stages]
    input = [round(rng.uniform(9.5, 12.0), 1) for _ in stages]
    weight = [round(rng.uniform(6.0, 9.0), 1) for _ in stages]
    # The head of the model.
    forward[-1] = round(forward[-1] * 1.2, 1)
    p2p = 1.1 if drawn.has_transfers else None
    if drawn.is_split:
        return Costs(
            forward_times=forward, input_times=input, weight_times=weight, p2p_time=p2p
        )
    backward = [round(one + other, 1) for one, other in zip(input, weight, strict=True)]
    return Costs(forward_times=forward, backward_times=backward, p2p_time=p2p)


def problem_of(drawn: Drawn, costs: Costs) -> Problem:
    """The problem: its ops in an order that holds everything, for a search to change."""
    stage = f"stage({drawn.chunks - 1} - c), m"
    backward = f"I({stage})  W({stage})" if drawn.is_split else f"B({stage})"
    text = f"""schedule drawn {{
        param ranks = {drawn.ranks}
        param microbatches = {drawn.microbatches}
        {PLACEMENTS[drawn.placement]}
        rank r {{
            for c in 0 .. {drawn.chunks} {{ for m in 0 .. microbatches {{ F(stage(c), m) }} }}
            for c in 0 .. {drawn.chunks} {{ for m in 0 .. microbatches {{ {backward} }} }}
        }}
    }}"""
    return Problem.of(compile(Source("drawn.sched", text), {}, costs), drawn.limit)


def plain(problem: Problem) -> float:
    """What ranks come to that do a backward wherever they can, else a forward, else a weight
    gradient; infinite where that comes to a stop.
    """
    instance = Instance.of(problem)
    rank_of = {Kind.I: 2.0, Kind.B: 2.0, Kind.F: 1.0, Kind.W: 0.0}
    first = [rank_of[Kind(ops[0][0])] for ops in problem.graph.ops]
    orders = greedy(instance, first)
    return problem.value(orders) if orders else inf


def searched(problem: Problem, limit: float) -> tuple[Answer, float]:
    """The answer that is there after so many seconds of processor time, or before, if it is proved;
    and how many it took.
    """
    begin = process_time()
    kept: Answer | None = None
    # As long as it likes, by the clock: it is ended here, by processor time.
    for answer in optimize(problem, 1e9, workers=1):
        seconds = process_time() - begin
        if seconds > limit and kept is not None:
            return kept, limit
        kept = answer
    assert kept is not None
    return kept, process_time() - begin


def row(number: int, limit: float) -> Row:
    """The row of an instance."""
    # All are drawn from one seed, one after the other: number 5 is the same whether it is asked for
    # alone or with others.
    drawn, costs = next(islice(instances(), number, None))
    problem = problem_of(drawn, costs)
    answer, seconds = searched(problem, limit)
    figures = f"{plain(problem):8.2f} {answer.value:8.2f} {answer.bound:8.2f}"
    text = f"{number:3} {drawn} {figures} {answer.gap:7.2%} {seconds:8.1f}"
    return Row(text, ["proved"] if answer.is_best else [])


def main() -> None:
    """Print a row for each instance, and how many are proved."""
    head = f"    {'':7} {'':5} {'':6} {'':9} {'':10} memory   "
    head += f" {'greedy':>8} {'found':>8} {'bound':>8} {'gap':>7} {'seconds':>8}"
    print_rows("search", head, COUNT, row, LIMIT)


if __name__ == "__main__":
    main()
