"""Kernels that are repeated: what is proved of them is so for every number of updates."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from attrs import evolve

from schedlang import (
    CompileError,
    Plan,
    Schedule,
    Source,
    compile,
    prove,
    read_plan,
)
from schedlang.compiler import check_schedule
from schedlang.plan.text import parse_actions
from schedlang.proof import repetition
from schedlang.proof.channels import channels_of
from schedlang.proof.repetition import prove_for_all_updates
from schedlang.schedule.columns import actions_from, table_of
from schedlang.schedule.layout import Layout, Pipeline
from schedlang.schedule.periods import repeat
from schedlang.schedule.schedule import Kernel, WeightRule
from schedlang.schedule.transports import GLOO, NAMES, transports
from tests.support.written import written

STREAMS = [
    ("pipedream", {"ranks": 2, "microbatches": 1}),
    ("pipedream", {"ranks": 4, "microbatches": 1}),
    ("pipedream_vertical", {"ranks": 4, "microbatches": 1}),
    ("pipedream_2bw", {"ranks": 3, "microbatches": 3}),
    ("pipedream_2bw", {"ranks": 4, "microbatches": 9}),
    ("pipemare", {"ranks": 3, "microbatches": 2}),
    ("wpipe", {"ranks": 2, "microbatches": 2}),
    ("wpipe", {"ranks": 4, "microbatches": 8}),
    ("pipedream_replicated", {"ranks": 5, "first": 2, "microbatches": 6}),
]

TWO_WAYS = """schedule two_ways {
    param ranks = 2  param microbatches = 2
    pipeline down runs microbatches / 2  stage s in 0 .. ranks on s
    pipeline up runs microbatches / 2  stage s in 0 .. ranks on ranks - 1 - s
    weights delay(4)
    rank r {
        warmup { }
        steady { F(down(r), 0) F(up(1 - r), 0) B(down(r), 0) B(up(1 - r), 0) U }
    }
}"""


def meeting_late(repeats: int) -> Plan:
    """A plan whose kernels can be repeated so many times, and once more they wait for each other.

    In its kernel rank 0 awaits the forward of the pipeline up before it sends that of down, and
    rank 1 the other way round, for an earlier microbatch: the two are of one microbatch only where
    rank 1 has come that far in its kernels. What follows on rank 1 is in the right order.
    """
    microbatches = repeats + 4
    last = microbatches - 1

    def forwards(rank: int, first: str, m: int) -> str:
        # Of one microbatch: what each rank does of the pipeline down (stages 0, 1), and of up (2,
        # 3).
        words = {
            "down": [f"0F{m} 0SEND_F{m}", f"1RECV_F{m} 1F{m}"],
            "up": [f"3RECV_F{m} 3F{m}", f"2F{m} 2SEND_F{m}"],
        }
        second = "up" if first == "down" else "down"
        return f"{words[first][rank]} {words[second][rank]}"

    def update(rank: int, m: int) -> str:
        ends = f"3B{m} 3SEND_B{m} 0RECV_B{m} 0B{m} 0U{m} 3U{m}"
        return [ends, f"1B{m} 1SEND_B{m} 2RECV_B{m} 2B{m} 1U{m} 2U{m}"][rank]

    parts = [
        (
            [f"0F{m} 0SEND_F{m}" for m in range(3)]
            + [f"3RECV_F{m} 3F{m}" for m in range(3)]
            + [f"{update(0, m)} {forwards(0, 'down', m + 3)}" for m in range(repeats)],
            f"{update(0, repeats)} {forwards(0, 'up', last)}",
            [update(0, m) for m in range(repeats + 1, microbatches)],
        ),
        (
            [forwards(1, "down", m) for m in range(2)],
            f"{forwards(1, 'down', 2)} {update(1, 0)}",
            [
                f"{forwards(1, 'up', m)} {update(1, m - 2)}"
                for m in range(3, microbatches)
            ]
            + [update(1, m) for m in range(last - 1, microbatches)],
        ),
    ]
    ranks = []
    kernels = []
    for before, kernel, behind in parts:
        start = len(" ".join(before).split())
        kernels.append(Kernel(start, start + len(kernel.split())))
        text = " ".join([*before, kernel, *behind])
        ranks.append(parse_actions(text, [0] * len(text.split())))
    plan = compile(Source("two_ways.sched", TWO_WAYS))
    pipelines = tuple(
        evolve(each, microbatches=microbatches) for each in plan.layout.pipelines
    )
    layout = evolve(plan.layout, updates=microbatches, pipelines=pipelines)
    return evolve(plan, layout=layout, ranks=tuple(ranks), kernels=tuple(kernels))


@pytest.mark.parametrize("transport", ["gloo", "buffered:1", "buffered"])
@pytest.mark.parametrize("repeats", [0, 1, 2, 4])
def test_kernels_that_meet_only_later(
    repeats: int, transport: str, tmp_path: Path
) -> None:
    plan = evolve(meeting_late(repeats), transport=transport)
    # Right so many times; the plan of one more is the first that is wrong.
    for times in range(repeats + 1):
        prove(repeat(plan, plan.kernels, times))
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_json()))
    with pytest.raises(CompileError) as caught:
        read_plan(tmp_path / "plan.json")
    wrong = caught.value.diagnostics[0]
    assert wrong.code == "deadlock"
    assert f"in the plan of {plan.layout.updates + repeats + 1} updates" in wrong.notes
    (verdict,) = check_schedule(plan, [transport], plan.kernels).values()
    assert [each.code for each in verdict] == ["deadlock"]


@pytest.mark.parametrize(("name", "params"), STREAMS)
@pytest.mark.parametrize("transport", NAMES)
def test_compiled_streams_go_on(
    name: str, params: dict[str, int], transport: str
) -> None:
    """And so they are proved by one step, however many updates they show."""
    plan = compile(name, params, transport=transport)
    assert plan.kernels
    more = evolve(plan.for_updates(plan.layout.updates + 3), kernels=plan.kernels)
    prove_for_all_updates(more, more.kernels)


def received_early(
    updates: int, replicas: int, starts: tuple[tuple[int, int], ...]
) -> tuple[Schedule, tuple[Kernel, ...]]:
    """Two stages, and replicas of them, of which the second posts receives so early that some are
    pending wherever it stops: it is sent a message once it has sent a gradient, and posts the
    receive four updates before. Kernels start with the ops of an update, or so many actions later.
    """
    texts = []
    kernels = []
    for rank in range(2 * replicas):
        words = [f"0F{m} 0SEND_F{m}" for m in range(2)]
        if rank % 2:
            words = [f"1RECV_F{m}" for m in range(4)]
        for k in range(updates):
            start = len(" ".join(words).split())
            if rank % 2:
                words += [f"1F{k} 1B{k}", *[f"1RECV_F{k + 4}"] * (k + 4 < updates)]
                words += [f"1SEND_B{k} 1U{k}"]
            else:
                words += [f"0RECV_B{k} 0I{k} 0W{k} 0U{k}"]
                words += [f"0F{k + 2} 0SEND_F{k + 2}"] * (k + 2 < updates)
            if k == starts[rank][0]:
                start += starts[rank][1]
                kernels.append(Kernel(start, start + (5 if rank % 2 else 6)))
        text = " ".join(words)
        # Replicas have the stages 2 and 3.
        if rank >= 2:
            text = re.sub(r"\b[01]", lambda stage: str(int(stage[0]) + 2), text)
        texts.append(text)
    pipelines = tuple(
        Pipeline(f"p{each}", 2 * each, 2 * each + 2, updates)
        for each in range(replicas)
    )
    layout = Layout(tuple(range(2 * replicas)), pipelines, updates=updates)
    plan = written(*texts, layout=layout, transport="gloo")
    weights = (WeightRule("stash"),) * len(layout.placement)
    return evolve(plan, weights=weights), tuple(kernels)


@pytest.mark.parametrize("transport", ["gloo", "nccl-edge"])
@pytest.mark.parametrize(
    "starts",
    [
        ((0, 0), (0, 0)),
        # The first rank cannot come to the end of its kernel; or not beyond its start.
        ((1, 0), (0, 0)),
        ((1, 1), (0, 0)),
        ((0, 0), (1, 0)),
        # Nor can the first two, which wait for the gradients of their replicas.
        ((0, 0), (0, 0), (0, 0), (0, 0)),
        ((1, 0), (1, 0), (0, 0), (0, 0)),
        ((0, 0), (0, 0), (1, 0), (1, 0)),
    ],
    ids=str,
)
def test_receives_that_are_pending_wherever_ranks_stop(
    starts: tuple[tuple[int, int], ...], transport: str
) -> None:
    plan, kernels = received_early(7, len(starts) // 2, starts)
    prove_for_all_updates(evolve(plan, transport=transport), kernels)


@pytest.mark.parametrize(
    ("transport", "places", "pending"),
    [("gloo", [3, 2], ["0RECV_B0"]), ("blocking", [2, 2], ["0RECV_B0"])],
)
def test_how_far_ranks_come(
    transport: str, places: list[int], pending: list[str]
) -> None:
    """Rank 1 stops before its backward."""
    cut = written("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0")
    found, rows = repetition.reached(cut, *transports(transport))
    assert found.tolist() == places
    assert [cut.name_of(*cut.columns.place(row)) for row in rows] == pending


def test_what_stands_behind_a_transfer_that_is_pending_is_so_too() -> None:
    cut = written("0F0 0RECV_B0 0SEND_F0", "1RECV_F0")
    found, rows = repetition.reached(cut, *transports("blocking"))
    assert found.tolist() == [1, 0]
    assert rows.tolist() == [1, 2, 3]


def test_a_step_waits_for_gradients_of_replicas_that_are_cut_off() -> None:
    layout = Layout((0, 1), (Pipeline("a", 0, 1, 1), Pipeline("b", 1, 2, 1)))
    cut = written("0F0 0B0 0U", "1F0", layout=layout)
    found, rows = repetition.reached(cut, *transports("gloo"))
    assert found.tolist() == [2, 1]
    assert not len(rows)


@pytest.mark.parametrize(
    ("places", "least", "closed"),
    [
        # The second receive stands right behind the place of rank 1.
        ((4, 2), (0, 0), [3, 2]),
        ((4, 2), (0, 2), [3, 2]),
        ((4, 3), (2, 2), [4, 3]),
        # Rank 0 would stop before what it has to do at least.
        ((4, 2), (4, 2), [3, 2]),
        # The backward needs that of rank 1, which is cut off.
        ((6, 4), (0, 0), [4, 4]),
    ],
)
def test_where_ranks_can_stop_with_nothing_pending(
    places: tuple[int, int], least: tuple[int, int], closed: list[int]
) -> None:
    plan = written(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
        microbatches=2,
    )
    partner = channels_of(plan, GLOO).partner
    found = repetition._closed(plan, partner, np.array(places), np.array(least))
    assert found.tolist() == closed


def test_ranks_that_never_come_back_to_the_same_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What cannot be shown is refused."""
    plan = compile("pipedream_2bw", {"ranks": 2, "microbatches": 2})
    monkeypatch.setattr(repetition, "goes_on", lambda *_: False)
    with pytest.raises(CompileError) as caught:
        prove_for_all_updates(plan, plan.kernels)
    (wrong,) = caught.value.diagnostics
    assert (wrong.code, wrong.message) == (
        "steady",
        "what repeats is proved for 3 to 8 updates, and for no more: the ranks never come back to "
        "the same state",
    )


