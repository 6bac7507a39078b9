"""A timeline drawn as text: a row for each rank, time from left to right, idle time as dots.

Where ops are narrower than a column, a row of letters would be a schedule that nobody has written.
Then each row has windows of time, with the shares of each that forwards, backwards and idle time
have.
"""

import shutil
from collections.abc import Callable, Collection, Sequence
from math import floor

from attrs import evolve, frozen

from schedlang.report.views import palette
from schedlang.report.views.bands import Share, shares
from schedlang.report.views.picture import Picture
from schedlang.report.views.units import time_text
from schedlang.schedule.actions import NO_MICROBATCH
from schedlang.schedule.kinds import OPS, Kind
from schedlang.schedule.naming import Names
from schedlang.schedule.timeline import Bar, Timeline

_IDLE = "·"
#: Ops narrower than a column may take so much of the work without being seen, as may an optimizer
#: step that is short beside all others.
_UNSEEN = 0.05
#: The digits of the times at which windows begin, where these have no unit.
_DIGITS = 5
#: A row: the text before it, its bars, and the text behind it.
_Row = tuple[str, Sequence[Bar], str]
#: A function that gives what is written on a bar.
_Label = Callable[[Bar], str]
#: A function that gives the columns of a bar, from its word and the number of columns.
_Paint = Callable[[Bar, str, int], Sequence[str]]


def draw(
    timeline: Timeline,
    names: Names,
    width: int | None = None,
    wrong: Collection[int] = (),
) -> str:
    """The picture, at most `width` columns wide, by default as wide as the terminal. The ranks for
    which claims do not hold, `wrong`, are marked: `rank 2!`.

    An op is as wide as it is long. It shows its kind, stage and microbatch if there is room: `F3`
    where each rank has one stage, `4F3` where a rank has several, `up(1)F3` where there are several
    pipelines and the terminal is wide enough. If there is no room, it shows the letter of its kind.
    A line below says what other numbers than those of programs stand for.
    """
    rows = _rows(timeline, wrong)
    frame = _fit(timeline, rows, names, width)
    return "\n".join([*_drawn(rows, frame, _plain), *_notes(rows, frame, names)])


def draw_both(
    predicted: Timeline, measured: Timeline, names: Names, width: int | None = None
) -> str:
    """Two timelines of one schedule on one axis of time, the rows of each rank below each other.

    Both start at 0. The picture is as wide as that of `draw`.
    """
    rows: list[_Row] = []
    for above, below in zip(_rows(predicted), _rows(measured), strict=True):
        for name, (before, bars, after) in (("predicted", above), ("measured", below)):
            rows.append((f"{before}{name:9} ", bars, after))
    longer = max(predicted, measured, key=lambda timeline: timeline.makespan)
    frame = _fit(longer, rows, names, width)
    return "\n".join([*_drawn(rows, frame, _plain), *_notes(rows, frame, names)])


