"""What is behind a wait: who a rank waits for may itself wait, so the chain is followed to what
runs, or moves.
"""

from bisect import bisect_right
from collections.abc import Iterator

from attrs import frozen

from schedlang.report.bubbles.waits import Step, Waits


@frozen
class Reason:
    """What is behind a wait for some time: an `op` or a `copy` that runs, `step`.

    Or its result is on its way to another rank, `receiver`, as a `transfer`, or held back by the
    `transport`.
    """

    kind: str
    start: float
    end: float
    step: Step
    receiver: int


def reasons(waits: Waits, rank: int, index: int, start: float, end: float) -> Iterator[Reason]:
    """What is behind a rank's wait with one of its steps, or with the end of all, for some time, in
    pieces.
    """
    following = [(rank, index, start, end)]
    while following:
        rank, index, start, end = following.pop()
        maker, arrival = waits.latest(rank, index)
        if index < len(waits.ranks[rank]):
            yield from _piece(
                "transport", max(start, arrival), end, maker or waits.ranks[rank][index], rank
            )
            if maker:
                yield from _piece("transfer", max(start, maker.end), min(end, arrival), maker, rank)
        if maker is None:
            continue
        end = min(end, maker.end)
        if maker.is_copy:
            yield from _piece("copy", start, end, maker, maker.rank)
        elif start < end:
            runs, waiting = _during(waits, maker.rank, start, end)
            yield from runs
            following += waiting


def _piece(kind: str, start: float, end: float, step: Step, receiver: int) -> Iterator[Reason]:
    if start < end:
        yield Reason(kind, start, end, step, receiver)


def _during(
    waits: Waits, rank: int, start: float, end: float
) -> tuple[list[Reason], list[tuple[int, int, float, float]]]:
    """What a rank does from a time to another: the steps that it runs, and the waits in between."""
    steps = waits.ranks[rank]
    runs = list[Reason]()
    waiting: list[tuple[int, int, float, float]] = []
    index = bisect_right(waits.starts[rank], start) - 1
    if index >= 0:
        runs += _piece("op", start, min(end, steps[index].end), steps[index], rank)
        start = max(start, steps[index].end)
    while start < end:
        index += 1
        begin = steps[index].start if index < len(steps) else end
        if start < begin:
            waiting.append((rank, index, start, min(end, begin)))
        if begin < end:
            runs += _piece("op", begin, min(end, steps[index].end), steps[index], rank)
        start = max(begin, steps[index].end) if index < len(steps) else end
    return runs, waiting
