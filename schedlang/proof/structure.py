"""Is every piece of work there, once? Every stage runs each microbatch's F, then its B, or its two
halves.
"""

from functools import cached_property

from attrs import frozen

from schedlang.diagnostics.diagnostic import CompileError, counted
from schedlang.proof.columnwise import is_large
from schedlang.schedule.actions import is_copy, is_transfer, word
from schedlang.schedule.findings import Finding, diagnose
from schedlang.schedule.kinds import Kind
from schedlang.schedule.schedule import Schedule

# What is done for a stage and a microbatch: a whole backward does both halves.
_FORWARD = 1
_INPUT = 2
_WEIGHT = 4
_AGAIN = 8
_UPDATE = 16
_AWAY = 32
_BACK = 64
_DOES: dict[int, int] = {
    Kind.F: _FORWARD,
    Kind.B: _INPUT | _WEIGHT,
    Kind.I: _INPUT,
    Kind.W: _WEIGHT,
    Kind.R: _AGAIN,
    Kind.U: _UPDATE,
    Kind.OFFLOAD: _AWAY,
    Kind.RELOAD: _BACK,
}
_WORDS: dict[int, str] = {
    Kind.F: "the forward",
    Kind.B: "the backward",
    Kind.I: "the backward",
    Kind.W: "the weight gradient",
    Kind.R: "the recomputation",
    Kind.U: "the optimizer step",
    Kind.OFFLOAD: "the offload",
    Kind.RELOAD: "the reload",
}


def check_structure(schedule: Schedule) -> None:
    """CompileError when an action is unknown, on the wrong rank, missing, or there twice."""
    if is_large(schedule):
        from schedlang.proof.columnwise.structure import is_complete

        if is_complete(schedule):
            return
    findings = [
        finding for rank in range(len(schedule.ranks)) for finding in _unknown(schedule, rank)
    ]
    if not findings:
        findings = _repeated_or_missing(schedule)
    if findings:
        raise CompileError(diagnose(schedule, findings))


def _unknown(schedule: Schedule, rank: int) -> list[Finding]:
    """Actions of stages and microbatches that do not exist or belong to another rank."""
    findings: list[Finding] = []
    actions = schedule.ranks[rank]
    layout = schedule.layout
    placement = schedule.placement

    def find(code: str, index: int, wrong: str) -> None:
        message = f"`{actions.word(index)}` on rank {rank}: {wrong}"
        place = actions.source[index]
        findings.append(Finding(code, message, rank, place, numbers=(actions.stage[index],)))

    for index, (kind, number, microbatch) in enumerate(
        zip(actions.kind, actions.stage, actions.microbatch, strict=True)
    ):
        stage = layout.stage_of(kind, number)
        if number >= len(placement) and not (is_transfer(kind) and number in layout.skip_stages):
            find("no-such-stage", index, f"there are stages 0 to {len(placement) - 1}")
        elif placement[stage] != rank:
            find("not-on-this-rank", index, f"stage {stage} is on rank {placement[stage]}")
        elif kind == Kind.U and microbatch >= layout.updates:
            find("update", index, f"there are updates 0 to {layout.updates - 1}")
        elif microbatch >= layout.units(stage):
            find(
                "no-such-microbatch",
                index,
                f"there are microbatches 0 to {layout.units(stage) - 1}",
            )
        elif is_copy(kind) and actions.group[index]:
            find("overlap", index, "a copy goes on beside what follows by itself, it stands alone")
    return findings


def _repeated_or_missing(schedule: Schedule) -> list[Finding]:
    done: dict[tuple[int, int], int] = {}
    first: dict[tuple[int, int, int], int] = {}
    findings = []
    for rank, actions in enumerate(schedule.ranks):
        for kind, stage, microbatch, place in zip(
            actions.kind, actions.stage, actions.microbatch, actions.source, strict=True
        ):
            if kind not in _DOES:
                continue
            # The only update of a schedule needs no number.
            microbatch = max(microbatch, 0)
            does = _DOES[kind]
            before = done.get((stage, microbatch), 0)
            if before & does:
                which = f"update {microbatch}" if kind == Kind.U else f"microbatch {microbatch}"
                message = f"{_WORDS[kind]} of {which} on stage {stage} runs twice"
                related = (first[stage, microbatch, before & does & -(before & does)], "first here")
                again = f"again, as `{word(kind, stage, microbatch)}`"
                findings.append(
                    Finding(
                        "repeated-op", message, rank, place, again, (related,), _split_help(kind)
                    )
                )
            for bit in (_FORWARD, _INPUT, _WEIGHT, _AGAIN, _UPDATE, _AWAY, _BACK):
                if does & bit and not before & bit:
                    first[stage, microbatch, bit] = place
            done[stage, microbatch] = before | does
    places = _Places(first)
    return (
        findings
        or _missing(schedule, done, places)
        or _missing_updates(schedule, done, places)
        or _offloads(schedule, done, places)
    )


