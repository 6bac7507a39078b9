"""Gathers and sums that a program writes: what is wrong with them, when they run, what they hold."""

from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from schedlang import (
    CompileError,
    Costs,
    Kind,
    Plan,
    Schedule,
    Source,
    compile,
    read_plan,
    simulate,
    write_plan,
)
from schedlang.plan.text import parse_actions
from schedlang.schedule.actions import Actions
from schedlang.schedule.layout import Layout, Pipeline
from tests.support.own_collectives import comes_to_its_end
from tests.support.own_needs import needs
from tests.support.sections import cases, section
from tests.support.sizes import examples
from tests.support.strategies import make_schedule
from tests.support.verdict import proved

ZERO = """schedule zero {
    param ranks = 2
    param microbatches = 2
    stage s in 0 .. 2 * ranks on s % ranks
    rank r {
        for c in 0 .. 2 {
            unshard(stage(c))
            repeat microbatches { F(stage(c), next) }
            reshard(stage(c))
        }
        for c in 0 .. 2 by -1 {
            unshard(stage(c))
            repeat microbatches { B(stage(c), next) }
            reduce(stage(c))
            reshard(stage(c))
        }
    }
}
"""

#: Two pipelines of one microbatch: rank 0 holds down(0) and up(1), rank 1 down(1) and up(0).
BOTH_WAYS = """schedule both_ways {
    param ranks = 2
    param microbatches = 2
    pipeline down runs 1 stage s in 0 .. 2 on s
    pipeline up runs 1 stage s in 0 .. 2 on 1 - s
    rank r {
        %s
    }
}
"""
FORWARDS = "F(down(r), 0)  F(up(1 - r), 0)"
BACKWARDS = "B(down(r), 0)  B(up(1 - r), 0)"


def both_ways(text: str, costs: Costs | None = None) -> Plan:
    return compile(Source("both_ways.sched", BOTH_WAYS % text), costs=costs or Costs())


def wrong(text: str) -> str:
    """What is said of the ranks of both ways, or of a whole program."""
    program = text if "schedule" in text else BOTH_WAYS % text
    with pytest.raises(CompileError) as caught:
        compile(Source("wrong.sched", program))
    return str(caught.value)


def test_gathers_and_sums_are_in_the_plan_and_read_again(tmp_path: Path) -> None:
    plan = compile(Source("zero.sched", ZERO))
    assert plan.ranks[1].text().split()[:9] == [
        "1UNSHARD",
        "1RECV_F0",
        "1F0",
        "1SEND_F0",
        "1RECV_F1",
        "1F1",
        "1SEND_F1",
        "1RESHARD",
        "3UNSHARD",
    ]
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").ranks == plan.ranks


def test_what_is_wrong_with_them(golden: Callable[[str, Path], None]) -> None:
    """What both ranks do, with a mistake; or a program of its own."""
    path = Path(__file__).with_name("collectives.txt")
    golden("".join(section(text, wrong(text)) for text in cases(path)), path)


def test_they_are_in_no_overlap_and_no_stream() -> None:
    start = "schedule s { param ranks = 1 param microbatches = 1 rank r {"
    with pytest.raises(
        CompileError, match="`unshard` goes on beside what follows by itself"
    ):
        compile(
            Source("s.sched", f"{start} overlap {{ unshard  F(0) }} B(0) reshard }} }}")
        )
    with pytest.raises(
        CompileError, match="`reduce` in `steady`: a schedule without a flush"
    ):
        compile(Source("s.sched", f"{start} steady {{ F(0) B(0) reduce U }} }} }}"))
    block = "schedule s { param ranks = 1 param microbatches = 1 block m every 3 { stage s in 0 .. 1"
    with pytest.raises(CompileError, match="`reduce` is of none"):
        compile(
            Source(
                "s.sched",
                f"{block} {{ F(s, m) at 0 B(s, m) at 1 reduce(s) at 3 }} }} }}",
            )
        )


