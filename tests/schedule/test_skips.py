"""Skips: what a stage makes for a later one that is not its neighbour, from the program to the
verdict.

Random schedules with skips are among those of `strategies.py` and `damage.py`, which most other
tests draw from; real processes are in `test_skip_models.py`.
"""

import json
import re
from pathlib import Path

import pytest
from attrs import evolve

from schedlang import (
    CompileError,
    Costs,
    Plan,
    Source,
    compile,
    prove,
    read_plan,
    read_source,
    simulate,
    write_plan,
)
from schedlang.cli.main import main
from schedlang.plan.text import parse_actions
from schedlang.ranks.lifetimes import frees
from tests.support.paths import PROGRAMS

UNET = read_source(PROGRAMS / "unet_1f1b.sched")


def program(items: str, ranks: int = 4, microbatches: int = 2) -> Source:
    """GPipe with some more items."""
    sizes = f"param ranks = {ranks} param microbatches = {microbatches}"
    rank = "rank r { for m in 0 .. microbatches { F(m) } for m in 0 .. microbatches { B(m) } }"
    return Source("s.sched", f"schedule s {{ {sizes} {items} {rank} }}")


def damaged(plan: Plan, rank: int, old: str, new: str) -> Plan:
    """A plan in whose actions something is replaced."""
    text = plan.ranks[rank].text()
    assert old in text
    changed = text.replace(old, new)
    sources = [0] * len(re.findall(r"\d+[A-Z]", changed))
    return evolve(
        plan,
        ranks=(
            *plan.ranks[:rank],
            parse_actions(changed, sources),
            *plan.ranks[rank + 1 :],
        ),
    )


def codes(plan: Plan) -> set[str]:
    try:
        prove(plan)
    except CompileError as error:
        return {each.code for each in error.diagnostics}
    return set()


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (
            "skip s in 0 .. 1 from 2 to 0",
            "the skip from stage 2 to stage 0 does not lead forward",
        ),
        (
            "skip s in 0 .. 1 from 2 to 2",
            "the skip from stage 2 to stage 2 does not lead forward",
        ),
        (
            "skip s in 0 .. 2 from s to s + 3",
            "the skip from stage 1 to stage 4 leads to no stage: there are stages 0",
        ),
        (
            "skip s in 0 .. 2 from s - 1 to 3",
            "the skip from stage -1 to stage 3 leads to no stage",
        ),
        (
            "skip s in 0 .. 3 from s to 3",
            "the skip from stage 2 to stage 3 leads to the next stage, which gets",
        ),
        (
            "skip s in 0 .. 2 from 0 to 2",
            "the skip from stage 0 to stage 2 is there already",
        ),
        (
            "skip s in 0 .. 1 from 0 to 3 skip t in 0 .. 2 from t to 3",
            "from stage 0 to stage 3 is there already",
        ),
    ],
)
def test_what_is_no_skip(items: str, message: str) -> None:
    with pytest.raises(CompileError, match=re.escape(message)) as caught:
        compile(program(items))
    assert [each.code for each in caught.value.diagnostics] == ["skip"]


def test_keywords_are_names_as_well() -> None:
    text = "let from = 0 let to = 2 fn skip(x) = x skip to2 in from .. 1 from skip(from) to to"
    assert compile(program(text)).layout.skips == ((0, 2),)


