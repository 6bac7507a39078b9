"""Copies of activations to the host and back: when they run, what ranks then hold, and what is
wrong with them.
"""

from itertools import pairwise

import pytest
from attrs import evolve
from hypothesis import given

from schedlang import (
    Actions,
    CompileError,
    Costs,
    Kind,
    Schedule,
    Source,
    compile,
    prove,
    read_source,
    simulate,
)
from schedlang.lowering import lower
from tests.support.paths import PROGRAMS
from tests.support.sizes import examples
from tests.support.strategies import oracle, schedules


def program(ops: str, head: str = "", ranks: int = 1, microbatches: int = 2) -> Source:
    text = f"schedule s {{ param ranks = {ranks} param microbatches = {microbatches} {head} rank r {{ {ops} }} }}"
    return Source("s.sched", text)


def copies(source: Source, costs: Costs) -> list[list[str]]:
    """Each rank's copies with their times."""
    timeline = simulate(compile(source, {}, costs)).timeline
    return [
        [f"{bar} {bar.start:g}-{bar.end:g}" for bar in rank] for rank in timeline.copies
    ]


def test_copies_run_one_after_the_other_beside_the_ops() -> None:
    """The first copy takes 3, so the second one waits until 4, and B1 until its activation is back
    at 12.
    """
    source = program("F(0) offload(0) F(1) offload(1) reload(1) reload(0) B(1) B(0)")
    costs = Costs(offload_times=(3,), reload_times=(5,))
    assert copies(source, costs) == [
        ["0OFFLOAD0 1-4", "0OFFLOAD1 4-7", "0RELOAD1 7-12", "0RELOAD0 12-17"]
    ]
    (bars,) = simulate(compile(source, {}, costs)).timeline.ranks
    assert [(str(bar), bar.start, bar.end) for bar in bars] == [
        ("0F0", 0, 1),
        ("0F1", 1, 2),
        ("0B1", 12, 14),
        ("0B0", 17, 19),
    ]


def test_a_copy_begins_where_it_stands() -> None:
    source = program("F(0) F(1) offload(0) B(1) reload(0) B(0)")
    assert copies(source, Costs(offload_times=(1,), reload_times=(1,))) == [
        ["0OFFLOAD0 2-3", "0RELOAD0 4-5"]
    ]
    short = Costs(forward_times=(0.25,), offload_times=(0.25,), reload_times=(1,))
    assert copies(source, short) == [["0OFFLOAD0 0.5-0.75", "0RELOAD0 2.5-3.5"]]


def test_ranks_share_a_link_in_order_of_time() -> None:
    ops = "F(0) offload(0) F(1) reload(0) B(0) B(1)"
    costs = Costs(offload_times=(4,), reload_times=(1,), p2p_time=0)
    # Each rank has a link of its own here.
    own = [["0OFFLOAD0 1-5", "0RELOAD0 5-6"], ["1OFFLOAD0 2-6", "1RELOAD0 6-7"]]
    assert copies(program(ops, ranks=2), costs) == own
    # Both ranks ask for the link at 2; of one time, the lower rank comes first.
    shared = [["0OFFLOAD0 1-5", "0RELOAD0 5-6"], ["1OFFLOAD0 6-10", "1RELOAD0 10-11"]]
    assert copies(program(ops, "link(r) = 0", ranks=2), costs) == shared
    # Rank 1 asks for it between the two copies of rank 0.
    ops = "F(0) offload(0) F(1) F(2) offload(1) reload(1) reload(0) B(0) B(1) B(2)"
    first, second = copies(
        program(ops, "link(r) = 0", ranks=2, microbatches=3),
        evolve(costs, forward_times=(0.25,)),
    )
    assert (first[:2], second[0]) == (
        ["0OFFLOAD0 0.25-4.25", "0OFFLOAD1 8.25-12.25"],
        "1OFFLOAD0 4.25-8.25",
    )


@pytest.mark.parametrize(
    ("offload", "peak"),
    [
        (0.5, 2),  # 0OFFLOAD0 ends at 1.5, while 0F1 runs
        (1.0, 2),  # 0OFFLOAD0 ends at 2, when 0F2 begins
        (1.5, 3),  # 0OFFLOAD0 ends at 2.5, when 0F2 has begun
    ],
)
def test_memory_is_held_until_the_copy_ends_and_from_when_the_next_begins(
    offload: float, peak: int
) -> None:
    microbatches = "F(0) offload(0) F(1) offload(1) F(2) offload(2)"
    source = program(
        f"{microbatches} reload(2) B(2) reload(1) B(1) reload(0) B(0)", microbatches=3
    )
    execution = simulate(
        compile(source, {}, Costs(offload_times=(offload,), reload_times=(0.25,)))
    )
    assert execution.peak_activations == (peak,)


