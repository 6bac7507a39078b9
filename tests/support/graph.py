"""The edges between stages, told apart from `schedlang.schedule.layout`: what the explorer and the
oracles ask.
"""

from schedlang.schedule.layout import Layout


def far_edges(layout: Layout) -> list[tuple[int, int]]:
    """The earlier and the later stage of each edge that is not between neighbours, in the order of
    their numbers; skips come behind the edges of their pipeline.
    """
    found = []
    if layout.models:
        far = [
            edge
            for edge in layout.edges
            if edge[1] - edge[0] != 1 or is_between(layout, edge)
        ]
        return [*far, *layout.skips]
    if handovers(layout):
        return list(layout.edges)
    for pipeline in layout.pipelines:
        pairs = [edge for edge in layout.edges if edge[1] - edge[0] != 1] + [
            *layout.skips
        ]
        found += [
            (pipeline.start + earlier, pipeline.start + later)
            for earlier, later in pairs
        ]
    return found


def handovers(layout: Layout) -> dict[int, int]:
    """By a stage that takes the output of another pipeline of its model, the stage that makes it. A
    layout with such edges has no other ones.
    """
    if layout.models or all(
        max(edge) < layout.pipelines[0].stop for edge in layout.edges
    ):
        return {}
    return {later: earlier for earlier, later in layout.edges}


def runs_ahead(layout: Layout, stage: int) -> bool:
    """Whether a stage is of a pipeline that hands over its microbatches."""
    return any(
        pipeline.start <= stage < pipeline.stop
        and pipeline.start <= earlier < pipeline.stop
        for earlier in handovers(layout).values()
        for pipeline in layout.pipelines
    )


def is_between(layout: Layout, edge: tuple[int, int]) -> bool:
    """Whether an edge leads from one model to another."""
    return any(edge[0] < pipeline.stop <= edge[1] for pipeline in layout.pipelines)


def pieces(layout: Layout, stage: int) -> list[int]:
    """The stages that are the same piece of a model as a stage. A damaged plan may name one that
    does not exist.
    """
    if layout.models or not 0 <= stage < len(layout.placement):
        return [stage]
    starts = [pipeline.start for pipeline in layout.pipelines]
    own = stage - max(start for start in starts if start <= stage)
    return [
        pipeline.start + own
        for pipeline in layout.pipelines
        if pipeline.start + own < pipeline.stop
    ]


def is_near(layout: Layout, earlier: int) -> bool:
    """Whether there is an edge from a stage to the next number."""
    for pipeline in layout.pipelines:
        if pipeline.start <= earlier < pipeline.stop - 1:
            piece = earlier - (0 if layout.models else pipeline.start)
            inside = [
                edge
                for edge in layout.edges
                if not layout.models
                or pipeline.start <= edge[0] < edge[1] < pipeline.stop
            ]
            return not inside or bool(handovers(layout)) or (piece, piece + 1) in inside
    return False


def has_before(layout: Layout, stage: int) -> bool:
    """Whether any stage hands on to this one."""
    return is_near(layout, stage - 1) or any(
        later == stage for _, later in far_edges(layout)
    )


def has_after(layout: Layout, stage: int) -> bool:
    """Whether this one hands on to any stage."""
    return is_near(layout, stage) or any(
        earlier == stage for earlier, _ in far_edges(layout)
    )
