"""Frozen stages: what of a program is left, and what that does to needs, memory, time and passes."""

import re

import pytest
from attrs import evolve

from schedlang import CompileError, Costs, Kind, Source, compile, prove, simulate
from schedlang.plan.plan import Plan
from schedlang.plan.text import parse_actions
from schedlang.plan.torch_tables.export import export_table
from schedlang.python.builder import Builder
from schedlang.ranks.connections import edges_of
from schedlang.ranks.lifetimes import Holds, lifetimes
from schedlang.ranks.weight_versions import follow_weights
from schedlang.schedule.kinds import GATHERS
from tests.support.explorer import is_right
from tests.support.paths import GALLERY, PROGRAMS
from tests.support.strategies import oracle

#: A program of each kind: what it writes for a backward, and passes.
LOOP = """schedule loop {{
    param ranks = 4
    param microbatches = 4
    {lines}
    rank r {{ repeat microbatches {{ F(next) }}  repeat microbatches {{ {backward} }} }}
    {passes}
}}"""


def loop(lines: str, backward: str = "B(next)", passes: str = "") -> Plan:
    return compile(
        Source("loop.sched", LOOP.format(lines=lines, backward=backward, passes=passes))
    )


def of_gallery(name: str, line: str, **params: int) -> Plan:
    """A program of the gallery with one more line, without what it claims."""
    text = re.sub(
        r"^ *assert .*\n(?: *or .*\n)*",
        "",
        (PROGRAMS / f"{name}.sched").read_text(),
        flags=re.M,
    )
    return compile(Source(name, f"{text[: text.rindex('}')]}{line}\n}}"), params)


def ops(plan: Plan) -> dict[int, set[str]]:
    """The kinds of op of each stage."""
    found: dict[int, set[str]] = {stage: set() for stage in range(len(plan.placement))}
    for actions in plan.ranks:
        for kind, stage in zip(actions.kind, actions.stage, strict=True):
            if kind < Kind.SEND_F:
                found[stage].add(Kind(kind).name)
    return found


@pytest.mark.parametrize(
    ("backward", "passes", "trained"),
    [
        ("B(next)", "", "B"),
        ("I(next)  W", "", "IW"),
        ("I(next)", "fill W", "IW"),
        ("I(next)", "fill W within 4", "IW"),
        ("B(next)", "recompute 0 .. 4", "RB"),
        ("offload(next)  reload(next)  B(next)", "", "OB"),
        ("B(next)", "reorder", "B"),
    ],
)
def test_what_frozen_stages_have_no_use_for_is_left_out(
    backward: str, passes: str, trained: str
) -> None:
    names = {"O": {"OFFLOAD", "RELOAD"}, **{letter: {letter} for letter in "BIWR"}}
    of_trained = {"F"}.union(*(names[letter] for letter in trained))
    behind = (of_trained - {"B", "W"}) | {"I"}
    plan = loop("frozen 0 .. 1  frozen 2 .. 3", backward, passes)
    assert ops(plan) == {0: {"F"}, 1: of_trained, 2: behind, 3: of_trained}
    assert oracle(plan)
    assert is_right(plan, "blocking")


def test_updates_of_frozen_stages_are_left_out() -> None:
    plan = of_gallery("pipedream_2bw", "frozen 0 .. 2", ranks=3, microbatches=3)
    found = ops(plan)
    assert found == {0: {"F"}, 1: {"F"}, 2: {"F", "B", "U"}}
    assert [str(plan.weights_of(stage)) for stage in range(3)] == [
        "latest",
        "latest",
        "delay(1)",
    ]
    stream = plan.for_updates(9)
    prove(stream)
    # A frozen stage has no older weights to read.
    assert follow_weights(stream).staleness == 1


def test_a_skip_from_a_trained_stage_brings_a_backward() -> None:
    """Stage 3 is behind stage 1, by the skip and by stage 2; stage 0 is behind none."""
    plan = loop("frozen 0 .. 1  frozen 2 .. 4\n skip s in 0 .. 1 from 0 to 2")
    assert ops(plan) == {0: {"F"}, 1: {"F", "B"}, 2: {"F", "I"}, 3: {"F", "I"}}
    # Gradients go from rank 3 to rank 1, activations to all.
    assert edges_of(plan.layout) == [(0, 1), (0, 2), (1, 2), (2, 1), (2, 3), (3, 2)]
    assert oracle(plan)


def test_every_pipeline_has_the_frozen_stages() -> None:
    plan = of_gallery("dualpipe", "frozen 0 .. 1", ranks=2, microbatches=4)
    assert [plan.layout.trains(stage) for stage in range(4)] == [
        False,
        True,
        False,
        True,
    ]
    assert oracle(plan)


def test_a_frozen_stage_keeps_nothing() -> None:
    plan = loop("frozen 0 .. 2")
    assert simulate(plan).peak_activations == (1, 1, 4, 4)
    kept = [
        len(
            {
                each.name
                for each in lifetimes(plan, rank)
                if each.what is Holds.ACTIVATION and each.stop > each.start
            }
        )
        for rank in range(4)
    ]
    assert kept == [0, 0, 4, 4]


