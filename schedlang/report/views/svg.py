"""A picture as an SVG for papers: one row per rank, microbatch numbers on the boxes, idle time
white, and a legend.

Text and plain shapes only, so that every program that reads SVG shows it alike.
"""

from collections.abc import Iterable, Iterator
from html import escape
from math import ceil, floor, log10

from attrs import frozen

from schedlang.report.views import palette
from schedlang.report.views.picture import Box, Picture
from schedlang.schedule.actions import is_copy
from schedlang.schedule.kinds import Kind

#: All in pixels.
_LEFT = 58
_RIGHT = 10
_TOP = 6
_ROW = 24
_GAP = 4
_LANE = 8
_AXIS = 30
_LINE = 20
_FONT = 11
_CHARACTER = 6.6
_STRIP = 4
_MARK = 3
_WIDEST = 4000

_GRID = "#c3c9d1"
FONTS = "Helvetica, Arial, Liberation Sans, DejaVu Sans, sans-serif"


def svg(picture: Picture) -> str:
    """The document. It is as wide as its numbers need, up to a limit; beyond, boxes that are too
    narrow have none.
    """
    frame = _frame(picture)
    legend, height = _legend(picture, frame)
    body = [*_rows(picture, frame), *_axis(picture, frame), *legend]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{frame.width}" height="{height}" '
            f'viewBox="0 0 {frame.width} {height}" font-family="{FONTS}" '
            f'font-size="{_FONT}" fill="{palette.INK}">',
            f"<title>{escape(picture.title)}</title>",
            *_hatches(picture),
            f'<rect width="{frame.width}" height="{height}" fill="{palette.PAPER}"/>',
            *body,
            "</svg>",
            "",
        ]
    )