def test_ops_wait_for_gathers_and_a_later_replica_begins_them() -> None:
    gathers = "if r == 0 { unshard(down(0))  unshard(up(1)) } else { unshard(up(0))  unshard(down(1)) }"
    costs = Costs(gather_times=(2.0,), sum_times=(3.0, 1.0, 1.0, 1.0))
    order = "if r == 0 { reduce(down(0))  reduce(up(1)) } else { reduce(up(0))  reduce(down(1)) }"
    text = f"{gathers}  {FORWARDS}  {BACKWARDS}  reshard  {order}"
    plan = both_ways(text, costs)
    timeline = simulate(plan, costs).timeline
    gathered = [
        bar for bars in timeline.copies for bar in bars if bar.kind == Kind.UNSHARD
    ]
    # Each rank has both gathers one after the other; the ops of the first begin at 2.
    assert [(bar.stage, bar.start, bar.end) for bar in gathered] == [
        (0, 0.0, 2.0),
        (3, 2.0, 4.0),
        (2, 0.0, 2.0),
        (1, 2.0, 4.0),
    ]
    assert min(bars[0].start for bars in timeline.ranks) == 2.0
    sums = {
        bar.stage: bar
        for bars in timeline.copies
        for bar in bars
        if bar.kind == Kind.REDUCE_GRAD
    }
    # Replicas end together, after the longest time that either has.
    for one, other in ((0, 2), (1, 3)):
        assert (sums[one].start, sums[one].end) == (sums[other].start, sums[other].end)
    assert sums[0].end - sums[0].start == 3
    assert timeline.makespan == max(bar.end for bar in sums.values())


def test_the_order_of_the_policy_takes_as_long_as_the_policy() -> None:
    """Written where the runtime makes them by itself, gathers and sums take no other time."""
    once = ZERO.replace(
        "            reshard(stage(c))\n        }\n        for",
        "        }\n        for",
    )
    once = once.replace("by -1 {\n            unshard(stage(c))\n", "by -1 {\n")
    implied = "".join(
        line
        for line in ZERO.splitlines(keepends=True)
        if not any(word in line for word in ("unshard", "reshard", "reduce"))
    )
    costs = Costs(gather_times=(0.25,), sum_times=(3.0, 1.0, 2.0, 1.0), p2p_time=0.5)
    written, left = (
        simulate(compile(Source("zero.sched", text), costs=costs), costs).timeline
        for text in (once, implied)
    )
    assert written.makespan == left.makespan
    assert sorted(each.end for each in written.beside if each.after >= 0) == sorted(
        each.end for each in left.beside if each.after >= 0
    )


def test_gathered_weights_are_held_until_they_are_dropped() -> None:
    claims = "assert peak(r) <= 14\n        assert peak(r) >= 14\n    "
    program = ZERO.replace("    rank r {", "    memory gather = 10\n    rank r {")
    program = f"{program[: program.rindex('}', 0, -3)]}    {claims}}}\n}}\n"
    # Four activations of two stages, and the weights of one stage.
    plan = compile(Source("zero.sched", program))
    assert simulate(plan).peak_activations == (4, 4)
    assert simulate(plan).peak_memory == (14.0, 14.0)
    costs = Costs(
        activation_bytes=(1.0,), weights_bytes=(100.0,), gathered_bytes=(1000.0,)
    )
    assert simulate(plan, costs).peak_bytes == (1204.0, 1204.0)


@pytest.mark.parametrize("cost", ["", "cost W = 0", "cost I = 0  cost W = 0"])
def test_they_stay_where_they_are_written_though_ops_take_no_time(cost: str) -> None:
    program = f"""schedule s {{
        param ranks = 2  param microbatches = 2
        {cost}
        rank r {{
            unshard  F(0) F(1)  reshard
            unshard  I(0) W(0)  reduce  I(1) W(1)  reduce  reshard
        }}
    }}"""
    plan = compile(Source("s.sched", program))
    assert plan.ranks[1].compute().text() == (
        "1UNSHARD 1F0 1F1 1RESHARD 1UNSHARD 1I0 1W0 1REDUCE_GRAD 1I1 1W1 1REDUCE_GRAD 1RESHARD"
    )


