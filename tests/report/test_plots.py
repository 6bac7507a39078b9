"""Plots of many executions: their rows, and what each format makes of them."""

import json
import re
import sys
from html import unescape
from pathlib import Path
from shlex import split
from typing import Any
from xml.etree import ElementTree

import pytest

from schedlang import Costs, compile, load, plot, simulate
from schedlang.extras.measured import compare, read_run
from schedlang.extras.plots.plot_rows import PLOTS
from schedlang.extras.plots.plot_svg import lines_of, svg
from schedlang.report.bubbles.attribution import CAUSES
from schedlang.report.views import Part, lay_out
from schedlang.report.views.svg import svg as picture_svg
from tests.support.commands import exit_code
from tests.support.paths import CASES

SVG = "{http://www.w3.org/2000/svg}"
BYTES = Costs(activation_bytes=(2e9,), weights_bytes=(1e9,))


def schedc(*words: str) -> int:
    try:
        return exit_code(*words)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.core
def test_rows_are_those_of_the_simulation() -> None:
    made = plot("bubble", ["1f1b", "zb_h1"], ranks=4, microbatches=range(4, 13, 4))
    assert [row["microbatches"] for row in made.rows] == [4, 4, 8, 8, 12, 12]
    for row in made.rows:
        plan = load(row["schedule"], ranks=4, microbatches=row["microbatches"])
        timeline = simulate(plan).timeline
        assert row["makespan"] == timeline.makespan
        assert row["bubble_over_makespan"] == timeline.bubble_over_makespan
        assert row["busy_ranks"] == pytest.approx(
            4 * (1 - timeline.bubble_over_makespan)
        )
        # What gives its numbers is Python that runs.
        execution = eval(row["command"], {"simulate": simulate})
        assert execution.timeline == timeline


def test_each_kind_has_its_values_along_the_axis() -> None:
    assert {row["microbatches"] for row in plot("bubble", "gpipe").rows} == {
        4 * each for each in (1, 2, 3, 4, 6, 8, 12, 16)
    }
    scaling = plot("scaling", "1f1b")
    assert [row["ranks"] for row in scaling.rows] == [2, 4, 8, 16]
    assert {row["microbatches"] for row in scaling.rows} == {32}
    bars = plot("bars", ["1f1b", "zb_h1"])
    for name in ("1f1b", "zb_h1"):
        idle = sum(row["idle"] for row in bars.rows if row["schedule"] == name)
        assert idle == pytest.approx(simulate(load(name)).timeline.bubble_over_makespan)
    assert {row["cause"] for row in bars.rows} <= set(CAUSES)


def test_memory_is_that_of_the_fullest_rank() -> None:
    execution = simulate(compile("1f1b"), BYTES)
    made = plot("memory", execution)
    held = [row["held"] for row in made.rows]
    assert execution.peak_bytes is not None
    assert max(held) == max(execution.peak_bytes)
    assert made.y.title == "held by the fullest rank, GB"
    assert made.rows[-1]["time"] == execution.timeline.makespan
    plain = plot("memory", "1f1b")
    assert plain.y.title == "held by the fullest rank, stage activations"


def test_the_frontier_has_no_better_schedule_beside_it() -> None:
    rows = plot("frontier", ["gpipe", "1f1b", "zb_h1", "zb_h2"]).rows
    on_frontier = [row for row in rows if row["frontier"]]
    assert on_frontier
    for row in rows:
        better = [
            other
            for other in rows
            if (other["held"], other["at_share"]) != (row["held"], row["at_share"])
            and other["held"] <= row["held"]
            and other["at_share"] <= row["at_share"]
        ]
        assert bool(better) != row["frontier"] or not better


@pytest.mark.core
def test_schedules_with_other_stages_are_compared_at_their_share_of_the_model() -> None:
    """A stage of eight takes half of one of four, and holds half as much."""
    made = plot("frontier", ["1f1b", "interleaved_1f1b"])
    rows = {row["schedule"]: row for row in made.rows}
    plain, interleaved = rows["1f1b"], rows["interleaved_1f1b"]
    assert plain["at_share"] == plain["makespan"]
    assert interleaved["at_share"] == interleaved["makespan"] / 2
    peak = max(simulate(load("interleaved_1f1b")).peak_activations)
    assert interleaved["held"] == peak / 2
    assert made.y.title == "makespan, of 1/4 model"
    alone = plot("frontier", "interleaved_1f1b")
    assert alone.rows[0]["at_share"] == alone.rows[0]["makespan"]


def test_a_size_that_is_refused_is_noted() -> None:
    made = plot("bubble", "dualpipe", ranks=4, microbatches=[4, 8, 9])
    assert [row["microbatches"] for row in made.rows] == [8]
    (note,) = made.notes
    assert note.startswith("dualpipe refuses 2 sizes: the schedule requires: ")
    assert note in svg(made)
    with pytest.raises(ValueError, match="there is nothing to plot: dualpipe refuses"):
        plot("bubble", "dualpipe", ranks=4, microbatches=[4])


