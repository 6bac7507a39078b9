"""A picture as an SVG for papers.

It has a row for each rank, numbers of microbatches on the boxes, white for idle time, and a legend.
It is made of text and plain shapes only, so that all programs show it alike.
"""

from collections.abc import Iterable, Iterator
from html import escape
from math import ceil, floor, log10

from attrs import frozen

from schedlang.report.views import palette
from schedlang.report.views.picture import Box, Picture
from schedlang.schedule.actions import is_copy
from schedlang.schedule.kinds import OPS, Kind
from schedlang.schedule.naming import Names

# Sizes, in pixels. Around the rows:
_LEFT = 58
_RIGHT = 10
_TOP = 6
# A row, the gap below it, and below that the lane of copies.
_ROW = 24
_GAP = 4
_LANE = 8
# The axis of time, and a line of the legend.
_AXIS = 30
_LINE = 20
# The letters, and how wide one is.
_FONT = 11
_CHARACTER = 6.6
# The strip of a weight version, and the mark of an op that takes no time.
_STRIP = 4
_MARK = 3
# The widest picture.
_WIDEST = 4000

GRID = "#c3c9d1"
FONTS = "Helvetica, Arial, Liberation Sans, DejaVu Sans, sans-serif"


def svg(picture: Picture) -> str:
    """The document.

    It is as wide as its numbers need, up to a limit; beyond that, boxes without room for their
    number have none.
    """
    frame = _frame(picture)
    width = frame.width
    legend, height = _legend(picture, frame)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="{FONTS}" '
        f'font-size="{_FONT}" fill="{palette.INK}">',
        f"<title>{escape(picture.title)}</title>",
        *_hatches(picture),
        f'<rect width="{width}" height="{height}" fill="{palette.PAPER}"/>',
        *_rows(picture, frame),
        *_axis(frame),
        *legend,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


@frozen
class _Frame:
    """Where times and ranks are: `scale` pixels for a unit of time, from `origin` on, and `pitch`
    pixels from rank to rank.
    """

    origin: float
    end: float
    scale: float
    pitch: int
    ranks: int

    @property
    def width(self) -> int:
        return ceil(max(_LEFT + (self.end - self.origin) * self.scale + _RIGHT, 640))

    @property
    def bottom(self) -> int:
        return _TOP + self.ranks * self.pitch - _GAP

    def x(self, time: float) -> float:
        return _LEFT + (time - self.origin) * self.scale

    def y(self, rank: int) -> int:
        return _TOP + rank * self.pitch


def _frame(picture: Picture) -> _Frame:
    """The frame in which every box has room for its label, if that is not too wide."""
    bars = [box.bar for box in picture.boxes]
    origin = min((bar.start for bar in bars), default=0.0)
    end = max((bar.end for bar in bars), default=0.0)
    # The pixels for a unit of time that each label needs.
    needed = [
        (len(box.label) * _CHARACTER + 6) / (box.bar.end - box.bar.start)
        for row in picture.ops
        for box in row
        if box.bar.end > box.bar.start
    ]
    widest = _WIDEST / ((end - origin) or 1.0)
    scale = min(max(needed, default=1.0), widest)
    pitch = _ROW + _GAP
    if picture.has_copies:
        pitch += _LANE + 2
    return _Frame(origin, end, scale, pitch, len(picture.ops))


def _rows(picture: Picture, frame: _Frame) -> Iterator[str]:
    """The names of the ranks and their boxes, then what lies over the boxes."""
    for rank in range(frame.ranks):
        y = frame.y(rank)
        left = frame.x(frame.origin)
        right = frame.x(frame.end)
        yield f'<text x="{_LEFT - 8}" y="{y + _ROW / 2 + 4:g}" text-anchor="end">rank {rank}</text>'
        yield _rect(left, y, right, _ROW, "none", f' stroke="{GRID}"')
    # Boxes without a width come last, so that no neighbour covers them.
    boxes = sorted(picture.boxes, key=lambda box: box.bar.end == box.bar.start)
    shapes = [(_fill(picture, box), _shape(frame, box)) for box in boxes]
    yield from _grouped(shapes, f'stroke="{palette.PAPER}" stroke-width="0.75"')
    ops = [box for row in picture.ops for box in row]
    if picture.has_versions:
        strips = []
        for box in ops:
            # An optimizer step makes a version and reads none.
            if box.bar.kind != Kind.U:
                strips.append((palette.version(box.version), _strip(frame, box)))
        yield from _grouped(strips, f'stroke="{GRID}" stroke-width="0.5"')
    yield from _overlaps(picture, frame)
    labels = [label for box in ops for label in _label(picture, frame, box)]
    yield from _grouped(labels, 'text-anchor="middle"')


def _shape(frame: _Frame, box: Box) -> str:
    """The rectangle of a box."""
    left, right = _sides(frame, box)
    y = frame.y(box.rank)
    if is_copy(box.bar.kind):
        return _rect(left, y + _ROW + 2, right, _LANE)
    return _rect(left, y, right, _ROW)


def _strip(frame: _Frame, box: Box) -> str:
    """The strip along the lower side of an op."""
    left, right = _sides(frame, box)
    return _rect(left, frame.y(box.rank) + _ROW - _STRIP, right, _STRIP)


def _sides(frame: _Frame, box: Box) -> tuple[float, float]:
    """Where a box begins and ends."""
    left = frame.x(box.bar.start)
    right = frame.x(box.bar.end)
    if left == right:
        # An op that takes no time, such as an optimizer step without a cost, is a mark.
        return left - _MARK / 2, right + _MARK / 2
    return left, right


