"""A plot as an SVG: a title, two axes with their units, the rows, a legend."""

from collections.abc import Callable, Iterator
from html import escape
from math import ceil, floor

from attrs import frozen

from schedlang.extras.plots.plot_rows import Chart, Form, Row
from schedlang.report.views import idle, palette
from schedlang.report.views.svg import (
    GRID,
    ROUNDING,
    fonts,
    number,
    pixels,
    round_step,
    wrapped,
)

#: The width where nobody asks for another, and the height of the axes for a width.
_WIDTH = 760
_HEIGHT = 0.5
# Sizes, in pixels. Around the axes:
_LEFT = 52
_RIGHT = 16
_TOP = 50
_BOTTOM = 40
# The letters, how wide one is, and a line of the legend.
_FONT = 11
_CHARACTER = 6.2
_LINE = 18
#: The least distance of ticks.
_TICK = 60
#: The share of its place that a bar takes.
_BAR = 0.62
#: The radius of a mark on a line, and of a point that is on the frontier, or is not.
_MARK = 3.5
_ON_FRONTIER = 4
_OFF_FRONTIER = 2.5
#: Of more points than that, only those on the frontier have their name beside them.
NAMED = 30
#: A line of more rows than that has no marks.
_MARKED = 70

#: The colours of series, also for people who lack a kind of cones (Okabe and Ito 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
#: The marks of series, for grey print: each the path of one of radius 1.
_MARKS = (
    "M-1 0a1 1 0 1 0 2 0a1 1 0 1 0 -2 0Z",
    "M-.9-.9H.9V.9H-.9Z",
    "M0-1.2L1.1.8H-1.1Z",
    "M0-1.3L1.3 0L0 1.3L-1.3 0Z",
    "M0 1.2L1.1-.8H-1.1Z",
)
#: What draws an entry of a legend, at a place.
_Swatch = Callable[[float, float], str]


def svg(
    chart: Chart,
    width: int | str | None = None,
    legend: bool = True,
    font: str | None = None,
    links: bool = False,
) -> str:
    """The document. With `links`, each mark leads to the element `row-N` of its row, on a page that
    has that.
    """
    frame = _frame(chart, pixels(width or _WIDTH))
    parts = _legend(chart, frame) if legend else []
    height = frame.bottom + _BOTTOM + _LINE * len(parts)
    lines = []
    for line, part in enumerate(parts):
        y = frame.bottom + _BOTTOM + _LINE * line + 8
        for x, swatch, name in part:
            lines.append(swatch(x, y - 4))
            lines.append(f'<text x="{number(x + 20)}" y="{number(y)}">{name}</text>')
    for note in chart.notes:
        for text in wrapped(note, frame.width - _LEFT):
            height += _LINE
            lines.append(
                f'<text x="{_LEFT}" y="{number(height - 10)}">{escape(text)}</text>'
            )
    title = [
        f'<text x="8" y="{17 + _LINE * line}" font-weight="600">{escape(text)}</text>'
        for line, text in enumerate(frame.title)
    ]
    size = f'width="{frame.width}" height="{ceil(height)}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
            f'viewBox="0 0 {frame.width} {ceil(height)}" font-family="{fonts(font)}" '
            f'font-size="{_FONT}" class="ink" fill="{palette.INK}">',
            f"<title>{escape(chart.title)}</title>",
            *idle.patterns(parts_of(chart) if chart.form is Form.BARS else ()),
            f'<rect {size} class="paper" fill="{palette.PAPER}"/>',
            *title,
            *_axes(chart, frame),
            *_limits(chart, frame),
            *_DRAWS[chart.form](chart, frame, links),
            *lines,
            "</svg>\n",
        ]
    )


def lines_of(chart: Chart) -> dict[str, list[tuple[int, Row]]]:
    """The rows of each series, each with its number among all rows. Series that are equal have one
    line, or the last one would hide the others.
    """
    rows: dict[str, list[tuple[int, Row]]] = {}
    for place, row in enumerate(chart.rows):
        rows.setdefault(str(row[chart.series]), []).append((place, row))
    names: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name, of_series in rows.items():
        points = tuple((chart.x.of(row), chart.y.of(row)) for _, row in of_series)
        names.setdefault(points, []).append(name)
    return {", ".join(equal): rows[equal[0]] for equal in names.values()}


def parts_of(chart: Chart) -> list[str]:
    """The series that bars are chart of."""
    return list(dict.fromkeys(str(row[chart.series]) for row in chart.rows))