@frozen
class _Places:
    """Where work stands in the program, by stage, microbatch and bit; and where others stand near
    work that is not.
    """

    first: dict[tuple[int, int, int], int]

    @cached_property
    def of_work(self) -> dict[tuple[int, int], int]:
        """A place of each work of each stage."""
        return {(stage, bit): place for (stage, _, bit), place in self.first.items()}

    def near(self, stage: int, bit: int) -> tuple[int, str]:
        """The place of the same work for another microbatch, or of other work of the stage, and
        what it is.
        """
        if (stage, bit) in self.of_work:
            return self.of_work[stage, bit], "others run here"
        own = [place for (at, _), place in self.of_work.items() if at == stage]
        return (own[-1], f"stage {stage} runs here") if own else (0, "")


def _split_help(kind: int) -> str | None:
    if kind == Kind.W:
        return "a `W` completes an `I`; a whole backward needs none"
    return None


def _missing(
    schedule: Schedule, done: dict[tuple[int, int], int], places: _Places
) -> list[Finding]:
    """The first piece of work missing on each stage, per kind: there may be millions."""
    wanted = [(_FORWARD, Kind.F), (_INPUT, Kind.B), (_WEIGHT, Kind.W)]
    findings: list[Finding] = []
    for bit, kind in wanted[:1] if schedule.is_forward_only else wanted:
        counts = [0] * len(schedule.placement)
        for (stage, _), bits in done.items():
            counts[stage] += bool(bits & bit)
        for stage, count in enumerate(counts):
            lacking = schedule.layout.units(stage) - count
            if lacking:
                absent = (
                    unit
                    for unit in range(schedule.layout.units(stage))
                    if not done.get((stage, unit), 0) & bit
                )
                findings.append(
                    _missing_op(
                        schedule, kind, stage, next(absent), lacking, places.near(stage, bit)
                    )
                )
        if findings:
            break
    return findings


def _missing_updates(
    schedule: Schedule, done: dict[tuple[int, int], int], places: _Places
) -> list[Finding]:
    """Updates that some stages make and others do not."""
    made = next((place for (_, _, bit), place in places.first.items() if bit == _UPDATE), 0)
    updates = {op for op, bits in done.items() if bits & _UPDATE}
    wanted = [
        (stage, each)
        for each in range(schedule.layout.updates)
        for stage in range(len(schedule.placement))
    ]
    return [
        Finding(
            "missing-op",
            f"stage {stage} never makes update {each}, others do",
            schedule.placement[stage],
            made,
            "others run here",
        )
        for stage, each in wanted
        if updates and (stage, each) not in updates
    ]


def _offloads(
    schedule: Schedule, done: dict[tuple[int, int], int], places: _Places
) -> list[Finding]:
    """Activations that are offloaded but not there, or never brought back."""
    findings = []
    for (stage, microbatch), bits in done.items():
        of = f"the activations of microbatch {microbatch} on stage {stage}"
        if bits & _AWAY and bits & _AGAIN:
            message = f"{of} are offloaded, but dropped after the forward: `R` makes them again"
        elif bits & _AWAY and not bits & _BACK:
            message = f"{of} are offloaded, and never reloaded"
        elif bits & _BACK and not bits & _AWAY:
            message = f"{of} are reloaded, and never offloaded"
        else:
            continue
        place = places.first[stage, microbatch, _AWAY if bits & _AWAY else _BACK]
        findings.append(Finding("offload", message, schedule.placement[stage], place))
    return findings[:1]


def _missing_op(
    schedule: Schedule, kind: Kind, stage: int, microbatch: int, lacking: int, near: tuple[int, str]
) -> Finding:
    message = f"{_WORDS[kind]} of microbatch {microbatch} never runs on stage {stage}"
    if lacking > 1:
        message += f", nor that of {counted(lacking - 1, 'other microbatch')}"
    help = (
        "every half for the inputs needs its `W`; write `BW` for a whole backward"
        if kind == Kind.W
        else None
    )
    return Finding("missing-op", message, schedule.placement[stage], *near, help=help)
