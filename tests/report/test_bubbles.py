"""Why ranks are idle: every moment has one cause, the critical path has no gap, and a faster op is
simulated.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from schedlang import (
    Actions,
    CompileError,
    Costs,
    Execution,
    Kind,
    Schedule,
    Source,
    compile,
    read_source,
    simulate,
)
from schedlang.cli.main import main
from schedlang.lowering import lower
from schedlang.report.bubbles import reasons as followed
from schedlang.report.bubbles.account import Account
from schedlang.report.bubbles.attribution import CAUSES, Idle, IdleTime
from schedlang.report.bubbles.critical_path import Segment
from schedlang.report.bubbles.explanation import explain_bubble
from schedlang.report.bubbles.op_waits import Step
from schedlang.schedule.costs import UNIT
from schedlang.schedule.timeline import Bar
from tests.support.paths import GALLERY, PROGRAMS, ROOT
from tests.support.sizes import examples
from tests.support.strategies import schedules


def explained(
    schedule: Schedule, costs: Costs
) -> tuple[Execution, IdleTime, list[Segment]]:
    execution = simulate(schedule, costs)
    account = Account(execution)
    return execution, account.idle, account.path


def check(schedule: Schedule, costs: Costs) -> None:
    """All idle time has one cause, which is true of it; and the critical path is as long as the
    execution.
    """
    execution, idle, path = explained(schedule, costs)
    makespan = execution.timeline.makespan
    for rank, bars in enumerate(execution.timeline.ranks):
        pieces = [(each.start, each.end) for each in idle if each.rank == rank]
        covered = sorted([*pieces, *((bar.start, bar.end) for bar in bars)])
        # Ops and idle time side by side: each begins where the one before ends, from 0 to the
        # makespan.
        ends = [0.0, *(end for _, end in covered)]
        assert [start for start, _ in covered] + [makespan] == pytest.approx(
            ends, abs=1e-6
        )
    # Of ops that overlap, all run until the last one ends.
    account = Account(execution)
    steps = [step for step in account.waits.steps if not step.is_copy]
    for each in idle:
        assert is_true(schedule, execution, steps, each), each
    communication = sum(
        each.length
        for each in idle
        if each.cause in ("transfer", "transport", "collective")
    )
    assert account.behind.exposed == pytest.approx(communication, abs=1e-6 * makespan)
    assert sum(segment.length for segment in path) == pytest.approx(makespan)
    assert [segment.start for segment in path] + [makespan] == pytest.approx(
        [0.0, *(segment.end for segment in path)]
    )


def is_true(
    schedule: Schedule, execution: Execution, steps: list[Step], idle: Idle
) -> bool:
    """Whether a cause's definition holds of some idle time, as far as it can be seen from outside."""
    middle = (idle.start + idle.end) / 2
    ranks = execution.timeline.ranks
    before = [bar for bar in ranks[idle.rank] if bar.end <= middle]
    after = [bar for bar in ranks[idle.rank] if bar.start >= middle]
    running = [step for step in steps if step.start <= middle <= step.end]
    runs = {
        schedule.ranks[step.rank].stage[row] for step in running for row in step.rows
    }
    has_forward = any(bar.kind == Kind.F for bar in after)
    has_backward = any(bar.kind in (Kind.B, Kind.I) for bar in before)
    match idle.cause:
        case "fill":
            return has_forward and not has_backward
        case "drain":
            return not has_forward
        case "dependency":
            return has_forward and has_backward and idle.subject[0] in runs
        case "imbalance":
            return idle.subject[0] in runs
        case "memory" | "order":
            gap = after[0].start - max((bar.end for bar in before), default=0.0)
            return any(bar.end - bar.start <= gap + 1e-6 for bar in after[1:])
        case "transfer":
            sender, receiver = idle.subject
            return sender != receiver and any(
                bar.end <= middle for bar in ranks[sender]
            )
    return idle.cause in CAUSES


