"""One rank's part of a pipeline: the plan's actions as a list of calls, walked once per step."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.actions import is_send, is_transfer
from schedlang.kinds import Kind
from schedlang.plan import Plan
from schedlang.runtime.exchange import Exchange
from schedlang.runtime.stage import LossFn, Stage
from schedlang.runtime.watchdog import PipelineError, Watchdog, wait_until
from schedlang.timeline import Bar
from schedlang.transports import BLOCKING, PORTABLE

#: The message that a compute op waits for, where it comes from another rank.
_NEEDS = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}

#: An action as a call: its index, the call, and the kind, stage and microbatch of a compute op.
Call = tuple[int, Callable[[], None], tuple[Kind, int, int] | None]

_pipelines = count()


class Pipeline:
    """Trains the stages of this rank as a plan says, together with the other ranks of the default process group.

    `stages` are the modules of exactly the stages that the plan gives to this rank; each takes and returns one tensor,
    microbatch first. `loss_fn(output, targets)` gives the scalar loss of one microbatch. Every microbatch's loss is
    multiplied by `loss_scale` before its backward; without it by 1/microbatches, for the gradient of the mean.
    `optimizers` are those of the stages that the plan updates (`U`), and no others. No wait is longer than `timeout`
    seconds.

    While `record` is true, a step leaves its compute ops in `bars`, with times of `time.perf_counter()`.

    PipelineError in the constructor or in a step means that the pipeline is over: all other ranks have printed the
    cause and ended with exit code 1.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, nn.Module],
        loss_fn: LossFn,
        *,
        loss_scale: float | None = None,
        optimizers: Mapping[int, Optimizer] | None = None,
        timeout: float = 60.0,
    ) -> None:
        if not dist.is_initialized():
            raise PipelineError("there is no process group: call torch.distributed.init_process_group first")
        self.record = False
        self.bars: list[Bar] = []
        self._plan, self._rank = plan, dist.get_rank()
        self._watchdog = Watchdog(plan, timeout)
        weakref.finalize(self, self._watchdog.close)
        try:
            self._check(stages, optimizers or {})
            _check_same_plan(plan, self._watchdog, timeout)
            scale = 1 / plan.microbatches if loss_scale is None else loss_scale
            self._stages = self._connected(stages, optimizers or {}, loss_fn, scale)
            self._device = _device(stages)
            self._exchange = Exchange(plan, self._stages, self._device, timeout, self._watchdog)
            self._calls = list(self._prepared())
            if self._device.type == "cuda":
                _warm_up(self._device)
        except Exception as error:
            self._watchdog.fail(error)

    def step(self, inputs: Tensor | None = None, targets: Tensor | None = None) -> Tensor | None:
        """Run the plan once on a batch; gradients add up in `.grad`.

        `inputs` are needed on the rank of the first stage, `targets` on that of the last; both are cut into
        microbatches along their first dimension. Gives the losses by microbatch, unscaled, on the rank of the last
        stage, and None elsewhere.
        """
        watchdog, last = self._watchdog, len(self._plan.placement) - 1
        watchdog.step += 1
        try:
            if 0 in self._stages:
                self._stages[0].inputs.update(self._cut("inputs", inputs))
            if last in self._stages:
                self._stages[last].targets.update(self._cut("targets", targets))
            if self.record:
                self._walk_recording()
            else:
                self._walk()
            self._exchange.finish()
            watchdog.action = None
        except Exception as error:
            watchdog.fail(error)
        if last not in self._stages:
            return None
        return torch.stack([self._stages[last].outputs.pop(each) for each in range(self._plan.microbatches)])

    def _walk(self) -> None:
        watchdog = self._watchdog
        for action, call, _ in self._calls:
            watchdog.action = action
            call()

    def _walk_recording(self) -> None:
        self.bars = []
        for action, call, op in self._calls:
            self._watchdog.action = action
            start = perf_counter()
            call()
            if op is not None:
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                self.bars.append(Bar(*op, start, perf_counter()))

    def _cut(self, name: str, batch: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """The microbatches of a batch, by number."""
        if not isinstance(batch, Tensor) or not batch.ndim:
            raise PipelineError(f"`{name}` must be a tensor on rank {self._rank}")
        microbatches = self._plan.microbatches
        if not len(batch) or len(batch) % microbatches:
            raise PipelineError(f"`{name}` has {len(batch)} rows, which do not divide into {microbatches} microbatches")
        return enumerate(batch.chunk(microbatches))

    def _prepared(self) -> Iterator[Call]:
        """The actions of this rank as calls."""
        actions = self._plan.ranks[self._rank]
        for batch in actions.batches():
            if is_transfer(actions.kind[batch.start]):
                rows = [(Kind(actions.kind[each]), actions.stage[each], actions.microbatch[each]) for each in batch]
                rows.sort(key=lambda row: not is_send(row[0]))
                transfers = [self._exchange.transfer(*row) for row in rows]
                yield batch.start, partial(self._exchange.issue, transfers), None
            else:
                for index in batch:
                    yield from self._compute(index)

    def _compute(self, index: int) -> Iterator[Call]:
        """A compute op as a call, after one that waits for what it needs from another rank."""
        actions = self._plan.ranks[self._rank]
        kind, number, microbatch = Kind(actions.kind[index]), actions.stage[index], actions.microbatch[index]
        need = _NEEDS.get(kind)
        if need is not None and self._plan.peer(need, number) is not None:
            yield index, partial(self._exchange.arrive, need, number, microbatch), None
        stage = self._stages[number]
        if kind == Kind.U:
            call: Callable[[], None] = stage.update
        else:
            call = partial(
                {
                    Kind.F: stage.forward,
                    Kind.B: stage.backward,
                    Kind.I: stage.backward_input,
                    Kind.W: stage.backward_weight,
                    Kind.R: stage.recompute,
                }[kind],
                microbatch,
            )
        yield index, call, (kind, number, microbatch)

    def _connected(
        self, modules: Mapping[int, nn.Module], optimizers: Mapping[int, Optimizer], loss_fn: LossFn, loss_scale: float
    ) -> dict[int, Stage]:
        """The stages of this rank; neighbours among them share their boxes."""
        last = len(self._plan.placement) - 1
        stages = {}
        for number, module in modules.items():
            recomputed = {microbatch for stage, microbatch in self._plan.recomputed if stage == number}
            loss = loss_fn if number == last else None
            stages[number] = Stage(number, module, optimizers.get(number), loss, loss_scale, recomputed)
        for number, stage in stages.items():
            if number + 1 in stages:
                following = stages[number + 1]
                following.inputs, stage.gradients = stage.outputs, following.input_gradients
        return stages

    def _check(self, stages: Mapping[int, nn.Module], optimizers: Mapping[int, Optimizer]) -> None:
        """Whether what this rank was given is what the plan wants here."""
        wrong = unsupported(self._plan) or wrong_number(self._plan, dist.get_world_size())
        if wrong is not None:
            raise PipelineError(wrong)
        if "cpu:" not in dist.get_backend_config():
            raise PipelineError("headers travel between CPUs: use init_process_group('cpu:gloo,cuda:nccl')")
        held = self._plan.stages_of(self._rank)
        if sorted(stages) != held:
            raise PipelineError(f"the plan gives this rank the stages {held}, `stages` has {sorted(stages)}")
        actions = self._plan.ranks[self._rank]
        updated = [stage for kind, stage in zip(actions.kind, actions.stage, strict=True) if kind == Kind.U]
        if sorted(optimizers) != sorted(updated):
            raise PipelineError(f"the plan updates the stages {sorted(updated)}, `optimizers` has {sorted(optimizers)}")


def unsupported(plan: Plan) -> str | None:
    """What of a plan this runtime does not run yet."""
    batches = any(group and is_transfer(k) for a in plan.ranks for k, group in zip(a.kind, a.group, strict=True))
    safe = (PORTABLE,) if batches else (PORTABLE, BLOCKING.name)
    found = {
        "several pipelines over the same ranks": len(plan.layout.pipelines) > 1,
        "slices of microbatches": plan.layout.slices > 1,
        "no backward": plan.is_forward_only,
        "offload of activations": bool(plan.offloaded),
        # Receives wait for the first header of their stage, so ranks may block; and with them the sends of their batch,
        # which `portable` allows and `blocking` does not.
        f"a proof for `{plan.transport}` alone": plan.transport not in safe,
        "updates but no flush between them": plan.layout.updates > 1,
    }
    return next((f"this runtime does not run plans with {name} yet" for name, has in found.items() if has), None)


def wrong_number(plan: Plan, started: int) -> str | None:
    """What is wrong with the number of processes."""
    needed = len(plan.ranks)
    if needed == started:
        return None
    plural = "" if needed == 1 else "es"
    return f"the plan needs {needed} process{plural}, {started} {'was' if started == 1 else 'were'} started"


def _check_same_plan(plan: Plan, watchdog: Watchdog, timeout: float) -> None:
    """Compare plans among all ranks, which also waits for all of them."""
    group = f"schedlang/plans/{next(_pipelines)}"
    keys = [f"{group}/{rank}" for rank in range(len(plan.ranks))]
    watchdog.store.set(keys[dist.get_rank()], plan.digest())
    if not wait_until(partial(watchdog.store.check, keys), timeout):
        missing = [str(rank) for rank, key in enumerate(keys) if not watchdog.store.check([key])]
        raise PipelineError(f"rank {' and '.join(missing)} has built no pipeline within {timeout:g} s")
    own = plan.digest().encode()
    for rank, digest in enumerate(watchdog.store.multi_get(keys)):
        if digest != own:
            raise PipelineError(f"rank {rank} has another plan")


def _device(stages: Mapping[int, nn.Module]) -> torch.device:
    """Where the modules live, which must be one device."""
    devices = {weight.device for stage in stages.values() for weight in stage.parameters()} or {torch.device("cpu")}
    if len(devices) > 1:
        raise PipelineError(f"the stages of a rank must be on one device, not on {', '.join(map(str, devices))}")
    return devices.pop()


def _warm_up(device: torch.device) -> None:
    """Let all ranks send something to the next: the first batch of an NCCL communicator needs all of them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks > 1:
        sent, received = torch.zeros(1, device=device), torch.zeros(1, device=device)
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