def _fill(picture: Picture, box: Box) -> str:
    """The colour of a box, or the pattern that hatches it."""
    if box.bar.kind in palette.HATCHED:
        return f"url(#hatch{box.chunk})"
    return palette.fill(box.bar.kind, box.chunk, picture.chunks)


def _label(picture: Picture, frame: _Frame, box: Box) -> Iterator[tuple[str, str]]:
    """The colour and the text on a box, if the text has room."""
    width = (box.bar.end - box.bar.start) * frame.scale
    if len(box.label) * _CHARACTER <= width:
        x = frame.x(box.bar.start) + width / 2
        y = frame.y(box.rank) + _ROW / 2 + 4
        fill = palette.fill(box.bar.kind, box.chunk, picture.chunks)
        yield palette.ink(fill), f'<text x="{number(x)}" y="{number(y)}">{box.label}</text>'


def _overlaps(picture: Picture, frame: _Frame) -> Iterator[str]:
    """A line around ops that run as one."""
    stroke = f' stroke="{palette.INK}" stroke-width="1.5"'
    for row in picture.ops:
        groups: dict[int, list[Box]] = {}
        for box in row:
            if box.overlap:
                groups.setdefault(box.overlap, []).append(box)
        for boxes in groups.values():
            left = frame.x(boxes[0].bar.start)
            right = frame.x(boxes[-1].bar.end)
            top = frame.y(boxes[0].rank)
            # Half of the line's width further in, so that it stays within the boxes.
            yield _rect(left + 0.75, top + 0.75, right - 0.75, _ROW - 1.5, "none", stroke)


def _axis(frame: _Frame) -> Iterator[str]:
    """The axis of time, which counts from the first start, with round numbers at its ticks."""
    y = frame.bottom + 6
    span = frame.end - frame.origin
    yield f'<path d="M{_LEFT} {y}H{number(frame.x(frame.end))}" stroke="{palette.INK}"/>'
    step = round_step(span, max(int(span * frame.scale / 60), 2))
    for tick in range(int(span / step) + 1) if span else [0]:
        x = frame.x(frame.origin + tick * step)
        yield f'<path d="M{number(x)} {y}v4" stroke="{palette.INK}"/>'
        time = number(tick * step)
        yield f'<text x="{number(x)}" y="{y + 15}" text-anchor="middle">{time}</text>'
    yield f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">time</text>'


def round_step(span: float, ticks: int) -> float:
    """The distance of ticks, so that there are about so many: 1, 2 or 5 times a power of ten."""
    least = (span or 1.0) / ticks
    power = 10.0 ** floor(log10(least))
    for factor in (1, 2, 5):
        if factor * power >= least:
            return factor * power
    return 10 * power


def _legend(picture: Picture, frame: _Frame) -> tuple[list[str], int]:
    """The legend, in lines as wide as the picture; and the height of the whole document."""
    x = float(_LEFT)
    y = frame.bottom + _AXIS + 6
    lines = []
    for swatches, name in _entries(picture):
        width = 16 * len(swatches) + 6 + len(name) * 6 + 18
        if x > _LEFT and x + width > frame.width:
            x = float(_LEFT)
            y = y + _LINE
        for swatch in swatches:
            lines.append(swatch.format(x=number(x), y=y))
            x += 16
        lines.append(f'<text x="{number(x + 4)}" y="{y + 10}">{escape(name)}</text>')
        x += width - 16 * len(swatches)
    return lines, y + _LINE


def _entries(picture: Picture) -> Iterator[tuple[list[str], str]]:
    """The entries of the legend: squares, to be put at some `x` and `y`, and what they mean."""
    square = '<rect x="{{x}}" y="{{y}}" width="14" height="12" fill="{}"{}/>'
    for kind in picture.kinds:
        fills = []
        for chunk in range(picture.chunks):
            if kind in palette.HATCHED:
                fills.append(f"url(#hatch{chunk})")
            else:
                fills.append(palette.fill(kind, chunk, picture.chunks))
        # Some kinds have one colour for all chunks.
        squares = [square.format(fill, "") for fill in dict.fromkeys(fills)]
        yield squares, OPS[kind].name
    if picture.chunks > 1:
        yield [], f"(light to dark: chunk 0 to {picture.chunks - 1})"
    note = Names(picture.layout).label_note
    if note:
        yield [], f"({note})"
    if any(box.overlap for row in picture.ops for box in row):
        yield [square.format("none", f' stroke="{palette.INK}" stroke-width="1.5"')], "run as one"
    if picture.has_versions:
        shades = [square.format(shade, f' stroke="{GRID}"') for shade in palette.VERSIONS]
        # A strip shows the remainder, since the colours begin again.
        yield shades, f"strip: version of the weights, modulo {len(shades)}"
    yield [square.format(palette.PAPER, f' stroke="{GRID}"')], "idle"


def _hatches(picture: Picture) -> Iterator[str]:
    """The patterns of kinds that are hatched, one for each chunk."""
    for kind in set(picture.kinds) & set(palette.HATCHED):
        for chunk in range(picture.chunks):
            fill = palette.fill(kind, chunk, picture.chunks)
            yield (
                f'<pattern id="hatch{chunk}" width="5" height="5" patternUnits="userSpaceOnUse" '
                f'patternTransform="rotate(45)"><rect width="5" height="5" fill="{fill}"/>'
                f'<rect width="1.5" height="5" fill="{palette.PAPER}"/></pattern>'
            )


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
