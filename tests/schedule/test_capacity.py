"""How much room ranks have, and what becomes of schedules that need more."""

import json
from pathlib import Path

import pytest

from schedlang import (
    Builder,
    CompileError,
    Costs,
    compile,
    read_plan,
    simulate,
    write_plan,
)
from schedlang.proof.capacity import fullness
from tests.support.commands import exit_code, output
from tests.support.paths import PROGRAMS

#: The peaks of 1F1B on 4 ranks: 4, 3, 2 and 1 activations, beside the weights.
BYTES = Costs(activation_bytes=(10,), weights_bytes=(1, 2, 3, 4))
PEAKS = (41, 32, 23, 14)
ORDER = """
    rank r {
        let warmup = ranks - 1 - r
        repeat warmup                { F(next) }
        repeat microbatches - warmup { F(next)  B(next) }
        repeat warmup                { B(next) }
    }
"""


def program(items: str) -> str:
    return f"schedule s {{ param ranks = 4  param microbatches = 8 {items} {ORDER} }}"


def test_a_rank_may_be_full_to_the_last_byte() -> None:
    plan = compile(program(""), costs=Costs(capacity_bytes=PEAKS).over(BYTES))
    assert simulate(plan).peak_bytes == PEAKS


def test_where_there_is_no_room_only_nothing_fits() -> None:
    """Not a whole part of it is used, but none."""
    costs = Costs(activation_bytes=(0,), weights_bytes=(0,), capacity_bytes=(0,))
    plan = compile(program(""), costs=costs)
    assert fullness(simulate(plan)) == [0, 0, 0, 0]
    with pytest.raises(
        CompileError, match="rank 3 holds 1 bytes at its peak, of which 1 are"
    ):
        compile(program(""), costs=Costs(weights_bytes=(0, 0, 0, 1)).over(costs))


@pytest.mark.parametrize("rank", range(4))
def test_one_byte_more_is_an_error(rank: int) -> None:
    capacities = list(PEAKS)
    capacities[rank] -= 1
    with pytest.raises(CompileError) as caught:
        compile(program(""), costs=Costs(capacity_bytes=tuple(capacities)).over(BYTES))
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "capacity"
    # The others are full to the last byte.
    assert not diagnostic.notes
    assert diagnostic.message == (
        f"rank {rank} holds {PEAKS[rank]} bytes at its peak, of which {rank + 1} are weights; its "
        f"capacity is {PEAKS[rank] - 1}"
    )
    assert "recompute" in str(diagnostic.help)


def test_the_rank_with_the_least_room_is_named_first() -> None:
    with pytest.raises(CompileError) as caught:
        compile(program("capacity(r) = 20 - 5 * r"), costs=BYTES)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.message.startswith("rank 3 holds 14 bytes")
    assert "and 3 more, on ranks 0-3" in diagnostic.notes


def test_what_a_user_gives_replaces_what_the_program_says() -> None:
    source = program("capacity = 10")
    with pytest.raises(CompileError, match="its capacity is 10"):
        compile(source, costs=BYTES)
    plan = compile(source, costs=Costs(capacity_bytes=(41,)).over(BYTES))
    assert plan.costs.capacity_bytes == (41,)


def test_without_bytes_a_capacity_is_a_warning() -> None:
    (warning,) = compile(program("capacity(r) = 10")).warnings
    assert (warning.code, warning.severity) == ("capacity", "warning")
    (warning,) = compile(program(""), costs=Costs(capacity_bytes=(10,))).warnings
    assert warning.code == "capacity"


def test_inference_keeps_no_activations() -> None:
    source = program("capacity = 14")
    plan = compile(source, costs=BYTES, forward_only=True)
    assert max(simulate(plan).peak_bytes or ()) == 14


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ("capacity(r) = 10 - 5 * r", "a capacity of -5, it must be 0 or more"),
        ("capacity = 1  capacity(r) = 2", "a schedule has one `capacity`"),
        ("capacity(r, q) = 1", "`capacity` with 2 names"),
    ],
)
def test_what_a_capacity_cannot_be(items: str, message: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile(program(items))
    assert message in str(caught.value)


def test_capacity_may_be_a_name() -> None:
    compile(
        program(
            "param capacity = 4  require capacity > 3  let x = capacity  capacity(r) = x"
        )
    )


def test_a_wrong_number_of_capacities() -> None:
    with pytest.raises(
        ValueError, match="3 `capacity_bytes` are given, there are 4 ranks"
    ):
        compile(program(""), costs=Costs(capacity_bytes=(1, 2, 3)))


def test_commands(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path_factory.mktemp("capacity")
    costs = folder / "costs.json"
    costs.write_text(json.dumps(BYTES.to_json()))
    file = str(PROGRAMS / "1f1b.sched")
    small = [file, "--costs", str(costs), "--capacity-bytes 40,40,40,40"]
    for command in (
        ["compile"],
        ["check"],
        ["simulate"],
        ["show"],
        ["export --to torch-csv"],
    ):
        assert exit_code(*command, *small) == 1
        assert "rank 0 holds 41 bytes" in capsys.readouterr().err
    plan = compile(file, costs=BYTES)
    written = folder / "plan.json"
    write_plan(plan, written)
    assert exit_code("check", str(written), "--capacity-bytes 40") == 1
    output("check", str(written), "--capacity-bytes 41")
    # A plan that is there is executed, however full its ranks are.
    figures = json.loads(output("simulate", str(written), "--capacity-bytes 40 --json"))
    assert figures["capacity_bytes"] == [40] * 4
    assert figures["full"] == [peak / 40 for peak in PEAKS]
    assert "102.5% 80.0% 57.5% 35.0%" in output(
        "simulate", str(written), "--capacity-bytes 40"
    )


def test_a_plan_and_a_builders_program_remember_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    costs = Costs(capacity_bytes=(50, 60.5))
    b = Builder(ranks=2, microbatches=1, costs=costs)
    for rank in range(2):
        b.forward(rank, 0)
        b.backward(rank, 0)
    plan = b.compile()
    assert "capacity(r) = " in b.text()
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    write_plan(plan, path)
    assert read_plan(path).costs == plan.costs == costs


@pytest.mark.parametrize(
    ("given", "capacity"),
    [
        ("80GB", [80e9] * 4),
        ("1GiB,2e9,3,4MB", [2.0**30, 2e9, 3.0, 4e6]),
        ("H100", [76e9] * 4),
    ],
)
def test_units_and_devices(
    given: str,
    capacity: list[float],
    tmp_path: Path,
) -> None:
    plan = tmp_path / "plan.json"
    write_plan(compile("1f1b", costs=BYTES), plan)
    assert (
        json.loads(output("simulate", str(plan), "--capacity-bytes", given, "--json"))[
            "capacity_bytes"
        ]
        == capacity
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [("H1000", "did you mean `H100`?"), ("80XB", "is not an amount of memory")],
)
def test_what_is_no_capacity(
    given: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        exit_code("compile gpipe --capacity-bytes", given)
    assert message in capsys.readouterr().err
