"""Schedules built in Python: the same plans as those of programs, by the same compiler and proof."""

import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import assume, given

from schedlang import (
    Actions,
    Builder,
    CompileError,
    Costs,
    Kind,
    Plan,
    Schedule,
    Source,
    compile,
    read_plan,
    read_source,
    write_plan,
)
from schedlang.compiler import ops_of
from schedlang.language.loading import load
from schedlang.schedule.kinds import OF_STAGE
from schedlang.schedule.layout_rules import without_stage
from tests.support.paths import PROGRAMS
from tests.support.sizes import examples
from tests.support.strategies import schedules

GALLERY = sorted(PROGRAMS.glob("*.sched"))
#: Ranks and microbatches, of which every program takes some.
SIZES = [(2, 2), (2, 5), (4, 8), (3, 1), (4, 1), (3, 6), (5, 6), (5, 10)]


def built(schedule: Schedule) -> Builder:
    """A schedule of ops, built again op by op."""
    layout = schedule.layout
    several = {
        # A numbered pipeline, `lane(0)`, is one of several by name.
        re.sub(r"\W", "_", pipeline.name).rstrip("_"): placement_of(schedule, number)
        for number, pipeline in enumerate(layout.pipelines)
    }
    b = Builder(
        schedule.name,
        ranks=len(schedule.ranks),
        microbatches=schedule.params["microbatches"],
        placement="loop" if len(several) > 1 else layout.placement,
        pipelines=several if len(several) > 1 else None,
        models={
            name: each.microbatches
            for name, each in zip(several, layout.pipelines, strict=True)
        }
        if layout.models
        else None,
        slices=layout.slices,
        skips=layout.skips,
        frozen=layout.frozen,
        edges=layout.edges,
        links=layout.links,
        weights=[
            str(schedule.weights_of(stage)) for stage in range(len(layout.placement))
        ],
        costs=schedule.costs,
    )
    if schedule.stream is None:
        add(b, schedule, schedule.ranks)
        return b
    with b.warmup():
        add(b, schedule, schedule.stream.warmup)
    with b.steady():
        add(b, schedule, schedule.stream.steady)
    return b


def placement_of(schedule: Schedule, number: int) -> tuple[int, ...]:
    pipeline = schedule.layout.pipelines[number]
    return schedule.placement[pipeline.start : pipeline.stop]


def add(b: Builder, schedule: Schedule, ranks: "tuple[Actions, ...]") -> None:
    for rank, actions in enumerate(ranks):
        for batch in actions.batches():
            if len(batch) == 1:
                add_op(b, schedule, rank, actions, batch.start)
                continue
            with b.overlap():
                for index in batch:
                    add_op(b, schedule, rank, actions, index)


def add_op(
    b: Builder, schedule: Schedule, rank: int, actions: Actions, index: int
) -> None:
    kind, stage, microbatch, *_ = actions.row(index)
    if kind in OF_STAGE:
        b.op(rank, Kind(kind), stage=stage)
        return
    slices = schedule.layout.slices
    whole, slice = divmod(microbatch, slices)
    b.op(rank, Kind(kind), whole, stage=stage, slice=slice if slices > 1 else None)


def ops(path: Path, ranks: int, microbatches: int) -> Schedule | None:
    """The ops of a program of the gallery, after its passes; None if it is not for this size."""
    source, tree = load(read_source(path))
    try:
        return ops_of(source, tree, {"ranks": ranks, "microbatches": microbatches})
    except CompileError as error:
        if {diagnostic.code for diagnostic in error.diagnostics} != {"require"}:
            raise
        return None


def rows(plan: Plan) -> list[list[tuple[int, int, int, int]]]:
    """What the ranks do, without the places in the program."""
    return [
        list(zip(own.kind, own.stage, own.microbatch, own.group, strict=True))
        for own in plan.ranks
    ]


def same(one: Plan, other: Plan) -> None:
    """Whether two plans are the same but for their texts."""
    assert rows(one) == rows(other)
    assert one.kernels == other.kernels
    assert one.weights == other.weights
    assert one.costs == other.costs
    for field in (
        "placement",
        "slices",
        "updates",
        "links",
        "skips",
        "frozen",
        "edges",
        "models",
    ):
        assert getattr(one.layout, field) == getattr(other.layout, field)


