"""The README names the targets to begin with, the pages every command and every word of the language."""

import re

from schedlang.cli.command_table import COMMANDS
from tests.support.paths import DOCS, ROOT

COMMAND_PAGE = (DOCS / "commands.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


LANGUAGE = (DOCS / "language.md").read_text(encoding="utf-8")


def test_every_word_of_the_grammar_is_in_the_reference() -> None:
    grammar = re.sub(
        r"//.*", "", (ROOT / "grammars" / "sched.lark").read_text(encoding="utf-8")
    )
    words = set(re.findall(r'"([a-zA-Z]+)"', grammar))
    assert len(words) > 40
    assert not words - set(
        re.findall(
            r"\w+", " ".join(re.findall(r"`[^`]+`|^```.*?^```", LANGUAGE, re.M | re.S))
        )
    )


def test_every_command_is_named() -> None:
    for command in COMMANDS:
        assert re.search(rf"`schedc {command}[ `]", COMMAND_PAGE), command


def test_the_targets_to_begin_with_are_named() -> None:
    for target in ("demo", "example", "test"):
        assert f"make {target}" in README
        assert f"\n{target}: " in (ROOT / "Makefile").read_text()
