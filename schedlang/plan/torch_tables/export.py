"""Plans as the action tables of torch.distributed.pipelining: CSV, one row per rank, one cell per
action.

`torch-csv-compute` has compute ops only: torch adds the communication as it loads the table
(`compute_only`, the form that torchtitan takes). `torch-csv` has everything (`compute_comms`): the
plan's own transfers, and for each stage when its weights are gathered (UNSHARD), when its gradients
are reduced and scaled (REDUCE_GRAD), and when its weights are dropped again (RESHARD). In the
dialect of torch 2.15 it also has a wait for each send (WAIT_SEND_F, WAIT_SEND_B) and each reduction
(WAIT_REDUCE_GRAD), which torch 2.13 does not know, and 2.15 does not do without.
"""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label
from schedlang.diagnostics.wrong_arguments import check_choice
from schedlang.plan.plan import Plan
from schedlang.ranks.receipts import receipts
from schedlang.schedule.actions import is_collective, is_transfer, word
from schedlang.schedule.kinds import GATHERS, REDUCES, WAITS, Kind, op_of

COMMS = "torch-csv"
COMPUTE = "torch-csv-compute"

#: The dialects of tables with communication, by the version of torch that first reads them.
DIALECTS = ("2.13", "2.15")

# What a user can do instead.
_CHECKPOINT = "recompute inside the stage instead, with torch.utils.checkpoint"
_EVAL = "export the schedule of the training: its `eval()` runs the forwards"
_LOSSES = "torch numbers the losses by the order of these forwards"
_HAND_ON = (
    "let the stages between hand such values on, as parts of what they return: "
    "docs/models.md shows how"
)
_ONE_SUM = "torch scales the gradients with each: leave all but the last one out"
_FROZEN = (
    "export the schedule without `frozen`: torch runs the backwards of stages whose weights "
    "want no gradient as well"
)
_COMPUTE = f"`--to {COMPUTE}` leaves the transfers to torch"


def dialect_of(torch: str) -> str:
    """The dialect that a version of torch reads, such as 2.15.0+cpu; ValueError for one before
    them all.
    """
    number = _number(torch)
    known = [dialect for dialect in DIALECTS if _number(dialect) <= number]
    if not known:
        raise ValueError(
            f"torch {torch} is older than {DIALECTS[0]}, the oldest known dialect"
        )
    return known[-1]


def installed_dialect() -> str:
    """The dialect that the installed torch reads, the newest one without any; ValueError for a
    torch before them all.
    """
    try:
        return dialect_of(version("torch"))
    except PackageNotFoundError:
        return DIALECTS[-1]


def _number(version: str) -> tuple[int, ...]:
    """The first two parts of a version, to compare by; ValueError for what is none."""
    parts = re.match(r"(\d+)(?:\.(\d+))?", version)
    if parts is None:
        raise ValueError(f"`{version}` is no version of torch, such as {DIALECTS[-1]}")
    return int(parts[1]), int(parts[2] or 0)


def export_table(plan: Plan, form: str, dialect: str | None = None) -> str:
    """The plan in one of the two forms, as torch writes it, in the dialect of the installed torch
    if none is given; CompileError for what torch's tables have no words for, ValueError for an
    unknown dialect.

    The form without communication is the same in all dialects.
    """
    if dialect is None and form == COMMS:
        dialect = installed_dialect()
    check_choice("dialect", dialect or DIALECTS[-1], DIALECTS)
    for what, span, help in _not_in_tables(plan, form):
        message = f"torch's action tables have no {what}"
        label = Label(plan.spans[span])
        raise CompileError(
            [Diagnostic("torch-table", message, (label,), plan.source, help=help)]
        )
    lines = []
    for rank, actions in enumerate(plan.ranks):
        if form == COMPUTE:
            cells = actions.compute().without_collectives().text().split()
        else:
            cells = _cells(plan, rank, has_waits=dialect != "2.13")
        # Line ends as Python's `csv` writes them, with which torch does.
        lines.append(f"{','.join(cells)}\r\n")
    return "".join(lines)


def _not_in_tables(plan: Plan, form: str) -> Iterator[tuple[str, int, str | None]]:
    """What of a plan torch's tables have no words for; with the index of its span, and what may
    help.
    """
    if plan.layout.models:
        yield "several models", 0, None
    elif len(plan.layout.pipelines) > 1:
        yield "second pipeline", 0, None
    if plan.layout.slices > 1:
        yield "slices of microbatches", 0, None
    if plan.layout.edges:
        yield "stages that are no chain", 0, None
    if plan.layout.skips:
        yield "skips from stage to stage", 0, _HAND_ON
    if plan.layout.frozen:
        yield "frozen stages", 0, _FROZEN
    if plan.message_type:
        item = f"send {plan.message_type}"
        yield (
            "rounding of messages",
            0,
            f"leave `{item}` out: torch sends messages as they are",
        )
    for rank, actions in enumerate(plan.ranks):
        for index, kind in enumerate(actions.kind):
            op = op_of(kind)
            if not (op.in_torch or is_transfer(kind) or op.is_collective):
                what = f"{op.name}: `{actions.word(index)}`"
                help = _CHECKPOINT if op.repeats else None
                yield what, actions.source[index], help
        if not plan.stages_of(rank):
            yield f"rank without a stage: rank {rank}", 0, None
    if plan.is_forward_only:
        yield "forward without its backward", 0, _EVAL
    yield from _losses_out_of_order(plan)
    if form == COMMS:
        yield from _more_sums(plan)
        yield from _batches(plan)