@pytest.mark.parametrize("path", GALLERY, ids=lambda path: path.stem)
def test_programs_of_the_gallery_built_from_their_ops(path: Path) -> None:
    compared = 0
    for ranks, microbatches in SIZES:
        schedule = ops(path, ranks, microbatches)
        if schedule is None:
            continue
        if path.stem == "recycle":
            # The builder gives all pipelines of a model as many microbatches: here they have not.
            with pytest.raises(ValueError, match="cannot share them evenly"):
                built(schedule)
            compared += 1
            continue
        compared += 1
        plan = compile(path, {"ranks": ranks, "microbatches": microbatches})
        b = built(schedule)
        again = b.compile()
        same(again, plan)
        # The text is a program whose plan is the same, to the last character.
        from_text = compile(Source(f"{schedule.name}.sched", b.text()))
        assert from_text == again
        assert from_text.digest == again.digest
    assert compared >= 1


def by_hand(schedule: Schedule) -> str:
    """The same ops as a program, written in the simplest way."""
    lines = [
        "schedule random {",
        f"param ranks = {len(schedule.ranks)}",
        f"param microbatches = {schedule.layout.microbatches}",
    ]
    held = "0"
    for stage, rank in enumerate(schedule.placement):
        held = f"if s == {stage} then {rank} else {held}"
    if not schedule.layout.models:
        lines.append(f"stage s in 0 .. {len(schedule.placement)} on {held}")
    else:
        lines.append(f"fn place(s) = {held}")
        for each in schedule.layout.pipelines:
            count = each.stop - each.start
            where = f"stage s in 0 .. {count} on place({each.start} + s)"
            lines.append(f"model {each.name} runs {each.microbatches} {where}")
    for earlier, later in schedule.layout.skips:
        lines.append(f"skip s in {earlier} .. {earlier + 1} from s to {later}")
    for earlier, later in schedule.layout.edges:
        lines.append(f"edge s in {earlier} .. {earlier + 1} from s to {later}")
    lines += [f"frozen {stage} .. {stage + 1}" for stage in schedule.layout.frozen]
    lines.append("rank r {")
    for rank, actions in enumerate(schedule.ranks):
        for index in range(len(actions)):
            kind, stage, microbatch, *_ = actions.row(index)
            lines.append(
                f"if r == {rank} {{ {word(schedule, kind)}({stage}, {microbatch}) }}"
            )
    return "\n".join([*lines, "}", "}"])


def word(schedule: Schedule, kind: int) -> str:
    has_halves = any(Kind.I in own.kind for own in schedule.ranks)
    return Kind(kind).name if has_halves or kind != Kind.B else "BW"


@examples(60)
@given(schedules())
def test_random_schedules_built_and_written_by_hand_are_the_same(
    schedule: Schedule,
) -> None:
    assume(without_stage(schedule.placement, len(schedule.ranks)) is None)
    b = built(evolve(schedule, name="random"))
    plan = b.compile()
    same(plan, compile(Source("by_hand.sched", by_hand(schedule))))
    assert compile(Source("random.sched", b.text())) == plan


def one_f_one_b(b: Builder, ranks: int, microbatches: int) -> None:
    for rank in range(ranks):
        warmup = min(ranks - 1 - rank, microbatches)
        for m in range(warmup):
            b.forward(rank, m)
        for m in range(microbatches - warmup):
            b.forward(rank, warmup + m)
            b.backward(rank, m)
        for m in range(microbatches - warmup, microbatches):
            b.backward(rank, m)


def test_a_with_block_compiles_at_its_end() -> None:
    with Builder("one_f_one_b", ranks=4, microbatches=8) as b:
        one_f_one_b(b, 4, 8)
        with pytest.raises(
            ValueError, match="`plan` is there at the end of the `with` block"
        ):
            assert b.plan
    assert repr(b) == "<Builder one_f_one_b (ranks = 4, microbatches = 8): 64 ops>"
    same(b.plan, compile(PROGRAMS / "1f1b.sched", {"ranks": 4, "microbatches": 8}))
    with pytest.raises(
        ValueError, match="the schedule is compiled, it takes no more ops"
    ):
        b.forward(0, 0)


def test_an_error_within_the_block_is_the_one_that_is_raised() -> None:
    with pytest.raises(ZeroDivisionError), Builder(ranks=2, microbatches=2):
        1 / 0  # noqa: B018


