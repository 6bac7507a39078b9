"""Torch's action tables, read and written; with torch itself, see test_torch_itself.py."""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlang import CompileError, Plan, Source, compile, read_plan, read_source
from schedlang.lowering import lower
from schedlang.plan.torch_tables import DIALECTS, export_table, plan_of, read_table
from tests.support.commands import exit_code, output
from tests.support.paths import CASES, PROGRAMS
from tests.support.strategies import oracle, schedules
from tests.support.tables import rows

#: What torch's tables have no word for.
REFUSED = {
    "1f1b_explicit": "batch of transfers: `(0SEND_F3;0RECV_B0)`",
    "1f1b_recompute": "recomputation: `0R0`",
    "mario": "recomputation: `0R0`",
    "af_pipe": "second pipeline",
    "bigmac": "second pipeline",
    "roundpipe": "second pipeline",
    "bitpipe": "second pipeline",
    "chimera": "second pipeline",
    "dualpipe": "second pipeline",
    "gems": "second pipeline",
    "forward_only": "forward without its backward",
    "decoding": "forward without its backward",
    "gpipe_groups": "optimizer step",
    "pipe_offload": "offload: `0OFFLOAD0`",
    "bpipe": "offload: `0OFFLOAD1`",
    "pipedream": "optimizer step: `0U0`",
    "pipedream_2bw": "optimizer step: `0U0`",
    "pipedream_replicated": "second pipeline",
    "pipedream_vertical": "optimizer step: `0U0`",
    "pipemare": "optimizer step: `0U0`",
    "wpipe": "optimizer step",
    "infinipipe": "slices of microbatches",
    "seq1f1b": "slices of microbatches",
    "terapipe": "slices of microbatches",
    "unet_1f1b": "skips from stage to stage",
    "frozen_1f1b": "frozen stages",
    "helixpipe": "second pipeline",
    "experts_1f1b": "exchange: `1EXCHANGE_F0`",
    "recycle": "second pipeline",
    "weipipe": "second pipeline",
    "two_encoders": "stages that are no chain",
    "distillation": "several models",
    "rlhf": "several models",
    "zeropp": "second sum of a stage's gradients: `4REDUCE_GRAD`",
    "vocabulary_parallel": "stages that are no chain",
}
EXPORTABLE = sorted({path.stem for path in PROGRAMS.glob("*.sched")} - set(REFUSED))
#: Ranks and microbatches.
SIZES = [(2, 4), (2, 8), (3, 6), (4, 8), (5, 10), (6, 12), (7, 14), (8, 16)]
#: Those of programs that are for one number of ranks, or for more microbatches.
SIZES_OF = {"1f1b_uneven": [(4, 3), (4, 8)], "stp": [(2, 5), (3, 8), (4, 12), (8, 24)]}


@cache
def program(name: str, ranks: int, microbatches: int) -> Plan:
    return compile(name, {"ranks": ranks, "microbatches": microbatches})


def table(text: str) -> Source:
    return Source("table.csv", text.replace("\r\n", "\n"))


def imported(text: str, transport: str = "portable") -> Plan:
    return plan_of(read_table(table(text)), transport)


def texts(plan: Plan) -> list[str]:
    return [actions.text() for actions in plan.ranks]


def computes(plan: Plan) -> list[str]:
    return [actions.compute().without_collectives().text() for actions in plan.ranks]


@pytest.mark.parametrize("name", EXPORTABLE)
def test_round_trip(name: str) -> None:
    for size in SIZES_OF.get(name, SIZES):
        plan = program(name, *size)
        for dialect in DIALECTS:
            back = imported(export_table(plan, "torch-csv", dialect))
            assert (texts(back), back.layout) == (texts(plan), plan.layout)
        back = imported(export_table(plan, "torch-csv-compute"))
        assert (computes(back), back.layout) == (computes(plan), plan.layout)


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_cannot_say_is_refused(name: str) -> None:
    with pytest.raises(CompileError) as caught:
        export_table(compile(name), "torch-csv")
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "torch-table"
    assert REFUSED[name] in diagnostic.message


def test_torch_places_the_transfers_of_batches_itself() -> None:
    plan = program("1f1b_explicit", 3, 4)
    assert computes(imported(export_table(plan, "torch-csv-compute"))) == computes(plan)


def test_rounded_messages_are_refused() -> None:
    text = """schedule rounded { param ranks = 2 param microbatches = 1 send bf16
        rank r { F(0)  B(0) }
    }"""
    with pytest.raises(CompileError, match="have no rounding of messages"):
        export_table(compile(Source("rounded.sched", text)), "torch-csv")


