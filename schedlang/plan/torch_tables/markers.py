"""The cells of a table that concern a whole stage: when its weights are gathered, its gradients
reduced.

Torch checks none of it: a REDUCE_GRAD too many or too early scales gradients wrongly, without a
word.
"""

from collections.abc import Iterator

from attrs import frozen

from schedlang.diagnostics.diagnostic import CompileError
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.schedule import Schedule


@frozen
class Marker:
    """UNSHARD, RESHARD or REDUCE_GRAD of a stage on a rank; `place` is an index into the schedule's
    spans.
    """

    what: str
    stage: int
    rank: int
    place: int

    def __str__(self) -> str:
        return f"`{self.stage}{self.what}` on rank {self.rank}"


def check_markers(schedule: Schedule, markers: list[Marker]) -> None:
    """CompileError for markers on the wrong rank, too early or too late, missing or there twice."""
    findings: list[Finding] = []
    of: dict[int, list[Marker]] = {stage: [] for stage in range(len(schedule.placement))}
    for marker in markers:
        if marker.stage not in of:
            message = f"{marker}: there are stages 0 to {len(of) - 1}"
            findings.append(Finding("no-such-stage", message, marker.rank, marker.place))
        elif schedule.placement[marker.stage] != marker.rank:
            message = (
                f"{marker}: stage {marker.stage} is on rank {schedule.placement[marker.stage]}"
            )
            findings.append(Finding("not-on-this-rank", message, marker.rank, marker.place))
        else:
            of[marker.stage].append(marker)
    reduced = any(marker.what == "REDUCE_GRAD" for marker in markers)
    for stage, its in of.items():
        findings += _shards(
            schedule, stage, [each for each in its if each.what != "REDUCE_GRAD"], reduced
        )
        if reduced:
            findings += _reductions(
                schedule, stage, [each for each in its if each.what == "REDUCE_GRAD"]
            )
    if findings:
        raise CompileError(diagnose(schedule, findings))


def _computed(schedule: Schedule, stage: int) -> list[int]:
    """The places of a stage's ops, in order."""
    actions = schedule.ranks[schedule.placement[stage]]
    columns = zip(actions.kind, actions.stage, actions.source, strict=True)
    return [place for kind, its, place in columns if its == stage and not is_transfer(kind)]


def _reductions(schedule: Schedule, stage: int, markers: list[Marker]) -> Iterator[Finding]:
    """A stage's gradients are reduced once, after its last backward."""
    last = _computed(schedule, stage)[-1]
    rank = schedule.placement[stage]
    if not markers:
        message = f"the gradients of stage {stage} are never reduced, those of others are"
        yield Finding(
            "reduce-grad", message, rank, last, f"`{stage}REDUCE_GRAD` belongs behind this"
        )
    for marker in markers[1:]:
        first = (markers[0].place, "first here")
        yield Finding("reduce-grad", f"{marker} comes twice", rank, marker.place, related=(first,))
    for marker in markers[:1]:
        if marker.place < last:
            message = f"{marker} comes before the last backward of its stage"
            later = (last, "which is here")
            yield Finding("reduce-grad", message, rank, marker.place, related=(later,))


def _shards(
    schedule: Schedule, stage: int, markers: list[Marker], dropped: bool
) -> Iterator[Finding]:
    """If a stage's weights are gathered at all, they are there for all its ops, and in the end
    perhaps dropped.
    """
    rank = schedule.placement[stage]
    there = False
    events: list[tuple[int, Marker | None]] = [(marker.place, marker) for marker in markers]
    if markers:
        events += [(place, None) for place in _computed(schedule, stage)]
    for place, marker in sorted(events, key=lambda event: event[0]):
        if marker is None:
            if not there:
                yield Finding(
                    "unshard",
                    f"stage {stage} runs on rank {rank} without its weights",
                    rank,
                    place,
                    help=f"put `{stage}UNSHARD` before it",
                )
                return
            continue
        if there == (marker.what == "UNSHARD"):
            state = "gathered" if there else "dropped"
            yield Finding(
                "unshard", f"{marker}: the weights of the stage are {state} already", rank, place
            )
            return
        there = not there
    # What torch dumped before it had REDUCE_GRAD has no RESHARD in the end either.
    if there and dropped:
        yield Finding(
            "unshard",
            f"the weights of stage {stage} are never dropped",
            rank,
            markers[-1].place,
            help=f"`{stage}RESHARD` belongs at the end",
        )
