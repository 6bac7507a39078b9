"""How a notebook shows plans and executions.

What draws them stands above what is drawn (`schedlang.report`). So nothing here knows it:
whoever asks `schedlang` for a name has it say what draws.
"""

from collections.abc import Callable
from typing import Any

#: Draws a plan or an execution as HTML; None for what cannot be drawn.
Draw = Callable[[Any], str | None]

_drawing: list[Draw] = []


def draw_with(draw: Draw) -> None:
    """Say what draws."""
    _drawing[:] = [draw]


def drawn(shown: Any) -> str | None:
    """The HTML of a plan or an execution, for its `_repr_html_`; without, a notebook takes the
    `repr`.
    """
    return _drawing[0](shown) if _drawing else None
