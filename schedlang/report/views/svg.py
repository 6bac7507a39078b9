"""Pictures as an SVG for papers: one, or several below each other on one axis of time.

It has titles, a row for each rank with its stages, ops with their letters and microbatches, white
for idle time, and a legend; and if that is asked for, colours for the causes of idle time, and what
the ranks hold. It is made of text and plain shapes only, so that all programs show it alike, and it
is as large as what is drawn.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from html import escape
from math import ceil, floor, log10
from textwrap import wrap

from attrs import evolve, frozen

from schedlang.report.views import idle, palette
from schedlang.report.views.boxes import Box
from schedlang.report.views.picture import WHOLE, Part, Picture
from schedlang.report.views.tiles import tile
from schedlang.report.views.units import PRINTED, SECONDS, unit_of
from schedlang.schedule.actions import is_beside, is_update
from schedlang.schedule.kinds import OPS

# Sizes, in pixels. Around the rows; on the left is at least so much room for names.
_LEFT = 58
_RIGHT = 10
_TOP = 26
# Where memory is drawn, below each row, and beside it the peak.
_MEMORY = 22
_PEAK = 92
# A row, the gap below it, and below that the lane of copies.
_ROW = 24
_GAP = 4
_LANE = 8
# The axis of time, a line of the legend, and what is between two pictures.
_AXIS = 30
_LINE = 20
_BETWEEN = 16
# The letters, how wide one is, and a small one.
_FONT = 11
_CHARACTER = 6.6
_SMALL = 8
_SMALL_CHARACTER = 4.7
# The strip of a weight version, and the mark of an op that takes no time.
_STRIP = 4
_MARK = 3
# Where no width is asked for: the widest picture, and the widest in which ops get room for their
# letters; in a wider one they get room for their numbers alone.
_WIDEST = 4000
_LETTERED = 1600
# A picture is made wider for its title up to this width; then it has several lines.
_TITLED = 640
#: The widths of a column and of a page of a paper, in pixels of which an inch has 96.
WIDTHS = {"column": 320, "page": 672}
# Boxes that are narrower on average have no lines between them, which would be all that is seen.
_LINED = 2.0

GRID = "#c3c9d1"
HELD = "#c6cbd2"
#: A tick that is at the edge up to so much of a step is in the window.
ROUNDING = 1e-9
FONTS = "Helvetica, Arial, Liberation Sans, DejaVu Sans, sans-serif"


def svg(*pictures: Picture, part: Part = WHOLE) -> str:
    """The document of a part of each picture; ValueError for a part that there is not.

    It is as wide as the part says, or as its labels need, up to a limit; beyond that, boxes
    without room for their number have none.
    """
    frames = _frames(pictures, part)
    width = frames[0].width
    lines: list[str] = []
    for picture, frame in zip(pictures, frames, strict=True):
        lines += _title(picture, frame)
        lines += _rows(picture, frame)
        lines += _memory(picture, frame) if part.memory else ()
    # The axis of all is below the last one, as long as the longest.
    longest = max(zip(pictures, frames, strict=True), key=lambda each: each[1].span)
    bottom = frames[-1].bottom
    lines += _axis(*longest, bottom + 6)
    height = bottom + _AXIS + 2
    if part.legend:
        legend, height = _legend(pictures, frames)
        lines += legend
    causes = dict.fromkeys(cause for frame in frames for cause in frame.causes)
    title = " and ".join(picture.title for picture in pictures)
    size = f'width="{width}" height="{height}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {width} {height}" '
        f'font-family="{fonts(part.font)}" font-size="{_FONT}" fill="{palette.INK}">',
        f"<title>{escape(title)}</title>",
        *_patterns(pictures, frames),
        *idle.patterns(list(causes)),
        f'<rect {size} fill="{palette.PAPER}"/>',
    ]
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


def fonts(font: str | None) -> str:
    """The fonts of a document: one that is asked for, and those that stand in for it."""
    return FONTS if font is None else f"{escape(font)}, {FONTS}"


def pixels(width: int | str) -> int:
    """A width in pixels of the SVG; ValueError for a word that names none."""
    if isinstance(width, int):
        return width
    if width not in WIDTHS:
        raise ValueError(f"`{width}` is no width: there is {' and '.join(WIDTHS)}")
    return WIDTHS[width]


@frozen
class _Frame:
    """Where times and ranks are: `scale` pixels for a unit of time, from `origin` to `end`, and
    `pitch` pixels from one of the `ranks` to the next. What these hold is drawn so far below the
    top of a row as `memory` says, or not at all, if that is None.
    """

    origin: float
    end: float
    scale: float
    pitch: int
    ranks: tuple[int, ...]
    memory: int | None
    #: The height of the memory's scale, in the unit of the memory.
    peak: float
    width: int
    #: Where the rows begin, beside the names.
    left: float
    #: The lines of the title, and where the first one is.
    title: tuple[str, ...]
    above: int
    #: Where the first row is.
    top: int
    #: How far below the top of a row the lane of the first resource is.
    lanes: int
    #: The causes by which idle time is coloured, or none.
    causes: Sequence[str]
    #: The kinds whose boxes have a pattern.
    hatched: Collection[int] = ()

    @property
    def bottom(self) -> int:
        return self.top + len(self.ranks) * self.pitch - _GAP

    @property
    def span(self) -> float:
        """The time that is drawn."""
        return self.end - self.origin

    def x(self, time: float) -> float:
        """Where a time is, or the edge if it is not in the window."""
        inside = min(max(time, self.origin), self.end)
        return self.left + (inside - self.origin) * self.scale

    def y(self, rank: int) -> int:
        return self.top + self.ranks.index(rank) * self.pitch

    def shows(self, box: Box) -> bool:
        """Whether some of a box is in the window."""
        if box.start == box.end:
            return self.origin <= box.start <= self.end
        return box.start < self.end and box.end > self.origin

    def shown(self, rows: Sequence[Sequence[Box]]) -> list[Box]:
        """The boxes that are seen, of those of each rank."""
        return [box for rank in self.ranks for box in rows[rank] if self.shows(box)]


def _frames(pictures: Sequence[Picture], part: Part) -> list[_Frame]:
    """The frames of all pictures, which have one scale of time: of the width that is asked for, or
    in which every box has room for its label, if that is not too wide.
    """
    windows = [part.window(picture) for picture in pictures]
    longest = max(end - origin for origin, end in windows) or 1.0
    left = max(_names_width(picture, part) for picture in pictures)
    right = _PEAK if part.memory else _RIGHT
    if part.width is not None:
        width = pixels(part.width)
        scale = max(width - left - right, 1) / longest
    else:
        # With letters, or at least with numbers: the last of an op's labels is the shortest.
        lettered = max(_pixels_of_labels(picture, part, -2) for picture in pictures)
        numbered = max(_pixels_of_labels(picture, part, -1) for picture in pictures)
        scale = min(lettered, max(numbered, _LETTERED / longest), _WIDEST / longest)
        width = ceil(left + longest * scale + right)
        titles = max(_text_width(": ".join(_title_of(each))) for each in pictures)
        width = max(width, min(titles + 16, _TITLED))
    peak = max(picture.peak for picture in pictures)
    frames: list[_Frame] = []
    for picture, window in zip(pictures, windows, strict=True):
        above = frames[-1].bottom + _BETWEEN if frames else 0
        frame = _frame(picture, part, window, above, width)
        hatched = _hatched_kinds(picture, scale)
        frames.append(evolve(frame, scale=scale, left=left, peak=peak, hatched=hatched))
    return frames


def _frame(
    picture: Picture, part: Part, window: tuple[float, float], above: int, width: int
) -> _Frame:
    """The frame of a picture that begins at some height, but for what it shares with others."""
    pitch = _ROW + _GAP
    if picture.has_copies:
        pitch += _LANE + 2
    # What stands below each other in the place of one rank, each part only where it is asked for:
    #
    #    y            ┌────────────┐  the ops            _ROW
    #                 ├──┤  ├──┤      copies             _LANE
    #    + lanes      ├─┤├───┤        a resource, …      _LANE each
    #    + memory     ▁▂▅▇▅▂▁         what it holds      _MEMORY
    #    + pitch      the next rank
    lanes = pitch - _GAP + 2
    pitch += (_LANE + 2) * len(picture.lanes)
    memory = None
    if part.memory:
        memory = pitch - 2
        pitch += _MEMORY + 2
    name, figures = _title_of(picture)
    title: tuple[str, ...] = (f"{name}: {figures}",)
    if _text_width(title[0]) + 16 > width:
        title = (*wrapped(name, width), *wrapped(figures, width))
    lines = len(title) - 1 + len(picture.wrong)
    return _Frame(
        origin=window[0],
        end=window[1],
        scale=1.0,
        pitch=pitch,
        ranks=part.ranks_of(picture),
        memory=memory,
        peak=1.0,
        width=width,
        left=_LEFT,
        title=title,
        above=above,
        top=above + _TOP + _LINE * lines,
        lanes=lanes,
        causes=idle.shown_causes(picture) if part.causes else (),
    )


def _title_of(picture: Picture) -> tuple[str, str]:
    """The two parts of a title: they stand in one line where there is room."""
    return picture.title, picture.figures


def wrapped(text: str, width: int) -> list[str]:
    """A text in lines that are no wider than a picture, broken between words."""
    return wrap(text, max(int((width - 16) / _CHARACTER), 10), break_long_words=False)


def _text_width(text: str) -> int:
    return ceil(len(text) * _CHARACTER)


def _names_width(picture: Picture, part: Part) -> float:
    """The room for the names of the ranks, and of their stages."""
    ranks = part.ranks_of(picture)
    needed: float = max(_text_width(f"rank {rank}") for rank in ranks)
    if not picture.names.are_ranks:
        stages = max(len(picture.names.stages_beside(rank)) for rank in ranks)
        needed = max(needed, stages * _SMALL_CHARACTER)
    return max(_LEFT, ceil(needed + 11))


def _pixels_of_labels(picture: Picture, part: Part, place: int) -> float:
    """The pixels for a unit of time that each op needs for one of its labels."""
    needed = []
    for rank in part.ranks_of(picture):
        for box in picture.ops[rank]:
            length = box.end - box.start
            if length > 0:
                labels = picture.names.labels(*box.bar[:3])
                label = labels[max(place, -len(labels))]
                needed.append((len(label) * _letters(box)[1] + 6) / length)
    return max(needed, default=1.0)


def _title(picture: Picture, frame: _Frame) -> Iterator[str]:
    """The title, and below it the claims that do not hold."""
    y = frame.above + 17
    for line in frame.title:
        yield f'<text x="8" y="{y}" font-weight="600">{escape(line)}</text>'
        y += _LINE
    for text in picture.wrong_texts:
        yield f'<text x="8" y="{y}" fill="{palette.WRONG}">{escape(text)}</text>'
        y += _LINE


def _rows(picture: Picture, frame: _Frame) -> Iterator[str]:
    """The names of the ranks and their boxes, then what lies over the boxes."""
    for rank in frame.ranks:
        y = frame.y(rank)
        left = frame.x(frame.origin)
        right = frame.x(frame.end)
        edge = number(frame.left - 8)
        height = y + _ROW / 2 + 4
        if not picture.names.are_ranks:
            height -= 5
            yield (
                f'<text x="{edge}" y="{y + _ROW - 3}" text-anchor="end" font-size="{_SMALL}">'
                f"{escape(picture.names.stages_beside(rank))}</text>"
            )
        place = f'x="{edge}" y="{height:g}" text-anchor="end"'
        if rank in picture.wrong_ranks:
            yield f'<text {place} fill="{palette.WRONG}" font-weight="600">rank {rank}!</text>'
        else:
            yield f"<text {place}>rank {rank}</text>"
        yield _rect(left, y, right, _ROW, "none", f' stroke="{GRID}"')
    if frame.causes:
        yield from _grouped(_idle(picture, frame), "")
    ops = frame.shown(picture.ops)
    boxes = ops + frame.shown(picture.copies) if picture.has_copies else ops
    # Boxes without a width come last, so that no neighbour covers them.
    boxes = sorted(boxes, key=lambda box: box.end == box.start)
    shapes = [
        (_fill(picture, frame, box.bar.kind, box.chunk), _shape(frame, box))
        for box in boxes
    ]
    lines = f'stroke="{palette.PAPER}" stroke-width="0.75"'
    # All rows behind each other, in pixels: with two or more for each box, lines between them are
    # seen.
    room = (frame.end - frame.origin) * frame.scale * len(frame.ranks)
    yield from _grouped(shapes, lines if room >= _LINED * len(boxes) else "")
    if picture.has_versions:
        strips = []
        for box in ops:
            # An optimizer step makes a version and reads none.
            if not is_update(box.bar.kind):
                strips.append((palette.version(box.version), _strip(frame, box)))
        yield from _grouped(strips, f'stroke="{GRID}" stroke-width="0.5"')
    yield from _overlaps(frame, ops)
    yield from _lanes(picture, frame)
    labels = [label for box in ops for label in _label(picture, frame, box)]
    yield from _grouped(labels, 'text-anchor="middle"')


def _idle(picture: Picture, frame: _Frame) -> Iterator[tuple[str, str]]:
    """The idle time of the ranks, in pieces of one cause each."""
    for rank, start, end, cause in idle.pieces(picture):
        if rank in frame.ranks and start < frame.end and end > frame.origin:
            yield (
                idle.fill(cause),
                _rect(frame.x(start), frame.y(rank), frame.x(end), _ROW),
            )


def _lanes(picture: Picture, frame: _Frame) -> Iterator[str]:
    """The components of ops, in a lane for each resource of a rank."""
    for place, lane in enumerate(picture.lanes):
        below = frame.lanes + place * (_LANE + 2)
        for rank in frame.ranks:
            y = frame.y(rank) + below
            yield (
                f'<text x="{number(frame.left - 8)}" y="{y + _LANE - 1}" text-anchor="end" '
                f'font-size="{_LANE}">{escape(lane.resource)}</text>'
            )
        shapes = []
        for box in frame.shown(lane.rows):
            left, right = _sides(frame, box)
            shape = _rect(left, frame.y(box.rank) + below, right, _LANE)
            shapes.append((_fill(picture, frame, box.bar.kind, box.chunk), shape))
        yield from _grouped(shapes, f'stroke="{palette.PAPER}" stroke-width="0.5"')


def _memory(picture: Picture, frame: _Frame) -> Iterator[str]:
    """What each rank holds over time, in steps, on one scale for all; and its peak."""
    unit = _MEMORY / (frame.peak or 1.0)
    right = frame.x(frame.end)
    for rank in frame.ranks:
        bottom = frame.y(rank) + (frame.memory or 0) + _MEMORY
        level = 0.0
        path = [f"M{number(frame.x(frame.origin))} {bottom}"]
        for time, amount in picture.memory[rank]:
            if time > frame.end:
                break
            # What changed before the window is at its edge.
            if time >= frame.origin:
                path.append(f"V{number(bottom - level * unit)}H{number(frame.x(time))}")
            level = amount
        path.append(f"V{number(bottom - level * unit)}H{number(right)}V{bottom}Z")
        yield f'<path d="{"".join(path)}" fill="{HELD}"/>'
        yield f'<path d="M{number(frame.left)} {bottom}H{number(right)}" stroke="{GRID}"/>'
        peak = picture.amount(picture.peaks[rank])
        yield f'<text x="{number(right + 8)}" y="{bottom - 6}">peak {peak}</text>'


def _shape(frame: _Frame, box: Box) -> str:
    """The rectangle of a box, or of its part of one that several ops share."""
    left, right = _sides(frame, box)
    y = frame.y(box.rank)
    if is_beside(box.bar.kind):
        return _rect(left, y + _ROW + 2, right, _LANE)
    height = _ROW / box.parts
    return _rect(left, y + box.part * height, right, height)


def _strip(frame: _Frame, box: Box) -> str:
    """The strip along the lower side of an op."""
    left, right = _sides(frame, box)
    bottom = frame.y(box.rank) + (box.part + 1) * _ROW / box.parts
    return _rect(left, bottom - _STRIP / box.parts, right, _STRIP / box.parts)


def _sides(frame: _Frame, box: Box) -> tuple[float, float]:
    """Where a box begins and ends."""
    left = frame.x(box.start)
    right = frame.x(box.end)
    if box.start == box.end:
        # An op that takes no time, such as an optimizer step without a cost, is a mark.
        return left - _MARK / 2, right + _MARK / 2
    return left, right


def _fill(picture: Picture, frame: _Frame, kind: int, chunk: int) -> str:
    """The colour of boxes of a kind and chunk, or the pattern in it."""
    fill = palette.fill(kind, chunk, picture.chunks)
    return f"url(#{_pattern_name(kind, fill)})" if kind in frame.hatched else fill


def _pattern_name(kind: int, fill: str) -> str:
    return f"{OPS[kind].pattern}-{fill[1:]}"


def _hatched_kinds(picture: Picture, scale: float) -> set[int]:
    """The kinds whose boxes have their pattern, at so many pixels for a unit of time: those that
    always have it, and those of which some box has no room for its letter.
    """
    found: set[int] = {kind for kind in picture.kinds if OPS[kind].is_hatched}
    for row in picture.ops:
        for box in row:
            if box.bar.kind not in found and box.end > box.start:
                *_, lettered, _ = ["", *picture.names.labels(*box.bar[:3])]
                if len(lettered) * _letters(box)[1] > (box.end - box.start) * scale:
                    found.add(box.bar.kind)
    return {kind for kind in found if OPS[kind].pattern != "plain"}


def _label(picture: Picture, frame: _Frame, box: Box) -> Iterator[tuple[str, str]]:
    """The colour and the text on a box: the longest of its labels that has room."""
    left = frame.x(box.start)
    width = frame.x(box.end) - left
    font, character = _letters(box)
    room = width / character
    labels = picture.names.labels(*box.bar[:3])
    label = next((label for label in labels if len(label) <= room), None)
    if label is not None:
        x = number(left + width / 2)
        middle = (box.part + 0.5) * _ROW / box.parts
        y = number(frame.y(box.rank) + middle + 4 * font / _FONT)
        fill = palette.fill(box.bar.kind, box.chunk, picture.chunks)
        size = "" if font == _FONT else f' font-size="{font:g}"'
        yield palette.ink(fill), f'<text x="{x}" y="{y}"{size}>{label}</text>'


def _letters(box: Box) -> tuple[float, float]:
    """The size of the letters on a box, and how wide one is: smaller where several ops share it."""
    size = min(_FONT, _ROW / box.parts - 2)
    return size, size * _CHARACTER / _FONT


def _overlaps(frame: _Frame, ops: list[Box]) -> Iterator[str]:
    """A line around the box of ops that run as one, where there is room for it."""
    stroke = f' stroke="{palette.INK}" stroke-width="1.5"'
    for box in ops:
        left, right = _sides(frame, box)
        top = frame.y(box.rank)
        # Half of the line's width further in, so that it stays within the box.
        if box.parts > 1 and box.part == 0 and right - left > 3:
            yield _rect(
                left + 0.75, top + 0.75, right - 0.75, _ROW - 1.5, "none", stroke
            )


def _axis(picture: Picture, frame: _Frame, y: int) -> Iterator[str]:
    """The axis of time, which counts from the first start, with round numbers at its ticks."""
    start = picture.timeline.start
    unit, name = _axis_unit(picture, frame)
    span = (frame.end - frame.origin) / unit
    ends = f"M{number(frame.left)} {y}H{number(frame.x(frame.end))}"
    yield f'<path d="{ends}" stroke="{palette.INK}"/>'
    # A tick every 60 pixels or more, so that the numbers below have room.
    step = round_step(span, max(int(span * unit * frame.scale / 60), 2))
    first = ceil((frame.origin - start) / unit / step - ROUNDING)
    last = floor((frame.end - start) / unit / step + ROUNDING)
    for tick in range(first, last + 1):
        x = frame.x(start + tick * step * unit)
        yield f'<path d="M{number(x)} {y}v4" stroke="{palette.INK}"/>'
        time = number(tick * step)
        yield f'<text x="{number(x)}" y="{y + 15}" text-anchor="middle">{time}</text>'
    edge = number(frame.left - 8)
    yield f'<text x="{edge}" y="{y + 15}" text-anchor="end">{name}</text>'


def _axis_unit(picture: Picture, frame: _Frame) -> tuple[float, str]:
    """The unit of the axis, in units of the costs, and what it is called."""
    if picture.seconds is None:
        return 1.0, "time"
    unit = unit_of((frame.end - picture.timeline.start) * picture.seconds)
    return SECONDS[unit] / picture.seconds, PRINTED[unit]


def round_step(span: float, ticks: int) -> float:
    """The distance of ticks, so that there are about so many: 1, 2 or 5 times a power of ten."""
    least = (span or 1.0) / ticks
    power = 10.0 ** floor(log10(least))
    for factor in (1, 2, 5):
        if factor * power >= least:
            return factor * power
    return 10 * power


def _legend(
    pictures: Sequence[Picture], frames: Sequence[_Frame]
) -> tuple[list[str], int]:
    """The legend of all pictures, in lines as wide as they are; and the height of the document."""
    # What several pictures have stands once: with as many colours as the one that has most.
    entries: dict[str, list[str]] = {}
    for picture, frame in zip(pictures, frames, strict=True):
        for swatches, name in _entries(picture, frame):
            entries[name] = max(entries.get(name, []), swatches, key=len)
    left = min(frames[0].left, _LEFT)
    x = left
    y = frames[-1].bottom + _AXIS + 6
    lines = []
    # Idle time comes last.
    for name in sorted(entries, key=lambda name: name.startswith("idle")):
        swatches = entries[name]
        # Squares, a gap, the name at about 6 pixels a letter, and the gap before the next entry.
        width = 16 * len(swatches) + 6 + len(name) * 6 + 18
        if x > left and x + width > frames[0].width:
            x = left
            y = y + _LINE
        for swatch in swatches:
            lines.append(swatch.format(x=number(x), y=y))
            x += 16
        lines.append(f'<text x="{number(x + 4)}" y="{y + 10}">{escape(name)}</text>')
        x += width - 16 * len(swatches)
    return lines, y + _LINE


def _entries(picture: Picture, frame: _Frame) -> Iterator[tuple[list[str], str]]:
    """The entries of the legend: squares, to be put at some `x` and `y`, and what they mean."""
    square = '<rect x="{{x}}" y="{{y}}" width="14" height="12" fill="{}"{}/>'
    for kind in picture.kinds:
        fills = [_fill(picture, frame, kind, chunk) for chunk in range(picture.chunks)]
        # Some kinds have one colour for all chunks.
        squares = [square.format(fill, "") for fill in dict.fromkeys(fills)]
        yield squares, f"{kind.name}: {OPS[kind].name}"
    if picture.chunks > 1:
        yield [], f"(light to dark: chunk 0 to {picture.chunks - 1})"
    for note in (picture.names.tags_note, picture.names.label_note):
        if note:
            yield [], f"({note})"
    if any(box.overlap for row in picture.ops for box in row):
        yield (
            [square.format("none", f' stroke="{palette.INK}" stroke-width="1.5"')],
            "run as one",
        )
    if picture.has_versions:
        shades = [
            square.format(shade, f' stroke="{GRID}"') for shade in palette.VERSIONS
        ]
        # A strip shows the remainder, since the colours begin again.
        yield shades, f"strip: version of the weights, modulo {len(shades)}"
    if frame.memory is not None:
        unit = "" if picture.memory_unit == "bytes" else f" {picture.memory_unit}"
        yield (
            [square.format(HELD, "")],
            f"memory, at most {picture.amount(frame.peak)}{unit}",
        )
    border = f' stroke="{GRID}"'
    if not frame.causes:
        yield [square.format(palette.PAPER, border)], "idle"
    for cause in frame.causes:
        yield [square.format(idle.fill(cause), border)], f"idle: {cause}"


def _patterns(pictures: Sequence[Picture], frames: Sequence[_Frame]) -> Iterator[str]:
    """The patterns in the colours of all chunks."""
    needed = {}
    for picture, frame in zip(pictures, frames, strict=True):
        for kind in frame.hatched:
            for chunk in range(picture.chunks):
                fill = palette.fill(kind, chunk, picture.chunks)
                needed[_pattern_name(kind, fill)] = OPS[kind].pattern, fill
    for name, (pattern, fill) in sorted(needed.items()):
        yield tile(name, pattern, palette.lines(fill), fill)


def _grouped(shapes: Iterable[tuple[str, str]], attributes: str) -> Iterator[str]:
    """Shapes of one colour together, which keeps the document small.

    Their order changes, so they must not lie on each other.
    """
    groups: dict[str, list[str]] = {}
    for fill, shape in shapes:
        groups.setdefault(fill, []).append(shape)
    for fill, members in groups.items():
        yield f'<g fill="{fill}" {attributes}>'
        yield from members
        yield "</g>"


def _rect(
    left: float, top: float, right: float, height: float, fill: str = "", more: str = ""
) -> str:
    """A rectangle; without a `fill` it has that of its group."""
    size = f'width="{number(right - left)}" height="{number(height)}"'
    colour = f' fill="{fill}"' if fill else ""
    return f'<rect x="{number(left)}" y="{number(top)}" {size}{colour}{more}/>'


def number(value: float) -> str:
    """A number, rounded to a hundredth of a pixel."""
    return f"{round(value, 2):.10g}"