def frontier_of(chart: Chart) -> list[tuple[float, float]]:
    """The corners of the line along the frontier: with more memory up to the next point, the time
    stays.
    """
    on = sorted(
        (chart.x.of(row), chart.y.of(row)) for row in chart.rows if row["frontier"]
    )
    corners = on[:1]
    for x, y in on[1:]:
        corners += [(x, corners[-1][1]), (x, y)]
    return corners


def bars_of(chart: Chart) -> dict[str, list[tuple[int, Row, float]]]:
    """For each bar its parts, from the lowest on: the number of the row, the row, and where it
    begins.
    """
    bars: dict[str, list[tuple[int, Row, float]]] = {}
    for place, row in enumerate(chart.rows):
        parts = bars.setdefault(row[chart.x.column], [])
        below = parts[-1][2] + chart.y.of(parts[-1][1]) if parts else 0.0
        parts.append((place, row, below))
    return bars


@frozen
class _Frame:
    """Where numbers are in the picture; the axes go from `x0` to `x1` and from `y0` to `y1`."""

    width: int
    #: The lines of the title.
    title: tuple[str, ...]
    #: The upper end of the y axis, and the lower one.
    top: float
    bottom: float
    x0: float
    x1: float
    y0: float
    y1: float

    @property
    def right(self) -> float:
        return self.width - _RIGHT

    def x(self, value: float) -> float:
        return _LEFT + (self.right - _LEFT) * (value - self.x0) / (self.x1 - self.x0)

    def y(self, value: float) -> float:
        share = (value - self.y0) / (self.y1 - self.y0)
        return self.bottom - (self.bottom - self.top) * share

    def at(self, x: float, y: float) -> str:
        """A point, as in the path of an SVG."""
        return f"{number(self.x(x))} {number(self.y(y))}"


def _frame(chart: Chart, width: int) -> _Frame:
    """The frame in which all rows are."""
    title = tuple(wrapped(chart.title, width))
    top = _TOP + _LINE * (len(title) - 1)
    bottom = top + max(width * _HEIGHT - _TOP, 140)
    if chart.form is Form.BARS:
        bars = bars_of(chart)
        tops = [parts[-1][2] + chart.y.of(parts[-1][1]) for parts in bars.values()]
        return _Frame(
            width,
            title,
            top,
            bottom,
            0,
            len(bars) or 1,
            0,
            1.06 * max(tops, default=0) or 1,
        )
    xs = [chart.x.of(row) for row in chart.rows]
    ys = [chart.y.of(row) for row in chart.rows]
    if chart.diagonal is not None:
        ys += xs
    x0 = 0.0 if chart.form is Form.POINTS else min(xs, default=0.0)
    x1 = max(
        [*xs, *([chart.limit.value * chart.x.scale] if chart.limit else [])],
        default=1.0,
    )
    # Times of points may be close to each other and far from 0.
    y0 = min([*ys, *([] if chart.form is Form.POINTS else [0.0])], default=0.0)
    y1 = max(ys, default=1.0)
    if chart.form is Form.POINTS:
        x1 *= 1.05
        y0 -= 0.08 * (y1 - y0 or y1)
    y1 += 0.06 * (y1 - y0)
    return _Frame(
        width,
        title,
        top,
        bottom,
        x0,
        x1 if x1 > x0 else x0 + 1,
        y0,
        y1 if y1 > y0 else y0 + 1,
    )


def _axes(chart: Chart, frame: _Frame) -> Iterator[str]:
    """Both axes, with round numbers at their ticks, and what they show."""
    bottom = number(frame.bottom)
    ticks = max(int((frame.bottom - frame.top) / _TICK), 2)
    for value in _ticks(frame.y0, frame.y1, ticks):
        y = number(frame.y(value))
        yield (
            f'<path d="M{_LEFT} {y}H{number(frame.right)}" class="grid" stroke="{GRID}" '
            'stroke-width="0.5"/>'
        )
        yield f'<text x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end">{value:.6g}</text>'
    if chart.form is Form.BARS:
        yield from _bar_names(chart, frame)
    else:
        ticks = max(int((frame.right - _LEFT) / _TICK), 2)
        for value in _ticks(frame.x0, frame.x1, ticks):
            x = number(frame.x(value))
            yield f'<path d="M{x} {bottom}v4" class="line" stroke="{palette.INK}"/>'
            yield (
                f'<text x="{x}" y="{number(frame.bottom + 16)}" text-anchor="middle">'
                f"{value:.6g}</text>"
            )
    yield (
        f'<path d="M{_LEFT} {number(frame.top)}V{bottom}H{number(frame.right)}" class="line" '
        f'stroke="{palette.INK}" fill="none"/>'
    )
    yield f'<text x="8" y="{number(frame.top - 12)}">{escape(chart.y.title)}</text>'
    yield (
        f'<text x="{number(frame.right)}" y="{number(frame.bottom + 31)}" '
        f'text-anchor="end">{escape(chart.x.title)}</text>'
    )


