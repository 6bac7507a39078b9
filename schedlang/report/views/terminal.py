"""Timelines drawn as text: a row for each rank, time from left to right, idle time as dots.

Where ops are narrower than a column, a row of letters would be a schedule that nobody has written.
Then each row has windows of time, with the shares of each that forwards, backwards and idle time
have.
"""

import shutil
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from itertools import pairwise
from math import floor

from attrs import evolve, frozen

from schedlang.report.views import palette
from schedlang.report.views.bands import Share, shares
from schedlang.report.views.labels import Labels
from schedlang.report.views.picture import Picture
from schedlang.report.views.svg import ROUNDING, round_step
from schedlang.report.views.units import PRINTED, SECONDS, time_text, unit_of
from schedlang.schedule.actions import NO_MICROBATCH, is_transfer
from schedlang.schedule.kinds import OPS, Kind
from schedlang.schedule.naming import Names
from schedlang.schedule.schedule import Schedule
from schedlang.schedule.timeline import Bar, Timeline

_IDLE = "·"
#: Between the labels of ops that run as one, and the rest of their block: the first op above, the
#: last one below.
_JOINED = "+"
_HALVES = "▀"
#: Ops narrower than a column may take so much of the work without being seen, as may an optimizer
#: step that is short beside all others.
_UNSEEN = 0.05
#: The digits of the times at which windows begin, where these have no unit.
_DIGITS = 5
#: The least distance of ticks on the axis, in columns.
_TICK = 10
#: The kind, stage and microbatch of an op.
Op = tuple[int, int, int]
#: A row: the text before it, its bars, and the text behind it.
_Row = tuple[str, Sequence[Bar], str]
#: The bars of ops that run as one; mostly it is a single one.
_Block = Sequence[Bar]
#: A function that paints a text of some columns as a block, in cells of a column each.
_Paint = Callable[[_Block, str], list[str]]


def draw(
    timeline: Timeline,
    names: Names,
    width: int | None = None,
    wrong: Collection[int] = (),
    joined: Container[Op] = (),
) -> str:
    """The picture, at most `width` columns wide, by default as wide as the terminal. The ranks for
    which claims do not hold, `wrong`, are marked: `rank 2!`. Ops that run as one with the next one,
    `joined`, share a block: `F3+B2`.

    An op is as wide as it is long. It has the longest of its labels that there is room for: its
    kind and microbatch `F3`, where its rank has several stages with what tells them apart, `4F3`
    or `dF3`; if there is no room at all, the letter of its kind. A line below says what the labels
    are.
    """
    rows = _rows(timeline, wrong)
    frame = _fit(timeline, rows, names, width, joined)
    return "\n".join([*_drawn(rows, frame, _plain), *_notes(rows, frame)])


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
    return "\n".join([*_drawn(rows, frame, _plain), *_notes(rows, frame)])


def joined_ops(schedule: Schedule) -> set[Op]:
    """The kind, stage and microbatch of each op that runs as one with the next op of its rank."""
    found: set[Op] = set()
    for actions in schedule.ranks:
        # Few schedules have any.
        if not any(actions.group):
            continue
        ops = zip(actions.each(), actions.group, strict=True)
        computed = [(op, group) for op, group in ops if not is_transfer(op[0])]
        for (op, group), (_, next_group) in pairwise(computed):
            if group and group == next_group:
                found.add(op)
    return found


