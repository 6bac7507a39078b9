"""Schedules without a flush: orders, weight versions, and plans for any number of updates."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from attrs import evolve

from schedlang import (
    CompileError,
    Costs,
    Kind,
    Plan,
    Source,
    compile,
    prove,
    read_plan,
    read_source,
    simulate,
    write_plan,
)
from schedlang.language.expand import expand
from schedlang.language.loading import load
from schedlang.lowering import lower
from schedlang.plan.text import parse_actions
from schedlang.proof.structure import check_structure
from schedlang.ranks.weight_versions import follow_weights
from schedlang.schedule.stream import unroll
from tests.support.paths import PROGRAMS
from tests.support.programs import plan_of

STREAMS = ["pipedream", "pipedream_vertical", "pipedream_2bw", "pipemare", "wpipe"]


def words(plan: Plan, rank: int) -> str:
    return plan.ranks[rank].compute().text()


def test_2bw_is_1f1b_without_a_flush() -> None:
    """The steady kernel of rank 0 at P = M = 4 (weights.md 4): F(4) B(1) F(1') B(2) F(2') B(3)
    F(3') B(4) U.
    """
    plan = plan_of("pipedream_2bw", ranks=4, microbatches=4)
    assert words(plan, 0).startswith(
        "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0U0 0F7 0B4"
    )
    assert words(plan, 3).startswith("3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3U0 3F4 3B4")


def test_wpipe_alternates_its_groups() -> None:
    """The kernels at P = M = 2, with the second group's stages 2 and 3."""
    plan = plan_of("wpipe", ranks=2, microbatches=2)
    assert words(plan, 0).startswith(
        "0F0 0F1 2F0 2F1 2B0 0F2 2B1 2U0 0F3 0B0 2F2 0B1 0U0 2F3 2B2"
    )
    assert words(plan, 1).startswith(
        "1F0 1F1 3F0 3B0 3F1 3B1 3U0 1F2 1B0 1F3 1B1 1U0 3F2 3B2"
    )


def test_figures() -> None:
    """2BW at P = 4 over 3 updates of 8: makespan 81, as recorded; and what notes on weight versions
    derive.
    """
    plan = plan_of("pipedream_2bw", ranks=4, microbatches=8).for_updates(3)
    execution = simulate(plan, Costs())
    assert execution.timeline.makespan == 81
    assert execution.peak_activations == (4, 3, 2, 1)
    for name, ranks, microbatches, held, staleness in [
        ("pipedream", 4, 1, (4, 3, 2, 1), 3),
        ("pipedream_vertical", 4, 1, (4, 4, 4, 4), 3),
        ("pipedream_2bw", 4, 4, (2, 2, 2, 2), 1),
        ("pipemare", 4, 1, (1, 1, 1, 1), 3),
        ("pipemare", 4, 2, (1, 1, 1, 1), 2),
        ("pipemare", 4, 4, (1, 1, 1, 1), 1),
        ("wpipe", 4, 4, (2, 2, 2, 2), 1),
    ]:
        versions = follow_weights(
            plan_of(name, ranks=ranks, microbatches=microbatches).for_updates(12)
        )
        assert (versions.held, versions.staleness) == (held, staleness), name
    # Only the first of WPipe's groups of stages reads late weights.
    assert (
        follow_weights(
            plan_of("wpipe", ranks=4, microbatches=4).for_updates(12)
        ).held_of
        == (2,) * 4 + (1,) * 4
    )


@pytest.mark.parametrize(
    ("text", "precede"),
    [("0F2", "0 updates precede"), ("0F0 0B0 0U0 0F3", "1 update precedes")],
)
def test_a_forward_that_is_too_early_for_its_version(text: str, precede: str) -> None:
    plan = plan_of("pipedream_2bw", ranks=1, microbatches=1).for_updates(4)
    (finding,) = follow_weights(
        evolve(plan, ranks=(parse_actions(text, [0] * (text.count(" ") + 1)),))
    ).findings
    wants = int(text[-1]) - 1
    assert (
        finding.message
        == f"`{text[-3:]}` reads version {wants} of the weights, but only {precede} it on rank 0"
    )


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize(
    ("ranks", "rounds"), [(1, 1), (2, 1), (2, 3), (3, 2), (4, 1), (5, 1), (8, 2)]
)
def test_a_plan_stands_for_any_number_of_updates(
    name: str, ranks: int, rounds: int
) -> None:
    """What repeats, repeated, is what lowering makes of the whole list; and it is proved."""
    microbatches = (
        1
        if name.startswith("pipedream") and name != "pipedream_2bw"
        else ranks * rounds
    )
    source = read_source(PROGRAMS / f"{name}.sched")
    params = {"ranks": ranks, "microbatches": microbatches}
    plan = compile(source, params)
    schedule = expand(*load(source), params)
    shown = plan.layout.updates
    for updates in (shown, shown + 1, shown + 2, shown + 7):
        longer = plan.for_updates(updates)
        assert longer.layout.updates == updates
        assert longer.layout.microbatches == updates * microbatches
        assert longer.ranks == lower(unroll(schedule, updates)).ranks
        prove(longer)
    with pytest.raises(ValueError, match=f"the plan has {shown} updates or more"):
        plan.for_updates(shown - 1)


@pytest.mark.parametrize("name", STREAMS)
def test_the_plan_file_keeps_what_repeats(name: str, tmp_path: Path) -> None:
    plan = plan_of(name)
    write_plan(plan, tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json")
    assert again.kernels == plan.kernels
    assert again.weights == plan.weights
    assert again.for_updates(9).to_json() == plan.for_updates(9).to_json()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda d: d | {"kernels": [[0, 1]]}, "`kernels` must be a pair of places"),
        (
            lambda d: d | {"kernels": [[9, 3]] * 4},
            "`kernels` must be places in the actions",
        ),
        (
            lambda d: d | {"kernels": [[0, 10**9]] * 4},
            "`kernels` must be places in the actions",
        ),
        (lambda d: d | {"kernels": [[0, 2]] * 4}, "error["),
        (lambda d: d | {"updates": 0}, "`updates`: it is 0, it must be 1 or more"),
        (lambda d: d | {"updates": 5}, "which do not divide into 5 `updates`"),
        (
            lambda d: d | {"weights": [{"name": "delay", "delay": 1}]},
            "a rule for each of the 4 stages",
        ),
        (
            lambda d: d | {"weights": [{"name": "older", "delay": 1}] * 4},
            "`weights` of stage 0: a rule is one of latest, stash, unstashed, delay",
        ),
        (
            lambda d: d | {"weights": [{"name": "delay", "delay": -1}] * 4},
            "delayed by -1 updates, it must be 0 or more",
        ),
        (lambda d: d | {"weights": []}, "weight-version"),
    ],
)
def test_a_damaged_stream_is_refused(
    tmp_path: Path, damage: Callable[[dict], dict], reason: str
) -> None:
    document = json.loads(json.dumps(plan_of("pipedream_2bw").to_json()))
    (tmp_path / "plan.json").write_text(json.dumps(damage(document)))
    with pytest.raises(CompileError) as caught:
        read_plan(tmp_path / "plan.json")
    assert reason in str(caught.value)


