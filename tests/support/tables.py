"""Tables of cases in a text: a line for each, with ` | ` between the cells."""

import re


def rows(text: str) -> list[list[str]]:
    """The cells of each line, without comments, which begin with `# `, and blank lines."""
    lines = [line.strip() for line in text.splitlines()]
    return [
        [cell.strip() for cell in re.split(r" \|(?= |$)", line)]
        for line in lines
        if line and not line.startswith("# ")
    ]
