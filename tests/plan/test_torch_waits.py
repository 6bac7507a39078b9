"""Waits for sends and for reductions, in action tables of torch 2.15: which there must be, what they
add to the proof, and where an export puts them.
"""

import random
import re
from pathlib import Path

import numpy as np
import pytest

from schedlang import CompileError, Costs, Plan, read_plan, write_plan
from schedlang.plan.torch_tables import DIALECTS, dialect_of, export_table, read_table
from schedlang.plan.torch_tables.table_reader import _schedule
from schedlang.proof.message_edges import transport_events
from schedlang.proof.running import run_on
from schedlang.schedule.kinds import Kind
from schedlang.schedule.transports import LOOSEST
from tests.plan.test_torch_tables import (
    EXPORTABLE,
    GOOD,
    SIZES,
    SIZES_OF,
    defects,
    imported,
    program,
    table,
    texts,
)

# A table with all that torch 2.15 has: weights gathered and dropped, gradients reduced, and a wait
# for each send and reduction.
WAITS = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,"
    "0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,"
    "1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B0,1WAIT_SEND_B1\n"
)
WAITS_ON_ONE = (
    "0UNSHARD,0F0,1UNSHARD,1F0,1B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,"
    "0WAIT_REDUCE_GRAD,0RESHARD\n"
)
# Rank 0 waits for its second send before it takes the gradient of the first microbatch, and rank 1
# until that one is taken before it receives the second:
#
#    rank 0   WAIT_SEND_F1 ──until──▶ RECV_F1   rank 1
#    rank 0   RECV_B0 ◀──until── WAIT_SEND_B0   rank 1
EACH_OTHER = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0WAIT_SEND_F0\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1\n"
)
RING = (
    "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,0RECV_B0,0B0,0WAIT_SEND_F0,"
    "3RECV_F1,3F1,3B1,3SEND_B1,3REDUCE_GRAD,3WAIT_REDUCE_GRAD,0RECV_B1,0B1,0REDUCE_GRAD,"
    "0WAIT_REDUCE_GRAD,3WAIT_SEND_B0,3WAIT_SEND_B1\n"
    "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0,1RECV_F1,1F1,1SEND_F1,1RECV_B1,1B1,1SEND_B1,"
    "1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1WAIT_SEND_F0,1WAIT_SEND_B0,1WAIT_SEND_F1,1WAIT_SEND_B1\n"
    "2RECV_F0,2F0,2SEND_F0,2RECV_B0,2B0,2SEND_B0,2RECV_F1,2F1,2SEND_F1,2RECV_B1,2B1,2SEND_B1,"
    "2REDUCE_GRAD,2WAIT_REDUCE_GRAD,2WAIT_SEND_F0,2WAIT_SEND_B0,2WAIT_SEND_F1,2WAIT_SEND_B1\n"
)
#: The same with that wait at the end of its row, which runs where sends do not hold their ranks.
RING_RUNS = RING.replace("0WAIT_SEND_F1,", "").replace(
    "3WAIT_SEND_B1", "3WAIT_SEND_B1,0WAIT_SEND_F1"
)
#: The defect: a good table, what is replaced in it, by what; and the row and column of what is
#: wrong, its text, and the reason.
MALFORMED = defects(
    r"""
WAIT_SEND_F missing | WAITS | ,0WAIT_SEND_F0 | | 1:14 0SEND_F0: wait: nothing on rank 0 waits for `0SEND_F0`
WAIT_SEND_B missing | WAITS | ,1WAIT_SEND_B1 | | 2:53 1SEND_B1: wait: nothing on rank 1 waits for `1SEND_B1`
WAIT_REDUCE_GRAD missing | WAITS | ,0WAIT_REDUCE_GRAD | | 1:90 0REDUCE_GRAD: wait: nothing on rank 0 waits for `0REDUCE_GRAD`
no WAIT_SEND, though a WAIT_REDUCE_GRAD | GOOD | GOOD | 0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD\n | 1:5 0SEND_F0: wait: nothing on rank 0 waits for `0SEND_F0`
WAIT_SEND_F before its send | WAITS | 0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0 | 0WAIT_SEND_F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0 | 1:14 0WAIT_SEND_F0: wait: `0WAIT_SEND_F0` on rank 0 comes before `0SEND_F0`, for which it waits
WAIT_SEND_B before its send | WAITS | 1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,1WAIT_SEND_B0 | 1B0,1WAIT_SEND_B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD | 2:40 1WAIT_SEND_B0: wait: `1WAIT_SEND_B0` on rank 1 comes before `1SEND_B0`, for which it waits
WAIT_REDUCE_GRAD before its REDUCE_GRAD | WAITS | 1REDUCE_GRAD,1WAIT_REDUCE_GRAD | 1WAIT_REDUCE_GRAD,1REDUCE_GRAD | 2:62 1WAIT_REDUCE_GRAD: wait: `1WAIT_REDUCE_GRAD` on rank 1 comes before `1REDUCE_GRAD`, for which it waits
WAIT_SEND_F twice | WAITS | 0WAIT_SEND_F0 | 0WAIT_SEND_F0,0WAIT_SEND_F0 | 1:63 0WAIT_SEND_F0: wait: `0WAIT_SEND_F0` on rank 0 waits again for `0SEND_F0`
WAIT_SEND_B twice | WAITS | 1WAIT_SEND_B1 | 1WAIT_SEND_B1,1WAIT_SEND_B0 | 2:130 1WAIT_SEND_B0: wait: `1WAIT_SEND_B0` on rank 1 waits again for `1SEND_B0`
WAIT_REDUCE_GRAD twice | WAITS | 0RESHARD | 0RESHARD,0WAIT_REDUCE_GRAD | 1:130 0WAIT_REDUCE_GRAD: wait: `0WAIT_REDUCE_GRAD` on rank 0 waits again for `0REDUCE_GRAD`
wait for a send of another rank | WAITS | 0B1, | 0B1,1WAIT_SEND_B0, | 1:76 1WAIT_SEND_B0: not-on-this-rank: `1WAIT_SEND_B0` on rank 0: stage 1 is on rank 1
WAIT_REDUCE_GRAD of another rank | WAITS | 0RESHARD | 0RESHARD,1WAIT_REDUCE_GRAD | 1:130 1WAIT_REDUCE_GRAD: not-on-this-rank: `1WAIT_REDUCE_GRAD` on rank 0: stage 1 is on rank 1
WAIT_SEND_F of no stage | WAITS | 0B1, | 0B1,7WAIT_SEND_F0, | 1:76 7WAIT_SEND_F0: no-such-stage: `7WAIT_SEND_F0` on rank 0: there are stages 0 to 1
WAIT_REDUCE_GRAD of no stage | WAITS | 0RESHARD | 0RESHARD,7WAIT_REDUCE_GRAD | 1:130 7WAIT_REDUCE_GRAD: no-such-stage: `7WAIT_REDUCE_GRAD` on rank 0: there are stages 0 to 1
WAIT_SEND_F of no microbatch | WAITS | 0B1, | 0B1,0WAIT_SEND_F9, | 1:76 0WAIT_SEND_F9: no-such-microbatch: `0WAIT_SEND_F9` on rank 0: there are microbatches 0 to 1
wait for the other direction | WAITS | 0WAIT_SEND_F1 | 0WAIT_SEND_B1 | 1:27 0SEND_F1: wait: nothing on rank 0 waits for `0SEND_F1`
wait behind the last stage | WAITS | 1WAIT_SEND_B0 | 1WAIT_SEND_F0,1WAIT_SEND_B0 | 2:102 1WAIT_SEND_F0: wait: `1WAIT_SEND_F0` on rank 1 waits for `1SEND_F0`, which the rank does not have
wait for another microbatch | WAITS | 0WAIT_SEND_F1 | 0WAIT_SEND_F0 | 1:76 0WAIT_SEND_F0: wait: `0WAIT_SEND_F0` on rank 0 waits again for `0SEND_F0`
send without its microbatch's wait | WAITS | 0SEND_F1, | | 1:67 0WAIT_SEND_F1: wait: `0WAIT_SEND_F1` on rank 0 waits for `0SEND_F1`, which the rank does not have
reduction missing | WAITS | 0REDUCE_GRAD, | | 1:72 0B1: reduce-grad: the gradients of stage 0 are never reduced, those of others are
no microbatch | WAITS | 0WAIT_SEND_F0 | 0WAIT_SEND_F | 1:49 0WAIT_SEND_F: table: `0WAIT_SEND_F` is not an action
WAIT_REDUCE_GRAD of a microbatch | WAITS | 0WAIT_REDUCE_GRAD | 0WAIT_REDUCE_GRAD0 | 1:103 0WAIT_REDUCE_GRAD0: table: `0WAIT_REDUCE_GRAD0` is not an action
no direction | WAITS | 0WAIT_SEND_F0 | 0WAIT_SEND0 | 1:49 0WAIT_SEND0: table: `0WAIT_SEND0` is not an action
wait for a receive | WAITS | 0RECV_B0, | 0RECV_B0,0WAIT_RECV_B0, | 1:45 0WAIT_RECV_B0: table: `0WAIT_RECV_B0` is not an action
wait for a gather | WAITS | 0UNSHARD, | 0UNSHARD,0WAIT_UNSHARD, | 1:10 0WAIT_UNSHARD: table: `0WAIT_UNSHARD` is not an action
wait for an op | WAITS | 0F1, | 0F1,0WAIT_F1, | 1:27 0WAIT_F1: table: `0WAIT_F1` is not an action
wait for nothing | WAITS | 0F1, | 0F1,0WAIT, | 1:27 0WAIT: table: `0WAIT` is not an action
a letter missing | WAITS | 0WAIT_SEND_F0 | 0WAITSEND_F0 | 1:49 0WAITSEND_F0: table: `0WAITSEND_F0` is not an action
lower case | WAITS | 0WAIT_SEND_F0 | 0wait_send_f0 | 1:49 0wait_send_f0: table: `0wait_send_f0` is not an action
junk behind a wait | WAITS | 0WAIT_SEND_F0 | 0WAIT_SEND_F0x | 1:49 0WAIT_SEND_F0x: table: `0WAIT_SEND_F0x` is not an action
negative microbatch | WAITS | 0WAIT_SEND_F0 | 0WAIT_SEND_F-1 | 1:49 0WAIT_SEND_F-1: table: `0WAIT_SEND_F-1` is not an action
no stage | WAITS | 1WAIT_SEND_B0 | WAIT_SEND_B0 | 2:102 WAIT_SEND_B0: table: `WAIT_SEND_B0` is not an action
two waits in a cell | WAITS | 1WAIT_SEND_B0,1WAIT_SEND_B1 | 1WAIT_SEND_B0;1WAIT_SEND_B1 | 2:102 1WAIT_SEND_B0;1WAIT_SEND_B1: table: `1WAIT_SEND_B0;1WAIT_SEND_B1` is not an action
blank among waits | WAITS | 1WAIT_SEND_B0, | 1WAIT_SEND_B0,, | 2:116 : table: a blank cell: only tables without communication have these
wait in a group before its send | WAITS | 0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1 | (0WAIT_SEND_F1;0WAIT_SEND_F0)OVERLAP_F_B,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1 | 1:28 0WAIT_SEND_F1: wait: `0WAIT_SEND_F1` on rank 0 comes before `0SEND_F1`, for which it waits
send twice, and waited for twice | WAITS | 0WAIT_SEND_F0 | 0WAIT_SEND_F0,0SEND_F0,0WAIT_SEND_F0 | 1:63 0SEND_F0: repeated-send: `0SEND_F0` is sent twice
send twice | WAITS | 0SEND_F0 | 0SEND_F0,0SEND_F0 | 1:23 0SEND_F0: repeated-send: `0SEND_F0` is sent twice
reduction twice, each waited for | WAITS | 0WAIT_REDUCE_GRAD | 0WAIT_REDUCE_GRAD,0REDUCE_GRAD,0WAIT_REDUCE_GRAD | 1:121 0REDUCE_GRAD: reduce-grad: `0REDUCE_GRAD` on rank 0 comes twice
reduction too early | WAITS | 0B1,0WAIT_SEND_F1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD | 0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0B1,0WAIT_SEND_F1 | 1:72 0REDUCE_GRAD: reduce-grad: `0REDUCE_GRAD` on rank 0 comes before the last backward of its stage
two reductions at a time | WAITS_ON_ONE | 1WAIT_REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD | 1RESHARD,0B0,0REDUCE_GRAD,1WAIT_REDUCE_GRAD | 1:57 0REDUCE_GRAD: wait: `0REDUCE_GRAD` on rank 0 begins while `1REDUCE_GRAD` is under way
waits of reductions exchanged | WAITS_ON_ONE | 1WAIT_REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD, | 0WAIT_REDUCE_GRAD,1RESHARD,0B0,0REDUCE_GRAD,1WAIT_REDUCE_GRAD, | 1:44 0WAIT_REDUCE_GRAD: wait: `0WAIT_REDUCE_GRAD` on rank 0 comes before `0REDUCE_GRAD`, for which it waits
waits that wait for each other | WAITS | WAITS | EACH_OTHER | 2:27 1WAIT_SEND_B0: deadlock: ranks 0-1 wait for each other
a wait in a ring of ranks | WAITS | WAITS | RING | 2:23 1RECV_B0: deadlock: ranks 0-2 wait for each other
wait in a table without transfers | GOOD | 0F0 | 0F0,0WAIT_SEND_F0 | 1:5 0WAIT_SEND_F0: wait: `0WAIT_SEND_F0` on rank 0 waits for `0SEND_F0`, which the rank does not have
receive missing | WAITS | 1RECV_F1, | | 2:23 1F1: order: `1F1` on rank 1 runs before `1RECV_F1`
receives exchanged | WAITS | 1RECV_F0,1F0,1RECV_F1 | 1RECV_F1,1RECV_F0,1F0 | 2:10 1RECV_F1: mismatched-transfer: rank 1 receives `1RECV_F1` where rank 0 sends `0SEND_F0`
UNSHARD missing | WAITS | 0UNSHARD, | | 1:1 0F0: unshard: stage 0 runs on rank 0 without its weights
RESHARD missing | WAITS | ,0RESHARD | | 1:1 0UNSHARD: unshard: the weights of stage 0 are never dropped
""",
    {
        "GOOD": GOOD,
        "WAITS": WAITS,
        "WAITS_ON_ONE": WAITS_ON_ONE,
        "EACH_OTHER": EACH_OTHER,
        "RING": RING,
    },
)


