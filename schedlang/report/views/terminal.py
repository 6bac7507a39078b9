"""A timeline drawn as text: a row for each rank, time from left to right, idle time as dots."""

import shutil
from collections.abc import Callable, Sequence
from math import floor

from attrs import frozen

from schedlang.report.views import palette
from schedlang.report.views.picture import Picture
from schedlang.schedule.actions import NO_MICROBATCH
from schedlang.schedule.kinds import OPS, Kind
from schedlang.schedule.timeline import Bar, Timeline

_IDLE = "·"
#: A row: the text before it, its bars, and the text behind it.
_Row = tuple[str, Sequence[Bar], str]
#: A function that gives the columns of a bar, from its word and the number of columns.
_Paint = Callable[[Bar, str, int], Sequence[str]]


def draw(timeline: Timeline, width: int | None = None) -> str:
    """The picture, at most `width` columns wide, by default as wide as the terminal.

    An op is as wide as it is long. It shows its kind, stage and microbatch if there is room: `F3`
    where each rank has one stage, `4F3` where a rank has several. If there is none, it shows the
    letter of its kind.
    """
    rows = _rows(timeline)
    return _text(rows, _fit(timeline, rows, width), _plain)


def draw_both(predicted: Timeline, measured: Timeline, width: int | None = None) -> str:
    """Two timelines of one schedule on one axis of time, the rows of each rank below each other.

    Both start at 0. The picture is as wide as that of `draw`.
    """
    rows: list[_Row] = []
    for above, below in zip(_rows(predicted), _rows(measured), strict=True):
        for name, (before, bars, after) in (("predicted", above), ("measured", below)):
            rows.append((f"{before}{name:9} ", bars, after))
    longer = max(predicted, measured, key=lambda timeline: timeline.makespan)
    return _text(rows, _fit(longer, rows, width), _plain)


def view(picture: Picture, colour: bool) -> str:
    """The picture as wide as the terminal, in colour or plain; with copies, and with a legend."""
    timeline = picture.timeline
    rows = _rows(timeline)
    if picture.has_copies:
        # The copies of a rank are drawn below its ops.
        of_ranks = rows
        rows = []
        for row, copies in zip(of_ranks, timeline.copies, strict=True):
            rows += [row, ("  host ", copies, "")]
    frame = _fit(timeline, rows)
    paint = _painter(picture) if colour else _plain
    parts = [
        f"{picture.title}: makespan {timeline.makespan:.10g}, "
        f"{timeline.bubble_over_makespan:.1%} idle",
        "",
        _text(rows, frame, paint),
        "",
        "   ".join([*_legend(picture, rows, paint), f"{_IDLE} idle"]),
    ]
    if _is_tight(rows, frame):
        parts.append(
            "too wide to show every op and its microbatch here: a page zooms, -o NAME.html"
        )
    return "\n".join(parts)


def _legend(picture: Picture, rows: Sequence[_Row], paint: _Paint) -> list[str]:
    """What the letters and colours of the picture mean."""
    # An op that takes no time has no column, and so is not seen.
    seen = {bar.kind for _, bars, _ in rows for bar in bars if bar.end > bar.start}
    entries = []
    for kind in picture.kinds:
        if kind in seen:
            bar = Bar(kind, 0, NO_MICROBATCH, 0, 0)
            swatch = "".join(paint(bar, kind.name[0], 1))
            entries.append(f"{swatch} {OPS[kind].name}")
    return entries


@frozen
class _Frame:
    """Where time is on the columns: `scale` columns for a unit of time, from `origin` on."""

    origin: float
    scale: float
    columns: int
    with_stage: bool

    def columns_of(self, bar: Bar) -> slice:
        return slice(self._column(bar.start), self._column(bar.end))

    def _column(self, time: float) -> int:
        return round((time - self.origin) * self.scale)


def _rows(timeline: Timeline) -> list[_Row]:
    """The rows of the ranks."""
    rows: list[_Row] = []
    for rank, (bars, idle) in enumerate(zip(timeline.ranks, timeline.idle, strict=True)):
        rows.append((f"rank {rank} ", bars, f" {idle:4.0%} idle"))
    return rows


def _fit(timeline: Timeline, rows: Sequence[_Row], width: int | None = None) -> _Frame:
    """The frame in which every op has room for its word, or the whole width if that is wider."""
    width = width or shutil.get_terminal_size((110, 24)).columns
    before = max(len(row[0]) for row in rows)
    after = max(len(row[2]) for row in rows)
    # Two columns are for the lines at both ends of a row.
    room = max(width - before - after - 2, 10)
    origin = min((bars[0].start for bars in timeline.ranks if bars), default=0.0)
    stages = [len({bar.stage for bar in bars}) for bars in timeline.ranks]
    with_stage = max(stages, default=1) > 1
    bars = [bar for rank in timeline.ranks for bar in rank if bar.end > bar.start]
    if not bars:
        return _Frame(origin, 1.0, 0, with_stage)
    # The columns for a unit of time in which each word fits, and a blank behind it.
    needed = max((len(_word(bar, with_stage)) + 1) / (bar.end - bar.start) for bar in bars)
    scale = min(needed, room / timeline.makespan)
    if scale >= 1:
        # With a whole number of columns, ops of one length are all as wide.
        scale = floor(scale)
    return _Frame(origin, scale, round(timeline.makespan * scale), with_stage)


def _is_tight(rows: Sequence[_Row], frame: _Frame) -> bool:
    """Whether some op has no room for its word."""
    for _, bars, _ in rows:
        for bar in bars:
            columns = range(frame.columns)[frame.columns_of(bar)]
            if bar.end > bar.start and len(_word(bar, frame.with_stage)) > len(columns):
                return True
    return False


def _text(rows: Sequence[_Row], frame: _Frame, paint: _Paint) -> str:
    """The rows as lines."""
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
    """What is written on an op: `F3`, or with its stage `4F3`."""
    word = Kind(bar.kind).name
    if with_stage:
        word = f"{bar.stage}{word}"
    if bar.microbatch != NO_MICROBATCH:
        word = f"{word}{bar.microbatch}"
    return word


def _plain(bar: Bar, word: str, width: int) -> str:
    """The columns of an op: its word, or the letter of its kind if the word has no room."""
    if width > len(word):
        # The last column stays free, so that neighbours do not run together.
        return word + "─" * (width - len(word) - 1) + " "
    if width == len(word):
        return word
    letter = next(character for character in word if character.isalpha())
    return (letter + "─" * width)[:width]


def _painter(picture: Picture) -> _Paint:
    """A function that paints ops as blocks of colour.

    A column is a text: the escape codes are parts of the first and the last one.
    """
    chunks = {box.bar.stage: box.chunk for box in picture.boxes}

    def paint(bar: Bar, word: str, width: int) -> Sequence[str]:
        cells = list(_plain(bar, word, width).replace("─", " "))
        # The free column at the end has no colour.
        painted = len(cells) - 1 if width > len(word) else len(cells)
        if painted:
            fill = palette.fill(bar.kind, chunks[bar.stage], picture.chunks)
            text = palette.terminal_colour(palette.ink(fill))
            block = palette.terminal_colour(fill)
            cells[0] = f"\x1b[38;5;{text};48;5;{block}m{cells[0]}"
            cells[painted - 1] += "\x1b[0m"
        return cells

    return paint
