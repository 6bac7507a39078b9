"""Found by the search against the gallery at its defaults, on real processes: `make
bench WHAT=search-runs`.

For each of three models of unequal layers, on 4 processes over gloo:

1. two programs run with an even split, of one and of two stages on each rank; their traces say what
   layers, transfers, and ops without any layer take;
2. from these costs `schedlang.extras.search` chooses: program and split (`search`); from the best
   of these also which rank has which stage, and an order (`solve`), which `optimize` then has some
   seconds for;
3. what was chosen, and the programs of the gallery at their defaults under the split that the
   runtime makes by the same costs, run in turns, a step each. Of the gallery, those run which are
   predicted to take at most a tenth more than the fastest of them, five at most.

Times are medians of steps, from the first op to the last. Where there is a core for each process,
the layers are the model's own. Where there are fewer, processes that compute would take each
other's cores, which no schedule can help. Then a layer waits, as a process does whose device
computes elsewhere: it computes a little, forward and backward, and sleeps in F, I and W, for as
long as the model's own layer takes alone, in proportion. The first line says which it is.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from attrs import evolve, frozen
from torch import Tensor, nn

from schedlang import Costs, Plan, Source, compile, read_plan, simulate, write_plan
from schedlang.examples.demo.trace_file import aligned, clock_offset, write_trace
from schedlang.extras.measured import Run, read_run
from schedlang.extras.search.optimize.optimize import optimize
from schedlang.extras.search.optimize.problem import Problem
from schedlang.extras.search.optimize.program_text import program_of
from schedlang.extras.search.partition import (
    Layer,
    Solution,
    costs_of_stages,
    fixed_of_runs,
    gallery,
    layers_of_run,
    names_by_stage,
    search,
    solve,
)
from schedlang.runtime import Pipeline, measure, split
from schedlang.runtime.model.partition import partition as even_split

RANKS = 4
MICROBATCHES = 8
#: Seconds that a launch may take at most; steps of each, of which the first is a warm-up.
LIMIT = 300
TURNS = 15
#: The programs that run first, with one stage on each rank and with two: their backwards are split,
#: so their traces have both halves.
FIRST = ("zb_h1", "zb_v")
#: Programs of the gallery run that are predicted to take at most so much of the fastest one, and so
#: many of them at most.
NEAR = 1.1
MOST = 5
#: From so many programs the placement is opened; and seconds for the order.
OPENED = 3
SECONDS = 10.0
#: Seconds that the whole model waits for a microbatch, forward and backward.
WAITING = 0.4

ROWS = 2
LENGTH = 64
WIDTH = 192


class Block(nn.Module):
    """Attention and a feed-forward layer, each added to its input."""

    def __init__(self, width: int = WIDTH, times: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query_key_value = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.up = nn.Linear(width, times * width)
        self.down = nn.Linear(times * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to the same."""
        heads = (
            self.query_key_value(self.norms[0](x))
            .unflatten(-1, (-1, 32))
            .transpose(1, 2)
        )
        query, key, value = heads.chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Experts(nn.Module):
    """Attention, and two of several experts for every token, weighted by a router."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.block = Block(times=1)
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH)
            )
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, width) to the same."""
        x = self.block(x)
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        added = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, which = (chosen == number).nonzero(as_tuple=True)
            part = expert(tokens[rows]) * weights[rows, which].unsqueeze(-1)
            added = added.index_add(0, rows, part)
        return x + added.view_as(x)