def test_options_are_those_of_compile() -> None:
    b = Builder(ranks=2, microbatches=4)
    one_f_one_b(b, 2, 4)
    assert b.compile(forward_only=True).is_forward_only
    assert b.compile(transport="nccl").transport == "nccl"
    with pytest.raises(ValueError, match="there is no transport `mpi`"):
        b.compile(transport="mpi")


@pytest.mark.parametrize(
    ("options", "placement"),
    [
        ({}, (0, 1, 2)),
        ({"chunks": 2}, (0, 1, 2, 0, 1, 2)),
        ({"chunks": 3, "placement": "v"}, (0, 1, 2, 2, 1, 0, 0, 1, 2)),
        ({"placement": [2, 0, 1, 1, 0]}, (2, 0, 1, 1, 0)),
        ({"pipelines": {"down": [0, 1, 2], "up": [2, 1, 0]}}, (0, 1, 2, 2, 1, 0)),
    ],
)
def test_placements(options: "dict[str, object]", placement: "tuple[int, ...]") -> None:
    b = Builder(ranks=3, microbatches=2, **options)  # type: ignore[arg-type]
    several = len(options.get("pipelines", "1"))  # type: ignore[arg-type]
    for stage, rank in enumerate(placement):
        for m in range(2 // several):
            b.forward(rank, m, stage=stage)
    plan = b.compile()
    assert plan.placement == placement
    assert plan.stages_of(2) == [
        stage for stage, rank in enumerate(placement) if rank == 2
    ]


def test_another_size_of_the_text_is_refused() -> None:
    b = Builder(ranks=2, microbatches=4)
    one_f_one_b(b, 2, 4)
    with pytest.raises(CompileError, match="the ops below are those of this size"):
        compile(b.text(), {"microbatches": 8})


def test_the_plan_names_the_lines_of_the_script(tmp_path: Path) -> None:
    b = Builder(ranks=2, microbatches=1)
    for rank in range(2):
        b.forward(rank, 0)
        b.backward(rank, 0)
    plan = b.compile()
    lines = [
        int(plan.where(1, index).rpartition(":")[2])
        for index in range(len(plan.ranks[1]))
    ]
    assert plan.where(0, 0).startswith("tests/python/test_builder.py:") or str(
        Path(__file__)
    ) in plan.where(0, 0)
    assert {
        Path(__file__).read_text().splitlines()[line - 1].strip() for line in lines
    } == {
        "b.forward(rank, 0)",
        "b.backward(rank, 0)",
    }
    # In its file it has the program, which is all that another process needs.
    write_plan(plan, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read == plan
    assert read.where(0, 0).startswith("schedule_in_python.sched:")


def underlined(error: CompileError) -> Iterator[str]:
    """What the labels of its diagnostics are about."""
    for diagnostic in error.diagnostics:
        assert diagnostic.source is not None
        for label in diagnostic.labels:
            yield diagnostic.source.text[label.span.start : label.span.end]


def test_a_deadlock_is_said_of_the_lines_of_the_script() -> None:
    b = Builder(ranks=2, microbatches=2)
    for m in range(2):
        b.forward(0, m)
        b.backward(0, m)
    for m in (0, 1):
        b.forward(1, m)
    for m in (0, 1):
        b.backward(1, m)
    with pytest.raises(CompileError) as wrong:
        b.compile()
    assert sorted(underlined(wrong.value)) == [
        "b.backward(0, m)",
        "b.backward(1, m)",
        "b.forward(0, m)",
        "b.forward(1, m)",
    ]
    text = str(wrong.value)
    assert "ranks 0-1 wait for each other" in text
    assert "rank 0 waits here, at `0RECV_B0`" in text
    assert ".sched" not in text


def test_a_mistake_in_a_loop_is_said_once() -> None:
    b = Builder(ranks=2, microbatches=4)
    for rank in range(2):
        for m in range(4):
            b.forward(rank, m)
        for m in range(4):
            b.forward(rank, m)
            b.backward(rank, m)
    with pytest.raises(CompileError) as wrong:
        b.compile()
    assert [diagnostic.code for diagnostic in wrong.value.diagnostics] == [
        "repeated-op"
    ]
    # Three more of this rank, and those of the other one.
    notes = wrong.value.diagnostics[0].notes
    assert notes == ("and 3 more, on rank 0", "and 1 more at this line")


def test_a_mistake_of_the_whole_is_said_of_the_builder() -> None:
    b = Builder(ranks=2, microbatches=2)
    with pytest.raises(CompileError) as wrong:
        b.compile()
    assert set(underlined(wrong.value)) <= {"Builder(ranks=2, microbatches=2)"}
    assert "never runs" in str(wrong.value)


def test_a_script_without_a_file_has_its_lines() -> None:
    script = "b.forward(0, 0)\nb.forward(0, 0)\nb.backward(0, 0)\n"
    b = Builder(ranks=1, microbatches=1)
    exec(script, {"b": b})
    with pytest.raises(CompileError, match="<string>:2"):
        b.compile()


def test_costs_are_decimals_in_the_program() -> None:
    costs = Costs(
        forward_times=(1.1, 1.1, 2.1, 3.1),
        backward_times=(0.1 + 0.2,),
        p2p_time=0.05,
        forward_memory=(0.5, -1.5, 3, 4),
    )
    b = Builder(ranks=4, microbatches=4, costs=costs)
    one_f_one_b(b, 4, 4)
    assert b.compile().costs == costs
    assert "cost B = 0.30000000000000004" in b.text()
    assert "cost send = 0.05" in b.text()


def test_messages_of_fewer_bits() -> None:
    b = Builder(ranks=2, microbatches=4, message_type="bf16")
    one_f_one_b(b, 2, 4)
    assert b.compile().message_type == "bf16"
    with pytest.raises(ValueError, match=r"`message_type` is 'bf15': .* '', 'bf16'"):
        Builder(ranks=2, microbatches=4, message_type="bf15")


def test_costs_by_microbatch_and_link_in_the_program() -> None:
    costs = Costs(
        forward_times=[[1, 2, 2, 2], [1, 2, 2, 2], [3.5, 3.5, 0.25, 3.5], [7] * 4],  # type: ignore[arg-type]
        weight_times=[[1, 2, 3, 5]],  # type: ignore[arg-type]
        backward_times=(4, 5, 6, 1),
        link_times=[[0, 1, 1, 1], [1, 0, 1, 1], [0.5, 0.5, 0, 2], [1, 2, 3, 0]],  # type: ignore[arg-type]
    )
    b = Builder(ranks=4, microbatches=4, costs=costs)
    one_f_one_b(b, 4, 4)
    compiled = b.compile().costs
    assert compiled.link_times == costs.link_times
    layout = b.compile().layout
    assert compiled.every_duration(layout) == costs.every_duration(layout)


def test_costs_by_slice_in_the_program() -> None:
    times = [[[1, 2], [3, 4]], [[5, 5], [6, 7]]]
    costs = Costs(forward_times=times)  # type: ignore[arg-type]
    b = Builder(ranks=2, microbatches=2, slices=2, costs=costs)
    for stage in range(2):
        for m, k in product(range(2), range(2)):
            b.forward(stage, m, slice=k)
    assert b.compile().costs.forward_times == costs.forward_times


def test_costs_in_the_program() -> None:
    costs = Costs(
        forward_times=(2, 3), backward_times=(4,), p2p_time=1, forward_memory=(2,)
    )
    b = Builder(ranks=2, microbatches=2, costs=costs)
    one_f_one_b(b, 2, 2)
    assert b.compile().costs == costs
    for line in ("cost F(s) = s + 2", "cost B = 4", "cost send = 1", "memory F = 2"):
        assert line in b.text()


def test_a_weight_half_without_an_input_half_is_no_half_of_a_whole_backward() -> None:
    b = Builder(ranks=1, microbatches=1)
    b.forward(0, 0)
    b.backward(0, 0)
    b.backward_weight(0, 0)
    with pytest.raises(CompileError):
        b.compile()


def test_many_ranks_and_ops() -> None:
    with Builder(ranks=300, microbatches=4, placement="v", chunks=2) as b:
        for rank in range(300):
            for stage in (rank, 599 - rank):
                for m in range(4):
                    b.forward(rank, m, stage=stage)
            for stage in (599 - rank, rank):
                for m in range(4):
                    b.backward(rank, m, stage=stage)
    assert sum(map(len, b.plan.ranks)) > 4800
