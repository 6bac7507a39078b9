"""What a plan lacks, has twice or has where it must not: which of it is told, and where."""

import pytest

from schedlang.schedule.layout import Layout, Pipeline
from tests.support.written import words, written, wrong

#: Two stages, which are updated twice, after a microbatch each.
TWO_UPDATES = Layout((0, 1), (Pipeline("", 0, 2, 2),), updates=2)


def test_of_copies_that_are_wrong_that_of_the_first_op_is_told() -> None:
    """Gathers, which are of no microbatch, are no ops of the first one."""
    plan = written(
        "0UNSHARD 0F1 0F0 0OFFLOAD0 0OFFLOAD1 0B1 0B0 0RESHARD", microbatches=2
    )
    (told,) = wrong(plan)
    assert told.code == "offload"
    assert (
        told.message
        == "the activations of microbatch 1 on stage 0 are offloaded, and never reloaded"
    )
    assert words(told) == ["0OFFLOAD1"]


def test_what_is_dropped_and_never_brought_back_is_told_to_be_dropped() -> None:
    (told,) = wrong(written("0F0 0OFFLOAD0 0R0 0B0"))
    assert told.message == (
        "the activations of microbatch 0 on stage 0 are offloaded, but dropped after the forward: "
        "`R` makes them again"
    )


def test_ops_beside_an_update_are_told_of_any_rank() -> None:
    plan = written(
        "0F0 0SEND_F0 0RECV_B0 0B0 0U0 0F1 0SEND_F1 0RECV_B1 0B1 0U1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 (1F1;1U0) 1B1 1SEND_B1 1U1",
        layout=TWO_UPDATES,
    )
    (told,) = wrong(plan)
    assert (told.code, told.message) == (
        "overlap",
        "`1F1` overlaps with `1U0`, which changes the weights that it reads",
    )
    assert told.help == "write one behind the other"
    assert words(told) == ["1F1"]


@pytest.mark.parametrize("at_one_place", [False, True])
def test_ops_beside_updates_are_told_once_a_place(at_one_place: bool) -> None:
    plan = written(
        "0F0 0SEND_F0 0RECV_B0 0B0 (0U0;0F1) 0SEND_F1 0RECV_B1 0B1 0U1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 (1U0;1F1) 1B1 1SEND_B1 1U1",
        layout=TWO_UPDATES,
        at_one_place=at_one_place,
    )
    told = wrong(plan)
    if at_one_place:
        assert [each.notes for each in told] == [("and 1 more, on ranks 0-1",)]
    else:
        assert [*map(words, told)] == [["0F1"], ["1F1"]]


def test_an_update_that_the_last_stage_lacks() -> None:
    (told,) = wrong(
        written(
            "0F0 0SEND_F0 0RECV_B0 0B0 0U",
            "1RECV_F0 1F0 1B0 1SEND_B0",
        )
    )
    assert (told.code, told.message) == (
        "missing-op",
        "stage 1 never makes update 0, others do",
    )


def test_updates_that_are_lacking_are_counted() -> None:
    """Of stage 1 the first two of three, and of stage 2 the last; stage 0 is frozen and has none."""
    layout = Layout((0, 0, 0, 0), (Pipeline("", 0, 4, 3),), updates=3, frozen=(0,))
    ops = [
        f"0F{m} 1F{m} 2F{m} 3F{m} 3B{m} 2B{m} 1B{m} 3U{m} 2U{m} 1U{m}" for m in range(3)
    ]
    text = " ".join(ops)
    for update in ("1U0", "1U1", "2U2"):
        text = text.replace(f" {update}", "")
    (told,) = wrong(written(text, layout=layout, at_one_place=True))
    assert told.message == "stage 1 never makes update 0, others do"
    assert told.notes == ("and 2 more, on rank 0",)


SKIP = Layout((0, 1, 0), (Pipeline("", 0, 3, 1),), skips=((0, 2),))


@pytest.mark.parametrize(
    ("word", "code", "message"),
    [
        ("3F0", "no-such-stage", "`3F0` on rank 0: there are stages 0 to 2"),
        (
            "3SEND_F5",
            "no-such-microbatch",
            "`3SEND_F5` on rank 0: there are microbatches 0 to 0",
        ),
    ],
)
def test_the_number_of_a_skip_is_explained(word: str, code: str, message: str) -> None:
    plan = written(
        f"0F0 0SEND_F0 {word} 2RECV_F0 2F0 2B0 2SEND_B0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1SEND_F0 1RECV_B0 1B0 1SEND_B0",
        layout=SKIP,
    )
    (told,) = wrong(plan)
    assert (told.code, told.message) == (code, message)
    assert told.notes == ("3 is the skip from stage 0 to stage 2",)
    assert words(told) == [word]


def test_a_stage_that_there_is_not_beside_the_only_one() -> None:
    (told,) = wrong(written("0F0 5F0 0B0"))
    assert told.message == "`5F0` on rank 0: there are stages 0 to 0"