class Patches(nn.Module):
    """An image of noise in place of each text, as patches, so that all models take the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patches = nn.Embedding(256, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """(rows, length) numbers to (rows, 4 * length, width)."""
        return self.patches(tokens).repeat(1, 4, 1)


class Projector(nn.Module):
    """What a tower has seen, as tokens for the layers behind it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.projection = nn.Linear(4 * width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, 4 * length, narrow) to (rows, length, width)."""
        return self.projection(x.unflatten(1, (4, -1)).transpose(1, 2).flatten(2))


Modules = OrderedDict[str, nn.Module]


def large_vocabulary() -> Modules:
    """A decoder whose output takes as long as several layers."""
    layers = {f"layer{number}": Block() for number in range(14)}
    return OrderedDict(
        embedding=nn.Embedding(256, WIDTH), **layers, head=nn.Linear(WIDTH, 8192)
    )


def experts_beside_dense() -> Modules:
    """A decoder in which every third layer has experts."""
    layers = {
        f"layer{number}": Experts() if number % 3 == 2 else Block()
        for number in range(14)
    }
    return OrderedDict(
        embedding=nn.Embedding(256, WIDTH), **layers, head=nn.Linear(WIDTH, 2048)
    )


def tower_in_front() -> Modules:
    """A narrow tower over long inputs, and a decoder behind it."""
    tower = {f"tower{number}": Block(96) for number in range(8)}
    layers = {f"layer{number}": Block() for number in range(8)}
    return OrderedDict(
        patches=Patches(96),
        **tower,
        projector=Projector(96),
        **layers,
        head=nn.Linear(WIDTH, 4096),
    )


MODELS: dict[str, Callable[[], Modules]] = {
    "large vocabulary": large_vocabulary,
    "experts beside dense": experts_beside_dense,
    "tower in front": tower_in_front,
}


class _Wait(torch.autograd.Function):
    """Hands on its input; the backward sleeps before it hands on the gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(context.seconds)
        return gradient, None


class Waiting(nn.Module):
    """A layer that computes a little and sleeps, forward and in each half of its backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = nn.Linear(128, 128)
        # It is called when the weight gradient is computed: in W, or in a whole backward.
        self.linear.weight.register_hook(self._wait)

    def _wait(self, gradient: Tensor) -> Tensor:
        time.sleep(self.seconds)
        return gradient

    def forward(self, x: Tensor) -> Tensor:
        """(rows, length, 128) to the same."""
        time.sleep(self.seconds)
        return _Wait.apply(x + 0.1 * self.linear(x), self.seconds)


@frozen
class Job:
    """What the ranks are told: which model, its layers' seconds if they wait, and what runs: plans
    in files, each with the names of the layers by stage and a file for its trace.
    """

    model: str
    seconds: Sequence[float] | None
    runs: Sequence[tuple[str, list[list[str]], str]]

    def modules(self) -> Modules:
        """A model, new."""
        torch.manual_seed(0)
        modules = MODELS[self.model]()
        if self.seconds is None:
            return modules
        return OrderedDict(zip(modules, map(Waiting, self.seconds), strict=True))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step."""
        rows = ROWS * MICROBATCHES
        if self.seconds is None:
            tokens = torch.randint(256, (rows, LENGTH))
            return tokens, tokens
        return torch.randn(rows, LENGTH, 128), torch.randn(rows, LENGTH, 128)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of scores, or the squared error of what only waits."""
    if targets.is_floating_point():
        return F.mse_loss(output, targets)
    return F.cross_entropy(output.flatten(0, -2), targets.flatten())


def rank_main(rank: int, folder: Path) -> None:
    """One rank of a launch: it makes a step of each run in turn, and rank 0 writes the traces."""
    torch.set_num_threads(1)
    job = Job(**json.loads((folder / "job.json").read_text()))
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=RANKS
    )
    plans = [read_plan(plan) for plan, _, _ in job.runs]
    pipelines = [
        Pipeline(
            plan,
            split(nn.Sequential(job.modules()), plan, layout=layout),
            loss_of,
            timeout=LIMIT,
        )
        for plan, (_, layout, _) in zip(plans, job.runs, strict=True)
    ]
    inputs, targets = job.batch()
    bars: list[list[Any]] = [[] for _ in pipelines]
    # All contenders in each turn, so that what else the machine does hits all alike.
    for turn in range(1 + TURNS):
        for pipeline, recorded in zip(pipelines, bars, strict=True):
            pipeline.record = True
            pipeline.step(inputs, targets)
            # The first one is a warm-up.
            if turn:
                recorded += [*pipeline.bars, *pipeline.messages]
            dist.barrier()
    # Clocks of processes differ; all bars are put on that of rank 0.
    offset = clock_offset(0)
    gathered: list[Any] | None = [None] * RANKS if rank == 0 else None
    dist.gather_object((bars, offset), gathered)
    if gathered is not None:
        for number, (plan, (_, _, trace)) in enumerate(
            zip(plans, job.runs, strict=True)
        ):
            of_ranks = [of_rank[number] for of_rank, _ in gathered]
            actions = aligned(of_ranks, [own for _, own in gathered])
            write_trace(Path(trace), plan, actions)
    dist.barrier()
    os._exit(0)


def launch(job: Job, folder: Path) -> None:
    """Run a job on all ranks; exit code 1 if it fails or takes too long."""
    (folder / "store").unlink(missing_ok=True)
    (folder / "job.json").write_text(
        json.dumps({"model": job.model, "seconds": job.seconds, "runs": job.runs})
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--folder", str(folder), "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=environment)
        for rank in range(RANKS)
    ]
    deadline = time.monotonic() + LIMIT
    try:
        for rank in ranks:
            if rank.wait(max(deadline - time.monotonic(), 0.1)):
                sys.exit(f"{job.model}: a rank ended with {rank.returncode}")
    except subprocess.TimeoutExpired:
        sys.exit(f"{job.model}: no end within {LIMIT} s")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@frozen
class Contender:
    """A plan under a split, and the step that was predicted for it, in microseconds."""

    name: str
    plan: Plan
    sizes: Sequence[int]
    predicted: float


def run_in_turns(
    model: str,
    seconds: Sequence[float] | None,
    layers: Sequence[Layer],
    contenders: Sequence[Contender],
) -> list[Run]:
    """What plans took that ran in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = []
        for number, contender in enumerate(contenders):
            plan = folder / f"{number}.json"
            write_plan(contender.plan, plan)
            layout = names_by_stage(layers, contender.sizes)
            runs.append((str(plan), layout, str(folder / f"{number}.trace.json")))
        launch(Job(model, seconds, runs), folder)
        return [read_run(trace) for _, _, trace in runs]


