"""Warnings beside a verdict: of several ranks, and where there is no reason to warn."""

from attrs import evolve

from schedlang import Plan, Source, compile
from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.plan.text import parse_actions
from schedlang.proof.lints import lint
from tests.support.strategies import make_schedule

#: Of GPipe on 3 ranks: what ranks 1 and 2 begin with, and the same with the receives turned round.
TURNED = {
    1: ("1RECV_F0 1F0 1SEND_F0 1RECV_F1", "1RECV_F1 1RECV_F0 1F0 1SEND_F0"),
    2: ("2RECV_F0 2F0 2RECV_F1", "2RECV_F1 2RECV_F0 2F0"),
}


def turned(*late: int) -> Plan:
    """GPipe on gloo, where some ranks receive in another order."""
    plan = compile("gpipe", {"ranks": 3, "microbatches": 3})
    ranks = list(plan.ranks)
    for rank in late:
        text = ranks[rank].text()
        # The test would say nothing if the plan of GPipe began otherwise.
        assert text.startswith(TURNED[rank][0])
        ranks[rank] = parse_actions(
            text.replace(*TURNED[rank]), list(ranks[rank].source)
        )
    return evolve(plan, ranks=tuple(ranks), transport="gloo")


def test_receives_in_another_order_are_told_of_all_ranks() -> None:
    """The first of each two ranks; what all have in common is said once."""
    assert not lint(turned())
    (one,) = lint(turned(2))
    assert (one.severity, one.code) == ("warning", "needs-tags")
    assert (
        one.message
        == "rank 2 receives `2RECV_F1` before `2RECV_F0`, which rank 1 sends first"
    )
    assert not one.notes
    (both,) = lint(turned(1, 2))
    assert (
        both.message
        == "rank 1 receives `1RECV_F1` before `1RECV_F0`, which rank 0 sends first"
    )
    assert both.notes == ("and 1 more, on ranks 1-2",)


SKIPPED = """schedule skipped {
    param ranks = 2
    param microbatches = 1
    stage s in 0 .. 4 on if s == 0 or s == 3 then 0 else 1
    skip s in 1 .. 2 from s to 3
    rank r { F(stage(0), 0)  F(stage(1), 0)  B(stage(1), 0)  B(stage(0), 0) }
}
"""


def test_a_receive_by_a_skip_says_what_its_number_is() -> None:
    plan = compile(Source("skipped.sched", SKIPPED), transport="gloo")
    first, second = plan.ranks
    text = first.text().replace("4RECV_F0 3RECV_F0", "3RECV_F0 4RECV_F0")
    ranks = (parse_actions(text, list(first.source)), second)
    (found,) = lint(evolve(plan, ranks=ranks))
    assert (
        found.message
        == "rank 0 receives `3RECV_F0` before `4RECV_F0`, which rank 1 sends first"
    )
    assert found.notes == ("4 is the skip from stage 1 to stage 3",)


def on_nccl(*texts: str) -> list[Diagnostic]:
    """The warnings of three ranks that do nothing but these transfers."""
    ranks = tuple(parse_actions(text, [0] * text.count("_")) for text in texts)
    return lint(evolve(make_schedule((0, 1, 2), 2, ranks), transport="nccl"))


BATCH = "(0SEND_F0;0RECV_B0)"
MIRROR = "(1RECV_F0;1SEND_B0)"


def test_batches_with_one_rank_and_single_transfers_with_another_are_not_mixed() -> (
    None
):
    """They take a communicator each, and no two ranks need two of them."""
    assert not on_nccl(BATCH, f"{MIRROR} 1SEND_F0", "2RECV_F0")
    (mixed,) = on_nccl(f"{BATCH} 0SEND_F1", f"{MIRROR} 1RECV_F1 1SEND_F0", "2RECV_F0")
    assert mixed.code == "mixed-transfers"
    assert mixed.message.startswith("ranks 0 and 1 exchange")
    assert not mixed.notes


def test_all_ranks_that_mix_transfers_are_told() -> None:
    both = f"{MIRROR} 1RECV_F1 (1SEND_F0;1RECV_B0) 1SEND_F1"
    (mixed,) = on_nccl(f"{BATCH} 0SEND_F1", both, "(2RECV_F0;2SEND_B0) 2RECV_F1")
    assert mixed.notes == ("and 1 more, on ranks 0-1",)


def test_a_batch_may_be_mixed_and_without_its_mirror_image() -> None:
    """The other rank issues alone what this one issues as one; on both warnings count."""
    warnings = on_nccl(f"{BATCH} 0SEND_F1", "1RECV_F0 1SEND_B0 1RECV_F1", "")
    assert [each.code for each in warnings] == ["asymmetric-batch", "mixed-transfers"]