def damaged(plan: Plan, rng: random.Random) -> Plan:
    """A plan with some actions moved among their neighbours, or with another kernel."""
    plan = plan.for_updates(plan.layout.updates + rng.choice([0, 0, 1, 2]))
    ranks = list(plan.ranks)
    kernels = list(plan.kernels)
    for _ in range(rng.choice([1, 1, 2, 3])):
        rank = rng.randrange(len(ranks))
        table = table_of(ranks[rank])
        start = kernels[rank].start
        stop = kernels[rank].stop
        end = table.shape[1]
        by = rng.choice([-3, -2, -1, 1, 2, 3])
        if rng.random() < 0.25 and start + by >= 0 and stop + by <= end:
            kernels[rank] = Kernel(start + by, stop + by)
            continue
        # An action stays before, in or behind the kernel.
        first, last = rng.choice([(0, start), (start, stop), (stop, end)])
        if last - first > 1:
            index = rng.randrange(first, last)
            place = min(max(index + by, first), last - 1)
            moved = np.delete(table, index, axis=1)
            ranks[rank] = actions_from(np.insert(moved, place, table[:, index], axis=1))
    return evolve(plan, ranks=tuple(ranks), kernels=tuple(kernels))


def is_right(plan: Plan, times: int) -> bool:
    try:
        prove(repeat(plan, plan.kernels, times))
    except CompileError:
        return False
    return True


@pytest.mark.parametrize("transport", NAMES)
@pytest.mark.slow
def test_what_is_proved_by_induction_is_what_is_proved_one_by_one(
    transport: str,
) -> None:
    rng = random.Random(transport)
    plans = [
        compile(name, params, transport=transport)
        for name, params in STREAMS
        if params["ranks"] < 4
    ]
    verdicts = []
    while len(verdicts) < 24:
        plan = damaged(rng.choice(plans), rng)
        if not is_right(plan, 0):
            continue
        try:
            prove_for_all_updates(plan, plan.kernels)
            verdicts.append(True)
        except CompileError:
            verdicts.append(False)
        # Eight more of the kernel show all that such small plans can do wrong.
        assert verdicts[-1] == all(is_right(plan, times) for times in range(1, 9))
    assert {*verdicts} == {True, False}
