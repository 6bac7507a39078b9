"""The messages of one rank: those of its plan, and an announcement at the start of every step.

A receive must know the shapes and types of its tensors. The first step with inputs of certain
shapes and types finds them out (see `schedlang.runtime.messages`); later steps with such inputs
know them. All ranks must agree which of the two a step is. So the rank that has the inputs
announces them when a step begins, for each microbatch if they differ.

Neither adds a wait that the proof does not cover. The announcement precedes the first action of the
plan, and goes only from the ranks of first stages to others, so no cycle can contain it; the wait
has the pipeline's time limit. The header of a first step precedes the tensors of a transfer in the
plan, as part of that transfer, and the op that needs them waits anyway. (Other trainers exchange
shapes in separate calls before each transfer. That is one more rendezvous, to which ranks may come
in different orders, so their interleaved schedules can deadlock with sequences of unequal lengths.)
"""

from collections.abc import Hashable, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from attrs import frozen
from torch import Tensor

from schedlang.on_demand import on_demand
from schedlang.plan.plan import Plan
from schedlang.runtime.announcement import NAME, Announcement, Rows, Shares
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.messages import (
    ActivationReceive,
    ActivationSend,
    Channel,
    GradientReceive,
    GradientSend,
    Receive,
    Send,
)
from schedlang.runtime.processes import Replicas, backend_of
from schedlang.runtime.tags import Tags
from schedlang.runtime.values import Value, ValueSpec
from schedlang.runtime.wire import InFlight, Wire
from schedlang.schedule.actions import is_send
from schedlang.schedule.kinds import RECEIVES, SENDS, Kind
from schedlang.schedule.layout import Layout, Pipeline

if TYPE_CHECKING:
    from schedlang.runtime.agreement import check_same_batch, totals_of_replicas
    from schedlang.runtime.lone_gradients import LoneGradientSend
    from schedlang.runtime.precision import Rounding
else:
    # For several first stages, and for replicas.
    check_same_batch = on_demand("schedlang.runtime.agreement.check_same_batch")
    totals_of_replicas = on_demand("schedlang.runtime.agreement.totals_of_replicas")
    # For a channel that has gradients alone.
    LoneGradientSend = on_demand("schedlang.runtime.lone_gradients.LoneGradientSend")

#: The digits of a plan's digest that identify it among the plans of a pipeline.
_DIGITS = 15


@frozen
class Given:
    """The inputs of a pipeline's first stage in a step: whether it evaluates, the rows of the
    batch, and the specs of the units that pass through, one for all or one for each. In training,
    `counts` are the weights of their losses, if the script gives any, and `totals` the sums of
    these for each update. `checksums` are those of the batch.
    """

    evaluates: bool
    rows: Rows
    specs: Sequence[ValueSpec]
    counts: Sequence[float] = ()
    totals: Sequence[float] = ()
    of_slices: tuple[float, ...] = ()
    checksums: tuple[int, int] = (0, 0)


