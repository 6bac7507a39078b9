"""The messages of one rank: those of its plan, and an announcement at the start of every step.

A receive must know the shapes and types that will come. The first step with inputs of some shapes
and types finds them out (see `schedlang.runtime.transport.messages`); later ones with such inputs
know them. So that all ranks agree which of the two a step is, the rank that has the inputs
announces them to the others as it begins.
"""

import torch
from attrs import frozen

from schedlang.plan.plan import Plan
from schedlang.runtime.errors import PipelineError
from schedlang.runtime.transport.messages import (
    ActivationReceive,
    ActivationSend,
    Channel,
    GradientReceive,
    GradientSend,
    Receive,
    Send,
)
from schedlang.runtime.transport.precision import Rounding
from schedlang.runtime.transport.wire import InFlight, Wire
from schedlang.runtime.values import Value, ValueSpec
from schedlang.schedule.kinds import Kind

# A user's script may send messages of its own, which have tag 0 by default.
_FIRST_TAG = 1
_LAST_TAG = 2**31


@frozen
class Rows:
    """The rows of a batch: all of them, and those of a microbatch, of which the last may have
    fewer.
    """

    total: int
    of_microbatch: int


@frozen
class Given:
    """What the first stage of a pipeline is given in a step: whether to evaluate it, the rows of
    the batch, shapes and types of a microbatch.
    """

    evaluates: bool
    rows: Rows
    spec: ValueSpec


