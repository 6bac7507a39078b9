"""What a rank offloads is kept by another rank, on real processes: the same training to the bit, in
less memory on the ranks that would hold most.
"""

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch", exc_type=ImportError
)

import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh  # noqa: E402

from schedlang import Source, compile  # noqa: E402
from schedlang.plan.plan import Plan  # noqa: E402
from schedlang.runtime import Pipeline  # noqa: E402
from schedlang.runtime.errors import PipelineError  # noqa: E402
from schedlang.runtime.parts.keepers import (  # noqa: E402
    KeptElsewhere,
    KeptHere,
    of_rank,
)
from schedlang.runtime.parts.offload import CopiesOfCpu, Memory, Offload  # noqa: E402
from schedlang.runtime.torch_private.tensors import changes_of  # noqa: E402
from tests.support.mesh import mesh, on  # noqa: E402
from tests.support.models import (  # noqa: E402
    ROWS,
    WIDTH,
    batch,
    modules,
    pipeline,
    program,
)
from tests.support.paths import PROGRAMS  # noqa: E402
from tests.support.ranks import Run  # noqa: E402
from tests.support.sizes import STEPS  # noqa: E402
from tests.support.training import printed_figures  # noqa: E402

pytestmark = pytest.mark.processes

#: The bytes that a stage saves of a microbatch: its output. Its input stays where it is.
SAVED = ROWS * WIDTH * 8


@pytest.mark.parametrize("steps", STEPS)
def test_steps_are_those_of_one_process_to_the_bit(train: Callable, steps: int) -> None:
    options = "--steps", steps, "--check", "--audit"
    trained = train(4, PROGRAMS / "bpipe.sched", *options)
    assert trained.codes == [0] * 4, trained.stderr
    figures = printed_figures(trained.stdout)
    assert figures["gradient_error"] == 0
    assert figures["loss_error"] == 0


def copies(ours: Pipeline) -> list[KeptElsewhere | KeptHere]:
    return [part for part in ours._parts if isinstance(part, KeptElsewhere | KeptHere)]


def keeping() -> tuple[int, int, list[Tensor]]:
    """What a rank has sent to others at most while a forward ran, and kept for others, in
    activations; and the gradients and losses of two steps, with an evaluation between them.
    """
    plan = program("bpipe", ranks=4, microbatches=8)
    model = modules(4)
    rank = dist.get_rank()
    ours = pipeline(plan, model)
    away = [0]
    kept = [0]

    def look(*_: object) -> None:
        for part in copies(ours):
            # All that this rank has begun.
            if isinstance(part, KeptElsewhere):
                wait(part._begun)
                away.append(
                    sum(
                        memory.size - memory.bytes.numel()
                        for each in ours._stages.values()
                        for offload in each.parts
                        for activations in getattr(offload, "_activations", {}).values()
                        for memory in activations.memories
                    )
                )

    def note(
        part: KeptHere, take: Callable[[int, int], None], stage: int, microbatch: int
    ) -> None:
        take(stage, microbatch)
        kept.append(
            sum(each.numel() for tensors in part._kept.values() for each in tensors)
        )

    for part in copies(ours):
        if isinstance(part, KeptHere):
            part._take = partial(note, part, part._take)
    model[rank].register_forward_pre_hook(look)
    losses = [ours.step(*batch(plan, 0))]
    ours.evaluate(*batch(plan, 1))
    losses.append(ours.step(*batch(plan, 2)))
    made = [each for each in losses if each is not None]
    made += [weight.grad for weight in model[rank].parameters()]
    return max(away) // SAVED, max(kept) // SAVED, made


def plainly() -> list[Tensor]:
    """The gradients and losses of the same without copies."""
    plan = program("1f1b", ranks=4, microbatches=8)
    model = modules(4)
    ours = pipeline(plan, model)
    made = [ours.step(*batch(plan, seed)) for seed in (0, 2)]
    weights = model[dist.get_rank()].parameters()
    return [
        each
        for each in (*made, *(weight.grad for weight in weights))
        if each is not None
    ]


@pytest.mark.core
def test_memory_is_free_while_another_rank_keeps_it(run_ranks: Run) -> None:
    """Rank 0 has one activation on rank 3 while it makes the next; two are there while one comes
    and one goes.
    """
    found = run_ranks(keeping, 4).results()
    assert [(away, kept) for away, kept, _ in found] == [(1, 0), (0, 0), (0, 0), (0, 2)]
    expected = run_ranks(plainly, 4).results()
    for (_, _, ours), theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs) >= 2
        assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def trained(plan: Plan, of: DeviceMesh | None) -> list[Tensor]:
    """The gradients of two steps, whose microbatches have different numbers of rows."""
    model = modules(len(plan.placement))
    ours = pipeline(plan, model) if of is None else on(of, plan, model)
    rank = dist.get_rank() if of is None else of.get_local_rank("pp")
    for step in range(2):
        generator = torch.Generator().manual_seed(
            dist.get_rank() // len(plan.ranks) * 2 + step
        )
        rows = [1 + (number + step) % 3 for number in range(plan.microbatches)]
        inputs, targets = (
            [
                torch.randn(each, WIDTH, generator=generator, dtype=torch.float64)
                for each in rows
            ]
            for _ in range(2)
        )
        ours.step(inputs, targets, counts=rows)
    return [weight.grad for weight in model[rank].parameters()]


def unequal() -> list[list[Tensor]]:
    return [
        trained(program(name, ranks=4, microbatches=8), None)
        for name in ("1f1b", "bpipe")
    ]