def view(pictures: Sequence[Picture], colour: bool) -> str:
    """Pictures as wide as the terminal, below each other on one axis of time, in colour or plain;
    with copies, and with a legend.
    """
    drawn = []
    for picture in pictures:
        rows = _rows_of(picture)
        joined = joined_ops(picture.execution.schedule)
        frame = _fit(picture.timeline, rows, picture.names, joined=joined)
        drawn.append((picture, rows, evolve(frame, seconds=picture.seconds)))
    left = max(_left(rows) for _, rows, _ in drawn)
    scale = _common_scale([frame for _, _, frame in drawn], left)
    parts = []
    legend: dict[str, None] = {}
    notes: dict[str, None] = {}
    is_tight = False
    for picture, rows, own in drawn:
        frame = own.scaled(scale, _all_bars(rows))
        rows = [(f"{before:<{left}}", bars, after) for before, bars, after in rows]
        paint = _painter(picture) if colour else _plain
        parts += [f"{picture.title}: {picture.figures}", *picture.wrong_texts, ""]
        parts += [*_drawn(rows, frame, paint), *_axis(rows, frame), ""]
        legend |= dict.fromkeys(_legend(picture, rows, frame, paint))
        notes |= dict.fromkeys(_notes(rows, frame))
        is_tight = is_tight or _is_tight(rows, frame)
    parts += ["   ".join([*legend, f"{_IDLE} idle"]), *notes]
    if is_tight:
        parts.append(
            "too wide to show every op and its microbatch here: a page zooms, -o NAME.html"
        )
    return "\n".join(parts)


def _rows_of(picture: Picture) -> list[_Row]:
    """The rows of a picture: those of the ranks, and below each what goes on beside its ops."""
    timeline = picture.timeline
    rows = _rows(timeline, picture.wrong_ranks)
    if not picture.has_copies:
        return rows
    name = "  host " if any(timeline.copying) else "beside "
    both = zip(rows, timeline.copies, strict=True)
    return [row for of_rank, copies in both for row in (of_rank, (name, copies, ""))]


def _legend(
    picture: Picture, rows: Sequence[_Row], frame: "_Frame", paint: _Paint
) -> list[str]:
    """What the letters and colours of the picture mean."""
    # An op that takes no time has no column, and so is not seen.
    seen = {bar.kind for _, bars, _ in rows for bar in bars if bar.end > bar.start}
    entries = []
    for kind in picture.kinds:
        if kind in seen:
            swatch = "".join(paint(_sample(kind), kind.name[0]))
            entries.append(f"{swatch} {OPS[kind].name}")
    texts = map(frame.text, _all_blocks(rows, frame))
    if not frame.is_narrow(_all_bars(rows)) and any(_JOINED in text for text in texts):
        entries.append(f"{_JOINED} run as one")
    return entries


def _sample(kind: int) -> _Block:
    """A block for the colour of a kind."""
    return (Bar(kind, 0, NO_MICROBATCH, 0, 0),)


@frozen
class _Frame:
    """Where time is on the columns: `scale` columns for a unit of time, from `origin` on, for the
    time `span`, and at most `room` columns; what is written on bars; and how many seconds a unit of
    time has, if that is known.
    """

    origin: float
    scale: float
    span: float
    room: int
    names: Labels
    joined: Container[Op] = ()
    #: Whether labels may begin with stages.
    has_stages: bool = True
    seconds: float | None = None

    @property
    def columns(self) -> int:
        return round(self.span * self.scale)

    def scaled(self, scale: float, bars: Sequence[Bar]) -> "_Frame":
        """The frame with another scale. Labels have no numbers of stages if some of the bars have
        room for their label without alone: `F0` before `4F1` would be read as `F04F1`.
        """
        frame = evolve(self, scale=scale, has_stages=True)
        for block in frame.blocks(bars):
            first, *shorter = frame.labels(block)
            is_numbered = bool(shorter) and first[0].isdigit()
            if is_numbered and _length(block) and frame.label(block) != first:
                return evolve(frame, has_stages=False)
        return frame

    def blocks(self, bars: Sequence[Bar]) -> Iterator[_Block]:
        """The bars of a row, of which those of ops that run as one are a block."""
        first = 0
        for last, bar in enumerate(bars):
            if bar[:3] not in self.joined:
                yield bars[first : last + 1]
                first = last + 1

    def time(self, value: float) -> str:
        """A time as text, short enough for the window that begins there."""
        return time_text(
            value, self.seconds, _DIGITS if self.seconds is None else _DIGITS - 2
        )

    def columns_of(self, block: _Block) -> slice:
        return slice(self._column(block[0].start), self._column(block[-1].end))

    def width_of(self, block: _Block) -> int:
        """The columns of a block."""
        return len(range(self.columns)[self.columns_of(block)])

    def label(self, block: _Block) -> str | None:
        """The longest label of a block that has room; None if there is none."""
        width = self.width_of(block)
        labels = self.labels(block)[0 if self.has_stages else -1 :]
        return next((label for label in labels if self.needed(label) <= width), None)

    def labels(self, block: _Block) -> list[str]:
        """The labels of a block, all with the letters of its kinds: that with its stages comes
        first.
        """
        of_bars = [self._labels_of(bar) for bar in block]
        return [
            _JOINED.join(labels[min(place, len(labels) - 1)] for labels in of_bars)
            for place in range(max(map(len, of_bars)))
        ]

    def _labels_of(self, bar: Bar) -> list[str]:
        first, *others = self.names.labels(*bar[:3])
        return [first, *(label for label in others if not label[0].isdigit())]

    def needed(self, label: str) -> int:
        """The columns that a label needs so that it does not run together with the next one: a
        blank more if it has the number of a stage, `0F0 0F1`, than if it has none, `F0F1`.
        """
        letter = next((place for place, each in enumerate(label) if each.isupper()), 0)
        return len(label) + any(map(str.isdigit, label[:letter]))

    def text(self, block: _Block) -> str:
        """What is written on a block, as wide as it is."""
        width = self.width_of(block)
        label = self.label(block)
        if label is None:
            letters = _JOINED.join(Kind(bar.kind).name[0] for bar in block)
            return (letters + "─" * width)[:width]
        if width == len(label):
            return label
        # The last column stays free, for the eye.
        return label + "─" * (width - len(label) - 1) + " "

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


