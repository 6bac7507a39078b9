"""One rank's part of a pipeline: the plan's actions as a list of calls, walked once per step."""

import weakref
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from schedlang.actions import is_transfer, word
from schedlang.passes.forward_only import FORWARD, forward_only
from schedlang.plan import Plan
from schedlang.runtime.calls import Call, prepare
from schedlang.runtime.checkpoint import RandomState, Stateful, resume, write
from schedlang.runtime.checks import check_same_plan, check_stages, check_transport, device_of
from schedlang.runtime.exchange import Exchange
from schedlang.runtime.model_files import write_model
from schedlang.runtime.replicas import Replicas
from schedlang.runtime.slices import SlicedStage
from schedlang.runtime.stage import LossFn, Stage
from schedlang.runtime.values import Look, Value, cut, flatten, join
from schedlang.runtime.watchdog import PipelineError, Watchdog
from schedlang.runtime.weights import Weights, delays
from schedlang.runtime.wire import Wire, warm_up
from schedlang.timeline import Bar

#: Keyword arguments of modules, by microbatch.
Options = Sequence[Mapping[str, Any]]

_pipelines = count()


class Pipeline:
    """Runs the stages of this rank as a plan says, together with the other ranks of the default process group.

    `stages` are the modules of exactly the stages that the plan gives to this rank. A stage takes what the one before
    returns, a tensor, or tensors in tuples, lists and dictionaries, microbatch first; a tuple as several arguments.
    Where the plan has slices, stages take and return more, see `SlicedStage`.
    `loss_fn(output, targets)` gives the scalar loss of one microbatch. Every microbatch's loss is multiplied by
    `loss_scale` before its backward; without it by 1/microbatches, those of one update, for the gradient of the mean.
    `optimizers` are those of the stages that the plan updates (`U`), and no others. No wait is longer than `timeout`
    seconds.

    A plan without a flush is for a number of updates (`Plan.for_updates`), and a step makes them all. The next step
    goes on as if there had been no cut; `state_dict` has what it needs for that beside modules and optimizers.

    While `record` is true, a step leaves its compute ops in `bars`, and its sends and waits for receives in `messages`,
    with times of `time.perf_counter()`; in a `torch.profiler` all of them are ranges by their names in the plan.

    PipelineError in the constructor or in a step means that the pipeline is over: all other ranks have printed the
    cause and ended with exit code 1.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, nn.Module],
        loss_fn: LossFn | None = None,
        *,
        loss_scale: float | None = None,
        optimizers: Mapping[int, Optimizer] | None = None,
        timeout: float = 60.0,
    ) -> None:
        if not dist.is_initialized():
            raise PipelineError("there is no process group: call torch.distributed.init_process_group first")
        self.record = False
        self.bars: list[Bar] = []
        self.messages: list[Bar] = []
        self._plan, self._rank = plan, dist.get_rank()
        number = next(_pipelines)
        self._watchdog = Watchdog(plan, number, timeout)
        # At the exit of the process, it closes itself.
        weakref.finalize(self, self._watchdog.close).atexit = False
        try:
            check_stages(plan, stages, optimizers or {}, loss_fn)
            check_same_plan(plan, self._watchdog)
            self._device = device_of(stages)
            check_transport(plan, self._device)
            scale = plan.layout.updates / plan.microbatches if loss_scale is None else loss_scale
            self._stages = self._connected(stages, optimizers or {}, loss_fn, scale)
            wire = Wire(timeout, self._watchdog)
            self._exchange, self._replicas = Exchange(plan, number, self._device, wire), Replicas(plan, stages, wire)
            self._training = prepare(plan, self._rank, self._stages, self._exchange)
            if self._device.type == "cuda":
                warm_up(plan, self._device)
        except Exception as error:
            self._watchdog.fail(error)

    def step(self, inputs: Value = None, targets: Value = None, options: Options | None = None) -> Tensor | None:
        """Run the plan once on a batch; gradients add up in `.grad`.

        `inputs` are needed on the rank of the first stage, `targets` on that of the last; all their tensors are cut
        into microbatches along their first dimension, and these into slices along the second one. `options` are keyword
        arguments for the modules of this rank, one dictionary per microbatch. Gives the losses by microbatch, unscaled,
        on the rank of the last stage, and None elsewhere; that of a microbatch is the mean of its slices'. Of several
        pipelines the first has the first microbatches; a rank gives the losses that it has.
        """
        if self._plan.is_forward_only:
            raise PipelineError("the plan has no backward, it evaluates")
        self._replicas.begin()
        self._run(self._training, inputs, targets, options, evaluates=False)
        losses = self._outputs()
        slices = self._plan.layout.slices
        return torch.stack(losses).view(-1, slices).mean(dim=1) if losses else None

    def evaluate(
        self, inputs: Value = None, targets: Value = None, options: Options | None = None
    ) -> list[Value] | None:
        """Run the forwards of the plan alone, without gradients; `step` says what they take.

        Gives on the rank of the last stage its outputs by microbatch, or with `targets` the losses; None elsewhere.
        """
        with torch.no_grad():
            self._run(self._evaluation, inputs, targets, options, evaluates=True)
        found, slices = self._outputs(), self._plan.layout.slices
        if slices > 1:
            parts = [found[begin : begin + slices] for begin in range(0, len(found), slices)]
            found = [join(each) if targets is None else torch.stack(each).mean() for each in parts]
        return found or None

    def state_dict(self) -> dict[int, Any]:
        """What a checkpoint needs beside modules and optimizers: older versions of the weights, by stage."""
        return {number: stage.weights.state_dict() for number, stage in self._stages.items() if stage.weights}

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Go on where a checkpoint was made, whose weights the modules have by now."""
        versioned = {number: stage.weights for number, stage in self._stages.items() if stage.weights}
        if state.keys() != versioned.keys():
            raise PipelineError(
                f"the checkpoint has versions of the stages {sorted(state)}, not of {sorted(versioned)}"
            )
        for number, weights in versioned.items():
            weights.load_state_dict(state[number])

    def save(self, folder: str | Path, step: int, others: Sequence[Stateful] = ()) -> None:
        """Write this rank's file of a checkpoint, between two updates; all ranks do so, after the same steps.

        It has the weights of the stages, in all versions, the optimizers that the pipeline was given, and torch's
        random state; and the states of `others`, such as optimizers of the script and learning rate schedulers.
        """
        try:
            write(Path(folder), self._plan, self._rank, step, self._parts(others))
        except Exception as error:
            self._watchdog.fail(error)

    def resume(self, folder: str | Path, others: Sequence[Stateful] = ()) -> int:
        """Go on from the newest checkpoint that all ranks have in the folder: its step, or 0 if there is none.

        All ranks do so, with as many `others`, in the same order, as for `save`.
        """
        try:
            return resume(Path(folder), self._plan, self._rank, self._device, self._parts(others), self._watchdog)
        except Exception as error:
            self._watchdog.fail(error)

    def save_model(self, folder: str | Path, step: int = 0, optimizers: Sequence[Optimizer] = ()) -> None:
        """Write the model under its own names, whole or not at all, into a folder that all ranks share.

        `load_model` reads the weights for any plan, and `load_optimizers` what optimizers keep: those of the pipeline,
        and the script's. The stages are those of `split`.
        """
        modules = {number: stage.module for number, stage in self._stages.items()}
        all_optimizers = [*optimizers, *(each.optimizer for each in self._stages.values() if each.optimizer)]
        try:
            write_model(Path(folder), self._plan, self._rank, step, modules, all_optimizers, self._watchdog)
        except Exception as error:
            self._watchdog.fail(error)

    def _parts(self, others: Sequence[Stateful]) -> dict[str, Stateful]:
        """What a checkpoint is made of, modules before the versions of their weights."""
        parts: dict[str, Stateful] = {f"stage {number}": stage.module for number, stage in self._stages.items()}
        for number, stage in self._stages.items():
            if stage.optimizer is not None:
                parts[f"the optimizer of stage {number}"] = stage.optimizer
        parts |= {"the versions of the weights": self, "the random state": RandomState(self._device)}
        return parts | {f"number {number} of the others": each for number, each in enumerate(others)}

    @cached_property
    def _evaluation(self) -> list[Call]:
        """The calls of the forwards, by their places in the whole plan."""
        forwards = forward_only(self._plan)
        places = [index for index, kind in enumerate(self._plan.ranks[self._rank].kind) if kind in FORWARD]
        return [
            (places[index], call, op) for index, call, op in prepare(forwards, self._rank, self._stages, self._exchange)
        ]

    def _run(self, calls: list[Call], inputs: Value, targets: Value, options: Options | None, evaluates: bool) -> None:
        watchdog = self._watchdog
        watchdog.step += 1
        try:
            looks = self._load(inputs, targets, options, evaluates)
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
                self._replicas.end()
            if self._device.type == "cuda":
                # The host has gone ahead; here the watchdog sees a GPU that waits in vain.
                torch.cuda.synchronize(self._device)
        except Exception as error:
            watchdog.fail(error)
        finally:
            watchdog.action = None

    def _walk_recording(self, calls: list[Call]) -> None:
        self.bars, self.messages = [], []
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

    def _load(self, inputs: Value, targets: Value, options: Options | None, evaluates: bool) -> dict[int, Hashable]:
        """Give this rank's stages what is theirs of a batch; what the inputs look like, by first stage."""
        looks: dict[int, Hashable] = {}
        begin = 0
        for pipeline in self._plan.layout.pipelines:
            mine = slice(begin, begin := begin + pipeline.microbatches)
            first, last = self._stages.get(pipeline.start), self._stages.get(pipeline.stop - 1)
            if first is not None:
                parts = self._cut("inputs", inputs, mine)
                first.inputs.update(enumerate(parts))
                looks[pipeline.start] = evaluates, Look.of(*flatten(parts[0], "`inputs`"))
            if last is not None:
                given = not evaluates or targets is not None
                last.targets = dict(enumerate(self._cut("targets", targets, mine) if given else []))
            for number in range(pipeline.start, pipeline.stop):
                if number in self._stages:
                    self._stages[number].begin(self._options(options, mine))
        return looks

    def _cut(self, name: str, batch: Value, mine: slice) -> list[Value]:
        """Some microbatches of a batch, or their slices."""
        parts, slices = cut(name, batch, self._plan.microbatches)[mine], self._plan.layout.slices
        if slices == 1:
            return parts
        return [each for part in parts for each in cut(name, part, slices, "slices", dimension=1)]

    def _options(self, options: Options | None, mine: slice) -> dict[int, Mapping[str, Any]]:
        if options is not None and len(options) != self._plan.microbatches:
            raise PipelineError(f"`options` are {len(options)}, the plan has {self._plan.microbatches} microbatches")
        return dict(enumerate(options[mine])) if options else {}

    def _outputs(self) -> list[Value]:
        """What the last stages that are on this rank have made, by microbatch, or slice of one."""
        layout = self._plan.layout
        last = [(stage, layout.units(number)) for number, stage in self._stages.items() if layout.is_last(number)]
        return [stage.outputs.pop(each) for stage, units in last for each in range(units)]

    def _connected(
        self,
        modules: Mapping[int, nn.Module],
        optimizers: Mapping[int, Optimizer],
        loss_fn: LossFn | None,
        scale: float,
    ) -> dict[int, Stage]:
        """The stages of this rank; neighbours among them share their boxes."""
        layout, stages = self._plan.layout, dict[int, Stage]()
        behind = delays(self._plan, self._rank)
        make = Stage if layout.slices == 1 else partial(SlicedStage, slices=layout.slices)
        for number in sorted(modules):
            per_update = layout.units(number) // layout.updates
            stages[number] = make(
                number,
                modules[number],
                self._device,
                is_first=layout.is_first(number),
                loss_fn=loss_fn if layout.is_last(number) else None,
                loss_scale=scale / layout.slices,
                optimizer=optimizers.get(number),
                recomputed={microbatch for stage, microbatch in self._plan.recomputed if stage == number},
                split={microbatch for stage, microbatch in self._plan.split if stage == number},
                offloaded={microbatch for stage, microbatch in self._plan.offloaded if stage == number},
                weights=Weights(modules[number], behind[number], per_update) if behind[number] else None,
            )
        for number, stage in stages.items():
            if number + 1 in stages and not layout.is_last(number):
                following = stages[number + 1]
                following.inputs, stage.gradients = stage.outputs, following.input_gradients
        return stages