def test_each_skip_has_a_number_behind_those_of_all_stages() -> None:
    items = "pipeline down runs 1 stage s in 0 .. 4 on s pipeline up runs 1 stage s in 0 .. 4 on 3 - s "
    items += "skip s in 0 .. 2 from s to 3 skip s in 0 .. 1 from 0 to 2"
    with pytest.raises(
        CompileError, match="the skip from stage 1 to stage 3"
    ) as caught:
        compile(program(items.replace("0 .. 2 from s", "0 .. 2 from 1")))
    assert [each.code for each in caught.value.diagnostics] == ["skip"]
    ops = "rank r { F(down(r), 0) F(up(3 - r), 0) B(down(r), 0) B(up(3 - r), 0) }"
    plan = compile(
        Source(
            "s.sched",
            f"schedule s {{ param ranks = 4 param microbatches = 2 {items} {ops} }}",
        )
    )
    assert plan.layout.skips == ((0, 3), (1, 3), (0, 2))
    ends = {8: (0, 3), 9: (1, 3), 10: (0, 2), 11: (4, 7), 12: (5, 7), 13: (4, 6)}
    assert plan.layout.far_edges == ends
    for number, stages in ends.items():
        earlier, later = (
            plan.ranks[plan.placement[stage]].text().split() for stage in stages
        )
        assert {f"{number}SEND_F0", f"{number}RECV_B0"} <= {*earlier}
        assert {f"{number}RECV_F0", f"{number}SEND_B0"} <= {*later}


def test_no_message_within_a_rank() -> None:
    """In a V, the skips of a U-Net stay on their ranks, where what they hand on is held."""
    v = "schedule v { param ranks = 4 param microbatches = 1 stage s in 0 .. 8 on if s < 4 then s else 7 - s "
    skips = "skip s in 0 .. 3 from s to 7 - s "
    ops = "rank r { F(r, 0) F(7 - r, 0) B(7 - r, 0) B(r, 0) } }"
    skipping, plain = (
        compile(Source("v.sched", v + items + ops)) for items in (skips, "")
    )
    assert [actions.text() for actions in skipping.ranks] == [
        actions.text() for actions in plain.ranks
    ]
    assert "0F0 0SEND_F0 7RECV_F0 7F0 free(7RECV_F0, 0SEND_F0, 0F0>7F0)" in frees(
        skipping, 0
    )


