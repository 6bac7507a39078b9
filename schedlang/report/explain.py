"""The pages of `schedc explain`.

For every error code there is one: what it means, a program that gets it, and one that is right.
"""

from schedlang.files.package import DOCS

PAGES = DOCS / "errors"


def codes() -> list[str]:
    """Every code that a diagnostic can have, in alphabetical order."""
    return sorted(path.stem for path in PAGES.glob("*.md"))


def page(word: str) -> str:
    """The page of a code, as Markdown."""
    return (PAGES / f"{word}.md").read_text(encoding="utf-8")


def summary(word: str) -> str:
    """The first sentence of the page of a code."""
    # The title comes first, then what the code means.
    _title, paragraph, *_ = page(word).split("\n\n")
    return " ".join(paragraph.split()).partition(". ")[0].removesuffix(".")
