"""One rank's part of a pipeline: the plan's actions as a list of calls, walked once per step."""

import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from schedlang.plan.plan import Plan
from schedlang.runtime.batches import Batches, Options
from schedlang.runtime.calls import Call, prepare
from schedlang.runtime.checks import (
    check_clipping,
    check_mesh,
    check_plan,
    check_same,
    check_stages,
    check_transport,
    device_of,
)
from schedlang.runtime.cutting.model import Stages
from schedlang.runtime.gradients.clipping import UpdateClip, total_norm
from schedlang.runtime.gradients.copies import Tied, check_copies, find_copies
from schedlang.runtime.gradients.sums import Sums, replica_sums
from schedlang.runtime.gradients.updates import replica_updates
from schedlang.runtime.saving.checkpoint import VERSIONS, RandomState, Stateful, resume, write
from schedlang.runtime.saving.model_files import write_model
from schedlang.runtime.stage.stage import LossFn
from schedlang.runtime.stage.values import Value, join
from schedlang.runtime.stages import connect
from schedlang.runtime.transport.exchange import Exchange
from schedlang.runtime.transport.precision import rounding_to
from schedlang.runtime.transport.ranks import ranks_of
from schedlang.runtime.transport.wire import Wire, warm_up
from schedlang.runtime.watch.watchdog import BETWEEN, PipelineError, Watchdog
from schedlang.schedule.actions import is_transfer, word
from schedlang.schedule.forward_only import FORWARD, forward_only
from schedlang.schedule.timeline import Bar

_pipelines = count()


