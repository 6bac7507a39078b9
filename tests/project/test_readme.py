"""The README names every command, and the reference every word of the language."""

import re

from schedlang.cli.command_table import COMMANDS
from tests.support.paths import DOCS, ROOT

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


def test_every_command_and_target_is_named() -> None:
    for command in COMMANDS:
        assert f"`schedc {command} " in README or f"`schedc {command}`" in README
    for target in ("demo", "example", "test"):
        assert f"make {target}" in README
        assert f"\n{target}: " in (ROOT / "Makefile").read_text()
