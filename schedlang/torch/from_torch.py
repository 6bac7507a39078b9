"""A schedule of torch's in our runtime, under torch's call signature."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.microbatch import (
    merge_chunks,
    split_args_kwargs_into_chunks,
)

from schedlang.compiler import compile
from schedlang.diagnostics.source import Source
from schedlang.diagnostics.wrong_arguments import check_number, check_type, shown
from schedlang.plan.plan import Plan
from schedlang.plan.torch_tables import plan_of, read_table
from schedlang.runtime import Pipeline
from schedlang.runtime.microbatches import Microbatches
from schedlang.runtime.processes import PIPELINE
from schedlang.runtime.torch_private.wrappers import is_sharded
from schedlang.schedule.forward_only import forward_only
from schedlang.torch.private import (
    AnySchedule,
    Given,
    TableSchedule,
    given,
    own_functions,
    table_of,
)
from schedlang.torch.same_stages import check_agreement, check_are_stages

#: Torch's schedules with one stage for each rank, which have no table, as programs of the gallery.
_PROGRAMS = {ScheduleGPipe: "gpipe", Schedule1F1B: "1f1b"}


def pipeline(schedule: Any, *, timeout: float = 300.0) -> "TorchPipeline":
    """A schedule of torch's, with its stages, in our runtime: what it gives has torch's `step` and
    `eval`.

    `schedule` is a `ScheduleGPipe` or `Schedule1F1B`, any of torch's schedules with several stages
    for each rank, or a `_PipelineScheduleRuntime` that has loaded a table. Its order of compute ops
    is proved like an imported table, and gets our communication. Its modules, loss function,
    process group and rules of cutting a batch are taken over. No wait is longer than `timeout`
    seconds.

    CompileError where the schedule is wrong, with cells of its table. TypeError or ValueError for
    what the runtime cannot take over: another kind of schedule, stages that were traced, functions
    of the script's own in place of actions.
    """
    check_number("timeout", timeout, above=0)
    what = "a schedule of torch.distributed.pipelining, such as ScheduleInterleaved1F1B"
    check_type("schedule", schedule, AnySchedule, what)
    own = given(schedule)
    check_are_stages(own.stages)
    functions = own_functions(schedule, own.stages)
    if functions:
        raise ValueError(
            f"`schedule` has functions of its own for {', '.join(functions)}, which only torch's "
            "runtime calls"
        )
    plan = _plan_of(schedule, own)
    check_agreement(plan, own.stages)
    return TorchPipeline(plan, own, timeout)


def _plan_of(schedule: Any, own: Given) -> Plan:
    """The order of a schedule's ops as a plan; without a loss that of its forwards."""
    name = type(schedule).__name__
    if isinstance(schedule, TableSchedule):
        table = table_of(schedule)
        if not table:
            raise ValueError("`schedule` has no table yet: `_load_csv` gives it one")
        plan = plan_of(read_table(Source(name, table)))
    else:
        programs = [
            program for kind, program in _PROGRAMS.items() if type(schedule) is kind
        ]
        if not programs:
            raise TypeError(
                f"`schedule` is {shown(schedule)}: it must be a ScheduleGPipe, a Schedule1F1B, or "
                "one with several stages for each rank"
            )
        params = {"ranks": own.stages[0].group_size, "microbatches": own.microbatches}
        plan = compile(programs[0], params)
    return plan if own.loss_fn is not None else forward_only(plan)


@frozen
class _Cut:
    """The batch of a step by microbatch, as far as this rank has a part of it."""

    inputs: Microbatches | None
    targets: Microbatches | None
    options: Sequence[Mapping[str, Any]] | None


