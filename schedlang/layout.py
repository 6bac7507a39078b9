"""What runs where: stages on ranks, and the pipelines that the stages make."""

from functools import cached_property

from attrs import frozen

from schedlang.actions import counterpart


@frozen
class Pipeline:
    """One way of microbatches through the model: the stages `start` up to `stop`, in order.

    Most schedules have one pipeline. Where there are more, the second one's stages are numbered on from the first
    one's, and so on, and stage `start + i` of each is a replica of the same piece of the model.
    """

    name: str
    start: int
    stop: int
    microbatches: int


@frozen
class Layout:
    """What runs where: `placement[s]` is the rank that holds stage s; the pipelines have the stages among them.

    A microbatch may be cut into `slices`, which pass through the stages one by one: an action's microbatch is then the
    number of the slice, counted through all microbatches of its pipeline. The microbatches are those of all `updates`
    that the schedule shows, in order; the action `U` of a stage has the number of its update for a microbatch.
    `links[r]` is the link to the host that rank r's copies take, one after the other with those of ranks on the same
    link; without any, each rank has its own.
    """

    placement: tuple[int, ...]
    pipelines: tuple[Pipeline, ...]
    slices: int = 1
    updates: int = 1
    links: tuple[int, ...] = ()

    @property
    def microbatches(self) -> int:
        """The microbatches of all pipelines."""
        return sum(pipeline.microbatches for pipeline in self.pipelines)

    @property
    def pieces(self) -> int:
        """Into how many stages the model is cut: those of one pipeline; the others' are replicas of them."""
        return self.pipelines[0].stop

    @cached_property
    def pipeline_of(self) -> tuple[Pipeline, ...]:
        """The pipeline of each stage."""
        return tuple(pipeline for pipeline in self.pipelines for _ in range(pipeline.start, pipeline.stop))

    def units(self, stage: int) -> int:
        """How many microbatches, or slices of microbatches, pass through a stage."""
        return self.pipeline_of[stage].microbatches * self.slices

    def update_of(self, stage: int, microbatch: int) -> int:
        """The update that a microbatch, or a slice of one, adds its gradient to."""
        return microbatch * self.updates // self.units(stage)

    def is_first(self, stage: int) -> bool:
        """Whether a stage takes the inputs."""
        return self.pipeline_of[stage].start == stage

    def is_last(self, stage: int) -> bool:
        """Whether a stage makes the losses."""
        return self.pipeline_of[stage].stop == stage + 1

    def replicas(self, stage: int) -> list[int]:
        """The stages of all pipelines that are the same piece of the model as a stage, and this one."""
        piece = stage - self.pipeline_of[stage].start
        return [pipeline.start + piece for pipeline in self.pipelines]

    def peer(self, kind: int, stage: int) -> int | None:
        """The rank at the other end of a transfer of `stage`.

        None where there is none to reach: past the first or last stage, or a stage of the same rank.
        """
        other, pipeline = counterpart(kind, stage)[1], self.pipeline_of[stage]
        if not pipeline.start <= other < pipeline.stop or self.placement[other] == self.placement[stage]:
            return None
        return self.placement[other]

    def stages_of(self, rank: int) -> list[int]:
        """The stages that a rank holds, in order."""
        return self._held.get(rank, [])[:]

    @cached_property
    def _held(self) -> dict[int, list[int]]:
        """The stages of each rank that has any."""
        found: dict[int, list[int]] = {}
        for stage, rank in enumerate(self.placement):
            found.setdefault(rank, []).append(stage)
        return found