def view(picture: Picture, colour: bool) -> str:
    """The picture as wide as the terminal, in colour or plain; with copies, and with a legend."""
    timeline = picture.timeline
    rows = _rows(timeline, picture.wrong_ranks)
    if picture.has_copies:
        # What goes on beside a rank's ops is drawn below these.
        of_ranks = rows
        name = "  host " if any(timeline.copying) else "beside "
        rows = []
        for row, copies in zip(of_ranks, timeline.copies, strict=True):
            rows += [row, (name, copies, "")]
    names = Names(picture.layout)
    frame = evolve(_fit(timeline, rows, names), seconds=picture.seconds)
    paint = _painter(picture) if colour else _plain
    parts = [
        f"{picture.title}: {picture.figures}",
        *picture.wrong_texts,
        "",
        *_drawn(rows, frame, paint),
        "",
        "   ".join([*_legend(picture, rows, paint), f"{_IDLE} idle"]),
        *_notes(rows, frame, names),
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
    """Where time is on the columns: `scale` columns for a unit of time, from `origin` on; what is
    written on bars; and how many seconds a unit of time has, if that is known.
    """

    origin: float
    scale: float
    columns: int
    label: _Label
    seconds: float | None = None

    def time(self, value: float) -> str:
        """A time as text, short enough for the window that begins there."""
        return time_text(
            value, self.seconds, _DIGITS if self.seconds is None else _DIGITS - 2
        )

    def columns_of(self, bar: Bar) -> slice:
        return slice(self._column(bar.start), self._column(bar.end))

    def is_tight(self, bar: Bar) -> bool:
        """Whether an op has no room for its label."""
        columns = range(self.columns)[self.columns_of(bar)]
        return bar.end > bar.start and _room(self.label(bar)) > len(columns)

    def is_narrow(self, bars: Sequence[Bar]) -> bool:
        """Whether ops without a column of their own are more than a few."""
        lengths = [bar.end - bar.start for bar in bars]
        unseen = sum(length for length in lengths if length * self.scale < 1)
        return unseen > _UNSEEN * sum(lengths)

    def _column(self, time: float) -> int:
        return round((time - self.origin) * self.scale)


def _rows(timeline: Timeline, wrong: Collection[int] = ()) -> list[_Row]:
    """The rows of the ranks, of which some are marked as `wrong`."""
    rows: list[_Row] = []
    for rank, (bars, idle) in enumerate(
        zip(timeline.ranks, timeline.idle, strict=True)
    ):
        mark = "!" if rank in wrong else " "
        rows.append((f"rank {rank}{mark}", bars, f" {idle:4.0%} idle"))
    return rows


def _fit(
    timeline: Timeline, rows: Sequence[_Row], names: Names, width: int | None = None
) -> _Frame:
    """The frame in which every op has room for its label, or the whole width if that is wider."""
    width = width or shutil.get_terminal_size((110, 24)).columns
    before = max(len(row[0]) for row in rows)
    after = max(len(row[2]) for row in rows)
    # Two columns are for the lines at both ends of a row.
    room = max(width - before - after - 2, 10)
    origin = timeline.start
    bars = [bar for rank in timeline.ranks for bar in rank if bar.end > bar.start]
    stages = [len({bar.stage for bar in bars}) for bars in timeline.ranks]
    label = _label(str if max(stages, default=1) > 1 else None, names)
    if not bars:
        return _Frame(origin, 1.0, 0, label)

    def needed(label: _Label) -> float:
        """The columns for a unit of time in which each label fits, and a blank behind it."""
        return max((len(label(bar)) + 1) / (bar.end - bar.start) for bar in bars)

    if max(stages) > 1 and len(names.layout.pipelines) > 1:
        # The name of a stage is longer than its number; it is written only if that does not cost
        # the picture any of its width.
        named = _label(names.stage, names)
        if needed(named) <= room / timeline.makespan:
            label = named
    scale = min(needed(label), room / timeline.makespan)
    if scale >= 1:
        # With a whole number of columns, ops of one length are all as wide.
        scale = floor(scale)
    return _Frame(origin, scale, round(timeline.makespan * scale), label)


def _label(stage_name: Callable[[int], str] | None, names: Names) -> _Label:
    """What is written on an op: `F3`, `F3.1` for a slice; with its stage `4F3`, `up(1)F3`."""

    def label(bar: Bar) -> str:
        stage = stage_name(bar.stage) if stage_name else ""
        kind = Kind(bar.kind).name
        if bar.microbatch == NO_MICROBATCH:
            return f"{stage}{kind}"
        unit = str(bar.microbatch) if kind == "U" else names.label(bar.microbatch)
        return f"{stage}{kind}{unit}"

    return label


def _notes(rows: Sequence[_Row], frame: _Frame, names: Names) -> list[str]:
    """What numbers on bars stand for that programs do not have."""
    if frame.is_narrow(_all_bars(rows)):
        return []
    bars = [bar for _, bars, _ in rows for bar in bars if bar.end > bar.start]
    labelled = next((bar for bar in bars if not frame.is_tight(bar)), None)
    if labelled is None:
        return []
    notes = []
    pipelines = names.layout.pipelines
    # Does a label begin with the number of a stage, where a program has a name?
    if len(pipelines) > 1 and frame.label(labelled).startswith(str(labelled.stage)):
        for pipeline in pipelines:
            first = pipeline.start
            last = pipeline.stop - 1
            if first == last:
                notes.append(f"{first} is {names.stage(first)}")
            else:
                notes.append(
                    f"{first}-{last} are {names.stage(first)} to {names.stage(last)}"
                )
        notes[0] = f"stages {notes[0]}"
    if names.label_note:
        notes.append(names.label_note)
    return ["; ".join(notes)] if notes else []


def _is_tight(rows: Sequence[_Row], frame: _Frame) -> bool:
    """Whether some op has no room for its label."""
    return any(frame.is_tight(bar) for _, bars, _ in rows for bar in bars)


def _all_bars(rows: Sequence[_Row]) -> list[Bar]:
    return [bar for _, bars, _ in rows for bar in bars]


def _drawn(rows: Sequence[_Row], frame: _Frame, paint: _Paint) -> list[str]:
    """The rows as lines, with ops, or where these are too narrow with shares of windows."""
    draws = _windows if frame.is_narrow(_all_bars(rows)) else _ops
    return draws(rows, frame, paint)


def _windows(rows: Sequence[_Row], frame: _Frame, paint: _Paint) -> list[str]:
    """A line with the times at which the windows begin, and a line of shares for each row."""
    left = max(len(row[0]) for row in rows)
    # A part is a letter and two digits, and there is a blank between two. What takes no time has no
    # share.
    parts = 1 + max(
        len({bar.kind for bar in bars if bar.end > bar.start}) for _, bars, _ in rows
    )
    width = 4 * parts - 1
    count = max((frame.columns + 1) // (width + 1), 1)
    span = frame.columns / frame.scale
    edges = [frame.origin + span * window / count for window in range(count + 1)]
    times = "".join(f"{frame.time(edge):<{width + 1}}" for edge in edges[:-1]).rstrip()
    lines = [f"{'time':>{left}} {times}"]
    for before, bars, after in rows:
        cells = [_cell(window, width, paint) for window in shares(bars, edges)]
        lines.append(f"{before:<{left}}│{'│'.join(cells)}│{after}")
    lines.append(
        f"{'':>{left}} shares in %, of windows of {frame.time(span / count)} each"
    )
    return lines


def _cell(window: Sequence[Share], width: int, paint: _Paint) -> str:
    """The shares of a window, each in the colour of its kind."""
    words = []
    for kind, share in window:
        if kind is None:
            words.append(f"{_IDLE}{share}")
        else:
            word = f"{kind.name[0]}{share}"
            swatch = paint(Bar(kind, 0, NO_MICROBATCH, 0, 0), word, len(word) + 1)
            words.append("".join(swatch).removesuffix(" "))
    # Not the length of the text, in which the escape codes of colours count too.
    length = sum(len(f"{share}") + 1 for _, share in window) + len(window) - 1
    return " ".join(words) + " " * (width - length)


def _ops(rows: Sequence[_Row], frame: _Frame, paint: _Paint) -> list[str]:
    """The rows with their ops."""
    left = max(len(row[0]) for row in rows)
    lines = []
    for before, bars, after in rows:
        cells = [_IDLE] * frame.columns
        for bar in bars:
            columns = frame.columns_of(bar)
            cells[columns] = paint(bar, frame.label(bar), columns.stop - columns.start)
        lines.append(f"{before:<{left}}│{''.join(cells)}│{after}")
    return lines


def _room(word: str) -> int:
    """The columns that a label needs so that it does not run together with the one before it: a
    blank more if it begins with the number of a stage, `0F00F1`, than if with its kind, `F0F1`.
    """
    return len(word) + word[0].isdigit()


def _plain(bar: Bar, word: str, width: int) -> str:
    """The columns of an op: its word, or the letter of its kind if the word has no room."""
    if width > len(word):
        # The last column stays free where it can, for the eye.
        return word + "─" * (width - len(word) - 1) + " "
    if width >= _room(word):
        return word
    letter = Kind(bar.kind).name[0]
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
