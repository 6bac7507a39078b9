"""What a proof asks before it looks at any transport, or instead of that."""

import pytest

from schedlang import prove
from schedlang.proof.prove import simulate
from schedlang.schedule.layout import Layout, Pipeline
from schedlang.schedule.transports import transports
from tests.support.written import BOTH_WAYS, words, written, wrong


def test_what_is_no_schedule() -> None:
    with pytest.raises(TypeError) as caught:
        prove(3)  # type: ignore[arg-type]
    assert str(caught.value) == "`schedule` is 3: it must be a Schedule or a Plan"


def test_replicas_with_sums_and_without_their_messages() -> None:
    """Sums come to their end, and nothing that ops need of other ranks is sent."""
    plan = written(
        "0F0 3F0 3B0 0B0 0REDUCE_GRAD 3REDUCE_GRAD",
        "2F0 1F0 1B0 2B0 2REDUCE_GRAD 1REDUCE_GRAD",
        layout=BOTH_WAYS,
    )
    told = wrong(plan)
    assert {each.code for each in told} == {"order"}
    assert told[0].message == "`up(1)F0` on rank 0 runs before `up(1)RECV_F0`"


def test_replicas_with_a_message_that_nothing_needs() -> None:
    layout = Layout((0, 1), (Pipeline("down", 0, 1, 1), Pipeline("up", 1, 2, 1)))
    texts = ("0F0 0B0 0SEND_B0 0REDUCE_GRAD", "1F0 1B0 1REDUCE_GRAD")
    (told,) = wrong(written(*texts, layout=layout))
    assert told.message == "`down(0)SEND_B0` has no other rank to reach"
    assert words(told) == ["0SEND_B0"]


def test_what_is_no_transport() -> None:
    with pytest.raises(TypeError) as caught:
        transports(3)  # type: ignore[arg-type]
    assert str(caught.value) == (
        "`transport` is 3: it must be the name of a transport, such as 'portable'"
    )


def test_a_simulation_is_ideal_only_where_that_is_asked_for() -> None:
    plan = written("0F0 0B0")
    assert simulate(plan).transport == "gloo"
    assert simulate(plan, ideal=True).transport == "ideal"


def test_a_batch_whose_other_side_is_none_is_not_portable() -> None:
    """Though it is right where ranks block."""
    texts = (
        "0F0 0SEND_F0 0F1 (0SEND_F1;0RECV_B0) 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    assert not wrong(written(*texts, microbatches=2, transport="blocking"))
    (told,) = wrong(written(*texts, microbatches=2))
    assert told.message == "ranks 0-1 wait for each other"


def test_of_all_that_an_action_is_before_the_first_is_told() -> None:
    """Of a step the first gradient, as its rank makes it, though there are sends as well."""
    count = 20

    def each(text: str) -> str:
        return " ".join(text.replace("m", str(m)) for m in range(count))

    plan = written(
        f"{each('0SEND_Fm')} {each('0Fm')} 0U {each('0RECV_Bm 0Bm')}",
        f"{each('1RECV_Fm 1Fm')} {each('1Bm 1SEND_Bm')} 1U",
        microbatches=count,
    )
    told = wrong(plan)
    assert [diagnostic.code for diagnostic in told] == ["order"] * (count + 1)
    assert [diagnostic.message for diagnostic in told[-2:]] == [
        "`0SEND_F19` on rank 0 runs before `0F19`",
        "`0U` on rank 0 runs before `0B0`",
    ]
    assert told[-1].notes == (f"and {count - 1} more, on rank 0",)