def place(error: CompileError) -> str:
    """The row, the column and the text of the first thing that is wrong, and the reason."""
    first = error.diagnostics[0]
    assert first.source is not None
    span = first.labels[0].span
    row, column = first.source.position(span.start)
    text = first.source.text[span.start : span.end]
    return f"{row}:{column} {text}: {first.code}: {first.message}"


@pytest.mark.parametrize("defect", MALFORMED)
def test_a_malformed_table_gives_row_and_cell_and_reason(defect: str) -> None:
    good, old, new, expected = MALFORMED[defect]
    assert old in good
    imported(good)
    with pytest.raises(CompileError) as caught:
        imported(good.replace(old, new, 1))
    assert place(caught.value) == expected


@pytest.mark.parametrize("transport", ["portable", "gloo", "nccl", "nccl-eager"])
def test_waits_that_wait_for_each_other_are_told_with_both_cells(
    transport: str,
) -> None:
    with pytest.raises(CompileError) as caught:
        imported(EACH_OTHER, transport)
    assert str(caught.value) == (
        "error[deadlock]: ranks 0-1 wait for each other\n"
        " --> table.csv:2:27\n"
        "  |\n"
        "1 | 0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0WAIT_SEND_F0\n"
        "  |                                         -------- until rank 0 comes here, to `0RECV_B0`\n"
        "  |                           ------------- rank 0 waits here, at `0WAIT_SEND_F1`\n"
        "2 | 1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1\n"
        "  |                           ^^^^^^^^^^^^^ rank 1 waits here, at `1WAIT_SEND_B0`\n"
        "  |                                         -------- until rank 1 comes here, to `1RECV_F1`\n"
        "  |\n"
        "  = help: a wait for a send belongs behind all that the other rank needs before its receive, "
        "as behind the backward of its stage and microbatch, or at the end of the row"
    )