def _losses_out_of_order(plan: Plan) -> Iterator[tuple[str, int, str]]:
    """Forwards of the last stage that are not in the order of their microbatches."""
    last = len(plan.placement) - 1
    actions = plan.ranks[plan.placement[last]]
    expected = 0
    for index, (kind, stage) in enumerate(
        zip(actions.kind, actions.stage, strict=True)
    ):
        if (kind, stage) != (Kind.F, last):
            continue
        if actions.microbatch[index] != expected:
            early = f"`{actions.word(index)}` before `{last}F{expected}`"
            what = f"other order of microbatches on the last stage: {early}"
            yield what, actions.source[index], _LOSSES
        expected += 1


def _more_sums(plan: Plan) -> Iterator[tuple[str, int, str]]:
    """Sums of a stage's gradients behind its first one."""
    for rank, actions in enumerate(plan.ranks):
        summed = set[int]()
        for index, (kind, stage) in enumerate(
            zip(actions.kind, actions.stage, strict=True)
        ):
            if kind in REDUCES:
                if stage in summed:
                    what = f"second sum of a stage's gradients: `{plan.name_of(rank, index)}`"
                    yield what, actions.source[index], _ONE_SUM
                summed.add(stage)


def _batches(plan: Plan) -> Iterator[tuple[str, int, str]]:
    """Transfers that are issued as one."""
    for actions in plan.ranks:
        for batch in actions.batches():
            if len(batch) > 1 and is_transfer(actions.kind[batch.start]):
                what = f"batch of transfers: `{actions.batch_text(batch)}`"
                yield what, actions.source[batch.start], _COMPUTE


def _cells(plan: Plan, rank: int, has_waits: bool) -> list[str]:
    """A rank's actions, with the UNSHARD of each stage before its first op, and its REDUCE_GRAD and
    RESHARD after its last one, if the plan does not have these itself; and waits, where the dialect
    has them.

    A rank waits for a send behind the op whose message shows that it has been received, so that the
    wait takes no time, or else at the end.
    """
    actions = plan.ranks[rank]
    batches = list(actions.batches())
    # For each stage the number of the batch with its first op, and with its last.
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    pairs = [*zip(actions.kind, actions.stage, strict=True)]
    gathered = {stage for kind, stage in pairs if kind in GATHERS}
    summed = {stage for kind, stage in pairs if kind in REDUCES}
    for number, batch in enumerate(batches):
        kind = actions.kind[batch.start]
        if not is_transfer(kind) and not is_collective(kind):
            for index in batch:
                first.setdefault(actions.stage[index], number)
                last[actions.stage[index]] = number
    waits: dict[int, list[str]] = {}
    if has_waits:
        for send, op in receipts(plan, rank).items():
            wait = WAITS[Kind(actions.kind[send])]
            text = word(wait, actions.stage[send], actions.microbatch[send])
            waits.setdefault(op, []).append(text)
    cells: list[str] = []
    # What the op before asks for. Transfers that follow it go first: another rank waits for them.
    pending: list[str] = []
    for number, batch in enumerate(batches):
        if is_transfer(actions.kind[batch.start]):
            cells.append(actions.batch_text(batch))
            continue
        cells += pending
        pending = [wait for index in batch for wait in waits.get(index, [])]
        if is_collective(actions.kind[batch.start]):
            cells.append(actions.word(batch.start))
            if has_waits and actions.kind[batch.start] in REDUCES:
                cells.append(f"{actions.stage[batch.start]}WAIT_REDUCE_GRAD")
            continue
        # Each stage once, also where ops of one stage overlap.
        for stage in dict.fromkeys(actions.stage[index] for index in batch):
            if first[stage] == number and stage not in gathered:
                cells.append(f"{stage}UNSHARD")
            if last[stage] == number and stage not in summed:
                pending.append(f"{stage}REDUCE_GRAD")
                if has_waits:
                    pending.append(f"{stage}WAIT_REDUCE_GRAD")
            if last[stage] == number and stage not in gathered:
                pending.append(f"{stage}RESHARD")
        cells.append(actions.batch_text(batch))
    return cells + pending + waits.get(len(actions), [])