COSTS = [
    Costs(),
    Costs(p2p_time=0.3),
    Costs(forward_times=(1,), backward_times=(2.3,), p2p_time=0.05),
    Costs(
        ranks_per_node=2,
        latency_in_node=0.1,
        latency_between_nodes=0.7,
        overlap_times=(2.5,),
        update_times=(0.5,),
    ),
]


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_programs(path: Path) -> None:
    plan = compile(read_source(path))
    for costs in COSTS:
        check(plan, costs)
    check(
        plan,
        Costs(
            forward_times=tuple(1 + stage % 3 for stage in range(len(plan.placement)))
        ),
    )


@pytest.mark.parametrize(
    "transport", ["blocking", "nccl", "nccl-eager", "nccl-edge", "buffered:1"]
)
@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved_1f1b", "dualpipe", "pipe_offload"]
)
def test_programs_on_transports(name: str, transport: str) -> None:
    for costs in COSTS:
        check(compile(name, transport=transport), costs)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> Costs:
    times = st.lists(
        st.sampled_from([0.0, 0.1, 1.0, 2.7]), min_size=stages, max_size=stages
    )
    p2p = draw(st.sampled_from([0.0, 0.1, 3.0]))
    return Costs(
        tuple(draw(times)),
        tuple(draw(times)),
        tuple(draw(times)),
        tuple(draw(times)),
        p2p_time=p2p,
    )