def test_losses_are_numbered_by_the_order_of_forwards() -> None:
    plan = imported("0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n")
    with pytest.raises(
        CompileError,
        match="other order of microbatches on the last stage: `1F1` before `1F0`",
    ):
        export_table(plan, "torch-csv")


def test_weights_are_there_from_the_first_op_to_the_last() -> None:
    assert export_table(program("1f1b_v", 1, 2), "torch-csv", "2.13") == (
        "0UNSHARD,0F0,1UNSHARD,1F0,1B0,0B0,0F1,1F1,1B1,1REDUCE_GRAD,1RESHARD,0B1,0REDUCE_GRAD,0RESHARD\r\n"
    )
    assert export_table(program("1f1b_v", 1, 2), "torch-csv", "2.15") == (
        "0UNSHARD,0F0,1UNSHARD,1F0,1B0,0B0,0F1,1F1,1B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1RESHARD,"
        "0B1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\r\n"
    )


# Every malformed table of which torch was seen to hang, crash, or train wrong; and others. Those
# with waits, which torch 2.15 has, are in test_torch_waits.py.
GOOD = "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"
HALVES = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1F1,1I0,1W0,1I1,1W1\n"
COMMS = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n"
)


def defects(text: str, good: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Malformed tables by their defects: the cells of each row, with good tables by their names."""
    return {
        title: tuple(good.get(cell, cell.replace("\\n", "\n")) for cell in cells)
        for title, *cells in rows(text)
    }


#: The defect: the code of the first diagnostic, a good table, and what is replaced in it.
MALFORMED = defects(
    r"""
forward missing | missing-op | GOOD | 1F1, |
backward missing | missing-op | GOOD | ,0B1 |
backward before forward | order | GOOD | 1F1,1B0,1B1 | 1B1,1B0,1F1
W before I | order | HALVES | 0I0,0W0 | 0W0,0I0
I without W | missing-op | HALVES | ,0W1 |
forward twice | repeated-op | GOOD | 0F0 | 0F0,0F0
backward twice | repeated-op | GOOD | 0B0 | 0B0,0B0
B beside I and W | repeated-op | HALVES | 0I1,0W1 | 0B0
deadlock | deadlock | GOOD | 0F1,0B0 | 0B0,0F1
microbatch out of range | placement | GOOD | 0F1 | 0F7
stage out of range | placement | GOOD | 1F1 | 9F1
stage on two ranks | placement | GOOD | 0B1\n | 0B1,1B1\n
row missing | placement | GOOD | 0F0,0F1,0B0,0B1\n |
trailing blank line | table | GOOD | 1B1\n | 1B1\n\n
blank line | table | GOOD | 0B1\n | 0B1\n\n
only blanks | table | GOOD | 0B1\n | 0B1\n , ,\n
empty | table | GOOD | GOOD |
junk behind an action | table | GOOD | 0F0 | 0F0junk
two actions in a cell | table | GOOD | 0B0,0B1 | 0B0;0B1
negative microbatch | table | GOOD | 0F1 | 0F-1
no microbatch | table | GOOD | 0F1 | 0F
header | table | GOOD | 0F0 | rank 0\n0F0
lower case | table | GOOD | 0F0 | 0f0
one quote | table | GOOD | 0F0 | "0F0
a V in the wrong order | deadlock | 0F0,2F0,2B0,0B0\n1F0,1B0\n | 0F0,2F0 | 2F0,0F0
one transfer among compute | order | GOOD | 0F0 | 0F0,0SEND_F0
receive missing | order | COMMS | 1RECV_F1, |
send missing | unmatched-receive | COMMS | 0SEND_F1, |
cyclic wait | deadlock | COMMS | 0F1,0SEND_F1,0RECV_B0,0B0 | 0RECV_B0,0B0,0F1,0SEND_F1
send twice | repeated-send | COMMS | 0SEND_F0 | 0SEND_F0,0SEND_F0
receive twice | mismatched-transfer | COMMS | 1RECV_F0 | 1RECV_F0,1RECV_F0
receives swapped | mismatched-transfer | COMMS | 1RECV_F0,1F0,1RECV_F1 | 1RECV_F1,1RECV_F0,1F0
sends swapped | mismatched-transfer | COMMS | 0SEND_F0,0F1,0SEND_F1 | 0F1,0SEND_F1,0SEND_F0
gradients swapped | mismatched-transfer | COMMS | 0RECV_B0,0B0,0RECV_B1 | 0RECV_B1,0RECV_B0,0B0
one REDUCE_GRAD missing | reduce-grad | COMMS | 1REDUCE_GRAD, |
REDUCE_GRAD too early | reduce-grad | COMMS | 0B1,0REDUCE_GRAD | 0REDUCE_GRAD,0B1
REDUCE_GRAD twice | reduce-grad | COMMS | 0REDUCE_GRAD | 0REDUCE_GRAD,0REDUCE_GRAD
REDUCE_GRAD of another rank | not-on-this-rank | COMMS | 0REDUCE_GRAD | 0REDUCE_GRAD,1REDUCE_GRAD
send before its forward | order | COMMS | 0F0,0SEND_F0 | 0SEND_F0,0F0
blank among transfers | table | COMMS | 0F0, | 0F0,,
send to the own rank | unmatched-send | 0F0,1F0,1B0,0B0\n | 0F0 | 0F0,0SEND_F0
send past the last stage | unmatched-send | COMMS | 1F0, | 1F0,1SEND_F0,
transfer of another rank | not-on-this-rank | COMMS | 0SEND_F0 | 1SEND_F0
UNSHARD missing | unshard | COMMS | 0UNSHARD, |
UNSHARD too late | unshard | COMMS | 0UNSHARD,0F0 | 0F0,0UNSHARD
UNSHARD twice | unshard | COMMS | 0F1 | 0UNSHARD,0F1
RESHARD missing | unshard | COMMS | ,0RESHARD |
RESHARD too early | unshard | COMMS | 0B1,0REDUCE_GRAD,0RESHARD | 0RESHARD,0B1,0REDUCE_GRAD
UNSHARD of no stage | no-such-stage | COMMS | 0F0 | 7UNSHARD,0F0
UNSHARD of a microbatch | table | COMMS | 0UNSHARD | 0UNSHARD0
nothing but UNSHARD | placement | GOOD | GOOD | 0UNSHARD,0RESHARD\n
empty group | table | GOOD | 0F1 | ()OVERLAP_F_B
group of nothing | table | GOOD | 0F1 | (0F1)
group in a group | table | GOOD | 0F1 | ((0F1))OVERLAP_F_B
open group | table | GOOD | 0F1 | (0F1;0B0OVERLAP_F_B
group with an empty place | table | GOOD | 0F1,0B0 | (0F1;0B0;)OVERLAP_F_B
junk behind a group | table | GOOD | 0F1 | (0F1)OVERLAP_F_B1
overlap of what depends | order | 0F0,0B0\n | 0F0,0B0 | (0F0;0B0)OVERLAP_F_B
very many stages | placement | GOOD | 1F1 | 999999999F1
very many microbatches | placement | GOOD | 1F1 | 1F999999999
""",
    {"GOOD": GOOD, "HALVES": HALVES, "COMMS": COMMS},
) | {"a number too long": ("table", GOOD, "0F0", "0F" + "1" * 5000)}


@pytest.mark.parametrize("defect", MALFORMED)
def test_malformed_tables_are_refused(defect: str) -> None:
    code, good, old, new = MALFORMED[defect]
    assert old in good
    imported(good)
    with pytest.raises(CompileError) as caught:
        imported(good.replace(old, new, 1))
    assert caught.value.diagnostics[0].code == code
    assert all(each.labels or each.file for each in caught.value.diagnostics)


def test_messages_point_at_cells() -> None:
    with pytest.raises(CompileError) as caught:
        imported(GOOD.replace("0F1,0B0", "0B0,0F1"))
    assert str(caught.value) == (
        "error[deadlock]: ranks 0-1 wait for each other\n"
        " --> table.csv:1:5\n"
        "  |\n"
        "1 | 0F0,0B0,0F1,0B1\n"
        "  |     ^^^ rank 0 waits here, at `0RECV_B0`\n"
        "  |         --- until rank 0 comes here, to `0SEND_F1`\n"
        "2 | 1F0,1F1,1B0,1B1\n"
        "  |         --- until rank 1 comes here, to `1SEND_B0`\n"
        "  |     --- rank 1 waits here, at `1RECV_F1`\n"
        "  |\n"
        "  = help: these ops cannot run in this order, whatever the communication: change the order of one rank"
    )
    with pytest.raises(CompileError) as caught:
        imported("0F0, 0X0 ,(0F1;0B)OVERLAP_F_B\n")
    places = [
        (each.labels[0].span.start, each.labels[0].span.end)
        for each in caught.value.diagnostics
    ]
    assert places == [(5, 8), (15, 17)]


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        # Torch takes the losses in the order of the forwards, and crashes on this.
        ("0F0,0F1,0B0,0B1\n1F1,1F0,1B1,1B0\n", ["0F0 0F1 0B0 0B1", "1F1 1F0 1B1 1B0"]),
        # Blanks, zeros in front, a group of one, no end of the last line.
        (
            "00F0,\t0F01 ,,0B0,0B1\n1F0,, (1F1)OVERLAP_F_B,1B0,1B1",
            ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"],
        ),
        # Torch runs a group one by one; with transfers, nothing in it overlaps.
        (
            COMMS.replace("0F1,0SEND_F1", "(0F1;0SEND_F1)OVERLAP_F_B"),
            ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"],
        ),
        ("0F0,(0F1 ; 0B0)OVERLAP_F_B,0B1", ["0F0 (0F1;0B0)OVERLAP_F_B 0B1"]),
    ],
)
def test_what_is_read(text: str, ranks: list[str]) -> None:
    assert computes(imported(text)) == ranks


@given(schedules(may_skip=False, may_freeze=False), st.data())
def test_a_table_that_is_accepted_computes_the_right_gradients(
    schedule: Plan, data: st.DataObject
) -> None:
    """A right table with cells dropped, doubled, or exchanged, is refused, or right again."""
    rows = [actions.text().split() for actions in lower(schedule).ranks if len(actions)]
    row = data.draw(st.sampled_from(rows))
    at = data.draw(st.integers(0, len(row) - 1))
    to = data.draw(st.integers(0, len(row) - 1))
    how = data.draw(st.sampled_from(["keep", "drop", "double", "move", "exchange"]))
    if how == "drop":
        del row[at]
    elif how == "double":
        row.insert(to, row[at])
    elif how == "move":
        row.insert(to, row.pop(at))
    elif how == "exchange":
        row[at], row[to] = row[to], row[at]
    try:
        plan = imported("\n".join(map(",".join, rows)))
    except CompileError:
        assert how != "keep"
        return
    assert oracle(plan)


@given(st.text('01FBIW,;() \n_SENDRCVU\r\t"x'))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        imported(text)
    except CompileError as error:
        str(error)


def test_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one_f_one_b = str(PROGRAMS / "1f1b.sched")
    assert (
        output(
            "export", one_f_one_b, "-p ranks=2 -p microbatches=2 --to torch-csv-compute"
        )
        == "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n"
    )
    assert (
        output(
            "export", one_f_one_b, "-p ranks=2 --to torch-csv --torch 2.15 -o table.csv"
        )
        == "wrote table.csv\n"
    )
    assert Path("table.csv").read_bytes().count(b"\r\n") == 2
    assert exit_code("import table.csv -o plan.json") == 0
    captured = capsys.readouterr()
    summary = "table: 2 ranks, 2 stages, 8 microbatches, 64 actions; no deadlock; 11.1% idle at unit costs\n"
    assert (captured.out, captured.err) == (f"{summary}wrote plan.json\n", "")
    assert texts(read_plan("plan.json")) == texts(program("1f1b", 2, 8))
    # Other versions of torch read another dialect.
    waits = Path("table.csv").read_text().count("WAIT_SEND")
    # A wait for each send, so that without the word `WAIT_` there are twice as many.
    assert (
        waits
        == Path("table.csv").read_text().replace("WAIT_", "").count("SEND") // 2
        > 0
    )
    as_json = "export plan.json --to torch-csv --format json --torch"
    versions = {"2.13": False, "2.14": False, "2.14.1+cpu": False, "2.15": True}
    for version, has_waits in versions.items():
        assert ("WAIT_SEND_F" in output(as_json, version)) == has_waits
    # A plan is exported like the program it comes from.
    assert exit_code("export plan.json --to torch-csv --torch 2.15 -o again.csv") == 0
    assert Path("again.csv").read_bytes() == Path("table.csv").read_bytes()
    capsys.readouterr()

    Path("old.csv").write_text(
        re.sub(
            r",\d(REDUCE_GRAD|WAIT_REDUCE_GRAD|RESHARD)",
            "",
            Path("table.csv").read_text(),
        )
    )
    assert exit_code("import old.csv") == 0
    captured = capsys.readouterr()
    assert captured.out == summary.replace("table", "old")
    assert captured.err.startswith("warning[unscaled]: `old.csv` has no REDUCE_GRAD")

    Path("bad.csv").write_text("0F0,0B0,x\n" * 30)
    assert exit_code("import bad.csv") == 1
    captured = capsys.readouterr()
    assert captured.err.count("error[table]") == 20
    assert captured.err.endswith(
        "30 errors, the first 20 are shown; see: schedc explain table\n"
    )
    assert exit_code("import absent.csv") == 2
    assert exit_code("export", one_f_one_b, "--to torch-csv -o absent/table.csv") == 2


#: What torch 2.13 writes for `defer_pp_recv=True`: named by schedule, ranks and microbatches.
DEFERRED = sorted((CASES / "torch_deferred").glob("*.csv"))


@pytest.mark.parametrize("path", DEFERRED, ids=lambda path: path.stem)
def test_deferred_receives_of_torch_train_wrong(path: Path) -> None:
    """It puts them in another order than the sends: seen to give wrong gradients, without an error."""
    with pytest.raises(CompileError) as caught:
        plan_of(read_table(read_source(path)))
    assert caught.value.diagnostics[0].code == "mismatched-transfer"


def older(plan: Plan, form: str) -> str:
    """A table of a plan in the letters of torch 2.5 and 2.6."""
    table = export_table(plan, form, "2.13")
    whole = re.sub(r"(\d)B(\d)", r"\1BW\2", table)
    return re.sub(r"(\d)I(\d)", r"\1B\2", whole)


@pytest.mark.parametrize("form", ["torch-csv", "torch-csv-compute"])
@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_zb", "dualpipe_v"])
def test_older_letters_of_torch_are_read(name: str, form: str) -> None:
    """Only halves, only whole backwards, both, and both in one cell."""
    plan = program(name, 4, 8)
    written = older(plan, form)
    assert written != export_table(plan, form, "2.13")
    assert texts(imported(written)) == texts(imported(export_table(plan, form, "2.13")))


def test_quoted_cells_are_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As spreadsheets and other writers of CSV have them."""
    monkeypatch.chdir(tmp_path)
    table = export_table(program("1f1b", 2, 4), "torch-csv-compute")
    quoted = re.sub(r"\w+", r'"\g<0>"', table)
    assert quoted.count('"') == 2 * len(table.replace(",", " ").split())
    assert texts(imported(quoted)) == texts(imported(table))
    Path("quoted.csv").write_text(quoted.replace('"1F0"', '"1X0"'))
    assert exit_code("import quoted.csv") == 1
    assert "`1X0` is not an action" in capsys.readouterr().err


def install_torch(folder: Path, version: str) -> None:
    """What Python's packages say of themselves, for a torch that is not there."""
    about = folder / f"torch-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    )


def test_the_installed_torch_decides_the_dialect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "export 1f1b -p ranks=2 --to torch-csv"
    assert exit_code(command) == 0
    by_default = capsys.readouterr().out
    assert output(command, "--torch", metadata.version("torch")) == by_default
    plan = program("1f1b", 2, 8)
    assert export_table(plan, "torch-csv") == by_default

    # An installed package is a folder with its version.
    for version, dialect in (("2.14.0", "2.13"), ("2.15.1+cpu", "2.15")):
        install_torch(tmp_path / version, version)
        monkeypatch.syspath_prepend(tmp_path / version)
        assert export_table(plan, "torch-csv") == export_table(
            plan, "torch-csv", dialect
        )
    install_torch(tmp_path / "old", "2.9.1")
    monkeypatch.syspath_prepend(tmp_path / "old")
    with pytest.raises(SystemExit):
        exit_code(command)
    assert "say with --torch which one" in capsys.readouterr().err
    # Compute ops alone are the same for all.
    assert exit_code(f"{command}-compute") == 0


@pytest.mark.parametrize(
    "events",
    [
        [[{"type": "F", "rank": 0, "minibatch": 0, "start_time": 0, "completion_time": 1}]],
        [{"start_time": 0.0, "completion_time": 1.0, "microbatch": 3, "type": "B"}],
        {"rank_0": [{"op": "F", "micro_batch": 0, "start": 1.5, "end": 2.5}]},
        {"fwd_start": [0.0, 1.0], "fwd_end": [0.5, 1.5], "fwd_minibatch": [0, 1]},
        {"1": {"total": 3.0, "bwd_start": [0.0], "bwd_end": [0.5]}},
    ],
)  # fmt: skip
def test_records_of_other_trainers_are_named(
    events: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Wherever they are given, with the way to what is read."""
    path = tmp_path / "events.json"
    path.write_text(json.dumps(events))
    commands = [["import", str(path)], ["simulate 1f1b --costs", str(path)]]
    for command in commands:
        assert exit_code(*command) in (1, 2)
        error = capsys.readouterr().err
        assert "another trainer's record of a schedule" in error
        assert "a row for each rank with cells such as `0F0`" in error