def test_behind_a_trained_stage_the_input_half_gives_all_back() -> None:
    costs = Costs(activation_bytes=(8.0,), kept_bytes=(2.0,), weights_bytes=(0.0,))
    plan = loop("frozen 1 .. 3", "I(next)  W")
    execution = simulate(plan, costs)
    for rank, stage in enumerate(range(4)):
        assert execution.memory[rank][-1][1] == 0, stage
    assert execution.peak_bytes == (32.0,) * 4


def test_a_backward_without_weights_takes_the_time_of_its_half() -> None:
    plan = loop("frozen 1 .. 4")
    costs = Costs(forward_times=(1.0,), input_times=(0.5,), weight_times=(4.0,))
    starts = {
        (kind, stage): end - start
        for bars in simulate(plan, costs).timeline.ranks
        for kind, stage, _, start, end in zip(*bars.columns, strict=True)
    }
    assert starts[Kind.B, 0] == 4.5
    assert starts[Kind.I, 1] == starts[Kind.I, 3] == 0.5


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_one_line_freezes_the_first_stage_of_a_program(path: object) -> None:
    """Its claims are of a training of all stages; all else holds."""
    line = "" if "frozen" in path.stem else "frozen 0 .. 1"
    plan = of_gallery(path.stem, line)
    has_backward = not plan.is_forward_only
    assert 0 in plan.layout.frozen
    for stage, kinds in ops(plan).items():
        if not has_backward or not plan.layout.has_backward[stage]:
            assert kinds - {Kind(kind).name for kind in GATHERS} == {"F"}
        else:
            assert kinds & {"B", "I"}


def test_a_frozen_stage_runs_no_further_ahead_than_the_program_says() -> None:
    """Rank 1 would else take all microbatches at once, and hold them."""
    plan = of_gallery("1f1b", "frozen 0 .. 1", ranks=2, microbatches=32)
    received = [each for each in lifetimes(plan, 1) if each.what is Holds.RECEIVED]
    held = max(
        sum(a.start <= at < a.stop for a in received)
        for at in range(len(plan.ranks[1]))
    )
    assert held <= 4


@pytest.mark.parametrize(
    ("lines", "code", "message"),
    [
        (
            "frozen 0 .. ranks",
            "frozen",
            "all stages are frozen, so there is nothing to train",
        ),
        ("frozen 0 .. 2  frozen 2 .. 4", "frozen", "all stages are frozen"),
        (
            "frozen 3 .. 5",
            "no-such-stage",
            "the stages 3 .. 5, there are stages 0 .. 4",
        ),
    ],
)
def test_what_cannot_be_frozen(lines: str, code: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        loop(lines)
    (found,) = caught.value.diagnostics
    assert (found.code, found.message[: len(message)]) == (code, message)
    assert found.labels[0].span.start > 0


def test_tables_of_torch_have_none() -> None:
    with pytest.raises(
        CompileError, match="torch's action tables have no frozen stages"
    ):
        export_table(loop("frozen 0 .. 1"), "torch-csv")


def test_a_builder_has_them() -> None:
    b = Builder("built", ranks=2, microbatches=2, frozen=[0])
    for rank in range(2):
        for m in range(2):
            b.forward(rank, m)
        for m in range(2):
            b.backward(rank, m)
    plan = b.compile()
    assert plan.layout.frozen == (0,)
    assert ops(plan) == {0: {"F"}, 1: {"F", "B"}}
    assert compile(b.text()).ranks == plan.ranks
    with pytest.raises(ValueError, match="`frozen`: all stages are frozen"):
        Builder("built", ranks=2, microbatches=2, frozen=[0, 1])
    with pytest.raises(ValueError, match=r"`frozen\[0\]`: there is no stage 2"):
        Builder("built", ranks=2, microbatches=2, frozen=[2])


@pytest.mark.parametrize(
    ("more", "rank", "message"),
    [
        (
            "0I0",
            0,
            "0 needs no gradients: it is frozen, and nothing before it is trained",
        ),
        (
            "3W0",
            3,
            "3 is frozen: its backwards are `I` alone, its weights have no gradients",
        ),
        (
            "4SEND_B0",
            2,
            "0 needs no gradients: it is frozen, and nothing before it is trained",
        ),
    ],
)
def test_a_plan_has_nothing_that_a_frozen_stage_has_no_use_for(
    more: str, rank: int, message: str
) -> None:
    """Stage 1 is trained; where it goes back over the skip, the message says what 4 is."""
    lines = "frozen 0 .. 1  frozen 2 .. 4  skip s in 0 .. 1 from s to 2"
    plan = loop(lines, "I(next)  W(next)")
    ranks = list(plan.ranks)
    text = f"{ranks[rank].text()} {more}"
    # It comes from where the first action does.
    place = ranks[rank].source[0]
    ranks[rank] = parse_actions(text, [*ranks[rank].source, place])
    with pytest.raises(CompileError) as caught:
        prove(evolve(plan, ranks=tuple(ranks)))
    (found,) = caught.value.diagnostics
    assert found.code == "frozen"
    assert [label.span for label in found.labels] == [plan.spans[place]]
    assert found.message == f"`{more}` on rank {rank}: stage {message}"
    assert found.notes == (
        ("4 is the skip from stage 0 to stage 2",) if "4" in more else ()
    )
