"""One rank's part of a pipeline: the plan's actions as a list of calls, walked once per step.

    step:   cut the batch ─► announce its shapes ─► call, call, call, … ─► sums that are left

The calls are bound to stages, messages and parts when the pipeline is built, so the walk itself
knows neither (`schedlang.runtime.calls`). Beside it runs the thread of the watchdog, which looks at
the index of the action under way.
"""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from schedlang.on_demand import on_demand
from schedlang.plan.plan import Plan
from schedlang.runtime.arguments import check_pipeline
from schedlang.runtime.arguments import check_plan as check_is_plan
from schedlang.runtime.batches import Batch, Batches, Options, Round, dims_of
from schedlang.runtime.building import build_stages, build_wire
from schedlang.runtime.calls import Call, prepare
from schedlang.runtime.checks import (
    agree_on_device,
    check_plan,
    check_same,
    check_setup,
    device_of,
)
from schedlang.runtime.door import (
    Asked,
    Rank,
    Site,
    build_parts_of_rank,
    check_together,
)
from schedlang.runtime.equal_weights import (
    check_common_weights,
    warn_of_equal_weights,
)
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.exchange import Exchange, Given
from schedlang.runtime.finite import FiniteCheck
from schedlang.runtime.later import LaterCalls
from schedlang.runtime.microbatches import Counts
from schedlang.runtime.part import Part, filled
from schedlang.runtime.processes import all_processes
from schedlang.runtime.results import Results
from schedlang.runtime.setup import LossFn, Setup, SkipIf, SliceLengths, Tied, Verify
from schedlang.runtime.stage import Stage
from schedlang.runtime.stateful import Stateful
from schedlang.runtime.values import Value, are_of_inference
from schedlang.runtime.watchdog import BETWEEN, Watchdog
from schedlang.schedule.actions import is_transfer

if TYPE_CHECKING:
    from schedlang.ranks.hazards import check_hazards
    from schedlang.ranks.warm_up import warm_ups
    from schedlang.ranks.weight_homes import homes_of
    from schedlang.runtime.captured_steps import CapturedSteps
    from schedlang.runtime.communicators import check_transport, warm_up
    from schedlang.runtime.gpu_progress import GpuProgress
    from schedlang.runtime.meshes import counting_together, processes_of
    from schedlang.runtime.model.checkpoint import (
        Checkpoints,
        checkpoints_of,
        warn_of_gradients,
    )
    from schedlang.runtime.model.model_arguments import check_state
    from schedlang.runtime.model.model_files import ModelPart, write_model
    from schedlang.runtime.named_losses import losses_of, means_of_losses
    from schedlang.runtime.next_batch import NextBatch as next_batch
    from schedlang.runtime.other_plans import check_other_plan
    from schedlang.runtime.parts.clipping import check_clipping, clip_by_total
    from schedlang.runtime.precision import rounding_of
    from schedlang.runtime.processes import Replicas
    from schedlang.runtime.shared_weights import check_shared_weights, ids_of_tied
    from schedlang.runtime.step_report import Measured, Report
    from schedlang.runtime.step_report import Measured as measured_steps
    from schedlang.schedule.forward_only import forward_only, forwards
    from schedlang.schedule.timeline import Bar
    from schedlang.schedule.transports import Transport
else:
    # For weights that are tied or replicated.
    check_shared_weights = on_demand(
        "schedlang.runtime.shared_weights.check_shared_weights"
    )
    ids_of_tied = on_demand("schedlang.runtime.shared_weights.ids_of_tied")
    # For meshes, and weights that are sharded over one.
    processes_of = on_demand("schedlang.runtime.meshes.processes_of")
    counting_together = on_demand("schedlang.runtime.meshes.counting_together")
    # For weights that travel from rank to rank.
    homes_of = on_demand("schedlang.ranks.weight_homes.homes_of")
    # For messages of fewer bits.
    rounding_of = on_demand("schedlang.runtime.precision.rounding_of")
    # On GPUs.
    CapturedSteps = on_demand("schedlang.runtime.captured_steps.CapturedSteps")
    check_hazards = on_demand("schedlang.ranks.hazards.check_hazards")
    GpuProgress = on_demand("schedlang.runtime.gpu_progress.GpuProgress")
    check_transport = on_demand("schedlang.runtime.communicators.check_transport")
    warm_up = on_demand("schedlang.runtime.communicators.warm_up")
    # For steps that are recorded, or whose warm-up may be walked over twice; for evaluations.
    measured_steps = on_demand("schedlang.runtime.step_report.Measured")
    warm_ups = on_demand("schedlang.ranks.warm_up.warm_ups")
    forward_only = on_demand("schedlang.schedule.forward_only.forward_only")
    forwards = on_demand("schedlang.schedule.forward_only.forwards")
    # For steps that follow another plan.
    check_other_plan = on_demand("schedlang.runtime.other_plans.check_other_plan")
    # For what a script may ask for beside a step.
    next_batch = on_demand("schedlang.runtime.next_batch.NextBatch")
    losses_of = on_demand("schedlang.runtime.named_losses.losses_of")
    means_of_losses = on_demand("schedlang.runtime.named_losses.means_of_losses")
    check_clipping = on_demand("schedlang.runtime.parts.clipping.check_clipping")
    clip_by_total = on_demand("schedlang.runtime.parts.clipping.clip_by_total")
    checkpoints_of = on_demand("schedlang.runtime.model.checkpoint.checkpoints_of")
    warn_of_gradients = on_demand(
        "schedlang.runtime.model.checkpoint.warn_of_gradients"
    )
    check_state = on_demand("schedlang.runtime.model.model_arguments.check_state")
    ModelPart = on_demand("schedlang.runtime.model.model_files.ModelPart")
    write_model = on_demand("schedlang.runtime.model.model_files.write_model")