def _left(rows: Sequence[_Row]) -> int:
    """The columns before the rows."""
    return max(len(row[0]) for row in rows)


def _fit(
    timeline: Timeline,
    rows: Sequence[_Row],
    names: Names,
    width: int | None = None,
    joined: Container[Op] = (),
) -> _Frame:
    """The frame in which every op has room for its label, or the whole width if that is wider."""
    width = width or shutil.get_terminal_size((110, 24)).columns
    after = max(len(row[2]) for row in rows)
    # Two columns are for the lines at both ends of a row.
    room = max(width - _left(rows) - after - 2, 10)
    span = timeline.makespan
    bars = [bar for rank in timeline.ranks for bar in rank]
    frame = _Frame(timeline.start, 1.0, span, room, Labels(names.layout), joined)
    blocks = [block for block in frame.blocks(bars) if _length(block)]
    if not blocks:
        return evolve(frame, span=0.0)
    # A column for each character, and a blank behind them.
    needed = max((len(frame.labels(block)[0]) + 1) / _length(block) for block in blocks)
    return frame.scaled(_whole(min(needed, room / span)), bars)


def _whole(scale: float) -> float:
    """A scale of whole columns where it has any, so that ops of one length are all as wide."""
    return floor(scale) if scale >= 1 else scale


def _common_scale(frames: Sequence[_Frame], left: int) -> float:
    """The scale of several pictures: of the one that needs most room, as far as all have that."""
    spans = [frame for frame in frames if frame.span]
    if not spans:
        return 1.0
    needed = max(frame.scale for frame in spans)
    room = min(frame.room for frame in spans)
    return _whole(min(needed, room / max(frame.span for frame in spans)))


def _notes(rows: Sequence[_Row], frame: _Frame) -> list[str]:
    """What the labels of ops stand for that programs do not have."""
    if frame.is_narrow(_all_bars(rows)):
        return []
    blocks = _all_blocks(rows, frame)
    labels = [
        (block, label) for block in blocks if (label := frame.label(block)) is not None
    ]
    names = frame.names
    notes: list[str | None] = []
    if any(label != frame.labels(block)[0] for block, label in labels):
        notes.append("some labels without stages, for lack of room")
    if any(
        label.startswith(names.prefixes[block[0].stage] or " ")
        for block, label in labels
    ):
        notes.append(names.tags_note)
    if labels:
        notes.append(names.label_note)
    text = "; ".join(note for note in notes if note)
    return [text] if text else []


def _is_tight(rows: Sequence[_Row], frame: _Frame) -> bool:
    """Whether some op has no room for its letter and microbatch."""
    return any(frame.label(block) is None for block in _all_blocks(rows, frame))


