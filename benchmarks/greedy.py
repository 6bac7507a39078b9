"""An order for each batch, by the pass `greedy`: what it takes to find and to prove it, and what it
gains: `make bench WHAT=greedy`.

The first table has processor times, the least of ROUNDS: of `compile` with new costs, and of its
parts. The second one has makespans by simulation, relative to 1F1B, means over BATCHES batches: of
`greedy`, and of ranks that choose while they run. These know what every op has taken so far, and
take the first ready op by a given order, as the ready sets of RRFP (Liu et al. 2026,
arXiv 2605.18750). All keep to the peak memory of 1F1B; transfers take no time.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from random import Random
from time import process_time
from typing import Any

import numpy as np

from schedlang import Costs, Noise, Plan, Source, compile, compiler, simulate_runs
from schedlang.compiler import ops_of
from schedlang.extras.noise.noise import Draws
from schedlang.language.loading import load
from schedlang.passes.greedy import most_urgent_first
from schedlang.passes.op_graph import ROUNDING, Graph
from schedlang.schedule.kinds import Kind

ROUNDS = 10
#: Ranks and microbatches of the first table; the last one has 10,000 actions.
SIZES = ((4, 16), (8, 32), (8, 64), (8, 228))
#: The parts of a compilation, as `schedlang.compiler` calls them.
PARTS = ("expand", "run_passes", "check_structure", "choose_lowering", "_proved")
#: Ranks and microbatches of the second table, and its noise.
SIZE = (8, 32)
BATCHES = 6
RUNS = 6
NOISES = {
    "no noise": Noise(),
    "jitter 0.1": Noise(jitter=0.1),
    "jitter 0.3": Noise(jitter=0.3),
    "rank 3 takes 1.3": Noise(slow_ranks={3: 1.3}),
}
ORDER = """schedule {} {{
    param ranks = 4
    param microbatches = 8
    rank r {{
        let warmup = min(ranks - 1 - r, microbatches)
        repeat warmup                {{ F(next) }}
        repeat microbatches - warmup {{ F(next)  B(next) }}
        repeat warmup                {{ B(next) }}
    }}
    {}
}}"""
STATIC = Source("static.sched", ORDER.format("one_f_one_b", ""))
GREEDY = Source("greedy.sched", ORDER.format("greedy_1f1b", "greedy"))


def texts(random: Random, ranks: int, microbatches: int) -> Costs:
    """Texts of any length, in tokens: alike on all stages."""
    lengths = [int(random.lognormvariate(6.5, 0.8)) + 16 for _ in range(microbatches)]
    return costs_of([lengths] * ranks)


def images_and_text(random: Random, ranks: int, microbatches: int) -> Costs:
    """Some images in a text: the first half of the stages encodes the images, the other half has
    all tokens.
    """
    images = [random.choice((0, 0, 1, 2, 4, 8)) * 256 for _ in range(microbatches)]
    whole = [image + random.randint(128, 1024) for image in images]
    half = ranks // 2
    return costs_of([[2 * image + 16 for image in images]] * half + [whole] * half)


def costs_of(tokens: Sequence[Sequence[int]]) -> Costs:
    """Costs by stage and microbatch: times and memory in proportion to tokens."""
    return Costs(
        forward_times=tokens,
        backward_times=[[2 * number for number in row] for row in tokens],
        forward_memory=tokens,
    )


BATCHES_OF: dict[str, Callable[[Random, int, int], Costs]] = {
    "texts": texts,
    "images and text": images_and_text,
}


def params(size: tuple[int, int]) -> dict[str, int]:
    """The parameters of the programs."""
    ranks, microbatches = size
    return {"ranks": ranks, "microbatches": microbatches}


def times(size: tuple[int, int]) -> dict[str, float]:
    """What it takes to compile the program for a new batch, and its parts, in milliseconds."""
    spent = dict.fromkeys(PARTS, 0.0)

    def timed(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start = process_time()
            found = part(*arguments)
            spent[name] = process_time() - start
            return found

        return run

    parts = {name: getattr(compiler, name) for name in PARTS}
    found: dict[str, list[float]] = {"whole": [], **{name: [] for name in PARTS}}
    try:
        for name, part in parts.items():
            setattr(compiler, name, timed(name, part))
        for seed in range(ROUNDS):
            costs = texts(Random(seed), *size)
            start = process_time()
            compile(GREEDY, params(size), costs)
            found["whole"].append(process_time() - start)
            for name in PARTS:
                found[name].append(spent[name])
    finally:
        for name, part in parts.items():
            setattr(compiler, name, part)
    return {name: 1e3 * min(each) for name, each in found.items()}


def ready_sets(graph: Graph, hint: Any, noise: Noise, runs: int) -> float:
    """The mean makespan of ranks that take their first ready op by a hint, over some runs."""
    schedule = graph.schedule
    columns = schedule.columns
    factors = Draws(schedule, noise, np.ones(len(columns), bool)).next(runs)
    limit = graph.highest_peak(graph.order)
    room = graph.room(limit + ROUNDING)
    makespans = []
    for run in range(runs):
        noisy = copy(graph)
        of_node = np.ones(len(graph))
        of_node[graph.node_of] = factors[:-1, run]
        noisy.time = (np.array(graph.time) * of_node).tolist()
        execution = most_urgent_first(noisy, len(graph.order), hint, room)
        if execution is None:
            raise RuntimeError("ranks that choose while they run have no room left")
        makespans.append(max(execution[1]))
    return float(np.mean(makespans))


def backwards_first(graph: Graph) -> Any:
    """A hint for ready sets: backwards before forwards, and microbatches in their order."""
    ops = [of_node[0] for of_node in graph.ops]
    return np.array([(kind != Kind.F) * 1e6 - number for kind, _, number in ops])


def makespans(batch: Costs, noise: Noise) -> Iterator[float]:
    """The mean makespans of one batch: of 1F1B, of `greedy`, and of ready sets by two hints."""
    runs = RUNS if noise.jitter else 1
    plans: list[Plan] = []
    for program in (STATIC, GREEDY):
        plans.append(compile(program, params(SIZE), batch))
        yield simulate_runs(plans[-1], noise, runs=runs, ideal=True).mean
    graph = Graph(ops_of(*load(STATIC), params(SIZE), batch))
    yield ready_sets(graph, backwards_first(graph), noise, runs)
    # The order that `greedy` has found, as a hint.
    found = Graph(ops_of(*load(GREEDY), params(SIZE), batch))
    yield ready_sets(found, -np.array(found.own_ends), noise, runs)


def main() -> None:
    """Print both tables."""
    heads = ("whole", "expand", "greedy", "check", "lower", "prove")
    print(f"{'ms':12} {'actions':>8}" + "".join(f"{head:>8}" for head in heads))
    for size in SIZES:
        actions = len(compile(GREEDY, params(size)).columns)
        cells = "".join(f"{each:8.1f}" for each in times(size).values())
        print(f"{'{} x {}'.format(*size):12} {actions:8,}{cells}", flush=True)
    print(
        f"\n{'':35} {'1F1B':>8} {'greedy':>8} {'ready':>8} {'ready,':>8}\n"
        f"{'':35} {'':8} {'':8} {'':>8} {'hinted':>8}"
    )
    for kind, batch_of in BATCHES_OF.items():
        for name, noise in NOISES.items():
            found = []
            for seed in range(BATCHES):
                batch = batch_of(Random(seed), *SIZE)
                found.append(np.array(list(makespans(batch, noise))))
            relative = np.mean([each / each[0] for each in found], axis=0)
            cells = " ".join(f"{each:8.2f}" for each in relative)
            print(f"{kind:17} {name:17} {cells}", flush=True)


if __name__ == "__main__":
    main()
