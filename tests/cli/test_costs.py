"""Costs given to commands: what is written and run is what was simulated."""

import json
from pathlib import Path
from random import Random

import pytest

import schedlang
from schedlang import read_plan, read_source
from schedlang.cli.command_table import parse
from schedlang.cli.inputs import load_to_execute
from schedlang.language import syntax
from schedlang.language.loading import load
from tests.support.commands import exit_code, output
from tests.support.paths import GALLERY, PROGRAMS


def has_pass(path: Path) -> bool:
    _, tree = load(read_source(path))
    return any(isinstance(item, syntax.Pass) for item in tree.items)


WITH_PASSES = [path for path in GALLERY if has_pass(path)]


def decimal_costs(seed: str, stages: int) -> dict[str, object]:
    """Random costs per stage, such as a run may have shown."""
    random = Random(seed)

    def times(least: float, most: float) -> list[float]:
        return [round(random.uniform(least, most), 3) for _ in range(stages)]

    return {
        "forward_times": times(0.8, 1.5),
        "input_times": times(0.7, 1.6),
        "weight_times": times(0.5, 1.3),
        "p2p_time": round(random.uniform(0.01, 0.4), 3),
    }


@pytest.mark.parametrize("path", WITH_PASSES, ids=lambda path: path.stem)
def test_what_is_compiled_for_costs_is_what_is_simulated_at_them(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = len(schedlang.compile(path).placement)
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(decimal_costs(path.stem, stages)))
    written = tmp_path / "plan.json"
    assert (
        exit_code("compile", str(path), "--costs", str(costs), "-o", str(written)) == 0
    )
    executed, _ = load_to_execute(parse(["simulate", str(path), "--costs", str(costs)]))
    plan = read_plan(written)
    assert plan.ranks == executed.ranks
    assert plan.costs == executed.costs == schedlang.read_costs(costs).over(plan.costs)
    assert (
        plan.digest == schedlang.compile(path, costs=schedlang.read_costs(costs)).digest
    )
    capsys.readouterr()

    # The plan remembers what it was compiled for.
    for arguments in (
        ["simulate", str(path), "--costs", str(costs)],
        ["simulate", str(written)],
    ):
        assert exit_code(*arguments, "--json") == 0
    of_program, of_plan = map(json.loads, capsys.readouterr().out.splitlines())
    assert of_program == of_plan

    # Commands that print the plan print the same one.
    for file in ([str(path), "--costs", str(costs)], [str(written)]):
        assert exit_code("show", *file, "--ranks") == 0
        assert exit_code("check", *file) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[: len(out) // 2] == out[len(out) // 2 :]


def test_costs_decide_about_the_order_that_is_written() -> None:
    """Or the test above would hold of compilers that do not look at costs."""
    for name in ("zb_1p", "zb_2p"):
        stages = len(schedlang.compile(name).placement)
        costs = schedlang.Costs(**decimal_costs(name, stages))  # type: ignore[arg-type]
        assert (
            schedlang.compile(name).ranks != schedlang.compile(name, costs=costs).ranks
        )


def test_a_run_is_compared_with_its_program_at_the_costs_that_it_was_compiled_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = schedlang.Costs(**decimal_costs("zb_2p", 4))  # type: ignore[arg-type]
    plan = schedlang.compile("zb_2p", costs=costs)
    events = []
    for rank, bars in enumerate(schedlang.simulate(plan).timeline.ranks):
        for bar in bars:
            place = {"pid": rank, "ts": bar.start, "dur": bar.end - bar.start}
            events.append({"ph": "X", "name": str(bar), **place})
    run = tmp_path / "run.json"
    run.write_text(
        json.dumps({"traceEvents": events, "otherData": {"plan": plan.to_json()}})
    )
    assert json.loads(
        output("compare", str(PROGRAMS / "zb_2p.sched"), str(run), "--json")
    )
    # A run of another number of stages is told as such.
    with pytest.raises(SystemExit):
        exit_code("compare", str(PROGRAMS / "zb_2p.sched"), str(run), "-p ranks=3")
    assert "the run is of `zb_2p` (ranks = 4" in capsys.readouterr().err
