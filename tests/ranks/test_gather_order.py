"""When sharded weights are gathered: that ops find them, in as few gathers as there can be, and
what `show` prints.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedlang import CompileError, Kind, Schedule, Source, compile, read_source
from schedlang.cli.main import main
from schedlang.ranks.gather_order import shards, shards_text
from schedlang.schedule.actions import Actions
from tests.support.paths import GALLERY
from tests.support.sizes import examples
from tests.support.strategies import schedules

USES = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)

#: The stages are updated one before the other, and one of them has a use in between.
UPDATES = """schedule updates {
    param ranks = 1
    param microbatches = 2
    stage s in 0 .. 2 on 0
    rank r {
        steady {
            for m in 0 .. 2 { F(0, m) F(1, m) B(1, m) if m == 1 { U(1) } B(0, m) }
            U(0)
        }
    }
}
"""


def follow(actions: Actions, places: int) -> tuple[int, int]:
    """Go over a rank's actions with what is done in between, which must be right: the gathers and
    reductions.
    """
    found = shards(actions, set(actions.stage), places)
    gathered = set[int]()
    owes = set[int]()
    kinds = [*zip(actions.kind, actions.stage, strict=True)]

    def do(steps: list[tuple[Kind, int]]) -> None:
        for what, stage in steps:
            if what == Kind.UNSHARD:
                assert stage not in gathered
                gathered.add(stage)
                assert len(gathered) <= places
            elif what == Kind.RESHARD:
                gathered.remove(stage)
            else:
                owes.remove(stage)

    for index, (kind, stage) in enumerate(kinds):
        do(found.before.get(index, []))
        if kind in USES:
            assert stage in gathered
        if kind in (Kind.B, Kind.W):
            owes.add(stage)
        do(found.after.get(index, []))
        if kind == Kind.U:
            assert stage not in gathered
            assert stage not in owes
    assert not gathered
    assert not owes
    return found.count(Kind.UNSHARD), found.count(Kind.REDUCE_GRAD)


def fewest(actions: Actions, places: int) -> int:
    """The fewest gathers of all ways to give places to stages, by trying them."""
    ways = {frozenset[int](): 0}
    for kind, stage in zip(actions.kind, actions.stage, strict=True):
        following = dict[frozenset[int], int]()
        for held, count in ways.items():
            if kind == Kind.U:
                then = [(held - {stage}, count)]
            elif kind not in USES or stage in held:
                then = [(held, count)]
            elif len(held) < places:
                then = [(held | {stage}, count + 1)]
            else:
                then = [(held - {each} | {stage}, count + 1) for each in held]
            for way, gathers in then:
                following[way] = min(gathers, following.get(way, gathers))
        ways = following
    return min(ways.values())


@examples(300)
@given(schedules(), st.integers(1, 4))
def test_ops_find_weights_in_the_fewest_gathers(
    schedule: Schedule, places: int
) -> None:
    """And one reduction for each stage that is trained."""
    for actions in schedule.ranks:
        gathers, reductions = follow(actions, places)
        assert gathers == fewest(actions, places)
        assert reductions == len(set(filter(schedule.layout.trains, actions.stage)))


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
@pytest.mark.parametrize("places", [1, 2, 3])
def test_programs_find_weights_in_the_fewest_gathers(path: Path, places: int) -> None:
    """Also where stages are updated in between."""
    try:
        plan = compile(read_source(path), {"ranks": 2})
    except CompileError:
        plan = compile(read_source(path))
    for actions in plan.ranks:
        left = actions.without_collectives()
        assert follow(left, places)[0] == fewest(left, places)


def test_what_a_program_says_is_not_said_again() -> None:
    plan = compile("looped_bfs_sharded", {"ranks": 2, "microbatches": 2})
    for rank, actions in enumerate(plan.ranks):
        assert not list(shards(actions, plan.stages_of(rank), 1))


def test_an_update_makes_gathered_weights_old() -> None:
    plan = compile(Source("updates.sched", UPDATES))
    assert [follow(plan.ranks[0], places) for places in (1, 2)] == [(15, 6), (6, 6)]


def test_with_a_place_for_each_stage_weights_are_gathered_once_and_early() -> None:
    plan = compile(
        read_source(next(path for path in GALLERY if path.stem == "interleaved_1f1b"))
    )
    for rank, actions in enumerate(plan.ranks):
        stages = plan.stages_of(rank)
        found = shards(actions, stages, len(stages))
        assert found.count(Kind.UNSHARD) == len(stages)
        ops = [index for index, kind in enumerate(actions.kind) if kind in USES]
        first = [
            next(
                each for each, index in enumerate(ops) if actions.stage[index] == stage
            )
            for stage in stages
        ]
        assert found.before == {
            ops[max(each - 1, 0)]: [(Kind.UNSHARD, stages[turn])]
            for turn, each in enumerate(first)
        }


def test_a_gather_begins_early_where_another_stage_can_give_up_its_place() -> None:
    """Stage 2 for stage 0 while stage 1 works; stage 0 once stage 2 has left its place."""
    program = """schedule three {
        param ranks = 1
        param microbatches = 2
        stage s in 0 .. 3 on 0
        rank r {
            for s in 0 .. 3 { F(s, 0) F(s, 1) }
            for s in 0 .. 3 { B(2 - s, 0) B(2 - s, 1) }
        }
    }"""
    assert shards_text(compile(Source("three.sched", program)), 0, 2).splitlines() == [
        "0UNSHARD 0F0",
        "1UNSHARD 0F1 1F0",
        "0RESHARD 2UNSHARD 1F1 2F0 2F1 2B0 2B1 2REDUCE_GRAD 2RESHARD 1B0",
        "0UNSHARD 1B1 1REDUCE_GRAD 1RESHARD 0B0 0B1 0REDUCE_GRAD 0RESHARD",
    ]


def test_gathers_are_shown_with_their_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "two.sched"
    costs = tmp_path / "costs.json"
    program.write_text(
        "schedule two { param ranks = 1 param microbatches = 1 stage s in 0 .. 2 on 0"
        " rank r { F(0, 0) F(1, 0) B(1, 0) B(0, 0) } }"
    )
    costs.write_text('{"weights_bytes": [1000, 10]}')
    shown = ["show", str(program), "--shards", "1"]
    assert main(shown) == 0
    assert capsys.readouterr().out.endswith(
        "rank 0, stages 0, 1: 3 gathers, at most 1 stage at once, 2 reductions\n"
        "  0UNSHARD 0F0\n"
        "  0RESHARD 1UNSHARD 1F0 1B0 1REDUCE_GRAD 1RESHARD\n"
        "  0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD\n"
    )
    assert main([*shown, "--costs", str(costs)]) == 0
    figures = (
        "3 gathers of 2,010 bytes, at most 1 stage at once, 1,000 bytes, 2 reductions"
    )
    assert f"rank 0, stages 0, 1: {figures}\n" in capsys.readouterr().out
    costs.write_text('{"weights_bytes": [1000, 10, 1]}')
    for wrong in (
        [*shown, "--costs", str(costs)],
        ["show", str(program), "--costs", str(costs)],
        [*shown[:-1], "0"],
    ):
        with pytest.raises(SystemExit):
            main(wrong)