@examples(100)
@given(st.data())
@pytest.mark.slow
def test_random_schedules(data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    given = data.draw(costs(len(schedule.placement)))
    check(lower(schedule), given)
    check_alternatives(schedule, given)


def check_alternatives(schedule: Schedule, given: Costs) -> None:
    """Where a later op could run, running it there delays nothing before it, and raises the peak or
    does not.
    """
    execution, idle, _ = explained(lower(schedule), given)
    for each in idle:
        if each.cause in ("order", "memory"):
            bars = execution.timeline.ranks[each.rank]
            index = sum(bar.start < (each.start + each.end) / 2 for bar in bars)
            peaks = list(
                peaks_with_earlier_ops(schedule, given, each.rank, index, bars)
            )
            raised = [peak > execution.peak_activations[each.rank] for peak in peaks]
            assert raised
            # By `order`, some op could have run there within the peak; by `memory`, some op only
            # above it.
            assert not all(raised) if each.cause == "order" else any(raised)


def peaks_with_earlier_ops(
    schedule: Schedule, given: Costs, rank: int, index: int, bars: Sequence[Bar]
) -> Iterator[int]:
    """The peak activations of a rank with a later op before op `index`, for each that delays that
    by nothing.
    """
    rows = [schedule.ranks[rank].row(i) for i in range(len(bars))]
    for later in range(index + 1, len(rows)):
        actions = Actions()
        for row in [*rows[:index], rows[later], *rows[index:later], *rows[later + 1 :]]:
            actions.add(*row)
        ranks = (*schedule.ranks[:rank], actions, *schedule.ranks[rank + 1 :])
        try:
            execution = simulate(lower(evolve(schedule, ranks=ranks)), given)
        except CompileError:
            continue
        if execution.timeline.ranks[rank][index + 1].start <= bars[index].start + 1e-6:
            yield execution.peak_activations[rank]


def idle_by_cause(
    text: str, given: Costs = UNIT
) -> dict[tuple[str, tuple[int, ...]], float]:
    _, idle, _ = explained(
        compile(Source("s.sched", f"schedule s {{ {text} }}")), given
    )
    found: dict[tuple[str, tuple[int, ...]], float] = {}
    for each in idle:
        found[each.cause, each.subject] = (
            found.get((each.cause, each.subject), 0.0) + each.length
        )
    return found


KEPT = """schedule kept {
    param ranks = 3  param microbatches = 4
    keeper(r) = if r == 0 then 1 else 0
    rank r {
        if r == 0 { F(0) offload(0) F(1) offload(1) F(2) F(3) %s B(2) B(3) }
        if r == 1 { %s }
        if r == 2 { F(0) B(0) F(1) B(1) F(2) B(2) F(3) B(3) }
    }
}"""


@pytest.mark.parametrize(
    ("reloads", "order", "moved", "p2p_time", "cause"),
    [
        # While rank 1 waits, it keeps two activations of rank 0: one more is above the three of
        # its own that it holds at most.
        (
            "reload(0) reload(1) B(0) B(1)",
            "F(0) B(0) F(1) F(2) F(3) B(1) B(2) B(3)",
            "F(0) F(1) B(0) F(2) F(3) B(1) B(2) B(3)",
            0,
            "memory",
        ),
        # With what it keeps later, its peak leaves room for one more of its own.
        (
            "reload(0) B(0) reload(1) B(1)",
            "F(0) F(1) B(0) F(2) B(1) F(3) B(2) B(3)",
            "F(0) F(1) F(2) B(0) B(1) F(3) B(2) B(3)",
            2,
            "order",
        ),
    ],
)
def test_what_a_rank_keeps_for_others_takes_its_room(
    reloads: str, order: str, moved: str, p2p_time: float, cause: str
) -> None:
    costs = Costs(p2p_time=p2p_time)
    plan = compile(Source("kept.sched", KEPT % (reloads, order)))
    found = {each.cause for each in explain_bubble(plan, costs).idle if each.rank == 1}
    assert {"memory", "order"} & found == {cause}
    earlier = compile(Source("kept.sched", KEPT % (reloads, moved)))
    peaks = [simulate(each, costs).peak_memory[1] for each in (plan, earlier)]
    assert (peaks[1] > peaks[0]) == (cause == "memory")


TWO = "param ranks = 2  param microbatches = 2"


def test_each_cause() -> None:
    # F0 F1 B0 B1 on both: rank 1 begins 1 later, rank 0 waits for its first gradient, rank 1 for
    # the end.
    gpipe = f"{TWO} rank r {{ F(0) F(1) B(0) B(1) }}"
    assert idle_by_cause(gpipe) == {("fill", ()): 1, ("drain", ()): 3 + 2}
    # One microbatch after the other: rank 0 could run F1 while B0 is on its way, but would hold
    # two. Rank 1 cannot.
    alone = f"{TWO} rank r {{ F(0) B(0) F(1) B(1) }}"
    assert idle_by_cause(alone) == {
        ("memory", ()): 3,
        ("fill", ()): 1,
        ("dependency", (0,)): 3,
        ("drain", ()): 3 + 2,
    }
    # The same where the rank holds as much at another time.
    later = "param ranks = 2  param microbatches = 3  rank r { F(0) B(0) F(1) F(2) B(1) B(2) }"
    assert idle_by_cause(later)["order", ()] == 3
    # The first transfer of each direction is waited for, the second one comes in time.
    sent = idle_by_cause(gpipe, Costs(p2p_time=0.25))
    assert sent["transfer", (0, 1)] == 0.25
    assert sent["transfer", (1, 0)] == 0.25
    # Rank 0 waits for a forward of 5 on stage 1, on average it is 3: 2 of them are beyond.
    uneven = idle_by_cause(
        "param ranks = 2 param microbatches = 1 rank r { F(0) B(0) }",
        Costs(forward_times=(1, 5)),
    )
    assert uneven == {("fill", ()): 1, ("drain", ()): 3 + 2 + 2, ("imbalance", (1,)): 2}
    copied = "param ranks = 1 param microbatches = 1 cost reload = 9 rank r { F(0) offload(0) reload(0) B(0) }"
    assert idle_by_cause(copied) == {("copy", (0, 0)): 1 + 9}


def test_one_f_one_b_waits_for_memory_in_its_warm_up() -> None:
    plan = compile("1f1b")
    _, idle, path = explained(plan, Costs())
    by_rank = [
        [
            sum(e.length for e in idle if (e.rank, e.cause) == (rank, cause))
            for rank in range(4)
        ]
        for cause in ("fill", "memory", "drain")
    ]
    assert by_rank == [[0, 1, 2, 3], [6, 4, 2, 0], [3, 4, 5, 6]]
    assert {segment.kind for segment in path} == {"op"}


def test_a_faster_op_is_simulated() -> None:
    plan = compile("1f1b")
    slow = Costs(forward_times=(1, 1, 1, 2), backward_times=(2, 2, 2, 4))
    found = explain_bubble(plan, slow)
    first = found.faster[0]
    assert (first.field, first.stage, first.duration) == ("backward", 3, 4)
    assert (
        first.makespan
        == simulate(plan, evolve(slow, backward_times=(2, 2, 2, 3.6))).timeline.makespan
    )
    assert first.makespan == pytest.approx(57 - 8 * 0.4)
    overlapping = explain_bubble(compile("dualpipe"), Costs(overlap_times=(2.5,)))
    assert "overlap" in {each.field for each in overlapping.faster}


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    program = "programs/1f1b.sched"
    assert main(["explain-bubble", program, "--p2p-time", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    # Four ranks for a makespan of 34.6, of which each works 8 * (1 + 2) = 24.
    assert found["idle"] == pytest.approx(4 * 34.6 - 96)
    assert sum(each["time"] for each in found["causes"]) == pytest.approx(found["idle"])
    assert sum(
        each["end"] - each["start"] for each in found["intervals"]
    ) == pytest.approx(found["idle"])
    for cause in found["causes"]:
        assert cause["time"] == pytest.approx(sum(cause["per_rank"]))
    assert found["critical_path"][0]["at"] == {
        "rank": 0,
        "actions": "0F0",
        "line": f"{program}:8",
    }
    assert {each["at"]["line"] for each in found["critical_path"]} <= {
        f"{program}:{line}" for line in (8, 9, 10)
    }
    transfer = next(
        each
        for each in found["intervals"]
        if (each["rank"], each["cause"]) == (1, "transfer")
    )
    # Rank 1 waits first for what rank 0 sends.
    assert (transfer["about"], transfer["behind"]["actions"]) == ([0, 1], "0F0")
    assert main(["explain-bubble", program, "--p2p-time", "0.1"]) == 0
    text = capsys.readouterr().out
    assert f"{program}:9" in text
    assert "what it waits for is on its way between those ranks" in text
    for line in text.splitlines():
        assert len(line) <= 120


def test_nothing_takes_time(capsys: pytest.CaptureFixture[str]) -> None:
    zero = ["--forward-times", "0", "--backward-times", "0"]
    assert main(["explain-bubble", str(PROGRAMS / "1f1b.sched"), *zero]) == 0
    assert "idle time 0 of 0" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb_v"])
def test_what_is_behind_waits_grows_with_the_microbatches(name: str) -> None:
    """Though the waits of most ranks go on through the waits of others, in the warm-up of all."""
    pieces: list[int] = []
    for microbatches in (64, 256):
        plan = compile(name, {"ranks": 8, "microbatches": microbatches})
        account = Account(simulate(plan, Costs(p2p_time=0.1)))
        assert account.behind.exposed > 0
        pieces.append(len(account.behind.gap))
    # Four times the microbatches, and hardly more than four times the pieces.
    assert pieces[0] <= pieces[1] < 4.4 * pieces[0]


def test_waits_are_followed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The waits of late ranks go on through those of all ranks before: once for all, not for each."""
    rounds = 0

    def counted(*arguments: object) -> object:
        nonlocal rounds
        rounds += 1
        return follow(*arguments)

    follow = followed._follow
    monkeypatch.setattr(followed, "_follow", counted)
    ranks = 40
    source = read_source(PROGRAMS / "forward_only.sched")
    plan = compile(source, {"ranks": ranks, "microbatches": 4})
    _, idle, _ = explained(plan, Costs())
    # Behind the wait of a rank is one op of each rank before it; at the end, of each but the last.
    assert len(idle) == ranks * (ranks - 1)
    assert rounds < 3 * ranks
