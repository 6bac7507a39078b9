"""Gathers, sums and hops to which ranks come in different orders: what is told, and where."""

from schedlang.schedule.layout import Layout, Pipeline
from tests.support.written import BOTH_WAYS, labels, written, wrong

OPS = (
    "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0",
    "1RECV_F0 2F0 2SEND_F0 1F0 1B0 2RECV_B0 1SEND_B0 2B0",
)


def test_sums_in_two_orders() -> None:
    plan = written(
        f"{OPS[0]} 0REDUCE_GRAD 3REDUCE_GRAD",
        f"{OPS[1]} 1REDUCE_GRAD 2REDUCE_GRAD",
        layout=BOTH_WAYS,
    )
    (told,) = wrong(plan)
    texts = [
        "rank 0 makes `down(0)REDUCE_GRAD` before `up(1)REDUCE_GRAD`",
        "rank 1 makes `down(1)REDUCE_GRAD` before `up(0)REDUCE_GRAD`",
    ]
    assert told.code == "collective"
    assert told.message == (
        f"ranks 0-1 come to gathers and sums in different orders: {', '.join(texts)}"
    )
    assert labels(told) == [("0REDUCE_GRAD", texts[0]), ("1REDUCE_GRAD", texts[1])]
    assert told.help == "write them in one order on all ranks that hold replicas"


def test_hops_that_cross() -> None:
    """Each rank sends the weights of its stage before it receives the other's."""
    plan = written(
        f"0SEND_WEIGHTS 3RECV_WEIGHTS {OPS[0]} 3SEND_GRADIENTS 0RECV_GRADIENTS 3RESHARD",
        f"1SEND_WEIGHTS 2RECV_WEIGHTS {OPS[1]} 1RECV_GRADIENTS 2SEND_GRADIENTS 2RESHARD",
        layout=BOTH_WAYS,
    )
    (told,) = wrong(plan)
    texts = [
        "rank 0 makes `down(0)SEND_WEIGHTS` before `up(1)RECV_WEIGHTS`",
        "rank 1 makes `down(1)SEND_WEIGHTS` before `up(0)RECV_WEIGHTS`",
    ]
    assert told.message == (
        f"ranks 0-1 come to hops in different orders: {', '.join(texts)}"
    )
    assert labels(told) == [("0SEND_WEIGHTS", texts[0]), ("1SEND_WEIGHTS", texts[1])]
    assert told.help == "let some ranks of the ring receive first, as every second one"


def test_a_rank_that_only_waits_is_none_of_those_that_differ() -> None:
    """Rank 0 waits for a sum that rank 1 makes last of all; ranks 1, 3 and 2 wait in a cycle."""
    layout = Layout(
        (0, 1, 2, 3, 1, 2, 3, 1), (Pipeline("p", 0, 4, 1), Pipeline("q", 4, 8, 1))
    )
    orders = ((0,), (1, 7, 4), (2, 5), (3, 6))
    ranks = []
    for stages in orders:
        ops = [f"{stage}F0 {stage}B0" for stage in stages]
        ranks.append(" ".join([*ops, *(f"{stage}REDUCE_GRAD" for stage in stages)]))
    (told,) = wrong(written(*ranks, layout=layout))
    texts = [
        "rank 1 makes `p(1)REDUCE_GRAD` before `q(3)REDUCE_GRAD`",
        "rank 3 makes `p(3)REDUCE_GRAD` before `q(2)REDUCE_GRAD`",
        "rank 2 makes `p(2)REDUCE_GRAD` before `q(1)REDUCE_GRAD`",
    ]
    assert told.message == (
        f"ranks 1-3 come to gathers and sums in different orders: {', '.join(texts)}"
    )
    assert labels(told) == [
        ("1REDUCE_GRAD", texts[0]),
        ("3REDUCE_GRAD", texts[1]),
        ("2REDUCE_GRAD", texts[2]),
    ]
