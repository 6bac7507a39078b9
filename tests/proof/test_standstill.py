"""What ranks that stand still are told: which of them wait, where, and for whom."""

import pytest

from schedlang import CompileError, Source, compile
from schedlang.schedule.layout import Layout, Pipeline
from tests.support.written import BOTH_WAYS, labels, words, written, wrong


def test_each_receive_that_nothing_is_sent_to_is_told_at_its_place() -> None:
    plan = written(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1 1RECV_F1 1RECV_F0",
        microbatches=2,
        transport="gloo",
    )
    told = wrong(plan)
    assert [each.code for each in told] == ["unmatched-receive"] * 2
    assert [each.message for each in told] == [
        f"`1RECV_F{m}` on rank 1 is never sent: rank 0 has no `0SEND_F{m}` left"
        for m in (1, 0)
    ]
    assert [*map(words, told)] == [["1RECV_F1"], ["1RECV_F0"]]


CROSSING = """schedule crossing {
    param ranks = 2
    param microbatches = 2
    rank r {
        if r == 0 { %s }
        else { recv F(0)  F(0)  B(0)  send B(0)  recv F(1)  F(1)  B(1)  send B(1) }
    }
}"""


@pytest.mark.parametrize(
    "first",
    [
        "F(0)  send F(0)  F(1)  send F(1)  recv B(0)  B(0)  recv B(1)  B(1)",
        "F(0)  recv B(0)  send F(0)  B(0)  F(1)  send F(1)  recv B(1)  B(1)",
    ],
    ids=["send", "recv"],
)
def test_written_transfers_that_cross_are_to_be_exchanged(first: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile(Source("crossing.sched", CROSSING % first))
    (told,) = caught.value.diagnostics
    assert (told.code, told.message) == ("deadlock", "ranks 0-1 wait for each other")
    assert told.help == (
        "issue transfers that cross as one batch, `overlap { … }`, or in one order on both ranks"
    )


def test_ops_that_cross_are_to_be_put_in_another_order() -> None:
    text = """schedule crossing {
        param ranks = 2
        param microbatches = 2
        rank r { if r == 0 { F(0)  B(0)  F(1)  B(1) } else { F(1)  F(0)  B(0)  B(1) } }
    }"""
    with pytest.raises(CompileError) as caught:
        compile(Source("crossing.sched", text))
    (told,) = caught.value.diagnostics
    assert told.help == (
        "these ops cannot run in this order, whatever the communication: "
        "change the order of one rank"
    )


#: Rank 1 sends weights behind what it needs of rank 2, which waits for these; rank 0 waits for both.
RELAY = """schedule relay {
    param ranks = 3
    param microbatches = 2
    pipeline down runs 1 stage s in 0 .. 3 on (s + 1) % 3
    pipeline up runs 1 stage s in 0 .. 3 on (2 - s) % 3
    rank r {
        if r == 0 {
            recv F(down(2), 0)  F(down(2), 0)  B(down(2), 0)  send B(down(2), 0)
            recv F(up(2), 0)  F(up(2), 0)  B(up(2), 0)  send B(up(2), 0)
        }
        if r == 1 {
            recv F(up(1), 0)  F(up(1), 0)  send F(up(1), 0)
            send weights(down(0))  F(down(0), 0)  send F(down(0), 0)
            recv B(up(1), 0)  B(up(1), 0)  send B(up(1), 0)
            recv B(down(0), 0)  B(down(0), 0)  recv gradients(down(0))
        }
        if r == 2 {
            recv weights(up(0))  F(up(0), 0)  send F(up(0), 0)
            recv F(down(1), 0)  F(down(1), 0)  send F(down(1), 0)
            recv B(down(1), 0)  B(down(1), 0)  send B(down(1), 0)
            recv B(up(0), 0)  B(up(0), 0)  send gradients(up(0))  reshard(up(0))
        }
    }
}"""


def test_hops_are_no_transfers_that_could_be_exchanged() -> None:
    with pytest.raises(CompileError) as caught:
        compile(Source("relay.sched", RELAY))
    (told,) = caught.value.diagnostics
    assert told.message == "ranks 1-2 wait for each other"
    assert told.labels[0].text == (
        "rank 2 waits for its replicas here, at `up(0)RECV_WEIGHTS`"
    )
    assert told.help == (
        "these ops cannot run in this order, whatever the communication: "
        "change the order of one rank"
    )


def test_ranks_that_wait_until_what_they_sent_is_received() -> None:
    """Of several sends each, the one that is waited for."""
    plan = written(
        "0F0 0SEND_F0 0F1 0SEND_F1 0F2 0SEND_F2 0WAIT_SEND_F1 0RECV_B1 0B1 0RECV_B0 0B0 "
        "0RECV_B2 0B2 0WAIT_SEND_F0 0WAIT_SEND_F2",
        "1RECV_F0 1F0 1B0 1SEND_B0 1WAIT_SEND_B0 1RECV_F1 1F1 1RECV_F2 1F2 1B1 1SEND_B1 "
        "1B2 1SEND_B2 1WAIT_SEND_B1 1WAIT_SEND_B2",
        microbatches=3,
        transport="gloo",
    )
    (told,) = wrong(plan)
    assert told.message == "ranks 0-1 wait for each other"
    assert labels(told) == [
        ("1WAIT_SEND_B0", "rank 1 waits here, at `1WAIT_SEND_B0`"),
        ("0RECV_B0", "until rank 0 comes here, to `0RECV_B0`"),
        ("0WAIT_SEND_F1", "rank 0 waits here, at `0WAIT_SEND_F1`"),
        ("1RECV_F1", "until rank 1 comes here, to `1RECV_F1`"),
    ]


def test_an_optimizer_step_that_overlaps_with_what_it_waits_for() -> None:
    """The last gradient of stage 2 needs that of stage 3, which begins together with the step."""
    plan = written(
        "0F0 0SEND_F0 3RECV_F0 3F0 0RECV_B0 0B0 (3B0;0U) 3SEND_B0 3U",
        "1RECV_F0 2F0 2SEND_F0 1F0 1B0 1SEND_B0 2RECV_B0 2B0 1U 2U",
        layout=BOTH_WAYS,
    )
    (told,) = wrong(plan)
    assert labels(told) == [
        ("2RECV_B0", "rank 1 waits here, at `up(0)RECV_B0`"),
        ("3SEND_B0", "until rank 0 comes here, to `up(1)SEND_B0`"),
        ("0U", "rank 0 waits here for the sum of gradients, at `down(0)U`"),
        ("2B0", "until rank 1 comes here, to `up(0)B0`"),
    ]


def test_a_message_that_is_over_only_with_a_batch_that_it_meets() -> None:
    """Rank 2 receives by the skip before it sends the gradient that the batch of rank 1 waits for."""
    layout = Layout((0, 1, 2), (Pipeline("", 0, 3, 2),), skips=((0, 2),))
    plan = written(
        "0F0 0SEND_F0 3SEND_F0 0F1 0SEND_F1 3SEND_F1 3RECV_B0 0RECV_B0 0B0 3RECV_B1 0RECV_B1 0B1",
        "1RECV_F0 1F0 1SEND_F0 (1RECV_F1;1RECV_B0) 1F1 1SEND_F1 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1",
        "2RECV_F0 3RECV_F0 2F0 2B0 3RECV_F1 2SEND_B0 2RECV_F1 2F1 3SEND_B0 2B1 3SEND_B1 2SEND_B1",
        layout=layout,
    )
    (told,) = wrong(plan)
    assert told.message == "ranks 0-2 wait for each other"
    assert labels(told) == [
        ("1RECV_B0", "rank 1 waits here, at `1RECV_B0`"),
        ("2SEND_B0", "until rank 2 comes here, to `2SEND_B0`"),
        ("3RECV_F1", "rank 2 waits here, at `3RECV_F1`"),
        ("3SEND_F1", "until rank 0 comes here, to `3SEND_F1`"),
        ("0SEND_F1", "rank 0 waits here, at `0SEND_F1`"),
        ("1RECV_B0", "until rank 1 is done with the batch here, at `1RECV_B0`"),
    ]


def test_gathers_behind_what_their_replicas_wait_for() -> None:
    plan = written(
        "3UNSHARD 0UNSHARD 0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0 0RESHARD 3RESHARD",
        "1UNSHARD 1RECV_F0 1F0 2UNSHARD 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0 1RESHARD 2RESHARD",
        layout=BOTH_WAYS,
    )
    (told,) = wrong(plan)
    assert told.message == "ranks 0-1 wait for each other"
    assert labels(told) == [
        ("1RECV_F0", "rank 1 waits here, at `down(1)RECV_F0`"),
        ("0SEND_F0", "until rank 0 comes here, to `down(0)SEND_F0`"),
        ("0UNSHARD", "rank 0 waits for its replicas here, at `down(0)UNSHARD`"),
        ("2UNSHARD", "until rank 1 comes here, to `up(0)UNSHARD`"),
    ]
