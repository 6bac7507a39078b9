"""`torchrun --nproc-per-node N -m schedlang.runtime PLAN`: train a small GPT with a plan for N ranks."""

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from schedlang.diagnostics import CompileError
from schedlang.measured import run_of
from schedlang.plan import Plan
from schedlang.plan_reader import open_plan, read_plan
from schedlang.runtime.checks import wrong_number
from schedlang.runtime.corpus import read_corpus
from schedlang.runtime.report import TOLERANCE, compare, print_header, report, total_losses
from schedlang.runtime.store import of_this_attempt
from schedlang.runtime.trace import aligned, write_trace
from schedlang.runtime.train import Checkpoints, Training, train, train_alone
from schedlang.runtime.watchdog import PipelineError, say


def main() -> NoReturn:
    """Train, report, with `--check` compare, and exit: 1 if the comparison fails."""
    options = _options()
    if "OMP_NUM_THREADS" not in os.environ:
        # The ranks are the parallel part.
        torch.set_num_threads(1)
    plan, corpus = _start(options.plan)
    checkpoints = Checkpoints(options.checkpoint, options.every) if options.checkpoint else None
    if plan.kernels:
        at_once = min(options.steps, options.every) if checkpoints else options.steps
        plan = plan.for_updates(max(at_once, plan.layout.updates))
    # The rank of the last stage has the losses, so it does the talking.
    writer = plan.placement[-1]
    if dist.get_rank() == writer:
        print_header(plan)
    try:
        training = train(plan, corpus, options.steps, options.seed, options.timeout, checkpoints)
    except PipelineError as error:
        say(str(error))
        _exit(1)
    if training.first >= options.steps:
        if dist.get_rank() == writer:
            print(f"nothing is left to do: `{options.checkpoint}` has step {training.first}")
        _exit(0)
    found: list[Any] | None = [None] * len(plan.ranks) if dist.get_rank() == writer else None
    right = [True]
    with _together():
        dist.gather_object(training, found, dst=writer)
    if found is not None:
        right = [_conclude(plan, corpus, options, found)]
    with _together():
        dist.broadcast_object_list(right, src=writer)
        dist.barrier()
        dist.destroy_process_group()
    _exit(0 if right[0] else 1)


@contextmanager
def _together() -> Iterator[None]:
    """What all ranks do after the training; where one of them is gone, the others end."""
    try:
        yield
    except RuntimeError as error:
        say(f"rank {dist.get_rank()} lost another rank after the training: {str(error).splitlines()[0]}")
        _exit(1)


def _exit(code: int) -> NoReturn:
    """End at once: a thread of gloo that outlives the interpreter aborts the process, once in a dozen runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N -m schedlang.runtime",
        description="Train a small GPT, on the source of Python's standard library, with a plan for N ranks.",
    )
    parser.add_argument("plan", type=Path, metavar="PLAN", help="a plan file, from `schedc compile -o`")
    parser.add_argument("--steps", type=_count, default=20, help="how many updates (default: 20)")
    parser.add_argument("--check", action="store_true", help="compare with the same training in one process")
    help = "write what the last steps did and when, for ui.perfetto.dev"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=help)
    help = "resume from the newest checkpoint in a folder, and write more there"
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help=help)
    parser.add_argument("--every", type=_count, default=10, help="how many updates from one to the next (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a rank waits at most (default: 60)")
    return parser.parse_args()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from 1")
    return int(text)


def _start(path: Path) -> tuple[Plan, Tensor]:
    """Join the other processes, and read what is to be done; where that fails on one rank, all of them end."""
    started = int(os.environ.get("WORLD_SIZE", 1))
    if "WORLD_SIZE" in os.environ:
        store, rank, ranks = next(rendezvous("env://"))
        dist.init_process_group("gloo", store=of_this_attempt(store), rank=rank, world_size=ranks)
    else:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    wrong = None
    try:
        # One rank proves the plan, and all have the same one, as the pipeline will see.
        plan, corpus = (open_plan if dist.get_rank() else read_plan)(path), read_corpus()
        wrong = wrong_number(plan, started)
        if wrong is None:
            wrong = "the plan has no backward" if plan.is_forward_only else None
        else:
            wrong += f": torchrun --nproc-per-node {len(plan.ranks)} -m schedlang.runtime {path}"
    except (CompileError, OSError) as error:
        wrong = str(error)
    found: list[str | None] = [None] * started
    # From here on all ranks end together; the launcher is not to kill the slower ones.
    default = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.all_gather_object(found, wrong)
    first = next((each for each in found if each is not None), None)
    if first is not None:
        say(wrong or first)
        _exit(1)
    signal.signal(signal.SIGTERM, default)
    return plan, corpus


def _conclude(plan: Plan, corpus: Tensor, options: argparse.Namespace, found: list[Training]) -> bool:
    """Print what came out, and the same as one line of JSON; whether it is right as far as is known."""
    bars = [[bar for step in (*each.recorded, *each.messages) for bar in step] for each in found]
    actions = aligned(bars, [each.offset for each in found])
    figures = report(run_of(plan, actions), found)
    if options.trace:
        try:
            write_trace(options.trace, plan, actions)
        except CompileError as error:
            say(str(error))
            return False
    right = True
    if options.check:
        losses, first = total_losses(found), found[0].first
        print(f"training again in one process, {first + len(losses)} steps", flush=True)
        errors = compare(found, losses, train_alone(plan, corpus, first + len(losses), options.seed))
        figures = errors | figures
        right = max(errors.values()) <= TOLERANCE
    print(json.dumps(figures), flush=True)
    return right


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        _exit(130)
