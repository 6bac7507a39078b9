"""Pictures of an execution: for the terminal, for papers, for a browser, and for trace viewers.

`lay_out` (schedlang/report/views/picture.py) says what there is to draw; each view draws it in its
own way.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import evolve

from schedlang.diagnostics.wrong_arguments import check_type
from schedlang.files.reading import check_is_path
from schedlang.files.writing import write_bytes
from schedlang.plan.plan import Plan
from schedlang.proof.execution import Execution
from schedlang.report.views.html import page
from schedlang.report.views.pdf import pdf_of
from schedlang.report.views.picture import WHOLE, Part, Picture, lay_out
from schedlang.report.views.png import of_image, png_of
from schedlang.report.views.svg import pixels, svg
from schedlang.report.views.trace import trace

__all__ = [
    "WHOLE",
    "Part",
    "Picture",
    "check_path",
    "lay_out",
    "write_pictures",
    "write_view",
]

#: The endings of files, and what is then in the file.
_FORMATS: dict[str, Callable[[Sequence[Picture], Part], bytes]] = {
    ".svg": lambda pictures, part: svg(*pictures, part=part).encode(),
    ".pdf": lambda pictures, part: pdf_of(svg(*pictures, part=part)),
    ".png": lambda pictures, part: png_of(svg(*pictures, part=_of_image(part))),
    ".html": lambda pictures, _: page(pictures).encode(),
    ".json": lambda pictures, _: trace(pictures[0]).encode(),
}
#: Those in which a part of a picture may be drawn, and those with one picture.
_STILL = (".svg", ".pdf", ".png")
_SINGLE = (".json",)


def write_view(plan: Plan, execution: Execution, path: str | Path) -> None:
    """Write a picture of a plan's execution, in the format of the path's ending.

    `.svg`, `.pdf` and `.png` are for papers, `.html` is a page to zoom and hover, `.json` a trace
    for Perfetto and Chrome. ValueError for another ending; ImportError for a PDF or a PNG if the
    package that draws it is missing; CompileError when the file cannot be written.
    """
    check_type("plan", plan, Plan, "a Plan, of `compile` or `read_plan`")
    check_type("execution", execution, Execution, "an Execution, of `simulate`")
    check_path(path, 1)
    write_pictures([lay_out(plan, execution)], path)


def check_path(path: str | Path, pictures: int, part: Part = WHOLE) -> None:
    """ValueError if so many pictures, or such a part of one, cannot be written to such a file,
    TypeError for no path.
    """
    check_is_path(path)
    *endings, last = _FORMATS
    if Path(path).suffix not in _FORMATS:
        raise ValueError(f"`{path}` must end in {', '.join(endings)} or {last}")
    if pictures > 1 and Path(path).suffix in _SINGLE:
        raise ValueError(
            f"a trace has one schedule, not {pictures}: a picture has several, NAME.svg or .html"
        )
    if isinstance(part.width, str):
        pixels(part.width)
    if part != WHOLE and Path(path).suffix not in _STILL:
        raise ValueError(
            f"a part is drawn in {', '.join(_STILL[:-1])} and {_STILL[-1]}, `{path}` has all of "
            "it"
        )


def _of_image(part: Part) -> Part:
    """A part whose width in pixels is that of an image."""
    return evolve(part, width=of_image(part.width))


def write_pictures(
    pictures: Sequence[Picture], path: str | Path, part: Part = WHOLE
) -> None:
    """Write pictures, or a part of each, as `write_view` does: several stand below each other, or
    side by side on a page.

    ValueError for a part that there is not.
    """
    check_path(path, len(pictures), part)
    write_bytes(_FORMATS[Path(path).suffix](pictures, part), path)
