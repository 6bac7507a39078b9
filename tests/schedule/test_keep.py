"""What a rank offloads is kept by another rank: what both then hold, how long the copies take, and
what is wrong with it.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given

from schedlang import (
    Builder,
    CompileError,
    Costs,
    Execution,
    Kind,
    Plan,
    Schedule,
    Source,
    compile,
    prove,
    read_plan,
    simulate,
    write_plan,
)
from schedlang.diagnostics.source import Span
from schedlang.extras.difference.difference import Setting, differ, side_of
from schedlang.lowering import lower
from schedlang.report.lines import line_costs
from schedlang.schedule.timeline import Bars
from tests.schedule.test_offload import offloaded
from tests.support.sizes import examples
from tests.support.strategies import schedules

KEPT = """schedule kept {
    param ranks = 2  param microbatches = 2
    keeper(r) = 1 - r
    rank r {
        if r == 0 { F(0) offload(0) F(1) reload(0) B(0) B(1) }
        if r == 1 { F(0) B(0) F(1) B(1) }
    }
}"""


def kept(old: str = "", new: str = "") -> Plan:
    assert old in KEPT
    return compile(Source("kept.sched", KEPT.replace(old, new) if old else KEPT))


def test_the_keeper_holds_it_from_the_begin_of_the_offload_to_the_end_of_the_reload() -> (
    None
):
    """The copies take from 1 to 4, and from 4 to 6; on rank 1, F0 begins at 1."""
    execution = simulate(kept(), Costs(offload_times=(3,), reload_times=(2,)))
    assert [str(bar) for bar in execution.timeline.copies[0]] == [
        "0OFFLOAD0",
        "0RELOAD0",
    ]
    assert execution.memory == (
        ((0, 1), (1, 2), (4, 1), (4, 2), (8, 1), (10, 0)),
        ((1, 1), (1, 2), (4, 1), (4, 2), (6, 1), (7, 0)),
    )
    assert execution.peak_activations == (2, 2)
    on_the_host = simulate(kept("keeper(r) = 1 - r", ""), Costs(offload_times=(3,)))
    assert on_the_host.peak_activations == (2, 1)
    assert (
        on_the_host.timeline.ranks
        == simulate(kept(), Costs(offload_times=(3,))).timeline.ranks
    )


def test_bytes_are_those_of_the_stage_that_they_are_of() -> None:
    execution = simulate(kept(), Costs(activation_bytes=(100, 7), weights_bytes=(1,)))
    assert execution.peak_bytes == (201, 108)


def test_the_lines_of_the_other_rank_are_why_the_keeper_holds_most() -> None:
    plan = kept("F(1) reload(0)", "F(1) offload(1) reload(1) reload(0)")
    execution = simulate(plan, Costs(offload_times=(0.5,)))
    assert execution.peak_activations == (2, 3)
    costs = line_costs(plan, execution)
    assert costs.peak_rank == 1
    begin = KEPT.index("if r == 0")
    assert costs.within(Span(begin, KEPT.index("if r == 1"))).held == 2


def test_a_run_has_recorded_copies_among_the_ops() -> None:
    execution = simulate(kept(), Costs(offload_times=(3,), reload_times=(2,)))
    timeline = execution.timeline
    together = tuple(
        Bars.of(sorted([*copies, *ops], key=lambda bar: bar.start))
        for copies, ops in zip(timeline.copies, timeline.ranks, strict=True)
    )
    for copies in ((), tuple(Bars() for _ in together)):
        recorded = evolve(timeline, ranks=together, copies=copies)
        measured = Execution("measured", execution.schedule, execution.costs, recorded)
        assert measured.peak_activations == execution.peak_activations


def test_gathers_of_the_other_rank_are_not_kept() -> None:
    ops = "F(0) offload(0) F(1) reload(0) B(0) B(1)"
    plan = kept(ops, f"unshard(0) {ops} reshard(0)")
    execution = simulate(plan, Costs(gather_memory=(50,)))
    assert execution.peak_memory == (52, 2)
    assert execution.memory[1] == simulate(kept()).memory[1]


@pytest.mark.parametrize(
    ("costs", "time"),
    [
        # As long as a forward, where nothing is said.
        (Costs(), 1),
        (Costs(forward_times=(2,)), 2),
        # By the link to the keeper: a latency, and the bytes over its bandwidth.
        (
            Costs(
                activation_bytes=(60,),
                boundary_bytes=(1,),
                bandwidth_in_node=20,
                latency_in_node=0.5,
            ),
            3.5,
        ),
        (
            Costs(
                activation_bytes=(60,),
                boundary_bytes=(1,),
                bandwidth_in_node=20,
                bandwidth_between_nodes=10,
                ranks_per_node=1,
            ),
            6,
        ),
        # What is said comes first.
        (
            Costs(
                activation_bytes=(60,),
                boundary_bytes=(1,),
                bandwidth_in_node=20,
                offload_times=(0.25,),
            ),
            0.25,
        ),
    ],
)
def test_how_long_a_copy_takes(costs: Costs, time: float) -> None:
    plan = kept()
    assert [
        bar.end - bar.start for bar in simulate(plan, costs).timeline.copies[0]
    ] == [time] * 2
    if costs.bandwidth_in_node and not costs.offload_times:
        host = simulate(kept("keeper(r) = 1 - r", ""), costs)
        assert [bar.end - bar.start for bar in host.timeline.copies[0]] == [1, 1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "keeper(r) = r",
            "are offloaded, and the rank keeps its own: `keeper` must name another one",
        ),
        (
            "keeper(r) = r + 1",
            r"error\[no-such-rank\]: rank 1 is kept on rank 2, there are ranks 0",
        ),
        ("keeper(r) = r - 1", r"error\[no-such-rank\]: rank 0 is kept on rank -1"),
        ("keeper(r) = 0.5", "the number of a rank"),
        (
            "keeper(r) = 1 - r  keeper(r) = 1 - r",
            r"error\[repeated-part\]: a schedule has one `keeper`",
        ),
        ("keeper(r) = 1 - s", r"error\[unknown-name\]"),
    ],
)
def test_what_is_wrong(line: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        kept("keeper(r) = 1 - r", line)


def test_a_rank_that_offloads_nothing_may_be_its_own_keeper() -> None:
    """As the rank in the middle of an odd number of them, where rank r is kept on the r-th last."""
    assert kept("keeper(r) = 1 - r", "keeper(r) = 1").layout.keepers == (1, 1)


def test_keep_is_a_name_elsewhere() -> None:
    plan = kept("if r == 1 {", "let keep = 1  if r == keep {")
    assert [actions.text() for actions in plan.ranks] == [
        actions.text() for actions in kept().ranks
    ]


def test_a_plan_file_has_keepers(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(kept(), path)
    assert read_plan(path) == kept()
    document = kept().to_json()
    for keepers in ([1], [1, 2], [1, -1], 3, [1, "0"]):
        path.write_text(json.dumps(document | {"keepers": keepers}))
        with pytest.raises(CompileError, match="keepers"):
            read_plan(path)
    path.write_text(json.dumps(document | {"keepers": [0, 0]}))
    with pytest.raises(CompileError, match="the rank keeps its own"):
        read_plan(path)
    path.write_text(json.dumps(document | {"keepers": []}))
    assert read_plan(path).layout.keepers == ()


def test_keepers_in_python() -> None:
    with Builder("kept", ranks=2, microbatches=1, keepers=[1, 0]) as b:
        b.forward(0, 0)
        b.offload(0, 0)
        b.reload(0, 0)
        b.backward(0, 0)
        b.forward(1, 0)
        b.backward(1, 0)
    assert b.plan.layout.keepers == (1, 0)
    assert "keeper(r) = 1 - r" in b.text()
    for keepers, message in (
        ([1], "`keepers`: there must be one for each rank: 1 for 2"),
        ([1, 2], r"`keepers\[1\]`"),
    ):
        with pytest.raises(ValueError, match=message):
            Builder("kept", ranks=2, microbatches=1, keepers=keepers)


def test_a_difference_says_where_activations_are_kept() -> None:
    sides = [
        side_of("kept.sched", plan, Costs())
        for plan in (kept("keeper(r) = 1 - r", ""), kept())
    ]
    assert Setting("keepers", "none", "1, 0") in differ(*sides).settings


def held(execution: Execution, rank: int, time: float) -> float:
    """What a rank holds at a time at which nothing changes."""
    steps = execution.memory[rank]
    return next((amount for when, amount in reversed(steps) if when < time), 0.0)


@examples(100)
@given(schedules())
def test_what_keepers_hold_is_counted_from_the_bars(schedule: Schedule) -> None:
    """Against the same on the host: at any time a rank holds as much as there, and what others have
    begun to offload to it and have not reloaded whole.
    """
    ranks = len(schedule.ranks)
    on_the_host = offloaded(schedule)
    keepers = tuple((rank + 1) % ranks for rank in range(ranks))
    layout = evolve(on_the_host.layout, keepers=keepers)
    if ranks == 1:
        return
    plain = prove(lower(on_the_host))
    kept = prove(lower(evolve(on_the_host, layout=layout)))
    assert kept.timeline == plain.timeline
    bars = [bar for rank in plain.timeline.copies for bar in rank]
    bars += [bar for rank in plain.timeline.ranks for bar in rank]
    times = sorted({time for bar in bars for time in (bar.start, bar.end)})
    for time in [(before + after) / 2 for before, after in pairwise(times)]:
        for rank, copies in enumerate(plain.timeline.copies):
            away = sum(bar.kind == Kind.OFFLOAD and bar.start < time for bar in copies)
            back = sum(bar.kind == Kind.RELOAD and bar.end < time for bar in copies)
            here = held(kept, keepers[rank], time) - held(plain, keepers[rank], time)
            assert here == away - back


@pytest.mark.parametrize(
    ("ranks", "microbatches"), [(4, 8), (5, 11), (7, 9), (8, 40), (16, 24)]
)
def test_bpipe_is_1f1b_with_as_much_on_every_rank(
    ranks: int, microbatches: int
) -> None:
    """Of the same ops in the same time, the rank that holds most holds half as much, and one more."""
    params = {"ranks": ranks, "microbatches": microbatches}
    bpipe = simulate(compile("bpipe", params))
    plain = simulate(compile("1f1b", params))
    assert bpipe.timeline.ranks == plain.timeline.ranks
    assert plain.peak_activations[0] == min(ranks, microbatches)
    assert max(bpipe.peak_activations) == (ranks + 3) // 2
    kinds = {kind for actions in bpipe.schedule.ranks for kind in actions.kind}
    assert {Kind.OFFLOAD, Kind.RELOAD} <= kinds