class Exchange:
    """All messages of one rank. `number` tells apart the pipelines that all processes have built
    one after another.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        number: int,
        device: torch.device,
        wire: Wire,
        rounding: Rounding | None,
    ) -> None:
        self._plan = plan
        self._device = device
        self._wire = wire
        self._rank = rank
        self._rounding = rounding
        self._name = torch.tensor([number, int(plan.digest[:15], 16)])
        stages = len(plan.placement)
        #: Channels are numbered as the stages that they begin at, and as skips.
        self._numbers = stages + len(plan.layout.far_edges)
        self._units = max(map(plan.layout.units, range(stages)))
        #: NCCL makes a batch of messages as one; to gloo, and by edges, batches mean nothing.
        self.has_batches = device.type == "cuda" and not wire.is_by_edge
        #: Where messages meet by their tags, a receive may begin before its place in the plan.
        self.has_tags = device.type != "cuda" and not wire.is_by_edge
        self._channels: dict[int, Channel] = {}
        #: The inputs of a first stage are numbered by their shapes and types: all that
        #: were seen, and those of this step.
        self._seen: dict[int, dict[tuple[bool, ValueSpec], int]] = {}
        self._inputs: dict[int, int] = {}
        #: For each channel, by its number, the first stages of its pipeline.
        self._firsts: dict[int, list[int]] = {}
        self._announced: list[tuple[InFlight, int]] = []

    def message(
        self, kind: Kind, number: int, microbatch: int, box: dict[int, Value]
    ) -> Send | Receive:
        """The message of an action, which takes its value from a box or puts it into one."""
        channel = self._channel(kind, number)
        is_gradient = kind in (Kind.SEND_B, Kind.RECV_B)
        first = 2 * (channel.number * self._units + microbatch) + is_gradient
        # Before them, an announcement and a header for every channel.
        tags = range(
            _FIRST_TAG + 2 * self._numbers + first, _LAST_TAG, 2 * self._numbers * self._units
        )
        if kind == Kind.SEND_F:
            return ActivationSend(channel, microbatch, tags, box)
        if kind == Kind.SEND_B:
            return GradientSend(channel, microbatch, tags, box)
        receive = ActivationReceive if kind == Kind.RECV_F else GradientReceive
        return receive(channel, microbatch, tags, box, self._device)

    def begin(self, given: dict[int, Given]) -> Rows:
        """Begin a step: announce the inputs that this rank has, by first stage, and receive what
        other ranks announce. Gives the rows of the batch.
        """
        rows: dict[int, Rows] = {}
        for first, inputs in given.items():
            seen = self._seen.setdefault(first, {})
            self._inputs[first] = seen.setdefault((inputs.evaluates, inputs.spec), len(seen))
            rows[first] = inputs.rows
            self._announce(first, inputs.rows)
        for first in self._plan.layout.firsts:
            if self._takes_part(self._rank, first) and first not in given:
                self._inputs[first], rows[first] = self._receive_announcement(first)
        for channel in self._channels.values():
            channel.begin(self._inputs_of(channel))
        return self._same(rows)

    def end(self) -> None:
        """End a step, when all of its messages are through."""
        for channel in self._channels.values():
            channel.end(self._inputs_of(channel))
        for in_flight, peer in self._announced:
            self._wire.wait(in_flight, peer)
        self._announced.clear()

    def _inputs_of(self, channel: Channel) -> tuple[int, ...]:
        """The numbers of this step's inputs, of the pipeline that a channel is in."""
        return tuple(self._inputs[first] for first in self._firsts[channel.number])

    def _channel(self, kind: Kind, number: int) -> Channel:
        layout = self._plan.layout
        first = min(number, layout.counterpart(kind, number)[1])
        if first not in self._channels:
            peer = self._plan.peer(kind, number)
            earlier = min(layout.ends(kind, number))
            assert peer is not None
            tag = _FIRST_TAG + self._numbers + first
            pipeline = layout.pipeline_of[earlier]
            self._firsts[first] = [
                stage for stage in layout.firsts if layout.pipeline_of[stage] == pipeline
            ]
            self._channels[first] = Channel(
                self._wire,
                first,
                earlier,
                self._what(first),
                peer,
                tag,
                self._rounding,
                self._device,
            )
        return self._channels[first]

    def _what(self, number: int) -> str:
        """What passes through a channel, for an error."""
        if number not in self._plan.layout.far_edges:
            return f"the output of stage {number}"
        earlier, later = self._plan.layout.far_edges[number]
        return f"what stage {earlier} returns for stage {later}"

    def _takes_part(self, rank: int, first: int) -> bool:
        """Whether a rank has a stage of a pipeline, by its first stage."""
        pipeline = self._plan.layout.pipeline_of[first]
        return rank in self._plan.placement[pipeline.start : pipeline.stop]

    def _announce(self, first: int, rows: Rows) -> None:
        what = [self._inputs[first], rows.total, rows.of_microbatch]
        announcement = torch.cat([self._name, torch.tensor(what)])
        for rank in range(len(self._plan.ranks)):
            if rank != self._rank and self._takes_part(rank, first):
                sent = self._wire.send(announcement, rank, _FIRST_TAG + first)
                self._announced.append(([(sent, announcement)], rank))

    def _receive_announcement(self, first: int) -> tuple[int, Rows]:
        """The number of the inputs, and the rows of the batch."""
        announcement = torch.empty(5, dtype=torch.int64)
        rank = self._plan.placement[first]
        received = self._wire.receive(announcement, rank, _FIRST_TAG + first)
        self._wire.wait([(received, announcement)], rank)
        if not torch.equal(announcement[:2], self._name):
            raise PipelineError(f"rank {rank} has begun a step of another pipeline")
        number, total, of_microbatch = announcement[2:].tolist()
        return number, Rows(total, of_microbatch)

    def _same(self, rows: dict[int, Rows]) -> Rows:
        """The rows that the first stages of all pipelines were given."""
        first, *others = rows
        for other in others:
            if rows[other] != rows[first]:
                ranks = [self._plan.placement[stage] for stage in (first, other)]
                raise PipelineError(
                    f"rank {ranks[0]} has `inputs` of {rows[first].total} rows, "
                    f"{rows[first].of_microbatch} a microbatch, and rank {ranks[1]} of "
                    f"{rows[other].total}, {rows[other].of_microbatch} a microbatch: all of them "
                    "take the same batch"
                )
        return rows[first]
