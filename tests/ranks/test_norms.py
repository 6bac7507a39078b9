"""Updates that are clipped by the norm of all gradients: when they are made, and which plans have
no time for it.
"""

import re

import pytest

from schedlang import Plan, Source, compile, read_source, simulate
from schedlang.ranks.norms import put_off, why_not
from schedlang.schedule.actions import is_transfer
from schedlang.schedule.kinds import Kind
from tests.support.paths import PROGRAMS

# The last stage sends a gradient only after a forward that reads the weights of the update which
# that gradient is part of; or, with `early`, before. It is on rank 1, or, `turned`, on rank 0.
LATE_SEND = """schedule late_send {
    param ranks = 2
    param microbatches = 1
    param early = 0
    param turned = 0
    stage s in 0 .. ranks on if turned then ranks - 1 - s else s
    weights stash
    rank r {
        let s = if turned then ranks - 1 - r else r
        warmup {
            if s == 0 { F(0) send F(0) } else { recv F(0) F(0) }
        }
        steady {
            if s == 0 { F(1) send F(1) recv B(0) B(0) U }
            else {
                B(0) U
                if early { recv F(1) send B(0) F(1) } else { recv F(1) F(1) send B(0) }
            }
        }
    }
}
"""


def plan_of(name: str, updates: int = 6, **params: int) -> Plan:
    source = (
        Source("late_send.sched", LATE_SEND)
        if name == "late_send"
        else read_source(PROGRAMS / f"{name}.sched")
    )
    plan = compile(source, params)
    return plan.for_updates(updates) if plan.kernels else plan


def made(plan: Plan, rank: int) -> dict[str, str]:
    """The updates of a rank, each with what it is put off to."""
    actions = plan.ranks[rank]
    words = [*map(actions.word, range(len(actions))), "end"]
    return {
        words[update]: words[place] for update, place in put_off(plan, rank).items()
    }


def test_an_update_is_put_off_to_what_needs_it() -> None:
    """In PipeDream-2BW to the first forward of the update after the next one, or the next update."""
    plan = plan_of("pipedream_2bw", updates=4)
    assert made(plan, 0) == {"0U0": "0F8", "0U1": "0F12", "0U2": "0U3", "0U3": "end"}
    assert made(plan, 3) == {"3U0": "3U1", "3U1": "3U2", "3U2": "3U3", "3U3": "end"}
    assert made(plan_of("pipedream", updates=6), 0) == {
        "0U0": "0F4",
        "0U1": "0F5",
        "0U2": "0U3",
        "0U3": "0U4",
        "0U4": "0U5",
        "0U5": "end",
    }
    assert made(plan_of("gpipe_groups"), 1) == {"5U": "end", "1U": "end"}
    assert made(plan_of("1f1b"), 0) == {}


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 4), (8, 8), (4, 3), (2, 1)])
def test_nobody_waits_in_pipedream_2bw(ranks: int, microbatches: int) -> None:
    """By the simulation: when an update is made, all ranks have had their parts of its norm, but at
    the end.
    """
    plan = plan_of("pipedream_2bw", ranks=ranks, microbatches=microbatches)
    bars = [[*each] for each in simulate(plan, ideal=True).timeline.ranks]
    # The last update of each number that a rank makes: by then it has its part of the norm.
    ends = {
        (rank, bar.microbatch): bar.end
        for rank, each in enumerate(bars)
        for bar in each
        if bar.kind == Kind.U
    }
    for rank in range(len(plan.ranks)):
        starts = {str(bar): bar.start for bar in bars[rank]}
        waits = {
            update: word for update, word in made(plan, rank).items() if word != "end"
        }
        # The last update is put off to the end, where nobody has anything else to do.
        assert len(waits) == plan.layout.updates - 1
        for word, place in waits.items():
            update = int(word.partition("U")[2])
            assert starts[place] >= max(
                ends[other, update] for other in range(len(plan.ranks))
            ), (
                rank,
                word,
            )


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("pipedream_2bw", {}, None),
        ("pipedream_2bw", {"ranks": 1}, None),
        ("pipedream", {}, None),
        ("pipedream_vertical", {}, None),
        ("pipemare", {}, None),
        ("pipemare", {"microbatches": 4}, None),
        ("gpipe_groups", {}, None),
        ("late_send", {"early": 1}, None),
        ("late_send", {"early": 1, "turned": 1}, None),
        (
            "late_send",
            {},
            "before `1F1` (late_send.sched:17) rank 1 would wait in vain for the norm of update 0: rank 0 has its part of "
            "it only after `0U0` (late_send.sched:14)",
        ),
        (
            "late_send",
            {"turned": 1},
            "before `1F1` (late_send.sched:17) rank 0 would wait in vain for the norm of update 0: rank 1 has its part of "
            "it only after `0U0` (late_send.sched:14)",
        ),
        (
            "wpipe",
            {},
            "before `4F4` (wpipe.sched:24) rank 0 would wait in vain for the norm of update 0: rank 0 has its part of it "
            "only after `0U0` (wpipe.sched:28)",
        ),
        ("1f1b", {}, "the plan does not update stage 0 itself (`U`)"),
        (
            "distillation",
            {},
            "it trains several models, of which each has a norm of its own",
        ),
        (
            "pipedream_replicated",
            {},
            "its stages have replicas in other pipelines, whose gradients they also wait for",
        ),
    ],
)
def test_plans_that_have_no_time_for_the_norm(
    name: str, params: dict[str, int], message: str | None
) -> None:
    plan = plan_of(name, **params)
    assert why_not(plan) == (
        message and message.replace("(wpipe", f"({PROGRAMS}/wpipe")
    )
    if message is None or "update 0" in message:
        assert stands(plan) == (message is not None)