def measured_alone(model: str) -> list[float]:
    """The seconds of the model's own layers, forward and backward, in this process."""
    modules = MODELS[model]()
    tokens = torch.randint(256, (ROWS, LENGTH))
    return measure(nn.Sequential(modules), tokens)


def sizes_of_even_split(layers: Sequence[Layer], plan: Plan) -> list[int]:
    """How many layers the runtime puts into each stage by their costs."""
    cuts = even_split([layer.time for layer in layers], plan.layout).cuts
    return [end - begin for begin, end in pairwise(cuts)]


def defaults(layers: Sequence[Layer], links: Costs, fixed: Layer) -> list[Contender]:
    """The programs of the gallery at their defaults, the fastest first."""
    contenders = []
    for name, params in gallery(RANKS, MICROBATCHES):
        plan = compile(name, params)
        if plan.layout.pieces > len(layers):
            continue
        sizes = sizes_of_even_split(layers, plan)
        costs = costs_of_stages(layers, sizes, plan.layout, links, fixed)
        makespan = simulate(plan, costs).timeline.makespan
        contenders.append(Contender(name, plan, sizes, makespan))
    return sorted(contenders, key=lambda contender: contender.predicted)


def optimized(solution: Solution) -> Plan:
    """A solution with the best order that is found for it in some seconds."""
    problem = Problem.of(evolve(solution.schedule, costs=solution.costs))
    *_, answer = optimize(problem, SECONDS)
    return compile(
        Source("chosen.sched", program_of(problem, answer)), costs=solution.costs
    )