class TorchPipeline:
    """A `Pipeline` under the signature of torch's schedules, which `pipeline` makes.

    `plan` is the proved plan. The modules are looked up in the stages when the `pipeline` is built,
    in the first step: so a script may still replace them, or give them their weights.

    Where torch's schedule has `scale_grads`, the loss of each microbatch is divided by their number
    before its backward, so that gradients are those of the mean; without it they are those of the
    sum. Torch divides `.grad` after the step, and with it what was there before; here gradients of
    several steps add up.
    """

    def __init__(self, plan: Plan, own: Given, timeout: float) -> None:
        self.plan = plan
        self._own = own
        self._timeout = timeout
        self._loss_kwargs: Mapping[str, Any] = {}
        self._has_first = any(
            plan.layout.is_first(stage.stage_index) for stage in own.stages
        )
        self._has_last = any(
            plan.layout.is_last(stage.stage_index) for stage in own.stages
        )

    @cached_property
    def pipeline(self) -> Pipeline:
        """The pipeline, which all ranks build together."""
        own = self._own
        return Pipeline(
            self.plan,
            {stage.stage_index: _module_of(stage) for stage in own.stages},
            None if own.loss_fn is None else self._loss,
            mesh=_mesh(own),
            loss_scale=1 / own.microbatches if own.scales_gradients else 1.0,
            timeout=self._timeout,
        )

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run the plan once on a batch; gradients add up in `.grad`.

        `args` are the arguments of the first stage and `target` those of the loss, of which other
        ranks need none; `kwargs` are keyword arguments for the stages of this rank. All are cut
        into microbatches as torch's schedule would; or they are given by microbatch, in `arg_mbs`,
        `kwarg_mbs` and `target_mbs`. `loss_kwargs` go to the loss function. On the rank of the last
        stage, it fills `losses` by microbatch, without their graphs, and gives the merged output;
        None elsewhere, and without `return_outputs`.
        """
        if self._own.loss_fn is None:
            output = self.eval(*args, arg_mbs=arg_mbs, kwarg_mbs=kwarg_mbs, **kwargs)
            return output if return_outputs else None
        if not finalize_gradients and any(
            is_sharded(stage.submod) for stage in self._own.stages
        ):
            raise ValueError(
                "`finalize_gradients` is False, and a stage is sharded, whose gradients are "
                "reduced in every step"
            )
        batch = self._cut(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        if self._has_last and batch.targets is None:
            raise ValueError(
                "this rank has the last stage, so it needs `target`, or `target_mbs`"
            )
        self._loss_kwargs = loss_kwargs or {}
        outputs: list[Any] | None = None
        if return_outputs:
            found, outputs = self.pipeline.step(
                batch.inputs, batch.targets, batch.options, return_outputs=True
            )
        else:
            found = self.pipeline.step(batch.inputs, batch.targets, batch.options)
        if losses is not None and found is not None:
            # In place: torch fills the list that it is given.
            losses[:] = found.unbind()
        return self._merged(outputs)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        loss_kwargs: Mapping[str, Any] | None = None,
        arg_mbs: Sequence[tuple[Any, ...]] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forwards alone, without gradients; arguments and results are those of `step`.

        Without a target there are no losses.
        """
        batch = self._cut(args, kwargs, target, arg_mbs, kwarg_mbs, target_mbs)
        self._loss_kwargs = loss_kwargs or {}
        outputs = self.pipeline.evaluate(batch.inputs, options=batch.options)
        if outputs is not None and batch.targets is not None and losses is not None:
            pairs = zip(outputs, batch.targets.values, strict=True)
            with torch.no_grad():
                losses[:] = [self._loss(output, of_one) for output, of_one in pairs]
        return self._merged(outputs)

    def _loss(self, output: Any, target: Any) -> Any:
        assert self._own.loss_fn is not None
        return self._own.loss_fn(output, target, **self._loss_kwargs)

    def _merged(self, outputs: list[Any] | None) -> Any:
        return (
            None if outputs is None else merge_chunks(outputs, self._own.output_chunks)
        )

    def _cut(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        arg_mbs: Sequence[tuple[Any, ...]] | None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None,
        target_mbs: Sequence[Any] | None,
    ) -> _Cut:
        """What a step is given, by microbatch; ValueError where it is given both ways, or for
        another number of microbatches.
        """
        # Torch's `step` and `_step_microbatches` in one call:
        #
        #     args, kwargs, target           as a whole   ──cut as torch does──┐
        #                                                                      ├─► by microbatch
        #     arg_mbs, kwarg_mbs, target_mbs              ────as they are──────┘
        count = self._own.microbatches
        by_microbatch = {
            "arg_mbs": arg_mbs,
            "kwarg_mbs": kwarg_mbs,
            "target_mbs": target_mbs,
        }
        is_cut = any(values is not None for values in by_microbatch.values())
        if is_cut and (args or kwargs or target is not None):
            raise ValueError(
                "the batch is given by microbatch (`arg_mbs`, `kwarg_mbs`, `target_mbs`), and as a "
                "whole: it must be one of the two"
            )
        for name, values in by_microbatch.items():
            if values is not None and len(values) != count:
                raise ValueError(
                    f"`{name}` are {len(values)}, and the schedule has {count} microbatches"
                )
        if args or kwargs:
            arg_mbs, kwarg_mbs = split_args_kwargs_into_chunks(
                args,
                dict(kwargs),
                count,
                self._own.args_chunks,
                self._own.kwargs_chunks,
            )
        if target is not None:
            target_mbs = [
                part
                for (part,) in split_args_kwargs_into_chunks((target,), {}, count)[0]
            ]
        inputs = None
        if self._has_first:
            inputs = Microbatches([()] * count if arg_mbs is None else arg_mbs)
        targets = None
        if self._has_last and target_mbs is not None:
            targets = Microbatches(target_mbs)
        return _Cut(inputs, targets, kwarg_mbs)


def _module_of(stage: PipelineStage) -> nn.Module:
    """The module of a stage; a `dw_builder` of the stage is a method of the module."""
    module: Any = stage.submod
    if stage.dw_builder is not None:
        module.dw_builder = stage.dw_builder
    return stage.submod


def _mesh(own: Given) -> DeviceMesh | None:
    """The processes of the stages; None for all that there are."""
    stage = own.stages[0]
    world = dist.group.WORLD
    group = world if stage.group is None else stage.group
    assert group is not None
    if group is world:
        return None
    return DeviceMesh.from_group(group, stage.device.type, mesh_dim_names=(PIPELINE,))
