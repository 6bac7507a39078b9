"""Cuts the batch of a step into microbatches for the stages of a rank, and collects the results.

A training step is one round through the plan, with all of its microbatches. An evaluation takes
batches of any size, in as many rounds as they need:

    11 rows, 2 a microbatch, a plan of 4 microbatches:

    round 0:  2 2 2 2      round 1:  2      round 2:  1

The values of a list are microbatches already, of any shape (`schedlang.runtime.microbatches`).
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, count, islice
from math import ceil
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen
from torch import Tensor

from schedlang.on_demand import on_demand
from schedlang.plan.plan import Plan
from schedlang.runtime.announcement import Announcement, Rows, Shares
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.exchange import Given
from schedlang.runtime.microbatches import (
    Counts,
    Microbatches,
    as_microbatches,
    weighted,
)
from schedlang.runtime.setup import SliceLengths
from schedlang.runtime.stage import Stage
from schedlang.runtime.values import (
    Value,
    ValueSpec,
    checksum,
    cut,
    flatten,
    size_along,
    trainable,
    unflatten,
)
from schedlang.schedule.layout import Layout, Pipeline

if TYPE_CHECKING:
    from schedlang.runtime.dealt import tell_of_other_batch
    from schedlang.runtime.keywords import Keywords as keywords_of
    from schedlang.runtime.several_inputs import (
        beside_others,
        called,
        inputs_of_stage,
        values_of_model,
    )
    from schedlang.runtime.unlike_microbatches import (
        check_count,
        check_counts,
        check_list,
        cut_slices,
        join_slices,
        shares_of_slices,
        totals_of,
    )
else:
    # If ranks were given different batches.
    tell_of_other_batch = on_demand("schedlang.runtime.dealt.tell_of_other_batch")
    # For lists of microbatches, counts and slices.
    check_count = on_demand("schedlang.runtime.unlike_microbatches.check_count")
    check_counts = on_demand("schedlang.runtime.unlike_microbatches.check_counts")
    check_list = on_demand("schedlang.runtime.unlike_microbatches.check_list")
    cut_slices = on_demand("schedlang.runtime.unlike_microbatches.cut_slices")
    join_slices = on_demand("schedlang.runtime.unlike_microbatches.join_slices")
    shares_of_slices = on_demand(
        "schedlang.runtime.unlike_microbatches.shares_of_slices"
    )
    totals_of = on_demand("schedlang.runtime.unlike_microbatches.totals_of")
    # For several models and first stages, and messages about these.
    beside_others = on_demand("schedlang.runtime.several_inputs.beside_others")
    called = on_demand("schedlang.runtime.several_inputs.called")
    inputs_of_stage = on_demand("schedlang.runtime.several_inputs.inputs_of_stage")
    values_of_model = on_demand("schedlang.runtime.several_inputs.values_of_model")
    # For steps with keyword arguments.
    keywords_of = on_demand("schedlang.runtime.keywords.Keywords")

#: The first batches, in which checksums are also made of tensors on a GPU: the host waits for them.
_EARLY = 3

#: Keyword arguments of modules, by microbatch.
Options = Sequence[Mapping[str, Any]]


@frozen
class BatchDims:
    """The dimensions along which inputs and targets have their rows."""

    inputs: int = 0
    targets: int = 0


def dims_of(dims: int | tuple[int, int]) -> BatchDims:
    """The dimensions, given as a pair or as one number for both."""
    return BatchDims(*(dims if isinstance(dims, tuple) else (dims, dims)))


@frozen(eq=False)
class Batch:
    """The arguments of `Pipeline.step`, or of `Pipeline.evaluate` if `evaluates`; `rows` are then
    those of a microbatch.
    """

    inputs: Value = field(converter=trainable)
    targets: Value = field(converter=trainable)
    options: Options | Mapping[str, Options] | None = field(converter=trainable)
    evaluates: bool
    rows: int | None = None
    counts: Counts | None = None
    keywords: Mapping[str, Any] = field(converter=trainable, factory=dict)


@frozen
class Round:
    """Microbatches of a batch that go through the plan together: `count` of them from number
    `begin` on, each with the same number of rows.
    """

    begin: int
    count: int
    first_row: int
    rows: int
    is_last: bool


def round_of(rows: Rows, microbatches: int, number: int) -> Round:
    """A round of a batch, by its number, under a plan with this number of microbatches. After the
    last round, it is an empty one, since another model may have more rounds.
    """
    of_batch = rounds(rows, microbatches)
    if number < len(of_batch):
        return of_batch[number]
    return Round(0, 0, 0, rows.of_microbatch, is_last=True)


def rounds(rows: Rows, microbatches: int) -> list[Round]:
    """The rounds of a batch under a plan with this number of microbatches."""
    rows_each = rows.of_microbatch
    whole, rest = divmod(rows.total, rows_each)
    sizes = [
        (begin, min(microbatches, whole - begin), rows_each)
        for begin in range(0, whole, microbatches)
    ]
    if rest:
        sizes.append((whole, 1, rest))
    return [
        Round(begin, count, begin * rows_each, rows, is_last=place == len(sizes) - 1)
        for place, (begin, count, rows) in enumerate(sizes)
    ]


class Batches:
    """Gives the batch of a step to the stages of one rank, and collects their results;
    PipelineError if the batch does not fit the plan.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[int, Stage],
        dims: BatchDims,
        slice_lengths: SliceLengths | None = None,
        has_scale: bool = False,
    ) -> None:
        self._stages = stages
        self._dims = dims
        self._slice_lengths = slice_lengths
        self._has_scale = has_scale
        #: The number of batches so far, and whether ranks were given different ones.
        self._batches = 0
        self._is_dealt_out = False
        #: Shapes and types of the last inputs of this rank's first stages.
        self._given_specs: dict[int, Sequence[ValueSpec]] = {}
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Cut batches into the microbatches of this plan from now on."""
        self._plan = plan
        self._layout = plan.layout
        self._shares = shares(plan.layout)
        self._last: dict[tuple[int, ...], list[tuple[Stage, int]]] = {}

    def load_inputs(self, batch: Batch, number: int) -> dict[int, Given]:
        """Give this rank's first stages the inputs of a round, by its number. Returns what each was
        given, by the number of the stage.
        """
        given: dict[int, Given] = {}
        updates = self._layout.updates
        for pipeline, mine in zip(self._layout.pipelines, self._shares, strict=True):
            # `mine` are numbers in the batch: with two pipelines, [0, 1] and [2, 3]. A stage counts
            # those of its own pipeline from 0, so `units` of the second are 0 and 1, cut from rows
            # 2 and 3.
            of_model = self._of_model("inputs", batch.inputs, pipeline)
            counts = self._of_model("counts", batch.counts, pipeline)
            for first in self._own(self._layout.firsts, pipeline):
                microbatches = self._layout.microbatches_of(first)
                inputs = as_microbatches(self._inputs_of(of_model, first, pipeline))
                rows = self._rows_of(batch, inputs, first, microbatches)
                this = round_of(rows, microbatches, number)
                parts = _microbatches("inputs", inputs, this, self._dims.inputs)
                units, lengths = self._slices("inputs", parts, mine, self._dims.inputs)
                self._stages[first].inputs.update(enumerate(units))
                if number == 0 and isinstance(inputs, Microbatches):
                    must_count = counts is None and not batch.evaluates
                    check_list(inputs, must_count and self._is_scaled(pipeline))
                # If a round has no microbatches of this pipeline, announce the shapes of the round
                # before: an announcement needs shapes, and other ranks would have to learn new
                # ones.
                if units or parts:
                    self._given_specs[first] = self._specs(inputs, units or parts)
                given[first] = Given(
                    batch.evaluates,
                    rows,
                    self._given_specs[first],
                    self._counts(counts, mine, microbatches),
                    () if counts is None else totals_of(counts, updates),
                    tuple(chain.from_iterable(map(shares_of_slices, lengths))),
                    self._checksums(batch, first, pipeline) if number == 0 else (0, 0),
                )
        return given

    def _checksums(
        self, batch: Batch, first: int, pipeline: Pipeline
    ) -> tuple[int, int]:
        """The checksums of a first stage's inputs and of the targets that this rank was given."""
        if pipeline.start in self._stages and pipeline.stop - 1 in self._stages:
            return 0, 0
        # A rank that does not need one of the two may have been given anything.
        inputs = targets = None
        with suppress(PipelineError):
            of_model = self._of_model("inputs", batch.inputs, pipeline)
            inputs = self._inputs_of(of_model, first, pipeline)
        with suppress(PipelineError):
            targets = self._of_model("targets", batch.targets, pipeline)
        is_early = self._batches < _EARLY
        return checksum(inputs, is_early), checksum(targets, is_early)

    def _check_same(
        self, batch: Batch, announced: Mapping[int, Announcement], pipeline: Pipeline
    ) -> None:
        """Report once if the rank of a first stage was given another batch than this rank of the
        last stage. If both inputs and targets differ, inputs would meet targets of other rows.
        """
        # It is enough if one of the two is the same: each rank may augment inputs by itself, and
        # only those of the first stage are used.
        for first in self._layout.firsts:
            if first not in announced or not pipeline.start <= first < pipeline.stop:
                continue
            own = self._checksums(batch, first, pipeline)
            pairs = zip(announced[first].checksums, own, strict=True)
            are_same = [one == other for one, other in pairs if one and other]
            if are_same and not any(are_same) and not self._is_dealt_out:
                self._is_dealt_out = True
                tell_of_other_batch(self._plan.placement[first])

    def _specs(self, inputs: Value, units: Sequence[Value]) -> list[ValueSpec]:
        """Shapes and types of the microbatches or slices that pass through a first stage in a
        round: one for all, or one for each.
        """
        # A tensor that was cut evenly has pieces that all look like the first one.
        if not isinstance(inputs, Microbatches) and self._slice_lengths is None:
            units = units[:1]
        specs = [ValueSpec.of(*flatten(unit, "`inputs`")) for unit in units]
        return specs[:1] if len(specs) == 1 or len({*specs}) == 1 else specs

    def _is_scaled(self, pipeline: Pipeline) -> bool:
        """Whether the losses of a pipeline's microbatches are divided by their number: some of its
        stages are trained, and the script gives no scale.
        """
        return not self._has_scale and any(
            self._layout.has_backward[pipeline.start : pipeline.stop]
        )

    def _counts(
        self, counts: Sequence[float] | None, mine: Sequence[int], microbatches: int
    ) -> list[float]:
        """The counts of a pipeline's microbatches or slices, if the script gives some."""
        if counts is None:
            return []
        check_counts(counts, microbatches, self._has_scale)
        slices = self._layout.slices
        return [float(counts[number]) for number in mine for _ in range(slices)]

    def _of_model(self, name: str, values: Any, pipeline: Pipeline) -> Any:
        """Inputs, targets or options for the model of a pipeline. If there are several models, they
        are an entry of a dictionary, or None if it has none.
        """
        if not self._layout.models or values is None:
            return values
        return values_of_model(name, values, self._layout, pipeline)

    def _own(self, stages: Sequence[int], pipeline: Pipeline) -> list[int]:
        """The stages among these that belong to a pipeline and are on this rank."""
        return [
            stage
            for stage in stages
            if pipeline.start <= stage < pipeline.stop and stage in self._stages
        ]

    def _inputs_of(self, inputs: Value, first: int, pipeline: Pipeline) -> Value:
        """The inputs of a first stage. If its pipeline has several first stages, they are an entry
        of a dictionary.
        """
        firsts = [
            stage - pipeline.start
            for stage in self._layout.firsts
            if self._layout.pipeline_of[stage] == pipeline
        ]
        if len(firsts) == 1:
            return inputs
        return inputs_of_stage(inputs, first, firsts, self._layout)

    def load_rest(
        self, batch: Batch, announced: Mapping[int, Announcement], number: int
    ) -> list[Round]:
        """Give this rank's stages the targets and options of a round, after the ranks of first
        stages have announced the batch. Returns the round of each pipeline.
        """
        rounds: list[Round] = []
        self._batches += number == 0
        for pipeline, mine in zip(self._layout.pipelines, self._shares, strict=True):
            # A rank may know only one of several replicas; all have the same batch.
            first = pipeline.start if self._layout.models else next(iter(announced))
            of_batch = announced[first].rows
            microbatches = self._layout.microbatches_of(pipeline.start)
            this = round_of(of_batch, microbatches, number)
            rounds.append(this)
            last = self._stages.get(pipeline.stop - 1)
            if last is not None:
                if number == 0:
                    self._check_same(batch, announced, pipeline)
                last.targets = self._targets_of(batch, of_batch, this, pipeline, mine)
            of_round = self._options_of(batch, of_batch, this, pipeline)
            shares = next(
                (
                    what.shares
                    for first, what in announced.items()
                    if pipeline.start <= first < pipeline.stop
                ),
                Shares(),
            )
            for stage in range(pipeline.start, pipeline.stop):
                if stage in self._stages:
                    self._stages[stage].options = self._by_unit(of_round, mine)
                    self._stages[stage].shares = shares
        return rounds

    def _targets_of(
        self,
        batch: Batch,
        rows: Rows,
        this: Round,
        pipeline: Pipeline,
        mine: Sequence[int],
    ) -> dict[int, Value]:
        """The targets of a pipeline's last stage, which is on this rank, by microbatch or slice."""
        last = pipeline.stop - 1
        targets = as_microbatches(self._of_model("targets", batch.targets, pipeline))
        has_loss = self._stages[last].loss is not None
        if not self._layout.is_last(last) or (
            targets is None and (batch.evaluates or not has_loss)
        ):
            return {}
        self._check_targets(targets, rows)
        parts = _microbatches("targets", targets, this, self._dims.targets)
        units, _ = self._slices("targets", parts, mine, self._dims.targets)
        return dict(enumerate(units))

    def _options_of(
        self, batch: Batch, rows: Rows, this: Round, pipeline: Pipeline
    ) -> Options:
        """The keyword arguments of the modules for a pipeline's microbatches in a round."""
        options = self._of_model("options", batch.options, pipeline)
        keywords = {
            name: self._of_model(name, value, pipeline)
            for name, value in batch.keywords.items()
        }
        if options is None and not keywords:
            return []
        if self._layout.models:
            # Modules of one model need not take the keywords of another one.
            keywords = {
                name: value for name, value in keywords.items() if value is not None
            }
        inputs = self._of_model("inputs", batch.inputs, pipeline)
        given = keywords_of(rows, self._dims.inputs, inputs, self._layout.slices > 1)
        sizes = [this.rows] * this.count
        return given.of_round(keywords, options, this.begin, this.first_row, sizes)

    def counts(self, this: Sequence[Round]) -> tuple[int, ...]:
        """The number of microbatches of a round in each pipeline."""
        # A short round has the first microbatches of the batch. With 3 of 4 and two pipelines,
        # [0, 1] has two and [2, 3] has one.
        return tuple(
            sum(number < of_pipeline.count for number in mine)
            for of_pipeline, mine in zip(this, self._shares, strict=True)
        )

    def last_units(self, this: Sequence[Round]) -> list[tuple[Stage, int]]:
        """This rank's stages that have a loss or hand on nothing, each with a microbatch or slice
        that passes through it in a round, in the order of the batch.
        """
        counts = self.counts(this)
        if counts not in self._last:
            units = [
                (pipeline.stop - 1, unit)
                for pipeline, count in zip(self._layout.pipelines, counts, strict=True)
                if pipeline.stop - 1 in self._stages
                and self._layout.is_last(pipeline.stop - 1)
                for unit in range(count * self._layout.slices)
            ]
            # In each update, the microbatches of the first pipeline come first, as in the batch.
            units.sort(key=lambda op: self._layout.update_of(*op))
            self._last[counts] = [(self._stages[stage], unit) for stage, unit in units]
        return self._last[counts]

    def joined(self, parts: Sequence[Value]) -> list[Value]:
        """Join the outputs of slices into those of microbatches."""
        slices = self._layout.slices
        if slices == 1:
            return list(parts)
        return join_slices(parts, slices, self._dims.inputs)

    def _rows_of(
        self, batch: Batch, inputs: Value, first: int, microbatches: int
    ) -> Rows:
        """The number of rows of a first stage's inputs, and of each of the plan's microbatches."""
        if isinstance(inputs, Microbatches):
            if batch.rows is not None:
                raise PipelineError(
                    "`inputs` are a list of microbatches, so `rows` cuts nothing"
                )
            if not inputs.values or not batch.evaluates:
                check_count("inputs", inputs, microbatches)
            # A value of a list counts as one row, so that rounds are computed alike.
            return Rows(len(inputs.values), 1, is_list=True)
        if inputs is None:
            raise PipelineError(
                f"there are no `inputs` for {called(self._layout, first)}, which is on this rank "
                f"and takes them{beside_others(self._layout, first)}"
            )
        total = size_along(self._dims.inputs, inputs, "inputs")
        if not total:
            raise PipelineError(
                f"`inputs` for {called(self._layout, first)} have no rows"
            )
        if batch.evaluates:
            return Rows(total, batch.rows or ceil(total / microbatches))
        if total % microbatches:
            raise PipelineError(
                f"`inputs` for {called(self._layout, first)} have {total} rows, which do not "
                f"divide into {microbatches} microbatches"
            )
        return Rows(total, total // microbatches)

    def _check_targets(self, targets: Value, rows: Rows) -> None:
        """PipelineError if inputs and targets differ in their number of rows, which a loss might
        broadcast, or if only one of them is a list.
        """
        if targets is None:
            raise PipelineError(
                "there are no `targets`: this rank has a last stage, whose loss needs them"
            )
        is_list = isinstance(targets, Microbatches)
        if is_list != rows.is_list:
            one, other = (
                ("`inputs`", "`targets`") if rows.is_list else ("`targets`", "`inputs`")
            )
            raise PipelineError(
                f"{one} are a list, which is one of microbatches, and {other} are a whole batch: "
                "cut both or none (several tensors of one batch stand in a tuple)"
            )
        if is_list:
            check_count("targets", targets, rows.total)
            return
        total = size_along(self._dims.targets, targets, "targets")
        if total != rows.total:
            raise PipelineError(
                f"`inputs` have {rows.total} rows, and `targets` have {total}: both must have a "
                "row for every example of the batch"
            )

    def _slices(
        self, name: str, parts: Sequence[Value], mine: Sequence[int], rows: int
    ) -> tuple[list[Value], list[list[int]]]:
        """The slices of a round's microbatches in a pipeline; and their lengths, if the slices of a
        microbatch differ in length.
        """
        own = [parts[number] for number in mine if number < len(parts)]
        slices = self._layout.slices
        if slices == 1:
            return own, []
        return cut_slices(name, own, slices, rows, self._slice_lengths)

    def _by_unit(
        self, options: Sequence[Mapping[str, Any]], mine: Sequence[int]
    ) -> dict[int, Mapping[str, Any]]:
        """The options of a round, by microbatch or slice of a pipeline."""
        slices = self._layout.slices
        own = (number for number in mine if number < len(options))
        return {
            place * slices + slice: options[number]
            for place, number in enumerate(own)
            for slice in range(slices)
        }


def _microbatches(name: str, batch: Value, this: Round, dim: int) -> list[Value]:
    """The microbatches of a round."""
    if not this.count:
        return []
    if isinstance(batch, Microbatches):
        return list(batch.values[this.begin : this.begin + this.count])
    tensors, tree = flatten(batch, f"`{name}`")
    # Narrow each tensor to the round, then cut it: both make views, so nothing is copied.
    rows = this.count * this.rows
    narrowed = [tensor.narrow(dim, this.first_row, rows) for tensor in tensors]
    return cut(unflatten(narrowed, tree), [this.rows] * this.count, dim)


def mean_of_slices(
    losses: Sequence[Tensor], units: Sequence[tuple[Stage, int]], slices: int
) -> Tensor:
    """The losses by microbatch, from those of slices (`units`): the mean over the slices, weighted
    by their shares.
    """
    shares = [
        stage.shares.of_slice(unit) for stage, unit in units if stage.shares.of_slices
    ]
    stacked = torch.stack(list(losses))
    return (
        (weighted(stacked, shares) if shares else stacked).view(-1, slices).mean(dim=1)
    )


def shares(layout: Layout) -> list[list[int]]:
    """The numbers of each pipeline's microbatches in the batch of a step. In each update, the first
    pipeline has the first ones. Each model has a batch of its own.
    """
    if layout.models:
        return [[*range(pipeline.microbatches)] for pipeline in layout.pipelines]
    of_pipelines: list[list[int]] = [[] for _ in layout.pipelines]
    numbers = count()
    # With two pipelines, 8 microbatches and 2 updates: [[0, 1, 4, 5], [2, 3, 6, 7]].
    for _ in range(layout.updates):
        for mine, pipeline in zip(of_pipelines, layout.pipelines, strict=True):
            if layout.follower(pipeline) is None:
                mine += islice(numbers, pipeline.microbatches // layout.updates)
    # A pipeline that runs ahead has those of the pipeline that it hands over to.
    for mine, pipeline in zip(of_pipelines, layout.pipelines, strict=True):
        follower = layout.follower(pipeline)
        if follower is not None:
            mine += of_pipelines[layout.pipelines.index(follower)]
    return of_pipelines
