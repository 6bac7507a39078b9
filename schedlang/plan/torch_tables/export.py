"""Plans as the action tables of torch.distributed.pipelining: CSV, one row per rank, one cell per
action.

`torch-csv-compute` has compute ops only: torch adds the communication as it loads the table
(`compute_only`, the form that torchtitan takes). `torch-csv` has everything (`compute_comms`): the
plan's own transfers, and for each stage when its weights are gathered (UNSHARD), when its gradients
are reduced and scaled (REDUCE_GRAD), and when its weights are dropped again (RESHARD).
"""

from collections.abc import Iterator

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label
from schedlang.plan.plan import Plan
from schedlang.schedule.actions import Actions, is_transfer
from schedlang.schedule.kinds import Kind

COMMS = "torch-csv"
COMPUTE = "torch-csv-compute"

_FOREIGN = {
    Kind.R: "recomputation",
    Kind.U: "optimizer step",
    Kind.OFFLOAD: "copy to the host",
    Kind.RELOAD: "copy to the host",
}
_CHECKPOINT = "recompute inside the stage instead, with torch.utils.checkpoint"
_EVAL = "export the schedule of the training: its `eval()` runs the forwards"
_LOSSES = "torch numbers the losses by the order of these forwards"
_ALONG = (
    "let the stages between hand such values on, as parts of what they return: "
    "docs/models.md "
    "shows how"
)
_COMPUTE = f"`--to {COMPUTE}` leaves the transfers to torch"


def export_table(plan: Plan, form: str) -> str:
    """The plan in one of the two forms, as torch writes it; CompileError for what torch's tables
    cannot say.
    """
    for lacking, place, help in _inexpressible(plan, form):
        message = f"torch's action tables have no {lacking}"
        raise CompileError(
            [
                Diagnostic(
                    "torch-table", message, (Label(plan.spans[place]),), plan.source, help=help
                )
            ]
        )
    rows = (
        actions.compute().text().split() if form == COMPUTE else _cells(actions)
        for actions in plan.ranks
    )
    return "".join(f"{','.join(row)}\r\n" for row in rows)


def _inexpressible(plan: Plan, form: str) -> Iterator[tuple[str, int, str | None]]:
    """What torch's tables have no words for, with its place and what may help."""
    if len(plan.layout.pipelines) > 1:
        yield "second pipeline", 0, None
    if plan.layout.slices > 1:
        yield "slices of microbatches", 0, None
    if plan.layout.skips:
        yield "skips from stage to stage", 0, _ALONG
    for rank, actions in enumerate(plan.ranks):
        for index, kind in enumerate(actions.kind):
            if kind in _FOREIGN:
                help = _CHECKPOINT if kind == Kind.R else None
                yield (
                    f"{_FOREIGN[Kind(kind)]}: `{actions.word(index)}`",
                    actions.source[index],
                    help,
                )
        if not plan.stages_of(rank):
            yield f"rank without a stage: rank {rank}", 0, None
    if plan.is_forward_only:
        yield "forward without its backward", 0, _EVAL
    yield from _out_of_order(plan)
    if form == COMMS:
        yield from _batched(plan)


def _out_of_order(plan: Plan) -> Iterator[tuple[str, int, str]]:
    """Forwards of the last stage that are not in the order of their microbatches."""
    last = len(plan.placement) - 1
    actions = plan.ranks[plan.placement[last]]
    due = 0
    for index, (kind, stage) in enumerate(zip(actions.kind, actions.stage, strict=True)):
        if (kind, stage) == (Kind.F, last):
            if actions.microbatch[index] != due:
                early = f"`{actions.word(index)}` before `{last}F{due}`"
                yield (
                    f"other order of microbatches on the last stage: {early}",
                    actions.source[index],
                    _LOSSES,
                )
            due += 1


def _batched(plan: Plan) -> Iterator[tuple[str, int, str]]:
    """Transfers that are issued as one."""
    for actions in plan.ranks:
        for batch in actions.batches():
            if len(batch) > 1 and is_transfer(actions.kind[batch.start]):
                yield (
                    f"batch of transfers: `{actions.batch_text(batch)}`",
                    actions.source[batch.start],
                    _COMPUTE,
                )


def _cells(actions: Actions) -> list[str]:
    """A rank's actions, and what is due at the first and after the last op of each of its stages.

    The transfers behind a last op go first: they have someone waiting.
    """
    batches = list(actions.batches())
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, batch in enumerate(batches):
        for index in batch if not is_transfer(actions.kind[batch.start]) else ():
            first.setdefault(actions.stage[index], number)
            last[actions.stage[index]] = number
    cells: list[str] = []
    due: list[str] = []
    for number, batch in enumerate(batches):
        if is_transfer(actions.kind[batch.start]):
            cells.append(actions.batch_text(batch))
            continue
        stages = dict.fromkeys(actions.stage[index] for index in batch)
        begins = [f"{stage}UNSHARD" for stage in stages if first[stage] == number]
        cells += [*due, *begins, actions.batch_text(batch)]
        due = [
            f"{stage}{what}"
            for stage in stages
            if last[stage] == number
            for what in ("REDUCE_GRAD", "RESHARD")
        ]
    return cells + due
