"""Which send meets which receive, by plans that are right or wrong for that alone."""

import pytest
from attrs import evolve

from schedlang import simulate
from schedlang.lowering import lower
from schedlang.schedule.layout import Layout, Pipeline
from tests.support.written import labels, words, written, wrong


@pytest.mark.parametrize(
    ("transport", "codes"), [("buffered:1", ["deadlock"]), ("buffered:2", [])]
)
def test_a_second_message_waits_for_room(transport: str, codes: list[str]) -> None:
    """Two ranks that both send two messages before they receive any."""
    layout = Layout((0, 1, 1, 0), (Pipeline("down", 0, 2, 2), Pipeline("up", 2, 4, 2)))
    plan = written(
        "0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1 3B0 3SEND_B0 3B1 3SEND_B1 "
        "0RECV_B0 0B0 0RECV_B1 0B1",
        "2F0 2SEND_F0 2F1 2SEND_F1 1RECV_F0 1F0 1RECV_F1 1F1 2RECV_B0 2B0 2RECV_B1 2B1 "
        "1B0 1SEND_B0 1B1 1SEND_B1",
        layout=layout,
        transport=transport,
    )
    assert [each.code for each in wrong(plan)] == codes


def test_a_message_that_is_sent_twice_is_told_where_it_is_sent_again() -> None:
    plan = written(
        "0F0 0SEND_F0 0SEND_F0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1RECV_F0 1B0 1SEND_B0",
        transport="buffered",
    )
    told = wrong(plan)
    assert [each.code for each in told] == ["repeated-send"]
    assert told[0].message == "`0SEND_F0` is sent twice"
    assert words(told[0]) == ["0SEND_F0"]
    assert told[0].labels[0].span.start == len("0F0 0SEND_F0 ")


def test_messages_in_another_order_are_told_at_both_ends() -> None:
    plan = written(
        "0F0 0F1 0SEND_F1 0SEND_F0 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
        microbatches=2,
        transport="blocking",
    )
    told = wrong(plan)
    assert [each.message for each in told] == [
        "rank 1 receives `1RECV_F0` where rank 0 sends `0SEND_F1`",
        "rank 1 receives `1RECV_F1` where rank 0 sends `0SEND_F0`",
    ]
    assert labels(told[0]) == [
        ("1RECV_F0", ""),
        ("0SEND_F1", "`0SEND_F1` is next on this channel"),
    ]


def test_messages_of_other_ranks_are_other_ones_whatever_their_stages() -> None:
    """A forward of the last stage, from rank 0 to rank 2, and a backward of the first one, from
    rank 1 to rank 0.
    """
    placement = (0, 1, 1, 1, 1, 1, 0, 2)
    texts = [
        "0F0 6F0 6B0 0B0",
        "1F0 2F0 3F0 4F0 5F0 5B0 4B0 3B0 2B0 1B0",
        "7F0 7B0",
    ]
    plan = written(*texts, placement=placement)
    plan = evolve(lower(plan), transport="gloo")
    assert simulate(plan).timeline.makespan == 8 * 3