def test_other_parameters_that_vary_are_named() -> None:
    made = plot("bubble", "interleaved_1f1b", microbatches=[8, 16], chunks=[2, 4])
    assert list(lines_of(made)) == [
        "interleaved_1f1b, chunks = 2",
        "interleaved_1f1b, chunks = 4",
    ]


def test_equal_lines_are_one() -> None:
    made = plot("bubble", ["1f1b", "gpipe", "zb_h1"])
    assert list(lines_of(made)) == ["1f1b, gpipe", "zb_h1"]


@pytest.mark.core
@pytest.mark.parametrize("kind", [kind for kind in PLOTS if kind != "error"])
@pytest.mark.parametrize("width", ["column", "page"])
def test_a_drawing_has_a_title_axes_and_a_legend(kind: str, width: str) -> None:
    made = plot(kind, ["1f1b", "zb_h1"])
    root = ElementTree.fromstring(svg(made, width))
    assert root.attrib["width"] == {"column": "320", "page": "672"}[width]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == made.title
    assert made.y.title in texts
    assert not made.x.title or made.x.title in texts
    numbers = [text for text in texts if text and re.fullmatch(r"[\d.]+", text)]
    assert len(numbers) >= 4
    height = float(root.attrib["height"])
    for each in root.iter(f"{SVG}text"):
        assert 0 <= float(each.attrib["x"]) <= float(root.attrib["width"])
        assert 0 <= float(each.attrib["y"]) <= height
    named = {"1f1b", "zb_h1"} if kind != "bars" else {"fill"}
    without = [
        text.text
        for text in ElementTree.fromstring(svg(made, width, legend=False)).iter(
            f"{SVG}text"
        )
    ]
    assert all(any(name in str(text) for text in texts) for name in named)
    if kind in ("bubble", "scaling", "memory"):
        assert not any("1f1b" in str(text) for text in without)


def test_long_titles_and_notes_have_several_lines(tmp_path: Path) -> None:
    """Nothing is cut at the edge of a column."""
    made = plot("bubble", "dualpipe", ranks=4, microbatches=[4, 8])
    root = ElementTree.fromstring(svg(made, "column", font="Times"))
    assert root.attrib["font-family"].startswith("Times, ")
    texts = [each for each in root.iter(f"{SVG}text") if not each.get("text-anchor")]
    for each in texts:
        assert float(each.attrib["x"]) + 5 * len(str(each.text)) <= 320
    words = " ".join(str(each.text) for each in texts)
    assert made.notes[0] in words
    made.write(tmp_path / "plot.png", width=640)
    assert int.from_bytes((tmp_path / "plot.png").read_bytes()[16:20]) == 640


def test_series_are_told_apart_without_colour() -> None:
    """By their marks, or by their dashes where a line has no marks."""
    lines = ["1f1b", "zb_h1", "zb_h2", "1f1b_v"]
    root = ElementTree.fromstring(svg(plot("bubble", lines)))
    marks = {
        each.attrib["d"]
        for each in root.iter(f"{SVG}path")
        if "transform" in each.attrib
    }
    assert len(marks) == len(lines)
    root = ElementTree.fromstring(svg(plot("memory", lines)))
    strokes = [
        each for each in root.iter(f"{SVG}path") if each.get("stroke-width") == "1.8"
    ]
    assert len({each.get("stroke-dasharray") for each in strokes}) == len(lines)


@pytest.mark.core
def test_each_point_of_a_page_leads_to_a_command_that_gives_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bubble.html"
    words = "1f1b --plot bubble --for microbatches=4..6 --p2p-time 0.5 --transport gloo"
    assert schedc("view", *words.split(), "-o", str(path)) == 0
    capsys.readouterr()
    page = path.read_text()
    links = re.findall(r'href="#(row-\d+)"', page)
    rows = dict(re.findall(r'<tr id="(row-\d+)">(.*?)</tr>', page))
    assert sorted(links) == sorted(rows)
    assert "prefers-color-scheme: dark" in page
    for row in rows.values():
        *cells, command = re.findall(r"<td>(.*?)</td>", row)
        words = split(unescape(re.sub("<.*?>", "", command)))
        assert words[:2] == ["schedc", "simulate"]
        assert schedc(*words[1:], "--json") == 0
        figures = json.loads(capsys.readouterr().out)
        assert f"{figures['makespan']:.6g}" in cells