def compare(model: str, waits: bool) -> None:
    """Measure, choose, run, and print the table of a model."""
    alone = measured_alone(model)
    # A third in F, in I and in W each.
    seconds = [WAITING * share / sum(alone) / 3 for share in alone] if waits else None
    names = list(MODELS[model]())
    # Nothing has run yet: the layers' own times say how to split them for the first runs.
    guesses = [
        Layer(share, share, share, name=name)
        for share, name in zip(alone, names, strict=True)
    ]
    first = []
    for name in FIRST:
        plan = compile(name, {"ranks": RANKS, "microbatches": MICROBATCHES})
        first.append(Contender(name, plan, sizes_of_even_split(guesses, plan), 0.0))
    measured = run_in_turns(model, seconds, guesses, first)
    pieces = [len(contender.sizes) for contender in first]
    fixed = fixed_of_runs(
        [(run.costs, own) for run, own in zip(measured, pieces, strict=True)]
    )
    # The smaller stages are, the more is known of each layer.
    finest = max(range(len(first)), key=pieces.__getitem__)
    layers = layers_of_run(
        measured[finest].costs, first[finest].sizes, alone, names, fixed
    )
    links = Costs(p2p_time=measured[finest].costs.p2p_time)

    begin = time.monotonic()
    programs = defaults(layers, links, fixed)
    fits = search(layers, gallery(RANKS, MICROBATCHES), links, fixed=fixed)
    best = fits[0]
    solution = solve(layers, fits[:OPENED], links, fixed=fixed)
    plan = optimized(solution)
    predicted = simulate(plan, solution.costs).timeline.makespan
    took = time.monotonic() - begin
    near = [
        other for other in programs if other.predicted <= NEAR * programs[0].predicted
    ]
    chosen = [
        Contender("by search, solve and optimize", plan, solution.sizes, predicted),
        Contender(f"by search: {best.program}", best.plan, best.sizes, best.makespan),
    ]
    contenders = [*chosen, *near[:MOST]]
    runs = run_in_turns(model, seconds, layers, contenders)

    runs_of = " and ".join(FIRST)
    print(
        f"\n{model}: {len(layers)} layers, costs from runs of {runs_of}; chosen in {took:.0f} s"
    )
    per_op = (fixed.forward, fixed.input, fixed.weight)
    print(
        f"without any layer, F, I, W take {', '.join(f'{each / 1e3:.2f}' for each in per_op)} ms"
    )
    print(
        f"{'program':<32} {'layers by stage':<34} predicted, ms  measured, ms   error"
    )
    steps = [median(step.makespan for step in own.steps) for own in runs]
    for contender, step in zip(contenders, steps, strict=True):
        print(
            f"{contender.name:<32} {' '.join(map(str, contender.sizes)):<34} "
            f"{contender.predicted / 1e3:>13.1f} {step / 1e3:>13.1f} "
            f"{contender.predicted / step - 1:>+7.1%}"
        )
    fastest = min(range(len(chosen), len(steps)), key=steps.__getitem__)
    # Turn by turn: what else the machine did then has hit both.
    turns = zip(runs[0].steps, runs[fastest].steps, strict=True)
    low, middle, high = quantiles(
        (ours.makespan / other.makespan for ours, other in turns), n=4
    )
    print(
        f"chosen against the fastest of the gallery, {contenders[fastest].name}: {middle:.3f} of "
        f"its step, and {low:.3f} to {high:.3f} in half of the turns",
        flush=True,
    )


def main() -> None:
    """Print a table for each model; or be one rank of a launch."""
    parser = argparse.ArgumentParser(
        description="The search against the gallery, on processes."
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    help = "the model's own layers, or ones that wait (default: by the number of cores)"
    parser.add_argument("--layers", choices=("own", "waiting"), help=help)
    help = f"which models (default: all): {', '.join(MODELS)}"
    parser.add_argument("models", nargs="*", default=[*MODELS], help=help)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.folder)
    torch.set_num_threads(1)
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count()
    )
    waits = (
        (cores or 1) < RANKS if options.layers is None else options.layers == "waiting"
    )
    what = "layers that wait as for a device" if waits else "the models' own layers"
    print(
        f"{what}: {RANKS} processes on {cores} cores, load {os.getloadavg()[0]:.1f}; "
        f"{MICROBATCHES} microbatches, medians of {TURNS} steps"
    )
    for model in options.models:
        compare(model, waits)


if __name__ == "__main__":
    main()
