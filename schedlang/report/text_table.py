"""Tables as lines of text, for terminals and logs."""

from collections.abc import Sequence


def rounded(value: float, digits: int = 6, sign: str = "") -> str:
    """A number to some significant digits. A large one has its whole part and no exponent, as
    17330800. With the `sign` "+", a positive number has one, too.
    """
    has_more = abs(value) >= 10**digits - 0.5
    return f"{value:{sign}.0f}" if has_more else f"{value:{sign}.{digits}g}"


def explained(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Names, values and what these mean, as lines."""
    width = max(len(value) for _, value, _ in rows)
    return [
        f"{name:<22}{value:<{width}}  {meaning}".rstrip()
        for name, value, meaning in rows
    ]


def aligned(rows: list[list[str]]) -> list[str]:
    """The rows of a table as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [f"{first:<{widths[0]}}"]
        for cell, width in zip(others, widths[1:], strict=True):
            cells.append(f"{cell:>{width}}")
        lines.append("  ".join(cells).rstrip())
    return lines