def _ticks(first: float, last: float, count: int) -> list[float]:
    """Round numbers between two, about so many."""
    step = round_step(last - first, count)
    numbers = range(ceil(first / step - ROUNDING), floor(last / step + ROUNDING) + 1)
    return [place * step for place in numbers]


def _bar_names(chart: Chart, frame: _Frame) -> Iterator[str]:
    """The names of the bars, in two rows if they have no room in one."""
    names = list(bars_of(chart))
    room = (frame.right - _LEFT) / max(len(names), 1)
    is_tight = max(map(len, names), default=0) * _CHARACTER > room
    for place, name in enumerate(names):
        y = frame.bottom + 15 + (13 if is_tight and place % 2 else 0)
        yield (
            f'<text x="{number(frame.x(place + 0.5))}" y="{number(y)}" '
            f'text-anchor="middle">{escape(name)}</text>'
        )


def _limits(chart: Chart, frame: _Frame) -> Iterator[str]:
    """The line at the limit, and the one on which y is x."""
    if chart.limit is not None:
        x = number(frame.x(chart.limit.value * chart.x.scale))
        yield (
            f'<path d="M{x} {number(frame.top)}V{number(frame.bottom)}" stroke="{COLOURS[1]}" '
            'stroke-dasharray="5 3" fill="none"/>'
        )
        yield (
            f'<text x="{x}" y="{number(frame.top - 8)}" text-anchor="middle">'
            f"{escape(chart.limit.name)}</text>"
        )
    if chart.diagonal is not None:
        low = max(frame.x0, frame.y0)
        high = min(frame.x1, frame.y1)
        yield (
            f'<path d="M{frame.at(low, low)}L{frame.at(high, high)}" class="line" '
            f'stroke="{palette.INK}" stroke-dasharray="2 3" fill="none"/>'
        )
        yield (
            f'<text x="{number(frame.x(high))}" y="{number(frame.y(high) - 7)}" '
            f'text-anchor="end">{escape(chart.diagonal)}</text>'
        )


def _lines(chart: Chart, frame: _Frame, links: bool) -> Iterator[str]:
    """A line for each series, with a mark at each row if there are not too many; as steps, if the
    plot has them.
    """
    steps = chart.form is Form.STEPS
    for place, rows in enumerate(lines_of(chart).values()):
        path = ""
        for _, row in rows:
            x = number(frame.x(chart.x.of(row)))
            y = number(frame.y(chart.y.of(row)))
            path += (f"H{x}V{y}" if steps else f"L{x} {y}") if path else f"M{x} {y}"
        yield (
            f'<path d="{path}" stroke="{_colour(place)}" stroke-width="1.8"'
            f'{_dashes(place, steps)} fill="none"/>'
        )
        if steps or len(rows) > _MARKED:
            continue
        for number_, row in rows:
            mark = _mark(place, frame.x(chart.x.of(row)), frame.y(chart.y.of(row)))
            yield _linked(chart, number_, row, mark, links)


def _points(chart: Chart, frame: _Frame, links: bool) -> Iterator[str]:
    """A mark for each row, and the frontier, which lies over the others."""
    corners = frontier_of(chart)
    if corners:
        path = "L".join(frame.at(*corner) for corner in corners)
        yield f'<path d="M{path}" stroke="{COLOURS[2]}" stroke-width="1.5" fill="none"/>'
    for place, row in sorted(
        enumerate(chart.rows), key=lambda each: each[1]["frontier"]
    ):
        radius = _ON_FRONTIER if row["frontier"] else _OFF_FRONTIER
        fill = COLOURS[2] if row["frontier"] else COLOURS[0]
        mark = (
            f'<circle cx="{number(frame.x(chart.x.of(row)))}" '
            f'cy="{number(frame.y(chart.y.of(row)))}" r="{radius}" fill="{fill}">'
        )
        yield _linked(chart, place, row, mark, links)
    yield from _point_names(chart, frame)


def _point_names(chart: Chart, frame: _Frame) -> Iterator[str]:
    """The names of points, those on the frontier first, as far as there is room."""
    taken: list[tuple[float, float, float]] = []
    for row in sorted(chart.rows, key=lambda row: not row["frontier"]):
        if not row["frontier"] and len(chart.rows) > NAMED:
            break
        name = str(row[chart.series])
        width = len(name) * _CHARACTER
        y = frame.y(chart.y.of(row)) - 7
        x = frame.x(chart.x.of(row))
        left = x if x + width < frame.right else x - width
        if any(
            left < other + room and other < left + width and abs(y - height) < _FONT
            for other, room, height in taken
        ):
            continue
        taken.append((left, width, y))
        yield f'<text x="{number(left)}" y="{number(y)}">{escape(name)}</text>'


