"""The table of docs/models.md that says what does not go together, printed from the rows
of `schedlang.runtime.door`.
"""

import re
from pathlib import Path

from schedlang.runtime.door import FEATURES

ROOT = Path(__file__).parents[2]
PAGE = "docs/models.md"

#: The table on the page: all lines behind its head.
_TABLE = re.compile(r"(?<=\n)\| these \| with these \| the error \|\n(\|.*\n)*")


def table() -> str:
    """The table as Markdown."""
    rows = [
        (feature.words, other.words, why.format_map(_Shown(other=other.words)))
        for feature in FEATURES.values()
        for other, why in (
            (FEATURES[name], why) for name, why in feature.not_with.items()
        )
    ]
    lines = [f"| {' | '.join(row)} |\n" for row in rows]
    return "".join(["| these | with these | the error |\n", "|---|---|---|\n", *lines])


class _Shown(dict[str, str]):
    """What stands in an error for what is not known here: the number of a stage."""

    def __missing__(self, key: str) -> str:
        return "…"


def files() -> dict[str, str]:
    """docs/models.md with the table as it is now."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    return {PAGE: _TABLE.sub(lambda _: table(), page)}
