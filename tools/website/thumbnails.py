"""Small pictures of schedules, without letters: of programs side by side, and for links."""

from collections import defaultdict

from schedlang.plan.plan import Plan
from schedlang.proof.prove import ideal_execution
from schedlang.report.views import palette
from schedlang.schedule.kinds import OPS

#: The size of a thumbnail, and the gap between its rows.
WIDTH = 240
HEIGHT = 96
_GAP = 1.5


def thumbnail(plan: Plan) -> str:
    """A schedule as an SVG of one size: a row for each rank, boxes in the colours of their ops."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}">\n{boxes(plan, WIDTH, HEIGHT)}\n</svg>\n'
    )


def boxes(plan: Plan, width: float, height: float) -> str:
    """The boxes of a schedule in an area of some size, as paths of an SVG."""
    execution = ideal_execution(plan)
    # A program of the gallery is proved, so it comes to its end.
    assert execution is not None
    rows = execution.timeline.ranks
    first = min(bar.start for row in rows for bar in row)
    last = max(bar.end for row in rows for bar in row)
    scale = width / (last - first)
    pitch = height / len(rows)
    held = [plan.layout.stages_of(rank) for rank in range(len(rows))]
    chunks = max(map(len, held))
    paths: dict[str, list[str]] = defaultdict(list)
    for rank, row in enumerate(rows):
        for bar in row:
            if OPS[bar.kind].is_update:
                continue
            chunk = held[rank].index(bar.stage)
            x = (bar.start - first) * scale
            w = (bar.end - bar.start) * scale
            d = f"M{x:.1f} {rank * pitch:.1f}h{w:.1f}v{pitch - _GAP:.1f}h-{w:.1f}z"
            paths[palette.fill(bar.kind, chunk, chunks)].append(d)
    return "\n".join(
        f'<path fill="{fill}" stroke="#ffffff" stroke-opacity=".5" stroke-width=".5" '
        f'd="{"".join(each)}"/>'
        for fill, each in paths.items()
    )
