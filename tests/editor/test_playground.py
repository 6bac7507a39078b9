"""What the playground is told of programs, without a browser."""

import json
from typing import Any

import pytest

from schedlang import Source, compile, read_source, simulate
from schedlang.compiler import check_program
from schedlang.extras.editor import playground
from schedlang.extras.editor.colours import coloured
from schedlang.files.programs import names, path_of, text_of
from schedlang.report.views import lay_out
from schedlang.report.views.html import page_data
from schedlang.schedule.transports import NAMES
from tests.support.paths import DOCS, PROGRAMS

WRONG = """\
schedule s {
    # A face, 🙂, is one character and two units.
    param ranks = 2
    rank r { F(next }
}
"""
HANGS = """\
schedule warm {
    param ranks = 2  param microbatches = 4
    rank r {
        let warmup = r
        repeat warmup                { F(next) }
        repeat microbatches - warmup { F(next)  B(next) }
        repeat warmup                { B(next) }
    }
}
"""


@pytest.fixture(autouse=True)
def begun(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The programs that the playground begins with."""
    # It changes the folder, and monkeypatch goes back.
    monkeypatch.chdir(".")
    programs: list[dict[str, str]] = json.loads(playground.begin())
    return programs


def answers(text: str, **params: int) -> list[dict[str, Any]]:
    return list(map(json.loads, playground.answers(text, params)))


def all_of(text: str, **params: int) -> dict[str, Any]:
    """All that is said of a program; of what is said twice, the last."""
    return {
        key: value
        for answer in answers(text, **params)
        for key, value in answer.items()
    }


@pytest.mark.parametrize("name", ["1f1b", "zb_v", "dualpipe"])
def test_what_the_commands_say(name: str) -> None:
    told = all_of(text_of(name), ranks=2)
    plan = compile(read_source(path_of(name)), {"ranks": 2})
    assert told["parameters"] == plan.params
    assert told["diagnostics"] == []
    assert told["colours"] == [
        [start, end, colour.value] for start, end, colour in coloured(text_of(name))
    ]
    drawn = page_data([lay_out(plan, simulate(plan))])
    # The compiler knows another name of the file.
    assert told["schedules"][0]["packed"] == drawn[0]["packed"]
    assert told["figures"][0][1] == f"{simulate(plan).timeline.makespan:g}"
    assert told["bubbles"].startswith(f"{plan.name} (ranks = 2")
    assert told["verdicts"] == [[transport, None] for transport in NAMES]


def test_a_reader_has_the_first_things_first() -> None:
    keys = [next(iter(answer)) for answer in answers(text_of("1f1b"))]
    assert keys == [
        "colours",
        "parameters",
        "diagnostics",
        "schedules",
        "figures",
        "bubbles",
        "verdicts",
    ]


@pytest.mark.slow
def test_every_program_of_the_gallery_can_be_opened(
    begun: list[dict[str, str]],
) -> None:
    assert [program["name"] for program in begun] == names()
    for program in begun:
        assert program["title"]
        told = answers(program["text"])
        assert not [
            each for each in told[2]["diagnostics"] if each["severity"] == "error"
        ]


def test_a_mistake_is_told_at_its_place_in_utf_16() -> None:
    told = all_of(WRONG)
    (mistake,) = told["diagnostics"]
    units = WRONG.encode("utf-16-le")
    assert units[2 * mistake["from"] : 2 * mistake["to"]].decode("utf-16-le") == "}"
    assert (mistake["code"], mistake["repair"]) == ("syntax", None)
    assert "--> program.sched:4:" in told["text"]
    assert "schedules" not in told


def test_another_spelling_is_offered() -> None:
    text = "# \U0001f600\n" + HANGS.replace("repeat warmup ", "repeat warmpu ", 1)
    (mistake,) = all_of(text)["diagnostics"]
    assert mistake["repair"]["text"] == "write `warmup`"
    (edit,) = mistake["repair"]["edits"]
    units = text.encode("utf-16-le")
    assert units[2 * edit["from"] : 2 * edit["to"]].decode("utf-16-le") == "warmpu"


def test_a_deadlock_comes_with_a_repair_that_works() -> None:
    assert all_of(HANGS, ranks=3, chunks=2)["parameters"] == {
        "ranks": 3,
        "microbatches": 4,
    }
    first, repaired = [each for each in answers(HANGS) if "diagnostics" in each]
    assert first["diagnostics"][0]["repair"] is None
    (mistake,) = repaired["diagnostics"]
    (edit,) = mistake["repair"]["edits"]
    text = HANGS[: edit["from"]] + edit["insert"] + HANGS[edit["to"] :]
    assert all_of(text)["diagnostics"] == []


def test_verdicts_differ_by_transport() -> None:
    page = (DOCS / "errors" / "first-use.md").read_text(encoding="utf-8")
    program = page.split("```")[1].strip()
    verdicts = dict(all_of(program)["verdicts"])
    assert verdicts["portable"] is None
    assert verdicts["nccl"].startswith("error[first-use]: ")


@pytest.mark.parametrize("name", ["1f1b_explicit", "first-use", *names()[::6]])
def test_verdicts_are_those_of_the_command(name: str) -> None:
    """Which asks for them from the program on, and not from the plan."""
    page = (DOCS / "errors" / "first-use.md").read_text(encoding="utf-8")
    text = page.split("```")[1].strip() if name == "first-use" else text_of(name)
    verdicts = dict(all_of(text)["verdicts"])
    asked = check_program(Source(str(PROGRAMS / "s.sched"), text), {}, verdicts)
    errors = {
        transport: [each for each in found if each.severity == "error"]
        for transport, found in asked.items()
    }
    assert verdicts == {
        transport: f"error[{found[0].code}]: {found[0].message}" if found else None
        for transport, found in errors.items()
    }


def test_a_file_to_import_is_no_program() -> None:
    told = all_of("fn half(n) = n / 2")
    assert [each["message"].partition("\n")[0] for each in told["diagnostics"]] == [
        "there is no schedule"
    ]
