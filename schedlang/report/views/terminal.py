"""A timeline drawn as text: one row per rank, time from left to right, idle time as dots."""

import shutil
from collections.abc import Callable, Sequence
from math import floor

from attrs import frozen

from schedlang.report.views import palette
from schedlang.report.views.picture import Picture
from schedlang.schedule.actions import NO_MICROBATCH
from schedlang.schedule.kinds import Kind
from schedlang.schedule.timeline import Bar, Timeline

_IDLE = "·"
#: What stands before a row, its bars, and what stands behind.
_Row = tuple[str, Sequence[Bar], str]
#: The columns of a bar, given its word and how many there are.
_Paint = Callable[[Bar, str, int], Sequence[str]]


def draw(timeline: Timeline, width: int | None = None) -> str:
    """The picture, at most `width` columns wide, by default the terminal's; actions keep their
    proportions.

    An action shows its kind, stage and microbatch where there is room: `F3` where each rank has one
    stage, `4F3` where a rank has several, or as much of it as fits.
    """
    rows = _rows(timeline)
    return _text(rows, _fit(timeline, rows, width), _plain)


def draw_both(predicted: Timeline, measured: Timeline, width: int | None = None) -> str:
    """Two timelines of one schedule on one axis of time, which starts at 0 in both: of each rank,
    one below the other.

    As wide as `draw` makes it.
    """
    rows = [
        (f"{before}{which:9} ", bars, after)
        for both in zip(_rows(predicted), _rows(measured), strict=True)
        for which, (before, bars, after) in zip(("predicted", "measured"), both, strict=True)
    ]
    longer = max(predicted, measured, key=lambda timeline: timeline.makespan)
    return _text(rows, _fit(longer, rows, width), _plain)


def view(picture: Picture, colour: bool) -> str:
    """The picture as wide as the terminal, in colour or plain; with its copies, and what the
    letters mean.
    """
    timeline = picture.timeline
    rows = _rows(timeline)
    paint = _painter(picture) if colour else _plain
    if picture.has_copies:
        rows = [
            row
            for rank, bars in zip(rows, timeline.copies, strict=True)
            for row in (rank, ("  host ", bars, ""))
        ]
    frame = _fit(timeline, rows)
    names = [
        (
            f"{''.join(paint(Bar(kind, 0, NO_MICROBATCH, 0, 0), kind.name[0], 1))} "
            f"{palette.NAMES[kind]}"
        )
        for kind in picture.kinds
        if any(bar.kind == kind and bar.end > bar.start for _, bars, _ in rows for bar in bars)
    ]
    head = (
        f"{picture.title}: makespan {timeline.makespan:.10g}, "
        f"{timeline.bubble_over_makespan:.1%} idle"
    )
    parts = [head, "", _text(rows, frame, paint), "", "   ".join([*names, f"{_IDLE} idle"])]
    if _is_tight(rows, frame):
        parts.append(
            "too wide to show every op and its microbatch here: a page zooms, -o NAME.html"
        )
    return "\n".join(parts)


@frozen
class _Frame:
    """How time is laid on columns: so many per unit of time, from `origin` on."""

    origin: float
    scale: float
    columns: int
    with_stage: bool

    def columns_of(self, bar: Bar) -> slice:
        return slice(*(round((time - self.origin) * self.scale) for time in (bar.start, bar.end)))


def _rows(timeline: Timeline) -> list[_Row]:
    return [
        (f"rank {rank} ", bars, f" {idle:4.0%} idle")
        for rank, (bars, idle) in enumerate(zip(timeline.ranks, timeline.idle, strict=True))
    ]


def _fit(timeline: Timeline, rows: Sequence[_Row], width: int | None = None) -> _Frame:
    """Room for every word if that fits beside what stands before and behind the rows, else the
    whole width.
    """
    width = width or shutil.get_terminal_size((110, 24)).columns
    room = max(width - max(len(row[0]) for row in rows) - max(len(row[2]) for row in rows) - 2, 10)
    origin = min((rank[0].start for rank in timeline.ranks if rank), default=0.0)
    with_stage = max((len({bar.stage for bar in rank}) for rank in timeline.ranks), default=1) > 1
    bars = [bar for rank in timeline.ranks for bar in rank if bar.end > bar.start]
    if not bars:
        return _Frame(origin, 1.0, 0, with_stage)
    roomy = max((len(_word(bar, with_stage)) + 1) / (bar.end - bar.start) for bar in bars)
    scale = min(roomy, room / timeline.makespan)
    # Whole columns per unit of time draw equal actions equally wide.
    scale = floor(scale) if scale >= 1 else scale
    return _Frame(origin, scale, round(timeline.makespan * scale), with_stage)


def _is_tight(rows: Sequence[_Row], frame: _Frame) -> bool:
    """Whether a bar has no room for its word."""
    bars = (bar for _, bars, _ in rows for bar in bars if bar.end > bar.start)
    return any(
        len(_word(bar, frame.with_stage)) > len(range(frame.columns)[frame.columns_of(bar)])
        for bar in bars
    )


def _text(rows: Sequence[_Row], frame: _Frame, paint: _Paint) -> str:
    left = max(len(row[0]) for row in rows)
    lines = []
    for before, bars, after in rows:
        cells = [_IDLE] * frame.columns
        for bar in bars:
            columns = frame.columns_of(bar)
            cells[columns] = paint(bar, _word(bar, frame.with_stage), columns.stop - columns.start)
        lines.append(f"{before:<{left}}│{''.join(cells)}│{after}")
    return "\n".join(lines)


def _word(bar: Bar, with_stage: bool) -> str:
    stage = str(bar.stage) if with_stage else ""
    return (
        f"{stage}{Kind(bar.kind).name}{'' if bar.microbatch == NO_MICROBATCH else bar.microbatch}"
    )


def _plain(bar: Bar, word: str, width: int) -> str:
    """The word in its columns, or the letter of its kind; a bar's last column stays free where
    there is room.
    """
    if width > len(word):
        return word + "─" * (width - len(word) - 1) + " "
    if width == len(word):
        return word
    return (next(letter for letter in word if letter.isalpha()) + "─" * width)[:width]


def _painter(picture: Picture) -> _Paint:
    """Bars as blocks of colour; the escape codes go with the first and the last column."""
    chunk = {box.bar.stage: box.chunk for box in picture.boxes}

    def paint(bar: Bar, word: str, width: int) -> Sequence[str]:
        cells = list(_plain(bar, word, width).replace("─", " "))
        inside = range(len(cells) - (width > len(word)))
        if inside:
            fill = palette.fill(bar.kind, chunk[bar.stage], picture.chunks)
            text = palette.terminal_colour(palette.ink(fill))
            block = palette.terminal_colour(fill)
            cells[0] = f"\x1b[38;5;{text};48;5;{block}m{cells[0]}"
            cells[inside[-1]] += "\x1b[0m"
        return cells

    return paint