def refusal(text: str, **params: int) -> list[str]:
    with pytest.raises(CompileError) as caught:
        compile(Source("s.sched", text), params)
    return [each.code for each in caught.value.diagnostics]


def stream(steady: str, weights: str = "weights delay(1)", warmup: str = "") -> str:
    return (
        f"schedule s {{ param ranks = 4  param microbatches = 4  {weights}  rank r {{ let ahead = ranks - 1 - r "
        f"warmup {{ {warmup or 'for m in 0 .. ahead { F(m) }'} }} steady {{ {steady} }} }} }}"
    )


def test_wrong_weight_versions() -> None:
    steady = "for m in 0 .. microbatches { F(m + ahead)  B(m) }  U"
    assert compile(Source("s.sched", stream(steady))).layout.updates >= 2
    # The most likely mistake: later ranks would read fresher weights, within one update and again
    # in the backward.
    assert set(refusal(stream(steady, "weights latest"))) == {"weight-version"}
    assert set(refusal(stream(steady, ""))) == {"weight-version"}
    assert set(refusal(stream(steady, "weights stash"))) == {"weight-version"}
    # Too few microbatches for one update of delay: rank 0 would wait for itself.
    assert refusal(stream(steady), microbatches=2) == ["weight-version"]
    assert (
        compile(
            Source("s.sched", stream(steady, "weights delay(2)")), {"microbatches": 2}
        ).layout.updates
        > 2
    )


