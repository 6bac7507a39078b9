"""Idle time as a still picture draws it: a pattern for each cause, in a tint of its colour, as the
page does.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from schedlang.report.bubbles.attribution import CAUSES
from schedlang.report.views import palette
from schedlang.report.views.picture import Picture
from schedlang.report.views.tiles import tile


def shown_causes(picture: Picture) -> Sequence[str]:
    """The causes of idle time that a picture has, in their order."""
    there = set(picture.account.idle.cause.tolist())
    return [cause for number, cause in enumerate(CAUSES) if number in there]


def pieces(picture: Picture) -> Iterator[tuple[int, float, float, str]]:
    """The idle time: rank, start, end and cause; what is behind it does not divide it."""
    idle = picture.account.idle
    for (rank, cause), parts in groupby(idle, key=lambda part: (part.rank, part.cause)):
        first, *more = parts
        start = first.start
        end = first.end
        for part in more:
            if part.start > end:
                yield rank, start, end, cause
                start = part.start
            end = part.end
        yield rank, start, end, cause


def fill(cause: str) -> str:
    """What fills idle time of a cause."""
    return f"url(#idle-{cause})"


def patterns(causes: Sequence[str]) -> Iterator[str]:
    """The patterns that these fills name."""
    for cause in causes:
        colour, pattern = palette.IDLE[cause]
        ground = palette.mixed(colour, palette.IDLE_SHARES["ground"], palette.PAPER)
        lines = palette.mixed(colour, palette.IDLE_SHARES["ink"], palette.PAPER)
        yield tile(f"idle-{cause}", pattern, lines, ground)
