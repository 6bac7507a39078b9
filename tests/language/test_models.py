"""Programs of several models: what they lay out, and what is said of mistakes."""

import json
from typing import Any

import pytest

from schedlang import CompileError, Source, compile
from schedlang.plan.proved_again import plan_in

LINES = """
    model teacher runs microbatches stage s in 0 .. 1 on 1
    model student runs microbatches stage s in 0 .. ranks on s
"""
ORDER = """
    rank r {
        repeat microbatches { if r == 1 { F(teacher(0), next) }  F(student(r), next) }
        repeat microbatches { B(student(r), next) }
    }
"""


def program(lines: str, order: str = ORDER) -> Source:
    text = f"schedule s {{ param ranks = 2 param microbatches = 4 {lines} {order} }}"
    return Source("s.sched", text)


def test_models_are_no_replicas() -> None:
    plan = compile(
        program(LINES + "edge s in 0 .. 1 from teacher(0) to student(1) frozen teacher")
    )
    layout = plan.layout
    assert layout.models
    assert layout.pieces == 3
    assert [layout.replicas(stage) for stage in range(3)] == [[0], [1], [2]]
    assert [layout.model_of(stage) for stage in range(3)] == [
        "teacher",
        "student",
        "student",
    ]
    # The edge leads to no neighbour, whatever its number; the student is a chain all the same.
    assert layout.far_edges == {3: (0, 2)}
    assert layout.before == ((), (), (1, 0))
    assert [layout.is_first(stage) for stage in range(3)] == [True, True, False]
    assert [layout.is_last(stage) for stage in range(3)] == [False, False, True]
    assert layout.has_backward == (False, True, True)
    assert [row.compute().text() for row in plan.ranks] == [
        "1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3",
        "0F0 2F0 0F1 2F1 0F2 2F2 0F3 2F3 2B0 2B1 2B2 2B3",
    ]
    assert plan_in("plan.json", json.loads(json.dumps(plan.to_json()))) == plan


def test_edges_of_a_model_take_the_place_of_its_own_chain() -> None:
    lines = """
        model one runs microbatches stage s in 0 .. 3 on s % 2
        model other runs 2 stage s in 0 .. 2 on s
        edge s in 0 .. 2 from s to 2
    """
    order = """
        rank r {
            for m in 0 .. microbatches {
                if r == 0 { F(one(0), m)  F(one(2), m)  B(one(2), m)  B(one(0), m) }
                else { F(one(1), m)  B(one(1), m) }
            }
            for m in 0 .. 2 { F(other(r), m) }
            for m in 0 .. 2 { B(other(r), m) }
        }
    """
    layout = compile(program(lines, order)).layout
    assert layout.before == ((), (), (1, 0), (), (3,))
    assert [layout.units(stage) for stage in range(5)] == [4, 4, 4, 2, 2]
    assert layout.microbatches == 4


def test_models_that_differ_by_a_number() -> None:
    lines = "model lane(i) in 0 .. 2 runs microbatches + i stage s in 0 .. 1 on i frozen lane"
    order = "rank r { for m in 0 .. microbatches + r { F(lane(r, 0), m) } }"
    with pytest.raises(CompileError, match="all stages are frozen"):
        compile(program(lines, order))
    plan = compile(program(lines.removesuffix("frozen lane"), order))
    assert [each.name for each in plan.layout.pipelines] == ["lane(0)", "lane(1)"]
    assert [each.microbatches for each in plan.layout.pipelines] == [4, 5]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (
            LINES + "pipeline up runs microbatches stage s in 0 .. 1 on s",
            "a schedule has pipelines, which are replicas of one model, or models",
        ),
        (LINES + "frozen techer", "no model `techer`"),
        (LINES + "frozen ranks", "no model `ranks`"),
        (
            LINES.replace("teacher runs microbatches", "teacher runs 3"),
            "the first model runs 3 microbatches, `microbatches` is 4",
        ),
        (
            LINES.replace("student runs microbatches", "student runs 3")
            + "edge s in 0 .. 1 from teacher(0) to student(1)",
            "the edge from stage 0 to stage 2 leads from the model `teacher`, which runs 4 "
            "microbatches, to `student`, which runs 3",
        ),
        (
            LINES + "edge s in 0 .. 1 from student(1) to teacher(0)",
            "the edge from stage 2 to stage 0 leads back from `student` to `teacher`",
        ),
        (
            LINES + "edge s in 0 .. 1 from teacher(0) to student(2)",
            "the edge from stage 0 to stage -1 leads to no stage: there are stages 0 to 2",
        ),
    ],
)
def test_mistakes_are_named(lines: str, said: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile(program(lines))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"models": 1}, "`models` must be true or false"),
        (
            {"models": False},
            "`pipelines`: the pipeline has 2 stages, the first one has 1",
        ),
        ({"frozen": [0, 1, 2]}, "`frozen`: all stages are frozen"),
        ({"edges": [[0, 3]]}, "leads to no stage: there are stages 0 to 2"),
    ],
)
def test_damaged_plans_are_refused(damage: Any, said: str) -> None:
    plan = compile(program(LINES + "frozen teacher"))
    with pytest.raises(CompileError) as caught:
        plan_in("plan.json", json.loads(json.dumps(plan.to_json())) | damage)
    assert said in str(caught.value)