def _all_bars(rows: Sequence[_Row]) -> list[Bar]:
    return [bar for _, bars, _ in rows for bar in bars]


def _all_blocks(rows: Sequence[_Row], frame: _Frame) -> list[_Block]:
    """The blocks of all rows that take time."""
    return [block for block in frame.blocks(_all_bars(rows)) if _length(block)]


def _length(block: _Block) -> float:
    """How long a block takes."""
    return block[-1].end - block[0].start


def _drawn(rows: Sequence[_Row], frame: _Frame, paint: _Paint) -> list[str]:
    """The rows as lines, with ops, or where these are too narrow with shares of windows."""
    draws = _windows if frame.is_narrow(_all_bars(rows)) else _ops
    return draws(rows, frame, paint)


def _axis(rows: Sequence[_Row], frame: _Frame) -> list[str]:
    """The axis of time below rows of ops, from the first start on; windows have times above."""
    if not frame.columns or frame.is_narrow(_all_bars(rows)):
        return []
    unit = 1.0
    name = "time"
    if frame.seconds is not None:
        word = unit_of(frame.span * frame.seconds)
        unit = SECONDS[word] / frame.seconds
        name = PRINTED[word]
    step = round_step(frame.span / unit, max(frame.columns // _TICK, 2))
    line = ""
    for tick in range(floor(frame.span / unit / step + ROUNDING) + 1):
        column = round(tick * step * unit * frame.scale)
        if not line or len(line) < column:
            line = f"{line:<{column}}{tick * step:.6g}"
    return [f"{name:>{_left(rows)}} {line}"]


def _windows(rows: Sequence[_Row], frame: _Frame, paint: _Paint) -> list[str]:
    """A line with the times at which the windows begin, and a line of shares for each row."""
    left = _left(rows)
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
            words.append("".join(paint(_sample(kind), word)))
    # Not the length of the text, in which the escape codes of colours count too.
    length = sum(len(f"{share}") + 1 for _, share in window) + len(window) - 1
    return " ".join(words) + " " * (width - length)


def _ops(rows: Sequence[_Row], frame: _Frame, paint: _Paint) -> list[str]:
    """The rows with their ops."""
    left = _left(rows)
    lines = []
    for before, bars, after in rows:
        cells = [_IDLE] * frame.columns
        for block in frame.blocks(bars):
            cells[frame.columns_of(block)] = paint(block, frame.text(block))
        lines.append(f"{before:<{left}}│{''.join(cells)}│{after}")
    return lines


def _plain(block: _Block, text: str) -> list[str]:
    """The cells of a text without colour."""
    return list(text)


def _painter(picture: Picture) -> _Paint:
    """A function that paints ops as blocks of colour.

    A column is a text: the escape codes are parts of the first and the last one.
    """
    chunks = {box.bar.stage: box.chunk for box in picture.boxes}

    def coloured(text: str, ink: str, ground: str) -> list[str]:
        cells = list(text)
        if cells:
            codes = map(palette.terminal_colour, (ink, ground))
            cells[0] = "\x1b[38;5;{};48;5;{}m".format(*codes) + cells[0]
            cells[-1] += "\x1b[0m"
        return cells

    def paint(block: _Block, text: str) -> list[str]:
        fills = [
            palette.fill(bar.kind, chunks[bar.stage], picture.chunks) for bar in block
        ]
        # The free column at the end has no colour.
        end = " " if text.endswith(" ") else ""
        text = text.removesuffix(" ").replace("─", " ")
        if len(block) == 1:
            return [*coloured(text, palette.ink(fills[0]), fills[0]), *end]
        # The labels have the colours of their ops; behind them, both colours lie on each other.
        label = text.rstrip()
        words = [word + _JOINED for word in label.split(_JOINED)]
        words[-1] = words[-1].removesuffix(_JOINED)
        cells = []
        for word, fill in zip(words, fills, strict=False):
            cells += coloured(word, palette.ink(fill), fill)
        halves = _HALVES * (len(text) - len(label))
        return [*cells, *coloured(halves, fills[0], fills[-1]), *end]

    return paint