@frozen
class _Frame:
    """Where time and ranks stand: `scale` pixels per unit of time from `origin` on, `pitch` from
    rank to rank.
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
    bars = [box.bar for box in picture.boxes]
    origin = min((bar.start for bar in bars), default=0.0)
    end = max((bar.end for bar in bars), default=0.0)
    room = [
        (len(box.label) * _CHARACTER + 6) / (box.bar.end - box.bar.start)
        for row in picture.ops
        for box in row
        if box.bar.end > box.bar.start
    ]
    scale = min(max(room, default=1.0), _WIDEST / ((end - origin) or 1.0))
    pitch = _ROW + _GAP + (_LANE + 2 if picture.has_copies else 0)
    return _Frame(origin, end, scale, pitch, len(picture.ops))


def _rows(picture: Picture, frame: _Frame) -> Iterator[str]:
    """The ranks with their boxes, then what is written on them."""
    for rank in range(frame.ranks):
        y = frame.y(rank)
        yield f'<text x="{_LEFT - 8}" y="{y + _ROW / 2 + 4:g}" text-anchor="end">rank {rank}</text>'
        yield _rect(
            frame.x(frame.origin), y, frame.x(frame.end), _ROW, "none", f' stroke="{_GRID}"'
        )
    # Marks come last, so that no neighbour covers them.
    boxes = sorted(picture.boxes, key=lambda box: box.bar.end == box.bar.start)
    fills = ((_fill(picture, box), _shape(frame, box)) for box in boxes)
    yield from _grouped(fills, f'stroke="{palette.PAPER}" stroke-width="0.75"')
    if picture.has_versions:
        ops = (box for row in picture.ops for box in row if box.bar.kind != Kind.U)
        strips = ((palette.version(box.version), _shape(frame, box, _ROW - _STRIP)) for box in ops)
        yield from _grouped(strips, f'stroke="{_GRID}" stroke-width="0.5"')
    yield from _overlaps(picture, frame)
    labels = (text for row in picture.ops for box in row for text in _label(picture, frame, box))
    yield from _grouped(labels, 'text-anchor="middle"')


def _shape(frame: _Frame, box: Box, below: int = 0) -> str:
    """The rectangle of a box, or what is below some height of it."""
    x = frame.x(box.bar.start)
    end = frame.x(box.bar.end)
    y = frame.y(box.rank)
    height = _ROW
    if is_copy(box.bar.kind):
        y = y + _ROW + 2
        height = _LANE
    if x == end:
        # An optimizer step without a cost is a mark.
        x, end = x - _MARK / 2, x + _MARK / 2
    return _rect(x, y + below, end, height - below)


def _fill(picture: Picture, box: Box) -> str:
    if box.bar.kind in palette.HATCHED:
        return f"url(#hatch{box.chunk})"
    return palette.fill(box.bar.kind, box.chunk, picture.chunks)


def _label(picture: Picture, frame: _Frame, box: Box) -> Iterator[tuple[str, str]]:
    """The text on a box, if it fits, with its colour."""
    width = (box.bar.end - box.bar.start) * frame.scale
    if len(box.label) * _CHARACTER <= width:
        x = frame.x(box.bar.start) + width / 2
        y = frame.y(box.rank) + _ROW / 2 + 4
        fill = palette.fill(box.bar.kind, box.chunk, picture.chunks)
        yield palette.ink(fill), f'<text x="{_n(x)}" y="{_n(y)}">{box.label}</text>'


def _overlaps(picture: Picture, frame: _Frame) -> Iterator[str]:
    """A frame around ops that run as one."""
    for row in picture.ops:
        groups: dict[int, list[Box]] = {}
        for box in row:
            if box.overlap:
                groups.setdefault(box.overlap, []).append(box)
        for boxes in groups.values():
            yield _outline(
                frame.x(boxes[0].bar.start), frame.y(boxes[0].rank), frame.x(boxes[-1].bar.end)
            )


def _outline(x: float, y: float, end: float) -> str:
    return _rect(
        x + 0.75,
        y + 0.75,
        end - 0.75,
        _ROW - 1.5,
        "none",
        f' stroke="{palette.INK}" stroke-width="1.5"',
    )


def _axis(picture: Picture, frame: _Frame) -> Iterator[str]:
    """Time, with round numbers at its ticks, counted from the first start."""
    y = frame.bottom + 6
    span = frame.end - frame.origin
    yield f'<path d="M{_LEFT} {y}H{_n(frame.x(frame.end))}" stroke="{palette.INK}"/>'
    step = _round_step(span, max(int(span * frame.scale / 60), 2))
    for tick in range(int(span / step) + 1) if span else [0]:
        x = frame.x(frame.origin + tick * step)
        yield f'<path d="M{_n(x)} {y}v4" stroke="{palette.INK}"/>'
        yield f'<text x="{_n(x)}" y="{y + 15}" text-anchor="middle">{_n(tick * step)}</text>'
    yield f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">time</text>'


def _round_step(span: float, ticks: int) -> float:
    """1, 2 or 5 times a power of ten, so that about so many steps make the span."""
    raw = (span or 1.0) / ticks
    power = 10.0 ** floor(log10(raw))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= raw), 10 * power)


def _legend(picture: Picture, frame: _Frame) -> tuple[list[str], int]:
    """What the colours mean, in lines as wide as the picture; and the height of the document."""
    x = float(_LEFT)
    y = frame.bottom + _AXIS + 6
    lines = []
    for swatches, name in _entries(picture):
        width = 16 * len(swatches) + 6 + len(name) * 6 + 18
        if x > _LEFT and x + width > frame.width:
            x = float(_LEFT)
            y = y + _LINE
        for swatch in swatches:
            lines.append(swatch.format(x=_n(x), y=y))
            x += 16
        lines.append(f'<text x="{_n(x + 4)}" y="{y + 10}">{escape(name)}</text>')
        x += width - 16 * len(swatches)
    return lines, y + _LINE


def _entries(picture: Picture) -> Iterator[tuple[list[str], str]]:
    """Each entry of the legend: its swatches, to be placed, and what they stand for."""
    square = '<rect x="{{x}}" y="{{y}}" width="14" height="12" fill="{}"{}/>'
    for kind in picture.kinds:
        fills = dict.fromkeys(
            f"url(#hatch{chunk})"
            if kind in palette.HATCHED
            else palette.fill(kind, chunk, picture.chunks)
            for chunk in range(picture.chunks)
        )
        yield [square.format(fill, "") for fill in fills], palette.NAMES[kind]
    if picture.chunks > 1:
        yield [], f"(light to dark: chunk 0 to {picture.chunks - 1})"
    if any(box.overlap for row in picture.ops for box in row):
        yield [square.format("none", f' stroke="{palette.INK}" stroke-width="1.5"')], "run as one"
    if picture.has_versions:
        shades = [square.format(shade, f' stroke="{_GRID}"') for shade in palette.VERSIONS]
        yield shades, f"strip: version of the weights, modulo {len(shades)}"
    yield [square.format(palette.PAPER, f' stroke="{_GRID}"')], "idle"


def _hatches(picture: Picture) -> Iterator[str]:
    """The pattern of recomputations, for each chunk."""
    for kind in set(picture.kinds) & set(palette.HATCHED):
        for chunk in range(picture.chunks):
            fill = palette.fill(kind, chunk, picture.chunks)
            yield (
                f'<pattern id="hatch{chunk}" width="5" height="5" patternUnits="userSpaceOnUse" '
                f'patternTransform="rotate(45)"><rect width="5" height="5" fill="{fill}"/>'
                f'<rect width="1.5" height="5" fill="{palette.PAPER}"/></pattern>'
            )


def _grouped(shapes: Iterable[tuple[str, str]], attributes: str) -> Iterator[str]:
    """Shapes of one colour together, which keeps the document small; they must not lie on each
    other.
    """
    groups: dict[str, list[str]] = {}
    for fill, shape in shapes:
        groups.setdefault(fill, []).append(shape)
    for fill, members in groups.items():
        yield f'<g fill="{fill}" {attributes}>'
        yield from members
        yield "</g>"


def _rect(x: float, y: float, end: float, height: float, fill: str = "", more: str = "") -> str:
    colour = f' fill="{fill}"' if fill else ""
    return (
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(end - x)}" height="{_n(height)}"{colour}{more}/>'
    )


def _n(number: float) -> str:
    """A number, rounded to what can be seen."""
    return f"{round(number, 2):.10g}"
