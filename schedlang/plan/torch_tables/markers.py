"""The cells of a table that are about a whole stage: when its weights are gathered, and when its
gradients are reduced. Waits for reductions are looked at beside those for sends, in `waits`.

Torch checks none of this: a REDUCE_GRAD too many or too early scales gradients wrongly, and nobody
is told.
"""

from collections import Counter
from collections.abc import Iterator

from attrs import evolve, frozen

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.schedule.actions import NO_MICROBATCH, Actions
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.kinds import OPS, Kind
from schedlang.schedule.schedule import Schedule


@frozen
class Marker:
    """UNSHARD, RESHARD, REDUCE_GRAD or WAIT_REDUCE_GRAD of a stage on a rank.

    `cell` is an index into the schedule's spans, which grow along a row.
    """

    what: str
    stage: int
    rank: int
    cell: int

    @property
    def text(self) -> str:
        """The text of its cell."""
        return f"{self.stage}{self.what}"

    def __str__(self) -> str:
        return f"`{self.text}` on rank {self.rank}"


def check_markers(schedule: Schedule, markers: list[Marker]) -> None:
    """CompileError for markers on the wrong rank, too early or too late, missing or there twice."""
    findings: list[Finding] = []
    placement = schedule.placement
    stages = range(len(placement))
    reductions: dict[int, list[Marker]] = {stage: [] for stage in stages}
    gathers: dict[int, list[Marker]] = {stage: [] for stage in stages}
    for marker in markers:
        if marker.stage not in stages:
            message = f"{marker}: there are stages 0 to {len(stages) - 1}"
            findings.append(Finding("no-such-stage", message, marker.rank, marker.cell))
        elif placement[marker.stage] != marker.rank:
            message = (
                f"{marker}: stage {marker.stage} is on rank {placement[marker.stage]}"
            )
            findings.append(
                Finding("not-on-this-rank", message, marker.rank, marker.cell)
            )
        elif marker.what == "REDUCE_GRAD":
            reductions[marker.stage].append(marker)
        elif marker.what in ("UNSHARD", "RESHARD"):
            gathers[marker.stage].append(marker)
    # Older tables have no REDUCE_GRAD at all; one that has some has all.
    are_reduced = any(marker.what == "REDUCE_GRAD" for marker in markers)
    for stage in stages:
        findings += _check_gathers(schedule, stage, gathers[stage], are_reduced)
        if are_reduced:
            findings += _check_reductions(schedule, stage, reductions[stage])
    if findings:
        raise CompileError(diagnose(schedule, findings))


def with_markers(schedule: Schedule, markers: list[Marker]) -> Schedule:
    """The schedule with the gathers and reductions of a table that are more than what a plan
    without any implies: some stage is gathered more than once. Of older tables, which have no
    reductions, they are left out.
    """
    gathers = Counter(marker.stage for marker in markers if marker.what == "UNSHARD")
    are_reduced = any(marker.what == "REDUCE_GRAD" for marker in markers)
    if not are_reduced or max(gathers.values(), default=0) < 2:
        return schedule
    ranks = []
    for rank, actions in enumerate(schedule.ranks):
        rows = [actions.row(index) for index in range(len(actions))]
        rows += [
            (Kind[marker.what], marker.stage, NO_MICROBATCH, marker.cell, 0)
            for marker in markers
            if marker.rank == rank and marker.what in Kind.__members__
        ]
        changed = Actions()
        # The cells of a row are counted on.
        for row in sorted(rows, key=lambda row: row[3]):
            changed.add(*row)
        ranks.append(changed)
    return evolve(schedule, ranks=tuple(ranks))


def _ops(schedule: Schedule, stage: int) -> list[int]:
    """The cells of a stage's ops, in order."""
    actions = schedule.ranks[schedule.placement[stage]]
    return [
        cell
        for kind, number, cell in zip(
            actions.kind, actions.stage, actions.source, strict=True
        )
        if number == stage and kind in OPS
    ]


def _check_reductions(
    schedule: Schedule, stage: int, markers: list[Marker]
) -> Iterator[Finding]:
    """What is wrong, if a stage's gradients are not reduced once, after its last backward."""
    # A stage in a table has at least one op: that is how it is known.
    last = _ops(schedule, stage)[-1]
    rank = schedule.placement[stage]
    if not markers:
        message = (
            f"the gradients of stage {stage} are never reduced, those of others are"
        )
        label = f"`{stage}REDUCE_GRAD` belongs behind this"
        yield Finding("reduce-grad", message, rank, last, label)
        return
    first, *others = markers
    for marker in others:
        # Twice would scale the gradients twice.
        related = (first.cell, "first here")
        message = f"{marker} comes twice"
        yield Finding("reduce-grad", message, rank, marker.cell, related=(related,))
    if first.cell < last:
        message = f"{first} comes before the last backward of its stage"
        related = (last, "which is here")
        yield Finding("reduce-grad", message, rank, first.cell, related=(related,))


def _check_gathers(
    schedule: Schedule, stage: int, markers: list[Marker], are_reduced: bool
) -> Iterator[Finding]:
    """What is wrong, if a stage's weights are gathered somewhere, but are not there for all of its
    ops, or are never dropped.
    """
    if not markers:
        return
    rank = schedule.placement[stage]
    is_gathered = False
    cells: list[tuple[int, Marker | None]] = [
        (marker.cell, marker) for marker in markers
    ]
    cells += [(cell, None) for cell in _ops(schedule, stage)]
    for cell, marker in sorted(cells, key=lambda pair: pair[0]):
        if marker is None and not is_gathered:
            message = f"stage {stage} runs on rank {rank} without its weights"
            help = f"put `{stage}UNSHARD` before it"
            yield Finding("unshard", message, rank, cell, help=help)
            return
        if marker is None:
            continue
        if is_gathered == (marker.what == "UNSHARD"):
            state = "gathered" if is_gathered else "dropped"
            message = f"{marker}: the weights of the stage are {state} already"
            yield Finding("unshard", message, rank, cell)
            return
        is_gathered = not is_gathered
    # Tables of a torch before REDUCE_GRAD have no RESHARD at the end either.
    if is_gathered and are_reduced:
        message = f"the weights of stage {stage} are never dropped"
        help = f"`{stage}RESHARD` belongs at the end"
        yield Finding("unshard", message, rank, markers[-1].cell, help=help)
