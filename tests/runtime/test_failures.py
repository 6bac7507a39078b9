"""How a run ends when something goes wrong, on real processes: all ranks end, and say why."""

import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the runtime needs torch", exc_type=ImportError)
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from schedlang import Source, compile
from schedlang.runtime import Pipeline, PipelineError, split
from tests.support.models import (
    UPDATES,
    WIDTH,
    Does,
    Summed,
    batch,
    kill,
    modules,
    pipeline,
    program,
    sleep,
)
from tests.support.ranks import LIMIT, Run

pytestmark = pytest.mark.processes


def fails(
    what: Callable[[torch.Tensor], object],
    stage: int = 1,
    call: int = 2,
    **options: object,
) -> None:
    """Two steps of 1F1B, with something that happens at forward `call` of a stage."""
    plan = program("1f1b", ranks=dist.get_world_size(), microbatches=4)
    model = modules(len(plan.placement))
    model[stage] = Does(model[stage], call, what)
    ours = pipeline(plan, model, **options)
    for step in range(2):
        ours.step(*batch(plan, step))


def throw(_: torch.Tensor) -> torch.Tensor:
    raise ValueError("boom\nand more")


def shorten(output: torch.Tensor) -> torch.Tensor:
    return output[1:]


def as_list(output: torch.Tensor) -> list[torch.Tensor | None]:
    return [output, None]


def vector_loss() -> None:
    plan = program("1f1b", ranks=2, microbatches=4)
    model = modules(2)
    mine = {stage: model[stage] for stage in plan.stages_of(dist.get_rank())}
    Pipeline(plan, mine, lambda output, target: (output - target) ** 2).step(
        *batch(plan, 0)
    )


def indivisible() -> None:
    plan = program("1f1b", ranks=2, microbatches=4)
    pipeline(plan, modules(2)).step(torch.ones(7, WIDTH), torch.ones(7, WIDTH))


def dealt_out(is_shuffled: bool) -> None:
    """Each rank has rows of its own, as a script without a pipeline has them."""
    plan = program("1f1b", ranks=2, microbatches=4)
    data = TensorDataset(*batch(plan, 0))
    sampler = DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, 4, is_shuffled, None if is_shuffled else sampler)
    ours = pipeline(plan, modules(2))
    torch.manual_seed(dist.get_rank())
    for given in loader:
        ours.step(*given)


def dictionary() -> None:
    """As a collator of transformers makes it."""
    plan = program("1f1b", ranks=2, microbatches=4)
    tokens = torch.zeros(8, 2, dtype=torch.int64)
    model = [nn.Embedding(4, WIDTH), nn.Linear(WIDTH, WIDTH)]
    pipeline(plan, model).step({"input_ids": tokens, "mask": tokens}, tokens)