class Pipeline:
    """Runs the stages of this rank as a plan says, together with the other ranks of the default
    process group.

    Or with those of a device `mesh` along its dimension `pp`. Along the other one, if it has two,
    are replicas of the pipeline, each with batches of its own, whose gradients are summed
    (docs/parallel.md).

    `stages` are the modules of exactly the stages that the plan gives to this rank. A stage takes
    what the one before returns, a tensor, or tensors in tuples, lists and dictionaries, microbatch
    first; a tuple as several arguments. Where the plan has slices or skips, stages take and return
    more, see `SlicedStage` and `SkippingStage`. `loss_fn(output, targets)` gives the scalar loss of
    one microbatch. Every microbatch's loss is multiplied by `loss_scale` before its backward;
    without it by 1/microbatches, those of one update in all replicas, for the gradient of the mean.
    `tied` has for each weight that several stages have, as input and output embeddings, its names
    by stage: `[{0: "byte.weight", 3: "scores.weight"}]`, by default those of `split`; its gradients
    are summed at the end of a step. `transfer_dtype`, bfloat16 or float16, is what activations and
    gradients of more bits are rounded to between ranks. Of stages that `fully_shard` has sharded,
    the weights of `max_gathered` are gathered at once at most, by default of all. `optimizers` are
    those of the stages that the plan updates (`U`), and no others. Gradients of such an update are
    clipped to `max_norm`, over all stages, if it is given. No wait is longer than `timeout`
    seconds.

    A plan without a flush is for a number of updates (`Plan.for_updates`), and a step makes them
    all. The next step goes on as if there had been no cut; `state_dict` has what it needs for that
    beside modules and optimizers.

    While `record` is true, a step leaves its compute ops in `bars`, and its sends and waits for
    receives in `messages`, with times of `time.perf_counter()`; in a `torch.profiler` all of them
    are ranges by their names in the plan.

    PipelineError in the constructor or in a step means that the pipeline is over: all other ranks
    have printed the cause and ended with exit code 1.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, nn.Module],
        loss_fn: LossFn | None = None,
        *,
        mesh: DeviceMesh | None = None,
        tied: Tied | None = None,
        transfer_dtype: torch.dtype | None = None,
        loss_scale: float | None = None,
        max_gathered: int | None = None,
        max_norm: float | None = None,
        optimizers: Mapping[int, Optimizer] | None = None,
        timeout: float = 60.0,
    ) -> None:
        check_mesh(mesh)
        tied = stages.tied if tied is None and isinstance(stages, Stages) else tied or ()
        self.record = False
        self.bars = list[Bar]()
        self.messages = list[Bar]()
        ranks = ranks_of(mesh)
        number = next(_pipelines)
        self._plan = plan
        self._ranks = ranks
        self._rank = ranks.own
        self._watchdog = Watchdog(plan, ranks, number, timeout)
        weakref.finalize(
            self, self._watchdog.close
        ).atexit = False  # at the exit of the process, it closes itself
        try:
            check_plan(plan, ranks)
            check_stages(
                plan, self._rank, stages, optimizers or {}, loss_fn, tied, max_gathered, max_norm
            )
            check_same(plan, tied, transfer_dtype, max_norm, ranks, self._watchdog)
            self._device = device_of(stages)
            check_transport(plan, ranks.group, self._device)
            self._copies = find_copies(plan, stages, tied)
            check_copies(self._copies, ranks, self._watchdog)
            self._stages = connect(plan, ranks, stages, optimizers or {}, loss_fn, loss_scale)
            self._wire = wire = Wire(ranks, timeout, self._watchdog)
            self._exchange = Exchange(
                plan, self._rank, number, self._device, wire, rounding_to(transfer_dtype)
            )
            updates = replica_updates(plan, self._stages, ranks, wire)
            self._batches = Batches(plan, self._stages)
            self._sums = Sums([] if updates else self._copies, ranks, wire)
            self._clip = clip = (
                None if max_norm is None else UpdateClip(plan, ranks, max_norm, self._stages, wire)
            )
            self._prepare = partial(
                prepare, self._rank, self._stages, self._exchange, max_gathered, updates, clip
            )
            self._training = self._prepare(
                plan, replica_sums(self._stages, self._copies, ranks, wire)
            )
            warm_up(plan, ranks, self._device)
        except Exception as error:
            self._watchdog.fail(error)

    def step(
        self, inputs: Value = None, targets: Value = None, options: Options | None = None
    ) -> Tensor | None:
        """Run the plan once on a batch; gradients add up in `.grad`.

        `inputs` are needed on the rank of the first stage, `targets` on that of the last; all their
        tensors are cut into microbatches along their first dimension, and these into slices along
        the second one. `options` are keyword arguments for the modules of this rank, one dictionary
        per microbatch. Gives the losses by microbatch, unscaled, on the rank of the last stage, and
        None elsewhere; that of a microbatch is the mean of its slices'. Of several pipelines the
        first has the first microbatches, of each update; a rank gives the losses that it has.
        """
        if self._plan.is_forward_only:
            raise PipelineError("the plan has no backward, it evaluates")
        self._sums.begin()
        self._run(self._training, inputs, targets, options, evaluates=False)
        losses = self._batches.outputs()
        slices = self._plan.layout.slices
        return torch.stack(losses).view(-1, slices).mean(dim=1) if losses else None

    def evaluate(
        self, inputs: Value = None, targets: Value = None, options: Options | None = None
    ) -> list[Value] | None:
        """Run the forwards of the plan alone, without gradients; `step` says what they take.

        Gives on the rank of the last stage its outputs by microbatch, or with `targets` the losses;
        None elsewhere.
        """
        with torch.no_grad():
            self._run(self._evaluation, inputs, targets, options, evaluates=True)
        found = self._batches.outputs()
        slices = self._plan.layout.slices
        if slices > 1:
            parts = [found[begin : begin + slices] for begin in range(0, len(found), slices)]
            found = [join(each) if targets is None else torch.stack(each).mean() for each in parts]
        return found or None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the gradients of all stages to a norm of at most `max_norm`; what it was before, on
        all ranks.

        As `torch.nn.utils.clip_grad_norm_` does for the whole model in one process; all ranks do
        so, after a step. A plan that updates its stages itself leaves no moment for it.
        """
        self._watchdog.between = "in clip_grad_norm_"
        try:
            check_clipping(self._plan)
            norm = total_norm(self._copies, self._rank, norm_type, self._device, self._wire)
            clip_grads_with_norm_(
                [weight for each in self._copies for weight in each.parameters], max_norm, norm
            )
        except Exception as error:
            self._watchdog.fail(error)
        self._watchdog.between = BETWEEN
        return norm

    @property
    def norms(self) -> list[Tensor]:
        """For each update of the last step its norm, on all ranks the same, before it was clipped
        to `max_norm`.
        """
        return [norm for _, norm in sorted(self._clip.norms.items())] if self._clip else []

    def mean_over_replicas(self, values: Tensor) -> Tensor:
        """The mean of a tensor, such as losses, over the replicas of this rank, which all do so,
        after a step.
        """
        self._watchdog.between = "in mean_over_replicas"
        total = values.clone()
        try:
            if self._ranks.replicas.are_several:
                self._wire.end_sum(
                    self._wire.begin_sum(total, self._ranks.replicas), self._ranks.replicas
                )
        except Exception as error:
            self._watchdog.fail(error)
        self._watchdog.between = BETWEEN
        return total / len(self._ranks.replicas.processes)

    def state_dict(self) -> dict[int, Any]:
        """What a checkpoint needs beside modules and optimizers: older versions of the weights, by
        stage.
        """
        return {
            number: stage.weights.state_dict()
            for number, stage in self._stages.items()
            if stage.weights
        }

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Go on where a checkpoint was made, whose weights the modules have by now."""
        versioned = {
            number: stage.weights for number, stage in self._stages.items() if stage.weights
        }
        if state.keys() != versioned.keys():
            raise PipelineError(
                f"the checkpoint has versions of the stages {sorted(state)}, not of "
                f"{sorted(versioned)}"
            )
        for number, weights in versioned.items():
            weights.load_state_dict(state[number])

    def save(self, folder: str | Path, step: int, others: Sequence[Stateful] = ()) -> None:
        """Write this rank's file of a checkpoint, between two updates; all ranks do so, after the
        same steps.

        It has the weights of the stages, in all versions, the optimizers that the pipeline was
        given, and torch's random state; and the states of `others`, such as optimizers of the
        script and learning rate schedulers.
        """
        try:
            write(Path(folder), self._plan, dist.get_rank(), step, self._parts(others))
        except Exception as error:
            self._watchdog.fail(error)

    def resume(self, folder: str | Path, others: Sequence[Stateful] = ()) -> int:
        """Go on from the newest checkpoint that all ranks have in the folder: its step, or 0 if
        there is none.

        All ranks do so, with as many `others`, in the same order, as for `save`.
        """
        try:
            return resume(
                Path(folder), self._plan, self._device, self._parts(others), self._watchdog
            )
        except Exception as error:
            self._watchdog.fail(error)

    def save_model(
        self, folder: str | Path, step: int = 0, optimizers: Sequence[Optimizer] = ()
    ) -> None:
        """Write the model under its own names, whole or not at all, into a folder that all ranks
        share.

        `load_model` reads the weights for any plan, and `load_optimizers` what optimizers keep:
        those of the pipeline, and the script's. The stages are those of `split`.
        """
        modules = {number: stage.module for number, stage in self._stages.items()}
        all_optimizers = [
            *optimizers,
            *(each.optimizer for each in self._stages.values() if each.optimizer),
        ]
        try:
            rank = self._rank if self._ranks.replicas.processes[0] == dist.get_rank() else None
            write_model(
                Path(folder), self._plan, rank, step, modules, all_optimizers, self._watchdog
            )
        except Exception as error:
            self._watchdog.fail(error)

    def _parts(self, others: Sequence[Stateful]) -> dict[str, Stateful]:
        """What a checkpoint is made of, modules before the versions of their weights."""
        parts: dict[str, Stateful] = {
            f"stage {number}": stage.module for number, stage in self._stages.items()
        }
        for number, stage in self._stages.items():
            if stage.optimizer is not None:
                parts[f"the optimizer of stage {number}"] = stage.optimizer
        parts |= {VERSIONS: self, "the random state": RandomState(self._device)}
        return parts | {
            f"number {number} of the others": each for number, each in enumerate(others)
        }

    @cached_property
    def _evaluation(self) -> list[Call]:
        """The calls of the forwards, by their places in the whole plan."""
        forwards = forward_only(self._plan)
        places = [
            index for index, kind in enumerate(self._plan.ranks[self._rank].kind) if kind in FORWARD
        ]
        calls = self._prepare(forwards, {})
        return [(places[index], call, op) for index, call, op in calls]

    def _run(
        self,
        calls: list[Call],
        inputs: Value,
        targets: Value,
        options: Options | None,
        evaluates: bool,
    ) -> None:
        watchdog = self._watchdog
        watchdog.step += 1
        try:
            looks = self._batches.load(inputs, targets, options, evaluates)
            # The wait for the other ranks counts as one for the first action.
            watchdog.action = 0
            self._exchange.begin(looks)
            if self.record:
                self._walk_recording(calls)
            else:
                for watchdog.action, call, _ in calls:
                    call()
            self._exchange.end()
            if not evaluates:
                self._sums.end()
            if self._device.type == "cuda":
                # The host has gone ahead; here the watchdog sees a GPU that waits in vain.
                torch.cuda.synchronize(self._device)
        except Exception as error:
            watchdog.fail(error)
        finally:
            watchdog.action = None
            watchdog.between = BETWEEN

    def _walk_recording(self, calls: list[Call]) -> None:
        self.bars = []
        self.messages = []
        for self._watchdog.action, call, op in calls:
            if op is None:
                call()
                continue
            start = perf_counter()
            with torch.profiler.record_function(word(*op)):
                call()
                if self._device.type == "cuda":
                    # Not the streams of messages, which may wait for what this rank has yet to do.
                    torch.cuda.current_stream(self._device).synchronize()
            found = self.messages if is_transfer(op[0]) else self.bars
            found.append(Bar(*op, start, perf_counter()))