def test_the_rows_are_printed_without_a_file(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "view 1f1b zb_h1 --plot bubble --for microbatches=8..9"
    assert schedc(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("Idle time against microbatches\n\nschedule")
    assert len(re.findall(r"^(?:1f1b|zb_h1) ", text, re.MULTILINE)) == 4
    assert schedc(words, "--json") == 0
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(json.loads(capsys.readouterr().out))
    assert table.pivot(
        index="microbatches", columns="schedule", values="bubble_over_makespan"
    ).shape == (2, 2)


@pytest.mark.parametrize("ending", ["svg", "pdf", "png", "html"])
def test_files(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"plot.{ending}"
    assert schedc("view 1f1b --plot memory -o", str(path)) == 0
    start = {"svg": b"<svg", "pdf": b"%PDF", "png": b"\x89PNG", "html": b"<!doctype"}
    assert path.read_bytes().startswith(start[ending])
    plot("bars", "1f1b").write(path)
    assert path.read_bytes().startswith(start[ending])


def box_of(pdf: bytes) -> tuple[float, ...]:
    """The size of the page of a PDF, in points."""
    found = re.search(rb"/MediaBox\s*\[\s*0\s+0\s+([\d.]+)\s+([\d.]+)", pdf)
    assert found
    return tuple(map(float, found.groups()))


@pytest.mark.core
def test_a_pdf_is_cropped_to_its_picture_and_has_its_fonts_in_it(
    tmp_path: Path,
) -> None:
    """A column is 240 points wide; the height is that of the picture."""
    path = tmp_path / "two.pdf"
    words = ["view 1f1b zb_h1 --width column -o", str(path)]
    assert schedc(*words) == 0
    pictures = [
        lay_out(plan, simulate(plan)) for plan in map(compile, ("1f1b", "zb_h1"))
    ]
    root = ElementTree.fromstring(picture_svg(*pictures, part=Part(width="column")))
    width, height = box_of(path.read_bytes())
    assert width == pytest.approx(240)
    assert height == pytest.approx(float(root.attrib["height"]) * 0.75, abs=1)
    assert b"/FontFile" in path.read_bytes() or b"/ObjStm" in path.read_bytes()


def test_a_pdf_without_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "typst", None)
    message = "error: a PDF needs typst: pip install 'schedlang[pdf]'\n"
    for more in ([], ["--plot memory"]):
        assert schedc("view 1f1b", *more, "-o", str(tmp_path / "view.pdf")) == 2
        assert capsys.readouterr().err == message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [kind for kind in PLOTS if kind != "error"])
def test_figures_of_matplotlib(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure")
    made = plot(kind, ["1f1b", "zb_h1", "dualpipe"])
    axes = figure.Figure().subplots()
    assert made.draw(axes) is axes
    assert axes.get_title(loc="left") == made.title
    assert axes.get_ylabel() == made.y.title
    points = [
        point for line in axes.lines for point in zip(*line.get_data(), strict=True)
    ]
    points += [(bar.get_x(), bar.get_y() + bar.get_height()) for bar in axes.patches]
    if kind != "bars":
        for row in made.rows:
            assert (made.x.of(row), made.y.of(row)) in points
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"schedlang\[plot\]"):
        made.draw()


def test_the_error_of_a_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    """Each op of the run, and by how much it ended later than predicted with the run's own costs."""
    run = CASES / "run.json"
    sizes = "-p ranks=2 -p microbatches=2"
    assert schedc("view 1f1b", str(run), sizes, "--plot error --json") == 0
    rows = json.loads(capsys.readouterr().out)
    recorded = read_run(run)
    bars = {str(bar): bar.end for rank in recorded.median.ranks for bar in rank}
    predicted = compare(recorded.plan, recorded).predicted
    ends = {str(bar): bar.end for rank in predicted.ranks for bar in rank}
    start = recorded.execution().timeline.start
    assert {row["op"] for row in rows} == bars.keys()
    for row in rows:
        assert row["time"] == pytest.approx(bars[row["op"]] - start)
        assert row["late"] == pytest.approx(row["time"] - ends[row["op"]])
        assert (
            row["command"] == f"schedc compare 1f1b {run} -p ranks=2 -p microbatches=2"
        )
    made = plot(
        "error", [recorded.execution(), simulate(recorded.plan, recorded.costs)]
    )
    assert [row["late"] for row in made.rows] == pytest.approx(
        [row["late"] for row in rows]
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--plot pie", "there is no `pie`, there is `bubble`"),
        (
            "--plot bubble -p microbatches=8",
            "against microbatches, of which there must be several",
        ),
        ("--plot bubble --for chunks=1..2", "no program has a parameter `chunks`"),
        (
            "--plot bubble --for microbatches=any",
            "--for microbatches=any is for proofs",
        ),
        ("--plot memory --window 0..4", "--window is for one schedule, not for a plot"),
        ("--plot memory -o x.json", "`x.json` must end in .svg, .pdf, .png or .html"),
        ("--plot error", "errors are those of one prediction for one run"),
        ("--for microbatches=1..2", "--for is for --plot"),
    ],
)
def test_wrong_usage(
    words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert schedc("view 1f1b", *words.split()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "params", "message"),
    [
        (("pie", "1f1b"), {}, "`kind` is 'pie': it must be one of 'bubble'"),
        (("bubble", "1f1b"), {"chunks": 2}, "no program has a parameter `chunks`"),
        (("bubble", "1f1b"), {"microbatches": 8}, "of which there must be several"),
    ],
)
def test_wrong_arguments(arguments: Any, params: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plot(*arguments, **params)
