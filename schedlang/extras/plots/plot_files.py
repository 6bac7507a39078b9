"""Plots in files: for papers, and as a page on which each point leads to its command."""

from collections.abc import Callable
from html import escape
from pathlib import Path

from schedlang.extras.plots.plot_rows import Chart
from schedlang.extras.plots.plot_svg import svg
from schedlang.files.writing import write_bytes
from schedlang.report.views.pdf import pdf_of
from schedlang.report.views.png import of_image, png_of

#: How wide a plot is, whether it has a legend, and in which font.
_Look = tuple[int | str | None, bool, str | None]

_FORMATS: dict[str, Callable[[Chart, _Look], bytes]] = {
    ".svg": lambda chart, look: svg(chart, *look).encode(),
    ".pdf": lambda chart, look: pdf_of(svg(chart, *look)),
    ".png": lambda chart, look: png_of(svg(chart, of_image(look[0]), *look[1:])),
    ".html": lambda chart, look: page(chart, *look).encode(),
}


def check_plot_path(path: str | Path) -> None:
    """ValueError for an ending that is not that of a plot."""
    *endings, last = _FORMATS
    if Path(path).suffix not in _FORMATS:
        raise ValueError(f"`{path}` must end in {', '.join(endings)} or {last}")


def write_plot(
    chart: Chart,
    path: str | Path,
    width: int | str | None = None,
    legend: bool = True,
    font: str | None = None,
) -> None:
    """Write a plot, as `Plot.write` says."""
    check_plot_path(path)
    write_bytes(_FORMATS[Path(path).suffix](chart, (width, legend, font)), path)


def page(chart: Chart, width: int | str | None, legend: bool, font: str | None) -> str:
    """A page with the plot and its rows; light or dark, as the reader has it."""
    columns = (
        [name for name in chart.rows[0] if name != "command"] if chart.rows else []
    )
    head = "".join(f"<th>{escape(name)}</th>" for name in [*columns, "command"])
    body = []
    for place, row in enumerate(chart.rows):
        cells = "".join(f"<td>{escape(cell_text(row[name]))}</td>" for name in columns)
        command = f"<td><code>{escape(row['command'])}</code></td>"
        body.append(f'<tr id="row-{place}">{cells}{command}</tr>')
    return _PAGE.format(
        title=escape(chart.title),
        picture=svg(chart, width, legend, font, links=True),
        head=head,
        body="\n".join(body),
    )


def cell_text(value: object) -> str:
    """A value of a row as text."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ margin: 1rem auto; max-width: 60rem; padding: 0 1rem }}
body {{ font: 14px/1.5 system-ui, sans-serif }}
svg {{ max-width: 100%; height: auto }}
.rows {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .15rem .6rem; text-align: right; white-space: nowrap }}
th, td {{ border-bottom: 1px solid #8885 }}
th:first-child, td:first-child, th:last-child, td:last-child {{ text-align: left }}
tr:target {{ background: #e69f0044 }}
code {{ user-select: all }}
@media (prefers-color-scheme: dark) {{
  body {{ background: #15191f; color: #e4e8ee }}
  .paper {{ fill: #15191f }}
  .ink {{ fill: #e4e8ee }}
  .line {{ stroke: #e4e8ee }}
  .grid {{ stroke: #4a5462 }}
}}
</style>
<main>
{picture}
<div class="rows" tabindex="0" role="region" aria-label="the numbers"><table>
<thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody>
</table></div>
</main>
</html>
"""