def _bars(chart: Chart, frame: _Frame, links: bool) -> Iterator[str]:
    """Bars with their parts on top of each other."""
    for place, parts in enumerate(bars_of(chart).values()):
        left = frame.x(place + (1 - _BAR) / 2)
        width = number(frame.x(place + (1 + _BAR) / 2) - left)
        for number_, row, below in parts:
            top = frame.y(below + chart.y.of(row))
            height = frame.y(below) - top
            mark = (
                f'<rect x="{number(left)}" y="{number(top)}" width="{width}" '
                f'height="{number(height)}" fill="{idle.fill(row[chart.series])}" '
                f'stroke="{GRID}">'
            )
            if height:
                yield _linked(chart, number_, row, mark, links)
        top = parts[-1][2] + chart.y.of(parts[-1][1])
        yield (
            f'<text x="{number(frame.x(place + 0.5))}" y="{number(frame.y(top) - 4)}" '
            f'text-anchor="middle">{top:.3g}</text>'
        )


_DRAWS: dict[Form, Callable[[Chart, _Frame, bool], Iterator[str]]] = {
    Form.LINES: _lines,
    Form.STEPS: _lines,
    Form.BARS: _bars,
    Form.POINTS: _points,
}


def _colour(place: int) -> str:
    """The colour of a series."""
    return COLOURS[place % len(COLOURS)]


def _dashes(place: int, always: bool) -> str:
    """What tells lines apart that have no marks, and those of one colour."""
    turn = place if always else place // len(COLOURS)
    dashes = ("", "6 3", "2 2", "8 2 2 2")[turn % 4]
    return f' stroke-dasharray="{dashes}"' if dashes else ""


def _mark(place: int, x: float, y: float) -> str:
    """The mark of a series at a point, which is not closed: it takes a title."""
    path = _MARKS[place % len(_MARKS)]
    return (
        f'<path d="{path}" transform="translate({number(x)} {number(y)}) scale({_MARK})" '
        f'fill="{_colour(place)}">'
    )


def _linked(chart: Chart, place: int, row: Row, mark: str, links: bool) -> str:
    """A mark with what its row says, for the pointer, and the way to the row."""
    element = mark[1 : mark.index(" ")]
    said = f"<title>{escape(said_of(chart, row))}</title>"
    whole = f"{mark}{said}</{element}>"
    return f'<a href="#row-{place}">{whole}</a>' if links else whole


def said_of(chart: Chart, row: Row) -> str:
    """A row in words: its series, its numbers, its command."""
    words = [str(row[chart.series])] if chart.series else []
    if chart.form is Form.BARS:
        words.insert(0, str(row[chart.x.column]))
    else:
        words.append(f"{chart.x.title}: {chart.x.of(row):.6g}")
    words.append(f"{chart.y.title}: {chart.y.of(row):.6g}")
    return "; ".join([*words, row["command"]])


def _legend(chart: Chart, frame: _Frame) -> list[list[tuple[float, _Swatch, str]]]:
    """The lines of the legend: of each entry where it is, what draws it, and its name."""
    lines: list[list[tuple[float, _Swatch, str]]] = [[]]
    x = float(_LEFT)
    for swatch, name in _entries(chart):
        width = 20 + len(name) * _CHARACTER + 18
        if lines[-1] and x + width > frame.right:
            lines.append([])
            x = float(_LEFT)
        lines[-1].append((x, swatch, escape(name)))
        x += width
    return [line for line in lines if line]


def _entries(chart: Chart) -> Iterator[tuple[_Swatch, str]]:
    """What each series looks like, and its name; points have their names beside them."""
    if chart.form is Form.POINTS:
        return
    names = parts_of(chart) if chart.form is Form.BARS else list(lines_of(chart))
    for place, name in enumerate(names):
        yield _swatch(chart, place, name), name


def _swatch(chart: Chart, place: int, name: str) -> _Swatch:
    def draw(x: float, y: float) -> str:
        if chart.form is Form.BARS:
            return (
                f'<rect x="{number(x)}" y="{number(y - 6)}" width="14" height="12" '
                f'fill="{idle.fill(name)}" stroke="{GRID}"/>'
            )
        steps = chart.form is Form.STEPS
        line = (
            f'<path d="M{number(x)} {number(y)}h16" stroke="{_colour(place)}" '
            f'stroke-width="1.8"{_dashes(place, steps)}/>'
        )
        return line if steps else f"{line}{_mark(place, x + 8, y)}</path>"

    return draw