@pytest.mark.parametrize(
    "transport",
    ["portable", "blocking", "gloo", "nccl", "nccl-eager", "nccl-edge", "buffered:1"],
)
def test_a_unet_runs_on_every_transport(transport: str) -> None:
    for ranks in range(2, 9):
        plan = compile(
            UNET,
            {"ranks": ranks, "microbatches": 2 * ranks},
            Costs(p2p_time=0.5),
            transport=transport,
        )
        sends = [
            text
            for actions in plan.ranks
            for text in re.findall(r"\d+SEND_[FB]\d+", actions.text())
        ]
        # Two for each microbatch, along the chain and by each skip.
        assert (
            len(sends)
            == len(set(sends))
            == 2 * ranks * 2 * (ranks - 1 + (ranks - 1) // 2)
        )


def test_skips_take_the_time_of_what_they_carry() -> None:
    """A message from stage 0 to stage 2, of which nothing else waits."""
    costs = Costs(boundary_bytes=(6, 1, 0), bandwidth_in_node=2.0)
    source = program("skip s in 0 .. 1 from 0 to 2", ranks=3, microbatches=1)
    timeline = simulate(compile(source), costs, ideal=True).timeline
    # 1 + 3 | 1 + 0.5 by the chain: the skip is there first, 4 after the first op; the last gradient
    # likewise.
    assert [bars.start[0] for bars in timeline.ranks] == [0, 4, 5.5]
    costs = Costs(
        boundary_bytes=(6, 1, 0),
        bandwidth_in_node=2.0,
        forward_times=(1, 0, 1),
        backward_times=(2, 0, 2),
    )
    starts = [
        bars.start[0]
        for bars in simulate(compile(source), costs, ideal=True).timeline.ranks
    ]
    assert starts == [0, 4, 4.5]


def test_damage_is_refused_and_the_skip_is_named() -> None:
    plan = compile(UNET, {"microbatches": 2})
    assert codes(plan) == set()
    named = "4 is the skip from stage 0 to stage 3"
    for rank, old, new, code in [
        (3, "4RECV_F0 ", "", "order"),
        (0, "4SEND_F0 ", "", "unmatched-receive"),
        (0, "4RECV_B0 ", "", "order"),
        (0, "4SEND_F0", "4SEND_F0 4SEND_F0", "repeated-send"),
        (0, "0F0 0SEND_F0 4SEND_F0", "4SEND_F0 0F0 0SEND_F0", "order"),
        (1, "1F0", "1F0 4SEND_F0", "not-on-this-rank"),
        (0, "4SEND_F0", "4RECV_F0", "not-on-this-rank"),
    ]:
        with pytest.raises(CompileError) as caught:
            prove(damaged(plan, rank, old, new))
        found = [each for each in caught.value.diagnostics if each.code == code]
        assert found, (new, caught.value)
        assert any(named in each.notes for each in found), found
    swapped = damaged(plan, 3, "4RECV_F0 4RECV_F1", "4RECV_F1 4RECV_F0")
    assert codes(swapped) == {"mismatched-transfer"}
    assert codes(evolve(swapped, transport="gloo")) == set()
    for word in ("4F0", "4B0", "5SEND_F0"):
        assert codes(damaged(plan, 0, "0F0", f"0F0 {word}")) == {"no-such-stage"}
    assert codes(damaged(plan, 0, "4SEND_F0", "4SEND_F2")) == {"no-such-microbatch"}


def test_transfers_that_a_program_writes_are_also_those_of_skips() -> None:
    source = read_source(PROGRAMS / "1f1b_explicit.sched")
    text = source.text.replace(
        "param microbatches = 8", "param microbatches = 8 skip s in 0 .. 1 from 0 to 3"
    )
    assert text != source.text
    plan = compile(Source("own.sched", text), transport="gloo")
    assert plan.ranks[3].text().startswith("3RECV_F0 4RECV_F0 3F0")
    with pytest.raises(CompileError) as caught:
        compile(Source("own.sched", text), transport="blocking")
    assert caught.value.diagnostics[0].code == "deadlock"


def test_passes_know_skips() -> None:
    """A `W` is put behind a `B` that also waits for what comes by a skip; `R` takes that in again."""
    text = "schedule s { param ranks = 4 param microbatches = 8 skip s in 0 .. 1 from 0 to 3 "
    order = (
        "rank r { repeat microbatches { F(next) } repeat microbatches { B(next) } } }"
    )
    passes = "fill W recompute 3 .. 4 ", "recompute 3 .. 4 "
    filled, plain = (compile(Source("s.sched", text + each + order)) for each in passes)
    assert simulate(filled).timeline.makespan < simulate(plain).timeline.makespan
    assert re.search(r"^3R0 free\(.*4RECV_F0", frees(filled, 3), re.M)


def test_a_schedule_without_a_flush_repeats_its_skips() -> None:
    source = read_source(PROGRAMS / "pipedream_2bw.sched")
    text = source.text.replace(
        "param microbatches = 4",
        "param microbatches = 4 skip s in 0 .. 2 from s to s + 2",
    )
    assert text != source.text
    plan = compile(Source("stream.sched", text))
    prove(plan.for_updates(plan.layout.updates + 3))
    assert "5SEND_F0" in plan.ranks[1].text()


def test_inference_has_the_skips_of_the_forwards() -> None:
    plan = compile(UNET, forward_only=True)
    assert plan.ranks[0].text().startswith("0F0 0SEND_F0 4SEND_F0")
    assert not any("_B" in actions.text() for actions in plan.ranks)


def test_a_plan_keeps_its_skips(tmp_path: Path) -> None:
    plan = compile(UNET)
    path = tmp_path / "plan.json"
    write_plan(plan, path)
    assert read_plan(path) == plan
    assert read_plan(path).digest == plan.digest
    document = plan.to_json()
    document["skips"] = []
    path.write_text(json.dumps(document))
    with pytest.raises(CompileError, match="no-such-stage"):
        read_plan(path)


def test_numbers_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", UNET.path, "-p", "ranks=6"]) == 0
    assert capsys.readouterr().out.splitlines()[1:4] == [
        "6 is the skip from stage 0 to stage 5",
        "7 is the skip from stage 1 to stage 4",
        "",
    ]
