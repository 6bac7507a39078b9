"""Training that goes on when one of its ranks dies, without a restart.

The plan has several pipelines with the same weights, so the weights of every stage are on several
ranks. For each rank that may die there is a second plan, compiled before the training begins, for
the ranks that are then left. If a rank dies in a step, the others do the whole step again under
that plan, on the same batch:

    rank 0    F  F  B  F ─┐             F  F  F  B  …   the plan for ranks 0, 1 and 3
    rank 1    F  B  F  B ─┤ agree:      F  F  F  B  …
    rank 2    F  F  ✗     │ rank 2
    rank 3    F  B  F  B ─┘ is dead     F  B  F  F  …

No weights move, since every rank keeps its stages' modules. Gradients and buffers are those from
before the step again, so that after the step they are what one process has on the whole batch.

How all ranks come to the same decision. A rank ends a step with a barrier of all ranks. Then it
writes the outcome of the step into the store, `done`, with a compare-and-set: only the first
outcome that is written counts. Where a rank has died, this happens instead:

  1. A rank that waits for the dead one finds the connection closed. It notes in the store that it
     has left the step, and closes its own connections. So each rank that waits for it leaves the
     step in turn, and all do within the time of one op: none can wait for a rank for ever.
  2. A rank that has left waits until there is an outcome, or until each rank that has not left is
     dead: until its heartbeats in the store have stopped for two seconds, if the connection to it
     broke, or else for the time-out. Then it writes the outcome: `lost`, and which ranks.
  3. All read the one outcome. If it is `done`, every rank had come to the barrier and has its
     gradients; the loss shows again in the next step. If one rank is lost, the others make a
     process group of those left, and a pipeline of the plan for them.

A rank that was taken for dead reads this, and ends. So no two ranks ever use different gradients.

The store must outlive the rank. torchrun has it in its own process, and without torchrun it is in
that of rank 0, which then cannot be lost. Only one rank can be lost in a training, and only in
`run` or `step`. Whoever dies elsewhere is found in the next step; a second loss, or one while the
new pipeline is built, ends all ranks, as does a rank that fails with an error of its own.
"""

import gc
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count
from time import monotonic, sleep
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from schedlang.diagnostics.wrong_arguments import check_number, check_type, check_whole
from schedlang.plan.plan import Plan
from schedlang.runtime.arguments import check_plan as check_is_plan
from schedlang.runtime.arguments import check_stages
from schedlang.runtime.checks import check_plan, device_of
from schedlang.runtime.errors import LostRank, PipelineError
from schedlang.runtime.heartbeats import Heartbeat, Heartbeats
from schedlang.runtime.pipeline import Pipeline
from schedlang.runtime.processes import PIPELINE, all_processes
from schedlang.runtime.setup import LossFn, Tied
from schedlang.runtime.store import LimitedStore, connection, is_of_torchrun
from schedlang.runtime.values import Value
from schedlang.runtime.watchdog import GRACE, say

T = TypeVar("T")

#: All processes make the same standbys one after another, and number them alike.
_standbys = count()

#: Seconds between two looks at the store.
_PAUSE = 0.05

#: A tag that no message has.
_UNUSED_TAG = 2**31 - 1

#: The outcome of a run in which no rank was lost; and what the other ones begin with.
_DONE = "done"
_LOST = "lost"


