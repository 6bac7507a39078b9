"""Tables in Markdown, and the pages whose text is written by hand around tables that are made."""

import re
from collections.abc import Iterable, Sequence


def line(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"| {' | '.join(cells)} |"


def table(*rows: Sequence[object]) -> str:
    """A table, the first of whose rows is its head: names to the left, numbers to the right."""
    head, *body = [
        [f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row]
        for row in rows
    ]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(map(line, [head, rule, *body]))


def with_rows(page: str, title: str, rows: Iterable[str]) -> str:
    """A page with these rows below the head of the table that comes first after a title."""
    before = rf"^#+ {re.escape(title)}\n(?:[^#|\n].*\n|\n)*\|.*\n\| ?---.*\n"
    made = "".join(f"{row}\n" for row in rows)
    filled, count = re.subn(
        rf"({before})(?:\|.*\n)*", lambda found: found[1] + made, page, flags=re.M
    )
    if count != 1:
        raise ValueError(f"the page has no table below `{title}`")
    return filled
