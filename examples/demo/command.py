"""The command `-m schedlang.runtime`, which trains a small GPT with a plan: its options, and what
it reports in the end.
"""

import argparse
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from schedlang.cli.command_line import Parser
from schedlang.cli.inputs import read_cost_options
from schedlang.cli.main import replace_unknown_characters
from schedlang.cli.options import TRAINING, add_options
from schedlang.cli.outputs import check_output
from schedlang.cli.run import STARTED, check_feedback
from schedlang.cli.usage import USAGE, UsageError
from schedlang.diagnostics.diagnostic import CompileError
from schedlang.examples.demo.checkpoint_folder import (
    CheckpointFolder,
    find_checkpoints,
)
from schedlang.examples.demo.collective import (
    device_for,
    join,
    leave,
    linked,
    together,
)
from schedlang.examples.demo.corpus import read_corpus
from schedlang.examples.demo.gpt import BLOCKS
from schedlang.examples.demo.one_process import check_comparable, train_reference
from schedlang.examples.demo.plan_source import share_plan
from schedlang.examples.demo.recipe import Recipe
from schedlang.examples.demo.report import (
    compare,
    is_rounding,
    print_header,
    report,
    total_losses,
)
from schedlang.examples.demo.trace_file import aligned, write_trace
from schedlang.examples.demo.training import Training, train
from schedlang.examples.demo.workload import Workload
from schedlang.extras.measured import run_of
from schedlang.plan.plan import Plan
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.watchdog import say


def main() -> NoReturn:
    """Train, report, with `--check` compare, and exit: 1 if the comparison fails."""
    replace_unknown_characters()
    options = _options()
    if options.json:
        # What is for people goes where it does not mix with the result.
        sys.stdout = sys.stderr
    if "OMP_NUM_THREADS" not in os.environ:
        # The ranks are the parallel part.
        torch.set_num_threads(1)
    # A line without the place in torch's or our sources, which help nobody here.
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    workload, checkpoints = _start(options)
    # The rank of the last stage has the losses, so it does the talking.
    writer = workload.writer
    if dist.get_rank() == writer:
        print_header(workload)
    try:
        training = train(
            workload,
            options.steps,
            options.timeout,
            checkpoints,
            options.audit,
            options.stop_on_nan,
        )
    except PipelineError as error:
        say(str(error))
        leave(1)
    if training.first >= options.steps:
        if dist.get_rank() == writer:
            print(
                f"nothing is left to do: `{options.checkpoint}` has step {training.first}"
            )
        leave(0)
    found: list[Any] | None = (
        [None] * dist.get_world_size() if dist.get_rank() == writer else None
    )
    # A list, since what is broadcast is put into one.
    right = [True]
    with linked("after the training"):
        dist.gather_object(training, found, dst=writer)
    if found is not None:
        right = [_conclude(workload, options, found)]
    with linked("after the training"):
        dist.broadcast_object_list(right, src=writer)
        dist.barrier()
        dist.destroy_process_group()
    leave(0 if right[0] else 1)


def _options() -> argparse.Namespace:
    parser = Parser(
        prog="torchrun --nproc-per-node N -m schedlang.runtime",
        description="Train a small GPT, on the source of Python's standard library, with N ranks.",
    )
    help = "a program, compiled for N ranks; or a plan for N ranks, from `schedc compile -o`"
    parser.add_argument("file", type=Path, metavar="FILE", help=help)
    add_options(parser, TRAINING)
    parser.set_defaults(optimizer="sgd", steps=20, every=10)
    parser.add_argument(
        "--json",
        action="store_true",
        help="only the result on stdout, as one line of JSON",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of weights and batches (default: 0)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=60,
        help="seconds that a rank waits at most (default: 60)",
    )
    try:
        options: argparse.Namespace = parser.parse_args(sys.argv[1:])
        # `schedc run` has looked itself, and knows what it was given.
        if options.trace and STARTED not in os.environ:
            check_output(options.trace, [str(options.file)], force=False)
        options.given_costs = read_cost_options(options)
    except (UsageError, CompileError) as error:
        parser.exit(USAGE, f"error: {error}\nsee: {parser.prog} --help\n")
    return options


def _start(options: argparse.Namespace) -> tuple[Workload, CheckpointFolder | None]:
    """Join the other processes, and find out what is to be done. If that fails for one process, all
    end.
    """
    device = device_for(options.device)
    group = join(options.timeout, device)
    plan = share_plan(
        options.file, options.params, options.given_costs, options.replicas, group
    )
    corpus = together(read_corpus, group)
    checkpoints = (
        find_checkpoints(Path(options.checkpoint), options.every, plan, group)
        if options.checkpoint
        else None
    )
    layers = checkpoints.layers if checkpoints else 0
    blocks = layers - 2 if layers else max(BLOCKS, plan.layout.pieces)
    # A step makes all updates of its plan, and a checkpoint can only come between two steps.
    at_once = min(options.steps, options.every) if checkpoints else options.steps
    plan = together(lambda: _for_updates(plan, at_once), group)
    if options.check:
        together(lambda: check_comparable(plan), group)
    if options.error_feedback:
        together(lambda: check_feedback(plan), group)
    recipe = Recipe(options.optimizer, options.lr, options.error_feedback)
    workload = Workload(
        plan,
        corpus,
        blocks,
        options.seed,
        options.replicas,
        recipe,
        options.unequal,
        device,
    )
    return workload, checkpoints


def _for_updates(plan: Plan, updates: int) -> Plan:
    """The plan of a schedule without a flush for so many updates, or those that it shows."""
    try:
        return (
            plan.for_updates(max(updates, plan.layout.updates))
            if plan.kernels
            else plan
        )
    except ValueError as error:
        raise PipelineError(str(error)) from None


def _conclude(
    workload: Workload, options: argparse.Namespace, found: list[Training]
) -> bool:
    """Print what came out, for people or with `--json` also for programs; gives whether it is
    right, as far as was compared.
    """
    ranks = found[: len(workload.plan.ranks)]
    bars = [
        [bar for step in (*rank.recorded, *rank.messages) for bar in step]
        for rank in ranks
    ]
    actions = aligned(bars, [training.offset for training in ranks])
    figures = report(workload, run_of(workload.plan, actions), found)
    if options.trace:
        try:
            write_trace(Path(options.trace), workload.plan, actions)
        except CompileError as error:
            say(str(error))
            return False
    for rank, training in enumerate(found):
        for verdict in training.audits:
            print(f"audit, rank {rank}: {verdict}", flush=True)
    right = True
    if options.check:
        losses = total_losses(found)
        first = found[0].first
        print(f"training again in one process, {first + len(losses)} steps", flush=True)
        alone = train_reference(workload, first + len(losses))
        message_type = workload.plan.message_type
        errors = compare(found, losses, alone, message_type)
        figures = errors | figures
        right = is_rounding(errors, message_type)
    if options.json:
        print(json.dumps(figures), file=sys.__stdout__, flush=True)
    return right


def run() -> NoReturn:
    """The whole command; interrupted, it ends with the exit code of a shell's."""
    # Ctrl-C reaches all ranks, so none has to tell the others, as a pipeline does for a script.
    signal.signal(signal.SIGINT, lambda *_: leave(130))
    main()