#: The name of the only model of a plan.
_ONLY = ""

#: The number of plans whose calls are kept.
_PLANS = 64

#: All processes build the same pipelines one after another, and number them alike.
_pipelines = count()


class Pipeline:
    """Runs the stages of this rank as a plan says, together with the other ranks of the default
    process group.

    With a device `mesh`, the other ranks are those along its dimension `pp`. If the mesh has a
    second dimension, replicas of the pipeline lie along it. Each replica has batches of its own,
    and their gradients are summed (docs/training.md).

    `stages` has the modules of exactly the stages that the plan places on this rank, by number. A
    stage is called with the output of the stage before: a tensor, or tensors in tuples, lists and
    dictionaries; a tuple is passed as several arguments. If the plan has `edges`, a stage gets an
    argument from each stage before it, in the order of their numbers. If the plan has slices or
    skips, stages take and return more values, see `schedlang.runtime.parts.slices.Past` and
    `schedlang.runtime.parts.far_edges.Skips`.

    `batch_dim` is the dimension along which the tensors of a batch have their rows, by default the
    first; a pair is for inputs and targets. If the plan has slices, `slice_lengths` has their
    lengths, or is a function that returns these for the length of the whole sequence; by default
    all slices have the same length. The loss of a slice is weighted by its length.

    `loss_fn(output, targets)` returns the scalar loss of one microbatch, or a dictionary with it as
    `loss`; the other entries are in `extras` after a step. Before its backward, the loss of each
    microbatch is multiplied by `loss_scale`, by default 1/microbatches (of one update, in all
    replicas), which gives the gradient of the mean. `loss_scale` may also be a
    `torch.amp.GradScaler`: all ranks then skip an update whose gradients overflow
    (docs/training.md#scaled-losses). Losses that stages add (`schedlang.runtime.losses.add_loss`)
    are scaled alike. The pipeline warns once of a loss that is not finite; with `stop_on_nan` it
    ends there, before weights are updated (except by updates of the plan itself). With `skip_if`,
    all ranks skip a bad batch: one in which the forward or the loss of any stage raises an
    exception of this type, or for whose losses this function returns True, see `skipped`
    (docs/training.md#bad-batches).

    If the plan has several models (docs/models.md#several-models), `loss_fn` is one function for
    all, or a dictionary of functions by the models' names. A stage counts the microbatches of its
    own model. After a step or an evaluation, `losses` and `outputs` have the results of this rank's
    last stages, by model.

    `tied` has the names by stage of each weight that several stages share, such as input and output
    embeddings: `[{0: "byte.weight", 3: "scores.weight"}]`; by default those that `split` found.
    Their gradients are summed at the end of a step. Activations and gradients are rounded to
    `transfer_dtype`, bfloat16 or float16, before they are sent to other ranks. Of stages sharded by
    `fully_shard`, at most `max_gathered` are gathered at a time, by default all.

    `optimizers` are those of the stages that the plan updates (`U`), and no others. Gradients of
    such an update are clipped to `max_norm`, the norm over all stages, if it is given. If
    `max_norm` is given and the plan has no updates, each step ends with an update by the
    `optimizers` of all stages; it may begin before the norm is known (`validate`,
    docs/training.md#post-validation).

    If the plan recomputes forwards (`R`), `verify` says when the outputs of both runs are compared:
    in "some" steps (the first four, then the 8th, the 16th and so on), "always", or "never". With
    `audit`, the first step also runs every stage alone and compares the gradients (docs/models.md),
    which takes twice as long. No wait for a rank that does nothing is longer than `timeout`
    seconds; a rank may compute, or compile, for as long as it takes.

    With `cuda_graphs`, steps on a GPU that are alike are captured as a CUDA graph, which the host
    launches by one call (docs/training.md#cuda-graphs); on a CPU it changes nothing.

    A step may take another `plan` of the same stages, with more microbatches or fewer, or in
    another order (docs/training.md#another-number-of-microbatches-in-each-step).

    A plan without a flush is for a number of updates (`Plan.for_updates`), and a step makes them
    all. The next step continues without a flush; `state_dict` has what must be saved for that
    besides modules and optimizers.

    While `record` is true, a step stores its compute ops in `bars`, and its sends and waits for
    receives in `messages`, with times of `time.perf_counter()`. Under a `torch.profiler` all of
    them are ranges with their names in the plan. `report` summarizes such steps.

    PipelineError in the constructor or in a step means that the pipeline is over: all other ranks
    have printed the cause and ended with exit code 1. With `survives_loss`, the loss of another
    rank raises LostRank instead, and this process goes on (`schedlang.runtime.standby`).
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, nn.Module],
        loss_fn: LossFn | Mapping[str, LossFn] | None = None,
        *,
        mesh: DeviceMesh | None = None,
        tied: Tied | None = None,
        transfer_dtype: torch.dtype | None = None,
        loss_scale: float | GradScaler | None = None,
        max_gathered: int | None = None,
        max_norm: float | None = None,
        verify: Verify = "some",
        audit: bool = False,
        batch_dim: int | tuple[int, int] = 0,
        slice_lengths: SliceLengths | None = None,
        stop_on_nan: bool = False,
        skip_if: SkipIf | None = None,
        optimizers: Mapping[int, Optimizer] | None = None,
        survives_loss: bool = False,
        cuda_graphs: bool = False,
        timeout: float = 60.0,
    ) -> None:
        if tied is None:
            tied = getattr(stages, "tied", ())
        setup = Setup(
            modules=stages,
            loss_fn=loss_fn,
            optimizers={} if optimizers is None else optimizers,
            tied=tied,
            loss_scale=loss_scale,
            transfer_dtype=transfer_dtype,
            max_gathered=max_gathered,
            max_norm=max_norm,
            verify=verify,
            audit=audit,
            batch_dim=batch_dim,
            slice_lengths=slice_lengths,
            stop_on_nan=stop_on_nan,
            skip_if=skip_if,
            survives_loss=survives_loss,
            cuda_graphs=cuda_graphs,
        )
        check_pipeline(plan, setup, mesh, timeout)
        self.record = False
        self._stops_on_nan = stop_on_nan
        self._evaluations: dict[tuple[int, ...], list[Call]] = {}
        #: Figures of the steps that were recorded.
        self._measured: Measured | None = None
        #: The names of all losses so far, of all ranks.
        self._loss_names: Sequence[str] = ()
        #: The plan that the pipeline was built with, and that of the last step or evaluation.
        self._plan = plan
        self._followed = plan
        self._processes = all_processes() if mesh is None else processes_of(mesh)
        self._rank = self._processes.own
        number = next(_pipelines)
        self._watchdog = Watchdog(plan, self._processes, number, timeout, survives_loss)
        self._finite = FiniteCheck(stop_on_nan, self._watchdog.fail)
        self._later = LaterCalls(self._watchdog)
        #: Whether there is a checkpoint since the last step.
        self._has_saved = False
        finalizer = weakref.finalize(self, self._watchdog.close)
        # At the exit of the process the watchdog closes itself.
        finalizer.atexit = False
        # From here on other ranks are told of an error, since they build their pipelines together
        # with this rank, and would wait for it.
        with self._watchdog.guard():
            self._build(setup, number, timeout)

    def __repr__(self) -> str:
        stages = ", ".join(map(str, self._stages))
        return f"<Pipeline {self._plan.title}: rank {self._rank}, stages {stages}>"

    def _build(self, setup: Setup, number: int, timeout: float) -> None:
        """Check the arguments, and bind the calls of a step. All ranks do so together: they compare
        their arguments, and make process groups in the same order.
        """
        plan = self._plan
        processes = self._processes
        check_plan(plan, processes, setup.modules)
        check_together(Asked(plan, processes, setup))
        check_setup(plan, self._rank, setup)
        check_same(plan, setup, processes, self._watchdog)
        self._device = agree_on_device(
            device_of(setup.modules), processes, self._watchdog
        )
        # gloo runs every plan: a rank waits for nothing but what it needs, and messages are matched
        # by their tags. So only GPUs have a transport.
        self._transport: Transport | None = None
        if self._device.type == "cuda":
            self._transport = check_transport(plan, processes.group, self._device)
            self._watchdog.gpu = GpuProgress(self._device)
        site = self._site = Site(plan, processes, setup, self._device)
        if not plan.is_forward_only:
            # Without backwards, a weight of several stages has no gradients to be summed.
            tied = ids_of_tied(site.shared) if setup.tied else set()
            check_common_weights(plan, setup.modules, tied)
            warn_of_equal_weights(plan, setup.modules, tied, processes, self._watchdog)
        if site.asks_for("sums"):
            check_shared_weights(site.shared, processes, self._watchdog)
        # From here on the pipeline is built from the inside out: stages, their batches, the wire
        # between ranks, the messages on the wire, the parts around both, and at last the calls.
        self._stages = build_stages(site)
        self._batches = Batches(
            plan,
            self._stages,
            dims_of(setup.batch_dim),
            setup.slice_lengths,
            has_scale=setup.fixed_scale is not None,
        )
        self._results = Results(plan, self._stages, self._batches, self._finite)
        self._wire = build_wire(site, timeout, self._watchdog)
        has_rounding = plan.message_type or setup.transfer_dtype is not None
        rounding = rounding_of(plan, setup.transfer_dtype) if has_rounding else None
        counting: Sequence[Replicas] = ()
        if processes.replicas.are_several or site.asks_for("sharded"):
            counting = counting_together(processes.replicas, setup.modules.values())
        self._exchange = Exchange(
            plan, self._rank, number, self._device, self._wire, rounding, counting
        )
        rank = Rank(
            site,
            self._stages,
            self._wire,
            self._exchange,
            self._watchdog,
            self._results,
        )
        self._parts = build_parts_of_rank(rank)
        self._after_step = filled(self._parts, "after_step")
        self._validate = filled(self._parts, "validate")
        #: The parts that run the warm-up, if it may run twice.
        self._walk_warm_up = filled(self._parts, "walk_warm_up")
        self._training, self._warm_up = self._bind(plan)
        #: Both of these, by the digest of the plan.
        self._bound = {plan.digest: (self._training, self._warm_up)}
        self._captured = None
        if self._device.type == "cuda" and setup.cuda_graphs:
            self._captured = CapturedSteps(self._stages, self._watchdog)
        if self._device.type == "cuda":
            # Last, since ranks wait for each other here: by now each has found that it can run it.
            warm_up(plan, processes, self._device)

    def _bind(self, plan: Plan) -> tuple[list[Call], int]:
        """The calls of a step of a plan; and the number of those in the warm-up, if it may run
        twice.
        """
        end = warm_ups(plan)[self._rank] if self._walk_warm_up else 0
        calls = prepare(
            plan, self._rank, self._stages, self._exchange, self._parts, end
        )
        if self._transport is not None:
            check_hazards(plan, self._rank, self._transport)
        return calls, sum(index < end for index, _, _ in calls)

    def _follow(self, plan: Plan) -> None:
        """Follow this plan from now on: the pipeline's own, or one that a step is given."""
        if plan.digest == self._followed.digest:
            return
        is_new = plan.digest not in self._bound
        if is_new:
            check_other_plan(self._site, plan)
        self._followed = plan
        self._watchdog.follow(plan)
        self._site.follow(plan)
        self._batches.follow(plan)
        self._exchange.follow(plan)
        for stage in self._stages.values():
            stage.follow(plan)
        if is_new:
            self._bound[plan.digest] = self._bind(plan)
        self._training, self._warm_up = self._bound[plan.digest]
        if len(self._bound) > _PLANS:
            used = plan.digest, self._plan.digest
            del self._bound[next(each for each in self._bound if each not in used)]

    @property
    def bars(self) -> "list[Bar]":
        """The compute ops of the last step that was recorded."""
        bars = self._measured.recording.bars if self._measured is not None else ()
        return [bar for bar in bars if not is_transfer(bar.kind)]

    @property
    def messages(self) -> "list[Bar]":
        """The sends, and the waits for receives, of the last step that was recorded."""
        bars = self._measured.recording.bars if self._measured is not None else ()
        return [bar for bar in bars if is_transfer(bar.kind)]

    @property
    def extras(self) -> list[Mapping[str, Any]]:
        """The other entries that `loss_fn` returned in the last step or evaluation."""
        return self._results.extras

    @property
    def skipped(self) -> bool:
        """Whether all ranks have skipped the batch of the last step, which then has no losses and
        no gradients, so that an optimizer changes nothing.
        """
        return any(part.skipped for part in self._parts)

    @property
    def losses(self) -> dict[str, Tensor]:
        """The losses of this rank's last stages: by model, a tensor of shape (microbatches,)."""
        return self._results.losses

    @property
    def outputs(self) -> dict[str, list[Value]]:
        """The outputs of this rank's last stages: by model, a list by microbatch."""
        return self._results.outputs

    @overload
    def step(
        self,
        inputs: Value = None,
        targets: Value = None,
        options: Options | Mapping[str, Options] | None = None,
        *,
        counts: Counts | None = None,
        plan: Plan | None = None,
        return_outputs: Literal[False] = False,
        **keywords: Any,
    ) -> Tensor | None: ...

    @overload
    def step(
        self,
        inputs: Value = None,
        targets: Value = None,
        options: Options | Mapping[str, Options] | None = None,
        *,
        counts: Counts | None = None,
        plan: Plan | None = None,
        return_outputs: Literal[True],
        **keywords: Any,
    ) -> tuple[Tensor | None, list[Value] | None]: ...

    def step(
        self,
        inputs: Value = None,
        targets: Value = None,
        options: Options | Mapping[str, Options] | None = None,
        *,
        counts: Counts | None = None,
        plan: Plan | None = None,
        return_outputs: bool = False,
        **keywords: Any,
    ) -> Tensor | tuple[Tensor | None, list[Value] | None] | None:
        """Run the plan once on a batch; gradients add up in `.grad`.

        The rank of the first stage needs `inputs`, that of the last stage `targets`; elsewhere both
        may be None. All ranks of a pipeline must load the same batches, and a rank that is given
        both compares them. If there are several first stages, `inputs` is a dictionary, such as
        `{0: images, 1: texts}`, of which a rank needs the entries of its own stages. All tensors
        are cut into microbatches along `batch_dim`, and microbatches into slices along the first
        other dimension. `keywords` are keyword arguments for the modules of this rank: their
        tensors are cut like inputs, and other values are the same for all microbatches
        (`schedlang.runtime.keywords`). `options` are keyword arguments that are not cut, one
        dictionary per microbatch.

        Returns the unscaled losses on the rank of the last stage, as a tensor of shape
        (microbatches,), and None elsewhere; the loss of a microbatch is the mean over its slices.
        If there are several pipelines, the first one has the first microbatches of each update, and
        a rank returns the losses that it has. With `return_outputs`, the result is a pair: the
        losses, and the last stage's outputs by microbatch, without their graphs.

        If inputs and targets are lists, their values are the plan's microbatches, which stages get
        as they are: their shapes may differ. `counts`, on the ranks of first stages, are the
        numbers of rows or tokens over which the losses of microbatches are means. The gradient is
        then that of the mean over all rows or tokens of an update, in all replicas. Without
        `counts`, all microbatches have the same weight, and those of a list must have the same
        shape. For several models, `counts` is a dictionary by name.

        With `plan`, such as `plan.for_microbatches(3)`, the step follows that plan instead of the
        pipeline's. It must have the same stages on the same ranks, and all ranks must be given the
        same one.

        The other entries that `loss_fn` returned are in `extras` on the rank of the last stage: a
        dictionary for each microbatch, or for each slice.

        For several models, inputs, targets and options are dictionaries by the models' names. The
        step then returns None, and the results are in `losses` and `outputs`.
        """
        if self._plan.is_forward_only:
            raise PipelineError(
                "the plan has forwards alone and cannot train: call `evaluate`"
            )
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            raise PipelineError(
                "`step` trains, and gradients are off here, as in `torch.no_grad()` or "
                "`torch.inference_mode()`: call `evaluate` there"
            )
        if plan is not None:
            check_is_plan(plan)
        for stage in self._stages.values():
            stage.keeps_results = return_outputs
        batch = Batch(inputs, targets, options, False, counts=counts, keywords=keywords)
        with self._later.within_step():
            plan = self._plan if plan is None else plan
            losses = self._train(batch, plan, return_outputs)
        return (losses, self.outputs.get(_ONLY)) if return_outputs else losses

    def train_batch(
        self, batches: Iterator[Any] | None = None, **given: Any
    ) -> Tensor | tuple[Tensor | None, list[Value] | None] | None:
        """Take the next batch of an iterator, which is a pair of inputs and targets or a dictionary
        of arguments of `step`; call `step` with it and with the other arguments, `given`.

        All ranks call this together. Ranks that need inputs, targets or keyword arguments have an
        iterator, and others may have none. At the end of the iterators, StopIteration is raised on
        all ranks, as by `next`; it is an error if they end after different numbers of batches. If
        the iterator of a rank raises an exception of `skip_if`, all ranks skip the batch.
        """
        with self._watchdog.guard("in train_batch"):
            batch = next_batch(batches, self._site.setup.skipped_exceptions)
            batch.agree(self._wire, self._processes)
            if batch.is_bad:
                for skip in filled(self._parts, "skip"):
                    skip()
        if batch.has_ended:
            raise StopIteration
        return None if batch.is_bad else self.step(**batch.arguments, **given)

    def _train(self, batch: Batch, plan: Plan, return_outputs: bool) -> Tensor | None:
        """Run the plan once, and collect the results; return the losses."""
        if self._has_saved:
            self._has_saved = False
            warn_of_gradients(self.parameters())
        is_own_plan = plan.digest == self._plan.digest
        captured = self._captured
        if return_outputs or self.record or not is_own_plan:
            captured = None
        if captured is not None:
            batch = captured.prepare(batch)
        self._results.begin()
        this = self._run(batch, plan, 0, captured)
        self._results.take(this, self._watchdog.step, return_outputs)
        if self._stops_on_nan:
            # Ranks without losses wait here for those that have some.
            self._meet("at the losses")
        if self._after_step:
            with self._watchdog.guard("at the update"):
                for call in self._after_step:
                    call()
        return self.losses.get(_ONLY)

    def barrier(self) -> None:
        """Wait until all ranks of the pipeline are here, after the same steps."""
        self._meet("in barrier")

    def _meet(self, where: str) -> None:
        """Wait for all ranks of the plan; messages name the place by `where`."""
        with self._watchdog.guard(where):
            self._wire.reduce(torch.zeros(1, device=self._device), dist.ReduceOp.MAX)

    def close(self) -> None:
        """Stop watching this process: the pipeline is over, and the script goes on without it."""
        self._watchdog.close()

    def evaluate(
        self,
        inputs: Value = None,
        targets: Value = None,
        options: Options | Mapping[str, Options] | None = None,
        *,
        rows: int | None = None,
        **keywords: Any,
    ) -> list[Value] | None:
        """Run only the forwards of the plan, without gradients. The arguments are those of `step`.

        A batch may have any number of rows. It is cut into microbatches of `rows` rows, the last
        one perhaps shorter, and the plan runs as often as needed. Without `rows`, there are at most
        as many microbatches as the plan has. The rank of the first stage tells the others the
        number of rows. A list may have any number of microbatches, of any shapes.

        Returns on the rank of the last stage its outputs by microbatch, or the losses if there are
        `targets`; None elsewhere.
        """
        if rows is not None and rows < 1:
            raise PipelineError(f"`rows` is {rows}, it must be 1 or more")
        # A tensor made in `torch.inference_mode` can never be used in training, such as a table
        # that a model keeps from its first forward, or an optimizer's state. So an evaluation does
        # not run in that mode, unless the model itself was made in it.
        modules = [stage.module for stage in self._stages.values()]
        with torch.inference_mode(are_of_inference(modules)), torch.no_grad():
            self.validate()
            batch = Batch(inputs, targets, options, True, rows=rows, keywords=keywords)
            with self._later.within_step():
                outputs = self._evaluate(batch)
        return outputs

    def _evaluate(self, batch: Batch) -> list[Value] | None:
        """Run rounds of forwards until the batch ends."""
        self._results.begin()
        number = 0
        is_over = False
        while not is_over:
            # A shorter round uses calls of its own, made once for each number of microbatches.
            this = self._run(batch, self._plan, number)
            self._results.take_evaluated(this)
            number += 1
            is_over = all(each.is_last for each in this)
        self._results.end_evaluation()
        return self.outputs.get(_ONLY)

    def named_losses(self) -> dict[str, float]:
        """The losses of the last step or evaluation by name; all ranks call this, and get the same.

        `loss` is that of the last stage; the others were added by stages (`add_loss`), and are
        given without their factors. Each is the weighted mean over all microbatches and replicas.
        For several models, the model's name comes first: `actor.loss`.
        """
        with self._watchdog.guard("in named_losses"):
            self._loss_names, means = means_of_losses(
                losses_of(self._results, self._stages, self._plan),
                self._loss_names,
                self._wire,
                self._watchdog,
                self._device,
            )
        return means

    def report(self, peak_flops: float | None = None) -> "Report":
        """Speed, FLOPs, idle time, memory and the slowest rank of the steps that were recorded
        since the last report: a dictionary of numbers for a logger, and text for people
        (docs/training.md#what-a-run-reaches). All ranks call this, and get the same. `mfu` is
        relative to `peak_flops`, in FLOPs per second of one device; by default those of its type.
        """
        with self._watchdog.guard("in report"):
            report = None
            if self._measured is not None:
                report = self._measured.report(self._wire, self._processes, peak_flops)
        # Nothing has failed, and a script that asks for a figure too early may go on.
        if report is None:
            raise PipelineError(
                "no step was recorded since the last report: set `pipeline.record = True` before "
                "the steps that it is to be of, on all ranks"
            )
        return report

    def _run(
        self,
        batch: Batch,
        plan: Plan,
        number: int,
        captured: "CapturedSteps | None" = None,
    ) -> list[Round]:
        """Run a round of a batch, by its number, under a plan: prepare it, walk over the calls, and
        finish it. The walk may be `captured`.
        """
        watchdog = self._watchdog
        watchdog.step += 1
        # Parts and stages count steps of training; an evaluation is none.
        owners: list[Part | Stage] = []
        if not batch.evaluates:
            owners = [*self._parts, *self._stages.values()]
        try:
            self._follow(plan)
            for owner in owners:
                owner.begin_step()
            given = self._batches.load_inputs(batch, number)
            # A wait for other ranks here counts as a wait of the first action.
            watchdog.action = 0
            announced = self._exchange.begin(given)
            watchdog.action = None
            this = self._batches.load_rest(batch, announced, number)
            self._measure(batch, given, this)
            calls = self._evaluation(this) if batch.evaluates else self._training
            if self._walk_warm_up and not batch.evaluates:
                warm_up = partial(self._walk, calls[: self._warm_up])
                for walk_twice in self._walk_warm_up:
                    walk_twice(warm_up, partial(self._start_over, batch))
                calls = calls[self._warm_up :]
            if captured is None:
                self._walk(calls)
            else:
                captured.walk(announced, partial(self._walk, calls))
            self._exchange.end()
            for owner in owners:
                owner.end_step()
        except Exception as error:
            watchdog.fail(
                error if self._captured is None else self._captured.told(error)
            )
        except BaseException as error:
            # KeyboardInterrupt, or a handler of a signal has called `sys.exit`.
            watchdog.abandon(error)
            raise
        finally:
            watchdog.action = None
            watchdog.between = BETWEEN
        return this

    def _start_over(self, batch: Batch) -> None:
        """Prepare a second run of the warm-up."""
        # Every message sent in a warm-up is received in it.
        self._exchange.complete_sends()
        if self.record and self._measured is not None:
            self._measured.begin_anew()
        self._batches.load_inputs(batch, 0)

    def _measure(
        self, batch: Batch, given: Mapping[int, Given], this: Sequence[Round]
    ) -> None:
        """Record the round that begins, if `record` is set."""
        if self.record:
            if self._measured is None:
                dim = dims_of(self._site.setup.batch_dim).inputs
                self._measured = measured_steps(
                    self._plan, self._stages, self._device, dim
                )
            counts = self._batches.counts(this)
            self._measured.begin(given, counts, batch.evaluates)
        elif self._measured is not None:
            self._measured.pause()

    def _walk(self, calls: list[Call]) -> None:
        """Make calls one after the other."""
        if self.record and self._measured is not None:
            self._measured.recording.walk(calls, self._watchdog, self._followed.names)
            return
        # The loop variable is a field of the watchdog. So its thread knows where this rank is,
        # without any work in the walk.
        watchdog = self._watchdog
        gpu = watchdog.gpu
        stream = None if gpu is None else gpu.stream()
        for watchdog.action, call, _ in calls:
            call()
            # A GPU is behind the host, and marks in its stream tell the watchdog how far it is.
            if gpu is not None and stream is not None:
                gpu.mark((watchdog.step, watchdog.action, ()), stream)

    def _evaluation(self, this: Sequence[Round]) -> list[Call]:
        """The calls of the forwards of a round, with the indices of these actions in the plan."""
        counts = self._batches.counts(this)
        if counts not in self._evaluations:
            indices = forwards(self._plan, self._rank, counts)
            plan = forward_only(self._plan, counts)
            # The same stages and messages, without backwards, and only with these microbatches.
            calls = prepare(plan, self._rank, self._stages, self._exchange, self._parts)
            # Calls at the end of a round have the index of its last action, if it has any.
            self._evaluations[counts] = [
                (indices[index] if indices else 0, call, op)
                for index, call, op in calls
            ]
        return self._evaluations[counts]

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank that an optimizer updates after a step.

        If the weights of a stage travel from rank to rank, they are at home on one rank between two
        steps, and only that rank has them here. On other ranks they have no elements then, and no
        gradients.
        """
        homes = {}
        if self._site.asks_for("hops"):
            homes = homes_of(self._plan, self._stages)
        modules = (
            stage.module
            for number, stage in self._stages.items()
            if homes.get(number, number) == number
        )
        # Two stages may have the same module.
        return iter(
            {
                id(each): each for module in modules for each in module.parameters()
            }.values()
        )

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, model: str | None = None
    ) -> Tensor:
        """Scale the gradients of all stages to a norm of at most `max_norm`; return the norm before
        on all ranks.

        This is what `torch.nn.utils.clip_grad_norm_` does for the whole model in one process. All
        ranks call it together, after a step. For several models, `model` is the name of the one
        whose gradients are clipped. If the plan itself updates stages, it is too late to clip.
        """
        with self._watchdog.guard("in clip_grad_norm_"):
            check_clipping(
                self._plan,
                model,
                self._site.modules,
                clips_itself=self._site.setup.ends_with_update(self._plan),
            )
            shared = [
                each
                for each in self._site.shared
                if model is None or model in each.models
            ]
            norm = clip_by_total(shared, max_norm, norm_type, self._device, self._wire)
        return norm

    def validate(self) -> None:
        """Wait for the norm of the update after the last step, and repeat that update if it should
        have been clipped. Call this after the last step, and before the script reads or changes
        weights or the state of optimizers.

        The next step does this itself, as do `evaluate`, `save`, `save_model` and `norms`. It sends
        no messages, so any rank may call it. If steps do not end with an update, it does nothing.
        """
        if self._validate:
            with self._watchdog.guard("in validate"):
                for call in self._validate:
                    call()

    @property
    def norms(self) -> list[Tensor]:
        """The gradient norm of each update of the last step before it was clipped to `max_norm`,
        the same on all ranks. For an update at the end of a step, this waits as `validate` does.
        """
        self.validate()
        norms = chain.from_iterable(sorted(part.norms.items()) for part in self._parts)
        return [norm for _, norm in norms]

    @property
    def audits(self) -> list[str]:
        """The result of the `audit` of the first step, for each stage of this rank."""
        parts = chain.from_iterable(stage.parts for stage in self._stages.values())
        return [part.verdict for part in parts if part.verdict is not None]

    def mean_over_replicas(self, values: Tensor) -> Tensor:
        """The mean of a tensor, such as losses, over the replicas of this rank, which all call this
        after a step.
        """
        replicas = self._processes.replicas
        total = values.clone()
        with self._watchdog.guard("in mean_over_replicas"):
            if replicas.are_several:
                self._wire.end_sum(self._wire.begin_sum(total, replicas), replicas)
        return total / len(replicas.processes)

    def state_dict(self) -> dict[int, Any]:
        """The state that a checkpoint needs besides modules and optimizers: older versions of the
        weights, by stage.
        """
        return {
            number: versions.state_dict() for number, versions in self._versions.items()
        }

    def load_state_dict(self, state: Mapping[int, Any]) -> None:
        """Restore this state, after the modules have the weights of the checkpoint."""
        versions = self._versions
        if state.keys() != versions.keys():
            raise PipelineError(
                f"the checkpoint has versions of the stages {sorted(state)}, not of "
                f"{sorted(versions)}"
            )
        for number, part in versions.items():
            part.load_state_dict(state[number])

    @property
    def _versions(self) -> dict[int, Part]:
        """The parts that keep older versions of weights, by stage."""
        return {
            number: part
            for number, stage in self._stages.items()
            for part in stage.parts
            if filled([part], "state_dict")
        }

    def save(
        self, folder: str | Path, step: int, others: Sequence[Stateful] = ()
    ) -> None:
        """Write this rank's file of a checkpoint, between two updates; all ranks call this after
        the same step.

        The file has the weights of the stages in all versions, the state of the pipeline's
        optimizers, torch's random state, and the states of `others`, such as the script's own
        optimizers and learning rate schedulers; but no gradients. If it is called within a step,
        for example by a handler of a signal, it is postponed so that all ranks write after the same
        step.
        """
        if self._later.add("save", partial(self.save, folder, step, others)):
            return
        self.validate()
        with self._watchdog.guard():
            self._checkpoints(folder, others).write(step)
        self._has_saved = True

    def resume(self, folder: str | Path, others: Sequence[Stateful] = ()) -> int:
        """Resume from the newest checkpoint that all ranks have in the folder; return its step, or
        0 if there is none.

        All ranks call this, with the same `others` in the same order as for `save`.
        """
        self.validate()
        with self._watchdog.guard():
            return self._checkpoints(folder, others).resume(
                self._device, self._watchdog
            )

    def _checkpoints(
        self, folder: str | Path, others: Sequence[Stateful]
    ) -> "Checkpoints":
        """This rank's checkpoints in a folder."""
        return checkpoints_of(
            folder, self._plan, self._stages, self, self._device, others
        )

    def save_model(
        self,
        folder: str | Path,
        step: int = 0,
        optimizers: Sequence[Optimizer] = (),
        state: Mapping[str, Stateful] = MappingProxyType({}),
    ) -> None:
        """Write the model under its own names, whole or not at all, into a folder that all ranks
        share.

        `load_model` reads the weights for any plan. `load_optimizers` reads the state of the
        pipeline's and the script's optimizers. `load_state` reads the `state`: other objects of the
        script by name, such as `{"scheduler": scheduler}`, which are the same on all ranks. The
        stages must be those of `split`. Within a step, the call is postponed, as for `save`.
        """
        check_state(state)
        call = partial(self.save_model, folder, step, optimizers, state)
        if self._later.add("save_model", call):
            return
        self.validate()
        modules = {number: stage.module for number, stage in self._stages.items()}
        own = [
            stage.optimizer
            for stage in self._stages.values()
            if stage.optimizer is not None
        ]
        part = ModelPart(self._plan, self._rank, modules, [*optimizers, *own])
        with self._watchdog.guard():
            write_model(Path(folder), step, part, state, self._watchdog)