@pytest.mark.parametrize(
    ("ops", "message"),
    [
        (
            "F(0) offload(0) F(1) B(0) B(1)",
            "of microbatch 0 on stage 0 are offloaded, and never reloaded",
        ),
        (
            "F(0) F(1) offload(1) B(0) B(1)",
            "of microbatch 1 on stage 0 are offloaded, and never reloaded",
        ),
        (
            "F(0) F(1) reload(0) B(0) B(1)",
            "of microbatch 0 on stage 0 are reloaded, and never offloaded",
        ),
        (
            "F(0) offload(0) F(1) B(0) reload(0) B(1)",
            "`0B0` on rank 0 runs before `0RELOAD0`",
        ),
        (
            "offload(0) F(0) F(1) reload(0) B(0) B(1)",
            "`0OFFLOAD0` on rank 0 runs before `0F0`",
        ),
        (
            "F(0) F(1) reload(0) offload(0) B(0) B(1)",
            "`0RELOAD0` on rank 0 runs before `0OFFLOAD0`",
        ),
        (
            "F(0) offload(0) offload(0) F(1) reload(0) B(0) B(1)",
            "the offload of microbatch 0 on stage 0 runs twice",
        ),
        (
            "F(0) offload(0) F(1) reload(0) R(0) B(0) B(1)",
            "are offloaded, but dropped after the forward",
        ),
        (
            "F(0) overlap { offload(0) F(1) } reload(0) B(0) B(1)",
            "`offload` goes on beside what follows by itself",
        ),
        (
            "F(0) offload(5) F(1) reload(0) B(0) B(1)",
            "`offload` of microbatch 5, there are microbatches 0 to 1",
        ),
    ],
)
def test_what_is_wrong(ops: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        compile(program(ops))


def test_links_of_too_many_ranks_are_refused_before_they_are_counted() -> None:
    with pytest.raises(CompileError, match=r"error\[too-many-ops\]"):
        compile(program("F(0) B(0)", "link(r) = r / 2", ranks=10**9))


def test_passes_do_not_move_copies() -> None:
    ops = "F(0) offload(0) F(1) reload(0) B(0) B(1)"
    for item in ("reorder", "fill W"):
        source = program(ops)
        with pytest.raises(
            CompileError, match=r"error\[pass\]: the ops cannot be moved: copies"
        ):
            compile(Source("s.sched", f"{source.text[:-1]} {item} }}"))


def test_in_a_building_block() -> None:
    block = "block m every 4 { stage s in 0 .. 1 { F(s, m) at 0 offload(s, m) at 1 reload(s, m) at 2 B(s, m) at 2 } }"
    text = f"schedule s {{ param ranks = 1 param microbatches = 2 {block} squeeze }}"
    (actions,) = compile(Source("s.sched", text)).ranks
    assert actions.text() == "0F0 0OFFLOAD0 0RELOAD0 0B0 0F1 0OFFLOAD1 0RELOAD1 0B1"


def offloaded(schedule: Schedule) -> Schedule:
    """The schedule with each activation copied away after its forward, and back before its
    backward.
    """
    ranks = []
    for actions in schedule.ranks:
        changed = Actions()
        for index in range(len(actions)):
            kind, stage, microbatch, place, group = actions.row(index)
            if kind in (Kind.B, Kind.I):
                changed.add(Kind.RELOAD, stage, microbatch, place)
            changed.add(kind, stage, microbatch, place, group)
            if kind == Kind.F and schedule.layout.has_backward[stage]:
                changed.add(Kind.OFFLOAD, stage, microbatch, place)
        ranks.append(changed)
    return evolve(schedule, ranks=tuple(ranks))


@examples(100)
@given(schedules())
def test_copies_that_take_no_time_change_nothing_but_memory(schedule: Schedule) -> None:
    free = evolve(
        offloaded(schedule), costs=Costs(offload_times=(0,), reload_times=(0,))
    )
    before = prove(lower(schedule))
    after = prove(lower(free))
    assert after.timeline.ranks == before.timeline.ranks
    assert all(
        ours <= theirs
        for ours, theirs in zip(
            after.peak_activations, before.peak_activations, strict=True
        )
    )
    assert oracle(lower(free))


@examples(100)
@given(schedules())
def test_slow_copies_only_delay(schedule: Schedule) -> None:
    """With links shared by all ranks too: no op starts earlier, and the link has one copy at a
    time.
    """
    slow = offloaded(schedule)
    slow = evolve(slow, layout=evolve(slow.layout, links=(0,) * len(slow.ranks)))
    before = prove(lower(schedule)).timeline
    after = prove(lower(slow)).timeline
    starts = {str(bar): bar.start for rank in before.ranks for bar in rank}
    assert all(bar.start >= starts[str(bar)] for rank in after.ranks for bar in rank)
    taken = sorted((bar.start, bar.end) for rank in after.copies for bar in rank)
    assert all(first[1] <= second[0] for first, second in pairwise(taken))


@pytest.mark.parametrize(("ranks", "chunks"), [(4, 2), (4, 4), (8, 4)])
def test_pipe_offload_against_the_same_order_without_it(
    ranks: int, chunks: int
) -> None:
    """Where a round trip takes as long as a forward, offload is free: of half the chunks it halves
    the peak.

    The order is that of grouped interleaving as published, with each weight gradient at once.
    """
    params = {"ranks": ranks, "microbatches": 2 * ranks, "chunks": chunks}
    costs = Costs(offload_times=(0.5,), reload_times=(0.5,))
    program = read_source(PROGRAMS / "interleaved_low_memory.sched")
    head, filling, _ = program.text.partition("    fill W within")
    assert filling
    published = compile(Source(program.path, head + "}"), params)
    plain = simulate(published)
    source = read_source(PROGRAMS / "pipe_offload.sched")
    half, whole = (
        simulate(compile(source, {**params, "offloaded": each}, costs))
        for each in (chunks // 2, chunks)
    )
    assert half.timeline.makespan == whole.timeline.makespan == plain.timeline.makespan
    assert max(half.peak_activations) <= max(plain.peak_activations) // 2
    assert max(whole.peak_activations) <= 5
    without = compile(source, {**params, "offloaded": 0})
    assert [each.text() for each in without.ranks] == [
        each.text() for each in published.ranks
    ]
