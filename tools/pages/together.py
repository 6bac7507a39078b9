"""The table of docs/models.md that says what does not go together, from the rows of
`schedlang.runtime.door`.
"""

from pathlib import Path

from schedlang.runtime.door import FEATURES
from tools.pages.tables import line, with_rows

ROOT = Path(__file__).parents[2]
PAGE = "docs/models.md"
TITLE = "What does not go together"


class _Shown(dict[str, str]):
    """What stands in an error for what is not known here: the number of a stage."""

    def __missing__(self, key: str) -> str:
        return "…"


def rows() -> list[str]:
    """The rows of the table."""
    return [
        line([feature.words, other.words, why.format_map(_Shown(other=other.words))])
        for feature in FEATURES.values()
        for other, why in (
            (FEATURES[name], why) for name, why in feature.not_with.items()
        )
    ]


def files() -> dict[str, str]:
    """docs/models.md with the table as it is now."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    return {PAGE: with_rows(page, TITLE, rows())}
