"""Patterns as elements of an SVG."""

from schedlang.report.views import palette


def tile(name: str, pattern: str, lines: str, ground: str) -> str:
    """The element that fills a shape with a pattern, `url(#name)`, of lines on a ground."""
    path, width, cap = palette.PATTERNS[pattern]
    size = f'width="{palette.TILE}" height="{palette.TILE}"'
    drawn = (
        f'<path d="{path}" fill="none" stroke="{lines}" stroke-width="{width}" '
        f'stroke-linecap="{cap}"/>'
    )
    return (
        f'<pattern id="{name}" {size} patternUnits="userSpaceOnUse">'
        f'<rect {size} fill="{ground}"/>{drawn if path else ""}</pattern>'
    )
