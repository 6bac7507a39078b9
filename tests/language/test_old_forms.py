"""Old words of the language: they mean what they did, with a warning that names the new ones."""

import json
from pathlib import Path

import pytest

from schedlang import Source, compile
from schedlang.cli.main import main
from schedlang.language.forms import old_forms
from schedlang.language.imports import load
from tests.support.paths import PROGRAMS

_HEAD = "param ranks = 2 param microbatches = 4"
_RANK = "rank r { repeat 4 { F(next) } repeat 4 { B(next) } }"
_BLOCK = "block m every 4 { stage s in 0 .. 2 { F(s, m) at s  I(s, m) at 5 - 2 * s } }"


def program(body: str) -> Source:
    return Source("s.sched", f"schedule s {{ {_HEAD} {body} }}")


def warnings(source: Source) -> list[str]:
    return [each.message for each in old_forms(*load(source))]


def plans(*bodies: str) -> list[list[str]]:
    return [
        [actions.text() for actions in compile(program(body)).ranks] for body in bodies
    ]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "rank r { repeat 4 { F(next) } BW(next) repeat 3 { B(next) W } }",
            "rank r { repeat 4 { F(next) } B(next) repeat 3 { I(next) W } }",
            "`B` is the input half",
        ),
        (
            f"fill W {_RANK}",
            f"fill W {_RANK.replace('B', 'I')}",
            "`B` is the input half",
        ),
        (
            f"cost B = 2 cost W = 1 fill W {_RANK.replace('B(', 'B (')}",
            f"cost I = 2 cost W = 1 fill W {_RANK.replace('B', 'I')}",
            "`B` is the input half",
        ),
        (
            f"objective flush {_RANK}",
            f"objective makespan {_RANK}",
            "`objective flush`",
        ),
        (
            f"{_RANK} recompute s in 0 .. 1",
            f"{_RANK} recompute 0 .. 1",
            "nothing uses the name",
        ),
        (
            f"{_RANK} recompute s in 0 .. 1",
            f"{_RANK} recompute (0) .. 1",
            "nothing uses the name",
        ),
        (f"{_BLOCK} fill W squeeze", f"{_BLOCK} fill W", "`squeeze` changes nothing"),
    ],
)
def test_an_old_form_means_the_new_one(old: str, new: str, said: str) -> None:
    (warning,) = warnings(program(old))
    assert said in warning
    assert not warnings(program(new))
    before, after = plans(old, new)
    assert before == after


def test_squeeze_before_a_fill_changes_it() -> None:
    block = (
        "block m every 6 { stage s in 0 .. 2 { F(s, m) at s  I(s, m) at 7 - 2 * s } }"
    )
    squeezed, drawn = plans(f"{block} squeeze fill W", f"{block} fill W")
    assert squeezed != drawn
    assert not warnings(program(f"{block} squeeze fill W"))


def test_one_warning_for_many_places() -> None:
    (warning,) = old_forms(
        *load(program("rank r { F(0) B(0) W F(1) B(1) W F(2) B(2) W }"))
    )
    assert warning.notes == ("and in 2 more places",)
    assert warning.severity == "warning"


def test_the_commands_show_warnings_and_succeed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "old.sched"
    path.write_text(program(f"objective flush {_RANK}").text)
    assert main(["compile", str(path)]) == 0
    assert (
        "warning[old-form]: `objective flush` is an old name" in capsys.readouterr().err
    )
    assert main(["check", str(path)]) == 0
    assert "warning[old-form]" in capsys.readouterr().err
    assert main(["check", str(path), "--transport", "all", "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert all(verdict["warnings"][0]["code"] == "old-form" for verdict in verdicts)
    assert all(verdict["proved"] for verdict in verdicts)


def test_no_program_of_the_gallery_has_an_old_form() -> None:
    folder = PROGRAMS
    for path in sorted(folder.glob("*.sched")):
        assert not warnings(Source(str(path), path.read_text(encoding="utf-8"))), path
