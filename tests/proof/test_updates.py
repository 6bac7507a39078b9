"""What programs with updates are refused for: late weights that nobody updates, updates without
gradients.
"""

import json
from pathlib import Path

import pytest
from attrs import evolve

from schedlang import CompileError, Plan, Source, compile, prove, read_plan
from schedlang.diagnostics.diagnostic import Diagnostic
from schedlang.plan.text import parse_actions
from schedlang.schedule.layout import Layout, Pipeline
from schedlang.schedule.schedule import WeightRule
from tests.support.strategies import make_schedule
from tests.support.written import words, written, wrong

LATE = """schedule late {{
    param ranks = 2
    param microbatches = 4
    {weights}
    rank r {{ {order} }}
}}
"""
FLUSH = "repeat microbatches { F(next) } repeat microbatches { B(next) }"


def refused(text: str, **params: int) -> Diagnostic:
    with pytest.raises(CompileError) as caught:
        compile(Source("s.sched", text), params)
    # One mistake is one diagnostic.
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def read_again(plan: Plan, folder: Path) -> Plan:
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    return read_plan(folder / "plan.json")


@pytest.mark.parametrize(
    ("weights", "rule"),
    [
        ("weights delay(1)", "delay(1)"),
        ("weights delay(3)", "delay(3)"),
        ("weights delay(0)", "delay(0)"),
        ("weights stash", "stash"),
        ("weights delay(2)  weights latest on 1 .. 2", "delay(2)"),
    ],
)
@pytest.mark.parametrize("order", [FLUSH, "repeat microbatches { F(next) }"])
def test_weights_that_nobody_updates(weights: str, rule: str, order: str) -> None:
    """The gradients of late weights are given to the module by `U` alone."""
    wrong = refused(LATE.format(weights=weights, order=order))
    assert wrong.code == "missing-op"
    assert wrong.message == f"stage 0 never makes update 0, and has `weights {rule}`"
    assert wrong.help is not None
    assert "write `U` behind the last backward" in wrong.help
    assert wrong.labels[0].text == "stage 0 runs here"


def test_a_plan_file_with_weights_that_nobody_updates(tmp_path: Path) -> None:
    plan = compile(Source("s.sched", LATE.format(weights="", order=FLUSH)))
    for rule in (WeightRule("delay", 1), WeightRule("stash")):
        late = evolve(plan, weights=(WeightRule(), rule))
        with pytest.raises(
            CompileError, match="stage 1 never makes update 0, and has `weights"
        ):
            read_again(late, tmp_path)


def test_some_stages_that_are_not_updated() -> None:
    wrong = refused(
        LATE.format(weights="weights delay(1)", order=FLUSH + " if r == 1 { U }")
    )
    assert wrong.message == "stage 0 never makes update 0, others do"


def test_replicas_with_weights_that_nobody_updates() -> None:
    text = """schedule late {
        param ranks = 2  param microbatches = 4
        pipeline down runs microbatches / 2  stage s in 0 .. ranks on s
        pipeline up runs microbatches / 2  stage s in 0 .. ranks on ranks - 1 - s
        weights delay(1) on 2 .. 4
        rank r {
            for m in 0 .. microbatches / 2 { F(down(r), m)  B(down(r), m) }
            for m in 0 .. microbatches / 2 { F(up(ranks - 1 - r), m)  B(up(ranks - 1 - r), m) }
        }
    }"""
    assert (
        refused(text).message
        == "stage up(0) never makes update 0, and has `weights delay(1)`"
    )


@pytest.mark.parametrize("weights", ["weights delay(1)", "weights stash"])
def test_what_evaluates_reads_the_newest_weights(weights: str) -> None:
    """Of a training program with late weights, the inference plan has no rule."""
    text = LATE.format(weights=weights, order=FLUSH + " U")
    assert compile(Source("s.sched", text)).weights
    assert not compile(Source("s.sched", text), forward_only=True).weights


@pytest.mark.parametrize("microbatches", [1, 4, 600])
def test_an_update_without_gradients(microbatches: int) -> None:
    text = LATE.format(weights="", order="repeat microbatches { F(next) } U")
    wrong = refused(text, microbatches=microbatches)
    assert wrong.code == "missing-op"
    assert wrong.message.startswith(
        "the backward of microbatch 0 never runs on stage 0"
    )


