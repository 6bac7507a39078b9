"""Action tables of torch.distributed.pipelining, read strictly and proved like programs.

A table is CSV: row r is what rank r does, a cell is one action, or a group `(0F1;7B1)OVERLAP_F_B`.
Torch reads the beginning of a cell and ignores what follows; here a cell is an action or a mistake.

Tables come in two forms. One has compute ops only, and blanks where a rank idles; it is lowered
like a program. The other has communication too. It also says for each stage when its weights are
gathered (UNSHARD) and dropped (RESHARD), and when its gradients are reduced (REDUCE_GRAD); and
since torch 2.15, when a rank waits for each of its sends and reductions. Of these it is checked
that they come at the right time. They are not in the plan, which implies them; but where a table
gathers a stage more than once, the plan says when.

Tables of torch 2.5 and 2.6 have other letters for backwards; they are read as well.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from attrs import define, evolve, field

from schedlang.diagnostics.diagnostic import CompileError, Diagnostic
from schedlang.diagnostics.source import Label, Source, Span
from schedlang.files.file_kinds import FileKind, kind_of
from schedlang.lowering import lower
from schedlang.plan.plan import Plan
from schedlang.plan.torch_tables.markers import Marker, check_markers, with_markers
from schedlang.plan.torch_tables.table_layout import find_layout
from schedlang.plan.torch_tables.waiting_cells import check_waits
from schedlang.proof.prove import prove
from schedlang.proof.running import run_on
from schedlang.proof.structure import check_structure
from schedlang.schedule.actions import (
    OVERLAP,
    Actions,
    is_transfer,
    is_wait,
)
from schedlang.schedule.kinds import Kind
from schedlang.schedule.letters import letters_of
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.transports import LOOSEST, NAMES, PORTABLE, transports

_ACTION = re.compile(
    r"([0-9]{1,9})(?:(F|BW|B|I|W|(?:SEND|RECV|WAIT_SEND)_[FB])([0-9]{1,9})|"
    r"(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD))"
)
_COMPUTE = re.compile("[0-9]+(F|BW|B|I|W)[0-9]+")
_GROUP = re.compile(rf"\((.*)\){OVERLAP}")
_FORM = (
    "a cell is a stage, what it does, and a microbatch: `2F0`, `1SEND_B3`; or "
    f"`(0F1;7B1){OVERLAP}`, `2REDUCE_GRAD`"
)


@define
class Table:
    """What the cells of a table say, before it is checked.

    `spans` are those of the actions, counted from 1: span 0 stands for the table as a whole.
    """

    source: Source
    #: What its letters for ops mean, where they are those of older versions of torch.
    letters: Mapping[str, str] = field(factory=dict)
    ranks: list[Actions] = field(factory=list)
    markers: list[Marker] = field(factory=list)
    spans: list[Span] = field(factory=lambda: [Span(0, 0)])
    #: The blank cells; and the cells that are mistakes.
    blanks: list[Span] = field(factory=list)
    wrong: list[Diagnostic] = field(factory=list)

    @property
    def has_communication(self) -> bool:
        """Whether the table is of the form with communication."""
        transfers = any(
            is_transfer(kind) for actions in self.ranks for kind in actions.kind
        )
        return transfers or self.reduces_gradients or self.has_waits

    @property
    def has_waits(self) -> bool:
        """Whether the table is in the dialect of torch 2.15, which waits for every send and every
        reduction by a cell of its own.
        """
        waits = any(is_wait(kind) for actions in self.ranks for kind in actions.kind)
        return waits or any(
            marker.what == "WAIT_REDUCE_GRAD" for marker in self.markers
        )

    @property
    def reduces_gradients(self) -> bool:
        """Whether the table says when gradients are reduced and scaled; where it does not, torch
        does not scale them.
        """
        return any(marker.what == "REDUCE_GRAD" for marker in self.markers)

    def row(self, line: str, start: int) -> None:
        """Read the row of the next rank, which starts at a character of the text."""
        self.ranks.append(Actions())
        if not line.replace(",", "").strip():
            message = f"the row of rank {len(self.ranks) - 1} is empty"
            self.mistake(message, Span(start, start + len(line)))
            return
        for cell in line.split(","):
            self.cell(*_strip(cell, start))
            # Behind the comma.
            start += len(cell) + 1

    def cell(self, text: str, span: Span) -> None:
        """Read one cell: a blank, an action, or a group of them."""
        if not text:
            self.blanks.append(span)
            return
        group = _GROUP.fullmatch(text)
        if group is None:
            self.action(text, span, 0)
            return
        words = []
        start = span.start + 1
        for word in group[1].split(";"):
            words.append(_strip(word, start))
            start += len(word) + 1
        # Torch runs the members of a group one by one, so a group with transfers is none to us.
        overlaps = len(words) > 1 and all(_COMPUTE.fullmatch(word) for word, _ in words)
        # Any number will do that no other group of the rank has.
        number = len(self.spans) if overlaps else 0
        for word, word_span in words:
            self.action(word, word_span, number)

    def action(self, text: str, span: Span, group: int) -> None:
        """Read one action."""
        match = _ACTION.fullmatch(text)
        if match is None:
            message = (
                f"`{text}` is not an action" if text else "there is no action here"
            )
            self.mistake(message, span, _FORM)
            return
        stage, kind, microbatch, marker = match.groups()
        rank = len(self.ranks) - 1
        cell = len(self.spans)
        if marker:
            self.markers.append(Marker(marker, int(stage), rank, cell))
        else:
            kind = self.letters.get(kind, kind)
            self.ranks[rank].add(Kind[kind], int(stage), int(microbatch), cell, group)
        self.spans.append(span)

    def mistake(self, message: str, span: Span, help: str | None = None) -> None:
        """Note what is wrong with a part of the text."""
        self.wrong.append(
            Diagnostic("table", message, (Label(span),), self.source, help=help)
        )


def _strip(text: str, start: int) -> tuple[str, Span]:
    """The text of a cell without the blanks and the quotes around it, and its span."""
    stripped = text.strip()
    begin = start + len(text) - len(text.lstrip())
    if len(stripped) > 1 and stripped[0] == stripped[-1] == '"':
        return _strip(stripped[1:-1], begin + 1)
    return stripped, Span(begin, begin + len(stripped))


def read_table(source: Source) -> Table:
    """The table in a text; CompileError with every cell that is a mistake."""
    ops = (match[1] for match in _COMPUTE.finditer(source.text))
    table = Table(source, letters_of(ops))
    # Not Python's `csv`: a message needs to know where a cell is.
    start = 0
    for line in source.text.removesuffix("\n").split("\n"):
        table.row(line, start)
        start += len(line) + 1
    # In a table of the other form, a blank is a time step in which the rank idles.
    if table.has_communication and table.blanks:
        table.mistake(
            "a blank cell: only tables without communication have these",
            table.blanks[0],
        )
    if table.wrong:
        kind = kind_of(source.text)
        is_table = any(map(len, table.ranks)) or kind in (FileKind.TABLE, FileKind.TEXT)
        if not is_table:
            message = f"`{source.path}` is {kind.called}, not an action table of torch"
            help = _FORM if kind is FileKind.CSV else kind.help(source.path)
            raise CompileError(
                [Diagnostic("table", message, help=help, file=source.path)]
            )
        raise CompileError(table.wrong)
    return table


def plan_of(table: Table, transport: str = PORTABLE) -> Plan:
    """A table as a plan, proved for a transport; CompileError with everything that is wrong with
    it.
    """
    try:
        schedule = evolve(_schedule(table), transport=transport)
        check_structure(schedule)
        check_markers(schedule, table.markers)
        if table.has_waits:
            check_waits(schedule, table.markers)
        schedule = with_markers(schedule, table.markers)
        if table.has_communication:
            return _as_written(schedule)
        # As torch does when it loads such a table.
        return _proved(lower(schedule))
    except CompileError as error:
        diagnostics = [
            _for_tables(table, transport, each) for each in error.diagnostics
        ]
        raise CompileError(diagnostics) from None


def _as_written(schedule: Schedule) -> Plan:
    """The plan of a schedule with the communication of a table; waits, which are in it, are proved
    and left out.
    """
    # What a portable plan may run on includes ranks that block, where a send holds its rank, and
    # its wait adds nothing. What torch itself does comes first: only what is written holds a rank.
    is_portable = schedule.transport == PORTABLE
    for rule in (LOOSEST,) if is_portable else transports(schedule.transport):
        run_on(schedule, schedule.costs, rule)
    without = tuple(
        actions.select(lambda kind: not is_wait(kind)) for actions in schedule.ranks
    )
    return _proved(evolve(schedule, ranks=without))


def _proved(schedule: Schedule) -> Plan:
    """A schedule with communication as a plan."""
    execution = prove(schedule)
    return Plan.of(schedule, idle=execution.timeline.bubble_over_makespan)


def _runs_on(table: Table) -> list[str]:
    """Of a table whose ranks wait for each other where ranks block, the transports where it runs,
    in torch as well as here.
    """

    def runs(transport: str) -> bool:
        try:
            # Messages have no tags in torch.
            run_on(schedule, schedule.costs, LOOSEST)
            _as_written(evolve(schedule, transport=transport))
        except CompileError:
            return False
        return True

    schedule = _schedule(table)
    names = [
        name for name in NAMES if not any(rule.blocks for rule in transports(name))
    ]
    return list(filter(runs, names))


def _schedule(table: Table) -> Schedule:
    """The table as a schedule, whose layout is what the cells say."""
    layout = find_layout(table.source, table.spans, table.ranks)
    params = {"ranks": len(table.ranks), "microbatches": layout.microbatches}
    name = Path(table.source.path).stem
    return Schedule(
        name, params, layout, tuple(table.ranks), table.source, tuple(table.spans)
    )


def _for_tables(table: Table, transport: str, diagnostic: Diagnostic) -> Diagnostic:
    """A diagnostic of a table: where its help speaks of programs, another one."""
    halves = "`B` is a whole backward; `I` and `W` are its halves, and go together"
    helps = {"missing-op": halves, "repeated-op": halves}
    if table.has_communication:
        leave_out = "a table without SEND and RECV gets them in an order that runs"
        helps["order"] = leave_out
        helps["deadlock"] = leave_out
        if diagnostic.code == "deadlock":
            helps["deadlock"] = (
                _deadlock_help(table, transport, diagnostic) or leave_out
            )
    if not diagnostic.help:
        return diagnostic
    return evolve(diagnostic, help=helps.get(diagnostic.code, diagnostic.help))


def _deadlock_help(table: Table, transport: str, diagnostic: Diagnostic) -> str | None:
    """What helps against ranks that wait for each other, but for leaving the transfers to us."""
    if any("WAIT_" in wait.at.action for wait in diagnostic.waits):
        return (
            "a wait for a send belongs behind all that the other rank needs before its receive, as "
            "behind the backward of its stage and microbatch, or at the end of the row"
        )
    names = _runs_on(table) if transport == PORTABLE else []
    if not names:
        return None
    options = " or ".join(f"`--transport {name}`" for name in names)
    return f"it runs where sends do not hold their ranks: {options} proves it for that"