def test_where_no_version_is_kept_a_backward_waits_for_the_update_as_well() -> None:
    """Rank 0 is drained by backwards alone, each of which reads what the update before has made."""
    plan = plan_of("pipemare", updates=5)
    actions = plan.ranks[0]
    waiting = [
        actions.word(place)
        for place in put_off(plan, 0).values()
        if place < len(actions)
    ]
    assert waiting == ["0F4", "0B2", "0B3", "0B4"]


def test_a_plan_for_one_transport_is_not_asked() -> None:
    plan = compile("pipedream_2bw", transport="gloo")
    assert (
        why_not(plan)
        == "the plan is proved for `gloo` alone, and must be for all transports"
    )


def stands(plan: Plan) -> bool:
    """Whether some rank never comes to the end: all are tried again and again, each action by
    itself.
    """
    at = [0 for _ in plan.ranks]
    ranks = range(len(plan.ranks))

    def may_pass(rank: int) -> bool:
        actions = plan.ranks[rank]
        for update, place in put_off(plan, rank).items():
            number = actions.microbatch[update]
            # Here the rank waits for all parts of the norm, as long as any rank has that update
            # before it.
            if place == at[rank] and any(
                f"U{number}" in left(other) for other in ranks
            ):
                return False
        if at[rank] == len(actions):
            return False
        return all(met(rank, index) for index in actions.batch(at[rank]))

    def left(rank: int) -> str:
        """The updates that a rank has not come to yet."""
        actions = plan.ranks[rank]
        words = map(actions.word, range(at[rank], len(actions)))
        return " ".join(re.sub(r"^\d+", "", word) for word in words if "U" in word)

    def met(rank: int, index: int) -> bool:
        kind, stage, microbatch, *_ = plan.ranks[rank].row(index)
        if not is_transfer(kind):
            return True
        other = plan.peer(kind, stage)
        wanted = *plan.layout.counterpart(kind, stage), microbatch
        theirs = plan.ranks[other]
        # What the other rank has done, and the batch at which it stands: both are there to be met.
        reached = [
            *range(at[other]),
            *(theirs.batch(at[other]) if at[other] < len(theirs) else ()),
        ]
        return any(theirs.row(each)[:3] == wanted for each in reached)

    moves = True
    while moves:
        moves = False
        for rank in ranks:
            while may_pass(rank):
                at[rank] = plan.ranks[rank].batch(at[rank]).stop
                moves = True
    return any(at[rank] < len(plan.ranks[rank]) for rank in ranks)
