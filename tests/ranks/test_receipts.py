"""What a rank knows of its messages, against an execution in which every message carries what its
sender knows.
"""

import pytest

from schedlang import Plan, compile
from schedlang.ranks.receipts import receipts
from schedlang.schedule.actions import is_send
from schedlang.schedule.kinds import Kind

WAITS = {Kind.F: Kind.RECV_F, Kind.B: Kind.RECV_B, Kind.I: Kind.RECV_B}


def knowledge(plan: Plan) -> dict[tuple[int, int], list[int]]:
    """For each op, by rank and index: how many actions of each rank its rank knows to be done."""
    known = [[0] * len(plan.ranks) for _ in plan.ranks]
    carried: dict[tuple[int, int, int], list[int]] = {}
    after: dict[tuple[int, int], list[int]] = {}
    position = [0] * len(plan.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(plan.ranks):
            while position[rank] < len(actions):
                kind, stage, microbatch, *_ = actions.row(position[rank])
                numbers = (
                    plan.layout.numbers(WAITS[kind], stage) if kind in WAITS else []
                )
                waits = [
                    (WAITS[kind], each, microbatch)
                    for each in numbers
                    if plan.peer(WAITS[kind], each) is not None
                ]
                if not carried.keys() >= set(waits):
                    break
                for each in waits:
                    known[rank] = list(map(max, known[rank], carried[each]))
                after[rank, position[rank]] = known[rank]
                position[rank] += 1
                known[rank] = [
                    *known[rank][:rank],
                    position[rank],
                    *known[rank][rank + 1 :],
                ]
                if is_send(kind):
                    carried[*plan.layout.counterpart(kind, stage), microbatch] = known[
                        rank
                    ]
                moved = True
    assert position == list(map(len, plan.ranks))
    return after


@pytest.mark.parametrize(
    ("name", "fewest"),
    [
        ("1f1b", 0.7),
        ("interleaved_1f1b", 0.7),
        ("zb_v", 0.5),
        ("chimera", 0.5),
        ("unet_1f1b", 0.5),
    ],
)
def test_a_send_is_waited_for_only_where_it_is_known_to_have_been_received(
    name: str, fewest: float
) -> None:
    plan = compile(name, {"ranks": 4, "microbatches": 16})
    after = knowledge(plan)
    places = []
    for rank, actions in enumerate(plan.ranks):
        for send, op in receipts(plan, rank).items():
            places.append(op < len(actions))
            if op < len(actions):
                kind, stage, microbatch, *_ = actions.row(send)
                receive, number = plan.layout.counterpart(kind, stage)
                holder = plan.layout.stage_of(receive, number)
                peer = plan.placement[holder]
                words = [
                    row[:3]
                    for row in map(plan.ranks[peer].row, range(len(plan.ranks[peer])))
                ]
                (used,) = (
                    index
                    for index, (each, *rest) in enumerate(words)
                    if WAITS.get(each) == receive
                    and tuple(rest) == (holder, microbatch)
                )
                assert after[rank, op][peer] > used
    assert sum(places) / len(places) > fewest