@pytest.mark.parametrize("microbatches", [2, 600])
@pytest.mark.parametrize("backward", ["", "if r == 0 { B(down(r), m) }"])
def test_an_update_of_replicas_without_gradients(
    microbatches: int, backward: str
) -> None:
    text = f"""schedule replicas {{
        param ranks = 2  param microbatches = 2
        pipeline down runs microbatches / 2  stage s in 0 .. ranks on s
        pipeline up runs microbatches / 2  stage s in 0 .. ranks on ranks - 1 - s
        rank r {{
            for m in 0 .. microbatches / 2 {{ F(down(r), m) {backward} }}
            for m in 0 .. microbatches / 2 {{ F(up(ranks - 1 - r), m) }}
            U
        }}
    }}"""
    assert refused(text, microbatches=microbatches).code == "missing-op"


@pytest.mark.parametrize(
    "text", ["0F0 0R0", "0F0 0OFFLOAD0 0RELOAD0", "0F0 0U", "0F0 0U0"]
)
def test_an_inference_has_forwards_alone(text: str, tmp_path: Path) -> None:
    source = Source(
        "s.sched", "schedule s { param ranks = 1 param microbatches = 1 rank r { F } }"
    )
    plan = compile(Source("s.sched", source.text.replace("F }", "F(0) }")))
    words = parse_actions(text, [0] * (text.count(" ") + 1))
    with pytest.raises(
        CompileError, match="the backward of microbatch 0 never runs on stage 0"
    ):
        prove(evolve(plan, ranks=(words,)))


REPLICAS = """schedule replicas {{
    param ranks = 2  param microbatches = 2
    pipeline down runs microbatches / 2  stage s in 0 .. ranks on s
    pipeline up runs microbatches / 2  stage s in 0 .. ranks on ranks - 1 - s
    {weights}
    rank r {{
        warmup {{ {warmup} }}
        steady {{
            F(down(r), {ahead})  F(up(1 - r), 0)
            B(down(r), 0)  B(up(1 - r), 0)  U
        }}
    }}
}}"""


@pytest.mark.parametrize(
    ("weights", "version"),
    [
        (
            "weights delay(1) on 0 .. 2",
            "`up(0)F1` reads version 1 of the weights, stage down(0) version 0",
        ),
        (
            "weights delay(1) on 2 .. 4",
            "`up(0)F1` reads version 0 of the weights, stage down(0) version 1",
        ),
    ],
)
def test_replicas_that_read_other_versions(
    weights: str, version: str, tmp_path: Path
) -> None:
    """Their gradients are summed, so they would be of two versions."""
    text = REPLICAS.format(weights=weights, warmup="", ahead=0)
    with pytest.raises(CompileError) as caught:
        compile(Source("s.sched", text))
    assert caught.value.diagnostics[0].code == "weight-version"
    assert version in caught.value.diagnostics[0].message
    whole = compile(Source("s.sched", REPLICAS.format(weights="", warmup="", ahead=0)))
    late = evolve(whole, weights=(WeightRule("delay", 1),) * 2 + (WeightRule(),) * 2)
    with pytest.raises(CompileError, match="they are replicas"):
        read_again(late, tmp_path)


@pytest.mark.parametrize("free", [0, 1])
def test_a_replica_that_reads_what_is_there_binds_no_other_one(free: int) -> None:
    """Whichever of the two it is: replica 1 runs ahead, and reads an older version."""
    texts = ("0F0 0B0 0U0 0F1 0B1 0U1", "1F0 1B0 1F1 1U0 1B1 1U1")
    ranks = tuple(parse_actions(text, [0] * 6) for text in texts)
    pipelines = (Pipeline("p0", 0, 1, 2), Pipeline("p1", 1, 2, 2))
    schedule = make_schedule((0, 1), 4, ranks)
    schedule = evolve(schedule, layout=Layout((0, 1), pipelines, updates=2))
    rules = [WeightRule("stash"), WeightRule("stash")]
    with pytest.raises(CompileError, match="they are replicas"):
        prove(evolve(schedule, weights=tuple(rules)))
    rules[free] = WeightRule("unstashed")
    prove(evolve(schedule, weights=tuple(rules)))


#: A model of two stages and one of a single stage, which runs more microbatches. Each steps as soon as
#: it has its own gradients.
TWO_MODELS = """schedule two_models {
    param ranks = 2
    param microbatches = 2
    model a runs microbatches stage s in 0 .. ranks on s
    model b runs 3 stage s in 0 .. 1 on 1
    rank r {
        for m in 0 .. 2 { F(a(r), m) }
        for m in 0 .. 2 { B(a(r), m) }
        U(a(r))
        if r == 1 { for m in 0 .. 3 { F(b(0), m)  B(b(0), m) }  U(b(0)) }
    }
}"""


