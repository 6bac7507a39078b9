"""Advice beside a standstill: who waits for whom and where, the smallest size, a repair; each held
to what it says.
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from schedlang import CompileError, Source, compile, read_plan, read_source, write_plan
from schedlang.advice.advice import WAITS, advise
from schedlang.advice.smallest import smallest
from schedlang.cli.main import main
from schedlang.diagnostics.rendering import to_json, to_text
from schedlang.schedule.transports import NAMES
from tests.support.paths import DIAGNOSTICS


def codes(source: Source, params: dict[str, int], transport: str) -> set[str]:
    try:
        compile(source, params, transport=transport)
    except CompileError as error:
        return {each.code for each in error.diagnostics}
    return set()


def advice(
    source: Source, params: dict[str, int], transport: str = "portable"
) -> dict[str, Any] | None:
    """The first standstill as machines read it, with advice."""
    try:
        compile(source, params, transport=transport)
    except CompileError as error:
        advised = advise(error, source, params, transport=transport)
        return next(
            (to_json(each) for each in advised.diagnostics if each.code in WAITS), None
        )
    return None


def loops(rng: random.Random) -> str:
    """A 1F1B loop with its communication, some of it in another order, batched or left out."""
    warm = ["recv F(m)", "F(m)", "send F(m)"]
    steady = [*warm, *[each.replace("F(m)", "B(m - warmup)") for each in warm]]
    if rng.random() < 0.3:
        warm = ["F(m)"]
        steady = ["F(m)", "B(m - warmup)"]
    cool = [each.replace("F(m)", "B(m)") for each in warm]
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(steady) - 1)
        a, b = steady[at : at + 2]
        both_transfers = all(each[:4] in ("send", "recv") for each in (a, b))
        steady[at : at + 2] = (
            [f"overlap {{ {a} {b} }}"]
            if both_transfers and rng.random() < 0.5
            else [b, a]
        )
        if len(steady) > 2 and rng.random() < 0.2:
            del steady[rng.randrange(len(steady))]
    ahead = rng.choice(
        [
            "ranks - 1 - r",
            "ranks - 1 - r",
            "r",
            "ranks - r",
            "max(ranks - 2 - r, 0)",
            "0",
        ]
    )
    return f"""schedule loops {{
    param ranks = 3
    param microbatches = 4
    rank r {{
        let warmup = min({ahead}, microbatches)
        for m in 0 .. warmup {{ {"  ".join(warm)} }}
        for m in warmup .. microbatches {{ {"  ".join(steady)} }}
        for m in microbatches - warmup .. microbatches {{ {"  ".join(cool)} }}
    }}
}}
"""


def standstills(
    count: int,
) -> Iterator[tuple[Source, dict[str, int], str, dict[str, Any]]]:
    rng = random.Random("standstills")
    for _ in range(count):
        source = Source("loops.sched", loops(rng))
        params = {"ranks": rng.randrange(2, 5), "microbatches": rng.randrange(1, 6)}
        transport = rng.choice(NAMES)
        found = advice(source, params, transport)
        if found:
            yield source, params, transport, found


def edited(source: Source, edits: list[dict[str, Any]]) -> Source:
    """The program with edits, from their lines and columns."""
    starts = [0, *(match.end() for match in re.finditer("\n", source.text))]
    text = source.text
    for edit in sorted(
        edits,
        key=lambda edit: (edit["start"]["line"], edit["start"]["column"]),
        reverse=True,
    ):
        begin, end = (
            starts[edit[side]["line"] - 1] + edit[side]["column"] - 1
            for side in ("start", "end")
        )
        text = text[:begin] + edit["text"] + text[end:]
    return Source(source.path, text)


@pytest.mark.slow
def test_what_is_advised_is_true() -> None:
    """A smallest size shows the mistake, and no smaller value of one parameter does; a repaired
    program is proved.
    """
    seen: dict[str, int] = {}
    for source, params, transport, found in standstills(150):
        sizes = [note for note in found["notes"] if "smallest" in note]
        small = {"ranks": 3, "microbatches": 4} if sizes else params
        small = small | {
            name: int(value)
            for note in sizes
            for name, value in re.findall(r"-p (\w+)=(\d+)", note)
        }
        assert bool(sizes) == (small != params)
        assert found["code"] in codes(source, small, transport), source.text
        for name in small:
            for value in range(1, small[name]):
                assert found["code"] not in codes(
                    source, small | {name: value}, transport
                ), source.text
        seen[found["code"]] = seen.get(found["code"], 0) + 1
        repair = found["repair"]
        if repair:
            assert not codes(
                edited(source, repair["edits"]),
                params,
                repair["transport"] or transport,
            ), source.text
            seen["repaired"] = seen.get("repaired", 0) + 1
    assert seen["deadlock"] > 10, seen
    assert seen["repaired"] > 10, seen
    assert seen["unmatched-receive"] > 2, seen


def test_the_search_for_the_smallest_size_is_bounded_by_counted_work() -> None:
    tried: list[int] = []
    assert (
        smallest(
            {"a": 10**9, "b": 10**9, "c": 0},
            lambda params: tried.append(params["a"]) or False,
        )
        is None
    )
    assert 100 < len(tried) < 1000
    assert smallest(
        {"a": 8, "b": 64, "c": 1}, lambda params: params["a"] >= 3 and params["b"] >= 5
    ) == {
        "a": 3,
        "b": 5,
        "c": 1,
    }
    assert (
        smallest({"a": 3, "b": 5}, lambda params: params["a"] >= 3 and params["b"] >= 5)
        is None
    )


def test_machines_read_who_waits_for_whom() -> None:
    path = DIAGNOSTICS / "deadlock_transfers.sched"
    found = advice(Source("s.sched", read_source(path).text), {})
    assert found
    assert found["waits"] == [
        {
            "rank": 0,
            "action": "0SEND_F1",
            "file": "s.sched",
            "line": 7,
            "column": 60,
            "variables": {"m": 1},
            "reason": "partner",
            "released_by": {
                "rank": 1,
                "action": "1RECV_F1",
                "file": "s.sched",
                "line": 7,
                "column": 43,
                "variables": {"m": 1},
            },
        },
        {
            "rank": 1,
            "action": "1SEND_B0",
            "file": "s.sched",
            "line": 7,
            "column": 105,
            "variables": {"m": 0},
            "reason": "partner",
            "released_by": {
                "rank": 0,
                "action": "0RECV_B0",
                "file": "s.sched",
                "line": 7,
                "column": 71,
                "variables": {"m": 1},
            },
        },
    ]


RING = """schedule ring {
    param ranks = 8
    param microbatches = 1
    stage s in 0 .. 2 * ranks on s % ranks
    rank r { for k in 0 .. 2 { F(r + ranks * (1 - k), 0) }  for k in 0 .. 2 { B(r + ranks * (1 - k), 0) } }
}
"""


def test_a_circle_of_many_ranks_is_two_lines_a_rank() -> None:
    with pytest.raises(CompileError) as caught:
        compile(Source("ring.sched", RING))
    text = to_text(caught.value.diagnostics[0])
    assert "ranks 0-7 wait for each other" in text
    for rank in range(8):
        assert (
            len(
                re.findall(
                    rf"rank {rank} waits here, at `\d+RECV_F0`, with k = 0$", text, re.M
                )
            )
            == 1
        )
        assert (
            len(
                re.findall(
                    rf"until rank {rank} comes here, to `\d+SEND_F0`, with k = [01]$",
                    text,
                    re.M,
                )
            )
            == 1
        )
    assert text.count("\n") < 24


@pytest.mark.slow
def test_every_wait_of_a_circle_ends_at_the_next_rank() -> None:
    circles = 0
    for _, _, _, found in standstills(60):
        if found["code"] == "deadlock":
            waits = found["waits"]
            assert [each["released_by"]["rank"] for each in waits] == [
                each["rank"] for each in [*waits[1:], waits[0]]
            ]
            assert len({each["rank"] for each in waits}) == len(waits) > 1
            circles += 1
    assert circles > 5


def test_loop_variables_are_those_of_the_op_that_a_transfer_comes_from() -> None:
    block = """schedule b {
    param ranks = 2
    param microbatches = 4
    block m every 6 { stage s in 0 .. ranks { F(s, m) at (ranks - 1 - s) * 3  B(s, m) at 1 + 2 * s } }
    squeeze
}
"""
    stream = """schedule s {
    param ranks = 2
    param microbatches = 2
    weights delay(1)
    rank r {
        let w = ranks - 1 - r
        warmup { for m in 0 .. w { recv F(m)  F(m)  send F(m) } }
        steady { for k in 0 .. microbatches { recv F(k + w)  F(k + w)  send F(k + w)  recv B(k)  B(k)  send B(k) }  U }
    }
}
"""
    shown = []
    for text in (block, stream):
        found = advice(Source("s.sched", text), {})
        assert found
        ends = [end for wait in found["waits"] for end in (wait, wait["released_by"])]
        shown.append([(end["action"], end["variables"]) for end in ends])
    assert shown[0] == [
        ("0RECV_B0", {"m": 0, "s": 0}),
        ("1SEND_B0", {"m": 0, "s": 1}),
        ("1RECV_F0", {"m": 0, "s": 1}),
        ("0SEND_F0", {"m": 0, "s": 0}),
    ]
    assert shown[1] == [
        ("0SEND_F1", {"k": 0}),
        ("1RECV_F1", {"k": 1}),
        ("1SEND_B0", {"k": 0}),
        ("0RECV_B0", {"k": 0}),
    ]


def test_a_plan_has_no_loop_variables_and_no_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = compile(
        read_source(DIAGNOSTICS / "deadlock_transfers.sched"), transport="buffered"
    )
    write_plan(evolve(plan, transport="blocking"), tmp_path / "plan.json")
    with pytest.raises(CompileError) as caught:
        read_plan(tmp_path / "plan.json")
    assert all(not wait.at.variables for wait in caught.value.diagnostics[0].waits)
    assert main(["check", str(tmp_path / "plan.json")]) == 1
    text = capsys.readouterr().err
    assert "rank 0 waits here, at `0SEND_F1`\n" in text
    assert "smallest" not in text
    assert "repair" not in text


def test_ranks_that_wait_for_each_other_at_first_uses() -> None:
    """Each of the pairs of three ranks is used first by one of its ranks, and by the other one
    second.
    """
    text = """schedule turns {
    param ranks = 3
    param microbatches = 3
    pipeline a runs 1 stage s in 0 .. 2 on s
    pipeline b runs 1 stage s in 0 .. 2 on s + 1
    pipeline c runs 1 stage s in 0 .. 2 on (s + 2) % 3
    rank r {
        if r == 0 { F(a(0), 0) send F(a(0), 0) recv F(c(1), 0) F(c(1), 0)
            B(c(1), 0) send B(c(1), 0) recv B(a(0), 0) B(a(0), 0) }
        if r == 1 { F(b(0), 0) send F(b(0), 0) recv F(a(1), 0) F(a(1), 0)
            B(a(1), 0) send B(a(1), 0) recv B(b(0), 0) B(b(0), 0) }
        if r == 2 { F(c(0), 0) send F(c(0), 0) recv F(b(1), 0) F(b(1), 0)
            B(b(1), 0) send B(b(1), 0) recv B(c(0), 0) B(c(0), 0) }
    }
}
"""
    source = Source("turns.sched", text)
    found = advice(source, {}, "nccl")
    assert found
    assert found["code"] == "first-use"
    assert (
        found["message"]
        == "ranks 0-2 wait for each other, each at the first use of a communicator"
    )
    assert [(each["rank"], each["released_by"]["rank"]) for each in found["waits"]] == [
        (0, 1),
        (1, 2),
        (2, 0),
    ]
    assert {each["reason"] for each in found["waits"]} == {"first use"}
    # On `nccl-eager` they would hang as well, so that is no repair of these, nor do they run
    # wherever ranks block.
    assert found["repair"]["transport"] == "nccl-edge"
    assert codes(source, {}, "nccl-eager") == {"deadlock"}
    assert not codes(source, {}, "nccl-edge")


def test_repairs_of_programs_that_import_are_edits_of_their_own_file(
    tmp_path: Path,
) -> None:
    (tmp_path / "lib.sched").write_text("stage s in 0 .. ranks on s\n")
    text = (DIAGNOSTICS / "deadlock_ops.sched").read_text()
    text = text.replace("    rank r", '    import "lib.sched"\n    rank r')
    source = Source(str(tmp_path / "main.sched"), text)
    found = advice(source, {})
    assert found
    assert not codes(edited(source, found["repair"]["edits"]), {}, "portable")


def test_labels_far_along_a_very_long_line_are_shown() -> None:
    ops = "F(0) send F(0) " + " ".join(f"F({m}) send F({m})" for m in range(1, 30))
    text = f"""schedule long {{
    param ranks = 2  param microbatches = 30
    rank r {{
        if r == 0 {{ recv B(0) {ops} B(0) for m in 1 .. 30 {{ recv B(m) B(m) }} }}
        if r == 1 {{ for m in 0 .. 30 {{ recv F(m) F(m) B(m) send B(m) }} }}
    }}
}}
"""
    with pytest.raises(CompileError) as caught:
        compile(
            Source(
                "long.sched",
                text.replace(
                    "recv B(0) F(0) send F(0)",
                    "recv B(0)" + " " * 300 + "F(0) send F(0)",
                ),
            )
        )
    shown = to_text(caught.value.diagnostics[0])
    assert "rank 0 waits here, at `0RECV_B0`" in shown
    assert "until rank 0 comes here, to `0SEND_F0`" in shown
    assert max(map(len, shown.splitlines())) < 260


def test_the_command_prints_advice_and_its_command_shows_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a ring.sched").write_text(RING)
    assert main(["check", "a ring.sched"]) == 1
    command = re.search(
        r"smallest size that shows it: `schedc (.*)`", capsys.readouterr().err
    )
    assert command
    assert command[1] == "compile 'a ring.sched' -p ranks=2"
    ops = str(DIAGNOSTICS / "deadlock_ops.sched")
    assert main(["compile", ops, "--format", "github"]) == 1
    assert capsys.readouterr().err.split("%0A")[1:] == [
        "line 5: rank 0 waits here, at `0RECV_B0`",
        "line 5: until rank 1 comes here, to `1SEND_B0`",
        "line 5: rank 1 waits here, at `1RECV_F1`",
        "line 5: until rank 0 comes here, to `0SEND_F1`",
        "repair: put `F(1)` (line 5) before `B(0)` (line 5): proved at this size\n",
    ]
    assert main(["compile", ops, "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().err)["diagnostics"][0]["repair"]["edits"][
        0
    ] == {
        "start": {"line": 5, "column": 26},
        "end": {"line": 5, "column": 26},
        "text": "F(1)  ",
    }


def test_an_empty_exchange_is_no_obstacle() -> None:
    text = """schedule s {
    param ranks = 2
    param microbatches = 1
    rank r { recv F(0)  F(0)  overlap { }  if r == 1 { send F(0) }  recv B(0)  B(0)  send B(0) }
}
"""
    found = advice(Source("s.sched", text), {})
    assert found
    assert found["code"] == "unmatched-receive"
    assert not codes(
        edited(Source("s.sched", text), found["repair"]["edits"]), {}, "portable"
    )


def test_the_smallest_size_keeps_to_what_the_program_requires() -> None:
    """Microbatch 5 is needed, and a multiple of the ranks; the cost of an op is not."""
    text = """schedule s {
    param ranks = 4
    param microbatches = 32
    param hidden = 4096
    require microbatches % ranks == 0
    cost F = hidden
    rank r {
        for m in 0 .. microbatches { if m == 5 and r == 0 { B(5) }  F(m) }
        for m in 0 .. microbatches { if m != 5 or r != 0 { B(m) } }
    }
}
"""
    found = advice(Source("s.sched", text), {})
    assert found
    command = "schedc compile s.sched -p ranks=2 -p microbatches=6 -p hidden=1"
    assert found["notes"] == [f"the smallest size that shows it: `{command}`"]
