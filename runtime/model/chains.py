"""The stages of a plan that a module is cut into, where they are not all: those of one of several
models, or some of a graph that are a chain.
"""

from collections.abc import Sequence
from itertools import pairwise

from attrs import evolve, frozen

from schedlang.runtime.errors import PipelineError
from schedlang.schedule.layout import Layout, Pipeline

#: The name of a model of the plan, or stages as its program numbers them, one after the other.
Part = str | Sequence[int]


@frozen
class Chain:
    """Stages that are a chain, as a `layout` of their own, and the `pieces` of the plan that these
    are, in order.
    """

    layout: Layout
    pieces: tuple[int, ...]

    def stages(self, whole: Layout) -> dict[int, int]:
        """For each stage of the whole plan that is one of these, its number among them."""
        return {
            stage: self.pieces.index(piece)
            for stage, piece in enumerate(whole.piece_of)
            if piece in self.pieces
        }


def chain_of(layout: Layout, part: Part | None) -> Chain:
    """The stages of a part of a plan, or without any of all; PipelineError where they are none or
    no chain.
    """
    pieces = tuple(_pieces(layout, part))
    first = pieces[0]
    # In a chain, each takes what the one before it makes, and nothing else of its own model.
    for earlier, later in pairwise(pieces):
        before = [
            layout.piece(stage)
            for stage in layout.before[later]
            if layout.model_of(stage) == layout.model_of(later)
        ]
        if later != earlier + 1 or before != [earlier]:
            given = ", ".join(map(str, before)) or "none"
            raise PipelineError(
                f"stage {later} takes what the stages {given} make, so the stages "
                f"{first} to {pieces[-1]} are no chain that a model could be cut into: give "
                "`stages` that are one, part by part"
            )
    pipelines: list[Pipeline] = []
    placement: list[int] = []
    for pipeline in layout.pipelines:
        stages = range(pipeline.start, pipeline.stop)
        own = [stage for stage in stages if layout.piece(stage) in pieces]
        if own:
            start = len(placement)
            placement += [layout.placement[stage] for stage in own]
            pipelines.append(evolve(pipeline, start=start, stop=len(placement)))
    frozen = tuple(pieces.index(piece) for piece in layout.frozen if piece in pieces)
    return Chain(Layout(tuple(placement), tuple(pipelines), frozen=frozen), pieces)


def _pieces(layout: Layout, part: Part | None) -> Sequence[int]:
    """The numbers of the stages, of pipelines that are replicas those of the first one."""
    names = [pipeline.name for pipeline in layout.pipelines]
    if isinstance(part, str):
        if not layout.models or part not in names:
            has = f"the models {', '.join(names)}" if layout.models else "one model"
            raise PipelineError(
                f"`stages` is the model `{part}`, and the plan has {has}"
            )
        pipeline = layout.pipelines[names.index(part)]
        return range(pipeline.start, pipeline.stop)
    if part is not None:
        pieces = list(part)
        if not pieces or not all(0 <= piece < layout.pieces for piece in pieces):
            raise PipelineError(
                f"`stages` is {pieces}: it must be some of the stages 0 to {layout.pieces - 1}"
            )
        return pieces
    if layout.models:
        raise PipelineError(
            f"the plan has the models {', '.join(names)}: cut one after the other, "
            f'`split(model, plan, stages="{names[0]}")`'
        )
    return range(layout.pieces)
