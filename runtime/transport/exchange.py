"""The messages of one rank: those of its plan, and a word at the start of every step.

A receive must know what will come. A step whose inputs look new finds it out (see
`schedlang.runtime.transport.messages`); later ones with such inputs know it. So that all ranks
agree which of the two a step is, the rank that has the inputs tells the others as it begins.
"""

from collections.abc import Hashable

import torch

from schedlang.plan.plan import Plan
from schedlang.runtime.stage.values import Value
from schedlang.runtime.transport.messages import (
    ActivationReceive,
    ActivationSend,
    Edge,
    GradientReceive,
    GradientSend,
    Receive,
    Send,
)
from schedlang.runtime.transport.precision import Rounding
from schedlang.runtime.transport.wire import InFlight, Wire
from schedlang.runtime.watch.watchdog import PipelineError
from schedlang.schedule.kinds import Kind

# Tag 0 is what messages have that a user's script may send.
_FIRST_TAG = 1
_LAST_TAG = 2**31


class Exchange:
    """The messages of one rank. `number` tells apart the pipelines that all processes have built
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
        #: Edges have the numbers of the stages that they begin at, and of skips.
        self._numbers = stages + len(plan.layout.skip_stages)
        self._units = max(map(plan.layout.units, range(stages)))
        #: NCCL issues batches as one; to gloo they mean nothing.
        self.has_batches = device.type == "cuda"
        self._edges: dict[int, Edge] = {}
        #: For each look of the inputs of a pipeline's first stage its number, and the number of
        #: this step's.
        self._seen: dict[int, dict[Hashable, int]] = {}
        self._inputs: dict[int, int] = {}
        self._told: list[tuple[InFlight, int]] = []

    def message(
        self, kind: Kind, number: int, microbatch: int, box: dict[int, Value]
    ) -> Send | Receive:
        """The message of an action, from a box or into one."""
        edge = self._edge(kind, number)
        first = 2 * (edge.number * self._units + microbatch) + (kind in (Kind.SEND_B, Kind.RECV_B))
        # Before them, a word and a header for every edge.
        tags = range(
            _FIRST_TAG + 2 * self._numbers + first, _LAST_TAG, 2 * self._numbers * self._units
        )
        if kind == Kind.SEND_F:
            return ActivationSend(edge, microbatch, tags, box)
        if kind == Kind.SEND_B:
            return GradientSend(edge, microbatch, tags, box)
        receive = ActivationReceive if kind == Kind.RECV_F else GradientReceive
        return receive(edge, microbatch, tags, box, self._device)

    def begin(self, looks: dict[int, Hashable]) -> None:
        """Begin a step: tell other ranks of the inputs that this one has, by first stage, and hear
        from the others.
        """
        for first, look in looks.items():
            seen = self._seen.setdefault(first, {})
            self._inputs[first] = seen.setdefault(look, len(seen))
            self._tell(first)
        for pipeline in self._plan.layout.pipelines:
            if self._takes_part(self._rank, pipeline.start) and pipeline.start not in looks:
                self._inputs[pipeline.start] = self._hear(pipeline.start)
        for edge in self._edges.values():
            edge.begin(self._inputs[self._plan.layout.pipeline_of[edge.earlier].start])

    def end(self) -> None:
        """End a step, in which all messages have come to an end."""
        for edge in self._edges.values():
            edge.end(self._inputs[self._plan.layout.pipeline_of[edge.earlier].start])
        for told, peer in self._told:
            self._wire.wait(told, peer)
        self._told.clear()

    def _edge(self, kind: Kind, number: int) -> Edge:
        layout = self._plan.layout
        edge = min(number, layout.counterpart(kind, number)[1])
        if edge not in self._edges:
            peer = self._plan.peer(kind, number)
            earlier = min(layout.ends(kind, number))
            assert peer is not None
            tag = _FIRST_TAG + self._numbers + edge
            self._edges[edge] = Edge(
                self._wire, edge, earlier, self._what(edge), peer, tag, self._rounding
            )
        return self._edges[edge]

    def _what(self, number: int) -> str:
        """What passes an edge, in a message."""
        if number not in self._plan.layout.skip_stages:
            return f"the output of stage {number}"
        earlier, later = self._plan.layout.skip_stages[number]
        return f"what stage {earlier} returns for stage {later}"

    def _takes_part(self, rank: int, first: int) -> bool:
        """Whether a rank has a stage of a pipeline, by its first stage."""
        pipeline = self._plan.layout.pipeline_of[first]
        return rank in self._plan.placement[pipeline.start : pipeline.stop]

    def _tell(self, first: int) -> None:
        word = torch.cat([self._name, torch.tensor([self._inputs[first]])])
        for rank in range(len(self._plan.ranks)):
            if rank != self._rank and self._takes_part(rank, first):
                self._told.append(([(self._wire.send(word, rank, _FIRST_TAG + first), word)], rank))

    def _hear(self, first: int) -> int:
        word = torch.empty(3, dtype=torch.int64)
        rank = self._plan.placement[first]
        self._wire.wait([(self._wire.receive(word, rank, _FIRST_TAG + first), word)], rank)
        if not torch.equal(word[:2], self._name):
            raise PipelineError(f"rank {rank} has begun a step of another pipeline")
        return int(word[2])
