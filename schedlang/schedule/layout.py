"""What runs where: stages on ranks, and the pipelines that the stages make."""

from collections.abc import Iterable, Sequence
from functools import cached_property

from attrs import NOTHING, fields, frozen

from schedlang.diagnostics.wrong_arguments import shown
from schedlang.schedule.actions import counterpart
from schedlang.schedule.kinds import RECEIVES, SENDS, TRANSFERS, Kind

#: The transfers of gradients.
_GRADIENTS = frozenset({SENDS[Kind.B], RECEIVES[Kind.B]})


@frozen
class Pipeline:
    """One pipeline: microbatches pass through the stages `start` up to `stop`, in order.

    Most schedules have one pipeline. Where there are more, the stages of the second one are
    numbered on from those of the first, and so on. Either the pipelines are replicas, and stage
    `start + i` of each has the same piece of the one model; or each pipeline is a model of its own
    (`Layout.models`).
    """

    name: str
    start: int
    stop: int
    microbatches: int

    @property
    def family(self) -> str:
        """The part of the name that pipelines with a number share: `lane` of `lane(1)`."""
        return self.name.partition("(")[0]


def pieces_of(pipelines: Sequence[Pipeline], models: bool) -> int:
    """The number of pieces of the model: stages that are replicas of each other count once."""
    return pipelines[-1 if models else 0].stop


def of_graph(
    edges: Iterable[tuple[int, int]], pipelines: Sequence[Pipeline], models: bool
) -> tuple[tuple[int, int], ...]:
    """The edges of a graph of stages; none if they only form chains, which need no edges."""
    given = tuple(edges)
    chains = {
        (stage, stage + 1)
        for pipeline in (pipelines if models else pipelines[:1])
        for stage in range(pipeline.start, pipeline.stop - 1)
    }
    # An edge that is given twice stays, so that the rules of layouts find it.
    return () if sorted(given) == sorted(chains) else given


