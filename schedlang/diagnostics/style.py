"""Colours of texts on a terminal: of diagnostics, as compilers of other languages have them, and of
differences, as they are in version control.
"""

from typing import NamedTuple

#: Of each part of a message, the parameters of its escape sequence (ECMA-48, SGR).
_CODES = {
    "error": "1;31",
    "warning": "1;33",
    "message": "1",
    # Line numbers, and the lines that lead to a place.
    "frame": "1;34",
    # What belongs to the place of the mistake but is not the mistake.
    "other": "34",
    "note": "1;36",
    # What two schedules have in common, and what became of the rest.
    "equal": "2",
    "removed": "31",
    "added": "32",
    "moved": "33",
}


class Style(NamedTuple):
    """How parts of a message are shown: in colour, or as they are."""

    is_coloured: bool

    def paint(self, part: str, text: str) -> str:
        """A text as a part of a message, by the name of the part in `_CODES`."""
        return (
            f"\x1b[{_CODES[part]}m{text}\x1b[0m" if self.is_coloured and text else text
        )


PLAIN = Style(is_coloured=False)
COLOURED = Style(is_coloured=True)