def test_a_sum_without_its_other_side_is_told_where_nothing_is_proved() -> None:
    """It stands still: rank 0 waits for the sum of a gradient that comes behind its own update."""
    texts = (
        "3RECV_F0 3F0 3B0 3U 3SEND_B0",
        "2F0 2SEND_F0 0F0 1F0 1B0 2RECV_B0 2B0 2REDUCE_GRAD 2U 1U 0B0 0REDUCE_GRAD 0U",
    )
    pipelines = (Pipeline("p0", 0, 2, 1), Pipeline("p1", 2, 4, 1))
    ranks = tuple(parse_actions(text, [0] * len(text.split())) for text in texts)
    schedule = make_schedule((1, 1, 1, 0), 2, ranks)
    schedule = evolve(schedule, layout=Layout((1, 1, 1, 0), pipelines))
    with pytest.raises(CompileError, match=r"error\[collective\]"):
        simulate(schedule)


@st.composite
def written(draw: st.DrawFn) -> Schedule:
    """A schedule of a pipeline, or of two in opposite directions, with gathers and sums in places
    that may be right.
    """
    ranks = draw(st.integers(1, 3))
    pipelines = draw(st.integers(1, 2))
    directions = [list(range(ranks)), list(reversed(range(ranks)))][:pipelines]
    placement = tuple(rank for direction in directions for rank in direction)
    lines = tuple(
        Pipeline(f"p{number}", number * ranks, (number + 1) * ranks, 1)
        for number in range(pipelines)
    )
    lists = [Actions() for _ in range(ranks)]
    empty = make_schedule(placement, 1, tuple(lists))
    layout = Layout(placement, lines)
    wanted = [
        (kind, stage, 0) for stage in range(len(placement)) for kind in (Kind.F, Kind.B)
    ]
    schedule = evolve(empty, layout=layout)
    made: set[tuple[int, int, int]] = set()
    while wanted:
        ready = [
            op for op in wanted if all(need in made for need in needs(schedule, *op))
        ]
        op = draw(st.sampled_from(ready))
        wanted.remove(op)
        made.add(op)
        lists[placement[op[1]]].add(*op, 0)
    with_gathers = draw(st.booleans())
    with_sums = draw(st.booleans())
    is_in_one_order = draw(st.booleans())
    pieces = draw(st.permutations(range(ranks)))
    changed = []
    for actions in lists:
        rows = [actions.row(index)[:3] for index in range(len(actions))]
        held = sorted(
            {stage for _, stage, _ in rows}, key=lambda stage: pieces[stage % ranks]
        )
        stages = held if is_in_one_order else draw(st.permutations(held))
        at = 0
        for stage in stages if with_gathers else ():
            first = next(i for i, row in enumerate(rows) if row[1] == stage)
            at = draw(st.integers(at if is_in_one_order else 0, max(first, at)))
            rows.insert(at, (Kind.UNSHARD, stage, -1))
            at += 1
            last = max(i for i, row in enumerate(rows) if row[1] == stage)
            rows.insert(
                draw(st.integers(last + 1, len(rows))), (Kind.RESHARD, stage, -1)
            )
        at = 0
        for stage in stages if with_sums else ():
            last = max(i for i, row in enumerate(rows) if row[:2] == (Kind.B, stage))
            least = max(last + 1, at if is_in_one_order else 0)
            at = draw(st.integers(least, len(rows)))
            rows.insert(at, (Kind.REDUCE_GRAD, stage, -1))
            at += 1
        if rows and not draw(st.integers(0, 9)):
            rows.insert(draw(st.integers(0, len(rows) - 1)), rows.pop())
        beside = [index for index, row in enumerate(rows) if row[2] < 0]
        if beside and not draw(st.integers(0, 9)):
            del rows[draw(st.sampled_from(beside))]
        own = Actions()
        for row in rows:
            own.add(*row, 0)
        changed.append(own)
    return evolve(schedule, ranks=tuple(changed))


@given(schedule=written())
@examples(300)
def test_the_proof_says_what_going_round_the_ranks_finds(schedule: Schedule) -> None:
    plan = proved(schedule)
    assert (plan is not None) == comes_to_its_end(schedule)
    if plan is not None:
        assert simulate(plan).timeline.makespan < inf
