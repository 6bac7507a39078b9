"""What the words of the language mean, as docs/language.md has it in its tables."""

import re
from functools import cache

from schedlang.files.package import DOCS
from schedlang.language.grammar import FORMS, spellings
from schedlang.language.sites import KINDS
from schedlang.schedule.kinds import OPS

_ROW = re.compile(r"^\| (.+?) \| (.+) \|$", re.M)


@cache
def meanings() -> dict[str, str]:
    """What ops, items, passes and figures do, by their words, in Markdown."""
    text = (DOCS / "language.md").read_text(encoding="utf-8")
    by_word: dict[str, str] = {}
    for forms, meaning in _ROW.findall(text):
        # A row of a table has all forms of a word at once: | `F(s)`, `F(s, m)` | the forward … |
        for form in re.findall(r"`([^`]+)`", forms):
            word = re.match(r"(?:send|recv|exchange) \w+|\w+", form)
            # The first table that has a word is about it; others may name it beside.
            if word and word.group() not in by_word:
                by_word[word.group()] = f"{forms}: {_without_links(meaning)}"
    # Also the older words for the same ops.
    ops = {word: OPS[kind].word for word, kind in KINDS.items() if kind in OPS}
    return {word: by_word[known] for word, known in ops.items()} | by_word


@cache
def examples() -> dict[str, str]:
    """How each word of the language stands in a program, by the word."""
    spelt = spellings()
    return {spelt[terminal]: form for terminal, form in FORMS.items()}


def _without_links(text: str) -> str:
    """Markdown without its links, which lead from another place."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