class Exchange:
    """All messages of one rank. `number` identifies the pipeline among those that all processes
    build in turn; `counting` are replicas whose losses are averaged together, along each dimension.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        number: int,
        device: torch.device,
        wire: Wire,
        rounding: "Rounding | None",
        counting: Sequence[Replicas] = (),
    ) -> None:
        self._number = number
        self._device = device
        self._wire = wire
        self._rank = rank
        self._rounding = rounding
        self._counting = counting
        #: The device on which counts are summed: the CPU if possible, to avoid a wait for the GPU.
        self._of_counts = device
        host = torch.device("cpu")
        groups = [each.group for each in counting if each.group is not None]
        if all(backend_of(group, host) is not None for group in groups):
            self._of_counts = host
        # Channels have the numbers of the stages at which they begin, or of far edges.
        channels = len(plan.placement) + len(plan.layout.far_edges)
        self.tags = Tags(channels, len(plan.ranks), units=0)
        #: NCCL posts a batch of messages as one; with gloo, or by edges, batches have no effect.
        self.has_batches = device.type == "cuda" and not wire.is_by_edge
        #: If messages are matched by tags, a receive may begin before its place in the plan.
        self.has_tags = device.type != "cuda" and not wire.is_by_edge
        self._channels: dict[int, Channel] = {}
        #: By kind, number and microbatch, the messages that any plan so far has.
        self._messages: dict[tuple[Kind, int, int], Send | Receive] = {}
        #: For each first stage, the numbers of all specs of inputs so far, and those of this step.
        self._seen: dict[int, dict[tuple[bool, ValueSpec], int]] = {}
        self._inputs: dict[int, tuple[int, ...]] = {}
        #: For each channel, by its number, the first stages of its pipeline.
        self._firsts: dict[int, list[int]] = {}
        self._announced: list[tuple[InFlight, int]] = []
        self.follow(plan)

    def follow(self, plan: Plan) -> None:
        """Send and receive by this plan from now on: that of the step."""
        self.plan = plan
        self._name = torch.tensor([self._number, int(plan.digest[:_DIGITS], 16)])
        units = max(map(plan.layout.units, range(len(plan.placement))))
        if units > self.tags.units:
            self.tags.units = units
            for channel in self._channels.values():
                channel.forget_inputs()

    def message(
        self, kind: Kind, number: int, microbatch: int, box: dict[int, Value]
    ) -> Send | Receive:
        """The message of an action, which takes its value from a box or puts it there."""
        known = self._messages.get((kind, number, microbatch))
        if known is not None:
            return known
        channel = self._channel(kind, number)
        is_gradient = kind in (SENDS[Kind.B], RECEIVES[Kind.B])
        message: Send | Receive
        if is_send(kind):
            send = GradientSend if is_gradient else ActivationSend
            if not self.plan.layout.carries(SENDS[Kind.F], channel.number):
                send = LoneGradientSend
            message = send(channel, microbatch, box)
        else:
            receive = GradientReceive if is_gradient else ActivationReceive
            message = receive(channel, microbatch, box, self._device)
        self._messages[kind, number, microbatch] = message
        return message

    def begin(self, given: dict[int, Given]) -> dict[int, Announcement]:
        """Begin a step: announce the inputs of this rank's first stages, and receive the
        announcements of other ranks. Returns all announcements by first stage.
        """
        announced: dict[int, Announcement] = {}
        layout = self.plan.layout
        totals_of: dict[str, Sequence[float]] = {}
        # All announcements are sent before this rank waits for one, since two ranks with first
        # stages of different pipelines send to each other.
        for first, inputs in given.items():
            # All first stages of a model on this rank have the same totals.
            model = layout.model_of(first)
            if model not in totals_of:
                totals_of[model] = self._totals(inputs)
            totals = totals_of[model]
            seen = self._seen.setdefault(first, {})
            forms = [
                seen.setdefault((inputs.evaluates, spec), len(seen))
                for spec in inputs.specs
            ]
            shares = Shares(self._shares(first, inputs, totals), inputs.of_slices)
            announced[first] = Announcement(
                inputs.rows, tuple(forms), shares, inputs.checksums
            )
            self._announce(first, announced[first])
        for first in self.plan.layout.firsts:
            if self._takes_part(self._rank, first) and first not in given:
                announced[first] = self._receive_announcement(first)
        self._inputs = {first: what.forms for first, what in announced.items()}
        for channel in self._channels.values():
            channel.begin(self._inputs_of(channel))
        if len(announced) > 1:
            check_same_batch(self.plan, announced)
        return announced

    def complete_sends(self) -> None:
        """Wait for all sends that have been posted."""
        for channel in self._channels.values():
            for message in channel.messages:
                if isinstance(message, Send):
                    message.complete()

    def end(self) -> None:
        """End a step, when all of its messages are complete."""
        for channel in self._channels.values():
            channel.end()
        for in_flight, peer in self._announced:
            self._wire.wait(in_flight, peer)
        self._announced.clear()

    def _inputs_of(self, channel: Channel) -> Sequence[Hashable]:
        """The numbers of this step's inputs for a channel's pipeline, for each microbatch or one
        for all; with several first stages, tuples of their numbers.
        """
        firsts = self._firsts[channel.number]
        if len(firsts) == 1:
            return self._inputs[firsts[0]]
        forms = [self._inputs[first] for first in firsts]
        count = max(map(len, forms))
        each = [
            numbers if len(numbers) == count else numbers * count for numbers in forms
        ]
        return tuple(zip(*each, strict=True))

    def _totals(self, given: Given) -> Sequence[float]:
        """The sum of `counts` over all replicas for each update; empty if the script gives none."""
        totals = given.totals
        if self._counting and not given.evaluates:
            totals = totals_of_replicas(
                self.plan, totals, self._counting, self._wire, self._of_counts
            )
        if not all(totals):
            raise PipelineError("`counts` are 0 for all microbatches of an update")
        return totals

    @property
    def _replicas(self) -> int:
        """The number of replicas whose losses are averaged together."""
        return prod(len(replicas.processes) for replicas in self._counting)

    def _shares(
        self, first: int, given: Given, totals: Sequence[float]
    ) -> tuple[float, ...]:
        """The weight of each unit of a first stage in its update, where 1.0 is the average."""
        if not totals:
            return ()
        layout = self.plan.layout
        on_average = self._replicas * layout.microbatches_of(first) // layout.updates
        return tuple(
            count * on_average / totals[layout.update_of(first, unit)]
            for unit, count in enumerate(given.counts)
        )

    def _channel(self, kind: Kind, number: int) -> Channel:
        layout = self.plan.layout
        first = min(number, layout.counterpart(kind, number)[1])
        if first not in self._channels:
            peer = self.plan.peer(kind, number)
            earlier = layout.earlier(kind, number)
            assert peer is not None
            # The shapes in one model may depend on the inputs of models that are linked with it.
            linked = _linked(layout, layout.pipeline_of[earlier])
            self._firsts[first] = [
                stage for stage in layout.firsts if layout.pipeline_of[stage] in linked
            ]
            self._channels[first] = Channel(
                self._wire,
                first,
                earlier,
                self._what(first),
                peer,
                self.tags,
                self._rounding,
                self._device,
                self.has_batches,
            )
        return self._channels[first]

    def _what(self, number: int) -> str:
        """The name of a channel's values in error messages."""
        if number not in self.plan.layout.far_edges:
            return f"the output of stage {number}"
        earlier, later = self.plan.layout.far_edges[number]
        return f"what stage {earlier} returns for stage {later}"

    def _takes_part(self, rank: int, first: int) -> bool:
        """Whether a rank has a stage of the pipeline with this first stage, or of one that hands
        microbatches over. With several models, all ranks take part in each, to know when all of
        them have ended.
        """
        if self.plan.layout.models or self.plan.layout.handovers:
            return True
        pipeline = self.plan.layout.pipeline_of[first]
        return rank in self.plan.placement[pipeline.start : pipeline.stop]

    def _announce(self, first: int, announcement: Announcement) -> None:
        tensors = announcement.pack(self._name)
        tag = self.tags.announcement(first)
        for rank in range(len(self.plan.ranks)):
            if rank != self._rank and self._takes_part(rank, first):
                sent = [
                    (self._wire.send(tensor, rank, tag), tensor) for tensor in tensors
                ]
                self._announced.append((sent, rank))

    def _receive_announcement(self, first: int) -> Announcement:
        rank = self.plan.placement[first]
        numbers = self._receive_now(Announcement.first_room(), rank, first)
        if not torch.equal(numbers[:NAME], self._name):
            is_same_pipeline = numbers[0] == self._name[0]
            what = (
                "with another plan: give all ranks the same `plan`, or none"
                if is_same_pipeline
                else "of another pipeline"
            )
            raise PipelineError(f"rank {rank} has begun a step {what}")
        rest = Announcement.rest_room(numbers)
        if rest is not None:
            self._receive_now(rest, rank, first)
        return Announcement.unpack(numbers, rest)

    def _receive_now(self, tensor: Tensor, rank: int, first: int) -> Tensor:
        received = self._wire.receive(tensor, rank, self.tags.announcement(first))
        self._wire.wait([(received, tensor)], rank)
        return tensor


def _linked(layout: Layout, pipeline: Pipeline) -> set[Pipeline]:
    """A pipeline, and other pipelines that are connected with it by edges."""
    linked = {pipeline}
    count = 0
    # Repeat until nothing is added, since an edge may connect a pipeline that a later edge links.
    while count < len(linked):
        count = len(linked)
        for ends in layout.far_edges.values():
            pipelines = {layout.pipeline_of[stage] for stage in ends}
            if pipelines & linked:
                linked |= pipelines
    return linked