def test_where_no_version_is_kept_each_op_reads_what_is_there() -> None:
    """Forwards of one update may read different versions; the gradients are still of one update, and
    a forward is not run again with other weights.
    """
    rule = "weights unstashed"
    steady = "for m in 0 .. microbatches { F(m + ahead)  B(m) }  U"
    plan = compile(Source("s.sched", stream(steady, rule)), {"microbatches": 2})
    read = follow_weights(plan.for_updates(4)).read
    # Rank 0 runs F3 to F6 in its first two updates: F3 and F4 before the first one.
    assert [read[Kind.F, 0, microbatch] for microbatch in range(7)] == [
        0,
        0,
        0,
        0,
        0,
        1,
        1,
    ]
    assert [read[Kind.B, 0, microbatch] for microbatch in range(7)] == [
        0,
        0,
        1,
        1,
        2,
        2,
        3,
    ]
    late = "for m in 0 .. microbatches { F(m + ahead)  if m > 0 { B(m - 1) } }  U  B(3)"
    assert set(refusal(stream(late, rule))) == {"order"}
    again = "for m in 0 .. microbatches { F(m + ahead)  R(m)  B(m) }  U"
    assert set(refusal(stream(again, rule))) == {"weight-version"}


def test_updates_that_are_missing_early_or_doubled() -> None:
    assert refusal(stream("for m in 0 .. microbatches { F(m + ahead)  B(m) }")) == [
        "update"
    ]
    assert refusal(stream("U for m in 0 .. microbatches { F(m + ahead)  B(m) }")) == [
        "order"
    ]
    assert refusal(stream("for m in 0 .. microbatches { F(m + ahead)  B(m) } U U")) == [
        "repeated-op"
    ]
    assert refusal(
        stream("for m in 0 .. microbatches { F(m + ahead)  B(m) } if r > 0 { U }")
    ) == ["missing-op"]


def test_what_a_stream_must_not_write() -> None:
    assert refusal(stream("F(next)")) == ["which-microbatch"]
    assert refusal(stream("for m in 0 .. 4 { F(m + ahead) B(m) W } U")) == [
        "which-microbatch"
    ]
    assert refusal(stream("} steady { U")) == ["repeated-part"]
    assert refusal(
        "schedule s { param ranks = 2 param microbatches = 1 rank r { steady { F(0) B(0) U } F(0) } }"
    ) == ["steady"]
    assert refusal(
        "schedule s { param ranks = 2 param microbatches = 1 rank r { if r > 5 { } warmup { } } }"
    ) == ["missing-part"]
    assert refusal(stream("F(0)", "weights delay(-1)")) == ["weight-version"]
    assert refusal(stream("F(0)", "weights stash on 0 .. 5")) == ["no-such-stage"]


def test_missing_updates_are_counted() -> None:
    """They are not listed one by one: a plan of a few words may say that it has millions."""
    plan = plan_of("pipedream_2bw", ranks=2, microbatches=1)
    pipelines = tuple(evolve(each, microbatches=0) for each in plan.layout.pipelines)
    layout = evolve(plan.layout, pipelines=pipelines, updates=10**7)
    ranks = tuple(parse_actions(text, [0]) for text in ("0U0", "1U3"))
    with pytest.raises(CompileError) as caught:
        check_structure(evolve(plan, layout=layout, ranks=ranks))
    text = str(caught.value)
    assert "stage 1 never makes update 0, others do" in text
    assert f"and {2 * (10**7 - 1) - 1} more, on ranks 0-1" in text