def test_a_wait_is_all_that_hangs() -> None:
    with pytest.raises(CompileError, match="rank 0 waits here, at `0WAIT_SEND_F1`"):
        imported(RING, "gloo")
    imported(RING_RUNS, "gloo")


def without_waits(text: str) -> str:
    return re.sub(r",\d+WAIT_\w+", "", text)


@pytest.mark.parametrize("name", EXPORTABLE)
def test_dialects_differ_by_waits(name: str) -> None:
    for size in SIZES_OF.get(name, SIZES):
        old, new = (
            export_table(program(name, *size), "torch-csv", each) for each in DIALECTS
        )
        assert without_waits(new) == old
        assert [read_table(table(text)).has_waits for text in (old, new)] == [
            False,
            True,
        ]


def waits_of(plan: Plan, costs: Costs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the waits for sends in a plan's table: whether each stands at the end of its row, when its
    rank comes to it, and when it goes on.
    """
    schedule = _schedule(read_table(table(export_table(plan, "torch-csv", "2.15"))))
    events = transport_events(schedule, costs, LOOSEST)
    columns = schedule.columns
    rows = columns.where(Kind.WAIT_SEND_F, Kind.WAIT_SEND_B)
    ops = columns.where(Kind.F, Kind.B, Kind.I, Kind.W)
    last_op = np.array(
        [ops[columns.rank[ops] == rank][-1] for rank in range(len(plan.ranks))]
    )
    items = events.item[rows]
    comes = events.graph.times_of(events.graph.begin[items])
    return rows > last_op[columns.rank[rows]], comes, events.graph.ends[items]


@pytest.mark.parametrize("name", EXPORTABLE)
def test_no_wait_of_an_export_takes_time(name: str) -> None:
    """However long ops and transfers take; but at the end, where there is nothing left to do."""
    rng = random.Random(name)
    for size in SIZES_OF.get(name, SIZES):
        plan = program(name, *size)
        stages = len(plan.placement)
        costs = Costs(
            forward_times=tuple(rng.choice([0.5, 1, 3]) for _ in range(stages)),
            backward_times=tuple(rng.choice([1, 2, 5]) for _ in range(stages)),
            p2p_time=rng.choice([0, 0.25, 4]),
        )
        is_at_end, comes, ends = waits_of(plan, costs)
        # A rank goes on from a wait the moment it comes to it.
        assert (ends[~is_at_end] == comes[~is_at_end]).all()
        assert len(plan.ranks) < 2 or (~is_at_end).any()


def test_a_version_reads_the_newest_dialect_that_it_knows() -> None:
    versions = ("2.13.0", "2.14.1+cu128", "2.15.0+cpu", "2.16.0a0+git1234", "3.0")
    assert [dialect_of(version) for version in versions] == [
        "2.13",
        "2.13",
        "2.15",
        "2.15",
        "2.15",
    ]
    with pytest.raises(ValueError, match=r"torch 2\.9\.1 is older than 2\.13"):
        dialect_of("2.9.1")
    with pytest.raises(ValueError, match=r"`dialect` is '2\.14'"):
        export_table(program("1f1b", 2, 4), "torch-csv", "2.14")


def test_no_plan_has_waits(tmp_path: Path) -> None:
    """They are checked, and left out: a plan's file has no such action."""
    plan = imported(WAITS)
    assert texts(plan) == texts(imported(without_waits(WAITS)))
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    text = path.read_text()
    path.write_text(text.replace("1SEND_B1", "1WAIT_SEND_B1"))
    with pytest.raises(CompileError):
        read_plan(path)


def runs_to_its_end(rows: list[list[str]], placement: tuple[int, ...]) -> bool:
    """Whether ranks that do these cells one by one, as torch does, come to the end of their rows: a
    message is there once both ranks have come to it, and the n-th send from one rank to another
    meets the n-th receive.
    """
    begun: dict[tuple[int, int], dict[str, list[str]]] = {}
    at = [0] * len(rows)

    def is_over(rank: int, transfer: str) -> bool:
        # The n-th of one side is over once the other side has begun n as well.
        for (sender, receiver), sides in begun.items():
            for side, own, other in (
                ("SEND", sender, "RECV"),
                ("RECV", receiver, "SEND"),
            ):
                if own == rank and transfer in sides[side]:
                    return len(sides[other]) > sides[side].index(transfer)
        return False

    def may_go_on(rank: int, cell: str) -> bool:
        match = re.fullmatch(r"(\d+)([A-Z_]+?)(\d*)", cell)
        assert match is not None
        stage = int(match[1])
        kind = match[2]
        microbatch = match[3]
        other = stage + (1 if kind in ("SEND_F", "RECV_B") else -1)
        if kind.startswith(("SEND", "RECV")):
            ends = rank, placement[other]
            key = ends if kind.startswith("SEND") else ends[::-1]
            begun.setdefault(key, {"SEND": [], "RECV": []})[kind[:4]].append(cell)
            return True
        if kind.startswith("WAIT_SEND"):
            return is_over(rank, cell.replace("WAIT_", ""))
        receive = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}.get(kind)
        wanted = f"{stage}{receive}{microbatch}"
        return wanted not in rows[rank] or is_over(rank, wanted)

    moves = True
    while moves:
        moves = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and may_go_on(rank, row[at[rank]]):
                at[rank] += 1
                moves = True
    return at == list(map(len, rows))