def penalty() -> None:
    """A penalty on the gradient of the output by the inputs of another stage."""
    plan = program("1f1b", ranks=2, microbatches=4)
    inputs, targets = batch(plan, 0)
    inputs.requires_grad_()

    def loss_fn(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(output.sum(), inputs, create_graph=True)
        return gradient.norm()

    rank = dist.get_rank()
    Pipeline(plan, {rank: modules(2)[rank]}, loss_fn).step(inputs, targets)


class Casting(nn.Sequential):
    """Casts what its head is given to the type of the head's weight, as Mamba does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x).to(self[1].weight.dtype))


def reads_elsewhere() -> None:
    plan = program("1f1b", ranks=2, microbatches=4)
    model = Casting(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2)))
    stages = split(model, plan, ["0", "1"])
    Pipeline(plan, stages, nn.functional.mse_loss).step(*batch(plan, 0))


def no_targets() -> None:
    plan = program("1f1b", ranks=2, microbatches=4)
    pipeline(plan, modules(2)).step(batch(plan, 0)[0])


def other_plan() -> None:
    plan = program("1f1b", ranks=3, microbatches=4 + (dist.get_rank() == 2))
    pipeline(plan, modules(3)).step(*batch(plan, 0))


def other_message() -> None:
    """Two pipelines of one plan, which the ranks step in different order."""
    plan = program("1f1b", ranks=2, microbatches=4)
    ours = [pipeline(plan, modules(2)), pipeline(plan, modules(2))]
    ours[dist.get_rank()].step(*batch(plan, 0))


def too_few_processes() -> None:
    pipeline(program("1f1b", ranks=4), modules(4))


class Forgetful(Summed):
    """Returns nothing for the next slice."""

    def forward(self, x: torch.Tensor, past: torch.Tensor | None) -> torch.Tensor:
        return super().forward(x, past)[0]


def no_past() -> None:
    plan = program("seq1f1b", ranks=2)
    pipeline(plan, [Forgetful(torch.float64) for _ in range(2)]).step(*batch(plan, 0))


def stages_of_another_rank() -> None:
    Pipeline(program("1f1b", ranks=2), {0: modules(1)[0]}, nn.functional.mse_loss)


def no_loss() -> None:
    Pipeline(program("1f1b", ranks=2), {dist.get_rank(): modules(1)[0]})


def replicas_that_differ() -> None:
    pipeline(program("gems", ranks=2, microbatches=2), modules(4))


def no_optimizers() -> None:
    pipeline(compile(Source("updates.sched", UPDATES)), modules(4))


def absent() -> None:
    plan = program("1f1b", ranks=2, microbatches=4)
    if dist.get_rank() == 0:
        time.sleep(2)
    pipeline(plan, modules(2), timeout=1).step(*batch(plan, 0))


def idles() -> None:
    """Rank 1 does not come to the second step."""
    plan = program("1f1b", ranks=3, microbatches=4)
    ours = pipeline(plan, modules(3), timeout=1)
    ours.step(*batch(plan, 0))
    if dist.get_rank() == 1:
        time.sleep(LIMIT)
    ours.step(*batch(plan, 1))


def signalled(what: signal.Signals) -> None:
    """Rank 0 gets a signal while it waits inside gloo for rank 1, which sleeps."""
    # A job in the background of a shell ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plan = program("1f1b", ranks=3, microbatches=4)
    model = modules(3)
    processes = [0, 0, 0]
    dist.all_gather_object(processes, os.getpid())
    model[1] = Does(model[1], 2, partial(alarm, what, processes[0]))
    pipeline(plan, model).step(*batch(plan, 0))


def interrupt(_: torch.Tensor) -> torch.Tensor:
    """Ctrl-C, while the rank computes."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)
    raise AssertionError


def leave(_: torch.Tensor) -> torch.Tensor:
    """As a script's own handler of a signal may do."""
    sys.exit(1)


def raises_in_a_wait() -> None:
    """A handler of a signal raises an error on rank 0 while that waits for rank 1, as that of torch
    does when a process of a DataLoader has died.
    """
    signal.signal(signal.SIGUSR1, die_of_memory)
    plan = program("1f1b", ranks=2, microbatches=4)
    model = modules(2)
    processes = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    model[1] = Does(model[1], 2, partial(tell, processes[0]))
    pipeline(plan, model).step(*batch(plan, 0))


def die_of_memory(*_: object) -> None:
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")


def tell(process: int, output: torch.Tensor) -> torch.Tensor:
    time.sleep(1)
    os.kill(process, signal.SIGUSR1)
    time.sleep(1)
    return output


def as_distributed(mesh: DeviceMesh, output: torch.Tensor) -> torch.Tensor:
    return DTensor.from_local(output, mesh, [Shard(0)])


def distributed() -> None:
    """A DTensor between two stages, as tensor parallelism leaves it."""
    plan = program("1f1b", ranks=2, microbatches=4)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "tp"))
    model = modules(2)
    model[0] = Does(model[0], 0, partial(as_distributed, mesh["tp"]))
    pipeline(plan, model).step(*batch(plan, 0))


def alarm(what: signal.Signals, process: int, output: torch.Tensor) -> torch.Tensor:
    time.sleep(1)
    os.kill(process, what)
    return sleep(output)


