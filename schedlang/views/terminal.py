"""A timeline drawn as text: one row per rank, time from left to right, idle time as dots."""

import shutil
from math import floor

from schedlang.actions import NO_MICROBATCH
from schedlang.kinds import Kind
from schedlang.timeline import Bar, Timeline

_IDLE = "·"


def draw(timeline: Timeline, width: int | None = None) -> str:
    """The picture, at most `width` columns wide, by default the terminal's; actions keep their proportions.

    An action shows its kind, stage and microbatch where there is room: `F3` where each rank has one stage, `4F3`
    where a rank has several, or as much of it as fits.
    """
    width = width or shutil.get_terminal_size((110, 24)).columns
    margins = [(f"rank {rank} ", f" {idle:4.0%} idle") for rank, idle in enumerate(timeline.idle)]
    left, right = max(len(each[0]) for each in margins), max(len(each[1]) for each in margins)
    stages = max((len({bar.stage for bar in rank}) for rank in timeline.ranks), default=1)
    scale, columns = _scale(timeline, max(width - left - right - 2, 10), stages > 1)
    rows = []
    for (before, after), rank in zip(margins, timeline.ranks, strict=True):
        cells = [_IDLE] * columns
        for bar in rank:
            start, end = round((bar.start - _origin(timeline)) * scale), round((bar.end - _origin(timeline)) * scale)
            cells[start:end] = _cell(_word(bar, stages > 1), end - start)
        rows.append(f"{before:<{left}}│{''.join(cells)}│{after}")
    return "\n".join(rows)


def _origin(timeline: Timeline) -> float:
    return min((rank[0].start for rank in timeline.ranks if rank), default=0.0)


def _scale(timeline: Timeline, width: int, with_stage: bool) -> tuple[float, int]:
    """Columns per unit of time, and columns in all: room for every word if that fits, else the whole width."""
    bars = [bar for rank in timeline.ranks for bar in rank if bar.end > bar.start]
    if not bars:
        return 1.0, 0
    roomy = max((len(_word(bar, with_stage)) + 1) / (bar.end - bar.start) for bar in bars)
    scale = min(roomy, width / timeline.makespan)
    # Whole columns per unit of time draw equal actions equally wide.
    scale = floor(scale) if scale >= 1 else scale
    return scale, round(timeline.makespan * scale)


def _word(bar: Bar, with_stage: bool) -> str:
    stage = str(bar.stage) if with_stage else ""
    return f"{stage}{Kind(bar.kind).name}{'' if bar.microbatch == NO_MICROBATCH else bar.microbatch}"


def _cell(word: str, width: int) -> str:
    """The word in its columns, or the letter of its kind; a bar's last column stays free where there is room."""
    if width > len(word):
        return word + "─" * (width - len(word) - 1) + " "
    if width == len(word):
        return word
    return (next(letter for letter in word if letter.isalpha()) + "─" * width)[:width]
