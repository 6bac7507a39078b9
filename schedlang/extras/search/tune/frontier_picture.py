"""The time of a step against the memory of a rank: what was simulated, and its frontier."""

from collections.abc import Iterator
from html import escape
from math import inf
from pathlib import Path

from attrs import frozen

from schedlang.extras.search.tune.candidates import Training
from schedlang.extras.search.tune.tuning import Result, Tuning
from schedlang.extras.search.tune.tuning_text import Units, gigabytes, name_of
from schedlang.files.writing import write_text
from schedlang.report.views import palette
from schedlang.report.views.svg import FONTS, GRID, number, round_step
from schedlang.schedule.kinds import Kind

_ENDINGS = (".svg", ".html")

_WIDTH = 760
_HEIGHT = 440
_LEFT = 70
_RIGHT = 30
_TOP = 30
_BOTTOM = 50
_FONT = 11
#: The least distance of ticks, in pixels.
_TICK = 70
#: Results slower than the fastest by more than this factor are left out of the picture.
_SLOWEST = 2.5
_DOT = palette.fill(Kind.F, 0, 1)
_FRONTIER = palette.fill(Kind.B, 0, 1)
_LIMIT = palette.fill(Kind.W, 1, 2)


def check_picture(path: str, training: Training) -> None:
    """ValueError for a path whose ending is not that of such a picture, and where bytes are not
    known.
    """
    if all(layers.costs.bytes(layers.count) is None for layers in training.layers):
        raise ValueError(
            "the picture is of bytes, which the costs do not have: add `activation_bytes` and "
            "`weights_bytes`"
        )
    if Path(path).suffix not in _ENDINGS:
        raise ValueError(f"`{path}` must end in {' or '.join(_ENDINGS)}")


def write_frontier(tuning: Tuning, units: Units, path: str) -> None:
    """Write the picture: `.svg`, or `.html`, which is the same as a page."""
    picture = frontier_svg(tuning, units)
    if Path(path).suffix == ".html":
        title = escape(_title(tuning))
        picture = (
            f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
            f"{picture}</html>\n"
        )
    write_text(picture, path)


@frozen
class _Frame:
    """Where bytes and times are in the picture: from 0 to the ends of both axes."""

    bytes: float
    least: float
    most: float

    def x(self, value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self.bytes

    def y(self, time: float) -> float:
        share = (time - self.least) / (self.most - self.least)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share


def frontier_svg(tuning: Tuning, units: Units) -> str:
    """The document. A dot that the pointer rests on says which candidate it is."""
    frontier = tuning.frontier
    slowest = _SLOWEST * frontier[0].time
    shown = [result for result in tuning.results if result.time <= slowest]
    memory = tuning.training.memory
    held = [result.bytes for result in shown]
    if memory < inf:
        # What takes far more than there is would press the others together.
        held = [value for value in held if value <= 1.5 * memory] + [memory]
    most = max(held)
    shown = [result for result in shown if result.bytes <= most]
    times = [result.time for result in shown]
    frame = _Frame(1.05 * most, 0.95 * min(times), 1.02 * max(times))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="{FONTS}" font-size="{_FONT}" '
        f'fill="{palette.INK}">',
        f"<title>{escape(_title(tuning))}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="{palette.PAPER}"/>',
        *_axes(frame, units),
    ]
    if memory < inf:
        x = number(frame.x(memory))
        lines.append(
            f'<path d="M{x} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{_LIMIT}" fill="none"/>'
        )
        lines.append(
            f'<text x="{x}" y="{_TOP - 8}" text-anchor="middle">{gigabytes(memory)}</text>'
        )
    lines += _line(frame, [result for result in frontier if result in shown])
    is_frontier = {id(result) for result in frontier}
    # Those of the frontier lie over the others.
    for result in sorted(shown, key=lambda result: id(result) in is_frontier):
        lines.append(_dot(frame, result, units, id(result) in is_frontier))
    lines += _names(frame, [result for result in frontier if result in shown])
    return "\n".join([*lines, "</svg>"]) + "\n"


def _title(tuning: Tuning) -> str:
    training = tuning.training
    return (
        f"{training.ranks} ranks, a batch of {training.batch}: step time against memory"
    )


def _axes(frame: _Frame, units: Units) -> Iterator[str]:
    """Both axes, with round numbers at their ticks."""
    bottom = _HEIGHT - _BOTTOM
    right = _WIDTH - _RIGHT
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" stroke="{palette.INK}" fill="none"/>'
    step = round_step(frame.bytes, (right - _LEFT) // _TICK)
    for tick in range(int(frame.bytes / step) + 1):
        x = number(frame.x(tick * step))
        yield f'<path d="M{x} {bottom}v4" stroke="{palette.INK}"/>'
        yield f'<text x="{x}" y="{bottom + 17}" text-anchor="middle">{tick * step / 1e9:g}</text>'
    step = round_step(frame.most - frame.least, (bottom - _TOP) // _TICK)
    first = int(frame.least / step) + 1
    for tick in range(first, int(frame.most / step) + 1):
        y = number(frame.y(tick * step))
        yield f'<path d="M{_LEFT} {y}H{right}" stroke="{GRID}" stroke-width="0.5"/>'
        yield f'<text x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end">{tick * step:.4g}</text>'
    yield (
        f'<text x="{right}" y="{bottom + 35}" text-anchor="end">'
        "GB that the rank holds which holds the most</text>"
    )
    unit = "s" if units.seconds else "in the unit of the costs"
    yield f'<text x="{_LEFT}" y="{_TOP - 14}">step, {unit}</text>'


def _line(frame: _Frame, frontier: list[Result]) -> Iterator[str]:
    """The frontier as steps: with more memory up to the next point, the time stays."""
    if frontier:
        *faster, last = frontier
        path = f"M{number(frame.x(last.bytes))} {number(frame.y(last.time))}"
        for result in reversed(faster):
            path += f"H{number(frame.x(result.bytes))}V{number(frame.y(result.time))}"
        yield f'<path d="{path}" stroke="{_FRONTIER}" stroke-width="1.5" fill="none"/>'


def _dot(frame: _Frame, result: Result, units: Units, is_frontier: bool) -> str:
    """A result, with its name for the pointer."""
    size = result.candidate.size
    name = (
        f"{name_of(result.candidate)}, {size.replicas} x {size.ranks} ranks, {size.microbatches} "
        f"microbatches of {size.samples}: {units.time(result.time)}, {gigabytes(result.bytes)}"
    )
    radius, fill = (4, _FRONTIER) if is_frontier else (2.5, _DOT)
    return (
        f'<circle cx="{number(frame.x(result.bytes))}" cy="{number(frame.y(result.time))}" '
        f'r="{radius}" fill="{fill}"><title>{escape(name)}</title></circle>'
    )


def _names(frame: _Frame, frontier: list[Result]) -> Iterator[str]:
    """The names of the frontier's programs, as far as there is room for them."""
    last = inf
    for result in reversed(frontier):
        y = frame.y(result.time) - 7
        if abs(last - y) <= _FONT:
            continue
        last = y
        x = frame.x(result.bytes)
        anchor = "start" if x < _WIDTH / 2 else "end"
        word = escape(Path(result.candidate.program.word).stem)
        yield f'<text x="{number(x)}" y="{number(y)}" text-anchor="{anchor}">{word}</text>'