def in_replicas() -> list[list[Tensor]]:
    of = mesh("dp", "pp")
    return [
        trained(compile(Source("two.sched", text)), of)
        for text in (TWO.replace(KEEP, ""), TWO)
    ]


KEEP = "keeper(r) = 1 - r"
TWO = f"""schedule two {{
    param ranks = 2  param microbatches = 4
    {KEEP}
    rank r {{
        for m in 0 .. microbatches {{ F(m) if r == 0 {{ offload(m) }} }}
        for m in 0 .. microbatches {{ if r == 0 {{ reload(m) }} B(m) }}
    }}
}}"""


@pytest.mark.core
@pytest.mark.parametrize("train", [unequal, in_replicas])
def test_microbatches_of_unequal_lengths_and_replicas(
    run_ranks: Run, train: Callable[[], list[list[Tensor]]]
) -> None:
    for plain, kept in run_ranks(train, 4).results():
        assert len(plain) == len(kept) == 2
        assert all(torch.equal(*pair) for pair in zip(plain, kept, strict=True))


def leftovers() -> tuple[int, int]:
    """How many threads of copies are there with a pipeline, and without it."""
    ours = pipeline(program("bpipe", ranks=4, microbatches=8), modules(4))
    ours.step(*batch(program("bpipe", ranks=4, microbatches=8), 0))

    def threads() -> int:
        return sum(
            each.name.startswith("schedlang copies") for each in threading.enumerate()
        )

    before = threads()
    del ours
    deadline = time.monotonic() + 10
    # A stage and its parts refer to each other.
    while gc.collect() and threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, threads()


def test_threads_end_with_their_pipeline(run_ranks: Run) -> None:
    assert run_ranks(leftovers, 4).results() == [(1, 0), (0, 0), (0, 0), (1, 0)]


#: Rank 0 has two stages, of which the second changes what the first has saved.
SHARED = """schedule shared {
    param ranks = 2  param microbatches = 1
    KEEP
    stage s in 0 .. 3 on s / 2
    rank r {
        if r == 0 { F(0, 0) F(1, 0) offload(0, 0) B(1, 0) reload(0, 0) B(0, 0) }
        if r == 1 { F(2, 0) B(2, 0) }
    }
}"""


class Changes(nn.Module):
    """A stage that changes its input in place."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x.mul_(2)
        return x * 3


def changing(keep: str) -> None:
    """A step in which the second stage changes what the first one has saved."""
    text = SHARED.replace("KEEP", "" if keep == "nowhere" else keep)
    if keep == "nowhere":
        text = text.replace("offload(0, 0)", "").replace("reload(0, 0)", "")
    plan = compile(Source("shared.sched", text))
    model = modules(3)
    model[1] = Changes()
    pipeline(plan, model).step(*batch(plan, 0))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ("nowhere", "modified by an inplace operation"),
        (
            "",
            "what stage 0 has saved of microbatch 0 for its backward was changed in place",
        ),
        (
            "keeper(r) = 1 - r",
            "what stage 0 has saved of microbatch 0 for its backward was changed",
        ),
    ],
    ids=["nowhere", "host", "rank"],
)
def test_what_is_changed_before_it_is_away_is_refused(
    run_ranks: Run, keep: str, message: str
) -> None:
    """Autograd says so itself, but not where what it has saved goes elsewhere."""
    failed = run_ranks(changing, 2, keep)
    assert any(failed.codes)
    assert message in "".join(failed.logs), failed.logs


def test_what_is_changed_on_its_way_is_refused() -> None:
    """The rank goes on while a copy is under way: the thread looks once more when it is over."""
    memory = Memory(torch.zeros(8, dtype=torch.uint8))
    saved = torch.zeros(2)
    memory.saved = [(saved, changes_of(saved))]
    change = partial(saved.add_, 1)

    class Slow:
        def make_copy(self, copy: Callable[[], None]) -> None:
            copy()

        def send(self, tensor: Tensor, peer: int, tag: int) -> None:
            change()

        def end_copy(self, in_flight: object, peer: int) -> None:
            pass

        def wait_for(self, copy: Future[None], peer: int) -> None:
            copy.result()

    copies = KeptElsewhere(Slow(), 1, 1)
    copies.offload([memory], 0, 5)
    with pytest.raises(
        PipelineError, match="of microbatch 5 for its backward was changed"
    ):
        copies.end_step()


def test_gpus_are_refused() -> None:
    plan = program("bpipe", ranks=4, microbatches=8)
    own = Offload(0, modules(1)[0], torch.device("cpu"), {1}, CopiesOfCpu())
    site = SimpleNamespace(
        plan=plan, rank=0, device=torch.device("cuda"), parts={0: [own]}
    )
    tags = SimpleNamespace(copies=lambda rank: rank)
    rank = SimpleNamespace(site=site, exchange=SimpleNamespace(tags=tags))
    with pytest.raises(PipelineError, match="rank 0 offloads activations to rank 3"):
        [*of_rank(rank)]


def failing() -> None:
    """The thread of a rank fails in the midst of a step, in which another one waits for it."""
    plan = program("bpipe", ranks=4, microbatches=8)
    model = modules(4)
    ours = pipeline(plan, model, timeout=30.0)

    def fail(*_: object) -> None:
        raise ValueError("boom")

    for part in copies(ours):
        if isinstance(part, KeptHere):
            part._give = fail
    ours.step(*batch(plan, 0))


def test_a_copy_that_fails_ends_all_ranks(run_ranks: Run) -> None:
    failed = run_ranks(failing, 4)
    assert failed.codes == [1] * 4
    assert all(
        "rank 3 failed" in log and "ValueError: boom" in log for log in failed.logs
    ), failed.logs
