"""What the README shows is what the commands print."""

import re
from pathlib import Path

import pytest

from schedlang import compile
from schedlang.cli.main import main
from schedlang.diagnostics.source import Source
from tests.support.paths import DIAGNOSTICS, DOCS, ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def shown(command: str, page: str = README) -> str:
    """The output that the README, or another page, shows under a command."""
    match = re.search(rf"^\$ {re.escape(command)}\n(.*?)(?=^\$ |^```)", page, re.M | re.S)
    assert match, f"the page does not show `{command}`"
    return match[1]


def test_the_first_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = re.search(r"^```\n(schedule first .*?)^```", README, re.M | re.S)
    assert program
    assert program[1].count("\n") == 10
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    Path("first.sched").write_text(program[1])
    assert main(["simulate", "first.sched"]) == 0
    assert capsys.readouterr().out == shown("schedc simulate first.sched")


def test_the_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("swapped.sched").write_text((DIAGNOSTICS / "deadlock_ops.sched").read_text())
    assert main(["compile", "swapped.sched"]) == 1
    assert capsys.readouterr().err == shown("schedc compile swapped.sched")


@pytest.mark.parametrize(
    ("page", "command"),
    [
        ("glossary", "show programs/gems.sched -p ranks=2 -p microbatches=2 --compute"),
        (
            "glossary",
            "show programs/seq1f1b.sched -p ranks=1 -p microbatches=2 -p slices=3 --compute",
        ),
        ("glossary", "show programs/zb_h1.sched -p ranks=2 -p microbatches=3 --compute"),
        ("glossary", "show programs/unet_1f1b.sched -p microbatches=1 --ranks"),
        ("transports", "simulate programs/1f1b.sched --p2p-time 0.25 --transport nccl"),
        ("memory", "show programs/1f1b.sched -p ranks=2 -p microbatches=3 --frees"),
        (
            "parallel",
            "show programs/interleaved_1f1b.sched -p ranks=2 -p microbatches=4 --shards 1",
        ),
    ],
)
def test_what_pages_show(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(command.split()) == 0
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == shown(f"schedc {command}", text)


LANGUAGE = (DOCS / "language.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "program", re.findall(r"^```sched\n(schedule .*?)^```", LANGUAGE, re.M | re.S)
)
def test_programs_of_the_reference_compile(program: str) -> None:
    compile(Source("language.md", program))


def test_every_word_of_the_grammar_is_in_the_reference() -> None:
    grammar = re.sub(r"//.*", "", (ROOT / "grammars" / "sched.lark").read_text(encoding="utf-8"))
    words = set(re.findall(r'"([a-zA-Z]+)"', grammar))
    assert len(words) > 40
    assert not words - set(
        re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`|^```.*?^```", LANGUAGE, re.M | re.S)))
    )


def test_every_command_and_program_is_named() -> None:
    commands = (
        "compile",
        "check",
        "show",
        "simulate",
        "view",
        "compare",
        "explain-bubble",
        "pipeline",
    )
    for command in (*commands, "export", "import", "run", "explain"):
        assert f"| `schedc {command} " in README
    for target in ("demo", "example", "test", "pictures"):
        assert f"make {target}" in README
        assert f"\n{target}: " in (ROOT / "Makefile").read_text()