def with_waits_anywhere(rows: list[list[str]], rng: random.Random) -> None:
    """Let receives wait until right before the ops that need them, and move waits to some place
    behind their sends.
    """
    for row in rows:
        for receive in [
            cell for cell in row if "RECV_F" in cell and rng.random() < 0.7
        ]:
            row.remove(receive)
            row.insert(row.index(receive.replace("RECV_", "")), receive)
        for wait in [
            cell for cell in row if "WAIT_SEND" in cell and rng.random() < 0.8
        ]:
            row.remove(wait)
            begin = row.index(wait.replace("WAIT_", "")) + 1
            row.insert(rng.randint(begin, min(begin + 4, len(row))), wait)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "hanayo", "zb_h1"])
def test_tables_with_waits_anywhere_hang_where_the_import_says(name: str) -> None:
    rng = random.Random(name)
    verdicts = []
    for _ in range(60):
        plan = program(name, *rng.choice([(2, 4), (3, 6), (4, 8)]))
        rows = [
            row.split(",")
            for row in export_table(plan, "torch-csv", "2.15").splitlines()
        ]
        with_waits_anywhere(rows, rng)
        text = "\n".join(map(",".join, rows))
        try:
            run_on(_schedule(read_table(table(text))), Costs(), LOOSEST)
            verdicts.append("runs")
        except CompileError as error:
            verdicts.append(error.diagnostics[0].code)
        # Messages that meet the wrong receives may well come to their end; only hangs are compared.
        if verdicts[-1] != "mismatched-transfer":
            assert (verdicts[-1] == "runs") == runs_to_its_end(rows, plan.placement), (
                text
            )
    assert {"runs", "deadlock"} <= set(verdicts)
