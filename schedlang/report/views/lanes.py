"""What the resources of each rank do, where the costs say of what components ops are."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from attrs import evolve, frozen

from schedlang.proof.execution import Execution
from schedlang.report.views.boxes import Box
from schedlang.schedule.costs import Durations


@frozen
class Lane:
    """A resource, and for each rank the components that occupy it, in order of time: each is the
    box of its op, for the time of the component.
    """

    resource: str
    rows: tuple[tuple[Box, ...], ...]


def lanes_of(execution: Execution, ops: Sequence[Sequence[Box]]) -> tuple[Lane, ...]:
    """The lanes of an execution, by the boxes of each rank's ops in order of time; none where no op
    has components.
    """
    durations = execution.costs.durations(execution.schedule.layout)
    if not durations.components:
        return ()
    rows = [
        sorted(
            _components(row, durations), key=lambda component: component[1].bar.start
        )
        for row in ops
    ]
    resources = dict.fromkeys(resource for row in rows for resource, _ in row)
    return tuple(
        Lane(
            name,
            tuple(
                tuple(box for resource, box in row if resource == name) for row in rows
            ),
        )
        for name in resources
    )


def _components(row: Sequence[Box], durations: Durations) -> Iterator[tuple[str, Box]]:
    """The components of a rank's ops, each with its resource."""
    # Neighbours that overlap have one number, and others than their neighbours.
    for number, group in groupby(row, key=lambda box: box.overlap):
        boxes = list(group)
        for together in [boxes] if number else [[box] for box in boxes]:
            # Pieces count from where the ops begin together.
            start = together[0].bar.start
            chains = durations.pieces([box.bar[:3] for box in together])
            for box, chain in zip(together, chains, strict=True):
                for piece in chain:
                    bar = box.bar._replace(
                        start=start + piece.start, end=start + piece.end
                    )
                    yield piece.component.resource, evolve(box, bar=bar, together=())
