"""Is every piece of work there, once? Every stage runs each microbatch's F, then its B, or its two halves."""

from schedlang.diagnostics import CompileError
from schedlang.findings import Finding, diagnose
from schedlang.schedule import Kind, Schedule, word

# What is done for a stage and a microbatch: a whole backward does both halves.
_FORWARD, _INPUT, _WEIGHT = 1, 2, 4
_DOES = {Kind.F: _FORWARD, Kind.B: _INPUT | _WEIGHT, Kind.I: _INPUT, Kind.W: _WEIGHT}
_WORDS = {
    Kind.F: "the forward", Kind.B: "the backward", Kind.I: "the backward", Kind.W: "the weight gradient",
}  # fmt: skip


def check_structure(schedule: Schedule) -> None:
    """CompileError when an action is unknown, on the wrong rank, missing, or there twice."""
    findings = [finding for rank in range(len(schedule.ranks)) for finding in _unknown(schedule, rank)]
    if not findings:
        findings = _repeated_or_missing(schedule)
    if findings:
        raise CompileError(diagnose(schedule, findings))


def _unknown(schedule: Schedule, rank: int) -> list[Finding]:
    """Actions of stages and microbatches that do not exist or belong to another rank."""
    findings = []
    actions, placement = schedule.ranks[rank], schedule.placement
    for index, (stage, microbatch) in enumerate(zip(actions.stage, actions.microbatch, strict=True)):
        if stage >= len(placement):
            wrong = f"there are stages 0 to {len(placement) - 1}"
        elif placement[stage] != rank:
            wrong = f"stage {stage} is on rank {placement[stage]}"
        elif microbatch >= schedule.microbatches:
            wrong = f"there are microbatches 0 to {schedule.microbatches - 1}"
        else:
            continue
        findings.append(
            Finding("unknown-action", f"`{actions.word(index)}` on rank {rank}: {wrong}", rank, actions.source[index])
        )
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
            does, before = _DOES[Kind(kind)], done.get((stage, microbatch), 0)
            if before & does:
                message = f"{_WORDS[Kind(kind)]} of microbatch {microbatch} on stage {stage} runs twice"
                related = (first[stage, microbatch, before & does & -(before & does)], "first here")
                again = f"again, as `{word(kind, stage, microbatch)}`"
                findings.append(Finding("repeated-op", message, rank, place, again, (related,), _split_help(kind)))
            for bit in (_FORWARD, _INPUT, _WEIGHT):
                if does & bit and not before & bit:
                    first[stage, microbatch, bit] = place
            done[stage, microbatch] = before | does
    return findings or _missing(schedule, done)


def _split_help(kind: int) -> str | None:
    if kind == Kind.W:
        return "a `W` completes a `B`; a whole backward, `BW`, needs none"
    return None


def _missing(schedule: Schedule, done: dict[tuple[int, int], int]) -> list[Finding]:
    """The first piece of work missing on each stage, per kind: there may be millions."""
    findings = []
    for bit, kind in ((_FORWARD, Kind.F), (_INPUT, Kind.B), (_WEIGHT, Kind.W)):
        counts = [0] * len(schedule.placement)
        for (stage, _), bits in done.items():
            counts[stage] += bool(bits & bit)
        for stage, count in enumerate(counts):
            if count < schedule.microbatches:
                absent = (m for m in range(schedule.microbatches) if not done.get((stage, m), 0) & bit)
                message = f"{_WORDS[kind]} of microbatch {next(absent)} never runs on stage {stage}"
                if count < schedule.microbatches - 1:
                    message += f", nor that of {schedule.microbatches - 1 - count} other microbatches"
                help = "every `B` of a schedule with `W` needs its `W`; write `BW` for a whole backward"
                rank = schedule.placement[stage]
                findings.append(Finding("missing-op", message, rank, help=help if kind == Kind.W else None))
        if findings:
            break
    return findings