def test_a_model_steps_without_the_gradients_of_another_one() -> None:
    plan = compile(Source("s.sched", TWO_MODELS))
    ops = plan.ranks[1].compute().text().split()
    assert ops[:5] == ["1F0", "1F1", "1B0", "1B1", "1U"]
    assert ops[5:] == ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2U"]
    assert prove(plan).timeline.ranks[0][-1].start == 9


def test_a_model_steps_with_all_gradients_of_its_own() -> None:
    wrong_order = TWO_MODELS.replace("U(a(r))", "").replace(
        "for m in 0 .. 2 { B(a(r), m) }", "B(a(r), 0)  U(a(r))  B(a(r), 1)"
    )
    wrong = refused(wrong_order)
    assert wrong.message == "`a(0)U` on rank 0 runs before `a(0)B1`"


@pytest.mark.parametrize("are_models", [False, True])
def test_models_are_no_replicas_of_each_other(are_models: bool) -> None:
    """Of two stages one runs ahead, and so reads older weights for its second update."""
    layout = Layout(
        (0, 1),
        (Pipeline("a", 0, 1, 2), Pipeline("b", 1, 2, 2)),
        updates=2,
        models=are_models,
    )
    plan = written("0F0 0B0 0U0 0F1 0B1 0U1", "1F0 1B0 1F1 1U0 1B1 1U1", layout=layout)
    plan = evolve(plan, weights=(WeightRule("stash"),) * 2)
    assert [each.code for each in wrong(plan)] == ["weight-version"] * (not are_models)


def test_replicas_of_several_stages_read_the_version_of_their_update() -> None:
    """The third stage reads version 0 for the first update, the first one 1 for the second."""
    pipelines = (Pipeline("a", 0, 3, 2), Pipeline("b", 3, 6, 2))
    plan = written(
        "0F0 1F0 2F0 2B0 1B0 0B0 0U0 1U0 2U0 0F1 1F1 2F1 2B1 1B1 0B1 0U1 1U1 2U1",
        "3F0 4F0 5F0 5B0 4B0 3B0 3U0 4U0 5U0 3F1 4F1 5F1 5B1 4B1 3B1 3U1 4U1 5U1",
        layout=Layout((0, 0, 0, 1, 1, 1), pipelines, updates=2),
    )
    assert not wrong(evolve(plan, weights=(WeightRule("stash"),) * 6))


def test_replicas_that_read_other_versions_are_told_once_an_update() -> None:
    pipelines = (Pipeline("a", 0, 1, 4), Pipeline("b", 1, 2, 4))
    plan = written(
        "0F0 0F1 0B0 0B1 0U0 0F2 0F3 0B2 0B3 0U1",
        "1F0 1F1 1B0 1B1 1F2 1F3 1U0 1B2 1B3 1U1",
        layout=Layout((0, 1), pipelines, updates=2),
    )
    (told,) = wrong(evolve(plan, weights=(WeightRule("stash"),) * 2))
    assert told.message == (
        "`b(0)F2` reads version 0 of the weights, stage a(0) version 1 for the same update: "
        "they are replicas"
    )
    assert words(told) == ["1F2"]


def test_replicas_of_which_one_runs_ahead() -> None:
    text = REPLICAS.format(weights="weights stash", warmup="F(down(r), 0)", ahead=1)
    with pytest.raises(CompileError, match="they are replicas"):
        compile(Source("s.sched", text))
    late = REPLICAS.format(weights="weights delay(1)", warmup="F(down(r), 0)", ahead=1)
    assert compile(Source("s.sched", late)).layout.updates > 1


@pytest.mark.parametrize("beside", ["U F(1)", "F(1) U"])
def test_ops_beside_an_update_of_their_stage(beside: str) -> None:
    text = f"""schedule s {{ param ranks = 1 param microbatches = 1 weights stash
        rank r {{ warmup {{ F(0) }} steady {{ B(0) overlap {{ {beside} }} }} }}
    }}"""
    wrong = refused(text)
    assert wrong.code == "overlap"
    assert (
        wrong.message
        == "`0F1` overlaps with `0U0`, which changes the weights that it reads"
    )


def test_ops_beside_an_update_of_another_stage() -> None:
    text = """schedule s { param ranks = 1 param microbatches = 1 stage s in 0 .. 2 on 0
        rank r { F(0, 0) F(1, 0) B(1, 0) overlap { U(1) B(0, 0) } U(0) }
    }"""
    assert "(1U;0B0)OVERLAP_F_B" in compile(Source("s.sched", text)).ranks[0].text()