# What goes wrong: what ranks do, how many, which of them finds it out (None: whoever is first), and
# what all of them say.
PLACE = r"\(1f1b.sched:\d+\)"
FAILURES = {
    "throws": (
        partial(fails, throw),
        3,
        1,
        rf"rank 1 failed at 1F2 {PLACE}: ValueError: boom",
    ),
    "throws_at_the_store": (
        partial(fails, throw, stage=0),
        3,
        0,
        rf"rank 0 failed at 0F2 {PLACE}: ValueError: boom",
    ),
    "shape": (
        partial(fails, shorten, stage=0),
        3,
        0,
        rf"rank 0 failed at 0SEND_F2 {PLACE}: the output of stage 0 is float64 \[2, 8\] for microbatch 2, "
        r"but float64 \[3, 8\] in the first step with inputs of this shape",
    ),
    "shape_later": (
        partial(fails, shorten, stage=0, call=6),
        3,
        0,
        rf"rank 0 failed at 0SEND_F2 {PLACE}: .* is float64 \[2, 8\] .* but float64 \[3, 8\] .*",
    ),
    "dtype": (
        partial(fails, torch.Tensor.float, stage=0),
        3,
        0,
        rf"rank 0 failed at 0SEND_F2 {PLACE}: the output of stage 0 is float32 \[3, 8\] for microbatch 2, "
        r"but float64 \[3, 8\] in the first step with inputs of this shape",
    ),
    "text": (
        partial(fails, str),
        3,
        1,
        rf"rank 1 failed at 1F2 {PLACE}: the output of stage 1 is a str: it must be a tensor, or .*",
    ),
    "list": (
        partial(fails, as_list),
        3,
        1,
        rf"rank 1 failed at 1F2 {PLACE}: the output of stage 1 is a list that holds a NoneType: it must .*",
    ),
    "integers": (
        partial(fails, torch.Tensor.long),
        3,
        1,
        rf"rank 1 failed at 1SEND_F2 {PLACE}: the output of stage 1 is int64 .* for microbatch 2.*",
    ),
    "vector_loss": (
        vector_loss,
        2,
        1,
        rf"rank 1 failed at 1F0 {PLACE}: the loss has the shape \[3, 8\], it must be a scalar .*",
    ),
    "indivisible": (
        indivisible,
        2,
        None,
        r"rank \d failed: `inputs` for stage 0 have 7 rows, which do not divide into 4 microbatches",
    ),
    "dealt_out": (
        partial(dealt_out, is_shuffled=False),
        2,
        1,
        r"rank 1 failed: rank 0 was given another batch than this rank, .* a DistributedSampler, .*",
    ),
    "shuffled": (
        partial(dealt_out, is_shuffled=True),
        2,
        1,
        r"rank 1 failed: rank 0 was given another batch than this rank, .* same seed on all ranks",
    ),
    "dictionary": (
        dictionary,
        2,
        0,
        rf"rank 0 failed at 0F0 {PLACE}: TypeError: .* must be Tensor, not dict \(.*`options`.*\)",
    ),
    "penalty": (
        penalty,
        2,
        1,
        rf"rank 1 failed at 1F0 {PLACE}: RuntimeError: .* \(the graph of a stage begins at its .*\)",
    ),
    "reads_elsewhere": (
        reads_elsewhere,
        2,
        0,
        rf"rank 0 failed at 0F0 {PLACE}: AttributeError: the model reads `1.weight`, and another .*",
    ),
    "no_targets": (
        no_targets,
        2,
        1,
        r"rank 1 failed: there are no `targets`: this rank has a last stage, .*",
    ),
    "other_message": (
        other_message,
        2,
        1,
        rf"rank 1 failed at 1RECV_F0 {PLACE}: rank 0 has begun a step of another pipeline",
    ),
    "other_plan": (
        other_plan,
        3,
        None,
        r"rank \d failed: rank \d has another plan: all ranks must be given the same",
    ),
    "processes": (
        too_few_processes,
        2,
        None,
        r"rank \d failed: the plan needs 4 processes, 2 were started",
    ),
    "no_past": (
        no_past,
        2,
        0,
        r"rank 0 failed at 0F\(m0.k0\) \(seq1f1b.sched:\d+\): stage 0 returns a Tensor: where .* two .*",
    ),
    "stages": (
        stages_of_another_rank,
        2,
        1,
        r"rank 1 failed: the plan gives this rank the stages \[1\], `stages` has \[0\]",
    ),
    "no_loss": (
        no_loss,
        2,
        1,
        r"rank 1 failed: the last stage is on this rank, so it needs a `loss_fn`",
    ),
    "replicas": (
        replicas_that_differ,
        2,
        None,
        r"rank \d failed: the replicas of stage \d on rank 0 and on rank 1 differ: .*",
    ),
    "optimizers": (
        no_optimizers,
        2,
        None,
        r"rank \d failed: the plan updates the stages \[\d, \d\], `optimizers` has \[\]",
    ),
    "absent": (absent, 2, 1, r"rank 1 failed: rank 0 has built no pipeline within 1 s"),
    "stalls": (
        partial(fails, sleep, timeout=1),
        3,
        None,
        rf"rank 1 has made no progress for \d\.\d s at 1F2 {PLACE}.*",
    ),
    "idles": (
        idles,
        3,
        None,
        r"rank 1 has made no progress for \d\.\d s between two steps: rank \d has waited 1 s at .*",
    ),
    "terminated": (
        partial(signalled, signal.SIGTERM),
        3,
        None,
        rf"rank 0 was terminated at 0B\d {PLACE}",
    ),
    "interrupted_in_an_op": (
        partial(fails, interrupt),
        3,
        None,
        rf"rank 1 was interrupted at 1F2 {PLACE}",
    ),
    "left": (
        partial(fails, leave),
        3,
        None,
        rf"rank 1 failed at 1F2 {PLACE}: SystemExit: 1",
    ),
    "raises_in_a_wait": (
        raises_in_a_wait,
        2,
        0,
        rf"rank 0 failed at 0\w+ {PLACE}: RuntimeError: DataLoader worker \(pid 7\) is killed by "
        r"signal: Killed.  \(a process of this rank's DataLoader has ended, .*\)",
    ),
    "distributed": (
        distributed,
        2,
        0,
        rf"rank 0 failed at 0SEND_F0 {PLACE}: the output of stage 0 is a DTensor, .* return "
        r"`x.to_local\(\)`, .*",
    ),
    "interrupted": (
        partial(signalled, signal.SIGINT),
        3,
        None,
        rf"rank 0 was interrupted at 0B\d {PLACE}",
    ),
}