@frozen(repr=False)
class Layout:
    """What runs where: `placement[s]` is the rank of stage s, and each pipeline has a range of the
    stages.

    A microbatch may be cut into `slices`, which pass through the stages one by one. The microbatch
    of an action is then the number of the slice, counted through all microbatches of its pipeline.
    Microbatches are numbered through all `updates` that the schedule shows. An optimizer step (`U`)
    has the number of its update in place of a microbatch.

    `links[r]` is the link to the host on which rank r copies; ranks with the same link copy one
    after the other. Without any, each rank has a link of its own. Activations are offloaded to the
    host, or where there are `keepers`, to the memory of the rank `keepers[r]`.

    The pipelines are replicas of one model and share its microbatches. With `models`, each pipeline
    is a model of its own, with its own microbatches.

    The output of a stage goes along the `edges` of the stage graph. An edge is a pair of an earlier
    and a later stage: of the first pipeline, whose replicas have the same edges, or of two models
    that run as many microbatches. A model without edges of its own is a chain. A skip is a pair of
    stages as well; along the `skips` goes something else than the stage's output. A transfer
    between neighbours has the number of its own stage. Every skip, and every edge between stages
    that are not neighbours, is a far edge. A far edge has a number of its own, behind the numbers
    of all stages; both of its ends use it.

    An edge between two pipelines of one model is a handover. It leads to the next piece of the
    model: that stage takes the output of the other pipeline's stage in place of that of its own
    pipeline, and its gradients go on along its own pipeline. The pipeline that hands over runs
    ahead: its forwards keep nothing and have no backward, and its microbatches are those of the
    pipeline that takes over. It may leave out the last stages, and stands behind the other one.

    The weights of `frozen` stages, and of their replicas, do not change. The stages are numbered in
    the first pipeline. A frozen stage has a backward only if a stage before it is trained, and then
    for the gradients of its inputs alone. No gradients are sent to a stage without a backward.
    """

    # The numbers of transfers, here of four stages with a skip from stage 0 to stage 3:
    #
    #     stage 0 ─────── stage 1 ─────── stage 2 ─────── stage 3
    #        │  0SEND_F 1RECV_F  1SEND_F 2RECV_F  2SEND_F 3RECV_F  │
    #        └── 4SEND_F ──────────────────────────────── 4RECV_F ─┘
    #
    # And with the edges (0, 2), (1, 2) and (2, 3), two encoders before one decoder:
    #
    #     stage 0 ── 4SEND_F ──────────── 4RECV_F ─┐
    #     stage 1 ── 1SEND_F ──────────── 2RECV_F ─┴─ stage 2 ── 2SEND_F 3RECV_F ── stage 3
    placement: tuple[int, ...]
    pipelines: tuple[Pipeline, ...]
    slices: int = 1
    updates: int = 1
    links: tuple[int, ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    frozen: tuple[int, ...] = ()
    models: bool = False
    keepers: tuple[int, ...] = ()

    def __repr__(self) -> str:
        """The placement and pipelines, and each other field that differs from its default."""
        values = [
            f"{part.name}={shown(getattr(self, part.name))}"
            for part in fields(Layout)
            if part.default is NOTHING or getattr(self, part.name) != part.default
        ]
        return f"Layout({', '.join(values)})"

    @property
    def microbatches(self) -> int:
        """The microbatches of the model, those of all pipelines. With several models, those of the
        first.
        """
        return self.microbatches_of(0)

    def microbatches_of(self, stage: int) -> int:
        """The microbatches of the model that a stage is a piece of."""
        if self.models:
            return self.pipeline_of[stage].microbatches
        return sum(pipeline.microbatches for pipeline in self.trained)

    @property
    def all_numbers(self) -> range:
        """The numbers that transfers can have: those of the stages, then those of far edges."""
        return range(len(self.placement) + len(self.far_edges))

    @property
    def pieces(self) -> int:
        """The number of stages that the models are cut into; replicas of a stage count once."""
        return pieces_of(self.pipelines, self.models)

    @cached_property
    def pipeline_of(self) -> tuple[Pipeline, ...]:
        """The pipeline of each stage."""
        return tuple(
            pipeline
            for pipeline in self.pipelines
            for _ in range(pipeline.start, pipeline.stop)
        )

    def model_of(self, stage: int) -> str:
        """The name of the model of a stage. The only model of a plan has none."""
        return self.pipeline_of[stage].name if self.models else ""

    def units(self, stage: int) -> int:
        """How many microbatches, or slices of microbatches, pass through a stage."""
        return self.pipeline_of[stage].microbatches * self.slices

    def units_of_update(self, stage: int) -> int:
        """How many microbatches, or slices of them, add their gradients to one update."""
        return self.units(stage) // self.updates

    def update_of(self, stage: int, microbatch: int) -> int:
        """The update that a microbatch, or a slice of one, adds its gradient to."""
        return microbatch // self.units_of_update(stage)

    @cached_property
    def handovers(self) -> dict[int, int]:
        """For each stage that takes the output of another pipeline of its model, the stage that
        makes it.
        """
        if self.models:
            return {}
        return {
            later: earlier
            for earlier, later in self.edges
            if min(earlier, later) >= 0
            and max(earlier, later) < len(self.pipeline_of)
            and self.pipeline_of[earlier] != self.pipeline_of[later]
        }

    @cached_property
    def _followers(self) -> dict[int, Pipeline]:
        """The pipelines that take microbatches over, by the first stage of the pipeline that hands
        them over.
        """
        return {
            self.pipeline_of[earlier].start: self.pipeline_of[later]
            for later, earlier in self.handovers.items()
        }

    def follower(self, pipeline: Pipeline) -> Pipeline | None:
        """The pipeline that takes the microbatches of another one over; None for one that does not
        run ahead.
        """
        return self._followers.get(pipeline.start)

    def runs_ahead(self, stage: int) -> bool:
        """Whether the pipeline of a stage runs ahead of another one."""
        return self.follower(self.pipeline_of[stage]) is not None

    @property
    def trained(self) -> list[Pipeline]:
        """The pipelines that run backwards: all that do not run ahead."""
        return [each for each in self.pipelines if self.follower(each) is None]

    def is_first(self, stage: int) -> bool:
        """Whether a stage takes inputs of its model, and no output of another of its stages."""
        pipeline = self.pipeline_of[stage]
        return stage not in self.handovers and all(
            self.pipeline_of[other] != pipeline for other in self.before[stage]
        )

    def is_last(self, stage: int) -> bool:
        """Whether a stage computes the loss: it is the last one of its pipeline, and its model
        hands nothing on to another model.
        """
        return self.pipeline_of[stage].stop == stage + 1 and self.is_end(stage)

    def is_end(self, stage: int) -> bool:
        """Whether no other stage depends on the output of a stage."""
        return not (self.after[stage] or self.gradients_from[stage])

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The stages that take inputs of the model."""
        return tuple(filter(self.is_first, range(len(self.placement))))

    def hands_on(self, stage: int) -> bool:
        """Whether the output of a stage goes to the stage after it."""
        return stage in self._chained and stage + 1 not in self.handovers

    def follows(self, stage: int) -> bool:
        """Whether a stage takes the output of the stage before it."""
        return stage - 1 in self._chained and stage not in self.handovers

    def returns_gradients(self, stage: int) -> bool:
        """Whether a stage gives the gradients of its input to the stage before it."""
        return stage - 1 in self._chained and self.has_backward[stage - 1]

    @cached_property
    def piece_of(self) -> tuple[int, ...]:
        """For each stage, the number of its piece of the model, which is that of its replicas."""
        starts = [0 if self.models else pipeline.start for pipeline in self.pipeline_of]
        return tuple(stage - start for stage, start in enumerate(starts))

    def piece(self, stage: int) -> int:
        """The number of the piece of a stage."""
        return self.piece_of[stage]

    def replicas(self, stage: int) -> list[int]:
        """All stages with the same piece of the model as a stage, itself included."""
        return [stage] if self.models else self._replicas[self.piece(stage)][:]

    @cached_property
    def _replicas(self) -> list[list[int]]:
        """For each piece of the model, the stages that have it."""
        replicas: list[list[int]] = [[] for _ in range(max(self.piece_of) + 1)]
        for stage, piece in enumerate(self.piece_of):
            replicas[piece].append(stage)
        return replicas

    def next_replica(self, stage: int) -> int:
        """The replica to which a stage passes weights or gradients on. Replicas form a ring, in the
        order of their pipelines.
        """
        replicas = self.replicas(stage)
        return replicas[(replicas.index(stage) + 1) % len(replicas)]

    @cached_property
    def far_edges(self) -> dict[int, tuple[int, int]]:
        """The two stages of each far edge, by its number. Those of the first pipeline come first,
        then those of the next; within a pipeline the skips come last. Handovers come behind all.
        """
        # Of two pipelines of 4 stages each, with an edge (0, 2) and a skip (0, 3), the numbers are:
        #
        #    0 … 3     stages of the first pipeline       8    (0, 2)      9    (0, 3)
        #    4 … 7     stages of the second one          10    (4, 6)     11    (4, 7)
        far = [
            (earlier, later)
            for earlier, later in self.graph
            if self._is_far(earlier, later)
        ]
        starts = [0] if self.models else [pipeline.start for pipeline in self.pipelines]
        pairs = [
            (start + earlier, start + later)
            for start in starts
            for earlier, later in [*far, *self.skips]
        ]
        pairs += [(earlier, later) for later, earlier in self.handovers.items()]
        return dict(enumerate(pairs, len(self.placement)))

    @cached_property
    def graph(self) -> list[tuple[int, int]]:
        """The edges of the stage graph: all but handovers."""
        return [ends for ends in self.edges if self.handovers.get(ends[1]) != ends[0]]

    def _is_far(self, earlier: int, later: int) -> bool:
        """Whether an edge is not between neighbours of one pipeline."""
        return later > earlier + 1 or self.pipeline_of[earlier].stop == later

    def is_skip(self, number: int) -> bool:
        """Whether a far edge, by its number, is a skip."""
        earlier, later = self.far_edges[number]
        return (self.piece(earlier), self.piece(later)) in self.skips

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the stages whose outputs it takes: the stage before it, then those at far
        edges.
        """
        stages = range(len(self.placement))
        before = [[stage - 1] if self.follows(stage) else [] for stage in stages]
        for earlier, later in self.far_edges.values():
            before[later].append(earlier)
        return tuple(map(tuple, before))

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the stages that take its output: the stage after it, then those at far
        edges.
        """
        stages = range(len(self.placement))
        after = [[stage + 1] if self.hands_on(stage) else [] for stage in stages]
        for earlier, later in self.far_edges.values():
            after[earlier].append(later)
        return tuple(map(tuple, after))

    @cached_property
    def gradients_from(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the stages whose backwards its own one waits for. With handovers, these
        are the next ones of its own pipeline, and other stages take its output.
        """
        if not self.handovers:
            return self.after
        return tuple(
            (stage + 1,) if stage in self._chained else ()
            for stage in range(len(self.placement))
        )

    @cached_property
    def gradients_to(self) -> tuple[tuple[int, ...], ...]:
        """For each stage the stages that its backward gives gradients to, if they have one."""
        if not self.handovers:
            return self.before
        return tuple(
            (stage - 1,) if stage - 1 in self._chained else ()
            for stage in range(len(self.placement))
        )

    def trains(self, stage: int) -> bool:
        """Whether the weights of a stage change, and so have gradients."""
        return self.piece(stage) not in self.frozen

    @cached_property
    def has_backward(self) -> tuple[bool, ...]:
        """For each stage whether it runs a backward: it is trained, or a stage is from which it
        takes inputs, directly or through others.
        """
        # Stages stand in an order in which each is behind those that it takes from, so one pass is
        # enough.
        has_backward: list[bool] = []
        for stage, before in enumerate(self.gradients_to):
            is_behind = any(has_backward[other] for other in before)
            is_needed = self.trains(stage) or is_behind
            has_backward.append(is_needed and not self.runs_ahead(stage))
        return tuple(has_backward)

    def makes(self, made: int, stage: int) -> bool:
        """Whether a stage makes something in training: activations, gradients of its inputs, or
        gradients of its weights.
        """
        if made == Kind.W:
            return self.trains(stage) and not self.runs_ahead(stage)
        return made == Kind.F or self.has_backward[stage]

    @cached_property
    def _chained(self) -> frozenset[int]:
        """The stages with an edge to the next one."""
        near = {
            earlier for earlier, later in self.graph if not self._is_far(earlier, later)
        }
        # Edges take the place of the chain of their own model.
        of_graphs = {
            self.pipeline_of[earlier]
            for earlier, later in self.graph
            if self.pipeline_of[earlier] == self.pipeline_of[later]
        }
        if self.graph and not self.models:
            of_graphs = {*self.pipelines}
        return frozenset(
            stage
            for pipeline in self.pipelines
            for stage in range(pipeline.start, pipeline.stop - 1)
            if pipeline not in of_graphs or self.piece(stage) in near
        )

    @cached_property
    def _far_numbers(self) -> dict[tuple[int, int], int]:
        """The number of each far edge, by its two stages, the lower number first."""
        return {
            (min(stages), max(stages)): number
            for number, stages in self.far_edges.items()
        }

    def number(self, stage: int, other: int) -> int:
        """The number of the transfers between a stage and another one."""
        return self._far_numbers.get((min(stage, other), max(stage, other)), stage)

    def numbers(self, kind: int, stage: int) -> list[int]:
        """The numbers of the transfers of a kind that a stage would have if every stage were on
        another rank.
        """
        return self._numbers[kind][stage]

    @cached_property
    def _numbers(self) -> dict[int, list[list[int]]]:
        """For each kind of transfer and each stage, the numbers of its transfers."""
        others_of = {
            SENDS[Kind.F]: self.after,
            RECEIVES[Kind.F]: self.before,
            SENDS[Kind.B]: self.gradients_to,
            RECEIVES[Kind.B]: self.gradients_from,
        }
        return {
            kind: [
                [self.number(stage, other) for other in others]
                for stage, others in enumerate(others_of_stages)
            ]
            for kind, others_of_stages in others_of.items()
        }

    def ends(self, kind: int, number: int) -> tuple[int, int]:
        """The stages at the two ends of a transfer, its own first. The other one may be past the
        first or the last stage.
        """
        distance = TRANSFERS[kind].distance
        if number in self.far_edges:
            earlier, later = self.far_edges[number]
            return (earlier, later) if distance > 0 else (later, earlier)
        return number, number + distance

    def stage_of(self, kind: int, number: int) -> int:
        """The stage of an action. Its number is that of a stage, or for a transfer maybe that of a
        far edge.
        """
        return self.ends(kind, number)[0] if number in self.far_edges else number

    def carries(self, kind: int, number: int) -> bool:
        """Whether there is something to send by a transfer: gradients that a backward waits for, or
        an output that the later stage does not get from another pipeline.
        """
        if kind in _GRADIENTS:
            return self.needs_gradients(kind, number)
        is_near = number not in self.far_edges
        return not (is_near and max(self.ends(kind, number)) in self.handovers)

    def needs_gradients(self, kind: int, number: int) -> bool:
        """Whether the gradients of a transfer are needed: the stage that they go to runs a
        backward.
        """
        return self.has_backward[self.earlier(kind, number)]

    def earlier(self, kind: int, number: int) -> int:
        """The earlier one of the two stages of a transfer."""
        if number in self.far_edges:
            return self.far_edges[number][0]
        return max(min(self.ends(kind, number)), self.pipeline_of[number].start)

    def counterpart(self, kind: int, number: int) -> tuple[Kind, int]:
        """The other end of a transfer: its kind and number."""
        return counterpart(kind, number, len(self.placement))

    def other_numbers(self, kind: int) -> list[int]:
        """For each number of a transfer of a kind, the number at its other end."""
        return [self.counterpart(kind, number)[1] for number in self.all_numbers]

    def peer(self, kind: int, number: int) -> int | None:
        """The rank at the other end of a transfer.

        None where there is none to reach: where no edge leads to the neighbour, as past the first
        or last stage; to a stage of the same rank; or where there is nothing to send.
        """
        stage, other = self.ends(kind, number)
        # The number of a stage alone means its neighbour, whether there is one or not.
        if number == stage and min(stage, other) not in self._chained:
            return None
        if (self.frozen or self.handovers) and not self.carries(kind, number):
            return None
        peer = self.placement[other]
        return None if peer == self.placement[stage] else peer

    def kept_by(self, rank: int) -> list[int]:
        """The other ranks for which a rank keeps what they offload, in order."""
        return [
            other
            for other, keeper in enumerate(self.keepers)
            if keeper == rank and other != rank
        ]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in order."""
        return self._held.get(rank, [])[:]

    @cached_property
    def _held(self) -> dict[int, list[int]]:
        """The stages of each rank that has any."""
        stages: dict[int, list[int]] = {}
        for stage, rank in enumerate(self.placement):
            stages.setdefault(rank, []).append(stage)
        return stages
