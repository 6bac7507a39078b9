"""What 200 simulated runs with noise take, against one simulation: `make bench WHAT=runs`.

Processor time, the least of ROUNDS. One simulation is all that `simulate` does, with a walk of its
own.
"""

import time
from collections.abc import Callable

from attrs import evolve

from schedlang import Costs, Noise, compile, simulate, simulate_runs

ROUNDS = 5
RUNS = 200
COSTS = Costs(p2p_time=0.1)
NOISE = Noise(jitter=0.1)
#: The programs, and their sizes.
SIZES = (
    ("interleaved_1f1b", {"ranks": 8, "microbatches": 64, "chunks": 2}),
    ("1f1b", {"ranks": 16, "microbatches": 1087}),
)


def spent(work: Callable[[], object]) -> float:
    """The processor time of some work, in seconds."""
    times = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return min(times)


def main() -> None:
    """Print both times, and their ratio."""
    print(
        f"{'':18} {'actions':>8}  {'transport':10} {'one':>8} {f'{RUNS} runs':>10}  ratio"
    )
    for name, params in SIZES:
        plan = compile(name, params)
        for transport in ("gloo", "nccl"):
            schedule = evolve(plan, transport=transport)
            one = spent(lambda: simulate(schedule, COSTS))  # noqa: B023
            many = spent(lambda: simulate_runs(schedule, NOISE, COSTS, RUNS))  # noqa: B023
            print(
                f"{name:18} {len(plan.columns):8,}  {transport:10} {one * 1e3:5.1f} ms "
                f"{many * 1e3:7.1f} ms  {many / one:.1f}"
            )


if __name__ == "__main__":
    main()
