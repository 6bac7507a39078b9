"""`schedc compare`: the figures of several schedules in one table."""

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import schedlang
from schedlang import Costs
from tests.support.commands import document, exit_code, output
from tests.support.paths import PROGRAMS


def files(*names: str) -> list[str]:
    return [str(PROGRAMS / f"{name}.sched") for name in names]


def compared(*line: object) -> list[dict[str, Any]]:
    return document("compare", *line)


def test_figures_are_those_of_simulate() -> None:
    names = files("gpipe", "zb_h1", "interleaved_1f1b")
    given = "-p ranks=2 -p microbatches=4 --p2p-time 0.1"
    found = compared(*names, given)
    assert [each["file"] for each in found] == names
    for each in found:
        alone = json.loads(output("simulate", each["file"], given, "--json"))
        assert each["figures"] == {name: alone[name] for name in each["figures"]}
    assert compared(*names, given, "--sort makespan") == sorted(
        found, key=lambda each: each["makespan_at_share"]
    )


def test_a_program_takes_the_parameters_that_it_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = compared(
        *files("1f1b", "interleaved_1f1b"), "-p chunks=3 -p microbatches=12"
    )
    assert [each["figures"]["params"].get("chunks") for each in found] == [None, 3]
    assert {each["figures"]["microbatches"] for each in found} == {12}
    with pytest.raises(SystemExit) as caught:
        exit_code("compare", *files("1f1b", "gpipe"), "-p chunks=3")
    assert caught.value.code == 2
    assert "no program has a parameter `chunks`" in capsys.readouterr().err


def test_who_refuses_the_size_says_why() -> None:
    given = [*files("dualpipe", "1f1b"), "-p microbatches=6"]
    reason = "the schedule requires: there are at least two microbatches per rank"
    assert compared(*given)[0] == {"file": given[0], "refusal": reason}
    assert compared(*given, "--sort makespan")[-1]["file"] == given[0]
    assert f"\n\nrefused: {given[0]}: {reason}\n" in output("compare", *given)
    assert output("compare", given[0], *given[2:]) == f"refused: {given[0]}: {reason}\n"


def test_the_table(tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    output("compile", *files("pipedream_2bw"), "-o", plan)
    (tmp_path / "costs.yaml").write_text(
        "activation_bytes: 1.0e6\nweights_bytes: 5.0e5\n"
    )
    text = output(
        "compare", *files("1f1b"), plan, "--costs", str(tmp_path / "costs.yaml")
    )
    head, first, second, empty, *meanings = text.splitlines()
    assert len(head) == len(first) == len(second)
    columns = [
        "stages",
        "makespan",
        "over ideal",
        "over makespan",
        "of span",
        "exposed",
        "activations",
        "bytes",
        "versions",
    ]
    for column in columns:
        assert column in head
        assert any(line.startswith(column) for line in meanings)
    assert first.split() == [
        *files("1f1b"),
        "4",
        "x",
        "8",
        "4",
        "33",
        "37.50%",
        "27.27%",
        "27.27%",
        "0",
        "4",
        "4,500,000",
        "1",
    ]
    assert second.split()[-2:] == ["5,000,000", "2"]
    assert empty == ""


@pytest.mark.core
def test_stages_take_their_share_of_the_model() -> None:
    """ZB-V has twice as many stages as ZB-H1, of half the size: 51 of its ops are 25.5 of those."""
    names = files("zb_h1", "zb_v", "1f1b_uneven")
    found = compared(*names, "--sort makespan")
    spans = {
        Path(each["file"]).stem: (
            each["figures"]["makespan"],
            each.get("makespan_at_share"),
        )
        for each in found
    }
    # Costs that are given for each stage say what that takes.
    assert list(spans.items()) == [
        ("zb_v", (51, 25.5)),
        ("zb_h1", (27, 27)),
        ("1f1b_uneven", (287.4, None)),
    ]
    head, *rows = output("compare", *names).splitlines()
    at = head.index("at share") + len("at share")
    assert [row[:at].split()[-1] for row in rows[:3]] == ["27", "25.5", "-"]
    # Transfers are no part of a stage: they take as long, and so do ops of which all take a third.
    given = ["-p ranks=4 -p chunks=3 -p microbatches=12"]
    found = compared(*files("1f1b", "interleaved_1f1b"), *given, "--p2p-time 0.1")
    third = Costs(
        forward_times=[Fraction(1, 3)], backward_times=[Fraction(2, 3)], p2p_time=0.1
    )
    plan = schedlang.load("interleaved_1f1b", ranks=4, chunks=3, microbatches=12)
    makespan = schedlang.simulate(plan, third).timeline.makespan
    assert found[1]["makespan_at_share"] == makespan
    # By stages, as each has it alone.
    assert "at share" not in output("compare", *names, "--unit", "stage")
    by_stage = compared(*names, "--unit stage")
    assert not any("makespan_at_share" in each for each in by_stage)
    # As many stages are compared as they are.
    assert "at share" not in output("compare", *files("1f1b", "zb_h1"))


def test_what_is_wrong_is_an_error_of_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = tmp_path / "bad.sched"
    bad.write_text(
        "schedule bad { param ranks = 1 param microbatches = 1 rank r { B(0) F(0) } }"
    )
    assert exit_code("compare", *files("1f1b"), str(bad)) == 1
    assert "error[order]" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        exit_code("compare", *files("1f1b", "zb_v"), "--forward-times 1 1 1 2")
    assert (
        "zb_v.sched`: 4 durations of `F` are given, there are 8 stages"
        in capsys.readouterr().err
    )