@pytest.mark.parametrize("scenario", FAILURES)
def test_all_ranks_say_what_went_wrong_and_exit(run_ranks: Run, scenario: str) -> None:
    body, ranks, finder, message = FAILURES[scenario]
    outcome = run_ranks(body, ranks)
    assert outcome.codes == [1] * ranks, outcome.logs
    raised = [
        rank
        for rank, log in enumerate(outcome.logs)
        if says(log, rf".*PipelineError: {message}")
    ]
    printed = [
        rank
        for rank, log in enumerate(outcome.logs)
        if says(log, rf"(rank {rank}: stopped: )?{message}")
    ]
    assert sorted(raised + printed) == list(range(ranks)), outcome.logs
    # Who finds it out raises, for the user to see where, or reports; the others have nothing to
    # add.
    assert finder is None or raised == [finder]
    # A report has a line for each rank, where it was: one rank prints it, the others a single line.
    reports = [rank for rank, log in enumerate(outcome.logs) if "\n  rank 0 " in log]
    assert len(reports) == (
        ".sched:" in message
        or scenario in ("idles", "indivisible", "no_targets")
        or "another batch" in message
    ), outcome.logs
    assert all(
        outcome.logs[rank].count("\n") == 1 for rank in {*printed} - {*reports}
    ), outcome.logs
    causes = {
        found[1]
        for rank in printed
        if (
            found := re.search(
                rf"^(?:rank {rank}: stopped: )?({message})$", outcome.logs[rank], re.M
            )
        )
    }
    assert len(causes) == 1
    assert outcome.seconds < 15


def says(log: str, line: str) -> bool:
    return re.search(rf"^{line}$", log, re.MULTILINE) is not None


def test_an_exception_of_a_stage_keeps_its_traceback(run_ranks: Run) -> None:
    log = run_ranks(partial(fails, throw), 3).logs[1]
    assert "in throw" in log
    assert "ValueError: boom\nand more\n" in log


def crashes_between() -> None:
    """The script fails on rank 1, not the pipeline."""
    plan = program("1f1b", ranks=dist.get_world_size(), microbatches=4)
    ours = pipeline(plan, modules(dist.get_world_size()))
    ours.step(*batch(plan, 0))
    assert dist.get_rank() != 1, "between"
    ours.step(*batch(plan, 1))


@pytest.mark.parametrize(
    ("body", "code"),
    [(partial(fails, kill), -9), (crashes_between, 1)],
    ids=["killed", "crashed"],
)
def test_a_rank_that_dies_is_named_by_the_others(
    run_ranks: Run, body: Callable[[], None], code: int
) -> None:
    outcome = run_ranks(body, 4)
    assert outcome.codes == [1, code, 1, 1]
    for rank in (0, 2, 3):
        assert says(
            outcome.logs[rank],
            r"(.*(stopped|Error): )?rank 1 is gone: rank \d lost its connection at .*",
        )
    assert outcome.seconds < 15


