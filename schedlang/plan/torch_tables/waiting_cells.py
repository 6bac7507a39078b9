"""The cells of a table that wait: for a send of their rank, or for a reduction of gradients.

Torch 2.15 asks for one of them behind each send and each reduction, and refuses a table in which
one is missing, without saying where. That a rank waits for a send before the other rank can post
its receive, it does not see: both would hang. The proof does.
"""

from collections.abc import Iterator
from itertools import pairwise

from attrs import frozen

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.plan.torch_tables.markers import Marker
from schedlang.schedule.actions import is_send, is_wait
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.schedule import Schedule

_WAIT = "WAIT_"
_REDUCTION = "REDUCE_GRAD"


@frozen(order=True)
class _Cell:
    """A send, a reduction, or the wait for one, in a rank's row; `awaited` is the text of the send
    or the reduction, and `place` its index in the schedule's spans.
    """

    place: int
    awaited: str
    is_wait: bool
    text: str

    @property
    def is_reduction(self) -> bool:
        """Whether it is about a reduction."""
        return self.awaited.endswith(_REDUCTION)


def check_waits(schedule: Schedule, markers: list[Marker]) -> None:
    """CompileError for a send or a reduction without a wait of its own behind it."""
    findings: list[Finding] = []
    for rank in range(len(schedule.ranks)):
        cells = _cells(schedule, markers, rank)
        findings += _check_pairs(rank, cells)
        findings += _check_reductions(rank, cells)
    if findings:
        raise CompileError(diagnose(schedule, findings))


def _cells(schedule: Schedule, markers: list[Marker], rank: int) -> list[_Cell]:
    """The cells of a rank that begin something or wait for it, in order."""
    actions = schedule.ranks[rank]
    texts = [
        (actions.source[index], actions.word(index))
        for index, kind in enumerate(actions.kind)
        if is_send(kind) or is_wait(kind)
    ]
    texts += [
        (marker.cell, marker.text)
        for marker in markers
        if marker.rank == rank and marker.what.endswith(_REDUCTION)
    ]
    return sorted(
        _Cell(cell, text.replace(_WAIT, ""), _WAIT in text, text)
        for cell, text in texts
    )


def _check_pairs(rank: int, cells: list[_Cell]) -> Iterator[Finding]:
    """What is wrong, if not each send and each reduction has one wait, somewhere behind it."""
    # By what is waited for: where it begins, and where the rank waits for it.
    begins: dict[str, list[int]] = {}
    waits: dict[str, list[int]] = {}
    for cell in cells:
        begins.setdefault(cell.awaited, [])
        waits.setdefault(cell.awaited, [])
        (waits if cell.is_wait else begins)[cell.awaited].append(cell.place)
    texts = {cell.awaited: cell.text for cell in cells if cell.is_wait}
    for awaited, starts in begins.items():
        wait = f"`{texts.get(awaited)}` on rank {rank}"
        if not starts:
            message = f"{wait} waits for `{awaited}`, which the rank does not have"
            yield from (
                Finding("wait", message, rank, place) for place in waits[awaited]
            )
            continue
        if not waits[awaited]:
            message = f"nothing on rank {rank} waits for `{awaited}`"
            help = "a table for torch 2.15 has all waits, one for 2.13 has none"
            yield Finding("wait", message, rank, starts[0], help=help)
        for place in starts[1:]:
            message = f"`{awaited}` is sent twice"
            related = ((starts[0], "first here"),)
            yield Finding("repeated-send", message, rank, place, related=related)
        early = [place for place in waits[awaited] if place < starts[0]]
        for place in early:
            message = f"{wait} comes before `{awaited}`, for which it waits"
            yield Finding(
                "wait", message, rank, place, related=((starts[0], "which is here"),)
            )
        for first, place in pairwise(waits[awaited][len(early) :]):
            message = f"{wait} waits again for `{awaited}`"
            yield Finding(
                "wait", message, rank, place, related=((first, "as this does"),)
            )


def _check_reductions(rank: int, cells: list[_Cell]) -> Iterator[Finding]:
    """Reductions that begin before the one before them is waited for."""
    pending: _Cell | None = None
    for cell in filter(lambda cell: cell.is_reduction, cells):
        if cell.is_wait:
            is_over = pending is not None and pending.awaited == cell.awaited
            pending = None if is_over else pending
            continue
        if pending is not None:
            message = f"`{cell.text}` on rank {rank} begins while `{pending.text}` is under way"
            related = ((pending.place, "which begins here"),)
            help = f"a rank has one reduction at a time: wait for `{pending.text}` before it"
            yield Finding("wait", message, rank, cell.place, related=related, help=help)
        pending = cell