class Standby:
    """A pipeline that goes on if one of its ranks dies in a step.

    `plan` has several pipelines with the same weights, on all processes. `left` has for each rank
    that may be lost the plan for the others, such as `recycle`'s; the others are its ranks in their
    order. Such a plan has as many microbatches and as many stages in each pipeline, and gives a
    rank no stages of which it has no weights. Neither plan updates weights (`U`). `stages`,
    `loss_fn` and the `options` are those of `Pipeline`.

    All ranks are given the same batches. Where a rank is lost, `pipeline` is another one
    afterwards. An optimizer over `parameters()` stays as it is.
    """

    def __init__(
        self,
        plan: Plan,
        left: Mapping[int, Plan],
        stages: Mapping[int, nn.Module],
        loss_fn: LossFn | None = None,
        *,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        _check_arguments(plan, left, stages, timeout)
        _check_plans(plan, left)
        if not dist.is_initialized():
            raise PipelineError(
                "there is no process group: call torch.distributed.init_process_group first"
            )
        if 0 in left and not is_of_torchrun():
            raise PipelineError(
                "rank 0 has the store of the process group, so no rank can go on without it: start "
                "the processes with torchrun, which has the store itself, or leave rank 0 out of "
                "`left`"
            )
        device = device_of(stages)
        if device is not None and device.type != "cpu":
            raise PipelineError(
                f"the stages are on the device `{device}`, and `Standby` sends messages by gloo, "
                "whose connections break where a rank dies: it goes on on CPUs alone yet. On GPUs, "
                "start again from a checkpoint: torchrun --max-restarts"
            )
        check_plan(plan, all_processes(), stages)
        piece = plan.layout.piece
        #: The modules of this rank, by the number of their stage in each of the pipelines.
        self._modules: dict[int, nn.Module] = {}
        for stage, module in stages.items():
            if self._modules.setdefault(piece(stage), module) is not module:
                raise PipelineError(
                    f"stage {stage} is the same stage as another one of this rank, in another "
                    "pipeline: give both one module"
                )
        self._left = left
        self._loss_fn = loss_fn
        self._options = options | {"timeout": timeout, "survives_loss": True}
        tied: Tied = options.get("tied") or getattr(stages, "tied", None) or ()
        # Pipelines have the same numbers of stages, so names by those of the first one fit all.
        self._options["tied"] = [
            {piece(stage): name for stage, name in names.items()} for names in tied
        ]
        self._ranks = [*range(dist.get_world_size())]
        self._outcomes = _Outcomes(self._ranks, next(_standbys), timeout)
        self._outcomes.publish_plans(left)
        self.pipeline = self._build(plan)
        self._outcomes.check_plans()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank."""
        return self.pipeline.parameters()

    def step(
        self, inputs: Value = None, targets: Value = None, **given: Any
    ) -> Tensor | None:
        """A step of the pipeline on a batch, see `Pipeline.step`. It has the rows of all pipelines
        of the plan, and is the same on all ranks.
        """

        def one_step(pipeline: Pipeline) -> Tensor | None:
            losses: Tensor | None = pipeline.step(inputs, targets, **given)
            return losses

        return self.run(one_step)

    def run(self, work: Callable[[Pipeline], T]) -> T:
        """Call `work` with the pipeline, and where a rank is lost meanwhile, with that of the ranks
        left; gives what it returns. All ranks do so together. It may change gradients and buffers,
        but no weights: a step, and a clipping of its gradients.
        """
        before = _State(self._modules)
        begin = monotonic()
        self._outcomes.begin()
        is_done = False
        while not is_done:
            try:
                made = work(self.pipeline)
                self.pipeline.barrier()
            except LostRank as error:
                self._outcomes.leave(error.ranks)
                _close_connections(self._group)
                outcome = self._outcomes.wait()
            else:
                outcome = self._outcomes.write(_DONE)
            is_done = outcome == _DONE
            if not is_done:
                self._go_on(_ranks_of(outcome), monotonic() - begin)
                before.restore()
                self._outcomes.begin()
        return made

    def _go_on(self, lost: Sequence[int], seconds: float) -> None:
        """Build the pipeline of the ranks that are left."""
        names = " and ".join(f"rank {rank}" for rank in lost)
        own = dist.get_rank()
        if own in lost:
            raise PipelineError(
                f"{names} did not answer, and the others go on without it"
            )
        if len(lost) != 1 or lost[0] not in self._left:
            raise PipelineError(
                f"{names} is gone, and there is no plan for the others"
                if lost
                else "the connection between two ranks broke, and no rank is gone"
            )
        plan = self._left[lost[0]]
        self._left = {}
        self._ranks = [rank for rank in self._ranks if rank != lost[0]]
        if own == self._ranks[0]:
            say(
                f"{names} is gone: the others begin the step anew after {seconds:.1f} s, under the "
                f"plan {plan.title}"
            )
        self.pipeline.close()
        del self.pipeline
        # The activations of the step that was left are in cycles.
        gc.collect()
        self.pipeline = self._build(plan)

    def _build(self, plan: Plan) -> Pipeline:
        """A pipeline of the ranks that there are, in a process group of its own: the connections of
        one that was left are closed.
        """
        limit = self._options["timeout"]
        try:
            group = dist.new_group(
                self._ranks,
                timedelta(seconds=limit),
                backend="gloo",
                use_local_synchronization=True,
            )
        except RuntimeError as error:
            names = ", ".join(map(str, self._ranks))
            raise PipelineError(
                f"the ranks {names} have not connected within {limit:g} s"
            ) from error
        assert isinstance(group, dist.ProcessGroup)
        # The limit is for the connections. A wait may be longer, since others may compute.
        group.set_timeout(dist.default_pg_timeout)
        self._group = group
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(PIPELINE,))
        own = self._ranks.index(dist.get_rank())
        stages = {
            stage: self._modules[plan.layout.piece(stage)]
            for stage in plan.stages_of(own)
        }
        self._outcomes.go_on(self._ranks)
        return Pipeline(plan, stages, self._loss_fn, mesh=mesh, **self._options)


class _State:
    """Gradients and buffers as they are before a step, which is perhaps done again."""

    def __init__(self, modules: Mapping[int, nn.Module]) -> None:
        self._gradients = [
            (weight, weight.grad)
            for module in modules.values()
            for weight in module.parameters()
        ]
        self._values = [
            (gradient, gradient.clone())
            for _, gradient in self._gradients
            if gradient is not None
        ]
        self._buffers = [
            (module, {name: each.clone() for name, each in module.named_buffers()})
            for module in modules.values()
        ]

    def restore(self) -> None:
        """Set them as they were."""
        for weight, gradient in self._gradients:
            weight.grad = gradient
        with torch.no_grad():
            # In the memory in which they were, of which a script may have views.
            for gradient, values in self._values:
                gradient.copy_(values)
            for module, before in self._buffers:
                for name, buffer in module.named_buffers():
                    buffer.copy_(before[name])


class _Outcomes:
    """The outcomes of runs, in the store: each is written once, and all ranks read the same."""

    def __init__(self, ranks: Sequence[int], number: int, timeout: float) -> None:
        world = dist.group.WORLD
        assert world is not None
        self.ranks = ranks
        self._rank = dist.get_rank()
        self._number = number
        self._timeout = timeout
        self._store = LimitedStore(
            connection(world.get_group_store()), timeout, lambda: None
        )
        self._heartbeats = Heartbeats(self._store)
        self._digests = ""
        self._run = 0
        #: The ranks to which a connection broke, one of which is dead.
        self._suspects: set[int] = set()
        #: The last heartbeat of each rank that others wait for, and since when there was no other.
        self._heard: dict[int, tuple[Heartbeat | None, float]] = {}

    def _key(self, *words: object) -> str:
        return "/".join(map(str, ["standby", self._number, *words]))

    def publish_plans(self, left: Mapping[int, Plan]) -> None:
        """Let other ranks compare the plans for ranks that are left."""
        digests = {rank: plan.digest for rank, plan in sorted(left.items())}
        self._digests = json.dumps(digests)
        self._store.set(self._key("plans", self._rank), self._digests)

    def check_plans(self) -> None:
        """PipelineError if another rank has other plans. All have published theirs."""
        for rank in self.ranks:
            theirs = self._store.get(self._key("plans", rank)).decode()
            if theirs != self._digests:
                raise PipelineError(
                    f"rank {rank} has another `left`: all ranks must be given the same plans"
                )

    def go_on(self, ranks: Sequence[int]) -> None:
        """Go on with these ranks, whose connections are new."""
        self.ranks = ranks
        self._suspects.clear()

    def begin(self) -> None:
        """Begin a run."""
        self._run += 1
        self._heard = {}

    def write(self, outcome: str) -> str:
        """Write the outcome of the run, unless there is one; return the one that counts."""
        key = self._key(self._run, "outcome")
        written: bytes = self._store.compare_set(key, "", outcome)
        if outcome == _DONE and self._rank == self.ranks[0]:
            # All ranks have come to the barrier of this run, so they have read the last outcome.
            self._store.delete_key(self._key(self._run - 1, "outcome"))
        return written.decode()

    def leave(self, suspects: Collection[int]) -> None:
        """Note that this rank has left the run, since the connection to one of these broke."""
        self._suspects.update(suspects)
        self._store.set(self._key(self._run, "left", self._rank), "")

    def wait(self) -> str:
        """Wait for the outcome, after this rank has left. Write it if all ranks that have not left
        are dead.
        """
        key = self._key(self._run, "outcome")
        while not self._store.check([key]):
            running = [
                rank
                for rank in self.ranks
                if not self._store.check([self._key(self._run, "left", rank)])
            ]
            if all([self._is_dead(rank) for rank in running]):
                return self.write(" ".join(map(str, [_LOST, *running])))
            sleep(_PAUSE)
        found: bytes = self._store.get(key)
        return found.decode()

    def _is_dead(self, rank: int) -> bool:
        """Whether the heartbeats of a rank have stopped: for two seconds if its connection broke,
        and for the time-out if not, since a call may block Python's other threads.
        """
        last = self._heartbeats.of(rank)
        if rank not in self._heard or last != self._heard[rank][0]:
            self._heard[rank] = last, monotonic()
        _, since = self._heard[rank]
        limit = GRACE if rank in self._suspects else self._timeout
        return monotonic() - since > limit


def _ranks_of(outcome: str) -> list[int]:
    """The ranks that are lost by an outcome."""
    return [int(rank) for rank in outcome.split()[1:]]


def _check_plans(plan: Plan, left: Mapping[int, Plan]) -> None:
    """PipelineError if the ranks that are left cannot go on under the plan for them."""
    held = [
        {plan.layout.piece(stage) for stage in plan.stages_of(rank)}
        for rank in range(len(plan.ranks))
    ]
    for lost, other in left.items():
        of_plan = f"`left[{lost}]`, {other.title},"
        others = [pieces for rank, pieces in enumerate(held) if rank != lost]
        if len(other.ranks) != len(others):
            raise PipelineError(
                f"{of_plan} is for {len(other.ranks)} ranks, and without rank {lost} there are "
                f"{len(others)}"
            )
        for what in ("microbatches", "pieces"):
            ours = getattr(plan.layout, what)
            theirs = getattr(other.layout, what)
            if ours != theirs:
                word = "stages in a pipeline" if what == "pieces" else what
                raise PipelineError(f"{of_plan} has {theirs} {word}, the plan {ours}")
        for rank, pieces in enumerate(others):
            needed = {other.layout.piece(stage) for stage in other.stages_of(rank)}
            if not needed <= pieces:
                number = rank if rank < lost else rank + 1
                raise PipelineError(
                    f"{of_plan} gives rank {number} the stages {sorted(needed)} of a pipeline, and "
                    f"it has the weights of {sorted(pieces)}"
                )


def _close_connections(group: dist.ProcessGroup) -> None:
    """Close all connections of this process in a group, so that no other rank waits for it there.

    Of a wait that is too long, gloo tells all ranks of its group by closing the connections.
    """
    for peer in range(group.size()):
        if peer != group.rank():
            with suppress(RuntimeError):
                work = group.recv([torch.empty(1)], peer, _UNUSED_TAG)
                work.wait(timedelta(milliseconds=1))


def _check_arguments(plan: Any, left: Any, stages: Any, timeout: Any) -> None:
    """The arguments of `Standby` that are not `Pipeline`'s, or that it needs before that."""
    check_is_plan(plan)
    what = "a mapping of ranks to the plans for the others, such as {3: plan}"
    check_type("left", left, Mapping, what)
    for rank, other in left.items():
        check_whole("a rank in left", rank, 0, len(plan.ranks) - 1)
        check_type(f"left[{rank}]", other, Plan, "a Plan")
    check_stages(stages)
    check_number("timeout", timeout, above=0)