def test_the_rank_that_holds_the_store_may_die(run_ranks: Run) -> None:
    outcome = run_ranks(partial(fails, kill, stage=0, call=5), 3)
    assert outcome.codes == [-9, 1, 1]
    # Rank 2 does not talk to rank 0 but for the store, where it might have read the cause.
    for rank in (1, 2):
        assert says(
            outcome.logs[rank],
            rf"(.*(stopped|Error): )?rank 0 is gone: rank {rank} lost (its connection|the) .*",
        )
    assert outcome.seconds < 15


def stopped(_: torch.Tensor) -> torch.Tensor:
    # A process that is stopped ends by nothing less, and must not be left behind.
    later(5, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGSTOP)
    raise AssertionError


def later(seconds: float, what: signal.Signals) -> None:
    """Send this process a signal, even if it is stopped by then."""
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(os.getppid(), what)
        os._exit(0)


def test_a_rank_that_does_not_answer_is_named_by_the_others(run_ranks: Run) -> None:
    outcome = run_ranks(partial(fails, stopped, timeout=1), 3)
    assert outcome.codes == [1, -9, 1]
    for rank in (0, 2):
        assert says(
            outcome.logs[rank],
            rf"(rank {rank}: stopped: )?rank 1 does not answer: rank \d has waited 1 s at .*",
        )


def threads() -> list[Any]:
    """Whether gloo's threads leave the core to the main thread."""
    pipeline(program("1f1b", ranks=2), modules(2))
    # By thread, its name, as Linux tells it.
    names = {
        int(each.parent.name): each.read_text().strip()
        for each in Path("/proc/self/task").glob("*/comm")
    }
    policies = {
        os.sched_getscheduler(thread)
        for thread, name in names.items()
        if name == "gloo_tcp_loop"
    }
    return [sorted(policies), os.sched_getscheduler(os.getpid())]


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux has such a policy for threads"
)
def test_threads_of_gloo_do_not_interrupt_the_main_thread(run_ranks: Run) -> None:
    assert run_ranks(threads, 2).results() == [[[os.SCHED_BATCH], os.SCHED_OTHER]] * 2


def fails_twice() -> list[str]:
    """A script that goes on after a failure."""
    plan = program("1f1b", ranks=1, microbatches=4)
    told = []
    for _ in range(2):
        try:
            pipeline(plan, modules(1)).step(torch.ones(7, WIDTH), torch.ones(7, WIDTH))
        except PipelineError as error:
            told.append(str(error))
    return told


def test_a_second_pipeline_after_a_failure_is_refused(run_ranks: Run) -> None:
    ((first, second),) = run_ranks(fails_twice, 1).results()
    assert "have 7 rows, which do not divide into 4 microbatches" in first
    assert second.startswith("an earlier pipeline of this process has failed")


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def compute(output: torch.Tensor) -> torch.Tensor:
    busy(5)
    return output


def let_another_compute(output: torch.Tensor) -> torch.Tensor:
    """As a compiler does, which is a process of its own."""
    child = os.fork()
    if child == 0:
        busy(5)
        os._exit(0)
    os.waitpid(child, 0)
    return output


def rest(output: torch.Tensor) -> torch.Tensor:
    """As one that reads a file."""
    time.sleep(2)
    return output


def works() -> int:
    """Two steps, in which and between which ranks work for longer than others wait for anything
    else.
    """
    plan = program("1f1b", ranks=3, microbatches=4)
    model = modules(3)
    for stage, what in enumerate((let_another_compute, compute, rest)):
        model[stage] = Does(model[stage], 0, what)
    ours = pipeline(plan, model, timeout=1)
    ours.step(*batch(plan, 0))
    if dist.get_rank() == 1:
        busy(3)
    ours.step(*batch(plan, 1))
    return ours._watchdog.step


def test_a_rank_that_works_is_waited_for(run_ranks: Run) -> None:
    assert run_ranks(works, 3).results() == [2, 2, 2]


def differs_by_hand() -> list[str]:
    """What is told of two batches of random numbers, which each rank draws by itself."""
    plan = program("1f1b", ranks=2, microbatches=4)
    ours = pipeline(plan, modules(2))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(2):
            ours.step(*batch(plan, 2 * step + dist.get_rank()))
    return [str(each.message) for each in told]


def test_batches_that_differ_by_hand_are_a_warning(run_ranks: Run) -> None:
    first, second = run_ranks(differs_by_hand, 2).results()
    assert first == []
    (told,) = second
    assert told.startswith("rank 0 was given another batch than this rank, so inputs")
